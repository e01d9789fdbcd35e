"""A sketch of where the weights are and which way their gradients point, and the windows it is judged in."""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from gradflow_export.hooks.optimizer_steps import OptimizerStep, Owned
from gradflow_export.hooks.readings import Analysed, Drained, Sample
from gradflow_export.metrics.direction import evenly_chosen
from gradflow_export.metrics.path import PathStatistics, path_errors, path_statistics, radii
from gradflow_export.records.catalog import MetricSpec, spec
from gradflow_export.records.step_record import RUN_SITE

ENTRIES = 64
"""Entries of the weights of one optimizer that are followed."""

POINTS, LEAST = 64, 24
"""Points of a window, and fewest that are judged."""

FIRST, LATER = 8, 16
"""Points between two judgements, until the window is full and afterwards."""

STRIDES = (1, 4, 16)
"""Steps between two points of a window: a slow rotation shows only in a long one."""

Floats = npt.NDArray[np.float64]

METRICS: Mapping[str, str] = MappingProxyType(
    {
        "winding": "flow.winding",
        "plane": "flow.plane",
        "growth": "flow.growth",
        "work": "flow.work",
        "straightness": "flow.straightness",
        "turning": "flow.turning",
        "coherence": "gradient.coherence",
    }
)
"""Metric of each field of :class:`~gradflow_export.metrics.path.PathStatistics`."""


@dataclass(frozen=True)
class Followed:
    """Evenly spaced entries of one parameter, in the order in which they lie in memory.

    Attributes:
        parameter: Contiguous, or so with channels last.
        stride: From one entry to the next; the first is the first of all.
        count: How many.
    """

    parameter: Tensor
    stride: int
    count: int


class PathInstrument:
    """Samples weights and gradients at the same evenly spaced entries, optimizer by optimizer.

    A few entries are enough: what goes round as a whole goes round in nearly every sample of its coordinates. Read
    before an optimizer steps, so that the gradient belongs to these weights.
    """

    def __init__(self) -> None:
        self._chosen: weakref.WeakKeyDictionary[object, tuple[object, list[Followed]]] = weakref.WeakKeyDictionary()
        self._paths = Paths()

    @property
    def specs(self) -> tuple[MetricSpec, ...]:
        """The metrics this instrument can give out."""
        names = tuple(METRICS.values())
        return tuple(spec(name) for name in (*names, *(spec(name).error for name in names), RADIUS))

    def followed(self, step: OptimizerStep) -> list[Followed]:
        """Return what is followed of one optimizer: nothing where weights and gradients cannot be had together."""
        if step.closure or not isinstance(step.optimizer, Optimizer):
            return []
        known = self._chosen.get(step.optimizer)
        if known is None or known[0] is not step.owned:
            known = self._chosen[step.optimizer] = step.owned, _followed(step.owned.parameters)
            left_out = sum(p.numel() for p in step.owned.parameters) > sum(entry.count for entry in known[1])
            self._paths.sampled[_site(step.owned)] = left_out
        return known[1]

    def read(self, step: OptimizerStep) -> Drained:
        """Return the sketch of one optimizer, nothing where weights and gradients of one moment cannot be had.

        Called under ``torch.no_grad()``.
        """
        weights, pulls = [], []
        for entry in self.followed(step):
            parameter, gradient = entry.parameter, entry.parameter.grad
            weights.append(parameter.as_strided((entry.count,), (entry.stride,)))
            if gradient is None:
                pulls.append(torch.zeros_like(weights[-1]))
            elif gradient.layout is torch.strided and gradient.stride() == parameter.stride():
                pulls.append(gradient.as_strided((entry.count,), (entry.stride,)))
            else:
                return []
        if not weights:
            return []
        both = torch.cat([*weights, *pulls])
        return [self.sample(step.owned, both if both.dtype is torch.float64 else both.float())]

    def sample(self, owned: Owned, values: Tensor | Floats) -> Sample:
        """Return what the worker makes of the entries that are followed: weights, then gradients. Shape: ``[2 k]``."""
        site = _site(owned)
        return Sample("flow.winding", site, values, analyse=partial(self._paths.take, site))


def _site(owned: Owned) -> str:
    """Return the name of the first parameter of an optimizer, which tells it from others."""
    return owned.sites[int(owned.where[0])]


def _followed(parameters: Sequence[Tensor]) -> list[Followed]:
    """Choose a few parameters and evenly spaced entries of each, in the order in which they lie in memory."""
    usable = [p for p in parameters if _is_plain(p)]
    chosen = [p for p in evenly_chosen(usable) if p.device == usable[0].device]
    limit = max(ENTRIES // max(len(chosen), 1), 1)
    out = []
    for parameter in chosen:
        stride = max(-(-parameter.numel() // limit), 1)
        # A stride that divides the width would follow one column only.
        while stride > 1 and math.gcd(stride, parameter.shape[-1] if parameter.dim() else 1) > 1:
            stride -= 1
        out.append(Followed(parameter, stride, -(-parameter.numel() // stride)))
    return out


def _is_plain(parameter: Tensor) -> bool:
    """Whether a parameter is trained, not empty, and a dense array of real numbers in memory of its own."""
    plain = type(parameter) in {Tensor, nn.Parameter} and parameter.layout is torch.strided
    if not (plain and parameter.requires_grad and parameter.is_floating_point() and parameter.numel()):
        return False
    channels_last = parameter.dim() == 4 and parameter.is_contiguous(memory_format=torch.channels_last)
    return parameter.is_contiguous() or channels_last


RADIUS = "flow.radius"


class Paths:
    """Joins the sketches of all optimizers into one path and looks at it through windows; lives on the worker.

    A point is complete when every optimizer has stepped, or when one steps again: one that rested has not moved.

    Attributes:
        sampled: Whether some of the weights of an optimizer are not followed, by its first parameter.
    """

    def __init__(self) -> None:
        self.sampled: dict[str, bool] = {}
        self._latest: dict[str, Floats] = {}
        self._round: set[str] = set()
        self._joined = False
        self._windows = [_Window(stride) for stride in STRIDES]

    def take(self, site: str, values: npt.NDArray[np.floating]) -> Analysed:
        """Take the sketch of one optimizer.

        Args:
            site: Tells optimizers apart.
            values: Weights, then gradients. Shape: ``[2 k]``.

        Returns:
            The statistics of one window, when they are due; else nothing.
        """
        out: Analysed = {}
        if site in self._round:
            out = {} if self._joined else self._join()
            self._round, self._joined = set(), False
        known = self._latest.get(site)
        finite = bool(np.logical_and.reduce(np.isfinite(values)))
        if known is None or known.shape != values.shape or not finite:
            self._windows = [_Window(stride) for stride in STRIDES]
        if not finite:
            self._latest.pop(site, None)
            return out
        self._latest[site] = np.array(values, dtype=np.float64)
        self._round.add(site)
        if self._round == self._latest.keys():
            out, self._joined = self._join() or out, True
        return out

    def _join(self) -> Analysed:
        """Add the point that all optimizers make together."""
        point = tuple(self._latest[site] for site in sorted(self._latest))
        sampled = any(self.sampled.get(site, False) for site in self._latest)
        judged = [window.add(point, sampled) for window in self._windows]
        if True not in judged:
            return {}
        seen = [window.statistics for window in self._windows if window.statistics]
        whole = max(seen, key=lambda s: s[0].winding * s[0].plane * max(-s[0].work, 0.0))
        out: dict[str, dict[str, float]] = {}
        for end, most, longest in zip(("", "_error"), whole, seen[-1], strict=False):
            values = asdict(most) | {"coherence": longest.coherence}  # how long gradients agree shows in the longest
            out |= {f"{METRICS[name]}{end}": {RUN_SITE: v} for name, v in values.items() if np.isfinite(v)}
        return {**out, RADIUS: dict(zip(sorted(self._latest), self._windows[0].radii, strict=True))}


class _Window:
    """The last points of a path, ``stride`` steps apart."""

    def __init__(self, stride: int) -> None:
        self._stride = stride
        self._count = 0
        self._points: deque[tuple[Floats, ...]] = deque(maxlen=POINTS)
        self.statistics: tuple[PathStatistics, ...] = ()
        self.radii: list[float] = []

    def add(self, point: tuple[Floats, ...], sampled: bool) -> bool:
        """Take a point, the sketches of all optimizers in order; True when the statistics were made anew."""
        self._count += 1
        if self._count % self._stride:
            return False
        self._points.append(point)  # cut up when it is looked at, which few points are
        points = self._count // self._stride
        if points < LEAST or points % (FIRST if points <= POINTS else LATER):
            return False
        players = [sketch.size // 2 for sketch in point]
        both = [np.concatenate(sketches).reshape(len(sketches), -1) for sketches in zip(*self._points, strict=True)]
        positions, pulls = (
            np.concatenate([array[:, i * size : (i + 1) * size] for array, size in zip(both, players, strict=True)], 1)
            for i in (0, 1)
        )
        self.statistics = (path_statistics(positions, pulls, players),)
        if sampled and min(players) > 1:
            self.statistics += (path_errors(positions, pulls, players),)
        self.radii = radii(positions, players)
        return True
