"""Jacobians, games and paths against closed forms, dense matrices by autograd, and SciPy."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from scipy.linalg import eigvals
from scipy.sparse.linalg import eigs
from torch.nn import functional as F

from gradflow_export.metrics.direction import coherence
from gradflow_export.metrics.jacobian import DENSE, Linearized, spectrum, spectrum_of
from gradflow_export.metrics.path import path_errors, path_statistics
from gradflow_export.metrics.vector import (
    circulation,
    directional_curl,
    gradient_diversity,
    gradient_field,
    noise_scale,
)


def leaf(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def linear(matrix):
    """The Jacobian object of ``x -> matrix x``."""
    x = torch.zeros(matrix.shape[1], dtype=torch.float64, requires_grad=True)
    return Linearized([x], [torch.as_tensor(matrix, dtype=torch.float64) @ x])


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def test_products_equal_the_dense_jacobian_by_autograd():
    """Rows, columns and both products of a nonlinear map of several tensors are those of torch.func.jacrev."""
    a, b = leaf(3, 2), leaf(4)

    def both(a, b):
        return torch.tanh(a.flatten() * a.sum()), (b * b.roll(1)).reshape(2, 2) * a[0, 0]

    jacobian = Linearized([a, b], both(a, b))
    rows = torch.func.jacrev(both, argnums=(0, 1))(a, b)
    expected = torch.cat(
        [torch.cat([block.reshape(n, -1) for block in row], dim=1) for n, row in zip((6, 4), rows, strict=False)]
    )
    assert torch.allclose(torch.as_tensor(jacobian.dense()), expected)
    v, u = torch.randn(10, dtype=torch.float64), torch.randn(10, dtype=torch.float64)
    assert torch.allclose(jacobian.apply(v), expected @ v)
    assert torch.allclose(jacobian.transposed(u), expected.T @ u)


def test_parts_that_nothing_depends_on_are_zero():
    """An output without a graph and an input that is not used are rows and columns of zeros."""
    a, b = leaf(2), leaf(3)
    jacobian = Linearized([a, b], [a * 2, torch.ones(2, dtype=torch.float64)])
    assert jacobian.dense().tolist() == [[2, 0, 0, 0, 0], [0, 2, 0, 0, 0], [0] * 5, [0] * 5]
    assert jacobian.apply(torch.ones(5, dtype=torch.float64)).tolist() == [2, 2, 0, 0]


def test_spectral_radius_of_a_complex_pair():
    """0.9 times a rotation by one radian has radius 0.9 and angle 1, which a Rayleigh quotient misses."""
    c, s = math.cos(1.0), math.sin(1.0)
    found = spectrum(linear(0.9 * np.array([[c, -s], [s, c]])))
    assert found.spectral_radius == pytest.approx(0.9, rel=1e-12)
    assert found.greatest_angle == pytest.approx(1.0)
    assert (found.outside, found.condition, found.stable_rank) == (0.0, pytest.approx(1.0), pytest.approx(2.0))


def test_non_normal_map_grows_before_it_decays():
    """[[.9, 5], [0, .9]] has radius 0.9 and gain 5.157, and its powers grow far beyond 0.9^k."""
    matrix = np.array([[0.9, 5.0], [0.0, 0.9]])
    found = spectrum(linear(matrix))
    assert found.spectral_radius == pytest.approx(0.9, rel=1e-6)
    assert found.greatest == pytest.approx(5.15707, rel=1e-5)
    powers = [np.linalg.norm(np.linalg.matrix_power(matrix, k), 2) / 0.9**k for k in range(1, 21)]
    assert found.transient == pytest.approx(max(powers), rel=1e-6)
    assert spectrum_of(np.array([[0.0, 1.0], [0.0, 0.0]])).transient == math.inf


def test_gaussian_matrix_equals_scipy():
    """A 200 x 200 matrix with entries N(0, 1/200): eigenvalues as SciPy finds them, near the unit circle."""
    matrix = np.random.default_rng(0).standard_normal((200, 200)) / math.sqrt(200)
    found = spectrum(linear(matrix))
    # ARPACK may miss one of several eigenvalues of nearly the same size, so that only the largest is its own.
    largest = eigs(matrix, k=6, v0=np.ones(200), return_eigenvectors=False)
    assert found.spectral_radius == pytest.approx(np.abs(largest).max(), rel=1e-6)
    assert found.spectral_radius == pytest.approx(1.0, abs=0.1)
    assert np.abs(found.eigenvalues[:6]) == pytest.approx(np.sort(np.abs(eigvals(matrix)))[::-1][:6], rel=1e-6)


def test_large_maps_are_measured_without_the_matrix():
    """Above 256 dimensions Arnoldi and Lanczos give the same radius and norm as the matrix written out."""
    matrix = np.random.default_rng(1).standard_normal((DENSE + 44, DENSE + 44)) / 20
    found, dense = spectrum(linear(matrix)), spectrum_of(matrix)
    assert found.bounded
    assert found.spectral_radius == pytest.approx(dense.spectral_radius, rel=1e-5)
    assert found.greatest == pytest.approx(dense.greatest, rel=1e-4)
    assert found.gain == pytest.approx(dense.gain, rel=0.1)
    assert found.condition <= dense.condition


@pytest.mark.parametrize(
    ("sigma", "rank", "stable"), [((1.0,) * 4, 4.0, 4.0), ((3.0, 0.0, 0.0), 1.0, 1.0), ((2.0, 1.0), 1.88988, 1.25)]
)
def test_ranks_of_known_spectra(sigma, rank, stable):
    """The identity has full rank, one direction rank 1, and (2, 1) lies between."""
    found = spectrum_of(np.diag(sigma))
    assert found.effective_rank == pytest.approx(rank, rel=1e-5)
    assert found.stable_rank == pytest.approx(stable)
    assert found.gain == pytest.approx(math.sqrt(sum(s * s for s in sigma) / len(sigma)))


def test_bilinear_game_only_rotates():
    """x'Ay: no divergence, rotation share 1, eigenvalues plus and minus i times the singular values of A."""
    x, y, a = leaf(4), leaf(4), torch.randn(4, 4, dtype=torch.float64)
    value = x @ a @ y
    xi, jacobian = gradient_field([value, -value], [[x], [y]])
    found = circulation(jacobian, single=False)
    assert found.rotation == pytest.approx(1.0, abs=1e-10)
    assert found.divergence == pytest.approx(0.0, abs=1e-10)
    assert directional_curl(jacobian, xi)[1] == pytest.approx(1.0, abs=1e-10)
    eigenvalues = spectrum(jacobian).eigenvalues
    assert np.abs(eigenvalues.real).max() < 1e-7
    assert np.sort(np.abs(eigenvalues.imag))[::2] == pytest.approx(np.linalg.svd(a.numpy())[1][::-1], abs=1e-7)


def test_share_of_rotation_in_a_plane():
    """The field [[a, b], [-b, a]] has rotation share b^2/(a^2+b^2) and divergence -a per dimension."""
    a, b = 0.3, 0.8
    x, y = leaf(1), leaf(1)
    losses = [(a / 2 * x**2 + b * x * y).sum(), (a / 2 * y**2 - b * x * y).sum()]
    xi, jacobian = gradient_field(losses, [[x], [y]])
    found = circulation(jacobian, single=False)
    assert found.rotation == pytest.approx(b**2 / (a**2 + b**2), abs=1e-10)
    assert found.divergence == pytest.approx(-a, abs=1e-10)
    assert (found.expanding, directional_curl(jacobian, xi)[0]) == (0.0, pytest.approx(b, abs=1e-10))


def test_dirac_gan_at_equilibrium():
    """Eigenvalues are plus and minus i f'(0) = 0.5 i (Mescheder et al. 2018, lemma 2.2)."""
    theta, psi = (torch.zeros(1, dtype=torch.float64, requires_grad=True) for _ in range(2))
    value = F.logsigmoid(theta * psi).sum()
    _, jacobian = gradient_field([value, -value], [[theta], [psi]])
    assert np.sort(spectrum(jacobian).eigenvalues.imag) == pytest.approx([-0.5, 0.5], abs=1e-6)


def test_one_loss_does_not_rotate():
    """Measured as if it were a game, the Hessian of a network has no antisymmetric part."""
    net = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2)).double()
    loss = net(torch.randn(7, 3, dtype=torch.float64)).square().mean()
    _, jacobian = gradient_field([loss], [list(net.parameters())])
    assert circulation(jacobian, single=False).rotation == pytest.approx(0.0, abs=1e-16)
    assert circulation(jacobian, single=True).rotation == 0.0


def test_hessian_of_logistic_regression():
    """At 0 it is X'X / 4n."""
    x, w = torch.randn(20, 4, dtype=torch.float64), torch.zeros(4, dtype=torch.float64, requires_grad=True)
    y = (torch.rand(20) > 0.5).double()
    _, jacobian = gradient_field([F.binary_cross_entropy_with_logits(x @ w, y)], [[w]])
    hessian = (x.T @ x / 80).numpy()
    assert jacobian.dense() == pytest.approx(hessian, abs=1e-10)
    found = circulation(jacobian, single=True, probes=4096)
    spread = math.sqrt(2 * (np.square(hessian).sum() - np.square(np.diag(hessian)).sum()) / 4096) / 4
    assert found.divergence == pytest.approx(-np.trace(hessian) / 4, abs=5 * spread)


def test_coherence_of_known_directions():
    """Equal directions give 1, orthogonal ones 0, opposite ones -1, whatever their lengths."""
    assert coherence(np.outer([1.0, 3.0, 1e-30], [1.0, 2.0])) == pytest.approx((1.0, 1.0))
    assert coherence(np.diag([1.0, 2.0, 5.0])) == pytest.approx((1 / math.sqrt(3), 0.0))
    assert coherence(np.array([[1.0], [-4.0]])) == pytest.approx((0.0, -1.0))
    assert all(math.isnan(value) for value in coherence(np.array([[1.0], [0.0], [math.nan]])))


def test_noise_scale_of_a_known_problem():
    """g_i = H (theta - x_i) with known moments: signal 1.89, noise 2.9, 1.5344 samples (McCandlish et al. 2018)."""
    rng = np.random.default_rng(0)
    spread = np.sqrt([0.5, 0.2, 0.1])
    gradients = (0.3 + rng.standard_normal((64_000, 3)) * spread) * [1.0, 2.0, 4.0]
    small = np.square(gradients.reshape(-1, 8, 3).mean(axis=1)).sum(axis=1).mean()
    big = np.square(gradients.reshape(-1, 64, 3).mean(axis=1)).sum(axis=1).mean()
    found = noise_scale(small, big, 8, 64)
    assert found.signal == pytest.approx(1.89, rel=0.03)
    assert found.noise == pytest.approx(2.9, rel=0.05)
    assert found.samples == pytest.approx(1.5344, rel=0.06)


def test_gradient_diversity_at_its_ends():
    """n equal gradients have diversity 1/n, orthogonal ones 1, those that cancel none."""
    assert gradient_diversity([4.0, 4.0], 16.0) == 0.5
    assert gradient_diversity([4.0, 4.0], 8.0) == 1.0
    assert gradient_diversity([4.0, 4.0], 0.0) == math.inf


def descend(field, start, rate, steps):
    """Plain simultaneous descent: the positions and the field there."""
    position, positions, pulls = np.array(start, dtype=float), [], []
    for _ in range(steps):
        pull = np.array(field(position))
        positions.append(position)
        pulls.append(pull)
        position = position - rate * pull
    return np.array(positions), np.array(pulls)


def test_path_of_the_bilinear_game():
    """Radius grows by sqrt(1 + eta^2) and the angle by atan(eta) per step: 60 steps are 1.885 turns about the origin."""
    positions, pulls = descend(lambda p: (p[1], -p[0]), (1.0, 0.0), 0.2, 61)
    radii = np.linalg.norm(positions, axis=1)
    assert radii[1:] / radii[:-1] == pytest.approx(np.full(60, math.sqrt(1.04)))
    found = path_statistics(positions, pulls, (1, 1))
    # The mean of a window that holds no whole number of turns lies off the origin.
    assert found.winding == pytest.approx(60 * math.atan(0.2) / math.tau, abs=0.15)
    assert found.plane == pytest.approx(1.0)
    assert found.growth > 1.3
    assert found.turning == pytest.approx(math.atan(0.2), abs=0.05)
    assert found.work == pytest.approx(-math.cos(math.atan(0.2)), abs=0.02)


def test_path_statistics_equal_a_plain_twin(twin):
    """One player, four entries: straightness, work and turning from plain loops."""
    rng = np.random.default_rng(3)
    positions, pulls = np.cumsum(rng.standard_normal((9, 4)), axis=0), rng.standard_normal((9, 4))
    found = path_statistics(positions, pulls)
    moves = [(b - a).tolist() for a, b in itertools.pairwise(positions)]
    lengths = [math.hypot(*move) for move in moves]
    assert found.straightness == pytest.approx(math.dist(positions[0], positions[-1]) / sum(lengths))
    work = sum(
        sum(m * g for m, g in zip(move, pull, strict=False)) for move, pull in zip(moves, pulls[1:], strict=False)
    )
    effort = sum(length * math.hypot(*pull) for length, pull in zip(lengths, pulls[1:], strict=False))
    assert found.work == pytest.approx(work / effort)
    angles = [math.acos(twin.cosine(a, b)) for a, b in itertools.pairwise(moves)]
    assert found.turning == pytest.approx(sum(angles) / len(angles))


def test_straight_descent_does_not_wind():
    """A bowl is gone down to its end: no turn, work -1, and the path closes in."""
    found = path_statistics(*descend(lambda p: p, (1.0, 2.0, 3.0), 0.1, 40))
    assert found.winding <= 0.51
    assert found.straightness == pytest.approx(1.0)
    assert found.work == pytest.approx(-1.0)
    assert found.growth < 0.8


@pytest.mark.parametrize("momentum", [0.0, 0.9, 0.98])
def test_no_work_is_done_on_a_closed_path_of_one_loss(momentum):
    """Noise and momentum may wind as much as they like: what comes back has not gone downhill all the way."""
    rng = np.random.default_rng(5)
    curvature = np.array([0.4, 0.6])
    for _ in range(50):
        position, speed, positions, pulls = np.zeros(2), np.zeros(2), [], []
        for _ in range(264):
            pull = curvature * position + rng.standard_normal(2)
            positions.append(position)
            pulls.append(pull)
            speed = momentum * speed + pull
            position = position - 0.1 * speed
        assert path_statistics(np.array(positions[200:]), np.array(pulls[200:])).work > -0.5


def test_players_are_measured_in_their_own_units():
    """A player whose weights are a thousand times smaller goes round all the same; so does a scaled loss."""
    positions, pulls = descend(lambda p: (p[1], -p[0]), (1.0, 0.0), 0.2, 40)
    plain = path_statistics(positions, pulls, (1, 1))
    scaled = path_statistics(positions * [1.0, 1e-3], pulls * [1e-8, 1e-5], (1, 1))
    assert (scaled.winding, scaled.plane, scaled.work) == pytest.approx((plain.winding, plain.plane, plain.work))


def test_resting_weights_have_no_path():
    """Weights that move by rounding alone do not wind."""
    positions = 1.0 + 1e-9 * np.random.default_rng(0).standard_normal((30, 3))
    assert path_statistics(positions, np.ones((30, 3))).winding == 0.0


def test_the_stated_errors_of_a_path_are_those_of_the_weights_that_are_followed():
    """Forty of 4 000 weights that orbit and scatter are off by as much as their halves differ."""
    random = np.random.default_rng(0)
    steps = np.arange(64) * 0.2
    phase, size = random.uniform(0, 2 * math.pi, 4000), random.lognormal(0.0, 0.3, 4000)
    positions = size * np.cos(steps[:, None] + phase) + 0.3 * random.standard_normal((64, 4000)).cumsum(axis=0)
    pulls = np.gradient(-positions, axis=0) + 0.3 * random.standard_normal((64, 4000))
    true, off = path_statistics(positions, pulls), []
    for _ in range(60):
        chosen = random.choice(4000, 40, replace=False)
        some = positions[:, chosen], pulls[:, chosen]
        found, errors = path_statistics(*some), path_errors(*some, (40,))
        off.append(
            [abs(getattr(found, n) - getattr(true, n)) / getattr(errors, n) for n in ("plane", "growth", "work")]
        )
    size = np.median(off, axis=0)  # 1 of two halves
    assert ((size > 0.4) & (size < 2.0)).all(), size
