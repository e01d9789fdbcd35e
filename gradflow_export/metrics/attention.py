"""How attention spreads over its keys, how far heads differ, and whether tokens stay apart.

What is measured is the ratio of two sums over queries, so that one formula states how far that of a few queries of a
few samples is from that of all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

SAMPLES, QUERIES = 4, 512
ENTRIES = 2**18
"""Greatest number of attention weights looked at in one call: more keys, fewer queries."""

MASKED = -9e3
"""What a score is at most where a key was masked out: -10000, -1e9 and the least number of a dtype are all in use."""

NEAR_ZERO = 0.1
"""A weight below this share of the uniform weight counts as none."""

UNIFORM = 1e-6


@dataclass(frozen=True)
class Rows:
    """Attention weights of a few queries, and the keys each of them may look at.

    Attributes:
        logits: Scaled and masked scores; -inf where a key is not admissible. Shape: ``[batch, heads, queries, keys]``.
        logs: Logarithms of the weights, 0 where a key is not admissible. Shape: that of ``logits``.
        weights: Softmax of the logits over keys, 0 where a key is not admissible. Shape: that of ``logits``.
        admissible: Whether a query may look at a key. Shape: that of ``logits``.
        keys: Number of admissible keys. Shape: ``[batch, heads, queries]``.
        chosen: Whether there is a choice: two or more admissible keys. Shape: ``[batch, heads, queries]``.
    """

    logits: Tensor
    logs: Tensor
    weights: Tensor
    admissible: Tensor
    keys: Tensor
    chosen: Tensor


def as_heads(tensor: Tensor, heads: int | None = None) -> Tensor:
    """Return a tensor of two or more dimensions as ``[batch, heads, positions, features]``.

    Args:
        tensor: ``[positions, features]``, ``[batch, positions, features]``, or with heads third from last.
        heads: With three dimensions: how many heads are folded into the batch, ``None`` for one.
    """
    if tensor.dim() == 2:
        return tensor[None, None]
    if tensor.dim() == 3:
        many = heads if heads and tensor.shape[0] % heads == 0 else 1
        return tensor.reshape(-1, many, *tensor.shape[1:])
    return tensor if tensor.dim() == 4 else tensor.flatten(0, -4)


def strides(batch: int, heads: int, queries: int, keys: int) -> tuple[int, int]:
    """Return the steps at which samples and queries are taken so that the limits of this module hold."""
    samples = min(batch, SAMPLES)
    most = min(QUERIES, max(ENTRIES // max(samples * heads * keys, 1), 1))
    return -(-batch // SAMPLES), -(-queries // most)


def masked_logits(
    query: Tensor,
    key: Tensor,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    heads: int | None = None,
) -> Tensor:
    """Return ``scale Q K^T + mask`` for evenly spaced samples and queries, the last query among them.

    Args:
        query: Shape: ``[..., heads, queries, features]``.
        key: Fewer heads than the query are shared by groups of it. Shape: ``[..., heads, keys, features]``.
        mask: True or 0 where a query may look; broadcast to ``[..., heads, queries, keys]``.
        causal: Whether query i may look at keys 0 to i only.
        scale: ``features^(-1/2)`` when ``None``.
        heads: Heads folded into the batch of a tensor of three dimensions.

    Returns:
        float32, or float64 for such a query; -inf where masked. Shape: ``[<= 4, heads, <= 512, keys]``.
    """
    if mask is not None:
        mask = mask.expand(*query.shape[:-1], key.shape[-2])
        mask = as_heads(mask, heads)
    query, key = as_heads(query, heads), as_heads(key, heads)
    if key.shape[1] not in (1, query.shape[1]):
        key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    many, few = strides(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    first = (query.shape[2] - 1) % few
    dtype = torch.float64 if query.dtype is torch.float64 else torch.float32
    factor = 1.0 / math.sqrt(max(query.shape[-1], 1)) if scale is None else scale
    chosen = query[::many, :, first::few].to(dtype) * factor
    logits = chosen @ key[:: many if key.shape[0] > 1 else 1].to(dtype).transpose(-2, -1)
    if mask is not None:
        part = mask[::many, :, first::few]
        hidden = ~part if part.dtype is torch.bool else part <= MASKED
        logits = logits if part.dtype is torch.bool else logits + part
        logits = logits.masked_fill(hidden, -math.inf)
    if causal:
        places = torch.arange(first, query.shape[2], few, device=logits.device)
        hidden = torch.arange(key.shape[2], device=logits.device) > places[:, None]
        logits = logits.masked_fill(hidden, -math.inf)
    return logits


def sampled_scores(scores: Tensor, heads: int | None = None) -> Tensor:
    """Return scores that are about to enter a softmax, sampled as :func:`masked_logits` does, -inf where masked.

    Args:
        scores: Shape: ``[batch * heads, queries, keys]`` or ``[..., heads, queries, keys]``.
        heads: Heads folded into the batch of a tensor of three dimensions.
    """
    scores = as_heads(scores, heads)
    many, few = strides(*scores.shape)
    part = scores[::many, :, (scores.shape[2] - 1) % few :: few]
    part = part if part.dtype is torch.float64 else part.float()
    return part.masked_fill(part <= MASKED, -math.inf)


def attention_rows(logits: Tensor) -> Rows:
    """Return the attention weights of masked logits. Shape: ``[batch, heads, queries, keys]``."""
    admissible = logits != -math.inf
    keys = admissible.sum(dim=-1)
    logs = torch.log_softmax(logits, dim=-1).masked_fill(~admissible, 0.0)
    return Rows(logits, logs, logs.exp().masked_fill(~admissible, 0.0), admissible, keys, keys > 1)


Terms = tuple[Tensor, Tensor]
"""What each query adds to the numerator and to the denominator. Shape of both: ``[batch, queries, values]``."""


def ratio(terms: Terms) -> Tensor:
    """Return the values that the terms of queries make together, NaN where there are none. Shape: ``[values]``."""
    return terms[0].sum(dim=(0, 1)) / terms[1].sum(dim=(0, 1))


def ratio_error(terms: Terms, batch: int, queries: int) -> Tensor:
    """Return the standard errors of these values, absolute, 0 where nothing was left out.

    Args:
        terms: Of some samples and queries.
        batch: How many samples there are.
        queries: How many queries each has.

    Returns:
        Shape: ``[values]``.

    Source: Cochran 1977, Sampling Techniques, section 10.3, sampling in two stages, of a ratio as in section 6.3.
    """
    above, below = terms
    n, q = above.shape[:2]
    residual = above - ratio(terms) * below
    samples = residual.sum(dim=1)
    between = samples.square().sum(dim=0) * (n / max(n - 1, 1))
    within = (residual - samples.unsqueeze(1) / q).square().sum(dim=(0, 1)) * (q / max(q - 1, 1))
    taken, looked = n / max(batch, n), q / max(queries, q)
    variance = (1.0 - taken) * between + taken * (1.0 - looked) * within
    return variance.sqrt() / below.sum(dim=(0, 1))


def _mean(values: Tensor, rows: Rows) -> Terms:
    """Return the terms of the mean over heads and queries that have a choice. Shape of values: that of a query's."""
    of_heads = _head_mean(values, rows)
    return of_heads[0].sum(dim=2, keepdim=True), of_heads[1].sum(dim=2, keepdim=True)


def _head_mean(values: Tensor, rows: Rows) -> Terms:
    """Return the terms of the mean of each head over queries that have a choice."""
    return torch.where(rows.chosen, values, 0.0).transpose(1, 2), rows.chosen.to(values.dtype).transpose(1, 2)


def entropies(rows: Rows) -> Tensor:
    """Return ``-sum_k p_k ln p_k`` of each query.

    Returns:
        Shape: ``[batch, heads, queries]``. Unit: nats.

    Source: Shannon 1948; of attention: Zhai et al. 2023, arXiv:2303.06296.
    """
    return -(rows.weights * rows.logs).sum(dim=-1)


def mean_entropy(rows: Rows) -> Terms:
    """Return the mean entropy over samples, heads and queries with two or more admissible keys.

    Returns:
        Terms of one value. Unit: nats.
    """
    return _mean(entropies(rows), rows)


def head_entropies(rows: Rows) -> Terms:
    """Return each head's mean entropy, divided by that of uniform attention over the admissible keys.

    Returns:
        Terms of a value in [0, 1] for each head; queries with one admissible key are left out.

    Source: Zhai et al. 2023, arXiv:2303.06296, normalised by ln #keys.
    """
    return _head_mean(entropies(rows) / rows.keys.clamp_min(2).to(rows.logs.dtype).log(), rows)


def entropy_bound(rows: Rows) -> Terms:
    """Return the least entropy that logits of this size can have, as a mean over queries.

    ``ln(1 + (T-1) b) + s sqrt(T (T-1)) b / (1 + (T-1) b)`` with ``b = exp(-s sqrt(T / (T-1)))`` for T admissible keys
    and ``s`` the norm of a row of logits about its mean. Attention close to it has collapsed as far as it can.

    Returns:
        Terms of one value. Unit: nats.

    Source: Zhai et al. 2023, arXiv:2303.06296, theorem 3.1, row by row.
    """
    count = rows.keys.clamp_min(2).to(rows.logs.dtype)
    # Differences of logits are those of log weights, which are 0 where a key is not admissible.
    centred = torch.where(rows.admissible, rows.logs - (rows.logs.sum(dim=-1) / count).unsqueeze(-1), 0.0)
    size = torch.linalg.vector_norm(centred, dim=-1)
    b = torch.exp(-size * (count / (count - 1)).sqrt())
    whole = 1 + (count - 1) * b
    return _mean(whole.log() + size * (count * (count - 1)).sqrt() * b / whole, rows)


def sparsity(rows: Rows) -> Terms:
    """Return the share of admissible weights that are below a tenth of the uniform weight.

    Returns:
        Terms of one value in [0, 1].
    """
    counted = rows.admissible & rows.chosen.unsqueeze(-1)
    small = rows.weights < (NEAR_ZERO / rows.keys.clamp_min(1).to(rows.weights.dtype)).unsqueeze(-1)
    above, below = (
        flags.sum(dim=(1, 3), dtype=rows.weights.dtype).unsqueeze(2) for flags in (small & counted, counted)
    )
    return above, below


def head_diversity(rows: Rows) -> Terms:
    """Return 1 - the mean cosine between heads of what tells their attention from uniform attention.

    Of t unit vectors u the sum of 1 - the cosine over pairs is ``t / 2 sum |u - mean u|^2``, query by query.

    Returns:
        Terms of one value: 0 for heads that are all alike, about 1 for unrelated ones, up to 2; nothing below the line
        for fewer than two heads whose attention is not uniform.

    Source: definition. A variance across heads of numbers in [0, 1] is at most H / (4 (H - 1)) and tells nothing.
    """
    uniform = rows.admissible / rows.keys.clamp_min(1).to(rows.weights.dtype).unsqueeze(-1)
    apart = (rows.weights - uniform).flatten(2)
    size = torch.linalg.vector_norm(apart, dim=-1, keepdim=True)
    telling = (apart.abs().amax(dim=-1) >= UNIFORM) & torch.isfinite(size.squeeze(-1))
    unit = torch.where(telling.unsqueeze(-1), apart / size, 0.0).reshape(rows.weights.shape)
    count = telling.sum(dim=1).to(unit.dtype)[:, None, None]
    mean = unit.sum(dim=1, keepdim=True) / count.clamp_min(1.0).unsqueeze(-1)
    differing = torch.where(telling[:, :, None, None], unit - mean, 0.0).square().sum(dim=(1, 3)).unsqueeze(2)
    whole = unit.square().sum(dim=(1, 3)).unsqueeze(2)
    return 0.5 * count * differing, 0.5 * (count - 1.0).clamp_min(0.0) * whole


def head_divergence(rows: Rows) -> Terms:
    """Return the Jensen-Shannon divergence of the heads: entropy of their mean less their mean entropy.

    Returns:
        Terms of the mean over queries, 0 for heads that are all alike, at most ln(heads). Unit: nats.

    Source: Lin 1991, IEEE Transactions on Information Theory 37.
    """
    joined = rows.weights.mean(dim=1, keepdim=True)
    logs = joined.clamp_min(torch.finfo(joined.dtype).tiny).log()
    spread = (rows.weights * (rows.logs - logs)).sum(dim=-1)
    above, below = _mean(spread, rows)
    return above.clamp_min(0.0), below


def max_logit(rows: Rows) -> Tensor:
    """Return the greatest magnitude of an admissible logit.

    Returns:
        Shape: scalar. Unit: logit.

    Source: Dehghani et al. 2023, arXiv:2302.05442; Wortsman et al. 2023, arXiv:2309.14322.
    """
    return rows.logits.masked_fill(~rows.admissible, 0.0).abs().amax()


def sink_share(rows: Rows) -> Terms:
    """Return the mean weight of the one key that receives most, averaged over samples and heads.

    Returns:
        Terms of one value in [0, 1], near 1 when all queries look at the same key, as at the first token of a trained
        language model; queries with one admissible key are left out.

    Source: Xiao et al. 2023, arXiv:2309.17453; Gu et al. 2024, arXiv:2410.10781.
    """
    weight = torch.where(rows.chosen.unsqueeze(-1), rows.weights, 0.0)
    most = weight.sum(dim=-2, keepdim=True).argmax(dim=-1, keepdim=True)
    each = rows.chosen.sum(dim=-1, keepdim=True).clamp_min(1).to(weight.dtype).reciprocal()
    received = weight.take_along_dim(most, dim=-1).squeeze(-1)
    return (received * each).sum(dim=1).unsqueeze(2), (rows.chosen * each).sum(dim=1).unsqueeze(2)


def rank_residual(tokens: Tensor) -> Terms:
    """Return how much of a sequence tells its tokens apart: ``||X - 1 mean(X)^T||_F / ||X||_F``.

    Args:
        tokens: Shape: ``[batch, positions, features]``.

    Returns:
        Terms of the mean over samples in [0, 1], 0 when all tokens of each sequence are equal. Shape of both:
        ``[batch, 1, 1]``.

    Source: Dong, Cordonnier and Loukas 2021, arXiv:2103.03404; ``frob_residue`` of their code.
    """
    x = tokens if tokens.dtype is torch.float64 else tokens.float()
    # Divided by the greatest entry, so that squares neither overflow nor vanish.
    greatest = x.abs().amax(dim=(1, 2), keepdim=True)
    x = x / torch.where(greatest > 0, greatest, 1.0)
    apart = torch.linalg.vector_norm(x - x.mean(dim=1, keepdim=True), dim=(1, 2))
    whole = torch.linalg.vector_norm(x, dim=(1, 2))
    residuals = torch.div(apart, torch.where(whole > 0, whole, 1.0))[:, None, None]
    return residuals, torch.ones_like(residuals)
