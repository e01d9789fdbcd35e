"""What is found where no symptom says so: forgotten steps, one batch for ever, far targets, and scripts that learn."""

from __future__ import annotations

import json
import textwrap
from dataclasses import replace

import pytest
import torch
from torch import nn

from gradflow_export.cli import main
from gradflow_export.experiments.battery import Battery
from gradflow_export.experiments.decision import Baseline, Trial
from gradflow_export.experiments.laboratory import Laboratory
from gradflow_export.experiments.mending.batches import ALIKE, Batches
from gradflow_export.experiments.survey import Training
from gradflow_export.experiments.target import Target
from gradflow_export.experiments.treatments import find
from gradflow_export.records.issues import IssueType

SCRIPT = """
    import sys
    import torch
    from torch import nn
    from torch.nn import functional as F

    word = sys.argv[1]
    torch.manual_seed(0)
    x = torch.randn(1024, 8)
    y = (x[:, :3] + 0.3 * x[:, 3:6]).argmax(1)
    z = x[:, :1] * x[:, 1:2] + (25 if word == "far" else 0)

    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1 if word in ("far", "near") else 3))
    decay = {"decay": 10.0, "some decay": 0.01}.get(word, 0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0 if word == "fast" else 3e-3, weight_decay=decay)
    for warmup in range(30 if word == "probed" else 0):
        optimizer.zero_grad()
        F.cross_entropy(model(x[:64]), y[:64]).backward()
    fixed = torch.randperm(1024)[:128]
    for step in range(300):
        rows = fixed if word == "same" else torch.randint(1024, (128,))
        out = model(x[rows])
        loss = F.mse_loss(out, z[rows]) if word in ("far", "near") else F.cross_entropy(out, y[rows])
        optimizer.zero_grad()
        loss.backward()
        if word != "forgotten":
            optimizer.step()
"""


@pytest.mark.parametrize(
    ("word", "cure"),
    [
        ("forgotten", "a step after each backward pass"),
        ("same", "other rows in each batch"),
        ("far", "standardize the targets"),
        ("fast", "learning rate x 0.1"),
        ("decay", None),
        ("some decay", None),
        ("near", None),
        ("probed", None),
        ("sound", None),
    ],
)
def test_a_cure_is_found_without_any_symptom(tmp_path, word, cure):
    """A sound script gets none, nor does one that only looks at gradients before it trains."""
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(SCRIPT), encoding="utf-8")
    with Laboratory(Target(path, words=(word,)), jobs=2) as laboratory:
        survey = laboratory.look()
        verdict = Battery(laboratory, survey.trainings[-1], steps=60).run()
    assert survey.trainings[-1].forgotten is (word == "forgotten")
    names = [trial.names[0] for trial in verdict.cures]
    assert cure in names if cure else not names, (names, verdict.baseline)


def test_a_forgotten_step_is_reported_with_its_cure(tmp_path, capsys):
    """The script makes no step at all, and that is no reason to try nothing."""
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(SCRIPT), encoding="utf-8")
    assert main(["doctor", "--try", "--format", "json", "--jobs", "2", str(path), "forgotten"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["steps"] == 0
    assert [each["treatments"] for each in told["experiments"][0]["cures"]] == [["a step after each backward pass"]]
    assert "NOT_TRAINING" in {each["issue_type"] for each in told["findings"]}


def test_batches_are_alike_where_they_are_drawn_and_hold_the_same():
    """One tensor that is kept, other rows, and rows that only an evaluation draws are no mistake."""
    x = torch.randn(100, 2)
    for index, drawn, same in (
        (lambda _: torch.arange(20), True, True),
        (lambda step: torch.arange(20) + step, True, False),
        (lambda _: torch.arange(20), False, False),
    ):
        look, model = Batches(), nn.Linear(2, 1)
        for step in range(30):
            rows = index(step)
            if drawn:
                look.function("__getitem__", (x, rows), {})
            look.called(model, (x[rows],), {})
            look.left(model, None)
        assert (look.told()["same"] >= ALIKE) is same


def test_larger_steps_are_not_named_by_a_finding_that_has_another_cause():
    """Weights that decay too fast accuse the decay, and not the rate, though both are LEARNING_RATE."""
    battery = Battery(None, Training(0, 300, 1), steps=60, suspects=[IssueType.LEARNING_RATE])
    larger, decay, verdict = ("learning rate x 10",), ("weight decay 0",), battery.verdict
    verdict.baseline, verdict.facts = Baseline((1.0,) * 3, (0.5,) * 3), {"faded": 0.0}
    small, decays = [("LEARNING_RATE", "too small")], [("LEARNING_RATE", "weights decay")]
    for found, named in ((), True), (small, True), (decays, False), (small + decays, True):
        verdict.found = found
        assert battery._licensed(larger) is named
        assert battery._licensed(decay)


def test_what_nothing_accuses_has_to_do_more_than_tuning_would():
    """Of what authors choose, such as dropout, not even that counts for a script that learns."""
    base = Baseline((1.0,) * 3, (0.5,) * 3)
    assert Trial(("learning rate x 0.1",), dict.fromkeys(range(3), 0.1)).turns(base)
    assert not Trial(("learning rate x 0.1",), {0: 0.1, 1: 0.1, 2: 0.3}).turns(base)
    assert not Trial(("learning rate x 0.1",), dict.fromkeys(range(3), 0.001)).turns(Baseline((1.0,) * 3, (0.01,) * 3))
    # What is of degree has to, whatever finding asks for it.
    for effect, learned, enough in ((0.2, 0.5, True), (0.3, 0.5, False), (0.001, 0.01, False), (0.3, 0.95, True)):
        trial = Trial(("layer norm after each layer",), dict.fromkeys(range(3), effect), of_degree=True)
        plain = replace(base, effect=(learned,) * 3)
        assert trial.suffices(plain) is enough
        assert replace(trial, of_degree=False).suffices(plain)
    chosen = {"dropout 0", "weight decay 0", "hold the first learning rate", "no penalty on the weights"}
    assert all(find(name).choice for name in chosen)
