"""Fine-tuning as a user does it: JSON lines, frozen embeddings, evaluation."""

import json
import subprocess
import unittest

from runs import ZERO, RunsTest


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
        # Three digits and the end of text; of the text what fits.
        self.assertEqual(json.loads(result.stdout)["tokens"], 10 * 4 + 32)
        self.assertIn("1 of 11 samples are longer than data.sequence_length "
                      "32", result.stderr)

    def test_a_wrong_line_is_an_error_with_its_place(self):
        self.write("bad.jsonl", sums(0, 3) + '{"prompt": "a"}\n')
        error = self.zero("train", "run.json", "--set", "data.train=bad.jsonl",
                          code=1).stderr
        self.assertIn('bad.jsonl:4: it has "prompt"; want {"prompt": "...", '
                      '"completion": "..."} or {"text": "..."}', error)


if __name__ == "__main__":
    unittest.main()
