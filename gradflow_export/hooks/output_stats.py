"""What blocks send forward: the size and the spread of each output, or samples of its rows."""

from __future__ import annotations

import torch
from torch import Tensor

from gradflow_export.hooks.readings import Drained, Pending, RowSample
from gradflow_export.hooks.site_buffer import Places, SiteValues
from gradflow_export.metrics.arrays.local import PLAIN, is_ragged
from gradflow_export.metrics.arrays.norms import dense_entries, linf
from gradflow_export.metrics.arrays.one_pass import usable_interface
from gradflow_export.metrics.arrays.samples import rows_of, size_of_rows
from gradflow_export.metrics.outputs import (
    SPREAD_FEATURES,
    SPREAD_ROWS,
    output_rms,
    output_spreads,
    rank_limits,
)
from gradflow_export.native.outputs import OutputReader, grid_of


class SentOutputs:
    """Reads outputs as they come; of several of one block the last counts.

    Args:
        names: Of the blocks.

    Attributes:
        sample_rows: Whether to keep rows for ranks, and the greatest entries.
    """

    def __init__(self, names: tuple[str, ...]) -> None:
        self.sample_rows = False
        self._rank_limits = rank_limits(max(len(names), 1))
        self._names = names
        self._sizes, self._spreads, self._errors, self._greatest = (SiteValues(len(names)) for _ in range(4))
        self._rows: dict[int, Tensor] = {}  # whose spread is still to be computed
        self._ranked: dict[int, Tensor] = {}
        self._whole: dict[int, tuple[int, int]] = {}
        self._shapes: list[torch.Size | None] = [None] * len(names)
        interface, sizes, spreads, errors = usable_interface(), self._sizes, self._spreads, self._errors
        self._reader: OutputReader | None = None
        if interface is not None:
            (size, sized), (spread, told), (error, known) = (
                (values.numbers, values.present) for values in (sizes, spreads, errors)
            )
            self._reader = OutputReader(
                interface, size, sized, spread, told, error, known, SPREAD_ROWS, SPREAD_FEATURES
            )

    def __bool__(self) -> bool:
        """Whether there is anything."""
        return bool(self._sizes.present.any())

    def take(self, index: int, tensor: Tensor) -> None:
        """Take an output; one without entries has no size, and a ragged one no shape."""
        if not tensor.numel() or (tensor.is_nested and is_ragged(tensor)):
            return
        reader = self._reader
        if reader is None or type(tensor) not in PLAIN:
            self._by_torch(index, tensor)
            return
        shape = tensor.shape
        if shape != self._shapes[index]:
            self._shapes[index] = shape
            reader.grids[index] = grid_of(shape, SPREAD_ROWS, SPREAD_FEATURES)
        if not reader.read(index, tensor):
            self._by_torch(index, tensor)
            return
        if self._rows or self._sizes.tensors:
            self._rows.pop(index, None)
            self._sizes.tensors.pop(index, None)
        if self.sample_rows:
            held = tensor.detach()
            low, high = map(float, torch.aminmax(held))
            self._greatest.put(index, max(high, -low))  # NaN is the least and the greatest of entries with any
            self._ranked[index], self._whole[index] = rows_of(held, *self._rank_limits).clone(), size_of_rows(held)

    def drain(self, sites: tuple[str, ...], order: Places) -> Drained:
        """Give out what was read since the last call.

        Args:
            sites: Names in the order wanted.
            order: Their places. Shape: ``[len(sites)]``.
        """
        if self._rows:
            with torch.no_grad():
                found = output_spreads(list(self._rows.values()), [self._whole[index] for index in self._rows])
                for index, spread, error in zip(self._rows, *found.unbind(), strict=True):
                    self._spreads.put(index, spread)
                    self._errors.put(index, error)
        out: Drained = [
            *self._sizes.pending("block.output_rms", sites, order),
            *self._greatest.pending("block.output_max", sites, order),
            *self._spreads.pending("block.output_spread", sites, order),
            *filter(_is_any, self._errors.pending("block.output_spread_error", sites, order)),
        ]
        if self.sample_rows:
            for index, rows in self._ranked.items():
                whole = self._whole[index]
                out.append(RowSample("block.effective_rank", self._names[index], rows, whole=whole))
        self.forget()
        return out

    def forget(self) -> None:
        """Forget what was read."""
        for values in (self._sizes, self._spreads, self._errors, self._greatest):
            values.clear()
        self._rows, self._ranked = {}, {}

    def _by_torch(self, index: int, tensor: Tensor) -> None:
        with torch.no_grad():
            self._spreads.drop(index)
            self._errors.drop(index)
            self._sizes.put(index, output_rms(tensor))
            if self.sample_rows:
                self._greatest.put(index, linf(dense_entries(tensor)))
            if tensor.layout is not torch.strided:  # has no rows to take
                self._rows.pop(index, None)
                self._ranked.pop(index, None)
                return
            limits = self._rank_limits if self.sample_rows else (SPREAD_ROWS, SPREAD_FEATURES)
            # A copy: the next in-place operation of the model would change a view.
            self._rows[index], self._whole[index] = rows_of(tensor, *limits).clone(), size_of_rows(tensor)
            if self.sample_rows:
                self._ranked[index] = self._rows[index]


def _is_any(errors: Pending) -> bool:
    """Whether any value was estimated; what lies on a device is not looked at."""
    return isinstance(errors.values, Tensor) or bool(errors.values.any())
