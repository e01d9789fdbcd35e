"""Which operation of a backward pass made NaN or Inf: the passes are repeated, and each operation is looked at."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gradflow_export.autograd_graph.nodes import walk
from gradflow_export.debugging.nan.anomaly import anomaly_mode
from gradflow_export.debugging.nan.batch import (
    Call,
    copied_buffers,
    outputs_of,
    random_states,
    restore_buffers,
    restore_random,
)
from gradflow_export.exporter import suspended
from gradflow_export.hooks.discover import unwrap
from gradflow_export.metrics.arrays.norms import stored

FRAMES = 12
"""Lines of a forward call's traceback that are kept, the innermost ones."""

Node = Any
"""A node of the autograd graph; PyTorch gives its classes no common public name."""


@dataclass(frozen=True)
class Culprit:
    """The first operation whose backward pass made NaN or Inf out of finite gradients.

    Attributes:
        operation: Its name, such as ``"SqrtBackward0"``.
        value: ``"NaN"`` or ``"Inf"``.
        traceback: Where it was called in the forward pass, as Python prints it; empty where that is not known.
    """

    operation: str
    value: str
    traceback: str = ""


class _Look:
    """A hook of a node: has it made what is not finite?"""

    def __init__(self, node: Node, found: list[Culprit]) -> None:
        self._node, self._found = node, found

    def __call__(self, made: Iterable[Tensor | None], given: Iterable[Tensor | None]) -> None:
        if self._found or any(_broken(g) for g in given):
            return
        broken = next((g for g in made if _broken(g)), None)
        if broken is not None:
            self._found.append(Culprit(self._node.name(), _word(broken), _traceback(self._node)))


def _broken(gradient: Tensor | None) -> bool:
    if gradient is None or not (gradient.is_floating_point() or gradient.is_complex()):
        return False
    return not bool(torch.isfinite(stored(gradient)).all())


def _word(gradient: Tensor) -> str:
    return "NaN" if bool(torch.isnan(stored(gradient)).any()) else "Inf"


def _traceback(node: Node) -> str:
    lines = [str(line) for line in node.metadata.get("traceback_", ())]
    return "".join(lines[-FRAMES:])


def nodes_of(roots: Iterable[Tensor]) -> Iterator[Node]:
    """Yield every node of the graph behind some tensors once."""
    yield from walk(tensor.grad_fn for tensor in roots)


@contextlib.contextmanager
def looked_at(roots: Iterable[Tensor]) -> Iterator[list[Culprit]]:
    """Look at every operation of backward passes through a graph within a block.

    Args:
        roots: The loss, or outputs.

    Yields:
        A list that holds the culprit once it was found.
    """
    found: list[Culprit] = []
    with contextlib.ExitStack() as stack:
        for node in nodes_of(roots):
            stack.callback(node.register_hook(_Look(node, found)).remove)
        yield found


def trace(model: nn.Module, call: Call) -> Culprit | None:
    """Repeat a forward and a backward pass of a model and find the operation that made NaN or Inf.

    Weights, gradients, buffers and generators stay as they are. Python side effects of ``forward`` happen once more.

    Args:
        model: With the weights that the pass had.
        call: The pass, with the gradients that arrived at what it gave.

    Returns:
        ``None`` where every operation was well, or the pass cannot be repeated because its inputs are gone.
    """
    inputs = call.inputs()
    if inputs is None:
        return None
    args, kwargs = inputs
    model = unwrap(model)
    device, enabled, dtype = call.autocast
    with put_back(model), suspended(model), anomaly_mode(check_nan=False), torch.enable_grad():
        restore_random(call.random_states)
        with torch.autocast(device, dtype=dtype, enabled=enabled):
            outputs = outputs_of(model(*args, **kwargs))
        pairs = [(tensor, call.arrived[place]) for place, tensor in enumerate(outputs) if place in call.arrived]
        parameters = [p for p in model.parameters() if p.requires_grad]
        if not pairs:
            return None
        with looked_at(tensor for tensor, _ in pairs) as found:
            torch.autograd.grad(
                [tensor for tensor, _ in pairs], parameters, [gradient for _, gradient in pairs], allow_unused=True
            )
        return found[0] if found else None


@contextlib.contextmanager
def put_back(model: nn.Module) -> Iterator[None]:
    """Put buffers and random generators back at the end of a block."""
    buffers, states = copied_buffers(model), random_states(model)
    try:
        yield
    finally:
        restore_buffers(buffers)
        restore_random(states)


def backward(loss: Tensor, *, run: Callable[[], None] | None = None) -> Culprit | None:
    """Run a backward pass and return the operation that made NaN or Inf first, if any; nothing is raised for it.

    Where the forward pass ran under :func:`~gradflow_export.debugging.nan.anomaly.anomaly_mode`, the traceback of its
    call is reported too.

    Args:
        loss: A scalar.
        run: What to call instead of ``loss.backward()``.
    """
    with looked_at([loss]) as found:
        if run is None:
            loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        else:
            run()
    return found[0] if found else None
