"""gpu_check on a machine with a fake GPU and a fake build: shell scripts in
place of the test programs, `zero` and the benchmarks."""

import contextlib
import glob
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import types
import unittest

sys.dont_write_bytecode = True
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(
    os.path.abspath(__file__))))
sys.path[1:1] = [os.path.join(ROOT, "tools/gpu"),
                 os.path.join(ROOT, "tools/bench")]

import bundle
import check
import common
import gpu
import machine
import parts
import programs

SCRIPT = os.path.join(ROOT, "tools/gpu_check")

# The behaviour of a gtest program with --gtest_output=json:PATH. The second
# line distinguishes a program for a GPU from one for the emulator.
GTEST = """#!/bin/sh
# libcublasLt.so.13
SUITES='EarlyDeathTest.
  A
Kernels.
  A
  B'
filter=none
for a; do case $a in
  --gtest_output=json:*) json=${a#*json:} ;;
  --gtest_filter=*) filter=${a#*=} ;;
  --gtest_list_tests) echo "$SUITES"; exit 0 ;;
esac; done
: ${json:=/dev/null}
ran() { echo "[ RUN      ] Kernels.$1"; echo "[ $2 ] Kernels.$1 (1 ms)"; }
cases() { echo '{"testsuites": [{"name": "Kernels", "testsuite": ['"$1"']}]}' \
  >$json; }
"""
PASSES = GTEST + """echo "[==========] Running 2 tests from 1 test suite."
ran A "      OK"
echo "[ RUN      ] Kernels.B"
echo "some words[       OK ] Kernels.B (1 ms)"
cases '{"name": "A", "result": "COMPLETED"}, {"name": "B"}'
"""
# The first of three fails, with the message $WORDS. If that is a fault of the
# GPU's, later ones in the same process fail too.
FAILS = GTEST + """case $filter in
  -Kernels.A) cases '{"name": "B"}, {"name": "C"}'; exit 0 ;;
  none) ;;
  *) exit 2 ;;
esac
echo "[==========] Running 3 tests from 1 test suite."
a='{"name": "A", "failures": [{"failure": "'$WORDS'"}]}'
case $WORDS in
  cuda*) b='{"name": "B", "failures": [{"failure": "as A"}]}' ;;
  *) b='{"name": "B"}' ;;
esac
c='{"name": "C", "result": "SKIPPED"}'
cases "$a, $b, $c"
exit 1
"""
# Leaves no counts: A passes, B crashes, and later ones pass.
CRASHES = GTEST + """case $filter in
  -Kernels.A:Kernels.B) cases '{"name": "C"}'; exit 0 ;;
esac
echo "[==========] Running 3 tests from 1 test suite."
ran A "      OK"
echo "[ RUN      ] Kernels.B"
kill -SEGV $$
"""
SKIPS = GTEST + """echo "[==========] Running 2 tests from 1 test suite."
ran A " SKIPPED"
cases '{"name": "A", "result": "SKIPPED"}, {"name": "B",
  "result": "COMPLETED", "timestamp": "1970-01-01T00:00:00Z"}'
echo "SKIPPED, every test: device cuda:0: the driver is too old"
"""
PARITY = GTEST + """echo "[==========] Running 1 test from 1 test suite."
cat >$json <<END
{"testsuites": [{"name": "Ops/OpParityTest", "testsuite": [
  {"name": "IsTheCpusOnTheSameData/Linear", "result": "COMPLETED",
   "fp32": "2e-07", "fp32_limit": "1e-05",
   "bf16": "0.0031", "bf16_limit": "0.0078"}]}]}
END
"""
# Starts a child that must end with it.
HANGS = """#!/bin/sh
sleep 300 &
echo $! >$CHILD
wait
"""
# `zero train`; the second line identifies a build with NCCL.
ZERO = "#!%s -SE\n" % sys.executable + """# ncclCommInitRankConfig
import json, os, sys, time
sets = dict(a.split("=", 1) for a in sys.argv if "=" in a)
on_gpu = sys.argv[sys.argv.index("--device") + 1] == "cuda"
stage = int(sets.get("zero_optimization.stage", 0))
nccl = sets.get("communication.backend") == "nccl"
if "--ranks" in sys.argv:
    assert sets["device.deterministic_attention"] == "true"
    assert sets["communication.timeout_seconds"] == "20"
    if nccl:
        assert os.environ["NCCL_DEBUG"] == os.environ.get("DEBUG", "WARN")
    if nccl and sys.argv[sys.argv.index("--ranks") + 1] == "2":
        assert os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"
        assert os.environ["NCCL_MAX_CTAS"] == "2"
if os.environ.get("BAD_STAGE") == str(stage):
    sys.exit("there is no key device.deterministic_attention")
config = json.load(open(sys.argv[2]))
assert os.path.getsize(config["data"]["train"]) > 100000
out = config["training"]["out_dir"]
os.makedirs(out)
if out.endswith(os.environ.get("HANGS", "?")):
    print("NCCL WARN a send failed\\nrank 0 waited for rank 1", flush=True)
    time.sleep(300)
with open(out + "/metrics.jsonl", "w") as file:
    for step in range(20):
        loss = 5 - 0.1 * step
        if on_gpu:
            loss *= 1 + float(os.environ.get("OFF_BY", "2e-6"))
        if nccl:
            loss *= 1 + float(os.environ.get("NCCL_OFF_BY", "0"))
        if step == 6 and out.endswith(os.environ.get("NO_LOSS", "?")):
            loss = None
        file.write(json.dumps({"step": step + 1, "loss": loss}) + "\\n")
with open(out + "/summary.json", "w") as file:
    odd = (os.environ.get("ODD_STAGE") == str(stage) or
           out.endswith(os.environ.get("ODD_RUN", "?")))
    nvme = "zero_optimization.offload_optimizer.nvme_path"
    assert (nvme in sets) == out.endswith("nvme"), sets
    json.dump({"parameters_hash": "odd" if odd else "abc", "final_loss": 3.1,
               "tokens_per_second": 1000, "peak_bytes": {"total": 10000000}},
              file)
"""
STEP_BENCH = """#!/bin/sh
cat <<END
{"micro_batch": 8, "accumulation_steps": 1, "sequence_length": 1024,
 "step_ms": [10, 11, 12],
 "device": "Fake H200", "peak_flops_bf16": 989.4e12,
 "host_ms": [0.5], "flops_per_token": 8e8,
 "peak_bytes": {"fixed": 700000000, "total": 20700000000},
 "ops": [{"op": "linear 8x8x8", "ms": 4}, {"op": "adamw", "ms": 1},
         {"op": "linear_cross_entropy 8x8x8", "ms": 2}],
 "memory": {"total": 140e9, "context": 700000000,
            "used": 20750000000, "ledger_peak": 20700000000,
            "predicted_peak": 20700000000}}
END
""".replace("\n \"", " \"").replace("\n         ", " ").replace(
    "\n            ", " ")
# The same, for a GPU that is too small for some settings.
SMALL_GPU = """#!/bin/sh
case "$*" in
  %s)
    echo "step_bench: this run needs 99 GiB; use more ranks; out of memory" >&2
    exit 1 ;;
esac
"""
# PyTorch's error in its first words, followed by much more.
PEER_OUT_OF_MEMORY = (
    "OutOfMemoryError: CUDA out of memory. Tried to allocate 12.27 GiB. GPU 0 "
    "has a total capacity of 79.10 GiB of which 5.12 GiB is free. Including "
    "memory that is not PyTorch's, this process has 73.97 GiB in use. Of the "
    "memory that is allocated 71.40 GiB is PyTorch's, and 1.83 GiB is reserved "
    "by it but not allocated. If memory that is reserved but not allocated is "
    "large, try PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True against "
    "fragments. The documentation of how PyTorch manages memory has more: "
    "https://pytorch.org/docs/stable/notes/cuda.html")
PEER = '{"micro_batch": 2, "peak_bytes": 9e9, "tokens_per_second": 400000}'
OP_BENCH = """#!/bin/sh
cat <<END
{"op": "copy", "shape": "1", "dtype": "bf16", "unit": "GB/s", "rate": 4000}
{"op": "product", "shape": "8", "dtype": "bf16", "unit": "GFLOP/s", "rate": 8e5}
{"op": "adamw, fp32 gradients", "shape": "8", "dtype": "bf16", "unit": "GB/s", "rate": 3700}
END
"""
# A tool that reports failed calls, and counts them unless told not to.
SANITIZER = """#!/bin/sh
echo "========= COMPUTE-SANITIZER"
for a; do case $a in
  */kernels_cuda_test) run=$a ;;
  --gtest_filter=*) run="$run $a" ;;
esac; done
echo "========= Program hit cudaErrorMemoryAllocation (error 2) due to \\"out \
of memory\\" on CUDA API call to cudaMalloc."
echo "=========     Saved host backtrace up to driver entry point at error"
case "$*" in
  *"--report-api-errors no"*) ;;
  *) echo "========= ERROR SUMMARY: 1 error"; exit 86 ;;
esac
%s
$run
echo "========= ERROR SUMMARY: %d errors"
exit %d
"""


class FakeMachine:
    nccl = "23004"

    def problem(self):
        return None

    def info(self):
        return {"name": "Fake H200", "gpus": 1, "memory_bytes": 141 * 10**9,
                "multiprocessors": 132, "compute_capability": "9.0",
                "driver": "580.1", "driver_cuda": "13.0", "cores": 2}

    def libraries(self):
        return {"libcublasLt.so.13": {"path": "/x/libcublasLt.so.13",
                                      "version": "130100"},
                "libcudnn.so.9": {"path": None, "version": None},
                "libnccl.so.2": {"path": "/x/libnccl.so.2",
                                 "version": self.nccl}}

    # No python3 with PyTorch: the peer fails in no time.
    python = "/no/python3"

    def environment(self):
        return {**os.environ, "GPU_CHECK_PYTHON": self.python}


def run_script(*arguments, script=SCRIPT, **more):
    done = subprocess.run([script, *arguments], text=True,
                          capture_output=True, **more)
    return done.returncode, done.stdout, done.stderr


class GpuCheckTest(unittest.TestCase):
    def setUp(self):
        self.root = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, self.root)
        # The parts' own temporary folders, so that one left behind shows.
        self.temp = os.path.join(self.root, "tmp")
        os.makedirs(self.temp)
        self.keep(tempfile, "tempdir", self.temp)
        self.keep(machine, "compute_sanitizer",
                  lambda: os.path.join(self.root, "sanitizer"))
        os.symlink(os.path.join(ROOT, "tools"),
                   os.path.join(self.root, "tools"))
        for name, text in {
                "zero": ZERO, "bench/step_bench": STEP_BENCH,
                "bench/op_bench": OP_BENCH,
                parts.KERNEL_TESTS: PASSES, parts.PARITY_TEST: PARITY,
                "tests/engine/train/cuda_step_test": PASSES,
                "tests/kernels/cuda_faults_test":
                    FAILS.replace("libcublasLt", "fake")}.items():
            self.program("out/" + name, text)
        self.program("sanitizer", SANITIZER % ("", 0, 0))

    def keep(self, module, name, value):
        self.addCleanup(setattr, module, name, getattr(module, name))
        setattr(module, name, value)

    def environ(self, **values):
        for name, value in values.items():
            os.environ[name] = value
            self.addCleanup(os.environ.pop, name, None)

    def program(self, name, text):
        path = os.path.join(self.root, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w") as file:
            file.write(text)
        os.chmod(path, 0o755)

    def small_gpu(self, pattern):
        """Settings that match this shell pattern do not fit."""
        self.program("out/bench/step_bench",
                     SMALL_GPU % pattern + STEP_BENCH.partition("\n")[2])

    def check(self, *arguments, here=None):
        """(exit status, report.json, report.md)"""
        out = os.path.join(self.root, "report")
        with contextlib.redirect_stdout(io.StringIO()):
            code = check.main(["--out", out, *arguments],
                              here or FakeMachine(), root=self.root)
        with open(os.path.join(out, "report.json")) as file:
            found = json.load(file)
        with open(os.path.join(out, "report.md")) as file:
            text = file.read()
        self.assertEqual(os.listdir(self.temp), [])
        # Not more: their reader may be allowed only a few.
        self.assertLessEqual(set(os.listdir(out)), {
            "report.json", "report.md", "log.txt", "bench.json"})
        return code, found, text

    def log(self):
        with open(os.path.join(self.root, "report/log.txt")) as file:
            return file.read()

    def row(self, found, part):
        return next(row for row in found["parts"] if row["part"] == part)

    # ---- The command line ---------------------------------------------------

    def test_help_names_the_parts_and_the_exit_status(self):
        code, text, _ = run_script("--help")
        self.assertEqual(code, 0)
        for word in (*check.LIMITS, "77", "--bundle"):
            self.assertIn(word, text)

    def test_an_unknown_part_is_an_error_that_names_those_there_are(self):
        for arguments in (["--parts", "tests,speed"], ["--limit", "speed=3"],
                          ["--limit", "tests=soon"]):
            code, _, text = run_script(*arguments)
            self.assertEqual(code, 2)
            self.assertIn("speed" if "speed" in str(arguments) else "soon",
                          text)

    def test_the_parts_fit_into_nine_minutes(self):
        self.assertLessEqual(check.SECONDS, 540)
        first = [seconds for name, seconds in check.LIMITS.items()
                 if name != "bench"]
        self.assertLess(sum(first), check.SECONDS - 60)

    def test_what_a_part_leaves_over_is_for_those_behind_it(self):
        out = os.path.join(self.root, "report")
        with contextlib.redirect_stdout(io.StringIO()):
            check.main(["--out", out], FakeMachine(), {
                name: lambda context: programs.passed()
                for name in check.LIMITS}, self.root)
        with open(os.path.join(out, "report.json")) as file:
            limits = {row["part"]: row["limit_s"]
                      for row in json.load(file)["parts"]}
        # No limit is cut, and the last part gets the remaining time.
        self.assertEqual({**limits, "bench": 0}, {**check.LIMITS, "bench": 0})
        self.assertGreater(limits["bench"], check.SECONDS - 60)

    def test_no_gpu_is_one_line_and_77(self):
        if machine.Machine(ROOT).problem() is None:
            self.skipTest("there is a GPU here")
        script = os.path.join(self.root, "tools/gpu_check")
        for environment in (None, {}):
            code, text, errors = run_script(script=script, env=environment)
            self.assertEqual((code, errors), (77, ""))
            self.assertRegex(text, r"\Agpu_check: no NVIDIA GPU here \(.+\); "
                             r"skipped: tests, .*, bench\n\Z")
        self.assertFalse(os.path.exists(self.root + "/out/gpu_check"))

    def test_without_a_gpu_a_checkout_runs_the_emulators_tests(self):
        here = FakeMachine()
        here.problem = lambda: "no /dev/nvidia0"
        graphs, parity = (programs[0] for programs in
                          parts.WITHOUT_GPU.values())
        self.program("out/" + graphs, PASSES)
        self.program("out/" + parity, PASSES)
        for bad in False, True:
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                code = check.main(["--parts", "tests,parity,memory"], here,
                                  root=self.root)
            self.assertEqual(code, 1 if bad else 77)
            self.assertEqual(printed.getvalue().splitlines(), [
                "gpu_check: without a GPU: %s: 2 passed" % graphs,
                "gpu_check: without a GPU: %s: %s" % (
                    parity, "1 failed: Kernels.A" if bad else "2 passed"),
                "gpu_check: no NVIDIA GPU here (no /dev/nvidia0); skipped: "
                "tests, parity, memory"])
            self.environ(WORDS="seeded")
            self.program("out/" + parity, FAILS)

    def test_a_folder_that_can_not_be_written_is_one_line(self):
        errors = io.StringIO()
        with contextlib.redirect_stderr(errors):
            code = check.main(["--out", os.path.join(SCRIPT, "x")],
                              FakeMachine(), root=self.root)
        self.assertEqual(code, 2)
        self.assertRegex(errors.getvalue(),
                         r"\Agpu_check: --out .*/x: .+; name a folder.*\n\Z")

    # ---- Parts --------------------------------------------------------------

    def test_a_run_in_which_all_is_well(self):
        code, found, text = self.check()
        self.assertEqual(found["failed"], [])
        self.assertEqual([row["status"] for row in found["parts"]],
                         ["passed"] * len(check.LIMITS))
        self.assertEqual([row["part"] for row in found["parts"]],
                         list(check.LIMITS))
        self.assertEqual(code, 0)
        for key in ("date", "device", "libraries", "seconds"):
            self.assertIn(key, found)
        # Tests on the emulated GPU are not tests of a GPU.
        self.assertEqual(
            [one["program"] for one in self.row(found, "tests")["programs"]],
            [parts.KERNEL_TESTS, "tests/engine/train/cuda_step_test"])
        for words in ("Fake H200", "580.1", "130100", "Nothing failed",
                      "| Linear | passed | 2.0e-07 of 1.0e-05 | "
                      "3.1e-03 of 7.8e-03 |", "| 4 | bf16 | 3 | abc |",
                      "GPT-2 124M, T 1024", "adamw, fp32 gradients / copy",
                      "| 2 | bf16 | 0 | abc | 0.00e+00 | ok |",
                      "of 989 TFLOP/s dense (Fake H200)",
                      "| Kernels | 2 | 2 | 0 |",
                      "| 20.70 | 20.75 | 20.70 | -50 | ok |"):
            self.assertIn(words, text)

    def failing(self, words):
        """Exit status and row of the part `tests` whose first test fails."""
        self.environ(WORDS=words)
        self.program("out/" + parts.KERNEL_TESTS, FAILS)
        code, found, text = self.check("--parts", "tests,parity")
        self.assertEqual((code, found["failed"]), (1, ["tests"]))
        self.assertEqual(self.row(found, "parity")["status"], "passed")
        self.assertIn("Failed: tests", text)
        return self.row(found, "tests")

    def test_what_fails_is_named_and_hides_nothing(self):
        row = self.failing("seeded")
        self.assertIn("1 failed: Kernels.A", row["why"])
        self.assertEqual([(one["passed"], one["failed"], one["skipped"])
                          for one in row["programs"]], [(1, 1, 1), (2, 0, 0)])
        # In one process.
        self.assertNotIn("--gtest_filter", self.log())

    def test_behind_a_fault_of_the_gpu_a_new_process_goes_on(self):
        row = self.failing("cuda:0: op: an illegal memory access")
        self.assertEqual([(one["passed"], one["failed"])
                          for one in row["programs"]], [(2, 1), (2, 0)])

    def test_after_a_crash_the_other_tests_run_in_a_new_process(self):
        self.program("out/" + parts.KERNEL_TESTS, CRASHES)
        code, found, _ = self.check("--parts", "tests")
        self.assertEqual(code, 1)
        row = self.row(found, "tests")
        self.assertIn("1 failed: Kernels.B (killed by signal 11)", row["why"])
        self.assertNotIn("not reached", row["why"])
        self.assertEqual((row["programs"][0]["passed"],
                          row["programs"][0]["failed"]), (2, 1))

    def test_a_test_that_hangs_is_named_and_leaves_time_for_others(self):
        self.keep(parts, "PROGRAM_SECONDS", 30)
        self.program("out/" + parts.KERNEL_TESTS,
                     CRASHES.replace("kill -SEGV $$", "exec sleep 60"))
        _, found, text = self.check("--parts", "tests", "--limit", "tests=10")
        row = self.row(found, "tests")
        self.assertIn("Kernels.B (stopped at its time limit); 1 not reached",
                      row["why"])
        self.assertIn("kernels_cuda_test | 1 | 1 | 0 | 1 |", text)
        self.assertEqual([one["problem"] is None for one in row["programs"]],
                         [False, True])

    def test_tests_that_are_all_skipped_prove_nothing(self):
        self.program("out/" + parts.PARITY_TEST, SKIPS)
        code, found, _ = self.check("--parts", "parity")
        self.assertEqual(code, 1)
        self.assertIn("no test ran: SKIPPED, every test: device cuda:0: the "
                      "driver is too old", self.row(found, "parity")["why"])

    def test_a_part_that_hangs_is_killed_with_its_children(self):
        child = os.path.join(self.root, "child")
        self.environ(CHILD=child)
        self.program("out/" + parts.PARITY_TEST, HANGS)
        start = time.monotonic()
        code, found, _ = self.check("--parts", "parity,steps", "--limit",
                                    "parity=5")
        self.assertLess(time.monotonic() - start, 30)
        self.assertEqual((code, found["failed"]), (1, ["parity"]))
        self.assertIn("time limit", self.row(found, "parity")["why"])
        self.assert_ends(child)

    def test_a_process_that_no_signal_ends_holds_up_nothing(self):
        asked = []

        class Stuck(subprocess.Popen):
            def wait(self, timeout=None):
                if "parity" not in self.args[0]:
                    return super().wait(timeout)
                asked.append(timeout)
                raise subprocess.TimeoutExpired(self.args, timeout)

        self.environ(CHILD=os.path.join(self.root, "child"))
        self.program("out/" + parts.PARITY_TEST, HANGS)
        self.keep(subprocess, "Popen", Stuck)
        code, found, text = self.check("--parts", "parity,memory")
        self.assertEqual((code, found["failed"]), (1, ["parity"]))
        self.assertIn("time limit, but did not end: it may still hold the GPU",
                      self.row(found, "parity")["why"])
        self.assertEqual(self.row(found, "memory")["status"], "passed")
        self.assertEqual((len(asked), asked[1]), (2, programs.KILL_SECONDS))

    def test_ctrl_c_ends_what_runs_and_leaves_the_report(self):
        child = os.path.join(self.root, "child")
        self.environ(CHILD=child)
        self.program("out/" + parts.PARITY_TEST, HANGS)
        waited = programs.waited

        def interrupted(process, seconds):
            def wait(_):
                del process.wait
                while not os.path.exists(child) or not os.path.getsize(child):
                    time.sleep(0.02)
                raise KeyboardInterrupt

            process.wait = wait
            return waited(process, seconds)

        self.keep(programs, "waited", interrupted)
        code, found, text = self.check("--parts", "parity,steps")
        self.assertEqual((code, found["failed"]), (130, ["parity"]))
        self.assertEqual([row["part"] for row in found["parts"]], ["parity"])
        self.assertIn("interrupted", text)
        self.assert_ends(child)

    def test_sigterm_leaves_what_a_part_found_so_far(self):
        waited, number = programs.waited, []

        def terminated(process, seconds):
            number.append(process)
            if len(number) == 5:  # a CPU and a GPU run are a row
                def wait(limit):  # as if it arrived during the real one
                    del process.wait
                    os.kill(os.getpid(), signal.SIGTERM)
                    process.wait(limit)

                process.wait = wait
            return waited(process, seconds)

        self.keep(programs, "waited", terminated)
        code, found, text = self.check("--parts", "steps,parity")
        # Else it would still write, to a folder that is being removed.
        self.assertEqual(number[-1].returncode, -signal.SIGKILL)
        self.assertEqual((code, found["failed"]), (130, ["steps"]))
        self.assertEqual(len(self.row(found, "steps")["rows"]), 2)
        self.assertIn("Did not run: parity.", text)
        self.assertEqual(signal.getsignal(signal.SIGTERM), signal.SIG_DFL)

    def test_a_program_ends_with_what_started_it_even_by_sigkill(self):
        child = os.path.join(self.root, "child")
        code = ("import sys; sys.path.append(%r); import common; "
                "common.attempt(['sh', '-c', 'echo $$ >%s; exec sleep 300'])" %
                (os.path.join(ROOT, "tools/bench"), child))
        with subprocess.Popen([sys.executable, "-B", "-c", code]) as parent:
            while not os.path.exists(child) or not os.path.getsize(child):
                time.sleep(0.02)
            parent.kill()
        self.assert_ends(child)

    def assert_ends(self, file):
        """The process whose number is in the file."""
        with open(file) as opened:
            status = "/proc/%d/status" % int(opened.read())
        deadline = time.monotonic() + 10
        while self.runs(status) and time.monotonic() < deadline:
            time.sleep(0.05)
        self.assertFalse(self.runs(status))

    @staticmethod
    def runs(status):
        try:
            with open(status) as file:
                return "zombie" not in file.read()
        except OSError:
            return False

    def test_what_no_time_is_left_for_is_said(self):
        code, found, text = self.check("--parts", "memory", "--seconds", "5")
        self.assertEqual(code, 1)
        self.assertEqual(self.row(found, "memory")["status"], "skipped")
        self.assertIn("no time was left", text)

    def test_no_part_and_no_time_are_wrong_options(self):
        for options in (["--parts", ""], ["--seconds", "0"],
                        ["--limit", "tests=-5"], ["--limit", "tests=nan"]):
            with contextlib.redirect_stderr(io.StringIO()):
                with self.assertRaises(SystemExit) as end:
                    check.main(options)
            self.assertEqual(end.exception.code, 2, options)

    def test_a_part_that_breaks_is_a_failure(self):
        def broken(context):
            raise ValueError("seeded")
        out = os.path.join(self.root, "report")
        with contextlib.redirect_stdout(io.StringIO()):
            code = check.main(["--parts", "memory", "--out", out],
                              FakeMachine(), {"memory": broken}, self.root)
        self.assertEqual(code, 1)

    def test_a_loss_that_is_not_finite_fails_its_row_alone(self):
        self.environ(NO_LOSS="GPT-2_fp32_cuda")
        code, found, _ = self.check("--parts", "steps")
        self.assertEqual(code, 1)
        self.assertEqual([row["problem"] for row in
                          self.row(found, "steps")["rows"]],
                         ["on cuda: the loss of step 7 is not finite"] +
                         [None] * 3)

    def test_losses_that_drift_apart_fail(self):
        self.environ(OFF_BY="2e-5")  # too much for fp32, little for bf16
        code, found, _ = self.check("--parts", "steps")
        self.assertEqual(code, 1)
        self.assertEqual([row["problem"] is None for row in
                          self.row(found, "steps")["rows"]],
                         [False, False, True, True])

    def test_a_stage_with_other_parameters_fails(self):
        self.environ(ODD_STAGE="2")
        code, found, text = self.check("--parts", "stages")
        self.assertEqual(code, 1)
        rows = self.row(found, "stages")["rows"]
        self.assertEqual([row["stage"] for row in rows if row["problem"]],
                         [2] * 4)
        self.assertIn("parameters differ from stage 0's", text)

    def test_without_stage_0_there_is_nothing_to_compare_with(self):
        self.environ(BAD_STAGE="0", ODD_STAGE="1")
        code, found, text = self.check("--parts", "stages")
        self.assertEqual(code, 1)
        row = self.row(found, "stages")
        self.assertIn("no key device.deterministic_attention", row["why"])
        self.assertEqual(
            [one["problem"] for one in row["rows"][1:4]],
            ["ran, but not compared: stage 0 did not run"] * 3)
        self.assertNotIn("other parameters", text)

    def test_offload_with_other_parameters_fails(self):
        self.environ(ODD_RUN="offload_param_nvme")
        code, found, text = self.check("--parts", "offload")
        self.assertEqual(code, 1)
        self.assertEqual([(row["offload"], row["problem"] is None) for row in
                          self.row(found, "offload")["rows"]],
                         [("none", True), ("optimizer on cpu", True),
                          ("optimizer on nvme", True), ("param on cpu", True),
                          ("param on nvme", False)])
        self.assertIn("parameters differ from the run without offload", text)

    def test_sums_of_16_bits_are_locals_and_those_of_fp32_near(self):
        self.environ(NCCL_OFF_BY="5e-7")
        code, found, _ = self.check("--parts", "nccl")
        self.assertEqual(code, 1)
        self.assertEqual(
            [(one["ranks"], one["dtype"]) for one in
             self.row(found, "nccl")["rows"] if one["problem"]],
            [(1, "bf16"), (1, "fp32"), (2, "bf16"), (2, "bf16")])
        self.environ(NCCL_OFF_BY="2e-6")
        found = self.check("--parts", "nccl")[1]
        self.assertTrue(all(one["problem"] for one in
                            self.row(found, "nccl")["rows"]))

    def test_two_ranks_of_an_older_nccl_want_two_gpus(self):
        here = FakeMachine()
        here.nccl = "22809"
        code, found, text = self.check("--parts", "nccl", here=here)
        self.assertEqual(code, 0)
        row = self.row(found, "nccl")
        self.assertEqual(["skipped" in one for one in row["rows"]],
                         [False, False, True, True, True])
        self.assertIn("| 2 | fp32 | 3 |  |  | skipped |", text)
        self.assertEqual(row["status"], "passed")
        self.assertEqual(
            row["why"], "NCCL 2.28.9; but NCCL between ranks is unproven here; "
            "skipped: 2 ranks need as many GPUs, or NCCL 2.30, but there is 1")
        self.assertIn(row["why"], text)
        # If they ran, it is proven.
        found = self.check("--parts", "nccl")[1]
        self.assertEqual(self.row(found, "nccl")["why"], "NCCL 2.30.4")

    def test_a_run_that_hangs_says_why_and_leaves_time_for_the_others(self):
        self.keep(parts, "RUN_SECONDS", 15)
        self.environ(HANGS="nccl_1_fp32_3_nccl", NCCL_DEBUG="INFO",
                     DEBUG="INFO")
        code, found, _ = self.check("--parts", "nccl")
        self.assertEqual(code, 1)
        self.assertEqual(
            [one["problem"] for one in self.row(found, "nccl")["rows"]],
            [None, "nccl: stopped at its time limit: NCCL WARN a send failed; "
             "rank 0 waited for rank 1", None, None, None])

    def test_a_build_without_nccl_is_skipped(self):
        self.program("out/zero", ZERO.replace(
            "ncclCommInitRankConfig",
            "found no CUDA toolkit, or no nccl.h and libnccl.so.2 beside it"))
        code, found, _ = self.check("--parts", "nccl")
        self.assertEqual(code, 0)
        self.assertIn("this build has no NCCL", self.row(found, "nccl")["why"])

    def table(self, left, *seconds):
        """A part of `left` seconds whose rows take this many, and fail when the
        time is over, or if they take -1."""
        class Clock:
            partial = {}
            now = 0

            def left(self):
                return left - self.now

        def run(context, seconds):
            context.now += abs(seconds)
            return {"problem": "seeded" if seconds < 0 else
                    "stopped" if context.left() <= 0 else None}

        return parts.table_of(Clock(), [[one] for one in seconds], run,
                              lambda row: "row")

    def test_rows_that_do_not_fit_are_counted(self):
        row = self.table(60, 55, 1, 1)
        self.assertEqual((row["status"], len(row["rows"])), ("passed", 1))
        self.assertIn("the last 2 of 3 rows", row["why"])
        row = self.table(60, 20, -1, 35, 1)
        self.assertEqual(row["status"], "failed")
        self.assertIn("seeded; left out for time: the last 1", row["why"])
        self.assertEqual(self.table(2, 1)["status"], "failed")

    def test_a_slow_machine_is_no_failure_and_a_hang_is(self):
        # Less is left than the longest row took; or enough, as it seemed.
        for seconds in [35, 1, 1], [20, 41, 1]:
            row = self.table(60, *seconds)
            self.assertEqual(row["why"],
                             "left out for time: the last 2 of 3 rows")
            self.assertEqual((row["status"], len(row["rows"])), ("passed", 1))
        # A test that takes three times as long, or never passed, hangs.
        self.assertEqual(self.table(60, 10, 50)["status"], "failed")
        self.assertEqual(self.table(60, 60)["status"], "failed")

    def test_memory_that_was_not_foreseen_fails(self):
        self.program("out/bench/step_bench", STEP_BENCH.replace(
            '"predicted_peak": 20700000000', '"predicted_peak": 19700000000'))
        code, found, _ = self.check("--parts", "memory")
        self.assertEqual(code, 1)
        # 0.5 % of what is measured, and 64 MiB.
        self.assertIn("predicted 19.70 GB, measured 20.75 GB: 1050 MB apart, "
                      "171 are allowed", self.row(found, "memory")["why"])

    def test_what_libraries_load_at_first_was_not_foreseen(self):
        self.program("out/bench/step_bench", STEP_BENCH.replace(
            '"predicted_peak": 20700000000', '"predicted_peak": 20650000000'))
        code, _, text = self.check("--parts", "memory")
        self.assertEqual(code, 0)
        self.assertIn("| 20.65 | 20.75 | 20.70 | -100 | ok |", text)

    def sanitized(self, *fill):
        self.keep(parts, "START_SECONDS", 1)
        self.program("sanitizer", SANITIZER % fill)
        return self.row(self.check("--parts", "memcheck", "--limit",
                                   "memcheck=12")[1], "memcheck")

    def test_the_sanitizers_findings_fail(self):
        write = 'echo "========= Invalid __global__ write of size 4 bytes"'
        # To the end, by its status alone, and before it had to be stopped.
        for fill in ((write, 1, 86), (write, 1, 0), (write, 0, 86),
                     (write + "; $run; sleep 60", 0, 0)):
            row = self.sanitized(*fill)
            self.assertEqual(row["status"], "failed", fill)
            self.assertIn("Invalid __global__ write", row["why"])
        self.assertIn("first (about Kernels.B): Invalid", self.sanitized(
            "$run; " + write, 1, 86)["why"])

    def test_what_the_summary_does_not_count_is_no_finding(self):
        row = self.sanitized('echo "========= Warning: some kernels are new"',
                             0, 0)
        self.assertEqual(row["status"], "passed")

    def test_a_fault_of_the_sanitizer_itself_is_no_finding(self):
        row = self.sanitized('echo "========= Internal Sanitizer Error: no"', 1,
                             86)
        self.assertEqual(row["status"], "skipped")
        self.assertIn("compute-sanitizer itself failed: no", row["why"])

    def test_hazards_are_findings(self):
        self.program("sanitizer", SANITIZER.replace(
            "ERROR SUMMARY: %d errors",
            "RACECHECK SUMMARY: %d hazards displayed (0 errors, 2 warnings)") %
            ("", 2, 0))
        _, found, _ = self.check("--parts", "racecheck")
        self.assertIn("2 findings", self.row(found, "racecheck")["why"])

    def test_our_own_kernels_are_sanitized_first_in_one_process(self):
        self.program("out/" + parts.KERNEL_TESTS, PASSES.replace(
            "\nKernels.", "\nLinearTest.\n  A\nKernels.", 1).replace(
                "  B'", "  B\nSgdTest.\n  A\nAttentionTest.\n  A'"))
        for tool in "memcheck", "racecheck":
            self.check("--parts", tool)
            self.assertEqual(
                [line.split("--gtest_filter=")[1]
                 for line in self.log().splitlines() if "--tool" in line],
                ["Kernels.*:SgdTest.*", "LinearTest.*:AttentionTest.*"])

    def test_a_sanitizer_out_of_time_says_what_it_did_not_reach(self):
        self.program("out/" + parts.KERNEL_TESTS, PASSES.replace(
            "  B'", "  B\n  C\nSgdTest.\n  A\nAttentionTest.\n  A\n  B'"))
        row = self.sanitized("$run; echo '[ RUN      ] Kernels.C'; sleep 60",
                             0, 0)
        self.assertEqual(row["status"], "passed")
        self.assertEqual([list(one.values()) for one in row["rows"]], [
            ["Kernels", 2, 3, 1], ["SgdTest", 0, 1, 1],
            ["AttentionTest", 0, 2, 2]])
        self.assertEqual(
            row["why"], "not reached: Kernels (1 of 3), SgdTest (1 of 1), "
            "AttentionTest (2 of 2); --parts memcheck --limit memcheck=500 has "
            "more time")

    def test_tests_that_are_all_skipped_prove_nothing_under_a_tool(self):
        self.program("out/" + parts.KERNEL_TESTS, SKIPS)
        row = self.sanitized("", 0, 0)
        self.assertEqual(row["status"], "failed")
        self.assertIn("no test ran: SKIPPED, every test: device cuda:0: the "
                      "driver", row["why"])
        self.program("out/" + parts.KERNEL_TESTS, PASSES)
        row = self.sanitized("sleep 60", 0, 0)
        self.assertEqual(row["status"], "skipped")
        self.assertIn("no test ended in time", row["why"])

    def test_a_sanitizer_that_cannot_run_here_is_skipped(self):
        row = self.sanitized('echo "========= Error: Device not supported"',
                             0, 1)
        self.assertEqual(row["status"], "skipped")
        self.keep(machine, "compute_sanitizer", lambda: None)
        code, found, _ = self.check("--parts", "racecheck")
        self.assertEqual(code, 0)
        self.assertIn("not installed", self.row(found, "racecheck")["why"])

    def test_a_benchmark_that_fails_is_a_failure_and_a_slow_one_is_not(self):
        self.program("out/bench/op_bench",
                     OP_BENCH.replace("3700", "3500"))
        code, found, text = self.check("--parts", "bench")
        self.assertEqual(code, 0)
        self.assertRegex(text, r"adamw.* / copy +0.875 +>= 0.900 +0.972  below")
        self.program("out/bench/step_bench", "#!/bin/sh\necho broken; exit 3\n")
        code, found, _ = self.check("--parts", "bench")
        self.assertEqual((code, found["failed"]), (1, ["bench"]))

    def test_a_gpu_that_is_too_small_for_a_model_is_no_failure(self):
        self.small_gpu("*preset=Qwen2.5-7B*")
        code, found, text = self.check("--parts", "bench")
        self.assertEqual((code, found["failed"]), (0, []))
        self.assertIn("too large for this GPU: Qwen2.5 7B, T 4096", text)
        self.assertIn("too_small", str(self.row(found, "bench")))
        # But one whose smaller micro-batch breaks is.
        self.small_gpu("*preset=Qwen2.5-7B*gpu=8*) ;; *preset=Qwen2.5-7B*) "
                       "echo broken >&2; exit 3 ;; none")
        self.assertEqual(self.check("--parts", "bench")[0], 1)

    def test_what_fits_without_moments_has_no_target(self):
        self.small_gpu("*SGD*) ;; *preset=Qwen2.5-7B*")
        code, found, text = self.check("--parts", "bench")
        self.assertEqual(code, 0)
        rows = {row["model"]: row for row in
                self.row(found, "bench")["bench"]["models"]}
        self.assertIn('optimizer={"type":"SGD"',
                      rows["Qwen2.5 7B, T 4096"]["setting"])
        self.assertNotIn("Qwen2.5 7B, 4 micro-batches, T 1024 tok/s", text)
        self.assertIn("Qwen2.5 3B, 4 micro-batches, T 1024 tok/s", text)

    def with_peer(self, script):
        """report.md of GPT-2's benchmark, if this is PyTorch's python."""
        self.program("python", "#!/bin/sh\necho $* >>$CALLS\n" + script)
        self.environ(CALLS=os.path.join(self.root, "calls"))
        here = FakeMachine()
        here.python = os.path.join(self.root, "python")
        _, found, text = self.check("--parts", "bench", "--bench",
                                    "--models gpt2", here=here)
        rows = self.row(found, "bench")["bench"]["models"]
        self.assertEqual([row["model"] for row in rows],
                         ["GPT-2 124M, T 1024"])
        return text

    def test_the_peer_takes_our_batch_or_half_of_it_until_it_fits(self):
        text = self.with_peer("""case $* in
  *"--micro-batch 2 "*) echo '%s' ;;
  *) echo "%s"; exit 1 ;;
esac
""" % (PEER, json.dumps({"error": PEER_OUT_OF_MEMORY}).replace('"', '\\"')))
        with open(os.environ["CALLS"]) as file:
            self.assertEqual([line.split("--micro-batch ")[1][0]
                              for line in file], ["8", "4", "2"])
        self.assertIn("PyTorch: 400000 tok/s, micro-batch 2, 9.00 GB\n", text)
        self.assertRegex(text, r"PyTorch compiled, micro-batch 8 / 2 +"
                         r"\d\.\d+ +>= 1\.150 +\d+\.\d{3}  ")

    def test_the_models_with_an_mfu_are_measured_behind_the_first(self):
        order = []
        run = gpu.Run(types.SimpleNamespace(seconds=60, models=[], sweep=False,
                                            json=None))
        run.device = lambda: None
        run.one_model = lambda one: order.append(gpu.label(one)) or ({}, ())
        run.stages = lambda one, setting: order.append("stages")
        run.peer = lambda one, row: order.append("PyTorch " + gpu.label(one))
        run.run()
        self.assertEqual(order[:5], [
            "GPT-2 124M, T 1024", "stages", "PyTorch GPT-2 124M, T 1024",
            "Qwen2.5 3B, T 1024", "Qwen2.5 3B, 4 micro-batches, T 1024"])
        behind = order[len(gpu.MODELS) + 2:]
        self.assertTrue(all(one.startswith("PyTorch ") for one in behind))
        self.assertEqual(len(behind), len(gpu.MODELS) - 1)

    def test_an_error_keeps_its_first_words_and_its_last(self):
        self.assertGreater(len(PEER_OUT_OF_MEMORY), 500)
        short = common.both_ends(PEER_OUT_OF_MEMORY)
        self.assertLess(len(short), 450)
        self.assertRegex(short, r"\AOutOfMemoryError: CUDA out of memory\. .*"
                         r" \.\.\. .*/cuda\.html\Z")

    def test_a_peer_that_can_not_compile_is_no_target(self):
        text = self.with_peer("""case $* in
  *compile*) echo '{"error": "no C compiler"}'; exit 1 ;;
esac
echo '%s'
""" % PEER)
        self.assertIn("9.00 GB, not compiled: no C compiler\n", text)
        self.assertNotIn("PyTorch compiled", text)

    def test_what_a_benchmark_left_out_for_time_is_named(self):
        self.program("out/bench/step_bench",
                     STEP_BENCH.replace("\n", "\nsleep 4\n", 1))
        code, found, text = self.check(
            "--parts", "bench", "--limit", "bench=25",
            "--bench=--models Qwen2.5-7B,Qwen2.5-3B --no-peers")
        self.assertEqual(code, 0)
        row = self.row(found, "bench")
        self.assertEqual(row["status"], "passed")
        self.assertRegex(row["why"], r"\A\d of \d left out for time: "
                         r".*Qwen2\.5 7B, T 4096\Z")
        self.assertIn("\n" + row["why"] + "\n", text)
        row = self.row(self.check("--parts", "bench", "--limit",
                                  "bench=8")[1], "bench")
        self.assertEqual(row["status"], "skipped")

    def test_options_of_the_benchmark_are_passed_on_and_checked(self):
        _, found, text = self.check(
            "--parts", "bench", "--bench=--models gpt2 --no-peers --sweep")
        self.assertEqual(len(self.row(found, "bench")["bench"]["sweep"]), 18)
        self.assertIn("device.loss_chunk_rows=4096: ", text)
        self.assertIn("bench $ ", self.log())
        for options, words in (("--models gpt3", "no 'gpt3'; there are "),
                               ("'--models", "--bench: No closing quotation")):
            code, _, errors = run_script("--bench=" + options)
            self.assertEqual(code, 2)
            self.assertIn(words, errors)

    def test_rows_before_a_fault_are_kept(self):
        self.program("out/bench/op_bench",
                     OP_BENCH + "echo '{broken'; echo fault >&2; exit 1\n")
        code, found, text = self.check("--parts", "bench")
        self.assertEqual(code, 1)
        row = self.row(found, "bench")
        self.assertIn("op_bench: fault", row["why"])
        self.assertEqual(len(row["bench"]["device"]), 3)
        self.assertIn("GPT-2 124M, T 1024", text)

    def test_the_benchmark_ends_with_its_time(self):
        self.program("out/bench/op_bench",
                     OP_BENCH + "exec sleep 300\n")
        run = gpu.Run(types.SimpleNamespace(
            seconds=5, json=None, out=os.path.join(self.root, "out")))
        wants = run.wants
        run.wants = lambda what, _: wants(what, 0)
        start = time.monotonic()
        run.device()
        self.assertLess(time.monotonic() - start, 30)
        self.assertEqual(len(run.result["device"]), 3)
        self.assertEqual(run.result["problems"], [])
        self.assertIn("1 of 1 left out for time: op_bench",
                      run.result["text"])

    def test_a_gpu_that_is_in_no_table_has_no_mfu(self):
        self.program("out/bench/step_bench",
                     STEP_BENCH.replace("989.4e12", "0"))
        code, _, text = self.check("--parts", "bench")
        self.assertEqual(code, 0)
        self.assertIn("the peak of Fake H200 is not in the table", text)
        self.assertNotRegex(text, "MFU +[0-9]")

    # ---- The machine --------------------------------------------------------

    def test_wheels_of_cuda_12_lend_no_cudnn_or_nccl(self):
        def install(name, *files):
            for file in files:
                self.program("%s/nvidia/%s" % (name, file), "")
            found = machine.wheel_folders(os.path.join(self.root, name))
            return [path.split("/nvidia/")[1] for path in found]

        wheels = ("cudnn/lib/libcudnn.so.9", "nccl/lib/libnccl.so.2")
        self.assertEqual(
            install("old", "cublas/lib/libcublasLt.so.12", *wheels),
            ["cublas/lib"])
        self.assertEqual(
            install("new", "cu13/lib/libcublasLt.so.13", *wheels),
            ["cu13/lib", "cudnn/lib", "nccl/lib"])
        self.assertEqual(
            install("other", "cublas/lib/libcublasLt.so.13", *wheels),
            ["cublas/lib", "cudnn/lib", "nccl/lib"])

    # ---- The bundle ---------------------------------------------------------

    def bundle(self, *arguments):
        file = os.path.join(self.root, "b.tar.xz")
        code, text, errors = run_script(
            "--bundle", file, "--from", os.path.join(self.root, "out"),
            *arguments, env={**os.environ, "TMPDIR": self.temp})
        self.assertEqual(os.listdir(self.temp), [])
        return file, code, text + errors

    def test_a_bundle_runs_anywhere(self):
        file, code, text = self.bundle()
        self.assertEqual(code, 0, text)
        self.assertIn("tools/gpu_check", text)
        with tempfile.TemporaryDirectory() as empty:
            with tarfile.open(file) as tar:
                tar.extractall(empty)
            folder = os.path.join(empty, bundle.NAME)
            for name in ("out/zero", "out/bench/step_bench", "LICENSE",
                         "out/" + parts.PARITY_TEST, "configs/llama_tiny.json",
                         "tools/bench/gpu.py"):
                self.assertTrue(os.path.exists(os.path.join(folder, name)))
            self.assertFalse(glob.glob(folder + "/**/*faults*",
                                       recursive=True))
            if machine.Machine(folder).problem() is None:
                self.skipTest("there is a GPU here")
            before = sorted(os.walk(empty))
            code, text, errors = run_script(
                script=folder + "/tools/gpu_check", cwd="/", env={})
            self.assertEqual((code, errors), (77, ""))
            self.assertEqual(text.count("\n"), 1)
            self.assertEqual(sorted(os.walk(empty)), before)

    def test_a_bundle_of_less_than_all_is_refused(self):
        os.remove(os.path.join(self.root, "out/bench/step_bench"))
        file, code, text = self.bundle()
        self.assertEqual(code, 2)
        self.assertIn("bench/step_bench is not built: ninja", text)
        for path in glob.glob(self.root + "/out/tests/*/*"):
            shutil.rmtree(path) if os.path.isdir(path) else os.remove(path)
        self.assertIn("build it with CUDA", self.bundle()[2])
        self.assertFalse(os.path.exists(file))

    def test_a_bundle_that_can_not_be_made_is_one_line(self):
        out = ["--from", os.path.join(self.root, "out")]
        file = os.path.join(self.root, "b.tar.xz")
        for arguments, words in (
                (["--bundle", file, "--from", "no/build"], "no/build; name a"),
                (["--bundle", "/no/b.tar.xz", *out], "there is no folder /no"),
                (["--bundle", "/proc/b.tar.xz", *out], "--bundle /proc/b.tar"),
                (["--bundle", self.root + "/b.zip", *out], "end in .tar.xz"),
                (["--bundle", "", *out], "--bundle '': the name must end"),
                (["--bundle"], "--bundle: expected one argument"),
                (["--from", "out"], "goes with --bundle FILE")):
            code, text, errors = run_script(*arguments)
            self.assertEqual((code, text), (2, ""), arguments)
            self.assertRegex(errors, r"\Agpu_check: [^\n]+\n\Z")
            self.assertIn(words, errors)
        self.assertFalse(os.path.exists(file))

    def test_a_bundle_that_is_too_large_names_what_is(self):
        self.keep(bundle, "LARGEST", 1000)
        with self.assertRaisesRegex(bundle.Error, "largest: tools/"):
            bundle.make(ROOT, os.path.join(self.root, "out"),
                        os.path.join(self.root, "b.tar.xz"))
        self.assertEqual(os.listdir(self.temp), [])

    def test_cudas_libraries_stay_out(self):
        self.program("ldd", "#!/bin/sh\ncat <<END\n"
                     "  libdnnl.so.2 => /usr/lib/libdnnl.so.2 (0x1)\n"
                     "  libcublasLt.so.13 => not found\n"
                     "  libnccl.so.2 => /usr/lib/libnccl.so.2 (0x1)\n"
                     "  libc.so.6 => /lib/libc.so.6 (0x1)\n"
                     "  /lib64/ld-linux-x86-64.so.2 (0x1)\nEND\n")
        self.environ_path(self.root)
        self.assertEqual(bundle.shared_libraries("x"),
                         {"libdnnl.so.2": "/usr/lib/libdnnl.so.2"})

    def environ_path(self, folder):
        path = os.environ["PATH"]
        self.addCleanup(os.environ.__setitem__, "PATH", path)
        os.environ["PATH"] = folder + ":" + path


if __name__ == "__main__":
    unittest.main()
