#!/usr/bin/env python3
"""AdamW on the host in DeepSpeed and PyTorch; prints its speed as JSON.

  deepspeed  DeepSpeedCPUAdam, then the parameters rounded to bf16, as in its offload
  pytorch    torch.optim.AdamW(fused=True), the same

Parameters, gradients and both moments in fp32. ms is the median of --rounds; rate counts what
a fused loop moves: 7 floats for each element, and 2 bytes if parameters are rounded.
The last line of stdout is one JSON object; on a failure it has "error", exit 1.
"""

import argparse
import os
import statistics
import sys
import time

import pytorch


def benchmark(args: argparse.Namespace) -> dict:
    os.environ.update(DS_ACCELERATOR="cpu", OMP_NUM_THREADS=str(args.threads))
    import torch

    torch.set_num_threads(args.threads)
    parameter = torch.nn.Parameter(torch.randn(args.elements))
    parameter.grad = torch.randn(args.elements)
    rounded = torch.empty(args.elements, dtype=torch.bfloat16)
    if args.mode == "deepspeed":
        from deepspeed.ops.adam import DeepSpeedCPUAdam
        optimizer = DeepSpeedCPUAdam([parameter], lr=1e-3, adamw_mode=True)
    else:
        optimizer = torch.optim.AdamW([parameter], lr=1e-3, fused=True)

    def update() -> None:
        optimizer.step()
        rounded.copy_(parameter.data)

    update()  # makes the moments
    ms = []
    for _ in range(args.rounds):
        start = time.perf_counter()
        update()
        ms.append(1e3 * (time.perf_counter() - start))
    median = statistics.median(ms)
    return {"version": torch.__version__, "ms": round(median, 2),
            "rate": round(30e-6 * args.elements / median, 2)}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=["deepspeed", "pytorch"], default="deepspeed")
    parser.add_argument("--elements", type=pytorch.positive, default=100_000_000,
                        help="(%(default)s)")
    parser.add_argument("--rounds", type=pytorch.positive, default=8, help="(%(default)s)")
    parser.add_argument("--threads", type=pytorch.positive,
                        default=len(os.sched_getaffinity(0)), help="(%(default)s)")
    return pytorch.report(benchmark, parser.parse_args(), "mode", "threads", peer="adam")


if __name__ == "__main__":
    sys.exit(main())
