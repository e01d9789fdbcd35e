"""Any object that takes numbers is a backend; what else it can do is used, and what it refuses costs that alone."""

import math
import sys

import numpy as np
import pytest

from gradflow_export.errors import MissingPackageError
from gradflow_export.records.step_record import Histogram, Issue, IssueType, Reading, RunInfo, Severity, StepRecord
from gradflow_export.writers import Writer, make_writer, trackers

INFO = RunInfo("1-0", 1.0, "Net", 10, ("a", "b"))


class Numbers:
    """The least that a sink is."""

    def __init__(self):
        self.rows = []

    def log_scalars(self, values, step):
        self.rows.append((step, values))


class All(Numbers):
    """All that a sink may be."""

    def __init__(self, broken=()):
        super().__init__()
        self.calls, self.broken = [], broken

    def __getattr__(self, name):
        if name.startswith("_") or name not in ("log_histogram", "log_table", "log_config", "alert", "close"):
            raise AttributeError(name)

        def call(*given):
            self.calls.append((name, *given))
            if name in self.broken:
                raise OSError("on purpose")

        return call

    def named(self, name):
        return [given for what, *given in self.calls if what == name]


def play(sink):
    """Write a few records with all that there is."""
    writer = make_writer(sink, "unused")
    writer.open(INFO)
    issue = Issue(IssueType.DEAD, Severity.HIGH, "a", 3, 1.0, 0.5, "Dead.", "Mend.", ("a",), None)
    histogram = Histogram("parameter.gradient", "a", np.linspace(0, 1, 65), np.arange(64))
    for step in range(1, 31):
        gains = Reading.of("block.gain", ("a", "b"), [None, math.nan if step == 5 else 2.0])
        readings = (Reading.run("loss", 1.0 / step), gains, Reading.of("parameter.gradient_norm", ("a.weight",), [1.0]))
        writer.write(
            StepRecord(step, float(step), readings, (histogram,) if step == 4 else (), (issue,) if step == 3 else ())
        )
        writer.flush()
    for _ in range(2):
        writer.close()
    writer.write(StepRecord(31, 31.0))
    return writer


def test_numbers_are_enough():
    """Every step, under our names, NaN as it is."""
    sink = Numbers()
    writer = play(sink)
    assert isinstance(writer, Writer)
    assert writer.name == "Numbers"
    assert [step for step, _ in sink.rows] == list(range(1, 31))
    assert sink.rows[0][1]["gradflow/loss"] == 1.0
    assert math.isnan(sink.rows[4][1]["gradflow/block.gain/b"])
    assert [values["gradflow/open_issues"] for _, values in sink.rows[:4]] == [0, 0, 1, 1]


def test_what_else_it_can_do_is_used():
    """Histograms, tables, description, one alert per incident, and its end, once."""
    sink = All()
    play(sink)
    ((config,),) = sink.named("log_config")
    ((title, _, level, step),) = sink.named("alert")
    ((name, counts, edges, at),) = sink.named("log_histogram")
    assert config["gradflow"]["model"] == "Net"
    assert (title, level, step) == ("gradflow: DEAD in a", "ERROR", 3)
    assert (name, len(counts), len(edges), at) == ("gradflow/histogram/first", 32, 33, 4)
    assert [table[0] for table in sink.named("log_table")] == ["gradflow/health", "gradflow/issues"]
    assert len(sink.named("close")) == 1


@pytest.mark.parametrize("broken", ["log_histogram", "log_table", "log_config", "alert", "close"])
def test_what_it_refuses_costs_that_alone(broken, caplog):
    """The numbers go on, and it is said once."""
    sink = All(broken=(broken,))
    play(sink)
    assert len(sink.rows) == 30
    assert len([line for line in caplog.messages if "All refused" in line]) == 1


@pytest.mark.parametrize(("sink", "package"), [(trackers.MlflowSink, "mlflow"), (trackers.SwanlabSink, "swanlab")])
def test_a_missing_package_is_said_with_the_pip_command(monkeypatch, sink, package):
    """Before training begins."""
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingPackageError, match=f"pip install {package}"):
        sink()
