"""The counts that CI believes: a tiny tree built with the real rules, whose
`test binaries` are shell scripts that fail in each of the ways tests fail."""

import os
import shutil
import subprocess
import tempfile
import unittest

BUILD = """ninja_required_version = 1.10
include out/machine.ninja
include tools/ninja/rules.ninja
rule copy
  command = cp $in $out && chmod +x $out
subninja tests/room.ninja
build $o/tests.dd: list_tests build.ninja
build check: summary || $o/tests.dd
  dyndep = $o/tests.dd
build check-build: phony || $o/tests.dd
  dyndep = $o/tests.dd
build check-memory: summary || $o/tests.dd
  dyndep = $o/tests.dd
build check-memory-build: phony || $o/tests.dd
  dyndep = $o/tests.dd
build check-threads: phony || $o/tests.dd
  dyndep = $o/tests.dd
build check-threads-build: phony || $o/tests.dd
  dyndep = $o/tests.dd
build check-matrix: summary || $o/tests.dd
  dyndep = $o/tests.dd
"""

# The behaviour of a gtest binary with --gtest_output=json:PATH, the last
# argument.
GTEST = """#!/bin/sh
for a; do json=${a#--gtest_output=json:}; done
"""
PASSES_TWO = GTEST + """cat >$json <<END
{"tests": 2, "failures": 0, "testsuites": []}
END
"""
FAILS_ONE_OF_THREE = GTEST + """cat >$json <<END
{"tests": 3, "failures": 1, "testsuites": [{"name": "S", "testsuite": [
  {"name": "Bad", "failures": [{"failure": "1 is not 2"}]},
  {"name": "Good", "result": "COMPLETED"}]}]}
END
echo expected 1, saw 2
exit 1
"""
SKIPS_ONE_OF_TWO = GTEST + """cat >$json <<END
{"tests": 2, "failures": 0, "testsuites": [{"name": "S", "testsuite": [
  {"name": "Gpu", "result": "SKIPPED"}]}]}
END
echo "a_test.cc:3: Skipped"
echo "no GPU here"
"""
CRASHES = "#!/bin/sh\nkill -SEGV $$\n"
PASSES_THE_SECOND_TIME = FAILS_ONE_OF_THREE.replace(
    "#!/bin/sh\n", '#!/bin/sh\n[ ! -e "$0.seen" ] || exec /bin/sh "$0.two" "$@"\n'
    'touch "$0.seen"\n')
HANGS = "#!/bin/sh\nexec sleep 60\n"


class CheckTest(unittest.TestCase):
    def setUp(self):
        self.root = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, self.root)
        for folder in ("tests/engine/zero", "tests/matrix", "tools", "out"):
            os.makedirs(os.path.join(self.root, folder))
        os.symlink(os.path.abspath("tools/ninja"),
                   os.path.join(self.root, "tools/ninja"))
        self.write("build.ninja", BUILD)
        self.write("out/machine.ninja", "o = out\n")
        self.room = ""

    def write(self, name, text):
        with open(os.path.join(self.root, name), "w") as f:
            f.write(text)

    def add(self, name, script, folder="tests", seconds=""):
        source = "%s/%s_test" % (folder, name)
        self.write(source + ".in", script)
        self.room += ("build $o/%s: copy %s.in\n"
                      "build $o/%s.ok: run_test $o/%s\n" % ((source,) * 4))
        if seconds:
            self.room += "  test_seconds = %s\n" % seconds
        self.write("tests/room.ninja", self.room)

    def run_in_root(self, *command):
        done = subprocess.run(command, cwd=self.root, capture_output=True,
                              text=True)
        return done.returncode, done.stdout + done.stderr

    def check(self, suite="check"):
        """Runs the suite; returns (status, summary lines)."""
        code, self.output = self.run_in_root("ninja", "-k", "0", suite)
        after = ["--after-failure"] if code else []
        status, text = self.run_in_root("tools/ninja/summary", *after,
                                        "out:" + suite)
        self.assertEqual(status != 0, code != 0)
        return status, text.splitlines()

    def test_test_cases_are_counted_and_not_binaries(self):
        self.add("a", PASSES_TWO)
        self.add("b", PASSES_TWO)
        self.assertEqual(self.check(), (0, ["4 passed, 0 failed"]))
        self.assertIn("4 passed, 0 failed", self.output)

    def test_a_passed_test_is_not_run_again(self):
        self.add("a", PASSES_TWO)
        self.check()
        self.check()
        self.assertNotIn("test out/tests/a_test", self.output)

    def test_a_failed_case_is_named_and_its_log_shown(self):
        self.add("a", PASSES_TWO)
        self.add("b", FAILS_ONE_OF_THREE)
        status, lines = self.check()
        self.assertEqual(lines, ["FAILED S.Bad (out/tests/b_test.ok)",
                                 "4 passed, 1 failed"])
        self.assertIn("expected 1, saw 2", self.output)

    def test_a_crash_counts_as_one_failure(self):
        self.add("a", PASSES_TWO)
        self.add("b", CRASHES)
        _, lines = self.check()
        self.assertEqual(lines[-1], "2 passed, 1 failed")
        self.assertIn("killed by signal 11", self.output)

    def second_try(self):
        code, self.output = self.run_in_root("env", "SECOND_TRY=1", "ninja",
                                             "-k", "0", "check")
        return code, self.output.splitlines()

    def test_a_test_that_passes_alone_is_named_as_unsteady(self):
        self.add("a", PASSES_THE_SECOND_TIME)
        os.makedirs(os.path.join(self.root, "out/tests"))
        self.write("out/tests/a_test.two", PASSES_TWO)
        self.assertEqual(self.check()[1][-1], "2 passed, 1 failed")
        code, lines = self.second_try()
        self.assertEqual(code, 0)
        self.assertEqual(lines[-2:], [
            "UNSTEADY, failed alongside other tests and passed alone: "
            "out/tests/a_test.first.log", "2 passed, 0 failed"])
        with open(os.path.join(self.root, "out/tests/a_test.first.log")) as f:
            self.assertIn("expected 1, saw 2", f.read())

    def test_a_test_that_fails_twice_has_failed(self):
        self.add("a", FAILS_ONE_OF_THREE)
        self.check()
        self.assertNotEqual(self.second_try()[0], 0)

    def test_what_a_sanitizer_reported_is_not_tried_again(self):
        self.add("a", "#!/bin/sh\n[ -e $0.seen ] && exec true\n"
                 "touch $0.seen\necho ==1==ERROR: AddressSanitizer: bad\n"
                 "exit 1\n")
        self.check()
        code, _ = self.second_try()
        self.assertNotEqual(code, 0)
        self.assertIn("a sanitizer's report, and not tried again", self.output)

    def test_a_hang_is_stopped_and_counts_as_one_failure(self):
        self.add("a", HANGS, seconds="1")
        _, lines = self.check()
        self.assertEqual(lines[-1], "0 passed, 1 failed")
        self.assertIn("stopped after 1 s", self.output)

    def test_a_test_that_stops_building_does_not_keep_its_old_counts(self):
        self.add("a", PASSES_TWO)
        self.add("b", PASSES_TWO)
        self.check()
        os.remove(os.path.join(self.root, "tests/b_test.in"))
        os.mkdir(os.path.join(self.root, "tests/b_test.in"))  # cp fails
        _, lines = self.check()
        self.assertEqual(lines[-1], "2 passed, 1 failed")

    def test_a_build_that_cannot_start_is_a_failure(self):
        self.add("a", PASSES_TWO)
        self.check()
        os.remove(os.path.join(self.root, "tests/a_test.in"))
        _, lines = self.check()
        self.assertIn("tests/a_test.in", lines[0])
        self.assertEqual(lines[-1], "2 passed, 1 failed")

    def test_a_skipped_case_is_counted_apart_with_its_reason(self):
        self.add("a", SKIPS_ONE_OF_TWO)
        self.assertEqual(self.check(), (0, [
            "skipped, 1: no GPU here (S.Gpu)",
            "1 passed, 0 failed, 1 skipped"]))

    def test_the_memory_suite_is_chosen_by_folder(self):
        self.add("a", CRASHES)
        self.add("b", PASSES_TWO, folder="tests/engine/zero")
        self.assertEqual(self.check("check-memory"),
                         (0, ["2 passed, 0 failed"]))

    def test_the_matrix_runs_only_when_it_is_asked_for(self):
        self.add("a", PASSES_TWO, folder="tests/matrix")
        self.add("b", FAILS_ONE_OF_THREE)
        self.assertEqual(self.check()[1][-1], "2 passed, 1 failed")
        self.assertEqual(self.check("check-matrix"),
                         (0, ["2 passed, 0 failed"]))

    def test_check_build_builds_tests_and_runs_none(self):
        self.add("a", CRASHES)
        code, _ = self.run_in_root("ninja", "check-build")
        self.assertEqual(code, 0)
        self.assertTrue(
            os.path.exists(os.path.join(self.root, "out/tests/a_test")))

    def test_check_build_builds_programs_that_no_test_needs(self):
        self.add("a", PASSES_TWO)
        # Instead of a compiler: creates the file after -o.
        self.write("tests/room.ninja", self.room +
                   "build $o/bench/b: link tests/a_test.in\n"
                   "  cxx = sh -c 'touch $$2' sh\n")
        self.assertEqual(self.check(), (0, ["2 passed, 0 failed"]))
        program = os.path.join(self.root, "out/bench/b")
        self.assertFalse(os.path.exists(program))
        code, text = self.run_in_root("ninja", "check-build")
        self.assertEqual(code, 0, text)
        self.assertTrue(os.path.exists(program))

    def test_a_python_test_counts_each_of_its_methods(self):
        self.write("tests/p_test.py", "import unittest\n"
                   "class T(unittest.TestCase):\n"
                   "  def test_a(self): pass\n"
                   "  def test_b(self): self.fail('seeded')\n"
                   "  def test_c(self): self.skipTest('no torch')\n")
        self.write("tests/room.ninja", "build $o/tests/p_test.ok: "
                   "run_python_test tests/p_test.py\n")
        _, lines = self.check()
        self.assertEqual(lines, [
            "skipped, 1: no torch (p_test.p_test.T.test_c)",
            "FAILED p_test.p_test.T.test_b (out/tests/p_test.ok)",
            "1 passed, 1 failed, 1 skipped"])

    def test_a_python_file_without_tests_fails(self):
        self.write("tests/p_test.py", "")
        self.write("tests/room.ninja", "build $o/tests/p_test.ok: "
                   "run_python_test tests/p_test.py\n")
        self.assertEqual(self.check()[1][-1], "0 passed, 1 failed")
