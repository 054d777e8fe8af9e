#!/usr/bin/env python3
"""Writes a tiny random transformers model, for `model.from_pretrained`.

Every weight, bias and norm weight is random, so no error in the reader can go unnoticed. The
default vocabulary is the 256 bytes and end of text (id 256).
"""

import argparse
import json
import pathlib

import torch

import families


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("family", choices=families.FAMILIES)
    parser.add_argument("out_dir", type=pathlib.Path, help="gets config.json and model.safetensors")
    parser.add_argument("--vocab", type=int, default=257, help="vocabulary size (%(default)s)")
    parser.add_argument("--positions", type=int, default=256, help="longest sequence (%(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    if args.vocab < 2 or args.positions < 1:
        parser.error("--vocab must be at least 2 and --positions at least 1")
    config = families.FAMILIES[args.family](args.vocab, args.positions)
    model = families.build(config, torch.float32)
    families.randomize(model, args.seed)
    families.save(model, args.out_dir)
    print(json.dumps({"family": args.family, "parameters": model.num_parameters(),
                      "vocab_size": args.vocab, "folder": str(args.out_dir)}))


if __name__ == "__main__":
    main()
