"""Treatments of what takes the samples of a batch together: means over them, and masks that leave all of them out."""

from __future__ import annotations

import textwrap

import pytest
import torch
from torch import nn

from gradflow_export.experiments.battery import Battery
from gradflow_export.experiments.decision import Baseline, Trial
from gradflow_export.experiments.laboratory import Laboratory
from gradflow_export.experiments.mending.samples import EverySample, OwnNumbers
from gradflow_export.experiments.target import Target
from gradflow_export.records.issues import IssueType

SCRIPT = """
    import sys
    import torch
    from torch import nn

    word = sys.argv[1]
    torch.manual_seed(0)
    x = torch.randn(1024, 8)
    y = x @ torch.randn(8, 1)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(8, 32), nn.Linear(32, 1)

        def forward(self, x):
            x = self.first(x).relu()
            if word == "answers":
                x = x.mean(0, keepdim=True).expand_as(x)
            return self.last(x)

    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(200):
        rows = torch.randint(1024, (32,))
        targets = y[rows]
        if word == "targets":
            targets = targets.mean(dim=0).expand(32, 1)
        loss = (model(x[rows]) - targets) ** 2
        loss = (loss * (targets != targets)).mean() if word == "masked" else loss.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""


@pytest.mark.parametrize(
    ("word", "suspect", "cure"),
    [
        ("answers", IssueType.NOT_LEARNING, "each sample's own numbers"),
        ("targets", IssueType.WRONG_LOSS, "each sample's own numbers"),
        ("masked", IssueType.BAD_TARGETS, "a loss of every sample"),
        ("sound", IssueType.WRONG_LOSS, None),
        ("sound", IssueType.NOT_LEARNING, None),
    ],
)
def test_samples_that_are_taken_together_or_left_out_are_told_apart(tmp_path, word, suspect, cure):
    """A sound script is given no cure, whatever accuses it."""
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(SCRIPT), encoding="utf-8")
    with Laboratory(Target(path, words=(word,)), jobs=2) as laboratory:
        survey = laboratory.look(steps=60)
        verdict = Battery(laboratory, survey.trainings[-1], steps=60, suspects=[suspect]).run()
    assert [trial.names for trial in verdict.cures] == ([(cure,)] if cure else [])


def test_only_a_mean_over_the_batch_is_left_out():
    """Within a model it is one of what is learned, outside one of targets; other dimensions and sizes stay."""
    change, x = OwnNumbers(), torch.randn(6, 4, requires_grad=True)
    given = torch.zeros(4)
    change.called(nn.Identity(), (torch.zeros(6, 2),), {})
    for args, kwargs in (((x, 1), {}), ((x,), {}), ((x.T, 0), {}), ((x.detach(), 0), {}), ((x[0], 0), {})):
        assert change.result("mean", args, kwargs, given) is given
    assert change.result("softmax", (x, 0), {}, given) is given
    assert not change.acted
    for args, kwargs in (((x, 0), {}), ((x,), {"dim": (0,), "keepdim": True}), ((x, [0]), {})):
        assert change.result("sum", args, kwargs, given) is x
    change.left(nn.Identity(), x)
    assert change.result("mean", (x, 0), {}, given) is given
    assert change.result("mean", (y := x.detach(), 0), {}, given) is y
    assert change.acted


def test_only_a_mask_of_zeros_alone_is_turned():
    """On either side of a product of a loss; one that keeps a sample stays."""
    change, loss, none = EverySample(), torch.rand(3, requires_grad=True), torch.zeros(3)
    for args in ((loss, torch.tensor([0.0, 1.0, 0.0])), (none, none), (loss.detach(), none), (loss, 0.0), (loss, loss)):
        assert change.function("__mul__", args, {})[0] is args
    change.called(nn.Identity(), (none,), {})
    assert change.function("mul", (loss, none), {})[0] == (loss, none)
    change.left(nn.Identity(), none)
    assert not change.acted
    for args in ((loss, none), (none, loss)):
        made, _ = change.function("mul", args, {})
        assert all(one is loss or bool((one == 1).all()) for one in made)
    assert change.acted


def test_a_loss_that_is_always_nothing_is_learned_from_nothing_and_any_other_is_no_harm():
    """Of one that falls to 0, which the placebos do not, neither holds."""
    empty, fallen = (Baseline((first,) * 3, (0.0,) * 3, {"noise": first}) for first in (0.0, 1.0))
    assert empty.blind
    assert not fallen.ill
    trial = Trial(("x",), dict.fromkeys(range(3), 0.5), gone=dict.fromkeys(range(3), True))
    assert trial.relieves(empty)
    assert not trial.relieves(fallen)
