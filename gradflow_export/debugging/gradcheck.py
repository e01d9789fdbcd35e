"""Analytic gradients against finite differences, in float64: of a module, a loss or a custom autograd function."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from gradflow_export.arguments import check_number
from gradflow_export.errors import ArgumentError, ArgumentTypeError
from gradflow_export.hooks import torch_private

ATTEMPTS = 5
"""Points that are tried for a parameter whose derivative jumps where it was looked at."""

EXACT_BELOW = 8
"""Tensors of fewer entries are checked entry by entry, larger ones along lines."""

LINES = 2
"""Lines along which a larger tensor is checked."""

GROUP = 8
"""Tensors of more than this number are first checked together; a group that is well is not looked into."""

TOGETHER = 1e-6
"""Greatest relative error of a group: one tensor's is thinned among the others'."""

_EPS = 1e-6
_SEED = 0


@dataclass(frozen=True)
class ParameterCheck:
    """The gradient of one tensor, compared.

    Attributes:
        relative_error: Greatest ``|analytic - numeric| / max(|analytic|, |numeric|)`` over the derivatives that were
            compared; 0 where both vanish in rounding.
        passed: Whether it is within the tolerance.
        analytic: Derivative by autograd where the error is greatest.
        numeric: The same by central differences.
        kinks: How often the derivative jumped where it was looked at, so that another point was tried.
    """

    relative_error: float
    passed: bool
    analytic: float
    numeric: float
    kinks: int = 0


@dataclass(frozen=True)
class GradientCheck:
    """What a check of gradients found; true when every tensor passed.

    Attributes:
        parameters: One entry for each tensor, by name; inputs are ``"input 0"``, ``"input 1"``.
        tolerance: Greatest relative error allowed.
    """

    parameters: Mapping[str, ParameterCheck] = field(default_factory=dict)
    tolerance: float = 1e-3

    @property
    def passed(self) -> bool:
        """Whether every tensor passed."""
        return all(check.passed for check in self.parameters.values())

    @property
    def worst(self) -> str:
        """Name of the tensor with the greatest error, failed ones first; ``""`` where nothing was checked."""
        return max(
            self.parameters,
            key=lambda name: (not self.parameters[name].passed, self.parameters[name].relative_error),
            default="",
        )

    @property
    def max_relative_error(self) -> float:
        """The error of :attr:`worst`; 0 where nothing was checked."""
        return self.parameters[self.worst].relative_error if self.parameters else 0.0

    def __bool__(self) -> bool:
        """Return :attr:`passed`."""
        return self.passed

    def __str__(self) -> str:
        """Return the verdict, and one line for each tensor that failed."""
        failed = [(name, check) for name, check in self.parameters.items() if not check.passed]
        head = (
            f"{len(self.parameters) - len(failed)} of {len(self.parameters)} gradients agree with finite differences "
            f"(tolerance {self.tolerance:g}); worst: {self.worst}, relative error {self.max_relative_error:.2g}"
        )
        rows = [f"  {n}: autograd {c.analytic:.6g}, differences {c.numeric:.6g}" for n, c in failed]
        return "\n".join([head, *rows])

    def as_dict(self) -> dict[str, Any]:
        """Return all of it, ready for JSON."""
        return {
            "passed": self.passed,
            "max_relative_error": self.max_relative_error,
            "worst": self.worst,
            "parameters": {name: vars(check) for name, check in self.parameters.items()},
        }


def check_gradients(
    function: Callable[..., Any],
    inputs: Any,
    *,
    loss: Callable[[Any], Tensor] | None = None,
    tolerance: float = 1e-3,
    dense: bool = True,
    sparse: bool = True,
) -> GradientCheck:
    """Compare gradients by autograd with central differences, in float64.

    A module is copied, put into evaluation mode, so that dropout and batch statistics do not disturb, and its
    parameters and floating-point inputs are checked. Of a function or a loss the inputs are. Random numbers that are
    drawn inside are the same at every call. Small tensors are compared entry by entry, larger ones along two lines
    each: a gradient that is wrong in a few of very many entries may pass. Where the derivative jumps between the two
    points, as a ReLU's at 0, a point close by is taken. More than eight tensors are checked together first, with a much
    smaller tolerance, and then by halves where that fails: a large model that is well costs a few forward passes.

    Args:
        function: A module, a loss module, ``MyFunction.apply``, or any callable.
        inputs: Its arguments: a tensor, or a tuple of anything.
        loss: Makes a scalar of the output; by default a fixed random projection of all outputs.
        tolerance: Greatest relative error allowed. 1e-3 finds a backward that is off by 1 %.
        dense: Whether parameters with dense gradients are checked.
        sparse: Whether parameters with sparse gradients are checked.

    Returns:
        Pass or fail, and the relative error, of each tensor.

    Raises:
        ArgumentError: Nothing can be checked: no floating-point tensor, or the output needs no gradient; or the
            tolerance is negative, infinite or NaN.
        ArgumentTypeError: ``function`` cannot be called, or the tolerance is no number.

    Source: central differences of step 1e-6 as in ``torch.autograd.gradcheck``, whose fast mode projects as well.
    """
    if not callable(function):
        raise ArgumentTypeError(
            f"function must be a module, a loss or any callable, got {type(function).__name__}; pass MyFunction.apply, "
            "not MyFunction."
        )
    check_number("tolerance", tolerance, example=1e-3)
    arguments = inputs if isinstance(inputs, tuple) else (inputs,)
    tensors = [
        leaf for leaf in torch_private.tree_leaves((arguments, _parameters(function))) if isinstance(leaf, Tensor)
    ]
    devices = sorted({t.device.index for t in tensors if t.device.type == "cuda"})
    with torch.random.fork_rng(devices=devices):
        problem = _Problem(function, arguments, loss, devices)
        wanted = [name for name in problem.leaves if (sparse if name in problem.sparse else dense)]
        checks = problem.check_all(wanted, tolerance)
    return GradientCheck(checks, tolerance)


class _Problem:
    """A scalar function of named float64 leaves."""

    def __init__(
        self,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        loss: Callable[[Any], Tensor] | None,
        devices: Sequence[int],
    ) -> None:
        self._loss, self._devices = loss, devices
        self._function = function
        self.leaves: dict[str, Tensor] = {}
        self.sparse: set[str] = set()
        if isinstance(function, nn.Module):
            module = copy.deepcopy(function).double().eval()
            module.zero_grad(set_to_none=True)
            self._function = module
            self.leaves = {name: p for name, p in module.named_parameters() if p.requires_grad}
        wide = torch_private.tree_map_only(Tensor, _wide, arguments)
        inputs = [leaf for leaf in torch_private.tree_leaves(wide) if isinstance(leaf, Tensor) and leaf.requires_grad]
        self.leaves.update({f"input {place}": tensor for place, tensor in enumerate(inputs)})
        self._arguments = wide
        if not self.leaves:
            raise ArgumentError(
                "inputs must hold a floating-point tensor, or the function parameters that are trained, got neither; "
                "there is no gradient to check."
            )
        self._weights: list[Tensor] = []
        self._random = torch.Generator().manual_seed(_SEED)
        self._gradients = self._differentiate()

    def check_all(self, names: Sequence[str], tolerance: float) -> dict[str, ParameterCheck]:
        """Compare the derivatives of several leaves: together, and by halves where that is not well."""
        if len(names) <= GROUP:
            return {name: self.check(name, tolerance) for name in names}
        together = self._together(names)
        if together is not None:
            return dict.fromkeys(names, together)
        half = len(names) // 2
        return {**self.check_all(names[:half], tolerance), **self.check_all(names[half:], tolerance)}

    def _together(self, names: Sequence[str]) -> ParameterCheck | None:
        """Compare the derivative along one line through several leaves; ``None`` where it is not beyond doubt."""
        leaves = [self.leaves[name] for name in names]
        lines = [
            self._direction(self._gradients[name], 0, spread=True) * _size(leaf)
            for name, leaf in zip(names, leaves, strict=True)
        ]
        slopes = [float((self._gradients[name] * line).sum()) for name, line in zip(names, lines, strict=True)]
        # Each leaf is to weigh about as much as the others, or the error of one with small gradients would not show.
        least = min((abs(slope) for slope in slopes if slope), default=0.0)
        weights = [max(least / abs(slope), 0.01) if slope else 1.0 for slope in slopes]
        analytic = math.fsum(w * slope for w, slope in zip(weights, slopes, strict=True))
        here = [leaf.detach().clone() for leaf in leaves]
        values = []
        with torch.no_grad():
            for sign in (_EPS, -_EPS):
                for leaf, start, line, w in zip(leaves, here, lines, weights, strict=True):
                    leaf.copy_(start + sign * w * line)
                values.append(float(self._value()))
            for leaf, start in zip(leaves, here, strict=True):
                leaf.copy_(start)
        numeric = (values[0] - values[1]) / (2 * _EPS)
        rounding = 8 * torch.finfo(torch.float64).eps * max(map(abs, values)) / _EPS
        size = max(abs(analytic), abs(numeric))
        error = abs(analytic - numeric) / size if size > 0 and math.isfinite(size) else math.inf
        well = error <= TOGETHER + rounding / size if size > 0 else False
        return ParameterCheck(error, True, analytic, numeric) if well and rounding <= 1e-5 * size else None

    def check(self, name: str, tolerance: float) -> ParameterCheck:
        """Compare the derivatives of one leaf; of several lines the worst counts."""
        leaf = self.leaves[name]
        lines = leaf.numel() if leaf.numel() < EXACT_BELOW else LINES
        return max(
            (self._line(name, line, tolerance) for line in range(lines)),
            key=lambda check: (not check.passed, check.relative_error),
            default=ParameterCheck(0.0, True, 0.0, 0.0),
        )

    def _line(self, name: str, line: int, tolerance: float) -> ParameterCheck:
        check = ParameterCheck(0.0, True, 0.0, 0.0)
        before = [leaf.detach().clone() for leaf in self.leaves.values()]
        for attempt in range(ATTEMPTS):
            gradient = self._gradients[name]
            direction = self._direction(gradient, line)
            analytic = float((gradient * direction).sum())
            numeric, jump, rounding = self._difference(self.leaves[name], direction)
            size = max(abs(analytic), abs(numeric))
            off = abs(analytic - numeric)
            error = 0.0 if off <= rounding else off / size if math.isfinite(size) else math.inf
            # At a kink autograd gives one slope and the difference the mean of two. Where many kinks meet their jumps
            # may nearly cancel; one that is suspected without being there costs another look and changes no verdict.
            kink = error > tolerance and jump > rounding + 0.01 * off
            check = ParameterCheck(error, error <= tolerance, analytic, numeric, attempt + kink)
            if not kink:
                break
            self._move()
        if check.kinks:
            self._return(before)
        return check

    def _direction(self, gradient: Tensor, line: int, *, spread: bool = False) -> Tensor:
        """Return a line of length 1 on which the gradient does not vanish by chance."""
        if gradient.numel() < EXACT_BELOW and not spread:
            out = torch.zeros_like(gradient).reshape(-1)
            out[line] = 1.0
            return out.reshape(gradient.shape)
        noise = torch.randn(gradient.shape, generator=self._random, dtype=torch.float64).to(gradient.device)
        out = noise / noise.norm()
        if float(gradient.norm()) > 0:
            out = out + gradient / gradient.norm()
        direction: Tensor = out / out.norm()
        return direction

    def _difference(self, leaf: Tensor, direction: Tensor) -> tuple[float, float, float]:
        """Return the slope along a line, by how much it jumps, and what rounding makes of it."""
        here = leaf.detach().clone()
        step = _EPS * max(1.0, _size(here))
        with torch.no_grad():
            leaf.copy_(here + step * direction)
            above = float(self._value())
            leaf.copy_(here - step * direction)
            below = float(self._value())
            leaf.copy_(here)
            middle = float(self._value())
        rounding = 64 * torch.finfo(torch.float64).eps * max(abs(above), abs(below), abs(middle)) / step
        return (above - below) / (2 * step), abs(above - 2 * middle + below) / step, rounding

    def _move(self) -> None:
        """Take a point close by."""
        with torch.no_grad():
            for leaf in self.leaves.values():
                size = _size(leaf) if bool(leaf.any()) else 1.0
                noise = torch.randn(leaf.shape, generator=self._random, dtype=torch.float64).to(leaf.device)
                leaf.add_(noise, alpha=1e-3 * size)
        self._gradients = self._differentiate()

    def _return(self, before: Sequence[Tensor]) -> None:
        with torch.no_grad():
            for leaf, value in zip(self.leaves.values(), before, strict=True):
                leaf.copy_(value)
        self._gradients = self._differentiate()

    def _differentiate(self) -> dict[str, Tensor]:
        with torch.enable_grad():
            value = self._value()
            if not value.requires_grad:
                raise ArgumentError(
                    "function must give an output that needs a gradient, got one that is detached from its inputs; "
                    "look for detach(), .data, .item() or torch.no_grad() in it."
                )
            found = torch.autograd.grad(value, list(self.leaves.values()), allow_unused=True)
        out = {}
        for (name, leaf), gradient in zip(self.leaves.items(), found, strict=True):
            if gradient is not None and gradient.is_sparse:
                self.sparse.add(name)
            dense = torch.zeros_like(leaf) if gradient is None else gradient.detach().to_dense()
            out[name] = dense.clone()
        return out

    def _value(self) -> Tensor:
        # Within fork_rng: what is drawn inside is the same at every call. torch.manual_seed would reach every device.
        torch.default_generator.manual_seed(_SEED)
        for index in self._devices:
            torch.cuda.default_generators[index].manual_seed(_SEED)
        with _without_autocast():
            output = self._function(*self._arguments)
            if self._loss is not None:
                return self._loss(output)
        tensors = [t for t in torch_private.tree_leaves(output) if isinstance(t, Tensor) and t.is_floating_point()]
        if not tensors:
            raise ArgumentError(
                "function must return a floating-point tensor, got none; pass loss= to make a scalar of it."
            )
        if not self._weights:
            self._weights = [
                torch.randn(t.shape, generator=self._random, dtype=torch.float64).to(t.device) for t in tensors
            ]
        parts = [(t.double() * weight).sum() for t, weight in zip(tensors, self._weights, strict=True)]
        total: Tensor = torch.stack([part.to(parts[0].device) for part in parts]).sum()
        return total


def _size(tensor: Tensor) -> float:
    """Return the root mean square of the entries, at least a little."""
    return max(float(tensor.detach().norm()) / math.sqrt(max(tensor.numel(), 1)), 1e-3)


def _parameters(function: object) -> list[Tensor]:
    return list(function.parameters()) if isinstance(function, nn.Module) else []


def _wide(tensor: Tensor) -> Tensor:
    copied = tensor.detach().clone()
    return copied.double().requires_grad_() if copied.is_floating_point() else copied


@contextlib.contextmanager
def _without_autocast() -> Iterator[None]:
    with torch.autocast("cpu", enabled=False), contextlib.ExitStack() as stack:
        if torch.cuda.is_available():
            stack.enter_context(torch.autocast("cuda", enabled=False))
        yield
