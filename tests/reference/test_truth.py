"""The benchmark that compares every metric with float64 arithmetic runs, and its page is of today's catalogue."""

import importlib
import re
from pathlib import Path

import pytest

from gradflow_export.records.catalog import CATALOG
from gradflow_export.records.step_record import Reading, StepRecord

ROOT = Path(__file__).parents[2]


@pytest.fixture
def truth(monkeypatch):
    """The script, with its own folder first."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("truth")


def test_every_metric_stands_on_the_page():
    """Each is compared, or named with the reason why no arithmetic can tell it; a new metric needs either."""
    page = (ROOT / "docs" / "accuracy.md").read_text(encoding="utf-8")
    named = re.findall(r"`([a-z0-9_.]+)`", page)
    assert set(CATALOG) <= set(named)
    assert "**off**" not in page


@pytest.mark.parametrize(
    "only",
    ["dense, AdamW", "long table, Adam", "many predictions", "clipped layer", "gradient scaler that", "two heads",
     "sparse, rows", "AMP, rows", "several optimizers, path", "shared parameter, grids"],
)  # fmt: skip
def test_records_say_what_float64_says(truth, only):
    """No value is off by more than 1e-5, nor an estimate by more than it states, and none is missing."""
    worst = truth.measure(only)
    assert worst.metrics
    assert [metric for metric in worst.metrics if worst.off(metric)] == []
    assert not worst.absent


def test_what_a_record_lacks_is_not_passed_over(truth):
    """A metric that should be there and is not, and one that is there and is compared nowhere, are both told."""
    worst, record = truth.Worst(), StepRecord(3, 1.0, (Reading.run("loss", 1.0), Reading.run("gain.depth", 2.0)))
    worst.note("a loop", {"AMP"}, record, {"loss": {"": 1.0}, "gain.slope": {"": 0.5}})
    assert worst.absent == {"gain.slope": "a loop, step 3"}
    assert worst.uncompared("gain.depth") == ["AMP"]
    assert worst.uncompared("loss") == []
