"""DiscreteUpdateAnalyzer: how much of each update arrives."""

from __future__ import annotations

import math
from collections import Counter, deque
from typing import Any

import torch
from torch import Tensor

from gradflow_export.errors import ArgumentError
from gradflow_export.metrics.discrete import SCORES, signal_to_noise, update_scores
from gradflow_export.metrics.grids import on_grid
from gradflow_export.records.statistics import Welford
from gradflow_export.records.step_record import Reading, StepRecord, number_to_json

_PER_PARAMETER = (
    ("effectiveness", "parameter.update_effectiveness"),
    ("lost_share", "parameter.lost_share"),
    ("cosine_similarity", "parameter.update_cosine"),
    ("information_loss", "parameter.update_error"),
    ("changed_share", "parameter.changed_share"),
    ("rate_effectiveness", "parameter.rate_effectiveness"),
)
_PER_NODE = (("update_frequency", "node.update_frequency"), ("effectiveness", "node.effectiveness"))
FREQUENCY_WINDOW = 50
FREQUENT = 0.2
"""Share of the last readings in which a node must have had an unusually small gradient to be named."""


class DiscreteUpdateAnalyzer:
    """Compares the updates that happened with those that the optimizer meant.

    What happened is the change of the weights from one forward pass to the next, as these passes use them: on their
    declared grid, or in their number format. A weight that moves and returns in between has not moved. It reads the
    records of an exporter, one call of :meth:`add` each; :meth:`analyze` compares tensors of your own.
    """

    def __init__(self) -> None:
        self._scores: dict[str, Welford] = {name: Welford() for name, _ in _PER_PARAMETER}
        self._effectiveness, self._lost = Welford(), Welford()
        self._latest: dict[str, Reading] = {}
        self._moved: dict[str, deque[bool]] = {}
        self._passed: dict[str, deque[bool]] = {}
        self._resting: dict[str, int] = {}
        self._nodes: dict[str, Reading] = {}
        self._small: deque[tuple[str, ...]] = deque(maxlen=FREQUENCY_WINDOW)

    def add(self, record: StepRecord) -> None:
        """Take in one record; those without what it needs pass by."""
        for seen, metric in ((self._effectiveness, "update.effectiveness"), (self._lost, "update.lost_share")):
            value = record.value(metric)
            if value is not None:
                seen.add(value)
        for name, metric in _PER_PARAMETER:
            reading = record.get(metric)
            if reading is not None:
                self._latest[name] = reading
                for value in reading.values[reading.present]:
                    self._scores[name].add(float(value))
        changed = _values(record, "parameter.changed")
        for site, norm in _values(record, "parameter.update_norm").items():
            # The norm may be that of a sample, which rests where other entries move; a checksum is of all entries.
            moved = norm != 0 or changed.get(site, 0.0) > 0
            self._moved.setdefault(site, deque(maxlen=FREQUENCY_WINDOW)).append(moved)
        self._add_passed(record)

    def _add_passed(self, record: StepRecord) -> None:
        """Take in what forward passes saw of the update."""
        shares = {**_values(record, "node.changed_share"), **_values(record, "parameter.changed_share")}
        intended, read = _values(record, "parameter.intended_share"), _values(record, "parameter.read_share")
        for site, share in shares.items():
            self._passed.setdefault(site, deque(maxlen=FREQUENCY_WINDOW)).append(share != 0)
            # Of some rows nobody can say that the others rest too.
            if share == 0 and intended.get(site, 1.0) > 0 and read.get(site, 1.0) == 1:
                self._resting[site] = self._resting.get(site, 0) + 1
            elif share != 0:
                self._resting.pop(site, None)
        for name, metric in _PER_NODE:
            reading = record.get(metric)
            if reading is not None:
                self._nodes[name] = reading
        if record.get("node.quiet_share") is not None:
            self._small.append(tuple(_values(record, "node.small")))

    def small_nodes(self) -> list[dict[str, Any]]:
        """Return the nodes whose gradient was unusually small for their tensor in a fifth of the last 50 readings.

        Returns:
            ``node``, ``count`` and ``share`` of each, the most frequent first; JSON-ready.
        """
        counts = Counter(node for nodes in self._small for node in nodes)
        return [
            {"node": node, "count": count, "share": count / len(self._small)}
            for node, count in sorted(counts.items(), key=lambda item: (-item[1], item[0]))
            if count >= FREQUENT * len(self._small)
        ]

    def analyze(self, before: Tensor, after: Tensor, expected: Tensor, step: float | None = None) -> dict[str, float]:
        """Compare one update by hand.

        Args:
            before: Weights before, real, of any number format. Shape: any.
            after: Weights after, or, with ``step``, weights that a grid is still to be laid over. Shape: the same.
            expected: The update that was meant. Shape: the same.
            step: Width of the grid that weights are rounded to when they are used, as in fake quantisation; see
                :func:`~gradflow_export.metrics.grids.on_grid`.

        Returns:
            ``effectiveness``, ``lost_share``, ``intended_share``, ``changed_share``, ``cosine`` and ``error`` as in
            :func:`~gradflow_export.metrics.discrete.update_scores`, and ``sqnr_db``.

        Raises:
            ArgumentError: The shapes differ, or ``step`` is not above 0.
        """
        if not before.shape == after.shape == expected.shape:
            raise ArgumentError(
                f"before, after and expected must have one shape, got {tuple(before.shape)}, {tuple(after.shape)} and "
                f"{tuple(expected.shape)}; pass the weights of one parameter."
            )
        if step is not None and not step > 0:
            raise ArgumentError(f"step must be the width of the grid, above 0, got {step}; leave it out for none.")
        ends = [tensor.detach().double() for tensor in (before, after)]
        if step is not None:
            rounding = torch.finfo(before.dtype).eps if before.is_floating_point() else 0.0
            ends = list(on_grid(ends[0], ends[1], step, rounding)[:2])
        scores = update_scores([ends[1] - ends[0]], [expected.detach().double()])[:, 0].tolist()
        out = dict(zip(SCORES, scores, strict=True))
        return {**out, "sqnr_db": signal_to_noise(out["error"])}

    def summary(self) -> dict[str, Any]:
        """Return means over the run, and the newest values by parameter; JSON-ready, ``None`` where nothing was read.

        Returns:
            ``mean_effectiveness`` (weighted by entries), ``lost_update_fraction``, ``cosine_similarity``,
            ``information_loss`` (noise over signal), ``sqnr_db``, ``rate_effectiveness``, ``update_frequency`` (share
            of the last 50 measured steps in which a parameter moved, by parameter), ``stagnant`` (measured steps in a
            row in which a parameter was meant to move and did not, by parameter), ``nodes`` (``update_frequency`` and
            ``effectiveness`` by node, such as ``phase[3]``, row 3 of the tensor: of all nodes where there are at most
            256, else of those that changed least often), ``small_nodes`` as in :meth:`small_nodes`, ``samples`` and
            ``parameters``.
        """
        error = _mean(self._scores["information_loss"])
        return {
            "mean_effectiveness": _mean(self._effectiveness),
            "lost_update_fraction": _mean(self._lost),
            "cosine_similarity": _mean(self._scores["cosine_similarity"]),
            "information_loss": error,
            "sqnr_db": None if error is None or not math.isfinite(error) else number_to_json(signal_to_noise(error)),
            "rate_effectiveness": _mean(self._scores["rate_effectiveness"]),
            "update_frequency": {
                site: sum(moved) / len(moved) for site, moved in {**self._moved, **self._passed}.items()
            },
            "stagnant": dict(self._resting),
            "nodes": {name: _by_site(reading) for name, reading in self._nodes.items()},
            "small_nodes": self.small_nodes(),
            "samples": self._effectiveness.count,
            "parameters": {name: _by_site(reading) for name, reading in self._latest.items()},
        }


def _mean(seen: Welford) -> float | None:
    return seen.mean if seen.count else None


def _by_site(reading: Reading) -> dict[str, Any]:
    return {site: number_to_json(value) for site, value in reading.as_dict().items() if value is not None}


def _values(record: StepRecord, metric: str) -> dict[str, float]:
    reading = record.get(metric)
    return {} if reading is None else {site: v for site, v in reading.as_dict().items() if v is not None}
