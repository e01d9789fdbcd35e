"""Values of one metric at all its sites, as they are gathered and joined (floor 0: numpy only)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


class Column:
    """Values of one metric, filled in by one or more optimizers, and joined over ranks."""

    def __init__(
        self, sites: tuple[str, ...], values: Floats | None = None, present: npt.NDArray[np.bool_] | None = None
    ) -> None:
        self.sites = sites
        self.values = np.zeros(len(sites)) if values is None else values
        self.present = np.zeros(len(sites), dtype=np.bool_) if present is None else present

    def as_list(self) -> list[float | None]:
        """Return the values, ``None`` where nothing arrived."""
        values: list[float | None] = self.values.tolist()
        return values if self.present.all() else [v if p else None for v, p in zip(values, self.present, strict=True)]
