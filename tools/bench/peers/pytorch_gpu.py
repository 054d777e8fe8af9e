#!/usr/bin/env python3
"""Trains GPT-2, Llama or Qwen2 with PyTorch on a GPU; prints speed and memory as JSON.

The peer of tools/bench/gpu.py: the same shapes from random weights, autocast to bf16 over
fp32 weights, torch.compile, scaled_dot_product_attention, fused AdamW, clipping at 1, and
random tokens: the work does not depend on them. Needs PyTorch 2.5 and nothing else.
The last line of stdout is one JSON object; where something fails it has "error", exit 1.
"""

import argparse
import json
import statistics
import sys
import time

# family, vocabulary, width, layers, heads, kv heads, head width, feed-forward width, tied
PRESETS = {
    "gpt2": ("gpt2", 50257, 768, 12, 12, 12, 64, 3072, True),
    "gpt2-xl": ("gpt2", 50257, 1600, 48, 25, 25, 64, 6400, True),
    "Llama-3.2-1B": ("llama", 128256, 2048, 16, 32, 8, 64, 8192, True),
    "Qwen2.5-0.5B": ("qwen2", 151936, 896, 24, 14, 2, 64, 4864, True),
    "Qwen2.5-1.5B": ("qwen2", 151936, 1536, 28, 12, 2, 128, 8960, True),
    "Qwen2.5-3B": ("qwen2", 151936, 2048, 36, 16, 2, 128, 11008, True),
    "Qwen2.5-7B": ("qwen2", 152064, 3584, 28, 28, 4, 128, 18944, False),
}
BETAS, EPS, LR, WEIGHT_DECAY, CLIP = (0.9, 0.95), 1e-8, 6e-4, 0.1, 1.0


def make_model(preset: str, length: int):
    """A decoder as a torch.nn.Module: tokens [B, T] to logits [B, T, V]."""
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
            return self.head(self.norm(x))

    with torch.device("cuda"):
        model = Decoder()
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                nn.init.normal_(parameter, std=0.02)
    return model


def make_step(model, compiled: bool):
    """A function of (tokens, targets) that runs one optimizer step and returns the loss."""
    import torch
    from torch.nn import functional as F

    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(
        [{"params": [p for p in parameters if p.ndim >= 2], "weight_decay": WEIGHT_DECAY},
         {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0}],
        lr=LR, betas=BETAS, eps=EPS, fused=True)

    def loss_of(tokens, targets):
        logits = model(tokens)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    run = torch.compile(loss_of) if compiled else loss_of

    def step(tokens, targets):
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16):
            loss = run(tokens, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        return loss.detach()

    return step


def benchmark(args: argparse.Namespace) -> dict:
    import torch

    torch.manual_seed(1)
    torch.set_float32_matmul_precision("high")
    model = make_model(args.preset, args.sequence_length)
    step = make_step(model, args.mode == "compile")
    shape = (args.micro_batch, args.sequence_length)
    tokens = torch.randint(PRESETS[args.preset][1], shape, device="cuda")
    start = time.perf_counter()
    for _ in range(args.warmup):
        loss = step(tokens, tokens)
    torch.cuda.synchronize()
    warm = time.perf_counter()
    milliseconds = []
    for _ in range(args.steps):
        before = time.perf_counter()
        loss = step(tokens, tokens)
        torch.cuda.synchronize()
        milliseconds.append(1e3 * (time.perf_counter() - before))
    count = args.micro_batch * args.sequence_length
    return {"version": torch.__version__, "device": torch.cuda.get_device_name(0),
            "tokens_per_second": round(1e3 * count / statistics.median(milliseconds), 1),
            "step_ms": [round(ms, 2) for ms in milliseconds],
            "warmup_seconds": round(warm - start, 1), "loss": loss.item(),
            "parameters": sum(p.numel() for p in model.parameters()),
            "peak_bytes": torch.cuda.max_memory_reserved()}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=list(PRESETS), default="gpt2")
    parser.add_argument("--mode", choices=["eager", "compile"], default="compile")
    for name, value, text in (("micro-batch", 8, "sequences per step"),
                              ("sequence-length", 1024, "tokens per sequence"),
                              ("warmup", 4, "steps before those measured"),
                              ("steps", 8, "steps measured")):
        parser.add_argument("--" + name, type=int, default=value, help=f"{text} (%(default)s)")
    args = parser.parse_args()
    if min(args.micro_batch, args.sequence_length, args.warmup, args.steps) < 1:
        parser.error("every number must be at least 1")
    return args


def main() -> int:
    args = parse()
    result = {"peer": "pytorch", "mode": args.mode, "preset": args.preset,
              "micro_batch": args.micro_batch, "sequence_length": args.sequence_length}
    try:
        result |= benchmark(args)
    except Exception as error:  # the bench table has a row that says so
        result["error"] = f"{type(error).__name__}: {str(error).strip()}"[:1000]
    print(json.dumps(result), flush=True)
    return 1 if "error" in result else 0


if __name__ == "__main__":
    sys.exit(main())
