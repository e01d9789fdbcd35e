"""A slow, obvious twin of every metric: plain Python floats and loops, nothing shared with the package."""

from __future__ import annotations

import cmath
import math
from itertools import combinations
from statistics import median

import numpy as np


def numbers(tensor):
    """Return the entries of a tensor as a flat list of Python numbers; of a sparse one the stored entries."""
    tensor = tensor.detach()
    if str(tensor.layout) == "torch.sparse_coo":
        tensor = tensor.coalesce().values()
    return tensor.resolve_conj().flatten().tolist()


def magnitude(x):
    """Return |x| of a real or complex number."""
    return abs(x) if not isinstance(x, complex) else math.hypot(x.real, x.imag)


def l2(tensor):
    """Return the square root of the sum of squares, scaled by the greatest entry."""
    sizes = [magnitude(x) for x in numbers(tensor)]
    greatest = max(sizes, default=0.0)
    if greatest == 0.0 or not math.isfinite(sum(sizes) if max(sizes) < 1e300 else greatest):
        return float("nan") if any(map(math.isnan, sizes)) else greatest
    return greatest * math.sqrt(math.fsum((s / greatest) ** 2 for s in sizes))


def l1(tensor):
    """Return the sum of magnitudes."""
    return math.fsum(magnitude(x) for x in numbers(tensor))


def linf(tensor):
    """Return the greatest magnitude."""
    return max((magnitude(x) for x in numbers(tensor)), default=0.0)


def mean(tensor):
    """Return the mean magnitude over the stored entries."""
    return l1(tensor) / max(len(numbers(tensor)), 1)


def zero_share(tensor):
    """Return the share of entries that are exactly zero."""
    entries = numbers(tensor)
    return sum(x == 0 for x in entries) / max(len(entries), 1)


def nonfinite(tensor):
    """Count entries that are NaN or infinite."""
    return sum(not cmath.isfinite(x) for x in numbers(tensor))


def gains(norms, eps=1e-30):
    """Return previous over current norm, written out case by case."""
    out = []
    for k in range(1, len(norms)):
        before, now = norms[k - 1], norms[k]
        if before is None or now is None:
            out.append(None)
        elif now < eps:
            out.append(math.inf)
        else:
            out.append(before / now)
    return out


def log_gains(norms, eps=1e-30):
    """Return the logarithm of each gain from clamped norms."""
    out = []
    for k, gain in enumerate(gains(norms, eps)):
        if gain is None or gain == math.inf:
            out.append(gain)
        else:
            out.append(math.log(max(norms[k], eps)) - math.log(max(norms[k + 1], eps)))
    return out


def theil_sen(x, y):
    """Return the median of all pairwise slopes."""
    slopes = [(y[j] - y[i]) / (x[j] - x[i]) for i, j in combinations(range(len(x)), 2) if x[i] != x[j]]
    return median(slopes)


def depth_slope(norms, eps=1e-30):
    """Return the Theil-Sen slope of the log norm over depth."""
    pairs = [(i, math.log(max(n, eps))) for i, n in enumerate(norms) if n is not None]
    return theil_sen([i for i, _ in pairs], [v for _, v in pairs])


def stats(values):
    """Return mean and standard deviation (ddof=0)."""
    m = math.fsum(values) / len(values)
    return m, math.sqrt(math.fsum((v - m) ** 2 for v in values) / len(values))


def softmax(row):
    """Return the softmax of one list of numbers."""
    top = max(row)
    weights = [math.exp(z - top) for z in row]
    total = math.fsum(weights)
    return [w / total for w in weights]


def logit_metrics(rows):
    """Return the eight logit metrics of a list of rows by name."""
    flat = [z for row in rows for z in row]
    m, s = stats(flat)
    probabilities = [softmax(row) for row in rows]
    entropies = [-math.fsum(p * math.log(p) for p in row if p > 0) / math.log(len(row)) for row in probabilities]
    return {
        "logits.max": max(flat),
        "logits.min": min(flat),
        "logits.mean": m,
        "logits.std": s,
        "logits.margin": stats([max(row) - sorted(row)[-2] for row in rows])[0],
        "logits.log_z": stats([math.log(math.fsum(math.exp(z) for z in row)) for row in rows])[0],
        "confidence.max": stats([max(row) for row in probabilities])[0],
        "confidence.entropy": stats(entropies)[0],
    }


def target_metrics(rows, targets):
    """Return the three target metrics of a list of rows by name; targets outside the classes are left out."""
    kept = [(softmax(row), row.index(max(row)), y) for row, y in zip(rows, targets, strict=True) if 0 <= y < len(row)]
    return {
        "confidence.target": stats([p[y] for p, _, y in kept])[0],
        "alignment.accuracy": stats([float(best == y) for _, best, y in kept])[0],
        "alignment.margin": stats([p[y] - max(q for k, q in enumerate(p) if k != y) for p, _, y in kept])[0],
    }


def rows_of(output):
    """Return samples and positions as rows and features as columns."""
    if output.dim() == 4:
        return [output[b, :, i, j].tolist() for b in range(output.shape[0]) for i, j in np.ndindex(*output.shape[2:])]
    return output.reshape(-1, output.shape[-1]).tolist()


def spread(rows):
    """Return the root mean square over features of the standard deviation over rows."""
    deviations = [stats(column)[1] for column in zip(*rows, strict=True)]
    return math.sqrt(math.fsum(d * d for d in deviations) / len(deviations))


def rms(tensor):
    """Return the root mean square of the entries."""
    return l2(tensor) / math.sqrt(len(numbers(tensor)))


def effective_rank(rows):
    """Return exp of the entropy of the normalised singular values of the centred rows, from the Gram matrix."""
    matrix = np.array(rows, dtype=np.longdouble)
    matrix = (matrix - matrix.mean(axis=0)).astype(np.float64)
    sigma = np.sqrt(np.maximum(np.linalg.eigvalsh(matrix.T @ matrix), 0.0))
    if sigma.sum() == 0:
        return 0.0
    share = [float(s) for s in sigma / sigma.sum() if s > 0]
    return math.exp(-math.fsum(p * math.log(p) for p in share))


def stable_rank(rows):
    """Return the squared Frobenius norm over the greatest eigenvalue of the Gram matrix of the centred rows."""
    matrix = np.array(rows, dtype=np.float64)
    matrix = matrix - matrix.mean(axis=0)
    return math.fsum(float(x) ** 2 for x in matrix.ravel()) / float(np.linalg.eigvalsh(matrix.T @ matrix)[-1])


def cosine(a, b):
    """Return the cosine of the angle between two lists."""
    dot = math.fsum(x * y for x, y in zip(a, b, strict=True))
    return dot / math.sqrt(math.fsum(x * x for x in a) * math.fsum(y * y for y in b))


def dead_share(outputs):
    """Return the share of units, along dim 1, that no output of a list of outputs has above zero."""
    units = outputs[0].shape[1]
    alive = [any(x > 0 for o in outputs for x in o.select(1, u).flatten().tolist()) for u in range(units)]
    return alive.count(False) / units


def saturated_share(output, derivative, greatest):
    """Return the share of outputs whose derivative, as a function of the output, is below 1 % of the greatest."""
    entries = numbers(output)
    return sum(derivative(o) < 0.01 * greatest for o in entries) / len(entries)


def bin_counts(entries, edges):
    """Count entries into bins, the last one closed on both sides."""
    counts = [0] * (len(edges) - 1)
    for x in entries:
        place = max(k for k in range(len(counts)) if x >= edges[k])
        counts[place] += 1
    return counts
