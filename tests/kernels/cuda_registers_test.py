"""What a block of each kernel takes of an SM, as ptxas reports it for sm_90a.

The build keeps ptxas's report beside every object of kernels/cuda. A kernel
that takes more than the bounds below hides less latency, which nothing else
would notice without a GPU. Spills need no bound: they fail the build.
"""

import os
import re
import subprocess
import tempfile
import unittest

ARCHIVE = os.path.join(os.environ.get("ZERO_OUT", "out"), "lib/kernels_cuda.a")
# 65536 registers of an SM / 64 = 1024 threads, half of what it can hold: 4 to 8
# blocks of ours, for which 8 * 12 KiB of shared memory are enough.
REGISTERS, SHARED = 64, 12 * 1024
# Kernels that may take more, over all of their instantiations. In registers:
# tiles of products, rows that stay in registers between two passes.
MORE = {
    "AddRunsKernel": (104, SHARED),
    "DeviceRadixSortOnesweepKernel": (80, 36 * 1024),   # CUB's
    "DeviceRadixSortSingleTileKernel": (128, 33 * 1024 + 64),  # CUB's
    "ForwardKernel": (128, SHARED),
    "KeyValueKernel": (128, SHARED),
    "LaterPartsKernel": (104, SHARED),
    "MomentsKernel": (REGISTERS, 22 * 1024),
    "NormBackwardKernel": (128, SHARED),
    "NormForwardKernel": (104, SHARED),
    "QueryKernel": (128, SHARED),
}
ENTRY = re.compile(r"Compiling entry function '(\w+)' for 'sm_90a'$")
USED = re.compile(r"Used (\d+) registers(?:.*, (\d+) bytes smem)?")


def parse(report):
    """[(mangled name, registers, bytes of static shared memory)]."""
    found, name = [], None
    for line in report.splitlines():
        entry, used = ENTRY.search(line), USED.search(line)
        if entry:
            name = entry[1]
        elif used and name:
            found.append((name, int(used[1]), int(used[2] or 0)))
            name = None
    return found


def reports(archive):
    """The reports beside the objects of a thin archive: one that a removed or
    renamed source has left does not count."""
    members = subprocess.run(["ar", "t", archive], check=True, text=True,
                             capture_output=True).stdout.split()
    paths = [member + ".ptxas" for member in members]
    return [path for path in paths if os.path.exists(path)]


def plain(text):
    """"Kernel" of "void zero::cuda::(anonymous namespace)::Kernel<...>(...)"."""
    text = re.sub(r"\(anonymous namespace\)::", "", text)
    text = re.split(r"[<(]", text.removeprefix("void "))[0]
    return text.split("::")[-1]


def too_much(kernel, registers, shared):
    bounds = MORE.get(kernel, (REGISTERS, SHARED))
    return registers > bounds[0] or shared > bounds[1]


class CudaRegistersTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        found = []
        for path in reports(ARCHIVE):
            with open(path) as f:
                found += parse(f.read())
        said = subprocess.run(["c++filt"], check=True, capture_output=True,
                              text=True, input="\n".join(
                                  name for name, _, _ in found))
        cls.kernels = [(text, plain(text), registers, shared)
                       for text, (_, registers, shared) in zip(
                           said.stdout.splitlines(), found)]

    def test_reports_are_read(self):
        report = """\
ptxas info    : Compiling entry function '_Z1av' for 'sm_90a'
ptxas info    : Function properties for _Z1av
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 38 registers, used 1 barriers, 2048 bytes smem
ptxas info    : Compile time = 22.895 ms
ptxas info    : Compiling entry function '_Z1bv' for 'sm_90a'
ptxas info    : Used 8 registers, used 0 barriers
"""
        self.assertEqual(parse(report), [("_Z1av", 38, 2048), ("_Z1bv", 8, 0)])
        self.assertEqual(plain("void zero::cuda::(anonymous namespace)::K<"
                               "zero::G<(int)8> >(zero::Args)"), "K")
        self.assertTrue(too_much("K", 65, 0))
        self.assertTrue(too_much("K", 64, SHARED + 1))
        self.assertFalse(too_much("NormBackwardKernel", 65, SHARED))

    def test_a_report_without_its_object_does_not_count(self):
        with tempfile.TemporaryDirectory() as folder:
            def path(name):
                return os.path.join(folder, name)

            for name in ("a.o", "a.o.ptxas", "b.o", "left.o", "left.o.ptxas"):
                open(path(name), "w").close()
            subprocess.run(["ar", "crs", "--thin", path("lib.a"), path("a.o"),
                            path("b.o")], check=True)
            self.assertEqual(reports(path("lib.a")), [path("a.o.ptxas")])

    def test_no_kernel_takes_more_than_its_bounds(self):
        self.assertGreater(len(self.kernels), 100)
        grown = ["%s: %d registers, %d bytes of shared memory" % (
            text, registers, shared)
            for text, kernel, registers, shared in self.kernels
            if too_much(kernel, registers, shared)]
        self.assertEqual(grown, [], "\n" + "\n".join(grown))

    def test_every_exception_is_one(self):
        need = {kernel for _, kernel, registers, shared in self.kernels
                if registers > REGISTERS or shared > SHARED}
        self.assertEqual(sorted(set(MORE) - need), [])


if __name__ == "__main__":
    unittest.main()
