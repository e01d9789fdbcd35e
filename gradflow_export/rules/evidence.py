"""What several rules ask of the past: whether a loss falls, and whether it says more than a constant would."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from gradflow_export.records.evidence import Wiring
from gradflow_export.records.sites import rows
from gradflow_export.records.statistics import median
from gradflow_export.records.step_record import RUN_SITE, BoolArray, IssueType, Reading, StepRecord
from gradflow_export.rules.history import History

Floats = npt.NDArray[np.float64]

DROPOUT = "dropout"
"""Cause of what is not learned because most units are dropped."""
_NO_REASON = (IssueType.NOT_LEARNING, IssueType.MEMORY_USAGE, IssueType.MEMORY_LEAK, IssueType.HEAD_REDUNDANCY)
OTHERS = (DROPOUT, *(kind for kind in IssueType if kind not in _NO_REASON))
"""What explains that nothing is learned."""
_CHOICE = ("loss.choice", "loss.samples", "loss.over_constant")
NORMED_AWAY = "single norm"
"""Cause of a gradient that does not pass a normalization over one value or two."""
INVERTED_MASK = "inverted mask"
"""Cause of attention that reads the padding: inputs then get no gradient, and answers do not depend on them."""


def past(history: History, metric: str, site: str, since: float = 0.0) -> Floats:
    """Return the recent values of a metric at one site, oldest first; those that are not finite are left out.

    Args:
        history: Holds the metric.
        metric: Its name.
        site: Where it was read.
        since: First step whose value counts.
    """
    series, run = history.at_sites(metric), history.run(metric)
    if site not in series.sites:
        # A model whose last layer is the model itself has the site of the run.
        return np.asarray(run.values[run.steps >= since], dtype=np.float64) if site == RUN_SITE else np.zeros(0)
    column = series.sites.index(site)
    values = series.values[series.present[:, column] & (series.steps >= since), column].astype(np.float64)
    return np.asarray(values[np.isfinite(values)])


def taken_away(history: History, names: Iterable[str]) -> set[str]:
    """Return which parameters got a gradient that was gone at the step when last seen, or have such a neighbor.

    Args:
        history: Holds ``parameter.kept_gradient``.
        names: The parameters; those of one module are neighbors.
    """
    kept = history.at_sites("parameter.kept_gradient")
    last = len(kept.steps) - 1 - kept.present[::-1].argmax(axis=0) if len(kept.steps) else np.zeros(0, dtype=np.intp)
    gone = kept.present.any(axis=0) & (kept.values[last, np.arange(len(kept.sites))] == 0)
    modules = {kept.sites[index].rpartition(".")[0] for index in np.flatnonzero(gone)}
    return {name for name in names if name.rpartition(".")[0] in modules}


def answered(history: History, share: float = 0.01) -> bool:
    """Whether every loss whose targets are known is next to nothing against that of the best constant prediction.

    Args:
        history: Holds ``loss.over_constant``.
        share: Below which nothing is left to learn.
    """
    sites = history.at_sites("loss.over_constant").sites or (RUN_SITE,)
    last = [past(history, "loss.over_constant", site)[-5:] for site in sites]
    return all(len(values) == 5 and float(values.max()) < share for values in last)


def chosen_blindly(record: StepRecord, history: History, site: str, *, after: int = 200, chance: float = 0.99) -> bool:
    """Whether a loss that chooses among the samples of a batch, as a contrastive one, remains that of a blind choice.

    Args:
        record: May hold what was read of the loss.
        history: Counts the steps.
        site: Of the loss.
        after: Steps in which it may be, as in a warm-up.
        chance: Least share of the loss of a blind choice.
    """
    choices, samples, share = (seen(record, fact, site) or 0.0 for fact in _CHOICE)
    return history.seen >= after and choices == samples > 1 and share >= chance


def unneeded(sites: tuple[str, ...], codes: npt.NDArray[np.int64]) -> set[str]:
    """Return the parameters that a sound loss may leave without a gradient while others of their block get one.

    A loss of derivatives, as a score is, knows no constant: a bias beside a weight that learns is not cut off. And what
    the last of a row of blocks makes for the next one has nowhere to go.

    Args:
        sites: Parameters, in the order of the model.
        codes: Their :class:`~gradflow_export.records.evidence.Wiring`. Shape: ``[len(sites)]``.
    """
    reached = dict(zip(sites, ((codes & Wiring.GRADIENT) > 0).tolist(), strict=True))
    learning = [site for site in sites if reached[site]]
    homes = {site.rpartition(".")[0] for site in learning}
    blocks = {member for site in learning for _, member in rows(site)}
    alike: dict[str, list[str]] = {}
    for site in sites:
        for row, _ in rows(site):
            alike.setdefault(row, []).append(site)
    ends = {(row, last) for row, (*before, last) in alike.items() if before and all(map(reached.__getitem__, before))}
    vectors = {sites[index] for index in np.flatnonzero(codes & Wiring.VECTOR)}
    return {
        site
        for site in sites
        if not reached[site]
        and (
            (site in vectors and site.rpartition(".")[0] in homes)
            or any((row, site) in ends and member in blocks for row, member in rows(site))
        )
    }


def fall(values: Floats, at: int | None = None) -> float:
    """Return how surely the later part of a series lies below the earlier, in standard deviations of chance.

    Args:
        values: Shape: ``[n]``; a value that is not finite counts as the greatest.
        at: How many belong to the earlier part, half of them by default; fewer than two thirds tell nothing.

    Returns:
        The z-score of the Mann-Whitney test, ties shared; 0 for fewer than 8 values. With n = 60, 3 is reached for a
        fall of 0.8 standard deviations of the noise in half of all cases.

    Source: Mann and Whitney 1947, Annals of Mathematical Statistics 18.

    >>> round(fall(np.arange(20.0)[::-1]), 2), fall(np.ones(20))
    (3.78, 0.0)
    """
    n = len(values)
    if n < 8 or (at is not None and 3 * at < 2 * n):
        return 0.0
    values = np.where(np.isfinite(values), values, np.inf)
    early, late = values[: n // 2 if at is None else at], values[n // 2 if at is None else at :]
    above = (early[:, None] > late[None, :]).sum() + 0.5 * (early[:, None] == late[None, :]).sum()
    mean, spread = early.size * late.size / 2.0, math.sqrt(early.size * late.size * (n + 1) / 12.0)
    return float((above - mean) / spread)


def since_when(steps: npt.NDArray[np.int64], flags: BoolArray) -> tuple[int | None, int | None]:
    """Return the step since which something has held in every reading, and how many steps before it may have as well.

    Args:
        steps: Of the readings, oldest first. Shape: ``[n]``.
        flags: Whether it held in each of them. Shape: ``[n]``.

    Returns:
        ``None`` for both where it does not hold, or held in the first reading that is known.
    """
    place = len(flags) - int(np.cumprod(flags[::-1]).sum())
    around = steps[place - 1 : place + 1].tolist()
    return (around[1], around[1] - around[0] - 1) if len(around) == 2 else (None, None)


def still_falls(history: History, recent: int = 16, sure: float = 2.5, most: float = math.nan) -> bool:
    """Whether the loss falls against its own noise: in the later two thirds of the run, or at the end of a plateau.

    The first steps are left out: nearly every loss falls in them, to the level of the best constant.

    Args:
        history: Holds ``loss``.
        recent: How many of the last losses are compared with the sixty before them.
        sure: Least z-score.
        most: Loss above which a fall does not count.
    """
    loss = history.run("loss")
    values, last = np.fmin(loss.whole()[1], most), np.fmin(loss.values[-60 - recent :], most)
    return fall(values[len(values) // 3 :]) >= sure or fall(last, max(len(last) - recent, 0)) >= sure


def fell(history: History, sure: float = 3.0) -> bool:
    """Whether the loss fell between the halves of the whole run, against its own noise.

    Args:
        history: Holds ``loss``.
        sure: Least z-score.
    """
    return fall(history.run("loss").whole()[1]) >= sure


def gradient_grows(history: History, sure: float = 3.0) -> bool:
    """Whether the gradient grows against its own noise in the later two thirds of the run.

    Where a model leaves a plateau it does long before the loss falls: near a saddle the distance from it, and the
    gradient with it, grows by a factor at each step.

    Args:
        history: Holds ``gradient.total_norm``.
        sure: Least z-score.

    Source: Saxe et al. 2014, arXiv:1312.6120.
    """
    norms = history.run("gradient.total_norm").whole()[1]
    return fall(-norms[len(norms) // 3 :]) >= sure


def fell_since(history: History, step: int, recent: int = 20, sure: float = 4.0, apart: float = 3.0) -> bool:
    """Whether the last losses lie below those up to a step, against their own noise; the first steps are left out.

    Args:
        history: Holds ``loss``.
        step: The last of the earlier ones.
        recent: How many of the last losses are looked at, where there are twice as many earlier ones.
        sure: Least z-score; where every step asks, one in nine stationary runs of 500 steps reaches 3 by chance.
        apart: Least z-score where every late loss lies below every early one: few losses reach no more.
    """
    loss = history.run("loss")
    steps, values = loss.whole()
    early = values[steps <= step]
    early = early[len(early) // 3 :]
    late = loss.values[loss.steps > step][-min(recent, max(len(early) // 2, 1)) :]
    least = apart if late.max(initial=-math.inf) < early.min(initial=math.inf) else sure
    return fall(np.concatenate((early, late)), len(early)) >= least


def falls_again(history: History, since: int, sure: float = 2.5, alike: float = 1.2) -> bool:
    """Whether a loss that rose falls since against its own noise; the first third is left out, for any leap settles.

    A loss up to ``alike`` times the best constant's comes down to it by saying less: nothing is learned by that. One
    far above it falls because other data are learned.

    Args:
        history: Holds ``loss`` and ``loss.over_constant``.
        since: The first step after the rise.
        sure: Least z-score.
        alike: See above.
    """
    steps, values = history.run("loss").all()
    risen, level = values[steps >= since], constant_level(history)
    risen = np.where(risen > alike * level, risen, np.fmin(risen, level))
    return fall(risen[len(risen) // 3 :]) >= sure


def no_better(history: History, site: str, level: float, readings: int) -> float | None:
    """Return the loss against the best constant where it is above ``level`` and was in most of the last readings.

    Args:
        history: Holds ``loss.over_constant``.
        site: Of the loss.
        level: Least share of the best constant's loss.
        readings: How many readings are looked at.

    Returns:
        Their median; ``None`` where it is lower, and for fewer readings.
    """
    values = past(history, "loss.over_constant", site)[-readings:]
    if len(values) < readings:
        return None
    typical = median(values)
    return typical if typical >= level else None


def none_better(history: History, level: float, readings: int) -> float | None:
    """Return the least loss against the best constant where every one is at ``level`` or above, else ``None``.

    Args:
        history: Holds ``loss.over_constant``.
        level: As for :func:`no_better`.
        readings: As for :func:`no_better`.
    """
    alone = (RUN_SITE,) if history.run("loss.over_constant").count else ()
    shares = [no_better(history, s, level, readings) for s in (*history.at_sites("loss.over_constant").sites, *alone)]
    return None if None in shares else min((share for share in shares if share is not None), default=None)


GROWN = 1.5
"""Multiple of their first size from which on targets are made by the run itself, as values that a model bootstraps."""


def growth_of_targets(history: History, since: int = 0) -> tuple[float, float]:
    """Return by what factor all targets had grown up to a step, and have by now; NaN where that is not known.

    Args:
        history: Holds ``target.rms``.
        since: The step; where no reading so old is remembered, the oldest one counts.
    """
    series = history.at_sites("target.rms")
    old = int(np.searchsorted(series.steps, since, side="right"))
    first = np.where(series.first > 0, series.first, np.nan).astype(np.float64)
    shares = series.values / first
    parts = shares[max(old - 5, 0) : max(old, 5)].T, shares[-5:].T
    before, now = (np.fmin.reduce([median(site[site > 0]) for site in part], initial=np.nan) for part in parts)
    return float(before), float(now)


def is_another_loss(history: History) -> bool:
    """Whether the newest loss is of other predictions than the one before, as after a pretraining, and starts anew.

    Args:
        history: Holds ``loss`` and ``loss.over_constant``.
    """
    series, loss = history.at_sites("loss.over_constant"), history.run("loss")
    if len(series.steps) < 2 or series.steps[-1:].tolist() != loss.steps[-1:].tolist():
        return False
    return bool(series.present[-2:].any(axis=1).all()) and not bool(series.present[-2:].all(axis=0).any())


def constant_level(history: History, alike: float = 1.2) -> float:
    """Return the loss of the best constant prediction, for comparison with the loss of every step; it is read at times.

    Args:
        history: Holds ``loss`` and ``loss.over_constant``.
        alike: Greatest ratio of what the last readings of both say: beyond it the data change, or the loss is more than
            what is known of it.

    Returns:
        Unit: that of the loss. NaN where there are several losses, or none is known.
    """
    loss, series = history.run("loss"), history.at_sites("loss.over_constant")
    if len(series.sites) != 1:
        return math.nan
    losses = dict(zip(loss.steps.tolist(), loss.values.tolist(), strict=True))
    shares = zip(series.steps.tolist(), series.values[:, 0].tolist(), strict=True)
    levels = [losses[step] / share for step, share in shares if share > 0 and step in losses][-5:]
    return median(np.array(levels)) if len(levels) > 1 and 0 < max(levels) <= alike * min(levels) else math.nan


def lowest_median(values: Floats) -> float:
    """Return what the median of a distribution is at least, from a sample: the fewer values, the farther below theirs.

    Args:
        values: Shape: ``[n]``.

    Returns:
        The median minus two of its standard errors, from the median absolute deviation; the least of one or two values,
        and NaN for none.

    >>> round(lowest_median(np.arange(101.0)), 1), round(lowest_median(np.arange(48.0, 53.0)), 1)
    (40.8, 48.3)
    """
    if len(values) < 3:
        return float(values.min()) if len(values) else math.nan
    typical = median(values)
    return typical - 2.0 * 1.2533 * 1.4826 * median(np.abs(values - typical)) / math.sqrt(len(values))


def supervised(history: History) -> bool:
    """Whether every loss that is known is of answers to a question alone, and there is one."""
    series, alone = history.at_sites("loss.supervised"), history.run("loss.supervised")
    values = [*series.values[series.present].tolist(), *alone.values.tolist()]
    return bool(values) and min(values) > 0


def reading_of(record: StepRecord, metric: str) -> Reading:
    """Return the reading of a metric in this record, one without sites where none arrived."""
    return record.get(metric) or _without_sites(metric)


@functools.cache
def _without_sites(metric: str) -> Reading:
    return Reading.of(metric, (), ())


def only(reading: Reading, flags: BoolArray) -> Reading:
    """Return the part of a reading that arrived and is flagged.

    Args:
        reading: Values of many sites.
        flags: Shape: that of ``reading.values``.
    """
    where = np.flatnonzero(reading.present & flags)
    sites = tuple(reading.sites[index] for index in where)
    return Reading.owned(reading.metric, sites, reading.values[where], reading.present[where])


def layers_of(record: StepRecord, fact: str) -> tuple[str, ...]:
    """Return the layers at which a fact was seen in this record, ``kind.name``."""
    return tuple(layer for layer, value in record.facts.get(fact, {}).items() if value is not None)


def seen(record: StepRecord, fact: str, layer: str = RUN_SITE) -> float | None:
    """Return one value of the evidence of this record as a number, ``None`` where there is none.

    Args:
        record: Where to look.
        fact: ``kind.name``.
        layer: The layer it was seen at.
    """
    value = record.fact(fact, layer)
    return None if value is None else float(value)


def values_of(record: StepRecord, fact: str) -> dict[str, float]:
    """Return the values of a fact by layer, ``kind.name``; a layer at which nothing could be read is left out."""
    return {layer: float(value) for layer, value in record.facts.get(fact, {}).items() if value is not None}


def columns_of(table: npt.NDArray[np.bool_], have: tuple[str, ...], want: tuple[str, ...]) -> npt.NDArray[np.bool_]:
    """Reorder the columns of ``table`` to ``want``; False where a site is not known."""
    place = {site: index for index, site in enumerate(have)}
    return np.pad(table, ((0, 0), (0, 1)))[:, [place.get(site, len(have)) for site in want]]
