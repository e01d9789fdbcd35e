"""What must hold of recurrent dynamics and policies whatever the numbers are."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradflow_export.metrics.policy import discrete_entropy
from gradflow_export.metrics.recurrent import Layer, dynamics, run
from gradflow_export.metrics.spectra import spectral_norm, spectral_radius

KINDS = {"RNN_TANH": 1, "RNN_RELU": 1, "GRU": 3, "LSTM": 4}
SEEDS = st.integers(0, 10_000)


def made(kind, seed, width=5, size=0.5):
    """Return a layer with random weights, inputs, and the steps it makes of them."""
    rng = np.random.default_rng(seed)
    rows = KINDS[kind] * width
    parts = [rng.normal(0, size, shape) for shape in ((rows, 3), (rows, width), (rows,), (rows,))]
    layer = Layer(kind, *parts)
    inputs = rng.normal(size=(12, 2, 3))
    return layer, inputs, run(layer, inputs, np.zeros((2, layer.dimension)), [12, 7])


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(sorted(KINDS)), SEEDS, st.floats(0.01, 3.0))
def test_numbers_belong_together(kind, seed, size):
    """The radius is at most the norm, ranks lie in the state's width, decay and memory say the same."""
    _, _, steps = made(kind, seed, size=size)
    found = dynamics([steps], [[12, 7]])
    assert 0 <= found.spectral_radius <= found.spectral_norm * (1 + 1e-9)
    assert 0 <= found.effective_rank <= found.dimension * (1 + 1e-9)
    assert found.decay == pytest.approx(math.exp(found.lyapunov)) if math.isfinite(found.lyapunov) else found.decay == 0
    assert (found.memory == math.inf) == (found.lyapunov >= 0)
    assert found.lyapunov <= max(math.log(max(np.linalg.norm(s.jacobian(0), 2) for s in steps) + 1e-300), 0) + 5


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(sorted(KINDS)), SEEDS)
def test_sequences_do_not_see_each_other(kind, seed):
    """The order of the sequences in a batch changes nothing but rounding."""
    layer, inputs, steps = made(kind, seed)
    turned = run(layer, inputs[:, ::-1], np.zeros((2, layer.dimension)), [7, 12])
    for step, other in zip(steps, turned, strict=True):
        np.testing.assert_allclose(step.state, other.state[::-1], atol=1e-12)
    first, second = dynamics([steps], [[12, 7]]), dynamics([turned], [[7, 12]])
    assert first.lyapunov == pytest.approx(second.lyapunov, rel=1e-6, abs=1e-9)


@settings(max_examples=25, deadline=None)
@given(SEEDS, st.floats(0.01, 100.0))
def test_a_relu_recurrence_does_not_see_the_scale_of_its_inputs(seed, factor):
    """Without biases a ReLU layer is homogeneous: inputs times c leave every Jacobian as it is."""
    rng = np.random.default_rng(seed)
    layer = Layer("RNN_RELU", rng.normal(size=(6, 2)), rng.normal(0, 0.5, (6, 6)))
    inputs = rng.normal(size=(8, 1, 2))
    plain, scaled = (run(layer, inputs * c, np.zeros((1, 6)), [8]) for c in (1.0, factor))
    for step, other in zip(plain, scaled, strict=True):
        np.testing.assert_array_equal(step.jacobian(0), other.jacobian(0))


@settings(max_examples=25, deadline=None)
@given(SEEDS, st.floats(0.001, 1000.0))
def test_radius_and_norm_scale_with_the_matrix(seed, factor):
    """Both are homogeneous, dense or iterated, and the radius is the same for the transposed matrix."""
    matrix = np.random.default_rng(seed).normal(size=(30, 30))
    for dense in (0, 128):
        radius = spectral_radius(matrix, dense=dense)
        assert spectral_radius(factor * matrix, dense=dense) == pytest.approx(factor * radius, rel=1e-3)
        assert spectral_radius(matrix.T, dense=dense) == pytest.approx(radius, rel=1e-2)
    assert spectral_norm(factor * matrix) == pytest.approx(factor * spectral_norm(matrix), rel=1e-9)


@settings(max_examples=40, deadline=None)
@given(SEEDS, st.integers(2, 9), st.floats(-50, 50), st.floats(0.0, 40.0))
def test_entropy_does_not_see_shifts_or_order(seed, actions, shift, size):
    """Adding a constant to the logits or reordering actions changes nothing; the value lies in [0, 1]."""
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(size * rng.normal(size=(6, actions)))
    value = float(discrete_entropy(logits))
    assert -1e-12 <= value <= 1 + 1e-12
    order = torch.from_numpy(rng.permutation(actions))
    assert float(discrete_entropy(logits[:, order] + shift)) == pytest.approx(value, abs=1e-9)
    blocked = torch.cat([logits, torch.full((6, 2), -math.inf, dtype=torch.float64)], dim=1)
    assert float(discrete_entropy(blocked)) == pytest.approx(value, abs=1e-12)
