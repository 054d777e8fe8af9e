#!/usr/bin/env python3
"""Makes the goldens: transformers' results, in float64, for four tiny models.

Writes FAMILY/config.json, FAMILY/model.safetensors (fp32 weights) and
FAMILY/golden.safetensors (everything a C++ test compares with, see README.md).
Prints how far plain fp32 transformers is from that truth: no fp32 engine can be
expected to come closer, and the tests' tolerances are set from it.
"""

import argparse
import pathlib

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch.overrides import TorchFunctionMode

import families

BATCH, TIME, STEPS = 2, 17, 3
VOCAB = {"gpt2": 97, "llama": 101, "qwen2": 97, "qwen3": 101}
# Adam divides by |g| + eps: an element with a gradient near 1e-8 turns rounding noise into
# a step of up to lr. Of seeds 1..24 these keep every gradient (GPT-2's key bias aside)
# farthest from zero: at least 2e-7 after clipping. Other seeds put fp32 PyTorch itself up
# to 4e-5 away.
SEED = {"gpt2": 15, "llama": 16, "qwen2": 8, "qwen3": 20}
IGNORED = [(0, 3), (0, 16), (1, 0), (1, 1), (1, 9)]  # (b, t) whose target is -100
ADAMW = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8}
WEIGHT_DECAY, MAX_NORM = 0.1, 1.0


class Float64(TorchFunctionMode):
    """Lets float64 stay float64: turns every request for float32 into one for float64.

    transformers upcasts to float32 where bf16 would hurt (RMSNorm, softmax, rotary
    angles, the loss). For a float64 model these lines lose digits. Under this mode
    its unmodified code computes all of it in float64.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        widen = lambda x: torch.float64 if x is torch.float32 else x
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        return func(*map(widen, args), **{k: widen(v) for k, v in (kwargs or {}).items()})


def make_batch(vocab: int, seed: int) -> dict[str, torch.Tensor]:
    """input_ids and targets [B, T]; target t is the token that follows input t."""
    tokens = np.random.default_rng(1000 + seed).integers(0, vocab, (BATCH, TIME + 1))
    targets = tokens[:, 1:].copy()
    for b, t in IGNORED:
        targets[b, t] = -100
    return {"input_ids": torch.from_numpy(tokens[:, :-1].copy()),
            "targets": torch.from_numpy(targets)}


def forward(model: torch.nn.Module, batch: dict[str, torch.Tensor]):
    """transformers' own loss (mean over valid targets); it must not shift again."""
    return model(input_ids=batch["input_ids"], labels=batch["targets"],
                 shift_labels=batch["targets"], use_cache=False)


def make_optimizer(model: torch.nn.Module) -> torch.optim.AdamW:
    """AdamW that decays matrices (embeddings included) and nothing else."""
    parameters = list(model.parameters())
    return torch.optim.AdamW(
        [{"params": [p for p in parameters if p.ndim >= 2], "weight_decay": WEIGHT_DECAY},
         {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0}], **ADAMW)


def copies(prefix: str, named) -> dict[str, torch.Tensor]:
    return {prefix + name: tensor.detach().clone() for name, tensor in named}


def train(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """STEPS steps on one batch; returns everything that the golden file holds."""
    optimizer, losses, norms, golden = make_optimizer(model), [], [], {}
    for step in range(STEPS):
        optimizer.zero_grad()
        out = forward(model, batch)
        out.loss.backward()
        if step == 0:
            golden |= {"logits": out.logits.detach(), "loss": out.loss.detach().reshape(1)}
            golden |= copies("grad.", ((n, p.grad) for n, p in model.named_parameters()))
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM))
        losses.append(out.loss.detach())
        optimizer.step()
    golden |= copies("step3.", model.named_parameters())
    return golden | {"step_losses": torch.stack(losses), "grad_norms": torch.stack(norms)}


def load(weights: dict[str, torch.Tensor], config, dtype: torch.dtype) -> torch.nn.Module:
    """The model with these (fp32) weights, in dtype."""
    model = families.build(config, dtype)
    missing, unexpected = model.load_state_dict(weights, strict=False)
    model.tie_weights()
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    return model


def prove_float64(model: torch.nn.Module, batch: dict[str, torch.Tensor],
                  golden: dict[str, torch.Tensor]) -> float:
    """Compares the gradient with a central difference along a random direction.

    float64 all through gives about 1e-9; one float32 operation left, about 1e-4.
    """
    rng, h, slope = np.random.default_rng(0), 1e-6, 0.0
    directions = [torch.from_numpy(rng.normal(size=p.shape)) for p in model.parameters()]
    with torch.no_grad():
        losses = []
        for sign in (1, -2, 1):  # to +h, to -h, back
            for p, d in zip(model.parameters(), directions):
                p += sign * h * d
            losses.append(forward(model, batch).loss.item())
        for (name, _), d in zip(model.named_parameters(), directions):
            slope += (golden["grad." + name] * d).sum().item()
    error = abs((losses[0] - losses[1]) / (2 * h) - slope) / abs(slope)
    if error > 1e-7:
        raise SystemExit(f"make_goldens: gradient and central difference differ by "
                         f"{error:.1e} (relative), want < 1e-7: some operation is not float64")
    return error


def key_bias(name: str, model: torch.nn.Module) -> slice | None:
    """GPT-2's key bias: its gradient is zero except for rounding, so Adam moves it by noise."""
    width = model.config.hidden_size
    return slice(width, 2 * width) if name.endswith("attn.c_attn.bias") else None


def noise_floor(truth: dict, plain: dict, model: torch.nn.Module) -> dict[str, float]:
    """How far fp32 transformers is from the truth, in the units of our tolerances."""
    gradients = parameters = 0.0
    for name, _ in model.named_parameters():
        grad, step = truth["grad." + name], truth["step3." + name]
        gradients = max(gradients, ((plain["grad." + name] - grad).abs().max()
                                    / grad.abs().max()).item())
        difference = (plain["step3." + name] - step).abs()
        if (skip := key_bias(name, model)) is not None:
            difference[skip] = 0.0
        parameters = max(parameters, difference.max().item())
    gap = lambda key: (plain[key] - truth[key]).abs().max().item()
    return {"logits": gap("logits"), "loss": gap("loss"), "grad": gradients,
            "step3": parameters, "losses": gap("step_losses"), "norms": gap("grad_norms")}


def rounded(golden: dict, batch: dict) -> dict[str, torch.Tensor]:
    """The stored dtypes: fp32 for float64 results, int32 for token ids."""
    stored = {name: tensor.to(torch.float32).contiguous() for name, tensor in golden.items()}
    return stored | {name: tensor.to(torch.int32) for name, tensor in batch.items()}


def make(family: str, out: pathlib.Path) -> None:
    """Makes one family's folder and prints one line about it."""
    folder, vocab, seed = out / family, VOCAB[family], SEED[family]
    config = families.FAMILIES[family](vocab, positions=32)
    model = families.build(config, torch.float32)
    families.randomize(model, seed)
    families.save(model, folder)
    batch, weights = make_batch(vocab, seed), load_file(folder / "model.safetensors")
    plain = train(load(weights, config, torch.float32), batch)
    with Float64():
        golden = train(load(weights, config, torch.float64), batch)
        wrong = [n for n, t in golden.items() if t.dtype != torch.float64]
        assert not wrong, f"not float64: {wrong}"
        proof = prove_float64(load(weights, config, torch.float64), batch, golden)
    save_file(rounded(golden, batch), folder / "golden.safetensors", {"format": "pt"})
    floor = noise_floor(golden, plain, model)
    print(f"{family:6} {model.num_parameters():6} parameters  loss {golden['loss'].item():.6f}  "
          f"norms {[round(x, 3) for x in golden['grad_norms'].tolist()]}  proof {proof:.0e}  "
          "fp32 is off by " + " ".join(f"{k} {v:.1e}" for k, v in floor.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("families", nargs="*", metavar="FAMILY", help="default: all of "
                        + ", ".join(families.FAMILIES))
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path(__file__).parent,
                        help="folder that gets one folder per family (default: this one)")
    args = parser.parse_args()
    if unknown := set(args.families) - set(families.FAMILIES):
        parser.error(f"unknown family {sorted(unknown)}, known: {list(families.FAMILIES)}")
    torch.set_num_threads(1)  # sums in one order
    for family in args.families or families.FAMILIES:
        make(family, args.out)


if __name__ == "__main__":
    main()
