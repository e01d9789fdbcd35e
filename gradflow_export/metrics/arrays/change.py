"""The change of a tensor that is too long to be copied: exact over some rows, signed sums of the rest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gradflow_export.metrics.arrays.norms import dense_entries
from gradflow_export.metrics.arrays.sketch import BLOCK, NORM_ERROR, mixed, seed_of, signed_sums

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


def joined(first: Values, rest: Sequence[Tensor]) -> Values:
    """Append scalars to a vector, on the host where all of them are there. Shape: ``[len(first) + len(rest)]``."""
    values = first
    if rest:
        more = torch.stack([value.double() for value in rest])
        values = torch.cat([torch.as_tensor(first).to(more), more]) if len(first) else more
    return values.double().numpy() if isinstance(values, Tensor) and values.is_cpu else values
