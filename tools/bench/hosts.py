"""Hosts that are namespaces of this machine (tests/cluster/cluster), for
tools/bench/cluster.py."""

import json
import os
import shutil
import subprocess
import tempfile

from common import CONFIG, ROOT, both_ends, middle, rows_of

CLUSTER = os.path.join(ROOT, "tests/cluster/cluster")
TEMP = "/var/tmp"  # the same on all hosts; their /tmp is their own
SECONDS = 600  # after which a run counts as hung


def missing(args):
    """Why there is no cluster here; empty: there may be one."""
    programs = ["ip", "tc", "nsenter", "unshare", "munged", "slurmctld",
                "slurmd", "sinfo", "mpirun"]
    found = ["no " + one for one in programs if not shutil.which(one)]
    if os.geteuid():
        found.append("not root")
    if not os.path.exists(os.path.join(ROOT, args.out, "zero_mpi.so")):
        found.append("zero is built without MPI")
    if ROOT.startswith("/tmp/"):
        found.append("the tree is in /tmp, which hosts have their own of")
    return ", ".join(found)


class Failed(Exception):
    """Why there is no result."""


def run(command, cwd=ROOT, env=None, cores=None):
    """A program's output."""
    try:
        done = subprocess.run(
            command, cwd=cwd, env=env, text=True, errors="replace",
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, timeout=SECONDS,
            preexec_fn=cores and (lambda: os.sched_setaffinity(0, cores)))
    except subprocess.TimeoutExpired as error:
        raise Failed("stopped after %d s" % SECONDS) from error
    if done.returncode:
        raise Failed("exit %d: %s" % (done.returncode, both_ends(
            (done.stderr or done.stdout).strip())))
    return done.stdout


def mpirun_options():
    root = ["--allow-run-as-root"] if not os.geteuid() else []
    return ["mpirun", *root, "--bind-to", "none"]


class Runs:
    """`zero train` in its own folder, on this machine."""

    def __init__(self, args):
        self.zero = os.path.join(ROOT, args.out, "zero")
        self.folder = tempfile.TemporaryDirectory(prefix="zero-bench-",
                                                  dir=TEMP)

    def close(self):
        self.folder.cleanup()

    def command(self, *sets, options=(), steps):
        """GPT-2 124M, micro-batch 2, a thread for each rank."""
        return [self.zero, "train", os.path.join(ROOT, CONFIG), "--threads",
                "1", *options, *(word for one in (
                    "data.train=%s/engine/*/*.cc" % ROOT,
                    "train_micro_batch_size_per_gpu=2",
                    "training.steps=%d" % steps, "training.out_dir=run", *sets)
                    for word in ("--set", one))]

    def measured(self, command, **more):
        """Runs it; returns {"step_ms", "exposed_ms", "tokens_per_second",
        "sent"}, of a step, without the first."""
        folder = os.path.join(self.folder.name, "run")
        shutil.rmtree(folder, ignore_errors=True)
        run(command, cwd=self.folder.name, **more)
        with open(os.path.join(folder, "metrics.jsonl")) as file:
            lines = rows_of(file.read())
        with open(os.path.join(folder, "summary.json")) as file:
            summary = json.load(file)
        later = lines[1:]
        sent = summary.get("process_sent_bytes")
        return {
            "step_ms": [line["step_ms"] for line in later],
            "exposed_ms": [line["communication"]["exposed_ms"]
                           for line in later],
            "tokens_per_second": lines[-1]["tokens"] / len(lines) * 1e3 /
            middle(line["step_ms"] for line in later),
            "sent": sent and sent / len(lines)}


class Hosts(Runs):
    """Two hosts and a login host, until `close`."""

    def __init__(self, args):
        super().__init__(args)
        self.state = tempfile.mkdtemp(prefix="zero-hosts-", dir=TEMP)
        self.env = {**os.environ, "CLUSTER": self.state, "ZERO": self.zero,
                    "OMPI_MCA_plm_rsh_agent": CLUSTER + " rsh"}
        try:
            self.cluster("up", "2")
        except Failed:
            self.close()
            raise

    def close(self):
        run([CLUSTER, "down"], env=self.env)
        shutil.rmtree(self.state, ignore_errors=True)
        super().close()

    def cluster(self, *args, cwd=ROOT):
        return run([CLUSTER, *args], cwd=cwd, env=self.env)

    def start(self, host, command, **more):
        """A program on a host."""
        return subprocess.Popen(
            [CLUSTER, "on", host, *command], env=self.env, text=True,
            stdin=subprocess.DEVNULL, cwd=self.folder.name, **more)

    def on_both(self, command):
        """A process on each host, by mpirun on the login host."""
        return [CLUSTER, "on", "ctl", *mpirun_options(), "--host",
                "node1,node2", "-n", "2", *command]

    def measured(self, command, **more):
        return super().measured(self.on_both(command), env=self.env, **more)
