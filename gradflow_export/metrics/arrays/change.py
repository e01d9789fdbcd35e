"""The change of a tensor that is too long to be copied: exact over some rows, signed sums of the rest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gradflow_export.metrics.arrays.local import PLAIN
from gradflow_export.metrics.arrays.norms import dense_entries
from gradflow_export.metrics.arrays.sketch import (
    BLOCK,
    NORM_ERROR,
    mixed,
    seed_of,
    signed_sums,
    squared_distances,
    sums_of_all,
)

Values = Tensor | npt.NDArray[np.float64]
PIECES = 64
"""Blocks that are looked at of what a sparse gradient did not touch."""


@dataclass(frozen=True)
class Change:
    """How large a tensor was, and how far it moved.

    Attributes:
        before: L2 norm of the tensor before. Shape: scalar.
        moved: L2 norm of the difference. Shape: scalar.
        before_error: Standard error of ``before`` as a share of it; 0 where it is exact.
        moved_error: The same of ``moved``.
    """

    before: Tensor
    moved: Tensor
    before_error: Tensor
    moved_error: Tensor


class KeptAll:
    """What is kept of many tensors in order to tell later how far they have moved.

    Those on the host of which any entry may move are read by one call for all of them, others one by one.

    Args:
        tensors: As for :class:`Kept`.
        rows: Of each, rows that are copied, and whether nothing else is likely to move.
        number: As for :class:`Kept`.
    """

    def __init__(self, tensors: Sequence[Tensor], rows: Sequence[tuple[Tensor, bool]], number: int) -> None:
        every = range(len(tensors))
        chosen = [place for place in every if not (len(rows[place][0]) or rows[place][1]) and _is_plain(tensors[place])]
        self._seed = seed_of(number) if chosen else 0
        self._sums = sums_of_all([tensors[place] for place in chosen], self._seed) if chosen else None
        self._together = chosen if self._sums is not None else []
        self._shapes = [tensors[place].shape for place in self._together]
        alone = sorted(set(every).difference(self._together))
        self._alone = {place: Kept(tensors[place], rows[place][0], number, sparse=rows[place][1]) for place in alone}

    def compare(self, tensors: Sequence[Tensor]) -> tuple[Values, Values, Values, Values] | None:
        """Return the fields of :class:`Change` for all tensors, ``None`` where one has another shape now."""
        found = self._compare_together([tensors[place] for place in self._together])
        changes = [kept.compare(tensors[place]) for place, kept in self._alone.items()]
        known = [change for change in changes if change is not None]
        if found is None or len(known) < len(changes):
            return None
        if not known:
            return found
        order = np.argsort([*self._together, *self._alone])
        before, moved, before_error, moved_error = (
            joined(values, _vector([getattr(change, field.name) for change in known]))[order]
            for values, field in zip(found, fields(Change), strict=True)
        )
        return before, moved, before_error, moved_error

    def _compare_together(self, tensors: Sequence[Tensor]) -> tuple[Values, Values, Values, Values] | None:
        if self._sums is None or not tensors:
            return np.zeros(0), np.zeros(0), np.zeros(0), np.zeros(0)
        if [tensor.shape for tensor in tensors] != self._shapes:
            return None
        held, squares = self._sums
        moved = squared_distances(tensors, self._seed, held) if all(map(_is_plain, tensors)) else None
        if moved is None:
            now = [signed_sums(dense_entries(tensor), self._seed, squares=False)[0] for tensor in tensors]
            apart = [(sums - torch.from_numpy(before).to(sums)) for before, sums in zip(held, now, strict=True)]
            moved = np.array([float(each.square().sum()) for each in apart])
        return np.sqrt(squares), np.sqrt(moved), np.zeros(len(moved)), np.where(moved > 0, NORM_ERROR, 0.0)


def _is_plain(tensor: Tensor) -> bool:
    """Whether the entries of a tensor lie on the host, one after the other."""
    plain = type(tensor) in PLAIN and tensor.is_cpu and tensor.layout is torch.strided
    return plain and tensor.is_floating_point() and tensor.is_contiguous()


class Kept:
    """What is kept of a tensor in order to tell later how far it has moved.

    Rows that are named are copied, and exact. All others go into signed sums, whose error is known whatever moves; with
    ``sparse``, into a random sample of blocks, because reading the whole would cost many times what the step does.

    Args:
        tensor: Dense, on any device. Shape: ``[rows, ...]``.
        rows: The rows that are copied, rising, on the CPU. Shape: ``[n]``.
        number: Tells this reading from others, so that their errors are independent.
        sparse: Whether nothing but ``rows`` is likely to move.
    """

    def __init__(self, tensor: Tensor, rows: Tensor, number: int, *, sparse: bool) -> None:
        held = dense_entries(tensor)
        self._rows, self._seed, self._sparse = rows, seed_of(number), sparse
        self._shape = held.shape
        self._known = self._rows_of(held).clone()
        self._sums, self._squares = self._rest(held)

    def compare(self, tensor: Tensor) -> Change | None:
        """Return what became of the tensor, ``None`` where it has another shape now."""
        held = dense_entries(tensor)
        if held.shape != self._shape or held.device != self._known.device:
            return None
        known = self._known.double()
        own = (self._rows_of(held).double() - known).square().sum()
        sums, _ = self._rest(held, squares=False)
        difference = sums - self._sums
        if self._sparse:
            rest, spread = self._scaled(difference.square().sum(dim=1))
            squares, squares_spread = self._scaled(self._squares)
        else:
            rest, squares = difference.square().sum(), self._squares
            spread, squares_spread = 2.0 * NORM_ERROR * rest, torch.zeros_like(rest)
        before, moved = squares + known.square().sum(), rest + own
        return Change(before.sqrt(), moved.sqrt(), _share(squares_spread, before), _share(spread, moved))

    def _rows_of(self, held: Tensor) -> Tensor:
        if not len(self._rows):
            return held.reshape(-1)[:0]
        return held.reshape(held.shape[0], -1).index_select(0, self._rows.to(held.device))

    def _rest(self, held: Tensor, *, squares: bool = True) -> tuple[Tensor, Tensor]:
        """Return what stands for all but the rows, and its squares."""
        if not self._sparse:
            return signed_sums(held, self._seed, self._rows if len(self._rows) else None, squares=squares)
        flat = held.reshape(-1)
        width, blocks = max(flat.numel() // self._shape[0], 1), -(-flat.numel() // BLOCK)
        starts = _chosen(blocks, self._seed) * BLOCK
        places = torch.from_numpy(starts)[:, None] + torch.arange(BLOCK)
        inside = places < flat.numel()
        row = torch.where(inside, places, 0) // width
        found = torch.searchsorted(self._rows, row).clamp_(max=max(len(self._rows) - 1, 0))
        taken = self._rows[found] == row if len(self._rows) else torch.zeros_like(inside)
        sample = flat[torch.where(inside, places, 0).to(flat.device)].double()
        sample = torch.where((inside & ~taken).to(flat.device), sample, 0.0)
        return sample, sample.square().sum(dim=1)

    def _scaled(self, squares: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sum over all blocks from that of some, and its standard error."""
        count, blocks = len(squares), -(-math.prod(self._shape) // BLOCK)
        if count < 2 or count == blocks:
            return squares.sum() * (blocks / max(count, 1)), torch.zeros_like(squares.sum())
        variance = squares.var() * (1.0 - count / blocks) / count
        return squares.mean() * blocks, variance.sqrt() * blocks


def _chosen(blocks: int, seed: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return one block of each of ``PIECES`` rows of blocks, drawn evenly; all where there are no more."""
    if blocks <= PIECES:
        return np.arange(blocks, dtype=np.int64)
    drawn = mixed(np.arange(PIECES, dtype=np.uint64) + np.uint64(seed)) >> np.uint64(11)
    edges = (np.arange(PIECES + 1) * blocks) // PIECES
    shares = drawn.astype(np.float64) / 2.0**53
    return np.asarray(edges[:-1] + np.floor(shares * np.diff(edges)), dtype=np.int64)


def _share(spread: Tensor, squares: Tensor) -> Tensor:
    """Return the error of a root as a share of it, from that of the square; 0 where nothing is. Shape: scalar."""
    return torch.where(squares > 0, 0.5 * spread / squares, torch.zeros_like(squares))


def joined(first: Values, rest: Values) -> Values:
    """Append a vector to another one, on the host where both are there. Shape: ``[len(first) + len(rest)]``."""
    if isinstance(first, np.ndarray) and isinstance(rest, np.ndarray):
        return np.concatenate([first, rest])
    if not len(first):
        return rest
    device = rest.device if isinstance(rest, Tensor) else None
    return torch.cat([torch.as_tensor(each, dtype=torch.float64).to(device) for each in (first, rest)])


def _vector(scalars: Sequence[Tensor]) -> Values:
    """Return scalars as a vector, on the host where they are there. Shape: ``[len(scalars)]``."""
    values = torch.stack(list(scalars)).double() if scalars else torch.zeros(0, dtype=torch.float64)
    return values.numpy() if values.is_cpu else values
