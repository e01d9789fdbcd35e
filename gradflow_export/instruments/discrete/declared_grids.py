"""The grids that a user declares: what weights are rounded to when they are used."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from gradflow_export.errors import ArgumentError, ArgumentTypeError, nearest
from gradflow_export.hooks.discover import site_name

Grids = float | Mapping[str, float] | None

_WHOLE = frozenset((torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64))


def is_store(tensor: Tensor) -> bool:
    """Return whether a tensor holds whole numbers, which are places on a grid."""
    return tensor.dtype in _WHOLE


def check_grids(model: nn.Module, grids: Grids, paired: tuple[str, ...] = ()) -> dict[str, float]:
    """Return the step of each tensor that lies on a declared grid, by the name under which it is shown.

    Args:
        model: Where parameters and buffers are.
        grids: As in :meth:`Exporter.watch <gradflow_export.exporter.Exporter.watch>`.
        paired: Names of the parameters that are phases and magnitudes: a single number is their step, or, without any,
            that of every real parameter.

    Raises:
        ArgumentError: A name is no parameter or buffer, a tensor is complex or a buffer that holds no whole numbers, or
            a step is not above 0 and finite.
        ArgumentTypeError: A step is no number, or ``grids`` is neither a number nor a mapping.
    """
    if grids is None:
        return {}
    tensors = {site_name(name): p for name, p in model.named_parameters()}
    stores = {site_name(name): b for name, b in model.named_buffers() if is_store(b)}
    if not isinstance(grids, Mapping):
        if isinstance(grids, bool) or not isinstance(grids, (int, float)):
            raise ArgumentTypeError(
                f"grids must be the width of a grid or widths by name, got {grids!r}; for example "
                'grids={"phase": 2 * math.pi / 512}.'
            )
        on = paired or tuple(name for name, p in tensors.items() if not p.is_complex())
        return {name: _step("grids", grids) for name in on}
    out = {}
    for name, step in grids.items():
        known = {**stores, **tensors}
        if name not in known:
            raise ArgumentError(
                f"grids names {name!r}, which is no parameter and no buffer of whole numbers{nearest(str(name), known)}"
            )
        if known[name].is_complex():
            raise ArgumentError(
                f"grids names {name!r}, which is complex; keep its phase and magnitude as two real parameters and name "
                "these in pairs and grids."
            )
        out[str(name)] = _step(f"grids[{name!r}]", step)
    return out


def check_intended(updates: Mapping[str, Tensor], stores: Mapping[str, Tensor | None]) -> None:
    """Check the updates that a user means for tensors of whole numbers.

    Args:
        updates: By name.
        stores: What is there, by name.

    Raises:
        ArgumentError: A name is none of them, or a shape is another one.
    """
    for name, update in updates.items():
        if name not in stores:
            raise ArgumentError(
                f"intended names {name!r}, which is no tensor of whole numbers named in grids or pairs"
                f"{nearest(str(name), stores)}"
            )
        tensor = stores[name]
        if tensor is not None and tensor.shape != update.shape:
            raise ArgumentError(
                f"intended[{name!r}] must have the shape of the tensor, {tuple(tensor.shape)}, got "
                f"{tuple(update.shape)}; pass the update of every entry, before rounding."
            )


def _step(name: str, step: object) -> float:
    if isinstance(step, bool) or not isinstance(step, (int, float)):
        raise ArgumentTypeError(f"{name} must be the width of a grid, got {step!r}; for example 2 * math.pi / 512.")
    if not 0 < step < math.inf:
        raise ArgumentError(f"{name} must be the width of a grid, above 0 and finite, got {step!r}.")
    return float(step)
