"""Losses that only draw two predictions together, and others that are near to them."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradflow_export.autograd_graph.drawn_together import drawn_together, own_positives
from gradflow_export.autograd_graph.handwritten_loss import forms_of

one, other, norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4)
x, y = torch.randn(6, 4), torch.randn(6, 4)


def cosine(a, b):
    return -F.cosine_similarity(a, b).mean()


def unit_lengths(a, b):
    return (2 - 2 * (F.normalize(a, dim=1) * F.normalize(b, dim=1)).sum(1)).mean()


def certainty(a):
    return -(a.softmax(1) * a.log_softmax(1)).sum(1).mean()


def equation():
    """Of growth, whose derivative is what it is, from 1 on."""
    at = torch.rand(6, 1, requires_grad=True)
    net = nn.Sequential(nn.Linear(1, 4), nn.SiLU(), nn.Linear(4, 1))
    (slope,) = torch.autograd.grad(net(at).sum(), at, create_graph=True)
    return F.mse_loss(slope, net(at)) + (net(torch.zeros(1, 1)) - 1.0).pow(2).mean()


def unlike(a, b):
    """A divergence, written out."""
    return (a.softmax(1) * (a.log_softmax(1) - b.log_softmax(1))).sum(1).mean()


def told_apart(a, b):
    scores, own = 10.0 * (F.normalize(a, dim=1) @ F.normalize(b, dim=1).T), torch.arange(len(a))
    return (F.cross_entropy(scores, own) + F.cross_entropy(scores.T, own)) / 2


DRAWN = {
    "cosine": lambda: cosine(one(x), other(x)),
    "both ways": lambda: cosine(other(one(x)), one(y)) / 2 + cosine(other(one(y)), one(x)) / 2,
    "unit length": lambda: unit_lengths(one(x), other(x)),
    "divergence": lambda: 4 * F.kl_div(one(x).log_softmax(1), other(x).softmax(1), reduction="batchmean"),
    "divergence by hand": lambda: unlike(one(x), other(x)),
    "squares": lambda: F.mse_loss(norm(one(x)), norm(one(y))),
    "by hand": lambda: (one(x) - other(x)).pow(2).sum(1).mean(),
}
HELD = {
    "taken as given": lambda: cosine(one(x), other(x).detach()),
    "divergence from what is given": lambda: unlike(one(x).detach(), other(x)),
    "targets": lambda: F.mse_loss(one(x), y),
    "targets beside": lambda: F.mse_loss(one(x), other(x)) + F.mse_loss(one(x), y),
    "rewards": lambda: (one(x) - (y + 0.9 * one(y))).pow(2).mean(),
    "distances": lambda: F.mse_loss((one(x) - one(y)).norm(dim=1), y[:, 0]),
    "labels": lambda: (y * (one(x) - one(y)).pow(2)).sum(1).mean(dim=0),
    "certainty": lambda: certainty(one(x)),
    "negatives": lambda: F.cross_entropy(F.normalize(one(x), dim=1) @ F.normalize(other(x), dim=1).T, torch.arange(6)),
    "margin": lambda: F.relu((one(x) - one(y)).pow(2) - (one(x) - one(-y)).pow(2) + 1).mean(),
    "variance": lambda: F.mse_loss(one(x), one(y)) + F.relu(1 - one(x).std(0)).mean(),
    "equation": equation,
    "critic": lambda: one(x).mean() - one(y).mean(),
}


@pytest.mark.parametrize("name", DRAWN)
def test_two_predictions_that_nothing_holds_apart(name):
    assert drawn_together(DRAWN[name]()) is not None


@pytest.mark.parametrize("name", HELD)
def test_what_something_else_enters_or_compares_is_in_order(name):
    assert drawn_together(HELD[name]()) is None


def test_samples_that_are_their_own_positives():
    """Equal sides are all of the loss; with another view, negatives of another network or a part beside, they are not."""
    z, many = torch.randn(9, 4), torch.randn(9, 4)
    assert own_positives(told_apart(one(z), one(z))) is not None
    assert own_positives(told_apart(one(z), one(many))) is None
    assert own_positives(told_apart(one(z), other(z))) is None
    assert own_positives(told_apart(one(z), one(z)) + F.mse_loss(one(z), many)) is None
    assert own_positives(told_apart(one(z[:1].expand(9, 4)), one(z[:1].expand(9, 4)))) is None


@pytest.mark.parametrize("level", [lambda s: s.logsumexp(1) - s.diag(), lambda s: -s.log_softmax(1).diag()])
def test_cosines_made_smaller_in_a_loss_written_out(level):
    """A temperature that multiplies leaves a cross-entropy where it is; one that divides does not."""
    cosines = F.normalize(one(x), dim=1) @ F.normalize(other(x), dim=1).T
    told = [[name for name, _, _ in forms_of(level(s).mean())] for s in (cosines * 0.1, cosines / 0.1)]
    assert told == [["cosines given to cross-entropy"], []]


def test_cosines_of_two_views_made_smaller_behind_a_mask():
    """Views are put together, and what belongs to the sample itself is masked, before the cross-entropy."""
    z = torch.cat([F.normalize(one(x), dim=1), F.normalize(other(x), dim=1)])
    scores = [(z @ z.T * scale).masked_fill(torch.eye(len(z), dtype=torch.bool), -1e9) for scale in (0.2, 5.0)]
    target = torch.arange(len(z)).roll(len(x))
    told = [[name for name, _, _ in forms_of(F.cross_entropy(s, target))] for s in scores]
    assert told == [["cosines given to cross-entropy"], []]
