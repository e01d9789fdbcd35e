"""Losses that hold earlier losses: a running sum on which ``backward`` is called again and again."""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from gradflow_export.autograd_graph.loss_graph import Node
from gradflow_export.autograd_graph.loss_shape import shape_of
from gradflow_export.autograd_graph.nodes import Op, kind_of, sources, walk
from gradflow_export.hooks import torch_private
from gradflow_export.hooks.optimizer_steps import OptimizerStep
from gradflow_export.hooks.readings import Clue, Drained, stack_scalars
from gradflow_export.instruments.base import Reader, Setting
from gradflow_export.metrics.arrays.samples import even_sample
from gradflow_export.records.step_record import RUN_SITE, IssueType, Severity, StepRecord
from gradflow_export.rules.base import Check, Finding, number
from gradflow_export.rules.evidence import seen
from gradflow_export.rules.history import History

ROOTS = 8
"""Earlier losses that a loss is compared with."""
NODES = 256
"""Nodes of a sum that are looked at; the newest terms are met first."""
FOLLOWED = 4
ENTRIES = 256
_SUMS = frozenset(
    (Op.ADD, Op.ALIAS, Op.CLONE, Op.DIV, Op.MUL, Op.NEG, Op.RSUB, Op.SELECT, Op.SQUEEZE, Op.SUB, Op.TO_COPY, Op.VIEW)
)
_LISTS = frozenset((Op.CAT, Op.STACK))

Terms = frozenset[tuple[int, str]]


class _Root(NamedTuple):
    """A loss that ``backward`` was called on: its terms, how many are nested in it, and in which step it was."""

    terms: Terms
    whole: bool
    depth: int
    step: int


class SumInstrument(Reader):
    """Reads, while armed, how many losses are nested in each other: l1, l1 + l2, l1 + l2 + l3.

    Terms are distinguished by the number autograd gave to the node that made them, which is never given again: nothing
    of a graph is kept. Where gradients were cleared between two passes of one step, the first of them left nothing.
    """

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._roots: deque[_Root] = deque(maxlen=ROOTS)
        self._step = 0
        self._told: list[Tensor] = []

    def listen(self, until: contextlib.ExitStack) -> None:
        """Forget the losses before: between two readings others may have come."""
        until.callback(self._roots.clear)

    def see(self, root: Tensor) -> None:
        """Compare a loss with those before it, before its backward pass.

        Args:
            root: What ``backward`` is called on.
        """
        if not self.armed:
            return
        terms, whole = terms_of_sum(root.grad_fn)
        depth, before = 1, self._step
        for earlier in self._roots:
            if len(terms) > 1 and earlier.depth >= depth and _holds(terms, whole, earlier):
                depth, before = earlier.depth + 1, earlier.step
        self._roots.append(_Root(terms, whole, depth, self._step))
        with torch.no_grad():
            told = torch.tensor(float(depth), dtype=torch.float64)
            if depth > 1 and before == self._step:
                told = 1.0 + (depth - 1.0) * (self._left() > 0).double()
            self._told.append(told)

    def after(self, step: OptimizerStep) -> None:
        """Count the steps; within a closure passes are of one step."""
        self._step += 1

    def drain(self) -> Drained:
        """Give out the longest row of nested losses since the last call."""
        told, self._told = self._told, []
        return [Clue("loss.nested", (RUN_SITE,), stack_scalars(told).amax().reshape(1))] if told else []

    def forget(self) -> None:
        """Forget what was read: the step makes no record."""
        self._told = []

    def _left(self) -> Tensor:
        """Return the mean size of what lies in some gradients. Shape: scalar."""
        model = self._model()
        gradients = [] if model is None else [p.grad for p in model.parameters() if p.grad is not None]
        dense = [g for g in gradients if g.layout is torch.strided and not hasattr(g, "placements")]
        chosen = dense[:: -(-len(dense) // FOLLOWED) or 1]
        if not chosen:
            return torch.zeros((), dtype=torch.float64)
        return stack_scalars([even_sample(g, ENTRIES).abs().double().mean() for g in chosen]).sum()


def _holds(terms: Terms, whole: bool, earlier: _Root) -> bool:
    """Whether all terms of an earlier loss are there and others too; of long sums at least most of the newest."""
    if not terms - earlier.terms:
        return False
    if whole and earlier.whole:
        return bool(earlier.terms) and earlier.terms < terms
    return 2 * len(terms & earlier.terms) >= len(earlier.terms) > 0


def terms_of_sum(node: Node) -> tuple[Terms, bool]:
    """Return the nodes whose results a scalar is the sum of, each with a factor, and whether all of them were met.

    Args:
        node: What made the scalar.
    """
    met = list(itertools.islice(walk([node], past=_adds_up), NODES + 1))
    terms = [each for each in met[:NODES] if kind_of(each) != Op.LEAF and not _adds_up(each)]
    return frozenset((torch_private.sequence_number(term), kind_of(term)) for term in terms), len(met) <= NODES


def _adds_up(node: Node) -> bool:
    made_of, kind = sources(node), kind_of(node)
    scalar = all(size == 1 for size in shape_of(node))
    listed = kind in {Op.MEAN, Op.SUM} and len(made_of) == 1 and kind_of(made_of[0]) in _LISTS
    product = kind in {Op.DIV, Op.MUL} and len(made_of) > 1
    return bool(made_of) and not product and ((scalar and (kind in _SUMS or listed)) or kind in _LISTS)


@dataclass(frozen=True, kw_only=True)
class NestedLosses(Check):
    """Report backward passes through a running sum of losses, which use the gradient of each loss repeatedly.

    A loss that contains the previous one, in the same step and with its gradient not cleared, is counted twice.
    Micro-batches, and losses that share a part of their graph, do not contain another loss as a whole. A loss that
    contains losses of earlier steps must contain at least two, because the loss of one player of a GAN may contain that
    of the other.

    Why it is bad:
        The gradient of the first loss is used again in each later backward pass. Updates are too large, and time and
        memory grow with every pass.

    Example:
        total = total + F.cross_entropy(model(x), y)
        total.backward(retain_graph=True)

    Use instead:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        total += loss.item()

    Not reported:
        Losses that share a part of their graph but do not contain each other; gradients that are cleared in between; a
        loss that contains another one once, as with two players.

    Attributes:
        deep: Minimum number of nested losses, in two of the last 16 readings.
        patience: One; two readings already require persistence.
    """

    deep: int = 3
    patience: int = 1

    order: ClassVar[int] = 60
    raises: ClassVar[tuple[IssueType, ...]] = (IssueType.STALE_GRAD,)
    evidence: ClassVar[tuple[str, ...]] = ("loss.nested",)
    remembers: ClassVar[tuple[str, ...]] = ("loss.nested",)

    def check(self, record: StepRecord, history: History) -> tuple[Finding, ...]:
        """Judge the losses of this record and of those before it."""
        depth, past = seen(record, "loss.nested"), history.run("loss.nested")
        recent = past.values[-16:]
        if depth is None or depth < 2 or (recent >= self.deep).sum() < 2:
            return ()
        return (
            Finding(
                IssueType.STALE_GRAD,
                Severity.HIGH,
                ("loss",),
                depth,
                1.0,
                f"backward() is called on a running sum that contains earlier losses: {number(float(recent.max()))} "
                "losses are nested, and the gradient of the first is used that many times.",
                "call backward() only on the loss of this batch, loss.backward(), or once on the final sum; for "
                "logging use total += loss.item(). Then retain_graph=True is not needed.",
                since=int(past.steps[0]),
                cause="running sum",
                origin="running sum",
            ),
        )
