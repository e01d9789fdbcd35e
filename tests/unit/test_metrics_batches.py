"""What is told of a batch of inputs."""

from __future__ import annotations

import numpy as np
import pytest

from gradflow_export.metrics.batches import input_statistics


@pytest.mark.parametrize("missing", [0.005, 0.02, 0.05])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_a_placeholder_squeezes_all_other_values(missing, scale):
    """Whatever the size of the numbers, and however rare it is."""
    noise = np.random.default_rng(0)
    values = noise.normal(300.0, 50.0, (64, 40))
    values[noise.random(values.shape) < missing] = -2147483648.0
    assert input_statistics(scale * (values - values.min()) / np.ptp(values))["input.squeezed_share"] > 0.9


@pytest.mark.parametrize("edge", [2.0, 6.0, 20.0])
@pytest.mark.parametrize("radius", [2.0, 4.0])
def test_pictures_with_a_background_are_not_squeezed(edge, radius):
    """A few bright pixels, whose edges are more or less soft, set no scale that the rest is lost in."""
    noise = np.random.default_rng(0)
    rows, columns = np.mgrid[0:16, 0:16]
    y, x = noise.uniform(4, 12, (2, 64, 1, 1))
    bright = 0.5 - 0.5 * np.tanh(edge / 2 * (((rows - y) ** 2 + (columns - x) ** 2) / radius**2 - 1))
    assert input_statistics(bright.reshape(64, -1))["input.squeezed_share"] == 0.0
