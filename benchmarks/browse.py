"""A real TensorBoard in a real Chromium, for the panel's benchmark and for its pictures."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import final

import psutil
from playwright.sync_api import Browser, ConsoleMessage, Frame, Page, sync_playwright

CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
FLAGS = ("--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--js-flags=--expose-gc")
PATIENCE = 120.0

# TensorBoard as its command starts it; the benchmark without our plugin takes it out of the list that is found.
_START = """
import sys
from tensorboard import default, main
found = default.get_dynamic_plugins()
default.get_dynamic_plugins = lambda: [item for item in found if {plugin} or "gradflow" not in item.__module__]
sys.exit(main.run_main())
"""

# Runs in every frame before anything else: notes each repaint of a map and each layout shift, and reports violations.
_PROBE = """
(() => {
  performance.setResourceTimingBufferSize(100000);
  const now = () => performance.timeOrigin + performance.now();
  const probe = window.gradflowProbe = { paints: [], shifts: [], lags: [], now };
  document.addEventListener('securitypolicyviolation', (e) => console.error('CSP ' + e.violatedDirective));
  new PerformanceObserver((list) => {
    for (const entry of list.getEntries()) if (!entry.hadRecentInput) probe.shifts.push([now(), entry.value]);
  }).observe({ type: 'layout-shift', buffered: true });
  const put = CanvasRenderingContext2D.prototype.putImageData;
  CanvasRenderingContext2D.prototype.putImageData = function (...rest) {
    probe.paints.push(now());
    return put.apply(this, rest);
  };
  probe.painted = () => new Promise((done) => requestAnimationFrame(() => {
    const channel = new MessageChannel();
    channel.port1.onmessage = () => done(now());
    channel.port2.postMessage(0);
  }));
  probe.time = (kind) => addEventListener(kind, (event) => {
    const begun = performance.timeOrigin + event.timeStamp;
    void probe.painted().then((end) => probe.lags.push(end - begun));
  }, { capture: true });
})();
"""


@contextlib.contextmanager
def tensorboard(logdir: Path, *flags: str, plugin: bool = True) -> Iterator[tuple[str, psutil.Process]]:
    """Run TensorBoard on a free port; yields its address and process once it lists its plugins.

    Args:
        logdir: What it shows.
        flags: More of its flags.
        plugin: Whether it may load our plugin.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-c", _START.format(plugin=plugin), f"--logdir={logdir}", "--host=127.0.0.1"]
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    with (
        open(os.devnull, "wb") as nowhere,  # noqa: PTH123 - not a path of ours
        subprocess.Popen(
            [*command, f"--port={port}", *flags], stdout=nowhere, stderr=nowhere, env=environment
        ) as server,
    ):
        try:
            address = f"http://127.0.0.1:{port}"
            wait_for(lambda: answers(f"{address}/data/plugins_listing"))
            yield address, psutil.Process(server.pid)
        finally:
            server.terminate()


def get(address: str) -> bytes:
    """Return the answer to a GET request."""
    with urllib.request.urlopen(address, timeout=PATIENCE) as response:
        return bytes(response.read())


def answers(address: str) -> bool:
    """Return whether a GET request succeeds."""
    try:
        get(address)
    except OSError:
        return False
    return True


def wait_for(condition: Callable[[], bool], pause: float = 0.02) -> None:
    """Return once a condition holds.

    Raises:
        TimeoutError: It did not within two minutes.
    """
    end = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"expected an answer within {PATIENCE:.0f} s, got none; is the machine very busy?")
        time.sleep(pause)


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """Run this machine's Chromium without a window."""
    found = next(filter(None, map(shutil.which, CHROMIUM)), None)
    if found is None:
        raise SystemExit("expected the program chromium on the PATH, found none; run: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=FLAGS)
        try:
            yield browser
        finally:
            browser.close()


@contextlib.contextmanager
def page_of(browser: Browser, errors: list[str], width: int = 1280, height: int = 1120) -> Iterator[Page]:
    """Open an empty page with the probe in a fresh profile; console errors and violations go into ``errors``."""

    def heard(message: ConsoleMessage) -> None:
        if message.type == "error":
            errors.append(f"{message.text} {message.location['url']}")

    with browser.new_context(viewport={"width": width, "height": height}) as context:
        page = context.new_page()
        page.set_default_timeout(PATIENCE * 1000)
        page.add_init_script(_PROBE)
        page.on("console", heard)
        page.on("pageerror", lambda error: errors.append(str(error)))
        yield page


def panel_of(page: Page) -> Frame:
    """Return the frame of the panel once it has read its first answer."""
    handle = page.wait_for_selector("iframe")
    frame = None if handle is None else handle.content_frame()
    if frame is None:
        raise RuntimeError("expected the GradFlow tab to hold a frame, found none; open the address with #gradflow")
    frame.wait_for_selector("body[data-ready='1']")
    return frame


def rest(where: Page | Frame) -> None:
    """Wait until nothing was fetched for a while; the polls of a live page come seconds apart."""
    where.evaluate("""async () => {
      const fetched = () => performance.getEntriesByType('resource').length;
      for (let quiet = 0, before = -1, left = 300; quiet < 6 && left > 0; left -= 1) {
        quiet = fetched() === before ? quiet + 1 : 0;
        before = fetched();
        await new Promise((go) => setTimeout(go, 100));
      }
    }""")


def heap(page: Page) -> tuple[float, int]:
    """Return the JavaScript heap of the page in megabytes after a full collection, and how many DOM nodes live."""
    session = page.context.new_cdp_session(page)
    for _ in range(2):  # the first pass runs finalisers whose garbage the second one takes
        session.send("HeapProfiler.collectGarbage")
    session.send("Performance.enable")
    metrics = {item["name"]: item["value"] for item in session.send("Performance.getMetrics")["metrics"]}
    session.detach()
    return metrics["JSHeapUsedSize"] / 1e6, int(metrics["Nodes"])


@final
class Cpu:
    """CPU time of a page's main thread while this is entered, which other work on the machine does not change.

    Args:
        page: The page.

    Attributes:
        ms: Milliseconds, once it is left.
    """

    def __init__(self, page: Page) -> None:
        self._session = page.context.new_cdp_session(page)
        self.ms = 0.0

    def __enter__(self) -> Cpu:
        self._session.send("Performance.enable", {"timeDomain": "threadTicks"})
        self.ms = -self._used()
        return self

    def __exit__(self, *_: object) -> None:
        self.ms += self._used()
        self._session.detach()

    def _used(self) -> float:
        metrics = self._session.send("Performance.getMetrics")["metrics"]
        return float(next(item["value"] for item in metrics if item["name"] == "TaskDuration") * 1e3)
