#!/usr/bin/env python3
"""Which sources make which archive.

  archives.py OUT      writes OUT/archives.ninja and OUT/cuda_archives.ninja

A source belongs to the archive of its folder, so a new file is built without
being listed: ninja reruns this when a folder has changed. All else (programs,
tests, a backend or its twin) is in a room's *.ninja.
"""

import glob
import os
import sys

# An archive's sources, and another archive whose members come last: ar takes an
# object added after an archive for a newer version of a member with the same
# name (device.o), and drops that member.
ARCHIVES = {
    # Sizes of a GPU's workspaces are also needed for plans without CUDA.
    "kernels": ("kernels/*.cc kernels/cpu/*.cc kernels/cuda/attention_call.cc "
                "kernels/cuda/workspace.cc", "kernels_cuda"),
    "optim": ("optim/*.cc", None),
    # Everything that the thread tests need, which are built again under tsan.
    "engine_core": ("engine/autograd/*.cc engine/base/*.cc "
                    "engine/checkpoint/*.cc engine/comm/*.cc "
                    "engine/config/*.cc engine/nn/*.cc engine/tensor/*.cc "
                    "engine/zero/*.cc", "engine_nccl"),
    "engine": ("engine/data/*.cc engine/train/*.cc", "engine_core"),
    "models": ("models/*.cc models/*/*.cc", None),
    # Tests link the same program with emulated GPUs.
    "cli": ("tools/cli/*.cc", "cli_page"),
    "bench": ("tools/bench/*.cc", None),
}
# The emulator has fakes for these: CUB's sort, cuBLASLt, cuDNN.
FAKED = ["kernels/cuda/" + name for name in (
    "sort.cu", "cublaslt_load.cc", "cudnn_attention.cc",
    "cudnn_attention_off.cc")]

VARIABLES = {
    "engine": "cxxflags = $engine_cxxflags",
    "models": "cxxflags = $engine_cxxflags",
    # Nothing there is a hot loop, except in one file, and the parser of
    # arguments takes long to optimize.
    "tools": "cxxflags = $cxxflags -O1",
    "tools/bench/memory_loops.cc": "extra = -O3",
    "engine/data/token_file.cc": "extra = -O3",
}


def listed(root, patterns):
    return sorted(os.path.relpath(path, root) for pattern in patterns.split()
                  for path in glob.glob(os.path.join(root, pattern)))


def sources(root):
    """{archive: its sources}, and those of the CUDA backend."""
    ours = {name: listed(root, patterns)
            for name, (patterns, _) in ARCHIVES.items()}
    elsewhere = sum(ours.values(), FAKED)
    cuda = listed(root, "kernels/cuda/*.cu kernels/cuda/*.cc")
    return ours, [source for source in cuda if source not in elsewhere]


def edges(archive, sources, rule, folder, last):
    """The text of one archive and its objects, in `folder`."""
    text, members = "", ""
    for source in sources:
        member = os.path.join(folder, os.path.splitext(source)[0] + ".o")
        members += " $\n    " + member
        text += "build %s: %s %s\n" % (member, rule, source)
        for place in (source.split("/")[0], source):
            if place in VARIABLES:
                text += "  %s\n" % VARIABLES[place]
    if last:
        members += " $\n    " + last
    return text + "build %s: archive%s\n" % (archive, members)


def replace(path, text):
    """An unchanged file keeps its bytes and is touched: nothing is rebuilt."""
    if os.path.exists(path):
        with open(path) as f:
            if f.read() == text:
                return os.utime(path)
    with open(path, "w") as f:
        f.write(text)


def main():
    out, = sys.argv[1:]
    ours, cuda = sources(".")
    # For a GPU, for its emulator and to count the lines that run: the including
    # file defines the rules `cu` (kernels) and `cuda_cc` (host code), the
    # folder of objects and the archive.
    kernels = [source for source in cuda if source.endswith(".cu")]
    host = [source for source in cuda if source.endswith(".cc")]
    replace(out + "/cuda_archives.ninja",
            edges("$cuda_kernels", kernels, "cu", "$cuda_o", None) +
            edges("$cuda_archive", host, "cuda_cc", "$cuda_o", "$cuda_kernels"))
    replace(out + "/archives.ninja", "".join(
        edges("$o/lib/%s.a" % name, ours[name], "cxx", "$o/obj",
              last and "$o/lib/%s.a" % last)
        for name, (_, last) in ARCHIVES.items()))
    folders = {folder.rstrip("/") for patterns, _ in ARCHIVES.values()
               for pattern in patterns.split()
               for folder in glob.glob(os.path.dirname(pattern) + "/")}
    with open(out + "/archives.ninja.d", "w") as f:
        f.write("%s/archives.ninja: %s\n" % (out, " ".join(sorted(folders))))


if __name__ == "__main__":
    main()
