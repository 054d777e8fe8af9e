"""The part of tools/bench/run about offload: AdamW on the host compared with a
plain loop over the same arrays, DeepSpeed's CPUAdam and PyTorch's; a step of
GPT-2 124M in fp32 with the optimizer on the host, over a host link of a given
speed, compared with the same step without offload; one with the optimizer on a
disk compared with DeepSpeed's; and the file of states on a disk compared with
fio.

A step computes with half of the cores, the host's work uses the other half;
clipping is off.
"""

import json
import os
import shutil
import subprocess

from common import (CONFIG, ROOT, attempt, bf16, both_ends, middle,
                    print_table, say, step_bench, summary, take_turns)

# The project's promises.
LOOP = 0.95  # AdamW, of a plain loop's speed
OF_PEER = 1.15  # AdamW that rounds to bf16, of DeepSpeed's CPUAdam
DELAYED = 1.05  # of a step without offload
# Of a step with the update before the norm, besides the last unit's update. By
# default updates wait for the norm, which can skip a step.
EXPOSED = 0.05
DISK = 0.85  # of fio's speed
LINK = "10GB/s,10us"
WARMUP = 2
HOST = "zero_optimization.offload_optimizer."
CASES = {
    "no offload": [],
    "offload": [HOST + "device=cpu"],
    "offload, update before norm": [HOST + "device=cpu",
                                    HOST + "update_before_norm=true"],
    "offload, delayed update": [HOST + "device=cpu",
                                HOST + "delayed_update.enabled=true",
                                HOST + "delayed_update.warmup_steps=0"],
}


def binary(args, name):
    return os.path.join(args.out, name)


def peer_command(args, *words):
    """DeepSpeed builds its ops with the tools next to its python."""
    path = os.path.dirname(args.peer_python) + ":" + os.environ["PATH"]
    return ["env", "PATH=" + path, args.peer_python, *words]


# ---- AdamW ------------------------------------------------------------------

def measure_adam(args):
    """{"loop": a row of op_bench, peer: its output} of one round."""
    row = {}
    found, why = attempt([binary(args, "bench/op_bench"), "--dtype", "bf16",
                          "--filter", "adamw", "--threads", str(args.threads),
                          "--seconds", "0.5" if args.quick else "1.5"])
    if why:
        say("  offload adamw failed: %s" % why)
        return row
    row["loop"] = found[-1]
    for peer in ("deepspeed", "pytorch") if args.peer_python else ():
        found, why = attempt(peer_command(
            args, "tools/bench/peers/adam.py", "--mode", peer, "--threads",
            str(args.threads)))
        if why:
            say("  offload adamw of %s failed: %s" % (peer, why))
        else:
            row[peer] = found[-1]
    say("  offload adamw: %.1f ms" % row["loop"]["ms"])
    return row


# ---- The step ---------------------------------------------------------------

def last_update_ms(path):
    """Of the host's updates in a trace: nothing is left to hide that one."""
    with open(path) as file:
        updates = [event for event in json.load(file)["traceEvents"]
                   if event["name"].startswith("Update(")]
    return max(updates, key=lambda event: event["ts"])["dur"] / 1e3 if (
        updates) else 0.0


def measure_step(args, name, sets):
    """[{step_ms, exposed_ms, update_ms}] of the steps after the first ones; []
    if it failed."""
    folder = os.path.join(args.out, "bench", "offload")
    shutil.rmtree(os.path.join(ROOT, folder), ignore_errors=True)
    trace = folder + ".trace.json"
    steps = WARMUP + args.steps + 1  # the last one waits for its own update
    sets = ["training.steps=%d" % steps, "training.out_dir=" + folder,
            "data.train=engine/zero/*.cc", "zero_optimization.stage=2",
            "gradient_clipping=0", "train_micro_batch_size_per_gpu=1",
            bf16("fp32"), *sets]
    done = subprocess.run(
        [binary(args, "zero"), "train", CONFIG, "--threads",
         str(max(1, args.threads // 2)), "--shape-host-link", LINK, "--trace",
         trace, *(word for one in sets for word in ("--set", one))],
        cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        say("  offload: %s failed: %s" % (name, both_ends(done.stderr.strip())))
        return []
    with open(os.path.join(ROOT, folder, "metrics.jsonl")) as file:
        rows = [json.loads(line) for line in file]
    update = last_update_ms(os.path.join(ROOT, trace))

    def exposed(row):  # on one rank only offload communicates
        return (row["communication"]["waited_ms"]["host"]
                if "communication" in row else 0.0)

    return [{"step_ms": row["step_ms"], "update_ms": update,
             "exposed_ms": exposed(row)}
            for row in rows if WARMUP < row.get("step", 0) < steps]


def measure_steps(args):
    """{case: [measure_step's results]}, alternating."""
    found = {name: [] for name in CASES}
    for number in range(args.rounds):
        for name, sets in CASES.items():
            rows = measure_step(args, name, sets)
            found[name] += rows
            if rows:
                say("  offload %-24s round %d/%d: %.0f ms" % (
                    name, number + 1, args.rounds,
                    middle(row["step_ms"] for row in rows)))
    return {name: rows for name, rows in found.items() if rows}


def measure_nvme(args):
    """{label: [result of each round]}: a step whose optimizer is on the disk,
    ours and DeepSpeed's, on one core each."""
    folder = os.path.join(ROOT, args.out, "bench", "nvme")
    cores = set(sorted(os.sched_getaffinity(0))[:1])
    ours = step_bench(args.out, [
        bf16("fp32"), "train_micro_batch_size_per_gpu=1",
        "zero_optimization.stage=3", HOST + "device=nvme",
        HOST + "nvme_path=" + folder],
        "--ranks", "1", "--threads", "1", "--steps", str(args.steps))
    turns = {"zero": (ours, cores)}
    if args.peer_python:
        turns["DeepSpeed"] = (peer_command(
            args, "tools/bench/peers/ranks.py", "--mode", "deepspeed",
            "--stage", "3", "--nvme", folder + "-deepspeed", "--ranks", "1",
            "--threads", "1", "--micro-batch", "1", "--steps",
            str(args.steps)), cores)
    found, _ = take_turns(args.rounds, "offload to the disk,", turns)
    shutil.rmtree(folder + "-deepspeed", ignore_errors=True)
    return found


# ---- The disk ---------------------------------------------------------------

def fio_seconds(folder, nbytes):
    """Seconds in which fio reads and writes this many bytes each, with the
    requests in flight of the file of states; None: there is no fio."""
    file = os.path.join(folder, "fio")
    job = ["--name=swap", "--filename=" + file, "--size=%d" % (2 * nbytes),
           "--rw=rw", "--bs=1M", "--direct=1", "--ioengine=io_uring",
           "--iodepth=16", "--output-format=json"]
    try:
        done = subprocess.run(["fio", *job], cwd=ROOT, capture_output=True,
                              check=True, text=True)
        job = json.loads(done.stdout)["jobs"][0]
        # For a size that it splits arbitrarily: the time of all its bytes.
        total = job["read"]["io_bytes"] + job["write"]["io_bytes"]
        return job["job_runtime"] / 1e3 * 2 * nbytes / total
    except (OSError, subprocess.CalledProcessError) as error:
        say("  no fio to compare with (apt-get install fio): %s" % error)
        return None
    finally:
        if os.path.exists(os.path.join(ROOT, file)):
            os.remove(os.path.join(ROOT, file))


def measure_disk(args):
    """swap_bench's output in one round, with fio's seconds; None if it
    failed."""
    folder = os.path.join(args.out, "bench", "swap")
    found, why = attempt([binary(args, "bench/swap_bench"), "--dir", folder,
                          "--rounds", "1" if args.quick else "3"])
    if why:
        say("  offload: the disk failed: %s" % why)
        return None
    row = found[-1]
    fio = fio_seconds(folder, row["bytes"])
    if fio:
        row["fio_seconds"] = fio
    say("  offload disk: %.2f s" % row["seconds"])
    return row


# ---- All of it --------------------------------------------------------------

def measure_offload(args):
    rounds = range(args.rounds)
    adam = [row for row in (measure_adam(args) for _ in rounds) if row]
    disk = [row for row in (measure_disk(args) for _ in rounds) if row]
    return {"adam": adam, "steps": measure_steps(args),
            "nvme": measure_nvme(args), "disk": disk}


def median_step(rows, key):
    return middle(row[key] for row in rows)


def offload_targets(found):
    """[(what, value, wanted, higher is better)]"""
    targets = []
    if not found:
        return targets
    adam, steps, disk = found["adam"], found["steps"], found["disk"]
    if adam:
        targets.append(("host's AdamW / plain loop over the same arrays",
                        middle(row["loop"]["ratio"] for row in adam), LOOP,
                        True))
    for peer in ("deepspeed", "pytorch"):
        if adam and all(peer in row for row in adam):
            targets.append((
                "host's AdamW with bf16 / %s's" % peer,
                middle(row[peer]["ms"] / row["loop"]["ms"] for row in adam),
                OF_PEER if peer == "deepspeed" else None, True))
    plain = steps.get("no offload")
    for case, rows in steps.items():
        if not plain or rows is plain:
            continue
        delayed = "delayed" in case
        targets.append((
            "step with %s / without" % case,
            median_step(rows, "step_ms") / median_step(plain, "step_ms"),
            DELAYED if delayed else None, False))
        if not delayed:
            targets.append((
                "%s: exposed beyond the last update / step" % case,
                max(0.0, median_step(rows, "exposed_ms") -
                    rows[0]["update_ms"]) / median_step(rows, "step_ms"),
                EXPOSED if "before" in case else None, False))
    if len(found["nvme"]) == 2:
        ours, peer = (summary(found["nvme"][name])["tokens_per_second"]
                      for name in ("zero", "DeepSpeed"))
        targets.append(("tok/s with states on the disk / DeepSpeed's",
                        ours / peer, None, True))
    if disk and all("fio_seconds" in row for row in disk):
        targets.append(("states on the disk, read and written / fio",
                        middle(row["fio_seconds"] / row["seconds"]
                               for row in disk), DISK, True))
    return targets


def print_offload(found):
    if not found:
        return
    adam, steps, disk = found["adam"], found["steps"], found["disk"]
    if adam:
        lines = [("zero", "loop")] + [
            (peer, peer) for peer in ("deepspeed", "pytorch")
            if all(peer in row for row in adam)]
        print_table(("AdamW of 100 M elements, rounded to bf16", "ms"), [
            (name, "%.1f" % middle(row[key]["ms"] for row in adam))
            for name, key in lines])
    if steps:
        plain = steps.get("no offload")
        print_table(("one rank, host link " + LINK, "ms", "of no offload",
                     "waited for the host, ms"), [
            (case, "%.0f" % median_step(rows, "step_ms"),
             "%.3f" % (median_step(rows, "step_ms") /
                       median_step(plain, "step_ms")) if plain else "",
             "%.1f" % median_step(rows, "exposed_ms"))
            for case, rows in steps.items()])
    if found["nvme"]:
        print_table(("one rank, the optimizer's states on a disk", "tok/s",
                     "peak GB"), [
            (name, "%.1f" % line["tokens_per_second"],
             "%.2f" % (line["peak_rss_bytes"] / 1e9))
            for name, line in ((name, summary(rows))
                               for name, rows in found["nvme"].items())])
    if disk:
        both = 2e-6 * disk[0]["bytes"]  # MB read and written
        lines = [("zero", "seconds"), ("zero, without checksums",
                                       "unchecked_seconds")]
        if all("fio_seconds" in row for row in disk):
            lines.append(("fio, io_uring", "fio_seconds"))
        print_table(("states read and written at once", "MB/s"), [
            (name, "%.0f" % (both / middle(row[key] for row in disk)))
            for name, key in lines])
