"""Parameters that were frozen and should not be: NOT_TRAINING."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import compress
from typing import ClassVar

import numpy as np

from gradflow_export.records.evidence import Wiring
from gradflow_export.records.step_record import BoolArray, Issue, IssueType, Severity, StepRecord
from gradflow_export.rules.base import Check, Finding, some
from gradflow_export.rules.evidence import none_better, still_falls
from gradflow_export.rules.history import History
from gradflow_export.rules.signals import connections, owner

_NOTHING_LEARNED = (
    IssueType.BAD_TARGETS,
    IssueType.DATA_SCALE,
    IssueType.LEARNING_RATE,
    IssueType.NUMERICAL,
    IssueType.STALE_GRAD,
    IssueType.WRONG_LOSS,
)
"""Why a loss may stay where it is, whatever is frozen."""


@dataclass(frozen=True, kw_only=True)
class LeftFrozen(Check):
    """Report parameters that are frozen by mistake: never unfrozen after another network's pass, or frozen at zero.

    Four cases are reported: parameters that were trained in the first ``brief`` steps, have been frozen since, and are
    held by an optimizer that still steps, or were trained for longer, if the loss stays no better than that of the best
    constant prediction; all parameters, while the optimizer that holds them steps and trains nothing else; a frozen
    matrix whose entries are all 0, such as the second factor of an adapter; and weights frozen at their random
    initialization, if the loss stays no better than that.

    Why it is bad:
        In adversarial training, one network has stopped learning and the other one wins. A frozen matrix of zeros
        removes everything it is multiplied with.

    Example:
        for p in discriminator.parameters():
            p.requires_grad_(False)
        generator_loss(discriminator(generator(z))).backward()

    Use instead:
        for p in discriminator.parameters():
            p.requires_grad_(False)
        generator_loss(discriminator(generator(z))).backward()
        for p in discriminator.parameters():
            p.requires_grad_(True)

    Not reported:
        A frozen model whose optimizer trains a head outside; layers that are frozen after the first ``brief`` steps
        where something was learned, or from the beginning with trained weights, or at a random initialization from
        which the other layers learn.

    Attributes:
        brief: Number of steps within which the parameters were last trained, where the loss does not matter.
        span: Minimum number of steps since then.
        drawn: Square of the largest entry over the mean square; it is 3 for entries drawn uniformly within a bound, and
            larger for trained weights, which have a few large entries.
        rests: Number of steps that parameters must have been frozen for where the loss matters.
        harmed: Number of steps after which weights frozen at their random initialization are judged by the loss.
        readings: Minimum number of readings in which they were frozen.
        patience: One; ``readings`` already requires persistence.
    """

    brief: int = 5
    span: int = 15
    drawn: tuple[float, float] = (2.5, 3.5)
    rests: int = 40
    harmed: int = 100
    readings: int = 6
    patience: int = 1
    heal: int = 2

    order: ClassVar[int] = 45
    raises: ClassVar[tuple[IssueType, ...]] = (IssueType.NOT_TRAINING,)
    evidence: ClassVar[tuple[str, ...]] = ("connection.state",)
    remembers: ClassVar[tuple[str, ...]] = (
        "connection.state",
        "parameter.frozen_size",
        "parameter.frozen_peak",
        "wiring.outside",
        "loss",
        "loss.over_constant",
    )
    by_layer: ClassVar[bool] = True

    def check(self, record: StepRecord, history: History) -> tuple[Finding, ...]:
        """Judge the connections of this record and of those before it."""
        ways = self._never_freed, self._all, self._at_zero, self._as_drawn
        return tuple(found for way in ways for found in way(record, history))

    def lasts(self, issue: Issue, history: History) -> bool:
        """Return whether what was never unfrozen still is: the first steps are not remembered for long."""
        series = history.at_sites("connection.state")
        here = [index for index, site in enumerate(series.sites) if site in issue.layers]
        codes = connections(series)[:, here]
        frozen = not (codes[-self.heal :] & Wiring.TRAINABLE).any()
        if issue.cause != "never unfrozen" or not frozen or ((codes & Wiring.STEPPED) > 0).mean() < 0.5:
            return False
        return issue.severity is Severity.HIGH or _learns_nothing(history)

    def _never_freed(self, record: StepRecord, history: History) -> tuple[Finding, ...]:
        series = history.at_sites("connection.state")
        if history.seen < self.brief + self.span:
            return ()
        codes = connections(series)
        cold = np.flip(np.logical_and.accumulate(np.flip((codes & Wiring.TRAINABLE) == 0, axis=0)), axis=0)
        count, used = cold.sum(axis=0), Wiring.TRAINABLE | Wiring.OWNED | Wiring.GRADIENT
        trained = (((codes & used) == used) & ~cold).any(axis=0)
        goes_on = (((codes & Wiring.STEPPED) > 0) & cold).sum(axis=0) >= 0.5 * count
        found = trained & (count >= self.readings) & goes_on
        if not found.any() or cold[-1].all():
            return ()
        names = tuple(compress(series.sites, found))
        until, since = series.steps[-int(count[found].max()) - 1 :][:2].tolist()
        late = until - history.begun > self.brief
        if late and (record.step < until + self.rests or not _learns_nothing(history)):
            return ()
        return (
            _finding(
                names,
                f"{len(names)} tensors ({some(names)}) were trained until step {until} and are frozen since: "
                "requires_grad is False at each step of the optimizer that holds them"
                f"{', and the loss is no better than that of a constant prediction' if late else ''}.",
                "call requires_grad_(True) again before their own backward pass; an iterator such as "
                "model.parameters() or itertools.chain(...) can be consumed only once: keep list(...) of it.",
                since,
                "never unfrozen",
                by_loss=late,
            ),
        )

    def _all(self, _record: StepRecord, history: History) -> tuple[Finding, ...]:
        """Find models of which nothing is trained, whose optimizer steps and trains no head outside either."""
        series = history.at_sites("connection.state")
        ever = np.bitwise_or.reduce(connections(series), axis=1, initial=0)
        count = _lately(ever & (Wiring.TRAINABLE | Wiring.STEPPED) == Wiring.STEPPED)
        if count < self.readings or history.run("wiring.outside").last > 0:
            return ()
        since, names = int(series.steps[-count]), tuple(series.sites)
        return (
            _finding(
                names,
                f"all {len(names)} tensors of the model are frozen since step {since}, while the optimizer that holds "
                "them steps: nothing is trained.",
                "call requires_grad_(True) on what is to be trained: freeze the backbone, not the whole model, and "
                "unfreeze what was frozen for one pass.",
                since,
                "all frozen",
            ),
        )

    def _at_zero(self, record: StepRecord, history: History) -> tuple[Finding, ...]:
        sizes = history.at_sites("parameter.frozen_size")
        if not len(sizes.steps):
            return ()
        names = self._used(history, compress(sizes.sites, sizes.present[-1] & (sizes.values[-1] == 0)))
        if not names:
            return ()
        return (
            _finding(
                names,
                f"{len(names)} weights ({some(names)}) are all 0 and frozen: their output is always 0, and they will "
                "never learn.",
                f"call requires_grad_(True) on {names[0]} before the optimizer is created, and check that nothing "
                f"freezes {owner(names[0]) or names[0]} again (PEFT: is_trainable=True, and no second get_peft_model); "
                "or load its trained weights.",
                _frozen_since(history, names),
                "frozen at zero",
                sure=history.seen >= self.span,
            ),
        )

    def _as_drawn(self, record: StepRecord, history: History) -> tuple[Finding, ...]:
        """Find weights that are frozen as they were drawn, where the loss does not get better than a constant's."""
        peaks = history.at_sites("parameter.frozen_peak")
        if not len(peaks.steps):
            return ()
        low, high = self.drawn
        drawn = peaks.present[-1] & (peaks.values[-1] >= low) & (peaks.values[-1] <= high)
        names, others = (self._used(history, compress(peaks.sites, flags)) for flags in (drawn, ~drawn))
        if len(names) <= len(others):
            return ()
        return (
            _finding(
                names,
                f"{len(names)} weights ({some(names)}) are frozen at their random initialization (uniform within a "
                f"bound): they were never trained, and after {history.seen} steps the loss is no better than that of "
                "a constant prediction.",
                "load trained weights before freezing them (model.load_state_dict, weights=...), or call "
                "requires_grad_(True) on them before the optimizer is created.",
                _frozen_since(history, names),
                "frozen as drawn",
                by_loss=True,
                sure=history.seen >= self.harmed and _learns_nothing(history),
            ),
        )

    def _used(self, history: History, sites: Iterable[str]) -> tuple[str, ...]:
        """Return those of some frozen weights that take part while gradients are on."""
        series = history.at_sites("connection.state")
        known = dict(zip(series.sites, np.bitwise_or.reduce(connections(series)).tolist(), strict=True))
        used = Wiring.TRAINABLE | Wiring.CALLED
        trains = any(code & Wiring.TRAINABLE for code in known.values())
        return tuple(site for site in sites if trains and known.get(site, 0) & used == Wiring.CALLED)


def _lately(flags: BoolArray) -> int:
    """Return how many of the last readings in a row have something."""
    return len(flags) if flags.all() else int(flags[::-1].argmin())


def _frozen_since(history: History, names: tuple[str, ...]) -> int:
    """Return the first reading of the last in a row in which all of some parameters were frozen."""
    series = history.at_sites("connection.state")
    cold = (connections(series)[:, np.isin(series.sites, names)] & Wiring.TRAINABLE) == 0
    return int(series.steps[-_lately(cold.all(axis=1))])


def _learns_nothing(history: History) -> bool:
    return none_better(history, 0.9, 3) is not None and not still_falls(history)


def _finding(
    names: tuple[str, ...],
    message: str,
    advice: str,
    since: int,
    cause: str,
    *,
    by_loss: bool = False,
    sure: bool = True,
) -> Finding:
    """Return what is said of frozen parameters; where the loss decided, less sure, and not beside what explains it."""
    return Finding(
        IssueType.NOT_TRAINING,
        Severity.MEDIUM if by_loss else Severity.HIGH,
        names,
        float(len(names)),
        0.0,
        message,
        advice,
        since=since,
        cause=cause,
        origin=cause,
        follows_from=_NOTHING_LEARNED if by_loss else (),
        sure=sure,
    )
