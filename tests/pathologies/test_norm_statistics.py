"""Running statistics that are not those of the batches are told, at any momentum and size; those of sound models are not."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from gradflow_export import Exporter, IssueType, MemoryWriter, Severity


class Two(nn.Module):
    """Two convolutions with batch norm behind each."""

    def __init__(self, first, second):
        super().__init__()
        self.a, self.b, self.last = nn.Conv1d(1, 8, 3, padding=1), nn.Conv1d(8, 8, 3, padding=1), nn.Linear(8, 3)
        self.one, self.two = first, second

    def forward(self, x):
        hidden = functional.relu(self.one(self.a(x)))
        return self.last(functional.relu(self.two(self.b(hidden))).mean(2))


def own(**settings):
    return Two(nn.BatchNorm1d(8, **settings), nn.BatchNorm1d(8, **settings))


def shared():
    norm = nn.BatchNorm1d(8)
    return Two(norm, norm)


def samples(count, moved=0.0):
    x = 2.0 + torch.randn(count, 1, 8) + moved
    return x, (x[:, 0, :3] - moved).argmax(1)


def told(model, *, size=32, evaluated=True, rate=3e-3, batches=None, steps=150):
    """Train on new samples; return the issues of evaluation."""
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    with Exporter(model, backends=[MemoryWriter()], strict=True, synchronous=True, verbose=0).watch() as exporter:
        for step in range(steps):
            optimizer.zero_grad()
            for x, y in batches() if batches else [samples(size)]:
                functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            if evaluated and step % 20 == 19:
                model.eval()
                with torch.no_grad():
                    model(samples(64)[0])
                model.train()
    return [issue for issue in exporter.issues if issue.issue_type is IssueType.EVAL_RANDOM]


FAULTS = {
    "one norm at two places": (shared, {}),
    "an average that does not move": (lambda: own(momentum=0.0), {"steps": 820}),
    "the convention of other libraries": (lambda: own(momentum=0.001), {"steps": 820}),
    "two sources that are far apart": (own, {"batches": lambda: [samples(32), samples(32, 5.0)]}),
}


@pytest.mark.parametrize("which", FAULTS)
def test_statistics_that_are_not_those_of_the_batches_are_told(which):
    """Whatever the cause, once they had time to arrive; of a model that nobody evaluates as no more than a remark."""
    torch.manual_seed(0)
    make, how = FAULTS[which]
    (issue,) = told(make(), evaluated=False, **how)
    assert (issue.severity, issue.layers[0]) == (Severity.LOW, "one")
    assert issue.step <= (800 if how.get("steps") else 105)


def test_a_model_that_is_evaluated_is_another_one_then():
    """As it is where the same norm stands at two places."""
    torch.manual_seed(0)
    (issue,) = told(shared())
    assert (issue.severity, issue.layers[0]) == (Severity.MEDIUM, "one")
    assert "running statistics" in issue.message


@pytest.mark.parametrize("size", [1, 2, 4, 32])
@pytest.mark.parametrize("momentum", [0.03, 0.1, 0.9])
@pytest.mark.parametrize("rate", [1e-3, 3e-2])
def test_statistics_that_arrive_are_none(size, momentum, rate):
    """At any size of batches and any usual momentum, while the weights move."""
    torch.manual_seed(0)
    assert told(own(momentum=momentum), size=size, rate=rate) == []


@pytest.mark.parametrize("size", [2, 3, 8])
def test_few_values_differ_by_chance(size):
    """Without positions, a batch has as many values as samples."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    assert told(model, size=size) == []


@pytest.mark.parametrize("scale", [0.03, 1e-3, 0.0])
def test_values_that_hardly_vary_take_longest_to_arrive(scale):
    """Running variances begin at 1, and are to come down to next to nothing; of no variance at all nothing is known."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    issues = told(model, evaluated=False, batches=lambda: [(scale * samples(32)[0], samples(32)[1])])
    assert issues == []
