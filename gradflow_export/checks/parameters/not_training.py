"""Parameters that should learn and get no update, each mistake distinguished: NOT_TRAINING."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from gradflow_export.checks.parameters.chosen import chosen, kin_of, moved_since
from gradflow_export.checks.parameters.passes import (
    ALONE,
    BLIND,
    COPIED,
    GATHERING,
    LONELY,
    STOPPED,
    Told,
    counted,
    taken,
)
from gradflow_export.records.evidence import Wiring
from gradflow_export.records.sites import pattern
from gradflow_export.records.step_record import BoolArray, Issue, IssueType, Severity, StepRecord
from gradflow_export.rules.base import Check, Finding, number, some
from gradflow_export.rules.evidence import INVERTED_MASK, seen, taken_away, unneeded
from gradflow_export.rules.history import History, SiteSeries
from gradflow_export.rules.progress import ZERO_GRADIENT, ZERO_RATE, shut
from gradflow_export.rules.signals import (
    LINKS,
    Codes,
    changed_at,
    connections,
    dated_change,
    dropped_at_once,
    follows,
    lost_links,
    owner,
    taking_turns,
)


@dataclass(frozen=True, kw_only=True)
class NotTraining(Check):
    """Report trainable parameters that are not connected to the loss, to an optimizer, or to the model.

    Connections are read in several steps; one that was seen once counts. A gradient that is exactly 0 from the first
    step on, while others are not, does not count as a connection.

    Why it is bad:
        The parameters stay at their random initial values, and the rest of the model learns to work around them.

    Example:
        self.heads = [nn.Linear(64, 10) for _ in range(3)]

    Use instead:
        self.heads = nn.ModuleList([nn.Linear(64, 10) for _ in range(3)])

    Not reported:
        Parameters without a gradient that no optimizer holds; modules that are called rarely, for the first ``rare``
        steps; modules that are never called, if similar modules are called in turns or with different numbers of
        samples (experts of a router), which STAGNATION reports as LOW; dead or saturated units (DEAD, SATURATION); a
        recurrent cell called once or twice in a step. A target network or moving average: it changes without a
        gradient, or started as a copy of a trained module and is called while gradients are off. Layers frozen before
        the rest (a backbone), a bias frozen alone, and layers of which only the biases are trained.

    Attributes:
        readings: Minimum number of steps read.
        span: Minimum number of steps without a gradient.
        rare: The same for one of several similar modules, and for an optimizer that has not stepped yet.
        patience: One; ``readings`` already requires persistence.
    """

    readings: int = 6
    span: int = 15
    rare: int = 100
    patience: int = 1
    heal: int = 2

    order: ClassVar[int] = 40
    raises: ClassVar[tuple[IssueType, ...]] = (IssueType.NOT_TRAINING,)
    evidence: ClassVar[tuple[str, ...]] = ("connection.state", *ALONE)
    remembers: ClassVar[tuple[str, ...]] = (
        "activation.saturated_share", "activation.zero_share", "layer.cell_calls", "learning_rate", "loss",
        "parameter.first_entries", "parameter.gradient_norm", "hidden.state", "parameter.weight_norm",
        "parameter.kept_gradient", "connection.state", "wiring.orphans",
    )  # fmt: skip
    by_layer: ClassVar[bool] = True

    def check(self, record: StepRecord, history: History) -> tuple[Finding, ...]:
        """Judge the connections of this record and of those before it."""
        foreign = seen(record, "wiring.foreign") or 0.0
        if lonely := seen(record, "wiring.lonely_passes"):
            return (counted(COPIED if foreign >= 0.5 else LONELY, lonely, foreign=foreign),)
        if gathered := seen(record, "wiring.gathering_passes"):
            return (counted(GATHERING, gathered),)
        if stopped := seen(record, "wiring.stopped_passes"):
            return (counted(STOPPED, stopped, record.step - 1),)
        series = history.at_sites("connection.state")
        if not record.facts.get("connection.state") or len(series.steps) < self.readings:
            return ()
        codes = connections(series)
        lately = changed_at(series, codes, history)
        whole = self._since(record, history, series, np.bitwise_or.reduce(codes), np.bitwise_and.reduce(codes))
        return (*(self._lately(record, history, series, codes, *lately) if lately else ()), *whole)

    def lasts(self, issue: Issue, history: History) -> bool:
        """Return whether all still lack a connection: that they had it before is not remembered for long."""
        series = history.at_sites("connection.state")
        here = [index for index, site in enumerate(series.sites) if site in issue.layers]
        lost = lost_links(connections(series)[-self.heal :, here])
        return lost.size > 0 and bool(lost.all())

    def _lately(
        self, record: StepRecord, history: History, series: SiteSeries, codes: Codes, start: int, changed: BoolArray
    ) -> Iterable[Finding]:
        """Yield what is wrong since a change with the parameters it befell; readings before it are of another run."""
        ever = np.bitwise_or.reduce(codes[start:]) & LINKS | np.bitwise_or.reduce(codes) & ~LINKS
        names = set(chosen(series.sites, changed))
        for found in self._since(record, history, series, ever, np.bitwise_and.reduce(codes[start:]), start):
            if names.issuperset(found.layers):
                yield found

    def _since(
        self, record: StepRecord, history: History, series: SiteSeries, ever: Codes, always: Codes, start: int = 0
    ) -> tuple[Finding, ...]:
        """Judge the connections since a reading, of which the bits that were ever there and those that always were."""
        span, since, sites = int(series.steps[-1] - series.steps[start]) + 1, int(series.steps[start]), series.sites
        trainable = (ever & Wiring.TRAINABLE) > 0
        total = int(trainable.sum())
        owned, reached = (ever & Wiring.OWNED) > 0, (ever & Wiring.GRADIENT) > 0
        now = (connections(series)[-1] & Wiring.GRADIENT) > 0
        blind = seen(record, "wiring.blind_passes") or 0.0
        if blind >= self.readings and (trainable & owned).any() and not reached.any():
            return (counted(BLIND, blind, since),)
        still = trainable & ((always & Wiring.ZERO_RATE) > 0)
        findings = [
            *_hidden(history, self.readings),
            *self._unowned(history, sites, trainable & reached & ~owned & now, ever),
            *self._unreached(history, sites, trainable & owned & ~reached, ever, span, since if start else 0),
            *self._flat(history, sites, trainable & owned & reached, ever),
            *(() if start and not dropped_at_once(history, since, still, total) else _rateless(sites, still, total)),
            *_frozen(sites, ~trainable, (always & Wiring.TRAINABLE) > 0, ever, 1 if start else 3),
        ]
        return tuple(
            Finding(
                IssueType.NOT_TRAINING,
                Severity.CRITICAL if len(names) >= total > 0 and sure else (Severity.HIGH if sure else Severity.MEDIUM),
                names,
                float(len(names)),
                0.0,
                f"{len(names)} tensor{'s' * (len(names) > 1)} ({some(names)}) got no update in {number(span)} steps: "
                f"{what}.",
                advice,
                since=dated[0],
                before=dated[1],
                cause=cause,
                origin=cause,
                follows_from=(INVERTED_MASK,) * (cause == ZERO_GRADIENT),
            )
            for cause, names, what, advice, sure in findings
            for dated in (dated_change(series, start, names, history, rate=cause == ZERO_RATE),)
        )

    def _unowned(self, history: History, sites: tuple[str, ...], loose: BoolArray, ever: Codes) -> Iterable[Told]:
        waiting = loose & ((ever & Wiring.WAITING) > 0)
        names = chosen(sites, waiting)
        if names and history.seen >= self.rare:
            yield Told(
                "optimizer never stepped",
                names,
                "an optimizer holds them, but its step() is not called",
                (
                    "call step() of every optimizer, here of the one that holds "
                    f"{names[0]}: loss.backward(); optimizer_b.step()."
                ),
                False,
            )
        names = chosen(sites, loose & ~waiting)
        if names and history.run("wiring.orphans").last > 0:
            yield Told(
                "left the model",
                names,
                (
                    "the optimizer holds tensors of the same shapes that are no longer in the model: the model was "
                    "changed after the optimizer was created"
                ),
                (
                    "replace modules, load or re-create the model and move it first, and create the optimizer "
                    "last: optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)."
                ),
                True,
            )
        elif names:
            yield Told(
                "in no optimizer",
                names,
                "gradients reach them, but no optimizer that steps holds them",
                (
                    "build the optimizer from model.parameters() after every module exists, or call "
                    f"optimizer.add_param_group({{'params': [...]}}); if {names[0]} is meant to stay constant, call "
                    "requires_grad_(False) on it."
                ),
                True,
            )

    def _unreached(
        self, history: History, sites: tuple[str, ...], cut: BoolArray, ever: Codes, span: int, since: int
    ) -> Iterable[Told]:
        if (span < self.span and not since) or not cut.any() or not ((ever & Wiring.GRADIENT) > 0).any():
            return
        called = dict(zip(sites, ((ever & Wiring.UNCALLED) == 0).tolist(), strict=True))
        turns, beside = taking_turns(history, lost=not since), kin_of(sites, ever, (ever & Wiring.GRADIENT) > 0)
        # What a router does not choose receives nothing: that tells nothing of a cut, however long it lasts.
        sent = turns | {pattern(name) for name in chosen(sites, (ever & Wiring.ROUTED) > 0)}
        norms = history.at_sites("parameter.gradient_norm")
        learned = set(chosen(norms.sites, norms.first > 0))
        moved = moved_since(history.at_sites("parameter.weight_norm"), since) | (unneeded(sites, ever) - learned)
        names = tuple(
            name
            for name in chosen(sites, cut & ~follows(history, sites, ever))
            if name not in moved
            and (pattern(name) not in sent or (called[name] and name not in learned))
            and (span >= self.rare or pattern(name) not in (turns if called[name] else turns | beside))
        )
        lost = since > 0 or learned.issuperset(names)
        gone = taken_away(history, names)
        used = tuple(name for name in names if called[name] and name not in gone)
        unused = tuple(name for name in names if not called[name] and name not in gone)
        yield from taken(names, gone)
        known = bool(((ever & Wiring.CALLED) > 0).any())  # else the model itself was never called
        if used:
            yield Told(
                "no gradient",
                used,
                f"{'forward() uses their modules, but ' * known}no gradient "
                f"{'comes back any more' if lost else 'ever came back'}: "
                f"{'' if known else 'their modules are not called, or '}the graph is cut between them and the loss",
                (
                    f"search the code after {owner(used[-1]) or used[-1]} for .detach(), .data, .item(), .numpy(), "
                    "torch.no_grad(), argmax, rounding or torch.tensor(...), and use the tensor itself."
                ),
                True,
            )
        if unused:
            yield Told(
                "never called",
                unused,
                f"forward() {'no longer' if lost else 'never'} calls their modules",
                f"call {owner(unused[0]) or unused[0]} in forward(), or remove it from the model.",
                True,
            )

    def _flat(self, history: History, sites: tuple[str, ...], learning: BoolArray, ever: Codes) -> Iterable[Told]:
        """Yield what gets a gradient of exactly 0, at the first reading and over the whole window since."""
        norms = history.at_sites("parameter.gradient_norm")
        if len(norms.steps) < self.span or shut(history) or history.run("loss").last == 0.0:
            return
        never = norms.present.all(axis=0) & (norms.values == 0).all(axis=0) & (norms.first == 0)
        flat = set(chosen(norms.sites, never))
        living = set(chosen(norms.sites, ~never & (norms.values > 0).any(axis=0)))
        homes = {owner(site) for site in living}
        brief = _brief_cells(history)
        known = dict(zip(sites, ever.tolist(), strict=True))
        codes = np.array([known.get(site, 0) for site in norms.sites], dtype=np.int64)
        kin = kin_of(norms.sites, codes, ~never & (norms.values > 0).any(axis=0)) | taking_turns(history)
        vectors = set(chosen(norms.sites, (codes & Wiring.VECTOR) > 0))
        names = tuple(
            site
            for site in chosen(sites, learning)
            if site in flat
            and not (site in vectors and owner(site) in homes)
            and site not in brief
            and pattern(site) not in kin
        )
        gone = taken_away(history, names)
        yield from taken(names, gone)
        names = tuple(name for name in names if name not in gone)
        if living and names:
            yield Told(
                ZERO_GRADIENT,
                names,
                "their gradient is exactly 0 at every step",
                (
                    f"check the operations after {owner(names[-1]) or names[-1]}: sign(), round(), floor() and "
                    "comparisons have a derivative of 0 everywhere (use a sigmoid, or x + (x.sign() - "
                    "x).detach()); a softmax over one value, weights of 0 and a dropout of 1 also block the "
                    "gradient. Also check its input: an input of 0, such as a state that is reset within the loop "
                    "over time, gives a gradient of 0."
                ),
                True,
            )


def _hidden(history: History, readings: int) -> Iterable[Told]:
    series = history.at_sites("hidden.state")
    if len(series.steps) < readings:
        return
    ever = np.bitwise_or.reduce(connections(series))
    wanted = Wiring.TRAINABLE | Wiring.GRADIENT
    loose = ((ever & wanted) == wanted) & ((ever & Wiring.OWNED) == 0)
    made = loose & ((ever & Wiring.MADE) > 0)
    names = chosen(series.sites, made)
    if names:
        yield Told(
            "made in forward",
            names,
            "they are created in each forward pass with new random weights, which are then discarded",
            f"create {names[0].rpartition('.')[2]} once, in __init__, and call it in forward().",
        )
    names = chosen(series.sites, loose & ~made)
    if names:
        holder = re.split(r"[\[ ]", names[0])[0]
        yield Told(
            "not registered",
            names,
            "gradients reach them, but they are not in model.parameters(), because a plain list, dict or "
            "attribute holds them, so no optimizer updates them and state_dict() does not save them",
            f"put them into nn.ModuleList, nn.ModuleDict or nn.ParameterList ({holder} = nn.ModuleList([...])), "
            "or wrap the tensor in nn.Parameter as the last operation (nn.Parameter(x.to(device)), not "
            "nn.Parameter(x).to(device), which is a plain tensor), and create the optimizer afterwards.",
        )


def _rateless(sites: tuple[str, ...], still: BoolArray, total: int) -> Iterable[Told]:
    names = chosen(sites, still)
    if names:
        yield Told(
            ZERO_RATE,
            names,
            "the learning rate of their parameter group is exactly 0",
            (
                "give the group a learning rate above 0 (optimizer.param_groups[i]['lr'] = 1e-3), or check whether "
                "the scheduler multiplies by 0: an integer division in LambdaLR, or a schedule that has ended."
            ),
            len(names) == total,
        )


def _frozen(sites: tuple[str, ...], frozen: BoolArray, trained: BoolArray, ever: Codes, least: int) -> Iterable[Told]:
    """Yield what is frozen the wrong way round: the output layer, or one of ``least`` like layers, where others learn.

    A layer is frozen, or trained, if its matrices are, which hold nearly all of its entries; its vectors count where it
    has no matrix. Layers are alike whose parameters are: as many matrices and vectors, in the same order. Of layers
    that learned before, one alike is enough: freezing what is trained usually begins at the input.
    """
    by_module: dict[str, list[int]] = {}
    for index, site in enumerate(sites):
        by_module.setdefault(owner(site), []).append(index)
    modules, vector = list(by_module), (ever & Wiring.VECTOR) > 0
    bulk = {m: [i for i in here if not vector[i]] or here for m, here in by_module.items()}
    cold = [m for m in modules if frozen[bulk[m]].all() and ((ever[bulk[m]] & Wiring.CALLED) > 0).all()]
    warm = [m for m in modules if trained[bulk[m]].all()]
    if not cold or len(warm) < 2 or len(warm) + len(cold) < len(modules):
        return
    last = cold == modules[-1:]
    kinds = {m: vector[by_module[m]].tolist() for m in (*warm, cold[0])}
    peers = [m for m in warm if kinds[m] == kinds[cold[0]]]
    among = len(cold) == 1 and len(peers) >= least and cold[0] != modules[0]
    if last or among:
        names = tuple(sites[i] for i in by_module[cold[0]] if frozen[i])
        yield Told(
            "frozen",
            names,
            f"requires_grad is False although all layers {'before' if last else 'around'} them are trained",
            (
                f"call requires_grad_(True) on {cold[0]}, and check that the optimizer holds it; usually the layers "
                "near the input are frozen instead."
            ),
            False,
        )


def _brief_cells(history: History) -> set[str]:
    """Return the recurrent weights of cells that were never called more than twice in a step."""
    calls = history.at_sites("layer.cell_calls")
    most = np.where(calls.present, calls.values, 0.0).max(axis=0, initial=0.0)
    return {f"{site}.weight_hh".lstrip(".") for site, count in zip(calls.sites, most, strict=True) if 0 < count <= 2}
