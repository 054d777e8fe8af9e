#!/usr/bin/env python3
"""Trains GPT-2, Llama or Qwen2 with PyTorch; prints speed and memory as JSON.

The peer of bench/step_bench: the same shapes from random weights, AdamW and clipping at 1;
bf16 is autocast over fp32 weights; attention is scaled_dot_product_attention. Random tokens:
the work does not depend on them. ranks.py runs the same on several processes. The preset
"transformers" is that package's GPT-2 124M, the others need only PyTorch 2.5.
The last line of stdout is one JSON object; on a failure it has "error", exit 1.
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

# family, vocabulary, width, layers, heads, kv heads, head width, feed-forward width, tied
PRESETS = {
    "transformers": ("gpt2", 50257, 768, 12, 12, 12, 64, 3072, True),
    "gpt2": ("gpt2", 50257, 768, 12, 12, 12, 64, 3072, True),
    "gpt2-xl": ("gpt2", 50257, 1600, 48, 25, 25, 64, 6400, True),
    "Llama-3.2-1B": ("llama", 128256, 2048, 16, 32, 8, 64, 8192, True),
    "Qwen2.5-0.5B": ("qwen2", 151936, 896, 24, 14, 2, 64, 4864, True),
    "Qwen2.5-1.5B": ("qwen2", 151936, 1536, 28, 12, 2, 128, 8960, True),
    "Qwen2.5-3B": ("qwen2", 151936, 2048, 36, 16, 2, 128, 11008, True),
    "Qwen2.5-7B": ("qwen2", 152064, 3584, 28, 28, 4, 128, 18944, False),
}


# ---- Models: tokens [B, T] to their mean cross-entropy --------------------------------

def import_transformers() -> str:
    """Its version; its memory counts as that of libraries."""
    import transformers

    transformers.GPT2LMHeadModel  # its code is imported at first use
    return transformers.__version__


def make_transformers_gpt2(length: int):
    """transformers' GPT-2, without dropout and with PyTorch's own (fused) attention."""
    import torch
    import transformers

    class Gpt2(transformers.GPT2LMHeadModel):
        def forward(self, tokens):
            return super().forward(input_ids=tokens, labels=tokens).loss

    transformers.logging.set_verbosity_error()
    torch.manual_seed(SEED)
    config = transformers.GPT2Config(n_positions=max(1024, length), resid_pdrop=0.0,
                                     embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False)
    return Gpt2(config).train()


def make_decoder(preset: str, length: int, device: str):
    """The same for any preset, by PyTorch only."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    family, vocab, width, layers, heads, kv_heads, dim, inner, tied = PRESETS[preset]
    gpt = family == "gpt2"

    def norm():
        return nn.LayerNorm(width) if gpt else nn.RMSNorm(width, eps=1e-6)

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(width, (heads + 2 * kv_heads) * dim, bias=family != "llama")
            self.out = nn.Linear(heads * dim, width, bias=gpt)

        def forward(self, x, rotate):
            batch, time_, _ = x.shape
            packed = self.qkv(x).view(batch, time_, heads + 2 * kv_heads, dim).transpose(1, 2)
            q, k, v = packed.split([heads, kv_heads, kv_heads], dim=1)
            if rotate is not None:
                q, k = rotate(q), rotate(k)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True,
                                               enable_gqa=heads != kv_heads)
            return self.out(y.transpose(1, 2).reshape(batch, time_, heads * dim))

    class FeedForward(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.Linear(width, inner if gpt else 2 * inner, bias=gpt)
            self.down = nn.Linear(inner, width, bias=gpt)

        def forward(self, x):
            if gpt:
                return self.down(F.gelu(self.up(x), approximate="tanh"))
            gate, up = self.up(x).chunk(2, dim=-1)
            return self.down(F.silu(gate) * up)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm1, self.attention = norm(), Attention()
            self.norm2, self.feed_forward = norm(), FeedForward()

        def forward(self, x, rotate):
            x = x + self.attention(self.norm1(x), rotate)
            return x + self.feed_forward(self.norm2(x))

    class Decoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens = nn.Embedding(vocab, width)
            self.positions = nn.Embedding(length, width) if gpt else None
            self.blocks = nn.ModuleList(Block() for _ in range(layers))
            self.norm = norm()
            self.head = nn.Linear(width, vocab, bias=False)
            if tied:
                self.head.weight = self.tokens.weight
            frequencies = 1e6 ** (-torch.arange(0, dim, 2).float() / dim)
            angles = torch.outer(torch.arange(length).float(), frequencies)
            self.register_buffer("cos", angles.cos(), persistent=False)
            self.register_buffer("sin", angles.sin(), persistent=False)

        def rotate(self, x):
            a, b = x.float().chunk(2, dim=-1)
            return torch.cat((a * self.cos - b * self.sin, b * self.cos + a * self.sin),
                             dim=-1).to(x.dtype)

        def forward(self, tokens):
            x = self.tokens(tokens)
            if gpt:
                x = x + self.positions.weight
            for block in self.blocks:
                x = block(x, None if gpt else self.rotate)
            logits = self.head(self.norm(x))
            return F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())

    torch.manual_seed(SEED)
    with torch.device(device):
        model = Decoder()
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                nn.init.normal_(parameter, std=0.02)
    return model


# ---- Training -------------------------------------------------------------------------

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


def make_step(model, optimizer, autocast: bool, device: str = "cpu"):
    """One optimizer step on a batch of tokens as a function; returns the loss, a tensor."""
    import torch

    def step(tokens):
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            loss = model(tokens)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        return loss.detach()

    return step


def measure(step, args: argparse.Namespace, preset: str = "transformers", seed: int = SEED,
            device: str = "cpu") -> dict:
    """Runs all steps; returns the measurements, rounded.

    step_cpu_ms is the CPU time of all threads: if it is far below threads * step_ms, something else
    used the machine and the numbers mean little.
    """
    import torch

    wall, cpu, generator = [], [], torch.Generator().manual_seed(seed)
    for _ in range(args.warmup + args.steps):
        tokens = torch.randint(PRESETS[preset][1], (args.micro_batch, args.sequence_length),
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
    """Peak memory of this process so far (Linux counts it in KiB)."""
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
    """Prints the options `names` and the result of benchmark(args), or why it failed; returns the
    exit status."""
    warnings.filterwarnings("ignore")
    result |= {name: getattr(args, name) for name in names}
    try:
        result |= benchmark(args)
    except Exception as error:  # any failure becomes a row of the bench table
        result["error"] = f"{type(error).__name__}: {str(error).strip() or 'no message'}"[:2000]
    print(json.dumps({"peak_rss_bytes": peak_rss_bytes(), **result}), flush=True)
    return 1 if "error" in result else 0


# ---- One process ----------------------------------------------------------------------

def benchmark(args: argparse.Namespace) -> dict:
    """Builds and runs args' model; returns the JSON object's measured part."""
    import torch

    torch.set_num_threads(args.threads)
    torch.set_float32_matmul_precision("high" if args.device == "cuda" else "highest")
    result = {"version": torch.__version__,
              "cpu_capability": torch.backends.cpu.get_cpu_capability()}
    if args.preset == "transformers":
        result["transformers"] = import_transformers()
    # About 0.4 GB more if PyTorch was built with CUDA.
    result["libraries_rss_bytes"] = peak_rss_bytes()
    model = (make_transformers_gpt2(args.sequence_length) if args.preset == "transformers" else
             make_decoder(args.preset, args.sequence_length, args.device))
    optimizer, kind = make_optimizer(model)
    run = torch.compile(model) if args.mode == "compile" else model
    step = make_step(run, optimizer, args.dtype == "bf16", args.device)
    result |= {"adamw": kind, "parameters": sum(p.numel() for p in model.parameters()),
               **measure(step, args, args.preset, device=args.device)}
    if args.device == "cuda":
        result["peak_bytes"] = torch.cuda.max_memory_reserved()
    return result


def main() -> int:
    parser = make_parser(__doc__, steps=5, warmup=2, micro_batch=4, sequence_length=256,
                         threads=len(os.sched_getaffinity(0)))
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--preset", choices=list(PRESETS), default="transformers")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--mode", choices=["eager", "compile"], default="eager",
                        help="compile is torch.compile of the model (%(default)s)")
    return report(benchmark, parser.parse_args(), "mode", "device", "preset", "dtype",
                  "threads", "micro_batch", "sequence_length", peer="pytorch")


if __name__ == "__main__":
    sys.exit(main())
