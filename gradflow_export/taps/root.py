"""Sees on which tensors ``backward`` is called: the loss of a loop that nobody told of."""

from __future__ import annotations

import contextlib
import functools
import math
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gradflow_export.hooks import torch_private
from gradflow_export.metrics.local import local
from gradflow_export.records import RUN_SITE
from gradflow_export.taps.base import Drained, Guard, Pending, unguarded

MOST_NODES = 5_000
"""Nodes of a graph that are looked at for a parameter of the model; what reaches none among them is another's loss."""
ALWAYS_CHECKED = 10
CHECKED_EVERY = 50
ROOTS = 1024
"""Roots kept until a step ends; beyond that the oldest are forgotten."""

See = Callable[[Any], None]
_MARK = "gradflow_listeners"
_CHECKPOINT = "CheckpointFunctionBackward"
"""A reentrant checkpoint, whose parameters show in the graph of its second run only."""


class _Listeners:
    """Stands in for ``torch.autograd.backward`` while anybody listens."""

    def __init__(self, original: Callable[..., None]) -> None:
        self.original = original
        self.current: tuple[See, ...] = ()
        listeners = self

        @functools.wraps(original)
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
            # Compiled code holds no trace of this; a checkpoint that is computed again is no pass of its own.
            if not torch.compiler.is_compiling() and torch_private.backward_number() == -1:
                for see in listeners.current:
                    see(tensors)
            original(tensors, *args, **kwargs)

        backward.__dict__[_MARK] = self
        self.stand_in = backward


def listen(see: See) -> contextlib.ExitStack:
    """Call ``see(tensors)`` before each outermost ``torch.autograd.backward`` of the process.

    ``Tensor.backward`` looks that function up when it is called, so that this one attribute suffices. It is replaced
    once, whatever the number of listeners, and put back when the last of them has gone.

    Args:
        see: Gets what ``backward`` was called on: a tensor, or a sequence of them.

    Returns:
        A stack whose closing ends it.
    """
    found = getattr(torch.autograd.backward, _MARK, None)
    listeners: _Listeners = _Listeners(torch.autograd.backward) if found is None else found
    if found is None:
        torch.autograd.backward = listeners.stand_in
    listeners.current = (*listeners.current, see)
    stack = contextlib.ExitStack()
    stack.callback(_leave, listeners, see)
    return stack


def _leave(listeners: _Listeners, see: See) -> None:
    listeners.current = tuple(other for other in listeners.current if other is not see)
    # Where somebody else has wrapped it in the meantime, it stays as a mere detour.
    if not listeners.current and torch.autograd.backward is listeners.stand_in:
        torch.autograd.backward = listeners.original


class Roots:
    """Keeps what one model's losses were in a step, as the tensors on which ``backward`` was called.

    Only a scalar whose graph reaches a parameter of the model counts. Its graph is followed at first, and then now and
    then; as soon as one belonged to another model, each is. The roots of a step are added up, because so are their
    gradients: of losses divided by the number of micro-batches the sum is their mean. A root whose gradients were
    cleared before the optimizer stepped, as the generator's are that ran through a critic, is forgotten. What a
    ``GradScaler`` multiplied is divided by its scale again. Scalars that lead to no parameter, with or without a graph,
    are counted until one leads there.

    Args:
        model: Returns the model, ``None`` when it is gone.
        on_root: Called with each root that counts, before its backward pass.
        guard: Wraps what is called from ``backward``.
    """

    def __init__(
        self,
        model: Callable[[], nn.Module | None],
        on_root: Callable[[Tensor], None],
        *,
        guard: Guard = unguarded,
    ) -> None:
        self._model, self._on_root, self._see = model, on_root, guard(self._called)
        self._values: deque[tuple[Tensor, Tensor | None]] = deque(maxlen=ROOTS)
        self._checks = self._until = 0
        self._alone = True
        self._blind = self._told = 0
        self.keep = True

    def attach(self) -> contextlib.ExitStack:
        """Begin; closing the returned stack ends it."""
        stack = contextlib.ExitStack()
        stack.callback(self.forget)
        stack.enter_context(listen(self._see))
        return stack

    def forget(self) -> None:
        """Forget the roots of this step."""
        self._values.clear()

    def drain(self) -> Drained:
        """Give out how many scalars in a row led to no parameter, where these are more than were told of."""
        more, self._told = self._blind > self._told, self._blind
        return [Pending("wiring.blind_passes", (RUN_SITE,), np.array([float(self._blind)]))] if more else []

    def loss(self) -> Tensor | None:
        """Return the sum of the roots, in double precision, ``None`` without any. Shape: scalar."""
        if not self._values:
            return None
        device = self._values[0][0].device
        values = [_unscaled(value, scale).to(device) for value, scale in self._values]
        return values[0] if len(values) == 1 else torch.stack(values).sum()

    def _called(self, tensors: Any) -> None:
        scalars = [
            root
            for root in ((tensors,) if isinstance(tensors, Tensor) else tensors)
            if isinstance(root, Tensor) and root.requires_grad and root.numel() == 1
        ]
        roots = [root for root in scalars if root.grad_fn is not None and self._mine(root)]
        self._blind = 0 if roots else self._blind + len(scalars)
        if roots and self._values and self._cleared():
            self._values.clear()
        for root in roots:
            if self.keep:
                self._values.append((local(root).detach(), scale_of(root.grad_fn)))
            self._on_root(root)

    def _mine(self, root: Tensor) -> bool:
        self._until -= 1
        if self._alone and self._until > 0:
            return True
        self._checks += 1
        self._until = 1 if self._checks < ALWAYS_CHECKED else CHECKED_EVERY
        model = self._model()
        if model is None:
            return False
        mine = reaches(root, map(id, model.parameters()))
        self._alone &= mine
        return mine

    def _cleared(self) -> bool:
        """Whether the gradients of the roots before this one are gone, so that no optimizer will use them."""
        model = self._model()
        return model is None or not any(p.grad is not None for p in model.parameters())


def reaches(root: Tensor, parameters: Iterable[int]) -> bool:
    """Whether the gradient of a tensor reaches one of these parameters.

    Args:
        root: A tensor with a graph.
        parameters: By ``id``.
    """
    known, waiting = frozenset(parameters), deque([root.grad_fn])
    seen = {root.grad_fn}
    while waiting and len(seen) < MOST_NODES:
        node: Any = waiting.popleft()
        if id(getattr(node, "variable", None)) in known or node.name() == _CHECKPOINT:
            return True
        for below, _ in node.next_functions:
            if below is not None and below not in seen:
                seen.add(below)
                waiting.append(below)
    return False


def saved(node: Any, name: str) -> Tensor | None:
    """Return a tensor that a node of the graph keeps for its backward pass, before that has begun.

    Args:
        node: The node.
        name: Such as ``"self"``.

    Returns:
        The tensor without its graph; ``None`` where there is none, it was freed, or hooks stand before it
        (checkpoints, offloading), which would compute or copy it for us.
    """
    raw = getattr(node, f"_raw_saved_{name}", None)
    # Older versions of PyTorch do not tell whether hooks stand before it.
    if raw is None or getattr(raw, "unpack_hook", raw) is not None:
        return None
    try:
        tensor = getattr(node, f"_saved_{name}")
    except RuntimeError:  # freed by an earlier backward pass
        return None
    return tensor.detach() if isinstance(tensor, Tensor) else None


def scale_of(node: Any) -> Tensor | None:
    """Return what may be a ``GradScaler``'s scale: a tensor of float32 without dimensions that a root was made with."""
    if node.name() != "MulBackward0" or node.next_functions[1][0] is not None:
        return None
    other = saved(node, "other")
    return other if other is not None and other.dim() == 0 and other.dtype == torch.float32 else None


def is_scaled(root: Tensor) -> bool:
    """Whether a root looks like what a ``GradScaler`` gives out, whose steps may overflow; waits for its device."""
    scale = None if root.grad_fn is None else scale_of(root.grad_fn)
    return scale is not None and float(scale) > 1.0 and math.frexp(float(scale))[0] == 0.5


def _unscaled(value: Tensor, scale: Tensor | None) -> Tensor:
    wide = value.to(torch.float64).reshape(())
    if scale is None:
        return wide
    # Scalers multiply by powers of two, of which the mantissa is 1/2; any other factor is the user's own.
    mantissa = torch.frexp(scale).mantissa
    return torch.where((mantissa == 0.5) & (scale > 1.0), wide / scale, wide)
