"""The job scripts of tools/jobs, unchanged, on a cluster of several hosts that
are namespaces of this machine. Skipped, loudly, without root or Slurm.

  python3 -B tests/cluster/cluster_test.py --repeat 20 FaultsTest
                        each fault 20 times instead of once, and a table of them
"""

import contextlib
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import unittest

OUT = os.path.abspath(os.environ.get("ZERO_OUT", "out"))
ZERO = os.path.join(OUT, "zero")
JOBS = os.path.abspath("tools/jobs")
HERE = os.path.dirname(os.path.abspath(__file__))
CLUSTER = os.path.join(HERE, "cluster")
REPEAT = 1  # --repeat: how often each fault is tried
RUN = "out/run"  # the folder that run.json does not name
TEMP = "/var/tmp"  # the same on all hosts; their /tmp is their own
MISSING = [program for program in
           ("ip", "nsenter", "unshare", "munged", "slurmctld", "slurmd",
            "sbatch", "mpirun") if not shutil.which(program)]
if os.geteuid() != 0:
    MISSING.append("root")
if not os.path.exists(os.path.join(OUT, "zero_mpi.so")):
    MISSING.append("zero_mpi.so")
if OUT.startswith("/tmp/"):
    MISSING.append("tree outside /tmp")

CONFIG = {
    "model": {"preset": "gpt2-tiny", "n_layer": 2, "n_embd": 64},
    "data": {"train": os.path.abspath("engine") + "/base/*.h",
             "tokenizer": "bytes", "sequence_length": 32},
    "training": {"steps": 30, "save_final": False},
    "train_batch_size": 8,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
    "zero_optimization": {"stage": 3},
    "communication": {"timeout_seconds": 20},
}


class HostsTest(unittest.TestCase):
    """A cluster of `hosts` hosts for all tests of a class."""
    hosts = 2

    @classmethod
    def setUpClass(cls):
        cls.state = tempfile.mkdtemp(prefix="zero-hosts-", dir=TEMP)
        cls.env = {**os.environ, "CLUSTER": cls.state, "ZERO": ZERO,
                   "JOBS": JOBS, "PATIENCE": "30",
                   "OMPI_MCA_plm_rsh_agent": CLUSTER + " rsh"}
        cls.addClassCleanup(cls.cluster, "down")
        cls.cluster("up", str(cls.hosts))

    @classmethod
    def cluster(cls, *args, cwd="/", timeout=120):
        result = subprocess.run([CLUSTER, *args], cwd=cwd, text=True,
                                env=cls.env, stdin=subprocess.DEVNULL,
                                capture_output=True, timeout=timeout)
        if result.returncode:
            raise AssertionError("%s: %d\n%s%s" % (
                args, result.returncode, result.stdout, result.stderr))
        return result.stdout

    def setUp(self):
        folder = tempfile.TemporaryDirectory(dir=TEMP)
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        with open(self.path("run.json"), "w") as file:
            json.dump(CONFIG, file)

    def path(self, *names):
        return os.path.join(self.folder, *names)

    def on(self, *args):
        return self.cluster("on", "ctl", *args, cwd=self.folder)

    def threads_hash(self, ranks, *sets):
        """parameters_hash of a run with ranks as threads of one process
        here."""
        subprocess.run([ZERO, "train", "run.json", "--ranks", str(ranks),
                        "--threads", "1", "--set",
                        "training.out_dir=threads", *sets], check=True,
                       cwd=self.folder, stdout=subprocess.DEVNULL)
        return self.summary("threads")["parameters_hash"]

    def summary(self, out=RUN):
        with open(self.path(out, "summary.json")) as file:
            return json.load(file)

    def sbatch(self, *args):
        text = self.on("sbatch", "--output=job.out", "--cpus-per-task=2",
                       *args)
        return text.split()[-1]

    def output(self):
        try:
            with open(self.path("job.out")) as file:
                return file.read()
        except FileNotFoundError:
            return ""

    def state_of(self, job):
        text = self.on("scontrol", "show", "job", job)
        return re.search(r"JobState=(\w+)", text)[1]

    def wait(self, job, until=("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT"),
             seconds=90):
        end = time.time() + seconds
        while time.time() < end:
            state = self.state_of(job)
            if state in until:
                return state
            time.sleep(0.2)
        self.fail("job %s is %s\n%s" % (job, state, self.output()))

    def metrics(self):
        """The lines of the run so far; the last may be incomplete."""
        try:
            with open(self.path(RUN, "metrics.jsonl")) as file:
                return [json.loads(line) for line in file
                        if line.endswith("\n")]
        except FileNotFoundError:
            return []

    def wait_for_steps(self, steps):
        end = time.time() + 60
        while time.time() < end:
            if len(self.metrics()) >= steps:
                return
            time.sleep(0.05)
        self.fail(self.output())

    def mpirun(self, *args, hosts=2):
        """mpirun.sh on ctl, with a hostfile of this many hosts."""
        with open(self.path("hosts"), "w") as file:
            for number in range(1, hosts + 1):
                file.write("node%d slots=1\n" % number)
        with open(self.path("job.out"), "w") as output:
            return subprocess.Popen(
                [CLUSTER, "on", "ctl", JOBS + "/mpirun.sh", "--hostfile",
                 "hosts", *args], cwd=self.folder, env=self.env, text=True,
                stdout=output, stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL)


@unittest.skipIf(MISSING, "SKIPPED: there is no " + ", no ".join(MISSING))
class ClusterTest(HostsTest):

    def test_a_job_has_the_bits_of_threads_of_one_machine(self):
        job = self.sbatch(JOBS + "/slurm.sbatch", "run.json", "--ranks", "2",
                          "--threads", "1")
        self.assertEqual(self.wait(job), "COMPLETED", self.output())
        self.assertIn("on 2 hosts", self.output())
        self.assertEqual(self.summary()["parameters_hash"],
                         self.threads_hash(4))

    def test_a_job_whose_time_is_up_goes_on_where_it_was(self):
        steps = ["--set", "training.steps=400"]
        job = self.sbatch(JOBS + "/slurm.sbatch", "run.json", "--threads", "1",
                          "--resume", "auto",
                          *steps)
        self.wait_for_steps(20)
        self.on("scancel", "--batch", "--signal=USR1", job)  # as --signal=B:
        self.assertEqual(self.wait(job), "COMPLETED", self.output())
        text = self.output()
        self.assertIn("the time is nearly up: saving", text)
        self.assertIn("start 2 on node[1-2], after out/run/checkpoints/step-", text)
        self.assertEqual(self.summary()["parameters_hash"],
                         self.threads_hash(2, *steps))

    def test_a_job_that_cannot_start_is_not_started_again(self):
        steps = ["--set", "training.steps=100000", "--set",
                 "training.save_every=10", "--threads", "1"]
        first = self.sbatch("--nodes=1", "--output=first.out",
                            JOBS + "/slurm.sbatch", "run.json", *steps)
        self.wait_for_steps(20)
        # Its checkpoints are not those of a second job in the same folder.
        second = self.sbatch("--nodes=1", JOBS + "/slurm.sbatch", "run.json",
                             *steps)
        self.assertEqual(self.wait(second), "FAILED", self.output())
        self.assertIn("another run is writing to", self.output())
        self.assertIn("training did not start, for the reason above: not "
                      "restarted", self.output())
        self.on("scancel", first)
        self.wait(first)
        # Every process would say what is wrong, and srun tell the status of
        # those that it ended.
        for words, reason in (
                (["--nodes=2", "--ntasks=3"], "3 tasks on 2 nodes"),
                (["--nodes=2"], "training.stpes")):
            job = self.sbatch(*words, "--output=%s.out" % len(words),
                              JOBS + "/slurm.sbatch", "run.json", "--set",
                              "training.stpes=3")
            self.assertEqual(self.wait(job), "FAILED")
            with open(self.path("%s.out" % len(words))) as file:
                self.assertIn(reason, file.read())
            self.assertIn("ExitCode=2:0", self.on("scontrol", "show", "job",
                                                  job))

    def test_mpirun_goes_on_after_a_process_was_killed(self):
        sets = ["--set", "training.steps=1500", "--set",
                "training.save_every=10"]
        run = self.mpirun("--max-restarts", "2", "run.json", "--threads", "1",
                          *sets)
        # Twice: the second time there is a checkpoint from before.
        for steps in (25, 125):
            self.wait_for_steps(steps)
            self.cluster("on", "node2", "pkill", "-9", "-x", "zero")
        self.assertEqual(run.wait(timeout=90), 0, self.output())
        text = self.output()
        self.assertRegex(text,
                         r"process 1 ended without reporting|rank 1 .*node2")
        self.assertIn("start 2, after out/run/checkpoints/step-", text)
        self.assertIn("start 3, after out/run/checkpoints/step-", text)
        self.assertEqual(self.summary()["parameters_hash"],
                         self.threads_hash(2, *sets))


@unittest.skipIf(MISSING, "SKIPPED: there is no " + ", no ".join(MISSING))
class ElasticTest(HostsTest):
    hosts = 4
    steps = ["--set", "training.steps=600", "--set", "training.save_every=10",
             "--set", "train_batch_size=24"]

    def setUp(self):
        super().setUp()
        self.cluster("up", str(self.hosts))  # anew: tests lose a host

    def expect_one_run(self, lost):
        """After `lost`, a host: every step once and all with one batch, the
        first ones on 4 ranks and the others on 3, and the loss is that of a run
        on 4 ranks."""
        text = self.output()
        for ranks, micro in ((4, 6), (3, 8)):
            self.assertIn("24 sequences = %d micro-batch x 1 accumulation x %d "
                          "ranks" % (micro, ranks), text)
        lines = self.metrics()
        self.assertEqual([line["step"] for line in lines],
                         list(range(1, 601)))
        summary = self.summary()
        self.assertEqual(len(summary["resumed_at"]), 1, text)
        self.assertEqual({line["tokens"] // line["step"] for line in lines},
                         {24 * 32})
        self.threads_hash(4, *self.steps)
        whole = self.summary("threads")
        self.assertLess(summary["final_loss"], 0.8 * lines[0]["loss"])
        # Sums in another order: the rounding of fp32, amplified by 600 steps.
        self.assertLess(abs(summary["final_loss"] - whole["final_loss"]),
                        0.01 * whole["final_loss"], lost)

    def test_mpirun_goes_on_with_the_hosts_that_are_left(self):
        run = self.mpirun("--elastic", "2:4", "--max-restarts", "2",
                          "run.json", "--threads", "1", *self.steps, hosts=4)
        self.wait_for_steps(25)
        self.cluster("off", "node3")
        self.assertEqual(run.wait(timeout=120), 0, self.output())
        text = self.output()
        self.assertIn("on 4 hosts: node1 node2 node3 node4", text)
        self.assertIn("on 3 hosts: node1 node2 node4", text)
        self.expect_one_run("node3")
        # 8 sequences are shared by 2 hosts and not by 3; 4 hosts are too many.
        for least, message in ((2, "on 2 hosts: node1 node2"),
                               (3, "8 is not a multiple of 3 ranks"),
                               (4, "3 hosts, and --elastic needs 4")):
            run = self.mpirun("--elastic", "%d:4" % least, "run.json",
                              "--threads", "1", "--set",
                              "training.out_dir=few%d" % least, hosts=4)
            self.assertEqual(run.wait(timeout=120), 0 if least == 2 else 1,
                             self.output())
            self.assertIn(message, self.output())

    def test_a_job_goes_on_with_the_nodes_that_are_left(self):
        job = self.sbatch("--nodes=2-4", JOBS + "/slurm.sbatch", "--elastic",
                          "2:4", "run.json", "--threads", "1", *self.steps)
        self.wait_for_steps(25)
        self.cluster("off", "node4")
        self.assertEqual(self.wait(job, seconds=240), "COMPLETED",
                         self.output())
        text = self.output()
        self.assertIn("start 1 on node[1-4] (4 of them)", text)
        self.assertIn("on node[1-3] (3 of them), after out/run/checkpoints/", text)
        self.expect_one_run("node4")


class Hang(AssertionError):
    """Something that must happen did not."""


class Late(Exception):
    """The run was over before the fault: this machine was too busy."""


class Outcome:
    """How a run ended after a fault: the seconds until then, the exit code of
    zero, what it said, what the restart did. `restart` is set later."""

    def __init__(self, seconds, code, message, restart="none"):
        self.seconds = seconds
        self.code = code
        self.message = " ".join(message.split())
        self.restart = restart


def outcome_table(outcomes):
    """Lines of text: the Outcomes, or errors, of each fault by its name."""
    def counted(values):
        return ", ".join("%s (%d)" % (value, values.count(value))
                         for value in sorted(set(values)))

    for name, tries in outcomes.items():
        ended = [one for one in tries if isinstance(one, Outcome)]
        yield "%s: %d tries, %d hangs, %d other failures" % (
            name, len(tries), sum(isinstance(one, Hang) for one in tries),
            sum(not isinstance(one, (Hang, Outcome)) for one in tries))
        if not ended:
            continue
        seconds = [one.seconds for one in ended]
        yield "  seconds to the end  %.1f min, %.1f median, %.1f max" % (
            min(seconds), statistics.median(seconds), max(seconds))
        for title, field in (("exit codes", "code"), ("messages", "message"),
                             ("restarts", "restart")):
            yield "  %-18s  %s" % (title, counted(
                [str(getattr(one, field)) for one in ended]))


@unittest.skipIf(MISSING, "SKIPPED: there is no " + ", no ".join(MISSING))
class FaultsTest(HostsTest):
    """Faults on the second of two hosts in the middle of a run."""
    steps = ["--threads", "1", "--set", "training.steps=1000", "--set",
             "training.save_every=10", "--set",
             "communication.timeout_seconds=5"]
    outcomes = {}

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        if REPEAT > 1:
            cls.addClassCleanup(lambda: print("\n".join(
                outcome_table(cls.outcomes)), flush=True))

    def repeat(self, fault):
        """Calls fault(), which returns an Outcome, REPEAT times, each in a
        separate folder, and raises the first error after the last call."""
        name = self.id().split(".")[-1]
        outcomes = self.outcomes[name] = []
        while len(outcomes) < REPEAT:
            begin = time.monotonic()
            try:
                outcomes.append(fault())
            except Late as error:
                print(repr(error), flush=True)
                self.cluster("up", str(self.hosts))
            except (AssertionError, subprocess.TimeoutExpired) as error:
                outcomes.append(error)
                print(error, flush=True)
                self.cluster("up", str(self.hosts))
            print("%s %d: %.1f s" % (name, len(outcomes),
                                     time.monotonic() - begin), flush=True)
            shutil.rmtree(self.path(RUN), ignore_errors=True)
            with contextlib.suppress(FileNotFoundError):
                os.remove(self.path("job.out"))
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome

    def until(self, pattern, seconds=60):
        """The match in the output, once it is there."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            match = re.search(pattern, self.output())
            if match:
                return match
            time.sleep(0.05)
        raise Hang("no \"%s\" within %d s\n%s" % (pattern, seconds,
                                                  self.output()[-4000:]))

    def end_after(self, fault, message):
        """The Outcome of a run that ends by fault() with an error, which says
        `message`, and is restarted."""
        begin = time.monotonic()
        fault()
        try:
            ended = self.until(r"zero ended with status (\d+)")
        finally:
            if len(self.metrics()) >= 1000:
                raise Late(self.output()[-1000:])
        seconds = time.monotonic() - begin
        self.assertNotEqual(ended[1], "0", self.output())
        self.assertRegex(self.output(), message)
        said = re.search(message, self.output())[0]
        return Outcome(seconds, ended[1], said[:30] + " ..." + said[-10:])

    def ends(self, run, code=0):
        try:
            self.assertEqual(run.wait(timeout=180), code, self.output())
        except subprocess.TimeoutExpired:
            raise Hang(self.output()) from None
        finally:
            run.kill()

    def expect_steps(self):
        self.assertEqual([line["step"] for line in self.metrics()],
                         list(range(1, 1001)))

    def expect_whole(self):
        """Each step once, to the bits of a run without a fault."""
        self.expect_steps()
        if not os.path.exists(self.path("threads")):
            self.threads_hash(2, *self.steps[2:])
        self.assertEqual(self.summary()["parameters_hash"],
                         self.summary("threads")["parameters_hash"])

    def test_a_killed_process_is_named_and_the_run_goes_on(self):
        def fault():
            run = self.mpirun("--max-restarts", "1", "run.json", *self.steps)
            self.wait_for_steps(25)
            outcome = self.end_after(
                lambda: self.cluster("on", "node2", "pkill", "-9", "-x",
                                     "zero"),
                r"process 1 ended without reporting.* on node2|"
                r"rank 1 .* on node2")
            self.ends(run)
            self.assertIn("start 2, after out/run/checkpoints/step-", self.output())
            self.expect_whole()
            outcome.restart = "resumed to the same bits"
            return outcome
        self.repeat(fault)

    def test_a_job_goes_on_after_all_processes_of_a_host_were_killed(self):
        def fault():
            job = self.sbatch(JOBS + "/slurm.sbatch", "run.json", *self.steps)
            self.wait_for_steps(25)
            # Its supervisor restarts slurmd.
            outcome = self.end_after(
                lambda: self.cluster(
                    "on", "node2", "bash", "-c",
                    "pkill -9 -x slurmd; pkill -9 -x slurmstepd; "
                    "pkill -9 -x zero; slurmd -N node2 -f $SLURM_CONF"),
                r"process 1 ended without reporting.* on node2|"
                r"rank 1 .* on node2")
            self.assertEqual(self.wait(job, seconds=180), "COMPLETED",
                             self.output())
            self.assertRegex(self.output(), r"start 2 on node\[1-2\], after "
                             "out/run/checkpoints/step-")
            self.expect_whole()
            outcome.restart = "resumed to the same bits"
            return outcome
        self.repeat(fault)

    def test_a_host_without_its_cable_is_named_and_the_other_goes_on(self):
        def fault():
            run = self.mpirun("--max-restarts", "1", "--elastic", "1:2",
                              "run.json", *self.steps)
            self.wait_for_steps(25)
            try:
                outcome = self.end_after(
                    lambda: self.cluster("on", "node2", "ip", "link", "set",
                                         "eth0", "down"),
                    r"(?s)rank 1 did not arrive at .* within 5s;.*; rank 1 is "
                    r"pid \d+ on node2")
                self.ends(run)
            finally:
                self.cluster("on", "node2", "ip", "link", "set", "eth0", "up")
                with contextlib.suppress(AssertionError):  # if none is left
                    self.cluster("on", "node2", "pkill", "-9", "-x",
                                 "zero|orted")
            self.assertIn("on 1 hosts: node1", self.output())
            self.expect_steps()
            outcome.restart = "resumed on the other host"
            return outcome
        self.repeat(fault)

    def test_a_slow_host_is_named(self):
        def fault():
            run = self.mpirun("run.json", *self.steps, "--inject-fault",
                              "1:3:slow=10")
            self.wait_for_steps(3)
            begin = time.monotonic()
            named = self.until(r"rank 1 on node2 takes \d+\.\d times as long "
                               "as the other")
            seconds = time.monotonic() - begin
            self.ends(run)
            self.expect_whole()
            return Outcome(seconds, 0, re.sub(r"\d+\.\d", "N", named[0]))
        self.repeat(fault)

    def test_a_slow_cable_is_no_slow_rank(self):
        def fault():
            shape = ["tc", "qdisc", "add", "dev", "eth0", "root", "tbf", "rate",
                     "50mbit", "burst", "32kb", "latency", "50ms"]
            self.cluster("on", "node2", *shape)
            try:
                run = self.mpirun("run.json", "--threads", "1", "--set",
                                  "training.steps=100")
                begin = time.monotonic()
                self.ends(run)
            finally:
                self.cluster("on", "node2", *shape[:2], "del", *shape[3:6])
            self.assertNotIn("straggler", self.output())
            # All wait for it: about 0.8 MB a step and rank, 0.13 s.
            self.assertRegex(self.output(),
                             r"exposed communication +\d+\.\d+ s, 9\d")
            return Outcome(time.monotonic() - begin, 0, "no rank is named")
        self.repeat(fault)

    def test_a_full_disk_ends_the_run_and_is_named(self):
        # A file size limit stands in for one, in mid-run and on this host.
        def fault():
            run = self.mpirun("--max-restarts", "1", "run.json", *self.steps)
            self.wait_for_steps(25)
            outcome = self.end_after(
                lambda: self.cluster(
                    "on", "node2", "bash", "-c",
                    "prlimit --fsize=10000 --pid $(pgrep -x zero)"),
                r"no checkpoint at step \d+: rank 1 on node2 cannot write")
            said = self.until("rank 1: cannot write .*: file too large")
            outcome.message = re.sub(r"\S*step-\S*", "FILE", said[0])
            self.ends(run)
            self.assertIn("start 2, after out/run/checkpoints/step-", self.output())
            self.expect_whole()
            outcome.restart = "resumed to the same bits"
            return outcome
        self.repeat(fault)


if __name__ == "__main__":
    if "--repeat" in sys.argv:
        place = sys.argv.index("--repeat")
        REPEAT = int(sys.argv[place + 1])
        del sys.argv[place:place + 2]
    unittest.main()
