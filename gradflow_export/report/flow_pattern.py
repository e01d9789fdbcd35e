"""What the gradient's way through the model looks like in words, and where it is narrow again and again."""

from __future__ import annotations

import functools
import math
from collections import Counter, deque
from collections.abc import Collection
from typing import Any

import numpy as np
import numpy.typing as npt

from gradflow_export.records.statistics import median
from gradflow_export.records.step_record import IssueType, Reading, StepRecord
from gradflow_export.rules.signals import Chain, chains, outlying, owner

UNIFORM, SPARSE, VANISHING, EXPLODING, MIXED = PATTERNS = ("uniform", "sparse", "vanishing", "exploding", "mixed")
WINDOW = 50
"""Samples that are looked back at."""

FREQUENT = 0.2
"""Least share of the samples in which a block must have been a bottleneck to be named."""

_VANISHED, _EXPLODED, _EVEN = math.log(1e-4), math.log(1e2), math.log(1e2)
_DAMPING = math.log(0.5)
_ZERO, _HOYER = 0.9, 0.8
_FACTOR, _DEVIATIONS = math.log(20.0), 6.0

Floats = npt.NDArray[np.float64]


def hoyer(l1: Floats, l2: Floats, entries: Floats) -> Floats:
    """Return Hoyer's sparsity ``(sqrt(n) - l1 / l2) / (sqrt(n) - 1)``: 0 all entries alike, 1 a single one.

    Args:
        l1: Sums of magnitudes. Shape: ``[n]``.
        l2: Roots of sums of squares. Shape: ``[n]``.
        entries: Numbers of entries. Shape: ``[n]``.

    Returns:
        NaN for zeros and single entries. Shape: ``[n]``.

    Source: Hoyer 2004, JMLR 5.
    """
    root = np.sqrt(entries)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(np.where((l2 > 0) & (entries > 1), (root - l1 / l2) / (root - 1), np.nan), dtype=np.float64)


def quiet(logs: Floats) -> npt.NDArray[np.bool_]:
    """Return which of several ln gradient sizes lie unusually far below the others.

    Args:
        logs: Finite. Shape: ``[n]``.

    Returns:
        True below the median by more than six robust standard deviations and a factor of 20. Shape: ``[n]``.

    Source: modified z-score, Iglewicz and Hoaglin 1993.
    """
    if len(logs) < 3:
        return np.zeros(len(logs), dtype=np.bool_)
    centre = median(logs)
    spread = 1.4826 * median(np.abs(logs - centre))
    return np.asarray(logs < centre - max(_DEVIATIONS * spread, _FACTOR), dtype=np.bool_)


def _narrow(links: Chain) -> list[str]:
    """Return the blocks of a chain that damp far more than the others do."""
    places = np.arange(len(links.sites) - 1) if links.joined is None else np.flatnonzero(links.joined)
    flags = outlying(links.log_gains[places], _FACTOR, _DEVIATIONS)
    return [links.sites[place + 1] for place in places[flags]]


class FlowPatterns:
    """Takes records one by one and classifies how the gradient flows, in a bounded amount of memory."""

    def __init__(self) -> None:
        self._numel: Reading | None = None
        self._sparse = False
        self._damped: float | None = None
        self._patterns: deque[str] = deque(maxlen=WINDOW)
        self._narrow: deque[tuple[str, ...]] = deque(maxlen=WINDOW)
        self._quiet: deque[tuple[str, ...]] = deque(maxlen=WINDOW)

    def add(self, record: StepRecord) -> None:
        """Take in one record."""
        self._numel = record.get("parameter.numel") or self._numel
        norms, blocks = record.get("parameter.gradient_norm"), record.get("block.gradient_norm")
        zeros = record.get("parameter.zero_share")
        # Gradients are read at every step, but this is worth the worker's time only where more was read with them.
        if norms is None or (blocks is None and zeros is None and record.get("parameter.numel") is None):
            return
        if zeros is not None:
            self._sparse = _is_sparse(zeros, record.get("parameter.gradient_l1"), norms, self._numel)
        links = chains(record, "block.gradient_norm")
        # A chain that is cut has no depth gain.
        cut = any(float(one.logs[0]) == -math.inf < float(one.logs[-1]) for one in links)
        if links:
            self._damped = float(np.mean(np.concatenate([one.log_gains for one in links]) < _DAMPING))
            self._narrow.append(tuple(site for one in links for site in _narrow(one)))
        where, logs = _sizes(norms, self._numel)
        self._quiet.append(tuple(norms.sites[index] for index in where[quiet(logs)]))
        self._patterns.append(self._classify(-math.inf if cut else record.value("gain.depth"), norms, logs))

    def _classify(self, depth: float | None, norms: Reading, logs: Floats) -> str:
        if depth is not None and depth < _VANISHED:
            return VANISHING
        if (depth is not None and depth > _EXPLODED) or not np.isfinite(norms.values[norms.present]).all():
            return EXPLODING
        if self._sparse:
            return SPARSE
        return UNIFORM if len(logs) < 2 or float(logs.max() - logs.min()) < _EVEN else MIXED

    def damped_share(self) -> float | None:
        """Return the share of gains below 1/2 in the last sample, ``None`` without gains."""
        return self._damped

    def pattern(self, open_types: Collection[IssueType] = ()) -> str | None:
        """Return the pattern, one of ``PATTERNS``; ``None`` before the first gradient.

        Args:
            open_types: Types of the issues that are open: a rule that sees more has the last word.
        """
        if IssueType.VANISHING in open_types:
            return VANISHING
        if IssueType.EXPLODING in open_types:
            return EXPLODING
        return Counter(self._patterns).most_common(1)[0][0] if self._patterns else None

    def as_dict(self, open_types: Collection[IssueType] = ()) -> dict[str, Any]:
        """Return pattern, how often each was seen, and the bottlenecks; JSON-ready.

        Args:
            open_types: As in :meth:`pattern`.
        """
        return {
            "pattern": self.pattern(open_types),
            "pattern_counts": dict(Counter(self._patterns)),
            "frequent_bottlenecks": _frequent(self._narrow, "block"),
            "unusually_small": _frequent(self._quiet, "parameter"),
        }


def _frequent(window: Collection[tuple[str, ...]], name: str) -> list[dict[str, Any]]:
    counts = Counter(site for sites in window for site in sites)
    return [
        {name: site, "count": count, "share": count / len(window)}
        for site, count in sorted(counts.items(), key=lambda item: (-item[1], item[0]))
        if count >= FREQUENT * len(window)
    ]


def _at(reading: Reading | None, sites: tuple[str, ...]) -> Floats:
    if reading is not None and reading.sites == sites:
        return np.where(reading.present, reading.values.astype(np.float64), np.nan)
    known = {} if reading is None else reading.as_dict()
    return np.array([math.nan if known.get(site) is None else known[site] for site in sites], dtype=np.float64)


def _is_sparse(zeros: Reading, l1: Reading | None, norms: Reading, numel: Reading | None) -> bool:
    """Whether in at least half of the modules most entries are zero, or a few entries hold nearly all of the size."""
    sites = zeros.sites
    with np.errstate(invalid="ignore"):
        thin = (_at(zeros, sites) > _ZERO) | (hoyer(_at(l1, sites), _at(norms, sites), _at(numel, sites)) > _HOYER)
    modules, place = _modules(sites)
    there, sparse = np.zeros((2, modules), dtype=np.bool_)
    there[place[zeros.present]] = True
    sparse[place[zeros.present & thin]] = True
    return bool(there.any()) and 2 * int(sparse.sum()) >= int(there.sum())


@functools.lru_cache(maxsize=4)
def _modules(parameters: tuple[str, ...]) -> tuple[int, npt.NDArray[np.intp]]:
    """Return how many modules own parameters, and the number of each parameter's. Shape: ``[len(parameters)]``."""
    numbers: dict[str, int] = {}
    place = np.array([numbers.setdefault(owner(name), len(numbers)) for name in parameters], dtype=np.intp)
    return len(numbers), place


def _sizes(norms: Reading, numel: Reading | None) -> tuple[npt.NDArray[np.int64], Floats]:
    """Return where a gradient is finite and above 0, and the logarithm of its root mean square."""
    entries, values = _at(numel, norms.sites), norms.values.astype(np.float64)
    usable = norms.present & np.isfinite(values) & (values > 0)
    entries = np.where(np.isfinite(entries) & (entries > 0), entries, 1.0)
    logs = np.log(values[usable]) - 0.5 * np.log(entries[usable])
    return np.flatnonzero(usable), np.asarray(logs, dtype=np.float64)
