"""Shared by the parts of tools/bench/run: processes, medians, printing."""

import ctypes
import json
import os
import signal
import statistics
import subprocess
import time

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(
    os.path.abspath(__file__))))
CONFIG = "configs/gpt2_124m.json"


def say(text=""):
    print(text, flush=True)


def replace(path, text):
    """Atomically: a kill in the middle leaves the file unchanged."""
    with open(path + ".tmp", "w") as file:
        file.write(text)
    os.replace(path + ".tmp", path)


def rows_of(text):
    """The JSON objects among lines; others may begin like one, or be cut."""
    found = []
    for line in text.splitlines():
        if line.startswith("{"):
            try:
                found.append(json.loads(line))
            except ValueError:
                continue
    return found


def both_ends(text):
    """Shortened text: an error's message is in its first or its last words."""
    return text if len(text) <= 400 else text[:150] + " ... " + text[-250:]


def step_bench(out, sets, *options):
    """The command: GPT-2 124M, changed by `sets`."""
    return [os.path.join(out, "bench/step_bench"), CONFIG, *options,
            *(word for one in sets for word in ("--set", one))]


def bf16(dtype):
    """The setting of a dtype."""
    return "bf16.enabled=%s" % ("true" if dtype == "bf16" else "false")


def model_sets(preset, length, micro_batch, recompute):
    """The settings of another model."""
    return ["model.preset=" + preset, "data.sequence_length=%d" % length,
            "train_micro_batch_size_per_gpu=%d" % micro_batch,
            "activation_checkpointing.enabled=%s" % str(recompute).lower()]


def die_with_parent():
    """In a child before it runs: it is killed with its parent, however that
    ends, and does not hold a GPU afterwards."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def attempt(command, cores=None, seconds=None):
    """Runs a program, on `cores` and for `seconds` if they are given. Returns
    the JSON objects that it printed, even if it failed, and why it failed
    (None: it did not)."""
    def prepare():
        die_with_parent()
        if cores:
            os.sched_setaffinity(0, cores)

    try:
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE, preexec_fn=prepare,
                              timeout=seconds)
    except OSError as error:
        return [], str(error)
    except subprocess.TimeoutExpired as error:
        return (rows_of((error.stdout or b"").decode(errors="replace")),
                "stopped after %.0f s" % seconds)
    found = rows_of(done.stdout.decode(errors="replace"))
    if done.returncode == 0:
        return (found, None) if found else ([], "it printed no result")
    why = (found[-1].get("error") if found else None) or done.stderr.decode(
        errors="replace")
    return ([row for row in found if "error" not in row],
            both_ends(why.strip()) or "exit %d" % done.returncode)


def call(command):
    """The same; [], and a line about it, if the program failed."""
    found, why = attempt(command)
    if why is None:
        return found
    say("  failed: %s: %s" % (" ".join(command[:4]), why))
    return []


def take_turns(rounds, what, programs):
    """Runs every command of {label: (command, cores)} `rounds` times,
    alternating; a command that is a text says why there is none. Returns
    {label: [result of each round]} and {label: why it failed}."""
    results, failed = {}, {}
    for number in range(rounds):
        for label, (command, cores) in programs.items():
            if label in failed:
                continue
            start = time.monotonic()
            found, why = ([], command) if isinstance(command, str) else (
                attempt(command, cores))
            if why:
                failed[label] = why
                say("  %s %s failed: %s" % (what, label, why))
                continue
            results.setdefault(label, []).append(found[-1])
            say("  %s %-26s round %d/%d: %7.1f tok/s (%.0f s)" % (
                what, label, number + 1, rounds,
                found[-1]["tokens_per_second"], time.monotonic() - start))
    return results, failed


def summary(rounds):
    """Over all rounds: median speed, its spread, peak memory of a rank."""
    ms = [value for one in rounds for value in one["step_ms"]]
    tokens = (rounds[0].get("ranks", 1) * rounds[0]["micro_batch"] *
              rounds[0]["sequence_length"])
    # A peer reports it for each of its ranks.
    peaks = [one["peak_rss_bytes"] for one in rounds]
    return {"tokens_per_second": 1e3 * tokens / middle(ms),
            "best_tokens_per_second": 1e3 * tokens / min(ms),
            "step_ms": middle(ms),
            "spread": (max(ms) - min(ms)) / middle(ms),
            "peak_rss_bytes": max(
                statistics.mean(peak) if isinstance(peak, list) else peak
                for peak in peaks)}


middle = statistics.median


def table(head, rows):
    """Lines of a table. The first column, and those without a head, are text
    and left-aligned; the last cell of a row with too few is a remark."""
    rows = [head] + [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in rows
                  if i + 1 < len(row) or len(row) == len(head))
              for i in range(len(head))]

    def justified(row):
        for i, (cell, width) in enumerate(zip(row, widths)):
            text = not i or not head[i] or i + 1 == len(row) < len(head)
            yield cell.ljust(width) if text else cell.rjust(width)

    return ["  ".join(justified(row)).rstrip() for row in rows]


def of_all(rounds, what):
    """The median over all steps of all rounds."""
    return middle([value for one in rounds for value in one[what]])


def print_table(head, rows):
    say()
    for line in table(head, rows):
        say(line)


def print_speeds(title, labels, turns, failed):
    """A row for every label in the result of take_turns: speed and memory, or
    why it failed."""
    rows = []
    for label in labels:
        rounds = turns.get(label)
        if label in failed:
            rows.append((label, failed[label]))
        elif rounds:
            whole = summary(rounds)
            rows.append((
                label, "%.1f" % whole["tokens_per_second"],
                "%.1f" % whole["best_tokens_per_second"],
                "%.0f" % whole["step_ms"], "%.0f%%" % (50 * whole["spread"]),
                "%.2f" % (whole["peak_rss_bytes"] / 1e9),
                *("%.1f" % of_all(rounds, key) if key in rounds[0] else ""
                  for key in ("exposed_ms", "host_ms"))))
    print_table((title, "tok/s", "fastest", "step ms", "+-", "GB/rank",
                 "exposed", "host ms"), rows)
    for label in labels:
        for one in turns.get(label, [])[:1]:
            if "peak_bytes" in one:
                say("  %s, peak MB: %s" % (label, ", ".join(
                    "%s %.0f" % (key, value / 1e6) for key, value in
                    one["peak_bytes"].items() if value > 5e6)))
    peers = [one for rounds in turns.values() for one in rounds
             if "libraries_rss_bytes" in one]
    if peers:
        say("  of a peer's GB, %.2f are its libraries (PyTorch %s) before there "
            "is a model" % (middle(
                one["libraries_rss_bytes"] for one in peers) / 1e9,
                            peers[0]["version"]))


def number(value):
    return "%.0f" % value if value >= 1000 else "%.3f" % value


def target_lines(title, targets):
    """A table of [(what, value, wanted or None, higher is better)]."""
    rows = []
    for what, value, wanted, higher in targets:
        row = [what, number(value), "", "", ""]
        if wanted is not None:
            good = value >= wanted if higher else value <= wanted
            row[2:] = ((">= " if higher else "<= ") + number(wanted),
                       "%.3f" % (value / wanted),
                       "ok" if good else "below" if higher else "above")
        rows.append(row)
    return table((title, "measured", "wanted", "ratio", ""), rows)
