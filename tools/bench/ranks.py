"""The part of tools/bench/run with several ranks: ours compared with DDP, FSDP2
and DeepSpeed, stages with each other, and a link as slow as computation.

GPT-2 124M, micro-batch 2 per rank, T = 256. A rank has one core and one
thread: ours is one process with a thread per core, a peer's ranks are processes
bound to one core each.
"""

import os

from common import (attempt, bf16, call, middle, print_speeds, print_table, say,
                    step_bench, summary, take_turns)

PEER = "tools/bench/peers/ranks.py"
OPEN_MPI = "tools/bench/peers/open_mpi.py"
RANKS = 2
STAGES = (0, 1, 2, 3)
# Alternating, each peer next to the stage of ours that it is compared with.
TURNS = (("zero", 0), ("ddp", 0), ("deepspeed", 0),
         ("zero", 1), ("deepspeed", 1),
         ("zero", 2), ("deepspeed", 2),
         ("zero", 3), ("deepspeed", 3), ("fsdp2", 3))
LABELS = {"zero": "zero stage %d", "ddp": "PyTorch DDP",
          "fsdp2": "PyTorch FSDP2, resharding",
          "deepspeed": "DeepSpeed stage %d"}

# The shaped link: communication takes this share of the compute time, 0.8 to
# 1 as measured in the same run.
SHARE = 0.85
LATENCY = "50us"
LINK_STAGE = 0
# One row of the table of the shaped link each: label and settings.
ROWS = (
    ("a collective per tensor, waited for",
     "per_tensor zero_optimization.reduce_bucket_size=1 "
     "zero_optimization.allgather_bucket_size=1 "
     "zero_optimization.overlap_comm=false"),
    ("a collective per segment, waited for",
     "zero_optimization.reduce_bucket_size=1 "
     "zero_optimization.allgather_bucket_size=1 "
     "zero_optimization.overlap_comm=false"),
    ("buckets of 25 MB, waited for", "zero_optimization.overlap_comm=false"),
    ("buckets of 25 MB, overlapped", ""),
    ("the same as a ring", "communication.algorithm=ring"),
    ("the same to a parameter server",
     "communication.algorithm=parameter_server"),
)

# The project's promises.
SPEEDUP = {"ddp": 1.3, "deepspeed": 1.7, "fsdp2": 1.7}
MEMORY = {"fp32": 0.3, "bf16": 0.4}  # of DeepSpeed stage 3
SLOWER = {1: 1.02, 2: 1.10}
HOST = 0.01
OVERLAP = 1.4
EXPOSED = 0.05


def label(name, stage):
    text = LABELS[name]
    return text % stage if "%d" in text else text


def cores(num_ranks):
    """This many of the cores it may use; all if there are fewer."""
    return set(sorted(os.sched_getaffinity(0))[:num_ranks])


# ---- Measuring --------------------------------------------------------------

def num_steps(args):
    """Per turn; there are many turns."""
    return min(args.steps, 3)


def ours(args, dtype, num_ranks, cases, *options):
    """(command, cores) that prints a result per case."""
    command = step_bench(
        args.out, [bf16(dtype), "train_micro_batch_size_per_gpu=2"],
        "--ranks", str(num_ranks), "--threads", "1", "--steps",
        str(num_steps(args)), *options)
    for case in cases:
        command += ["--case", case]
    return command, cores(num_ranks)


def peer(args, dtype, name, stage):
    if not args.peer_python:
        return "not installed: tools/bench/peers/setup", None
    return [args.peer_python, PEER, "--mode", name, "--stage", str(stage),
            "--dtype", dtype, "--ranks", str(RANKS), "--steps",
            str(num_steps(args))], None


def measure(*run):
    """The output of `ours`; [], and a line about it, if it failed."""
    found, why = attempt(*ours(*run))
    if why:
        say("  failed: %s" % why)
    return [] if why else found


def stage_is(stage, more=""):
    return ("zero_optimization.stage=%d %s" % (stage, more)).strip()


def measure_turns(args, dtype):
    """{label: [result of each round]} and {label: why it failed}"""
    return take_turns(args.rounds, dtype, {
        label(name, stage): ours(args, dtype, RANKS, [stage_is(stage)])
        if name == "zero" else peer(args, dtype, name, stage)
        for name, stage in TURNS})


def measure_pairs(args, dtype):
    """{ranks: [stage 0, stage 3]}, alternating within one process."""
    pairs = {}
    counts = [1, RANKS]
    while counts[-1] * 2 <= len(os.sched_getaffinity(0)):
        counts.append(counts[-1] * 2)
    for count in counts:
        say("  %s stages 0 and 3 in turns, %d rank(s)" % (dtype, count))
        found = measure(args, dtype, count, [stage_is(0), stage_is(3)],
                        "--rounds", "2")
        if found:
            pairs[count] = found
    return pairs


def pick_link(args, dtype, stage, known):
    """A link on which this stage communicates for SHARE of its compute time;
    `known`: results of this stage without one, or None."""
    known = known or measure(args, dtype, RANKS, [stage_is(stage)])
    if not known:
        return None
    one = known[-1]
    compute = middle(one["step_ms"]) - middle(one["exposed_ms"])
    rate = one["link_bytes"] / (SHARE * compute) * 1e-3
    return "%.4gMB/s,%s" % (rate, LATENCY)


def measure_link(args, dtype, turns):
    """{"stages": {stage: {"on", "off"}}, "rows": [(label, result, why)]}"""
    stages, rows = {}, []
    for stage in STAGES:
        link = pick_link(args, dtype, stage, turns.get(label("zero", stage)))
        if link is None:
            continue
        say("  %s stage %d over a link of %s" % (dtype, stage, link))
        found = measure(args, dtype, RANKS, [
            stage_is(stage),
            stage_is(stage, "zero_optimization.overlap_comm=false")],
            "--shape-link", link)
        if not found:
            continue
        stages[stage] = {"on": found[0], "off": found[1]}
        if stage != LINK_STAGE:
            continue
        for name, settings in ROWS:
            found, why = attempt(*ours(
                args, dtype, RANKS, [stage_is(stage, settings)],
                "--shape-link", link))
            rows.append({"label": name, "result": None if why else found[-1],
                         "failed": why})
    return {"stages": stages, "rows": rows}


def measure_ranks(args):
    """{dtype: {"turns", "failed", "pairs", "link"}}"""
    results = {}
    for dtype in args.dtypes:
        turns, failed = measure_turns(args, dtype)
        pairs = measure_pairs(args, dtype)
        results[dtype] = {"turns": turns, "failed": failed, "pairs": pairs,
                          "link": measure_link(args, dtype, turns)}
    return results


def measure_collectives(args):
    """Rows of comm_bench, with Open MPI's rate if it has the same."""
    seconds = "0.1" if args.quick else "1"
    launch = args.peer_python and [
        os.path.join(os.path.dirname(args.peer_python), "mpirun"),
        "--allow-run-as-root", "--oversubscribe", "-n", str(RANKS),
        args.peer_python, OPEN_MPI, "--seconds", seconds]
    best, peers = {}, {}

    def keep(rows, kept):
        for row in rows:
            key = (row["op"], row["shape"], row["dtype"])
            if key not in kept or row["rate"] > kept[key]["rate"]:
                kept[key] = row

    for _ in range(2):
        say("  collectives of %d ranks" % RANKS)
        keep(call([os.path.join(args.out, "bench/comm_bench"), "--ranks",
                   str(RANKS), "--seconds", seconds]), best)
        if launch:
            keep(call(launch), peers)
    for key, row in best.items():
        if key in peers:
            row["open_mpi"] = peers[key]["rate"]
    return list(best.values())


# ---- What it says -----------------------------------------------------------

def memory_of(rounds):
    """Bytes per rank at peak."""
    return summary(rounds)["peak_rss_bytes"]


def faster(mine, other):
    """Round by round, so that a slow minute slows both."""
    return middle([middle(b["step_ms"]) / middle(a["step_ms"])
                   for a, b in zip(mine, other)])


def slower(pair):
    """Stage 3 over stage 0."""
    return middle(pair[1]["step_ms"]) / middle(pair[0]["step_ms"])


def allowed_ms(one):
    """The share that may stay exposed on a shaped link."""
    return (one["link"]["first_gather_ms"] + one["link"]["last_reduction_ms"] +
            EXPOSED * middle(one["step_ms"]))


def rank_targets(results):
    """[(what, value, wanted, higher is better)]"""
    targets = []
    for dtype, found in results.items():
        turns = found["turns"]

        def add(what, *rest):
            targets.append(("%s %s" % (dtype, what), *rest))

        for name, stage in TURNS:
            mine, other = (turns.get(label(one, stage))
                           for one in ("zero", name))
            if name != "zero" and mine and other:
                wanted = None if (name, stage) == ("deepspeed", 0) else (
                    SPEEDUP[name])
                add("stage %d speed / %s" % (stage, label(name, stage)),
                    faster(mine, other), wanted, True)
        for stage in STAGES[1:]:
            mine, before = (turns.get(label("zero", s))
                            for s in (stage, stage - 1))
            if mine and before:
                add("stage %d memory / stage %d" % (stage, stage - 1),
                    memory_of(mine) / memory_of(before), 1.0, False)
        mine, other = (turns.get(label(one, 3))
                       for one in ("zero", "deepspeed"))
        if mine and other:
            add("stage 3 memory / DeepSpeed stage 3",
                memory_of(mine) / memory_of(other), MEMORY[dtype], False)
        for count, pair in found["pairs"].items():
            add("stage 3 step / stage 0, %d rank(s)" % count, slower(pair),
                SLOWER.get(count), False)
        for stage in STAGES:
            for one in turns.get(label("zero", stage), [])[:1]:
                add("stage %d host / step" % stage,
                    middle(one["host_ms"]) / middle(one["step_ms"]), HOST,
                    False)
        for stage, pair in found["link"]["stages"].items():
            add("stage %d link: exposed / allowed" % stage,
                middle(pair["on"]["exposed_ms"]) / allowed_ms(pair["on"]), 1.0,
                False)
            add("stage %d link: step without overlap" % stage,
                middle(pair["off"]["step_ms"]) / middle(pair["on"]["step_ms"]),
                OVERLAP, True)
    return targets


def collective_targets(rows):
    targets = []
    for row in rows:
        if row["unit"] != "GB/s":
            continue
        what = "%s %s / " % (row["dtype"], row["op"])
        targets.append((what + "plain loop", row["ratio"], 0.8, True))
        if "open_mpi" in row:
            targets.append((what + "Open MPI", row["rate"] / row["open_mpi"],
                            2.0, True))
    return targets


def print_turns(dtype, found):
    print_speeds("%s, %d ranks with one core each" % (dtype, RANKS),
                 [label(name, stage) for name, stage in TURNS],
                 found["turns"], found["failed"])
    for stage in STAGES:
        for one in found["turns"].get(label("zero", stage), [])[:1]:
            wire = one["wire"]
            say("  stage %d sent per rank and step: gathered %.1f MB (formula "
                "%.1f), reduced %.1f MB (%.1f), %d collectives" % (
                    stage, wire["gathered"] / 1e6,
                    wire["formula_gathered"] / 1e6, wire["reduced"] / 1e6,
                    wire["formula_reduced"] / 1e6, wire["collectives"]))


def print_pairs(dtype, pairs):
    if 1 not in pairs:
        return
    alone = middle(pairs[1][0]["step_ms"])
    rows = []
    for count, pair in pairs.items():
        steps = [middle(one["step_ms"]) for one in pair]
        rows.append((count, *("%.0f" % step for step in steps),
                     *("%.2f" % (alone / step) for step in steps)))
    print_table((dtype + ", one thread per rank", "stage 0 ms", "stage 3",
                 "efficiency 0", "efficiency 3"), rows)


def print_link(dtype, link, pairs):
    if not link["stages"]:
        return
    rows = []
    for stage, pair in link["stages"].items():
        on, off = pair["on"], pair["off"]
        share = on["link"]["all_ms"] / (middle(off["step_ms"]) -
                                        middle(off["exposed_ms"]))
        rows.append((
            "stage %d, %s" % (stage, on["link"]["rate"]),
            "%.0f%%" % (100 * share), *("%.0f" % ms for ms in (
                middle(on["step_ms"]), middle(off["step_ms"]),
                middle(on["exposed_ms"]), allowed_ms(on),
                on["link"]["first_gather_ms"],
                on["link"]["last_reduction_ms"])),
            "" if 0.8 <= share <= 1 else "not 80 to 100 %: measure again"))
    print_table(("%s, %d ranks over a slow link" % (dtype, RANKS),
                 "comm/compute", "overlapped ms", "waited for", "exposed ms",
                 "allowed ms", "first gather", "last reduction", ""), rows)
    say("  allowed: the first gather, the last reductions (the embedding's "
        "bucket and rows:\n  %.0f %% of all that is reduced) and %.0f %% of the step" % (
            100 * on["last_reduction_bytes"] / on["wire"]["reduced"],
            100 * EXPOSED))
    if not link["rows"]:
        return
    alone = middle(pairs[1][0]["step_ms"]) if 1 in pairs else None
    rows = []
    for row in link["rows"]:
        one = row["result"]
        rows.append((row["label"], row["failed"]) if one is None else (
            row["label"], one["wire"]["collectives"],
            "%.3f" % one["bus_gb_per_s"], "%.0f" % middle(one["step_ms"]),
            "%.0f" % middle(one["exposed_ms"]),
            "%.2f" % (alone / middle(one["step_ms"])) if alone else ""))
    print_table(("%s, stage %d, the same link" % (dtype, LINK_STAGE), "calls",
                 "GB/s", "step ms", "exposed", "efficiency"), rows)
    say("  a segment: a unit, or an equal part of one above 16 MiB (this "
        "model's 148 tensors\n  are in 35), per tensor each tensor; GB/s: bytes "
        "sent over the time that collectives\n  took; efficiency: the step of "
        "one rank alone over this one")


def print_ranks(results):
    for dtype, found in results.items():
        print_turns(dtype, found)
        print_pairs(dtype, found["pairs"])
        print_link(dtype, found["link"], found["pairs"])
