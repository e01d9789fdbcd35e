"""Sees on which tensors ``backward`` is called: the loss of a loop that nobody reported."""

from __future__ import annotations

import contextlib
import functools
import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from gradflow_export.autograd_graph.nodes import Op, below, is_variant, kind_of, walk
from gradflow_export.hooks import torch_private
from gradflow_export.hooks.guards import TURNS, Guard, unguarded
from gradflow_export.hooks.readings import Clue, Drained
from gradflow_export.metrics.arrays.local import is_ragged
from gradflow_export.records.step_record import RUN_SITE

MOST_NODES = 5_000
"""Nodes of a graph that are looked at for a parameter of the model; what reaches none among them is another's loss."""
ALWAYS_CHECKED = 10
CHECKED_EVERY = 50
NEAREST = 64
"""Nodes next to a loss that are looked at for a parameter: it distinguishes passes of one model from another's."""
KINDS = 64
"""Kinds of passes of other models that are remembered."""
_MARK = "gradflow_listeners"
"""A reentrant checkpoint, whose parameters show in the graph of its second run only."""


class Listener(Protocol):
    """Is notified of each outermost backward pass of the process."""

    def see(self, tensors: Any, gradients: Any) -> None:
        """Take what ``backward`` is called on, and the gradients that were given with it, before the pass."""

    def over(self, seconds: float | None) -> None:
        """Take the time of the pass that this thread began, ``None`` where it raised."""


_Told = tuple[tuple[Listener, ...], float]


def _before(listeners: _Listeners, tensors: Any, args: Any, kwargs: Any) -> tuple[Any, _Told]:
    """Report a pass before it is made; return what it is called on, and who was notified and when."""
    told = () if torch_private.backward_number() != -1 else listeners.current
    tensors = tensors if isinstance(tensors, (Tensor, tuple, list)) else tuple(tensors)
    gradients = args[0] if args else kwargs.get("grad_tensors", kwargs.get("grad_variables"))
    for listener in told:
        listener.see(tensors, gradients)
    return tensors, (told, time.perf_counter())


def _after(told: _Told) -> None:
    """Report a pass once it is made."""
    seconds = time.perf_counter() - told[1]
    for listener in told[0]:
        listener.over(seconds)


class _Listeners:
    """Stands in for ``torch.autograd.backward`` while anybody listens.

    Attributes:
        apart_before: What reports a pass in the middle of compiled code: it breaks the graph and is not compiled. One
            for the process, so that another exporter has nothing compiled anew.
        apart_after: The same after the pass.
        apart: Whether these two are made.
    """

    apart = False
    apart_before = staticmethod(_before)
    apart_after = staticmethod(_after)

    def __init__(self, original: Callable[..., None]) -> None:
        self.original = original
        self.current: tuple[Listener, ...] = ()
        listeners = self

        @functools.wraps(original)
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
            if torch.compiler.is_compiling():
                # A function that calls loss.backward() is compiled: so is this, which the pass itself never is.
                if _breaks():
                    tensors, told = _Listeners.apart_before(listeners, tensors, args, kwargs)
                    original(tensors, *args, **kwargs)
                    _Listeners.apart_after(told)
                else:
                    original(tensors, *args, **kwargs)
            elif torch_private.backward_number() != -1:  # a checkpoint that is computed again is no pass of its own
                original(tensors, *args, **kwargs)
            else:
                listeners.run(tensors, args, kwargs)

        backward.__dict__[_MARK] = self
        self.stand_in = backward

    def run(self, tensors: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Make the pass, and report it before and after."""
        tensors, (told, began) = _before(self, tensors, args, kwargs)
        seconds = None
        try:
            self.original(tensors, *args, **kwargs)
            seconds = time.perf_counter() - began
        finally:
            for listener in told:
                listener.over(seconds)


@torch_private.constant_when_traced
def _breaks() -> bool:
    """Return whether the graph that is traced may break for a pass to be seen; ``torch.compile`` calls this itself."""
    if torch_private.traces_one_graph():
        return False
    if not _Listeners.apart:
        _Listeners.apart_before = staticmethod(torch.compiler.disable(_before))  # type: ignore[no-untyped-call]
        _Listeners.apart_after = staticmethod(torch.compiler.disable(_after))  # type: ignore[no-untyped-call]
        _Listeners.apart = True
    return True


def listen(listener: Listener) -> contextlib.ExitStack:
    """Report each outermost ``torch.autograd.backward`` of the process.

    ``Tensor.backward`` looks that function up when it is called, so that this one attribute suffices. It is replaced
    once, whatever the number of listeners, and put back when the last of them has gone.

    Args:
        listener: Who is notified.

    Returns:
        A stack whose closing ends it.
    """
    with TURNS:
        found = getattr(torch.autograd.backward, _MARK, None)
        listeners: _Listeners = _Listeners(torch.autograd.backward) if found is None else found
        if found is None:
            torch.autograd.backward = listeners.stand_in
        listeners.current = (*listeners.current, listener)
    stack = contextlib.ExitStack()
    stack.callback(TURNS.last, functools.partial(_leave, listeners, listener))
    return stack


def _leave(listeners: _Listeners, listener: Listener) -> None:
    listeners.current = tuple(other for other in listeners.current if other is not listener)
    # Where somebody else has wrapped it in the meantime, it stays as a mere detour.
    if not listeners.current and torch.autograd.backward is listeners.stand_in:
        torch.autograd.backward = listeners.original


Root = tuple[Tensor, "Tensor | None"]
"""A scalar that ``backward`` is called on, and the gradient that was given with it, by which it is multiplied."""


class Roots:
    """Tells which backward passes are one model's, and on which losses they are called.

    Only a tensor whose graph reaches a parameter of the model counts. Its graph is followed at first, then now and
    then, and where another thread than that of the model's last pass begins one; as soon as one belonged to another
    model, each is, but for those like others that were never the model's: with the same parameter next to the loss, and
    as many nodes made since the pass before. Scalars that lead to no parameter, with or without a graph, are counted
    until one leads there.

    Args:
        model: Returns the model, ``None`` when it is gone.
        on_pass: Called with the scalars among the roots before each backward pass of the model.
        over: Called after each backward pass of the process with its seconds, ``None`` where it raised.
        guard: Wraps what is called from ``backward`` before the pass.

    Attributes:
        thread: That of the model's latest pass, 0 before the first.
        on_turn: Called with what each pass of the process begins at and whether it is the model's, ``None`` for nobody.
        used: Whether an optimizer of the model has stepped since its latest pass.
        game: Whether the model is known to be one player of several.
    """

    def __init__(
        self,
        model: Callable[[], nn.Module | None],
        on_pass: Callable[[Sequence[Root]], None],
        over: Callable[[float | None], None],
        *,
        guard: Guard = unguarded,
    ) -> None:
        self._model, self._on_pass = model, on_pass
        self.see, self.over = guard(self._called), over
        self._checks = self._until = self.thread = 0
        self._alone = True
        self.on_turn: Callable[..., None] | None = None
        self.used = self.game = False
        self._strangers = _Strangers()
        self._blind = self._told = 0
        self._listening = contextlib.ExitStack()

    def attach(self) -> contextlib.ExitStack:
        """Begin; closing the returned stack ends it."""
        stack = contextlib.ExitStack()
        stack.callback(self._end)
        self._begin()
        return stack

    def rest(self) -> Callable[[], None]:
        """Be notified of no pass for a while; return a function that ends that."""
        self._end()
        return self._begin

    def _begin(self) -> None:
        self._listening = listen(self)

    def _end(self) -> None:
        self._listening.close()

    def drain(self) -> Drained:
        """Give out how many scalars in a row led to no parameter, where these are new, and whether the model plays."""
        more, self._told = self._blind > self._told, self._blind
        out: Drained = [Clue("wiring.blind_passes", (RUN_SITE,), np.array([float(self._blind)]))] if more else []
        if self.game:
            out.append(Clue("wiring.game", (RUN_SITE,), np.ones(1)))
        return out

    def _called(self, tensors: Any, gradients: Any) -> None:
        if isinstance(tensors, Tensor):
            tensors = (tensors,)
        if gradients is None or isinstance(gradients, Tensor):
            gradients = (gradients,) * len(tensors)
        roots: list[Root] = []
        scalars, mine = 0, False
        for root, given in zip(tensors, gradients, strict=False):
            if isinstance(root, Tensor) and root.requires_grad:
                scalar = root.numel() == 1  # a vector says nothing of a loss
                scalars += scalar
                if root.grad_fn is not None and self._mine(root):
                    mine = True
                    if scalar:
                        roots.append((root, given))
        self._blind = 0 if mine else self._blind + scalars
        if self.on_turn is not None:
            self.on_turn(tensors, mine=mine)
        if mine:
            self._on_pass(roots)

    def _mine(self, root: Tensor) -> bool:
        self._until -= 1
        thread = threading.get_ident()
        if self._alone and self._until > 0 and thread == self.thread:
            return True
        self._checks += 1
        self._until = 1 if self._checks < ALWAYS_CHECKED else CHECKED_EVERY
        model = self._model()
        if model is None:
            return False
        kind = None if self._alone else self._strangers.kind_of(root.grad_fn)
        if kind is not None and self._strangers.knows(kind):
            return False
        mine = reaches(root, map(id, model.parameters()))
        self.thread = thread if mine else self.thread
        self._alone &= mine
        if kind is not None:
            self._strangers.learn(kind, mine=mine)
        return mine


_Kind = tuple[int, int]
"""The ``id`` of the parameter next to a loss, and the nodes that were made since the pass before."""


class _Strangers:
    """Remembers what passes of other models look like, so that their graphs need not be followed each time.

    Models that one loop trains in turn make graphs of the same length over and over. A pass that goes through the
    watched model too, such as that of a generator through its discriminator, comes after more or other nodes.
    """

    def __init__(self) -> None:
        self._made = 0
        self._seen: dict[_Kind, int] = {}

    def kind_of(self, node: Any) -> _Kind | None:
        """Return what is known of a pass before its graph is followed; ``None`` where no parameter is near the loss."""
        number = torch_private.sequence_number(node)
        made, self._made = self._made, number
        nearest = next(
            (v for each in walk([node], most=NEAREST) if (v := getattr(each, "variable", None)) is not None), None
        )
        return None if nearest is None else (id(nearest), number - made)

    def knows(self, kind: _Kind) -> bool:
        """Whether passes of this kind were never the model's; now and then they are looked at again."""
        times = self._seen.get(kind, 0)
        if times < ALWAYS_CHECKED or times % CHECKED_EVERY == 0:
            return False
        self._seen[kind] = times + 1
        return True

    def learn(self, kind: _Kind, *, mine: bool) -> None:
        """Take what was found of one; a kind that was the model's once is followed each time."""
        times = self._seen.get(kind, 0)
        if len(self._seen) >= KINDS and kind not in self._seen:
            self._seen.clear()
        self._seen[kind] = -1 if mine or times < 0 else times + 1


def reaches(root: Tensor, parameters: Iterable[int]) -> bool:
    """Whether the gradient of a tensor reaches one of these parameters.

    Args:
        root: A tensor with a graph.
        parameters: By ``id``.
    """
    known = frozenset(parameters)
    behind = walk([root.grad_fn], most=MOST_NODES)
    return any(id(getattr(node, "variable", None)) in known or kind_of(node) == Op.CHECKPOINT for node in behind)


def saved(node: Any, name: str) -> Tensor | None:
    """Return a tensor that a node of the graph keeps for its backward pass, before that has begun.

    Args:
        node: The node.
        name: Such as ``"self"``.

    Returns:
        The tensor without its graph; ``None`` where there is none, it was freed, it has no entries (an empty batch is
        evidence of nothing), it is not strided (sparse and ragged tensors lack most operations), or hooks stand before
        it (checkpoints, offloading), which would compute or copy it for us.
    """
    raw = getattr(node, f"_raw_saved_{name}", None)
    # Older versions of PyTorch do not tell whether hooks stand before it.
    if raw is None or getattr(raw, "unpack_hook", raw) is not None:
        return None
    try:
        tensor = getattr(node, f"_saved_{name}")
    except RuntimeError:  # freed by an earlier backward pass
        return None
    strided = isinstance(tensor, Tensor) and tensor.layout is torch.strided and tensor.numel() and not is_ragged(tensor)
    return tensor.detach() if strided else None


def scale_of(node: Any) -> Tensor | None:
    """Return what may be a ``GradScaler``'s scale: a tensor of float32 without dimensions that a root was made with."""
    if not is_variant(node, Op.MUL, 0) or below(node, 1) is not None:
        return None
    other = saved(node, "other")
    return other if other is not None and other.dim() == 0 and other.dtype == torch.float32 else None


def is_scaled(root: Tensor) -> bool:
    """Whether a root looks like what a ``GradScaler`` gives out, whose steps may overflow; waits for its device."""
    scale = None if root.grad_fn is None else scale_of(root.grad_fn)
    return scale is not None and float(scale) > 1.0 and math.frexp(float(scale))[0] == 0.5
