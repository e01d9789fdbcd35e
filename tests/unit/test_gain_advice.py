"""When a chain of gains gets advice, and which."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradflow_export.writers.gain_advice import gain_advice

GAIN = st.one_of(st.none(), st.floats(0, 1e30), st.just(math.inf), st.just(math.nan))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(GAIN, max_size=40))
def test_advice_is_given_exactly_where_most_transitions_damp_or_amplify(gains):
    """More than half as many as there are blocks; what is missing or not finite counts as neither."""
    finite = [gain for gain in gains if gain is not None and math.isfinite(gain)]
    most = (len(gains) + 1) // 2
    damped, amplified = sum(gain < 0.5 for gain in finite), sum(gain > 2.0 for gain in finite)
    advice = gain_advice(gains)
    assert bool(advice) is (damped > most or amplified > most)
    if advice:
        assert advice[0].startswith(f"{max(damped, amplified)} of {len(gains)} transitions")
        assert ("damp" in advice[0].split(".")[0]) is (damped > most)
        assert len(advice) > 2


@pytest.mark.parametrize(
    ("gains", "said"), [([0.1] * 400, "1e-400 times"), ([1e-3, 0.0, 0.1, 0.1], ""), ([0.1, None, 0.1, 0.1, 0.1], "")]
)
def test_the_gain_of_the_whole_chain_is_said_where_it_is_known(gains, said):
    """Beyond what a float holds too; not where the chain is cut or a gain is missing."""
    (first, *_) = gain_advice(gains)
    assert said in first
    assert ("From the last block" in first) is bool(said)
