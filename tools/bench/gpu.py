#!/usr/bin/env python3
"""Measures training steps on one GPU, beside the machine and beside PyTorch.

  tools/bench/gpu.py [--models NAME,...] [--seconds N] [--sweep] [--no-peers]
                     [--out DIR] [--json FILE]

Tokens/s, model FLOPs utilization, memory and the time of each category of
kernels, in bf16 with fp32 master weights, AdamW and clipping at 1; a step is one
micro-batch unless the row says otherwise. MFU by the
PaLM convention: (6 N + 12 L q s) FLOP per token, N without embedding tables
and with a tied head counted once, against NVIDIA's dense peak of this GPU (none
where the device's table has no figure for it) and against the rate of a large
product measured in this run. Where a micro-batch does not fit, the next setting
of the model is tried, and the row says which one ran; the last one of 7B, for
GPUs of 80 GB, has no moments and is compared with no target.

PyTorch (torch.compile, fused AdamW, SDPA) trains the same model in the same run
where it is installed (GPU_CHECK_PYTHON or python3): with our micro-batch, or
half of it until it fits; not compiled where it cannot compile, which wants a C
compiler, and then without a target. --seconds leaves out what does not fit.
FILE is rewritten after every row. Exit status 1 where something failed; neither
a missed target nor a model for which the GPU is too small did.
"""

import argparse
import itertools
import json
import os
import sys
import time

sys.dont_write_bytecode = True

from common import (ROOT, attempt, bf16, middle, model_sets, replace, say,
                    step_bench, table, target_lines)

PEER = "tools/bench/peers/pytorch.py"
# Of one program, in seconds: more is a hang. Compiling is what takes PyTorch
# minutes.
LONGEST, LONGEST_PEER = 150, 300
# What an error of either ends with or has, where the GPU is too small.
OUT_OF_MEMORY = "out of memory"
# What the project promises, of one H200.
SPEEDUP = 1.15
STAGE_3 = 1.02
ADAMW = 0.9
MFU = 0.58

BF16_GRADIENTS = "data_types.grad_accum_dtype=bf16"
SELECTIVE = "activation_checkpointing.granularity=selective"
# As llmq's figures, whose steps are 524,288 tokens: the update is not all of
# them.
ACCUMULATED = "gradient_accumulation_steps=4"
# Where memory is ample: 5 % of GPT-2's step on an H200.
KEEP_ALL = "activation_checkpointing.keep_all=true"
# 6 bytes per parameter and not 14, with gradients in bf16.
OTHER_OPTIMIZER = "optimizer="
SGD = OTHER_OPTIMIZER + '{"type":"SGD","params":{"lr":6e-4}}'


def model(name, preset, length, *settings, wanted=None, published=None,
          peer=False, mfu=False):
    """`settings`: micro-batches, or (micro-batch, recompute, more keys), the
    fastest first. `peer`: PyTorch trains it too."""
    return {"name": name, "preset": preset, "length": length,
            "settings": [(one, False, ()) if isinstance(one, int) else one
                         for one in settings],
            "wanted": wanted, "published": published, "peer": peer, "mfu": mfu}


def kept(micro_batch, *more):
    return micro_batch, False, more


def recomputed(micro_batch, *more):
    return micro_batch, True, more


# In the order in which they are measured: behind the first one those of which
# an MFU is promised. Published: llm.c and llmq on an H100, tokens/s.
MODELS = (
    model("GPT-2 124M", "gpt2", 1024, kept(64, KEEP_ALL), 64, 32, 16,
          wanted=520e3, published="llm.c 458k", peer=True),
    model("Qwen2.5 3B", "Qwen2.5-3B", 1024, 16, 8, 4, recomputed(16),
          peer=True, mfu=True),
    model("Qwen2.5 3B, 4 micro-batches", "Qwen2.5-3B", 1024,
          kept(16, ACCUMULATED), kept(8, ACCUMULATED),
          recomputed(16, ACCUMULATED),
          wanted=33e3, published="llmq 30.9k", mfu=True),
    model("Qwen2.5 7B, 4 micro-batches", "Qwen2.5-7B", 1024,
          kept(8, BF16_GRADIENTS, ACCUMULATED),
          recomputed(8, BF16_GRADIENTS, SELECTIVE, ACCUMULATED),
          recomputed(8, BF16_GRADIENTS, ACCUMULATED),
          recomputed(1, BF16_GRADIENTS, ACCUMULATED),
          recomputed(8, BF16_GRADIENTS, SGD, ACCUMULATED),
          wanted=14e3, published="llmq 13.8k", mfu=True),
    model("GPT-2 1558M", "gpt2-xl", 1024, 16, 8, recomputed(16),
          wanted=52e3, published="llm.c 48.5k", peer=True),
    model("Qwen2.5 0.5B", "Qwen2.5-0.5B", 1024, kept(32, KEEP_ALL), 32, 16,
          recomputed(16),
          wanted=165e3, published="llmq 149k", peer=True),
    model("Qwen2.5 1.5B", "Qwen2.5-1.5B", 1024, kept(16, KEEP_ALL), 16, 8,
          recomputed(16),
          wanted=65e3, published="llmq 58.8k", peer=True),
    model("Llama-3.2 1B", "Llama-3.2-1B", 4096, 4, 2, recomputed(4), peer=True),
    model("Qwen2.5 0.5B", "Qwen2.5-0.5B", 4096, 8, 4, recomputed(4), peer=True),
    model("Qwen2.5 1.5B", "Qwen2.5-1.5B", 4096, 4, 2, recomputed(4), peer=True),
    model("Qwen2.5 3B", "Qwen2.5-3B", 4096, 4, 2, 1, recomputed(4), mfu=True),
    model("Qwen2.5 7B", "Qwen2.5-7B", 4096, kept(2, BF16_GRADIENTS),
          recomputed(2, BF16_GRADIENTS, SELECTIVE),
          recomputed(2, BF16_GRADIENTS), recomputed(1, BF16_GRADIENTS),
          recomputed(2, BF16_GRADIENTS, SGD), mfu=True),
)

# First words of ops in the profile.
CATEGORIES = (
    ("loss", ("linear_cross_entropy",)),
    ("products", ("linear",)),
    ("attention", ("attention",)),
    ("norms", ("layernorm", "rmsnorm")),
    ("activations", ("gelu", "swiglu", "rotary", "dropout", "add")),
    ("embedding", ("embedding",)),
    ("optimizer", ("adamw", "sum_squares", "sum", "clip", "count_non_finite")),
)


def category(op):
    for name, starts in CATEGORIES:
        if op.startswith(starts):
            return name
    return "other"


def one_line(why):
    return " ".join(why.split())


def label(one):
    return "%s, T %d" % (one["name"], one["length"])


# ---- Measuring --------------------------------------------------------------

class Clock:
    def __init__(self, seconds):
        self.until = time.monotonic() + seconds

    def left(self):
        return self.until - time.monotonic()

    def attempt(self, command, longest=LONGEST):
        """See attempt; stopped when the time is over."""
        return attempt(command, seconds=max(1, min(self.left(), longest)))


def command_of(args, one, setting, sets=()):
    micro_batch, recompute, more = setting
    # A step is worth the seconds that it takes to choose its algorithms.
    return step_bench(
        args.out, [bf16("bf16"), *model_sets(one["preset"], one["length"],
                                             micro_batch, recompute),
                   "device.time_algorithms=true", *more, *sets],
        "--device", "cuda", "--steps", str(
            max(2, args.steps // 4) if ACCUMULATED in more else args.steps),
        "--warmup", "1" if ACCUMULATED in more else "3")


def setting_text(setting):
    micro_batch, recompute, more = setting
    return "micro-batch %d%s%s" % (
        micro_batch, ", recomputed" if recompute else "",
        "".join(", " + key for key in more))


def derive(found, product_rate):
    """What follows from a result of step_bench."""
    tokens = (found["micro_batch"] * found["accumulation_steps"] *
              found["sequence_length"])
    rate = 1e3 * tokens / middle(found["step_ms"])
    flops = rate * found["flops_per_token"]
    peak = found["peak_flops_bf16"]
    times = {}
    for op in found["ops"]:
        name = category(op["op"])
        times[name] = times.get(name, 0) + op["ms"]
    return {"tokens_per_second": rate,
            "step_ms": middle(found["step_ms"]),
            "micro_batch": found["micro_batch"],
            "mfu": flops / peak if peak else None,
            "mfu_of_measured": flops / product_rate if product_rate else None,
            "peak_bytes": found["peak_bytes"]["total"],
            "device_bytes": found["memory"]["used"],
            "category_ms": times, "host_ms": middle(found["host_ms"])}


def measure(args, one, setting, product_rate, clock):
    """The row of one setting; a "problem" where it did not run."""
    row = {"model": label(one), "setting": setting_text(setting)}
    found, why = clock.attempt(command_of(args, one, setting))
    if why:
        return {**row, "problem": one_line(why)}
    return {**row, "problem": None, "run": found[-1],
            **derive(found[-1], product_rate)}


def measure_model(args, one, product_rate, clock):
    """The first setting that runs; a row with "problem" where none does, and
    "too_small" where all that failed was the GPU's memory."""
    known = {key: one[key] for key in ("preset", "length", "wanted",
                                       "published")}
    left_out = []
    for setting in one["settings"]:
        row = {**known, "left_out": left_out,
               **measure(args, one, setting, product_rate, clock)}
        if row["problem"] is None:
            if any(key.startswith(OTHER_OPTIMIZER) for key in setting[2]):
                row["wanted"] = None
            return row, setting
        left_out.append("%s: %s" % (row["setting"], row["problem"]))
        if clock.left() <= 0:
            break
    row["too_small"] = all(OUT_OF_MEMORY in why for why in left_out)
    return row, None


def measure_stages(args, one, setting, clock):
    """A step at stage 3 over one at stage 0, in turns."""
    ms = {0: [], 3: []}
    for _ in range(2):
        for stage in ms:
            found, why = clock.attempt(command_of(
                args, one, setting, ["zero_optimization.stage=%d" % stage]))
            if why:
                return {"problem": "stage %d: %s" % (stage, one_line(why))}
            ms[stage] += found[-1]["step_ms"]
    return {"model": label(one), "problem": None,
            "stage_0_ms": middle(ms[0]),
            "stage_3_ms": middle(ms[3]),
            "ratio": middle(ms[3]) / middle(ms[0])}


def measure_peer(args, one, batch, clock):
    """With `batch` sequences, or half of them until that fits; without
    torch.compile where it fails."""
    libraries = os.environ.get("GPU_CHECK_PYTHON_LIBRARIES")
    mode, uncompiled = "compile", None
    while True:
        found, why = clock.attempt([
            *([] if libraries is None else
              ["env", "LD_LIBRARY_PATH=" + libraries]),
            args.python, "-B", PEER, "--device", "cuda", "--dtype", "bf16",
            "--preset", one["preset"], "--mode", mode, "--micro-batch",
            str(batch), "--sequence-length", str(one["length"]), "--steps",
            str(args.steps), "--warmup", "4"],
            longest=LONGEST_PEER)
        if why is None:
            return {"problem": None, "uncompiled": uncompiled, **found[-1]}
        if clock.left() <= 0:
            return {"problem": "out of time"}
        if OUT_OF_MEMORY in why and batch > 1:
            batch //= 2
        elif mode == "compile":
            mode, uncompiled = "eager", one_line(why)
        else:
            return {"problem": uncompiled or one_line(why)}


def rate_of(rows, op, dtype=None):
    for row in rows:
        if row["op"] == op and dtype in (None, row["dtype"]):
            return row["rate"] * 1e9
    return None


def sweep(args, one, clock):
    """Rows for micro-batches, and rows of logits at a time, around the usual
    ones."""
    for micro_batch, chunk in itertools.product((4, 8, 16, 32, 64, 128),
                                                (4096, 8192, 16384)):
        if clock.left() < 10:
            break
        setting = (micro_batch, False, ("device.loss_chunk_rows=%d" % chunk,))
        yield measure(args, one, setting, None, clock)


# ---- What it says -----------------------------------------------------------

def percent(value):
    return "%.1f%%" % (100 * value) if value else ""


def model_lines(rows):
    cells = []
    for row in rows:
        if row["problem"]:
            cells.append((row["model"], row["problem"]))
            continue
        peer = row.get("peer") or {}
        speedup = row.get("over_peer")
        cells.append((
            row["model"], "%.0f" % row["tokens_per_second"],
            "%.1f" % row["step_ms"], percent(row["mfu"]),
            percent(row["mfu_of_measured"]),
            "%.2f" % (row["device_bytes"] / 1e9),
            "%.2fx" % speedup if speedup else
            "failed" if peer.get("problem") else "-", row["setting"]))
        for tried in row["left_out"]:
            cells.append(("    did not fit or failed: " + tried,))
        if peer:
            cells.append(("    PyTorch: %s" % (peer["problem"] or (
                "%.0f tok/s, micro-batch %d, %.2f GB%s" % (
                    peer["tokens_per_second"], peer["micro_batch"],
                    peer["peak_bytes"] / 1e9,
                    ", not compiled: " + peer["uncompiled"]
                    if peer["uncompiled"] else ""))),))
    return table(("", "tok/s", "step ms", "MFU", "of meas.", "peak GB",
                  "PyTorch", ""), cells)


def category_lines(rows):
    names = [name for name, _ in CATEGORIES] + ["other"]
    return table(("ms per step", *names), [
        (row["model"], *("%.2f" % row["category_ms"].get(name, 0)
                         for name in names))
        for row in rows if not row["problem"]])


def device_lines(rows):
    copy = rate_of(rows, "copy")
    return table(("op", "", "", "rate", "of the copy", ""), [
        (row["op"], row["shape"], row["dtype"], "%.1f" % row["rate"],
         percent(row["rate"] * 1e9 / copy)
         if row["unit"] == "GB/s" and copy else "", row["unit"])
        for row in rows])


def targets(result):
    """[(what, value, wanted, higher is better)]"""
    found = []
    for row, one in ((row, one) for row in result["models"] for one in MODELS
                     if label(one) == row["model"]):
        if row["problem"]:
            continue
        if row["wanted"]:
            found.append(("%s tok/s (published: %s)" % (
                row["model"], row["published"]), row["tokens_per_second"],
                row["wanted"], True))
        if one["mfu"] and row["mfu"] and OTHER_OPTIMIZER not in row["setting"]:
            found.append((row["model"] + " MFU", row["mfu"], MFU, True))
        if row.get("over_peer") and not row["peer"]["uncompiled"]:
            found.append(("%s / PyTorch compiled, micro-batch %d / %d" % (
                row["model"], row["micro_batch"], row["peer"]["micro_batch"]),
                          row["over_peer"], SPEEDUP, True))
    copy = rate_of(result["device"], "copy")
    for row in result["device"]:
        if row["op"].startswith("adamw") and copy:
            found.append((row["op"] + " / copy", row["rate"] * 1e9 / copy,
                          ADAMW, True))
    if result.get("stages", {}).get("ratio"):
        found.append(("stage 3 step / stage 0, 1 rank",
                      result["stages"]["ratio"], STAGE_3, False))
    return found


def sweep_text(row):
    return "%s, %s: %s" % (
        row["model"], row["setting"], row["problem"] or
        "%.0f tok/s" % row["tokens_per_second"])


def peak_text(rows):
    """Against which peak the MFU is."""
    for row in rows:
        if not row["problem"]:
            peak, name = row["run"]["peak_flops_bf16"], row["run"]["device"]
            return ("MFU: PaLM convention, of %.0f TFLOP/s dense (%s)" % (
                peak / 1e12, name) if peak else
                    "MFU: none, the peak of %s is not in the table" % name)
    return "MFU: PaLM convention"


def text_of(result):
    lines = ["bf16, fp32 master weights, AdamW unless the row names another "
             "optimizer, clipping at 1; one GPU",
             peak_text(result["models"]) + (
                 "; measured product: %.0f TFLOP/s" % (
                     result["product_rate"] / 1e12)
                 if result["product_rate"] else ""), ""]
    for make, rows in ((model_lines, result["models"]),
                       (category_lines, result["models"]),
                       (device_lines, result["device"])):
        if rows:
            lines += [*make(rows), ""]
    for row in result.get("sweep", []):
        lines.append(sweep_text(row))
    found = targets(result)
    if found:
        lines += target_lines("target, of one H200", found)
    lines += ["failed: " + problem for problem in result["problems"]]
    lines += result["skipped"]
    if result["left_out_text"]:
        lines.append(result["left_out_text"])
    return lines


# ---- Main -------------------------------------------------------------------

class Run:
    """Measures in the order of importance and keeps what was found."""

    def __init__(self, args):
        self.args = args
        self.clock = Clock(args.seconds)
        # "problems": what ran and failed; a target that is missed is none.
        # "left_out": of what is "wanted", for time.
        self.result = {"device": [], "models": [], "skipped": [],
                       "problems": [], "product_rate": None, "wanted": 0,
                       "left_out": []}

    def save(self):
        left_out = self.result["left_out"]
        self.result["left_out_text"] = "%d of %d left out for time: %s" % (
            len(left_out), self.result["wanted"],
            "; ".join(left_out)) if left_out else ""
        self.result["text"] = text_of(self.result)
        if self.args.json:
            replace(self.args.json, json.dumps(self.result, indent=1))

    def wants(self, what, seconds):
        self.result["wanted"] += 1
        if self.clock.left() >= seconds:
            return True
        self.result["left_out"].append(what)
        return False

    def fault(self, what, why):
        """What was stopped because all time is over did not fail."""
        if self.clock.left() > 0:
            self.result["problems"].append("%s: %s" % (what, why))
        else:
            self.result["left_out"].append(what)

    def device(self):
        if not self.wants("copy, products, AdamW alone", 10):
            return
        rows, why = self.clock.attempt([
            os.path.join(self.args.out, "bench/op_bench"), "--device",
            "cuda", "--seconds", "0.1"])
        if why:
            self.fault("op_bench", why)
        self.result["device"] = rows
        self.result["product_rate"] = rate_of(rows, "product", "bf16")
        self.save()

    def one_model(self, one):
        """Ours: (row, setting that fits), or None without time for it."""
        if not self.wants(label(one), 15):
            return None
        row, setting = measure_model(
            self.args, one, self.result["product_rate"], self.clock)
        self.result["models"].append(row)
        if row["problem"] and row["too_small"]:
            self.result["skipped"].append(
                "too large for this GPU: " + row["model"])
        elif row["problem"]:
            self.fault(row["model"], row["problem"])
        say("  %s: %s" % (row["model"], row["problem"] or
                          "%.0f tok/s" % row["tokens_per_second"]))
        self.save()
        return row, setting

    def stages(self, one, setting):
        if not self.wants("stage 3 beside stage 0", 30):
            return
        found = measure_stages(self.args, one, setting, self.clock)
        self.result["stages"] = found
        if found["problem"]:
            self.fault("stage 3 beside stage 0", found["problem"])
        self.save()

    def peer(self, one, row):
        if not one["peer"] or not self.args.python:
            return
        what = "PyTorch on " + label(one)
        # Compiling alone takes most of a minute.
        if not self.wants(what, 90):
            return
        row["peer"] = measure_peer(self.args, one, row["micro_batch"],
                                   self.clock)
        if not row["peer"]["problem"]:
            row["over_peer"] = (row["tokens_per_second"] /
                                row["peer"]["tokens_per_second"])
        elif self.clock.left() <= 0:
            self.result["left_out"].append(what)
        self.save()

    def run(self):
        """The first model at both stages and with its peer, then all of ours,
        then the other peers."""
        self.device()
        chosen = [one for one in MODELS if not self.args.models or
                  one["preset"] in self.args.models]
        done = []
        for one in chosen:
            found = self.one_model(one)
            if found is None or found[1] is None:
                continue
            done.append((one, *found))
            if len(done) == 1:
                self.stages(one, found[1])
                self.peer(one, found[0])
        for one, row, _ in done[1:]:
            self.peer(one, row)
        if self.args.sweep:
            self.result["sweep"] = []
            for one in chosen:
                for row in sweep(self.args, one, self.clock):
                    self.result["sweep"].append(row)
                    say("  " + sweep_text(row))
                    self.save()
        self.save()


def parse(arguments=None):
    parser = argparse.ArgumentParser(
        prog="tools/bench/gpu.py", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="",
                        help="presets, with commas (all): %s" % ", ".join(
                            dict.fromkeys(one["preset"] for one in MODELS)))
    parser.add_argument("--seconds", type=float, default=3600,
                        help="what does not fit is left out (3600)")
    parser.add_argument("--steps", type=int, default=8,
                        help="measured of every run (8)")
    parser.add_argument("--sweep", action="store_true",
                        help="also micro-batches and chunks of the loss")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--out", default="out", help="the build (out)")
    parser.add_argument("--json", help="gets all figures")
    args = parser.parse_args(arguments)
    args.out = os.path.join(ROOT, args.out)
    args.models = [name for name in args.models.split(",") if name]
    known = {one["preset"] for one in MODELS}
    for name in args.models:
        if name not in known:
            parser.error("--models: there is no %r; there are %s" % (
                name, ", ".join(sorted(known))))
    args.python = None if args.no_peers else os.environ.get(
        "GPU_CHECK_PYTHON", "python3")
    return args


def main():
    args = parse()
    run = Run(args)
    run.run()
    for line in run.result["text"]:
        say(line)
    return 1 if run.result["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
