"""The parts of gpu_check: each a function of a Context that returns a row of
the report: "status" (passed, failed, skipped), "why" where it did not pass,
and what it measured."""

import itertools
import json
import math
import os
import random
import re
import sys
import time

import bundle
import machine
from common import bf16, model_sets, rows_of, step_bench
from programs import (
    STATUS, count, explained, failed, failures_of, how_ended,
    last_words, passed, printed_cases, problem_of, run_gtest, skipped,
    why_ended)

KERNEL_TESTS = "tests/kernels/kernels_cuda_test"
# What a program that hangs leaves to each one after it, in seconds.
PROGRAM_SECONDS = 15


# What runs without a GPU, of a build with CUDA; a bundle has none of it.
WITHOUT_GPU = {
    "tests": ("tests/kernels/cudnn_graph_test",
              "tests/kernels/kernels_emulated_test",
              "tests/engine/train/cuda_step_emulated_test"),
    "parity": ("tests/kernels/parity_emulated_test",)}


def tests(context):
    """Every test program that wants a GPU, but for the parity of ops: the
    kernels' first, on which the others build."""
    programs = [name for name in bundle.gpu_tests(context.build)
                if "parity" not in name]
    programs.sort(key=lambda name: name != KERNEL_TESTS)
    if not programs:
        return failed("there is no GPU test in %s: build with CUDA" %
                      context.build)
    rows = context.partial["programs"] = []
    problems = []
    for number, name in enumerate(programs):
        others = len(programs) - number - 1
        left = context.left()
        if left < 1:
            problems.append("%s: no time was left for it" % name)
            continue
        ran = run_gtest(context, name, max(
            left / (others + 1), left - PROGRAM_SECONDS * others))
        problem = problem_of(ran)
        rows.append({"program": name, "problem": problem,
                     "not_reached": ran.missed,
                     **{status: count(ran.cases, status)
                        for status in STATUS.values()}})
        if problem:
            problems.append("%s: %s" % (name, problem))
    return (failed("; ".join(problems), programs=rows) if problems else
            passed(programs=rows))


# ---- compute-sanitizer ------------------------------------------------------

FOUND_ERRORS = 86  # the exit status that it is told to use
SUMMARY = re.compile(r"^=+ +(?:ERROR SUMMARY: (\d+) error|"
                     r"RACECHECK SUMMARY: (\d+) hazard)", re.MULTILINE)
# How a finding begins.
FINDING = re.compile(
    r"^=+ +((?:Error: |Warning: )?(?:Invalid|Misaligned|Race reported|"
    r"(?:Potential )?(?:RAW|WAR|WAW) hazard|Barrier error|"
    r"Uninitialized).*)", re.MULTILINE)


def findings(done):
    """What a tool found, or None. Its summary counts; one that was killed
    wrote none."""
    counts = [int(errors or hazards)
              for errors, hazards in SUMMARY.findall(done.text)]
    first = FINDING.search(done.text)
    if sum(counts) or done.code == FOUND_ERRORS or (first and not counts):
        # Some tools tell of a kernel a little after its test.
        begun = re.findall(r"^\[ RUN +\] (\S+)",
                           done.text[:first.start() if first else 0],
                           re.MULTILINE)
        return "%s, first%s: %s" % (
            "%d findings" % sum(counts) if counts else "findings",
            " (about %s)" % begun[-1] if begun else "",
            first.group(1) if first else "see the log")
    return None


# Words in the names of suites that call cuBLASLt or cuDNN. They come behind our
# own kernels: a library takes long to open under a tool.
WITH_LIBRARIES = ("Attention", "CrossEntropy", "Linear", "Matmul")
# Less is not worth a start: under a tool a GPU takes seconds to open.
START_SECONDS = 10
# Of racecheck: our kernels alone. How those of libraries synchronize is not for
# us to prove, and to watch them takes long.
OUR_KERNELS = ["--kernel-name", "kernel_substring=4zero4cuda"]


def suites_of(done):
    """[{suite: how many tests}] of a list of tests: those of our own kernels,
    and those with libraries. Death tests run no kernel."""
    groups = {}, {}
    for suite, tests in re.findall(r"^(\S+)\..*\n((?:  .+\n)+)", done.text,
                                   re.MULTILINE):
        if not suite.endswith("DeathTest"):
            groups[any(word in suite for word in WITH_LIBRARIES)][suite] = (
                tests.count("\n"))
    return [group for group in groups if group]


def sanitize_suites(context, sanitizer, tool, suites):
    """(Done, cases, problem or None). A test that was stopped is none."""
    # Not calls that return an error: tests let an allocation fail, and opening
    # a GPU asks for peers that there may not be. A finding ends its kernel and
    # not the context: the tests behind it go on.
    done = context.run([sanitizer, "--tool", tool, "--report-api-errors", "no",
                        "--destroy-on-device-error", "kernel",
                        *(OUR_KERNELS if tool == "racecheck" else []),
                        "--error-exitcode", str(FOUND_ERRORS),
                        context.path(KERNEL_TESTS), "--gtest_filter=" +
                        ":".join(suite + ".*" for suite in suites)])
    cases = [case for case in printed_cases(done)
             if not (done.timed_out and "why" in case[2])]
    problem = findings(done) or failures_of(cases)
    if problem is None and done.code != 0 and (
            not done.timed_out or done.code is None):
        problem = why_ended(done)
    return done, cases, problem


def sanitize(context, tool):
    """The kernels' tests under a tool, in one process for our own kernels and
    one for those with libraries. Tests that the time does not suffice for are
    named, and no failure."""
    sanitizer = machine.compute_sanitizer()
    if sanitizer is None:
        return skipped("compute-sanitizer is not installed")
    done = context.run([context.path(KERNEL_TESTS), "--gtest_list_tests"])
    groups = suites_of(done)
    if not groups:
        return failed(why_ended(done))
    rows = context.partial["rows"] = []
    problems, in_time = [], True
    for group in groups:
        cases, problem = [], None
        if context.left() >= START_SECONDS:
            done, cases, problem = sanitize_suites(context, sanitizer, tool,
                                                   group)
            in_time = not done.timed_out
        else:
            in_time = False
        if "Device not supported" in done.text:
            return skipped("compute-sanitizer does not support this device or "
                           "its container")
        broken = re.search(r"Internal Sanitizer Error: (.*)", done.text)
        if broken:
            return skipped("compute-sanitizer itself failed: %s" %
                           broken.group(1))
        problems += [problem] if problem else []
        for suite, number in group.items():
            found = [case for case in cases if case[0].startswith(suite + ".")]
            rows.append({"suite": suite, "passed": count(found, "passed"),
                         "of": number, "not_reached": number - len(found)})
    missed = ", ".join("%s (%d of %d)" % (
        row["suite"], row["not_reached"], row["of"])
        for row in rows if row["not_reached"])
    if problems:
        result = failed("; ".join(problems), rows=rows)
    elif any(row["passed"] for row in rows):
        result = passed(rows=rows)
    elif in_time:
        result = failed("no test ran: " + last_words(done.text), rows=rows)
    else:
        result = skipped("no test ended in time", rows=rows)
    return explained(
        result, missed and "not reached: " + missed, None if in_time else
        "--parts %s --limit %s=500 has more time" % (tool, tool))


# ---- CPU beside CUDA --------------------------------------------------------

PARITY_TEST = "tests/kernels/parity_cuda_test"
DTYPES = ("fp32", "bf16", "fp16")


def parity(context):
    """Every op with the same data on both; the largest differences."""
    ran = run_gtest(context, PARITY_TEST)
    rows = []
    for name, status, case in ran.cases:
        op = name.split("/")[-1]
        row = {"op": op, "status": status}
        for dtype in DTYPES:
            if dtype in case:
                row[dtype] = {"worst": float(case[dtype]),
                              "limit": float(case[dtype + "_limit"])}
        rows.append(row)
    problem = problem_of(ran)
    return failed(problem, ops=rows) if problem else passed(ops=rows)


FAMILIES = {"GPT-2": "gpt2-tiny", "Llama": "llama-tiny"}
STEPS = 20
# Largest relative difference of a loss.
STEP_LIMITS = {"fp32": 1e-5, "bf16": 5e-3}
WORDS = ("shard rank gather reduce scatter bucket prefetch stage master weight "
         "moment step loss gradient norm token layer head width stream event "
         "kernel plan unit world bytes wire owner peak arena").split()


def write_text(path, words=30000):
    """Something to learn, the same everywhere."""
    draw = random.Random(1)
    with open(path, "w") as file:
        for number in range(words):
            end = "\n" if number % 12 == 11 else " "
            file.write(draw.choice(WORDS) + end)


def config_of(family, text, out):
    """A config that reads `text` and evaluates, samples and saves nothing."""
    return {"model": {"preset": FAMILIES[family]},
            "data": {"train": text, "tokenizer": "bytes",
                     "sequence_length": 64},
            "training": {"steps": STEPS, "out_dir": out, "save_final": False,
                         "sample": {"tokens": 0}},
            "train_batch_size": 8, "gradient_accumulation_steps": 1,
            "gradient_clipping": 1.0,
            "optimizer": {"type": "AdamW",
                          # With 2e-3 GPT-2's loss jumps twice, and what bf16
                          # rounds is then 3 % of it.
                          "params": {"lr": 1e-3, "weight_decay": 0.1}},
            "scheduler": {"type": "WarmupLR", "params": {
                "warmup_num_steps": 10, "warmup_type": "linear"}}}


def train(context, name, family, sets, options, more=None, seconds=math.inf):
    """Trains; returns (losses of the steps, summary, why it failed). `more`:
    of the environment."""
    text = os.path.join(context.scratch, "text.txt")
    if not os.path.exists(text):
        write_text(text)
    out = os.path.join(context.scratch, name)
    config = out + ".json"
    with open(config, "w") as file:
        json.dump(config_of(family, text, out), file)
    command = [context.path("zero"), "train", config, *options]
    for key, value in sets.items():
        command += ["--set", "%s=%s" % (key, value)]
    done = context.run(command, more, seconds)
    if done.code != 0 or done.timed_out:
        return [], {}, why_ended(done, lines=3)
    try:
        with open(os.path.join(out, "metrics.jsonl")) as file:
            lines = [json.loads(line) for line in file]
        with open(os.path.join(out, "summary.json")) as file:
            summary = json.load(file)
    except (OSError, ValueError) as error:
        return [], {}, str(error)
    losses = {line["step"]: line["loss"] for line in lines
              if "step" in line and "loss" in line}
    for step, loss in losses.items():
        if loss is None:  # as JSON has it
            return [], {}, "the loss of step %d is not finite" % step
    return list(losses.values()), summary, None if len(losses) == STEPS else (
        "%d of %d losses are in metrics.jsonl" % (len(losses), STEPS))


def largest_difference(losses, others):
    return max(abs(a - b) / abs(b) for a, b in zip(losses, others))


def compare_steps(context, family, dtype):
    """One row: the same steps on the CPU and on the GPU."""
    runs, row = {}, {"model": family, "dtype": dtype,
                     "limit": STEP_LIMITS[dtype]}
    for device in ("cpu", "cuda"):
        sets = {"bf16.enabled": "true" if dtype == "bf16" else "false"}
        losses, _, why = train(
            context, "steps_%s_%s_%s" % (family, dtype, device),
            family, sets, ["--device", device])
        if why:
            return {**row, "problem": "on %s: %s" % (device, why)}
        runs[device] = losses
    worst = largest_difference(runs["cuda"], runs["cpu"])
    row.update(worst=worst, losses=runs)
    row["problem"] = None if worst <= row["limit"] else (
        "losses differ by %.2g, %.2g is allowed" % (worst, row["limit"]))
    return row


# Less than this is not worth a start, nor is less than this many times what the
# longest row took; one that is killed after HANGS times as much hung.
ROW_SECONDS, ROW_SHARE, HANGS = 8, 1.3, 3


def table_of(context, cases, run, name):
    """A part that is a table: run(context, *case) for every case that there is
    time for. Fails where a row has a problem; that it was slower than a row
    that passed, and the time over, is none."""
    rows = context.partial["rows"] = []
    longest = 0
    for number, case in enumerate(cases):
        before = context.left()
        if before < max(ROW_SECONDS, ROW_SHARE * longest):
            return shortened(verdict(rows, name), rows, len(cases) - number)
        rows.append(run(context, *case))
        if not rows[-1]["problem"]:
            longest = max(longest, before - context.left())
        elif context.left() <= 0 and before < HANGS * longest:
            rows.pop()
            return shortened(verdict(rows, name), rows, len(cases) - number)
    return verdict(rows, name)


def shortened(row, rows, missing):
    """The verdict on `rows`, said to be without the last `missing`."""
    text = "left out for time: the last %d of %d rows" % (
        missing, missing + len(rows))
    return explained(row, text) if rows else failed(text)


def verdict(rows, name):
    problems = ["%s: %s" % (name(row), row["problem"])
                for row in rows if row["problem"]]
    if not problems:
        return passed(rows=rows)
    more = len(problems) - 3
    text = "; ".join(problems[:3])
    return failed(text + ("; and %d more" % more if more > 0 else ""),
                  rows=rows)


def steps(context):
    cases = [(family, dtype) for dtype in STEP_LIMITS for family in FAMILIES]
    return table_of(context, cases, compare_steps,
                    lambda row: "%s %s" % (row["model"], row["dtype"]))


# ---- Stages -----------------------------------------------------------------

STAGES = (0, 1, 2, 3)
RANKS = (2, 4)
# One run on several ranks: more is a hang, and leaves time for the others. A
# rank waits less for another one, so that the run itself says for which.
RUN_SECONDS, WAIT_SECONDS = 45, 20


def stage_sets(dtype, stage, backend):
    """Settings under which stages and backends agree to the bit. A build that
    does not know one of them refuses to run."""
    return {"zero_optimization.stage": stage,
            "bf16.enabled": "true" if dtype == "bf16" else "false",
            "device.deterministic_attention": "true",
            "communication.timeout_seconds": WAIT_SECONDS,
            "communication.backend": backend}


def train_ranks(context, name, ranks, sets, more=None):
    """See train."""
    return train(context, name, "Llama", sets,
                 ["--device", "cuda", "--ranks", str(ranks)], more, RUN_SECONDS)


def stages(context):
    """0 to 3 with several ranks on one GPU: the same parameters."""
    first = {}  # of each number of ranks and dtype

    def run(context, ranks, dtype, stage):
        row = {"ranks": ranks, "dtype": dtype, "stage": stage, "problem": None}
        _, summary, why = train_ranks(
            context, "stage_%d_%s_%d" % (ranks, dtype, stage), ranks,
            stage_sets(dtype, stage, "local"))
        if why:
            return {**row, "problem": why}
        row.update(hash=summary["parameters_hash"], loss=summary["final_loss"],
                   tokens_per_second=summary["tokens_per_second"],
                   peak_bytes=summary["peak_bytes"]["total"])
        if stage == 0:
            first[dtype, ranks] = row["hash"]
        if (dtype, ranks) not in first:
            row["problem"] = "ran, but not compared: stage 0 did not run"
        elif row["hash"] != first[dtype, ranks]:
            row["problem"] = "parameters differ from stage 0's"
        return row

    return table_of(
        context, list(itertools.product(RANKS, STEP_LIMITS, STAGES)), run,
        lambda row: "%d ranks, %s, stage %d" % (
            row["ranks"], row["dtype"], row["stage"]))


# ---- Offload ----------------------------------------------------------------

# (which states, where): a rank keeps what it updates in pinned memory of the
# host, or reads and writes it on a disk around the update.
OFFLOADS = ((), ("optimizer", "cpu"), ("optimizer", "nvme"), ("param", "cpu"),
            ("param", "nvme"))
OFFLOAD_RANKS, OFFLOAD_STAGE, OFFLOAD_DTYPE = 2, 3, "bf16"


def offload_sets(context, states, where):
    """With the parameters goes the optimizer."""
    kinds = ("optimizer", "param") if states == "param" else ("optimizer",)
    sets = {}
    for kind in kinds:
        key = "zero_optimization.offload_%s." % kind
        sets[key + "device"] = where
        if where == "nvme":
            sets[key + "nvme_path"] = os.path.join(context.scratch, "nvme")
    return sets


def offload(context):
    """The same parameters whatever the host or a disk has of them."""
    first = []

    def run(context, *case):
        name = "_".join(case) or "none"
        row = {"offload": name.replace("_", " on "), "problem": None}
        sets = stage_sets(OFFLOAD_DTYPE, OFFLOAD_STAGE, "local")
        if case:
            sets.update(offload_sets(context, *case))
        _, summary, why = train_ranks(context, "offload_" + name,
                                      OFFLOAD_RANKS, sets)
        if why:
            return {**row, "problem": why}
        row.update(hash=summary["parameters_hash"],
                   tokens_per_second=summary["tokens_per_second"],
                   peak_bytes=summary["peak_bytes"]["total"])
        if not case:
            first.append(row["hash"])
        elif not first:
            row["problem"] = "ran, but not compared: no run without offload"
        elif row["hash"] != first[0]:
            row["problem"] = "parameters differ from the run without offload"
        return row

    return table_of(context, OFFLOADS, run, lambda row: row["offload"])


# ---- NCCL -------------------------------------------------------------------

# (ranks, dtype, stage); stages 0 and 3 together have all collectives.
NCCL_CASES = ((1, "bf16", 3), (1, "fp32", 3), (2, "bf16", 3), (2, "fp32", 3),
              (2, "bf16", 0))
# Sums of 16 bits are those of `local`, to the bit. Sums of fp32 are in NCCL's
# own order: relative, of a loss.
NCCL_FP32 = 1e-6
# From this version on, and only when asked to, ranks can share a GPU; their
# kernels wait for each other, so they must fit onto it together, and their
# streams must not share one of its queues, of which CUDA makes 8 unless told.
SHARES_GPU = 23000
SHARED_GPU = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "2",
              "CUDA_DEVICE_MAX_CONNECTIONS": "32"}


def nccl_version(context):
    number = context.nccl
    if not number:
        return "an NCCL of unknown version"
    return "NCCL %d.%d.%d" % (number // 10000, number // 100 % 100,
                              number % 100)


def without_nccl(context, ranks):
    """Why this many ranks cannot run here, or None."""
    if ranks <= context.gpus or (context.nccl or 0) >= SHARES_GPU:
        return None
    return "%d ranks need as many GPUs, or NCCL 2.30, but there is %d" % (
        ranks, context.gpus)


def compare_nccl(row, ours, local):
    """Why NCCL's (losses, parameters_hash) are not those of `local`."""
    exact = row["ranks"] == 1 or row["dtype"] == "bf16"
    if exact and ours != local:
        return "losses or parameters differ from local's"
    if row["worst"] > NCCL_FP32:
        return "losses differ from local's by %.2g, %.2g is allowed" % (
            row["worst"], NCCL_FP32)
    return None


def nccl_row(context, ranks, dtype, stage):
    """The same steps with the backends local and nccl."""
    row = {"ranks": ranks, "dtype": dtype, "stage": stage, "problem": None}
    skip = without_nccl(context, ranks)
    if skip:
        return {**row, "skipped": skip}
    more = {"NCCL_DEBUG": context.environment.get("NCCL_DEBUG", "WARN"),
            **(SHARED_GPU if ranks > context.gpus else {})}
    found = {}
    for backend in ("local", "nccl"):
        sets = {**stage_sets(dtype, stage, backend),
                "communication_data_type": dtype}
        losses, summary, why = train_ranks(
            context, "nccl_%d_%s_%d_%s" % (ranks, dtype, stage, backend),
            ranks, sets, more)
        if why:
            return {**row, "problem": "%s: %s" % (backend, why)}
        found[backend] = losses, summary["parameters_hash"]
    row.update(worst=largest_difference(found["nccl"][0], found["local"][0]),
               hash=found["nccl"][1])
    row["problem"] = compare_nccl(row, found["nccl"], found["local"])
    return row


def nccl(context):
    """NCCL itself, not the tests' stand-in: communicators are opened, split,
    registered with, used and closed. Says where no ranks did so together."""
    # Not the library's name: the twin of a build without NCCL says it.
    if not bundle.has(context.path("zero"), b"ncclCommInitRankConfig"):
        return skipped("this build has no NCCL")
    result = table_of(context, NCCL_CASES, nccl_row,
                      lambda row: "%d ranks, %s, stage %d" % (
                          row["ranks"], row["dtype"], row["stage"]))
    rows = result.get("rows", [])
    proven = any(row["ranks"] > 1 and "hash" in row for row in rows)
    reasons = dict.fromkeys(row["skipped"] for row in rows if "skipped" in row)
    return explained(result, nccl_version(context), *(
        [] if proven else ["but NCCL between ranks is unproven here"]),
        *("skipped: " + reason for reason in reasons))


# ---- Memory -----------------------------------------------------------------

MEMORY_RUNS = (("GPT-2 124M", "gpt2", 8, False),
               ("Qwen2.5 0.5B, recomputed", "Qwen2.5-0.5B", 4, True))
# What no prediction has: kernels that load with their first launch, after the
# device was opened, and what the driver rounds up to its pieces of 2 MiB: 3 to
# 12 MB on an H200.
MEMORY_SHARE, MEMORY_SLACK = 0.005, 64 << 20


def memory_row(context, label, preset, micro_batch, recompute):
    """The predicted peak, with what was taken once the device was open (by the
    context, by libraries, by others), beside what is taken in the end."""
    done = context.run(step_bench(
        context.build, [bf16("bf16"),
                        *model_sets(preset, 1024, micro_batch, recompute)],
        "--device", "cuda", "--steps", "2"))
    lines = rows_of(done.text)
    row = {"model": label, "problem": None}
    if done.code != 0 or not lines:
        return {**row, "problem": why_ended(done)}
    found = lines[-1]
    memory = found["memory"]
    measured, predicted = memory["used"], memory["predicted_peak"]
    row.update(predicted=predicted, measured=measured,
               difference=predicted - measured, ledger=memory["ledger_peak"],
               categories=found["peak_bytes"])
    allowed = MEMORY_SHARE * measured + MEMORY_SLACK
    if abs(row["difference"]) > allowed:
        row["problem"] = (
            "predicted %.2f GB, measured %.2f GB: %.0f MB apart, %.0f are "
            "allowed" % (predicted / 1e9, measured / 1e9,
                         abs(row["difference"]) / 1e6, allowed / 1e6))
    return row


def memory(context):
    return table_of(context, MEMORY_RUNS, memory_row,
                    lambda row: row["model"])


# ---- Benchmark --------------------------------------------------------------

def read_json(path):
    try:
        with open(path) as file:
            return json.load(file)
    except (OSError, ValueError):
        return None


def bench(context):
    """tools/bench/gpu.py in the time that is left. A target that is missed is
    a figure, not a failure, and so is what was left out for time."""
    path = os.path.join(context.out, "bench.json")
    if os.path.exists(path):
        os.remove(path)
    # PyTorch compiles into a folder of ours: its own may not be writable.
    caches = {name: os.path.join(context.scratch, name)
              for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
    try:
        done = context.run([
            sys.executable, "-B", os.path.join(context.root,
                                               "tools/bench/gpu.py"),
            "--seconds", "%.0f" % max(1, context.left() - 3), *context.bench,
            "--out", context.build, "--json", path], caches)
    finally:
        result = context.partial["bench"] = read_json(path) or {}
    if not result:
        return failed(why_ended(done))
    if result["problems"]:
        return failed("; ".join(result["problems"]), bench=result)
    if done.timed_out:
        return passed(why=how_ended(done), bench=result)
    if done.code != 0:
        return failed(why_ended(done), bench=result)
    return (passed if len(result["left_out"]) < result["wanted"] else skipped)(
        why=result["left_out_text"], bench=result)


PARTS = {"tests": tests,
         "memcheck": lambda context: sanitize(context, "memcheck"),
         "racecheck": lambda context: sanitize(context, "racecheck"),
         "parity": parity, "steps": steps, "stages": stages,
         "offload": offload, "nccl": nccl,
         "memory": memory, "bench": bench}
