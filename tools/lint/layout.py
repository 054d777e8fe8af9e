"""The top level is fixed, and no file names one machine's folders."""

import os
import re

TOP = {"build.ninja", "README.md", "LICENSE", "kernels", "optim", "engine",
       "models", "configs", "tests", "tools"}

# A home folder, or the folder of this checkout.
HOMES = r"/(?:home|Users)/\w+/|/roo[t]/"


def check(tree):
    for entry in sorted({n.split("/")[0] for n in tree.files}):
        if entry not in TOP and not entry.startswith("."):
            yield "%s: not among the top-level entries: %s" % (
                entry, ", ".join(sorted(TOP)))
    pattern = HOMES
    above = os.path.dirname(tree.root)
    if above not in ("/", "/tmp", "/var/tmp"):  # these may be named with reason
        pattern += "|%s(?![\w.-])" % re.escape(above)
    machine = re.compile(pattern)
    for name in tree.files:
        with open(tree.path(name), "rb") as f:
            if b"\0" in f.read(4096):
                continue
        for number, line in tree.lines(name):
            found = machine.search(line)
            if found:
                yield "%s:%d: machine path %s" % (name, number, found.group(0))
