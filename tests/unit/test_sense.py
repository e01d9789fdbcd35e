"""Whether predictions go with their targets, whatever these scatter by."""

import numpy as np
import pytest

from gradflow_export.metrics.constants import sense


@pytest.mark.parametrize("known", [0.0, 0.3])
def test_little_that_is_foretold_shows_beside_much_noise(known):
    """A tenth of the targets' variance is seen in some batches of 64; nothing is seen where there is nothing."""
    g = np.random.default_rng(0)
    said = g.standard_normal((16, 64, 1))
    meant = known * said + g.standard_normal((16, 64, 1))
    shown = [sense("squared", p, y, meant.reshape(-1, 1)) for p, y in zip(0.01 * said + 5, meant, strict=True)]
    assert (sum(shown) >= 3 * len(shown) ** 0.5) == (known > 0)


@pytest.mark.parametrize("known", [0.0, 0.5])
def test_classes_are_judged_against_their_shares(known):
    """A model that gives each class its share says nothing; one that says a little more is seen."""
    g = np.random.default_rng(0)
    y = g.choice(3, 1024, p=[0.6, 0.3, 0.1])
    scores = np.log([0.6, 0.3, 0.1]) + 0.05 * g.standard_normal((1024, 3))
    scores[np.arange(1024), y] += known * np.abs(g.standard_normal(1024))
    logs = scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))
    parts = [sense("classes", logs[i : i + 64][np.arange(64), y[i : i + 64]][:, None], y[i : i + 64, None], y[:, None])
             for i in range(0, 1024, 64)]  # fmt: skip
    assert (sum(parts) >= 3 * len(parts) ** 0.5) == (known > 0)


def test_a_constant_answer_has_no_sense():
    """An answer that is the same for all samples, and losses of which the answer is not kept, tell nothing."""
    y = np.arange(8.0)[:, None]
    assert sense("squared", np.ones((8, 1)), y, y) == 0.0
    assert np.isnan(sense("margin", y, y, y))
