"""How many lines of kernels/cuda/*.cu the emulated tests run.

The kernels of $ZERO_OUT/coverage are compiled with --coverage
(tests/kernels/coverage.ninja); the tests run once, in one order of threads.
Lines of headers do not count: they are not measured, and all tests use them. A
kernel that no emulator can run (CUB's sort) is named and left out.
"""

import glob
import json
import os
import re
import subprocess
import unittest

ROOT = os.environ.get("ZERO_OUT", "out")
OUT = os.path.join(ROOT, "coverage")
KERNELS = "kernels/cuda/"
WANTED = 0.95


def emulated():
    """The .cu files that the backend has for every machine."""
    with open(os.path.join(ROOT, "cuda_archives.ninja")) as f:
        return sorted(re.findall(r": cu %s(\w+)\.cu" % KERNELS, f.read()))


def lines_of(document, source):
    """{line: times run} of a source in gcov's JSON, over all instantiations."""
    counts = {}
    for file in document["files"]:
        if file["file"].endswith(source):
            for line in file["lines"]:
                number = line["line_number"]
                counts[number] = counts.get(number, 0) + line["count"]
    return counts


def measure(name):
    """{line: times run} of kernels/cuda/NAME.cu."""
    data = os.path.join(OUT, KERNELS, name + ".gcda")
    if not os.path.exists(data):
        return {}
    said = subprocess.run(["gcov", "--json-format", "--stdout", data],
                          check=True, capture_output=True, text=True)
    return lines_of(json.loads(said.stdout), KERNELS + name + ".cu")


def ranges(numbers):
    """[3, 4, 5, 9] as "3-5, 9"."""
    parts = []
    for n in numbers:
        if parts and n == parts[-1][1] + 1:
            parts[-1][1] = n
        else:
            parts.append([n, n])
    return ", ".join("%d" % a if a == b else "%d-%d" % (a, b)
                     for a, b in parts)


class CudaCoverageTest(unittest.TestCase):
    def test_lines_that_did_not_run_are_named_in_ranges(self):
        self.assertEqual(ranges([3, 4, 5, 9]), "3-5, 9")
        self.assertEqual(ranges([]), "")

    def test_a_line_that_one_instantiation_runs_has_run(self):
        document = {"files": [
            {"file": "kernels/cuda/a.cu", "lines": [
                {"line_number": 1, "count": 0}, {"line_number": 1, "count": 2},
                {"line_number": 2, "count": 0}]},
            {"file": "kernels/cuda/a.cuh", "lines": [
                {"line_number": 9, "count": 1}]}]}
        self.assertEqual(lines_of(document, "kernels/cuda/a.cu"), {1: 2, 2: 0})

    def test_most_lines_of_the_kernels_run(self):
        for old in glob.glob(os.path.join(OUT, KERNELS, "*.gcda")):
            os.remove(old)
        subprocess.run([os.path.join(OUT, "kernels_coverage_test"),
                        "--gtest_brief=1"], check=True)
        all_lines = all_run = 0
        print("\nlines of %s that the emulated tests run:" % KERNELS)
        for name in emulated():
            counts = measure(name)
            missed = sorted(n for n, count in counts.items() if count == 0)
            run = len(counts) - len(missed)
            self.assertGreater(run, 0, name + ".cu is run by no test")
            print("  %-20s %4d of %4d  %5.1f %%  %s" % (
                name + ".cu", run, len(counts), 100 * run / len(counts),
                ranges(missed)))
            all_lines += len(counts)
            all_run += run
        others = {os.path.splitext(os.path.basename(path))[0]
                  for path in glob.glob(KERNELS + "*.cu")} - set(emulated())
        print("  in all               %4d of %4d  %5.1f %%; not emulated: %s" %
              (all_run, all_lines, 100 * all_run / all_lines,
               ", ".join(sorted(others))))
        self.assertGreaterEqual(all_run, WANTED * all_lines)


if __name__ == "__main__":
    unittest.main()
