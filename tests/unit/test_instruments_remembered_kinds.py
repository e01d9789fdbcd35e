"""How many different targets a loss has seen, whatever entered the model beside them."""

from __future__ import annotations

import numpy as np
import pytest

from gradflow_export.checks.batch_pool import Found, Remembered


def test_targets_of_another_kind_of_pass_count_as_well():
    """A critic is shown samples as real and noise through the generator as false: neither pass alone has both."""
    memory = Remembered()
    real = np.column_stack([np.random.default_rng(0).normal(size=(8, 2)), np.zeros(8), np.ones(8)])
    false = np.column_stack([np.random.default_rng(1).normal(size=(8, 4)), np.zeros(8), np.zeros(8)])
    found = {"kind": "binary", "logits": True, "outputs": 1, "own": True, "count": 8}
    first = memory.take(Found(inputs=2, **found), real)
    second = memory.take(Found(inputs=4, **found), false)
    assert first["target.distinct"] == {"": 1.0}
    assert second["target.distinct"] == {"": 2.0}


def test_targets_that_are_all_alike_stay_one():
    """What enters may change as it likes."""
    memory = Remembered()
    for width in (2, 4, 2):
        rows = np.column_stack([np.ones((8, width)), np.zeros(8), np.ones(8)])
        told = memory.take(Found(kind="binary", logits=True, inputs=width, outputs=1, own=True, count=8), rows)
        assert told["target.distinct"] == {"": 1.0}


@pytest.mark.parametrize(("tokens", "even", "there"), [(False, True, True), (True, True, False), (False, False, False)])
def test_what_a_fit_in_closed_form_explains_is_read(tokens, even, there):
    """After a dozen readings of a loss that rests, never of words, whose numbers are no sizes, nor of weighted samples."""
    memory, noise = Remembered(), np.random.default_rng(0)
    found = Found(kind="squared", inputs=3, outputs=1, own=True, count=16, tokens=tokens, even=even)
    for reading in range(1, 13):
        x = noise.integers(0, 4, size=(16, 3)).astype(float)
        told = memory.take(found, np.column_stack([x, np.full(16, 9.0), x[:, 0]]))
        assert ("target.attained" in told) is (there and reading == 12)
    assert not there or told["target.attained"][""] < 0.1


@pytest.mark.parametrize(("batch", "least", "most"), [(8, 8, 16), (64, 28, 32), (512, 28, 32)])
def test_all_rows_are_looked_at_again_once_an_eighth_is_new(batch, least, most):
    """Of 96 readings every third at most; of 8 rows each, ever fewer the more are remembered."""
    memory, noise, told = Remembered(), np.random.default_rng(0), 0
    found = Found(kind="squared", inputs=3, outputs=1, own=True, count=batch, steps=(1,))
    for _ in range(96):
        told += "target.tested" in memory.take(found, noise.normal(size=(batch, 5)))
    assert least <= told <= most
