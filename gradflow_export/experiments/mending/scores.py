"""Changes to scores between a layer and what chooses among them: axis, order and range."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from gradflow_export.autograd_graph.loss_shape import SHAPES, factor_of
from gradflow_export.autograd_graph.nodes import Op, below, kind_of
from gradflow_export.experiments.interventions import Intervention
from gradflow_export.experiments.mending.batches import Counted
from gradflow_export.experiments.mending.losses import ENTROPIES, first

SOFTMAXES = frozenset(("softmax", "log_softmax"))
FLATTENED = frozenset(("view", "reshape"))
CLAMPS = frozenset(("clamp", "clip"))
EDGE = 0.01
"""What the bounds of clamped probabilities may be apart from 0 and 1."""
COLD, HOT = 0.005, 10.0
"""Temperatures from which on, either way, they may be the cause."""
FLAT, SHARP = 0.1, 20.0
"""Spread of a sample's first scores, divided by such a temperature, from which on, either way, it is evident."""
_PASSED = SHAPES | {Op.COPY_SLICES, Op.MASKED_FILL}


class WithinSamples(Intervention):
    """Lets a softmax over the samples of a batch run over the last dimension of a sample that has several entries."""

    stays = True

    def function(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
        """Change the dimension."""
        given, _ = first(args, kwargs)
        axis, put = _axis(args, kwargs)
        if name not in SOFTMAXES or given is None or given.dim() < 2 or axis not in {0, -given.dim()}:
            return args, kwargs
        wide = [at for at in range(1, given.dim()) if given.shape[at] > 1]
        self.acted |= bool(wide)
        return put(wide[-1]) if wide else (args, kwargs)


class OverKeys(Intervention):
    """Lets a softmax over the queries of attention run over its keys."""

    stays = True

    def function(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
        """Change the dimension."""
        given, _ = first(args, kwargs)
        axis, put = _axis(args, kwargs)
        if name not in SOFTMAXES or given is None or given.dim() < 3 or axis not in {-2, given.dim() - 2}:
            return args, kwargs
        self.acted |= given.shape[-1] > 1
        return put(-1) if given.shape[-1] > 1 else (args, kwargs)


class ClassesLast(Intervention):
    """Moves the classes to the end before a table of them is made of what has positions as well."""

    stays = True

    def function(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
        """Change the order of dimensions."""
        if name not in FLATTENED or not args[0].requires_grad or args[0].dim() < 3:
            return args, kwargs
        given, shape = args[0], args[1] if len(args) == 2 else args[1:]
        rows, classes = math.prod(given.shape) // max(given.shape[1], 1), given.shape[1]
        if not isinstance(shape, (tuple, list)) or tuple(shape) not in {(-1, classes), (rows, classes)}:
            return args, kwargs
        self.acted = True
        return (given.movedim(1, -1).contiguous(), *args[1:]), kwargs


class Transposed(Counted):
    """Exchanges the first dimension with another where the script reshapes to do so, which mixes a batch's samples."""

    def function(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
        """Transpose what is reshaped."""
        other = mixes(name, args, self._counts)
        if not other:
            return args, kwargs
        self.acted = True
        return (args[0].transpose(0, other).contiguous(), *args[1:]), kwargs


def mixes(name: str, args: tuple[Any, ...], counts: set[int]) -> int:
    """Return the dimension whose size a reshape exchanges with the first one's, of which one is a batch's; else 0."""
    wanted = args[1] if len(args) == 2 else args[1:]
    if name not in FLATTENED or not isinstance(wanted, (tuple, list)) or not args[0].dim():
        return 0
    first, *rest = args[0].shape
    for at, size in enumerate(rest, 1):
        swapped = tuple(wanted) == args[0].transpose(0, at).shape
        if swapped and first != size and 1 not in {first, size} and not counts.isdisjoint({first, size}):
            return at
    return 0


class NoClamp(Intervention):
    """Gives a sigmoid of scores in place of scores that are clamped to 0 and 1."""

    stays = True

    def result(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], given: Any) -> Any:
        """Return it."""
        if name not in CLAMPS or not args[0].requires_grad:
            return given
        low, high = (args[at] if len(args) > at else kwargs.get(key) for at, key in ((1, "min"), (2, "max")))
        if not (isinstance(low, (int, float)) and isinstance(high, (int, float))):
            return given
        if max(abs(low), abs(1 - high)) > EDGE:
            return given
        self.acted = True
        return low + (high - low) * args[0].sigmoid()


class Tempered(Intervention):
    """Divides scores so that those of a sample first have a spread of 1, where the script has a temperature."""

    stays = True

    def __init__(self) -> None:
        super().__init__()
        self._factor = 0.0

    def function(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
        """Scale what a cross-entropy is given, by the same number each time."""
        given, put = first(args, kwargs)
        spread = tempered(name, args, kwargs)
        if given is None or not spread:
            return args, kwargs
        self._factor, self.acted = self._factor or 1 / spread, True
        return put(given * self._factor)


def tempered(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> float:
    """Return the spread of a sample's scores that an extreme temperature divides before a cross-entropy, else 0."""
    given, _ = first(args, kwargs)
    if name not in ENTROPIES or given is None or given.dim() < 2:
        return 0.0
    node = given.grad_fn
    while kind_of(node) in _PASSED:
        node = below(node)
    if not (0 < factor_of(node) <= 1 / HOT or factor_of(node) >= 1 / COLD):
        return 0.0
    # Typical ones, so that scores that were masked do not count.
    scores = given.detach().double()
    spread = float((scores - scores.median(1, keepdim=True).values).abs().median(1).values.median())
    return spread if math.isfinite(spread) else 0.0


def _axis(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return the dimension of a softmax, and what puts another in its place."""

    def put(axis: int) -> tuple[Any, Any]:
        return ((args[0], axis, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "dim": axis})

    return (args[1] if len(args) > 1 else kwargs.get("dim")), put
