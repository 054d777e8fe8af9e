#!/usr/bin/env python3
"""Loads a folder that zero wrote with transformers and prints its loss on tokens, as JSON.

Fails (exit 1) if a key is missing, unexpected or of another shape. Window i has the
tokens [i*T, i*T + T) as inputs and [i*T + 1, i*T + T] as targets; a shorter rest is left out. The
loss is the mean over all targets.
"""

import argparse
import json
import math
import pathlib
import sys
from typing import NoReturn

import numpy as np
import torch
import transformers
from safetensors import safe_open

HEADER_INTS = 256  # llm.c's token files start with 256 int32: magic, version, count, zeros
MAGIC_DTYPES = {20240520: np.uint16, 20240801: np.uint32}


def fail(message: str) -> NoReturn:
    print(f"check_hf: {message}", file=sys.stderr)
    sys.exit(1)


def read_bytes(path: pathlib.Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        fail(f"{path}: {error.strerror}")


def read_bin(path: pathlib.Path, dtype: str) -> np.ndarray:
    """Tokens of a raw file or of one with llm.c's header, which must agree with dtype."""
    raw = read_bytes(path)
    magic, _, count = np.frombuffer(raw, "<i4", 3) if len(raw) >= 4 * HEADER_INTS else (0, 0, 0)
    if magic not in MAGIC_DTYPES:
        return np.frombuffer(raw, dtype)
    if MAGIC_DTYPES[magic] != np.dtype(dtype):
        fail(f"{path}: magic {magic} says {MAGIC_DTYPES[magic].__name__}, --dtype says {dtype}")
    body = (len(raw) - 4 * HEADER_INTS) // np.dtype(dtype).itemsize
    if count > body:
        fail(f"{path}: the header says {count} tokens, the file has {body}")
    return np.frombuffer(raw, dtype, count, 4 * HEADER_INTS)


def read_tokens(args: argparse.Namespace) -> np.ndarray:
    """int64 tokens of --bin, or the bytes of --text, with --append at the end."""
    if args.bin:
        tokens = read_bin(args.bin, args.dtype)
    else:
        tokens = np.frombuffer(read_bytes(args.text), np.uint8)
    return np.concatenate([tokens.astype(np.int64), np.array(args.append, np.int64)])


def check_file(folder: pathlib.Path) -> None:
    """Compares the file's keys and shapes with those that transformers itself would write.

    from_pretrained's report is not enough: it stays silent about keys on the model's
    ignore list (GPT-2's attn.bias) and about a tied head that is stored twice.
    """
    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    tied = set(model.all_tied_weights_keys)
    want = {name: list(t.shape) for name, t in model.state_dict().items() if name not in tied}
    with safe_open(folder / "model.safetensors", "pt") as file:
        have = {name: file.get_slice(name).get_shape() for name in file.keys()}
    problems = [f"missing {n}" for n in sorted(want.keys() - have.keys())]
    problems += [f"unexpected {n}" for n in sorted(have.keys() - want.keys())]
    problems += [f"{n} has shape {have[n]}, want {want[n]}"
                 for n in sorted(have.keys() & want.keys()) if have[n] != want[n]]
    if problems:
        fail(f"{folder / 'model.safetensors'}: " + "; ".join(problems))


def load(folder: pathlib.Path) -> torch.nn.Module:
    """The model in fp32, or an error that names transformers' complaint."""
    for name in ("config.json", "model.safetensors"):
        if not (folder / name).is_file():
            fail(f"{folder} has no {name}")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    check_file(folder)
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True, output_loading_info=True)
    wrong = {kind: sorted(map(str, keys)) for kind, keys in report.items() if keys}
    if wrong:
        fail(f"{folder}: transformers reports {json.dumps(wrong)}")
    return model.eval()


@torch.no_grad()
def mean_loss(model: torch.nn.Module, tokens: np.ndarray, time: int, batch: int) -> dict:
    """Mean cross entropy (float64 sum of fp32 logits' losses) over all whole windows."""
    windows = (len(tokens) - 1) // time
    starts = torch.arange(windows) * time
    index = starts[:, None] + torch.arange(time)
    tokens, total = torch.from_numpy(tokens), 0.0
    for rows in index.split(batch):
        logits = model(input_ids=tokens[rows], use_cache=False).logits
        total += torch.nn.functional.cross_entropy(
            logits.double().flatten(0, 1), tokens[rows + 1].flatten(), reduction="sum").item()
    loss = total / (windows * time)
    return {"loss": loss, "perplexity": math.exp(min(loss, 700)), "tokens": windows * time,
            "windows": windows}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=pathlib.Path, help="config.json and model.safetensors")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--bin", type=pathlib.Path, help="token file, raw or with llm.c's header")
    source.add_argument("--text", type=pathlib.Path, help="file read as bytes, token = byte")
    parser.add_argument("--dtype", choices=["uint16", "uint32"], default="uint16",
                        help="of --bin (%(default)s)")
    parser.add_argument("--sequence-length", type=int, default=64, metavar="T",
                        help="tokens per window (%(default)s)")
    parser.add_argument("--append", type=int, action="append", default=[], metavar="ID",
                        help="token to add at the end, such as end of text; may be repeated")
    parser.add_argument("--batch", type=int, default=8, help="windows at once (%(default)s)")
    args = parser.parse_args()
    if args.sequence_length < 1 or args.batch < 1:
        parser.error("--sequence-length and --batch must be at least 1")
    return args


def main() -> None:
    args = parse()
    model = load(args.folder)
    result = {"family": model.config.model_type, "parameters": model.num_parameters()}
    if args.bin or args.text:
        tokens, time = read_tokens(args), args.sequence_length
        if len(tokens) < time + 1:
            fail(f"{args.bin or args.text}: {len(tokens)} tokens, want at least "
                 f"--sequence-length + 1 = {time + 1}")
        if tokens.max() >= model.config.vocab_size:
            fail(f"{args.bin or args.text}: token {tokens.max()} is not below "
                 f"vocab_size {model.config.vocab_size}")
        result |= mean_loss(model, tokens, time, args.batch)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
