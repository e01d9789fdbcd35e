"""Evidence of silent mistakes: typed facts with a layer and a step, stored beside the issues and no metric."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from torch import nn

from gradflow_export import Exporter, JsonlWriter, MemoryWriter, TensorBoardWriter
from gradflow_export.engine.analyses import Clues
from gradflow_export.hooks.readings import Clue
from gradflow_export.records.catalog import CATALOG
from gradflow_export.records.evidence import (
    Evidence,
    Wiring,
    evidence_from_json,
    evidence_of,
    evidence_to_json,
    facts_of,
)
from gradflow_export.records.retired import RETIRED
from gradflow_export.records.step_record import Issue, IssueType, Reading, RunInfo, Severity, StepRecord
from gradflow_export.rules.history import History
from gradflow_export.storage.reader import read_run

NAMES = tuple(f"layers.{i}.weight" for i in range(1000))


def test_facts_and_evidence_are_two_views_of_the_same():
    """Values of one kind at the same layers stand together; facts of other layers keep their own order."""
    facts = {
        "input.rms": {"b": 1.0, "a": 2.0}, "input.mean": {"b": 0.5, "a": None}, "input.ahead": {"a": True, "b": False},
        "connection.state": {"a": Wiring.OWNED}, "wiring.orphans": {"": 0.0},
    }  # fmt: skip
    evidence = evidence_of(7, facts)
    assert evidence[0] == Evidence("input", "b", 7, {"rms": 1.0, "mean": 0.5})
    assert facts_of(evidence) == facts
    assert list(facts_of(evidence)["input.ahead"]) == ["a", "b"]


def test_layers_with_the_same_values_are_stored_once():
    """A thousand parameters that are connected in one of two ways take two sets of values, by the names of the flags."""
    state = {name: Wiring.TRAINABLE | (Wiring.OWNED if i % 2 else 0) for i, name in enumerate(NAMES)}
    evidence, tables = evidence_of(1, {"connection.state": state}), []
    (stored,) = evidence_to_json(evidence, lambda layers: tables.append(layers) or 0)
    assert stored["values"] == [{"state": ("TRAINABLE",)}, {"state": ("TRAINABLE", "OWNED")}]
    assert len(json.dumps(stored)) < 4 * len(NAMES)
    back = json.loads(json.dumps(stored))
    assert tuple(evidence_from_json(1, back, tables[0])) == evidence


def test_clues_of_several_optimizers_are_joined_in_the_order_of_the_model():
    """The later value counts, what is NaN where that means nothing is looked for and not known, and places rise."""
    clues, sites = Clues(), ("a", "b", "c", "d")
    clues.add(Clue("x.y", sites, np.array([3.0, 4.0]), np.array([2, 3])), np.array([3.0, 4.0]))
    more = np.array([math.nan, math.nan])
    clues.add(Clue("x.y", sites, more, np.array([0, 3]), nan_is_missing=True), more)
    assert list(clues.facts()["x.y"].items()) == [("a", None), ("c", 3.0), ("d", 4.0)]


def test_rules_look_back_at_facts_as_at_metrics():
    """The history has a window of each fact that is asked for; of the whole model a series of numbers."""
    history = History(["input.rms", "wiring.orphans"])
    for step in (1, 2):
        facts = {"input.rms": {"a": float(step), "b": None}, "wiring.orphans": {"": step}, "input.mean": {"a": 0.0}}
        history.add(StepRecord(step, 0.0, evidence=evidence_of(step, facts)))
    assert history.at_sites("input.rms").values.tolist() == [[1.0, 0.0], [2.0, 0.0]]
    assert history.at_sites("input.rms").present.tolist() == [[True, False]] * 2
    assert history.run("wiring.orphans").values.tolist() == [1.0, 2.0]
    assert history.at_sites("input.mean").sites == ()


def trained(*writers):
    """Train a small network while watched; return what was recorded."""
    torch.manual_seed(0)
    model, memory = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), MemoryWriter()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Exporter(model, backends=[memory, *writers], strict=True).watch():
        for _ in range(12):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(torch.randn(16, 4)), torch.randint(3, (16,))).backward()
            optimizer.step()
    return memory.records


@pytest.mark.parametrize("form", [JsonlWriter, TensorBoardWriter])
def test_what_a_run_saw_is_stored_and_is_no_metric(form, tmp_path):
    """Sizes of inputs, connections and first weights come back from a file, and no reading tells of them."""
    records = trained(form(tmp_path))
    kinds = {evidence.kind for record in records for evidence in record.evidence}
    assert {"input", "loss", "target", "connection", "parameter"} <= kinds
    assert all(evidence.step == record.step for record in records for evidence in record.evidence)
    assert {reading.metric for record in records for reading in record.readings} <= CATALOG.keys() - RETIRED
    assert list(read_run(tmp_path).records) == list(records)


@pytest.mark.parametrize("form", [JsonlWriter, TensorBoardWriter])
def test_logs_of_earlier_versions_keep_their_verdicts(form, tmp_path):
    """Where evidence was stored as metrics these are left out; other readings and the issues are there."""
    issue = Issue(IssueType.WRONG_LOSS, Severity.HIGH, "loss", 1, 1.0, 0.0, "It is wrong.", "Mend it.")
    old = [Reading.of(name, ("a", "b"), (1.0, None)) for name in sorted(RETIRED) if not name.startswith("wiring.")]
    old.append(Reading.run("wiring.orphans", 0.0))
    kept = (Reading.of("parameter.gradient_norm", ("a", "b"), (1.0, 2.0)), Reading.run("loss", 0.5))
    writer = form(tmp_path)
    writer.open(RunInfo("1-0", 1.0, "Net"))
    writer.write(StepRecord(1, 1.0, (*kept, *old), issues=(issue,)))
    writer.close()
    (record,) = read_run(tmp_path).records
    assert record == StepRecord(1, 1.0, kept, issues=(issue,))
