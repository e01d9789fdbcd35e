"""Scripts without an optimizer: their updates are steps, which treatments change as they do those of any optimizer."""

from __future__ import annotations

import textwrap

import pytest

from gradflow_export.experiments.battery import Battery
from gradflow_export.experiments.laboratory import Laboratory
from gradflow_export.experiments.target import Target
from gradflow_export.records.issues import IssueType

SCRIPT = """
    import sys
    import torch
    from torch import nn

    word = sys.argv[1]
    torch.manual_seed(0)
    x = torch.randn(1024, 8)
    y = (x[:, :3] + x[:, 3:6]).argmax(1)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))
    rate = 300.0 if word == "fast" else 0.5
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    for step in range(200):
        for part in range(2):
            rows = torch.randint(1024, (16,))
            (nn.functional.cross_entropy(model(x[rows]), y[rows]) / 2).backward()
        if word == "mixed" and step > 20:
            optimizer.step()
        with torch.no_grad():
            for at, weight in enumerate(model.parameters()):
                if weight.grad is not None and not (word == "forgotten" and at < 2):
                    weight -= rate * weight.grad * (word != "mixed" or step <= 20)
                    weight.grad = None if word != "stale" else weight.grad
"""


@pytest.mark.parametrize(
    ("word", "suspects", "cure"),
    [
        ("sound", [IssueType.LEARNING_RATE], None),
        ("fast", [], "learning rate x 0.01"),
        ("stale", [IssueType.STALE_GRAD], "clear old gradients"),
        ("forgotten", [IssueType.NOT_TRAINING], "train every parameter"),
    ],
)
def test_updates_by_hand_are_steps(tmp_path, word, suspects, cure):
    """Those after two passes each: one that is unchanged is as it was, and a sound script is given no cure."""
    with Laboratory(script(tmp_path, word), jobs=2) as laboratory:
        (training,) = laboratory.look(steps=60).trainings
        verdict = Battery(laboratory, training, steps=60, suspects=suspects).run()
    assert training.by_hand
    assert training.steps == 199
    assert next((trial.names[0] for trial in verdict.cures), None) == cure


def test_where_an_optimizer_steps_nothing_else_does(tmp_path):
    """Also where it begins later: what changed weights before it is not counted."""
    with Laboratory(script(tmp_path, "mixed"), jobs=2) as laboratory:
        (training,) = laboratory.look(steps=60).trainings
    assert not training.by_hand
    assert (training.skipped, training.steps) == (0, 179)


def script(folder, word: str) -> Target:
    """Return a script whose mistake has this name."""
    path = folder / "train.py"
    path.write_text(textwrap.dedent(SCRIPT), encoding="utf-8")
    return Target(path, words=(word,))
