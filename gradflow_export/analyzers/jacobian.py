"""The Jacobian of each block for one sample: radius, conditioning, rank, gain."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gradflow_export.analyzers.objective import Objective
from gradflow_export.analyzers.vector import twice_differentiable
from gradflow_export.errors import MissingPackageError
from gradflow_export.hooks.chains import NamedModule
from gradflow_export.hooks.module_calls import output_tensor
from gradflow_export.metrics.jacobian import Linearized, Spectrum, spectrum
from gradflow_export.rules.base import number

BLOCKS = 32
"""Blocks that are examined at most, evenly chosen."""

LOW_RANK = 0.1
TRANSIENT = 10.0


@dataclass(frozen=True)
class BlockJacobian:
    """The Jacobian of one block's output by its input, for the first sample of a batch.

    Attributes:
        name: The block.
        spectrum: What was found, ``None`` where the Jacobian cannot be had.
        note: Why it cannot.
    """

    name: str
    spectrum: Spectrum | None
    note: str = ""

    def line(self) -> str:
        """Return the measurements as text."""
        s = self.spectrum
        if s is None:
            return f"  {self.name:<20} {self.note}"
        words = [f"{s.rows} x {s.columns}", f"gain {number(s.gain)}", f"sigma_max {number(s.greatest)}"]
        if not math.isnan(s.spectral_radius):
            words.append(f"radius {number(s.spectral_radius)}")
        words.append(f"condition {'>= ' if s.bounded else ''}{number(s.condition)}")
        if not math.isnan(s.effective_rank):
            low = " (low)" if s.effective_rank < LOW_RANK * min(s.rows, s.columns) else ""
            words.append(f"rank {number(s.effective_rank)}{low}")
        if s.transient > TRANSIENT:
            words.append(f"grows {number(s.transient)}-fold before it decays (non-normal)")
        return f"  {self.name:<20} " + ", ".join(words)


@dataclass(frozen=True)
class JacobianFlow:
    """The Jacobians of the blocks, in depth order."""

    blocks: tuple[BlockJacobian, ...]

    def lines(self) -> list[str]:
        """Return the measurements as text."""
        return ["Jacobian analysis (one sample; healthy: gain and radius near 1)", *(b.line() for b in self.blocks)]

    def __getitem__(self, name: str) -> Spectrum | None:
        """Return the spectrum of a block by its name."""
        return {block.name: block.spectrum for block in self.blocks}[name]


def examine_blocks(objective: Objective, blocks: Sequence[NamedModule]) -> JacobianFlow:
    """Measure the Jacobian of each block in one forward pass.

    Each block sees its input cut off from what came before, and only its first sample may vary; batch statistics and
    the masks of dropout are those of the whole batch.

    Args:
        objective: Inputs and model.
        blocks: Names and modules; at most ``BLOCKS`` of them are examined.
    """
    chosen = blocks[:: -(-len(blocks) // BLOCKS) or 1]
    seen: dict[str, tuple[Tensor, Tensor]] = {}
    with twice_differentiable(), _watched(chosen, seen):
        objective.evaluate(objective.input_fn())
        return JacobianFlow(tuple(_measure(name, seen.get(name)) for name, _ in chosen))


def _measure(name: str, pair: tuple[Tensor, Tensor] | None) -> BlockJacobian:
    if pair is None:
        return BlockJacobian(name, None, "was not called with a floating tensor, or gave none back")
    try:
        found = spectrum(Linearized([pair[0]], [pair[1]]))
    except (RuntimeError, np.linalg.LinAlgError, MissingPackageError) as error:
        return BlockJacobian(name, None, str(error).splitlines()[0])
    return BlockJacobian(name, found)


@contextlib.contextmanager
def _watched(blocks: Sequence[NamedModule], seen: dict[str, tuple[Tensor, Tensor]]) -> Iterator[None]:
    leaves: dict[str, Tensor] = {}
    with contextlib.ExitStack() as stack:
        for name, module in blocks:
            before = module.register_forward_pre_hook(partial(_enter, name, leaves), with_kwargs=True)
            stack.callback(before.remove)
            stack.callback(module.register_forward_hook(partial(_leave, name, leaves, seen)).remove)
        yield


def _enter(
    name: str, leaves: dict[str, Tensor], _module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Let the block's first floating argument begin a graph of its own."""
    positional, named = list(args), dict(kwargs)
    for holder, keys in ((positional, range(len(positional))), (named, list(named))):
        for key in keys:
            value = holder[key]  # type: ignore[index]
            if isinstance(value, Tensor) and value.is_floating_point():
                holder[key] = _opened(name, leaves, value)  # type: ignore[index]
                return tuple(positional), named
    return args, named


def _opened(name: str, leaves: dict[str, Tensor], value: Tensor) -> Tensor:
    value = value.detach()
    batched = value.dim() > 1
    leaf = leaves[name] = (value[:1] if batched else value).clone().requires_grad_()
    # A copy: the block may work in place, which a leaf does not allow.
    return torch.cat([leaf, value[1:]]) if batched else leaf.clone()


def _leave(
    name: str,
    leaves: dict[str, Tensor],
    seen: dict[str, tuple[Tensor, Tensor]],
    _module: nn.Module,
    _args: Any,
    output: Any,
) -> None:
    leaf, tensor = leaves.get(name), output_tensor(output)
    if leaf is not None and tensor is not None and name not in seen:
        # A copy, because the next block may change the output in place.
        seen[name] = leaf, (tensor[:1] if leaf.dim() > 1 and tensor.dim() > 1 else tensor).clone()
