"""What every test shares."""

import gc
import importlib
import importlib.util
import random
import sys
import zlib
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

from gradflow_export import config
from gradflow_export.engine import backlog
from gradflow_export.engine import exporter_report as reports

try:
    import fcntl
except ImportError:  # no worker waits for another on Windows
    fcntl = None

# Small models wait for each other's threads where other work shares the cores; bits do not depend on the machine either.
torch.set_num_threads(1)

# The same examples everywhere and always, however slow the machine is: a failure is one of the code, and comes again.
settings.register_profile(
    "same", derandomize=True, database=None, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("same")

# How long the end of a run, and training, wait for the worker: on a slow machine with other work that may take long.
reports.CLOSE_SECONDS = 100.0
backlog.ROOM_SECONDS = backlog.JUDGE_SECONDS = 30.0

# What a run reads depends on no clock, unless a test is about the budget.
config.AUTOMATIC = None, 0.0

# Nothing is printed or logged but what a test asks for.
config.VERBOSE = 0


def _beside(name):
    """Load a module that lies beside this one."""
    spec = importlib.util.spec_from_file_location(f"gradflow_test_{name}", Path(__file__).with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


perturb, warm = _beside("perturb"), _beside("warm")
_MARGINS = pytest.StashKey()
_LINES = pytest.StashKey()


def pytest_addoption(parser):
    """Add what verdicts are tested with beyond one machine: see ``tests/perturb.py``."""
    group = parser.getgroup("verdicts")
    group.addoption("--perturb", default="", help="arithmetic of another machine: products,inputs,seed=3,threads=2")
    group.addoption(
        "--cases", choices=("last", "others"), help="run the last case of each test of verdicts, or all else"
    )
    group.addoption(
        "--half",
        type=int,
        choices=(0, 1),
        help="run one half of the last cases, or of the cases of each test that has several",
    )
    group.addoption("--margins", type=float, help="move every threshold by this share and print which verdicts change")


# The files that take longest, the longest first. `make test` hands files out in the order in which they are collected.
LONGEST = (
    "unit/test_cli_demo.py", "contract/test_rules.py", "unit/test_experiments.py", "distributed/test_ranks.py",
    "pathologies/test_late_in_a_budget.py", "pathologies/test_lost_late.py", "browser/test_answer.py",
    "failures/test_processes.py",
    "wandb_core/test_exporter.py", "wandb_core/test_online.py", "loops/test_compiled.py", "unit/test_speaks.py",
    "unit/test_experiments_files.py", "browser/test_behaviour.py", "unit/test_fingerprints.py",
    "failures/test_private_names.py", "checks/test_pairs.py", "browser/test_panel.py", "unit/test_extensions.py",
    "browser/test_readings.py", "distributed/test_pipeline.py", "browser/test_views.py", "unit/test_distribution.py",
    "test_architecture.py",
)  # fmt: skip
_PLACES = {Path(__file__).parent / name: place for place, name in enumerate(LONGEST)}


def _is_of_verdicts(item):
    """Whether `make test-verdicts-inputs` runs a test."""
    return item.path.parent.name == "pathologies" or "test_a_broken_batch_is_a_loss_spike_that_passes" in item.name


def pytest_collection_modifyitems(config, items):
    """Leave out what is not wanted, and begin with the files that take longest; the others keep their order."""
    wanted = config.getoption("cases")
    if wanted is not None:
        last = {(item.path, getattr(item, "originalname", item.name)): item for item in items if _is_of_verdicts(item)}
        ends = set(map(id, last.values()))
        parts = {"last": [], "others": []}
        for item in items:
            parts["last" if id(item) in ends else "others"].append(item)
        items[:] = parts.pop(wanted)
        config.hook.pytest_deselected(items=[*parts.popitem()[1]])
    half = config.getoption("half")
    if half is not None:
        # By a checksum of their names: every second one would leave out one value of a parameter that has two.
        cases = Counter((item.path, getattr(item, "originalname", item.name)) for item in items)
        parts = {True: [], False: []}
        for item in items:
            several = wanted == "last" or cases[item.path, getattr(item, "originalname", item.name)] > 1
            parts[several and zlib.crc32(item.nodeid.encode()) % 2 != half].append(item)
        items[:] = parts[False]
        config.hook.pytest_deselected(items=parts[True])
    items.sort(key=lambda item: _PLACES.get(item.path, len(LONGEST)))


@pytest.hookimpl(wrapper=True)
def pytest_collection(session):
    """Have one worker collect first; the others find compiled what it compiled, and take a third of the time for it.

    What collecting makes stays, so that the garbage collector, which finds next to nothing, waits until its end.
    """
    gc.disable()
    if fcntl is None or not hasattr(session.config, "workerinput"):
        return (yield)
    with Path(__file__).open(encoding="utf-8") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            fcntl.flock(held, fcntl.LOCK_SH)
        return (yield)


def pytest_collection_finish():
    """Have garbage collections pass over the half million objects that collecting the tests made: a fifth of their time.

    Those of the compiler, which the first optimizer imports, are then passed over too.
    """
    importlib.import_module("torch._dynamo")
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_configure(config):
    """Perturb the process before the first test."""
    perturb.begin(perturb.parse(config.getoption("perturb")))
    share = config.getoption("margins")
    config.stash[_MARGINS] = None if share is None else perturb.Margins(share)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol():
    """Have what is left of a test, such as what it imported, passed over from then on.

    Each exporter looks for its hooks among all objects there are, and collections do. Few are made by many a test.
    """
    done = yield
    if any(gc.get_count()[1:]):
        gc.collect()
        gc.freeze()
    return done


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_teardown(item):
    """Keep the margins of what the test judged."""
    yield
    margins = item.config.stash[_MARGINS]
    if margins is not None:
        lines = list(margins.close())
        item.user_properties += [("margin", line) for line in lines]


def pytest_report_teststatus(report):
    """Print the margins of a test where it ends."""
    for kind, line in report.user_properties if report.when == "teardown" else ():
        if kind == "margin":
            print(f"\n{report.nodeid}: {line}", end="")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Begin every test with the same random numbers, whatever ran before it in its process."""
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - what numpy's global generator gives is what has to be the same
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def programs(tmp_path_factory):
    """What starts programs as ``python -c`` does, without the seconds that importing torch takes."""
    made = warm.Programs(lambda: tmp_path_factory.mktemp("program"))
    yield made
    made.close()
