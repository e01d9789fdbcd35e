"""A learning rate that is far too large is LEARNING_RATE, whatever comes of it: overflow, dead units, a plateau."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradflow_export import Exporter, IssueType
from gradflow_export.records.causes import groups
from gradflow_export.records.issues import Severity


def causes(optimizer, seed, *, act=nn.ReLU, scale=1.0, steps=120):
    """Return the open issues that no other explains, of a classifier of four clusters in eight dimensions."""
    torch.manual_seed(seed)
    widths = [8, 48, 48, 48]
    layers = [each for a, b in itertools.pairwise(widths) for each in (nn.Linear(a, b), act())]
    model, data = nn.Sequential(*layers, nn.Linear(48, 4)), torch.Generator().manual_seed(seed)
    steps_of, centres = optimizer(model.parameters()), scale * torch.randn(4, 8, generator=data)
    with Exporter(model, backends=[], verbose=0, strict=True, synchronous=True).watch() as exporter:
        for _ in range(steps):
            y = torch.randint(4, (32,), generator=data)
            x = centres[y] + 0.7 * torch.randn(32, 8, generator=data)
            steps_of.zero_grad()
            F.cross_entropy(model(x), y).backward()
            steps_of.step()
    return [g.head for g in groups(exporter.issues) if g.head.open and g.head.severity >= Severity.MEDIUM]


@pytest.mark.parametrize("seed", [0, 2])
@pytest.mark.parametrize("act", [nn.ReLU, nn.GELU])
@pytest.mark.parametrize("rate", [50.0, 1000.0])
def test_descent_that_overflows(rate, act, seed):
    """Within some tens of steps or a few: the explosion and the NaN are what the rate did."""
    (issue,) = causes(lambda p: torch.optim.SGD(p, rate), seed, act=act, steps=60)
    assert issue.issue_type is IssueType.LEARNING_RATE
    assert issue.step <= 4


@pytest.mark.parametrize("seed", [0, 2])
@pytest.mark.parametrize("rate", [1.0, 3.0])
def test_adam_that_leaps_over_everything(rate, seed):
    """The loss is a thousand times as high after the first step, comes down, and what the units are dead of is named."""
    (issue,) = causes(lambda p: torch.optim.Adam(p, rate), seed)
    assert issue.issue_type is IssueType.LEARNING_RATE
    assert issue.severity is Severity.HIGH


@pytest.mark.parametrize("seed", [0, 2])
@pytest.mark.parametrize(
    "optimizer",
    [
        lambda p: torch.optim.Adam(p, 3e-2),
        lambda p: torch.optim.SGD(p, 0.3),
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
        lambda p: torch.optim.RMSprop(p, 3e-3),
    ],
    ids=["Adam", "SGD", "momentum", "RMSprop"],
)
def test_rates_that_learn_are_not_reported(optimizer, seed):
    """However high the loss was in the first steps: it is low after them."""
    assert not causes(optimizer, seed)
