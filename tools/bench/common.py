"""What the parts of tools/bench/run share: processes, medians, printing."""

import ctypes
import json
import os
import signal
import statistics
import subprocess

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(
    os.path.abspath(__file__))))
CONFIG = "configs/gpt2_124m.json"


def say(text=""):
    print(text, flush=True)


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
    """Text that is short: an error says what it is in its first words, or in
    its last ones."""
    return text if len(text) <= 400 else text[:150] + " ... " + text[-250:]


def die_with_parent():
    """In a child before it runs: it is killed with its parent, whatever ends
    that, and holds no GPU for nobody."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def attempt(command, cores=None, seconds=None):
    """Runs a program, on `cores` and for `seconds` only where they are given.
    Returns the JSON objects that it printed, also where it failed, and why it
    failed (None: it did not)."""
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


def call(command, cores=None):
    """The same; None, and a line about it, where the program failed."""
    found, why = attempt(command, cores)
    if why is None:
        return found
    say("  failed: %s: %s" % (" ".join(command[:4]), why))
    return None


def middle(values):
    return statistics.median(values)


def table(head, rows):
    """Lines of a table. The first column, and those without a head, are text
    and stand to the left; the last cell of a row with too few is a remark."""
    rows = [head] + [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in rows
                  if i + 1 < len(row) or len(row) == len(head))
              for i in range(len(head))]

    def justified(row):
        for i, (cell, width) in enumerate(zip(row, widths)):
            text = not i or not head[i] or i + 1 == len(row) < len(head)
            yield cell.ljust(width) if text else cell.rjust(width)

    return ["  ".join(justified(row)).rstrip() for row in rows]


def print_table(head, rows):
    say()
    for line in table(head, rows):
        say(line)


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
