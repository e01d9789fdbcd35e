"""Laws of paths, fields and spectra over arbitrary numbers: scale, turning of coordinates, range."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradflow_export.metrics.direction import coherence
from gradflow_export.metrics.jacobian import Linearized, spectrum_of
from gradflow_export.metrics.path import path_statistics
from gradflow_export.metrics.vector import circulation, gradient_field, noise_scale

SEEDS = st.integers(0, 2**31)


def holds_for(*strategies):
    """Try a law on thirty examples, the same ones every time."""
    return lambda law: settings(max_examples=30, deadline=None, derandomize=True)(given(*strategies)(law))


def draw(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape)


@holds_for(SEEDS, st.integers(-60, 60), st.integers(-60, 60))
def test_a_path_does_not_depend_on_units_or_coordinates(seed, of_weights, of_loss):
    """Scaled weights, a scaled loss, a shift and a rotation of all coordinates leave every statistic as it was."""
    positions, pulls = np.cumsum(draw(seed, 30, 4), axis=0), draw(seed + 1, 30, 4)
    turn = np.linalg.qr(draw(seed + 2, 4, 4))[0]
    plain = path_statistics(positions, pulls)
    weights, loss = 2.0**of_weights, 2.0**of_loss
    moved = path_statistics((positions @ turn + 3.0) * weights, pulls @ turn * loss / weights)
    for name, value in vars(plain).items():
        assert getattr(moved, name) == pytest.approx(value, rel=1e-4, abs=1e-6), name


@holds_for(SEEDS, st.integers(3, 64), st.integers(1, 6))
def test_path_statistics_stay_in_their_range(seed, points, entries):
    """Shares between 0 and 1, cosines between -1 and 1, angles between 0 and pi."""
    found = path_statistics(draw(seed, points, entries), draw(seed + 1, points, entries))
    assert 0 <= found.plane <= 1 + 1e-9
    assert -1 - 1e-9 <= found.work <= 1 + 1e-9
    assert 0 <= found.straightness <= 1 + 1e-9
    assert 0 <= found.turning <= math.pi
    assert found.growth > 0
    assert -1 - 1e-9 <= found.coherence <= 1 + 1e-9
    assert found.winding <= (points - 1) / 2


@holds_for(SEEDS, st.integers(-200, 200))
def test_coherence_sees_directions_alone(seed, exponent):
    """Each gradient may have a scale of its own."""
    gradients = draw(seed, 5, 7)
    scales = 2.0 ** (exponent * draw(seed + 1, 5, 1))
    assert coherence(gradients * scales) == pytest.approx(coherence(gradients), abs=1e-9)


@holds_for(SEEDS)
def test_rotation_and_divergence_of_a_linear_field(seed):
    """With as many probes as Hadamard rows the trace is exact up to the off-diagonal part; the share is a share."""
    matrix = torch.as_tensor(draw(seed, 4, 4))
    x = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    found = circulation(Linearized([x], [matrix @ x]), single=False, probes=128)
    symmetric = (matrix + matrix.T) / 2
    spread = math.sqrt(2 * float(symmetric.square().sum() - symmetric.diag().square().sum()) / 128) / 4
    assert found.divergence == pytest.approx(-float(matrix.trace()) / 4, abs=6 * spread + 1e-12)
    assert 0 <= found.rotation <= 1
    turned = circulation(Linearized([x], [matrix.T @ x]), single=False, probes=128)
    assert turned.rotation == pytest.approx(found.rotation, abs=1e-9)


@holds_for(SEEDS, st.integers(1, 6))
def test_a_spectrum_bounds_what_a_map_does(seed, size):
    """The radius is at most the norm, ranks lie between 1 and the dimension, stable at most effective squared."""
    found = spectrum_of(draw(seed, size, size))
    assert found.spectral_radius <= found.greatest * (1 + 1e-9)
    assert 1 - 1e-9 <= found.stable_rank <= size + 1e-9
    assert 1 - 1e-9 <= found.effective_rank <= size + 1e-9
    assert found.gain <= found.greatest * (1 + 1e-9)
    assert found.condition >= 1 - 1e-9
    assert found.transient >= 1
    assert 0 <= found.outside <= 1


@holds_for(st.floats(0.1, 10), st.floats(0, 10), st.integers(1, 64))
def test_noise_scale_is_unbiased(signal, noise, small):
    """Given the expected squared norms it returns the signal and noise that they were made of."""
    found = noise_scale(signal + noise / small, signal + noise / (8 * small), small, 8 * small)
    assert found.signal == pytest.approx(signal)
    assert found.noise == pytest.approx(noise, abs=1e-6 * small)


def test_a_game_among_many_players_has_one_field():
    """Three players in a ring: the field is the joint gradient, the Jacobian square and all rotation."""
    players = [torch.randn(2, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    losses = [
        (a * (b - c)).sum()
        for a, b, c in zip(players, players[1:] + players[:1], players[2:] + players[:2], strict=True)
    ]
    xi, jacobian = gradient_field(losses, [[p] for p in players])
    expected = torch.cat([players[1] - players[2], players[2] - players[0], players[0] - players[1]])
    assert torch.allclose(xi, expected.detach())
    assert circulation(jacobian, single=False).rotation == pytest.approx(1.0)
