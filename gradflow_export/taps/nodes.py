"""Nodes, which have a phase and a magnitude: rows of complex weights, of two named tensors, or of real weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gradflow_export.errors import ArgumentError, ArgumentTypeError, nearest
from gradflow_export.metrics.phase import node_sizes, polar_changes, polar_gradients, row_changes, row_gradients, wrap

Pairs = Iterable[tuple[str, str]] | Literal["rows"] | None
ROWS: Literal["rows"] = "rows"


@dataclass(frozen=True)
class Moved:
    """Some rows of one parameter in one step, in double precision.

    Attributes:
        before: Weights before the step. Shape: ``[rows, entries]``.
        after: Weights after it. Shape: that of ``before``.
        gradient: The gradient that was used. Shape: that of ``before``.
    """

    before: Tensor
    after: Tensor
    gradient: Tensor


@dataclass(frozen=True)
class Nodes:
    """What one tensor of nodes did in one step, node by node.

    Attributes:
        phase: Size of the gradient of the phase. Shape: ``[nodes]``.
        magnitude: Size of the gradient of the magnitude. Shape: ``[nodes]``.
        phase_change: Size of the change of the phase. Shape: ``[nodes]``.
        magnitude_change: Size of the change of the magnitude. Shape: ``[nodes]``.
        changed: Whether a single bit of the node is another. Shape: ``[nodes]``.
    """

    phase: Tensor
    magnitude: Tensor
    phase_change: Tensor
    magnitude_change: Tensor
    changed: Tensor


def nodes_of(own: Moved, magnitude: Moved | None = None) -> Nodes:
    """Return the nodes of one tensor.

    Args:
        own: Complex weights, real weights whose rows are taken as direction and length, or the phase of a pair.
        magnitude: The magnitude of the pair.
    """
    changed = (own.before != own.after).any(dim=1)
    if magnitude is not None:
        changed = changed | (magnitude.before != magnitude.after).any(dim=1)
        gradients = own.gradient, magnitude.gradient
        changes = wrap(own.after - own.before), magnitude.after - magnitude.before
    elif own.before.is_complex():
        gradients, changes = polar_gradients(own.before, own.gradient), polar_changes(own.before, own.after)
    else:
        gradients, changes = row_gradients(own.before, own.gradient), row_changes(own.before, own.after)
    sizes = [values.abs() if values.dim() == 1 else node_sizes(values) for values in (*gradients, *changes)]
    return Nodes(sizes[0], sizes[1], sizes[2], sizes[3], changed)


def joined(nodes: Iterable[Nodes], limit: int) -> tuple[Tensor, Tensor]:
    """Return phase and magnitude gradients of all nodes, evenly thinned. Shape of both: ``[<= limit]``."""
    every = list(nodes)
    device = every[0].phase.device
    phase = torch.cat([n.phase.to(device) for n in every])
    magnitude = torch.cat([n.magnitude.to(device) for n in every])
    stride = -(-phase.numel() // limit)
    return phase[::stride], magnitude[::stride]


def check_pairs(named: Mapping[str, Tensor], pairs: Pairs) -> tuple[tuple[str, str], ...]:
    """Return the pairs that were named, none for ``"rows"`` and ``None``.

    Raises:
        ArgumentError: A name is no parameter's, or two parameters of a pair differ in shape or are complex.
        ArgumentTypeError: ``pairs`` holds something other than two names.
    """
    if pairs is None or (isinstance(pairs, str) and pairs == ROWS):
        return ()
    if isinstance(pairs, str) or not isinstance(pairs, Iterable):
        raise ArgumentError(
            f'pairs must be "rows" or pairs of parameter names, got {pairs!r}; for example [("phase", "magnitude")].'
        )
    out = []
    for pair in pairs:
        if isinstance(pair, str) or not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise ArgumentTypeError(
                f'pairs must hold two parameter names each, phase first, got {pair!r}; for example ("phase", "size").'
            )
        for name in pair:
            if name not in named:
                raise ArgumentError(f"pairs names {name!r}, which is no parameter of the model{nearest(name, named)}")
        phase, magnitude = named[pair[0]], named[pair[1]]
        if phase.shape != magnitude.shape or phase.is_complex() or magnitude.is_complex():
            raise ArgumentError(
                f"the two parameters of a pair must be real and of one shape; {pair[0]!r} is {tuple(phase.shape)}, "
                f"{pair[1]!r} is {tuple(magnitude.shape)}. A complex parameter needs no pair."
            )
        out.append((str(pair[0]), str(pair[1])))
    return tuple(out)
