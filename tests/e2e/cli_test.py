"""The program as a user calls it: only out/zero and files."""

import ctypes
import ctypes.util
import json
import os
import re
import resource
import shutil
import signal
import struct
import subprocess
import tempfile
import time
import unittest

ZERO = os.path.abspath(os.path.join(os.environ.get("ZERO_OUT", "out"), "zero"))
SOURCES = os.path.abspath("engine")
LLAMA_1B = os.path.abspath("configs/llama_3_2_1b.json")

CONFIG = {
    "model": {"preset": "llama-tiny", "num_hidden_layers": 2, "hidden_size": 64},
    "data": {"train": SOURCES + "/*/*.h", "validation_fraction": 0.1,
             "tokenizer": "bytes", "sequence_length": 32},
    "training": {"steps": 12, "out_dir": "run", "eval_batches": 2,
                 "sample": {"prompt": "//", "tokens": 8}},
    "train_batch_size": 4,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
}


def byte_level_tokenizer():
    """A tokenizer.json like GPT-2's, with few merges."""
    letters = [chr(b) for b in range(256)
               if 33 <= b <= 126 or 161 <= b and b != 173]
    letters += [chr(256 + i) for i in range(256 - len(letters))]
    merges = [("t", "h"), ("th", "e"), ("\u0120", "the"), ("o", "r"),
              ("\u0120", "\u0120"), ("/", "/")]
    tokens = letters + [a + b for a, b in merges]
    return json.dumps({
        "added_tokens": [{"id": len(tokens), "content": "<|endoftext|>",
                          "special": True}],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False},
        "post_processor": None,
        "decoder": {"type": "ByteLevel"},
        "model": {"type": "BPE", "merges": merges,
                  "vocab": {token: i for i, token in enumerate(tokens)}}})


class CliTest(unittest.TestCase):

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        self.write("config.json", json.dumps(CONFIG, indent=2))

    def path(self, name):
        return os.path.join(self.folder, name)

    def write(self, name, text):
        with open(self.path(name), "w") as f:
            f.write(text)

    def read_json(self, name):
        with open(self.path(name)) as f:
            return json.load(f)

    def zero(self, *args, env=None):
        return subprocess.run([ZERO, *args], cwd=self.folder, text=True,
                              capture_output=True, timeout=120,
                              env={**os.environ, **(env or {})})

    def ok(self, *args):
        result = self.zero(*args)
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        return result.stdout

    def error(self, *args):
        """The error text of a command that must fail without a crash."""
        result = self.zero(*args)
        self.assertIn(result.returncode, (1, 2), result.stdout + result.stderr)
        return result.stderr

    def train(self, out_dir, *sets):
        self.ok("train", "config.json", "--set", "training.out_dir=" + out_dir,
                *sets)
        return self.read_json(out_dir + "/summary.json")

    def test_checkpoint_commands_say_what_they_want(self):
        for args, error in (
            ((), "A subcommand is required"),
            (("list", "none"), "'none' does not exist; name a checkpoint"),
            (("show", "."), "there is no checkpoint in .; name a checkpoint"),
            (("verify", "none"), "'none' does not exist; name a checkpoint"),
            (("diff", ".", "none"), "there is no checkpoint in ."),
            (("export", "none", "out", "--dtype", "fp8"), "--dtype: fp8"),
            (("export", "none", "out"), "'none' does not exist"),
        ):
            self.assertIn(error, self.error("checkpoint", *args))
        self.assertEqual(self.zero("checkpoint", "diff", ".", ".").returncode, 2)
        self.assertIn("export", self.ok("checkpoint", "--help"))
        for command in ("list", "show", "verify", "diff", "export"):
            text = self.ok("checkpoint", command, "--help")
            self.assertIn("training.out_dir", text)
            self.assertRegex(text, "Example:\n  zero checkpoint %s [a-z]" % command)

    def test_a_run_without_checkpoints_is_not_called_damaged(self):
        self.train("run", "training.steps=1")
        for args in (("list", "run"), ("show", "run"), ("verify", "run/"),
                     ("diff", "run", "run"), ("export", "run", "weights")):
            result = self.zero("checkpoint", *args)
            self.assertEqual(
                (result.stdout, result.stderr),
                ("", "zero: there is no checkpoint in run (its "
                     "training.save_every is 0); the run's weights are "
                     "run/final\n"))
        # A folder named like a checkpoint is a damaged checkpoint.
        os.makedirs(self.path("step-00000002"))
        self.assertIn("step-00000002: 'step-00000002' is not a checkpoint: it "
                      "has no checkpoint.json",
                      self.zero("checkpoint", "verify", "step-00000002").stdout)

    def test_checkpoints_of_runs_are_listed_compared_and_exported(self):
        sets = ["--set", "bf16.enabled=true", "--set", "training.save_every=6"]
        for run, ranks, stage in (("a", 2, 1), ("b", 2, 3), ("c", 1, 0)):
            self.ok("train", "config.json", *sets, "--ranks", str(ranks), "--set",
                    "zero_optimization.stage=%d" % stage, "--set",
                    "training.out_dir=" + run)
        listed = [json.loads(line) for line in
                  self.ok("checkpoint", "list", "a", "--json").splitlines()]
        self.assertEqual([(one["step"], one["samples"], one["complete"])
                          for one in listed], [(6, 24, True), (12, 48, True)])
        self.assertIn("exp_avg_sq", self.ok("checkpoint", "show", "a"))
        self.assertEqual(
            self.ok("checkpoint", "verify", "a", "b", "c").count("as written"), 6)
        # Stages compute the same bits; other numbers of ranks do not.
        for step in ("step-00000006", "step-00000012"):
            same = self.ok("checkpoint", "diff", "a/checkpoints/" + step,
                           "b/checkpoints/" + step)
            self.assertIn("config zero_optimization.stage: 1 and 3", same)
            self.assertIn("equal: ", same)
        other = self.zero("checkpoint", "diff", "a", "c")
        self.assertIn("elements differ, first ", other.stderr)
        self.assertEqual(other.returncode, 1)
        # The states with the most different elements are printed.
        def different(text):
            return [int(n.replace(",", "")) for n in
                    re.findall(r": ([0-9,]+) of [0-9,]+ elements differ", text)]
        every = different(self.zero("checkpoint", "diff", "a", "c", "--all").stdout)
        self.assertEqual(every, sorted(every, reverse=True))
        self.assertEqual(different(other.stdout), every[:10])
        self.assertIn("\n... and %d more; --all prints them\n" % (len(every) - 10),
                      other.stdout)
        # What differs before a damage is printed, too.
        shutil.copytree(self.path("a"), self.path("damaged"))
        shard = self.path("damaged/checkpoints/step-00000012/states-00001.safetensors")
        with open(shard, "r+b") as f:
            f.seek(-1, os.SEEK_END)
            last = f.read(1)[0]
            f.seek(-1, os.SEEK_END)
            f.write(bytes([last ^ 1]))
        damaged = self.zero("checkpoint", "diff", "damaged", "c")
        self.assertEqual(damaged.returncode, 2, damaged.stderr)
        self.assertIn("states-00001.safetensors", damaged.stderr)
        self.assertGreater(len(different(damaged.stdout)), 0)
        # The last one has the weights that the run ended with.
        self.assertIn("as bf16", self.ok("checkpoint", "export", "a", "exported"))
        for place, has in (("a", "metrics.jsonl"), ("a/checkpoints", "latest"),
                           ("a/checkpoints/" + step, "checkpoint.json")):
            self.assertIn("'%s' is a run's folder (it has %s)" % (place, has),
                          self.error("checkpoint", "export", "a", place))
        self.assertIn("'.' is neither empty nor a model",
                      self.error("checkpoint", "export", "a", "."))
        for size, reason in (("0GB", "is not more than 0"),
                             ("5", "has no unit"),
                             ("1e30GB", "is too large"),
                             ("10XB", "has an unknown unit, XB")):
            self.assertIn('--max-shard-size: "%s" %s' % (size, reason), self.error(
                "checkpoint", "export", "a", "none", "--max-shard-size", size))
        # A link to a larger disk stays one.
        os.mkdir(self.path("disk"))
        os.symlink("disk", self.path("link"))
        self.ok("checkpoint", "export", "a", "link")
        self.assertTrue(os.path.islink(self.path("link")))
        self.assertTrue(os.path.exists(self.path("disk/model.safetensors")))
        for name in ("config.json", "model.safetensors"):
            with open(self.path("a/final/" + name), "rb") as want, \
                    open(self.path("exported/" + name), "rb") as got:
                self.assertEqual(got.read(), want.read(), name)

    def test_launchers_are_refused_with_what_is_wrong(self):
        one = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1",
               "MASTER_PORT": "29500"}
        train = ("train", "config.json")
        for change, args, error in (
            ({"MASTER_PORT": ""}, train,
             "MASTER_PORT is not set, but WORLD_SIZE is 4"),
            ({"RANK": "4"}, train, "RANK is 4, but WORLD_SIZE is 4"),
            ({}, (*train, "--ranks", "2", "--device", "cuda"),
             "--ranks 2, but WORLD_SIZE is 4, one rank in each process"),
            ({}, train, "WORLD_SIZE is 4, but torchrun cannot connect ranks on "
             "the CPU; start them by mpirun or srun --mpi=pmix, or --ranks 4"),
            ({}, (*train, "--set", "communication.backend=local"),
             'communication.backend: "local" connects threads of one process, '
             "but WORLD_SIZE is 4"),
        ):
            result = self.zero(*args, env={**one, **change})
            self.assertEqual(result.returncode, 1, result.stderr)
            self.assertRegex(result.stderr, "^zero: (process [0-9]+ on .*: )?" +
                             re.escape(error))
            self.assertEqual(result.stdout, "")
        self.assertIn(
            'communication.backend: "nccl" connects GPUs, but --device is cpu',
            self.error(*train, "--set", "communication.backend=nccl"))

    def test_of_launched_processes_one_does_the_work(self):
        self.train("run", "training.steps=1")
        env = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
               "MASTER_PORT": "29500"}
        for args, words in (
                (("eval", "config.json"), "perplexity"),
                (("generate", "config.json", "--tokens", "2",
                  "--prompt", "int "), "int "),
                (("plan", "config.json", "--no-step"), "on 2 ranks")):
            with self.subTest(args=args):
                result = self.zero(*args, env={**env, "RANK": "1"})
                self.assertEqual(
                    (result.returncode, result.stdout, result.stderr),
                    (0, "", ""))
                result = self.zero(*args, env={**env, "RANK": "0"})
                self.assertEqual(result.returncode, 0, result.stderr)
                self.assertIn(words, result.stdout)
                self.assertIn("zero: note: WORLD_SIZE is 2, and %s takes one "
                              "process: rank 0 does it, the others exit\n"
                              % args[0], result.stderr)
        # Commands that print or write on every machine still do.
        result = self.zero("config", "config.json", env={**env, "RANK": "1"})
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertIn('"sequence_length"', result.stdout)

    def test_a_trace_replaces_traces_only(self):
        train = ("train", "config.json", "--set", "training.steps=1", "--trace")
        before = self.read_json("config.json")
        self.assertIn("--trace: 'config.json' exists and is not a trace; "
                      "choose another name", self.error(*train, "config.json"))
        self.assertEqual(self.read_json("config.json"), before)
        for _ in range(2):
            self.ok(*train, "trace.json")
            self.assertIn("traceEvents", self.read_json("trace.json"))

    def test_memory_says_why_stage_2_takes_as_much_as_stage_1(self):
        args = ("memory", "config.json", "--set", "train_batch_size=16")
        note = "note: stage 2 saves nothing over stage 1 "
        text = self.ok(*args, "--ranks", "2")
        self.assertIn(note, text)
        # It names the levels where that is so.
        peaks = {tuple(line.split()[:2]): float(line.split()[2])
                 for line in text.splitlines()
                 if re.match(r" *\*?[0-3] ", line)}
        named = re.search(note + "with recompute (.*?): ", text)[1].split(", ")
        for level in ("keep_all", "off", "selective", "full"):
            saved = 1 - peaks["2", level] / peaks["1", level]
            # 1 %, and what two rounded numbers hide.
            if level in named:
                self.assertLess(saved, 0.015, text)
            else:
                self.assertGreater(saved, 0.005, text)
        self.assertNotIn(note, self.ok(*args, "gradient_accumulation_steps=2",
                                       "--ranks", "2"))
        # Nothing is sharded.
        alone = self.ok(*args, "--ranks", "1")
        self.assertIn("note: one rank has nothing to shard", alone)
        self.assertNotIn(note, alone)
        self.assertNotIn(note, self.ok(
            *args, "zero_optimization={\"stage\": 2, \"mics_shard_size\": 1}",
            "--ranks", "2"))

    def test_memory_is_silent_about_paddings(self):
        # 128 bytes of 7 GB are no news.
        text = self.ok("memory", LLAMA_1B, "--ranks", "64",
                       "--device-memory", "40GiB")
        self.assertIn("fits as it is: ", text)
        self.assertNotIn("by ZeRO's formula", text)

    def test_train_names_the_level_of_recompute_as_the_config_does(self):
        text = self.ok("train", "config.json", "--set", "training.steps=1",
                       "activation_checkpointing.keep_all=true")
        self.assertRegex(text, r"\n *recompute +keep_all\n")

    def test_more_threads_than_cores_are_named(self):
        train = ("train", "config.json", "--set", "training.steps=1",
                 "training.out_dir=threads")
        note = "note: --threads 64 on 1 rank is more than the "
        text = self.ok(*train, "--threads", "64")
        self.assertIn(note, text)
        self.assertRegex(text, r"memory +the process [0-9.]+ MiB at its peak; "
                               r"predicted [0-9.]+ MiB of 1 rank")
        self.assertNotIn(note[:13], self.ok(*train, "--threads", "1"))

    def test_memory_compares_what_the_stages_take(self):
        args = ("memory", "config.json", "--ranks", "2", "--threads", "1",
                "--set", "train_batch_size=4")
        measured = self.zero(*args, "--json", "--measure", "--offload")
        self.assertEqual(measured.returncode, 0, measured.stderr)
        self.assertIn("zero: measuring 3 of 32: config.json, stage 2, recompute "
                      "keep_all\n", measured.stderr)
        rows = [json.loads(line) for line in measured.stdout.splitlines()]
        self.assertEqual([(row["stage"], row["recompute"]) for row in rows
                          if row["offload"] == "-"],
                         [(stage, recompute)
                          for recompute in ("keep_all", "off", "selective",
                                            "full")
                          for stage in range(4)])
        for row in rows:
            self.assertEqual(row["states_bytes"],
                             row["states_bytes_by_formula"])
            states = [row[name] for name in
                      ("parameters", "gradients", "optimizer")]
            # Gradients replace activations.
            self.assertLessEqual(sum(states), row["states_bytes"])
            others = [row[name] for name in
                      ("gathered_parameters", "reduce_buffers", "activations",
                       "workspace", "inputs", "fragmentation", "fixed")]
            self.assertEqual(sum(states + others), row["peak_bytes"])
            self.assertTrue(row["fits"])
            self.assertRegex(row["peak_action"], r"^\w+\(.+\)$")
            if row["stage"] < 3:
                self.assertEqual(row["sent_bytes_per_step"],
                                 row["sent_bytes_by_formula"])
            # A run took the predicted memory; outside the arenas the prediction
            # is a bound for such a small model.
            measured = row["measured"]
            for name, value in measured.items():
                if name not in ("fixed", "total"):
                    self.assertEqual(value, row[name], name)
            self.assertLess(measured["fixed"], row["fixed"] * 1.25)
            self.assertGreater(measured["fixed"], row["fixed"] * 0.5)
            self.assertEqual(sum(measured.values()), 2 * measured["total"])

        table = self.ok(*args, "--device-memory", "1MiB").splitlines()
        self.assertRegex(table[0], r"^config\.json does not fit as it is: "
                                   r"[0-9.]+ MiB of 1\.0 MiB$")
        self.assertRegex(table[1], r"each of 2 ranks .* may take 1\.0 MiB$")
        self.assertRegex(table[2], r"^stage +recompute +peak +fits .* parameters ")
        self.assertEqual([line.split()[4] for line in table[3:19]], ["no"] * 16)
        self.assertRegex(
            self.ok(*args), "note: at stage 3 a rank gathers [0-9,]+ bytes = "
            "ZeRO's formula [0-9,]+ - [0-9,]+ of units that stayed in place")
        for legend in (r"\* is the config's own; fixed: ",
                       r"computed again in backward: keep_all nothing; off norms"):
            self.assertRegex(self.ok(*args), r"note: " + legend)
        for size, reason in (
                ("80", "has no unit"), ("1e9", "has no unit"),
                ("10XB", "has an unknown unit, XB: the units are B, KB, MB, GB, "
                         "TB, KiB, MiB, GiB and TiB"),
                ("1e30GB", "is too large: the limit is 1000000 TB"),
                ("-5GiB", "is not more than 0"), ("0", "is not more than 0"),
                ("0.5B", "is less than one byte"),
                ("0x10GiB", "is not a number with a unit"),
                ("GiB", "is not a number with a unit"),
                ("nanGiB", "is not a number with a unit"),
                ("5,5GiB", "is not a number with a unit")):
            for option in ("--device-memory", "--host-memory"):
                self.assertIn(
                    '%s: "%s" %s; want a size such as 80GiB' % (
                        option, size, reason), self.error(*args, option, size))
        for size in ("2gib", "2 GiB", "2048MiB", "2g", "2Gi", "2147483648B",
                     "2.0GiB "):
            self.assertIn("may take 2.00 GiB",
                          self.ok(*args, "--device-memory", size))
        self.ok(*args, "--set", "zero_optimization.stage=3",
                "--set", "zero_optimization.mics_shard_size=1")
        csv = self.ok(*args, "--csv").splitlines()
        self.assertEqual(csv[0].split(","), list(rows[0])[:-1])
        self.assertEqual(len(csv), 17)
        both = self.ok("memory", "config.json", "config.json").splitlines()
        self.assertEqual(
            sum(line.startswith("config.json: memory of") for line in both), 2)
        self.assertIn("excludes", self.error(*args, "--csv", "--json"))
        self.assertIn("a parameter server has no stages", self.error(
            *args, "--set", "communication.algorithm=parameter_server"))

    def test_memory_measures_without_the_data(self):
        rows = [json.loads(line) for line in self.ok(
            "memory", "config.json", "--threads", "1", "--json", "--measure",
            "--ranks", "2", "--set", "data.train=missing.txt",
            "training.sample_every=4", "train_micro_batch_size_per_gpu=1",
            "gradient_accumulation_steps=8", "train_batch_size=auto",
            'model={"model_type": "gpt2", "n_layer": 2, "n_embd": 64, '
            '"n_head": 2}').splitlines()]
        self.assertEqual(len(rows), 16)
        for row in rows:
            for name in row["measured"].keys() - {"fixed", "total"}:
                self.assertEqual(row["measured"][name], row[name], name)

    def test_peaks_fall_where_the_vocabulary_is_the_model(self):
        args = ("--ranks", "2", "--set", "train_batch_size=2",
                "--set", "train_micro_batch_size_per_gpu=1",
                "--set", "data.sequence_length=256", "--set", "model=" + json.dumps(
                    {"model_type": "gpt2", "n_layer": 2, "n_embd": 256,
                     "n_head": 4, "vocab_size": 50257, "n_positions": 256}))
        rows = [json.loads(line) for line in
                self.ok("memory", "config.json", *args, "--json").splitlines()]
        for level in {row["recompute"] for row in rows}:
            peaks = [row["peak_bytes"] for row in rows
                     if row["recompute"] == level]
            self.assertEqual(len(peaks), 4)
            self.assertEqual(peaks, sorted(peaks, reverse=True))
        text = self.ok("plan", "config.json", "--no-step", *args,
                       "--set", "zero_optimization.stage=3")
        self.assertRegex(text, r"note: the vocabulary is in \d+ parts of ")
        self.assertIn("\n  head.0", text)
        text = self.ok("plan", "config.json", "--no-step", *args,
                       "--set", "zero_optimization.stage=3",
                       "--set", "zero_optimization.vocabulary_parts=off")
        self.assertNotIn("vocabulary is in", text)

    def test_with_few_logits_the_vocabulary_is_in_parts_at_stage_0(self):
        def has_parts(*sets, length=8, tied=True, layers=1, vocabulary=50257):
            model = {"model_type": "llama", "num_hidden_layers": layers,
                     "hidden_size": 64, "num_attention_heads": 2,
                     "intermediate_size": 128, "vocab_size": vocabulary,
                     "tie_word_embeddings": tied}
            text = self.ok("plan", "config.json", "--no-step", "--ranks", "2",
                           "--set", "train_batch_size=2",
                           "--set", "train_micro_batch_size_per_gpu=1",
                           "--set", "data.sequence_length=%d" % length,
                           "--set", "model=" + json.dumps(model), *sets)
            return "note: the vocabulary is in " in text
        for stage in "01":
            at = ("--set", "zero_optimization.stage=" + stage)
            self.assertTrue(has_parts(*at))
            self.assertTrue(has_parts(*at, tied=False))
            # Nothing to hide; too many logits; a gradient that the lookup and
            # the head write together.
            self.assertFalse(has_parts(
                *at, "--set", "zero_optimization.overlap_comm=false"))
            self.assertFalse(has_parts(*at, length=64))
            self.assertFalse(has_parts(
                *at, "--set", "gradient_accumulation_steps=4096",
                "--set", "train_batch_size=8192"))
        # With sharded gradients, too, if parts save little memory.
        at = ("--set", "zero_optimization.stage=2")
        small = {"layers": 12, "vocabulary": 8000}
        self.assertTrue(has_parts(*at, **small))
        self.assertFalse(has_parts(
            *at, "--set", "zero_optimization.overlap_comm=false", **small))

    def test_a_billion_parameters_in_parts_peak_in_blocks_at_a_gigabyte(self):
        # The vocabulary is four blocks large, and its gradient is dense, the
        # head's and the lookup's. Yet only blocks are at the peak: one or two
        # of them in flight.
        def row(*sets):
            rows = [json.loads(line) for line in
                    self.ok("memory", LLAMA_1B, "--ranks", "1024", "--json",
                            "--set", "train_batch_size=1024",
                            "--set", "zero_optimization.vocabulary_parts=on",
                            *sets).splitlines()]
            return next(row for row in rows if row["stage"] == 3 and
                        row["recompute"] == "full")
        two = row()
        self.assertLess(two["peak_bytes"], 1.05 * 2**30)
        self.assertIn("block", two["peak_action"])
        one = row("--set", "zero_optimization.overlap_comm=false")
        self.assertLess(one["peak_bytes"], 0.8 * 2**30)

    def test_memory_has_the_papers_table(self):
        # Rajbhandari et al. 2020, figure 1: 7.5 billion parameters on 64 GPUs,
        # 2 + 2 + 12 bytes each. This model has 7.46 billion.
        args = ("memory", "config.json", "--ranks", "64", "--json",
                "--device-memory", "200GB", "--set", "model=" + json.dumps(
                    {"model_type": "gpt2", "n_layer": 36, "n_embd": 4096,
                     "n_head": 32, "vocab_size": 50257, "n_positions": 1024}),
                "--set", "train_batch_size=64", "--set", "bf16.enabled=true",
                "--set", "data_types.grad_accum_dtype=bf16")
        def states(*sets):
            rows = [json.loads(line) for line in
                    self.ok(*args, *sets).splitlines()]
            return [row["states_bytes"] for row in rows
                    if row["recompute"] == "off"]
        for got, paper in zip(
                states("--set", "data_types.split_master_weights=false"),
                (120, 31.4, 16.6, 1.9)):
            self.assertAlmostEqual(got / 1e9 * 7.5 / 7.4624, paper,
                                   delta=0.01 * paper + 0.05)
        # The optimizer's part is 10 bytes by default, of which two are the
        # parameter's.
        for got, bytes_ in zip(states(), (14, 4 + 10 / 64, 2 + 12 / 64,
                                          14 / 64)):
            self.assertAlmostEqual(got / 7.4624e9, bytes_, delta=0.01 * bytes_)

    def test_memory_proposes_what_fits_and_that_runs(self):
        sets = ("--set", "train_batch_size=32", "data.sequence_length=256")
        args = ("memory", "config.json", "--ranks", "2", *sets)
        rows = [json.loads(line)
                for line in self.ok(*args, "--json").splitlines()]
        here = next(row for row in rows if row["as_configured"])
        least = min(row["peak_bytes"] for row in rows)
        memory = (here["peak_bytes"] + least) // 2
        *rows, proposed = map(json.loads, self.ok(
            *args, "--json", "--fit", "--device-memory", "%dB" % memory,
            "--fit-config", "fits.json").splitlines())
        fits = proposed["fits"]
        here = next(row for row in rows if row["as_configured"])
        self.assertEqual(proposed["as_it_is"]["patch"], "")
        self.assertEqual(proposed["as_it_is"]["peak_bytes"], here["peak_bytes"])
        self.assertGreater(len(fits), 0)
        seconds = [fit["assumed_seconds"] for fit in fits]
        self.assertEqual(seconds, sorted(seconds))
        for fit in fits:
            # Two starts of the program differ by less than is left free.
            self.assertLessEqual(fit["peak_bytes"], memory - (1 << 20))
            self.assertIn("--set ", fit["patch"])
        # The proposals take the predicted memory: as options and as a file.
        for command in (("config.json", *fits[0]["patch"].split(),
                         *sets), ("fits.json",)):
            self.ok("train", *command, "--ranks", "2",
                    "--device-memory", "%dB" % memory,
                    "--set", "training.steps=2")
            summary = self.read_json("run/summary.json")
            self.assertEqual(summary["peak_bytes"]["activations"],
                             summary["predicted_peak_bytes"]["activations"])
            self.assertAlmostEqual(summary["peak_bytes"]["total"],
                                   fits[0]["peak_bytes"], delta=16 << 20)
        # For people: the verdict first, then the config's own above the ways.
        text = self.ok(*args, "--fit", "--device-memory", "%dB" % memory)
        self.assertRegex(text, r"\Aconfig\.json does not fit as it is: [0-9.]+ "
                               r"MiB of [0-9.]+ MiB\n")
        self.assertRegex(text, r"cheapest first; above them the config as it is, "
                               r"to compare\n +peak .*\n.*  as it is \(does not "
                               r"fit\)\n.*  --set ")
        starts = {line.index("--set ") for line in text.splitlines()
                  if "--set " in line}
        self.assertEqual(len(starts), 1, text)
        text = self.ok(*args, "--fit")
        self.assertRegex(text, r"\Aconfig\.json fits as it is: ")
        self.assertRegex(text, r"to compare\n +peak .*\n.*  as it is\n")
        self.assertEqual(text.count("  as it is"), 1)
        self.assertIn("'fits.json' exists", self.error(
            *args, "--fit", "--fit-config", "fits.json"))
        self.assertIn("several are named", self.error(
            *args, "config.json", "--fit", "--fit-config", "other.json"))
        result = self.zero(*args, "--fit", "--device-memory", "1MiB")
        self.assertEqual(result.returncode, 1, result.stderr)
        self.assertRegex(result.stdout,
                         "fit: with this global batch nothing fits.*: a rank "
                         "needs at least [0-9.]+ MiB of the device's memory and "
                         "may take 1.0 MiB .--device-memory.; raise "
                         "--device-memory, or take ")
        self.assertIn("--fit: no change makes config.json fit", result.stderr)
        result = self.zero(*args, "--fit", "--device", "cuda",
                           "--device-memory", "150MiB")
        self.assertEqual(result.stdout.count(
            "may take 150.0 MiB, 128.0 MiB of it kept for kernels that load "
            "later\n"), 1)
        self.assertRegex(result.stdout,
                         ": a rank needs at least [0-9.]+ MiB of the device's "
                         "memory .128.0 MiB of it for kernels that load later. "
                         "and may take 150.0 MiB .--device-memory.; raise ")
        result = self.zero(*args, "--fit", "--device", "cuda",
                           "--device-memory", "1200MiB", "--host-memory", "1MiB",
                           "--set", 'model={"preset": "gpt2"}',
                           "data.tokenizer=none")
        self.assertEqual(result.returncode, 1, result.stderr)
        self.assertRegex(result.stdout,
                         "nothing fits.*: with offload the device has room, but "
                         "a rank needs at least [0-9.]+ MiB of the host's memory "
                         "and may take 1.0 MiB .--host-memory.; raise "
                         "--host-memory, or take ")
        result = self.zero(*args, "--fit", "--device-memory", "1MiB",
                           "--fit-config", "other.json")
        self.assertEqual(result.returncode, 1)
        self.assertIn("stage", result.stdout)  # the table comes nevertheless
        self.assertIn("other.json is not written", result.stderr)

    def test_what_fits_without_room_to_spare_is_proposed_with_a_warning(self):
        def fit(memory, *form):
            return self.zero("memory", "config.json", "--ranks", "2", "--fit",
                             "--device-memory", "%dKiB" % memory, *form)

        def fits_barely(memory):
            lines = fit(memory, "--json").stdout.splitlines()
            return json.loads(lines[-1])["fits_barely"]
        warning = "so zero train may refuse them"
        low, high = 1024, 1 << 20  # nothing fits; all does
        while high - low > 64:
            middle = (low + high) // 2
            if fit(middle).returncode == 0:
                high = middle
            else:
                low = middle
        # Two starts of the program take memory that differs by some 500 KiB; 1.5
        # MiB of each rank is room.
        low, high = low - 640, high + 640
        self.assertIn("with this global batch nothing fits", fit(low).stdout)
        self.assertIn(warning, fit(high).stdout)
        self.assertNotIn(warning, fit(high + 1536).stdout)
        self.assertEqual([fits_barely(memory)
                          for memory in (low, high, high + 1536)],
                         [False, True, False])
        # So is the config as it is.
        def as_it_is(memory, *args):
            return self.ok("memory", "config.json", "--ranks", "2",
                           "--device-memory", "%dB" % memory, *args).splitlines()

        def own(memory):
            rows = map(json.loads, as_it_is(memory, "--json"))
            return next(row for row in rows if row["as_configured"])
        peak = own(1 << 30)["peak_bytes"]
        for free, barely in ((3 << 18, True), (5 << 19, False)):
            row = own(peak + free)
            self.assertEqual((row["fits"], row["fits_barely"]), (True, barely))
            lines = as_it_is(peak + free)
            self.assertEqual("so zero train may refuse the run" in lines[0],
                             barely)
            table_row = next(line for line in lines
                             if line.lstrip().startswith("*"))
            self.assertEqual("barely" in table_row, barely)

    def test_memory_and_train_count_the_same_program(self):
        for ranks in ("1", "2"):
            run = ("config.json", "--ranks", ranks)
            row = next(row for row in map(json.loads, self.ok(
                "memory", *run, "--json").splitlines()) if row["as_configured"])
            self.ok("train", *run, "--set", "training.steps=1")
            # Though zero train has loaded data and run kernels by then.
            predicted = self.read_json("run/summary.json")["predicted_peak_bytes"]
            self.assertAlmostEqual(predicted["fixed"], row["fixed"],
                                   delta=1 << 20)

    def test_the_peak_is_the_operating_systems_within_two_percent(self):
        def peak(save_every, *args):
            result = self.zero(
                "train", "config.json", "--ranks", "2", "--threads", "1",
                "--set", "zero_optimization.stage=2",
                "--set", 'model={"model_type": "gpt2", "n_layer": 2, "n_embd": '
                '512, "n_head": 4, "vocab_size": 50257, "n_positions": 128}',
                "--set", "data.sequence_length=128", "--set",
                "training.save_every=%d" % save_every, *args)
            self.assertEqual(result.returncode, 0, result.stderr)
            summary = self.read_json("run/summary.json")
            predicted = 2 * summary["predicted_peak_bytes"]["total"]
            self.assertGreater(predicted, 1 << 29)
            self.assertAlmostEqual(summary["peak_resident_bytes"], predicted,
                                   delta=predicted // 50)
            # The copy that checkpoints are written from.
            self.assertEqual("snapshot" in summary["peak_bytes"], save_every > 0)
            return summary["peak_resident_bytes"]
        peak(0, "--set", "training.steps=2")
        shutil.rmtree(self.path("run"))
        fresh = peak(1, "--set", "training.steps=2")
        # The windows that each rank read the checkpoint through are gone.
        resumed = peak(1, "--set", "training.steps=4", "--resume", "auto")
        self.assertLess(resumed, fresh + (16 << 20))

    def test_plan_shows_owners_bytes_and_the_step(self):
        text = self.ok("plan", "config.json", "--ranks", "2",
                       "--set", "train_batch_size=4",
                       "--set", "zero_optimization.stage=3")
        for part in ("ZeRO stage 3 on 2 ranks", "per rank, sharded",
                     "memory of a step, on ", "reduce buckets",
                     "Gather(block.1)", "Update(head)"):
            self.assertIn(part, text)
        self.assertRegex(text, r"each rank +[0-9.]+ MiB at peak: parameters ")
        self.assertNotIn("note: ", text)
        self.assertRegex(text, "gathered +[0-9,]+ bytes = ZeRO's formula [0-9,]+ "
                               "- [0-9,]+ of units that stayed in place\n")
        text = self.ok("plan", "config.json", "--no-step",
                       "--set", "zero_optimization.overlap_comm=false")
        self.assertIn("note: zero_optimization.overlap_comm changes nothing on "
                      "one rank", text)

    def test_a_plan_says_once_what_is_alike(self):
        text = self.ok("plan", "config.json", "--ranks", "2",
                       "--set", "train_batch_size=10",
                       "--set", "gradient_accumulation_steps=5",
                       "--set", "model.num_hidden_layers=6",
                       "--set", "zero_optimization.stage=2",
                       "--set", "zero_optimization.reduce_bucket_size=1000")
        for pattern in (r"\n  block.0 to block.5 +[0-9,]+ elements in .*, each\n",
                        r"\n  \d+ to \d+ +[0-9,]+ elements, .* each: "
                        r"block.5#0 to block.0#\d+\n",
                        r"\nmicro-step 0\nLoadBatch\nForward\(embedding\); after "
                        r"GatherUpdated\(bucket 0: embedding.table\) of the "
                        r"step before\n",
                        r"\n  8 +20,480 elements, 80.0 KiB: rows of "
                        r"embedding.table\n",
                        r"\nmicro-steps 1 to 4, each\n",
                        r"\nand then\n +Reduce\(bucket 8: rows of "
                        r"embedding.table\); after Backward\(embedding\)\n"
                        r"ReleaseGradients.*\nAddRows\(embedding.table\); .*\n"
                        r"Norm\n",
                        r"\n +Reduce\(bucket \d+: head\); after "
                        r"ForwardBackward\(head\)\n",
                        r"\n  norm and agreements +96 bytes\n",
                        r"\nUpdate\(embedding\) to Update\(block.5\)\n"):
            self.assertRegex(text, pattern)
        self.assertEqual(text.count("\nForwardBackward"), 2)

    def test_a_trace_is_json_with_a_row_per_stream(self):
        self.ok("train", "config.json", "--ranks", "2", "--trace", "t.json",
                "--set", "train_batch_size=4", "--set", "training.steps=2",
                "--set", "zero_optimization.stage=3")
        events = self.read_json("t.json")["traceEvents"]
        rows = {(e["pid"], e["args"]["name"]) for e in events
                if e["name"] == "thread_name"}
        self.assertEqual(len(rows), 10)  # five on each rank
        names = {e["name"] for e in events if e["ph"] == "X"}
        for name in ("Forward(block.0)", "all_gather block.0",
                     "reduce_scatter block.1", "inference: Forward(block.0)",
                     "inference: Forward(head)", "wait: gather embedding.table",
                     "wait: gather block.1", "wait: reduce block.1",
                     "wait: scalar norm and loss",
                     "wait: scalar stop, valid targets"):
            self.assertIn(name, names)
        # A wait has a name, and a step agrees before and after it.
        self.assertNotIn("wait", names)
        agreed = [e["name"] for e in events
                  if e["pid"] == 0 and e["ph"] == "X" and
                  e["name"].startswith("wait: scalar ")]
        self.assertEqual(agreed.count("wait: scalar stop, valid targets"), 2)
        self.assertEqual(agreed.count("wait: scalar norm and loss"), 2)
        self.assertNotIn("wait: scalar valid targets", agreed)

    def test_a_rank_that_fails_ends_the_run_with_its_name(self):
        self.train("run")  # an earlier good final/ stays
        for kind, stage, words in (
                ("throw", 0, "rank 1 aborted the run: injected fault in step 3 "
                             "at reduce_scatter"),
                ("stop", 3, "step 3: local: rank 1 did not arrive at #"),
                ("mismatch", 2, "step 3: local: rank 1 differs from rank 0 at")):
            with self.subTest(kind=kind):
                text = self.error(
                    "train", "config.json", "--ranks", "2",
                    "--inject-fault", "1:3:" + kind,
                    "--set", "communication.timeout_seconds=2",
                    "--set", "zero_optimization.stage=%d" % stage)
                self.assertIn(words, text)
                self.assertEqual("hangs and is abandoned" in text,
                                 kind == "stop")
                summary = self.read_json("run/summary.json")
                self.assertIn("rank 1", summary["error"])
                self.assertEqual(summary["steps"], 2)
                with open(self.path("run/metrics.jsonl")) as f:
                    self.assertEqual(len(f.readlines()), 2)
                self.assertTrue(os.path.exists(self.path("run/final")))
                self.assertFalse(os.path.exists(self.path("run/final.failed")))
                self.assertIn("the last one failed",
                              self.error("eval", "config.json"))
        # If rank 0 hangs, the next one reports.
        self.error("train", "config.json", "--ranks", "3",
                   "--inject-fault", "0:2:stop",
                   "--set", "train_batch_size=6",
                   "--set", "communication.timeout_seconds=2",
                   "--set", "zero_optimization.stage=1")
        summary = self.read_json("run/summary.json")
        self.assertIn("step 2: local: rank 0 did not", summary["error"])
        self.assertEqual(summary["steps"], 1)
        several = ("train", "config.json", "--ranks", "2")
        self.assertIn("--inject-fault: fault \"1:13:stop\": step \"13\" is not "
                      "in [1, 12]",
                      self.error(*several, "--inject-fault", "1:13:stop"))
        self.assertIn("want RANK:STEP:KIND",
                      self.error(*several, "--inject-fault", "1:3"))
        self.assertIn("--inject-fault: ", self.error(
            *several, "--inject-fault", "1:3:stop", "--inject-fault",
            "1:4:stop"))
        self.assertIn("--inject-fault", self.ok("train", "--help"))

    def test_the_plan_says_what_crosses_hosts(self):
        plan = ("plan", "config.json", "--ranks", "4")
        stage = ("--set", "zero_optimization.stage=2")
        text = self.ok(*plan, "--no-step", "--hosts", "2", *stage)
        self.assertIn("bytes sent between 2 hosts per step, each one process of "
                      "2 ranks", text)
        self.assertIn("k (n - k) / n of the bytes to be summed", text)
        self.assertIn("between 1 host per step, each one process of 4 ranks",
                      self.ok(*plan, "--no-step", "--hosts", "1"))
        document = json.loads(self.ok(*plan, "--hosts", "2", "--json", *stage))
        hosts = document["host_bytes"]
        self.assertEqual(hosts["flat"][0]["summed"],
                         2 * hosts["hierarchical"][0]["summed"])
        numbers = json.loads(self.ok(*plan, "--json", *stage))
        self.assertNotIn("hosts", numbers)
        self.assertEqual(document["rank_bytes"], numbers["rank_bytes"])
        self.assertIn("each one process of 2 ranks", self.ok(
            *plan, "--no-step", "--hosts", "2", "--set",
            "communication.algorithm=parameter_server"))
        auto = json.loads(self.ok(
            *plan, "--hosts", "2", "--json", *stage, "--set",
            "zero_optimization.mics_shard_size=auto"))
        self.assertEqual(auto["shards"], 2)
        self.assertIn("--hosts 3 does not divide --ranks 4",
                      self.error(*plan, "--hosts", "3"))
        self.assertIn("--no-step", self.error(*plan, "--json", "--no-step"))

    def test_a_slow_rank_is_named_everywhere_and_changes_no_bit(self):
        sets = ("--set", "training.steps=400", "zero_optimization.stage=2",
                "--set", "train_batch_size=6")
        run = ("train", "config.json", "--ranks", "3", "--threads", "1", *sets)
        self.ok(*run)
        as_ever = self.read_json("run/summary.json")
        text = self.ok(*run, "--inject-fault", "1:3:slow=20")
        named = r"rank 1 on \S+ takes \d+\.\d times as long as the other " \
                r"ranks for its own work; the largest difference is in compute"
        self.assertRegex(text, r"note: step \d+: " + named)
        self.assertRegex(text, r"straggler +" + named)
        self.assertNotRegex(text, r"rank [02] on \S+ takes")
        summary = self.read_json("run/summary.json")
        self.assertEqual(summary["parameters_hash"], as_ever["parameters_hash"])
        [straggler] = summary["stragglers"]
        self.assertEqual((straggler["rank"], straggler["part"]),
                         (1, "compute"))
        with open(self.path("run/metrics.jsonl")) as f:
            lines = [json.loads(line) for line in f]
        self.assertEqual([one for line in lines
                          for one in line.get("stragglers", [])], [straggler])
        self.assertNotIn("ranks_before", lines[0])
        self.assertEqual(lines[20]["ranks_before"]["slowest_rank"], 1)
        self.assertRegex(self.ok("report", "run", "--html", "slow.html"),
                         r"note: run/metrics.jsonl: step \d+: " + named)
        # No rank is named if the factor is 0.
        self.ok(*run, "communication.straggler_factor=0",
                "training.steps=40", "--inject-fault",
                "1:3:slow=20")
        self.assertNotIn("stragglers", self.read_json("run/summary.json"))
        self.assertIn("step \"500\" is not in", self.error(
            *run, "--inject-fault", "1:500:slow=20"))

    def test_options_of_ranks_are_named_where_they_are_wrong(self):
        several = ("train", "config.json", "--ranks", "2")
        self.assertIn("--shape-link: link \"fast\"",
                      self.error(*several, "--shape-link", "fast"))
        self.assertIn("--trace: ", self.error(*several, "--trace", "no/t.json"))
        self.assertFalse(os.path.exists(self.path("run")))
        for command in ("eval", "generate"):
            self.assertIn("--ranks: %s runs on one rank" % command,
                          self.error(command, "config.json", "--ranks", "2"))

    def test_a_trace_of_a_rank_that_hangs_is_written(self):
        out = self.zero("train", "config.json", "--ranks", "2",
                        "--trace", "t.json", "--inject-fault", "1:2:stop",
                        "--set", "communication.timeout_seconds=2")
        self.assertEqual(out.returncode, 1)
        self.assertIn("rank 1 hangs and is abandoned", out.stderr)
        self.assertIn("trace in t.json", out.stdout)
        events = self.read_json("t.json")["traceEvents"]
        self.assertEqual({e["pid"] for e in events if e["ph"] == "X"}, {0, 1})

    def test_every_stage_gives_the_same_hash(self):
        hashes = set()
        for stage in range(4):
            self.ok("train", "config.json", "--ranks", "3",
                    "--set", "train_batch_size=6", "--set", "training.steps=3",
                    "--set", "zero_optimization.stage=%d" % stage)
            summary = self.read_json("run/summary.json")
            hashes.add(summary["parameters_hash"])
            # Each rank has a ledger, and the process is their sum; for such a
            # small model nearly all is fixed: libraries, code, threads.
            peak = summary["peak_bytes"]
            ranks = summary["peak_bytes_of_all_ranks"]
            self.assertEqual(ranks, 3 * peak["total"])
            unknown = summary["peak_resident_bytes"] - ranks
            self.assertLess(abs(unknown), 40 << 20)
            self.assertEqual(sum(peak.values()), 2 * peak["total"])
            # Every page of the arenas is touched before the first step.
            resident = summary["resident_bytes"]
            self.assertGreater(resident.pop("code and files"), 0)
            self.assertAlmostEqual(sum(resident.values()),
                                   peak["total"] - peak["fixed"],
                                   delta=4096 * len(resident))
        self.assertEqual(len(hashes), 1)
        # One rank sees the same batches and judges by the same text.
        several = self.read_json("run/summary.json")["validation_loss"]
        alone = self.train("run", "train_batch_size=6", "training.steps=3")
        self.assertAlmostEqual(alone["validation_loss"], several, places=4)

    def test_a_shaped_link_is_told(self):
        out = self.ok("train", "config.json", "--ranks", "2",
                      "--shape-link", "100MB/s,50us",
                      "--set", "training.steps=2")
        self.assertIn("100MB/s,50us between ranks", out)
        self.assertNotIn("note: --shape-link", out)
        summary = self.read_json("run/summary.json")
        self.assertEqual(summary["shape_link"], "100MB/s,50us")
        self.assertEqual(summary["ranks"], 2)
        self.assertGreaterEqual(summary["threads"], 1)
        out = self.ok("train", "config.json", "--shape-link", "100MB/s,50us",
                      "--set", "training.steps=2")
        self.assertNotIn("between ranks", out)
        self.assertIn("note: --shape-link changes nothing on one rank", out)
        summary = self.read_json("run/summary.json")
        self.assertNotIn("shape_link", summary)
        self.assertEqual(summary["ranks"], 1)

    def test_a_shaped_link_to_the_host_is_waited_for(self):
        offload = ("train", "config.json", "--set", "training.steps=3",
                   "--set", "zero_optimization.stage=2", "--set",
                   "zero_optimization.offload_optimizer.device=cpu")
        self.ok(*offload)
        fast = self.read_json("run/summary.json")
        self.assertNotIn("shape_host_link", fast)
        out = self.ok(*offload, "--shape-host-link", "1MB/s,1ms")
        self.assertIn("over 1MB/s,1ms (--shape-host-link)", out)
        slow = self.read_json("run/summary.json")
        self.assertEqual(slow["shape_host_link"], "1MB/s,1ms")
        self.assertEqual(slow["parameters_hash"], fast["parameters_hash"])
        # Gradients in fp32 go down, and parameters come up, in each step.
        self.assertGreater(slow["exposed_seconds"],
                           3 * 4e-6 * slow["parameters"])
        self.assertIn("--shape-host-link: link \"fast\"",
                      self.error(*offload, "--shape-host-link", "fast"))
        self.assertIn("note: --shape-host-link changes nothing without offload",
                      self.ok("train", "config.json", "--shape-host-link",
                              "1GB/s,0", "--set", "training.steps=1"))

    def test_groups_shard_within_and_add_up_across(self):
        def run(*sets):
            args = ["train", "config.json", "--ranks", "4"]
            for one in ("train_batch_size=8", "training.steps=3",
                        "zero_optimization.stage=3") + sets:
                args += ["--set", one]
            out = self.ok(*args)
            with open(self.path("run/metrics.jsonl")) as f:
                step = json.loads(f.readlines()[1])
            return out, self.read_json("run/summary.json"), step

        full_out, full, full_step = run()
        out, halves, step = run("zero_optimization.mics_shard_size=2")
        same_out, same, same_step = run("zero_optimization.mics_shard_size=4")
        self.assertIn("sharded in each of 2 groups of 2", out)
        # One group equals no groups, to the bit and the byte.
        self.assertEqual(same["parameters_hash"], full["parameters_hash"])
        self.assertNotIn("group", same_out + full_out)
        for one in (same_step, full_step):
            waited = one["communication"].pop("waited_ms")
            self.assertEqual(list(waited),
                             ["gather", "reduce", "across", "scalar", "host",
                              "disk"])
            self.assertAlmostEqual(one["communication"].pop("exposed_ms"),
                                   sum(waited.values()), places=6)
            self.assertGreater(waited["scalar"], 0)
        self.assertEqual(same_step["communication"],
                         full_step["communication"])
        # Two have twice the states each, and the same numbers except for the
        # order of sums.
        for state in ("parameters", "optimizer"):
            self.assertEqual(halves["peak_bytes"][state],
                             2 * full["peak_bytes"][state])
        self.assertEqual(halves["peak_bytes"], halves["predicted_peak_bytes"])
        self.assertAlmostEqual(halves["final_loss"], full["final_loss"],
                               places=5)
        # Psi / 2 within, and 2 * 1/2 * Psi / 2 across. For the table's
        # gradient, a token and a row per lookup of a rank, of one rank within
        # and of two across.
        wire = next(line for line in out.splitlines() if "wire per" in line)
        states = halves["peak_bytes"]["parameters"]  # fp32, as gradients
        rows = 2 * 32 * 4 * (1 + 64)
        beside = r"of embedding rows \(not in the formula\)"
        formula = "= ZeRO's formula"
        self.assertRegex(wire, r"; reduced {:,} bytes {} {:,} \+ {:,} {}; reduced "
                               r"across groups [0-9,]+ bytes {} [0-9,]+ \+ {:,} "
                               r"{}$".format(states + rows, formula, states, rows,
                                             beside, formula, 2 * rows, beside))
        self.assertNotIn("the plan says", wire)
        self.assertEqual(step["communication"]["reduced_bytes"], states + rows)
        self.assertEqual(step["communication"]["across_bytes"],
                         states + 2 * rows)
        text = self.ok("plan", "config.json", "--ranks", "4",
                       "--set", "train_batch_size=8",
                       "--set", "zero_optimization.stage=3",
                       "--set", "zero_optimization.mics_shard_size=2")
        for part in ("4 ranks in 2 groups of 2", "across groups",
                     "ReduceAcross(bucket 0"):
            self.assertIn(part, text)
        # One rank reads the config of several.
        self.ok("eval", "config.json", "--set", "zero_optimization.stage=3",
                "--set", "zero_optimization.mics_shard_size=2")

    def train_on(self, ranks, *sets):
        args = ["train", "config.json", "--ranks", str(ranks)]
        for one in ("train_batch_size=%d" % (2 * ranks),
                    "training.steps=3") + sets:
            args += ["--set", one]
        return self.ok(*args), self.read_json("run/summary.json")

    def test_offload_keeps_states_on_the_host_to_the_same_bits(self):
        # As in Hugging Face's documentation.
        offload = {"device": "cpu", "pin_memory": True}
        zero = {"stage": 3, "offload_optimizer": offload,
                "offload_param": offload, "overlap_comm": True,
                "contiguous_gradients": True, "sub_group_size": 1e9,
                "reduce_bucket_size": "auto",
                "stage3_prefetch_bucket_size": "auto",
                "stage3_param_persistence_threshold": "auto",
                "stage3_max_live_parameters": 1e9,
                "stage3_max_reuse_distance": 1e9,
                "stage3_gather_16bit_weights_on_model_save": True}
        keys = "zero_optimization=" + json.dumps(zero)
        bf16 = "bf16.enabled=true"
        for ranks in (1, 2):
            _, plain = self.train_on(ranks, bf16)
            out, host = self.train_on(ranks, bf16, keys)
            self.assertEqual(host["parameters_hash"], plain["parameters_hash"])
            self.assertEqual(host["validation_loss"], plain["validation_loss"])
            self.assertIn("and parameters, in the host's memory", out)
            # bf16, the other half of masters, moments and fp32 gradients.
            elems = plain["peak_bytes"]["parameters"] / 2 / ranks
            self.assertGreater(host["host_bytes"], 16 * elems)
            self.assertNotIn("optimizer", host["peak_bytes"])
            self.assertEqual(host["peak_bytes"], host["predicted_peak_bytes"])
        # Weights, an evaluation and a checkpoint of such a run.
        self.ok("eval", "config.json", "--set", keys)
        self.ok("generate", "config.json", "--tokens", "3", "--set", keys)
        plan = self.ok("plan", "config.json", "--ranks", "2", "--set", keys,
                       "--set", "train_batch_size=4")
        for action in ("Fetch(block.1)", "Offload(bucket 0", "SumSquares(head)",
                       "Update(head)"):
            self.assertIn(action, plan)
        rows = [json.loads(line) for line in self.ok(
            "memory", "config.json", "--ranks", "2", "--offload", "--json",
            "--set", "train_batch_size=4").splitlines()]
        self.assertEqual(len(rows), 32)
        for row in rows:
            self.assertEqual(row["states_bytes"],
                             row["states_bytes_by_formula"])
            self.assertEqual(row["host_bytes"] > 0, row["offload"] != "-")
            self.assertEqual(row["offload_seconds_per_step"] > 0,
                             row["offload"] != "-")
        self.assertRegex(
            self.ok("memory", "config.json", "--offload"),
            r"copies of [\d.]+ GB/s, AdamW of [\d.]+ G .*, measured here")

    def test_devices_times_the_host_and_a_disk(self):
        self.assertIn("disk does not exist", self.error("devices", "--disk",
                                                        "disk"))
        os.mkdir(os.path.join(self.folder, "disk"))
        text = self.ok("devices", "--disk", "disk", "--host-threads", "3")
        self.assertRegex(text, r"as a host: copies to it [\d.]+ GB/s, from it "
                               r"[\d.]+ GB/s; AdamW [\d.]+ G elements/s by 3 "
                               r"threads\n")
        self.assertRegex(text, r"disk: [\d.]+ GB/s read while as much is "
                               r"written")
        self.assertEqual(os.listdir(os.path.join(self.folder, "disk")), [])
        self.assertIn("/dev/null", self.error("devices", "--disk",
                                              "/dev/null/x"))

    def test_a_ratio_leaves_a_part_of_the_optimizer_on_the_device(self):
        bf16 = "bf16.enabled=true"
        keys = "zero_optimization=" + json.dumps(
            {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.5}})
        _, plain = self.train_on(2, bf16)
        out, some = self.train_on(2, bf16, keys)
        self.assertEqual(some["parameters_hash"], plain["parameters_hash"])
        self.assertIn("offload_optimizer.ratio 0.5 holds for whole units", out)
        self.assertIn("a part of the optimizer and the gradients", out)
        self.assertEqual(some["peak_bytes"], some["predicted_peak_bytes"])
        self.assertGreater(some["peak_bytes"]["optimizer"], 0)
        self.assertGreater(some["host_bytes"], 0)
        plan = self.ok("plan", "config.json", "--ranks", "2", "--set", keys,
                       "--set", "train_batch_size=4")
        self.assertEqual(len(re.findall("optimizer .* sharded\n", plan)), 1)
        self.assertEqual(
            len(re.findall("optimizer .*, in the host's memory", plan)), 1)
        rows = [json.loads(line) for line in self.ok(
            "memory", "config.json", "--ranks", "2", "--json", "--set", keys,
            "--set", "train_batch_size=4").splitlines()]
        of = {(row["stage"], row["offload"]): row for row in rows
              if row["recompute"] == "off"}
        for row in rows:
            self.assertEqual(row["states_bytes"],
                             row["states_bytes_by_formula"])
        for stage in (1, 2, 3):
            self.assertGreater(of[stage, "optimizer"]["optimizer"], 0)
            self.assertLess(of[stage, "optimizer"]["optimizer"],
                            of[stage, "-"]["optimizer"])
        # Parameters on the host are all updated there.
        self.assertEqual(of[3, "all"]["optimizer"], 0)

    NVME = {"device": "nvme", "nvme_path": "disk"}

    def test_offload_keeps_states_on_a_disk_to_the_same_bits(self):
        zero = {"stage": 3, "offload_optimizer": self.NVME,
                "offload_param": self.NVME}
        keys = "zero_optimization=" + json.dumps(zero)
        aio = 'aio={"block_size": 65536, "queue_depth": 16}'
        bf16 = "bf16.enabled=true"
        for ranks in (1, 2):
            _, plain = self.train_on(ranks, bf16)
            out, disk = self.train_on(ranks, bf16, keys, aio)
            self.assertEqual(disk["parameters_hash"], plain["parameters_hash"])
            self.assertEqual(disk["validation_loss"], plain["validation_loss"])
            disk_folder = os.path.join(os.path.realpath(self.folder), "disk")
            self.assertIn("in '%s', 16 requests of 64.0 KiB at once" % disk_folder,
                          out)
            made = "note: made the folder '%s' (nvme_path)" % disk_folder
            self.assertEqual(made in out, ranks == 1)
            self.assertEqual(disk["peak_bytes"], disk["predicted_peak_bytes"])
            self.assertIn("disk", disk["waited_ms"])
            self.assertEqual(os.listdir(os.path.join(self.folder, "disk")), [])
        self.assertIn('nvme_path: "mnt/disk": there is no folder "mnt"; a run '
                      "makes only the last folder of the path, so correct it, "
                      "mount the disk, or make the folder",
                      self.error("train", "config.json", "--set", keys,
                                 *("zero_optimization.offload_%s.nvme_path="
                                   "mnt/disk" % of for of in
                                   ("optimizer", "param"))))
        self.assertFalse(os.path.exists(self.path("mnt")))
        self.ok("eval", "config.json", "--set", keys)
        self.ok("generate", "config.json", "--tokens", "3", "--set", keys)
        plan = self.ok("plan", "config.json", "--ranks", "2", "--set", keys,
                       "--set", "train_batch_size=4")
        for action in ("ReadParameters(block.1)", "ReadStates(head)",
                       "WriteStates(head)", "on a disk"):
            self.assertIn(action, plan)
        memory = ["memory", "config.json", "--ranks", "2", "--set", keys,
                  "--set", "train_batch_size=4"]
        # The run made the folder, whose disk is timed.
        text = self.ok(*memory)
        self.assertIn("from disk", text)
        self.assertRegex(text, r"a disk of [\d.]+ GB/s, measured here")
        self.assertRegex(
            self.ok(*memory, "--set", "zero_optimization.offload_optimizer."
                    "nvme_path=none", "--set",
                    "zero_optimization.offload_param.nvme_path=none"),
            r"s, measured here; a disk of 1\.0 GB/s, assumed\n")
        os.mkdir(self.path("blocked"))
        self.write("blocked/zero_swap", "no folder")
        self.assertRegex(
            self.ok(*memory, "--set", "zero_optimization.offload_optimizer."
                    "nvme_path=blocked", "--set",
                    "zero_optimization.offload_param.nvme_path=blocked"),
            r"a disk of 1\.0 GB/s, assumed: .*'blocked/zero_swap'")
        for line in self.ok(*memory, "--json").splitlines():
            row = json.loads(line)
            uses = row["offload"] != "-"
            for name in ("disk_bytes", "from_disk_bytes_per_step",
                         "to_disk_bytes_per_step"):
                self.assertEqual(row[name] > 0, uses)

    def test_a_run_keeps_to_budgets_of_both_memories(self):
        model = ('model={"preset": "gpt2", "n_layer": 16, "n_embd": 384, '
                 '"n_head": 8, "vocab_size": 1024}')
        run = ("config.json", "--set", "training.steps=2", "--set", model,
               "--set", "data.sequence_length=32", "--set",
               "training.save_final=false")
        self.ok("train", *run)
        plain = self.read_json("run/summary.json")
        # Too little for the parameters beside the rest, and half of what states
        # take then.
        device = ["--device-memory", "%dB" % (plain["peak_bytes"]["total"] / 3.5)]
        host = ["--host-memory", "%dB" % plain["peak_bytes"]["total"]]
        # Without the second one memory has both.
        text = self.error("train", *run, *device)
        self.assertRegex(text, r"may take .* \(--device-memory\) of the")
        # Of several ranks the size that was given, and what it comes to.
        self.assertIn("may take 20.0 MiB (2 ranks of 10.0 MiB by "
                      "--device-memory) of the", self.error(
                          "train", *run, "--ranks", "2", "--device-memory",
                          "10MiB"))
        self.assertNotIn("offload", text)
        # What it proposes runs, to the same bits.
        patch = self.proposed(*run, *device, *host)
        self.assertIn("zero_optimization.offload_optimizer.device=cpu", patch)
        on_host = self.train_as_predicted(*run, *device, *host, *patch)
        self.assertEqual(on_host["parameters_hash"], plain["parameters_hash"])
        host[1] = "%dB" % (on_host["host_bytes"] / 2)
        # So does what it proposes for a host that is too small.
        patch = self.proposed(*run, *device, *host, *patch)
        self.assertIn("zero_optimization.offload_optimizer.device=nvme", patch)
        # An example of a folder, with the space that it needs.
        self.assertRegex(self.error("train", *run, *device, *host),
                         r"local disk, where each rank takes \d+\.\d MiB\n")
        patch = self.proposed(*run, *device, *host)
        self.assertIn("zero_optimization.offload_optimizer.device=nvme", patch)
        on_disk = self.train_as_predicted(*run, *device, *host, *patch)
        self.assertEqual(on_disk["parameters_hash"], plain["parameters_hash"])

    def proposed(self, *run):
        """The options with which a run that does not fit would."""
        text = self.error("train", *run)
        patch = text[text.index("this fits: ") + len("this fits: "):]
        return patch.partition(";")[0].split()

    def train_as_predicted(self, *run):
        """The summary of a run whose peaks of both memories, as the operating
        system has them, are the predicted ones within two percent."""
        row = next(row for row in map(json.loads, self.ok(
            "memory", *run, "--json").splitlines()) if row["as_configured"])
        self.ok("train", *run)
        summary = self.read_json("run/summary.json")
        resident = summary["resident_bytes"]
        # Beside the program itself, which is foreseen with some room.
        arenas = row["peak_bytes"] - row["fixed"]
        for predicted, measured in (
                (arenas,
                 resident["model states"] +
                 resident["activations, workspace and buffers"]),
                (row["host_bytes"], resident["model states of the host"])):
            self.assertGreater(predicted, 32 << 20)
            self.assertAlmostEqual(measured, predicted, delta=predicted // 50)
        self.assertGreater(summary["peak_resident_bytes"],
                           arenas + row["host_bytes"])
        self.assertLess(summary["peak_resident_bytes"],
                        summary["predicted_peak_bytes"]["total"] +
                        row["host_bytes"])
        return summary

    def test_a_run_on_a_disk_is_alone_there_and_goes_on_after_a_kill(self):
        optimizer = json.dumps({"stage": 2, "offload_optimizer": self.NVME})
        run = ("train", "config.json", "--ranks", "2",
               "--set", "train_batch_size=4",
               "--set", "zero_optimization=" + optimizer)
        whole = self.ok(*run, "--set", "training.steps=6",
                        "--set", "training.out_dir=whole")
        self.assertIn("and on a disk", whole)
        process = subprocess.Popen(
            [ZERO, *run, "--set", "training.steps=1000000",
             "--set", "training.save_every=3", "--set", "training.keep_last=0",
             "--set", "training.out_dir=killed"],
            cwd=self.folder, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL)
        try:
            metrics = os.path.join(self.folder, "killed", "metrics.jsonl")
            saved = os.path.join(self.folder, "killed", "checkpoints",
                                 "step-00000003")
            while not (os.path.exists(saved) and os.path.exists(metrics)):
                self.assertIsNone(process.poll())
                time.sleep(0.05)
            out = self.error(*run, "--set", "training.steps=2",
                             "--set", "training.out_dir=second")
            self.assertIn("belongs to another run in progress", out)
            self.assertIn("nvme_path of its own", out)
            # Whoever measures the disk is no other run.
            self.assertIn("disk  disk: ", self.ok("devices", "--disk", "disk"))
            self.assertIsNone(process.poll())
        finally:
            process.kill()
            process.wait()
        swap = os.path.join(self.folder, "disk", "zero_swap")
        self.assertEqual(sorted(os.listdir(swap)), ["rank_0", "rank_1"])
        self.ok(*run, "--resume", saved, "--set", "training.steps=6",
                "--set", "training.out_dir=resumed")
        self.assertEqual(
            self.read_json("resumed/summary.json")["parameters_hash"],
            self.read_json("whole/summary.json")["parameters_hash"])
        self.assertFalse(os.path.exists(swap))

    def test_a_disk_that_loses_data_ends_the_run_and_leaves_nothing(self):
        optimizer = json.dumps({"stage": 2, "offload_optimizer": self.NVME})
        process = subprocess.Popen(
            [ZERO, "train", "config.json", "--ranks", "2",
             "--set", "train_batch_size=4", "--set", "training.steps=1000000",
             "--set", "zero_optimization=" + optimizer],
            cwd=self.folder, text=True, stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE)
        swap = self.path("disk/zero_swap")
        try:
            while not os.path.exists(self.path("run/metrics.jsonl")):
                self.assertIsNone(process.poll())
                time.sleep(0.05)
            with open(swap + "/rank_1", "r+b") as file:
                noise = os.urandom(os.fstat(file.fileno()).st_size - 4096)
                until = time.monotonic() + 60
                while process.poll() is None:
                    self.assertLess(time.monotonic(), until)
                    file.seek(4096)
                    file.write(noise)
        finally:
            process.kill()
            _, error = process.communicate()
        self.assertEqual(process.returncode, 1, error)
        self.assertRegex(error, r"rank_1': \d+ bytes at offset \d+ are not "
                         "what was written there")
        self.assertFalse(os.path.exists(swap))
        self.assertFalse([name for name in os.listdir(self.path("run"))
                          if name.startswith(("final", "checkpoints"))])

    def test_a_ring_sends_what_direct_sends_and_sums_in_its_order(self):
        stage = "zero_optimization.stage=2"
        _, direct = self.train_on(3, stage)
        ring = "communication.algorithm=ring"
        out, summary = self.train_on(3, ring, stage)
        _, again = self.train_on(3, ring, "zero_optimization.stage=1",
                                 "zero_optimization.reduce_bucket_size=1000")
        self.assertIn("sharded; by ring", out)
        self.assertRegex(out, r"reduced [0-9,]+ bytes = ZeRO's formula "
                              r"[0-9,]+ \+ [0-9,]+ of embedding rows")
        self.assertEqual(summary["parameters_hash"], again["parameters_hash"])
        self.assertNotEqual(summary["parameters_hash"],
                            direct["parameters_hash"])
        self.assertAlmostEqual(summary["final_loss"], direct["final_loss"],
                               places=5)
        self.assertGreater(summary["peak_bytes"]["reduce_buffers"],
                           direct["peak_bytes"]["reduce_buffers"])
        self.assertEqual(summary["peak_bytes"],
                         summary["predicted_peak_bytes"])

    def test_a_parameter_server_holds_the_optimizer_and_moves_it_all(self):
        server = "communication.algorithm=parameter_server"
        _, direct = self.train_on(3)
        out, summary = self.train_on(3, server)
        with open(self.path("run/metrics.jsonl")) as f:
            step = json.loads(f.readlines()[1])["communication"]
        self.assertIn("rank 0 has the optimizer; by parameter_server", out)
        self.assertRegex(out, "at peak: .*; a worker [0-9.]+ [MK]iB")
        self.assertAlmostEqual(summary["final_loss"], direct["final_loss"],
                               places=5)
        states = summary["peak_bytes"]["parameters"]  # fp32, without padding
        self.assertEqual(summary["peak_bytes"], summary["predicted_peak_bytes"])
        self.assertEqual(summary["peak_bytes"]["optimizer"], 2 * states)
        # Twice the parameters to two workers, twice the gradients from them.
        self.assertEqual(step["gathered_bytes"], 2 * states)
        self.assertEqual(step["received_bytes"], 2 * states)
        self.assertEqual(step["reduced_bytes"], 0)
        self.assertIn(
            "the server sends {0:,} bytes = ZeRO's formula; it receives {0:,} "
            "bytes = ZeRO's formula; a worker sends {1:,} and receives {1:,}\n"
            .format(2 * states, states), out)
        # Equal bits for any buckets.
        _, again = self.train_on(3, server,
                                 "zero_optimization.reduce_bucket_size=1000",
                                 "zero_optimization.overlap_comm=false")
        self.assertEqual(again["parameters_hash"], summary["parameters_hash"])
        self.ok("eval", "config.json", "--set", server)
        text = self.error("train", "config.json", "--ranks", "2", "--set",
                          server, "--set", "zero_optimization.stage=1")
        self.assertIn("want stage 0", text)
        text = self.ok("plan", "config.json", "--ranks", "4", "--set", server)
        for part in ("on rank 0, nothing on the others", "rank 0 owns all",
                     "server receives", "worker sends"):
            self.assertIn(part, text)
        for who in ("server", "worker"):
            self.assertRegex(text, who + r" +[0-9.]+ MiB at peak: ")
        # Without a GPU it says what it assumes.
        text = self.ok("plan", "config.json", "--device", "cuda")
        self.assertIn("memory of a step, on ", text)
        self.assertRegex(text, r"each rank +[0-9.]+ [MG]iB at peak: .*activations "
                         r".*workspace .*fixed ")
        if not shutil.which("nvidia-smi"):
            self.assertIn("on NVIDIA H100 80 GB (assumed: no GPU here) with 79",
                          text)
            self.assertIn("note: this GPU is assumed, with ", text)

    def test_a_run_leaves_its_files_and_a_falling_loss(self):
        summary = self.train("run")
        self.assertEqual(summary["steps"], 12)
        self.assertLess(summary["final_loss"], summary["first_loss"] - 0.5)
        self.assertRegex(summary["parameters_hash"], "^[0-9a-f]{32}$")
        with open(self.path("run/metrics.jsonl")) as f:
            lines = [json.loads(line) for line in f]
        steps = [line for line in lines if "loss" in line]
        self.assertEqual([line["step"] for line in steps], list(range(1, 13)))
        for key in ("grad_norm", "lr", "tokens", "tokens_per_second", "step_ms",
                    "peak_bytes"):
            self.assertIn(key, steps[0])
        self.assertGreater(steps[0]["lr"], 0)
        # The resolved config is a config: the same run from it.
        self.ok("train", "run/config.json", "--set", "training.out_dir=again")
        self.assertEqual(self.read_json("again/summary.json")["parameters_hash"],
                         summary["parameters_hash"])

    def test_the_readmes_config_learns_without_a_spike(self):
        out = self.path("tiny")
        subprocess.run([ZERO, "train", "configs/gpt2_tiny.json", "--set",
                        "training.sample.tokens=0", "training.out_dir=" + out],
                       check=True, capture_output=True, timeout=120)
        with open(out + "/metrics.jsonl") as file:
            norms = [line["grad_norm"] for line in map(json.loads, file)
                     if "grad_norm" in line]
        # The first steps' are the largest. At twice the learning rate step 30
        # had five times as much, and with a short warm-up the loss jumped.
        self.assertLess(max(norms), 2.5 * norms[0])

    def test_parameters_hash_is_that_of_the_saved_weights(self):
        """Recomputed as described in engine/base/hash.h."""

        class Hash(ctypes.Structure):
            _fields_ = [("low", ctypes.c_uint64), ("high", ctypes.c_uint64)]

        xxhash = ctypes.CDLL(ctypes.util.find_library("xxhash"))
        xxh3_128 = xxhash.XXH3_128bits_withSeed
        xxh3_128.restype = Hash
        xxh3_128.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_uint64]
        _, summary = self.train_on(2, "zero_optimization.stage=3")
        with open(self.path("run/final/model.safetensors"), "rb") as f:
            header = json.loads(f.read(*struct.unpack("<Q", f.read(8))))
            data = f.read()
        del header["__metadata__"]
        parameters = {}
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            # Ours: some tensors are rows of one parameter.
            for theirs, ours in (
                    (r"model.layers.(\d+)", r"block.\1"),
                    (r"self_attn.[qkv]_proj", "attn.qkv"),
                    (r"self_attn.o_proj", "attn.out"),
                    (r"mlp.(gate|up)_proj", "mlp.gate_up"),
                    (r"mlp.down_proj", "mlp.down"),
                    (r"input_layernorm", "input_norm"),
                    (r"post_attention_layernorm", "post_norm"),
                    (r"model.embed_tokens.weight", "embedding.table"),
                    (r"model.norm", "head.norm"),
                    (r"^lm_head.weight", "head.lm_head")):
                name = re.sub(theirs, ours, name)
            parameters[name] = parameters.get(name, b"") + data[begin:end]
        total = block = 0
        for name in sorted(parameters):
            for at in range(0, len(parameters[name]), 256):
                values = parameters[name][at:at + 256]
                one = xxh3_128(values, len(values), block)
                total += one.high << 64 | one.low
                block += 1
        self.assertEqual("%032x" % (total % 2**128),
                         summary["parameters_hash"])

    def test_same_config_same_bits_and_recompute_too_with_less_memory(self):
        first = self.train("a")
        second = self.train("b")
        recomputed = self.train("c", "activation_checkpointing.enabled=true")
        selective = self.train("d", "activation_checkpointing={\"enabled\": true, "
                               "\"granularity\": \"selective\"}")
        kept = self.train("e", "activation_checkpointing.keep_all=true")
        for other in (second, recomputed, selective, kept):
            self.assertEqual(first["parameters_hash"],
                             other["parameters_hash"])
        # What a process takes anyway changes from one to the next.
        peaks = [one["peak_bytes"]["total"] - one["peak_bytes"]["fixed"]
                 for one in (recomputed, selective, first, kept)]
        self.assertLess(max(peaks[:2]), peaks[2])
        self.assertLess(peaks[2], peaks[3])
        for summary in (first, recomputed, selective, kept):
            self.assertEqual(summary["peak_bytes"],
                             summary["predicted_peak_bytes"])

    def test_the_seed_decides_the_run(self):
        self.assertNotEqual(
            self.train("a")["parameters_hash"],
            self.train("b", "training.seed=7")["parameters_hash"])

    def test_every_precision_and_optimizer_trains(self):
        for i, sets in enumerate((["bf16.enabled=true"],
                                  ["fp16.enabled=true"],
                                  ["optimizer={\"type\": \"SGD\", \"params\": "
                                   "{\"lr\": 0.1, \"momentum\": 0.9}}"],
                                  ["optimizer={\"type\": \"Lamb\", \"params\": "
                                   "{\"lr\": 0.02}}"])):
            with self.subTest(sets=sets):
                summary = self.train("run%d" % i, *sets)
                self.assertLess(summary["final_loss"],
                                summary["first_loss"] - 0.2)

    def test_eval_and_generate_use_what_train_wrote(self):
        summary = self.train("run")
        evaluated = json.loads(self.ok("eval", "config.json", "--json"))
        self.assertAlmostEqual(evaluated["loss"], summary["validation_loss"],
                               places=6)
        self.assertEqual(evaluated["model"], "run/final")
        self.assertEqual([evaluated[name] for name in (
            "tokens", "sequences", "sequence_length")], [2 * 4 * 32, 8, 32])
        self.assertRegex(
            self.ok("eval", "config.json"),
            r"perplexity [\d.]+ over 256 tokens: the first 8 of [\d,]+ "
            r"sequences of 32 \(training.eval_batches\)\n")
        self.write("held_out.txt", "x" * 65)
        self.assertRegex(self.ok("eval", "config.json", "--data",
                                 "held_out.txt"),
                         "over 64 tokens: 2 sequences of 32\n")
        text = self.ok("generate", "config.json", "--prompt", "// The",
                       "--tokens", "20")
        self.assertTrue(text.startswith("// The"))
        again = self.ok("generate", "--model", "run/final", "--prompt", "// The",
                        "--tokens", "20")
        self.assertEqual(text, again)

    def test_eval_says_if_the_run_had_other_data(self):
        self.write("text.txt", "the quick brown fox\n" * 100)
        loss = self.train("run", "data.train=text.txt")["validation_loss"]
        note = ("zero: note: this is the loss of other data than the run's: "
                "its data.train was [\"text.txt\"], now ")
        for args in (["config.json"], ["config.json", "--model", "run/final/"]):
            result = self.zero("eval", *args, "--json")
            self.assertTrue(result.stderr.startswith(note), result.stderr)
        self.assertIn("for that of the run, give run/config.json as the config",
                      result.stderr)
        result = self.zero("eval", "run/config.json", "--json")
        self.assertEqual(result.stderr, "")
        self.assertAlmostEqual(json.loads(result.stdout)["loss"], loss, places=6)
        # Who names the data on the command line knows.
        self.write("other.txt", "over the lazy dog\n" * 100)
        for named in (["config.json", "--data", "other.txt"],
                      ["run/config.json", "--set", "data.train=other.txt"],
                      ["run/config.json", "--set", "data.validation=other.txt",
                       "data.validation_fraction=0"]):
            self.assertEqual(self.zero("eval", *named).stderr, "")
        self.assertTrue(self.zero(
            "eval", "config.json", "--set",
            "data.validation_fraction=0.2").stderr.startswith(note))
        # A config.json beside another model, or without a run, is no run's.
        shutil.copytree(self.path("run/final"), self.path("gpt2"))
        shutil.copytree(self.path("run/final"), self.path("final"))
        self.write("other.json", json.dumps(
            CONFIG | {"data": CONFIG["data"] | {"train": "text.txt"}}))
        for model in ("gpt2", "final"):
            self.assertEqual(self.zero("eval", "other.json", "--model",
                                       model).stderr, "")
        shutil.copy(self.path("run/metrics.jsonl"), self.path("."))
        self.assertEqual(
            self.zero("eval", "other.json", "--model", "gpt2").stderr, "")
        self.assertIn("now [\"text.txt\"]", self.zero(
            "eval", "other.json", "--model", "final").stderr)

    def test_training_goes_on_from_a_model_folder(self):
        first = self.train("run")
        self.assertIn("training starts from run/final (model.from_pretrained), "
                      "and this run's weights would replace it",
                      self.error("train", "config.json", "--model", "run/final",
                                 "--set", "training.out_dir=run"))
        self.ok("train", "config.json", "--model", "run/final", "--set",
                "training.out_dir=more")
        self.assertLess(self.read_json("more/summary.json")["first_loss"],
                        first["first_loss"] - 0.5)

    def test_a_fine_tune_is_judged_by_what_it_trained(self):
        self.train("base")
        fine = ["fine.json"]
        self.write("fine.json", json.dumps(
            CONFIG | {"model": {"from_pretrained": "base/final"},
                      "training": CONFIG["training"] | {"out_dir": "fine"}}))
        before = self.zero("eval", *fine, "--json")
        self.assertEqual(json.loads(before.stdout)["model"], "base/final")
        self.assertIn("fine/final does not exist yet", before.stderr)
        self.ok("train", *fine)
        after = self.zero("eval", *fine, "--json")
        self.assertEqual(json.loads(after.stdout)["model"], "fine/final")
        self.assertIn("trained from base/final", after.stderr)
        self.assertAlmostEqual(json.loads(after.stdout)["loss"],
                               self.read_json("fine/summary.json")
                               ["validation_loss"], places=6)
        named = self.ok("eval", *fine, "--json", "--model", "base/final")
        self.assertEqual(json.loads(named)["loss"],
                         json.loads(before.stdout)["loss"])
        self.assertEqual(named, self.ok(
            "eval", *fine, "--json", "--set",
            'model={"from_pretrained": "base/final"}'))

    def test_weights_of_an_earlier_run_are_not_taken_for_the_last_ones(self):
        self.train("run")
        # As left by kill -9.
        os.remove(self.path("run/summary.json"))
        text = self.error("eval", "config.json")
        self.assertIn("run/final is from an earlier run", text)
        self.assertIn("was killed", text)
        self.assertIn("earlier run", self.error("generate", "config.json"))
        self.ok("eval", "config.json", "--model", "run/final")
        self.train("run")
        self.error("train", "config.json", "--set", "optimizer.params.lr=1e30",
                   "--set", "gradient_clipping=0")
        self.assertIn("the last one failed: the run diverged",
                      self.error("eval", "config.json"))
        self.train("run", "training.save_final=false")
        self.assertIn("the last one wrote no weights",
                      self.error("eval", "config.json"))
        self.train("run")
        self.ok("eval", "config.json")

    def test_tokenize_makes_files_that_train_reads(self):
        out = self.ok("tokenize", SOURCES + "/nn/*.h", SOURCES + "/tensor/*.h",
                      "--out", "code.bin", "--train-sentencepiece", "400")
        self.assertIn("code.model", out)
        with open(self.path("code.bin"), "rb") as f:
            self.assertEqual(struct.unpack("<i", f.read(4))[0], 20240520)
        summary = self.train(
            "run", "data.train=code.bin", "data.tokenizer=code.model",
            "model.vocab_size=400")
        self.assertLess(summary["final_loss"], summary["first_loss"])
        # The model's folder has the tokenizer, and text needs no token file.
        text = self.ok("generate", "--model", "run/final", "--prompt", "int ",
                       "--tokens", "5")
        self.assertTrue(text.startswith("int "))
        self.train("text", "data.tokenizer=code.model", "model.vocab_size=400")
        self.assertIn("code.bin' exists", self.error(
            "tokenize", SOURCES + "/nn/*.h", "--out", "code.bin"))
        self.assertIn("code.model' exists", self.error(
            "tokenize", SOURCES + "/nn/*.h", "--out", "code.bin",
            "--train-sentencepiece", "400"))
        self.ok("tokenize", SOURCES + "/nn/*.h", "--out", "code.bin", "--force")

    def test_a_models_own_tokenizer_goes_where_the_model_goes(self):
        self.write("tokenizer.json", byte_level_tokenizer())
        self.write("held_out.txt", "the tensor and the shard\n" * 200)
        summary = self.train("run", "data.tokenizer=tokenizer.json",
                             "model.vocab_size=300")
        self.assertLess(summary["final_loss"], summary["first_loss"])
        with open(self.path("run/final/tokenizer.json")) as f:
            self.assertEqual(f.read(), byte_level_tokenizer())
        self.assertEqual(self.read_json("run/final/tokenizer_config.json")
                         ["eos_token"], "<|endoftext|>")
        self.assertIn("give --data FILE",
                      self.error("eval", "--model", "run/final"))
        # Neither needs a config.
        text = self.ok("generate", "--model", "run/final", "--prompt",
                       "the <|endoftext|>", "--tokens", "5")
        self.assertTrue(text.startswith("the "))
        evaluated = json.loads(self.ok("eval", "--model", "run/final", "--data",
                                       "held_out.txt", "--json"))
        self.assertGreater(evaluated["tokens"], 1000)
        positions = self.read_json("run/final/config.json")[
            "max_position_embeddings"]
        with_config = json.loads(self.ok(
            "eval", "config.json", "--model", "run/final", "--set",
            "data.tokenizer=run/final", "--data", "held_out.txt", "--json",
            "--set", "training.eval_batches=0", "--set",
            "data.sequence_length=%d" % positions))
        self.assertAlmostEqual(evaluated["loss"], with_config["loss"],
                               places=5)
        # Training from it also takes it.
        with open(self.path("run/final/generation_config.json"), "w") as f:
            f.write("{}")
        self.ok("train", "--set", "data.train=held_out.txt", "config.json",
                "--model", "run/final", "--set", "training.out_dir=more",
                "--set", "data.tokenizer=run/final")
        for name in ("tokenizer.json", "generation_config.json"):
            self.assertTrue(os.path.exists(self.path("more/final/" + name)))
        # Without one: ids in, ids out.
        os.remove(self.path("run/final/tokenizer.json"))
        ids = self.ok("generate", "--model", "run/final", "--prompt", "5, 299",
                      "--tokens", "4", "--temperature", "0")
        self.assertRegex(ids, r"^5, 299( \d+){4}\n$")
        text = self.error("generate", "--model", "run/final", "--prompt", "the")
        self.assertIn("which tokenizer does run/final use?", text)
        self.assertIn("token ids below 300", text)
        self.assertIn("or --tokenizer bytes for a model of bytes", text)

    def test_a_tokenizer_that_is_not_read_is_named_with_a_remedy(self):
        whole = byte_level_tokenizer()
        for text, words in (
                ("no JSON", "is not JSON"),
                ("{}", "is not a tokenizer.json"),
                (whole[:1000], "is not JSON"),
                (whole.replace('"BPE"', '"WordPiece"'),
                 'model.type is "WordPiece"'),
                (whole.replace('"BPE"', '"Unigram"'), "tokenizer.model"),
                (whole.replace('"ByteLevel"', '"Metaspace"'),
                 'pre_tokenizer.type is "Metaspace"')):
            with self.subTest(words=words):
                self.write("tokenizer.json", text)
                for args in (("tokenize", SOURCES + "/nn/*.h", "--out",
                              "code.bin", "--tokenizer", "tokenizer.json"),
                             ("train", "config.json", "--set",
                              "data.tokenizer=tokenizer.json")):
                    self.assertIn(words, self.error(*args))
                self.assertFalse(os.path.exists(self.path("code.bin")))

    def test_wrong_configs_name_the_place_the_reason_and_the_remedy(self):
        for override, words in (
                ("optimizr={}", ["optimizr", 'did you mean "optimizer"']),
                ("training.steps=\"x\"", ["training.steps", "whole number"]),
                ("train_micro_batch_size_per_gpu=3",
                 ["train_batch_size", "train_micro_batch_size_per_gpu"]),
                ("model.preset=\"gpt3\"", ["model.preset", "gpt2"]),
                ("data.train=\"nope.txt\"", ["data.train", "does not exist"]),
                ("zero_optimization.stage=7", ["stage", "[0, 3]"]),
                ("zero_optimization.mics_shard_size=2",
                 ["mics_shard_size", "stage is 0 and shards nothing"]),
                ("zero_optimization.offload_optimizer.device=\"cpu\"",
                 ["offload_optimizer", "stage 1, 2 or 3"]),
                ("optimizer.params.lr=-1", ["optimizer.params.lr", "-1"]),
                ("train_micro_batch_size=2",
                 ["did you mean \"train_micro_batch_size_per_gpu\""]),
                ("wandb.enabled=true", ["wandb", "metrics.jsonl", "delete it"]),
                ("zero_optimization.cpu_offload=true",
                 ["offload_optimizer.device", "stage 1, 2 or 3"]),
                ("device=cuda", ["device: \"cuda\" is a string", "--device"]),
                ("device.type=cuda", ["device.type", "--device cuda"]),
                ("amp.enabled=true", ["amp", "bf16"])):
            with self.subTest(override=override):
                text = self.error("train", "config.json", "--set", override)
                for word in words:
                    self.assertIn(word, text)
                self.assertFalse(os.path.exists(self.path("run")))
        self.write("truncated.json", "{\"model\": {")
        self.assertIn("truncated.json:1:12", self.error("train",
                                                        "truncated.json"))
        self.write("twice.json", '{"train_batch_size": 1,\n'
                   ' "train_batch_size": 2}')
        self.assertIn("twice.json:2:2", self.error("train", "twice.json"))

    def test_a_wrong_command_or_device_is_one_clear_error(self):
        self.assertIn("did you mean train", self.error("trian", "x.json"))
        self.assertIn("no-such.json", self.error("train", "no-such.json"))
        # Not in this build, or no GPU here: either way one line that says so.
        if "cuda  0:" not in self.ok("devices"):
            text = self.error("train", "config.json", "--device", "cuda")
            self.assertIn("cuda", text)
            self.assertEqual(text.count("\n"), 1, text)
        result = self.zero("train", "config.json", "--device", "cuda:1")
        self.assertEqual(result.returncode, 2)
        self.assertIn("CUDA_VISIBLE_DEVICES", result.stderr)

    def test_an_option_of_another_program_is_answered_with_ours(self):
        for args, words in (
                (["--local_rank=0"], "--local_rank=0; leave it out: the "
                 "launcher sets LOCAL_RANK; see zero train --help"),
                (["--nproc_per_node", "2"], "write --ranks N, or start "
                 "torchrun with it"),
                (["--rank", "2"], "; did you mean --ranks?"),
                (["--resume_from_checkpoint", "a"], "; write --resume latest"),
                (["--configs", "x"], "--configs; see zero train --help"),
                (["--resum", "--threads", "abc"], "in range 1 to 1024; see zero"),
                (["--frobnicate"], "--frobnicate; see zero train --help")):
            with self.subTest(args=args):
                result = self.zero("train", "config.json", *args)
                self.assertEqual(result.returncode, 2)
                self.assertIn(words, result.stderr)
        # Only if the command has the option that the answer names.
        self.assertNotIn("--ranks", self.error("eval", "config.json",
                                               "--gpus", "2"))
        self.assertNotIn("--set", self.error("models", "--bf16"))
        for option in "--out", "--output":
            self.assertIn(option + "; write --html FILE; see zero report --help",
                          self.error("report", "run", option, "x.html"))

    def test_a_wrong_number_is_one_clear_error(self):
        for args, words in (
                (["--temperature", "abc"],
                 '--temperature: "abc" is not a number >= 0'),
                (["--top-k", "1.5"], '"1.5" is not a whole number in [0, 1000000000000]'),
                (["--top-p", "3"], '"3" is not a number in (0, 1]'),
                (["--top-p", "0"], '"0" is not a number in (0, 1]'),
                (["--seed", "x"], "Could not convert: --seed = x"),
                (["--threads", "0"], "--threads: Value 0 not in range 1 to 1024")):
            with self.subTest(args=args):
                self.assertIn(words, self.error("generate", "config.json", *args))

    def test_config_shows_what_a_run_would_lack_and_train_dumps_the_same(self):
        shown = self.ok("config", "config.json")
        self.assertNotIn("// note", shown)
        lacking = self.zero("config", "config.json", "--set",
                            "data.train=no.txt")
        self.assertEqual(lacking.returncode, 0)
        self.assertEqual(lacking.stderr,
                         "zero: warning: a run would not start here: --set: "
                         "data.train: \"no.txt\" does not exist; correct the "
                         "name\n")
        out = self.ok("train", "config.json", "--set", "dump_state=true",
                      "--set", "training.steps=1")
        self.assertIn('"dump_state": true', out)
        self.assertNotIn('"dump_state"', self.ok(
            "train", "config.json", "--set", "training.steps=1"))

    def test_token_ids_outside_the_vocabulary_are_found_before_the_first_step(
            self):
        with open(self.path("bad.bin"), "wb") as f:
            f.write(struct.pack("<1000H", *([5] * 900 + [300] + [5] * 99)))
        text = self.error("train", "config.json", "--set", "data.train=bad.bin")
        self.assertIn("bad.bin", text)
        self.assertIn("id 300, but model.vocab_size is 257; the data belongs to "
                      "another tokenizer (format read: raw_uint16): set "
                      "model.vocab_size and data.tokenizer to what zero "
                      "tokenize printed for it", text)

    def test_a_prompt_or_tokenizer_that_does_not_fit_is_refused(self):
        self.train("run")
        text = self.error("generate", "config.json", "--prompt", "x" * 33)
        self.assertIn("--prompt is 33 tokens long and the context 32", text)
        self.assertIn("--set data.sequence_length=", text)
        longer = ["--set", "data.sequence_length=40", "--prompt", "x" * 33,
                  "--tokens", "2"]
        self.assertIn("x" * 33, self.ok("generate", "config.json", *longer))
        # --set also works without a config.
        short = ["--model", "run/final", "--prompt", "x" * 33]
        self.ok("generate", *short, "--tokens", "2")
        self.assertIn("the context 8", self.error(
            "generate", *short, "--set", "data.sequence_length=8"))
        self.ok("tokenize", SOURCES + "/nn/*.h", "--out", "code.bin",
                "--train-sentencepiece", "400")
        text = self.error("generate", "--model", "run/final", "--tokenizer",
                          "code.model")
        self.assertIn("400 ids", text)
        self.assertIn("vocabulary of 257", text)
        self.train("wide", "model.vocab_size=1000")
        result = self.zero("generate", "--model", "wide/final", "--tokenizer",
                           "bytes", "--tokens", "2")
        self.assertEqual(result.returncode, 0)
        self.assertIn("has 257 ids, the model 1000", result.stderr)
        for command in ("eval", "train"):
            result = self.zero(command, "config.json", "--model", "wide/final")
            self.assertEqual(result.returncode, 0, result.stderr)
            self.assertIn("has 257 ids, the model 1000", result.stderr)

    def test_a_run_that_replaces_another_says_so(self):
        train = ("train", "config.json", "--set", "training.steps=1")
        self.assertNotIn("replaces", self.ok(*train))
        self.assertIn("note: this run replaces the one in run; to start from "
                      "the weights of a run, give --model DIR/final",
                      self.ok(*train))
        os.remove(self.path("run/summary.json"))  # as one that was killed
        self.assertIn("note: this run replaces", self.ok(*train))
        # --resume auto says why it starts over.
        auto = (*train, "training.steps=2", "--resume", "auto")
        self.assertIn("note: there is no checkpoint in run (its "
                      "training.save_every is 0): training starts over; this run "
                      "replaces the one in run; ", self.ok(*auto))
        self.ok(*train, "training.save_every=1000")
        shutil.rmtree(self.path("run/checkpoints"))
        self.assertIn("note: there is no checkpoint in run: training starts over",
                      self.ok(*auto))

    def test_weights_that_the_disk_has_no_room_for_are_refused_at_once(self):
        small = ["unshare", "-rm", "sh", "-c", "mount -t tmpfs -o size=200k "
                 "tmpfs small && for more; do $0 train config.json --set "
                 "training.out_dir=small/run --set training.steps=1 --set "
                 "$more; done; cat small/run/summary.json", ZERO]
        os.mkdir(self.path("small"))
        if subprocess.run([*small[:-2], "mount -t tmpfs tmpfs small"],
                          cwd=self.folder, capture_output=True).returncode:
            self.skipTest("no small disk can be made here")
        result = subprocess.run(
            [*small, "training.save_final=false", "training.save_final=true"],
            cwd=self.folder, capture_output=True, text=True, timeout=120)
        self.assertRegex(result.stderr, "zero: training.out_dir: the weights "
                         "take .* and the disk of small/run has .* free; make "
                         "room, choose another folder, or set "
                         "training.save_final=false\n$")
        # It took nothing from the previous run.
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual(json.loads(result.stdout.splitlines()[-1])["steps"], 1)

    def test_checkpoints_that_the_disk_has_no_room_for_are_refused_at_once(self):
        saves = ("--set", "training.steps=4", "training.save_every=1",
                 "training.save_final=false")
        self.ok("train", "config.json", *saves)
        folder = self.path("run/checkpoints/step-00000004")
        one = sum(entry.stat().st_size for entry in os.scandir(folder))
        small = ["unshare", "-rm", "sh", "-c", "mount -t tmpfs -o size=%d tmpfs "
                 "small && exec $0 $*" % (5 * one // 2 + (64 << 10)), ZERO,
                 "train", "config.json", *saves, "training.out_dir=small/run"]
        os.mkdir(self.path("small"))
        if subprocess.run(["unshare", "-rm", "mount", "-t", "tmpfs", "tmpfs",
                           "small"], cwd=self.folder,
                          capture_output=True).returncode:
            self.skipTest("no small disk can be made here")
        for keep, refused in ((2, True), (1, False)):
            result = subprocess.run(
                [*small, "training.keep_last=%d" % keep], cwd=self.folder,
                capture_output=True, text=True, timeout=120)
            self.assertEqual(result.returncode, 1 if refused else 0,
                             result.stderr)
            self.assertEqual("no checkpoint at" in result.stdout, False)
            if refused:
                self.assertRegex(result.stderr, "zero: training.out_dir: 3 "
                                 "checkpoints of .* that will exist together "
                                 ".* take .* and the disk of small/run has .* "
                                 "free; .* lower training.keep_last\n$")

    def test_a_folder_of_weights_is_no_runs(self):
        self.train("run")
        before = self.read_json("run/final/config.json")
        text = self.error("train", "config.json", "--model", "run/final",
                          "--set", "training.out_dir=run/final")
        self.assertIn("training.out_dir: run/final holds a model "
                      "(model.safetensors), whose config.json a run would "
                      "replace; choose another folder", text)
        self.assertEqual(self.read_json("run/final/config.json"), before)

    def test_a_reader_that_goes_away_does_not_end_a_run(self):
        process = subprocess.Popen(
            [ZERO, "train", "config.json"], cwd=self.folder,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        process.stdout.close()
        text = process.stderr.read()
        self.assertEqual(process.wait(timeout=60), 1)
        process.stderr.close()
        self.assertIn("could not write everything to stdout; all else was done",
                      text)
        self.assertEqual(self.read_json("run/summary.json")["steps"], 12)
        self.assertTrue(os.path.exists(self.path("run/final")))

    def test_waiting_threads_spin_for_a_moment_only(self):
        def spins(**env):
            text = self.zero("models", env={"OMP_DISPLAY_ENV": "VERBOSE",
                                            **env}).stderr
            return re.findall(r"GOMP_SPINCOUNT = '(\d+)'", text)[-1]
        self.assertEqual(spins(), "2000")
        self.assertEqual(spins(GOMP_SPINCOUNT="7"), "7")
        self.assertNotEqual(spins(OMP_WAIT_POLICY="active"), "2000")

    def test_samples_print_no_control_characters(self):
        text = self.ok("train", "config.json", "--set",
                       "training.sample.tokens=200", "--set",
                       "training.sample.temperature=2")
        self.assertEqual(re.findall(r"[\x00-\x08\x0b-\x1f\x7f]", text), [])

    def test_a_run_that_diverges_fails_and_says_why_in_its_summary(self):
        text = self.error("train", "config.json", "--set",
                          "optimizer={\"type\": \"SGD\", \"params\": "
                          "{\"lr\": 1e30}}", "--set", "gradient_clipping=0",
                          "--set", "training.max_consecutive_skips=2")
        self.assertIn("2 steps in a row", text)
        summary = self.read_json("run/summary.json")
        self.assertIn("2 steps in a row", summary["error"])
        self.assertLess(summary["steps"], 12)
        self.assertFalse(os.path.exists(self.path("run/final")))

    def start_and_signal(self, *signals, ranks=1):
        process = subprocess.Popen(
            [ZERO, "train", "config.json", "--set", "training.steps=100000",
             "--set", "train_batch_size=8", "--ranks", str(ranks)],
            cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True)
        metrics = self.path("run/metrics.jsonl")
        deadline = time.time() + 60
        while not (os.path.exists(metrics) and os.path.getsize(metrics) > 0):
            self.assertIsNone(process.poll())
            self.assertLess(time.time(), deadline)
            time.sleep(0.02)
        for one in signals:
            process.send_signal(one)
        self.stderr = process.communicate(timeout=60)[1]
        return process.returncode

    def test_ctrl_c_ends_at_a_step_boundary_with_everything_written(self):
        for one in (signal.SIGINT, signal.SIGTERM):
            with self.subTest(signal=one):
                self.assertEqual(self.start_and_signal(one), 128 + one)
                summary = self.read_json("run/summary.json")
                self.assertTrue(summary["interrupted"])
                self.assertGreaterEqual(summary["steps"], 1)
                evaluated = json.loads(self.ok("eval", "config.json", "--json"))
                self.assertGreater(evaluated["loss"], 0)
                shutil.rmtree(self.path("run"))

    def test_ctrl_c_ends_all_ranks_at_the_same_step(self):
        for attempt in range(3):
            self.assertEqual(self.start_and_signal(signal.SIGINT, ranks=4), 130)
            summary = self.read_json("run/summary.json")
            self.assertTrue(summary["interrupted"])
            self.assertNotIn("error", summary)
            self.assertEqual(len(summary["parameters_hash"]), 32)
            for name in ("run/summary.json", "run/metrics.jsonl"):
                os.remove(self.path(name))

    def test_every_micro_batch_is_rehearsed(self):
        # Units that stay in place change the arena of later ones.
        self.ok("train", "config.json", "--ranks", "2",
                "--set", "model={\"preset\": \"gpt2-tiny\"}",
                "--set", "train_batch_size=8", "--set", "training.steps=1",
                "--set", "train_micro_batch_size_per_gpu=1",
                "--set", "gradient_accumulation_steps=4",
                "--set", "data.sequence_length=8",
                "--set", "zero_optimization.stage=3",
                "--set", "zero_optimization.stage3_prefetch_bucket_size=500000")

    def test_a_trace_replaces_no_device_and_is_tried_before_the_run(self):
        self.assertIn("it is a device, a pipe or a socket, not a file",
                      self.error("train", "config.json", "--trace",
                                 "/dev/null"))
        self.error("train", "config.json", "--trace", "missing/trace.json")
        self.assertFalse(os.path.exists(self.path("run/metrics.jsonl")))

    def test_ctrl_c_in_generate_is_an_exit_code_of_its_own(self):
        self.train("run", "training.steps=1")
        process = subprocess.Popen(
            [ZERO, "generate", "config.json", "--tokens", "100000000"],
            cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self.assertTrue(process.stdout.read(1))
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
        self.assertEqual(process.returncode, 130)

    def test_a_limit_of_the_size_of_files_is_told(self):
        # Enough for all but checkpoints and weights.
        result = subprocess.run(
            [ZERO, "train", "config.json", "--set", "training.save_every=6"],
            cwd=self.folder, capture_output=True, text=True, timeout=120,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE,
                                                  (100000, 100000)))
        self.assertEqual(result.returncode, 1, result.stderr)
        words = "raise the file size limit (ulimit -f)"
        self.assertRegex(result.stderr,
                         "no checkpoint at step 6: .*" + re.escape(words))
        self.assertIn(words, self.read_json("run/summary.json")["error"])

    def test_a_full_stdout_is_an_error(self):
        for args in (["models"], ["--help"], ["config", "config.json"]):
            with self.subTest(args=args), open("/dev/full", "w") as full:
                result = subprocess.run([ZERO, *args], cwd=self.folder,
                                        stdout=full, stderr=subprocess.PIPE,
                                        text=True, timeout=60)
                self.assertEqual(result.returncode, 1)
                self.assertIn("zero: could not write everything",
                              result.stderr)

    def test_errors_of_the_command_line_are_named_and_exit_with_two(self):
        for args, words in (
                (["train"], "zero: CONFIG is required: "),
                (["checkpoint", "diff", "a"],
                 "zero: B is required: a checkpoint's folder, or a run's "
                 "training.out_dir for its newest; see zero checkpoint diff "
                 "--help"),
                (["config"], "zero: CONFIG, --schema, --keys or --differences "
                             "is required; see zero config --help"),
                (["generate"], "zero: CONFIG, or --model DIR"),
                ([], "zero: A subcommand is required; see zero --help"),
                (["trian"], 'no command "trian", did you mean train'),
                (["frobnicate"], 'no command "frobnicate"; want one of train, '
                                 "eval, "),
                (["checkpoint", "exprt", "run"],
                 'no command "checkpoint exprt", did you mean checkpoint '
                 "export?; see zero checkpoint --help"),
                (["checkpoint", "run"],
                 'no command "checkpoint run"; want one of list, show, verify, '
                 "diff, export; see"),
                (["train", "config.json", "--resume", "--ranks", "2"],
                 "--resume lacks its value before --ranks: resume from a "
                 "checkpoint: auto"),
                (["checkpoint", "export", "a", "b", "--dtype"],
                 "--dtype lacks its value: fp32, bf16 or fp16"),
                (["train", "config.json", "--set", "--ranks=2"],
                 "--set lacks its value before --ranks=2: override keys")):
            with self.subTest(args=args):
                result = self.zero(*args)
                self.assertEqual(result.returncode, 2)
                self.assertIn(words, result.stderr)
        self.assertIn("tokenize", self.ok("help"))
        keys = self.ok("config", "--keys", "keep_last")
        self.assertEqual(len(keys.split("\n    ")), 3, keys)
        for words, error in ((["bf16", "fp16"], "takes one PATTERN"),
                             (["--differences"], "print one at a time")):
            self.assertIn(error, self.error("config", "--keys", *words))
        for flag in "--schema", "--differences":
            self.assertIn(flag + ": takes no config, not config.json as well",
                          self.error("config", flag, "config.json"))
        self.assertIn('--keys: no key\'s name or meaning contains "kep_last"; did you mean '
                      '"training.keep_last"?',
                      self.error("config", "--keys", "kep_last"))
        self.assertEqual(self.ok("help", "eval"), self.ok("eval", "--help"))
        self.assertTrue(self.ok("--version").startswith("zero "))

    def test_the_vocabulary_is_read_from_the_tokenizer(self):
        self.ok("tokenize", SOURCES + "/nn/*.h", "--out", "code.bin",
                "--train-sentencepiece", "400")
        shown = self.ok("config", "config.json", "--set", "data.train=code.bin",
                        "--set", "data.tokenizer=code.model", "--set",
                        'model={"model_type": "gpt2", "n_embd": 32, '
                        '"n_layer": 1, "n_head": 2}')
        self.assertIn('"vocab_size": 400', shown)

    def test_a_second_signal_stops_at_once_and_says_what_is_kept(self):
        # Two kinds: a second one of the same kind would be lost.
        code = self.start_and_signal(signal.SIGINT, signal.SIGTERM)
        self.assertEqual(code, 128 + signal.SIGTERM)
        self.assertRegex(self.stderr, r"stopped at once; .*metrics\.jsonl")
        with open(self.path("run/metrics.jsonl")) as file:
            self.assertIn("loss", json.loads(file.readline()))

    def test_a_run_that_does_not_fit_is_an_error_and_no_crash(self):
        text = self.error("train", "config.json", "--set",
                          'model={"preset": "Llama-3.1-8B", '
                          '"num_hidden_layers": 1000}')
        self.assertIn("iB at its peak", text)
        self.assertIn("nothing fits", text)
        text = self.error("train", "config.json", "--ranks", "2",
                          "--set", 'model={"preset": "gpt2", "n_layer": 48}',
                          "--set", "train_batch_size=7000")
        self.assertRegex(text, "may take .* with the same global batch this "
                               "fits: --set .*train_micro_batch_size_per_gpu=")
        self.train("run", "training.steps=1")
        text = self.error("eval", "config.json", "--set",
                          "train_batch_size=1000000000")
        self.assertIn("tokens in one pass", text)
        text = self.error("eval", "config.json", "--set",
                          "train_batch_size=50000000")
        self.assertIn("lower train_micro_batch_size_per_gpu", text)

    def test_a_third_of_the_memory_is_refused_with_a_patch_that_runs(self):
        run = ("config.json", "--ranks", "2", "--set", "train_batch_size=128",
               "data.sequence_length=256", "training.steps=2")
        rows = map(json.loads, self.ok("memory", *run, "--json").splitlines())
        needed = next(row["peak_bytes"] for row in rows if row["as_configured"])
        limit = needed // 3
        limited = ("train", *run, "--device-memory", "%dB" % limit)
        text = self.error(*limited)
        self.assertEqual(text.count("\n"), 1, text)
        self.assertFalse(os.path.exists(self.path("run/metrics.jsonl")))
        patch = re.search(r"this fits: (--set [^;\n]*)", text)
        self.assertTrue(patch, text)
        self.ok(*limited, *patch.group(1).split())
        summary = self.read_json("run/summary.json")
        self.assertLessEqual(summary["peak_bytes"]["total"], limit)
        # The operating system's figure is of both ranks.
        self.assertLessEqual(summary["peak_resident_bytes"], 2 * limit)
        self.assertGreater(summary["peak_resident_bytes"], limit)


if __name__ == "__main__":
    unittest.main()
