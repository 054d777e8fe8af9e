"""Published configs with offload train with only a model, data, a length and
the disk's folder set."""

import json
import os
import subprocess
import unittest

from runs import ZERO, RunsTest

PUBLISHED = os.path.abspath("tests/engine/config/published.json")


def offloads(config):
    zero = config.get("zero_optimization", {})
    return zero.get("cpu_offload") or any(
        zero.get("offload_" + what, {}).get("device") in ("cpu", "nvme")
        for what in ("optimizer", "param"))


class PublishedTest(RunsTest):

    def train(self, source, config, ranks):
        self.config("published.json", config)
        sets = ["model=" + json.dumps({"model_type": "gpt2", "n_embd": 32,
                                       "n_layer": 1, "n_head": 2}),
                "data.train=" + os.path.abspath("engine/base") + "/*.h",
                "data.sequence_length=8", "training.steps=2",
                "training.out_dir=out", "training.save_final=false",
                "training.sample.tokens=0"]
        for what in ("optimizer", "param"):
            section = config["zero_optimization"].get("offload_" + what, {})
            if section.get("device") == "nvme":
                sets.append("zero_optimization.offload_%s.nvme_path=%s" % (
                    what, self.folder))
        done = subprocess.run(
            [ZERO, "train", "published.json", "--threads", "1", "--ranks",
             str(ranks), "--set", *sets], cwd=self.folder, text=True,
            capture_output=True, timeout=300)
        self.assertEqual(done.returncode, 0, source + done.stderr)
        # In 16 bits an initial scale that is too large skips steps.
        self.assertEqual(self.summary("out")["steps"], 2, source)
        self.assertRegex(done.stdout, r"\n *offload +", source)

    def test_each_with_offload_trains(self):
        with open(PUBLISHED) as file:
            published = [one for one in json.load(file)
                         if offloads(one["config"]) and "refused" not in one]
        self.assertGreaterEqual(len(published), 12)
        for one in published:
            with self.subTest(source=one["source"]):
                self.train(one["source"], one["config"], one["ranks"])


if __name__ == "__main__":
    unittest.main()
