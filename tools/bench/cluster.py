"""The part of tools/bench/run about processes and hosts: processes over MPI
compared with threads; two hosts (namespaces of this machine, hosts.py) over a
link of a given speed compared with plain sockets, the prediction of `zero
plan`, DDP, FSDP2 and DeepSpeed; and how long a run takes to resume after kill
-9.

GPT-2 124M, micro-batch 2 per rank, T = 256. A rank has one thread. The kernel
may have no way to delay packets: the latency is that of the namespaces, and is
printed.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time

from common import ROOT, call, middle, print_table, rows_of, say
from hosts import Failed, Hosts, Runs, missing, mpirun_options, run

PARTS = ("processes", "links", "exposed", "levels", "peers", "recovery")
PEER = "tools/bench/peers/ranks.py"
OPEN_MPI = "tools/bench/peers/open_mpi.py"
SOCKETS = "tools/bench/sockets.py"
RATES = {"1gbit": 0.125e9, "10gbit": 1.25e9}  # bytes per second
FAST = "10gbit"
PEERS = ("ddp", "fsdp2", "deepspeed")
TIMEOUT = 20  # communication.timeout_seconds of the run that is killed

# The project's promises.
SLOWER = 1.05  # a step of 2 processes over one of 2 threads
OF_OPEN_MPI = 1.5
OF_SOCKETS = 0.9
PREDICTED = 0.1  # exposed communication is within this share of the plan's
# Ratio of the summed bytes, hierarchical to flat: a quarter, plus the agreement
# of ranks at the start of a run.
ACROSS = 0.251
OF_PEER = 1.5
RECOVERY = TIMEOUT + 10  # seconds


# ---- One host ---------------------------------------------------------------

def measure_processes(args, _):
    """{"threads", "processes": [steps of each round], "collectives"}"""
    runs, found = Runs(args), {"threads": [], "processes": []}
    cores = set(sorted(os.sched_getaffinity(0))[:2])
    try:
        for _ in range(args.rounds):
            found["threads"].append(runs.measured(runs.command(
                options=("--ranks", "2"), steps=1 + args.steps), cores=cores))
            found["processes"].append(runs.measured(
                mpirun_options() + ["-n", "2"] +
                runs.command(steps=1 + args.steps), cores=cores))
            say("  threads %.0f ms, processes %.0f ms a step" % tuple(
                middle(found[key][-1]["step_ms"])
                for key in ("threads", "processes")))
    finally:
        runs.close()
    found["collectives"] = measure_collectives(args)
    return found


def measure_collectives(args):
    """Rows of comm_bench on two processes, with Open MPI's own rates."""
    plugin = os.path.join(ROOT, args.out, "bench/zero_mpi.so")
    if not os.path.lexists(plugin):
        os.symlink("../zero_mpi.so", plugin)
    seconds = "0.2" if args.quick else "1"
    rows = call([*mpirun_options(), "-n", "2",
                 os.path.join(args.out, "bench/comm_bench"), "--ranks", "1",
                 "--seconds", seconds])
    theirs = args.peer_python and call([
        os.path.join(os.path.dirname(args.peer_python), "mpirun"),
        "--allow-run-as-root", "--oversubscribe", "-n", "2", args.peer_python,
        OPEN_MPI, "--seconds", seconds])
    for row in rows:
        for other in theirs or ():
            if all(row[key] == other[key] for key in ("op", "shape", "dtype")):
                row["open_mpi"] = other["rate"]
    return rows


# ---- Two hosts --------------------------------------------------------------

def sockets(hosts):
    listener = hosts.start("node1", [sys.executable, os.path.join(
        ROOT, SOCKETS)])
    try:
        return rows_of(hosts.cluster("on", "node2", sys.executable,
                                     os.path.join(ROOT, SOCKETS), "node1"))[-1]
    finally:
        listener.kill()
        listener.wait()


def messages(hosts):
    """The output of `zero devices` on the two hosts."""
    text = run(hosts.on_both([hosts.zero, "devices", "--threads", "1"]),
               env=hosts.env)
    found = re.search(r"node1 to node2 +([0-9.]+) GB/s, ([0-9.]+) us", text)
    if not found:
        raise Failed("zero devices says nothing of node1 to node2")
    return {"bytes_per_second": 1e9 * float(found[1]),
            "latency_us": float(found[2])}


def measure_links(_, hosts):
    """{rate: {"sockets", "zero"}}"""
    links = {}
    for rate in RATES:
        hosts.cluster("rate", rate)
        links[rate] = {"sockets": sockets(hosts), "zero": messages(hosts)}
    return links


def plan(hosts, command):
    """Each host's sent bytes in a step of this run, with two hosts."""
    command = [word for word in command if word != "train"]
    text = run([command[0], "plan", *command[1:], "--hosts", "2", "--json"])
    return rows_of(text)[-1]["host_bytes"]


def measure_exposed(args, hosts):
    """{rate: {"sent" as planned and counted, "link", "waited", "hidden"}} at
    stage 0: the waits without and with overlap."""
    found = {}
    for rate in RATES:
        hosts.cluster("rate", rate)
        link = sockets(hosts)
        steps = 1 + min(args.steps, 3)
        planned = plan(hosts, hosts.command(options=("--ranks", "2"), steps=1))
        one = {"planned": planned["flat"][0]["sent"], "link": link}
        for key, overlap in (("waited", "false"), ("hidden", "true")):
            one[key] = hosts.measured(hosts.command(
                "zero_optimization.overlap_comm=" + overlap, steps=steps))
        found[rate] = one
        say("  %s: %.0f ms exposed without overlap, %.0f ms with" % (
            rate, *(middle(one[key]["exposed_ms"])
                    for key in ("waited", "hidden"))))
    return found


LEVELS = ("model.n_layer=4", "model.vocab_size=1024", "data.sequence_length=64",
          "train_micro_batch_size_per_gpu=1")


def measure_levels(args, hosts):
    """{algorithm: {"planned", "run"}} of 2 hosts with 4 ranks, 1 Gb/s."""
    hosts.cluster("rate", "1gbit")
    found = {}
    for algorithm, name in (("direct", "flat"),
                            ("hierarchical", "hierarchical")):
        sets = LEVELS + ("communication.algorithm=" + algorithm,)
        planned = plan(hosts, hosts.command(*sets, options=("--ranks", "8"),
                                            steps=1))
        found[name] = {"planned": planned[name][0], "run": hosts.measured(
            hosts.command(*sets, options=("--ranks", "4"),
                          steps=1 + args.steps))}
    return found


def peer_on_hosts(args, hosts, mode):
    """tools/bench/peers/ranks.py with a rank on each host."""
    store = os.path.join(hosts.folder.name, mode)
    ranks = []
    for rank in range(2):
        ranks.append(hosts.start("node%d" % (rank + 1), [
            "env", "GLOO_SOCKET_IFNAME=eth0", "DS_ACCELERATOR=cpu",
            "TOKENIZERS_PARALLELISM=false", "LOCAL_RANK=0", "RANK=%d" % rank,
            args.peer_python, os.path.join(ROOT, PEER), "--mode", mode,
            "--stage", "0", "--dtype", "fp32", "--ranks", "2", "--steps",
            str(min(args.steps, 3)), "--rank", str(rank), "--store", store],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE))
    try:
        parts = []
        for rank in ranks:
            stdout, stderr = rank.communicate(timeout=300)
            rows = rows_of(stdout)
            if rank.returncode or not rows or "error" in rows[-1]:
                raise Failed(str(rows[-1].get("error")) if rows else
                             stderr.strip()[-300:])
            parts.append(rows[-1])
    finally:
        for rank in ranks:
            rank.kill()
    # A step ends with its last rank.
    step_ms = [max(ms) for ms in zip(*(part["step_ms"] for part in parts))]
    return 2 * 2 * 256 * 1e3 / middle(step_ms)


def measure_peers(args, hosts):
    """{"zero" or peer: tokens per second, or why not} over the fast link."""
    hosts.cluster("rate", FAST)
    speeds = {"zero": middle(
        2 * 2 * 256 * 1e3 / ms for ms in hosts.measured(hosts.command(
            steps=1 + args.steps))["step_ms"])}
    for mode in PEERS:
        if not args.peer_python:
            speeds[mode] = "not installed: tools/bench/peers/setup"
            continue
        try:
            speeds[mode] = peer_on_hosts(args, hosts, mode)
        except (Failed, subprocess.TimeoutExpired) as error:
            speeds[mode] = str(error)
        say("  %s: %s tok/s" % (mode, speeds[mode]))
    return speeds


TINY = {"model": {"preset": "gpt2-tiny"},
        "data": {"train": ROOT + "/engine/*/*.cc", "sequence_length": 64},
        "training": {"steps": 100000, "save_every": 10, "save_final": False,
                     "out_dir": "tiny"},
        "train_batch_size": 8, "zero_optimization": {"stage": 2},
        "communication": {"timeout_seconds": TIMEOUT}, "steps_per_print": 1}


def await_steps(path, job, start, steps):
    """Waits until the output of a job has this many steps of a start."""
    end = time.monotonic() + 120
    while time.monotonic() < end and job.poll() is None:
        with open(path) as file:
            text = file.read()
        # The first start is not announced.
        at = text.find("start %d, after" % start) if start > 1 else 0
        if at >= 0 and len(re.findall(r"step \d+/", text[at:])) >= steps:
            return
        time.sleep(0.02)
    raise Failed("no %d steps of start %d from %s" % (steps, start, path))


def measure_recovery(args, hosts):
    """Seconds from kill -9 of a process to the next finished step, by
    tools/jobs/mpirun.sh; of each try."""
    hosts.cluster("rate", FAST)
    folder = hosts.folder.name
    for name, text in (("tiny.json", json.dumps(TINY)),
                       ("hosts", "node1 slots=1\nnode2 slots=1\n")):
        with open(os.path.join(folder, name), "w") as file:
            file.write(text)
    output = os.path.join(folder, "job.out")
    seconds, tries = [], 1 if args.quick else 3
    with open(output, "w") as file:
        job = hosts.start(
            "ctl", [os.path.join(ROOT, "tools/jobs/mpirun.sh"), "--hostfile",
                    "hosts", "--max-restarts", str(tries), "tiny.json",
                    "--threads", "1"], stdout=file, stderr=subprocess.STDOUT)
    try:
        await_steps(output, job, 1, 25)
        for number in range(tries):
            begin = time.monotonic()
            hosts.cluster("on", "node2", "pkill", "-9", "-x", "zero")
            await_steps(output, job, number + 2, 1)
            seconds.append(time.monotonic() - begin)
            # Another checkpoint before the next one.
            await_steps(output, job, number + 2, 25)
    finally:
        job.send_signal(signal.SIGTERM)
        job.wait()
    return seconds


def measure_cluster(args):
    """{part: its measurements}"""
    measures = {"processes": measure_processes, "links": measure_links,
                "exposed": measure_exposed, "levels": measure_levels,
                "peers": measure_peers, "recovery": measure_recovery}
    wanted = [part for part in PARTS if args.part in (None, part)]
    found, hosts, lacking = {}, None, missing(args)
    if lacking:
        say("  SKIPPED: no cluster of hosts: " + lacking)
        return found
    try:
        for part in wanted:
            say("  cluster: " + part)
            try:
                if part != "processes" and hosts is None:
                    hosts = Hosts(args)
                found[part] = measures[part](args, hosts)
            except Failed as error:
                say("  cluster: %s failed: %s" % (part, error))
    finally:
        if hosts is not None:
            hosts.close()
    return found


# ---- What it says -----------------------------------------------------------

def predicted_ms(one):
    """All bytes of a step, one after the other."""
    return 1e3 * one["planned"] / one["link"]["bytes_per_second"]


def summed(one):
    """Bytes to be summed that a host actually sent: all except the plan's other
    bytes."""
    return one["run"]["sent"] - (one["planned"]["sent"] -
                                 one["planned"]["summed"])


def cluster_targets(found):
    """[(what, value, wanted, higher is better)]"""
    targets = []
    add = lambda *target: targets.append(target)
    if "processes" in found:
        one = found["processes"]
        # Round by round, so that a slow minute slows both.
        add("2 processes: step / 2 threads", middle(
            middle(a["step_ms"]) / middle(b["step_ms"])
            for a, b in zip(one["processes"], one["threads"])), SLOWER, False)
        for row in one["collectives"]:
            if "open_mpi" in row:
                add("2 processes: %s / Open MPI" % row["op"],
                    row["rate"] / row["open_mpi"], OF_OPEN_MPI, True)
    for rate, one in found.get("links", {}).items():
        add("2 hosts, %s: messages / plain sockets" % rate,
            one["zero"]["bytes_per_second"] /
            one["sockets"]["bytes_per_second"], OF_SOCKETS, True)
    for rate, one in found.get("exposed", {}).items():
        add("2 hosts, %s: exposed off the plan's" % rate, abs(
            middle(one["waited"]["exposed_ms"]) / predicted_ms(one) - 1),
            PREDICTED, False)
    if "levels" in found:
        flat, levels = (found["levels"][name]
                        for name in ("flat", "hierarchical"))
        add("2 hosts x 4 ranks: summed bytes, hierarchical / flat",
            summed(levels) / summed(flat), ACROSS, False)
        add("2 hosts x 4 ranks: step, hierarchical / flat",
            middle(levels["run"]["step_ms"]) / middle(flat["run"]["step_ms"]),
            None, False)
    speeds = found.get("peers", {})
    for mode in PEERS:
        if isinstance(speeds.get(mode), float):
            add("2 hosts, %s: tok/s / %s" % (FAST, mode),
                speeds["zero"] / speeds[mode], OF_PEER, True)
    if "recovery" in found:
        add("kill -9 to the next step, s", max(found["recovery"]), RECOVERY,
            False)
    return targets


def print_cluster(found):
    if "processes" in found:
        one = found["processes"]
        print_table(("one host, 2 ranks", "step ms", "exposed"), [
            (label, *("%.0f" % middle(ms for part in one[label]
                                      for ms in part[key])
                      for key in ("step_ms", "exposed_ms")))
            for label in ("threads", "processes")])
        print_table(("2 processes", "", "rate", "Open MPI", ""), [
            (row["dtype"] + " " + row["op"], row["shape"],
             "%.2f" % row["rate"], "%.2f" % row["open_mpi"]
             if "open_mpi" in row else "", row["unit"])
            for row in one["collectives"]])
    if "links" in found:
        print_table(("2 hosts, one way", "GB/s", "of the link", "us"), [
            ("%s, %s" % (rate, who), "%.3f" % (link["bytes_per_second"] / 1e9),
             "%.0f%%" % (100 * link["bytes_per_second"] / RATES[rate]),
             "%.0f" % link["latency_us"])
            for rate, one in found["links"].items()
            for who, link in one.items()])
    if "exposed" in found:
        print_table(("2 hosts, stage 0", "planned MB", "sent", "planned ms",
                     "exposed", "overlapped", "step", "overlapped"), [
            (rate, "%.1f" % (one["planned"] / 1e6),
             "%.1f" % (one["waited"]["sent"] / 1e6),
             "%.0f" % predicted_ms(one),
             *("%.0f" % middle(one[key][what])
               for what in ("exposed_ms", "step_ms")
               for key in ("waited", "hidden")))
            for rate, one in found["exposed"].items()])
    if "levels" in found:
        print_table(("2 hosts x 4 ranks, 1gbit", "planned MB", "sent", "summed",
                     "step ms", "exposed"), [
            (name, "%.1f" % (one["planned"]["sent"] / 1e6),
             "%.1f" % (one["run"]["sent"] / 1e6), "%.1f" % (summed(one) / 1e6),
             *("%.0f" % middle(one["run"][key])
               for key in ("step_ms", "exposed_ms")))
            for name, one in found["levels"].items()])
    if "peers" in found:
        print_table(("2 hosts, %s, fp32" % FAST, "tok/s"), [
            (name, "%.1f" % speed if isinstance(speed, float) else speed)
            for name, speed in found["peers"].items()])
    if "recovery" in found:
        say()
        say("  kill -9 to the next finished step: %s s" % ", ".join(
            "%.1f" % one for one in found["recovery"]))
