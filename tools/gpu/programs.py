"""Programs that gpu_check runs: until when, how they ended, and what their
tests said."""

import collections
import contextlib
import json
import math
import os
import re
import signal
import subprocess
import time

from common import both_ends, die_with_parent

Done = collections.namedtuple("Done", "code text timed_out")


class Context:
    """Where a part runs, and until when."""

    def __init__(self, root, out, scratch, environment, gpus, nccl, bench):
        self.root = root
        self.build = os.path.join(root, "out")
        self.out = out
        self.scratch = scratch
        self.environment = environment
        self.gpus = gpus
        self.nccl = nccl  # version of the library, 23004 for 2.30.4; or None
        self.bench = bench  # options of the benchmark
        self.log = os.path.join(out, "log.txt")
        open(self.log, "w").close()
        self.part = ""
        self.until = 0
        # Of the part's row, as it goes: what is left of one that is ended.
        self.partial = {}

    def begin(self, part, until):
        self.part = part
        self.until = until
        self.partial = {}

    def left(self):
        return self.until - time.monotonic()

    def path(self, name):
        return os.path.join(self.build, name)

    def run(self, command, more=None, seconds=math.inf):
        """Runs a program for `seconds`, until the part's time is over, or until
        Ctrl-C, and kills it and what it started then. Its output is in the log
        and in the answer. `more`: of its environment."""
        limit = max(0.1, min(seconds, self.left()))
        with open(self.log, "ab+") as log:
            log.write(("\n%s $ %s\n" % (
                self.part, " ".join(command))).encode())
            log.flush()
            start = log.tell()
            try:
                process = subprocess.Popen(
                    command, cwd=self.root, stdout=log,
                    env={**self.environment, **(more or {})},
                    stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                    start_new_session=True, preexec_fn=die_with_parent)
            except OSError as error:
                return Done(127, str(error), False)
            timed_out = not waited(process, limit)
            log.seek(start)
            text = log.read().decode(errors="replace")
        return Done(process.returncode, text, timed_out)


# A process that hangs in the driver may not even end by SIGKILL.
KILL_SECONDS = 10


def waited(process, seconds):
    """False where the process had to be killed; it has no returncode where it
    did not end then."""
    try:
        process.wait(seconds)
        return True
    except subprocess.TimeoutExpired:
        return False
    finally:
        # It has a session of its own: its children go with it, and Ctrl-C
        # does not reach any of them.
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(KILL_SECONDS)


def passed(**more):
    return {"status": "passed", **more}


def failed(why, **more):
    return {"status": "failed", "why": why, **more}


def skipped(why, **more):
    return {"status": "skipped", "why": why, **more}


def explained(row, *more):
    """The row with more in its "why"."""
    return {**row, "why": "; ".join(filter(None, (row.get("why"), *more)))}


def last_words(text, lines=1):
    """What a program said last; a tool around it says less."""
    said = [line.strip() for line in text.splitlines() if line.strip()]
    its_own = [line for line in said if not line.startswith("=========")]
    return "; ".join(both_ends(line) for line in
                     (its_own or said or ["no output"])[-lines:])


def how_ended(done):
    if done.timed_out:
        return "stopped at its time limit" + (
            ", but did not end: it may still hold the GPU"
            if done.code is None else "")
    if done.code < 0:
        return "killed by signal %d" % -done.code
    return "exit %d" % done.code


def why_ended(done, lines=1):
    return "%s: %s" % (how_ended(done), last_words(done.text, lines))


# ---- Programs of googletest -------------------------------------------------

# missed: how many tests were not reached.
Ran = collections.namedtuple("Ran", "done cases missed")


def gtest_cases(path):
    """[(name, status, the case)] of a --gtest_output file."""
    try:
        with open(path) as file:
            suites = json.load(file)["testsuites"]
    except (OSError, ValueError, KeyError):
        return []
    found = []
    for suite in suites:
        for case in suite["testsuite"]:
            # Where a program skips itself as a whole, googletest calls its
            # tests completed: at the beginning of time.
            skipped_all = case.get("timestamp", "").startswith("1970-")
            status = ("failed" if case.get("failures") else "skipped"
                      if skipped_all or case.get("result") == "SKIPPED" else
                      "passed")
            found.append(("%s.%s" % (suite["name"], case["name"]), status,
                          case))
    return found


STATUS = {"OK": "passed", "FAILED": "failed", "SKIPPED": "skipped"}


def printed_cases(done):
    """The same from what a program printed. The test that it did not come out
    of has "why"."""
    words = re.split(r"^\[ RUN +\] (\S+)$", done.text, flags=re.MULTILINE)
    found = []
    for name, text in zip(words[1::2], words[2::2]):
        end = re.search(r"\[ +(OK|FAILED|SKIPPED) +\] %s\b" % re.escape(name),
                        text)
        found.append((name, STATUS[end.group(1)],
                      {"failures": text[:end.start()]}) if end else
                     (name, "failed", {"why": how_ended(done)}))
    return found


# What is said of a fault after which the process cannot use its GPU.
DEVICE_FAULT = re.compile(
    r"illegal|misaligned|launch failure|device-side assert|cuda:\d+: ")


def run_process(context, name, known, seconds):
    """(Done, cases, whether a new process is to go on) of the tests that are
    not yet known, up to the one that left the process without a GPU."""
    counts = os.path.join(context.scratch, os.path.basename(name) + ".json")
    if os.path.exists(counts):
        os.remove(counts)
    command = [context.path(name), "--gtest_output=json:" + counts]
    if known:
        command.append("--gtest_filter=-" + ":".join(known))
    done = context.run(command, seconds=seconds)
    found = [case for case in gtest_cases(counts) or printed_cases(done)
             if case[0] not in known]
    for number, (_, status, case) in enumerate(found):
        if status == "failed" and ("why" in case or DEVICE_FAULT.search(
                str(case["failures"]))):
            return done, found[:number + 1], not done.timed_out
    return done, found, False


def run_gtest(context, name, seconds=math.inf):
    """All tests of one program; `done` is that of its last process. A crash,
    or a fault of the GPU, fails all that comes after it in the same process:
    the next one goes on behind it."""
    until = time.monotonic() + min(seconds, context.left())
    cases, total, go_on = {}, 0, True
    while go_on:
        done, found, go_on = run_process(context, name, list(cases),
                                         until - time.monotonic())
        cases.update((case[0], case) for case in found)
        running = re.search(r"Running (\d+) test", done.text)
        total = total or int(running.group(1) if running else 0)
        go_on = go_on and until - time.monotonic() >= 1
    return Ran(done, list(cases.values()), max(0, total - len(cases)))


def count(cases, status):
    return sum(1 for _, one, _ in cases if one == status)


def failures_of(cases):
    """Which tests failed, or None."""
    bad = [name + (" (%s)" % case["why"] if "why" in case else "")
           for name, status, case in cases if status == "failed"]
    return "%d failed: %s%s" % (len(bad), ", ".join(bad[:5]),
                                ", ..." if bad[5:] else "") if bad else None


def problem_of(ran):
    """Why this program's tests do not count as passed, or None."""
    problem = failures_of(ran.cases)
    if problem is None and (ran.done.timed_out or ran.done.code != 0):
        problem = why_ended(ran.done)
    if problem is None and not count(ran.cases, "passed"):
        problem = "no test ran: " + last_words(ran.done.text)
    missed = "%d not reached" % ran.missed if ran.missed else None
    return "; ".join(filter(None, (problem, missed))) or None
