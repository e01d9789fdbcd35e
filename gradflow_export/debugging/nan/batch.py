"""What a training step finds when its first forward pass begins, so that it can be made as if it had never begun."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gradflow_export.engine.isolation import Guard
from gradflow_export.hooks import torch_private
from gradflow_export.hooks.module_hooks import ModuleHook, hook_calls

HELD_BYTES = 8 * 2**20
"""Inputs of one step up to this size are kept until it ends; larger ones only as long as somebody else keeps them."""

CALLS = 16
"""Forward passes of one step that are kept."""


@dataclass
class Call:
    """One forward pass: what is needed to repeat it, and the gradients that came back to what it gave.

    Attributes:
        arguments: Positional and keyword arguments; in place of large tensors weak references.
        random_states: As in :class:`BatchState`.
        autocast: Device type, whether it was enabled, and its dtype.
        arrived: Gradient that arrived at each output that needs one, by its place among them.
    """

    arguments: Any
    random_states: list[tuple[torch.device, Tensor]]
    autocast: tuple[str, bool, torch.dtype]
    arrived: dict[int, Tensor] = field(default_factory=dict)

    def inputs(self) -> tuple[Any, Any] | None:
        """Return positional and keyword arguments with their tensors, ``None`` where one of those is gone."""
        leaves, form = torch_private.tree_flatten(self.arguments)
        held = [leaf() if isinstance(leaf, weakref.ref) else leaf for leaf in leaves]
        gone = any(isinstance(leaf, weakref.ref) and now is None for leaf, now in zip(leaves, held, strict=True))
        return None if gone else torch_private.tree_unflatten(held, form)


@dataclass
class BatchState:
    """State that forward passes change.

    Attributes:
        random_states: State of the generator of each device.
        buffers: Module, name and copy of each buffer.
        calls: The step's forward passes.
    """

    random_states: list[tuple[torch.device, Tensor]] = field(default_factory=list)
    buffers: list[tuple[nn.Module, str, Tensor]] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)

    def restore(self) -> None:
        """Put buffers and generators back."""
        restore_buffers(self.buffers)
        restore_random(self.random_states)


def random_states(model: nn.Module) -> list[tuple[torch.device, Tensor]]:
    """Return the state of the CPU's generator and of those of the model's CUDA devices."""
    out = [(torch.device("cpu"), torch.get_rng_state())]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
        out += [(device, torch.cuda.get_rng_state(device)) for device in sorted(devices, key=str)]
    return out


def restore_random(states: Sequence[tuple[torch.device, Tensor]]) -> None:
    """Put generators back."""
    for device, state in states:
        if device.type == "cpu":
            torch.set_rng_state(state)
        else:
            torch.cuda.set_rng_state(state, device)


def copied_buffers(model: nn.Module) -> list[tuple[nn.Module, str, Tensor]]:
    """Return module, name and a copy of each buffer."""
    return [
        (module, name, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in torch_private.buffers(module)
        if buffer is not None and not is_lazy(buffer)
    ]


def restore_buffers(buffers: Sequence[tuple[nn.Module, str, Tensor]]) -> None:
    """Put buffers back, in place where they have kept their shape."""
    with torch.no_grad():
        for module, name, copy in buffers:
            now = dict(torch_private.buffers(module)).get(name)
            if now is not None and now.shape == copy.shape and now.dtype == copy.dtype:
                now.copy_(copy)
            else:
                torch_private.put_buffer(module, name, copy.clone())


class BatchWatch:
    """Sees the first forward pass of each step begin, through hooks on the model that copies of it do not carry.

    Args:
        model: What is trained; held weakly.
        keep_state: Whether to keep copies of buffers and generators.
        keep_calls: Whether to keep what is needed to repeat the forward passes.
        before: Gives what is called when the first forward pass of a step begins, ``None`` when it is gone.
    """

    def __init__(
        self, model: nn.Module, *, keep_state: bool, keep_calls: bool, before: Callable[[], Callable[[], None] | None]
    ) -> None:
        self._keep_state, self._keep_calls, self._before = keep_state, keep_calls, before
        self._held = 0
        self._begun = False
        self._served: set[int] = set()
        self._state: BatchState | None = None
        guard = Guard().part("the begin of a batch")
        stack = contextlib.ExitStack()
        hook = ModuleHook(guard(self._entered))
        stack.callback(hook_calls([(model, hook)], before=True, with_kwargs=True))
        if keep_calls:
            stack.callback(hook_calls([(model, ModuleHook(guard(self._left)))]))
        self._stack = stack
        self._model = weakref.ref(model)

    def state_for(self, optimizer: object) -> BatchState | None:
        """Return what the step under way found; ``None`` where its beginning was not seen.

        Args:
            optimizer: Whose step it is; one that has stepped since the last forward pass has nothing to do with that.
        """
        return None if id(optimizer) in self._served else self._state

    def end(self, optimizer: object) -> None:
        """End the step of an optimizer: the next forward pass begins another."""
        self._served.add(id(optimizer))

    def close(self) -> None:
        """Take the hooks away."""
        self._stack.close()
        self._state = None

    def _entered(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not torch.is_grad_enabled():
            return
        if self._served or not self._begun:
            self._begun = True
            self._served.clear()
            call = self._before()
            if call is not None:
                call()
            self._held = 0
            self._state = BatchState()
            if self._keep_state:
                self._state.random_states = random_states(module)
                self._state.buffers = copied_buffers(module)
        state = self._state
        if self._keep_calls and state is not None and len(state.calls) < CALLS:
            held = torch_private.tree_map_only(Tensor, self._hold, (args, kwargs))
            device = next((p.device.type for p in module.parameters()), "cpu")
            autocast = device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
            state.calls.append(Call(held, random_states(module), autocast))

    def _hold(self, tensor: Tensor) -> Tensor | weakref.ref[Tensor]:
        self._held += tensor.numel() * tensor.element_size()
        # A parameter is kept anyway, and PyTorch converts none that somebody refers to weakly.
        small = self._held <= HELD_BYTES or isinstance(tensor, nn.Parameter)
        return tensor if small else weakref.ref(tensor)

    def _left(self, _module: nn.Module, _args: Any, output: Any) -> None:
        if self._state is None or not self._state.calls or not torch.is_grad_enabled():
            return
        arrived = self._state.calls[-1].arrived
        for place, tensor in enumerate(outputs_of(output)):
            tensor.register_hook(_Keeper(arrived, place))  # type: ignore[no-untyped-call]  # torch leaves it untyped


class _Keeper:
    """A tensor hook that remembers the gradient; a pickled graph would not need it."""

    def __init__(self, arrived: dict[int, Tensor], place: int) -> None:
        self._arrived, self._place = arrived, place

    def __call__(self, gradient: Tensor) -> None:
        self._arrived[self._place] = gradient


def outputs_of(output: Any) -> list[Tensor]:
    """Return the tensors of an output that gradients come back to."""
    return [leaf for leaf in torch_private.tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
