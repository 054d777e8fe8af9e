#!/usr/bin/env python3
"""Trains GPT-2 with PyTorch and transformers, and prints its speed and memory as JSON.

The peer of `zero train configs/gpt2_124m.json`: the same model from random weights, the
same batch shape, AdamW and clipping; bf16 is autocast over fp32 weights. Random tokens: the work does not
depend on them. ranks.py runs the same on several processes.
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

BETAS, EPS = (0.9, 0.95), 1e-8


def make_model(args: argparse.Namespace):
    """transformers' GPT-2, without dropout and with PyTorch's own (fused) attention."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(args.seed)
    config = transformers.GPT2Config(
        vocab_size=args.vocab, n_positions=max(1024, args.sequence_length), n_layer=args.layers,
        n_head=args.heads, n_embd=args.hidden, resid_pdrop=args.dropout,
        embd_pdrop=args.dropout, attn_pdrop=args.dropout, use_cache=False,
        bos_token_id=args.vocab - 1, eos_token_id=args.vocab - 1)
    return transformers.GPT2LMHeadModel(config).train()


def make_optimizer(model, args: argparse.Namespace):
    """AdamW with weight decay on matrices; returns (optimizer, how it runs)."""
    import torch

    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": args.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0}]
    for kind in ("fused", "foreach"):
        with contextlib.suppress(RuntimeError):  # fused on the CPU came with PyTorch 2.4
            return torch.optim.AdamW(groups, lr=args.lr, betas=BETAS, eps=EPS, **{kind: True}), kind
    raise RuntimeError("AdamW is neither fused nor foreach")


def make_step(model, optimizer, args: argparse.Namespace, autocast: bool):
    """One optimizer step on a batch of tokens as a function; returns the loss, a tensor."""
    import torch

    run = torch.compile(model) if args.mode == "compile" else model

    def step(tokens):
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = run(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        return loss.detach()

    return step


def measure(step, args: argparse.Namespace, seed: int) -> dict:
    """Runs all steps; returns what is known of the measured ones, rounded.

    step_cpu_ms is the CPU time of all threads: where it is far below threads · step_ms,
    something else used the machine and the numbers are worth little.
    """
    import torch

    wall, cpu, generator = [], [], torch.Generator().manual_seed(seed)
    for _ in range(args.warmup + args.steps):
        tokens = torch.randint(args.vocab, (args.micro_batch, args.sequence_length),
                               generator=generator)
        start = time.perf_counter(), time.process_time()
        loss = step(tokens).item()  # on a CPU nothing is left to wait for
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


def benchmark(args: argparse.Namespace) -> dict:
    """Builds and runs what args say; returns the JSON object's measured part."""
    import torch
    import transformers

    torch.set_num_threads(args.threads)
    transformers.GPT2LMHeadModel  # its code is imported at first use
    libraries = peak_rss_bytes()  # some 0.4 GB more where PyTorch was built with CUDA
    model = make_model(args)
    optimizer, kind = make_optimizer(model, args)
    step = make_step(model, optimizer, args, autocast=args.dtype == "bf16")
    measured = measure(step, args, args.seed)
    return {"version": torch.__version__, "transformers": transformers.__version__,
            "cpu_capability": torch.backends.cpu.get_cpu_capability(), "adamw": kind,
            "libraries_rss_bytes": libraries, "attention": model.config._attn_implementation,
            "parameters": sum(p.numel() for p in model.parameters()), **measured}


def add_number(parser, name: str, value, kind=int, help: str = "") -> None:
    parser.add_argument(name, type=kind, default=value, help=f"{help} (%(default)s)".strip())


def add_options(parser: argparse.ArgumentParser, micro_batch: int, warmup: int) -> None:
    """Declares what every peer has: the model, the batch, the optimizer, the length."""
    number = lambda *arguments, **more: add_number(parser, *arguments, **more)
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    number("--steps", 5, help="steps measured")
    number("--warmup", warmup, help="steps before them")
    number("--micro-batch", micro_batch, help="sequences per step and process")
    number("--sequence-length", 256, help="tokens per sequence")
    number("--layers", 12)
    number("--heads", 12)
    number("--hidden", 768)
    number("--vocab", 50257)
    number("--dropout", 0.0, float)
    number("--lr", 6e-4, float)
    number("--weight-decay", 0.1, float)
    number("--clip", 1.0, float, help="global norm")
    number("--seed", 1)


def parse_options(parser: argparse.ArgumentParser, *counts: str) -> argparse.Namespace:
    """The parsed and checked options of add_options; `counts` are at least 1 as well."""
    args = parser.parse_args()
    for name in ("steps", "micro_batch", "layers", "heads", "hidden", "vocab", *counts):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')}: {getattr(args, name)} is not at least 1")
    if args.warmup < 0 or args.sequence_length < 2:
        parser.error("--warmup must be at least 0 and --sequence-length at least 2")
    return args


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=["eager", "compile"], default="eager",
                        help="compile is torch.compile of the model (%(default)s)")
    add_number(parser, "--threads", len(os.sched_getaffinity(0)),
               help="default: the cores it may use")
    add_options(parser, micro_batch=4, warmup=2)
    return parse_options(parser, "threads")


def error_text(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip() or 'no message'}"[:2000]


def main() -> int:
    args = parse()
    result = {"peer": "pytorch", "mode": args.mode, "dtype": args.dtype, "threads": args.threads,
              "micro_batch": args.micro_batch, "sequence_length": args.sequence_length}
    warnings.filterwarnings("ignore")
    try:
        result |= benchmark(args)
    except Exception as error:  # whatever goes wrong, the bench table has a row that says so
        result["error"] = error_text(error)
    result["peak_rss_bytes"] = peak_rss_bytes()
    print(json.dumps(result), flush=True)
    return 1 if "error" in result else 0


if __name__ == "__main__":
    sys.exit(main())
