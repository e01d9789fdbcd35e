"""Laws of update scores and of phase and magnitude, over arbitrary entries."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradflow_export.metrics.discrete import SCORES, update_scores
from gradflow_export.metrics.phase import correlations, polar_gradients, quiet_share, row_changes, row_gradients, wrap

ENTRY = st.floats(-1, 1, width=32).map(lambda x: 0.0 if abs(x) < 1e-3 else x)
PAIRS = st.lists(st.tuples(ENTRY, ENTRY), min_size=1, max_size=30)
SIZES = st.lists(st.floats(1e-20, 1e20), min_size=1, max_size=30)


def holds_for(*strategies):
    """Try a law on sixty examples, the same ones every time."""
    return lambda law: settings(max_examples=60, deadline=None, derandomize=True)(given(*strategies)(law))


def columns(pairs):
    """Return two float64 tensors."""
    return torch.tensor(pairs, dtype=torch.float64).T


def scores(actual, expected):
    """Return the scores of one pair of tensors by name."""
    return dict(zip(SCORES, update_scores([actual], [expected])[:, 0].tolist(), strict=True))


@holds_for(PAIRS)
def test_scores_stay_in_their_range(pairs):
    """Shares, cosine and effectiveness are bounded, or undefined where nothing was meant."""
    actual, expected = columns(pairs)
    got = scores(actual, expected)
    if not expected.any():
        assert all(math.isnan(got[name]) for name in ("lost_share", "error", "cosine", "effectiveness"))
        return
    assert 0 <= got["lost_share"] <= 1
    assert 0 <= got["effectiveness"] <= 1 + 1e-12
    assert got["error"] >= 0
    assert math.isnan(got["cosine"]) is not bool(actual.any())
    assert got["effectiveness"] <= max(0.0, got["cosine"] if actual.any() else 0.0) + 1e-12


@holds_for(PAIRS, st.integers(-60, 60))
def test_scores_do_not_depend_on_scale(pairs, exponent):
    """Both updates times a power of two have the same scores."""
    actual, expected = columns(pairs)
    first, second = scores(actual, expected), scores(actual * 2.0**exponent, expected * 2.0**exponent)
    assert list(second.values()) == pytest.approx(list(first.values()), rel=1e-9, nan_ok=True)


@holds_for(PAIRS)
def test_an_exact_update_is_perfect(pairs):
    """Nothing is lost of an update that arrives."""
    expected = columns(pairs)[1]
    got = scores(expected, expected)
    if expected.any():
        wanted = {"lost_share": 0.0, "error": 0.0, "cosine": 1.0, "effectiveness": 1.0}
        assert {name: got[name] for name in wanted} == pytest.approx(wanted)


@holds_for(PAIRS, st.integers(0, 99))
def test_phase_and_magnitude_together_are_the_whole_gradient(pairs, seed):
    """``(g_phi / |w|)^2 + g_r^2 = |g|^2`` for complex entries, and Pythagoras for rows."""
    torch.manual_seed(seed)
    g = torch.complex(*columns(pairs))
    w = torch.randn(g.shape, dtype=g.dtype)
    phase, magnitude = polar_gradients(w, g)
    assert torch.allclose((phase / w.abs()).square() + magnitude.square(), g.abs().square(), atol=1e-12)
    rows, gradient = torch.view_as_real(w), torch.view_as_real(g)
    across, along = row_gradients(rows, gradient)
    assert torch.allclose(across.square() + along.square(), gradient.square().sum(1), atol=1e-12)


@holds_for(st.integers(0, 99), st.floats(0.1, 10.0))
def test_a_longer_row_has_the_same_direction(seed, factor):
    """Scaling a row turns it by nothing."""
    torch.manual_seed(seed)
    before = torch.randn(4, 3, dtype=torch.float64)
    angle, length = row_changes(before, factor * before)
    assert angle.abs().max().item() < 1e-12
    assert torch.allclose(length, (factor - 1) * before.norm(dim=1))


@holds_for(st.floats(-1e3, 1e3))
def test_wrapped_angles_are_the_same_angle(angle):
    """A wrapped angle differs by whole turns and lies between -pi and pi."""
    wrapped = wrap(torch.tensor(angle, dtype=torch.float64)).item()
    assert -math.pi <= wrapped <= math.pi
    assert math.cos(wrapped - angle) == pytest.approx(1.0, abs=1e-9)


@holds_for(SIZES, st.integers(-60, 60))
def test_quiet_nodes_do_not_depend_on_scale(sizes, exponent):
    """Loss scale cannot make a node quiet."""
    values = torch.tensor(sizes, dtype=torch.float64)
    share = quiet_share(values).item()
    assert 0 <= share <= 0.5
    assert quiet_share(values * 2.0**exponent).item() == pytest.approx(share)


@holds_for(st.lists(st.tuples(st.floats(1e-3, 1e3), st.floats(1e-3, 1e3)), min_size=8, max_size=30))
def test_correlations_are_bounded_and_symmetric(pairs):
    """Both lie in [-1, 1], and neither side is special."""
    a, b = columns(pairs)
    there, back = correlations(a, b).tolist(), correlations(b, a).tolist()
    assert there == pytest.approx(back, abs=1e-9, nan_ok=True)
    assert all(math.isnan(r) or -1 <= r <= 1 for r in there)
