"""Ranks in several processes, started by mpirun on one machine: the bits of
threads, and how such runs end. Skipped, loudly, without mpirun."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
import unittest

from runs import CONFIG, OUT, ZERO, RunsTest

ROOT = os.getcwd()
MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to",
          "none"]
MISSING = [what for what, there in (
    ("mpirun (openmpi-bin)", shutil.which("mpirun")),
    ("zero_mpi.so (libopenmpi-dev)",
     os.path.exists(os.path.join(OUT, "zero_mpi.so")))) if not there]


@unittest.skipIf(MISSING, "SKIPPED: there is no " + " and no ".join(MISSING))
class ProcessesTest(RunsTest):
    def arguments(self, out, ranks, sets, config="run.json"):
        result = [ZERO, "train", config, "--threads", "1", "--ranks",
                  str(ranks), "--set", "training.out_dir=" + out]
        for one in sets:
            result += ["--set", one]
        return result

    def start(self, command):
        return subprocess.Popen(command, cwd=self.folder, text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def end(self, run, code=0):
        stdout, stderr = run.communicate(timeout=120)
        self.assertEqual(run.returncode, code, stdout + stderr)
        return stdout + stderr

    def processes(self, number, ranks, out, *sets, more=()):
        """A run of `number` processes of `ranks` ranks each."""
        return self.start(MPIRUN + ["-n", str(number)] +
                          self.arguments(out, ranks, sets) + list(more))

    def test_every_split_has_the_bits_of_threads(self):
        for sets in (
            ("zero_optimization.stage=0",),
            ("zero_optimization.stage=2", "bf16.enabled=true"),
            ("zero_optimization.stage=3", "zero_optimization.mics_shard_size=2",
             "zero_optimization.overlap_comm=true"),
            ("communication.algorithm=parameter_server",),
        ):
            self.end(self.start(self.arguments("threads", 4, sets)))
            threads = self.summary("threads")
            for number in (2, 4):
                with self.subTest(sets=sets, processes=number):
                    text = self.end(self.processes(number, 4 // number,
                                                   "split", *sets))
                    split = self.summary("split")
                    for key in ("parameters_hash", "final_loss", "wire"):
                        self.assertEqual(split.get(key), threads.get(key), key)
                    # One process prints.
                    self.assertEqual(text.count("parameters_hash"), 1)
                    # Line by line: mpirun's pseudo-terminal is none.
                    self.assertNotIn("\x1b", text)
                    self.assertIn("connected by Open MPI", text)

    def test_the_memory_line_and_the_report_are_of_one_process(self):
        for number, ranks in ((2, 2), (3, 1)):
            text = self.end(self.processes(
                number, ranks, "run", "train_batch_size=12",
                "zero_optimization.stage=2"))
            summary = self.summary("run")
            self.assertEqual(summary["process_ranks"], ranks)
            of_one = summary["peak_bytes"]["total"]
            self.assertRegex(
                text, "the first process [0-9.]+ MiB at its peak; predicted "
                "%.1f MiB of its %d rank" % (ranks * of_one / 2**20, ranks))
            page = self.path("report.html")
            self.end(self.start([ZERO, "report", "run", "--html", page]))
            with open(page) as file:
                self.assertIn('"resident":%d' % (
                    summary["peak_resident_bytes"] // ranks), file.read())

    def test_memory_and_train_count_the_same_process(self):
        launch = MPIRUN + ["-n", "2", ZERO]
        rows = self.end(self.start(launch + ["memory", "run.json", "--json"]))
        row = next(row for row in map(json.loads, (
            line for line in rows.splitlines() if line.startswith("{")))
            if row["as_configured"])
        self.end(self.start(launch + ["train", "run.json", "--set",
                                      "training.out_dir=run"]))
        summary = self.summary("run")
        predicted = summary["predicted_peak_bytes"]
        # Though zero train has loaded MPI and data by then.
        self.assertAlmostEqual(predicted["fixed"], row["fixed"], delta=3 << 19)
        # MPI's part is counted without being loaded.
        self.assertAlmostEqual(summary["peak_resident_bytes"],
                               predicted["total"], delta=4 << 20)

    def test_hierarchical_sums_depend_on_the_hosts_alone(self):
        sets = ("zero_optimization.stage=2", "bf16.enabled=true",
                "communication.algorithm=hierarchical",
                "communication.ranks_per_host=2")
        self.end(self.start(self.arguments("threads", 4, sets)))
        for number in (2, 4):
            self.end(self.processes(number, 4 // number, "split", *sets))
            self.assertEqual(self.hash_of("split"), self.hash_of("threads"))
        # mpirun says that all four are on one host.
        self.end(self.processes(2, 2, "one", *sets[:3]))
        self.assertNotEqual(self.hash_of("one"), self.hash_of("threads"))
        self.assertGreater(self.summary("one")["process_sent_bytes"], 0)

    def test_a_run_is_saved_by_some_processes_and_goes_on_in_others(self):
        sets = ("training.steps=40", "zero_optimization.stage=3")
        self.end(self.start(self.arguments("whole", 4, sets)))
        run = self.processes(2, 2, "parts", *sets)
        self.wait_for_steps(run, "parts", 3)
        run.send_signal(signal.SIGUSR1)  # mpirun passes it on
        self.end(run, code=130)
        self.end(self.processes(4, 1, "parts", *sets,
                                more=["--resume", "latest"]))
        self.assertEqual(self.hash_of("parts"), self.hash_of("whole"))

    def test_the_script_resumes_once_with_or_without_the_users_resume(self):
        script = os.path.join(ROOT, "tools", "jobs", "mpirun.sh")
        command = ["env", "ZERO=" + ZERO, script, "run.json", "--threads", "1",
                   "--set", "training.out_dir=script", "training.save_every=2"]
        for steps, resume in ((4, []), (6, ["--resume", "auto"]),
                              (8, ["--resume=latest"])):
            text = self.end(self.start(
                command + ["training.steps=%d" % steps, *resume]))
            self.assertEqual("resumed" in text, steps > 4, text)
        self.assertIn("--resume lacks its value: auto, latest", self.end(
            self.start(command + ["--resume", "--ranks", "1"]), code=2))

    def test_the_script_starts_again_after_a_crash_before_training(self):
        # The first process of the first start crashes, as in MPI_Init.
        with open(self.path("crashes_once"), "w") as file:
            file.write("#!/bin/bash\n"
                       "if [ $1 = train ] && mkdir started; then\n"
                       "  kill -SEGV $$\n"
                       "fi\n"
                       "exec %s \"$@\"\n" % ZERO)
        os.chmod(self.path("crashes_once"), 0o755)
        script = os.path.join(ROOT, "tools", "jobs", "mpirun.sh")
        command = ["env", "ZERO=" + self.path("crashes_once"), script,
                   "--max-restarts", "1", "run.json", "--threads", "1", "--set",
                   "training.out_dir=script"]
        self.assertIn("zero ended with status 139; start 2, after nothing",
                      self.end(self.start(command)))
        # What zero refuses is not tried again.
        self.assertIn("training did not start, for the reason above: giving up",
                      self.end(self.start(command + ["--model", "none"]),
                               code=1))

    def test_no_process_promises_a_checkpoint_that_one_could_not_write(self):
        # A file size limit stands in for a full disk.
        zero = self.arguments("full", 1, ("training.steps=100000",
                                          "zero_optimization.stage=3"))
        run = self.start(MPIRUN + ["-n", "1"] + zero + [
            ":", "-n", "1", "bash", "-c",
            "ulimit -f 10; exec \"$@\"", "bash"] + zero)
        self.wait_for_steps(run, "full", 3)
        run.send_signal(signal.SIGUSR1)
        text = self.end(run, code=1)
        self.assertRegex(text, r"no checkpoint at step \d+: rank 1 on \S+ "
                         "cannot write")
        self.assertRegex(text, r"rank 1: cannot write \S*full/checkpoints/.*: "
                         "file too large")
        self.assertNotIn(": stopped by", text)

    def test_processes_that_do_not_share_a_folder_are_told_at_the_start(self):
        other = self.path("elsewhere")
        os.makedirs(other)
        os.symlink(self.path("run.json"), os.path.join(other, "run.json"))
        sets = ("training.save_every=50",)
        command = MPIRUN + ["-n", "1"] + self.arguments("apart", 1, sets) + [
            ":", "-n", "1", "--wdir", other] + self.arguments("apart", 1, sets)
        text = self.failure(self.start(command), 30)
        self.assertIn("training.out_dir: rank 1 does not see the folder apart "
                      "that rank 0 has made", text)
        self.assertNotIn("probe", " ".join(os.listdir(self.path("apart"))))

    def failure(self, run, seconds):
        """The error of a run that must fail on its own, in time."""
        start = time.time()
        stdout, stderr = run.communicate(timeout=60)
        self.assertLess(time.time() - start, seconds, stderr)
        self.assertNotEqual(run.returncode, 0, stdout + stderr)
        return stdout + stderr

    def test_a_fault_of_a_rank_ends_all_and_is_named(self):
        for fault, words in (
            ("3:2:throw", r"step 2: mpi: rank 3 aborted the run: injected fault"),
            ("3:2:mismatch", r"step 2: mpi: rank \d differs from rank \d at #\d+ of "
             r"channel \"reduce\": .*injected fault"),
            ("3:2:stop", r"step 2: mpi: rank 3 did not arrive at #\d+ of channel .*rank 3 "
             r"is of process 1, pid \d+ on "),
            # What the process of the hanging rank itself says.
            ("0:2:stop", r"rank 0 hangs and is abandoned; rank 0 is of process 0, pid "
             r"\d+ on "),
        ):
            with self.subTest(fault=fault):
                text = self.failure(
                    self.processes(2, 2, "faulty", "zero_optimization.stage=2",
                                   "communication.timeout_seconds=3",
                                   more=["--inject-fault", fault]), 20)
                self.assertRegex(text, words)

    def test_a_slow_rank_of_another_process_is_named_with_its_host(self):
        text = self.end(self.processes(
            2, 2, "slow", "training.steps=400",
            "zero_optimization.stage=3", more=["--inject-fault", "3:2:slow=20"]))
        self.assertIn("straggler", text)
        [straggler] = self.summary("slow")["stragglers"]
        self.assertEqual((straggler["rank"], straggler["part"],
                          straggler["host"]),
                         (3, "compute", socket.gethostname()))

    def test_groups_are_hosts_where_mics_shard_size_is_auto(self):
        key = "zero_optimization.mics_shard_size=auto"
        stage = "zero_optimization.stage=3"
        text = self.end(self.processes(
            2, 2, "hosts", stage, key, "communication.ranks_per_host=2"))
        self.assertIn("zero_optimization.mics_shard_size auto: 2 groups of the "
                      "2 ranks of communication.ranks_per_host", text)
        self.end(self.start(self.arguments(
            "named", 4, (stage, "zero_optimization.mics_shard_size=2"))))
        self.assertEqual(self.hash_of("hosts"), self.hash_of("named"))
        text = self.end(self.processes(2, 2, "one", stage, key))
        self.assertIn("one group of all 4 ranks, as all ranks are on one host",
                      text)

    def test_what_a_process_sends_is_what_the_plan_says_of_a_host(self):
        by_hosts = ("communication.algorithm=hierarchical",
                    "communication.ranks_per_host=2")
        for sets in (("zero_optimization.stage=0",),
                     ("zero_optimization.stage=2", "bf16.enabled=true",
                      *by_hosts),
                     ("zero_optimization.stage=3",
                      "zero_optimization.mics_shard_size=auto",
                      "communication.ranks_per_host=2"),
                     ("communication.algorithm=parameter_server",)):
            with self.subTest(sets=sets):
                sent = []
                for steps in (4, 9):
                    self.end(self.processes(
                        2, 2, "run", "training.steps=%d" % steps,
                        "training.sample.tokens=0", *sets))
                    sent.append(self.summary("run")["process_sent_bytes"])
                plan = json.loads(self.end(self.start(
                    [ZERO, "plan", "run.json", "--ranks", "4", "--hosts", "2",
                     "--json", "--set", *sets])))
                how = "hierarchical" if sets[-2:] == by_hosts else "flat"
                host = plan["host_bytes"][how][0]
                self.assertEqual((sent[1] - sent[0]) / 5, host["sent"])

    def test_devices_of_all_hosts_are_one_table(self):
        text = self.end(self.start(MPIRUN + ["-n", "3", ZERO, "devices"]))
        self.assertIn("3 processes, connected by Open MPI", text)
        host = socket.gethostname()
        self.assertRegex(text, r"%s +processes 0, 1, 2, \d+ cores each, .*, "
                         r"(no GPU|\d+ x )" % host)
        self.assertRegex(text, r"within %s +\d+\.\d\d GB/s, \d+\.\d us" % host)
        alone = self.end(self.start([ZERO, "devices"]))
        self.assertIn("cpu   ", alone)
        self.assertNotIn("processes", alone)

    def test_a_trace_has_the_ranks_of_all_processes(self):
        for _ in range(2):  # the second replaces the first
            self.end(self.processes(2, 2, "traced", "training.steps=3",
                                    more=["--trace", "t.json"]))
            with open(self.path("t.json")) as file:
                events = json.load(file)["traceEvents"]
            spans = [event for event in events if event["ph"] == "X"]
            self.assertEqual({span["pid"] for span in spans}, {0, 1, 2, 3})
            # By one clock: a step's collective ends on all ranks before that
            # of the next step begins on any.
            ends = [[] for _ in range(4)]
            for span in spans:
                if span["name"] == "all_gather norm and loss":
                    ends[span["pid"]].append((span["ts"],
                                              span["ts"] + span["dur"]))
            for one, two in zip(zip(*ends), list(zip(*ends))[1:]):
                self.assertLess(max(begin for begin, _ in one),
                                min(end for _, end in two))
            self.assertEqual([name for name in os.listdir(self.folder)
                              if "rank" in name], [])

    def test_a_killed_process_is_named(self):
        run = self.processes(2, 2, "killed", "training.steps=100000",
                             "communication.timeout_seconds=10")
        self.wait_for_steps(run, "killed", 2)
        pids = subprocess.run(["pgrep", "-P", str(run.pid), "zero"], text=True,
                              capture_output=True).stdout.split()
        self.assertEqual(len(pids), 2)
        victim = max(pids, key=int)
        os.kill(int(victim), signal.SIGKILL)
        text = self.failure(run, 15)
        self.assertRegex(text, r"process \d ended without reporting an error: "
                               r".*process \d "
                         r"is ranks \d to \d, pid %s on " % victim)

    def test_other_configs_are_named(self):
        other = dict(CONFIG, gradient_clipping=2.0)
        self.config("other.json", other)
        command = MPIRUN + ["-n", "1"] + self.arguments("a", 1, ()) + [
            ":", "-n", "1"] + self.arguments("b", 1, (), config="other.json")
        text = self.failure(self.start(command), 30)
        self.assertRegex(text, r"process 1 differs from rank 0: it has "
                         r"\"gradient_clipping: 2")

    def test_a_launcher_without_mpi_is_told_so(self):
        launched = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2",
                    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
                    "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
        result = subprocess.run(
            self.arguments("alone", 1, ()), cwd=self.folder, text=True,
            capture_output=True, env={**os.environ, **launched}, timeout=60)
        self.assertEqual(result.returncode, 1)
        self.assertIn("says that this is process 0 of 1, but "
                      "OMPI_COMM_WORLD_SIZE is 2", result.stderr)
        for backend, words in (
            ("local", "\"local\" connects threads of one process, but "
             "OMPI_COMM_WORLD_SIZE is 2; want \"mpi\""),
            ("nccl", "\"nccl\" connects GPUs, but --device is cpu; want "
             "\"mpi\""),
        ):
            result = subprocess.run(
                self.arguments("alone", 1, ("communication.backend=" +
                                            backend,)),
                cwd=self.folder, text=True, capture_output=True,
                env={**os.environ, **launched}, timeout=60)
            self.assertIn(words, result.stderr)


if __name__ == "__main__":
    unittest.main()
