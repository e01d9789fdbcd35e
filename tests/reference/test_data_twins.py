"""The best constant's loss and the test of dependence against slow, obvious twins."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from gradflow_export.checks.target_reader import some_rows
from gradflow_export.metrics.constants import constant_loss, losses, mean_loss
from gradflow_export.metrics.dependence import (
    any_dependence,
    dependence,
    dependence_on_tokens,
    linear_dependence,
    unbent,
)

REAL = np.random.default_rng(0).normal(size=(40, 3))


@pytest.fixture
def rng():
    """Numbers that are the same whatever ran before."""
    return np.random.default_rng(0)


def least(loss, start):
    """Minimise a loss over one prediction for all samples."""
    z = torch.tensor(start, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([z], max_iter=300, line_search_fn="strong_wolfe", tolerance_change=1e-14)

    def closure():
        optimizer.zero_grad()
        value = loss(z)
        value.backward()
        return value

    optimizer.step(closure)
    return loss(z).item()


TARGETS = {
    "classes": np.array([0, 0, 1, 2, 2, 2, 1, 0, 2, 2.0])[:, None],
    "soft": np.exp(REAL) / np.exp(REAL).sum(axis=1, keepdims=True),
    "binary": (REAL > 0.3).astype(float),
    "squared": REAL,
}


def reference(kind, z, y):
    """Return the mean loss of PyTorch for one prediction repeated, logits where there are any."""
    z = z.expand(len(y), -1)
    if kind == "classes":
        return F.cross_entropy(z, y[:, 0].long())
    if kind == "soft":
        return F.cross_entropy(z, y)
    return F.binary_cross_entropy_with_logits(z, y) if kind == "binary" else F.mse_loss(z, y)


@pytest.mark.parametrize("kind", TARGETS)
def test_best_constant_is_what_minimising_finds(kind):
    """The closed form equals the least loss that an optimizer reaches with one prediction for all."""
    y = torch.tensor(TARGETS[kind])
    found = least(lambda z: reference(kind, z, y), [0.0] * 3)
    assert constant_loss(kind, TARGETS[kind]) == pytest.approx(found, rel=1e-6)


@pytest.mark.parametrize("kind", ["classes", "binary"])
def test_weights_of_classes_move_the_best_constant(kind, rng):
    """With weights of classes, or of positives, level and mean are those of PyTorch's own weighted loss."""
    y = torch.tensor(TARGETS[kind])
    weight = torch.tensor([0.3, 2.0, 5.0], dtype=torch.float64)
    counts = weight[y.long()] if kind == "classes" else 1.0 + (weight - 1.0) * y

    def loss(z):
        z = z.expand(len(y), 3)
        if kind == "classes":
            return F.cross_entropy(z, y[:, 0].long(), weight=weight)
        return F.binary_cross_entropy_with_logits(z, y, pos_weight=weight) * y.numel() / counts.sum()

    assert constant_loss(kind, y.numpy(), counts.numpy()) == pytest.approx(least(loss, [0.0] * 3), rel=1e-6)
    z = torch.tensor(rng.normal(size=(len(y), 3)))
    said = z.log_softmax(1).gather(1, y.long()) if kind == "classes" else torch.sigmoid(z)
    assert mean_loss(kind, said.numpy(), y.numpy(), counts.numpy()) == pytest.approx(float(loss(z)), rel=1e-9)


@pytest.mark.parametrize("kind", ["absolute", "huber"])
def test_best_constant_of_distances_is_the_median(kind):
    """No constant on a fine grid is better, but for the tenth that the median gives away with a Huber loss."""
    grid = np.linspace(-3, 3, 2001)
    y = REAL[:, :1]
    best = min(float(losses(kind, np.full_like(y, z), y).mean()) for z in grid)
    assert best <= constant_loss(kind, y) * (1 + 1e-12) <= best * (1.1 if kind == "huber" else 1.001)


def test_losses_are_those_of_pytorch(rng):
    """Of each kind the mean over samples is what PyTorch's function returns."""
    z, y = torch.tensor(rng.normal(size=(12, 3))), torch.tensor(rng.normal(size=(12, 3)))
    p, yes = torch.sigmoid(z), (y > 0).double()
    log_p = z.log_softmax(1)
    index = torch.arange(12) % 3
    wanted = {
        "squared": F.mse_loss(z, y), "absolute": F.l1_loss(z, y), "huber": F.smooth_l1_loss(z, y),
        "binary": F.binary_cross_entropy(p, yes), "soft": F.cross_entropy(z, y.softmax(1)),
        "classes": F.cross_entropy(z, index),
    }  # fmt: skip
    given = {
        "binary": (p, yes),
        "soft": (log_p, y.softmax(1)),
        "classes": (log_p.gather(1, index[:, None]), index[:, None].double()),
    }
    for kind, value in wanted.items():
        predictions, targets = given.get(kind, (z, y))
        assert losses(kind, predictions.numpy(), targets.numpy()).mean() == pytest.approx(float(value), rel=1e-9)


def test_dependence_is_the_z_score_among_permutations(rng):
    """The exact moments are those of many drawn permutations of the same statistic."""
    x, y = rng.normal(size=(24, 2)), rng.normal(size=(24, 2))
    y[:, 0] += x[:, 0]

    def statistic(order):
        s = (x - x.mean(0)) / x.std(0)
        squares = ((s[:, None] - s[None]) ** 2).sum(-1)
        kernel = np.exp(-squares / np.median(squares[np.triu_indices(24, 1)]))
        centre = np.eye(24) - 1 / 24
        kernel = centre @ kernel @ centre
        r = (y - y.mean(0))[order]
        return sum(kernel[i, j] * float(r[i] @ r[j]) for i in range(24) for j in range(24))

    drawn = np.array([statistic(rng.permutation(24)) for _ in range(1500)])
    expected = (statistic(np.arange(24)) - drawn.mean()) / drawn.std()
    assert dependence(x, y) == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize(("rows", "features"), [(40, 1), (200, 5), (600, 40)])
def test_linear_dependence_is_a_normal_score_where_there_is_none(rows, features, rng):
    """Its quantiles are those of the normal distribution, whatever the sizes, and those of the F-test it stands for."""
    scores = np.array(
        [linear_dependence(rng.normal(size=(rows, features)), rng.exponential(size=(rows, 1))) for _ in range(400)]
    )
    assert (scores < 1.645).mean() == pytest.approx(0.95, abs=0.035)
    assert (scores < 0.0).mean() == pytest.approx(0.5, abs=0.08)


def test_linear_dependence_sees_what_explains_two_percent(rng):
    """With a thousand rows; scaled, moved and repeated columns change nothing, and what cannot be tested is NaN."""
    drawn = [(x := rng.normal(size=(1024, 5)), 0.15 * x[:, :1] + rng.normal(size=(1024, 1))) for _ in range(40)]
    assert np.mean([linear_dependence(x, y) for x, y in drawn]) > 2.5
    x, y = drawn[0]
    score = linear_dependence(x, y)
    assert linear_dependence(3.0 * x - 7.0, -2.0 * y + 1.0) == pytest.approx(score, rel=1e-9)
    assert linear_dependence(x, x[:, :1]) > 20
    assert math.isnan(linear_dependence(x[:9], y[:9]))
    assert math.isnan(linear_dependence(x, np.ones((1024, 1))))
    assert math.isnan(linear_dependence(np.ones((1024, 2)), y))


def test_dependence_tells_independent_rows_from_dependent_ones(rng):
    """Of independent rows the z-score is small, of exclusive or, which no line shows, it is large."""
    x = rng.normal(size=(200, 2))
    xor = (x[:, :1] * x[:, 1:] > 0).astype(float)
    noise = np.array([dependence(rng.normal(size=(100, 4)), rng.normal(size=(100, 1))) for _ in range(400)])
    assert noise.mean() == pytest.approx(0.0, abs=0.2)
    assert (noise > 3.0).mean() < 0.03  # a sum of squares has a longer tail than the normal distribution: about 0.01
    assert dependence(x, xor) > 8
    assert dependence(x, xor[rng.permutation(200)]) < 3
    assert unbent(x, xor) > 8
    assert unbent(x, x @ [[1.0], [2.0]] + 0.1 * rng.normal(size=(200, 1))) < 3


def test_kernels_of_interactions_are_sums_over_products_of_different_features(rng):
    """Of bits, the statistic of three features together is that of all products of three, counted one by one."""
    x = rng.integers(2, size=(60, 5)) * 2.0 - 1.0
    x = np.concatenate([x, -x])  # each feature is as often 1 as -1, and is standardised already
    y = rng.normal(size=(120, 1))
    y -= y.mean(axis=0)
    products = np.stack([x[:, list(c)].prod(axis=1) for c in itertools.combinations(range(5), 3)], axis=1)

    def z(order):
        centred = products - products.mean(axis=0)
        return float(np.square(centred.T @ y[order]).sum())

    drawn = np.array([z(rng.permutation(120)) for _ in range(4000)])
    parity = (x[:, [0]] * x[:, [2]] * x[:, [3]] > 0) * 1.0
    y = parity - parity.mean()
    expected = (z(np.arange(120)) * 1.0 - drawn.mean() * y.var() / 1.0) / (drawn.std() * y.var())
    assert any_dependence(x, parity) == pytest.approx(expected, rel=0.4)
    assert any_dependence(x, parity) > 2 * dependence(x, parity)


def test_five_tests_see_what_one_does_not(rng):
    """A parity of three bits among twenty, and a quick wave, are told; shuffled rows are not, in most cases."""
    bits = rng.integers(2, size=(256, 20)) * 2.0 - 1.0
    parity = (bits[:, [1]] * bits[:, [4]] * bits[:, [8]] > 0) * 1.0
    assert dependence(bits, parity) < 3 < any_dependence(bits, parity)
    place = rng.uniform(-1, 1, size=(200, 2))
    wave = np.sin(9 * place[:, :1]) * np.cos(8 * place[:, 1:])
    assert any_dependence(place, wave) > 10
    apart = [any_dependence(place, wave[rng.permutation(200)]) for _ in range(40)]
    assert np.median(apart) < 1.5
    assert np.mean(np.array(apart) > 3) < 0.2


def test_words_are_told_by_their_number_and_by_their_place(rng):
    """Which word comes first shows at its place alone, which word there is in the counts; chance shows nowhere."""
    words = rng.integers(12, size=(200, 8)).astype(float)
    first, any_ = (words[:, :1] < 6) * 1.0, (words == 3).any(axis=1, keepdims=True) * 1.0
    assert dependence_on_tokens(words, first, 64) > 5
    assert dependence_on_tokens(words, any_, 64) > 5
    assert dependence_on_tokens(words, first[rng.permutation(200)], 64) < 4


def test_where_nothing_can_be_said_it_is_nan(rng):
    """Too few rows, constant inputs or targets, an exact line, and more features than rows give NaN."""
    x, y = rng.normal(size=(40, 3)), rng.normal(size=(40, 1))
    assert math.isnan(dependence(x[:8], y[:8]))
    assert math.isnan(dependence(np.ones((40, 2)), y))
    assert math.isnan(dependence(x, np.ones((40, 1))))
    assert math.isnan(any_dependence(x[:8], y[:8]))
    assert math.isnan(any_dependence(x, np.ones((40, 1))))
    assert math.isnan(unbent(x, x @ [[1.0], [2.0], [3.0]]))
    assert math.isnan(unbent(rng.normal(size=(20, 30)), y[:20]))


def test_constant_targets_tell_nothing_of_bends(rng):
    """Of targets that are all alike a linear fit leaves rounding alone, from which nothing may be read."""
    x = rng.normal(size=(240, 2))
    assert all(math.isnan(unbent(x, np.full((240, 1), value))) for value in (1.0, 0.1, -3e7, 0.0))


@pytest.mark.parametrize("period", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("count", [257, 512, 640, 1000, 2048])
def test_rows_that_are_read_of_a_long_batch_are_of_all_kinds(count, period):
    """Where kinds of samples follow each other in turn, about as many rows of each kind are read, and the same ones."""
    rows = some_rows(torch.arange(count))
    assert len(rows) == 256
    assert torch.equal(rows, torch.unique(rows))
    assert torch.equal(rows, some_rows(torch.arange(count)[:, None].double())[:, 0].long())
    shares = torch.bincount(rows % period, minlength=period) / 256
    assert float(shares.min()) > 0.6 / period
