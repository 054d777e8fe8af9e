"""The part of tools/bench/run about checkpoints: how long a save blocks
training, and how fast it is written and read, compared with `dd` on the same
disk, torch.distributed.checkpoint and DeepSpeed (peers/checkpoint.py).

GPT-2 124M in bf16 with Adam's moments, one rank with all cores.
"""

import os
import re
import subprocess

from common import (CONFIG, ROOT, attempt, bf16, middle, print_table, say)

# The project's promises.
BLOCKED = 1.1  # of one copy of the states in memory
DISK = 0.85  # of dd's speed
OF_PEER = 0.5  # of the time that training waits for the better of the peers
BYTES = 1.01  # of the states: headers and checksums come on top
PEER = "tools/bench/peers/checkpoint.py"
PEERS = ("dcp", "dcp-kept", "deepspeed")
ROUNDS = 3


def dd(*operands):
    """Bytes per second of `dd`, without the page cache."""
    done = subprocess.run(["dd", "bs=8M", *operands], cwd=ROOT, check=True,
                          stderr=subprocess.PIPE, text=True,
                          env={**os.environ, "LC_ALL": "C"})
    found = re.search(r"(\d+) bytes .* copied, ([0-9.e+-]+) s", done.stderr)
    return int(found[1]) / float(found[2])


def measure_peers(args, folder):
    """{peer: its output} of those that run here."""
    peers = {}
    for name in PEERS if args.peer_python else ():
        found, why = attempt([args.peer_python, PEER, "--mode", name, "--dir",
                              folder, "--threads", str(args.threads)])
        if why:
            say("  checkpoint %s failed: %s" % (name, why))
        else:
            peers[name] = found[-1]
    return peers


def measure_checkpoint(args):
    """checkpoint_bench's output in each round, with dd's speeds; [] if there is
    no such disk."""
    folder = os.path.join(args.out, "bench", "checkpoint")
    file = os.path.join(folder + ".dd")
    os.makedirs(os.path.join(ROOT, folder), exist_ok=True)
    rows = []
    for number in range(1 if args.quick else ROUNDS):
        found, why = attempt(
            [os.path.join(args.out, "bench/checkpoint_bench"), CONFIG,
             "--threads", str(args.threads), "--dir", folder, "--set",
             bf16("bf16"), "--saves", "2" if args.quick else "3"])
        if why:
            say("  checkpoint failed: %s" % why)
            return rows
        row = found[-1]
        blocks = "count=%d" % (row["bytes"] >> 23)
        try:
            row["dd_write"] = dd("if=/dev/zero", "of=" + file, blocks,
                                 "oflag=direct", "conv=fsync")
            row["dd_read"] = dd("if=" + file, "of=/dev/null", "iflag=direct")
        except subprocess.CalledProcessError as error:
            say("  no dd to compare with: %s" % error.stderr.strip())
        finally:
            if os.path.exists(os.path.join(ROOT, file)):
                os.remove(os.path.join(ROOT, file))
        row["peers"] = measure_peers(args, folder)
        row["write"] = row["bytes"] / row["written_s"]
        row["read"] = row["bytes"] / row["read_s"]
        rows.append(row)
        say("  checkpoint round %d: waited %.0f ms, %.2f s to disk, %.2f s "
            "to resume" % (number + 1, row["blocked_ms"], row["written_s"],
                           row["read_s"]))
    return rows


def print_checkpoint(rows):
    if not rows:
        return

    def line(what, key, to, unit, remark):
        ours, ceiling = [middle(row[one] / unit for row in rows)
                         for one in (key, to)]
        return (what, "%.0f" % ours, "%.0f" % ceiling,
                "%.0f%%" % (100 * ours / ceiling), remark)

    lines = [line("training waits, ms", "blocked_ms", "copy_ms", 1,
                  "one copy in memory")]
    if "dd_read" in rows[0]:
        lines += [line("to disk, MB/s", "write", "dd_write", 1e6,
                       "dd oflag=direct conv=fsync"),
                  line("resume, MB/s", "read", "dd_read", 1e6,
                       "dd iflag=direct")]
    for name in PEERS:
        if all(name in row["peers"] for row in rows):
            lines.append(("training waits, ms: " + name, "%.0f" % middle(
                row["peers"][name]["blocked_ms"] for row in rows), "", "",
                "%.2f GB" % (rows[0]["peers"][name]["bytes"] / 1e9)))
    print_table(("checkpoint, %.2f GB" % (rows[0]["bytes"] / 1e9), "zero",
                 "ceiling", "of it", ""), lines)


def checkpoint_targets(rows):
    if not rows:
        return []
    # Of adjacent rounds, so that a slow minute slows both.
    def ratio(key, to):
        return middle(row[key] / row[to] for row in rows)
    targets = [("save: training waits / one copy of the states",
                ratio("blocked_ms", "copy_ms"), BLOCKED, False)]
    targets.append(("save: bytes of the files / of the states",
                    middle(row["bytes"] / row["state_bytes"] for row in rows),
                    BYTES, False))
    if all(row["peers"] for row in rows):
        targets.append((
            "save: training waits / the better peer's time",
            middle(row["blocked_ms"] / min(
                peer["blocked_ms"] for peer in row["peers"].values())
                   for row in rows), OF_PEER, False))
    if "dd_read" in rows[0]:
        targets += [("save: written / dd", ratio("write", "dd_write"), DISK,
                     True),
                    ("resume: read / dd", ratio("read", "dd_read"), DISK,
                     True)]
    return targets
