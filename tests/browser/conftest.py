"""A real TensorBoard in a real browser."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import expect, sync_playwright

from tensorboard_plugin_gradflow import data, standalone

# How long anything may take on a slow machine with other work; what waits, waits for a condition and goes on at once.
PATIENCE = 300
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
WATCH_CSP = "document.addEventListener('securitypolicyviolation', e => console.error('CSP ' + e.violatedDirective))"


@pytest.fixture(scope="session")
def logs():
    """The module that writes known runs, shared with the tests of the plugin."""
    path = Path(__file__).parents[1] / "plugin" / "logs.py"
    spec = importlib.util.spec_from_file_location("gradflow_test_logs", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def browser():
    """Chromium of this machine; Playwright's event loop, which lets no other run in this thread, ends with the module."""
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    assert chromium is not None, "the browser tests need the program chromium on the PATH: apt-get install chromium"
    expect.set_options(timeout=1000 * PATIENCE)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS, timeout=1000 * PATIENCE)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def context(browser):
    """One profile for all pages, so that TensorBoard's own code is compiled once."""
    with browser.new_context() as context:
        context.set_default_timeout(1000 * PATIENCE)
        yield context


@contextmanager
def running_tensorboard(*flags, holds=()):
    """Start TensorBoard on a free port of this machine; yields its address.

    It reads its log in the background: it is ready once it holds all that ``holds`` names, the versions of runs.
    """
    command = [sys.executable, "-m", "tensorboard.main", "--host=127.0.0.1", "--port=0", *flags]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONWARNINGS": "ignore"}
    with (
        tempfile.TemporaryFile() as said,
        subprocess.Popen(command, stdout=said, stderr=said, env=environment) as process,
    ):
        try:
            # The port is the system's choice and TensorBoard's own from the start: nobody can take it in between.
            address = wait_for(lambda: re.search(r"http://127[.]0[.]0[.]1:[^ ]+", words(said)), process, said)[
                0
            ].rstrip("/")
            wait_for(lambda: versions_at(address) == sorted(holds), process, said)
            yield address
        finally:
            process.terminate()


def words(file):
    """Return what was written into a file so far, wherever its end is now."""
    return os.pread(file.fileno(), 2**20, 0).decode(errors="replace")


def versions_at(address):
    """Return the versions of the runs that a TensorBoard has read so far, None while it does not answer."""
    try:
        with urllib.request.urlopen(f"{address}/data/plugin/gradflow/runs", timeout=PATIENCE) as response:
            return sorted(run["version"] for run in json.load(response)["runs"])
    except OSError:
        return None


@pytest.fixture(scope="session")
def versions_in():
    """Return a function that gives the versions of the runs in a folder, read whole."""
    return lambda logdir: [run["version"] for run in data.list_runs(standalone.open_source(logdir))["runs"]]


def wait_for(condition, process, said):
    """Return what ``condition`` gives once that is true; fail with the process's output when it died or time is over."""
    end = time.monotonic() + PATIENCE
    while not (found := condition()):
        assert process.poll() is None, words(said)
        assert time.monotonic() < end, f"waited in vain; TensorBoard said: {words(said)}"
        time.sleep(0.05)
    return found


@pytest.fixture(scope="session")
def tensorboard():
    """Return the context manager that runs TensorBoard with the flags it is given."""
    return running_tensorboard


@pytest.fixture(scope="session")
def logdir(tmp_path_factory, logs):
    """Runs that are healthy, sick and hostile, and some whose values are known."""
    root = tmp_path_factory.mktemp("logs")
    logs.sick_run(root / "healthy", sick=False)
    logs.sick_run(root / "sick")
    logs.hostile_run(root / logs.HOSTILE[2])
    logs.write_run(root / "known", logs.plain_records(range(1, 9), value=lambda step, site: step + 100 * site + 0.125))
    logs.write_run(root / "kinds", logs.records_of_kinds())
    logs.write_run(root / "states", logs.records_of_states())
    logs.write_run(root / "spike", logs.records_with_spike(), rows=1024)
    return root


@pytest.fixture(scope="session")
def address(logdir, versions_in, tensorboard):
    """A TensorBoard with the fast loader, as it starts by default."""
    with tensorboard(f"--logdir={logdir}", "--load_fast=true", holds=versions_in(logdir)) as address:
        yield address


def is_ours(message):
    """Return whether a console message is an error.

    Two are not ours: outside --path_prefix TensorBoard's own page looks for its font, and a page for plugins that is
    opened by itself has no icon.
    """
    return message.type == "error" and not re.search("/font-roboto/|/favicon.ico$", message.location["url"])


def said(message):
    """Return what a console message said and where."""
    return f"{message.text} {message.location['url']}"


@pytest.fixture
def open_panel(context):
    """Return a function that opens the panel; at the end nothing may have gone to the error console.

    The panel lies in TensorBoard's own page for plugins, with its policy. The whole TensorBoard stands around it only
    where ``host`` is asked for, because it takes seconds to start; with ``clock`` its time can be moved on.
    """
    errors, pages = [], []

    def open_panel(address, state="", width=1280, height=1120, host=False, clock=False):
        page = context.new_page()
        pages.append(page)
        page.set_viewport_size({"width": width, "height": height})
        page.add_init_script(WATCH_CSP)
        if clock:
            page.clock.install()
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda message: errors.append(said(message)) if is_ours(message) else None)
        page.goto(f"{address}/#gradflow{state}" if host else f"{address}/data/plugin_entry.html?name=gradflow#{state}")
        frame = page.frame_locator("iframe") if host else page
        frame.locator("body[data-ready='1']").wait_for()
        return page, frame

    yield open_panel
    for page in pages:
        page.close()
    assert errors == []
