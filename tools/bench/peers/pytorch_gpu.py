#!/usr/bin/env python3
"""Trains GPT-2, Llama or Qwen2 with PyTorch on a GPU; prints speed and memory as JSON.

The peer of tools/bench/gpu.py: the same shapes from random weights, autocast to bf16 over
fp32 weights, torch.compile, scaled_dot_product_attention, fused AdamW, clipping at 1, and
random tokens: the work does not depend on them. Needs PyTorch 2.5 and pytorch.py beside it.
The last line of stdout is one JSON object; where something fails it has "error", exit 1.
"""

import argparse
import sys

import pytorch

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


def benchmark(args: argparse.Namespace) -> dict:
    import torch
    from torch.nn import functional as F

    torch.manual_seed(pytorch.SEED)
    torch.set_float32_matmul_precision("high")
    model = make_model(args.preset, args.sequence_length)

    def loss_of(tokens):
        logits = model(tokens)
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())

    run = torch.compile(loss_of) if args.mode == "compile" else loss_of
    optimizer, _ = pytorch.make_optimizer(model)
    step = pytorch.make_step(run, model, optimizer, autocast=True, device="cuda")
    measured = pytorch.measure(step, args, vocab=PRESETS[args.preset][1], device="cuda")
    return {"version": torch.__version__, "device": torch.cuda.get_device_name(0),
            "parameters": sum(p.numel() for p in model.parameters()),
            "peak_bytes": torch.cuda.max_memory_reserved(), **measured}


def main() -> int:
    parser = pytorch.make_parser(__doc__, steps=8, warmup=4, micro_batch=8,
                                 sequence_length=1024)
    parser.add_argument("--preset", choices=list(PRESETS), default="gpt2")
    parser.add_argument("--mode", choices=["eager", "compile"], default="compile")
    return pytorch.report(benchmark, parser.parse_args(), "mode", "preset", "micro_batch",
                          "sequence_length", peer="pytorch")


if __name__ == "__main__":
    sys.exit(main())
