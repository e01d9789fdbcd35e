"""Attention metrics against slow twins in plain Python, and against values known from theory."""

import math
from functools import wraps
from itertools import combinations
from statistics import median

import pytest
import torch
from torch import nn
from torch.nn import functional

from gradflow_export.metrics import attention as terms_of
from gradflow_export.metrics.attention import (
    attention_rows,
    entropies,
    masked_logits,
    max_logit,
    ratio,
    ratio_error,
    sampled_scores,
)


def value_of(measure):
    """Return a measure that gives the value its terms make."""
    return wraps(measure)(lambda given: ratio(measure(given)))


entropy_bound, head_divergence, head_diversity, head_entropies, mean_entropy, rank_residual, sink_share, sparsity = (
    value_of(getattr(terms_of, name))
    for name in (
        "entropy_bound", "head_divergence", "head_diversity", "head_entropies", "mean_entropy", "rank_residual",
        "sink_share", "sparsity",
    )
)  # fmt: skip


def softmax(row):
    """Return the weights of one row of logits, ``None`` where a key is masked."""
    kept = [z for z in row if z != -math.inf]
    total = math.fsum(math.exp(z - max(kept)) for z in kept)
    return [None if z == -math.inf else math.exp(z - max(kept)) / total for z in row]


def rows_with_a_choice(logits):
    """Yield ``(sample, head, logits, weights)`` of every row with two or more admissible keys, masked keys left out."""
    for b, sample in enumerate(logits.tolist()):
        for h, head in enumerate(sample):
            for row in head:
                kept = [z for z in row if z != -math.inf]
                if len(kept) > 1:
                    yield b, h, kept, [p for p in softmax(row) if p is not None]


def mean(values):
    values = list(values)
    return math.fsum(values) / len(values)


def entropy(weights):
    return -math.fsum(p * math.log(p) for p in weights if p > 0)


def bound(row):
    """Return theorem 3.1 of Zhai et al. for one row."""
    count, centre = len(row), mean(row)
    size = math.sqrt(math.fsum((z - centre) ** 2 for z in row))
    b = math.exp(-size * math.sqrt(count / (count - 1)))
    whole = 1 + (count - 1) * b
    return math.log(whole) + size * math.sqrt(count * (count - 1)) * b / whole


def cosine(u, v):
    return math.fsum(a * b for a, b in zip(u, v, strict=True)) / math.sqrt(
        math.fsum(a * a for a in u) * math.fsum(b * b for b in v)
    )


def twins(logits):
    """Return every statistic of masked logits by plain loops."""
    rows = list(rows_with_a_choice(logits))
    heads, samples, keys = logits.shape[1], logits.shape[0], logits.shape[3]
    apart = {
        (b, h): [
            0.0 if p is None else p - 1 / sum(q is not None for q in softmax(row))
            for row in logits[b, h].tolist()
            for p in softmax(row)
        ]
        for b in range(samples)
        for h in range(heads)
    }
    shares = []
    for b in range(samples):
        for h in range(heads):
            chosen = [softmax(row) for row in logits[b, h].tolist() if sum(z != -math.inf for z in row) > 1]
            shares.append(max(mean(row[k] or 0.0 for row in chosen) for k in range(keys)))
    spread = []
    for b in range(samples):
        for q in range(logits.shape[2]):
            each = [[p for p in softmax(row) if p is not None] for row in logits[b, :, q].tolist()]
            if len(each[0]) > 1:
                joined = [mean(column) for column in zip(*each, strict=True)]
                spread.append(entropy(joined) - mean(entropy(weights) for weights in each))
    return {
        "head_entropies": [mean(entropy(w) / math.log(len(w)) for _, g, _, w in rows if g == h) for h in range(heads)],
        "mean_entropy": mean(entropy(w) for *_, w in rows),
        "entropy_bound": mean(bound(z) for _, _, z, _ in rows),
        "sparsity": mean(p < 0.1 / len(w) for *_, w in rows for p in w),
        "max_logit": max(abs(z) for z in logits.flatten().tolist() if z != -math.inf),
        "head_diversity": 1
        - mean(cosine(apart[b, g], apart[b, h]) for b in range(samples) for g, h in combinations(range(heads), 2)),
        "sink_share": mean(shares),
        "head_divergence": mean(spread),
    }


def statistics(logits):
    """Return what the package says of the same logits."""
    rows = attention_rows(logits)
    functions = (mean_entropy, entropy_bound, sparsity, max_logit, head_diversity, sink_share, head_divergence)
    return {"head_entropies": head_entropies(rows).tolist(), **{f.__name__: f(rows).item() for f in functions}}


def masks():
    """Return logits with no mask, a causal one, and a random one."""
    torch.manual_seed(0)
    plain = 3 * torch.randn(2, 3, 5, 6, dtype=torch.float64)
    causal = plain.masked_fill(torch.ones(5, 6, dtype=torch.bool).triu(1), -math.inf)
    hidden = torch.rand(2, 1, 5, 6) < 0.3
    hidden[..., :2] = False
    return {"plain": plain, "causal": causal, "random": plain.masked_fill(hidden, -math.inf)}


@pytest.mark.parametrize("kind", ["plain", "causal", "random"])
def test_every_statistic_equals_its_twin(kind):
    """Entropy, bound, sparsity, logits, diversity, sink and divergence are those of plain loops over the same rows."""
    logits = masks()[kind]
    found, expected = statistics(logits), twins(logits)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-9, abs=1e-12), name


def test_logits_are_those_of_scaled_dot_product_attention():
    """Softmax of the logits times the values is what torch returns: causal, masked, scaled, grouped, broadcast."""
    torch.manual_seed(1)
    q, k, v = (torch.randn(2, 4, 7, 8, dtype=torch.float64) for _ in range(3))
    seen = torch.rand(2, 1, 7, 7) < 0.6
    seen[..., 0] = True
    bias = torch.randn(4, 7, 7, dtype=torch.float64)
    cases = [
        ({"is_causal": True}, {"causal": True}, k, v),
        ({"attn_mask": seen}, {"mask": seen}, k, v),
        ({"attn_mask": bias, "scale": 0.7}, {"mask": bias, "scale": 0.7}, k, v),
        ({"enable_gqa": True}, {}, k[:, :2], v[:, :2]),
        ({}, {}, k[:1], v[:1]),
    ]
    for theirs, ours, key, value in cases:
        every = (2, -1, -1, -1)
        expected = functional.scaled_dot_product_attention(q, key.expand(every), value.expand(every), **theirs)
        weights = attention_rows(masked_logits(q, key, **ours)).weights
        values = value.repeat_interleave(4 // value.shape[1], dim=1)
        torch.testing.assert_close(weights @ values, expected, rtol=1e-9, atol=1e-12)


def test_weights_equal_those_that_multihead_attention_returns():
    """What is computed from the projections is what ``need_weights=True`` gives, head by head."""
    torch.manual_seed(2)
    mha = nn.MultiheadAttention(12, 3, batch_first=True).double()
    x = torch.randn(2, 6, 12, dtype=torch.float64)
    _, returned = mha(x, x, x, need_weights=True, average_attn_weights=False)
    q, k, _ = functional.linear(x, mha.in_proj_weight, mha.in_proj_bias).chunk(3, dim=-1)
    q, k = (t.unflatten(-1, (3, 4)).transpose(1, 2) for t in (q, k))
    torch.testing.assert_close(attention_rows(masked_logits(q, k)).weights, returned, rtol=0, atol=1e-12)


def test_samples_are_few_sequences_and_evenly_spaced_queries_with_the_last():
    """Whatever the batch and length, at most four samples and 512 queries are looked at, in their order."""
    q, k = torch.randn(5, 1, 1030, 2), torch.randn(5, 1, 9, 2)
    logits, whole = masked_logits(q, k), q @ k.transpose(-2, -1) / math.sqrt(2)
    assert logits.shape[0] == 3
    assert 256 <= logits.shape[2] <= 512
    torch.testing.assert_close(logits[:, :, -1], whole[[0, 2, 4], :, -1])
    torch.testing.assert_close(sampled_scores(whole), logits)
    wide = sampled_scores(torch.zeros(2, 64, 64, 4096))
    assert wide.numel() <= 2**20
    assert wide.shape[1] == 64


@pytest.mark.parametrize("fill", [-math.inf, -1e9, -1e4, torch.finfo(torch.float32).min])
def test_masked_scores_are_known_by_their_size(fill):
    """Every usual way to mask a score makes its key inadmissible, and no other."""
    scores = torch.tensor([[[[1.0, 2.0, fill], [700.0, -700.0, 0.0]]]])
    rows = attention_rows(sampled_scores(scores))
    assert rows.keys.tolist() == [[[2, 3]]]


def test_closed_forms_of_one_row():
    """Logits (2, 0 x 7) have 0.788399 of the greatest entropy, equal ones all of it, a one-hot row none."""
    row = torch.tensor([2.0] + [0.0] * 7, dtype=torch.float64)
    for logits, expected in ((row, 0.788399), (0 * row, 1.0), (1e3 * row, 0.0)):
        value = head_entropies(attention_rows(logits.reshape(1, 1, 1, 8)))
        assert value.item() == pytest.approx(expected, abs=1e-6)


def test_the_entropy_bound_is_attained_and_never_undercut():
    """For T = 10 and size 4 the bound is 0.618855: the row with one high logit has it, random rows have more."""
    high = torch.full((10,), -1.0, dtype=torch.float64)
    high[0] = 9.0
    high *= 4.0 / high.norm()
    rows = attention_rows(high.reshape(1, 1, 1, 10))
    assert entropy_bound(rows).item() == pytest.approx(0.618855, abs=1e-6)
    assert mean_entropy(rows).item() == pytest.approx(0.618855, abs=1e-6)
    torch.manual_seed(0)
    many = torch.randn(2000, 10, dtype=torch.float64)
    many -= many.mean(dim=1, keepdim=True)
    many *= 4.0 / many.norm(dim=1, keepdim=True)
    assert (entropies(attention_rows(many.reshape(1, 1, 2000, 10))) >= 0.618855 - 1e-6).all()


def test_head_diversity_of_copied_disjoint_and_random_heads():
    """Copied heads have none, disjoint one-hot heads at least 1, independent random heads about 1."""
    torch.manual_seed(0)
    one = torch.randn(1, 1, 12, 12, dtype=torch.float64)
    assert head_diversity(attention_rows(one.expand(1, 4, 12, 12))).item() == pytest.approx(0.0, abs=1e-9)
    disjoint = 1e3 * torch.eye(4, dtype=torch.float64)[:, None].expand(4, 6, 4)[None]
    assert head_diversity(attention_rows(disjoint)).item() >= 1.0
    free = head_diversity(attention_rows(torch.randn(2, 8, 32, 32, dtype=torch.float64)))
    assert free.item() == pytest.approx(1.0, abs=0.1)


def test_what_cannot_be_compared_is_undefined():
    """Uniform heads have no direction, and queries with one key no choice: NaN, not a number that looks real."""
    uniform = attention_rows(torch.zeros(1, 4, 6, 6))
    assert math.isnan(head_diversity(uniform))
    assert head_entropies(uniform).tolist() == pytest.approx([1.0] * 4)
    alone = attention_rows(torch.tensor([[[[0.0, -math.inf]]]]))
    assert math.isnan(head_entropies(alone))
    assert math.isnan(mean_entropy(alone))


def test_uniform_attention_leaves_no_residual_and_pure_attention_loses_it_fast():
    """Equal keys merge all tokens in one layer; attention without skip or MLP squares the residual away."""
    torch.manual_seed(0)
    x = torch.randn(2, 12, 32, dtype=torch.float64)
    zero = torch.zeros_like(x)
    assert rank_residual(functional.scaled_dot_product_attention(zero, zero, x)).item() == pytest.approx(0, abs=1e-12)
    assert rank_residual(torch.matmul(torch.eye(12, dtype=torch.float64), x)).item() == rank_residual(x).item()
    residuals = []
    for _ in range(4):
        residuals.append(rank_residual(x).item())
        x = functional.scaled_dot_product_attention(x / 4, x / 4, x)
    assert residuals[0] > 0.9
    assert residuals[1] / residuals[0] > residuals[2] / residuals[1] > residuals[3] / residuals[2]


def test_the_residual_equals_its_twin_at_any_scale():
    """Norm of the tokens less their mean over the norm of the tokens, from 1e-30 to 1e30; 0 for equal tokens."""
    torch.manual_seed(0)
    x = torch.randn(3, 5, 4) + 0.5

    def twin(tokens):
        shares = []
        for sample in tokens.double().tolist():
            centre = [mean(column) for column in zip(*sample, strict=True)]
            apart = math.fsum((v - c) ** 2 for token in sample for v, c in zip(token, centre, strict=True))
            shares.append(math.sqrt(apart / math.fsum(v * v for token in sample for v in token)))
        return mean(shares)

    for scale in (1e-30, 1.0, 1e30):
        assert rank_residual(scale * x).item() == pytest.approx(twin(x), rel=1e-5)
    assert rank_residual(torch.zeros(1, 3, 2)).item() == 0.0
    assert rank_residual(torch.ones(1, 3, 2)).item() == pytest.approx(0.0, abs=1e-7)


@pytest.mark.parametrize(("batch", "looked"), [(16, 24), (16, 6), (4, 6), (1, 6)])
def test_the_stated_errors_are_those_of_samples_and_queries(batch, looked):
    """What four samples of a batch, or some queries of each, say is off by as much as is stated; all of them by nothing.

    Samples differ in how sharp they are, and queries in how much they like a common key.
    """
    off = []
    measures = [getattr(terms_of, f) for f in ("head_entropies", "mean_entropy", "sparsity", "sink_share",
                                               "head_diversity", "head_divergence", "entropy_bound")]  # fmt: skip
    for seed in range(60):
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape, generator=generator):
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        logits = normal(batch, 3, 24, 12) * (0.3 * normal(batch, 1, 1, 1)).exp()
        logits += normal(batch, 1, 24, 12) + 2.0 * normal(1, 1, 1, 12) * (0.3 * normal(batch, 1, 24, 1)).exp()
        chosen = torch.randperm(24, generator=generator)[:looked]
        every, some = attention_rows(logits), attention_rows(logits[:4, :, chosen])
        for place, measure in enumerate(measures):
            true, terms = ratio(measure(every)), measure(some)
            error = ratio_error(terms, batch, 24)
            assert (ratio_error(terms, min(batch, 4), looked) == 0).all()
            assert (error > 0).all()
            off += [(place, size) for size in ((ratio(terms) - true) / error).abs().tolist()]
    for place, measure in enumerate(measures):
        size = median(size for at, size in off if at == place)  # 0.67 of a normal error, 0.76 of four samples
        assert 0.4 < size < 1.2, (measure.__name__, size)
