"""Include guards, and heavy headers only in allowed places
(tools/rooms.txt)."""

import re

from rooms import Arrows, includes


def _guard(tree, name):
    want = "ZERO_%s_" % re.sub(r"[^A-Za-z0-9]", "_", name).upper()
    if name.endswith("-inl.h"):
        # Highway reads these once per SIMD target: its toggle is the guard.
        toggle = "defined(%s) == defined(HWY_TARGET_TOGGLE)" % want
        if toggle not in re.sub(r"\s*\\\n\s*", " ", tree.text(name)):
            yield "%s:1: include guard is not #if %s" % (name, toggle)
        return
    found = re.findall(r"^#(ifndef|define|endif)(?: +(?:// +)?(\S+))?",
                       tree.text(name), re.M)
    if not found or found[0] != ("ifndef", want):
        yield "%s:1: include guard is not #ifndef %s" % (name, want)
    elif found[1] != ("define", want):
        yield "%s:1: #define %s does not follow its #ifndef" % (name, want)


def check(tree):
    heavy = Arrows(tree).heavy
    for name in tree.cxx():
        header = name.endswith((".h", ".cuh"))
        if header:
            yield from _guard(tree, name)
        for number, _, target in includes(tree, name):
            for pattern, places in heavy:
                if not target.startswith(pattern):
                    continue
                # `sources` allows any .cc; a path allows everything under it.
                if ("sources" in places and not header) or name.startswith(
                        tuple(p for p in places if p != "sources")):
                    continue
                yield "%s:%d: %s belongs in %s only (tools/rooms.txt)" % (
                    name, number, target, ", ".join(places))
