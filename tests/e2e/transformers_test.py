"""Our folders in transformers, and transformers' folders here, both ways.

Needs torch and transformers, as peers.py finds them; skipped if they are
missing.
"""

import json
import os
import subprocess
import tempfile
import unittest

from peers import PYTHON, has_transformers

ZERO = os.path.abspath(os.path.join(os.environ.get("ZERO_OUT", "out"), "zero"))
GOLDEN = os.path.abspath("tests/golden")
LENGTH = 64


@unittest.skipUnless(has_transformers(), "no torch and transformers in python")
class TransformersTest(unittest.TestCase):

    def run_json(self, *args):
        result = subprocess.run(args, cwd=self.folder, text=True,
                                capture_output=True, timeout=300)
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        return json.loads(result.stdout.strip().splitlines()[-1])

    def run_ok(self, *args):
        result = subprocess.run(args, cwd=self.folder, text=True,
                                capture_output=True, timeout=300)
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)

    def check(self, family):
        # A whole number of windows, and the token after the last.
        with open(os.path.join(GOLDEN, "make_goldens.py"), "rb") as f:
            text = f.read()[:20 * LENGTH + 1]
        with open(os.path.join(self.folder, "text.txt"), "wb") as f:
            f.write(text)
        self.run_ok(PYTHON, os.path.join(GOLDEN, "make_hf.py"), family, "hf",
                    "--vocab", "257")
        config = {
            "model": {"from_pretrained": "hf"},
            "data": {"train": "text.txt", "validation": "text.txt",
                     "tokenizer": "bytes", "sequence_length": LENGTH},
            "training": {"steps": 20, "out_dir": "run"},
            "train_batch_size": 4,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        }
        with open(os.path.join(self.folder, "config.json"), "w") as f:
            json.dump(config, f)
        check = (PYTHON, os.path.join(GOLDEN, "check_hf.py"))
        tokens = ("--text", "text.txt", "--sequence-length", str(LENGTH))
        theirs = self.run_json(*check, "hf", *tokens)["loss"]
        ours = self.run_json(ZERO, "eval", "config.json", "--json")["loss"]
        self.assertAlmostEqual(ours, theirs, delta=1e-5 * theirs)

        self.run_ok(ZERO, "train", "config.json")
        theirs = self.run_json(*check, "run/final", *tokens)["loss"]
        trained = self.run_json(ZERO, "eval", "config.json", "--model",
                                "run/final", "--json")["loss"]
        self.assertAlmostEqual(trained, theirs, delta=1e-5 * theirs)
        self.assertLess(trained, ours - 0.3)
        return ours, trained

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name

    def test_gpt2_has_the_losses_of_transformers(self):
        self.check("gpt2")

    def test_llama_has_the_losses_of_transformers(self):
        self.check("llama")

    def test_qwen2_has_the_losses_of_transformers(self):
        self.check("qwen2")

    def test_qwen3_has_the_losses_of_transformers(self):
        self.check("qwen3")


if __name__ == "__main__":
    unittest.main()
