"""Analytic gradients against finite differences, in float64: of a module, a loss or a custom autograd function."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from gradflow_export.debugging.inspect.scalar import ScalarFunction, root_mean_square
from gradflow_export.debugging.inspect.slopes import Slope, slopes
from gradflow_export.errors import ArgumentTypeError
from gradflow_export.validation import check_number

MINIMUM = 1e-7
"""Relative error that is always allowed."""

MULTIPLE = 10.0
"""An error up to this many times the estimated error of the finite difference is allowed."""

SETTLED = 0.01
"""A finite difference whose tolerance would be greater than this share settles nothing."""

ATTEMPTS = 4
"""Points that are tried along a line whose derivative jumps, or does not agree, where it was looked at."""

EXACT_BELOW = 8
"""Tensors of fewer entries are checked entry by entry, larger ones along lines."""

LINES = 4
"""Lines along which a larger tensor is checked, of which the first leans towards the gradient."""

LINES_TOGETHER = 2
"""Lines along which a group of tensors is checked."""

GROUP = 8
"""Tensors of more than this number are first checked together; a group that is well is not looked into."""

SPREAD = 100.0
"""Greatest ratio of the sensitivities in a group: the error of one tensor is not to be lost among the others'."""


@dataclass(frozen=True)
class ParameterCheck:
    """The gradient of one tensor, compared.

    Attributes:
        relative_error: Greatest ``|analytic - numeric|`` over the derivatives that were compared, as a share of the
            greatest of ``|analytic|``, ``|numeric|`` and what a line of its length has on average; 0 where all of them
            vanish in noise.
        passed: Whether it is within the tolerance.
        analytic: Derivative by autograd where the error is greatest.
        numeric: The same by central differences.
        kinks: How often the derivative jumped or did not agree, so that another point was tried.
        tolerance: Greatest relative error that was allowed, from the noise of the finite difference.
        settled: Whether finite differences settle the question; where they do not, it is not passed.
    """

    relative_error: float
    passed: bool
    analytic: float
    numeric: float
    kinks: int = 0
    tolerance: float = MINIMUM
    settled: bool = True


@dataclass(frozen=True)
class GradientCheck:
    """What a check of gradients found; true when every tensor passed.

    Attributes:
        parameters: One entry for each tensor, by name; inputs are ``"input 0"``, ``"input 1"``.
        tolerance: Relative error that is allowed in any case; each tensor has its own beside it.
    """

    parameters: Mapping[str, ParameterCheck] = field(default_factory=dict)
    tolerance: float = MINIMUM

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
        rows = [
            f"  {n}: autograd {c.analytic:.6g}, differences {c.numeric:.6g}, relative error {c.relative_error:.2g} of "
            f"{c.tolerance:.2g} allowed" + ("" if c.settled else "; the differences do not settle")
            for n, c in failed
        ]
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
    tolerance: float | None = None,
    dense: bool = True,
    sparse: bool = True,
) -> GradientCheck:
    """Compare gradients by autograd with central differences, in float64.

    A module is copied, put into evaluation mode, so that dropout and batch statistics do not disturb, and its
    parameters and floating-point or complex inputs are checked. Of a function or a loss the inputs are. Nothing is
    changed: not the module, its buffers and gradients, nor any generator. Random numbers that are drawn inside are the
    same at every call.

    Small tensors are compared entry by entry, larger ones along four lines that move every entry. The finite difference
    tells its own noise: two steps and a fourth difference, at the best of several steps. Ten times that noise is
    allowed, at least 1e-7. A backward that changes the gradient of a tensor by a share ``e`` of its norm is then missed
    along one line with a probability of about ``0.8 * tolerance / e``; ``e`` is 1e-3 times ``sqrt(0.1)`` for an error
    of 0.1 % in a tenth of its entries. Where the derivative jumps, as a ReLU's at 0, points close by are taken. More
    than eight tensors are checked together first, those of like sensitivity, and by halves where that fails: ``e`` is
    then less by the square root of their number.

    Args:
        function: A module, a loss module, ``MyFunction.apply``, or any callable.
        inputs: Its arguments: a tensor, or a tuple of anything.
        loss: Makes a scalar of the output; by default a fixed random projection of all outputs.
        tolerance: Relative error that is allowed in any case; by default 1e-7.
        dense: Whether parameters with dense gradients are checked.
        sparse: Whether parameters with sparse gradients are checked.

    Returns:
        Pass or fail, the relative error, and the tolerance of each tensor.

    Raises:
        ArgumentError: Nothing can be checked: no floating-point tensor, or the output needs no gradient; or the
            tolerance is negative, infinite or NaN.
        ArgumentTypeError: ``function`` or ``loss`` cannot be called, or the tolerance is no number.

    Source: ``torch.autograd.gradcheck``, whose fast mode projects as well, with Richardson's extrapolation.
    """
    if not callable(function):
        raise ArgumentTypeError(
            f"function must be a module, a loss or any callable, got {type(function).__name__}; pass MyFunction.apply, "
            "not MyFunction."
        )
    if loss is not None and not callable(loss):
        raise ArgumentTypeError(f"loss must be callable, got {type(loss).__name__}; pass a function of the output.")
    if tolerance is not None:
        check_number("tolerance", tolerance, example=1e-3)
    scalar = ScalarFunction(function, inputs if isinstance(inputs, tuple) else (inputs,), loss)
    with scalar.undisturbed():
        scalar.differentiate()
        wanted = [name for name in scalar.leaves if (sparse if name in scalar.sparse else dense)]
        least = MINIMUM if tolerance is None else float(tolerance)
        checks = _Comparison(scalar, least).check_all(wanted)
    return GradientCheck({name: checks[name] for name in wanted}, least)


class _Comparison:
    """Compares the slopes of a scalar function along lines with what its gradients say."""

    def __init__(self, scalar: ScalarFunction, least: float) -> None:
        self._scalar, self._least = scalar, least

    def check_all(self, names: Sequence[str]) -> dict[str, ParameterCheck]:
        """Compare the derivatives of several leaves: those of like sensitivity together where they are many."""
        if len(names) <= GROUP:
            return {name: self._check(name) for name in names}
        ordered = sorted(names, key=self._sensitivity)
        groups: list[list[str]] = []
        for name in ordered:
            first = groups[-1][0] if groups else name
            if groups and self._sensitivity(name) <= SPREAD * self._sensitivity(first):
                groups[-1].append(name)
            else:
                groups.append([name])
        return {name: check for group in groups for name, check in self._halve(group).items()}

    def _halve(self, names: Sequence[str]) -> dict[str, ParameterCheck]:
        """Compare leaves of like sensitivity together, and by halves where that is not well."""
        if len(names) == 1:
            return {names[0]: self._check(names[0])}
        least = min(self._sensitivity(name) for name in names)
        # Each leaf is to weigh as much as the others, or the error of one with small gradients would not show.
        weights = {name: least / self._sensitivity(name) if least else 1.0 for name in names}
        checks = []
        for _ in range(LINES_TOGETHER):
            lines = {name: self._scalar.noise_like(name) * weight for name, weight in weights.items()}
            checks.append(self._compare(lines, attempts=1))
            if not checks[-1].passed:
                half = len(names) // 2
                return {**self._halve(names[:half]), **self._halve(names[half:])}
        return dict.fromkeys(names, max(checks, key=lambda check: check.relative_error))

    def _check(self, name: str) -> ParameterCheck:
        """Compare the derivatives of one leaf; of several lines the worst counts."""
        gradient = self._scalar.gradients[name]
        count = gradient.numel()
        lines = (
            (self._compare({name: line}) for line in torch.eye(count, dtype=torch.float64, device=gradient.device))
            if count < EXACT_BELOW
            else (self._compare({name: self._line(name, leaning=number == 0)}) for number in range(LINES))
        )
        return max(
            lines,
            key=lambda check: (not check.passed, check.relative_error),
            default=ParameterCheck(0.0, True, 0.0, 0.0),
        )

    def _line(self, name: str, *, leaning: bool) -> Tensor:
        noise, gradient = self._scalar.noise_like(name), self._scalar.gradients[name]
        size = root_mean_square(gradient)
        if not leaning or not 0 < size < math.inf:
            return noise
        line = noise + gradient / size
        return line / root_mean_square(line)

    def _sensitivity(self, name: str) -> float:
        """Return by how much the value changes on average where all entries change by a share of their size."""
        return float(self._scalar.gradients[name].norm()) * self._scalar.sizes[name]

    def _compare(self, lines: Mapping[str, Tensor], attempts: int = ATTEMPTS) -> ParameterCheck:
        """Compare the slope along a line through leaves; where it does not agree, at other points too."""
        scalar, place = self._scalar, self._scalar.place()
        best: ParameterCheck | None = None
        for attempt in range(attempts):
            if attempt:
                scalar.move()
            check = replace(self._at_this_point(lines), kinks=attempt)
            if best is None or (check.passed, check.settled, -check.tolerance) > (
                best.passed,
                best.settled,
                -best.tolerance,
            ):
                best = check
            if check.passed or not math.isfinite(check.analytic):
                break
        if attempt:
            scalar.go_back(place)
        assert best is not None
        return best

    def _at_this_point(self, lines: Mapping[str, Tensor]) -> ParameterCheck:
        scalar = self._scalar
        lines = {name: line.reshape(scalar.gradients[name].shape) * scalar.sizes[name] for name, line in lines.items()}
        pairs = [(scalar.gradients[name], line) for name, line in lines.items()]
        analytic = math.fsum(float((gradient * line).sum()) for gradient, line in pairs)
        # What a line of this length has on average: one that happens to be level says little of a relative error.
        usual = math.hypot(*(float(g.norm()) * root_mean_square(line) for g, line in pairs))
        overall = max(map(self._sensitivity, scalar.gradients))
        best: Slope | None = None
        for slope in slopes(functools.partial(scalar.along, lines), scalar.middle, scalar.magnitude):
            if not math.isfinite(slope.noise):
                continue
            if best is None or slope.noise < best.noise:
                best = slope
            enough = self._least * max(abs(analytic), abs(slope.value), usual)
            if abs(analytic - slope.value) <= enough:
                best = slope
                break
            if MULTIPLE * slope.noise <= enough:  # clearly wrong
                break
        if best is None or not math.isfinite(analytic):
            return ParameterCheck(math.inf, False, analytic, math.nan if best is None else best.value, settled=False)
        size, off = max(abs(analytic), abs(best.value), usual), abs(analytic - best.value)
        well = off <= self._least * size
        allowed = self._least * size if well else max(self._least * size, MULTIPLE * best.noise)
        settled = well or allowed <= SETTLED * max(size, overall) or best.noise <= 3 * best.rounding
        passed = off <= allowed and settled
        lost = passed and size <= MULTIPLE * best.noise
        error = 0.0 if lost or not size else off / size
        return ParameterCheck(
            error, passed, analytic, best.value, tolerance=allowed / size if size else self._least, settled=settled
        )
