"""The job scripts of tools/jobs, unchanged, on a cluster of several hosts that
are namespaces of this machine. Skipped, loudly, without root or Slurm."""

import json
import os
import re
import shutil
import subprocess
import tempfile
import time
import unittest

OUT = os.path.abspath(os.environ.get("ZERO_OUT", "out"))
ZERO = os.path.join(OUT, "zero")
JOBS = os.path.abspath("tools/jobs")
HERE = os.path.dirname(os.path.abspath(__file__))
CLUSTER = os.path.join(HERE, "cluster")
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
    "training": {"steps": 30, "save_final": False, "out_dir": "run"},
    "train_batch_size": 8,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
    "zero_optimization": {"stage": 3},
    "communication": {"timeout_seconds": 20},
}


@unittest.skipIf(MISSING, "SKIPPED: there is no " + ", no ".join(MISSING))
class ClusterTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.state = tempfile.mkdtemp(prefix="zero-hosts-", dir=TEMP)
        cls.env = {**os.environ, "CLUSTER": cls.state, "ZERO": ZERO,
                   "JOBS": JOBS, "OMPI_MCA_plm_rsh_agent": CLUSTER + " rsh"}
        cls.addClassCleanup(cls.cluster, "down")
        cls.cluster("up", "2")

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
        """parameters_hash of ranks that are threads of one process here."""
        subprocess.run([ZERO, "train", "run.json", "--ranks", str(ranks),
                        "--threads", "1", "--set",
                        "training.out_dir=threads", *sets], check=True,
                       cwd=self.folder, stdout=subprocess.DEVNULL)
        return self.summary("threads")["parameters_hash"]

    def summary(self, out="run"):
        with open(self.path(out, "summary.json")) as file:
            return json.load(file)

    def sbatch(self, *args):
        text = self.on("sbatch", "--output=job.out", "--cpus-per-task=2",
                       *args)
        return text.split()[-1]

    def output(self):
        with open(self.path("job.out")) as file:
            return file.read()

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

    def wait_for_steps(self, steps):
        end = time.time() + 60
        while time.time() < end:
            try:
                with open(self.path("run", "metrics.jsonl")) as file:
                    if file.read().count("\n") >= steps:
                        return
            except FileNotFoundError:
                pass
            time.sleep(0.05)
        self.fail(self.output())

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
                          *steps)
        self.wait_for_steps(20)
        self.on("scancel", "--batch", "--signal=USR1", job)  # as --signal=B:
        self.assertEqual(self.wait(job), "COMPLETED", self.output())
        text = self.output()
        self.assertIn("the time is nearly up: saving", text)
        self.assertIn("start 2 on node[1-2], after run/checkpoints/step-", text)
        self.assertEqual(self.summary()["parameters_hash"],
                         self.threads_hash(2, *steps))

    def test_mpirun_goes_on_after_a_process_was_killed(self):
        with open(self.path("hosts"), "w") as file:
            file.write("node1 slots=1\nnode2 slots=1\n")
        sets = ["--set", "training.steps=1500", "--set",
                "training.save_every=10"]
        run = subprocess.Popen(
            [CLUSTER, "on", "ctl", JOBS + "/mpirun.sh", "--hostfile", "hosts",
             "--max-restarts", "2", "run.json", "--threads", "1", *sets],
            cwd=self.folder, env=self.env, text=True,
            stdout=open(self.path("job.out"), "w"), stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL)
        # Twice: the second time there is a checkpoint from before.
        for steps in (25, 125):
            self.wait_for_steps(steps)
            self.cluster("on", "node2", "pkill", "-9", "-x", "zero")
        self.assertEqual(run.wait(timeout=90), 0, self.output())
        text = self.output()
        self.assertRegex(text, r"process 1 ended without a word|rank 1 .*node2")
        self.assertIn("start 2, after run/checkpoints/step-", text)
        self.assertIn("start 3, after run/checkpoints/step-", text)
        self.assertEqual(self.summary()["parameters_hash"],
                         self.threads_hash(2, *sets))


if __name__ == "__main__":
    unittest.main()
