"""Reads the hand-kept *.ninja files: enough of ninja's syntax for ours.

The lints and list_tests ask the build itself what it builds, so nothing has to
be listed twice. Paths keep their `$o/`; `$cuda` and the like match every
possible file, since the tree must be right for all machines.
"""

import glob
import os
import re
from collections import namedtuple

# outputs and inputs (explicit, implicit and order-only together) of one edge.
Edge = namedtuple("Edge", "outputs rule inputs file line")


def _logical_lines(text):
    """Yields (line number, line) with `$` continuations joined."""
    start, parts = None, []
    for number, line in enumerate(text.split("\n"), 1):
        if start is None:
            start = number
        if re.search(r"(?<!\$)(\$\$)*\$$", line):
            parts.append(line[:-1].rstrip())
            continue
        parts.append(line.lstrip() if parts else line)
        yield start, " ".join(parts)
        start, parts = None, []


def _paths(words):
    return [w for w in words.split() if w not in ("|", "||")]


def machine(path):
    """The variables of a machine.ninja."""
    with open(path) as f:
        return dict(re.findall(r"^(\w+) = (.*)$", f.read(), re.MULTILINE))


def read(root, top="build.ninja", variables={}):
    """Returns (edges, files, missing): every edge reached from `top`, the
    .ninja files read, and (file, line, path) of those named but absent.

    With the variables of a machine, `subninja x-$cuda.ninja` is its one file
    of that machine; without, all of them."""
    edges, files, missing = [], [], []

    def visit(path):
        if path in files:
            return
        files.append(path)
        with open(os.path.join(root, path)) as f:
            text = f.read()
        for number, line in _logical_lines(text):
            words = line.split("#")[0] if line.startswith("#") else line
            sub = re.match(r"(?:subninja|include) (\S+)$", words)
            if sub:
                pattern = re.sub(
                    r"\$(\w+)",
                    lambda m: variables.get(m.group(1), "*"), sub.group(1))
                found = sorted(glob.glob(os.path.join(root, pattern)))
                if not found and not sub.group(1).startswith(("out/", "$o/")):
                    missing.append((path, number, sub.group(1)))
                for name in found:
                    name = os.path.relpath(name, root)
                    if not name.startswith("out" + os.sep):
                        visit(name)
                continue
            edge = re.match(r"build (.+?): *(\S+)(.*)$", words)
            if edge:
                edges.append(
                    Edge(_paths(edge.group(1)), edge.group(2),
                         _paths(edge.group(3)), path, number))

    visit(top)
    return edges, files, missing


TEST_RULES = ("run_test", "run_python_test")


def tests(edges):
    """The stamps that `check` requires: [(stamp, rule, test)]."""
    return [(e.outputs[0], e.rule, e.inputs[0] if e.inputs else "")
            for e in edges if e.rule in TEST_RULES + ("lint",)]
