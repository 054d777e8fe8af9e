"""Includes follow the arrows of tools/rooms.txt."""

import os
import re

import tree as tree_module

INCLUDE = re.compile(r'\s*#\s*include\s+(["<])([^">]+)[">]')


class Arrows:
    """tools/rooms.txt, parsed. See there for the format."""

    def __init__(self, tree):
        self.allowed, self.heavy, self.errors = {}, [], []
        name = "tools/rooms.txt"
        for number, line in tree.lines(name):
            words = line.split("#")[0].split()
            if not words:
                continue
            if words[0] == "room" and words[2:3] == ["->"]:
                self.allowed[words[1]] = words[3:]
            elif words[0] == "heavy" and words[2:3] == ["in"] and words[3:]:
                self.heavy.append((words[1], words[3:]))
            else:
                self.errors.append(
                    "%s:%d: want `room NAME -> ROOMS` or `heavy HEADER in "
                    "PLACES`" % (name, number))
        for room, targets in self.allowed.items():
            for target in targets:
                if target != "*" and target not in self.allowed:
                    self.errors.append("%s: room %s names %s, which is no room"
                                       % (name, room, target))

    def room_of(self, path):
        """The longest room that is a folder of `path`, or its file stem."""
        best = None
        for room in self.allowed:
            if re.match(re.escape(room) + r"[/._]", path):
                if best is None or len(room) > len(best):
                    best = room
        return best


def includes(tree, name):
    """(line number, quote, path) of each #include."""
    for number, line in tree.lines(name):
        match = INCLUDE.match(line)
        if match:
            yield number, match.group(1), match.group(2)


def check(tree):
    arrows = Arrows(tree)
    yield from arrows.errors
    for name in tree.cxx():
        room = arrows.room_of(name)
        if room is None:
            yield "%s:1: in no room of tools/rooms.txt" % name
            continue
        allowed = arrows.allowed[room]
        for number, quote, target in includes(tree, name):
            where = "%s:%d: " % (name, number)
            if target.split("/")[0] not in tree_module.ROOMS:
                if quote == '"' and os.path.exists(
                        os.path.join(os.path.dirname(tree.path(name)), target)):
                    yield where + ('"%s": write the path from the top of the '
                                   'tree' % target)
                continue
            if not os.path.exists(tree.path(target)):
                yield where + '"%s": no such file' % target
                continue
            other = arrows.room_of(target)
            if other not in allowed and other != room and "*" not in allowed:
                yield where + ('"%s": %s may not include %s; it may include %s '
                               '(tools/rooms.txt)' %
                               (target, room, other, ", ".join(allowed)
                                or "nothing of ours"))
