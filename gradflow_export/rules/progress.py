"""Parameters that do not move: STAGNATION, with the reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import compress
from types import MappingProxyType
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from gradflow_export.records.evidence import Wiring
from gradflow_export.records.sites import pattern
from gradflow_export.records.step_record import FloatArray, Issue, IssueType, Reading, Severity, StepRecord
from gradflow_export.rules.base import Finding, Rule, number, some
from gradflow_export.rules.evidence import columns_of, only, reading_of, taken_away, unneeded
from gradflow_export.rules.history import History, SiteSeries, unread, unread_at
from gradflow_export.rules.sampled import likely
from gradflow_export.rules.signals import connected, connections, converged, follows, lately, owner, taking_turns

NOT_OWNED = "not in an optimizer"
NO_GRADIENT = "no gradient"
ZERO_RATE = "learning rate 0"
ZERO_GRADIENT = "zero gradient"
ROUNDING = "rounding"
LEFT_OUT = "no update moves them"
_NOWHERE = "no update moves any"
UNCHOSEN = "not chosen"
TAKEN_BACK = "taken back"
CUT = "cut off"
TAKEN_AWAY = "gradient taken away"

_DECAYED, _FADED = 1e-2, 1e-5
"""Shares of its maximum, and of the weights, below which a learning rate and an update leave weights as they are."""
_SHUT = ("activation.zero_share", "activation.saturated_share")


@dataclass(frozen=True, kw_only=True)
class Stagnation(Rule):
    """Report trainable parameters that have not changed by a single bit over at least ``span`` executed steps.

    Checksums of all entries are compared, so changes by a moving average, a copy or another optimizer also count. Not
    reported: a gradient that is zero by invariance, meaning exactly 0 or below ``invariant`` of the other gradients of
    its module while those parameters learn (the key bias of attention, a convolution's bias before BatchNorm, the last
    bias where the loss is of derivatives alone); and a gradient that is zero because an activation blocks it, with all
    outputs 0 or saturated, which DEAD and SATURATION report, but not in modules whose parameters are all 0.

    A gradient that becomes exactly 0 while another parameter of the module still gets one was cut off in
    ``forward()``; this is reported even if the momentum of the optimizer still changes the parameter.

    Steps that a gradient scaler skipped do not count. A parameter that gets no gradient because no sample was routed to
    it, while similar modules learn, is reported as not chosen, with severity LOW, because a router may still choose it.
    This is detected from modules that were not called, from an earlier gradient, and from similar modules that get a
    gradient in some steps only. A target network may wait for its next copy, see
    :func:`~gradflow_export.rules.signals.follows`.

    Attributes:
        span: Minimum number of steps without a change.
        readings: Minimum number of readings within them.
        invariant: Maximum fraction of the sibling's gradient norm that counts as zero by invariance.
        patience: One; ``span`` already requires persistence.
    """

    span: int = 10
    readings: int = 3
    invariant: float = 1e-4
    patience: int = 1

    needs: ClassVar[tuple[str, ...]] = ("parameter.changed",)
    remembers: ClassVar[tuple[str, ...]] = (
        "loss",
        "learning_rate",
        "parameter.changed",
        "parameter.first_entries",
        "parameter.gradient_norm",
        "parameter.kept_gradient",
        "update.ratio",
        "connection.state",
        *_SHUT,
    )
    by_layer: ClassVar[bool] = True

    def check(self, record: StepRecord, history: History) -> tuple[Finding, ...]:
        """Judge the updates of this record and the readings before it."""
        trainable = record.get("parameter.trainable")
        readings, norms = history.at_sites("parameter.changed"), history.at_sites("parameter.gradient_norm")
        if trainable is None or len(readings.steps) < self.readings:
            return ()
        sites = tuple(trainable.sites)
        since, count = _unchanged(sites, readings)
        trained = trainable.present & (trainable.values > 0)
        still = trained & (record.step - since + 1 >= self.span) & (count >= self.readings)
        cut = self._cut(history, tuple(compress(sites, trained)))
        if not (still.any() or cut):
            return ()
        reasons = self._reasons(record, history, sites, still & ~np.isin(sites, [*cut])) | {CUT: tuple(cut)}
        if converged(history):
            reasons = {why: sites for why, sites in reasons.items() if why not in {LEFT_OUT, ROUNDING, ZERO_GRADIENT}}
        rate = history.run("learning_rate")
        if rate.last < _DECAYED * rate.high:  # what a schedule did, and LEARNING_RATE reports
            reasons.pop(ROUNDING, None)
        _part_taken(reasons, history)
        _leave_followers(reasons, history)
        if ZERO_GRADIENT in reasons and shut(history):
            reasons[ZERO_GRADIENT] = self._blank(record, sites, reasons[ZERO_GRADIENT])
        _part_unchosen(reasons, {pattern(sites[index]) for index in np.flatnonzero(~still)}, history)
        first = dict(zip(sites, since.tolist(), strict=True)) | cut
        return tuple(
            replace(
                self._finding(why, first, record.step, trainable, layers),
                # The last that moved a parameter is one of the steps that the reading before covers.
                before=unread(norms.steps, cut[layers[0]])
                if why == CUT
                else unread_at(readings, layers[0], int(first[layers[0]]) - 1),
            )
            for why, layers in reasons.items()
            if layers
        )

    def refuted(self, issue: Issue, history: History) -> bool:
        """Whether all have moved; a reading or two that excuse their rest are no end of it."""
        readings = history.at_sites("parameter.changed")
        moved = np.flatnonzero((readings.present[-1:] & (readings.values[-1:] > 0)).any(axis=0))
        return issue.cause != CUT and {readings.sites[index] for index in moved}.issuperset(issue.layers)

    def _reasons(
        self, record: StepRecord, history: History, sites: tuple[str, ...], still: npt.NDArray[np.bool_]
    ) -> dict[str, tuple[str, ...]]:
        norms, rates = _at(record, "parameter.gradient_norm", sites), _at(record, "parameter.learning_rate", sites)
        loudest: dict[str, float] = {}
        for index in np.flatnonzero(~still & (norms > 0)):
            module = owner(sites[index])
            loudest[module] = max(loudest.get(module, 0.0), float(norms[index]))
        beside = np.array([loudest.get(owner(site), -1.0) for site in sites])
        invariant = norms.astype(np.float64) <= self.invariant * beside
        unknown = np.isnan(rates) & ~np.isnan(rates).all()  # of all, where no optimizer makes the steps
        # An optimizer that steps more rarely than another has no learning rate to tell at this step.
        loose, held = lately(history, Wiring.GRADIENT, Wiring.OWNED), connected(history, Wiring.OWNED)
        # What no optimizer holds and no gradient reaches takes no part, as a head in the pretraining of a body.
        away = lately(history, Wiring.TRAINABLE, Wiring.OWNED | Wiring.GRADIENT)
        strange, idle = np.isin(sites, [*loose]), unknown & np.isin(sites, [*held, *away])
        moves = history.run("update.ratio").values
        fades = bool((moves[moves > 0][-1:] < _FADED).any())
        why = np.select(
            [strange, idle, unknown, np.isnan(norms), rates == 0.0, invariant, norms == 0.0],
            [NOT_OWNED, "", NOT_OWNED, NO_GRADIENT, ZERO_RATE, "", ZERO_GRADIENT],
            LEFT_OUT if np.isnan(rates).all() and not fades else ROUNDING,
        )
        return {
            each: tuple(compress(sites, still & (why == each))) for each in dict.fromkeys(why[still].tolist()) if each
        }

    def _cut(self, history: History, sites: tuple[str, ...]) -> dict[str, int]:
        """Return the first step with a gradient of exactly 0 of those whose module's other parameters have one."""
        norms = history.at_sites("parameter.gradient_norm")
        if len(norms.steps) <= self.readings or shut(history):
            return {}
        lately = (norms.present & (norms.values > 0))[-self.readings - 1 :]
        learn = {owner(norms.sites[index]) for index in np.flatnonzero(lately.all(axis=0))}
        had = dict(zip(norms.sites, norms.first.tolist(), strict=True))
        since, count = _unchanged(sites, norms)
        rests = (norms.steps[-1] - since + 1 >= self.span) & (count > self.readings)
        first = norms.steps[np.searchsorted(norms.steps, since)]
        cut = zip(sites, first.tolist(), rests.tolist(), strict=True)
        return {site: start for site, start, still in cut if still and had[site] > 0 and owner(site) in learn}

    def _blank(self, record: StepRecord, sites: tuple[str, ...], layers: tuple[str, ...]) -> tuple[str, ...]:
        """Return those parameters whose modules hold nothing but zeros."""
        sizes = _at(record, "parameter.weight_norm", sites)
        filled = {owner(site) for site, size in zip(sites, sizes, strict=True) if size != 0.0}
        return tuple(site for site in layers if owner(site) not in filled)

    def _finding(self, why: str, first: dict[str, int], step: int, known: Reading, layers: tuple[str, ...]) -> Finding:
        total, since = int((known.present & (known.values > 0)).sum()), first[layers[0]]
        weighty = Severity.HIGH if 2 * len(layers) >= total else Severity.MEDIUM
        what = f"did not change in {number(step - since + 1)} steps: {why}."
        if why == CUT:
            what = "had a gradient before, and get exactly 0 now, while other parameters of their modules get one."
        return Finding(
            IssueType.STAGNATION,
            Severity.LOW if why == UNCHOSEN else weighty,
            layers,
            0.0,
            0.0,
            f"{len(layers)} of {total} trainable parameters ({some(layers)}) {what}",
            _ADVICE[_NOWHERE if why == LEFT_OUT and len(layers) == total else why].format(layer=layers[0]),
            since=since,
            cause=why,
            origin=why * (why == CUT),
            follows_from=(IssueType.VANISHING,) if why in {CUT, LEFT_OUT, ROUNDING, ZERO_GRADIENT} else (),
            about=partial(self._finding, why, first, step, known),
        )


@dataclass(frozen=True, kw_only=True)
class LostUpdates(Rule):
    """Report runs in low precision, or on declared quantization grids, whose updates are mostly lost to rounding.

    The intended update is compared with the actual change of each entry. This also detects models in which a few
    weights still change, and earlier than waiting for weights that stay constant. A severe one is NOT_TRAINING, which
    explains the STAGNATION; a grid that the user declared is no mistake.

    Source: Zamirai et al. 2020, arXiv:2010.06192.

    Attributes:
        lost: Minimum fraction of the entries with an intended change that did not change, for a severe issue.
        effectiveness: Maximum effectiveness of the whole update for a severe issue.
        most: Minimum fraction that is reported.
        part: Maximum effectiveness that is reported.
        patience: High enough for a warm-up, in which the first updates are lost.
    """

    lost: float = 0.95
    effectiveness: float = 0.1
    most: float = 0.6
    part: float = 0.55
    patience: int = 8
    heal: int = 2

    needs: ClassVar[tuple[str, ...]] = ("update.lost_share",)
    remembers: ClassVar[tuple[str, ...]] = ("loss",)

    def check(self, record: StepRecord, history: History) -> tuple[Finding, ...]:
        """Judge the updates of this record."""
        least, share, _ = likely(record, "update.lost_share")
        each, arrived = record.get("parameter.lost_share"), likely(record, "update.effectiveness")[2]
        if each is None or converged(history):
            return ()
        grave = least >= self.lost and arrived <= self.effectiveness
        grids = bool(reading_of(record, "parameter.grid").present.any())
        if not grave and (not (least >= self.most and arrived <= self.part) or grids):
            return ()
        order = np.argsort(-np.where(each.present, each.values, -1.0), kind="stable")
        layers = tuple(each.sites[i] for i in order if each.present[i] and each.values[i] >= self.most)
        message = (
            f"{number(100 * share)} % of the optimizer's updates left the weights unchanged ({some(layers)}): "
            f"{ROUNDING}."
        )
        finding = Finding(
            IssueType.STAGNATION,
            Severity.HIGH if grave else Severity.MEDIUM,
            layers,
            share,
            self.most,
            message,
            _OFF_GRID if grids else _ADVICE[ROUNDING],
            cause=ROUNDING,
            follows_from=(IssueType.VANISHING,),
        )
        whole = grave and not grids
        return (*([replace(finding, issue_type=IssueType.NOT_TRAINING, origin=ROUNDING)] if whole else []), finding)


@dataclass(frozen=True, kw_only=True)
class TakenBack(Rule):
    """Report parameters that change in ``optimizer.step()`` and have their old values again at the next forward pass.

    This happens if weights are quantized after each step and no update reaches half a quantization step, or if weights
    are restored. Weights between the points of a declared grid are only updated late and not reported; nor is a
    parameter of which only some rows were read, because the other rows may change.

    Attributes:
        patience: High enough for a warm-up, in which the first updates are lost.
    """

    patience: int = 8
    heal: int = 2

    needs: ClassVar[tuple[str, ...]] = ("parameter.change_norm",)
    by_layer: ClassVar[bool] = True

    def check(self, record: StepRecord, history: History) -> tuple[Finding, ...]:
        """Judge the updates of this record."""
        change = reading_of(record, "parameter.change_norm")
        moved = _at(record, "parameter.update_norm", change.sites)
        whole = _at(record, "parameter.read_share", change.sites) == 1
        late = _at(record, "parameter.between", change.sites) > 0
        layers = only(change, (change.values == 0) & (moved > 0) & whole & ~late).sites
        if not layers:
            return ()
        total = int(change.present.sum())
        return (
            Finding(
                IssueType.STAGNATION,
                Severity.HIGH if 2 * len(layers) >= total else Severity.MEDIUM,
                layers,
                0.0,
                0.0,
                f"{len(layers)} of {total} parameters ({some(layers)}) change in optimizer.step() and are back at "
                "their old values, bit for bit, at the next forward pass.",
                "find the code that writes to them between step() and the forward pass. If they are quantized, keep "
                "full-precision weights for the optimizer and quantize a copy in forward (straight-through estimator), "
                "or raise the learning rate until an update is half a quantization step; if they are meant to stay "
                "constant, call requires_grad_(False).",
                origin=TAKEN_BACK,
            ),
        )


def _at(record: StepRecord, metric: str, sites: tuple[str, ...]) -> FloatArray:
    """Return a metric at ``sites``, NaN where missing. Shape: ``[len(sites)]``."""
    reading = reading_of(record, metric)
    if reading.sites == sites:
        return np.where(reading.present, reading.values, np.float32(np.nan))
    known = reading.as_dict()
    return np.array([np.nan if known.get(site) is None else known[site] for site in sites], dtype=np.float32)


_OFF_GRID = (
    "each update is smaller than half a step of the declared grid: keep full-precision weights and quantize a copy "
    "in forward (w + (round(w / step) * step - w).detach()), raise the learning rate, or declare a finer grid."
)


_ADVICE: Mapping[str, str] = MappingProxyType(
    {
        NOT_OWNED: "build the optimizer from model.parameters() after every module exists, or call "
        "optimizer.add_param_group({{'params': [...]}}); if {layer} is frozen on purpose, call requires_grad_(False) "
        "on it.",
        NO_GRADIENT: "the graph of the loss does not contain {layer}: look for .detach(), .item(), torch.no_grad() "
        "or an argmax between it and the loss, and for modules that forward() never calls.",
        UNCHOSEN: "nothing is sent to {layer} while modules like it learn: if a router chooses among them, add noise "
        "to its scores or a load-balancing loss; if none does, look for dead units and gradients of 0 behind it, call "
        "the module in forward(), or remove it from the model.",
        ZERO_RATE: "set a learning rate above 0 in this parameter group, or check that the scheduler is called "
        "once per step and has not ended.",
        ZERO_GRADIENT: "a layer after {layer} blocks the gradient: look for dead ReLU units, weights initialized "
        "to 0 (use nn.init.kaiming_normal_), or a mask that removes its output.",
        _NOWHERE: "change the parameters themselves: p -= lr * p.grad inside torch.no_grad(), for p = p - lr * p.grad "
        "makes a tensor that the model does not hold; in bfloat16 or float16 small updates are lost to rounding.",
        LEFT_OUT: "update {layer} where the loop updates the others, or call requires_grad_(False) on it if it is "
        "frozen on purpose; in bfloat16 or float16 small updates are lost to rounding: keep the weights in float32.",
        TAKEN_AWAY: "gradients reach {layer}, and are gone when the optimizer steps: search the code between "
        "backward() and step() for what sets .grad to None or 0; if it is meant to stay constant, call "
        "requires_grad_(False).",
        CUT: "look for what forward() does to {layer} since that step: round, sign, argmax or .detach() pass no "
        "gradient, weight + (round(weight) - weight).detach() does (straight-through estimator).",
        ROUNDING: "each update is smaller than half the spacing of the weights' floating-point format: raise the "
        "learning rate (is it decayed too often?), or the factor of the term of the loss that they serve; instead of "
        "bfloat16 or float16, keep the weights in float32 and use torch.autocast.",
    }
)
"""What to do, by the reason."""


def _leave_followers(reasons: dict[str, tuple[str, ...]], history: History) -> None:
    """Take out target networks and the like, which get no gradient on purpose."""
    wiring = history.at_sites("connection.state")
    ever = np.bitwise_or.reduce(connections(wiring), axis=0)
    following = follows(history, wiring.sites, ever)
    resting = {wiring.sites[index] for index in np.flatnonzero(following)} | unneeded(wiring.sites, ever)
    for why in (NO_GRADIENT, NOT_OWNED):
        reasons[why] = tuple(site for site in reasons.get(why, ()) if site not in resting)


def _part_taken(reasons: dict[str, tuple[str, ...]], history: History) -> None:
    """Move what got a gradient that was gone at the step to a reason of its own."""
    for why in (NO_GRADIENT, ZERO_GRADIENT, CUT):
        if gone := taken_away(history, reasons.get(why, ())):
            reasons[TAKEN_AWAY] = (*reasons.get(TAKEN_AWAY, ()), *(site for site in reasons[why] if site in gone))
            reasons[why] = tuple(site for site in reasons[why] if site not in gone)


def _part_unchosen(reasons: dict[str, tuple[str, ...]], alive: set[str], history: History) -> None:
    """Move what nothing was sent to, while others of its kind learn, to a reason of its own."""
    norms, routed = history.at_sites("parameter.gradient_norm"), taking_turns(history, lost=False)
    learned = set(compress(norms.sites, norms.first > 0))
    # What is called, and is given all there is, is sent something: its graph is cut.
    learned -= lately(history, Wiring.CALLED, Wiring.UNCALLED | Wiring.ROUTED)
    unchosen: list[str] = []
    for why, unsent in ((NO_GRADIENT, learned | connected(history, Wiring.UNCALLED)), (ZERO_GRADIENT, set())):
        names = reasons.get(why, ())
        idle = {n for n in names if pattern(n) in alive and (n in unsent or pattern(n) in routed)}
        unchosen += [name for name in names if name in idle]
        reasons[why] = tuple(name for name in names if name not in idle)
    reasons[UNCHOSEN] = tuple(unchosen)


def shut(history: History) -> bool:
    """Whether all outputs of some activation are 0, or flat, in the latest reading: no gradient passes it."""
    return any(bool((each.present[-1:] & (each.values[-1:] == 1.0)).any()) for each in map(history.at_sites, _SHUT))


def _unchanged(sites: tuple[str, ...], readings: SiteSeries) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return since which step each parameter has rested, and over how many readings; what is not known has moved.

    Returns:
        Steps and counts. Shape of both: ``[len(sites)]``.
    """
    steps = readings.steps
    rested = columns_of(readings.present & (readings.values == 0), readings.sites, sites)
    count = np.where(rested.all(axis=0), len(steps), rested[::-1].argmin(axis=0))
    first = np.minimum(len(steps) - count, len(steps) - 1)
    # A reading covers all steps since the one before it; of the first that is remembered, of its own.
    since = np.where(first > 0, steps[first - 1] + 1, steps[0])
    return since, np.asarray(count, dtype=np.int64)
