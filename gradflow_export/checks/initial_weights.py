"""How the weights begin: their gain, and whether the units of a layer are copies of each other."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from gradflow_export.hooks import torch_private
from gradflow_export.hooks.discover import site_name
from gradflow_export.hooks.optimizer_steps import OptimizerStep
from gradflow_export.hooks.parameter_slots import Slot
from gradflow_export.hooks.readings import Clue, ClueSample, stack_scalars
from gradflow_export.instruments.base import Reader, Setting
from gradflow_export.metrics.arrays.local import local, shards
from gradflow_export.metrics.arrays.norms import l2_norms
from gradflow_export.metrics.arrays.samples import even_sample
from gradflow_export.records.sites import pattern

LATER = 8
"""Armed step at which rows are compared once more."""
MATRICES = 256
"""Weights that are looked at."""
COLUMNS = 64
"""Evenly spaced entries of each row that are compared."""
ROWS = 1024
"""Rows of a layer that is looked at for doubles, at most."""
ENTRIES = 256
"""Evenly spaced entries of a weight that are compared with those of its siblings."""
JOINED = 2**14
"""Entries of a weight that is joined with others of its shape, so that one call reads them all."""
ALIKE = 0.01
"""Greatest difference of the gradients of copies, as a share of them: rounding, which updates may enlarge."""
KEYS = 4
"""Numbers of each row that are compared instead of its entries."""
NEIGHBOURS = 8
"""Rows next in order of the first number that a row is compared with."""
ROUNDING = 1e-5
"""Greatest difference of entries, as a share of the greatest, that rounding makes of equal ones within ``LATER`` steps.

A gradient summed over n samples differs by about ``sqrt(n) * eps`` between two orders of summation: in float32, with a
million samples, 1e-4 of itself, and a step is a small share of the weights.
"""

_NO_LAYERS = ("torch.nn.", "torch.ao.")
"""Where modules come from that hold weights of other kinds: norms, tables, attention."""
_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Bilinear, nn.RNNBase, nn.RNNCellBase)
_HOLDERS = (nn.ParameterList, nn.ParameterDict)
"""Lists of weights that somebody else's ``forward`` uses."""
_TABLES = (nn.Embedding, nn.EmbeddingBag, nn.LayerNorm, torch_private.Norm, *_LAYERS)


class InitialInstrument(Reader):
    """Reads the weights of layers before the first step, and compares their rows again a few steps later.

    An update by hand is found when it has been made: it moves weights by a small share of their size.
    """

    by_hand: ClassVar[bool] = True

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        model = setting.model
        self._weights = {
            site_name(f"{name}.{key}".lstrip(".")): Slot(module, key)
            for name, module in model.named_modules()
            if isinstance(module, (*_LAYERS, nn.Embedding)) or _is_own(module)
            for key, weight in module.named_parameters(recurse=False)
            if weight.dim() >= 2 and weight.shape[0] and weight.shape[1:].numel() >= 2
        }
        whole = (m for m in model.modules() if isinstance(m, nn.Embedding) or _is_own(m))
        own = {id(weight) for module in whole for weight in module.parameters(recurse=False)}
        # By name: other tensors come into their places where a model is sharded or moved after this.
        self._own = frozenset(name for name, slot in self._weights.items() if id(slot()) in own)
        # Rows of a table are no units, and are looked at for zeros alone; a layer may hold the same weights as well.
        self._tables = frozenset(n for n, slot in self._weights.items() if isinstance(slot.reference(), nn.Embedding))
        self._level: dict[str, Tensor] = {}
        self._steps = 0

    def before(self, step: OptimizerStep) -> None:
        """Read the weights that an optimizer has not changed yet, and once more after a few steps."""
        if not self.armed or self._steps >= LATER:
            return
        self._steps += 1
        if self._steps not in {1, LATER}:
            return
        mine = {id(p) for p in step.owned.parameters}
        held = self._held()
        if self._steps == 1:
            held = [(name, weight) for name, weight in held if name not in self._tables]
        else:  # a single row has no other to be compared with
            held = [(name, weight) for name, weight in held if len(weight) > 1]
        named = [(name, local(weight)) for name, weight in held if id(weight) in mine or self._steps == LATER]
        if not named:
            return
        sites = tuple(name for name, _ in named)
        with torch.no_grad():
            weights = [weight for _, weight in named]
            if self._steps == 1:
                own = [name in self._own for name in sites]
                self._level = dict(zip(sites, _of_each(_levels, weights), strict=True))
                self._out.append(_pending("parameter.initial_gain", sites, _gains(weights, own)))
                self._out.append(_pending("parameter.initial_mean", sites, _of_each(_one_sided, weights)))
            else:
                trained = {name for name, weight in held if weight.grad is not None}  # no copies that others follow
                self._look_for_doubles([(name, weight) for name, weight in named if name in trained - self._own])
                parting = [self._parting(*each) for each in named]
                self._out.append(_pending("parameter.row_parting", sites, parting))
            self._out.append(_pending("parameter.row_spread", sites, self._spreads(named)))

    def _look_for_doubles(self, named: list[tuple[str, Tensor]]) -> None:
        for name, weight in named:
            if weight.shape[0] <= ROWS:
                analyse = partial(_doubles, name, max(ROUNDING, _rounding(weight.dtype)))
                self._out.append(ClueSample("parameter.row_doubles", name, _mixed(weight), analyse))
        siblings: dict[tuple[str, torch.Size], list[tuple[str, Tensor]]] = {}
        for name, weight in named:
            siblings.setdefault((pattern(name), weight.shape), []).append((name, weight))
        gaps = [gap for alike in siblings.values() if len(alike) > 1 for gap in _gaps(alike)]
        if gaps:
            self._out.append(
                _pending("parameter.sibling_gap", tuple(name for name, _ in gaps), [value for _, value in gaps])
            )

    def _spreads(self, named: list[tuple[str, Tensor]]) -> list[Tensor]:
        """Return the spread of rows; of a layer of somebody's own, which may count by columns, where it began even."""
        spreads = _of_each(_row_spreads, [weight for _, weight in named])
        for place, (name, weight) in enumerate(named):
            if name in self._own:
                columns = _row_spreads(weight.reshape(weight.shape[0], -1).t()[None])[0]
                both, level = torch.minimum(spreads[place], columns), self._level.get(name)
                even = torch.full_like(both, torch.nan) if level is None else level
                spreads[place] = torch.where(even.isnan(), torch.nan, both)
        return spreads

    def _parting(self, name: str, weight: Tensor) -> Tensor:
        """Return how far rows that began at one number have parted; of a layer of somebody's own, rows or columns."""
        level = self._level.get(name)
        if level is None:
            return torch.full((), torch.nan, dtype=torch.float64, device=weight.device)
        flat = _corner(weight)
        parted, gradient = _parting(flat, level), weight.grad
        if name not in self._own:
            return parted
        parted = torch.minimum(parted, _parting(flat.t(), level))
        if gradient is None or gradient.layout is not torch.strided:
            return parted
        # Of numbers that are no weights of units, such as scales, all may rise: they are copies if all rise alike.
        rows = _corner(gradient)
        alike = torch.minimum(_parting(rows, 0.0), _parting(rows.t(), 0.0)) <= ALIKE
        return torch.where(alike, parted, torch.nan)

    def _held(self) -> list[tuple[str, Tensor]]:
        held = [(name, reference()) for name, reference in self._weights.items()]
        return [(name, weight) for name, weight in held if weight is not None and _has_rows(weight)][:MATRICES]


def _has_rows(weight: Tensor) -> bool:
    """Whether a weight is trained, real and dense, with all its rows in this process."""
    real = weight.requires_grad and weight.is_floating_point() and weight.layout is torch.strided
    return real and shards(weight) == 1


def _is_own(module: nn.Module) -> bool:
    """Whether a module is of a kind that somebody made for weights of its own."""
    return not isinstance(module, _TABLES) and (
        isinstance(module, _HOLDERS) or not type(module).__module__.startswith(_NO_LAYERS)
    )


def _gains(weights: list[Tensor], own: list[bool]) -> list[Tensor]:
    """Return the root mean square of each weight times the root of its number of inputs. Shape of each: scalar.

    Args:
        weights: Shape of each: ``[outputs, inputs, ...]``.
        own: Whether that order is not known, so that the lesser number is taken for the inputs.
    """
    # What many tensors are read by makes no copy of a large one.
    norms = l2_norms(weights).double()
    sizes = [max(w.shape[0], w[0].numel()) if either else w.shape[0] for w, either in zip(weights, own, strict=True)]
    return [norm / math.sqrt(size) for norm, size in zip(norms, sizes, strict=True)]


def _of_each(read: Callable[[Tensor], Tensor], weights: list[Tensor]) -> list[Tensor]:
    """Return what is read of each weight; small ones of one kind are joined, and read by one call.

    Args:
        read: Takes weights of one shape, ``[weights, outputs, inputs]``, and returns a number of each.
        weights: Shape of each: ``[outputs, inputs, ...]``.
    """
    kinds: dict[tuple[Any, ...], list[int]] = {}
    for place, weight in enumerate(weights):
        apart = place if weight.numel() > JOINED else -1
        kinds.setdefault((weight.shape, weight.dtype, weight.device, apart), []).append(place)
    found: dict[int, Tensor] = {}
    for places in kinds.values():
        one = weights[places[0]]
        joined = torch.stack([weights[place] for place in places]) if len(places) > 1 else one.detach()[None]
        found.update(zip(places, read(joined.reshape(len(places), one.shape[0], -1)).unbind(), strict=True))
    return [found[place] for place in range(len(weights))]


def _levels(weights: Tensor) -> Tensor:
    """Return the number that all entries are, NaN where they differ or are 0. Shape: ``[weights]``, float64."""
    low, high = torch.aminmax(weights.flatten(1), dim=1)
    return torch.where((low == high) & (low != 0), low, torch.nan).double()


def _row_spreads(weights: Tensor) -> Tensor:
    """Return the greatest difference from the first row, as a share of the greatest entry.

    Args:
        weights: Shape: ``[weights, rows, columns]``.

    Returns:
        Shape: ``[weights]``, float64.
    """
    first = weights[:, 0]
    low, high = torch.aminmax(weights, dim=1)  # by columns: a difference of all entries would be as large as they are
    apart, sizes = torch.stack((high - first, first - low)), torch.stack((high, low)).abs()
    spreads = (apart.amax(dim=(0, 2)) / sizes.amax(dim=(0, 2))).double()
    return torch.where(spreads <= _rounding(weights.dtype), 0.0, spreads)


def _rounding(dtype: torch.dtype) -> float:
    """Return the difference that counts as none, as a share of the greatest entry: two roundings of a coarse format."""
    eps = torch.finfo(dtype).eps
    return 2 * eps if eps > ROUNDING else 0.0


def _corner(weight: Tensor) -> Tensor:
    """Return evenly spaced entries of evenly spaced rows. Shape: ``[<= ENTRIES, <= ENTRIES]``."""
    flat = weight.reshape(weight.shape[0], -1)
    return flat[:: -(-flat.shape[0] // ENTRIES), :: -(-flat.shape[1] // ENTRIES)]


def _parting(rows: Tensor, level: Tensor | float) -> Tensor:
    """Return how far rows are from their mean, as a share of how far they are from where they began.

    Args:
        rows: Shape: ``[rows, columns]``.
        level: The number that all entries began at; NaN without one.

    Returns:
        The ratio of the root mean squares, from 0 for rows that move together to 1 for rows that have nothing in
        common; 0 where none has moved, NaN without a number. Shape: scalar, float64.
    """
    moved = rows.double() - level
    apart = torch.linalg.vector_norm(moved - moved.mean(dim=0))
    share: Tensor = apart / torch.linalg.vector_norm(moved).clamp_min(1e-300)
    return share


def _one_sided(weights: Tensor) -> Tensor:
    """Return the size of the mean against the root mean square. Shape: ``[weights]``, float64."""
    flat = weights.flatten(1)
    sample = flat[:, :: -(-flat.shape[1] // (16 * ENTRIES))].double()
    rms: Tensor = torch.linalg.vector_norm(sample, dim=1) / math.sqrt(sample.shape[1])
    return sample.mean(dim=1).abs() / rms


def _mixed(weight: Tensor) -> Tensor:
    """Return numbers of each row that only rows with the same entries have in common, and the sum of its sizes.

    Returns:
        Shape: ``[rows, KEYS + 1]``, float64.
    """
    flat = weight.reshape(weight.shape[0], -1)
    rows = flat[:, :: -(-flat.shape[1] // COLUMNS)].double()
    # Sines of whole numbers: no sum of whole multiples of them is 0.
    places = np.arange(1.0, rows.shape[1] + 1.0)[:, None] * np.arange(1.0, KEYS + 1.0)
    factors = torch.from_numpy(np.sin(places)).to(rows.device, non_blocking=True)
    return torch.cat((rows @ factors, rows.abs().sum(dim=1, keepdim=True)), dim=1)


def _doubles(name: str, tolerance: float, mixed: npt.NDArray[np.floating]) -> dict[str, dict[str, float]]:
    """Return the share of rows that another row is like, but for rounding; nothing where all are 0.

    Args:
        name: Of the weight.
        tolerance: Greatest difference of the entries of like rows, as a share of those of the greatest row.
        mixed: What :func:`_mixed` returns.
    """
    if not mixed.any():
        return {}
    ordered = mixed[np.argsort(mixed[:, 0], kind="stable")]
    keys, found, least = ordered[:, :KEYS], np.zeros(len(mixed), dtype=np.bool_), tolerance * mixed[:, KEYS].max()
    for step in range(1, min(NEIGHBOURS, len(mixed) - 1) + 1):
        same = np.abs(keys[step:] - keys[:-step]).max(axis=1) <= least
        found[step:] |= same
        found[:-step] |= same
    return {"parameter.row_doubles": {name: float(found.mean())}}


def _gaps(alike: list[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """Return of each of several weights its greatest difference from the next, against its greatest entry."""
    samples = [even_sample(weight, ENTRIES).double() for _, weight in alike]
    pairs = zip(alike, samples, [*samples[1:], samples[0]], strict=True)
    gaps = [(name, (a - b.to(a.device)).abs().amax() / a.abs().amax(), weight.dtype) for (name, weight), a, b in pairs]
    return [(name, torch.where(gap <= _rounding(dtype), 0.0, gap)) for name, gap, dtype in gaps]


def _pending(fact: str, sites: tuple[str, ...], values: list[Tensor]) -> Clue:
    return Clue(fact, sites, stack_scalars(values), nan_is_missing=True)
