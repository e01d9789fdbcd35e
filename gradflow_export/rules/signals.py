"""What several rules ask of a record: the chain of blocks, whether training is solved, which names belong together."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Container
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gradflow_export.records.evidence import Wiring
from gradflow_export.records.sites import pattern
from gradflow_export.records.statistics import median
from gradflow_export.records.step_record import BoolArray, Reading, StepRecord
from gradflow_export.rules.evidence import Floats, reading_of
from gradflow_export.rules.history import History, SiteSeries

Codes = npt.NDArray[np.int64]

_EACH_LINK = (Wiring.TRAINABLE, Wiring.OWNED, Wiring.ZERO_RATE, Wiring.GRADIENT)
LINKS = int(Wiring.TRAINABLE | Wiring.OWNED | Wiring.GRADIENT | Wiring.ZERO_RATE)
"""What may be lost while a run goes on."""
AGAIN = 3
"""Steps in a row after which what is exact, and was otherwise before, is no coincidence."""


@dataclass(frozen=True)
class Chain:
    """Logarithms of one metric along the blocks it arrived at, in depth order.

    Attributes:
        sites: Names of the blocks that have a finite value.
        logs: Natural logarithms, -inf where the value is 0. Shape: ``[len(sites)]``.
        joined: Whether all that each block but the last gives goes on through the one after it, and only that is fed
            by it; ``None`` when nobody looked, and the order is taken for it. Shape: ``[len(sites) - 1]``.
        ends: Whether nothing but the loss is known to come after the last block; ``None`` when nobody looked.
    """

    sites: tuple[str, ...]
    logs: Floats
    joined: BoolArray | None = None
    ends: bool | None = None

    @property
    def log_gains(self) -> Floats:
        """What each block but the first multiplies the gradient by on its way back. Shape: ``[len(sites) - 1]``."""
        with np.errstate(invalid="ignore"):
            return np.asarray(self.logs[:-1] - self.logs[1:], dtype=np.float64)

    @property
    def rise(self) -> float:
        """Logarithm of the last over the first; NaN when either is 0."""
        first, last = float(self.logs[0]), float(self.logs[-1])
        return last - first if math.isfinite(first) and math.isfinite(last) else math.nan


def chain(reading: Reading) -> Chain | None:
    """Return the logarithms along a chain, ``None`` for fewer than two blocks with a finite value."""
    usable = reading.present & np.isfinite(reading.values) & (reading.values >= 0)
    if int(usable.sum()) < 2:
        return None
    with np.errstate(divide="ignore"):
        logs = np.log(reading.values[usable].astype(np.float64))
    return Chain(tuple(site for site, here in zip(reading.sites, usable.tolist(), strict=True) if here), logs)


def chains(record: StepRecord, metric: str) -> tuple[Chain, ...]:
    """Return the logarithms along every chain of a record.

    Heads side by side, networks of several players and branches that the loss enters apart are chains of their own:
    blocks are of one chain when what they give meets again in one block before the loss.

    Args:
        record: May tell in ``block.next`` how its blocks hang together; else they are one chain.
        metric: A metric of blocks.
    """
    whole, following = chain(reading_of(record, metric)), record.get("block.next")
    if whole is None or following is None:
        return () if whole is None else (whole,)
    found = _linked(whole.sites, following.sites, following.values.tobytes(), following.present.tobytes())
    return tuple(Chain(sites, whole.logs[places], joined, ends) for sites, places, joined, ends in found)


_Links = tuple[tuple[str, ...], npt.NDArray[np.intp], BoolArray, bool]


@functools.lru_cache(maxsize=8)
def _linked(sites: tuple[str, ...], every: tuple[str, ...], values: bytes, present: bytes) -> tuple[_Links, ...]:
    """Return sites, places, joints and end of each chain: several rules ask at each record, and it hardly changes."""
    places = np.frombuffer(values, dtype=np.float32).tolist()
    after = {
        site: int(place)
        for site, place, here in zip(every, places, np.frombuffer(present, dtype=np.bool_).tolist(), strict=True)
        if here
    }
    members: dict[str, list[int]] = {}
    for index, site in enumerate(sites):
        last = site
        while after.get(last, -1) >= 0:
            last = every[after[last]]
        if site in after:
            members.setdefault(last, []).append(index)
    known, out = frozenset(sites), []
    for last, indices in members.items():
        own = tuple(sites[index] for index in indices)
        joined = np.array([_beyond(a, after, every, known) == b for a, b in itertools.pairwise(own)], dtype=np.bool_)
        where = np.array(indices, dtype=np.intp)
        for array in (joined, where):
            array.setflags(write=False)
        if len(own) > 1:
            out.append((own, where, joined, after[last] == -1))
    return tuple(out)


def _beyond(site: str, after: dict[str, int], sites: tuple[str, ...], known: Container[str]) -> str:
    """Return the next block that a value arrived for."""
    while (place := after.get(site, -1)) >= 0:
        site = sites[place]
        if site in known:
            return site
    return ""


def outlying(log_gains: Floats, floor: float, deviations: float) -> BoolArray:
    """Find the transitions that damp far more than the others do.

    Args:
        log_gains: Shape: ``[n]``. -inf marks a transition that lets nothing through.
        floor: Least distance from the median of the others, in nats.
        deviations: Least distance in robust standard deviations of the others.

    Returns:
        True where ``log_gain < median of the others - max(floor, deviations * 1.4826 * MAD of the others)``; all False
        for fewer than two transitions. Shape: ``[n]``.

    Source: leave-one-out median and MAD, Rousseeuw and Croux 1993, JASA 88.
    """
    flags = np.zeros(len(log_gains), dtype=np.bool_)
    finite = np.isfinite(log_gains)
    if len(log_gains) < 2 or not finite.any():
        return flags
    highest = float(log_gains[finite].max())
    for index, gain in enumerate(log_gains.tolist()):
        # The median of the others is at most their greatest: most transitions need no closer look.
        if not gain < highest - floor:
            continue
        others = np.delete(log_gains, index)
        others = others[np.isfinite(others)]
        centre = median(others)
        spread = 1.4826 * median(np.abs(others - centre))
        flags[index] = gain < centre - max(floor, deviations * spread)
    return flags


def solved(history: History, share: float = 0.1) -> bool:
    """Whether the loss has fallen below ``share`` of where it started; always False for losses that go below 0."""
    loss = history.run("loss")
    recent = loss.values[-5:]
    known = loss.count >= 5 and loss.low >= 0 and bool(np.isfinite(recent).all())
    return known and median(recent) < share * loss.first


def settled(history: History, small: float = 1e-3, scatter: float = 0.5) -> bool:
    """Whether a small loss is what a solved problem leaves: its logarithm scatters, because few samples make it up.

    A loss that is small only because it was scaled down varies between batches as the unscaled one does, by little.

    Args:
        history: Holds ``loss``.
        small: Greatest such loss; absolute, because a run that starts solved shows no fall to compare with.
        scatter: Least standard deviation of the last 20 logarithms, in nats.
    """
    recent = history.run("loss").values[-20:]
    if len(recent) < 5 or not np.isfinite(recent).all() or not (recent > 0).all() or float(recent.max()) >= small:
        return False
    return float(np.log(recent).std()) > scatter


def stuck(history: History, span: int = 200, share: float = 0.9) -> bool:
    """Whether the loss has not come below ``share`` of its first level over at least ``span`` steps.

    Always False for losses that go below 0, whose level has no zero to compare with.
    """
    loss = history.run("loss")
    steps, values = loss.whole()
    if len(values) < 10 or loss.low < 0 or loss.steps[-1] - steps[0] < span or not np.isfinite(loss.values[-20:]).all():
        return False
    return median(loss.values[-20:]) > share * median(values[: max(5, len(values) // 20)])


def converged(history: History) -> bool:
    """Whether there is nothing left to learn, so that resting weights and gradients are no fault.

    Either the loss fell by a tenth or more of its first value, lies within 1 % of that fall from its least value, and
    its level fell by less than 0.1 % of it between the halves of the last 20 steps. Or it started solved, see
    :func:`settled`.

    Source: criterion (d) of the convergence indicators.
    """
    loss = history.run("loss")
    if loss.last == 0.0 or settled(history):
        return True
    recent, drop = loss.values[-20:], loss.first - loss.low
    if len(recent) < 20 or not np.isfinite(recent).all() or drop < 0.1 * abs(loss.first):
        return False
    before, after = median(recent[:10]), median(recent[10:])
    return after <= loss.low + 0.01 * drop and before - after < 1e-3 * drop


def owner(parameter: str) -> str:
    """Return the module a parameter belongs to."""
    return parameter.rpartition(".")[0]


def connections(series: SiteSeries) -> Codes:
    """Return the bits of ``connection.state`` or ``hidden.state``, 0 where none arrived.

    Args:
        series: The past of one of them.

    Returns:
        Sums of :class:`~gradflow_export.records.evidence.Wiring`. Shape: that of ``series.values``.
    """
    known = series.present & np.isfinite(series.values)
    return np.clip(np.where(known, series.values, 0.0), 0, 2**24).astype(np.int64)


def connected(history: History, wanted: int) -> set[str]:
    """Return the parameters that had all of some connections at one reading or more.

    Args:
        history: Holds ``connection.state``.
        wanted: Flags of :class:`~gradflow_export.records.evidence.Wiring`.
    """
    series = history.at_sites("connection.state")
    return set(itertools.compress(series.sites, (connections(series) & wanted == wanted).any(axis=0)))


def lately(history: History, wanted: int, lacking: int) -> set[str]:
    """Return the parameters that had all of some connections, and none of others, at the newest reading."""
    series = history.at_sites("connection.state")
    return set(itertools.compress(series.sites, (connections(series)[-1:] & (wanted | lacking) == wanted).any(axis=0)))


def begun(steps: npt.NDArray[np.int64], flags: BoolArray, again: int = AGAIN) -> npt.NDArray[np.int64]:
    """Return since which reading something holds that held in none before: where it began, and is no coincidence.

    Args:
        steps: Of the readings, oldest first. Shape: ``[n]``.
        flags: Whether it held in each of them. Shape: ``[n, sites]``.
        again: In so many steps in a row it has to hold at first, and not to have held in as many readings before; one
            is left of these where the window is about to end.

    Returns:
        The place of the first reading with it, ``n`` where it has not begun. Shape: ``[sites]``.
    """
    n, count = len(flags), flags.sum(axis=0)
    start = n - count
    if n < 2 * again:
        return np.full(len(count), n)
    known = start >= (1 if n > 4 * again else again)
    lasts = (flags == (np.arange(n)[:, None] >= start)).all(axis=0) & (count >= again) & known
    at = np.where(lasts, start, 0)
    return np.where(lasts & (steps[np.minimum(at + again - 1, n - 1)] - steps[at] < again), start, n)


def lost_links(codes: Codes) -> Codes:
    """Return which connections parameters lack; a learning rate above 0 is one of them.

    Args:
        codes: What :func:`connections` returns.
    """
    return codes & LINKS ^ (LINKS & ~Wiring.ZERO_RATE)


def changed_at(series: SiteSeries, codes: Codes, history: History) -> tuple[int, BoolArray] | None:
    """Return at which reading parameters lost a connection that they had in all before, and which they are.

    A gradient that came and went before, step by step, is not lost: players and experts take turns.
    """
    norms, n = history.at_sites("parameter.gradient_norm"), len(codes)
    gone = set(itertools.compress(norms.sites, begun(norms.steps, ~norms.present) < len(norms.steps)))
    lost = lost_links(codes)
    starts = [begun(series.steps, (lost & bit) > 0) for bit in _EACH_LINK]
    starts[-1] = np.where([site in gone for site in series.sites], starts[-1], n)
    changed = np.min(starts, axis=0)
    return (int(changed.min()), changed < n) if (changed < n).any() else None


def dated_change(
    series: SiteSeries, start: int, names: tuple[str, ...], history: History, *, rate: bool
) -> tuple[int, int | None]:
    """Return since which step it is known that a connection is lost, and in how many before it may have been.

    It was lost at some step after the reading before; or, where gradients are gone with it, or the learning rate, which
    are read more often, after the last of these.

    Args:
        series: The past of ``connection.state``.
        start: The first reading without it.
        names: The parameters.
        history: Holds ``parameter.gradient_norm`` and ``learning_rate``.
        rate: Whether the connection is the learning rate.
    """
    first, rates, norms = (
        int(series.steps[start]),
        history.run("learning_rate"),
        history.at_sites("parameter.gradient_norm"),
    )
    last = int(series.steps[start - 1]) if start else series.left
    steps, lives = norms.steps, (norms.values[:, np.isin(norms.sites, names)] > 0).any(axis=1)
    steps, lives = (rates.steps, rates.values > 0) if rate else (steps, lives)
    later = steps[lives & (steps >= last)].tolist()
    if last and later and later[-1] < first:
        last, first = later[-1], min(first, *steps[steps > later[-1]].tolist(), first)
    return first, first - last - 1 if last else None


def dropped_at_once(history: History, since: int, still: BoolArray, total: int) -> bool:
    """Whether the rate of all parameters fell to 0 at once, and not at the end of a schedule that lowered it."""
    rate = history.run("learning_rate")
    before = rate.values[(rate.steps < since) & (rate.values > 0)][-1:]
    return int(still.sum()) == total and bool((before >= 0.1 * rate.high).any())


def warms_up(history: History) -> bool:
    """Whether the rate rises fast: by a fifth and more within ten steps, however few of them were recorded."""
    steps, rates = history.run("learning_rate").steps, history.run("learning_rate").values
    before = rates[steps <= steps[-1:] - 10]
    return len(before) > 0 and float(rates[-1]) > 1.2 * float(before[-1])


def inside(module: str, block: str) -> bool:
    """Whether ``module`` is ``block`` or lies within it."""
    return module == block or module.startswith(block + ".")


def taking_turns(history: History, *, lost: bool = True) -> set[str]:
    """Return the patterns of numbered parameters that get a gradient in some steps only: experts behind a router.

    One of them that had a gradient in one reading and none, or one of 0, in another is evidence for all of its kind;
    members of a stack have one in every step, whatever they are called.

    Args:
        history: Holds ``parameter.gradient_norm``.
        lost: Whether a gradient counts that was there in all steps and is gone since one of them.
    """
    norms = history.at_sites("parameter.gradient_norm")
    here = norms.present & (norms.values > 0)
    varies = here.any(axis=0) & ~here.all(axis=0) & (lost | (begun(norms.steps, ~here) == len(here)))
    return {pattern(norms.sites[index]) for index in np.flatnonzero(varies)} - set(norms.sites)


def follows(history: History, sites: tuple[str, ...], codes: Codes) -> BoolArray:
    """Tell which parameters belong to a follower: a copy of what learns, and called only while gradients are off.

    Vectors, which often begin as one number everywhere, follow where a matrix does.

    Args:
        history: Holds ``parameter.first_entries``.
        sites: Names of parameters.
        codes: Sums of :class:`~gradflow_export.records.evidence.Wiring` over all readings. Shape: ``[sites]``.

    Returns:
        Shape: ``[sites]``.
    """
    beside = (codes & (Wiring.LOOKED | Wiring.CALLED)) == Wiring.LOOKED
    matrix = (codes & Wiring.VECTOR) == 0
    series = history.at_sites("parameter.first_entries")
    first = dict(zip(series.sites, series.first.tolist(), strict=True))
    entries = np.array([first.get(site, np.nan) for site in sites])
    copied = beside & matrix & np.isin(entries, entries[(codes & Wiring.GRADIENT) > 0])
    return np.asarray(copied | (beside & ~matrix & copied.any()), dtype=np.bool_)
