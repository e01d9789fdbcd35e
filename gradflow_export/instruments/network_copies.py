"""Networks of one model that begin with the same weights, as a target network does with those of the one it follows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from gradflow_export.metrics.arrays.samples import even_sample

ENTRIES = 256
"""Entries of a parameter by which one that varies is told from one that is filled with a number."""


def alike(model: nn.Module) -> list[tuple[nn.Module, nn.Module]]:
    """Return pairs of modules whose trained parameters have the same names and shapes, outermost ones only.

    Members of one list of layers are no pair, nor are three modules that are alike: both are layers of one network.
    """
    modules = list(model.modules())
    kinds: dict[object, int] = {}
    kind: dict[int, int] = {}
    listed: dict[int, int] = {}
    for module in reversed(modules):  # children come before their parents
        children = [(name, child) for name, child in module.named_children() if kind.get(id(child), -1) >= 0]
        if isinstance(module, (nn.ModuleList, nn.Sequential)):
            listed.update((id(child), id(module)) for _, child in children)
        own = tuple(_described(name, p) for name, p in module.named_parameters(recurse=False) if p.requires_grad)
        key = own, tuple((name, kind[id(child)]) for name, child in children)
        kind[id(module)] = kinds.setdefault(key, len(kinds)) if own or children else -1
    groups: dict[int, list[nn.Module]] = defaultdict(list)
    for module in modules:
        groups[kind[id(module)]].append(module)
    groups.pop(-1, None)
    paired: set[int] = set()
    out: list[tuple[nn.Module, nn.Module]] = []
    for module in modules:
        group = groups.get(kind[id(module)], [])
        if id(module) in paired or len(group) != 2:
            continue
        one, other = group
        paired |= {id(inner) for outer in group for inner in outer.modules()}
        together = listed.get(id(one), one) == listed.get(id(other), other)
        if not together and not {id(p) for p in one.parameters()} & {id(p) for p in other.parameters()}:
            out.append((one, other))
    return out


def _described(name: str, parameter: Tensor) -> tuple[object, ...]:
    return name, tuple(parameter.shape), parameter.dtype, parameter.device


def copied(model: nn.Module, sums: Mapping[int, Tensor]) -> Iterator[tuple[list[Tensor], list[Tensor], Tensor]]:
    """Yield the parameters of modules that are alike, and whether they hold the same, without waiting for a device.

    Args:
        model: The unwrapped model.
        sums: Checksums of its parameters by their ``id``; a pair without all of them is left out.

    Yields:
        The trained parameters of both, in one order, and a scalar of booleans: whether all bits are the same, and any
        of the parameters is not filled with one number.
    """
    for pair in alike(model):
        one, other = ([p for p in module.parameters() if p.requires_grad] for module in pair)
        if all(id(p) in sums for p in (*one, *other)):
            same = [sums[id(a)] == sums[id(b)] for a, b in zip(one, other, strict=True)]
            varies = [_varies(p).to(same[0].device) for p in one]
            yield one, other, torch.stack([each.to(same[0].device) for each in same]).all() & torch.stack(varies).any()


def _varies(parameter: Tensor) -> Tensor:
    entries = even_sample(parameter, ENTRIES)
    return (entries != entries[:1]).any()
