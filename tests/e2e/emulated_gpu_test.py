"""The program with --device cuda, on the two emulated GPUs."""

import json
import os
import subprocess
import tempfile
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


class EmulatedGpuTest(unittest.TestCase):

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


if __name__ == "__main__":
    unittest.main()
