"""Proves the CUDA backend on a machine with an NVIDIA GPU, part by part.

  tools/gpu_check [--parts A,B] [--limit PART=SECONDS]... [--seconds N]
                  [--bench OPTIONS] [--out DIR]
  tools/gpu_check --bundle FILE [--from DIR]

Goes on after a part that fails. DIR gets report.json and report.md, written
anew after every part, log.txt with what every program printed, and bench.json,
written anew after every row of the benchmark. Exit status: 0; 1 where a part
failed or no time was left for one; 2 for a wrong option, or a bundle that can
not be made; 77 (and one line) where there is no GPU; 130 after Ctrl-C, SIGTERM
or SIGHUP. Needs no network, root or packages; CUDA's shared libraries are taken
from LD_LIBRARY_PATH, a PyTorch installation or the toolkit. Without a GPU, a
build that has tests for the emulated one runs those first (status 1 where they
fail); a bundle has none.

Nine minutes do not suffice for all models or all tests under compute-sanitizer.
Three calls give each its time, with a DIR for each report:

  tools/gpu_check --parts tests,parity,steps,stages,offload,nccl,memory \\
                  --out DIR
  tools/gpu_check --parts bench --out DIR
  tools/gpu_check --parts memcheck,racecheck --limit memcheck=260 \\
                  --limit racecheck=260 --out DIR

--bundle, on a machine with nvcc after `ninja check-build`, packs all that is
needed into one FILE (.tar.xz) of at most 50 MB; unpacked anywhere, its
tools/gpu_check runs on what it holds.
"""

import argparse
import contextlib
import math
import os
import shlex
import signal
import sys
import tempfile
import time

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(
    os.path.abspath(__file__))))
# Before installed packages, which may have a gpu or a common.
sys.path.insert(1, os.path.join(ROOT, "tools/bench"))

import bundle
import gpu
import machine
import parts
import programs
import report

WRONG, NO_GPU, INTERRUPTED = 2, 77, 130

# Seconds of each part, in the order in which they run; together they fit into
# the nine minutes of --seconds. What they leave over, the last one has.
LIMITS = {"tests": 60, "memcheck": 50, "racecheck": 40, "parity": 80,
          "steps": 40, "stages": 60, "offload": 30, "nccl": 90, "memory": 20,
          "bench": 3600}
SECONDS = 540
NO_TIME = "no time was left for it"
# Kept back for writing the report.
RESERVE = 5


def say(text):
    print(text, flush=True)


class Parser(argparse.ArgumentParser):
    def error(self, message):
        self.exit(WRONG, "gpu_check: %s; see tools/gpu_check --help\n" %
                  message)


def parse(arguments):
    parser = Parser(
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
                        help="gets the report and the log (out/gpu_check)")
    parser.add_argument("--bench", metavar="OPTIONS", default="",
                        help="of tools/bench/gpu.py, as one word: "
                        "--bench='--models gpt2 --sweep'")
    parser.add_argument("--bundle", metavar="FILE",
                        help="make a bundle and run nothing")
    parser.add_argument("--from", dest="build", metavar="DIR",
                        help="the build that is bundled (out)")
    options = parser.parse_args(arguments)
    if options.build is not None and options.bundle is None:
        parser.error("--from: is the build of a bundle; it goes with --bundle "
                     "FILE")
    try:
        options.bench = shlex.split(options.bench)
    except ValueError as error:
        parser.error("--bench: %s" % error)
    gpu.parse(options.bench)
    options.parts = [name for name in options.parts.split(",") if name]
    if not options.parts:
        parser.error("--parts: no part is named; the parts are %s" %
                     ", ".join(LIMITS))
    options.parts = list(dict.fromkeys(options.parts))
    for name in options.parts:
        if name not in LIMITS:
            parser.error("--parts: there is no part %r; the parts are %s" % (
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
            parser.error("%s: %g is not a valid time" % (
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
        row = programs.failed("interrupted", interrupted=True,
                              **context.partial)
    except Exception as error:  # a part's own fault must not hide the others
        row = programs.failed("%s: %s" % (type(error).__name__, error),
                              **context.partial)
    return {"part": name, "seconds": round(time.monotonic() - start, 1),
            "limit_s": round(limit, 1), **row}


@contextlib.contextmanager
def signals_as_ctrl_c():
    """Ends the running part and writes the report on SIGTERM, which a machine
    sends before it is taken back."""
    kept = {one: signal.signal(one, signal.default_int_handler)
            for one in (signal.SIGTERM, signal.SIGHUP)
            if signal.getsignal(one) != signal.SIG_IGN}  # as nohup wants it
    try:
        yield
    finally:
        for one, handler in kept.items():
            signal.signal(one, handler)


def check(options, here, all_parts, root, out):
    """Runs the parts; returns the report."""
    start = time.monotonic()
    result = {"date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
              "seconds_allowed": options.seconds, "device": here.info(),
              "libraries": here.libraries(), "parts": [],
              "to_come": list(options.parts), "seconds": 0}
    report.write(result, out)
    until = start + options.seconds - RESERVE
    with tempfile.TemporaryDirectory(prefix="gpu_check.") as scratch:
        nccl = result["libraries"]["libnccl.so.2"]["version"]
        context = programs.Context(root, out, scratch, here.environment(),
                                   result["device"]["gpus"],
                                   int(nccl) if str(nccl).isdigit() else None,
                                   options.bench)
        for name in options.parts:
            say("gpu_check: %s" % name)
            row = run_part(name, context, options.limits[name], until,
                           all_parts)
            result["parts"].append(row)
            result["to_come"].remove(name)
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


def make_bundle(options, root):
    try:
        say(bundle.make(root, options.build or "out", options.bundle))
    except bundle.Error as error:
        print("gpu_check: %s" % error, file=sys.stderr)
        return WRONG
    return 0


def without_gpu(names, seconds, root, out):
    """Runs tests for the emulated GPU; returns whether they passed."""
    good = True
    with tempfile.TemporaryDirectory(prefix="gpu_check.") as scratch:
        context = programs.Context(root, out, scratch, os.environ, 0, None, [])
        context.begin("without a GPU", time.monotonic() + seconds)
        for name in names:
            ran = programs.run_gtest(context, name)
            problem = programs.problem_of(ran)
            good = good and problem is None
            say("gpu_check: without a GPU: %s: %s" % (
                name, problem or "%d passed" % programs.count(ran.cases,
                                                              "passed")))
    return good


def run(options, here, all_parts, root):
    """Exit status of a check."""
    problem = here.problem()
    out = os.path.abspath(options.out or os.path.join(root, "out/gpu_check"))
    names = [name for part in options.parts
             for name in parts.WITHOUT_GPU.get(part, ())
             if os.path.exists(os.path.join(root, "out", name))]
    if problem is None or names:
        try:
            os.makedirs(out, exist_ok=True)
            with tempfile.TemporaryFile(dir=out):
                pass
        except OSError as error:
            print("gpu_check: --out %s: %s; name a folder that can be written" %
                  (out, error.strerror), file=sys.stderr)
            return WRONG
    if problem:
        good = not names or without_gpu(names, options.seconds, root, out)
        say("gpu_check: no NVIDIA GPU here (%s); skipped: %s" % (
            problem, ", ".join(options.parts)))
        return NO_GPU if good else 1
    result = check(options, here, all_parts, root, out)
    if result["parts"] and result["parts"][-1].get("interrupted"):
        return INTERRUPTED
    unrun = [p["part"] for p in result["parts"] if p.get("why") == NO_TIME]
    if unrun:
        say("gpu_check: not run, as no time was left: %s; run them with "
            "--parts, or raise --seconds" % ", ".join(unrun))
    return 1 if report.failures(result) or unrun else 0


def main(arguments, here=None, all_parts=parts.PARTS, root=ROOT):
    options = parse(arguments)
    if options.bundle is not None:
        return make_bundle(options, root)
    with signals_as_ctrl_c():
        try:
            return run(options, here or machine.Machine(root), all_parts, root)
        except KeyboardInterrupt:  # before the first part, or after the last
            return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
