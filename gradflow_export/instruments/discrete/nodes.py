"""Nodes, which have a phase and a magnitude: rows of complex weights, of two named tensors, or of real weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gradflow_export.errors import ArgumentError, ArgumentTypeError, nearest
from gradflow_export.metrics.phase import (
    node_sizes,
    polar_changes,
    polar_gradients,
    row_changes,
    row_gradients,
    row_turns,
    wrap,
)

Pairs = Iterable[tuple[str, str]] | Literal["rows"] | None
ROWS: Literal["rows"] = "rows"


@dataclass(frozen=True)
class Moved:
    """Some rows of one tensor in one step, in double precision.

    Attributes:
        before: Weights as the forward pass before the step used them. Shape: ``[rows, entries]``.
        after: Weights as the next forward pass used them. Shape: that of ``before``.
        gradient: The gradient that was used; ``None`` for a tensor that has none. Shape: that of ``before``.
    """

    before: Tensor
    after: Tensor
    gradient: Tensor | None


@dataclass(frozen=True)
class Nodes:
    """What one tensor of nodes did in one step, node by node.

    Attributes:
        phase: Size of the gradient of the phase; ``None`` where there are no gradients. Shape: ``[nodes]``.
        magnitude: Size of the gradient of the magnitude; ``None`` with ``phase``. Shape: ``[nodes]``.
        phase_change: By how much the node turned. Shape: ``[nodes]``. Unit: radian.
        magnitude_change: Size of the change of the magnitude. Shape: ``[nodes]``.
        changed: Whether the node is another. Shape: ``[nodes]``.
    """

    phase: Tensor | None
    magnitude: Tensor | None
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
        turns = row_turns(wrap(own.after - own.before))
        grown = node_sizes(magnitude.after - magnitude.before)
    elif own.before.is_complex():
        angles, lengths = polar_changes(own.before, own.after)
        # An entry that is 0 has no phase; among the others it would make the row's turn look smaller.
        turns, grown = row_turns(angles, (own.before != 0) & (own.after != 0)), node_sizes(lengths)
    else:
        turns, longer = row_changes(own.before, own.after)
        grown = longer.abs()
    phase, along = _gradients(own, magnitude)
    return Nodes(phase, along, turns, grown, changed)


def _gradients(own: Moved, magnitude: Moved | None) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """Return the sizes of the gradients of phase and magnitude, node by node."""
    if own.gradient is None or (magnitude is not None and magnitude.gradient is None):
        return None, None
    if magnitude is not None and magnitude.gradient is not None:
        return node_sizes(own.gradient), node_sizes(magnitude.gradient)
    if own.before.is_complex():
        phase, along = polar_gradients(own.before, own.gradient)
        return node_sizes(phase), node_sizes(along)
    across, along = row_gradients(own.before, own.gradient)
    return across, along.abs()


def joined(nodes: Iterable[Nodes], limit: int) -> tuple[Tensor, Tensor] | None:
    """Return phase and magnitude gradients of all nodes, evenly thinned. Shape of both: ``[<= limit]``.

    ``None`` where no node has a gradient.
    """
    every = [(n.phase, n.magnitude) for n in nodes if n.phase is not None and n.magnitude is not None]
    if not every:
        return None
    device = every[0][0].device
    phase, magnitude = (torch.cat([sides[which].to(device) for sides in every]) for which in (0, 1))
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
