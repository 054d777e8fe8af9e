"""report.json and report.md of gpu_check."""

import json
import os

from common import replace


def failures(result):
    return [row for row in result["parts"] if row["status"] == "failed"]


def cell(value):
    """Text that keeps its column."""
    return " ".join(str(value).replace("|", "/").split())


def table(head, rows):
    lines = ["| %s |" % " | ".join(head), "|%s" % (" --- |" * len(head))]
    lines += ["| %s |" % " | ".join(cell(value) for value in row)
              for row in rows]
    return lines + [""]


def gigabytes(count):
    return "%.2f" % (count / 1e9)


def machine_lines(result):
    device = result["device"]
    lines = ["%s, %s GB, %s multiprocessors, compute capability %s%s" % (
        device["name"], gigabytes(device["memory_bytes"]),
        device["multiprocessors"], device["compute_capability"],
        "; %d of them" % device["gpus"] if device["gpus"] > 1 else ""), ""]
    rows = [("driver", device["driver"], "CUDA " + device["driver_cuda"])]
    for name, found in result["libraries"].items():
        rows.append((name, found["version"] or "?",
                     found["path"] or "not found: left to the system"))
    return lines + table(("library", "version", "where"), rows)


def parts_lines(result):
    return table(("part", "", "seconds", "limit", ""), [
        (row["part"], row["status"], row["seconds"], row["limit_s"],
         row.get("why", "")) for row in result["parts"]])


def verdict(row):
    return row.get("problem") or ("skipped" if "skipped" in row else "ok")


def parity(dtype):
    return dtype, lambda row: "{worst:.1e} of {limit:.1e}".format(**row[dtype])


# Of each part: a line about its table, the key of its rows, and the columns:
# a key, or (head, key:format or function of a row).
SUITES = ("", "rows", ("suite", "passed", "of", ("not reached", "not_reached")))
TABLES = {
    "tests": ("", "programs", ("program", "passed", "failed", "skipped",
                               ("not reached", "not_reached"))),
    "memcheck": SUITES, "racecheck": SUITES,
    "parity": ("Largest difference of the norm of a row, and what is allowed.",
               "ops", ("op", ("", "status"), parity("fp32"), parity("bf16"),
                       parity("fp16"))),
    "steps": ("Losses of the same steps on the CPU and on the GPU.", "rows", (
        "model", "dtype", ("largest relative difference", "worst:.2e"),
        ("allowed", "limit:.0e"), ("", verdict))),
    "stages": ("Ranks on one GPU, 20 steps, deterministic.", "rows", (
        "ranks", "dtype", "stage", ("parameters_hash", "hash"),
        ("tok/s", "tokens_per_second:.0f"),
        ("peak MB per rank", lambda row: "%.1f" % (row["peak_bytes"] / 1e6)),
        ("", verdict))),
    "offload": ("2 ranks on one GPU at stage 3, bf16, 20 steps.", "rows", (
        "offload", ("parameters_hash", "hash"),
        ("tok/s", "tokens_per_second:.0f"),
        ("peak MB per rank", lambda row: "%.1f" % (row["peak_bytes"] / 1e6)),
        ("", verdict))),
    "nccl": ("The same 20 steps with the backends local and nccl.", "rows", (
        "ranks", "dtype", "stage", ("parameters_hash", "hash"),
        ("largest relative difference of a loss", "worst:.2e"), ("", verdict))),
    "memory": ("", "rows", (
        "model", ("predicted GB", lambda row: gigabytes(row["predicted"])),
        ("measured GB", lambda row: gigabytes(row["measured"])),
        ("of the ledger GB", lambda row: gigabytes(row["ledger"])),
        ("predicted - measured MB",
         lambda row: "%+.0f" % (row["difference"] / 1e6)), ("", verdict))),
}


def cell_of(column, row):
    """Nothing where the row lacks it."""
    try:
        if callable(column):
            return column(row)
        key, _, form = column.partition(":")
        return format(row[key], form)
    except KeyError:
        return ""


def part_lines(row):
    if row["part"] not in TABLES:
        return bench_lines(row)
    intro, key, columns = TABLES[row["part"]]
    columns = [(one, one) if isinstance(one, str) else one for one in columns]
    if not row.get(key):
        return []
    return ([intro, ""] if intro else []) + table(
        [head for head, _ in columns],
        [[cell_of(column, one) for _, column in columns] for one in row[key]])


def bench_lines(row):
    lines = row.get("bench", {}).get("text", [])
    return ["```", *lines, "```", ""] if lines else []


def markdown(result):
    bad = failures(result)
    lines = ["# gpu_check, %s" % result["date"], "",
             "%s after %.0f s.%s" % (
                 "Failed: " + ", ".join(row["part"] for row in bad)
                 if bad else "Nothing failed", result["seconds"],
                 " Did not run: %s." % ", ".join(result["to_come"])
                 if result["to_come"] else ""), ""]
    lines += machine_lines(result) + parts_lines(result)
    for row in result["parts"]:
        section = part_lines(row)
        if section:
            lines += ["## %s" % row["part"], ""] + section
    return "\n".join(lines)


def write(result, out):
    """Both files in the folder `out`."""
    bad = [row["part"] for row in failures(result)]
    replace(os.path.join(out, "report.json"),
            json.dumps({**result, "failed": bad}, indent=1) + "\n")
    replace(os.path.join(out, "report.md"), markdown(result))
