"""The results that tools/bench/run derives from measurements on several
ranks."""

import contextlib
import io
import os
import sys
import types
import unittest
import xml.etree.ElementTree

sys.dont_write_bytecode = True
sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)),
                             "../../tools/bench"))

import common
import picture
import ranks


def ours(step_ms, **more):
    return {"step_ms": step_ms, "exposed_ms": [10], "host_ms": [2],
            "ranks": 2, "micro_batch": 2, "sequence_length": 256,
            "link_bytes": 90e6, "peak_rss_bytes": 2e9, "peak_bytes": {},
            "wire": {"gathered": 0, "reduced": 90e6, "formula_gathered": 0,
                     "formula_reduced": 90e6, "collectives": 7}, **more}


def peer(step_ms):
    return {"step_ms": step_ms, "ranks": 2, "micro_batch": 2,
            "sequence_length": 256, "peak_rss_bytes": [4e9, 6e9],
            "libraries_rss_bytes": 0.5e9, "version": "2.5"}


class RanksTest(unittest.TestCase):
    def test_a_slow_minute_slows_both_of_a_round(self):
        mine = [ours([100, 100]), ours([300, 300]), ours([100, 100])]
        other = [peer([200, 200]), peer([600, 600]), peer([210, 210])]
        self.assertEqual(ranks.faster(mine, other), 2)

    def test_memory_is_per_rank(self):
        self.assertEqual(ranks.memory_of([ours([1])]), 2e9)
        self.assertEqual(ranks.memory_of([peer([1])]), 5e9)

    def test_the_link_takes_its_share_of_the_compute_time(self):
        link = ranks.pick_link(None, "fp32", 0, [ours([110])])
        rate, latency = link.split(",")
        self.assertEqual(latency, ranks.LATENCY)
        seconds = 90e6 / (float(rate[:-len("MB/s")]) * 1e6)
        self.assertAlmostEqual(seconds / 0.1, ranks.SHARE, 3)

    def test_what_may_stay_exposed(self):
        one = ours([1000], link={"first_gather_ms": 30,
                                 "last_reduction_ms": 40})
        self.assertEqual(ranks.allowed_ms(one), 30 + 40 + 50)

    def test_a_peer_that_does_not_run_keeps_its_row(self):
        args = types.SimpleNamespace(rounds=2, steps=3, out="out",
                                     peer_python=None)
        real, common.attempt = common.attempt, lambda *_: (
            [ours([100], tokens_per_second=1)], None)
        printed = io.StringIO()
        try:
            with contextlib.redirect_stdout(printed):
                turns, failed = ranks.measure_turns(args, "fp32")
                ranks.print_turns("fp32", {"turns": turns, "failed": failed})
        finally:
            common.attempt = real
        self.assertEqual(sorted(turns),
                         ["zero stage %d" % s for s in range(4)])
        for name, stage in ranks.TURNS:
            row = ranks.label(name, stage)
            self.assertIn(row, printed.getvalue())
            if name != "zero":
                self.assertRegex(printed.getvalue(),
                                 row + r" +not installed: tools/bench/peers")


class PictureTest(unittest.TestCase):
    def setUp(self):
        self.results = {"ranks": {"fp32": {"turns": {
            "zero stage 0": [ours([100], device="A & B")],
            "PyTorch DDP": [peer([200])],
            "zero stage 3": [ours([400])]}}}}

    def bars(self, kind):
        root = xml.etree.ElementTree.fromstring(
            picture.picture(self.results, "fp32"))
        return [float(bar.get("width")) for bar in root.iter(
            "{http://www.w3.org/2000/svg}rect") if bar.get("class") == kind]

    def test_a_bar_is_as_long_as_its_number(self):
        # Speed and memory of each, ours of 100 and 400 ms and 2 GB, a peer of
        # 200 ms and 5 GB.
        full = picture.BARS
        self.assertEqual(self.bars("zero"), [full, full * 2 / 5,
                                             full / 4, full * 2 / 5])
        self.assertEqual(self.bars("peer"), [full / 2, full])

    def test_it_names_what_was_measured_and_knows_dark_pages(self):
        text = picture.picture(self.results, "fp32")
        for words in ("PyTorch DDP", "2 sequences of 256 tokens", "A &amp; B",
                      "prefers-color-scheme: dark"):
            self.assertIn(words, text)
        self.assertNotIn("DeepSpeed", text)

    def test_results_without_ranks_are_an_error(self):
        with self.assertRaisesRegex(ValueError, "--only ranks"):
            picture.picture({"ranks": {}}, "bf16")
