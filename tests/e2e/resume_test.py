"""Runs that are stopped or killed, and resume.

  RESUME_KILLS=500 python3 -B tests/e2e/resume_test.py    more than the build's
"""

import os
import random
import signal
import subprocess
import time
import unittest

import runs
from runs import ZERO, RunsTest

KILLS = int(os.environ.get("RESUME_KILLS", "12"))

CONFIG = runs.CONFIG | {
    "model": runs.CONFIG["model"] | {"resid_pdrop": 0.1},
    "training": {"steps": 60, "eval_every": 25, "save_every": 5,
                 "save_final": False},
    "train_batch_size": 4,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2},
}


class ResumeTest(RunsTest):
    config_of_runs = CONFIG

    def start(self, out, *args, config="run.json", ranks=2):
        """A run that writes to the folder `out`."""
        return subprocess.Popen(
            [ZERO, "train", config, "--ranks", str(ranks), "--threads", "1",
             "--set", "training.out_dir=" + out, *args],
            cwd=self.folder, text=True, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE)

    def train(self, out, *args, **kwargs):
        """A run to its end: what it printed."""
        run = self.start(out, *args, **kwargs)
        stdout, stderr = run.communicate()
        self.assertEqual(run.returncode, 0, stdout + stderr)
        return stdout

    def listing(self, *names):
        try:
            return os.listdir(self.path(*names))
        except FileNotFoundError:
            return []

    def newest(self, out):
        """The newest complete checkpoint's step; 0: none."""
        return max([int(name[5:]) for name in self.listing(out, "checkpoints")
                    if name.startswith("step-") and name[5:].isdigit()],
                   default=0)

    def expect_equal(self, out, whole):
        self.assertEqual(self.hash_of(out), self.hash_of(whole))
        keys = ("step", "loss", "grad_norm", "lr", "validation_loss")
        self.assertEqual(
            [[line.get(key) for key in keys] for line in self.metrics(out)],
            [[line.get(key) for key in keys] for line in self.metrics(whole)])

    def test_signals_stop_a_run_that_the_same_command_goes_on_with(self):
        self.train("whole")
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            with self.subTest(signal=number):
                out = "run-%d" % number
                run = self.start(out, "--resume", "auto")
                self.wait_for_steps(run, out, 7)
                run.send_signal(number)
                stdout, stderr = run.communicate()
                self.assertEqual(
                    run.returncode, 143 if number == signal.SIGTERM else 130,
                    stderr)
                self.assertIn("the same command with --resume auto", stdout)
                at = self.summary(out)["steps"]
                self.assertEqual(self.newest(out), at)
                self.assertIn("resumed from %s/checkpoints/step-%08d: step %d"
                              % (out, at, at),
                              self.train(out, "--resume", "auto"))
                self.assertEqual(self.summary(out)["resumed_at"], [at])
                self.assertIn("a run in 2 parts, resumed at step %d" % at,
                              subprocess.check_output([ZERO, "report", out],
                                                      cwd=self.folder,
                                                      text=True))
                self.expect_equal(out, "whole")

    def test_checkpoints_that_were_set_aside_are_named(self):
        short = ["--set", "training.save_every=0", "training.steps=3",
                 "training.eval_every=0"]
        run = self.start("run")
        self.wait_for_steps(run, "run", 7)
        run.send_signal(signal.SIGINT)
        run.communicate()
        how = "continue from one of them, give --resume and its path"
        text = self.train("run", *short)
        self.assertIn("are run/checkpoints.previous now: to " + how, text)
        text = self.train("run", *short, "training.steps=4", "--resume", "auto")
        self.assertIn("run/checkpoints.previous has those of an earlier run: "
                      "to " + how, text)
        newest = max(self.listing("run", "checkpoints.previous"))
        self.train("other", "--resume", "run/checkpoints.previous/" + newest)

    def test_a_finished_run_says_that_it_is(self):
        once = self.train("run")
        self.assertIn("\ndone\n", once)
        self.assertNotIn("already", once)
        steps = self.summary("run")["steps"]
        again = self.train("run", "--resume", "auto")
        self.assertIn("note: the run is already finished, at step %d: nothing "
                      "is trained; to continue it, raise training.steps" % steps,
                      again)
        self.assertIn("\nalready done\n", again)
        # Of steps to take, or taken by this start.
        for words in ("zero train\n", "\n  memory ", "\n  speed ",
                      "\n  wire per step and rank ",
                      "\n  exposed communication "):
            self.assertIn(words, once)
            self.assertNotIn(words, again)
        for key in "tokens_per_second", "mfu", "exposed_seconds":
            self.assertNotIn(key, self.summary("run"))

    def test_speed_and_advice_are_of_the_ranks_that_went_on(self):
        self.train("run")
        alone = self.train("run", "--resume", "auto", "--set",
                           "training.steps=70", ranks=1)
        self.assertRegex(alone, r"steps +70, [0-9,]+ tokens in ")
        self.assertRegex(alone, r"speed +[0-9,]+ tok/s since step 60, mfu ")
        self.assertNotIn("exposed communication", alone)
        self.assertNotIn("to hide more of it", alone)
        self.assertRegex(
            self.train("run", "--resume", "auto", "--set", "training.steps=80"),
            r"exposed communication +[0-9.]+ s, [0-9.]+ % of the training time "
            "since step 70; ")

    def test_a_finished_run_is_not_repeated_by_the_command_that_continues_it(self):
        ends = ["--set", "training.save_every=0", "training.steps=12",
                "training.eval_every=0", "training.save_final=true"]
        # A signal's checkpoint, and none of the end.
        run = self.start("run", *ends, "training.steps=1000000")
        self.wait_for_steps(run, "run", 7)
        run.send_signal(signal.SIGINT)
        run.communicate()
        at = self.summary("run")["steps"]
        newest = "run/checkpoints/step-%08d" % at
        ends[2] = "training.steps=%d" % (at + 2)
        text = self.train("run", *ends, "--resume", "auto")
        self.assertRegex(text, r"weights +from the checkpoint of step %d\n" % at)
        self.assertNotIn("random", text)
        done = self.hash_of("run")
        # Nor ended again at its checkpoint by one of fewer steps.
        for fewer in [], ["training.steps=%d" % at]:
            again = self.start("run", *ends, *fewer, "--resume", "auto")
            _, stderr = again.communicate()
            self.assertEqual(again.returncode, 1)
            self.assertIn(
                "training.resume: the run in run is finished (summary.json: %d "
                "steps) and has no checkpoint of its end; raise training.steps "
                "to continue from %s, give --resume latest to repeat what "
                "follows it, or start another run from its weights: --model "
                "run/final and another training.out_dir" % (at + 2, newest),
                stderr)
        self.assertEqual(self.hash_of("run"), done)
        self.train("run", *ends, "--resume", "latest")
        self.assertEqual(self.hash_of("run"), done)
        # Without any checkpoint.
        self.train("short", *ends, "training.steps=2")
        again = self.start("short", *ends, "training.steps=2", "--resume", "auto")
        self.assertIn("or leave out --resume, to repeat it, or start another run",
                      again.communicate()[1])
        text = self.train("short", *ends, "training.steps=3", "--resume", "auto")
        self.assertRegex(text, r"weights +random, seed")

    def test_a_second_signal_ends_a_run_whose_rank_hangs(self):
        self.train("whole")
        run = self.start("run", "--inject-fault", "1:13:stop")
        self.wait_for_steps(run, "run", 12)
        run.send_signal(signal.SIGINT)
        told = run.stderr.readline() + run.stderr.readline()
        self.assertIn("stopping after the current step; a rank that hangs in it "
                      "is given up after 300 s (communication.timeout_seconds); "
                      "interrupt again to stop at once\n", told)
        self.assertIsNone(run.poll())
        run.send_signal(signal.SIGTERM)
        _, stderr = run.communicate(timeout=60)
        self.assertEqual(run.returncode, 143, stderr)
        self.assertIn("stopped at once; ", stderr)
        # Its checkpoints stay as they were.
        self.assertGreaterEqual(self.newest("run"), 5)
        subprocess.run([ZERO, "checkpoint", "verify", "run"], cwd=self.folder,
                       check=True, capture_output=True)
        self.train("run", "--resume", "auto")
        self.expect_equal("run", "whole")

    def test_a_run_whose_time_is_over_says_that_it_wants_to_go_on(self):
        run = self.start("run", "--set", "training.max_minutes=0.1", "--set",
                         "training.steps=1000000")
        stdout, stderr = run.communicate()
        self.assertEqual(run.returncode, 85, stderr)
        self.assertIn("stopped by training.max_minutes", stderr)
        self.assertEqual(self.newest("run"), self.summary("run")["steps"])

    def test_kills_at_any_moment_lose_nothing_that_was_saved(self):
        # Enough steps for all kills, and one run without kills.
        self.config("long.json", CONFIG | {"training": CONFIG["training"] | {
            "steps": 60 + 60 * KILLS}})
        chance = random.Random(1234)
        in_save = 0
        for _ in range(KILLS):
            before = self.newest("killed")
            run = self.start("killed", "--resume", "auto", config="long.json")
            if chance.random() < 0.3:  # while it starts
                time.sleep(chance.uniform(0, 1.2))
            else:  # while it trains and saves, however slow the machine is
                while run.poll() is None and self.newest("killed") == before:
                    time.sleep(0.005)
                time.sleep(chance.uniform(0, 0.2))
            run.kill()
            stdout, stderr = run.communicate()
            self.assertEqual(run.returncode, -signal.SIGKILL, stdout + stderr)
            in_save += any(name.endswith(".partial") for name in
                           self.listing("killed", "checkpoints"))
            if before and ("resumed from" in stdout or "\nstep " in stdout):
                self.assertIn("step-%08d: step %d" % (before, before), stdout)
        self.assertGreater(self.newest("killed"), 0)
        print("%d kills, %d of them within a save" % (KILLS, in_save))
        self.assertGreater(in_save, 0)
        self.train("killed", "--resume", "auto", config="long.json")
        self.train("whole", config="long.json")
        self.expect_equal("killed", "whole")
        self.assertEqual(
            [name for name in os.listdir(self.path("killed", "checkpoints"))
             if "partial" in name or "zero-" in name], [])

    def test_a_run_beside_checkpoints_says_how_to_go_on(self):
        self.train("run")
        run = self.start("run")
        _, stderr = run.communicate()
        self.assertEqual(run.returncode, 1)
        self.assertIn("run/checkpoints has checkpoints of an earlier run; "
                      "resume from them with --resume auto", stderr)

    def test_a_runs_folder_is_answered_with_its_newest_checkpoint(self):
        self.train("run")
        newest = "run/checkpoints/step-%08d" % self.newest("run")
        for given in "run", "run/", "run/checkpoints/":
            for out, also in ("run", ", or auto\n"), ("other", "\n"):
                run = self.start(out, "--resume", given)
                _, stderr = run.communicate()
                self.assertEqual(run.returncode, 1)
                self.assertIn(
                    "training.resume: '%s' is a run's folder, not a "
                    "checkpoint; pass its newest one, %s%s" % (
                        given, newest, also), stderr)

    def test_a_full_disk_ends_the_run_and_names_the_file(self):
        # A file size limit stands in for a full disk.
        run = subprocess.run(
            ["bash", "-c", "ulimit -f 100; exec \"$@\"", "bash",
             ZERO, "train", "run.json", "--ranks", "2", "--threads", "1",
             "--set", "training.out_dir=full"],
            cwd=self.folder, text=True, capture_output=True)
        self.assertEqual(run.returncode, 1, run.stdout + run.stderr)
        error = (r"no checkpoint at step %s: cannot write \S*full/checkpoints/.*: "
                 "file too large")
        self.assertRegex(run.stderr, error % "5")
        self.assertRegex(self.summary("full")["error"], error % "5")
        # The next save waits for the one before.
        self.assertLessEqual(self.metrics("full")[-1]["step"], 10)
        self.assertEqual(self.newest("full"), 0)
        # A script must not take a stop without a checkpoint for a clean one. Only
        # the stop saves here.
        run = subprocess.run(
            ["bash", "-c", "ulimit -f 100; exec \"$@\"", "bash",
             ZERO, "train", "run.json", "--threads", "1", "--max-minutes",
             "0.1", "--set", "training.out_dir=stopped",
             "training.steps=1000000", "training.eval_every=0",
             "training.save_every=0",
             # Few lines of metrics, which are also a file.
             "train_batch_size=800"],
            cwd=self.folder, text=True, capture_output=True)
        self.assertEqual(run.returncode, 1, run.stdout + run.stderr)
        self.assertRegex(run.stderr, error.replace("full/", "stopped/") % r"\d+")
        self.assertNotIn("zero: stopped by", run.stderr)


if __name__ == "__main__":
    unittest.main()
