"""Finds two layers in a row with no activation between them, whose middle is used by nothing else."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from gradflow_export.autograd_graph.layer_graph import LOOKUPS, Straight, is_factor, is_straight
from gradflow_export.autograd_graph.loss_graph import LAYERS, through_shapes
from gradflow_export.autograd_graph.loss_shape import adds_bias
from gradflow_export.autograd_graph.nodes import ATTENTION, Op, below, kind_of, takers_in
from gradflow_export.hooks import torch_private
from gradflow_export.rules.signals import owner

Node = Any
_PASSED = frozenset(
    [
        Op.ALIAS,
        Op.CLONE,
        Op.CUDNN_BATCH_NORM,
        Op.NATIVE_BATCH_NORM,
        Op.NATIVE_DROPOUT,
        Op.RESHAPE_ALIAS,
        Op.SQUEEZE,
        Op.TO_COPY,
        Op.UNSAFE_VIEW,
        Op.UNSQUEEZE,
        Op.VIEW,
    ]
)
_JOINED = frozenset((Op.ADD, Op.CAT, Op.STACK))
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True)
class Pair:
    """Two layers that are one.

    Attributes:
        first: Name of the module that comes first.
        second: Of the one behind it.
        width: Features between them, as a multiple of the lesser of those that enter and leave.
    """

    first: str
    second: str
    width: float


def pairs_of(made: list[tuple[Node, str]], root: Node, modules: Mapping[str, nn.Module]) -> tuple[Pair, ...]:
    """Return the pairs of layers that follow each other directly and could be one without loss.

    Both are linear layers, or convolutions of the same kernel without groups, of one parent module; where modules meet,
    what one hands to the other may be wanted elsewhere. The middle is at least as wide as one end, so that it is no
    factorisation of low rank, and nothing else in the whole graph takes it. Unless it is wider than both ends, nothing
    may be added to what the second gives out, as is done with adapters, and the first must not be given entries of a
    table that is narrower than both its number of entries and what the second gives out: all three are then one
    factorisation of low rank. Projections of attention are left out.

    Args:
        made: Nodes of layers, with the names of their modules.
        root: Node of the loss.
        modules: By name.
    """
    by_node = {node: name for node, name in made if _plain(modules.get(name))}
    uses: dict[str, int] = defaultdict(int)
    chains: dict[tuple[str, str], list[list[Node]]] = defaultdict(list)
    for node, name in by_node.items():
        uses[name] += 1
        chain = _chain(node, by_node)
        if chain and _alike(by_node[chain[-1]], name, modules):
            chains[by_node[chain[-1]], name].append(chain)
    candidates = {
        pair: each
        for pair, each in chains.items()
        if pair[0] != pair[1] and len(each) == uses[pair[0]] == uses[pair[1]]
    }
    if not candidates:
        return ()
    takers = takers_in(root) or {}
    return tuple(
        Pair(*names, width=_width(modules[names[0]], modules[names[1]]))
        for names, each in candidates.items()
        if all(len(takers.get(node, ())) == 1 for chain in each for node in chain[1:])
        and (
            _wide(modules[names[0]], modules[names[1]])
            or not (_is_added((c[0] for c in each), takers) or any(_factors(c, modules[names[1]]) for c in each))
        )
    )


def _plain(module: nn.Module | None) -> bool:
    if isinstance(module, _CONVOLUTIONS):
        return module.groups == 1 and len({*module.kernel_size}) == 1
    return isinstance(module, nn.Linear) and not isinstance(module, torch_private.AttentionOutput)


def _chain(node: Node, known: Mapping[Node, str]) -> list[Node]:
    """Return the nodes from one layer down to the one before it, ``[]`` where anything else is between them."""
    chain = [node]
    here = below(node, LAYERS[kind_of(node)][1])
    while here is not None and here not in known:
        kind = kind_of(here)
        factor = kind in {Op.DIV, Op.MUL} and is_factor(here)
        if not (factor or kind in _PASSED or is_straight(here) or adds_bias(here)):
            return []
        chain.append(here)
        here = below(here) if below(here) is not None else below(here, 1)
    if here is None:
        return []
    source = kind_of(through_shapes(below(here, LAYERS[kind_of(here)][1])))
    return [] if source == Op.BMM or source.startswith(ATTENTION) else [*chain, here]


def _alike(first: str, second: str, modules: Mapping[str, nn.Module]) -> bool:
    """Whether two layers are of one kind and one parent, fit directly, and their middle expresses no low rank."""
    a, b = modules[first], modules[second]
    if not (_owns_weight(a) and _owns_weight(b) and owner(first) == owner(second) and _sizes(a)[1] == _sizes(b)[0]):
        return False
    kinds = [(getattr(each, "kernel_size", ()), getattr(each, "dilation", ())) for each in (a, b)]
    return kinds[0] == kinds[1] and _width(a, b) >= 1.0


def _owns_weight(module: nn.Module) -> bool:
    """Whether the weight is a parameter: to look at one that is computed may change it (``spectral_norm``)."""
    return any(name == "weight" for name, _ in module.named_parameters(recurse=False))


def _sizes(module: nn.Module) -> tuple[int, int]:
    """Return how many features, or channels, enter and leave."""
    weight: Any = module.weight
    return int(weight.shape[1]), int(weight.shape[0])


def _width(a: nn.Module, b: nn.Module) -> float:
    return _sizes(a)[1] / max(min(_sizes(a)[0], _sizes(b)[1]), 1)


def _wide(a: nn.Module, b: nn.Module) -> bool:
    return _sizes(a)[1] > max(_sizes(a)[0], _sizes(b)[1])


def _factors(chain: list[Node], second: nn.Module) -> bool:
    """Whether what enters the first layer are entries of a table that make one factorisation with both layers."""
    table = through_shapes(below(chain[-1], LAYERS[kind_of(chain[-1])][1]))
    entries = getattr(below(table), "variable", None) if kind_of(table) in LOOKUPS else None
    return entries is not None and entries.dim() == 2 and entries.shape[1] < min(entries.shape[0], _sizes(second)[1])


def _is_added(results: Iterable[Node], takers: Mapping[Node, list[Node]]) -> bool:
    """Whether what the second layer gives out is added to, or put beside, something else."""
    for result in results:
        node = result
        while len(takers.get(node, ())) == 1 and (kind_of(takers[node][0]) in _PASSED or adds_bias(takers[node][0])):
            node = takers[node][0]
        if any(kind_of(taker) in _JOINED and not adds_bias(taker) for taker in takers.get(node, ())):
            return True
    return False


def row_length(run: tuple[Straight, ...]) -> int:
    """Return how many layers stand in a row without need, 1 where each narrows what the next one widens.

    Such a factorisation of low rank is made on purpose; any other hidden layer adds nothing to a single one.
    """
    idle = any(a.outputs >= min(a.inputs, b.outputs) for a, b in itertools.pairwise(run))
    return len(run) if idle else min(len(run), 1)
