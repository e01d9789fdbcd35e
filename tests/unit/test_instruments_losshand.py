"""What the graph of a loss written by hand proves, and what is left in peace."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradflow_export.autograd_graph.handwritten_loss import forms_of
from gradflow_export.autograd_graph.loss_graph import terms_of
from gradflow_export.records import loss_mistakes as known

BATCH, CLASSES = 8, 5


@pytest.fixture
def layer():
    return nn.Linear(6, CLASSES)


@pytest.fixture
def scores(layer):
    return layer(torch.randn(BATCH, 6))


@pytest.fixture
def classes():
    return torch.arange(BATCH) % CLASSES


def told(loss):
    return {site for site, _, _ in forms_of(loss)}


def overlap(probabilities, targets):
    shared = (probabilities * targets).sum(1)
    return ((2 * shared + 1) / (probabilities.sum(1) + targets.sum(1) + 1)).mean()


def test_overlap_of_scores_and_one_that_is_minimised_are_told(scores):
    """Dice takes probabilities, and is taken off one."""
    targets = (torch.rand(BATCH, CLASSES) > 0.5).float()
    assert told(1 - overlap(scores, targets)) == {known.SCORES_IN_OVERLAP}
    assert told(overlap(scores.sigmoid(), targets)) == {known.OVERLAP_MINIMISED}
    assert not told(1 - overlap(scores.sigmoid(), targets))
    assert not told(-0.5 * overlap(scores.softmax(1), targets))


def test_expectation_over_places_is_no_overlap(scores):
    """A coordinate is a mean weighted by probabilities, and may well be made less."""
    weights = scores.sigmoid()
    assert not told((((weights * torch.arange(5.0)).sum(1) / weights.sum(1)) - 2.0).square().mean())


def test_overlap_of_probabilities_over_the_batch_is_told():
    """A convolution gives samples in dimension 0, over which no softmax of classes runs."""
    out = nn.Conv2d(1, 2, 3, padding=1)(torch.randn(4, 1, 6, 6))
    targets = torch.ones(4, 2, 6, 6)
    assert told(1 - overlap(out.softmax(0).flatten(1), targets.flatten(1))) == {known.SOFTMAX_OVER_BATCH}
    assert not told(1 - overlap(out.softmax(1).flatten(1), targets.flatten(1)))


def test_logarithm_of_scores_is_told_and_that_of_probabilities_is_not(scores, classes):
    """Cross-entropies by hand want probabilities; logarithms of counts are compared with counts."""
    shares = F.one_hot(classes, CLASSES).float()
    assert told(-(shares * scores.clamp(1e-8).log()).sum(1).mean()) == {known.SCORES_IN_LOGARITHM}
    assert not told(-(shares * scores.softmax(1).clamp(1e-8).log()).sum(1).mean())
    assert not told(((scores.clamp(min=0) + 1).log() - shares).square().mean())


def test_scores_that_are_cut_off_are_no_probabilities(layer, scores):
    """``clamp(0, 1)`` lets BCELoss run, and keeps gradients from most samples."""
    targets = torch.ones(BATCH, CLASSES)
    assert told(F.binary_cross_entropy(scores.clamp(0, 1), targets)) == {known.CLAMPED_SCORES}
    assert not told(F.binary_cross_entropy(scores.sigmoid().clamp(1e-6, 1 - 1e-6), targets))


@pytest.mark.parametrize("squash", [torch.sigmoid, lambda s: s.softmax(1)])
def test_log_softmax_of_probabilities_is_told_wherever_it_stands(scores, classes, squash):
    """Focal losses pick from a log_softmax by hand; limits between change nothing."""
    picked = F.log_softmax(squash(scores), 1).gather(1, classes[:, None])
    assert told((-((1 - picked.exp()) ** 2) * picked).mean()) & {known.SOFTMAX_BEFORE_CE, known.SIGMOID_BEFORE_CE}
    (term,) = terms_of(F.cross_entropy(squash(scores).clamp(1e-6, 1 - 1e-6), classes))[0]
    assert term.mistakes.keys() & {known.SOFTMAX_BEFORE_CE, known.SIGMOID_BEFORE_CE}


def test_log_softmax_of_scores_is_right_wherever_it_stands(scores, classes):
    """So are logarithms of limited probabilities in nll_loss, and both directions of a table of likenesses."""
    picked = F.log_softmax(scores, 1).gather(1, classes[:, None])
    assert not told((-((1 - picked.exp()) ** 2) * picked).mean())
    assert not told(F.nll_loss(scores.softmax(1).clamp(1e-6).log(), classes))
    table = scores @ torch.randn(CLASSES, BATCH)
    assert not told(-(table.log_softmax(0).diagonal() + table.log_softmax(1).diagonal()).mean())


def test_log_softmax_along_samples_is_told(scores, classes):
    """Picked by hand, or rows of it given to nll_loss."""
    assert told(-scores.log_softmax(0)[torch.arange(BATCH), classes].mean()) == {known.SOFTMAX_OVER_BATCH}
    rows = torch.tensor([0, 2, 4])
    assert told(F.nll_loss(scores.log_softmax(0)[rows], classes[rows])) == {known.OVER_POSITIONS}
    assert not told(F.nll_loss(scores.log_softmax(1)[rows], classes[rows]))


def test_log_probabilities_need_their_minus(scores, classes):
    """Without weights of any sign, as returns are, only a loss with a minus makes targets likely."""
    picked = scores.log_softmax(1)[torch.arange(BATCH), classes]
    assert told(picked.mean()) == {known.UNLIKELY}
    assert not told(-picked.mean())
    assert not told((picked * torch.randn(BATCH)).mean())
    assert not told(-picked.sum() * -3.0)


@pytest.mark.parametrize("shape", [(BATCH,), (BATCH, 1), (BATCH, 3)])
def test_logarithms_of_two_classes_need_their_minus(shape):
    """Whichever way they are written. Labels of one class are a player's, and weights of its own make an entropy."""
    scores = nn.Linear(6, math.prod(shape) // BATCH)(torch.randn(BATCH, 6)).reshape(shape)
    p, y = scores.sigmoid(), (torch.arange(math.prod(shape)) % 2).float().reshape(shape)
    ways = {
        "plain": lambda y: y * p.log() + (1 - y) * (1 - p).log(),
        "other way": lambda y: (1 - p).log() * (1 - y) + p.log() * y,
        "kept from 0": lambda y: y * torch.log(p + 1e-7) + (1 - y) * torch.log(1 - p + 1e-7),
        "limited": lambda y: y * p.clamp(1e-6, 1 - 1e-6).log() + (1 - y) * torch.log1p(-p.clamp(1e-6, 1 - 1e-6)),
        "of scores": lambda y: y * F.logsigmoid(scores) + (1 - y) * F.logsigmoid(-scores),
    }
    for way in ways.values():
        assert told(way(y).mean()) == told(way(y).sum()) == {known.UNLIKELY}
        assert not told(-way(y).mean())
        assert not told(way(torch.ones_like(y)).mean())
    assert not told((p * p.log() + (1 - p) * (1 - p).log()).mean())
    assert not told((torch.randn(shape) * p.log() + torch.rand(shape) * (1 - p).log()).mean())


def test_differences_of_every_pair_are_told_whatever_is_done_with_them(classes):
    """A column less a vector is a square; columns made on purpose and tables of likeness are none of that."""
    column, targets = nn.Linear(6, 1)(torch.randn(BATCH, 6)), torch.randn(BATCH)
    for wrong in (
        torch.maximum(0.7 * (targets - column), -0.3 * (targets - column)).mean(),
        (column - targets).cosh().log().mean(),
        ((column - targets) ** 2).mean().sqrt(),
    ):
        assert told(wrong) == {known.BROADCAST}
    assert not told((column.squeeze(1) - targets).abs().mean())
    assert not told((column.squeeze(1).unsqueeze(1) - targets).abs().mean())
    assert not told((column - targets).abs().min(1).values.mean())
    chosen = nn.Linear(6, CLASSES)(torch.randn(BATCH, 6)).log_softmax(1).gather(1, classes[:, None]).squeeze(1)
    assert told(-(chosen * targets[:, None]).mean()) == {known.BROADCAST}
    assert not told(-(chosen * targets).mean())


def test_sequences_want_a_log_softmax_over_classes():
    """Of scores ``[samples, time, classes]``, time comes first for ctc_loss and the softmax stays with the classes."""
    out = nn.Linear(6, CLASSES)(torch.randn(3, 9, 6))
    targets, lengths = torch.ones(3, 2, dtype=torch.long), (torch.full((3,), 9), torch.full((3,), 2))
    assert told(F.ctc_loss(out.log_softmax(1).transpose(0, 1), targets, *lengths)) == {known.OVER_POSITIONS}
    assert not told(F.ctc_loss(out.log_softmax(2).transpose(0, 1), targets, *lengths))
    assert not told(F.ctc_loss(out.permute(1, 0, 2).log_softmax(-1), targets, *lengths))


def test_cosines_want_a_scale(layer, scores, classes):
    """Between -1 and 1 no class of many can be likely; a temperature is a scale."""
    cosines = F.linear(F.normalize(scores), F.normalize(nn.Linear(CLASSES, 5).weight))
    assert told(F.cross_entropy(cosines, classes)) == {known.COSINES_IN_CE}
    assert not told(F.cross_entropy(16 * cosines, classes))
    assert not told(F.cross_entropy(scores, classes))
    a, b = (F.normalize(nn.Linear(CLASSES, 8)(scores)) for _ in range(2))
    pairs, same = a @ b.T, torch.arange(len(scores))
    for wrong in (pairs * 0.07, 0.5 * pairs, pairs / 14, pairs / 0.07 * 0.07 * 0.07):
        assert told(F.cross_entropy(wrong, same)) == {known.COSINES_IN_CE}
    for right in (pairs, pairs / 0.07, pairs / 2 * 16, pairs * nn.Parameter(torch.tensor(0.07))):
        assert not told(F.cross_entropy(right, same))


def test_focal_weights_are_those_of_samples(scores, classes):
    """The mean of a batch has one weight."""
    mean, each = F.cross_entropy(scores, classes), F.cross_entropy(scores, classes, reduction="none")
    assert told((1 - torch.exp(-mean)) ** 2 * mean) == {known.FOCAL_OF_MEAN}
    assert not told(((1 - torch.exp(-each)) ** 2 * each).mean())


def test_poisson_takes_logarithms_of_rates(scores):
    """What cannot be negative is a rate already."""
    counts = torch.ones(BATCH, CLASSES)
    assert told(F.poisson_nll_loss(F.softplus(scores), counts)) == {known.RATES_IN_POISSON}
    assert not told(F.poisson_nll_loss(scores, counts))
    assert not told(F.poisson_nll_loss(F.softplus(scores), counts, log_input=False))


def test_every_way_of_writing_an_overlap_is_known():
    """Tversky's counts, sums of both at once, weights for classes, and einsum; a projection is no overlap."""
    out = nn.Conv2d(1, 2, 3, padding=1)(torch.randn(4, 1, 6, 6))
    targets = (torch.rand(4, 2, 6, 6) > 0.5).float()

    def tversky(p):
        both, more, less = (p * targets).sum(), (p * (1 - targets)).sum(), (targets * (1 - p)).sum()
        return (1 - (both + 1) / (both + 0.3 * more + 0.7 * less + 1)) ** 0.75

    def weighted(p):
        shared, sizes, weights = (p * targets).sum((0, 2, 3)), (p + targets).sum((0, 2, 3)), torch.rand(2)
        return 1 - 2 * (weights * shared).sum() / ((weights * sizes).sum() + 1e-6)

    def einsum(p):
        shared = torch.einsum("bchw,bchw->bc", p, targets)
        return 1 - (2 * shared / (torch.einsum("bchw->bc", p) + targets.sum((2, 3)))).mean()

    for loss in (tversky, weighted, einsum):
        assert told(loss(out)) == {known.SCORES_IN_OVERLAP}
        assert not told(loss(out.softmax(1)))
    signal = targets[:, :1]
    scale = (out[:, :1] * signal).sum((1, 2, 3)) / out[:, :1].square().sum((1, 2, 3))
    assert not told((scale[:, None] * torch.rand(4, 3)).sum())


def test_a_temperature_does_not_hide_along_what_a_softmax_runs(scores, classes):
    """Students are divided by a temperature before their log_softmax."""
    shares = F.one_hot(classes, CLASSES).float()
    assert told(F.kl_div((scores / 2).log_softmax(0), shares, reduction="batchmean")) == {known.SOFTMAX_OVER_BATCH}
    assert not told(F.kl_div((scores / 2).log_softmax(1), shares, reduction="batchmean"))
