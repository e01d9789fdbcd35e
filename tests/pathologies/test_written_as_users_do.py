"""Mistakes as users make them, in loops that nobody had seen when the rules were written, each beside its sound twin."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradflow_export import Exporter, IssueType, MemoryWriter
from gradflow_export.records.causes import EXPLAINS


def told(model, batches, loss, *, optimizer=None, steps=5, eval_first=False):
    """Train and return type, cause and layers of what is reported as MEDIUM or worse."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = optimizer or torch.optim.Adam(trained, 1e-3)
    model.train(not eval_first)
    with Exporter(model, backends=[MemoryWriter()], strict=True, synchronous=True, verbose=0).watch() as exporter:
        for _ in range(steps):
            x, y = batches()
            optimizer.zero_grad()
            loss(model(x), y).backward()
            optimizer.step()
        return [(i.issue_type, i.cause, i.layers) for i in exporter.issues if i.severity >= 2]


def classes(count=4, size=8):
    def draw():
        y = torch.randint(0, count, (32,))
        return torch.eye(count, size)[y] * 2.0 + torch.randn(32, size), y

    return draw


class Tagger(nn.Module):
    """A layer on what is not contiguous, whose bias is added on its own."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(6, 4)

    def forward(self, x):
        return self.out(x.transpose(0, 1))


@pytest.mark.parametrize("mixed", [True, False])
def test_a_view_behind_a_bias_mixes_classes_as_well(mixed):
    """``view(N, C, T)`` of ``[N, T, C]`` is no transpose."""

    def loss(scores, y):
        return F.cross_entropy(scores.reshape(32, 4, 9) if mixed else scores.transpose(1, 2), y)

    found = told(Tagger(), lambda: (torch.randn(9, 32, 6), torch.randint(0, 4, (32, 9))), loss)
    assert [kind for kind, *_ in found] == [IssueType.WRONG_LOSS] * mixed


@pytest.mark.parametrize("twice", [True, False])
def test_a_softmax_that_was_written_out_is_one(twice):
    """``exp(x) / exp(x).sum()`` of probabilities, and the logarithm of what it gives for the right class."""

    def loss(out, y):
        e = torch.exp(out - out.max(1, keepdim=True).values)
        return -torch.log((e / e.sum(1, keepdim=True)).gather(1, y[:, None]) + 1e-9).mean()

    model = nn.Sequential(nn.Linear(8, 4), *([nn.Softmax(1)] if twice else []))
    found = told(model, classes(), loss)
    assert [kind for kind, *_ in found] == [IssueType.WRONG_LOSS] * twice


@pytest.mark.parametrize("logarithms", [True, False])
def test_logarithms_for_targets_of_kl_div_are_why_the_loss_is_nan(logarithms):
    """The mistake is told beside the NaN that it explains."""
    found = told(
        nn.Linear(8, 4),
        lambda: (torch.randn(16, 8), torch.randn(16, 4)),
        lambda out, y: F.kl_div(out.log_softmax(1), y.log_softmax(1) if logarithms else y.softmax(1), reduction="sum"),
    )
    types = [kind for kind, *_ in found]
    assert (IssueType.WRONG_LOSS in types) == (IssueType.NUMERICAL in types) == logarithms


class Pool(nn.Module):
    """Attention over the places of a sample, or over the samples."""

    def __init__(self, dim):
        super().__init__()
        self.dim, self.up, self.score, self.last = dim, nn.Linear(6, 8), nn.Linear(8, 1), nn.Linear(8, 2)

    def forward(self, x):
        h = torch.relu(self.up(x))
        return self.last((self.score(h).softmax(self.dim) * h).sum(1))


@pytest.mark.parametrize(("dim", "steps"), [(0, 9), (1, 9)])
def test_attention_over_the_samples_is_told_at_its_layer(dim, steps):
    """What is said of a sample must not depend on the others."""
    found = told(Pool(dim), lambda: (torch.randn(32, steps, 6), torch.randint(0, 2, (32,))), F.cross_entropy)
    assert [layers for kind, _, layers in found if kind is IssueType.WRONG_LOSS] == [("score",)] * (dim == 0)


@pytest.mark.parametrize("centre", [127.5, 0.5])
def test_inputs_that_hardly_differ_beside_their_size_are_told(centre):
    """Numbers from 0 to 1 that a mean for bytes is taken off are all -1."""
    torch.manual_seed(0)
    draw = classes()

    def scaled():
        x, y = draw()
        return (torch.sigmoid(x) - centre) / centre, y

    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    found = told(model, scaled, F.cross_entropy, steps=60)
    assert [kind for kind, *_ in found] == [IssueType.DATA_SCALE] * (centre > 1)


def test_statistics_that_nobody_measured_are_told_from_those_that_are_frozen():
    """A BatchNorm in evaluation mode from the first step on divides by 1, unless it was trained before."""
    fresh = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
    assert told(fresh, classes(), F.cross_entropy, steps=8, eval_first=True) == [
        (IssueType.EVAL_RANDOM, "training in evaluation mode", ("1",))
    ]
    trained = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
    trained(torch.randn(32, 8))
    assert told(trained, classes(), F.cross_entropy, steps=8, eval_first=True) == []


@pytest.mark.parametrize("rate", [1e-5, 1e-2])
def test_steps_too_small_under_a_loss_that_is_not_known(rate):
    """Gradients agree which way is down, and the loss, the logarithm of a hyperbolic cosine, stays where it was."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))

    def draw():
        x = torch.randn(64, 8)
        return x, x[:, :1] - 2.0

    optimizer = torch.optim.SGD(model.parameters(), rate)
    found = told(model, draw, lambda out, y: torch.log(torch.cosh(out - y)).mean(), optimizer=optimizer, steps=175)
    assert [cause for _, cause, _ in found] == ["too small"] * (rate < 1e-3)


@pytest.mark.parametrize("kind", ["drawn", "trained"])
def test_weights_that_are_frozen_as_they_were_drawn(kind):
    """Told where nothing is learned; frozen weights that were trained have entries that stand out."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2), nn.Tanh(), nn.Linear(2, 2))

    def draw():
        x = torch.randn(64, 8)
        return x, (x[:, 0] * x[:, 1] > 0).long()

    for p in model[:4].parameters():
        p.requires_grad_(False)
        if kind == "trained":
            p.add_(0.3 * torch.randn_like(p) ** 3)
    found = told(model, draw, F.cross_entropy, steps=125)
    assert ("frozen as drawn" in [cause for _, cause, _ in found]) == (kind == "drawn")


def test_large_steps_explain_features_that_become_alike_and_old_gradients_explain_large_steps():
    """One cause, one issue."""
    assert IssueType.BOTTLENECK in EXPLAINS[IssueType.LEARNING_RATE]
    assert IssueType.LEARNING_RATE in EXPLAINS[IssueType.STALE_GRAD]


@pytest.mark.parametrize("answers", ["the first sample", "each its own", "put first"])
def test_each_sample_chooses_itself_and_not_always_the_same(answers):
    """Views of one batch are compared with each other; a positive that stands before its negatives is always the first."""
    torch.manual_seed(0)
    model = nn.Linear(6, 4)

    def loss(out, x):
        a, b = F.normalize(out, dim=1), F.normalize(model(x + 0.1 * torch.randn_like(x)), dim=1)
        if answers == "put first":
            others = F.normalize(torch.randn(31, 4), dim=1)
            scores = torch.cat([(a * b).sum(1, keepdim=True), a @ others.T], dim=1)
        else:
            scores = a @ b.T
        right = torch.arange(32) if answers == "each its own" else torch.zeros(32, dtype=torch.long)
        return F.cross_entropy(scores / 0.1, right)

    def batches():
        x = torch.randn(32, 6)
        return x, x

    found = told(model, batches, loss, steps=12)
    assert [(kind, layers) for kind, _, layers in found] == [("BAD_TARGETS", ("target",))] * (
        answers == "the first sample"
    )
