"""Whether a tensor holds something that no healthy computation holds."""

from __future__ import annotations

import torch
from torch import Tensor

from gradflow_export.metrics.arrays.local import local


def looks_broken(values: Tensor) -> bool:
    """Return whether a tensor holds NaN or Inf and is no attention mask.

    A mask has ``-inf`` where nothing may be attended to and 0 elsewhere. This waits for the device.

    Args:
        values: Shape: any; whole numbers and booleans are never broken.

    Source:
        Definition.
    """
    values = local(values)  # a collective that only some ranks come to would never end
    if not (values.is_floating_point() or values.is_complex()) or values.layout is not torch.strided:
        return False
    finite = torch.isfinite(values)
    if bool(finite.all()):
        return False
    if values.is_complex():
        return True
    mask = (values == 0) | (values == -torch.inf)
    return not bool(mask.all()) or not bool(finite.any())
