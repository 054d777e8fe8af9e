"""The program with --device cuda, on emulated GPUs."""

import contextlib
import json
import os
import re
import signal
import socket
import struct
import subprocess
import tempfile
import time
import unittest

ZERO = os.path.abspath(os.path.join(os.environ.get("ZERO_OUT", "out"),
                                    "tests/e2e/zero_emulated"))
SOURCES = os.path.abspath("engine")

CONFIG = {
    "model": {"preset": "llama-tiny", "num_hidden_layers": 2,
              "hidden_size": 32, "intermediate_size": 64},
    "data": {"train": SOURCES + "/base/*.h", "validation_fraction": 0.1,
             "tokenizer": "bytes", "sequence_length": 16},
    "training": {"steps": 3, "out_dir": "run", "eval_batches": 1,
                 "sample": {"prompt": "//", "tokens": 4}},
    "train_batch_size": 4,
    "gradient_clipping": 1.0,
    "device": {"deterministic_attention": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
}


class EmulatedGpuTestCase(unittest.TestCase):

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        with open(self.path("config.json"), "w") as f:
            json.dump(CONFIG, f)

    def path(self, name):
        return os.path.join(self.folder, name)

    def zero(self, *args):
        return subprocess.run([ZERO, *args], cwd=self.folder, text=True,
                              capture_output=True, timeout=300)


class EmulatedGpuTest(EmulatedGpuTestCase):

    def train(self, out_dir, *args):
        """(summary, losses) of a run that must succeed."""
        result = self.zero("train", "config.json", "--set",
                           "training.out_dir=" + out_dir, *args)
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        with open(self.path(out_dir + "/metrics.jsonl")) as f:
            lines = [json.loads(line) for line in f]
        with open(self.path(out_dir + "/summary.json")) as f:
            return json.load(f), [x["loss"] for x in lines if "loss" in x]

    def test_a_run_has_the_losses_of_the_cpu(self):
        _, cpu = self.train("cpu", "--device", "cpu")
        _, gpu = self.train("gpu", "--device", "cuda")
        self.assertEqual(len(gpu), CONFIG["training"]["steps"])
        for a, b in zip(cpu, gpu, strict=True):
            self.assertLess(abs(a - b), 1e-5 * a)

    def test_every_stage_ends_with_the_same_parameters_local_and_nccl(self):
        hashes = {}
        for stage, backend in ((0, "local"), (3, "local"), (1, "nccl"),
                               (2, "nccl")):
            summary, _ = self.train(
                "run", "--device", "cuda", "--ranks", "2",
                "--set", "zero_optimization.stage=%d" % stage,
                "--set", "communication.backend=" + backend)
            hashes[stage, backend] = summary["parameters_hash"]
        self.assertEqual(len(set(hashes.values())), 1, hashes)

    def test_a_plan_predicts_the_memory_of_a_run(self):
        for ranks, sets in ((1, ()),
                            (2, ("zero_optimization.stage=3",
                                 "communication.backend=nccl")),
                            (2, ("communication.algorithm=ring",))):
            args = ["config.json", "--device", "cuda", "--ranks", str(ranks)]
            for one in ("training.steps=1", "training.eval_batches=0",
                        "data.validation_fraction=0",
                        "training.sample.tokens=0", *sets):
                args += ["--set", one]
            run = self.zero("train", *args).stdout
            plan = self.zero("plan", *args).stdout
            told = re.search(r"memory +(.* at peak: .*)", run)[1]
            self.assertIn(" fixed ", told)
            self.assertRegex(plan, "each rank +" + re.escape(told))
            self.assertIn("memory of a step, on emulated GPU with 8.00 GiB",
                          plan)

    def test_devices_lists_the_gpus(self):
        text = self.zero("devices").stdout
        self.assertRegex(text, r"cuda +0: emulated GPU")
        self.assertRegex(text, r"cuda +1: emulated GPU")

    def test_more_nccl_ranks_than_gpus_are_refused_with_the_remedy(self):
        result = self.zero("train", "config.json", "--device", "cuda",
                           "--ranks", "4", "--set",
                           "communication.backend=nccl")
        self.assertEqual(result.returncode, 1, result.stdout)
        self.assertIn("local", result.stderr)
        self.assertFalse(os.path.exists(self.path("run/summary.json")))

    def test_the_ranks_of_a_gpu_are_told(self):
        result = self.zero("train", "config.json", "--device", "cuda",
                           "--ranks", "4", "--set", "training.steps=1")
        self.assertIn("4 threads of this process on 2 GPUs, ZeRO stage",
                      result.stdout)

    def test_console_and_summary_say_the_same_of_a_fault(self):
        started = []
        for fault, words, end in (
                ("0:2:stop", ": nccl: rank 0 did not arrive at #",
                 "; rank 0 hangs and is abandoned"),
                ("1:2:mismatch", ": nccl: rank 1 differs from rank 0 at #",
                 "")):
            out_dir = fault.replace(":", "_")
            process = subprocess.Popen(
                [ZERO, "train", "config.json", "--device", "cuda",
                 "--ranks", "2", "--set", "training.out_dir=" + out_dir,
                 "--set", "communication.backend=nccl",
                 "--set", "communication.timeout_seconds=2",
                 "--inject-fault", fault],
                cwd=self.folder, text=True, stdout=subprocess.PIPE,
                stderr=subprocess.PIPE)
            started.append((process, out_dir, words, end))
        for process, out_dir, words, end in started:
            with self.subTest(out_dir=out_dir):
                _, said = process.communicate(timeout=60)
                self.assertEqual(process.returncode, 1, said)
                with open(self.path(out_dir + "/summary.json")) as f:
                    error = json.load(f)["error"]
                self.assertIn(words, error)
                self.assertEqual(said, "zero: %s%s\n" % (error, end))


class ProcessesTest(EmulatedGpuTestCase):
    """Ranks in separate processes, as torchrun starts them."""

    def setUp(self):
        super().setUp()
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]

    @contextlib.contextmanager
    def rank(self, rank, world, *args, **variables):
        """The process of a rank; without other variables on its own machine."""
        env = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(world),
               "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
               "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.port),
               **variables}
        process = subprocess.Popen(
            [ZERO, "train", "config.json", "--device", "cuda", *args],
            cwd=self.folder, env=env, text=True, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE)
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()
                process.communicate()

    def ranks(self, stack, world, name, *args):
        """The processes of all ranks, each with a GPU of this machine, which
        the fake NCCL connects; the run writes to the folder `name`."""
        meeting = self.path(name + "-nccl")
        os.mkdir(meeting)
        return [stack.enter_context(self.rank(
            rank, world, "--set", "training.out_dir=" + name, *args,
            LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world),
            EMULATED_GPUS=str(world), FAKE_NCCL_FOLDER=meeting))
                for rank in range(world)]

    def connect(self, first):
        """A connection to rank 0, as soon as it listens."""
        while True:
            try:
                return socket.create_connection(("127.0.0.1", self.port))
            except ConnectionRefusedError:
                self.assertIsNone(first.poll())
                time.sleep(0.02)

    def greet(self, first, greeting):
        """Rank 0's answer to the greeting of another rank; the connection
        closes after it."""
        frame = b"h" + greeting.encode()
        with self.connect(first) as to:
            to.sendall(struct.pack(">I", len(frame)) + frame)
            size, = struct.unpack(">I", to.recv(4, socket.MSG_WAITALL))
            return to.recv(size, socket.MSG_WAITALL).decode()

    def end_of(self, process, code=1):
        """The output of a process that ends with this code."""
        _, err = process.communicate(timeout=60)
        self.assertEqual(process.returncode, code, err)
        return err

    def wait_until_it_takes(self, process, number):
        """A signal before the program handles it ends it at once."""
        bit = 1 << (number - 1)
        while not self.blocked_signals(process) & bit:
            self.assertIsNone(process.poll())
            time.sleep(0.01)

    def blocked_signals(self, process):
        with open("/proc/%d/status" % process.pid) as f:
            return int(re.search(r"SigBlk:\t(\w+)", f.read()).group(1), 16)

    def test_processes_have_the_bits_of_threads_at_every_stage(self):
        world = 4
        for stage in range(4):
            with self.subTest(stage=stage), contextlib.ExitStack() as stack:
                sets = ["--set", "zero_optimization.stage=%d" % stage]
                if stage == 3:  # two groups: communicators between them too
                    sets += ["--set", "zero_optimization.mics_shard_size=2"]
                name = "stage%d" % stage
                for process in self.ranks(stack, world, name, *sets):
                    self.end_of(process, code=0)
                threads = subprocess.run(
                    [ZERO, "train", "config.json", "--device", "cuda",
                     "--ranks", str(world), "--set", "training.out_dir=threads",
                     "--set", "communication.backend=nccl", *sets],
                    cwd=self.folder, text=True, capture_output=True,
                    timeout=300, env={**os.environ, "EMULATED_GPUS":
                                      str(world)})
                self.assertEqual(threads.returncode, 0, threads.stderr)
                hashes = []
                for out_dir in (name, "threads"):
                    with open(self.path(out_dir + "/summary.json")) as file:
                        hashes.append(json.load(file)["parameters_hash"])
                self.assertEqual(*hashes)

    def test_a_killed_process_ends_all_and_is_named(self):
        with contextlib.ExitStack() as stack:
            first, second, third = self.ranks(
                stack, 3, "killed", "--set", "training.steps=100000", "--set",
                "train_batch_size=6", "--set", "zero_optimization.stage=3",
                "--set", "communication.timeout_seconds=10")
            while not os.path.exists(self.path("killed/metrics.jsonl")):
                self.assertIsNone(first.poll())
                time.sleep(0.05)
            second.kill()
            second.communicate()
            begin = time.monotonic()
            for process in (first, third):
                self.assertRegex(self.end_of(process), r"rank 1 ended without "
                                 "reporting an error: its connection closed")
            self.assertLess(time.monotonic() - begin, 10)

    def test_a_signal_ends_a_rank_that_waits_for_others(self):
        with self.rank(0, 4) as first:
            self.connect(first).close()
            first.send_signal(signal.SIGINT)
            self.assertIn(": nccl: rank 0 was stopped by a signal while it "
                          "waited for rank 1, rank 2 and rank 3 of 4\n",
                          self.end_of(first, code=130))
        with self.rank(1, 4) as other:
            self.wait_until_it_takes(other, signal.SIGTERM)
            other.send_signal(signal.SIGTERM)
            self.assertIn(": stopped by a signal while rank 1 waits for "
                          "rank 0 at 127.0.0.1:%d\n" % self.port,
                          self.end_of(other, code=143))

    def test_a_process_with_another_config_ends_all(self):
        with self.rank(0, 2) as first, self.rank(
                1, 2, "--set", "training.steps=4") as second:
            for process in (first, second):
                self.assertIn(": nccl: rank 1 differs from rank 0: it has "
                              "\"training.steps: 4\", rank 0 \"training.steps: "
                              "3\"", self.end_of(process))

    def test_a_process_that_dies_before_all_are_there_ends_all(self):
        with self.rank(0, 4) as first:
            self.assertEqual(self.greet(first, "zero store 2\n2\n4"), "n")
            self.assertIn("rank 2 ended without reporting an error: its "
                          "connection closed",
                          self.end_of(first))

    def test_who_does_not_belong_here_is_told_why(self):
        with self.rank(0, 4) as first:
            for greeting, answer in (
                    ("zero store 9\n1\n4", "another version of zero"),
                    ("zero store 2\n1\n2", "rank 1 has a world of 2, "
                     "rank 0 has 4")):
                self.assertIn(answer, self.greet(first, greeting))


if __name__ == "__main__":
    unittest.main()
