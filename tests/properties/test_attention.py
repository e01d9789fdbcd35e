"""Laws of attention metrics: permutations of heads and keys, shifts of logits, size of the batch, ranges."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradflow_export.metrics import attention as terms_of
from gradflow_export.metrics.attention import attention_rows, max_logit, ratio, sampled_scores

OF_ALL = (
    terms_of.mean_entropy, terms_of.entropy_bound, terms_of.sparsity, terms_of.sink_share, terms_of.head_divergence,
    terms_of.head_diversity,
)  # fmt: skip


def head_entropies(rows):
    return ratio(terms_of.head_entropies(rows))


def rank_residual(tokens):
    return ratio(terms_of.rank_residual(tokens))


def holds_for(*strategies):
    """Try a law on thirty examples, the same ones every time."""
    return lambda law: settings(max_examples=30, deadline=None, derandomize=True)(given(*strategies)(law))


@st.composite
def logits(draw):
    """Return logits of random shape and size, causal or not."""
    heads, queries, keys = draw(st.integers(2, 4)), draw(st.integers(2, 5)), draw(st.integers(2, 6))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    size = draw(st.sampled_from([1e-2, 1.0, 30.0]))
    values = size * torch.randn(2, heads, queries, keys, generator=generator, dtype=torch.float64)
    if draw(st.booleans()):
        values = values.masked_fill(torch.ones(queries, keys, dtype=torch.bool).triu(1), -math.inf)
    return values


def of_all(values):
    rows = attention_rows(values)
    return [ratio(measure(rows)).item() for measure in OF_ALL]


@holds_for(logits(), st.randoms(use_true_random=False))
def test_neither_heads_nor_keys_have_an_order(values, random):
    """Permuted heads permute their entropies and change nothing else; permuted keys change nothing at all."""
    heads, keys = list(range(values.shape[1])), list(range(values.shape[3]))
    random.shuffle(heads)
    random.shuffle(keys)
    permuted = values[:, heads][..., keys]
    assert of_all(permuted) == pytest.approx(of_all(values), rel=1e-9, abs=1e-12)
    before, after = (head_entropies(attention_rows(v)) for v in (values, permuted))
    torch.testing.assert_close(after, before[heads], rtol=1e-9, atol=1e-12)


@holds_for(logits(), st.floats(-50, 50))
def test_a_shift_of_all_logits_is_not_seen(values, shift):
    """Softmax does not see a constant, so that neither does anything but the greatest logit."""
    assert of_all(values + shift) == pytest.approx(of_all(values), rel=1e-6, abs=1e-9)


@holds_for(logits())
def test_ranges_and_order(values):
    """Entropy lies between its bound and that of uniform attention; shares in [0, 1]; diversity in [0, 2]."""
    rows = attention_rows(values)
    nats, least, few, sink, apart, diversity = of_all(values)
    assert -1e-12 <= least <= nats + 1e-9
    assert nats <= math.log(values.shape[3]) + 1e-9
    assert 0 <= few <= 1
    assert 1 / values.shape[3] - 1e-9 <= sink <= 1 + 1e-9
    assert 0 <= apart <= math.log(values.shape[1]) + 1e-9
    assert math.isnan(diversity) or -1e-9 <= diversity <= 2
    assert ((head_entropies(rows) >= -1e-12) & (head_entropies(rows) <= 1 + 1e-12)).all()
    assert max_logit(rows).item() == pytest.approx(values[torch.isfinite(values)].abs().max().item())


@holds_for(logits(), st.integers(2, 5))
def test_the_batch_does_not_count(values, times):
    """A batch of copies of one sample gives what the sample gives: averages over samples, not sums."""
    alone = values[:1]
    assert of_all(sampled_scores(alone.repeat(times, 1, 1, 1))) == pytest.approx(of_all(alone), rel=1e-9, abs=1e-12)


@holds_for(st.integers(0, 999), st.integers(-90, 90), st.integers(2, 6))
def test_the_residual_sees_neither_scale_nor_order_of_tokens(seed, exponent, positions):
    """Powers of two and permuted tokens leave it as it is; a common vector added to all tokens lowers it."""
    tokens = torch.randn(2, positions, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    value = rank_residual(tokens).item()
    assert 0 <= value <= 1
    assert rank_residual(tokens.flip(1) * 2.0**exponent).item() == pytest.approx(value, rel=1e-12)
    shifted = rank_residual(tokens - tokens.mean(dim=1, keepdim=True) + 10.0).item()
    assert shifted < rank_residual(tokens - tokens.mean(dim=1, keepdim=True)).item()
