"""Changes to what a batch holds: other rows of the data, the inputs of the batch before, targets made of the inputs."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from gradflow_export.experiments.interventions import Intervention
from gradflow_export.experiments.mending.losses import ELEMENTWISE, LOSSES, AnswersInUnits, argument, first
from gradflow_export.experiments.model_edits import tensors

INDEX = "__getitem__"
PICKED = "gather"
"""How a loss that is written by hand takes the scores of its targets."""
TARGETED = frozenset((PICKED, *LOSSES, *ELEMENTWISE))
"""What compares an answer with a target."""
REORDERED = frozenset((INDEX, "index_select", "roll", "flip"))
BLANKED = frozenset(("__mul__", "__rmul__", "mul", "masked_fill", "zeros_like", "ones_like"))
"""Functions that may put samples in another order, and that may make them all alike."""
KINDS = 4
"""Classes that a short training distinguishes, at most."""
ALIKE = 20
"""Batches in a row with the same samples from which on that may be the cause."""


class Outside(Intervention):
    """Knows whether a model is being called, or the script runs."""

    def __init__(self) -> None:
        super().__init__()
        self._inside = False

    def called(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """A call begins."""
        self._inside = True
        return super().called(module, args, kwargs)

    def left(self, module: nn.Module, output: Any) -> Any:
        """The script goes on."""
        self._inside = False
        return super().left(module, output)


class Counted(Intervention):
    """Knows how many samples a model is given, and stays while its effect is measured."""

    stays = True

    def __init__(self) -> None:
        super().__init__()
        self._counts: set[int] = set()

    def called(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Take note of how many samples there are."""
        self._counts = {len(each) for each in tensors([args, kwargs]) if each.dim()}
        return super().called(module, args, kwargs)


class OtherRows(Outside):
    """Takes other rows in each step where the script indexes a table by rows, and where it gets batches from a loader.

    Tables of one length that are indexed alike are still indexed alike.

    Args:
        mixed: Whether the rows come from all over the table; else from a place that is drawn anew after each step, so
            that what follows on each other still does.
    """

    stays = True

    def __init__(self, *, mixed: bool) -> None:
        super().__init__()
        self._mixed = mixed
        self._generator = torch.Generator().manual_seed(0)
        self._orders: dict[int, Tensor] = {}
        self._start = 0.0

    def after_step(self, optimizer: Any) -> None:
        """Draw another place."""
        del optimizer
        self._start = float(torch.rand((), generator=self._generator))

    def function(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
        """Change the rows; what a model indexes is left alone."""
        if name != INDEX or self._inside or args[0].requires_grad or not args[0].dim():
            return args, kwargs
        count = len(args[0])
        rows = _rows(args[1], count)
        if rows is None:
            return args, kwargs
        self.acted = True
        if self._mixed:
            order = self._orders.setdefault(count, torch.randperm(count, generator=self._generator))
            return (args[0], order[rows.cpu()]), kwargs
        return (args[0], (rows + int(self._start * count)) % count), kwargs

    def batch(self, loader: object, given: Any) -> Any:
        """Return a batch of samples that are drawn at random."""
        if not isinstance(loader, DataLoader) or not loader.batch_size or isinstance(loader.dataset, IterableDataset):
            return given
        self.acted = True
        drawn = torch.randint(len(loader.dataset), (loader.batch_size,), generator=self._generator)  # type: ignore[arg-type]
        return loader.collate_fn([loader.dataset[at] for at in drawn.tolist()])

    def told(self) -> dict[str, Any]:
        """Return that no batch is like the one before."""
        return {"opened": self.acted and not self._mixed}


class Batches(Outside):
    """Looks at the batches, and changes nothing.

    Attributes:
        same: How many batches after the first one were drawn as rows of a table and hold the same; below 0 where one
            holds something else, or was not drawn.
    """

    def __init__(self) -> None:
        super().__init__()
        self.same = 0.0
        self._first: Tensor | None = None
        self._sizes: set[int] = set()
        self._units = AnswersInUnits()
        self._drawn = AsDrawn()

    def called(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Compare what a model gets with what it got at first."""
        given = next(tensors([args, kwargs]), None)
        if torch.is_grad_enabled() and given is not None and given.dim() and given.layout is torch.strided:
            if self._first is not None:
                alike = given.shape == self._first.shape and torch.equal(given, self._first.to(given))
                # Samples that are all alike say nothing of the rows that were drawn.
                drawn = len(given) in self._sizes and bool((given != given[:1]).any())
                self.same = self.same + 1 if alike and drawn else -math.inf
            self._first = given.detach().clone()
            self._sizes.clear()
        return super().called(module, args, kwargs)

    def function(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
        """Take note of rows that are drawn, and of what a loss compares."""
        rows = _rows(args[1], len(args[0])) if name == INDEX and not self._inside and args[0].dim() else None
        self._sizes.update([] if rows is None else [len(rows)])
        # Under a function transform numbers cannot be read.
        with contextlib.suppress(Exception):
            self._units.function(name, args, kwargs)
        return args, kwargs

    def result(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], given: Any) -> Any:
        """Take note of samples that are put in another order or made alike."""
        with contextlib.suppress(Exception):
            if not self._inside and self._drawn.lost < ALIKE:
                self._drawn.result(name, args, kwargs, given)
        return given

    def told(self) -> dict[str, Any]:
        """Return it, whether targets are far from 0 or far apart, and how often samples were changed."""
        return {"same": max(self.same, -1.0), "far": self._units.acted, "lost": self._drawn.lost}


def _rows(index: Any, count: int) -> Tensor | None:
    """Return the rows that an index takes, where these are several, and at most half of the table."""
    if isinstance(index, slice):
        index = torch.tensor(range(*index.indices(count)))
    several = isinstance(index, Tensor) and index.dtype is torch.int64 and index.dim() == 1
    return index if several and 1 < len(index) <= count / 2 else None


class AsDrawn(Outside):
    """Gives back what the script draws, where it puts samples in another order or makes all of them alike.

    Inputs and targets that are put in one order together belong to each other before it as well.

    Attributes:
        lost: How often that was done, in a call that looks and changes nothing.
    """

    stays = True

    def __init__(self) -> None:
        super().__init__()
        self.lost = 0

    def result(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], given: Any) -> Any:
        """Return what it was made of."""
        del kwargs
        if name not in REORDERED | BLANKED or self._inside or not _lost(args[0], given, blank=name in BLANKED):
            return given
        self.acted, self.lost = True, self.lost + 1
        return args[0]


def _lost(source: Any, given: Any, *, blank: bool) -> bool:
    """Return whether samples differ that are all alike in what was made of them, or that stand in another order."""
    if not (isinstance(source, Tensor) and isinstance(given, Tensor)) or source.requires_grad or given.requires_grad:
        return False
    if source.shape != given.shape or not source.dim() or len(source) < 2 or source.is_complex() or source.is_sparse:
        return False
    before, after = source.detach().reshape(len(source), -1).double(), given.detach().reshape(len(given), -1).double()
    if not before.shape[1] or bool((before == before[0]).all()) or torch.equal(before, after):
        return False
    if blank:
        return bool((after == after[0]).all())
    # A number for each sample, and one for each place of a sample.
    one = torch.linspace(1.0, 2.0, before.shape[1], dtype=torch.double, device=before.device)
    rows, others = ((each @ one).sort().values for each in (before, after))
    columns, places = (each.sum(0).sort().values for each in (before, after))
    return torch.allclose(rows, others) or (len(columns) > 1 and torch.allclose(columns, places))


class EarlierInputs(Intervention):
    """Calls a model with the inputs of its call before, to which targets belong that come one batch late."""

    stays = True

    def __init__(self) -> None:
        super().__init__()
        self._before: dict[int, tuple[Any, Any]] = {}

    def called(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Exchange them."""
        if not torch.is_grad_enabled():
            return args, kwargs
        before, self._before[id(module)] = self._before.get(id(module)), (args, kwargs)
        self.acted |= before is not None
        return before or (args, kwargs)


class ComputedTargets(Outside):
    """Gives a loss targets that follow from the inputs: each is a function of one number, in which samples differ most.

    Classes are as frequent as each other; numbers have the mean and the spread that they had.
    """

    stays = True

    def __init__(self) -> None:
        super().__init__()
        self._inputs: Tensor | None = None
        self._scales: dict[int, tuple[Tensor, Tensor]] = {}
        self._unit: tuple[float, float] | None = None

    def called(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Remember the inputs."""
        if torch.is_grad_enabled():
            self._inputs = next(tensors([args, kwargs]), None)
        return super().called(module, args, kwargs)

    def function(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
        """Change the targets: after the model's call, differences are losses."""
        if self._inputs is None or name not in (LOSSES if self._inside else TARGETED):
            return args, kwargs
        given, _ = first(args, kwargs)
        target, put = argument(2, "index", args, kwargs) if name == PICKED else argument(1, "target", args, kwargs)
        if given is None or target is None or target.requires_grad or not given.requires_grad or not target.dim():
            return args, kwargs
        if not len(target) or self._inputs.numel() % len(target):
            return args, kwargs
        self.acted = True
        return put(self._computed(target, given))

    def _computed(self, target: Tensor, given: Tensor) -> Tensor:
        score = self._score(len(target)).reshape(-1, *(1 for _ in target.shape[1:])).expand(target.shape)
        share = (1 + torch.erf(score / math.sqrt(2))) / 2
        if not target.is_floating_point():
            kinds = min(given.shape[1] if given.dim() > 1 else 2, KINDS)
            return (share * kinds).to(target.dtype).clamp(0, kinds - 1)
        if bool(((target == 0) | (target == 1)).all()):
            return share.round().to(target)
        if self._unit is None:
            self._unit = float(target.mean()), float(target.std()) or 1.0
        return (self._unit[0] + self._unit[1] * score).to(target)

    def _score(self, count: int) -> Tensor:
        """Return where each sample stands in the direction in which those of the first batch differ most."""
        assert self._inputs is not None
        rows = self._inputs.detach().reshape(count, -1)
        if not rows.is_floating_point():
            # Words are numbers without an order.
            rows = torch.sin(rows.double() ** 2).mean(1, keepdim=True)
        rows = rows.double()
        if rows.shape[1] not in self._scales:
            mean = rows.mean(0)
            self._scales[rows.shape[1]] = mean, torch.linalg.svd(rows - mean, full_matrices=False).Vh[0]
        mean, direction = self._scales[rows.shape[1]]
        score = (rows - mean) @ direction
        return (score - score.mean()) / score.std().clamp_min(1e-12)
