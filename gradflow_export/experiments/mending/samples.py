"""Changes to what takes samples together: means over the batch, and masks that leave all of them out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gradflow_export.experiments.mending.batches import Counted, Outside
from gradflow_export.experiments.mending.labels import PRODUCTS

REDUCED = frozenset(("mean", "sum"))


class OwnNumbers(Counted, Outside):
    """Leaves each sample its own numbers where a mean or a sum over the batch is taken: in a model, and of targets.

    What follows broadcasts one row to all samples, so that a row for each has a shape that fits.
    """

    def result(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], given: Any) -> Any:
        """Return what was reduced."""
        if name not in REDUCED or not isinstance(args[0], Tensor):
            return given
        axis = args[1] if len(args) > 1 else kwargs.get("dim")
        if axis not in (0, (0,), [0]) or args[0].dim() < 2 or len(args[0]) not in self._counts - {1}:
            return given
        if args[0].requires_grad != self._inside:
            return given
        self.acted = True
        return args[0]


class EverySample(Outside):
    """Takes ones in the place of a mask of nothing but zeros that a script multiplies a loss with."""

    stays = True

    def function(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
        """Change the mask."""
        if name not in PRODUCTS or self._inside or len(args) != 2 or not all(isinstance(e, Tensor) for e in args):
            return args, kwargs
        masks = [not each.requires_grad and bool(each.numel()) and not bool(each.any()) for each in args]
        if sum(masks) != 1 or not args[masks.index(False)].requires_grad:
            return args, kwargs
        self.acted = True
        return tuple(torch.ones_like(e) if mask else e for e, mask in zip(args, masks, strict=True)), kwargs
