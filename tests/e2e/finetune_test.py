"""Fine-tuning as a user does it: JSON lines on a model from transformers,
with frozen embeddings, and back into transformers.

The second half needs torch and transformers, as transformers_test.py.
"""

import json
import os
import subprocess
import unittest

from peers import PYTHON, has_transformers
from runs import ZERO, RunsTest

GOLDEN = os.path.abspath("tests/golden")
ZOO = os.path.abspath("tests/e2e/tokenizer_zoo.py")
END = "<|endoftext|>"


def sums(first, last):
    return "".join(json.dumps({"prompt": "%d+%d=" % (n, n),
                               "completion": str(2 * n)}) + "\n"
                   for n in range(first, last))


class SamplesTest(RunsTest):

    def zero(self, *args, code=0):
        result = subprocess.run((ZERO,) + args, cwd=self.folder, text=True,
                                capture_output=True, timeout=300)
        self.assertEqual(result.returncode, code,
                         result.stdout + result.stderr)
        return result

    def write(self, name, text):
        with open(self.path(name), "w") as file:
            file.write(text)

    def test_training_evaluating_and_freezing_from_the_command_line(self):
        self.write("sums.jsonl", sums(0, 80))
        run = ("run.json", "--set", "data.train=sums.jsonl",
               "--set", "model.freeze=embedding.*",
               "--set", "training.save_final=true",
               "--set", "training.sample.tokens=0")
        plan = self.zero("plan", *run, "--no-step").stdout
        self.assertRegex(plan, r"of them frozen, ")
        whole = self.zero("memory", "run.json", "--set",
                          "data.train=sums.jsonl").stdout
        self.assertNotEqual(self.zero("memory", *run).stdout, whole)
        trained = self.zero("train", *run, "--set", "training.out_dir=out")
        self.assertRegex(trained.stdout, r"frozen +[\d,]+ of [\d,]+ parameters,"
                                         r" in 2 tensors")
        self.assertRegex(trained.stdout, r"validation loss +\d.*perplexity")
        self.write("more.jsonl", sums(80, 90) +
                   json.dumps({"text": "x" * 200}) + "\n")
        result = self.zero("eval", "--model", "out/final", "--data",
                           "more.jsonl", "--set", "data.sequence_length=32",
                           "--json")
        # Three digits and the end of text; the part of the text that fits.
        self.assertEqual(json.loads(result.stdout)["tokens"], 10 * 4 + 32)
        self.assertIn("1 of 11 samples are longer than data.sequence_length "
                      "32", result.stderr)

    def test_a_wrong_line_is_an_error_with_its_place(self):
        self.write("bad.jsonl", sums(0, 3) + '{"prompt": "a"}\n')
        error = self.zero("train", "run.json", "--set", "data.train=bad.jsonl",
                          code=1).stderr
        self.assertIn('bad.jsonl:4: it has "prompt"; want {"prompt": "...", '
                      '"completion": "..."} or {"text": "..."}', error)


@unittest.skipUnless(has_transformers(), "no torch and transformers in python")
class TransformersSamplesTest(RunsTest):

    def run_ok(self, *args):
        # Decoded here: text=True would change the "\r\n" of a model's text.
        result = subprocess.run(args, cwd=self.folder, capture_output=True,
                                timeout=300)
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        return result.stdout.decode()

    def theirs(self, folder):
        result = json.loads(self.run_ok(
            PYTHON, os.path.join(GOLDEN, "check_samples.py"), folder,
            "--samples", "sums.jsonl", "--end", str(self.end),
            "--prompt", "12+12=", "--tokens", "12"))
        self.assertEqual(result["wrong_tensors"], {})
        self.assertEqual(result["warnings"], "")
        return result

    def expect_equal(self, folder):
        """Losses of completions, several to a row here and alone there, and
        greedy continuations."""
        theirs = self.theirs(folder)
        ours = json.loads(self.run_ok(
            ZERO, "eval", "run.json", "--model", folder, "--data",
            "sums.jsonl", "--json"))
        self.assertEqual(ours["tokens"], theirs["tokens"])
        # fp32 logits of two programs.
        self.assertAlmostEqual(ours["loss"], theirs["loss"],
                               delta=1e-5 * theirs["loss"])
        text = self.run_ok(ZERO, "generate", "run.json", "--model", folder,
                           "--prompt", "12+12=", "--tokens", "12",
                           "--temperature", "0")
        self.assertEqual(text.removeprefix("12+12=").rstrip("\n"),
                         theirs["text"].rstrip("\n"))
        return theirs

    def embeddings(self, folder, name):
        script = ("import sys, glob; from safetensors import safe_open\n"
                  "for f in sorted(glob.glob(sys.argv[1] + '/*.safetensors')):\n"
                  "  with safe_open(f, 'np') as s:\n"
                  "    if sys.argv[2] in s.keys():\n"
                  "      print(s.get_tensor(sys.argv[2]).tobytes().hex())\n")
        return self.run_ok(PYTHON, "-c", script, folder, name)

    def check(self, family, tokenizer, embedding):
        with open(self.path("sums.jsonl"), "w") as file:
            file.write(sums(0, 60))
        save = ("import sys; sys.path.insert(0, %r)\n"
                "import json, tokenizer_zoo as zoo, transformers\n"
                "t = zoo.%s()\n"
                "end = %r if %r != 'llama3' else '<|end_of_text|>'\n"
                "begin = '<|begin_of_text|>' if %r == 'llama3' else None\n"
                "transformers.PreTrainedTokenizerFast(tokenizer_object=t, "
                "eos_token=end, bos_token=begin).save_pretrained('hf')\n"
                "print(t.get_vocab_size(), t.token_to_id(end), "
                "-1 if begin is None else t.token_to_id(begin))\n" %
                (os.path.dirname(ZOO), tokenizer, END, tokenizer, tokenizer))
        vocab, self.end, begin = map(int, self.run_ok(
            PYTHON, "-c", save).split()[-3:])
        self.run_ok(PYTHON, os.path.join(GOLDEN, "make_hf.py"), family, "hf",
                    "--vocab", str(vocab))
        with open(self.path("hf/config.json")) as file:
            config = json.load(file)
        config["eos_token_id"] = self.end
        config["bos_token_id"] = None if begin < 0 else begin
        self.config("hf/config.json", config)
        self.config("run.json", {
            "model": {"from_pretrained": "hf", "freeze": "*" + embedding},
            "data": {"train": "sums.jsonl", "sequence_length": 64},
            "training": {"steps": 20, "out_dir": "run",
                         "max_shard_size": 60_000, "sample": {"tokens": 0}},
            "train_batch_size": 4,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}})
        before = self.expect_equal("hf")["loss"]
        self.run_ok(ZERO, "train", "run.json")
        self.assertTrue(os.path.exists(
            self.path("run/final/model.safetensors.index.json")))
        after = self.expect_equal("run/final")
        self.assertLess(after["loss"], before - 0.3)
        self.assertEqual(after["eos_token_id"], self.end)
        frozen = self.embeddings("hf", embedding)
        self.assertGreater(len(frozen), 8 * vocab)
        self.assertEqual(self.embeddings("run/final", embedding), frozen)

    def test_checkpoints_are_read_by_the_package_safetensors(self):
        self.config("train.json", {
            "model": {"model_type": "llama", "hidden_size": 32,
                      "num_hidden_layers": 1, "num_attention_heads": 2,
                      "intermediate_size": 48},
            "data": {"train": "sums.jsonl", "sequence_length": 64},
            "training": {"steps": 4, "out_dir": "run", "save_every": 4,
                         "sample": {"tokens": 0}},
            "bf16": {"enabled": True},
            "train_batch_size": 4, "zero_optimization": {"stage": 3},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}})
        with open(self.path("sums.jsonl"), "w") as file:
            file.write(sums(0, 60))
        self.run_ok(ZERO, "train", "train.json", "--ranks", "2")
        self.run_ok(ZERO, "checkpoint", "export", "run", "fp32", "--dtype",
                    "fp32", "--max-shard-size", "20KB")
        script = (
            "import glob, json, re\n"
            "import numpy as np\n"
            "from safetensors import safe_open\n"
            "parts, whole = {}, {}\n"
            "for f in sorted(glob.glob('run/checkpoints/step-*/*.safetensors')):\n"
            "  with safe_open(f, 'np') as s:\n"
            "    for name in s.keys():\n"
            "      at = re.fullmatch(r'weight/(.*)\\[(\\d+):\\d+\\]', name)\n"
            "      if at: parts.setdefault(at[1], []).append(\n"
            "          (int(at[2]), s.get_tensor(name).flatten()))\n"
            "for f in sorted(glob.glob('fp32/*.safetensors')):\n"
            "  with safe_open(f, 'np') as s:\n"
            "    whole.update({n: s.get_tensor(n) for n in s.keys()})\n"
            "mine = np.concatenate([p for _, p in sorted(\n"
            "    parts['embedding.table'], key=lambda p: p[0])])\n"
            "its = whole['model.embed_tokens.weight']\n"
            "print(json.dumps([len(whole), str(its.dtype),\n"
            "                  bool((mine == its.flatten()).all())]))\n")
        self.assertEqual(json.loads(self.run_ok(PYTHON, "-c", script)),
                         [12, "float32", True])

    def test_gpt2_has_the_losses_and_texts_of_transformers(self):
        self.check("gpt2", "gpt2", "transformer.wte.weight")

    def test_llama_has_the_losses_and_texts_of_transformers(self):
        self.check("llama", "llama3", "model.embed_tokens.weight")

    def test_qwen2_has_the_losses_and_texts_of_transformers(self):
        self.check("qwen2", "qwen2", "model.embed_tokens.weight")

    def test_qwen3_has_the_losses_and_texts_of_transformers(self):
        self.check("qwen3", "qwen2", "model.embed_tokens.weight")


if __name__ == "__main__":
    unittest.main()
