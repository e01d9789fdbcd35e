"""Changes that take leaked targets away, and one that keeps small gradients above the grid of float16."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gradflow_export.experiments.interventions import Intervention, leaves
from gradflow_export.experiments.mending.labels import KEPT
from gradflow_export.experiments.mending.losses import ELEMENTWISE, LOSSES
from gradflow_export.experiments.mending.sequences import CLOSED
from gradflow_export.experiments.model_edits import mapped, tensors

LEAST = 8
"""Fewest samples of a batch in which a column is compared with targets."""
ROUNDING = 1e-4
"""What a target may differ from a column that was scaled, as a share of its spread."""
SHORTEST = 4
"""Places of a sequence, at least."""
SCALE = 2.0**14
"""Factor with which gradients begin, halved whenever one is no number."""


class HiddenTargets(Intervention):
    """Puts the mean of a column of the inputs in its place where it is the target, but for a factor and an offset.

    A column counts that is the target in every batch since it was seen to be; of sequences those of the last step.
    """

    stays = True

    def __init__(self) -> None:
        super().__init__()
        self._given: list[Tensor] = []
        self._columns: dict[int, tuple[Tensor, Tensor]] = {}
        self._now: dict[int, tuple[Tensor, Tensor]] = {}

    def called(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Remember the inputs, and hide what is known."""
        del module
        self._given = [*self._given, *(each for each in tensors([args, kwargs]) if _is_table(each))][-KEPT:]
        return mapped(args, self._hidden), mapped(kwargs, self._hidden)

    def function(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
        """Compare them with what a loss takes for targets."""
        if self._given and (name in LOSSES or name in ELEMENTWISE):
            pair = list(tensors([args[:2], [kwargs.get("input"), kwargs.get("target")]]))
            if any(each.requires_grad for each in pair):
                for target in pair:
                    self._compare(target)
        return args, kwargs

    def after_step(self, optimizer: Any) -> None:
        """Believe what is a target in this batch as well."""
        del optimizer
        for width, (same, mean) in self._now.items():
            known = self._columns.get(width)
            self._columns[width] = (same, mean) if known is None else (known[0] & same, known[1])
        self._given, self._now = [], {}

    def _hidden(self, table: Tensor) -> Tensor:
        known = self._columns.get(table.shape[-1]) if _is_table(table) else None
        if known is None or not bool(known[0].any()):
            return table
        self.acted, hidden = True, table.clone()
        _last(hidden)[:, known[0]] = known[1][known[0]].to(table)
        return hidden

    def _compare(self, target: Tensor) -> None:
        if target.requires_grad or not target.dim() or len(target) < LEAST:
            return
        for table in self._given:
            rows, numbers = _last(table).double(), target.detach().double().reshape(len(target), -1)
            if len(rows) == len(numbers) and bool((numbers != numbers[0]).any()):
                same = _copies(rows, numbers)
                before = self._now.get(rows.shape[1])
                self._now[rows.shape[1]] = (same, rows.mean(0)) if before is None else (same | before[0], before[1])


def _is_table(given: Tensor) -> bool:
    return given.is_floating_point() and not given.requires_grad and given.dim() in {2, 3}


def _last(table: Tensor) -> Tensor:
    return table if table.dim() == 2 else table[:, -1]


def _copies(x: Tensor, y: Tensor) -> Tensor:
    """Return which columns of a table are one of the targets' columns. Shape: ``[columns]``."""
    a, b = x - x.mean(0), y - y.mean(0)
    slope = a.T @ b / a.square().sum(0)[:, None].clamp_min(torch.finfo(a.dtype).tiny)
    apart = (b[:, None] - a[:, :, None] * slope).abs().amax(0)
    spread = b.std(0)
    return ((apart <= ROUNDING * spread) & (spread > 0)).any(1)


class NothingLater(Intervention):
    """Lets no place attend to a later one, where a sequence of words attends to itself."""

    stays = True

    def __init__(self) -> None:
        super().__init__()
        self._lengths: set[int] = set()

    def called(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Take note of how long the sequences are."""
        del module
        self._lengths = {length for each in tensors([args, kwargs]) if _is_text(each) for length in each.shape}
        return args, kwargs

    def function(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
        """Change the mask of attention, or the scores of one that is written by hand."""
        if name == "scaled_dot_product_attention":
            given = {
                **dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), args, strict=False)),
                **kwargs,
            }
            if not given.get("is_causal") and self._attends(given["query"].shape[-2], given["key"].shape[-2]):
                self.acted = True
                return (), {**given, "attn_mask": _pairs(given["query"], given.get("attn_mask")).tril()}
            return args, kwargs
        if name != "softmax" or not args or not isinstance(args[0], Tensor) or args[0].dim() < 3:
            return args, kwargs
        scores, axis = args[0], args[1] if len(args) > 1 else kwargs.get("dim")
        if axis not in {-1, scores.dim() - 1} or not self._attends(*scores.shape[-2:]):
            return args, kwargs
        self.acted = True
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        return (scores.masked_fill(later, CLOSED), *args[1:]), kwargs

    def _attends(self, queries: int, keys: int) -> bool:
        return queries == keys >= SHORTEST and keys in self._lengths


def _is_text(given: Tensor) -> bool:
    return given.dtype is torch.int64 and given.dim() == 2


def _pairs(query: Tensor, mask: Tensor | None) -> Tensor:
    """Return which places may attend to which, at least each to itself."""
    size = query.shape[-2]
    itself = torch.eye(size, dtype=torch.bool, device=query.device)
    if mask is None:
        return torch.ones_like(itself)
    pairs = itself | (mask if mask.dtype is torch.bool else mask > CLOSED)
    # Where all that is open lies later, the mask was made the wrong way round.
    return pairs if bool((pairs & ~itself).tril().any()) else torch.ones_like(itself)


class ScaledLoss(Intervention):
    """Differentiates a multiple of the loss and divides the gradients by it, as a scaler of half precision does."""

    def __init__(self) -> None:
        super().__init__()
        self._scale = SCALE
        self._pending = 0.0
        self._before: dict[int, tuple[Tensor, Tensor | None]] = {}
        self._known: dict[int, nn.Parameter] = {}

    def function(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
        """Begin the backward pass with a gradient above 1."""
        if name != "backward" or len(args) > 1 or kwargs.get("gradient") is not None or args[0].numel() != 1:
            return args, kwargs
        self._pending = self._scale
        return args, {**kwargs, "gradient": torch.full_like(args[0], self._scale)}

    def before_backward(self, loss: Tensor) -> None:
        """Put the gradients of earlier passes aside."""
        if self._pending:
            self._known.update((id(weight), weight) for weight in leaves(loss))
            self._before = {key: (weight, weight.grad) for key, weight in self._known.items()}
            for weight in self._known.values():
                weight.grad = None

    def after_backward(self) -> None:
        """Divide what came, and add it to these; a pass that overflows counts for nothing."""
        scale, self._pending = self._pending, 0.0
        came = [weight.grad for weight, _ in self._before.values() if scale and weight.grad is not None]
        finite = all(bool(each.isfinite().all()) for each in came)
        self._scale = self._scale if finite else self._scale / 2
        for weight, before in self._before.values() if scale else ():
            new = None if weight.grad is None else weight.grad / scale if finite else torch.zeros_like(weight.grad)
            weight.grad = new if before is None else before if new is None else before + new
            self.acted |= weight.grad is not None
