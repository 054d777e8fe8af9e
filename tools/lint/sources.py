"""Every source is built, every file the build names exists, every test runs."""

import os
import re

import archives
import manifest

# cu and cuda_cc: sources compiled for a GPU and for its emulator.
COMPILES = ("cxx", "cxx_test", "cu", "cuda_cc")
JOINS = ("archive", "link")
# Folders named $cuda_o and the like are under $o/obj.
OBJECTS = re.compile(r"\$(o/obj|\w+_o)/")


def check(tree):
    edges, files, missing = manifest.read(tree.root)
    for file, line, path in missing:
        yield "%s:%d: subninja %s: no such file" % (file, line, path)

    by_folder, of_gpu = archives.sources(tree.root)
    compiled, used, objects = set(sum(by_folder.values(), of_gpu)), set(), {}
    for edge in edges:
        if edge.rule in COMPILES and edge.inputs:
            source, output = edge.inputs[0], edge.outputs[0]
            compiled.add(source)
            objects[output] = source
            if not os.path.exists(tree.path(source)):
                yield "%s:%d: %s: no such file" % (edge.file, edge.line, source)
            want = "$o/obj/%s.o" % os.path.splitext(source)[0]
            # One source may be compiled twice (say, for an emulator), but then
            # under a name of its own.
            if not OBJECTS.match(output):
                yield "%s:%d: object %s lies outside $o/obj/; want %s" % (
                    edge.file, edge.line, output, want)
        elif edge.rule in JOINS:
            used.update(edge.inputs)
    for edge in edges:
        if edge.rule in COMPILES and edge.outputs[0] not in used:
            yield "%s:%d: %s is in no archive or binary" % (
                edge.file, edge.line, edge.outputs[0])

    for name in tree.cxx((".cc", ".cu")):
        if name not in compiled:
            yield ("%s:1: its folder is in no archive (tools/ninja/archives.py)"
                   ", and no line of a *.ninja compiles it" % name)
    for name in tree.files:
        if name.endswith(".ninja") and name not in files:
            yield "%s:1: no subninja line leads here" % name

    # A test is run directly or as part of a binary.
    run = {test for _, _, test in manifest.tests(edges)}
    tested = set(run)
    for edge in edges:
        if edge.rule == "link" and edge.outputs[0] in run:
            tested.update(objects.get(name) for name in edge.inputs)
    for name in tree.files:
        if name.startswith("tests/") and name.endswith(
                ("_test.cc", "_test.py")) and name not in tested:
            yield "%s:1: no run_test line runs this test" % name
