#!/usr/bin/env python3
"""The collectives of comm_bench through Open MPI, with the same data and timing; a process per
rank.

    out/peers-venv/bin/mpirun -n 2 out/peers-venv/bin/python tools/bench/peers/open_mpi.py

Rank 0 prints one JSON object per line.
"""

import argparse
import json
import time

import numpy
from mpi4py import MPI


def measure(op: str, collective, nbytes: int, seconds: float) -> None:
    """As in comm_bench: a turn ends when the last rank arrives, the first does not count, and the
    best of the others does."""
    world, turns, enough = MPI.COMM_WORLD, [], False
    while not enough:
        world.Barrier()
        begin = time.perf_counter()
        collective()
        world.Barrier()
        turns.append(time.perf_counter() - begin)
        enough = world.bcast(len(turns) > 5 and sum(turns) >= seconds)
    if world.rank == 0:
        best = min(turns[1:])
        print(json.dumps({
            "op": op, "shape": f"{world.size} ranks, {nbytes // 1000} KB", "dtype": "fp32",
            "ms": 1e3 * best, "unit": "GB/s",
            "rate": 1e-9 * (nbytes - nbytes // world.size) / best,
            "rounds": len(turns) - 1}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=25, help="of the full side (%(default)s)")
    parser.add_argument("--seconds", type=float, default=1, help="per case, at least (%(default)s)")
    args = parser.parse_args()
    world = MPI.COMM_WORLD
    piece = int(args.megabytes * 1e6) // (256 * world.size) * 64  # elements of one rank
    full = numpy.random.default_rng(1).random(piece * world.size, dtype=numpy.float32) - 0.5
    shard = numpy.empty(piece, dtype=numpy.float32)
    measure("all_gather", lambda: world.Allgather(MPI.IN_PLACE, full), full.nbytes, args.seconds)
    measure("reduce_scatter", lambda: world.Reduce_scatter_block(full, shard), full.nbytes,
            args.seconds)


if __name__ == "__main__":
    main()
