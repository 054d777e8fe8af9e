#!/usr/bin/env python3
"""Trains GPT-2 124M with PyTorch and transformers; prints speed and memory as JSON.

The peer of `zero train configs/gpt2_124m.json`: the same model from random weights, the
same batch shape, AdamW and clipping; bf16 is autocast over fp32 weights. Random tokens: the
work does not depend on them. ranks.py runs the same on several processes, pytorch_gpu.py
other models on a GPU, both with what is here.
The last line of stdout is one JSON object; where something fails it has "error", exit 1.
"""

import argparse
import contextlib
import json
import os
import resource
import statistics
import sys
import time
import warnings

BETAS, EPS, LR, WEIGHT_DECAY, CLIP = (0.9, 0.95), 1e-8, 6e-4, 0.1, 1.0
SEED = 1
VOCAB = 50257


# ---- What every peer has --------------------------------------------------------------

def make_optimizer(model):
    """AdamW with weight decay on matrices; returns (optimizer, how it runs)."""
    import torch

    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0}]
    for kind in ("fused", "foreach"):
        with contextlib.suppress(RuntimeError):  # fused on the CPU came with PyTorch 2.4
            return torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS, **{kind: True}), kind
    raise RuntimeError("AdamW is neither fused nor foreach")


def make_step(loss_of, model, optimizer, autocast: bool, device: str = "cpu"):
    """One optimizer step on a batch of tokens as a function; returns the loss, a tensor."""
    import torch

    def step(tokens):
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            loss = loss_of(tokens)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        return loss.detach()

    return step


def measure(step, args: argparse.Namespace, vocab: int = VOCAB, seed: int = SEED,
            device: str = "cpu") -> dict:
    """Runs all steps; returns what is known of the measured ones, rounded.

    step_cpu_ms is the CPU time of all threads: where it is far below threads * step_ms,
    something else used the machine and the numbers are worth little.
    """
    import torch

    wall, cpu, generator = [], [], torch.Generator().manual_seed(seed)
    for _ in range(args.warmup + args.steps):
        tokens = torch.randint(vocab, (args.micro_batch, args.sequence_length),
                               generator=generator).to(device)
        start = time.perf_counter(), time.process_time()
        loss = step(tokens).item()  # waits for a GPU
        if device == "cuda":  # the optimizer comes behind the loss
            torch.cuda.synchronize()
        wall.append(1e3 * (time.perf_counter() - start[0]))
        cpu.append(1e3 * (time.process_time() - start[1]))
    measured, count = wall[args.warmup:], args.micro_batch * args.sequence_length
    return {"tokens_per_second": round(1e3 * count / statistics.median(measured), 2),
            "step_ms": [round(ms, 2) for ms in measured],
            "step_cpu_ms": [round(ms, 2) for ms in cpu[args.warmup:]],
            "warmup_seconds": round(sum(wall[:args.warmup]) / 1e3, 2), "loss": loss}


def peak_rss_bytes() -> int:
    """Most memory that this process has held so far (Linux counts it in KiB)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return int(text)


def make_parser(doc: str, **numbers: int) -> argparse.ArgumentParser:
    """Declares `numbers`, option by default value, all at least 1."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    helps = {"steps": "steps measured", "warmup": "steps before them",
             "micro_batch": "sequences per step and process",
             "sequence_length": "tokens per sequence", "threads": "of a process",
             "ranks": "processes"}
    for name, value in numbers.items():
        parser.add_argument("--" + name.replace("_", "-"), type=positive, default=value,
                            help=f"{helps[name]} (%(default)s)")
    return parser


def report(benchmark, args: argparse.Namespace, *names: str, **result) -> int:
    """Prints the options `names` and what benchmark(args) returns, or why it failed; returns
    the exit status."""
    warnings.filterwarnings("ignore")
    result |= {name: getattr(args, name) for name in names}
    try:
        result |= benchmark(args)
    except Exception as error:  # whatever goes wrong, the bench table has a row that says so
        result["error"] = f"{type(error).__name__}: {str(error).strip() or 'no message'}"[:2000]
    print(json.dumps({"peak_rss_bytes": peak_rss_bytes(), **result}), flush=True)
    return 1 if "error" in result else 0


# ---- GPT-2 on a CPU -------------------------------------------------------------------

def make_model(args: argparse.Namespace):
    """transformers' GPT-2, without dropout and with PyTorch's own (fused) attention."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(SEED)
    config = transformers.GPT2Config(
        vocab_size=VOCAB, n_positions=max(1024, args.sequence_length), resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False)
    return transformers.GPT2LMHeadModel(config).train()


def loss_by(model):
    """The loss of a batch of tokens as a function, by a model of make_model."""
    return lambda tokens: model(input_ids=tokens, labels=tokens).loss


def benchmark(args: argparse.Namespace) -> dict:
    """Builds and runs what args say; returns the JSON object's measured part."""
    import torch
    import transformers

    torch.set_num_threads(args.threads)
    transformers.GPT2LMHeadModel  # its code is imported at first use
    libraries = peak_rss_bytes()  # some 0.4 GB more where PyTorch was built with CUDA
    model = make_model(args)
    optimizer, kind = make_optimizer(model)
    run = torch.compile(model) if args.mode == "compile" else model
    measured = measure(make_step(loss_by(run), model, optimizer, args.dtype == "bf16"), args)
    return {"version": torch.__version__, "transformers": transformers.__version__,
            "cpu_capability": torch.backends.cpu.get_cpu_capability(), "adamw": kind,
            "libraries_rss_bytes": libraries, "attention": model.config._attn_implementation,
            "parameters": sum(p.numel() for p in model.parameters()), **measured}


def main() -> int:
    parser = make_parser(__doc__, steps=5, warmup=2, micro_batch=4, sequence_length=256,
                         threads=len(os.sched_getaffinity(0)))
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--mode", choices=["eager", "compile"], default="eager",
                        help="compile is torch.compile of the model (%(default)s)")
    return report(benchmark, parser.parse_args(), "mode", "dtype", "threads", "micro_batch",
                  "sequence_length", peer="pytorch")


if __name__ == "__main__":
    sys.exit(main())
