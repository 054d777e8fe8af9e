"""The pages that zero writes: their data, and their display in Chromium."""

import json
import os
import re
import shutil
import struct
import subprocess
import tempfile
import unittest

import browser

ZERO = os.path.abspath(os.path.join(os.environ.get("ZERO_OUT", "out"), "zero"))

CONFIG = {
    "model": {"preset": "gpt2-tiny", "n_layer": 2, "n_embd": 64},
    "data": {"train": os.path.abspath("engine") + "/base/*.h",
             "validation_fraction": 0.1, "tokenizer": "bytes",
             "sequence_length": 32},
    "training": {"steps": 4, "out_dir": "a", "eval_every": 2,
                 "save_final": False},
    "train_batch_size": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
}


def masked_crc(data):
    """TensorFlow's masked CRC-32C, bit by bit."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    crc ^= 0xFFFFFFFF
    return (crc >> 15 | crc << 17) + 0xA282EAD8 & 0xFFFFFFFF


def fields(message):
    """{field number: [values]} of a protobuf message."""
    def varint(at):
        value, shift = 0, 0
        while True:
            value |= (message[at] & 127) << shift
            at, shift = at + 1, shift + 7
            if message[at - 1] < 128:
                return value, at
    at, values = 0, {}
    while at < len(message):
        key, at = varint(at)
        if key & 7 == 0:
            value, at = varint(at)
        elif key & 7 == 2:
            size, at = varint(at)
            value, at = message[at:at + size], at + size
        else:
            kind, size = {1: ("<d", 8), 5: ("<f", 4)}[key & 7]
            value, at = struct.unpack_from(kind, message, at)[0], at + size
        values.setdefault(key >> 3, []).append(value)
    return values


def read_events(path):
    """The events of a TensorBoard file, whose checksums must be right."""
    with open(path, "rb") as f:
        data = f.read()
    while data:
        length, crc = struct.unpack_from("<QI", data)
        event, (event_crc,) = data[12:12 + length], struct.unpack_from(
            "<I", data, 12 + length)
        assert (crc, event_crc) == (masked_crc(data[:8]), masked_crc(event))
        yield fields(event)
        data = data[16 + length:]


class PageTestCase(unittest.TestCase):

    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.folder = folder.name
        with open(cls.path("config.json"), "w") as f:
            json.dump(CONFIG, f)
        cls.ok("train", "config.json", "--ranks", "2")
        cls.ok("train", "config.json", "--ranks", "2",
               "--set", "training.out_dir=b", "--set", "training.steps=6",
               "--set", "zero_optimization.stage=3",
               "--set", "training.tensorboard=true")

    @classmethod
    def path(cls, name):
        return os.path.join(cls.folder, name)

    @classmethod
    def zero(cls, *args):
        return subprocess.run([ZERO, *args], cwd=cls.folder, text=True,
                              capture_output=True, timeout=120)

    @classmethod
    def ok(cls, *args):
        result = cls.zero(*args)
        if result.returncode:
            raise AssertionError(result.stdout + result.stderr)
        return result.stdout

    @classmethod
    def document(cls, name):
        with open(cls.path(name)) as f:
            return json.loads(re.search(r'id="document">(.*?)</script>',
                                        f.read(), re.S).group(1))


class DataTest(PageTestCase):

    def error(self, *args):
        result = self.zero(*args)
        self.assertEqual(result.returncode, 1, result.stdout + result.stderr)
        return result.stderr

    def copy_run(self, name, lines=None):
        """Run a as another folder, with other lines of metrics."""
        shutil.rmtree(self.path(name), ignore_errors=True)
        shutil.copytree(self.path("a"), self.path(name))
        if lines is not None:
            with open(self.path(name + "/metrics.jsonl"), "w") as f:
                f.write(lines)

    def test_a_report_holds_what_the_runs_wrote(self):
        shown = self.ok("report", "a", "b/")
        self.assertEqual(shown, "a: 4 steps\nb: 6 steps\nwritten report.html\n")
        data = self.document("report.html")
        self.assertEqual((data["kind"], data["title"], data["notes"]),
                         ("report", "Runs a, b", []))
        a, b = data["runs"]
        self.assertEqual((a["name"], b["name"]), ("a", "b"))
        with open(self.path("a/metrics.jsonl")) as f:
            lines = [json.loads(line) for line in f]
        for name in ("loss", "grad_norm", "lr", "tokens_per_second", "mfu",
                     "validation_loss"):
            self.assertEqual(a["series"][name],
                             [[line["step"], line[name]] for line in lines
                              if name in line])
        for outer, inner in (("communication", "exposed_ms"),
                             ("peak_bytes", "total")):
            self.assertEqual(
                a["series"][outer + "." + inner],
                [[line["step"], line[outer][inner]] for line in lines
                 if outer in line])
        with open(self.path("a/summary.json")) as f:
            summary = json.load(f)
        self.assertEqual(a["predicted"], summary["predicted_peak_bytes"])
        self.assertEqual(a["peak"], summary["peak_bytes"])
        self.assertEqual(a["resident"], summary["peak_resident_bytes"] //
                         summary["ranks"])
        figures = {row["name"]: row["values"] for row in data["summary"]}
        self.assertEqual(figures["steps"], [4, 6])
        self.assertEqual(figures["final_loss"][0], summary["final_loss"])
        # Of stage 3 alone.
        self.assertEqual(
            figures["peak_bytes.gathered_parameters"],
            [None, b["peak"]["gathered_parameters"]])
        config = {row["key"]: row["values"] for row in data["config"]}
        self.assertEqual(config["training.steps"], ["4", "6"])
        self.assertEqual(config["zero_optimization.stage"], ["0", "3"])
        self.assertEqual(config["training.out_dir"], ['"a"', '"b"'])
        self.assertNotIn("model.preset", config)  # the same in both

    def test_one_run_has_its_whole_config(self):
        self.ok("report", "a", "--html", "one.html")
        config = {row["key"]: row["values"]
                  for row in self.document("one.html")["config"]}
        self.assertEqual(config["model.preset"], ['"gpt2-tiny"'])

    def test_what_a_killed_run_leaves_is_drawn_with_a_note(self):
        self.copy_run("killed", '{"step":1,"loss":2.5}\n{"step":2,"loss":null}'
                                '\n{"step":3,"lo')
        os.remove(self.path("killed/summary.json"))
        shown = self.ok("report", "killed", "--html", "killed.html")
        notes = ["killed/metrics.jsonl: the last line is broken, as a killed "
                 "run leaves it",
                 "killed: no summary.json; the run is still going, or was "
                 "killed"]
        self.assertEqual(shown, "note: %s\nnote: %s\nkilled: 2 steps\n"
                         "written killed.html\n" % tuple(notes))
        data = self.document("killed.html")
        self.assertEqual(data["notes"], notes)
        self.assertEqual(data["runs"][0]["series"]["loss"],
                         [[1, 2.5], [2, None]])
        self.assertEqual(data["summary"], [])

    def test_a_run_that_has_not_begun_its_steps_is_a_note(self):
        self.copy_run("young", "")
        self.assertIn("note: young/metrics.jsonl: no step is written yet",
                      self.ok("report", "young", "--html", "young.html"))

    def test_a_step_that_is_taken_again_counts_once(self):
        self.copy_run("resumed", '{"step":1,"loss":4}\n{"step":2,"loss":3}\n'
                                 '{"step":2,"loss":2}\n{"step":3,"loss":1}\n')
        self.ok("report", "resumed", "--html", "resumed.html")
        self.assertEqual(
            self.document("resumed.html")["runs"][0]["series"]["loss"],
            [[1, 4], [2, 2], [3, 1]])

    def test_a_long_run_keeps_its_spikes(self):
        losses = {step: 1.0 + step % 7 for step in range(1, 50001)}
        losses[31415] = 1000.0
        losses[27182] = -1000.0
        self.copy_run("long", "".join('{"step":%d,"loss":%f}\n' % loss
                                      for loss in losses.items()))
        self.ok("report", "long", "--html", "long.html")
        points = self.document("long.html")["runs"][0]["series"]["loss"]
        self.assertLessEqual(len(points), 2000)
        self.assertGreater(len(points), 1000)
        steps = [step for step, _ in points]
        self.assertEqual(steps, sorted(set(steps)))
        for step, loss in points:
            self.assertEqual(loss, losses[step])
        self.assertIn([31415, 1000.0], points)
        self.assertIn([27182, -1000.0], points)

    def test_event_files_hold_every_value(self):
        self.ok("report", "a", "b", "--tensorboard", "events")
        for name in ("a", "b"):
            with open(self.path(name + "/metrics.jsonl")) as f:
                lines = [json.loads(line) for line in f]
            path = self.path("events/%s/events.out.tfevents.0.zero" % name)
            first, *events = read_events(path)
            if name == "b":
                # As written by the run itself, except for their times.
                own = list(read_events(self.path(
                    "b/tensorboard/events.out.tfevents.0.zero")))
                self.assertEqual(
                    {(e[2][0], v) for e in own[1:] for v in fields(e[5][0])[1]},
                    {(e[2][0], v) for e in events for v in fields(e[5][0])[1]})
                self.assertGreater(own[1][1][0], 1.7e9)  # seconds since 1970
            self.assertEqual(first[3], [b"brain.Event:2"])
            losses, waits = {}, {}
            for event in events:
                for value in fields(event[5][0])[1]:
                    value = fields(value)
                    if value[1] == [b"loss"]:
                        losses[event[2][0]] = value[2][0]
                    if value[1] == [b"communication.waited_ms.gather"]:
                        waits[event[2][0]] = value[2][0]
            single = lambda x: struct.unpack("<f", struct.pack("<f", x))[0]
            self.assertEqual(losses, {line["step"]: single(line["loss"])
                                      for line in lines if "loss" in line})
            self.assertEqual(len(waits), len(losses))
            times = [event[1][0] for event in events]
            self.assertEqual(times, sorted(times))

    def test_errors_name_the_folder_and_the_line(self):
        self.assertEqual(
            self.error("report", "a", "nowhere"),
            "zero: 'nowhere' is not a folder; name the training.out_dir of a "
            "run\n")
        os.makedirs(self.path("empty"), exist_ok=True)
        self.assertEqual(
            self.error("report", "empty"),
            "zero: 'empty' has no metrics.jsonl; name the training.out_dir of "
            "a run\n")
        self.copy_run("broken", '{"step":1,"loss":2}\n{"st\n{"step":3}\n')
        self.assertIn("zero: broken/metrics.jsonl:2: not a JSON object with a "
                      "step; is it", self.error("report", "broken"))
        self.copy_run("list")
        with open(self.path("list/summary.json"), "w") as f:
            f.write("[]")
        self.assertIn("zero: list/summary.json: not a JSON object",
                      self.error("report", "list"))
        self.assertIn("no/where", self.error("report", "a", "--html",
                                             "no/where/r.html"))

    def test_a_page_of_memory_has_the_rows_of_json_and_a_timeline(self):
        args = ("memory", "config.json", "--ranks", "2", "--measure")
        rows = [json.loads(line) for line in self.ok(
            *args, "--json", "--html", "memory.html").splitlines()]
        data = self.document("memory.html")
        self.assertEqual((data["kind"], data["title"]),
                         ("memory", "Memory of config.json"))
        self.assertEqual(len(data["rows"]), 16)
        for row, line in zip(data["rows"], rows):
            self.assertEqual(row["config"], "config.json")
            self.assertEqual({name: row[name] for name in line}, line)
            self.assertGreater(row["measured"]["total"], 0)
            actions = row["timeline"]["actions"]
            at = [0] * len(actions)  # bytes at each action
            for changes in row["timeline"]["bytes"].values():
                ends = [begin for begin, _ in changes[1:]] + [len(actions)]
                self.assertEqual(changes[0][0], 0)
                for (begin, size), end in zip(changes, ends):
                    for i in range(begin, end):
                        at[i] += size
            self.assertEqual(max(at), row["peak_bytes"])
            self.assertEqual(actions[at.index(max(at))], row["peak_action"])

    def test_a_page_replaces_pages_only(self):
        self.assertIn("'config.json' exists and is not a page of zero; choose "
                      "another name, or remove it",
                      self.error("report", "a", "--html", "config.json"))
        with open(self.path("config.json")) as f:
            self.assertEqual(json.load(f), CONFIG)
        for _ in range(2):
            self.ok("report", "a", "--html", "twice.html")

    def test_names_can_not_end_the_data(self):
        name = "</script><script>throw 1<"
        os.makedirs(self.path(name), exist_ok=True)
        shutil.copy(self.path("a/metrics.jsonl"), self.path(name))
        self.ok("report", name, "--html", "name.html")
        self.assertEqual(self.document("name.html")["runs"][0]["name"], name)


# For every chart: its title, and how many of its pixels are drawn.
CHARTS = """[...document.querySelectorAll("canvas")].map((canvas) => {
  const chart = Chart.getChart(canvas);
  const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext(
    "2d", {willReadFrequently: true});
  copy.drawImage(canvas, 0, 0);
  const pixels = copy.getImageData(0, 0, canvas.width, canvas.height).data;
  let drawn = 0;
  for (let i = 3; i < pixels.length; i += 4) drawn += pixels[i] > 0;
  return {
    title: canvas.getAttribute("aria-label"),
    share: drawn / (canvas.width * canvas.height),
    width: canvas.getBoundingClientRect().width,
    sets: chart.data.datasets.map((set, i) => ({
      label: set.label,
      places: chart.getDatasetMeta(i).data.map((e) => [e.x, e.y, e.width]),
    })),
  };
})"""


WINDOWS = [{"width": width, "dark": dark}
           for width in (390, 1280) for dark in (False, True)]
PIXEL = 1.5  # of a bar's border, and of rounding


@unittest.skipUnless(browser.program(), "no Chromium (Debian's package "
                     "chromium-headless-shell)")
class BrowserTest(PageTestCase):

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.browser = browser.Browser()
        cls.addClassCleanup(cls.browser.close)

    def open(self, name, **window):
        """Opens a page, which must fit and report no errors; returns its charts
        by title."""
        path = self.path(name)
        self.browser.open(path, **window)
        self.assertEqual(self.browser.problems(), [])
        self.assertEqual(self.browser.requests(), ["file://" + path])
        self.assertEqual(
            self.browser.run("document.documentElement.scrollWidth"),
            window["width"])
        charts = self.browser.run(CHARTS)
        for chart in charts:
            with self.subTest(chart=chart["title"], **window):
                self.assertGreater(chart["share"], 0.01)
                self.assertGreater(chart["width"], 0.3 * window["width"])
                self.assertLess(chart["width"], window["width"])
        return {chart["title"]: chart for chart in charts}

    def text(self):
        return self.browser.run("document.body.innerText")

    def test_a_report_is_drawn(self):
        self.ok("report", "a", "b")
        for window in WINDOWS:
            charts = self.open("report.html", **window)
            self.assertEqual(
                list(charts),
                ["Loss", "Validation loss", "Gradient norm", "Learning rate",
                 "Tokens per second", "MFU", "Exposed communication",
                 "Peak memory of a rank", "Memory by category"])
            a, b = charts["Loss"]["sets"]
            self.assertEqual((a["label"], b["label"]), ("a", "b"))
            self.assertEqual((len(a["places"]), len(b["places"])), (4, 6))
            # Steps go to the right, and losses fall.
            for line in (a["places"], b["places"]):
                self.assertLess(line[0][0], line[-1][0])
                self.assertLess(line[0][1], line[-1][1])
            bars = charts["Memory by category"]["sets"]
            self.assertEqual([bar["label"] for bar in bars],
                             ["a, predicted", "a, booked", "b, predicted",
                              "b, booked"])
            self.assertTrue(all(max(width for _, _, width in bar["places"]) > 3
                                for bar in bars))
            self.assertIn("Where the configs differ", self.text())
            ground = self.browser.run(
                "getComputedStyle(document.body).backgroundColor")
            self.assertEqual(ground == "rgb(255, 255, 255)",
                             not window["dark"])

    def test_the_stages_are_drawn(self):
        self.ok("memory", "config.json", "--ranks", "2", "--device-memory",
                "4MiB", "--html", "memory.html")
        rows = self.document("memory.html")["rows"]
        for window in WINDOWS:
            charts = self.open("memory.html", **window)
            self.assertEqual(list(charts), ["config.json", "Action by action"])
            sets = charts["config.json"]["sets"]
            for i, row in enumerate(rows):
                # The widths of a row's bars match its categories.
                width = sum(one["places"][i][2] for one in sets)
                for one in sets:
                    bytes_ = row[one["label"].replace(" ", "_")]
                    self.assertAlmostEqual(
                        one["places"][i][2], width * bytes_ / row["peak_bytes"],
                        delta=PIXEL)
            self.assertIn("optimizer", [one["label"] for one in sets])
            # The config's own row is marked, and the one that is shown.
            self.assertEqual(
                self.browser.run("document.querySelector('select').value"),
                "* stage 0, recompute off")
            self.assertIn("config.json, in ", self.text())
            self.assertIn("2 ranks on ", self.text())
            self.assertNotIn("measured", self.text())
        self.browser.run("""
            document.querySelector("select").selectedIndex = 3;
            document.querySelector("select").dispatchEvent(
              new Event("change"));""")
        step = {c["title"]: c for c in self.browser.run(CHARTS)}[
            "Action by action"]
        self.assertIn("gathered parameters",
                      [one["label"] for one in step["sets"]])
        self.assertEqual(len(step["sets"][0]["places"]),
                         len(rows[3]["timeline"]["actions"]) + 1)
        self.assertEqual(self.browser.problems(), [])

    def test_measured_stands_beside_predicted(self):
        self.ok("memory", "config.json", "--html", "measured.html")
        data = self.document("measured.html")
        for row in data["rows"]:
            row["measured"] = {"parameters": row["parameters"],
                               "host_bytes": 0, "total": row["parameters"]}
        # As of two configs.
        data["rows"] += [{**row, "config": "other", "config_index": 1,
                          "timeline": None}
                         for row in data["rows"]]
        with open(self.path("measured.html")) as f:
            text = f.read()
        with open(self.path("measured.html"), "w") as f:
            f.write(re.sub(r'(id="document">).*?(</script>)',
                           lambda m: m[1] + json.dumps(data) + m[2], text,
                           count=1, flags=re.S))
        for window in WINDOWS:
            charts = self.open("measured.html", **window)
            self.assertEqual(list(charts),
                             ["config.json", "other", "Action by action"])
            sets = {one["label"]: [width for _, _, width in one["places"]]
                    for one in charts["other"]["sets"]}
            for a, b in zip(sets["parameters"], sets["parameters, measured"]):
                self.assertAlmostEqual(a, b, delta=PIXEL)
            self.assertIn("measured", self.text())

    def test_every_row_can_be_selected(self):
        for args in (("--offload",), ("--set", "optimizer.type=Lamb"),
                     ("--measure", "--device-memory", "1MiB")):
            self.ok("memory", "config.json", "--ranks", "2", "--html",
                    "rows.html", *args)
            self.open("rows.html", width=1280)
            rows = self.browser.run("""(() => {
                const select = document.querySelector("select");
                for (let i = 0; i < select.options.length; i++) {
                  select.selectedIndex = i;
                  select.dispatchEvent(new Event("change"));
                }
                return select.options.length;
            })()""")
            self.assertEqual(rows, len(self.document("rows.html")["rows"]))
            self.assertEqual(self.browser.problems(), [])
            # Without offload or a measurement there is no such column.
            self.assertNotIn("\tmeasured\t", self.text())
            self.assertEqual("states on the host" in self.text(),
                             args == ("--offload",))

    def test_smoothing_and_a_log_scale_change_the_curves(self):
        self.ok("report", "b", "--html", "smooth.html")
        raw = self.open("smooth.html", width=1280)["Loss"]["sets"][0]["places"]
        self.browser.run("""
            const slider = document.querySelector("input[type=range]");
            slider.value = 0.9;
            slider.dispatchEvent(new Event("change"));""")
        charts = {c["title"]: c for c in self.browser.run(CHARTS)}
        smooth = charts["Loss"]["sets"][0]["places"]
        self.assertNotEqual(raw[-1][1], smooth[-1][1])
        self.browser.run("""
            document.querySelector("figcaption input").click();""")
        self.assertEqual(
            self.browser.run('Chart.getChart(document.querySelector("canvas"))'
                             '.scales.y.type'), "logarithmic")
        self.assertEqual(self.browser.problems(), [])

    def test_a_name_is_text(self):
        name = "<img src=x onerror=alert(1)>"
        shutil.rmtree(self.path(name), ignore_errors=True)
        shutil.copytree(self.path("a"), self.path(name))
        self.ok("report", name, "--html", "image.html")
        self.open("image.html", width=390)
        self.assertIn("Run " + name, self.text())


if __name__ == "__main__":
    unittest.main()
