"""Which sites make one row of a map: as many as it takes, none left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tensorboard_plugin_gradflow.errors import RequestError

MOST_ROWS = 4096


@dataclass(frozen=True)
class Rows:
    """How sites are joined to rows.

    Attributes:
        number: About how many rows are wanted, ``None`` for one for each site.
        cuts: Instead: at which sites, counted from 0 in depth order, a row begins.
        start: The first site, with ``number``.
        until: The site before which the last row ends, ``None`` for all sites.
    """

    number: int | None = None
    cuts: tuple[int, ...] = ()
    start: int = 0
    until: int | None = None

    def __post_init__(self) -> None:
        if self.number is not None and not 1 <= self.number <= MOST_ROWS:
            raise RequestError(400, f"Expected rows between 1 and {MOST_ROWS}; got {self.number}.")
        if self.number is not None and self.cuts:
            raise RequestError(400, "Expected either rows or cuts; got both. Leave one out.")
        rising = all(a < b for a, b in zip(self.cuts, self.cuts[1:], strict=False))
        if len(self.cuts) > MOST_ROWS or not rising or min((*self.cuts, self.start)) < 0:
            raise RequestError(400, f"Expected cuts to be at most {MOST_ROWS} rising numbers from 0; got others.")
        if not self.joins and (self.until is not None or self.start):
            raise RequestError(400, "Expected rows or cuts beside from and until; got neither.")

    @property
    def joins(self) -> bool:
        """Whether sites are joined at all."""
        return self.number is not None or bool(self.cuts)

    def edges(self, sites: int) -> npt.NDArray[np.int64]:
        """Return the first site of each row and, last, the site before which the last row ends.

        Args:
            sites: How many there are.

        Raises:
            RequestError: No site is in the range.
        """
        end = sites if self.until is None else min(self.until, sites)
        start = self.cuts[0] if self.cuts else self.start
        if not self.joins:
            return np.arange(sites + 1, dtype=np.int64)
        if start >= end:
            raise RequestError(400, f"Expected a range of the {sites} sites; got {start} to {end}.")
        if self.cuts:
            return np.array([*(cut for cut in self.cuts if cut < end), end], dtype=np.int64)
        # A power of two: a map that is dragged a pixel taller does not shift its rows.
        per_row = 1 << max(0, -(-(end - start) // (self.number or 1)) - 1).bit_length()
        return np.append(np.arange(start, end, per_row, dtype=np.int64), end)


def numbers_of(text: str) -> tuple[int, ...]:
    """Return a comma-separated list of whole numbers.

    Raises:
        RequestError: It is none.
    """
    parts: Sequence[str] = text.split(",")
    if not all(part.isascii() and part.isdigit() and len(part) <= 15 for part in parts):
        raise RequestError(400, f"Expected a comma-separated list of whole numbers; got {text[:40]!r}.")
    return tuple(map(int, parts))
