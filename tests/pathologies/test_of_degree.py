"""Numbers that are far off: the scale of the scores, the share that dropout leaves; each beside a usual one."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradflow_export import Exporter, IssueType, MemoryWriter
from gradflow_export.records.issues import Severity


class Scorer(nn.Module):
    """Scores of classes with a factor on them, behind dropout."""

    def __init__(self, factor=1.0, dropout=0.1, classes=6):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Dropout(dropout), nn.Linear(64, 64), nn.ReLU())
        self.drop, self.head, self.factor = nn.Dropout(dropout), nn.Linear(64, classes), factor

    def forward(self, x):
        return self.head(self.drop(self.body(x))) * self.factor


def found(model, seed, steps, loss=F.cross_entropy, rare=False):
    """Train on classes that depend on the inputs; return type, cause and severity of what is found."""
    torch.manual_seed(seed)
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            layer.reset_parameters()
    first, second = torch.randn(20, 24) / 3, torch.randn(24, 6)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    with Exporter(model, backends=[MemoryWriter()], strict=True).watch() as exporter:
        for _ in range(steps):
            x = torch.randn(64, 20)
            y = (torch.tanh(x @ first) @ second).argmax(1)
            if rare:
                y = torch.where(torch.rand(64) < 0.97, 0, y)
            optimizer.zero_grad()
            loss(model(x), y).backward()
            optimizer.step()
    return {(issue.issue_type, issue.cause, issue.severity) for issue in exporter.issues}


SURE = (IssueType.BAD_INIT, "too large", Severity.MEDIUM)


@pytest.mark.parametrize("seed", [0, 2])
@pytest.mark.parametrize("factor", [1000.0, 1.0])
def test_scores_that_begin_far_apart_are_told_whatever_made_them_so(seed, factor):
    """No weight is large: a factor alone makes the first answers sure."""
    assert (SURE in found(Scorer(factor), seed, 60)) == (factor > 1.0)


def test_a_class_that_nearly_all_samples_have_makes_no_answer_sure():
    """The best constant prediction is then far better than equal probabilities, with which every model begins."""
    assert SURE not in found(Scorer(), 0, 60, rare=True)


def test_a_margin_loss_is_no_logarithm():
    """Equal scores cost as much as there are other classes."""
    assert SURE not in found(Scorer(classes=40), 0, 60, F.multi_margin_loss)


@pytest.mark.parametrize("seed", [0, 2])
@pytest.mark.parametrize("dropout", [0.95, 0.85, 0.7, 0.3])
def test_noise_that_shrinks_is_nothing_learned(seed, dropout):
    """Down to the loss of a constant prediction the answers only become smaller, and the noise in them with it."""
    issues = found(Scorer(dropout=dropout), seed, 300)
    told = {(kind, severity) for kind, _, severity in issues}
    assert (IssueType.NOT_LEARNING, Severity.MEDIUM) in told if dropout > 0.8 else not told
