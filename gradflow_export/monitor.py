"""GradientGainMonitor: how the gradient grows or shrinks from block to block, for one backward pass at a time."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

from torch import nn

from gradflow_export.errors import ArgumentError, ArgumentTypeError, check_flag, nearest
from gradflow_export.hooks.discover import check_blocks
from gradflow_export.hooks.gradient_hooks import GradientStore
from gradflow_export.hooks.module_calls import ModuleCalls, output_tensor
from gradflow_export.metrics.gains import AMPLIFYING, DAMPING, EPS, gains, log_gains, summary_stats
from gradflow_export.writers.gain_advice import gain_advice

if TYPE_CHECKING:
    from typing_extensions import Self

NORM_TYPES = ("l2", "l1", "linf", "mean")


class GradientGainMonitor:
    """Measures gradient norms ``||dL/dh_i||`` at block outputs and the backward gains between consecutive blocks.

    The gain of block i is ``gamma_i = ||dL/dh_{i-1}|| / ||dL/dh_i||``. Above 1 the gradient grows in the backward pass,
    below 1 it shrinks, near 1 it is preserved, which is often healthy in residual networks. The monitor only measures.
    The forward and the backward pass must run while it is open:

    >>> import torch
    >>> blocks = torch.nn.ModuleList(torch.nn.Identity() for _ in range(3))
    >>> with GradientGainMonitor(blocks) as monitor:
    ...     x = torch.ones(2, 4, requires_grad=True)
    ...     for block in blocks:
    ...         x = 2 * block(x)
    ...     x.sum().backward()
    ...     monitor.gains()
    [2.0, 2.0]

    Args:
        blocks: Separate modules in depth order: a list, ``nn.ModuleList`` or ``nn.Sequential``. Outputs may be tensors,
            tuples, lists or mappings (Hugging Face).
        norm_type: ``"l2"``, ``"l1"``, ``"linf"`` or ``"mean"`` (mean absolute value: invariant to size, not to scale).
        strict_single_backward: True: a second gradient for a block without :meth:`reset` raises RuntimeError in
            ``backward()``. False: it overwrites the first.
        eps: Norms below this count as zero.

    Raises:
        ArgumentTypeError: ``blocks`` contains an object that is not a module.
        ArgumentError: ``blocks`` is empty or holds a module twice, ``norm_type`` is unknown, ``eps`` is not positive.
    """

    def __init__(
        self,
        blocks: Iterable[nn.Module],
        norm_type: str = "l2",
        strict_single_backward: bool = True,
        eps: float = EPS,
    ) -> None:
        modules = _as_modules(blocks)
        check_flag("strict_single_backward", strict_single_backward)
        if norm_type not in NORM_TYPES:
            raise ArgumentError(f"unknown norm_type {norm_type!r}{nearest(str(norm_type), NORM_TYPES)}")
        if not (isinstance(eps, (int, float)) and 0 < eps < math.inf):
            raise ArgumentError(f"eps must be a positive number, got {eps!r}; the default is {EPS}.")
        self.norm_type = norm_type
        self.strict_single_backward = strict_single_backward
        self.eps = float(eps)
        self.num_blocks = len(modules)
        names = [type(module).__name__ for module in modules]
        repeat: Any = "raise" if strict_single_backward else "overwrite"
        self._seen = False
        self._store = GradientStore(names, norm_type=norm_type, repeat=repeat)
        self._calls = ModuleCalls()
        for index, module in enumerate(modules):
            self._calls.add(module, partial(self._called, index))
        self._hooks: contextlib.ExitStack = self._calls.attach()
        self._calls.arm()

    def _called(self, index: int, _module: nn.Module, _args: Any, output: Any) -> None:
        self._seen = True
        tensor = output_tensor(output)
        if tensor is not None:
            self._store.watch(index, tensor)

    def __len__(self) -> int:
        """Return the number of blocks."""
        return self.num_blocks

    def norms(self) -> list[float | None]:
        """Return the gradient norm at each block's output, ``None`` where none arrived. Shape: ``[num_blocks]``.

        Raises:
            RuntimeError: No gradient has arrived at any block since the monitor was created or :meth:`reset`. The other
            reading methods raise it too.
        """
        arrived = self._store.norms()
        if not arrived:
            raise RuntimeError(self._why_nothing())
        return [float(arrived[index]) if index in arrived else None for index in range(self.num_blocks)]

    def _why_nothing(self) -> str:
        """Return what is missing where no gradient has arrived."""
        came = f"expected a backward pass through the {len(self)} blocks, but no gradient has arrived at any of them"
        if self._seen:
            return (
                f"{came} since the monitor was made or reset. Call loss.backward() first; if it was called, the loss "
                "does not depend on these blocks, or nothing in or before them requires a gradient."
            )
        return (
            f"{came}, and none was called with gradients enabled while the monitor was open. Run the forward pass "
            "inside the with statement too, and then loss.backward()."
        )

    def gains(self) -> list[float | None]:
        """Return the gain of each transition.

        Returns:
            ``None`` if either norm is missing, inf where the denominator is below ``eps``. Shape: ``[num_blocks - 1]``.
        """
        return gains(self.norms(), self.eps)

    def log_gains(self) -> list[float | None]:
        """Return the natural logarithms of the gains, computed from clamped norms. Shape: ``[num_blocks - 1]``."""
        return log_gains(self.norms(), self.eps)

    def summary_stats(self) -> dict[str, float | int]:
        """Return means over finite gains (NaN when there is none) and counts that add up to ``num_blocks - 1``.

        Returns:
            ``mean_gain``, ``min_gain``, ``max_gain``, ``mean_log_gain``, ``num_amplifying`` (> 2), ``num_damping``
            (< 0.5), ``num_healthy``, ``num_vanishing`` (inf), ``num_missing`` (``None``) and ``num_nonfinite``.
        """
        return summary_stats(self.norms(), self.eps)

    def report(self) -> str:
        """Return norms, gains with heuristic labels, and summary statistics as text.

        If most transitions damp or amplify the gradient, the report ends with fixes.
        """
        norms = self.norms()
        lines = [
            "Gradient Flow Report",
            "=" * 60,
            f"Gradient Norms ({self.norm_type}, at block outputs):",
            *(f"  Block {index:2d}: {_number(value)}" for index, value in enumerate(norms)),
            "",
            "Gradient Gains (ratio of consecutive norms):",
        ]
        pairs = zip(gains(norms, self.eps), log_gains(norms, self.eps), strict=True)
        for index, (gain, log_gain) in enumerate(pairs):
            where = f"  Transition {index:2d} to {index + 1:2d}: "
            if gain is None or log_gain is None:
                lines.append(f"{where}no gradient [MISSING]")
            else:
                # An infinite norm makes a gain of 0 or inf that says nothing; it is counted apart too.
                broken = any(n is not None and not math.isfinite(n) for n in norms[index : index + 2])
                word = label(math.nan if broken else gain)
                lines.append(f"{where}gamma={gain:.4f}, log_gamma={log_gain:.4f} [{word}]")
        lines += ["", *_summary_lines(summary_stats(norms, self.eps))]
        told, *advice = gain_advice(gains(norms, self.eps)) or ("",)
        return "\n".join([*lines, *(["", told, *(f"  - {what}" for what in advice)] if told else [])])

    def reset(self) -> None:
        """Clear the recorded gradients; call it before the next backward pass."""
        self._store.clear()

    def close(self) -> None:
        """Remove the hooks; calling it again does nothing. What was recorded can still be read."""
        self._hooks.close()

    def __enter__(self) -> Self:
        """Return the monitor."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()


def label(gain: float) -> str:
    """Return the heuristic label of a gain."""
    if math.isnan(gain):
        return "NONFINITE"
    if math.isinf(gain):
        return "VANISHING"
    return "AMPLIFYING" if gain > AMPLIFYING else "DAMPING" if gain < DAMPING else "Healthy"


def _number(value: float | None) -> str:
    return "no gradient" if value is None else f"{value:.6e}"


def _summary_lines(stats: dict[str, float | int]) -> list[str]:
    return [
        "Summary Statistics:",
        f"  Mean gain: {stats['mean_gain']:.4f}",
        f"  Min gain: {stats['min_gain']:.4f}",
        f"  Max gain: {stats['max_gain']:.4f}",
        f"  Mean log-gain: {stats['mean_log_gain']:.4f}",
        f"  Amplifying (gamma > {AMPLIFYING}): {stats['num_amplifying']}",
        f"  Damping (gamma < {DAMPING}): {stats['num_damping']}",
        f"  Healthy ({DAMPING} <= gamma <= {AMPLIFYING}): {stats['num_healthy']}",
        f"  Vanishing (gamma = inf): {stats['num_vanishing']}",
        f"  Missing (no gradient): {stats['num_missing']}",
        f"  Non-finite norms: {stats['num_nonfinite']}",
        "Labels are heuristic: 0.5 and 2.0 may need adjusting for your model.",
    ]


def _as_modules(blocks: Iterable[nn.Module]) -> list[nn.Module]:
    if isinstance(blocks, nn.Module) and not isinstance(blocks, (nn.ModuleList, nn.Sequential)):
        raise ArgumentTypeError(
            f"blocks must be a list, nn.ModuleList or nn.Sequential of modules, got a single {type(blocks).__name__}; "
            "pass its blocks, for example model.blocks."
        )
    try:
        modules = list(blocks)
    except TypeError:
        raise ArgumentTypeError(
            f"blocks must be a list, nn.ModuleList or nn.Sequential of modules, got {type(blocks).__name__}."
        ) from None
    for index, module in enumerate(modules):
        if not isinstance(module, nn.Module):
            raise ArgumentTypeError(f"blocks[{index}] must be a torch.nn.Module, got {type(module).__name__}.")
    check_blocks([(str(index), module) for index, module in enumerate(modules)])
    return modules
