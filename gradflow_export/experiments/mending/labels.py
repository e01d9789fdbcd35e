"""Changes to labels that are not what a loss takes: 0 and 1 for -1 and 1, fractions made whole, words that entered."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from gradflow_export.experiments.interventions import Intervention
from gradflow_export.experiments.model_edits import tensors

MARGINS = MappingProxyType({
    "hinge_embedding_loss": 1, "soft_margin_loss": 1, "margin_ranking_loss": 2, "cosine_embedding_loss": 2,
})  # fmt: skip
"""Losses of labels that are -1 and 1, and the position of these among the arguments."""
PRODUCTS = frozenset(("__mul__", "__rmul__", "mul"))
CASTS = frozenset(("long", "int", "to", "type"))
WHOLE = frozenset((torch.int64, torch.int32, torch.int16, torch.uint8, "torch.LongTensor", "torch.IntTensor"))
MANY = 256
"""Different numbers from which on they are no numbers of classes."""
NO_TARGET = -100
"""Target that torch leaves out of a loss unless told otherwise."""
KEPT = 16
"""Answers of models that are remembered."""


class Remembering(Intervention):
    """Remembers what models answered since the last step, so that it is known where only its numbers are left."""

    stays = True

    def __init__(self) -> None:
        super().__init__()
        self._given: list[Tensor] = []

    def left(self, module: nn.Module, output: Any) -> Any:
        """Remember the tensors in an answer through which gradients flow."""
        del module
        self.remember(output)
        return output

    def remember(self, output: Any) -> None:
        """Remember the tensors in something through which gradients flow."""
        self._given = [*self._given, *(each for each in tensors([output]) if each.requires_grad)][-KEPT:]

    def after_step(self, optimizer: Any) -> None:
        """Forget what was answered before it."""
        del optimizer
        self._given = []

    def like(self, tensor: Tensor) -> Tensor | None:
        """Return the last answer with these numbers, in the shape of the tensor; ``None`` where there is none."""
        flat = tensor.detach().reshape(-1)
        for each in reversed(self._given):
            alike = each.numel() == flat.numel() and each.dtype == flat.dtype and each.device == flat.device
            if alike and torch.equal(each.detach().reshape(-1), flat):
                return each.reshape(tensor.shape)
        return None


class SignedLabels(Remembering):
    """Gives losses of a margin -1 and 1 in place of 0 and 1: those of torch, and products of labels and answers."""

    def function(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
        """Change the labels."""
        if name in MARGINS:
            at = MARGINS[name]
            if len(args) > at:
                return (*args[:at], self._signed(args[at]), *args[at + 1 :]), kwargs
            return args, {**kwargs, "target": self._signed(kwargs.get("target"))}
        if name in PRODUCTS and len(args) == 2 and all(isinstance(each, Tensor) for each in args):
            one, other = args
            if one.requires_grad and not other.requires_grad and self._answered(one, other):
                return (one, self._signed(other)), kwargs
            if other.requires_grad and not one.requires_grad and self._answered(other, one):
                return (self._signed(one), other), kwargs
        return args, kwargs

    def _answered(self, answer: Tensor, labels: Tensor) -> bool:
        return answer.numel() == labels.numel() > 1 and self.like(answer) is not None

    def _signed(self, labels: Any) -> Any:
        if not isinstance(labels, Tensor) or not bool(((labels == 0) | (labels == 1)).all()):
            return labels
        self.acted |= bool((labels == 0).any())
        return 2 * labels.to(torch.int64 if labels.dtype is torch.bool else labels.dtype) - 1


class KeptDifferences(Intervention):
    """Keeps apart what becomes one number when fractions are made whole: each is counted in their smallest distance."""

    stays = True

    def __init__(self) -> None:
        super().__init__()
        self._unit = 0.0

    def function(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
        """Change what is cast."""
        if name not in CASTS or not args or not isinstance(args[0], Tensor) or not args[0].is_floating_point():
            return args, kwargs
        given = args[0]
        if given.requires_grad or given.numel() < 2 or not _becomes_whole(name, args, kwargs):
            return args, kwargs
        low, high = (float(each) for each in given.aminmax())
        if not 0 <= low <= high < 1:
            return args, kwargs
        apart = torch.cat([given.new_zeros(1), given.flatten()]).sort().values.diff()
        apart = apart[apart > 0]
        if high > low and len(apart) < MANY:
            step = float(apart.min())
            self._unit = min(self._unit or step, step)
        if not self._unit:
            return args, kwargs
        self.acted |= high > 0
        return ((given / self._unit).round(), *args[1:]), kwargs


class MovedOn(Intervention):
    """Scores each word of a sequence against the next one, where it was scored against itself."""

    stays = True

    def __init__(self) -> None:
        super().__init__()
        self._words: list[Tensor] = []

    def called(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Remember the words that enter."""
        del module
        if torch.is_grad_enabled():
            whole = [each for each in tensors([args, kwargs]) if each.dtype is torch.int64 and each.dim() == 2]
            self._words = whole[-KEPT:]
        return args, kwargs

    def function(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
        """Move the targets on by one; the last of each sequence has none."""
        target = args[1] if len(args) > 1 else kwargs.get("target")
        if name not in {"cross_entropy", "nll_loss"} or not isinstance(target, Tensor):
            return args, kwargs
        for words in self._words:
            if words.numel() == target.numel() and torch.equal(words.reshape(-1), target.reshape(-1)):
                none = torch.full_like(words[:, :1], kwargs.get("ignore_index", NO_TARGET))
                moved = torch.cat([words[:, 1:], none], 1).reshape(target.shape)
                self.acted = True
                return ((args[0], moved, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "target": moved})
        return args, kwargs


def _becomes_whole(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    kinds = [each for each in (*args[1:], kwargs.get("dtype")) if isinstance(each, (torch.dtype, str))]
    return name in {"long", "int"} or bool(WHOLE.intersection(kinds))
