"""Whatever is written comes back: over arbitrary records, chunk sizes and damage."""

import tempfile
from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gradflow_export.records.evidence import Evidence, Wiring
from gradflow_export.records.step_record import Histogram, Issue, IssueType, Reading, RunInfo, Severity, StepRecord
from gradflow_export.storage.reader import read_run
from gradflow_export.writers import JsonlWriter, TensorBoardWriter

VALUES = st.one_of(
    st.none(), st.floats(width=32), st.sampled_from([0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1e-45])
)
NAMES = st.text(min_size=1, max_size=8)
SITES = st.sampled_from([("a", "b"), ("a", "b", "c/d.weight"), ("",), (), ("größe", "0\n", "")])


@st.composite
def issues(draw):
    """Draw an issue."""
    return Issue(
        draw(st.sampled_from(IssueType)),
        draw(st.sampled_from(Severity)),
        draw(NAMES),
        draw(st.integers(0, 2**40)),
        draw(st.floats()),
        draw(st.floats()),
        draw(NAMES),
        draw(NAMES),
        tuple(draw(st.lists(NAMES, max_size=2))),
        draw(st.none() | st.integers(0, 2**40)),
    )


@st.composite
def histograms(draw, site):
    """Draw a histogram of one site."""
    counts = draw(st.lists(st.integers(0, 2**60), min_size=1, max_size=4))
    edges = sorted(draw(st.floats(allow_nan=False)) for _ in range(len(counts) + 1))
    return Histogram("parameter.weight", site, np.array(edges), np.array(counts), draw(st.integers(0, 9)))


@st.composite
def evidence(draw, step):
    """Draw what was seen of one kind at one layer."""
    values = st.dictionaries(NAMES, st.none() | st.booleans() | st.floats() | st.sampled_from([Wiring(0), Wiring(263)]))
    return Evidence(draw(st.sampled_from(["input", "connection"])), draw(NAMES), step, draw(values))


@st.composite
def runs(draw):
    """Draw records whose metrics, sites and phases come and go."""
    out, step = [], 0
    for _ in range(draw(st.integers(0, 8))):
        step += draw(st.integers(1, 2**33))
        readings = []
        for metric in draw(st.sets(st.sampled_from(["block.gain", "loss", "custom.größe.x", "custom.run.steps"]))):
            sites = draw(SITES)
            readings.append(Reading.of(metric, sites, [draw(VALUES) for _ in sites]))
        out.append(
            StepRecord(
                step,
                draw(st.floats(0, 4e9)),
                tuple(readings),
                tuple(draw(histograms(site)) for site in draw(st.sets(NAMES, max_size=2))),
                tuple(draw(st.lists(issues(), max_size=2))),
                draw(st.sampled_from(["train", "evaluation"])),
                draw(st.integers(0, 1)),
                evidence=tuple(draw(st.lists(evidence(step), max_size=3))),
            )
        )
    return out


def written(folder, rows, form, chunk):
    """Write a run in one of the two forms; return its file."""
    writer = JsonlWriter(folder) if form == "jsonl" else TensorBoardWriter(folder, rows=chunk)
    writer.open(RunInfo("1-0", 1.0, "Net"))
    for row in rows:
        writer.write(row)
    writer.close()
    return writer.path


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(runs(), st.sampled_from(["jsonl", "tensorboard"]), st.integers(1, 4))
def test_records_come_back_bit_for_bit(rows, form, chunk):
    """Every record, in both forms and with every chunk size, equals what was written."""
    with tempfile.TemporaryDirectory() as folder:
        written(folder, rows, form, chunk)
        run = read_run(folder)
        assert list(run.records) == rows
        assert run.skipped == 0


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(runs(), st.sampled_from(["jsonl", "tensorboard"]), st.data())
def test_damage_never_raises(rows, form, data):
    """Bytes overwritten, cut out or cut off anywhere leave a run that can be read with strictly rising steps."""
    with tempfile.TemporaryDirectory() as folder:
        path = written(folder, rows, form, 2)
        whole = path.read_bytes()
        start = data.draw(st.integers(0, len(whole)))
        end = data.draw(st.integers(start, min(len(whole), start + 64)))
        path.write_bytes(whole[:start] + data.draw(st.binary(max_size=16)) + whole[end:])
        run = read_run(Path(folder))
        steps = [record.step for record in run.records]
        assert steps == sorted(set(steps))
