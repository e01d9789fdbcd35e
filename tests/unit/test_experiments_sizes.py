"""Numbers that are far off in a loss: a temperature, a sum over the batch, a norm over a batch of two."""

from __future__ import annotations

import math
import textwrap

import pytest
import torch
from torch import nn
from torch.nn import functional

from gradflow_export.experiments.battery import Battery
from gradflow_export.experiments.decision import Baseline, Trial
from gradflow_export.experiments.laboratory import Laboratory
from gradflow_export.experiments.mending.passages import OpenNorms, starved
from gradflow_export.experiments.mending.rates import MeanLoss, terms
from gradflow_export.experiments.mending.scores import Tempered, tempered
from gradflow_export.experiments.target import Target

SCRIPT = """
    import sys
    import torch
    from torch import nn
    from torch.nn import functional as F

    word = sys.argv[1]
    rows = 2 if word == "pair" else 32
    torch.manual_seed(0)
    x = torch.randn(512, 8)
    other = torch.tanh(x @ torch.randn(8, 8))
    y = (x[:, :3] + x[:, 3:6]).argmax(1)
    norm = nn.BatchNorm1d(32) if word == "pair" else nn.Identity()
    model = nn.Sequential(nn.Linear(8, 32), norm, nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8))
    if word in {"summed", "both"}:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1 if word == "summed" else 0.01, momentum=0.9)
    else:
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    temperature = {"hot": 50.0, "cold": 2e-4, "right": 0.1}.get(word)
    for step in range(300):
        some = torch.randint(512, (rows,))
        optimizer.zero_grad()
        if temperature:
            one, two = F.normalize(model(x[some]), dim=1), F.normalize(other[some], dim=1)
            loss = F.cross_entropy(one @ two.T / temperature, torch.arange(rows))
        elif word == "summed":
            loss = ((model(x[some])[:, :3] - x[some][:, :3]) ** 2).sum()
        elif word == "both":
            loss = F.mse_loss(model(x[some]), x[some], reduction="sum")
        else:
            loss = F.cross_entropy(model(x[some]), y[some])
        loss.backward()
        optimizer.step()
    """


@pytest.mark.parametrize(
    ("word", "cure"),
    [
        ("hot", ["another temperature"]),
        ("cold", ["another temperature"]),
        ("right", []),
        ("summed", ["the mean of the loss"]),
        ("both", ["the mean of the loss", "learning rate x 10"]),
        ("pair", ["no norm over a single number"]),
    ],
)
def test_a_number_that_is_far_off_is_named(tmp_path, word, cure):
    """A temperature that is neither too high nor too low is left as it is."""
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(SCRIPT), encoding="utf-8")
    with Laboratory(Target(path, words=(word,)), jobs=2) as laboratory:
        survey = laboratory.look()
        verdict = Battery(laboratory, survey.trainings[-1], steps=60).run()
    assert [name for trial in verdict.cures[:1] for name in trial.names] == cure


def test_scores_have_a_temperature_where_a_number_scales_them():
    """Masked scores do not count; a usual temperature, one that is learned, and scores without one are left alone."""
    scores = nn.Linear(8, 16)(torch.randn(32, 8))
    masked = (scores / 100).masked_fill(torch.eye(32, 16, dtype=torch.bool), -math.inf)
    assert 0 < tempered("cross_entropy", (masked,), {}) < 0.05
    learned = nn.Parameter(torch.tensor(0.01))
    for given in (scores, scores / 0.07, scores * learned, (scores / 100).detach()):
        assert tempered("cross_entropy", (given,), {}) == 0
    change = Tempered()
    args, _ = change.function("cross_entropy", (scores / 100,), {})
    assert tempered("cross_entropy", (args[0] / 100,), {}) == pytest.approx(0.01)
    assert change.acted


def test_terms_of_a_loss_are_counted_whatever_scales_it():
    """A mean has one, however it is written; of scores of several classes one counts for each sample."""
    out, y = nn.Linear(8, 4)(torch.randn(32, 8)), torch.randint(4, (32,))
    known = {
        functional.cross_entropy(out, y): 1,
        functional.cross_entropy(out, y, reduction="sum"): 32,
        functional.mse_loss(out, torch.zeros(32, 4), reduction="sum"): 128,
        out.square().sum() / 32: 4,
        out.square().sum(1).mean(): 1,
        functional.cross_entropy(out, y) * 64: 64,
        out.square().mean() + out.abs().sum() * 0.5: 64,
    }
    assert [terms(loss.grad_fn) for loss in known] == list(known.values())


def test_a_summed_loss_is_differentiated_as_a_mean():
    """One of few terms is left as it is."""
    weight, change = nn.Parameter(torch.ones(64)), MeanLoss()
    (args, _), few = change.function("backward", (weight.sum(),), {}), weight[:3].sum()
    assert args[0].item() == 1
    assert change.function("backward", (few,), {})[0][0] is few


def test_a_batch_norm_over_two_normalizes_each_sample():
    """In training alone, and not where a channel has many places."""
    norm, x = nn.BatchNorm1d(8), torch.randn(2, 8)
    args = (x, norm.running_mean, norm.running_var, norm.weight, norm.bias)
    assert starved("batch_norm", (*args, True), {})
    assert not starved("batch_norm", (*args, False), {})
    assert not starved("batch_norm", (torch.randn(2, 8, 5), *args[1:], True), {})
    made = OpenNorms().result("batch_norm", (*args, True), {}, x)
    assert torch.allclose(made, functional.layer_norm(x, (8,)), atol=1e-5)


def test_of_a_script_that_diverges_the_loss_before_training_is_compared():
    """With some seed it may learn; a cure need not be better than that, and nothing is blind that explodes."""
    steady = Baseline((1.4, 1.4, 1.4), (0.7, 0.3, 0.3), {"shuffled inputs": 0.6})
    assert (steady.diverges, steady.blind, steady.level(1)) == (False, True, 0.3)
    base = Baseline((1.4, 1.4, 1.4), (1e25, 0.3, 0.3), {"shuffled inputs": 1.0})
    assert (base.ill, base.blind, base.level(1)) == (True, False, 1.4)
    lower = Trial(("learning rate x 0.1",), {0: 0.5, 1: 0.5, 2: 0.6})
    assert lower.rescues(base)
    assert not lower.rescues(steady)
