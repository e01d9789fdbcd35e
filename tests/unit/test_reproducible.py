"""The benchmark of reproducibility compares what it says, and two programs pass it."""

import importlib
from pathlib import Path

import pytest
import torch

from gradflow_export.records.catalog import CATALOG
from gradflow_export.records.step_record import Reading, StepRecord


@pytest.fixture
def benchmark(monkeypatch):
    """Return the module."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return importlib.import_module("reproducible")


@pytest.mark.parametrize("name", ["spikes", "nan_batch"])
def test_runs_of_one_program_are_equal(benchmark, name):
    """Issues are the same in both modes, values of synchronous runs the same bits, and no record is lost."""
    runs = {mode: [benchmark.observe(name, synchronous=mode == "synchronous") for _ in range(2)] for mode in MODES}
    for mode, results in runs.items():
        assert benchmark.judge(mode, results) == []
        assert results[0]["issues"]
    assert benchmark.judge("default", [results[0] for results in runs.values()]) == []


MODES = ("default", "synchronous")


@pytest.mark.parametrize(("threads", "deterministic"), [(2, False), (1, True)])
def test_threads_and_deterministic_algorithms_change_no_record(benchmark, threads, deterministic):
    """A program whose own arithmetic they leave alone says the same, bit for bit."""
    plain, used = benchmark.observe("clipped_adam", synchronous=True), torch.get_num_threads()
    torch.use_deterministic_algorithms(deterministic, warn_only=True)
    try:
        other = benchmark.observe("clipped_adam", synchronous=True, threads=threads)
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(used)
    assert benchmark.judge("synchronous", [plain, other]) == []


def test_what_differs_is_named(benchmark):
    """A value, an issue and a lost record each make a difference; clocks and memory make none."""

    def run(loss, seconds, lost=0, issues=()):
        record = StepRecord(1, seconds, (Reading.run("loss", loss), Reading.run("runtime.step_time", seconds)))
        return {"records": benchmark.digest([record]), "issues": list(issues), "lost": lost}

    same = [run(1.0, 0.1), run(1.0, 0.2)]
    assert benchmark.judge("synchronous", same) == []
    assert benchmark.judge("default", [run(1.0, 0.1), run(2.0, 0.1)]) == []
    (line,) = benchmark.judge("synchronous", [run(1.0, 0.1), run(2.0, 0.1)])
    assert "1 values of run 2 differ from the first: [('loss', 1)]" in line
    assert "issues of run 2" in benchmark.judge("default", [run(1.0, 0.1), run(1.0, 0.1, issues=[["DEAD"]])])[0]
    assert benchmark.judge("default", [run(1.0, 0.1, lost=3)]) == ["3 records lost"]


def test_only_clocks_and_memory_are_left_out(benchmark):
    """What is not compared are seconds, steps per second, megabytes and the exporter's own share."""
    timed = {name for name in CATALOG if benchmark.is_timed(name)}
    assert {"runtime.step_time", "runtime.throughput", "runtime.rss", "overhead"} <= timed
    assert {CATALOG[name].unit for name in timed - {"overhead"}} == {"s", "steps/s", "MB"}
    assert len(benchmark.programs()) == 21
