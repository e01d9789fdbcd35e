"""Mistakes of loss and data that throw no error, each beside its mended twin, seen by ``watch()`` alone."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradflow_export import Exporter, IssueType, MemoryWriter
from gradflow_export.checks.not_learning import NotLearning
from gradflow_export.checks.unrelated_targets import UnrelatedTargets
from gradflow_export.checks.wrong_loss import WrongLoss
from gradflow_export.records.evidence import evidence_of
from gradflow_export.records.step_record import Reading, StepRecord
from gradflow_export.rules.judge import Judge

KINDS = {
    IssueType.WRONG_LOSS, IssueType.DATA_SCALE, IssueType.BAD_TARGETS, IssueType.CAPACITY, IssueType.NOT_LEARNING,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def mlp(*widths, last=None):
    layers = []
    for a, b in itertools.pairwise(widths):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1], *([last] if last is not None else []))


def issues(model, loss, *, steps=12, lr=1e-2, data=None, kinds=KINDS):
    """Train on fresh batches; return the issues of the given types."""
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    with Exporter(model, backends=[MemoryWriter()], strict=True).watch() as exporter:
        for _ in range(steps):
            x, y = data() if data is not None else blobs()
            optimizer.zero_grad()
            loss(model(x), y).backward()
            optimizer.step()
    return [issue for issue in exporter.issues if issue.issue_type in kinds]


def blobs(n=48):
    """Three classes, easily told apart."""
    y = torch.randint(3, (n,))
    return torch.randn(n, 6) + 2.0 * F.one_hot(y, 6), y


def plane(n=48):
    x = torch.randn(n, 6)
    return x, x[:, 0] - 0.5 * x[:, 1]


def binary(n=48):
    x, y = plane(n)
    return x, (y > 0).float().unsqueeze(1)


def squared(out, y):
    return F.mse_loss(out.squeeze(1), y)


def by_hand(out, y):
    return ((out - y) ** 2).mean()


def quantiles(out, y):
    """Return the loss of three quantiles of one number."""
    error, share = y[:, None] - out, torch.tensor([0.1, 0.5, 0.9])
    return (0.5 * error.abs() + (share - 0.5) * error).mean()


def quantile_pairs(out, y):
    """Return how far each of three quantiles of a sample is from each of three others."""
    said, wanted = torch.broadcast_tensors(out[:, :, None], (y[:, None] + torch.tensor([-1.0, 0.0, 1.0]))[:, None, :])
    return F.huber_loss(said, wanted, reduction="none").mean()


def chosen(p, y):
    return -torch.log(p.gather(1, y[:, None]) + 1e-8).mean()


def shares(p, y):
    return -(y * torch.log(p + 1e-7) + (1 - y) * torch.log(1 - p + 1e-7)).mean()


def signed(out, y):
    """Return scores, and labels of -1 and 1."""
    return out.squeeze(1), 2.0 * y.squeeze(1) - 1.0


def labelled(out, y):
    """Cross-entropy of one or two labels a sample."""
    return F.cross_entropy(out, torch.stack([y == 0, y < 2, y > 0], 1).float())


def aligned(scores):
    """The loss of sequences of three, from scores of eight frames each."""
    counts = [torch.full((6,), n) for n in (8, 2)]
    return F.ctc_loss(scores.view(6, 8, 3).transpose(0, 1), torch.ones(6, 2, dtype=torch.long), *counts)


def reshaped(out, y, *, right):
    """Classes of [samples, classes] brought to [2, samples / 2, classes] and then to [2, classes, samples / 2]."""
    out = out.view(2, -1, 3)
    out = out.transpose(1, 2) if right else out.view(2, 3, -1)
    return F.cross_entropy(out, y.view(2, -1))


WRONG = {
    "softmax before cross-entropy": ((6, 16, 3), nn.Softmax(dim=1), F.cross_entropy, blobs),
    "sigmoid before cross-entropy": ((6, 16, 3), nn.Sigmoid(), F.cross_entropy, blobs),
    "tanh before cross-entropy": ((6, 16, 3), nn.Tanh(), F.cross_entropy, blobs),
    "probabilities given to nll_loss": ((6, 16, 3), nn.Softmax(dim=1), F.nll_loss, blobs),
    "logits given to nll_loss": ((6, 16, 3), None, F.nll_loss, blobs),
    "log-softmax over the batch": ((6, 16, 3), nn.LogSoftmax(dim=0), F.nll_loss, blobs),
    "sigmoid before BCE with logits": ((6, 16, 1), nn.Sigmoid(), F.binary_cross_entropy_with_logits, binary),
    "ReLU before BCE with logits": ((6, 16, 1), nn.ReLU(), F.binary_cross_entropy_with_logits, binary),
    "BCE with logits swapped": (
        (6, 16, 1), None, lambda out, y: F.binary_cross_entropy_with_logits(y, out), binary,
    ),
    "BCE swapped": (
        (6, 16, 1), nn.Sigmoid(), lambda out, y: F.binary_cross_entropy(0.05 + 0.9 * y, out), binary,
    ),
    "softmax of one": ((6, 16, 1), nn.Softmax(dim=1), F.binary_cross_entropy, binary),
    "cross-entropy of one": ((6, 16, 1), None, F.cross_entropy, binary),
    "broadcast": ((6, 16, 1), None, F.mse_loss, plane),
    "broadcast by hand": ((6, 16, 1), None, by_hand, plane),
    "broadcast L1": ((6, 16, 1), None, F.l1_loss, plane),
    "one number for all outputs": ((6, 16, 3), None, lambda out, y: F.mse_loss(out, y[:, None]), plane),
    "one number for all outputs by hand": ((6, 16, 3), None, lambda out, y: by_hand(y[:, None], out), plane),
    "ReLU cannot reach": ((6, 16, 1), nn.ReLU(), squared, plane),
    "sigmoid cannot reach": ((6, 16, 1), nn.Sigmoid(), squared, plane),
    "softmax of a softmax": (
        (6, 16, 3), nn.Softmax(dim=1), lambda out, y: chosen(out.softmax(1), y), blobs,
    ),
    "log of a softmax of a softmax": (
        (6, 16, 3), nn.Softmax(dim=1), lambda out, y: F.nll_loss(out.softmax(1).log(), y), blobs,
    ),
    "logarithm given to cross-entropy after two": (
        (6, 16, 3), nn.Softmax(dim=1), lambda out, y: F.cross_entropy((out.softmax(1) + 1e-6).log(), y), blobs,
    ),
    "sigmoid of a sigmoid": (
        (6, 16, 1), nn.Sigmoid(), lambda out, y: F.binary_cross_entropy(out.sigmoid(), y), binary,
    ),
    "sigmoid of a sigmoid by hand": ((6, 16, 1), nn.Sigmoid(), lambda out, y: shares(out.sigmoid(), y), binary),
    "shares broadcast by hand": ((6, 16, 1), nn.Sigmoid(), lambda out, y: shares(out, y.squeeze(1)), binary),
    "classes of several samples": ((6, 16, 3), None, lambda out, y: reshaped(out, y, right=False), blobs),
    "sigmoid of one column of two": (
        (6, 16, 2), nn.Softmax(dim=1), lambda out, y: shares(out[:, 1:].sigmoid(), y), binary,
    ),
    "column of a softmax given to BCE with logits": (
        (6, 16, 2), nn.Softmax(dim=1), lambda out, y: F.binary_cross_entropy_with_logits(out[:, 1], y[:, 0]), binary,
    ),
    "logits broadcast by hand": (
        (6, 16, 1), None, lambda out, y: (F.softplus(out) - y[:, 0] * out).mean(), binary,
    ),
    "softmax over positions": (
        (6, 16, 3), None, lambda out, y: F.nll_loss(out.view(6, 8, 3).log_softmax(1).view(-1, 3), y), blobs,
    ),
    "cross-entropy of shares over positions": (
        (6, 16, 3), None, lambda out, y: F.cross_entropy(out.view(6, 8, 3), F.one_hot(y, 3).view(6, 8, 3).float()), blobs,
    ),
    "kl_div of a softmax of a softmax": (
        (6, 16, 3), nn.Softmax(dim=1),
        lambda out, y: F.kl_div(out.log_softmax(1), F.one_hot(y, 3) * 0.8 + 0.05, reduction="batchmean"), blobs,
    ),
    "hinge of 0 and 1": (
        (6, 16, 1), None, lambda out, y: torch.clamp(1 - y * out, min=0).mean(), binary,
    ),
    "squared hinge of 0 and 1": ((6, 16, 1), None, lambda out, y: F.relu(1 - out * y).square().mean(), binary),
    "soft margin of 0 and 1": ((6, 16, 1), None, F.soft_margin_loss, binary),
    "hinge of distances of 0 and 1": ((6, 16, 1), None, F.hinge_embedding_loss, binary),
    "ranking of 0 and 1": ((6, 16, 1), None, lambda out, y: F.margin_ranking_loss(out, -out, y, margin=0.1), binary),
    "several labels": ((6, 16, 3), None, labelled, blobs),
    "several labels for the shares of a softmax": (
        (6, 16, 3), nn.Softmax(dim=1),
        lambda out, y: F.binary_cross_entropy(out, torch.stack([y == 0, y < 2, y > 0], 1).float()), blobs,
    ),
    "scores given to ctc_loss": ((6, 16, 3), None, lambda out, _: aligned(out), blobs),
    "probabilities given to ctc_loss": ((6, 16, 3), nn.Softmax(dim=1), lambda out, _: aligned(out), blobs),
    "probabilities given to kl_div": (
        (6, 16, 3), nn.Softmax(dim=1), lambda out, y: F.kl_div(out, F.one_hot(y, 3).float(), reduction="batchmean"),
        blobs,
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("name", WRONG)
def test_wrong_loss_is_told_within_a_dozen_steps(name):
    """Each loss that does not suit what it is given is WRONG_LOSS, at the loss, and nothing else."""
    widths, last, loss, data = WRONG[name]
    found = issues(mlp(*widths, last=last), loss, data=data)
    assert [(issue.issue_type, issue.layer) for issue in found] == [(IssueType.WRONG_LOSS, "loss")]
    assert found[0].step <= 2
    assert "(" in found[0].advice


def test_targets_outside_shares_are_told_at_the_target():
    """Masks of 0 and 255 in a binary cross-entropy are WRONG_LOSS, at the target."""

    def masks():
        x, y = binary()
        return x, 255 * y

    found = issues(mlp(6, 16, 1), F.binary_cross_entropy_with_logits, data=masks)
    assert [(issue.issue_type, issue.layer) for issue in found] == [(IssueType.WRONG_LOSS, "target")]


RIGHT = {
    "logits": ((6, 16, 3), None, F.cross_entropy, blobs),
    "log-probabilities into cross-entropy": ((6, 16, 3), nn.LogSoftmax(dim=1), F.cross_entropy, blobs),
    "log-softmax and nll": ((6, 16, 3), nn.LogSoftmax(dim=1), F.nll_loss, blobs),
    "smoothed": ((6, 16, 3), None, lambda out, y: F.cross_entropy(out, y, label_smoothing=0.1), blobs),
    "class probabilities": ((6, 16, 3), None, lambda out, y: F.cross_entropy(out, F.one_hot(y, 3).float()), blobs),
    "one-hot BCE": (
        (6, 16, 3), None, lambda out, y: F.binary_cross_entropy_with_logits(out, F.one_hot(y, 3).float()), blobs,
    ),
    "sigmoid and BCE": ((6, 16, 1), nn.Sigmoid(), F.binary_cross_entropy, binary),
    "kl_div": (
        (6, 16, 3), nn.LogSoftmax(dim=1),
        lambda out, y: F.kl_div(out, F.one_hot(y, 3).float(), reduction="batchmean"), blobs,
    ),
    "hinge": ((6, 16, 1), None, lambda out, y: (1 - torch.mul(*signed(out, y))).clamp(min=0).mean(), binary),
    "soft margin": ((6, 16, 1), None, lambda out, y: F.soft_margin_loss(*signed(out, y)), binary),
    "hinge of distances": ((6, 16, 1), None, lambda out, y: F.hinge_embedding_loss(*signed(out, y)), binary),
    "ranking": (
        (6, 16, 1), None, lambda out, y: F.margin_ranking_loss(out, -out, signed(out, y)[1][:, None], margin=0.1), binary,
    ),
    "contrast of pairs": (
        (6, 16, 1), None, lambda out, y: (y * out.square() + (1 - y) * F.relu(1 - out).square()).mean(), binary,
    ),
    "ctc_loss": ((6, 16, 3), nn.LogSoftmax(dim=1), lambda out, _: aligned(out), blobs),
    "words of a text": (
        (3, 16, 3), None, lambda out, y: -(out.log_softmax(1) * y).sum(1).mean(), lambda: 2 * ((torch.rand(48, 3) > 0.3).float(),),
    ),
    "one label with a weight": (
        (6, 16, 3), None, lambda out, y: F.cross_entropy(out, F.one_hot(y, 3) * torch.tensor([0.5, 2.0, 3.0])), blobs,
    ),
    "classes moved": ((6, 16, 3), None, lambda out, y: reshaped(out, y, right=True), blobs),
    "classes in the last dimension": (
        (6, 16, 3), None, lambda out, y: F.nll_loss(out.view(6, 8, 3).log_softmax(2).view(-1, 3), y), blobs,
    ),
    "choice among products": (
        (6, 16, 3), None, lambda out, y: F.cross_entropy(out.view(16, 3, 3) @ out.view(16, 3, 3), y.view(16, 3)), blobs,
    ),
    "several questions of one layer": (
        (6, 16, 4), None, lambda out, y: F.cross_entropy(out.view(48, 2, 2), torch.stack([y > 0, y > 1], 1).long()), blobs,
    ),
    "column of pairs": ((6, 16, 1), None, lambda out, y: squared(out, y) + (out.squeeze(1)[:, None] * y).mean() ** 2, plane),
    "chosen probabilities": ((6, 16, 3), nn.Softmax(dim=1), chosen, blobs),
    "logarithm given to cross-entropy": (
        (6, 16, 3), nn.Softmax(dim=1), lambda out, y: F.cross_entropy(torch.log(out), y), blobs,
    ),
    "shares by hand": ((6, 16, 1), nn.Sigmoid(), shares, binary),
    "choice of a position": (
        (1, 16, 1), None, lambda out, y: F.cross_entropy(out.view(6, 8), y[:6]), lambda: (torch.randn(48, 1), blobs()[1]),
    ),
    "regression": ((6, 16, 1), None, squared, plane),
    "regression by hand": ((6, 16, 1), None, lambda out, y: by_hand(out.squeeze(1), y), plane),
    "sigmoid that reaches": ((6, 16, 1), nn.Sigmoid(), lambda out, y: squared(out, y.sigmoid()), plane),
    "one target for all": ((6, 16, 1), None, lambda out, y: F.mse_loss(out, torch.zeros(1).expand_as(out)), plane),
    "quantiles of quantiles": ((6, 16, 3), None, quantile_pairs, plane),
    "quantiles": ((6, 16, 3), None, quantiles, plane),
    "the output that is meant": ((6, 16, 3), None, lambda out, y: by_hand(out.gather(1, (y[:, None] > 0).long()), y[:, None]), plane),
    "a column each": ((6, 16, 3), None, lambda out, y: by_hand(out, y[:, None] * torch.tensor([1.0, -2.0, 0.5])), plane),
    "pairwise distances": ((6, 16, 1), None, lambda out, y: (out - out.T).square().mean() + squared(out, y), plane),
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_right_losses_are_left_in_peace(name):
    """What comes close to a mistake and is none raises no WRONG_LOSS."""
    widths, last, loss, data = RIGHT[name]
    assert issues(mlp(*widths, last=last), loss, data=data, kinds={IssueType.WRONG_LOSS}) == []


def test_ascending_is_told_only_when_the_loss_has_grown():
    """A loss with a minus is WRONG_LOSS once it has doubled the best constant's."""
    found = issues(mlp(6, 16, 3), lambda out, y: -F.cross_entropy(out, y), steps=40)
    assert [issue.issue_type for issue in found] == [IssueType.WRONG_LOSS]
    assert "minus" in found[0].message


def test_unscaled_features_that_stop_learning_are_data_scale():
    """Features of a size of a thousand, with plain steps, are told at the input; normalised in the model they are not."""

    def data():
        x, y = plane()
        return 1000.0 * x, y

    found = issues(mlp(6, 16, 1), squared, data=data, steps=60)
    assert [(issue.issue_type, issue.layer) for issue in found] == [(IssueType.DATA_SCALE, "input")]
    assert issues(nn.Sequential(nn.BatchNorm1d(6), *mlp(6, 16, 1)), squared, data=data, steps=60) == []


class Sequences(nn.Module):
    """A recurrent layer, or attention, that is or is not told where the batch is."""

    def __init__(self, kind, *, batch_first):
        super().__init__()
        self.kind = kind
        self.read = (
            nn.GRU(4, 4, batch_first=batch_first)
            if kind == "recurrent"
            else nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=batch_first)
        )
        self.last = nn.Linear(4, 3)

    def forward(self, x):
        read = self.read(x)
        return self.last((read[0] if self.kind == "recurrent" else read)[:, -1])


@pytest.mark.parametrize("samples", [2, 4, 6])
def test_steps_put_in_one_row_mix_nothing_though_they_are_as_many_as_features(samples):
    """Each step of each sequence has an answer, and there are as many of them as numbers in each."""
    model = nn.Sequential(nn.Linear(4, 5 * samples), nn.Tanh(), nn.Flatten(0, 1), nn.Linear(5 * samples, 3))

    def clips():
        return torch.randn(samples, 5, 4), torch.randint(3, (samples * 5,))

    assert issues(model, F.cross_entropy, data=clips, kinds={IssueType.WRONG_LOSS}) == []


@pytest.mark.parametrize("kind", ["recurrent", "attention"])
def test_a_batch_that_is_taken_for_time_is_told_at_its_layer(kind):
    """One prediction for each of what the layer takes for steps is NOT_LEARNING; with ``batch_first`` it is none."""

    def clips():
        return torch.randn(12, 5, 4), torch.randint(3, (12,))

    wrong, right = (Sequences(kind, batch_first=first) for first in (False, True))
    (issue,) = issues(wrong, F.cross_entropy, data=clips, kinds={IssueType.NOT_LEARNING})
    assert issue.layer.startswith("read")
    assert issues(right, F.cross_entropy, data=clips, kinds={IssueType.NOT_LEARNING}) == []


def test_one_prediction_for_each_step_of_each_sequence_is_no_mistake():
    """A tagger has as many predictions as steps times sequences, whichever comes first."""
    model = nn.ModuleDict({"read": nn.GRU(4, 4), "last": nn.Linear(4, 3)})
    model.forward = lambda x: model["last"](model["read"](x)[0]).flatten(0, 1)

    def tags():
        return torch.randn(12, 5, 4), torch.randint(3, (60,))

    assert issues(model, F.cross_entropy, data=tags, kinds={IssueType.NOT_LEARNING}) == []


def test_sorted_classes_are_bad_targets_and_rare_ones_are_not():
    """Batches of one class each, of three that are as frequent, are told; batches without a rare class are not."""
    turns = itertools.count()

    def sorted_classes():
        y = torch.full((16,), next(turns) // 4 % 3)
        return torch.randn(16, 6) + F.one_hot(y, 6), y

    def rare():
        y = torch.where(torch.rand(16) < 0.02, torch.randint(1, 3, (16,)), 0)
        return torch.randn(16, 6) + F.one_hot(y, 6), y

    wanted = {IssueType.BAD_TARGETS}
    (issue,) = issues(mlp(6, 16, 3), F.cross_entropy, data=sorted_classes, steps=60, kinds=wanted)
    assert (issue.layer, "sorted" in issue.message) == ("target", True)
    told = issues(mlp(6, 16, 3), F.cross_entropy, data=rare, steps=60, kinds=wanted)
    assert not any("sorted" in issue.message for issue in told)


def test_a_first_state_of_zeros_is_no_input():
    """A recurrent layer of few features is judged by what enters it, not by the state it begins with."""

    class Reader(nn.Module):
        def __init__(self):
            super().__init__()
            self.read, self.last = nn.GRU(1, 24, batch_first=True), nn.Linear(24, 1)

        def forward(self, x):
            return self.last(self.read(x)[0][:, -1])

    def noise():
        return torch.randn(32, 4, 1), torch.randn(32)

    assert issues(Reader(), squared, data=noise, steps=60, lr=1e-4, kinds={IssueType.DATA_SCALE}) == []


def test_targets_of_a_hundred_thousand_are_data_scale():
    """Prices in single units are told at the target; standardised they are learned."""
    found = issues(mlp(6, 16, 1), lambda out, y: squared(out, 2e5 + 1e5 * y), data=plane, steps=50)
    assert [(issue.issue_type, issue.layer) for issue in found] == [(IssueType.DATA_SCALE, "target")]
    assert issues(mlp(6, 16, 1), squared, data=plane, steps=50) == []


def test_constant_targets_are_bad_targets():
    """A loader that gives out one class only is told at the target; a player whose targets are constant is not."""
    found = issues(mlp(6, 16, 3), lambda out, y: F.cross_entropy(out, y * 0))
    assert [(issue.issue_type, issue.layer) for issue in found] == [(IssueType.BAD_TARGETS, "target")]
    critic = mlp(6, 16, 1)
    player = mlp(6, 16, 6)
    loss = F.binary_cross_entropy_with_logits
    assert issues(player, lambda out, _: loss(critic(out), torch.ones(len(out), 1))) == []


def test_targets_of_other_samples_are_bad_targets():
    """Targets that were shuffled alone are told at the target, without NOT_LEARNING beside it; in order they are learned."""

    def shuffled():
        x, y = blobs()
        return x, y[torch.randperm(len(y))]

    # Chance is the evidence here: with more tests, two in a row below the threshold come for any seed.
    found = issues(mlp(6, 16, 3), F.cross_entropy, data=shuffled, steps=180, lr=1e-3)
    assert [(issue.issue_type, issue.layer) for issue in found] == [(IssueType.BAD_TARGETS, "target")]
    assert issues(mlp(6, 16, 3), F.cross_entropy, steps=90) == []


def rings(n=64):
    """A ring around a heap: no line tells them apart."""
    y = torch.arange(n) % 2
    radius = torch.where(y == 0, 0.5, 2.0) + 0.1 * torch.randn(n)
    angle = 6.3 * torch.rand(n)
    return radius[:, None] * torch.stack([angle.cos(), angle.sin()], 1), y


class Forgotten(nn.Module):
    """Computes its activations, and goes on with what went into them."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.relu = nn.Linear(6, 16), nn.Linear(16, 3), nn.ReLU()

    def forward(self, x):
        x = self.one(x)
        self.relu(x)
        return self.two(x)


def test_layers_without_a_bend_are_capacity():
    """Three linear layers before a ring, and a ReLU whose result nobody takes, are CAPACITY at these layers."""
    straight = nn.Sequential(nn.Linear(2, 16), nn.Linear(16, 16), nn.Linear(16, 2))
    found = issues(straight, F.cross_entropy, data=rings, steps=70)
    assert [(issue.issue_type, set(issue.layers)) for issue in found] == [(IssueType.CAPACITY, {"0", "1", "2"})]
    found = issues(Forgotten(), F.cross_entropy)
    assert [(issue.issue_type, set(issue.layers)) for issue in found] == [(IssueType.CAPACITY, {"one", "two"})]


def test_linear_maps_on_purpose_are_left_in_peace():
    """A single layer, a factorisation of low rank and a deep linear network on a linear problem raise nothing."""
    for model in (
        nn.Linear(6, 1),
        nn.Sequential(nn.Linear(6, 2), nn.Linear(2, 1)),
        nn.Sequential(nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 1)),
    ):
        assert issues(model, squared, data=plane, steps=60) == []


def judged(level, *rules, steps=160, falls=0.0, **beside):
    """Return the types of :func:`judged_issues`."""
    return [issue.issue_type for issue in judged_issues(level, *rules, steps=steps, falls=falls, **beside)]


def judged_issues(level, *rules, steps=160, falls=0.0, **beside):
    """Return the issues of a run whose loss scatters around ``level(step)`` times that of the best constant."""
    judge, noise = Judge(rules, strict=True), np.random.default_rng(0)
    for step in range(1, steps + 1):
        loss = level(step) + 0.05 * noise.normal()
        facts = {"mistake.softmax over one class": 1.0, "loss.over_constant": loss, "loss.known": 1.0, **beside}
        evidence = evidence_of(step, {name: {"head": value} for name, value in facts.items()})
        judge.check(StepRecord(step, 0.0, (Reading.run("loss", loss - falls * step),), evidence=evidence))
    return judge.issues


def test_what_nothing_explains_is_not_learning():
    """A loss at the best constant's level is told, unless another issue explains it, or it fell from a bad start."""
    assert judged(lambda _: 1.0, NotLearning()) == [IssueType.NOT_LEARNING]
    assert judged(lambda _: 1.0, WrongLoss(), NotLearning()) == [IssueType.WRONG_LOSS]
    assert judged(lambda step: 1.1 - 0.002 * step, NotLearning()) == []
    assert judged(lambda step: 1.5 + 5.0 / step, NotLearning()) == []
    assert judged(lambda _: 1.5, NotLearning()) == [IssueType.NOT_LEARNING]
    assert judged(lambda _: 0.6, NotLearning()) == []
    (found,) = judged_issues(lambda _: 1.0, NotLearning())
    assert "% of that of the best constant prediction" in found.message, "nobody says that a loss is 1 times another"
    assert judged(lambda _: 1.0, NotLearning(), steps=99) == []


@pytest.mark.parametrize(("later", "over"), [((4.0, 3.5), True), ((4.0, 0.5), False), ((2.4,) * 60, False)])
def test_two_tests_on_end_that_find_a_dependence_end_unrelated_targets(later, over):
    """Tests become rare: the last ones count, a single one of them may be chance, and nearly positive is not enough."""
    judge, noise = Judge((UnrelatedTargets(),), strict=True), np.random.default_rng(0)
    for step, z in enumerate((*(0.5,) * 60, *later, *(None,) * 10), start=1):
        facts = {"loss.over_constant": 1.0, "loss.known": 1.0, "target.distinct": 9.0, "target.tested": 256.0}
        facts |= {} if z is None else {"target.dependence": z}
        evidence = evidence_of(step, {name: {"head": value} for name, value in facts.items()})
        readings = Reading.run("loss", 1 + 0.05 * noise.normal()), Reading.run("gradient.cosine", 0.0)
        judge.check(StepRecord(step, 0.0, readings, evidence=evidence))
    assert [issue.healed_step is not None for issue in judge.issues] == [over]


@pytest.mark.parametrize(("begins", "told"), [(1.0, 1), (1.5, 1), (3.0, 1), (1.02, 0)])
def test_a_fall_down_to_the_constants_level_is_no_learning(begins, told):
    """Only a bias was learned by then. What falls from the constant's level itself goes on to learn."""
    judge, noise = Judge((UnrelatedTargets(),), strict=True), np.random.default_rng(0)
    ends = 1.0 if told else 0.9
    for step in range(1, 130):
        loss = ends + (begins - ends) * (1 - step / 130) + 0.01 * noise.normal()
        facts = {"loss.over_constant": loss, "loss.known": 1.0, "target.distinct": 9.0, "target.tested": 256.0}
        facts["target.dependence"] = 0.5
        evidence = evidence_of(step, {name: {"head": value} for name, value in facts.items()})
        readings = Reading.run("loss", loss), Reading.run("gradient.cosine", 0.0)
        judge.check(StepRecord(step, 0.0, readings, evidence=evidence))
    assert len(judge.issues) == told


@pytest.mark.parametrize(("sense", "repeated", "told"), [(0.0, 0.0, 1), (1.0, 0.0, 0), (1.0, 0.5, 1)])
def test_targets_that_a_model_answers_for_new_samples_are_related(sense, repeated, told):
    """However weak the relation, and however few rows the tests have; of samples that come again it may be memory."""
    judge, noise = Judge((UnrelatedTargets(),), strict=True), np.random.default_rng(0)
    facts = {"loss.over_constant": 0.99, "loss.known": 1.0, "target.distinct": 9.0, "target.tested": 256.0}
    facts |= {"target.dependence": 1.5, "target.repeated": repeated, "loss.sense": sense}
    for step in range(1, 100):
        evidence = evidence_of(step, {name: {"head": value} for name, value in facts.items()})
        readings = Reading.run("loss", 1 + 0.05 * noise.normal()), Reading.run("gradient.cosine", 0.0)
        judge.check(StepRecord(step, 0.0, readings, evidence=evidence))
    assert len(judge.issues) == told


@pytest.mark.parametrize(("share", "over"), [(1.0, False), (0.8, True)])
def test_easier_batches_are_no_end_of_a_run_that_does_not_learn(share, over):
    """The loss falls with that of the best constant prediction, and the issue stays; below it the issue heals."""
    judge, noise = Judge((NotLearning(),), strict=True), np.random.default_rng(0)
    for step in range(1, 401):
        now = (share if step > 200 else 1.0) + 0.01 * noise.normal()
        loss = now * (1 - 0.001 * max(step - 150, 0))
        evidence = evidence_of(step, {"loss.over_constant": {"head": now}, "loss.known": {"head": 1.0}})
        judge.check(StepRecord(step, 0.0, (Reading.run("loss", loss),), evidence=evidence))
    assert [issue.healed_step is not None for issue in judge.issues] == [over]


@pytest.mark.parametrize(
    ("rate", "rises"),
    [
        (lambda t: 1e-7 * t, True),
        (lambda t: min(1e-4 * t, 5e-3), False),
        (lambda t: 1e-3 if t < 100 else 1e-4 + 4e-6 * (t - 100), False),
    ],
)
def test_a_warm_up_of_thousands_of_steps_is_named(rate, rises):
    """However slowly it rises by then; a rate that was higher before is in a cycle."""
    judge, noise = Judge((NotLearning(),), strict=True), np.random.default_rng(0)
    for step in range(1, 301):
        now = 1.03 - 0.0001 * step + 0.01 * noise.normal()
        evidence = evidence_of(step, {"loss.over_constant": {"head": now}, "loss.known": {"head": 1.0}})
        readings = Reading.run("loss", now), Reading.run("learning_rate", rate(step))
        judge.check(StepRecord(step, 0.0, readings, evidence=evidence))
    (issue,) = judge.issues
    assert ("still rising" in issue.advice) == rises
    assert issue.message.endswith("does not fall below it: the inputs are not used.")


def test_a_part_of_the_loss_that_others_drown():
    """Beside parts that are not known and fall, one whose targets depend on the inputs and whose predictions do not."""
    facts = {"loss.known": 0.0, "target.dependence": 100.0, "loss.sense": 0.1}

    def of_part(level=1.0, **others):
        return judged(lambda _: level, NotLearning(), steps=230, falls=0.01, **{**facts, **others})

    assert of_part() == [IssueType.NOT_LEARNING]
    for healthy in ({"loss.sense": 4.0}, {"target.dependence": 0.5}, {"loss.known": 1.0}, {"level": 0.8}):
        assert of_part(**healthy) == []


def test_what_a_fit_in_closed_form_explains_must_be_learned():
    """At a level that falls a little, targets that lie open are told; not where they do not, or the loss comes down."""
    creeps = {"target.attained": 0.1, "loss.sense": 4.0}
    assert judged(lambda _: 0.95, NotLearning(), **creeps) == [IssueType.NOT_LEARNING]
    assert judged(lambda step: 2.0 - 0.002 * step, NotLearning(), **creeps) == [IssueType.NOT_LEARNING]
    assert judged(lambda _: 0.95, NotLearning(), **{**creeps, "target.attained": 0.9}) == []
    assert judged(lambda step: 1.2 - 0.003 * step, NotLearning(), falls=0.003, **creeps) == []
    assert judged(lambda _: 0.95, NotLearning(), **creeps, **{"target.uniform_share": 1.0}) == []


@pytest.mark.parametrize("ignored", [True, False])
def test_targets_that_are_all_ignored(ignored):
    """A loss that is 0 because no target counts is told; the same loss with targets is not."""

    def data():
        x, y = blobs()
        return x, torch.full_like(y, -100) if ignored else y

    def loss(out, y):
        return F.cross_entropy(out, y, reduction="sum") / (y != -100).sum().clamp(min=1)

    found = issues(mlp(6, 16, 3), loss, steps=25, data=data)
    assert [(i.issue_type, i.layer, i.step) for i in found] == [(IssueType.BAD_TARGETS, "target", 1)] * ignored


def test_an_output_grows_because_targets_are_large():
    """A regression to targets in the hundreds is no chain that explodes."""

    def data():
        x, y = plane()
        return x, 300 * y

    found = issues(mlp(6, 16, 1), squared, steps=60, lr=0.3, data=data, kinds={IssueType.EXPLODING})
    assert found == []
