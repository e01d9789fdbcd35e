"""The loss of each column of the targets, and what a fit in closed form says of it."""

from __future__ import annotations

import numpy as np
import pytest

from gradflow_export.checks.batch_pool import Found, Remembered
from gradflow_export.checks.unlearned_part import parts_of
from gradflow_export.metrics.constants import (
    attained,
    column_levels,
    column_losses,
    constant_loss,
    constant_losses,
    entries,
    losses,
)


@pytest.mark.parametrize("kind", ["squared", "absolute", "huber", "binary"])
def test_a_loss_is_the_mean_of_those_of_its_columns(kind):
    """Of samples and of the best constant prediction."""
    noise = np.random.default_rng(0)
    y, p = noise.integers(0, 2, (40, 3)).astype(float), noise.uniform(0.1, 0.9, (40, 3))
    assert np.allclose(entries(kind, p, y).mean(axis=1), losses(kind, p, y))
    assert np.isclose(constant_losses(kind, y).mean(), constant_loss(kind, y))


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_each_column_is_compared_with_its_own_constant(scale):
    """The scale of a column changes nothing, nor does what the others cost."""
    y = np.random.default_rng(0).normal(size=(600, 3)) * [1.0, scale, 1.0]
    said = np.column_stack([y[:, 0], np.zeros(600), 0.5 * y[:, 2]])
    shares = column_losses("squared", said, y) / column_levels("squared", y)
    told = parts_of("head", {"over_constant": shares})
    assert told["column.least"] == {"head": 0.0}
    assert told["column.over_constant"] == {"head[1]": pytest.approx(1.0, abs=0.01)}


def test_losses_whose_least_is_not_0_have_no_columns():
    """A student may have learned all of what a teacher says and still be near the entropy of it."""
    memory = Remembered()
    found = Found(kind="soft", outputs=2, own=True, count=8)
    for _ in range(9):
        told = memory.take(found, np.column_stack([np.log(np.full((8, 2), 0.5)), np.full((8, 2), 0.5)]))
    assert "column.least" not in told


def test_classes_are_one_part():
    """Of classes the fit is compared with what the most frequent one costs."""
    memory, noise = Remembered(), np.random.default_rng(0)
    found = Found(kind="classes", inputs=3, outputs=1, own=True, count=32)
    for _ in range(24):
        x = noise.normal(size=(32, 3))
        told = memory.take(found, np.column_stack([x, np.full(32, -np.log(3.0)), x.argmax(axis=1)]))
    assert told["column.over_constant"] == {"": pytest.approx(1.0, abs=0.02)}
    assert told["column.attained"][""] == pytest.approx(told["target.attained"][""], abs=0.05)
    assert told["column.attained"][""] < 0.6


@pytest.mark.parametrize("even", [True, False])
def test_a_sign_that_is_random_leaves_the_square(even):
    """One column follows from the inputs, of one the size alone, and one is noise whose size follows from them."""
    memory, noise = Remembered(), np.random.default_rng(0)
    found = Found(kind="squared", inputs=4, outputs=3, own=True, count=32, even=even)
    for _ in range(24):
        x = noise.normal(size=(32, 4))
        signs = noise.choice([-1.0, 1.0], 32)
        y = np.column_stack([x[:, 0], signs * (2.0 + x[:, 1]), (1.0 + np.abs(x[:, 2])) * noise.normal(size=32)])
        told = memory.take(found, np.column_stack([x, x[:, :1], np.zeros((32, 2)), y]))
    assert ("column.least" in told) is even
    if even:
        assert set(told["column.over_constant"]) == {"[1]", "[2]"}
        assert all(value > 0.8 for value in told["column.attained"].values())
        assert told["column.square"]["[1]"] < 0.2
        assert told["column.square"]["[2]"] > 0.6


@pytest.mark.parametrize("columns", [3, 2])
@pytest.mark.filterwarnings("error")
def test_classes_without_a_column_have_no_loss(columns):
    """A fit is of so many classes at most, and what it says of the others is not known."""
    targets = np.eye(3)[:, :columns]
    assert np.isnan(attained("classes", np.full((3, columns), 0.2), targets)) == (columns < 3)
