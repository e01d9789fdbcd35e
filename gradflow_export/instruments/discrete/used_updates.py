"""Readings of updates whose both ends forward passes have used: scores by parameter, nodes, and single nodes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gradflow_export.hooks.readings import Drained, Pending, Sample
from gradflow_export.instruments.discrete.node_history import COLUMNS, ROWS, NodeBook, Part
from gradflow_export.instruments.discrete.nodes import Moved, Nodes, joined, nodes_of
from gradflow_export.metrics.arrays.local import local
from gradflow_export.metrics.discrete import SCORES, update_errors, update_scores
from gradflow_export.metrics.phase import correlations, quiet_share
from gradflow_export.records.step_record import RUN_SITE

CORRELATED_NODES = 4096
_SCORE_METRICS = tuple(f"parameter.{name if name.endswith('share') else f'update_{name}'}" for name in SCORES)
_GRADIENT_METRICS = ("node.phase_gradient", "node.magnitude_gradient", "node.quiet_share")
_CHANGE_METRICS = ("node.phase_change", "node.magnitude_change", "node.changed_share", "node.count")
_CORRELATIONS = ("phase.correlation", "phase.rank_correlation")
_SINGLE = ("node.update_frequency", "node.effectiveness", "node.small")
_ABOUT = ("parameter.numel", "parameter.master", "parameter.read_share", "parameter.change_norm")
_GRID = ("parameter.grid", "parameter.between")
_ERRORS = ("parameter.lost_share_error", "parameter.update_effectiveness_error")
METRICS = (
    *_SCORE_METRICS, *_ERRORS, *_ABOUT, *_GRID, *_GRADIENT_METRICS, *_CHANGE_METRICS, *_CORRELATIONS, *_SINGLE,
)  # fmt: skip


@dataclass(frozen=True)
class SeenUpdate:
    """One tensor between two forward passes.

    Attributes:
        moved: Its rows, on the grid where there is one.
        expected: The update that was meant, real; ``None`` where it is not known. Shape: that of the real rows.
        has_master: Whether the optimizer keeps it in float32.
        step: Width of its declared grid.
        between: 1 where its weights lie between the points of the grid, else 0.
    """

    moved: Moved
    expected: Tensor | None
    has_master: bool = False
    step: float | None = None
    between: Tensor | None = None


class SeenUpdates:
    """Turns updates into readings.

    Args:
        sites: Names of all tensors, parameters first.
        parameters: How many of them are parameters; of the others, which are buffers, those that are nodes or lie on a
            grid have readings too.
        tensors: All of them by name; only their shapes are kept.
        magnitude_of: Names of magnitudes by those of their phases.
        nodes: Names of tensors whose rows are nodes; of a pair, the phase.
    """

    def __init__(
        self,
        sites: Sequence[str],
        parameters: int,
        tensors: Mapping[str, Tensor],
        magnitude_of: Mapping[str, str],
        nodes: Collection[str],
    ) -> None:
        self._sites = tuple(sites)
        self._magnitude_of = dict(magnitude_of)
        self._node_sites = tuple(n for n in sites if n in nodes)
        self._single = {*nodes, *magnitude_of.values()}
        stores = tuple(site for site in self._sites[parameters:] if site in self._single)
        self._shown = (*self._sites[:parameters], *stores)
        self._places = {site: place for place, site in enumerate(self._shown)}
        self._counts = {n: float(tensors[n].shape[0]) if tensors[n].dim() else 1.0 for n in self._node_sites}
        self._sizes = {n: tensors[n].numel() for n in sites}
        self._local = {n: local(tensors[n]).numel() for n in sites}
        self._rows = {n: local(tensors[n]).shape[0] for n in sites if local(tensors[n]).dim()}
        self._scalars = {n for n in sites if not tensors[n].dim()}
        self._book = NodeBook()

    def give(self, done: Mapping[int, SeenUpdate]) -> Drained:
        """Return the readings of the updates of one step, by the places of their tensors."""
        by_site = {self._sites[place]: done[place] for place in sorted(done)}
        out: Drained = []
        if by_site:
            out += self._scores(by_site)
            out += self._nodes(by_site)
            out += self._each_node({site: update for site, update in by_site.items() if site in self._single})
        return out

    def _scores(self, by_site: Mapping[str, SeenUpdate]) -> Drained:
        mine = {site: update for site, update in by_site.items() if site in self._places}
        scored = {site: update for site, update in mine.items() if update.expected is not None}
        others = {site: update for site, update in mine.items() if update.expected is None}
        out: Drained = []
        if scored:
            device = next(iter(scored.values())).moved.after.device
            actual = [_change(update).to(device) for update in scored.values()]
            expected = [u.expected.to(device) for u in scored.values() if u.expected is not None]
            where = self._where(scored)
            for metric, values in zip(_SCORE_METRICS, update_scores(actual, expected), strict=True):
                out.append(Pending(metric, self._shown, values, where, nan_is_missing=True))
            looked = [self._looked(site, update) for site, update in scored.items()]
            if min(looked) < 1.0:
                for metric, values in zip(_ERRORS, update_errors(actual, expected, looked), strict=True):
                    out.append(Pending(metric, self._shown, values, where, nan_is_missing=True))
        if others:
            out.append(self._each("parameter.changed_share", others, _changed_share))
        if mine:
            out += self._about(mine)
        return out

    def _about(self, mine: Mapping[str, SeenUpdate]) -> Drained:
        where = self._where(mine)
        sizes = {site: float(self._sizes[site]) for site in mine}
        looked = {site: float(update.moved.after.numel()) for site, update in mine.items()}
        every = np.array([float(self._sizes[site]) for site in self._shown])
        shares = [self._looked(site, update) for site, update in mine.items()]
        out: Drained = [
            Pending("parameter.numel", self._shown, every),
            Pending("parameter.read_share", self._shown, np.array(shares), where),
            Pending("parameter.master", self._shown, np.array([float(u.has_master) for u in mine.values()]), where),
        ]
        scale = {site: (sizes[site] / looked[site]) ** 0.5 for site in mine}
        out.append(
            self._each("parameter.change_norm", mine, lambda update: torch.linalg.vector_norm(_change(update)), scale)
        )
        grids = {site: update for site, update in mine.items() if update.step is not None}
        if grids:
            steps = np.array([update.step for update in grids.values()], dtype=np.float64)
            out.append(Pending("parameter.grid", self._shown, steps, self._where(grids)))
        laid = {site: update for site, update in grids.items() if update.between is not None}
        if laid:
            out.append(self._each("parameter.between", laid, _between))
        return out

    def _looked(self, site: str, update: SeenUpdate) -> float:
        """Return the share of the entries of a tensor that was looked at."""
        return update.moved.after.numel() / max(update.moved.after.numel(), self._local[site])

    def _where(self, sites: Iterable[str]) -> npt.NDArray[np.int64]:
        return np.array([self._places[site] for site in sites], dtype=np.int64)

    def _each(
        self,
        metric: str,
        updates: Mapping[str, SeenUpdate],
        read: Callable[[SeenUpdate], Tensor],
        scale: Mapping[str, float] = MappingProxyType({}),
    ) -> Pending:
        values = [read(update).double() * scale.get(site, 1.0) for site, update in updates.items()]
        device = values[0].device
        stacked = torch.stack([value.to(device) for value in values])
        return Pending(metric, self._shown, stacked, self._where(updates))

    def _nodes(self, by_site: Mapping[str, SeenUpdate]) -> Drained:
        nodes: dict[int, Nodes] = {}
        for place, site in enumerate(self._node_sites):
            own, partner = by_site.get(site), by_site.get(self._magnitude_of.get(site, ""))
            if own is not None and (partner is not None or site not in self._magnitude_of):
                nodes[place] = nodes_of(own.moved, None if partner is None else partner.moved)
        if not nodes:
            return []
        device = next(iter(nodes.values())).phase_change.device
        moved = {place: _changes(n, self._counts[self._node_sites[place]]).to(device) for place, n in nodes.items()}
        learned = {place: row.to(device) for place, n in nodes.items() if (row := _gradients(n)) is not None}
        out: Drained = []
        for metrics, rows in ((_CHANGE_METRICS, moved), (_GRADIENT_METRICS, learned)):
            where = np.array(list(rows), dtype=np.int64)
            for metric, values in zip(metrics, torch.stack(list(rows.values()), dim=1) if rows else (), strict=False):
                out.append(Pending(metric, self._node_sites, values, where))
        together = joined(nodes.values(), CORRELATED_NODES)
        if together is not None:
            for metric, value in zip(_CORRELATIONS, correlations(*together), strict=True):
                out.append(Pending(metric, (RUN_SITE,), value.reshape(1), nan_is_missing=True))
        return out

    def _each_node(self, updates: Mapping[str, SeenUpdate]) -> Drained:
        """Give out what each single node did, for the worker, which remembers the steps before."""
        if not updates:
            return []
        device = next(iter(updates.values())).moved.after.device
        parts, facts = [], []
        for site, update in updates.items():
            rows = _facts(update)
            every = -(-self._rows.get(site, len(rows)) // len(rows))  # row_sample took one out of so many
            thinned = rows[:: -(-len(rows) // ROWS)]
            stride = every * -(-len(rows) // ROWS)
            parts.append(Part(site, len(thinned), stride, site in self._scalars))
            facts.append(thinned.to(device))
        analyse = partial(self._book.take, tuple(parts))
        return [Sample("node.update_frequency", parts[0].site, torch.cat(facts), analyse)]


def real(tensor: Tensor) -> Tensor:
    """Return complex entries as pairs of real ones. Shape: that of ``tensor``, with a dimension of 2 at the end."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _change(update: SeenUpdate) -> Tensor:
    return real(update.moved.after) - real(update.moved.before)


def _changed_share(update: SeenUpdate) -> Tensor:
    return (_change(update) != 0).double().mean()


def _between(update: SeenUpdate) -> Tensor:
    return update.moved.after.new_zeros(()) if update.between is None else update.between


def _changes(n: Nodes, count: float) -> Tensor:
    means = [values.mean() for values in (n.phase_change, n.magnitude_change, n.changed.to(n.phase_change.dtype))]
    return torch.stack([*means, torch.full_like(means[0], count)])


def _gradients(n: Nodes) -> Tensor | None:
    if n.phase is None or n.magnitude is None:
        return None
    return torch.stack([n.phase.mean(), n.magnitude.mean(), quiet_share(torch.hypot(n.phase, n.magnitude))])


def _facts(update: SeenUpdate) -> Tensor:
    """Return what each row did, in the columns of the node book. Shape: ``[rows, 5]``."""
    d, moved = _change(update).flatten(1), update.moved
    unknown = torch.full_like(d[:, 0], torch.nan)
    size, product, meant = unknown, unknown, unknown
    if moved.gradient is not None:
        size = torch.linalg.vector_norm(real(moved.gradient).flatten(1), dim=1)
    if update.expected is not None:
        e = update.expected.flatten(1).to(d.device)
        product, meant = (d * e).sum(dim=1), e.square().sum(dim=1)
    out = [size, (d != 0).any(dim=1).to(d.dtype), product, d.square().sum(dim=1), meant]
    return torch.stack(out[: len(COLUMNS)], dim=1)
