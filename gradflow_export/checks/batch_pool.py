"""What the worker remembers of inputs, predictions and targets, and what it reads off them (numpy alone)."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from gradflow_export.checks.answer_reader import ROUNDING, Aims, Found, mistakes_of
from gradflow_export.checks.layers.redundant import row_length
from gradflow_export.checks.leaked_columns import copies
from gradflow_export.checks.unlearned_part import BEHIND, parts_of
from gradflow_export.metrics.batches import directions, heavy_class, input_statistics, interleaved
from gradflow_export.metrics.constants import (
    PICKED,
    Kind,
    attained,
    column_fits,
    column_levels,
    column_losses,
    constant_loss,
    mean_loss,
    sense,
    with_squares,
)
from gradflow_export.metrics.dependence import (
    MOST_ROWS,
    any_dependence,
    dependence_on_tokens,
    left_out,
    linear_dependence,
    unbent,
)
from gradflow_export.records.loss_mistakes import (
    DIMENSIONS_MIXED,
    UNSIGNED,
    WEIGHTS_FAR,
    WEIGHTS_TURNED,
)
from gradflow_export.records.statistics import distinct, first_of_each

Floats = npt.NDArray[np.float64]
POOL = 1024
"""Rows of targets and inputs that are remembered."""
LEVEL = 0.8
"""The tests of dependence are made only while the loss is above this share of the best constant's."""
LEARNED = 0.3
"""Share of the best constant's loss below which nobody asks how much more could be learned."""
TESTED_EVERY = 3
"""Fewest readings between two tests."""
NEW = 0.125
"""Least share of the rows that are new since the last test."""
LABELS = 32
"""Fewest labels of a margin loss that are judged."""
MIXED = 6.0
"""Z-score by which numbers as far apart as there are channels are more alike than neighbours, where these are mixed."""
TINY = 1e-12
"""Weight of a class that does not count."""
PER_CLASS = 12
"""Least number of samples of a typical class with which a dependence shows."""
_ODD = MappingProxyType({"turned": WEIGHTS_TURNED, "far": WEIGHTS_FAR})
BUCKETS = 64
"""Words are counted by their number modulo this."""
FEW_WORDS = 3
"""Of no more words, such as a user and an item, only both together may tell anything, which so few rows do not show."""


class Remembered:
    """The last rows of one loss; used on the worker thread only."""

    def __init__(self) -> None:
        self._rows: deque[tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]] = deque()
        self._total = self._readings = self._uniform = self._tested = 0
        self._shape: tuple[Any, ...] = ()
        self._first: Floats | None = None
        self._varies = False
        self._ways = np.zeros((2, 0), dtype=np.bool_)
        self._forms = set[bool]()
        self._signs: list[Floats] = []
        self._chosen: list[float] = []
        self._levels: deque[Floats] = deque(maxlen=10)
        self._often, self._weights = np.zeros(0), np.zeros(0)
        self._lately: deque[Floats] = deque(maxlen=TESTED_EVERY)
        self._parts: dict[str, Floats] = {}
        self._aims = Aims()

    def take(self, found: Found, values: npt.NDArray[Any]) -> dict[str, dict[str, float]]:
        """Return the readings of one sample.

        Args:
            found: What its columns are.
            values: Shape: ``[rows, inputs + 2 * outputs]``.
        """
        rows = np.asarray(values, dtype=np.float64)
        self._forms.add(found.graded)
        self._varies |= len(self._forms) > 1  # what the other loss is of is not known by this one
        if found.graded:
            self._pull(rows[:, found.inputs + found.outputs :][:, : found.outputs])
            found, rows = self._aims.understood(found, rows)
        x = rows[:, : found.inputs]
        out: dict[str, float] = {}
        self._parts = {}
        mistakes = dict(found.mistakes)
        if found.kind is not None:
            predictions, targets = np.split(rows[:, found.inputs :], 2, axis=1)
            here = np.isfinite(predictions).all(axis=1) & np.isfinite(targets).all(axis=1)
            if here.any():
                self._add(found, x[here], targets[here])
                mistakes.update(mistakes_of(found, x[here], predictions[here], targets[here]))
                out.update(self._judge(found, found.kind, predictions[here], targets[here]))
            self._weights = np.zeros(0)
        run = tuple(straight for straight in found.run if straight.plain or not found.bends)
        length = row_length(run)
        if not found.bends:
            out["loss.affine_depth"] = float(length)
            out["loss.idle_activations"] = float(found.idle)
            out["loss.affine_norms"] = float(sum(straight.normalised for straight in run[:-1]))
        if out and self._is_due():
            out.update(self._copies(found))
            self._tested = self._total
        told = {metric: {found.site: value} for metric, value in out.items() if not math.isnan(value)}
        told.update(parts_of(found.site, self._parts))
        if length > 1:
            told["layer.row"] = {straight.name: float(length) for straight in run}
        if found.pairs and found.bends:
            told["layer.merged"] = {name: pair.width for pair in found.pairs for name in (pair.first, pair.second)}
        if found.inputs and not (found.tokens or found.part or found.asked):
            stats = input_statistics(x)
            told.update({metric: {found.input_site: value} for metric, value in stats.items()})
            told["input.normalised"] = {found.input_site: float(found.normalised)}
        told.update({f"mistake.{name}": {found.site: value} for name, value in mistakes.items()})
        return told

    def beside(self, found: Found, values: npt.NDArray[Any]) -> dict[str, dict[str, float]]:
        """Return the statistics of one input of several, which may be the same for a whole batch, as the time is."""
        return {} if (values == values[:1]).all() else self.take(found, values)

    def copied(self, site: str, values: npt.NDArray[Any]) -> dict[str, dict[str, float]]:
        """Return the share of targets that are the words given at their own places, and of those that are padding.

        Args:
            site: Of the loss.
            values: 1 where one is, 2 where that is padding, 0 where not, NaN where it does not count.
        """
        told = np.asarray(values, dtype=np.float64)
        told = told[np.isfinite(told)]
        shares = {"copied": told >= 1, "padded": told == 2}
        return {f"target.{name}": {site: float(those.mean())} for name, those in shares.items() if len(told)}

    def signed(self, site: str, values: npt.NDArray[Any]) -> dict[str, dict[str, float]]:
        """Return the share of zeros among labels of a margin loss where these are 0 and one other number alone.

        Args:
            site: Of the loss.
            values: Labels of one batch.
        """
        self._signs = [*self._signs[-15:], np.asarray(values, dtype=np.float64).reshape(-1)]
        labels = np.concatenate(self._signs)
        if len(labels) < LABELS or set(distinct(labels)) not in ({0.0, 1.0}, {-1.0, 0.0}):
            return {}
        return {f"mistake.{UNSIGNED}": {site: float((labels == 0).mean())}}

    def alike(self, site: str, values: npt.NDArray[Any]) -> dict[str, dict[str, float]]:
        """Return that one sample of the batch is the answer for all of them, as long as it always was.

        Args:
            site: Of the loss.
            values: Which sample of the batch each of some others is to be like.
        """
        self._chosen = distinct(np.append(self._chosen, values))[:2].tolist()
        return {"target.distinct": {site: 1.0}} if len(self._chosen) == 1 else {}

    def weighted(self, site: str, values: npt.NDArray[Any]) -> dict[str, dict[str, float]]:
        """Return how much less a loss weighs the rarest class than the most frequent, where weights are frequencies.

        The weights are those of the rows that come next.

        Args:
            site: Of the loss.
            values: What :func:`gradflow_export.checks.target_reader.weighted` returned.
        """
        given = np.asarray(values, dtype=np.float64)
        classes = int(given[0])
        weights, labels = given[1 : 1 + classes], given[1 + classes :]
        self._weights = weights if len(labels) else np.array([np.ones(classes), weights])
        if not len(labels):
            return {}
        if len(self._often) != classes:
            self._often = np.zeros(classes)
        self._often += (labels[:, None] == np.arange(classes)).sum(axis=0)
        found = heavy_class(self._often, weights)
        return {} if found is None else {f"mistake.{_ODD[found[0]]}": {site: found[1]}}

    def _pull(self, gradients: Floats) -> None:
        """Know that targets differ where some answers are pulled up and others down, though neither may be read."""
        ways = np.array([(gradients < 0).any(axis=0), (gradients > 0).any(axis=0)])
        self._ways = ways | self._ways if self._ways.shape == ways.shape else ways
        self._varies |= bool(self._ways.all(axis=0).any())

    def _add(self, found: Found, x: Floats, targets: Floats) -> None:
        shape = (found.kind, found.inputs, found.outputs)
        if shape != self._shape:
            self._rows.clear()
            self._lately.clear()
            self._levels.clear()
            self._shape = shape
        # What enters may change from pass to pass, as in a game, and its rows are forgotten: not what was wanted.
        first = targets[0] if self._first is None or self._first.shape != targets[0].shape else self._first
        self._varies |= bool((np.abs(targets - first) > ROUNDING * np.abs(first).max()).any())
        self._first = first
        self._rows.append((x.astype(np.float32), targets.astype(np.float32)))  # as they came
        self._total += len(targets)
        self._readings += 1
        if len(targets) > 1 and np.ptp(targets, axis=0).max() <= ROUNDING * np.abs(targets).max():
            self._uniform += 1
            self._levels.append(targets[0])
        while sum(len(y) for _, y in self._rows) - len(self._rows[0][1]) >= POOL:
            self._rows.popleft()

    def _judge(self, found: Found, kind: Kind, predictions: Floats, targets: Floats) -> dict[str, float]:
        y = np.concatenate([targets for _, targets in self._rows]).astype(np.float64)
        if found.logits:
            predictions = 1.0 / (1.0 + np.exp(-np.clip(predictions, -60.0, 60.0)))
        counts = _counted(found, self._weights if found.weights is None else found.weights, y)
        constant = constant_loss(kind, y, counts)
        mean = mean_loss(kind, predictions, targets, None if counts is None else counts[-len(targets) :])
        out = {
            "loss.constant": constant,
            "loss.known": float(found.whole),
            "loss.choice": float(found.choices if kind in PICKED else 0),
            "loss.samples": float(found.count),
            "loss.supervised": float(found.answers),
            "target.rows": float(self._total),
            "target.uniform_share": self._uniform / self._readings,
        }
        if found.own and (self._varies or not found.part):  # a condition may ask one part for one number
            levels = np.sort([*self._levels] or [targets[0]], axis=0)
            apart = np.diff(levels, axis=0) > 10 * ROUNDING * np.abs(levels).max(axis=0)
            out["target.levels"] = float(apart.sum(axis=0).max())
            out["target.distinct"] = float(max(len(first_of_each(y)), 2)) if self._varies else 1.0
        if constant > 0:
            out["loss.over_constant"] = mean / constant
            out["loss.sense"] = sense(kind, predictions, targets, y, counts)
        if kind in {"squared", "absolute", "huber"}:
            size = float(np.sqrt(np.square(targets).mean()))
            out["target.rms"], out["target.directions"] = size, float(directions(y))
            if size > 0:
                out["target.reach"] = float(np.sqrt(np.square(predictions).mean())) / size
        # Few readings are judged: the test takes some milliseconds, which is much beside all the rest.
        even = found.even and counts is None and not found.turned
        if even and kind not in {"margin", "soft"} and 2 * self._uniform <= self._readings:
            self._lately.append(column_losses(kind, predictions, targets))
        due = self._is_due()
        if due and len(self._lately) == TESTED_EVERY:
            self._parts["over_constant"] = np.mean(self._lately, axis=0) / column_levels(kind, y)
        left = mean > LEARNED * constant or any((shares > BEHIND).any() for shares in self._parts.values())
        if due and found.inputs and constant > 0 and not found.turned and (left or not found.bends):
            found = replace(found, even=even)
            out.update(self._dependence(found, constant, tested=mean > LEVEL * constant or not found.bends))
        return out

    def _is_due(self) -> bool:
        """Whether many of the rows are new: to judge all takes a hundred times what it takes to add some."""
        rows = sum(len(y) for _, y in self._rows)
        return self._readings % TESTED_EVERY == 0 and self._total - self._tested >= NEW * rows

    def _copies(self, found: Found) -> dict[str, float]:
        """Return which column of the inputs is the target."""
        if not (found.own and self._rows) or found.tokens or not all(found.steps):
            return {}
        x, y = (np.concatenate([pair[part] for pair in self._rows]).astype(np.float64) for part in (0, 1))
        steps = found.steps if found.every == 1 else (1, found.inputs)
        wide = -(-found.width // found.every)
        column, rows = copies(x, y, steps, numbers=found.kind not in PICKED, timed=found.asked, wide=wide)
        return {"target.column": float(column * found.every if column >= 0 else -1), "target.compared": float(rows)}

    def _dependence(self, found: Found, constant: float, *, tested: bool) -> dict[str, float]:
        rows, targets = (np.concatenate([pair[part] for pair in self._rows]) for part in (0, 1))
        # Drawn, always alike: every second row may be of one class.
        chosen = np.random.default_rng(0).permutation(first_of_each(rows))
        every_x, every_y = (part[chosen].astype(np.float64) for part in (rows, targets))
        x, y = every_x[:MOST_ROWS], every_y[:MOST_ROWS]
        few = found.kind in PICKED and len(x) < PER_CLASS * math.exp(constant_loss("classes", y))
        if few or not np.isfinite(every_x).all():  # too few of each class to tell anything by
            return {}
        if found.kind in PICKED:
            every_y = (every_y == distinct(every_y)[None, :64]).astype(np.float64)
            y = every_y[:MOST_ROWS]
        out = {"target.repeated": 1.0 - len(chosen) / len(rows)}
        if found.tokens and found.inputs <= FEW_WORDS:
            return out
        if tested and found.tokens:
            out["target.dependence"] = dependence_on_tokens(x, y, BUCKETS)
        elif tested:
            out["target.dependence"] = float(np.fmax(any_dependence(x, y), linear_dependence(every_x, every_y)))
        if tested:
            out["target.tested"] = float(len(x))
        # What gives out its inputs, through a code or noise, is no worse for a fit that has neither.
        copied = found.kind not in PICKED and -(-found.width // found.every) == found.inputs > 1
        # So is what counts samples by weights: the fit counts all alike.
        apart = found.tokens or copied or not found.even or self._readings <= 9
        fit = None if apart else left_out(x, with_squares(y))
        if fit is not None and found.kind is not None:
            out["target.attained"] = attained(found.kind, fit[:, : y.shape[1]], y) / constant
            self._parts.update(column_fits(found.kind, fit, y) if self._parts else {})
        if not (found.bends or found.tokens):
            out["loss.unbent"] = unbent(x, y)
        return out


def _counted(found: Found, weights: Floats, targets: Floats) -> Floats | None:
    """Return what each entry counts where classes, or positives, have weights; ``None`` where that is not known.

    Args:
        found: What the columns are.
        weights: Of classes, or of negatives and positives. Shape: ``[classes]``, or ``[2, outputs]``.
        targets: Of each step of a sample all outputs. Shape: ``[n, steps * outputs]``.
    """
    if found.kind == "classes" and len(weights) > targets.max():
        return np.asarray(np.maximum(weights[targets.astype(np.int64)], TINY))
    if found.kind != "binary" or len(weights) != 2:
        return None
    positives = weights[1].reshape(-1)
    steps, rest = divmod(targets.shape[1], len(positives))
    if rest or (len(positives) > 1 and found.width != targets.shape[1]):  # not all columns were taken
        return None
    return np.asarray(np.maximum(1.0 + (np.tile(positives, steps) - 1.0) * targets, TINY))


def mixed_channels(site: str, channels: int, values: npt.NDArray[Any]) -> dict[str, dict[str, float]]:
    """Return that images whose channels lie side by side in memory entered a layer as if they lay one by one.

    Args:
        site: The layer.
        channels: How many it takes.
        values: What :func:`gradflow_export.checks.target_reader.images` returned.
    """
    mixed = interleaved(np.asarray(values, dtype=np.float64), channels) >= MIXED
    return {f"mistake.{DIMENSIONS_MIXED}": {site: float(channels)}} if mixed else {}
