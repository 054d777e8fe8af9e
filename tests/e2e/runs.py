"""Shared by tests of whole runs: a folder with configs and the runs' output."""

import json
import os
import tempfile
import time
import unittest

OUT = os.environ.get("ZERO_OUT", "out")
ZERO = os.path.abspath(os.path.join(OUT, "zero"))

# A small GPT-2 on this project's headers.
CONFIG = {
    "model": {"preset": "gpt2-tiny", "n_layer": 2, "n_embd": 64},
    "data": {"train": os.path.abspath("engine") + "/base/*.h",
             "validation_fraction": 0.1, "tokenizer": "bytes",
             "sequence_length": 32},
    "training": {"steps": 6, "save_final": False},
    "train_batch_size": 8,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
}


class RunsTest(unittest.TestCase):
    config_of_runs = CONFIG

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        self.config("run.json", self.config_of_runs)

    def path(self, *names):
        return os.path.join(self.folder, *names)

    def config(self, name, value):
        with open(self.path(name), "w") as file:
            json.dump(value, file)

    def summary(self, out):
        with open(self.path(out, "summary.json")) as file:
            return json.load(file)

    def hash_of(self, out):
        return self.summary(out)["parameters_hash"]

    def metrics(self, out):
        with open(self.path(out, "metrics.jsonl")) as file:
            return [json.loads(line) for line in file]

    def wait_for_steps(self, run, out, steps):
        """Waits until a running program has written `steps` lines of
        metrics."""
        while run.poll() is None:
            try:
                with open(self.path(out, "metrics.jsonl")) as file:
                    if file.read().count("\n") >= steps:
                        return
            except FileNotFoundError:
                pass
            time.sleep(0.02)
        self.fail("the run ended: " + "".join(run.communicate()))
