"""Networks that follow another one: targets, teachers, moving averages. Nothing is wrong where no gradient comes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gradflow_export.records.evidence import Wiring
from gradflow_export.rules.signals import owner


def follows(sites: tuple[str, ...], codes: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Tell which parameters belong to a follower: a copy of what learns, and called only while gradients are off.

    Vectors, which often begin as one number everywhere, follow where all matrices of the nearest module around them do.

    Args:
        sites: Names of parameters.
        codes: Sums of :class:`~gradflow_export.records.evidence.Wiring` over all readings. Shape: ``[sites]``.

    Returns:
        Shape: ``[sites]``.
    """
    beside = (codes & (Wiring.LOOKED | Wiring.CALLED)) == Wiring.LOOKED
    matrix = (codes & Wiring.VECTOR) == 0
    copied = beside & matrix & ((codes & Wiring.COPY) > 0)
    all_copied: dict[str, bool] = {}
    for index in np.flatnonzero(matrix):
        parts = owner(sites[index]).split(".")
        for depth in range(len(parts) + 1):
            module = ".".join(parts[:depth])
            all_copied[module] = all_copied.get(module, True) and bool(copied[index])
    follows: npt.NDArray[np.bool_] = copied.copy()
    for index in np.flatnonzero(beside & ~matrix):
        module = owner(sites[index])
        while module and module not in all_copied:
            module = owner(module)
        follows[index] = all_copied.get(module, False)
    return follows
