"""report.json and report.md of gpu_check."""

import json
import os


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


def tests_lines(row):
    return table(("program", "passed", "failed", "skipped", "not reached"), [
        (one["program"], one["passed"], one["failed"], one["skipped"],
         one["not_reached"]) for one in row.get("programs", [])])


def sanitizer_lines(row):
    if not row.get("rows"):
        return []
    return table(("suite", "passed", "of", "not reached"), [
        (one["suite"], one["passed"], one["of"], one["not_reached"])
        for one in row["rows"]])


def parity_lines(row):
    def worst(one, dtype):
        if dtype not in one:
            return ""
        return "%.1e of %.1e" % (one[dtype]["worst"], one[dtype]["limit"])

    return ["Largest difference of the norm of a row, and what is allowed.",
            ""] + table(("op", "", "fp32", "bf16", "fp16"), [
                (one["op"], one["status"], *(worst(one, dtype) for dtype in
                                             ("fp32", "bf16", "fp16")))
                for one in row.get("ops", [])])


def steps_lines(row):
    return ["Losses of the same steps on the CPU and on the GPU.", ""] + table(
        ("model", "dtype", "largest relative difference", "allowed", ""), [
            (one["model"], one["dtype"],
             "%.2e" % one["worst"] if "worst" in one else "",
             "%.0e" % one["limit"], one["problem"] or "ok")
            for one in row.get("rows", [])])


def stages_lines(row):
    return ["Ranks on one GPU, 20 steps, deterministic.", ""] + table(
        ("ranks", "dtype", "stage", "parameters_hash", "tok/s",
         "peak MB per rank", ""), [
             (one["ranks"], one["dtype"], one["stage"], one.get("hash", ""),
              "%.0f" % one["tokens_per_second"] if "hash" in one else "",
              "%.1f" % (one["peak_bytes"] / 1e6) if "hash" in one else "",
              one["problem"] or "ok") for one in row.get("rows", [])])


def nccl_lines(row):
    return ["The same 20 steps with the backends local and nccl.", ""] + table(
        ("ranks", "dtype", "stage", "parameters_hash",
         "largest relative difference of a loss", ""), [
             (one["ranks"], one["dtype"], one["stage"], one.get("hash", ""),
              "%.2e" % one["worst"] if "worst" in one else "",
              one["problem"] or ("skipped" if "skipped" in one else "ok"))
             for one in row.get("rows", [])])


def memory_lines(row):
    return table(("model", "predicted GB", "measured GB", "of the ledger GB",
                  "predicted - measured MB", ""), [
        (one["model"], *(gigabytes(one[key]) if key in one else ""
                         for key in ("predicted", "measured", "ledger")),
         "%+.0f" % (one["difference"] / 1e6) if "difference" in one else "",
         one["problem"] or "ok") for one in row.get("rows", [])])


def bench_lines(row):
    lines = row.get("bench", {}).get("text", [])
    return ["```", *lines, "```", ""] if lines else []


SECTIONS = {"tests": tests_lines, "memcheck": sanitizer_lines,
            "racecheck": sanitizer_lines, "parity": parity_lines,
            "steps": steps_lines, "stages": stages_lines, "nccl": nccl_lines,
            "memory": memory_lines, "bench": bench_lines}


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
        section = SECTIONS.get(row["part"], lambda row: [])(row)
        if section:
            lines += ["## %s" % row["part"], ""] + section
    return "\n".join(lines)


def replace(path, text):
    """At once: who is killed in the middle leaves the file as it was."""
    with open(path + ".tmp", "w") as file:
        file.write(text)
    os.replace(path + ".tmp", path)


def write(result, out):
    """Both files in the folder `out`."""
    bad = [row["part"] for row in failures(result)]
    replace(os.path.join(out, "report.json"),
            json.dumps({**result, "failed": bad}, indent=1) + "\n")
    replace(os.path.join(out, "report.md"), markdown(result))
