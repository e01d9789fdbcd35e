"""Real wandb, kept on this machine: folders of its own, no statistics, no console capture, no server but the loopback."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import socket
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import wandb

from gradflow_export.records.step_record import Issue, IssueType, Reading, RunInfo, Severity, StepRecord
from gradflow_export.writers import WandbWriter

INFO = RunInfo("1700000000123-0", 1700000000.123, "Net", 10, ("a", "b"), 0, 1, {"every": 1}, {"torch": "2"})


def pytest_terminal_summary(terminalreporter):
    """Show the logging patterns of ``test_patterns.py`` as a table, whether it ran in this process or in another."""
    reports = [report for kind in ("passed", "failed") for report in terminalreporter.stats.get(kind, ())]
    lines = [line for report in reports for key, line in report.user_properties if key == "pattern"]
    if lines:
        terminalreporter.section("rows in W&B by way of logging")
        terminalreporter.line(f"{'pattern':<28}{'logged':>6}{'kept':>6}{'here':>6}{'ours':>8}{'here':>6}")
        terminalreporter.line("kept: by wandb without us; here: in the run's log with our values in them")
        for line in lines:
            terminalreporter.line(line)


def beside(name):
    """Load a module that lies beside this one."""
    spec = importlib.util.spec_from_file_location(f"gradflow_wandb_{name}", Path(__file__).with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def held_port():
    """Yield a port of the loopback where only a server of ours, which reuses addresses, listens as long as this lasts."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


def only_here(folder, port):
    """Return the environment that keeps wandb in a folder, and has it ask a port that is closed but for `port`."""
    places = {f"WANDB_{name}_DIR": str(folder / name.lower()) for name in ("DATA", "CACHE", "CONFIG")}
    return {
        "WANDB_MODE": "offline", "WANDB_DIR": str(folder), "WANDB_SILENT": "true", "WANDB_CONSOLE": "off",
        "WANDB_BASE_URL": f"http://127.0.0.1:{port}", "WANDB_ERROR_REPORTING": "false", "NO_PROXY": "127.0.0.1",
        "WANDB__DISABLE_STATS": "true", "WANDB_X_DISABLE_STATS": "true", "WANDB_X_DISABLE_META": "true",
        "WANDB_X_SERVICE_WAIT": "120", **places,
    }  # fmt: skip


# After how long the writer gives up what does not come to an end: here a slow machine is no server in trouble.
PATIENT = {
    "wandb.writer._LAST_SECONDS": 100.0, "wandb.runs.FINISH_SECONDS": 100.0, "wandb.runs.INIT_SECONDS": 100.0,
    "wandb.alerts.PROBE_SECONDS": 100.0,
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def place(tmp_path_factory):
    """A folder that wandb keeps to, and one wandb-core for all runs of a module."""
    folder = tmp_path_factory.mktemp("wandb_core")
    with held_port() as held, pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("WANDB")]:
            patch.delenv(name)
        for name, value in only_here(folder, held).items():
            patch.setenv(name, value)
        for name, seconds in PATIENT.items():
            patch.setattr(f"gradflow_export.writers.{name}", seconds)
        yield folder
        wandb.teardown()


@pytest.fixture(scope="session")
def offline():
    """The reader of offline logs."""
    return beside("offline")


@pytest.fixture(scope="module")
def port(place):
    """The port of the server in the environment: wandb 0.28 asks that one for some things, whatever the run's settings."""
    return int(os.environ["WANDB_BASE_URL"].rpartition(":")[2])


@pytest.fixture(scope="session")
def beside_server():
    """The stand-in for the server."""
    return beside("server")


@pytest.fixture(scope="module")
def begin(place):
    """Start a run as a user would; what a failed test leaves open is finished."""

    def start(**more):
        if wandb.run is not None:
            wandb.run.finish()
        settings = wandb.Settings(x_disable_stats=True, console="off", **more.pop("settings", {}))
        return wandb.init(project="test", settings=settings, **more)

    return start


@pytest.fixture(scope="session")
def read(offline):
    """Read the log of a finished run."""
    return lambda run: offline.wait_for_log(Path(run.dir).parent)


@pytest.fixture
def said(caplog):
    """Return a function that gives the lines logged so far that hold a word."""
    caplog.set_level(logging.INFO, logger="gradflow_export")
    return lambda word="": [
        r.getMessage() for r in caplog.records if r.name == "gradflow_export" and word in r.getMessage()
    ]


@pytest.fixture
def unhurried(monkeypatch):
    """A run's end that waits longer for records on their way, whose thread may get its turn late."""
    monkeypatch.setattr("gradflow_export.writers.wandb.writer._QUIET_SECONDS", 3.0)
    monkeypatch.setattr("gradflow_export.writers.wandb.writer._SETTLE_SECONDS", 100.0)


@pytest.fixture(scope="session")
def make():
    """Things to write: a writer that is open, records, issues."""

    def writer(**options):
        made = WandbWriter(**options)
        made.open(INFO)
        return made

    def record(step, *readings, issues=(), wall_time=None, **more):
        readings = readings or (Reading.run("loss", 1 / step),)
        return StepRecord(step, 1e9 + step if wall_time is None else wall_time, readings, issues=issues, **more)

    def issue(kind=IssueType.EXPLODING, severity=Severity.HIGH, layer="a", step=3, healed=None):
        return Issue(kind, severity, layer, step, 38.0, 2.0, f"{layer} explodes.", "Clip.", (layer,), healed)

    return SimpleNamespace(writer=writer, record=record, issue=issue, info=INFO)


def ours(log, prefix="gradflow"):
    """Return our rows of a log, in order, without the prefix."""
    found = ({k.removeprefix(f"{prefix}/"): v for k, v in r.items() if k.startswith(f"{prefix}/")} for r in log.history)
    return [row for row in found if row]


@pytest.fixture(scope="session", name="ours")
def ours_fixture():
    """Our rows of a log."""
    return ours
