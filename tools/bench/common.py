"""What the parts of tools/bench/run share: processes, medians, printing."""

import json
import os
import statistics
import subprocess

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(
    os.path.abspath(__file__))))
CONFIG = "configs/gpt2_124m.json"


def say(text=""):
    print(text, flush=True)


def attempt(command, cores=None):
    """Runs a program, on `cores` only where they are given. Returns the JSON
    objects that it printed and why it failed (None: it did not)."""
    limit = (lambda: os.sched_setaffinity(0, cores)) if cores else None
    try:
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE, text=True,
                              preexec_fn=limit)
    except OSError as error:
        return [], str(error)
    found = []
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            found.append(json.loads(line))
    if done.returncode == 0:
        return found, None
    why = (found[-1].get("error") if found else None) or done.stderr
    return [], why.strip()[-400:] or "exit %d" % done.returncode


def call(command, cores=None):
    """The same; None, and a line about it, where the program failed."""
    found, why = attempt(command, cores)
    if why is None:
        return found
    say("  failed: %s: %s" % (" ".join(command[:4]), why))
    return None


def middle(values):
    return statistics.median(values)
