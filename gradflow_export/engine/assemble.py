"""Turns what arrived from the device into the readings of one record, and derives what follows from them."""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from gradflow_export.engine.analyses import Analyses, Clues
from gradflow_export.engine.clip_factors import before_clipping, clip_inside
from gradflow_export.engine.discrete_totals import discrete_totals, rate_effectiveness
from gradflow_export.engine.transfer import Bundle, spread
from gradflow_export.hooks.readings import Clue, Pending, RowSample, Sample
from gradflow_export.hooks.shard_layout import Layout
from gradflow_export.instruments.gradients.clipping import CLIPPED, ClipCall
from gradflow_export.metrics.gains import arrived, depth_gain, gains, log_gains, passed
from gradflow_export.metrics.noise import NoiseScale
from gradflow_export.metrics.outputs import rank_errors, ranks
from gradflow_export.records.column import Column
from gradflow_export.records.evidence import Evidence, evidence_of
from gradflow_export.records.statistics import median, root_of_squares
from gradflow_export.records.step_record import RUN_SITES, Histogram, Issue, Note, Reading, to_float32

Floats = npt.NDArray[np.float64]
POOLED_BATCHES, POOLED_ROWS = 4, 512
HISTOGRAM_BINS = 32
CLIP_WINDOW = 20
_WIDEST = 8e307  # so that the width of a range is finite too
_NORM, _SENT_BACK = "parameter.gradient_norm", "block.gradient_norm"


class Ranks(Protocol):
    """The way to the other processes of a distributed run."""

    def join(
        self, step: int, columns: dict[str, Column], layouts: Sequence[Layout], told: list[Issue | Note] | None = None
    ) -> list[Reading]:
        """Change columns, and what else is reported, into those of the whole job where this is the rank that writes."""

    def close(self) -> None:
        """Send and take no more."""


class Assembler:
    """Builds readings and histograms from bundles, one after the other, on the worker thread."""

    def __init__(self) -> None:
        self.ranks: Ranks | None = None
        self._pools: dict[str, deque[npt.NDArray[np.floating]]] = {}
        self._last_rank_step = 0
        self._noise = NoiseScale()
        self._scales: deque[float] = deque(maxlen=CLIP_WINDOW)
        self._analyses = Analyses()

    def assemble(self, bundle: Bundle) -> tuple[list[Reading], list[Histogram], tuple[Evidence, ...]]:
        """Return the readings, histograms and evidence of one step."""
        columns: dict[str, Column] = {}
        clues = Clues()
        samples: list[tuple[Sample, npt.NDArray[np.floating]]] = []
        clips: list[tuple[ClipCall, float]] = []
        for packed in bundle.packed:
            for item, values in packed.unpack():
                if isinstance(item, Sample):
                    samples.append((item, values))
                elif isinstance(item, ClipCall):
                    clips.append((item, float(values[0])))
                elif isinstance(item, Clue):
                    clues.add(item, values)
                else:
                    _merge(columns, item, values)
        if bundle.scaled:
            _drop_skipped(columns)
        _drop_undefined(columns)
        _divide_by_scale(columns)
        clip_inside(columns, clips)
        joined = [] if self.ranks is None else self.ranks.join(bundle.step, columns, bundle.layouts, bundle.told)
        readings = [
            Reading.run(metric, float(c.values[0]))
            if c.sites == RUN_SITES and c.present[0]
            else Reading.owned(metric, c.sites, to_float32(c.values), c.present)
            for metric, c in columns.items()
        ]
        readings.extend(Reading.run(metric, value) for metric, value in bundle.scalars.items())
        readings.extend(joined)
        readings.extend(derived(columns))
        readings.extend(self._clipping(columns, clips, bundle.scalars.get("runtime.backward_passes", 1.0)))
        readings.extend(_players(bundle, columns.get(_NORM)))
        rows = [(s.site, v, s.whole) for s, v in samples if isinstance(s, RowSample)]
        if rows:
            readings.extend(self._ranks(bundle.step, rows))
        plain = [(s, v) for s, v in samples if s.analyse is None and not isinstance(s, RowSample)]
        analysed, facts = self._analyses.run(samples, bundle.step, bundle.told)
        readings.extend(analysed)
        evidence = evidence_of(bundle.step, {**clues.facts(), **facts})
        return readings, [histogram_of(s.metric, s.site, v) for s, v in plain], evidence

    def _clipping(
        self, columns: Mapping[str, Column], clips: Sequence[tuple[ClipCall, float]], passes: float
    ) -> Iterator[Reading]:
        scale, first, whole = (columns.get(f"gradient.{n}") for n in ("clip_scale", "first_norm", "norm_before_clip"))
        left = None if scale is None else float(scale.values[0])
        before = before_clipping(columns.get(_NORM), clips)
        if before is not None and left is None and whole is None:
            left = before.used / before.whole if before.whole > 0 else 1.0
            yield Reading.run("gradient.norm_before_clip", before.whole)
            yield Reading.run("gradient.clip_scale", left)
        if before is not None and before.factors is not None:
            norms = columns[_NORM]
            if np.ptp(before.factors[norms.present]) > 0:
                yield Reading("parameter.clip_scale", norms.sites, to_float32(before.factors), norms.present)
        if left is not None:
            self._scales.append(left)
            yield Reading.run("gradient.clipped_share", sum(s < CLIPPED for s in self._scales) / len(self._scales))
        if first is None or whole is None:
            return
        count, one, all_of_them = int(passes), float(first.values[0]), float(whole.values[0])
        if count > 1 and math.isfinite(one) and math.isfinite(all_of_them) and all_of_them > 0:
            # Divided by the passes or not, both are the same multiple of a mean gradient.
            noise = self._noise.add((count * one) ** 2, all_of_them**2, count)
            if noise is not None:
                yield Reading.run("gradient.noise_scale", noise)

    def _ranks(
        self, step: int, samples: Sequence[tuple[str, npt.NDArray[np.floating], tuple[int, int]]]
    ) -> Iterator[Reading]:
        # Samples of consecutive steps are pooled; older ones belong to other weights.
        if step > self._last_rank_step + POOLED_BATCHES:
            self._pools = {}
        self._last_rank_step = step
        # By block: of two optimizers that step in turn both call it.
        found: dict[str, tuple[float, ...]] = {}
        for site, rows, whole in samples:
            pool = self._pools.setdefault(site, deque(maxlen=POOLED_BATCHES))
            if pool and pool[0].shape[1] != rows.shape[1]:
                pool.clear()
            pool.append(rows.copy())  # a part of all that was sent, which would stay with it
            while sum(map(len, pool)) > max(POOLED_ROWS, len(rows)):
                pool.popleft()
            joined = np.concatenate(pool)
            if len(joined) > 1:  # one row is no spread that could have directions
                left_out = tuple(1.0 - n / max(of, n) for n, of in zip(rows.shape, whole, strict=True))
                found[site] = *ranks(joined), len(joined), *rank_errors(joined, left_out)
        if not found:
            return
        names = ("effective_rank", "stable_rank", "rank_rows", "effective_rank_error", "stable_rank_error")
        for name, values in zip(names, zip(*found.values(), strict=True), strict=True):
            if any(values) or not name.endswith("_error"):
                yield Reading.of(f"block.{name}", list(found), list(values))


def _players(bundle: Bundle, norms: Column | None) -> Iterator[Reading]:
    """Yield what each of several optimizers did."""
    sites, players = bundle.players_sites, bundle.players
    if len(sites) < 2 or not players:
        return
    yield Reading.of(
        "optimizer.steps", sites, [float(players[n][1]) if n in players else None for n in range(len(sites))]
    )
    if norms is None:
        return
    totals: list[float | None] = [None] * len(sites)
    for number, (where, _) in players.items():
        values = norms.values[where][norms.present[where]]
        if number < len(sites) and values.size:
            totals[number] = root_of_squares(values)
    yield Reading.of("optimizer.gradient_norm", sites, totals)


def _merge(columns: dict[str, Column], item: Pending, values: npt.NDArray[np.floating]) -> None:
    column, (new, present) = columns.get(item.metric), spread(item, values)
    if column is None or column.sites != item.sites:
        if item.nan_is_missing:
            new[~present] = 0.0
        columns[item.metric] = Column(item.sites, new, present)
    else:
        if item.metric == _SENT_BACK:  # by another pass to the same block, as with micro-batches
            both = column.present & present
            new[both] = np.hypot(column.values[both], new[both])
        column.values[present] = new[present]
        column.present |= present


def _drop_skipped(columns: Mapping[str, Column]) -> None:
    """Make block norms missing that overflowed in a pass which a gradient scaler threw away: the used one is finite."""
    norms, blocks = columns.get(_NORM), columns.get(_SENT_BACK)
    if norms is not None and blocks is not None and np.isfinite(norms.values[norms.present]).all():
        blocks.present &= np.isfinite(blocks.values)


def _divide_by_scale(columns: Mapping[str, Column]) -> None:
    """Take the factor of a gradient scaler out of what was read in backward passes, before it was divided out."""
    scale = columns.get("gradient.loss_scale")
    if scale is None or not (scale.present[0] and scale.values[0] > 0):
        return
    for metric in (_SENT_BACK, "upstream.norm", "upstream.mean_norm"):
        column = columns.get(metric)
        if column is not None:
            column.values /= scale.values[0]


def _drop_undefined(columns: Mapping[str, Column]) -> None:
    """Make averages over nothing missing: the diversity of uniform heads, the entropy of queries without a choice.

    They arrive as NaN, because telling them apart on the training thread would wait for the device. Where the logits
    themselves are not finite, NaN is what was read.
    """
    logits = columns.get("attention.max_logit")
    if logits is None:
        return
    finite = {site for site, value in zip(logits.sites, logits.values, strict=True) if math.isfinite(value)}
    for metric, column in columns.items():
        if metric.startswith("attention.") and np.isnan(column.values).any():
            for index in np.flatnonzero(np.isnan(column.values)):
                site = column.sites[index]
                column.present[index] &= site not in finite and site.rpartition(".head")[0] not in finite


def derived(columns: Mapping[str, Column]) -> Iterator[Reading]:
    """Yield the readings that follow from others: totals, gains, ratios.

    Args:
        columns: Per-site values by metric.
    """
    norms = columns.get(_NORM)
    if norms is not None:
        yield from _gradient_summary(norms.values[norms.present])
    blocks = columns.get(_SENT_BACK)
    if blocks is not None:
        yield from _gain_readings(blocks, columns.get("block.next"))
    yield from _moment_readings(columns)
    sizes, greatest = columns.get("block.output_rms"), columns.get("block.output_max")
    if sizes is not None and greatest is not None:
        usable = greatest.present & (sizes.values > 0)
        with np.errstate(invalid="ignore"):  # Inf / Inf
            peaks = np.divide(greatest.values, sizes.values, out=np.zeros_like(sizes.values), where=usable)
        yield Reading.owned("block.peak_ratio", sizes.sites, to_float32(peaks), usable)
    if {"parameter.weight_norm", "parameter.update_norm"} <= columns.keys():
        yield from _update_readings(columns)
    yield from rate_effectiveness(columns)
    yield from discrete_totals(columns)


def _gradient_summary(norms: Floats) -> Iterator[Reading]:
    count = norms.size
    yield Reading.run("gradient.with_grad", float(count))
    yield Reading.run("gradient.nonfinite", float(count - np.count_nonzero(np.isfinite(norms))))
    if not count:
        return
    yield Reading.run("gradient.total_norm", root_of_squares(norms))
    with np.errstate(invalid="ignore", over="ignore"):  # what the methods of arrays do, without their detours
        mean = np.add.reduce(norms) / count
        apart = norms - mean
        yield Reading.run("gradient.mean_norm", float(mean))
        yield Reading.run("gradient.std_norm", math.sqrt(np.add.reduce(apart * apart) / count))
        yield Reading.run("gradient.max_norm", float(np.maximum.reduce(norms)))
        yield Reading.run("gradient.min_norm", float(np.minimum.reduce(norms)))


def _ends(following: Column | None, sites: tuple[str, ...]) -> list[int | None]:
    """Return the last block of the chain that each block belongs to, ``None`` where it is in none."""
    if following is None or following.sites != sites:
        return [0] * len(sites)
    return list(_last(following.values.tobytes(), following.present.tobytes()))


@functools.lru_cache(maxsize=8)
def _last(following: bytes, present: bytes) -> tuple[int | None, ...]:
    """Do what :func:`_ends` says: at each record the blocks hang together as they did before."""
    places = np.frombuffer(following).tolist()
    here = np.frombuffer(present, dtype=np.bool_).tolist()
    after = [int(place) if there else None for place, there in zip(places, here, strict=True)]
    ends: list[int | None] = [place if step is not None else None for place, step in enumerate(after)]
    for place, step in reversed(list(enumerate(after))):
        if step is not None and step >= 0:
            ends[place] = ends[step] if step > place else step
    return tuple(ends)


def _gain_readings(blocks: Column, following: Column | None) -> Iterator[Reading]:
    norms = blocks.as_list()
    if len(norms) < 2:
        return
    # Entry k of the gains is the transition k to k + 1: it belongs to the block the gradient passed back through.
    sites, ends = blocks.sites[1:], _ends(following, blocks.sites)
    # Between two chains, such as heads side by side or two players of a game, there is no gain.
    linked = [a is not None and a == b for a, b in itertools.pairwise(ends)]
    linked = [link and there for link, there in zip(linked, arrived(norms), strict=True)]
    linear = [gain if link else None for gain, link in zip(gains(norms), linked, strict=True)]
    logged = [link and through for link, through in zip(linked, passed(norms), strict=True)]
    logarithmic = [gain if link else None for gain, link in zip(log_gains(norms), logged, strict=True)]
    yield Reading.of("block.gain", sites, linear)
    yield Reading.of("block.log_gain", sites, logarithmic)
    known = [end for end in ends if end is not None]
    lengths = Counter(known)
    longest = max(lengths, key=lengths.__getitem__, default=None)  # of several the first
    whole = depth_gain([norm if end == longest else None for norm, end in zip(norms, ends, strict=True)])
    for name, value in (("gain.depth", whole.total), ("gain.slope", whole.slope)):
        if not math.isnan(value):
            yield Reading.run(name, value)
    finite = [g for g in linear if g is not None and math.isfinite(g)]
    if finite:
        logs = [g for g in logarithmic if g is not None and math.isfinite(g)]
        yield Reading.run("gain.min", min(finite))
        yield Reading.run("gain.max", max(finite))
        if logs:  # where nothing passed, and beside an infinite norm, a gain is 0 and has no finite logarithm
            yield Reading.run("gain.mean_log", math.fsum(logs) / len(logs))


def _moment_readings(columns: Mapping[str, Column]) -> Iterator[Reading]:
    ratios, shares = columns.get("parameter.adam_rms"), columns.get("parameter.epsilon_share")
    if ratios is not None and ratios.present.any():
        yield Reading.run("optimizer.adam_rms", float(ratios.values[ratios.present].max()))
    if shares is not None and shares.present.any():
        yield Reading.run("optimizer.epsilon_share", median(shares.values[shares.present]))


def _update_readings(columns: Mapping[str, Column]) -> Iterator[Reading]:
    weights, updates = columns["parameter.weight_norm"], columns["parameter.update_norm"]
    # A ratio to nothing says nothing: parameters that are all zero, such as fresh biases, have none.
    usable = updates.present & (weights.values != 0)
    ratios = np.divide(updates.values, weights.values, out=np.zeros_like(updates.values), where=usable)
    yield Reading.owned("parameter.update_ratio", updates.sites, to_float32(ratios), usable)
    present = updates.present
    total, size = root_of_squares(updates.values[present]), root_of_squares(weights.values[present])
    yield Reading.run("update.total_norm", total)
    told = [columns.get(f"parameter.{name}_norm_error") for name in ("weight", "update")]
    of_weights, of_updates = (np.zeros(len(ratios)) if each is None else each.values for each in told)
    if told[1] is not None:
        both = np.hypot(of_weights, of_updates)
        yield Reading.owned("parameter.update_ratio_error", updates.sites, to_float32(both), usable & told[1].present)
        error = _error_of_root(updates.values[present], of_updates[present])
        yield Reading.run("update.norm_error", error)
        if size > 0:
            yield Reading.run(
                "update.ratio_error", math.hypot(error, _error_of_root(weights.values[present], of_weights[present]))
            )
    if size > 0 or math.isnan(size):
        yield Reading.run("update.ratio", total / size)


def _error_of_root(norms: Floats, errors: Floats) -> float:
    """Return the standard error of ``(sum n^2)^(1/2)`` as a share of it, from those of each. Shape of both: ``[n]``."""
    total = root_of_squares(norms)
    if not (total > 0 and math.isfinite(total)):
        return 0.0
    return float(np.linalg.norm(np.square(norms / total) * errors))


def histogram_of(metric: str, site: str, entries: npt.NDArray[np.floating]) -> Histogram:
    """Count entries into evenly wide bins over their finite range.

    Args:
        metric: ``"parameter.gradient"`` or ``"parameter.weight"``.
        site: The parameter's name.
        entries: Shape: ``[n]``.
    """
    finite = entries[np.isfinite(entries)].astype(np.float64)
    if finite.size == 0:
        return Histogram(metric, site, np.array([0.0, 1.0]), np.array([0]), int(entries.size))
    np.clip(finite, -_WIDEST, _WIDEST, out=finite)
    low, high = float(finite.min()), float(finite.max())
    # Entries that differ by rounding alone leave no room for bins between them.
    if high - low <= 1e-12 * max(abs(low), abs(high)) + 1e-300:
        high = low + max(abs(low) * 1e-6, 1e-12)
    counts, edges = np.histogram(finite, bins=HISTOGRAM_BINS, range=(low, high))
    return Histogram(metric, site, edges, counts, int(entries.size - finite.size))
