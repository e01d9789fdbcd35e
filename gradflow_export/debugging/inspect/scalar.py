"""A scalar function of named float64 tensors, made of a module, a loss or any callable, that leaves no trace."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gradflow_export.debugging.nan.batch import copied_buffers, restore_buffers
from gradflow_export.errors import ArgumentError
from gradflow_export.hooks import torch_private

SMALLEST = 0.1
"""Size of tensors whose entries are smaller: of zeros nothing tells what a small change is."""

_SEED = 0


class ScalarFunction:
    """A scalar function of named float64 leaves, the same at every call.

    A module is copied and put into evaluation mode. Random numbers that are drawn inside are the same at every call,
    and buffers are put back before each, those of modules that a callable holds as well.

    Args:
        function: A module or any callable.
        arguments: What it is called with.
        loss: Makes a scalar of the output; by default a fixed random projection of all outputs.

    Attributes:
        leaves: Tensors whose gradients are checked, by name.
        sparse: Names of those whose gradient is sparse.
        gradients: Gradient of each leaf by autograd; of complex entries real and imaginary part.
        sizes: Root mean square of the entries of each leaf, at least a little.
        magnitude: Of what is added up to the value, as it was read last.

    Raises:
        ArgumentError: Nothing can be differentiated.
    """

    def __init__(
        self, function: Callable[..., Any], arguments: tuple[Any, ...], loss: Callable[[Any], Tensor] | None
    ) -> None:
        self._function, self._loss = _widened(function), None if loss is None else _widened(loss)
        found = self._function.named_parameters() if isinstance(self._function, nn.Module) else ()
        self.leaves: dict[str, Tensor] = {name: p for name, p in found if p.requires_grad}
        self._arguments = torch_private.tree_map_only(Tensor, _leaf, arguments)
        inputs = [leaf for leaf in torch_private.tree_leaves(self._arguments) if isinstance(leaf, Tensor)]
        self.leaves.update({f"input {n}": t for n, t in enumerate(t for t in inputs if t.requires_grad)})
        if not self.leaves:
            raise ArgumentError(
                "inputs must hold a floating-point tensor, or the function parameters that are trained, got neither; "
                "there is no gradient to check."
            )
        tensors = [*torch_private.tree_leaves(arguments), *self.leaves.values()]
        self._devices = sorted({t.device.index for t in tensors if isinstance(t, Tensor) and t.device.type == "cuda"})
        modules = [*_modules_in(self._function), *_modules_in(self._loss)]
        self._buffers = [buffer for module in modules for buffer in copied_buffers(module)]
        self._weights: list[Tensor] = []
        self._random = torch.Generator("cpu").manual_seed(_SEED)
        self.sparse: set[str] = set()
        self.magnitude = 0.0
        self._middle: float | None = None
        self._settle()

    @contextlib.contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Put generators and buffers back at the end of the block, in which the function may be called."""
        pythons, numpys = random.getstate(), np.random.get_state()  # noqa: NPY002 - what modules may draw from
        # Stand-ins: a graph of the user's may have saved the buffers, and would notice that they are written.
        owned = [(module, name, torch_private.own_tensor(module, name)) for module, name, _ in self._buffers]
        for module, name, before in self._buffers:
            torch_private.put_buffer(module, name, before.clone())
        try:
            with torch.random.fork_rng(devices=self._devices):
                yield
        finally:
            random.setstate(pythons)
            np.random.set_state(numpys)  # noqa: NPY002 - as above
            for module, name, buffer in owned:
                torch_private.put_buffer(module, name, buffer)

    def differentiate(self) -> None:
        """Read the gradients at the point where the leaves are.

        Raises:
            ArgumentError: The output needs no gradient, or is no floating-point tensor.
        """
        with torch.enable_grad():
            value = self._value()
            if not value.requires_grad:
                raise ArgumentError(
                    "function must give an output that needs a gradient, got one that is detached from its inputs; "
                    "look for detach(), .data, .item() or torch.no_grad() in it."
                )
            found = torch.autograd.grad(value, list(self.leaves.values()), allow_unused=True)
        self.gradients: dict[str, Tensor] = {}
        for (name, leaf), gradient in zip(self.leaves.items(), found, strict=True):
            if gradient is not None and gradient.is_sparse:
                self.sparse.add(name)
            dense = torch.zeros_like(leaf) if gradient is None else gradient.detach().to_dense()
            self.gradients[name] = _parts(dense).clone()

    def along(self, lines: Mapping[str, Tensor], amount: float) -> float:
        """Return the value some way along a line through leaves, which are put back.

        Args:
            lines: Direction by name, in the form of :attr:`gradients`.
            amount: How far.
        """
        with torch.no_grad():
            for name, line in lines.items():
                _parts(self.leaves[name]).copy_(self._here[name] + amount * line)
            try:
                return float(self._value())
            finally:
                for name in lines:
                    _parts(self.leaves[name]).copy_(self._here[name])

    @property
    def middle(self) -> float:
        """The value at the point where the leaves are."""
        if self._middle is None:
            with torch.no_grad():
                self._middle = float(self._value())
        return self._middle

    def noise_like(self, name: str) -> Tensor:
        """Return random numbers of the form of a gradient, whose mean square is 1."""
        like = self.gradients[name]
        noise = torch.randn(like.shape, generator=self._random, dtype=torch.float64, device="cpu").to(like.device)
        scale = math.sqrt(noise.numel()) / max(float(noise.norm()), 1e-300)
        return noise * scale

    def move(self) -> None:
        """Take a point close by, and the gradients there."""
        with torch.no_grad():
            for name, leaf in self.leaves.items():
                size = self.sizes[name] if bool(leaf.any()) else 1.0
                _parts(leaf).add_(self.noise_like(name), alpha=1e-3 * size)
        self._settle()
        self.differentiate()

    def place(self) -> dict[str, Tensor]:
        """Return the point where the leaves are, for :meth:`go_back`."""
        return self._here

    def go_back(self, place: Mapping[str, Tensor]) -> None:
        """Return to a point, and take the gradients there."""
        with torch.no_grad():
            for name, leaf in self.leaves.items():
                _parts(leaf).copy_(place[name])
        self._settle()
        self.differentiate()

    def _settle(self) -> None:
        self._middle = None
        self._here = {name: _parts(leaf.detach()).clone() for name, leaf in self.leaves.items()}
        self.sizes = {name: max(root_mean_square(start), SMALLEST) for name, start in self._here.items()}

    def _value(self) -> Tensor:
        restore_buffers(self._buffers)
        # Within fork_rng: what is drawn inside is the same at every call. torch.manual_seed would reach every device.
        torch.default_generator.manual_seed(_SEED)
        for index in self._devices:
            torch.cuda.default_generators[index].manual_seed(_SEED)
        random.seed(_SEED)
        np.random.seed(_SEED)  # noqa: NPY002 - as above
        with _plainly():
            output = self._function(*self._arguments)
            if self._loss is not None:
                value: Tensor = self._loss(output)
                self.magnitude = float(value.detach().abs())
                return value
        tensors = [t for t in torch_private.tree_leaves(output) if isinstance(t, Tensor) and _is_checked(t)]
        if not tensors:
            raise ArgumentError(
                "function must return a floating-point tensor, got none; pass loss= to make a scalar of it."
            )
        parts = [_parts(t).double() for t in tensors]
        if not self._weights:
            draw = functools.partial(torch.randn, generator=self._random, dtype=torch.float64, device="cpu")
            self._weights = [draw(t.shape).to(t.device) for t in parts]
        weighed = [part * weight for part, weight in zip(parts, self._weights, strict=True)]
        self.magnitude = sum(float(each.detach().abs().sum()) for each in weighed)
        total: Tensor = torch.stack([each.sum().to(weighed[0].device) for each in weighed]).sum()
        return total


def root_mean_square(tensor: Tensor) -> float:
    """Return the root mean square of the entries, 0 of none."""
    return float(tensor.detach().norm()) / math.sqrt(max(tensor.numel(), 1))


def _is_checked(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _parts(tensor: Tensor) -> Tensor:
    """Return real and imaginary part of a complex tensor as entries of a real one that shares its memory."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _wide(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.double() if tensor.is_floating_point() else tensor


def _leaf(tensor: Tensor) -> Tensor:
    copied = _wide(tensor.detach().clone())
    return copied.requires_grad_() if _is_checked(copied) else copied


def _widened(function: Any) -> Any:
    """Return a copy of a module in float64 and evaluation mode, and any other callable as it is."""
    if not isinstance(function, nn.Module):
        return function
    module = torch_private.convert(copy.deepcopy(function), _wide).eval()  # double() leaves complex entries as they are
    module.zero_grad(set_to_none=True)
    return module


def _modules_in(function: Any) -> Iterable[nn.Module]:
    """Return the modules that a callable holds: itself, its owner, what it closes over, arguments bound to it."""
    held = [function, getattr(function, "__self__", None)]
    for cell in getattr(function, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # the cell is empty
            held.append(cell.cell_contents)
    if isinstance(function, functools.partial):
        held += [function.func, getattr(function.func, "__self__", None), *function.args, *function.keywords.values()]
    return [each for each in held if isinstance(each, nn.Module)]


@contextlib.contextmanager
def _plainly() -> Iterator[None]:
    """Have no autocast, and no cuDNN: its recurrent layers have no backward pass in evaluation mode."""
    with torch.autocast("cpu", enabled=False), contextlib.ExitStack() as stack:
        if torch.cuda.is_available():
            stack.enter_context(torch.autocast("cuda", enabled=False))
            stack.enter_context(torch.backends.cudnn.flags(enabled=False))
        yield
