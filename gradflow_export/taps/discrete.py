"""What arrives of an update: in coarse number formats, and split into phase and magnitude."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from gradflow_export.catalog import MetricSpec, spec
from gradflow_export.metrics.discrete import SCORES, update_scores
from gradflow_export.metrics.local import local
from gradflow_export.metrics.phase import correlations, quiet_share
from gradflow_export.metrics.samples import row_sample
from gradflow_export.records import RUN_SITE
from gradflow_export.taps.base import Drained, Pending
from gradflow_export.taps.discover import site_name
from gradflow_export.taps.expected import Meant, master_of, meant_update
from gradflow_export.taps.nodes import ROWS, Moved, Nodes, Pairs, check_pairs, joined, nodes_of
from gradflow_export.taps.optimizers import OptimizerStep

ENTRIES = 2**19
"""Entries looked at in one step, shared out evenly among the parameters; whole rows of each."""

AT_ONCE = 100
"""Parameters scored in one step, so that its cost is bounded; the others have their turn at the next ones."""

CORRELATED_NODES = 4096
_SCORE_METRICS = tuple(f"parameter.{name if name.endswith('share') else f'update_{name}'}" for name in SCORES)
_NODE_METRICS = (
    "node.phase_gradient", "node.magnitude_gradient", "node.phase_change", "node.magnitude_change",
    "node.changed_share", "node.quiet_share", "node.count",
)  # fmt: skip
_CORRELATIONS = ("phase.correlation", "phase.rank_correlation")


def is_coarse(parameter: Tensor) -> bool:
    """Return whether a number format is coarser than float32: bfloat16, float16, float8, complex32."""
    return parameter.dtype is torch.complex32 or (parameter.is_floating_point() and parameter.element_size() < 4)


@dataclass(frozen=True)
class _Entry:
    """One parameter before its step."""

    place: int
    parameter: Tensor
    before: Tensor
    gradient: Tensor | None
    meant: Meant | None
    has_master: bool


class DiscreteTap:
    """Compares weights before and after the steps of an optimizer, while it is armed.

    Args:
        model: Where the parameters are; nothing of it is kept.
        pairs: Names of parameters that belong together, phase first, magnitude second; ``"rows"`` takes the direction
            and the length of each row of every real weight, and scores every parameter's update. ``None`` takes complex
            parameters alone, and scores those in formats coarser than float32.
        entries: How many entries to look at in one step.

    Raises:
        ArgumentError: A pair names no parameter, or two of different shapes.
        ArgumentTypeError: ``pairs`` holds something other than two names.
    """

    instrument: ClassVar[str] = "discrete"

    def __init__(
        self,
        model: nn.Module,
        *,
        pairs: Pairs = None,
        entries: int = ENTRIES,
    ) -> None:
        named = {site_name(name): parameter for name, parameter in model.named_parameters()}
        self._all_rows = isinstance(pairs, str) and pairs == ROWS
        self._magnitude_of = dict(check_pairs(named, pairs))
        magnitudes = set(self._magnitude_of.values())
        self._node_sites = tuple(
            n
            for n, p in named.items()
            if n in self._magnitude_of
            or (n not in magnitudes and (p.is_complex() or (self._all_rows and p.is_floating_point() and p.dim() > 1)))
        )
        self._counts = tuple(float(named[n].shape[0]) if named[n].dim() else 1.0 for n in self._node_sites)
        self._wanted = {n for n, p in named.items() if self._all_rows or is_coarse(p)}
        self._wanted |= {*self._node_sites, *magnitudes}
        # Nodes belong together, and rows were asked for: only parameters that are scored alone can wait.
        alone = not self._all_rows and not self._node_sites
        self._turns = max(-(-len(self._wanted) // AT_ONCE), 1) if alone else 1
        self._turn: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()
        self._share = max(entries // max(len(self._wanted), 1), 1)
        self._armed = False
        self._open: weakref.WeakKeyDictionary[object, list[_Entry]] = weakref.WeakKeyDictionary()
        self._out: Drained = []

    @property
    def modules(self) -> int:
        """How many parameters are looked at in one step; 0 when none is coarse or complex, nor asked for."""
        return -(-len(self._wanted) // self._turns)

    @property
    def specs(self) -> tuple[MetricSpec, ...]:
        """The metrics this tap can give out."""
        return tuple(
            spec(name)
            for name in (*_SCORE_METRICS, "parameter.numel", "parameter.master", *_NODE_METRICS, *_CORRELATIONS)
        )

    def attach(self) -> contextlib.ExitStack:
        """Begin; closing the returned stack forgets everything."""
        stack = contextlib.ExitStack()
        stack.callback(self._close)
        return stack

    def arm(self, *, on: bool) -> None:
        """Begin to look at steps, or with ``on=False`` at no more."""
        self._armed = on

    def drain(self) -> Drained:
        """Give out what was measured since the last call."""
        out, self._out = self._out, []
        return out

    def forget(self) -> None:
        """Forget what was measured: the step makes no record."""
        self._out = []

    def _close(self) -> None:
        self._armed = False
        self._open.clear()
        self.forget()

    def _take(self, tensor: Tensor) -> Tensor:
        """Return a copy of some rows in double precision, complex where the tensor is."""
        rows = row_sample(tensor, self._share)
        wide: Tensor = rows.to(torch.complex128 if rows.is_complex() else torch.float64, copy=True)
        return wide.resolve_conj()

    def _take_real(self, tensor: Tensor) -> Tensor:
        return _real(self._take(tensor))

    def before(self, step: OptimizerStep) -> None:
        """Copy some rows of weights and gradients before an optimizer steps."""
        if self._armed and isinstance(step.optimizer, Optimizer):
            with torch.no_grad():
                self._open[step.optimizer] = list(self._look(step, step.optimizer))

    def skip(self, step: OptimizerStep) -> None:
        """Forget them: the step was skipped."""
        self._open.pop(step.optimizer, None)

    def _look(self, step: OptimizerStep, optimizer: Optimizer) -> Iterator[_Entry]:
        owned, turn = step.owned, self._turn.get(optimizer, 0)
        self._turn[optimizer] = turn + 1
        for parameter, place, number in zip(owned.parameters, owned.where, owned.groups, strict=True):
            if (place + turn) % self._turns:
                continue
            if owned.sites[place] not in self._wanted or parameter.layout is not torch.strided:
                continue
            if not local(parameter).numel():
                continue
            gradient = None if step.closure else _dense(parameter.grad)
            if gradient is None and not step.closure:
                continue
            used = None if gradient is None else self._take(gradient)
            if used is not None and step.scale is not None:
                used = used / step.scale.to(used.device, torch.float64)
            scored = self._all_rows or is_coarse(parameter)
            group = optimizer.param_groups[number]
            meant = meant_update(optimizer, parameter, group, self._take_real) if scored else None
            kept = master_of(optimizer, parameter) is not None
            yield _Entry(int(place), parameter, self._take(parameter), used, meant, kept)

    def after(self, step: OptimizerStep) -> None:
        """Compare with the weights after the step."""
        entries = self._open.pop(step.optimizer, None)
        if not entries:
            return
        with torch.no_grad():
            pairs = [(entry, moved) for entry in entries if (moved := self._moved(entry)) is not None]
            self._give_scores(step.owned.sites, [(e, m) for e, m in pairs if e.meant is not None])
            self._give_nodes({step.owned.sites[entry.place]: moved for entry, moved in pairs})

    def _moved(self, entry: _Entry) -> Moved | None:
        gradient = entry.gradient
        if gradient is None:  # the closure has filled it in since
            arrived = _dense(entry.parameter.grad)
            if arrived is None:
                return None
            gradient = self._take(arrived)
        after = self._take(entry.parameter)
        same = entry.before.shape == after.shape == gradient.shape
        return Moved(entry.before, after, gradient) if same else None

    def _give_scores(self, sites: tuple[str, ...], scored: list[tuple[_Entry, Moved]]) -> None:
        if not scored:
            return
        device = scored[0][1].after.device
        actual = [(_real(m.after) - _real(m.before)).to(device) for _, m in scored]
        expected = [e.meant(_real(m.gradient)).to(device) for e, m in scored if e.meant is not None]
        where = np.array([entry.place for entry, _ in scored], dtype=np.int64)
        for metric, values in zip(_SCORE_METRICS, update_scores(actual, expected), strict=True):
            self._out.append(Pending(metric, sites, values, where, nan_is_missing=True))
        sizes = torch.tensor([float(entry.parameter.numel()) for entry, _ in scored], dtype=torch.float64)
        self._out.append(Pending("parameter.numel", sites, sizes, where))
        masters = torch.tensor([float(entry.has_master) for entry, _ in scored], dtype=torch.float64)
        self._out.append(Pending("parameter.master", sites, masters, where))

    def _give_nodes(self, moved: dict[str, Moved]) -> None:
        nodes: dict[int, Nodes] = {}
        for place, site in enumerate(self._node_sites):
            own, partner = moved.get(site), moved.get(self._magnitude_of.get(site, ""))
            if own is not None and (partner is not None or site not in self._magnitude_of):
                nodes[place] = nodes_of(own, partner)
        if not nodes:
            return
        every, where = list(nodes.values()), np.array(list(nodes), dtype=np.int64)
        first = every[0].phase
        columns = torch.stack([_node_row(n).to(first.device) for n in every], dim=1)
        counts = torch.tensor([[self._counts[place] for place in nodes]], dtype=first.dtype, device=first.device)
        for metric, values in zip(_NODE_METRICS, torch.cat([columns, counts]), strict=True):
            self._out.append(Pending(metric, self._node_sites, values, where))
        for metric, value in zip(_CORRELATIONS, correlations(*joined(every, CORRELATED_NODES)), strict=True):
            self._out.append(Pending(metric, (RUN_SITE,), value.reshape(1), nan_is_missing=True))


def _node_row(n: Nodes) -> Tensor:
    means = [v.mean() for v in (n.phase, n.magnitude, n.phase_change, n.magnitude_change, n.changed.to(n.phase.dtype))]
    return torch.stack([*means, quiet_share(torch.hypot(n.phase, n.magnitude))])


def _dense(gradient: Tensor | None) -> Tensor | None:
    return gradient if gradient is not None and gradient.layout is torch.strided else None


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
