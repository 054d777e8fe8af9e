"""Proves the CUDA backend on a machine with an NVIDIA GPU, part by part.

  tools/gpu_check [--parts A,B] [--limit PART=SECONDS]... [--seconds N]
                  [--out DIR]
  tools/gpu_check --bundle FILE [--from DIR]

Goes on after a part that fails, and writes DIR/report.json and DIR/report.md.
Exit status: 0, 1 where a part failed or no time was left for one, 2 for a wrong option, 77 (and one line)
where there is no GPU, 130 after Ctrl-C. Needs no network, root or packages;
CUDA's shared libraries are taken from LD_LIBRARY_PATH, a PyTorch installation
or the toolkit.

--bundle, on a machine with nvcc after `ninja check-build`, packs all that is needed into
one FILE (.tar.xz) of at most 50 MB; unpacked anywhere, its tools/gpu_check
runs on what it holds.
"""

import argparse
import math
import os
import sys
import tempfile
import time

import bundle
import machine
import parts
import report

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(
    os.path.abspath(__file__))))
NO_GPU, INTERRUPTED = 77, 130

# Seconds of each part, in the order in which they run; together they fit into
# the nine minutes of --seconds. What a part leaves over, the last one has.
LIMITS = {"tests": 90, "memcheck": 50, "racecheck": 40, "parity": 70,
          "steps": 60, "stages": 90, "nccl": 45, "memory": 30, "bench": 540}
SECONDS = 540
NO_TIME = "no time was left for it"
# Kept back for writing the report.
RESERVE = 5


def say(text):
    print(text, flush=True)


def parse(arguments):
    parser = argparse.ArgumentParser(
        prog="tools/gpu_check", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(LIMITS), metavar="A,B",
                        help="which: %s (all)" % ", ".join(LIMITS))
    parser.add_argument("--limit", action="append", default=[],
                        metavar="PART=SECONDS",
                        help="after which a part is stopped: %s" % ", ".join(
                            "%s %d" % limit for limit in LIMITS.items()))
    parser.add_argument("--seconds", type=float, default=SECONDS,
                        help="for all of it (%d)" % SECONDS)
    parser.add_argument("--out", metavar="DIR", default=None,
                        help="gets the report and the logs (out/gpu_check)")
    parser.add_argument("--bundle", metavar="FILE",
                        help="make a bundle and run nothing")
    parser.add_argument("--from", dest="build", metavar="DIR", default="out",
                        help="the build that is bundled (out)")
    options = parser.parse_args(arguments)
    options.parts = [name for name in options.parts.split(",") if name]
    if not options.parts:
        parser.error("--parts: none is named; there are %s" % ", ".join(LIMITS))
    for name in options.parts:
        if name not in LIMITS:
            parser.error("--parts: there is no %r; there are %s" % (
                name, ", ".join(LIMITS)))
    options.limits = dict(LIMITS)
    for text in options.limit:
        name, _, seconds = text.partition("=")
        try:
            options.limits[name] = float(seconds)
        except ValueError:
            name = None
        if name not in LIMITS:
            parser.error("--limit: %r is not PART=SECONDS of a part" % text)
    for name, seconds in (*options.limits.items(), ("", options.seconds)):
        if not 0 < seconds < math.inf:
            parser.error("%s: %g is no time" % (
                "--limit " + name if name else "--seconds", seconds))
    return options


def run_part(name, context, limit, until, all_parts):
    """One row of the report."""
    start = time.monotonic()
    limit = min(limit, until - start)
    if limit < 1:
        return {"part": name, "status": "skipped", "seconds": 0,
                "limit_s": 0, "why": NO_TIME}
    context.begin(name, start + limit)
    try:
        row = all_parts[name](context)
    except KeyboardInterrupt:
        row = parts.failed("interrupted", interrupted=True)
    except Exception as error:  # a part's own fault must not hide the others
        row = parts.failed("%s: %s" % (type(error).__name__, error))
    return {"part": name, "seconds": round(time.monotonic() - start, 1),
            "limit_s": round(limit, 1), **row}


def check(options, here, all_parts, root):
    """Runs the parts; returns the report."""
    start = time.monotonic()
    out = os.path.abspath(options.out or os.path.join(root, "out/gpu_check"))
    os.makedirs(out, exist_ok=True)
    result = {"date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
              "seconds_allowed": options.seconds, "device": here.info(),
              "libraries": here.libraries(), "parts": []}
    until = start + options.seconds - RESERVE
    with tempfile.TemporaryDirectory(prefix="gpu_check.") as scratch:
        version = result["libraries"]["libnccl.so.2"]["version"]
        context = parts.Context(root, out, scratch, here.environment(),
                                result["device"]["gpus"],
                                int(version) if version else None)
        for name in options.parts:
            say("gpu_check: %s" % name)
            row = run_part(name, context, options.limits[name], until,
                           all_parts)
            result["parts"].append(row)
            result["seconds"] = round(time.monotonic() - start, 1)
            # After every part, so that a machine that is taken away leaves
            # what was found.
            report.write(result, out)
            say("gpu_check: %s %s after %.0f s%s" % (
                name, row["status"], row["seconds"],
                ": " + row["why"] if row.get("why") else ""))
            if row.get("interrupted"):
                break
    say("gpu_check: report in %s" % os.path.join(out, "report.md"))
    return result


def main(arguments, here=None, all_parts=parts.PARTS, root=ROOT):
    options = parse(arguments)
    if options.bundle:
        try:
            say(bundle.make(root, options.build, options.bundle))
        except bundle.Error as error:
            sys.exit("gpu_check: %s" % error)
        return 0
    here = here or machine.Machine(root)
    problem = here.problem()
    if problem:
        say("gpu_check: no NVIDIA GPU here (%s); skipped: %s" % (
            problem, ", ".join(options.parts)))
        return NO_GPU
    result = check(options, here, all_parts, root)
    if result["parts"] and result["parts"][-1].get("interrupted"):
        return INTERRUPTED
    unrun = [p["part"] for p in result["parts"] if p.get("why") == NO_TIME]
    if unrun:
        say("gpu_check: not run, for no time was left: %s; run them with "
            "--parts, or raise --seconds" % ", ".join(unrun))
    return 1 if report.failures(result) or unrun else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
