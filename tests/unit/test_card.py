"""The card of a run, its picture of the loss, and what an exporter is in words."""

from __future__ import annotations

import math
import re
import sys
import xml.etree.ElementTree as ET

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gradflow_export import ArgumentError, Exporter, MissingPackageError
from gradflow_export.records.step_record import Issue, IssueType, Reading, RunInfo, Severity, StepRecord
from gradflow_export.report.card import HEIGHT, WIDTH, card, sparkline
from gradflow_export.report.summary import RunSummary
from gradflow_export.report.trace import POINTS, Trace

NUMBERS = st.floats(allow_nan=True, allow_infinity=True, width=32)


@given(st.lists(NUMBERS, max_size=400), st.integers(1, 50))
def test_the_picture_of_the_loss_is_bounded_and_stays_in_its_frame(values, apart):
    """Whatever the loss does, there are few points, each within the picture, and it is well formed."""
    trace = Trace()
    for number, value in enumerate(values):
        trace.add(1 + number * apart, value)
    assert len(trace.steps) == len(trace.values) < POINTS
    assert trace.steps == sorted(set(trace.steps))
    picture = sparkline(trace)
    if sum(map(math.isfinite, trace.values)) < 2:
        assert picture == ""
        return
    lines = [element.get("points") for element in ET.fromstring(picture).iter("polyline")]
    places = [tuple(map(float, point.split(","))) for line in lines for point in line.split()]
    assert places
    assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for x, y in places)


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=2000))
def test_a_trace_keeps_the_mean(values):
    """Each point is the mean of the readings that it stands for."""
    trace = Trace()
    for number, value in enumerate(values):
        trace.add(number, value)
    ends = [*trace.steps[1:], trace.steps[-1] + (trace.steps[1] - trace.steps[0] if len(trace.steps) > 1 else 1)]
    for begin, end, value in zip(trace.steps, ends, trace.values, strict=True):
        part = values[begin:end]
        assert value == pytest.approx(sum(part) / len(part), abs=1e-6)


@pytest.mark.parametrize("count", [1, 9, 10, 300])
def test_the_picture_has_the_first_and_the_last_loss_of_the_verdict(count):
    """One odd batch at either end does not change what is said; too few losses have no ends."""
    summary = RunSummary()
    for step in range(1, count + 1):
        odd = 50.0 if step in (1, count) else 0.0
        summary.add(StepRecord(step, 1.0, (Reading.run("loss", 3.0 - step / 200 + odd),)))
    text = card(summary, "", "gradflow report")
    if count < 10:
        assert "loss from" not in text
        return
    first, last = summary.loss
    assert f"<title>loss from {first:.4g} to {last:.4g}</title>" in text
    assert f"from {first:.4g} to {last:.4g}" in summary.verdict
    assert max(first, last) < 4


def test_names_on_the_card_are_text():
    """A layer or class with markup in its name is shown as it is called."""
    summary = RunSummary(RunInfo("1-0", 1.0, "<b>Net</b>", 10))
    issue = Issue(IssueType.DEAD, Severity.HIGH, "<script>", 1, 1.0, 0.5, "a < b & c.", 'use "x".')
    summary.add(StepRecord(1, 1.0, (Reading.run("loss", 1.0),), issues=(issue,)))
    text = card(summary, "runs/<x>", "gradflow report")
    assert "<script>" not in text
    assert "&lt;script&gt;" in text
    ET.fromstring(text)


def test_an_exporter_says_what_it_is_at_any_time(tmp_path):
    """repr and card work before, during and after training, and name model, folder and verdict."""
    model = nn.Linear(2, 1)
    exporter = Exporter(model, logdir=tmp_path / "run")
    assert "Exporter of Linear" in repr(exporter)
    ET.fromstring(exporter._repr_html_())
    exporter.watch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 2)).square().sum().backward()
        optimizer.step()
    assert "healthy" in exporter._repr_html_()
    exporter.close()
    assert re.fullmatch(r"<Exporter of Linear in .*run: step 3, healthy: .*>", repr(exporter))
    assert "gradflow report" in exporter._repr_html_()


def test_what_cannot_be_shown_says_what_is_missing(monkeypatch):
    """Without files there is no panel, without pandas no frame, and an unknown metric names the nearest."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Exporter(model, backends="memory").watch() as exporter:
        model(torch.ones(2, 2)).square().sum().backward()
        optimizer.step()
        with pytest.raises(ArgumentError, match="add 'tensorboard'"):
            exporter.show()
        assert list(exporter.to_pandas("loss").columns) == ["loss"]
        with pytest.raises(ArgumentError, match="no record has the metric 'lss'; did you mean 'loss'"):
            exporter.to_pandas("lss")
        monkeypatch.setitem(sys.modules, "pandas", None)
        with pytest.raises(MissingPackageError, match="pip install pandas"):
            exporter.to_pandas("loss")
