#!/usr/bin/env python3
"""Saves GPT-2's states with PyTorch and DeepSpeed; prints how long training waits, as JSON.

The peers of bench/checkpoint_bench: a weight and Adam's two moments of each parameter in
fp32, on one rank.

  dcp        torch.distributed.checkpoint.async_save, which copies the states first
  dcp-kept   the same with host memory that is kept between saves
  deepspeed  the engine's save_checkpoint at ZeRO stage 1 in bf16 (parameters in bf16 besides)

blocked_ms is the time until training can continue, written_s until the files are complete
(not: durable), medians over --saves after a warm-up one. The last line of stdout
is one JSON object; on a failure it has "error", exit 1.
"""

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time

import pytorch


def states_of(model) -> dict:
    import torch

    optimizer, _ = pytorch.make_optimizer(model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # makes the moments
    states = {}
    for name, parameter in model.named_parameters():
        states["weight." + name] = parameter.detach()
        for key in ("exp_avg", "exp_avg_sq"):
            states[f"{key}.{name}"] = optimizer.state[parameter][key]
    return states


def make_dcp(args: argparse.Namespace, keep: bool):
    """Returns save(folder) -> wait(): it blocks as long as training would wait."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.staging import BlockingAsyncStager

    states = states_of(pytorch.make_transformers_gpt2(args.sequence_length))
    stager = BlockingAsyncStager(cache_staged_state_dict=keep) if keep else None

    def save(folder):
        more = {"async_stager": stager} if stager else {}
        done = dcp.async_save(states, checkpoint_id=folder, **more)
        return getattr(done, "upload_completion", done).result

    return save


def make_deepspeed(args: argparse.Namespace):
    import deepspeed
    import torch

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
    model = pytorch.make_transformers_gpt2(args.sequence_length)
    optimizer, _ = pytorch.make_optimizer(model)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config={
        "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1},
        "bf16": {"enabled": True}, "steps_per_print": 1 << 30})
    # Two tokens: plain PyTorch takes minutes for bf16 products on some CPUs.
    tokens = torch.zeros((1, 2), dtype=torch.long)
    engine.backward(engine(tokens))
    engine.step()  # makes the moments

    def save(folder):
        engine.save_checkpoint(folder)
        return lambda: None

    return save


def bytes_in(folder: str) -> int:
    return sum(os.path.getsize(os.path.join(where, name))
               for where, _, names in os.walk(folder) for name in names)


def benchmark(args: argparse.Namespace) -> dict:
    import torch

    torch.set_num_threads(args.threads)
    pytorch.import_transformers()
    result = {"version": torch.__version__}
    os.environ.update(DS_ACCELERATOR="cpu", RANK="0", LOCAL_RANK="0", WORLD_SIZE="1",
                      GLOO_SOCKET_IFNAME="lo")
    os.makedirs(args.dir, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=os.path.abspath(args.dir)) as folder:
        torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store",
                                             rank=0, world_size=1)
        save = (make_deepspeed(args) if args.mode == "deepspeed" else
                make_dcp(args, keep=args.mode == "dcp-kept"))
        blocked, written = [], []
        for _ in range(1 + args.saves):
            to = os.path.join(folder, "saved")
            start = time.perf_counter()
            wait = save(to)
            blocked.append(1e3 * (time.perf_counter() - start))
            wait()
            written.append(time.perf_counter() - start)
            result["bytes"] = bytes_in(to)
            shutil.rmtree(to)
    return result | {"blocked_ms": round(statistics.median(blocked[1:]), 2),
                     "written_s": round(statistics.median(written[1:]), 3)}


def main() -> int:
    parser = pytorch.make_parser(__doc__, sequence_length=256,
                                 threads=len(os.sched_getaffinity(0)))
    parser.add_argument("--mode", choices=["dcp", "dcp-kept", "deepspeed"], default="dcp")
    parser.add_argument("--saves", type=pytorch.positive, default=3, help="measured (%(default)s)")
    parser.add_argument("--dir", default="out/bench", help="where they go (%(default)s)")
    return pytorch.report(benchmark, parser.parse_args(), "mode", "threads", peer="checkpoint")


if __name__ == "__main__":
    sys.exit(main())
