"""Chromium without a window, through its own debugging protocol.

`chromium-headless-shell --remote-debugging-pipe` reads commands from file 3 and
writes answers and events to file 4, JSON objects that end with a zero byte
(https://chromedevtools.github.io/devtools-protocol).
"""

import base64
import json
import os
import shutil
import subprocess
import tempfile

PROGRAMS = ("chromium-headless-shell", "chromium", "chromium-browser",
            "google-chrome")


def program():
    """Path of a Chromium, or None."""
    return next(filter(None, map(shutil.which, PROGRAMS)), None)


class Browser:
    """One tab. `events` are all events received, in the protocol's form."""

    def __init__(self):
        self.folder = tempfile.TemporaryDirectory()
        to_read, self.commands = os.pipe()
        self.answers, to_write = os.pipe()
        # bash puts the pipes where Chromium expects them.
        self.process = subprocess.Popen(
            ["bash", "-c", 'exec 3<&%d 4>&%d "$@"' % (to_read, to_write), "-",
             program(), "--headless", "--no-sandbox", "--disable-gpu",
             "--disable-dev-shm-usage", "--hide-scrollbars",
             "--user-data-dir=" + self.folder.name, "--remote-debugging-pipe"],
            pass_fds=(to_read, to_write), stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL)
        os.close(to_read)
        os.close(to_write)
        self.events, self.buffer, self.last_id, self.session = [], b"", 0, None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target,
                                 flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(domain + ".enable")

    def close(self):
        os.close(self.commands)  # ends Chromium
        try:
            self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self.answers)
        self.folder.cleanup()

    def _next(self):
        while b"\0" not in self.buffer:
            more = os.read(self.answers, 1 << 20)
            if not more:
                raise RuntimeError("Chromium ended")
            self.buffer += more
        message, self.buffer = self.buffer.split(b"\0", 1)
        return json.loads(message)

    def call(self, method, **params):
        self.last_id += 1
        message = {"id": self.last_id, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self.last_id:
                if "error" in answer:
                    raise RuntimeError("%s: %s" % (method, answer["error"]))
                return answer["result"]
            self.events.append(answer)

    def open(self, path, width, height=900, dark=False):
        """Shows a file in a window of that size, until it is loaded."""
        self.call("Emulation.setDeviceMetricsOverride", width=width,
                  height=height, deviceScaleFactor=1, mobile=width < 600)
        self.call("Emulation.setEmulatedMedia", features=[
            {"name": "prefers-color-scheme",
             "value": "dark" if dark else "light"}])
        self.events = []
        self.call("Page.navigate", url="file://" + os.path.abspath(path))
        while not any(e.get("method") == "Page.loadEventFired"
                      for e in self.events):
            self.events.append(self._next())
        # Charts get their size in the next frames.
        self.run("new Promise(done => requestAnimationFrame("
                 "() => requestAnimationFrame(done)))")

    def run(self, script):
        """The value of a JavaScript expression."""
        answer = self.call("Runtime.evaluate", expression=script,
                           returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"])
        return answer["result"].get("value")

    def problems(self):
        """The page's errors and warnings since it was opened."""
        return [e["params"] for e in self.events
                if e.get("method") in ("Runtime.exceptionThrown",
                                       "Log.entryAdded") or
                (e.get("method") == "Runtime.consoleAPICalled" and
                 e["params"]["type"] in ("error", "warning", "assert"))]

    def requests(self):
        """Addresses that the page requested since it was opened."""
        return [e["params"]["request"]["url"] for e in self.events
                if e.get("method") == "Network.requestWillBeSent"]

    def screenshot(self, path):
        """Of the whole page, as PNG."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        data = self.call("Page.captureScreenshot", captureBeyondViewport=True,
                         clip={"x": 0, "y": 0, "width": size["width"],
                               "height": size["height"], "scale": 1})["data"]
        with open(path, "wb") as f:
            f.write(base64.b64decode(data))
