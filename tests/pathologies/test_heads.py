"""Targets are judged whatever stands between the last layer and the loss."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradflow_export import Exporter, IssueType, MemoryWriter


class Own(nn.Module):
    """Numbers of the model's own behind the last layer."""

    def __init__(self, how):
        super().__init__()
        self.how, self.factor, self.weight = how, nn.Parameter(torch.ones(4)), nn.Parameter(0.3 * torch.randn(4, 4))

    def forward(self, h):
        return {
            "scaled": lambda: h * self.factor,
            "shifted": lambda: h + self.factor,
            "a product": lambda: h.tanh() @ self.weight + self.factor,
            "a temperature": lambda: h / 2.0,
            "a range": lambda: 3.0 * torch.tanh(h),
            "limited": lambda: h.clamp(-8.0, 8.0),
        }[self.how]()


class Steps(nn.Module):
    """The outputs of a recurrent layer are not contiguous, and a layer adds its bias by itself."""

    def __init__(self):
        super().__init__()
        self.read, self.last = nn.GRU(20, 12, batch_first=True), nn.Linear(12, 4)

    def forward(self, x):
        return self.last(self.read(x[:, None].expand(-1, 3, -1))[0])[:, -1]


class Sum(nn.Module):
    """Of a part for the rule and one for the exception: a layer, or a number of each of some things."""

    def __init__(self, second):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), second

    def forward(self, h):
        return self.first(h) + self.second(h if isinstance(self.second, nn.Linear) else h.argmax(1))


HEADS = {
    how: lambda how=how: Own(how) for how in ("scaled", "shifted", "a product", "a temperature", "a range", "limited")
}
HEADS |= {
    "a norm": lambda: nn.LayerNorm(4),
    "a batch norm": lambda: nn.BatchNorm1d(4),
    "dropout": lambda: nn.Dropout(0.1),
    "a sum of layers": lambda: Sum(nn.Linear(4, 4)),
    "a sum with a table": lambda: Sum(nn.Embedding(4, 4)),
}
NAMES = [*HEADS, "steps"]
DATA = {IssueType.BAD_TARGETS, IssueType.LEAKAGE}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def types(name, loss, target, steps=30, kinds=DATA):
    """Train with targets that follow from the inputs in some way; return what is wrong with the data."""
    body = nn.Sequential(nn.Linear(20, 24), nn.ReLU(), nn.Linear(24, 4))
    model = Steps() if name == "steps" else nn.Sequential(body, HEADS[name]())
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    with Exporter(model, backends=[MemoryWriter()], strict=True).watch() as exporter:
        for _ in range(steps):
            x = torch.randn(32, 20)
            optimizer.zero_grad()
            loss(model(x), target(x)).backward()
            optimizer.step()
    return {issue.issue_type for issue in exporter.issues} & kinds


@pytest.mark.parametrize("name", NAMES)
def test_targets_of_one_class_are_told(name):
    """All targets are the same, step after step; those that the inputs tell are in order."""
    assert types(name, F.cross_entropy, lambda x: torch.zeros(32, dtype=torch.long)) == {IssueType.BAD_TARGETS}
    assert types(name, F.cross_entropy, lambda x: x[:, :4].argmax(1)) == set()


@pytest.mark.parametrize("name", [name for name in NAMES if name != "a batch norm"])
def test_a_target_among_the_inputs_is_told(name):
    """One of several numbers; a product of two inputs is in order."""

    def leaked(x):
        return torch.stack([x[:, 3], x[:, 0] * x[:, 1], x[:, 1] * x[:, 2], x[:, 2] * x[:, 4]], 1)

    assert types(name, F.mse_loss, leaked) == {IssueType.LEAKAGE}
    assert types(name, F.mse_loss, lambda x: leaked(x)[:, [1, 1, 2, 3]]) == set()


@pytest.mark.parametrize("name", NAMES)
def test_targets_averaged_over_the_batch_are_told(name):
    """They are one row that differs from batch to batch, be it in one column; a target of each sample is in order."""

    def mean(x):
        return torch.cat([torch.ones(32, 3), x[:, :1].mean().expand(32, 1).tanh()], dim=1)

    def own(x):
        return torch.cat([torch.ones(32, 3), x[:, :1].tanh()], dim=1)

    for targets, told in ((mean, {IssueType.WRONG_LOSS}), (own, set())):
        assert types(name, F.mse_loss, targets, steps=60, kinds={IssueType.WRONG_LOSS}) == told
