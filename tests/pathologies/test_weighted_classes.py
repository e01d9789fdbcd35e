"""Losses in which rare classes count more: what a constant attains is measured with the same weights."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradflow_export import Exporter, IssueType, MemoryWriter

WEIGHTS = torch.tensor([1 / 2.7, 1 / 0.21, 1 / 0.09])
MANY = torch.tensor([0.1 / 0.9, 0.93 / 0.07, 0.97 / 0.03])


def positive(y):
    return (y > 0).float()


def each(out, y):
    return F.cross_entropy(out, y, reduction="none")


FORMS = {
    "library": (3, lambda out, y: F.cross_entropy(out, y, weight=WEIGHTS)),
    "nll": (3, lambda out, y: F.nll_loss(out.log_softmax(1), y, weight=WEIGHTS)),
    "by hand": (3, lambda out, y: (each(out, y) * WEIGHTS[y]).mean()),
    "by hand, normalized": (3, lambda out, y: (each(out, y) * WEIGHTS[y]).sum() / WEIGHTS[y].sum()),
    "picked": (3, lambda out, y: -(out.log_softmax(1)[torch.arange(len(y)), y] * WEIGHTS[y]).mean()),
    "pos_weight": (
        1, lambda out, y: F.binary_cross_entropy_with_logits(out[:, 0], positive(y), pos_weight=torch.tensor(9.0)),
    ),
    "pos_weight of several": (
        3, lambda out, y: F.binary_cross_entropy_with_logits(out, F.one_hot(y, 3).float(), pos_weight=MANY),
    ),
    "positives by hand": (
        1,
        lambda out, y: -(9.0 * positive(y) * F.logsigmoid(out[:, 0]) + (1 - positive(y)) * F.logsigmoid(-out[:, 0])).mean(),
    ),
}  # fmt: skip


def issues_of(form, seed, *, noise=False, steps=220):
    outputs, loss = FORMS[form]
    torch.manual_seed(seed)
    centres = torch.tensor([[0.0, 0.0, 0.0], [1.2, 0.5, 0.0], [0.0, 1.2, 1.0]]).repeat(1, 3)
    model = nn.Sequential(nn.Linear(9, 64), nn.ReLU(), nn.Linear(64, outputs))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    with Exporter(model, backends=[MemoryWriter()], verbose=0) as exporter:
        exporter.watch()
        for _ in range(steps):
            y = torch.multinomial(torch.tensor([0.9, 0.07, 0.03]), 32, replacement=True)
            x = torch.randn(32, 9) + (0.0 if noise else centres[y])
            optimizer.zero_grad()
            loss(model(x), y).backward()
            optimizer.step()
        return {issue.issue_type for issue in exporter.issues}


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("form", FORMS)
def test_weights_against_imbalance_are_in_order(form, seed):
    """A model that gives rare classes their due says less of the frequent one than a constant without weights."""
    assert issues_of(form, seed) == set()


@pytest.mark.parametrize("form", ["library", "pos_weight", "pos_weight of several"])
def test_noise_is_not_learned_whatever_classes_count(form):
    """Inputs that tell nothing leave a weighted loss at the level of a weighted constant."""
    assert issues_of(form, 0, noise=True, steps=400) & {IssueType.NOT_LEARNING, IssueType.BAD_TARGETS}


SHAPES = {
    "steps of several": (3, lambda out, x: binary(out, x, MANY)),
    "steps of two": (2, lambda out, x: binary(out, x, MANY[:2])),
    "steps of one weight": (2, lambda out, x: binary(out, x, MANY[1])),
    "many steps": (3, lambda out, x: binary(out.repeat(1, 40, 1), x.repeat(1, 40, 1), MANY)),
    "classes of steps": (3, lambda out, x: F.cross_entropy(out.transpose(1, 2), x[..., :3].argmax(-1), weight=WEIGHTS)),
    "ignored": (3, lambda out, x: F.cross_entropy(out[:, 0], kept(x, -100), weight=WEIGHTS)),
    "ignored by a number": (
        3,
        lambda out, x: F.cross_entropy(out[:, 0], kept(x, 255), weight=WEIGHTS, ignore_index=255),
    ),
    "shares": (3, lambda out, x: F.cross_entropy(out[:, 0], x[:, 0, :3].softmax(1), weight=WEIGHTS)),
    "without weight": (3, lambda out, x: F.cross_entropy(out[:, 0], kept(x, 0), weight=torch.tensor([0.0, 1.0, 1.0]))),
}


def binary(out, x, weight):
    return F.binary_cross_entropy_with_logits(out, (x[..., : out.shape[-1]] > 1).float(), pos_weight=weight)


def kept(x, ignored):
    return x[:, 0, :3].argmax(1).masked_fill(x[:, 0, 3] > 1, ignored)


@pytest.mark.parametrize("shape", SHAPES)
def test_weights_of_any_shape_are_read(shape):
    """For each step of a sequence, for more than are looked at, beside targets that do not count: no reading fails."""
    outputs, loss = SHAPES[shape]
    torch.manual_seed(0)
    model, writer = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, outputs)), MemoryWriter()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    with Exporter(model, backends=[writer], synchronous=True, verbose=0) as exporter:
        exporter.watch()
        for _ in range(12):
            x = torch.randn(16, 5, 6)
            optimizer.zero_grad()
            loss(model(x), x).backward()
            optimizer.step()
    assert sum(record.fact("loss.over_constant", "2") is not None for record in writer.records) >= 10
