"""Logs stored by the old layout open in report, panel and replay.

The files beside this one hold one run of ``train.py``, as event file and as JSON lines, written by the release in which
evidence was stored as metrics and no issue was listed within another. ``tests/wandb_core/test_replay.py`` sends it.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from werkzeug.test import Client

from gradflow_export.cli import main
from gradflow_export.records.catalog import CATALOG
from gradflow_export.records.retired import RETIRED
from gradflow_export.storage.reader import read_run
from tensorboard_plugin_gradflow import standalone

STORED = Path(__file__).parent
BOTH = pytest.mark.parametrize("form", ["gradflow", "jsonl"])


def unpacked(form, folder):
    """Write the stored file of one form to a folder; return the lines or bytes that it holds."""
    (packed,) = STORED.glob(f"*.{form}.gz")
    content = gzip.decompress(packed.read_bytes())
    (folder / packed.stem).write_bytes(content)
    return content


def in_file(tmp_path):
    """Return the steps of the run as they stand in the file, read by no code of ours."""
    lines = map(json.loads, unpacked("jsonl", tmp_path).decode().splitlines())
    return {line["step"]: line for line in lines if line["kind"] == "step"}


@BOTH
def test_every_value_that_is_still_a_metric_comes_back(form, tmp_path):
    """Steps, metrics, sites and bits are those in the file; what is evidence today is left out."""
    steps = in_file(tmp_path)
    (tmp_path / "old").mkdir()
    unpacked(form, tmp_path / "old")
    run = read_run(tmp_path / "old")
    assert (run.skipped, run.gaps, run.closed) == (0, (), True)
    assert [record.step for record in run.records] == sorted(steps) == list(range(1, 61))
    for record in run.records:
        there = steps[record.step]
        named = {*there["run"], *there["sites"]}
        assert {reading.metric for reading in record.readings} == named - RETIRED
        for metric in there["run"].keys() - RETIRED:
            assert np.float32(there["run"][metric]) == record.value(metric)
        for metric in there["sites"].keys() - RETIRED:
            values = [value for value in there["sites"][metric][1] if value is not None]
            (reading,) = (r for r in record.readings if r.metric == metric)
            assert np.asarray(reading.values)[list(reading.present)].tolist() == np.float32(values).tolist()
        assert bool(record.histograms) == bool(there.get("histograms"))
    assert {"loss.mistake", "parameter.wiring"} <= {*steps[1]["sites"]}, "the file is not of the old layout"
    assert {reading.metric for record in run.records for reading in record.readings} <= CATALOG.keys()
    assert [(note.kind, note.text) for r in run.records for note in r.notes if note.kind == "mark"] == [
        ("mark", "a mark")
    ]


@BOTH
def test_the_report_has_its_verdict(form, tmp_path, capsys):
    """Both causes are problems; what one of them explains is listed within it, though the file does not say so."""
    unpacked(form, tmp_path)
    assert main(["report", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "2 problems" in text
    assert "it cannot fall below 0.551" in text
    assert "2 tensors (2.weight, 2.bias) got no update in 6 steps" in text
    assert main(["report", str(tmp_path), "--json"]) == 0
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert run["steps"] == {"count": 60, "first": 1, "last": 60}
    found = {issue["issue_type"]: issue["explained_by"] for issue in run["issues"]}
    assert {kind for kind, cause in found.items() if cause is None} == {"WRONG_LOSS", "NOT_TRAINING"}
    assert "NOT_TRAINING" in found["STAGNATION"]


def test_the_panel_draws_it(tmp_path):
    """Every route of ``gradflow view`` answers; metrics that are evidence today are not offered."""
    steps = in_file(tmp_path)
    unpacked("gradflow", tmp_path)
    client = Client(standalone.ViewerApp(tmp_path))
    (run,) = client.get("/runs").json["runs"]
    assert (run["first"], run["last"], run["damaged"], run["state"]) == (1, 60, 0, "closed")
    offered = {metric["name"] for metric in client.get("/meta?run=.").json["metrics"]}
    assert not offered & RETIRED
    assert {*steps[60]["run"], *steps[60]["sites"]} - RETIRED <= offered
    for metric in sorted(offered):
        assert client.get(f"/series?run=.&metric={metric}").status_code == 200, metric
    gradients = client.get("/moment?run=.&metric=block.gradient_norm&step=60").json["metrics"]["block.gradient_norm"]
    assert gradients["values"] == [float(np.float32(v)) for v in steps[60]["sites"]["block.gradient_norm"][1]]
    assert client.get("/overview").json["runs"][0]["problems"] == 2
    issues = client.get("/issues?run=.").json["issues"]
    assert {"WRONG_LOSS", "NOT_TRAINING", "STAGNATION"} == {issue["issue_type"] for issue in issues}
    for histogram in client.get("/histograms?run=.").json["items"][:4]:
        answer = client.get(f"/histograms?run=.&metric={histogram['metric']}&site={histogram['site']}")
        assert answer.status_code == 200
