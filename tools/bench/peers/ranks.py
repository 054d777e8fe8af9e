#!/usr/bin/env python3
"""Trains GPT-2 on several ranks with PyTorch or DeepSpeed; prints speed and memory as JSON.

The peers of `zero train configs/gpt2_124m.json --ranks N`: pytorch.py's model, batch and
optimizer, one process per rank, each with one core and one thread, gloo between them.

  ddp        DistributedDataParallel, gradients as views of its buckets; bf16 is autocast
  fsdp2      fully_shard of every block and of the root, resharding after forward; bf16:
             MixedPrecisionPolicy with bf16 parameters, gradients reduced in fp32
  deepspeed  ZeRO --stage 0 to 3 with DeepSpeed's defaults on its CPU accelerator, and
             PyTorch's fused AdamW, since its own would be compiled at run time

The last line of stdout is one JSON object; on a failure it has "error", exit 1.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

import pytorch

SECONDS = 1200  # after which a run counts as hung


# ---- One rank -------------------------------------------------------------------------

def make_ddp(args: argparse.Namespace):
    """Each of these returns (step, its entry in the result)."""
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(pytorch.make_transformers_gpt2(args.sequence_length),
                                    gradient_as_bucket_view=True)
    optimizer, kind = pytorch.make_optimizer(model)
    return pytorch.make_step(model, optimizer, args.dtype == "bf16"), kind


def make_fsdp2(args: argparse.Namespace):
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = pytorch.make_transformers_gpt2(args.sequence_length)
    options = {"mesh": init_device_mesh("cpu", (args.ranks,)), "reshard_after_forward": True}
    if args.dtype == "bf16":
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for block in model.transformer.h:
        fully_shard(block, **options)
    fully_shard(model, **options)
    optimizer, kind = pytorch.make_optimizer(model)
    return pytorch.make_step(model, optimizer, autocast=False), kind


def make_deepspeed(args: argparse.Namespace):
    import deepspeed

    # It would be compiled here, but only tensor-parallel layers call it.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
    model = pytorch.make_transformers_gpt2(args.sequence_length)
    optimizer, kind = pytorch.make_optimizer(model)
    config = {
        "train_micro_batch_size_per_gpu": args.micro_batch,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": pytorch.CLIP,
        "zero_optimization": {"stage": args.stage},
        "bf16": {"enabled": args.dtype == "bf16"},
        "steps_per_print": 1 << 30}
    if args.nvme:  # it takes its own Adam alone there
        config["zero_optimization"]["offload_optimizer"] = {"device": "nvme",
                                                            "nvme_path": args.nvme}
        config["optimizer"] = {"type": "AdamW", "params": {
            "lr": pytorch.LR, "betas": pytorch.BETAS, "eps": pytorch.EPS,
            "weight_decay": pytorch.WEIGHT_DECAY}}
        optimizer, kind = None, "DeepSpeedCPUAdam"
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer,
                                      model_parameters=model.parameters(), config=config)

    def step(tokens):
        loss = engine(tokens)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step, kind


MODES = {"ddp": make_ddp, "fsdp2": make_fsdp2, "deepspeed": make_deepspeed}


def run_rank(args: argparse.Namespace) -> dict:
    """One rank from its start to its end; returns its part of the result."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[args.rank % len(cores)]})  # before libraries start threads
    import torch

    torch.set_num_threads(args.threads)
    pytorch.import_transformers()
    result = {"version": torch.__version__}
    if args.mode == "deepspeed":
        import deepspeed
        result["deepspeed"] = deepspeed.__version__
    result["libraries_rss_bytes"] = pytorch.peak_rss_bytes()
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{args.store}", rank=args.rank, world_size=args.ranks)
    step, result["adamw"] = MODES[args.mode](args)
    result |= pytorch.measure(step, args, seed=pytorch.SEED + args.rank)
    torch.distributed.barrier()
    return result


# ---- All ranks ------------------------------------------------------------------------

def start_rank(rank: int, folder: str) -> subprocess.Popen:
    """Runs this program again, as one rank."""
    environment = {
        "DS_ACCELERATOR": "cpu", "GLOO_SOCKET_IFNAME": "lo", "TOKENIZERS_PARALLELISM": "false",
        "LOCAL_RANK": str(rank), "RANK": str(rank)}
    with open(f"{folder}/{rank}", "w") as log:
        return subprocess.Popen(
            [sys.executable, *sys.argv, "--rank", str(rank), "--store", f"{folder}/store"],
            env={**os.environ, **environment}, stdout=log, stderr=log)


def wait_for_all(ranks: list) -> None:
    """Waits until all are done; if one fails or time is up, ends the others."""
    end = time.monotonic() + SECONDS
    while any(rank.poll() is None for rank in ranks):
        if any(rank.poll() for rank in ranks) or time.monotonic() > end:
            for rank in ranks:
                rank.kill()
        time.sleep(0.1)


def result_of(rank: subprocess.Popen, log: str) -> dict:
    """A rank's last output; an "error" if that is not a result."""
    with open(log, errors="replace") as file:
        text = file.read()
    for line in reversed(text.splitlines()):
        if line.startswith("{"):
            return json.loads(line)
    return {"error": f"exit {rank.returncode}: {text.strip()[-1500:]}"}


def benchmark(args: argparse.Namespace) -> dict:
    """Runs all ranks; returns the measured part of the result."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = [start_rank(rank, folder) for rank in range(args.ranks)]
        try:
            wait_for_all(ranks)
        finally:
            for rank in ranks:
                rank.kill()
        parts = [result_of(rank, f"{folder}/{i}") for i, rank in enumerate(ranks)]
    # A killed rank has no result: the first that has one says why.
    errors = [part["error"] for part in parts if "error" in part]
    if errors:
        raise RuntimeError(min(errors, key=lambda error: error.startswith("exit -9")))
    # A step ends with its last rank.
    step_ms = [max(ms) for ms in zip(*(part.pop("step_ms") for part in parts))]
    tokens = args.ranks * args.micro_batch * args.sequence_length
    return {**parts[0], "tokens_per_second": round(1e3 * tokens / statistics.median(step_ms), 2),
            "step_ms": step_ms, "loss": [part["loss"] for part in parts],
            "peak_rss_bytes": [part["peak_rss_bytes"] for part in parts]}


def main() -> int:
    parser = pytorch.make_parser(__doc__, steps=5, warmup=1, micro_batch=2,
                                 sequence_length=256, ranks=2, threads=1)
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--mode", choices=list(MODES), default="ddp")
    parser.add_argument("--stage", type=int, choices=[0, 1, 2, 3], default=0,
                        help="of deepspeed (%(default)s)")
    parser.add_argument("--nvme", metavar="DIR",
                        help="deepspeed, stage 3: the optimizer's states on the disk of DIR")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    args = parser.parse_args()
    return pytorch.report(benchmark if args.rank is None else run_rank, args, "stage", "dtype",
                          "ranks", "threads", "micro_batch", "sequence_length", peer=args.mode)


if __name__ == "__main__":
    sys.exit(main())
