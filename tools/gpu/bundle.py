"""Packs what gpu_check needs on a machine without compilers into one file."""

import glob
import io
import os
import re
import shutil
import subprocess
import tarfile
import tempfile

LARGEST = 50 * 10**6
# The bundle's only folder.
NAME = "zero_gpu_check"
# From the checkout, as they are.
SOURCES = ("tools/gpu_check", "tools/gpu/*.py", "tools/bench/common.py",
           "tools/bench/gpu.py", "tools/bench/peers/pytorch.py",
           "configs/*.json", "LICENSE")
# From the build, stripped. Globs that match nothing are errors. There are no
# goldens: what runs on a GPU is compared with the CPU in the same run, or with
# a reference in the test, and it is the CPU that tests/golden proves, where
# `ninja check` runs.
PROGRAMS = ("zero", "bench/step_bench", "bench/op_bench")
TESTS = "tests/**/*cuda*_test"
# Found on the other machine: CUDA's, which are large, and those of any Linux
# with glibc 2.34 and GCC 12's libstdc++.
LEFT_OUT = ("libcu", "libnv", "libnccl", "linux-vdso", "ld-linux", "libc.so",
            "libm.so", "libdl.so", "librt.so", "libpthread.so", "libstdc++.so",
            "libgcc_s.so", "libresolv.so", "libutil.so")


class Error(Exception):
    pass


def has(path, name):
    """Whether a program has this name in it."""
    if not os.path.isfile(path) or not os.access(path, os.X_OK):
        return False
    with open(path, "rb") as file:
        return name in file.read()


def gpu_tests(build):
    """The test programs that want a GPU, relative to the build folder. Those
    for the emulator do not know a library of CUDA's by its name."""
    found = glob.glob(os.path.join(build, TESTS), recursive=True)
    return sorted(os.path.relpath(path, build) for path in found
                  if has(path, b"libcublasLt.so"))


def shared_libraries(program):
    """{name: path} of the libraries that it loads and the bundle must hold."""
    done = subprocess.run(["ldd", program], capture_output=True, text=True)
    found = {}
    for line in done.stdout.splitlines():
        words = line.split()
        if len(words) < 3 or words[1] != "=>":
            continue
        if os.path.basename(words[0]).startswith(LEFT_OUT):
            continue
        if words[2] == "not":
            raise Error("%s needs %s, which is not on this machine" % (
                program, words[0]))
        found[words[0]] = words[2]
    return found


def strip(source, target):
    os.makedirs(os.path.dirname(target), exist_ok=True)
    done = None
    if shutil.which("strip"):
        done = subprocess.run(["strip", "-o", target, source],
                              stderr=subprocess.DEVNULL)
    if done is None or done.returncode != 0:  # a script
        shutil.copy(source, target)
    shutil.copymode(source, target)


def check_target(file):
    """Checks the target before packing, which takes a minute. Errors: Error,
    OSError."""
    if not file.endswith(".tar.xz"):
        raise Error("--bundle %r: the name must end in .tar.xz" % file)
    folder = os.path.dirname(file) or "."
    if not os.path.isdir(folder):
        raise Error("--bundle %s: there is no folder %s; make it, or name "
                    "another one" % (file, folder))
    with tempfile.TemporaryFile(dir=folder):
        pass


def check_build(build):
    if not os.path.isdir(build):
        raise Error("--from: there is no folder %s; name a build with CUDA, or "
                    "make one (tools/configure --cuda on; ninja check-build)" %
                    build)


def stage(root, build, folder):
    """Fills `folder` with what the bundle holds."""
    for pattern in SOURCES:
        found = sorted(glob.glob(os.path.join(root, pattern)))
        if not found:
            raise Error("%s is not in this checkout" % pattern)
        for path in found:
            target = os.path.join(folder, os.path.relpath(path, root))
            os.makedirs(os.path.dirname(target), exist_ok=True)
            shutil.copy(path, target)
    tests = gpu_tests(build)
    if not tests:
        raise Error("%s has no %s: build it with CUDA (tools/configure --cuda "
                    "on; ninja check-build)" % (build, TESTS))
    libraries = {}
    for name in list(PROGRAMS) + tests:
        path = os.path.join(build, name)
        if not os.path.exists(path):
            raise Error("%s is not built: ninja %s" % (path, path))
        libraries.update(shared_libraries(path))
        strip(path, os.path.join(folder, "out", name))
    for name, path in libraries.items():
        strip(path, os.path.join(folder, "lib", name))


def newest(folder):
    """The newest versions of glibc and libstdc++ that a file here asks for."""
    found = {}
    for path in glob.glob(os.path.join(folder, "**/*"), recursive=True):
        if not os.path.isfile(path):
            continue
        with open(path, "rb") as file:
            data = file.read()
        if not data.startswith(b"\x7fELF"):
            continue
        for name, version in re.findall(rb"\b(GLIBC|GLIBCXX)_([0-9.]+)\0",
                                        data):
            number = tuple(int(part) for part in version.split(b".") if part)
            found[name] = max(found.get(name, ()), number)
    return ["%s_%s" % (name.decode(), ".".join(map(str, version)))
            for name, version in sorted(found.items())]


def pack(folder, file):
    """A .tar.xz with nothing of this machine in it but the files."""
    def plain(info):
        info.mtime = info.uid = info.gid = 0
        info.uname = info.gname = ""
        return info

    paths = []
    for where, folders, names in os.walk(folder):
        folders.sort()
        paths += [os.path.join(where, name) for name in sorted(names)]
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:xz", preset=9) as tar:
        for path in paths:
            tar.add(path, os.path.join(NAME, os.path.relpath(path, folder)),
                    filter=plain)
    if data.tell() > LARGEST:
        sizes = sorted(((os.path.getsize(path), path) for path in paths),
                       reverse=True)
        raise Error("the bundle would be %.1f MB, more than %d; largest: %s" % (
            data.tell() / 1e6, LARGEST / 1e6, ", ".join(
                "%s %.1f MB" % (os.path.relpath(path, folder), size / 1e6)
                for size, path in sizes[:5])))
    with open(file, "wb") as out:
        out.write(data.getvalue())
    return data.tell(), len(paths)


def make(root, build, file):
    """Writes the bundle; returns a line about it. Errors: Error."""
    try:
        check_target(file)
        check_build(os.path.join(root, build))
        with tempfile.TemporaryDirectory(prefix="gpu_check.") as folder:
            stage(root, os.path.join(root, build), folder)
            needs = newest(folder)
            size, count = pack(folder, file)
    except OSError as error:
        raise Error("--bundle %s: %s" % (file, error)) from error
    # tar wants xz-utils for this.
    return ("%s: %.1f MB, %d files%s; on the GPU machine: python3 -m tarfile "
            "-e %s && %s/tools/gpu_check" % (
                file, size / 1e6, count,
                ", for %s or newer" % ", ".join(needs) if needs else "",
                os.path.basename(file), NAME))
