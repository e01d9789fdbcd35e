"""Finds objects by what they hold.

A list of all objects, as ``gc.get_objects`` returns it, also holds tuples that another thread is still building, and
CPython then fails in that thread with a ``SystemError``. Here only what refers to the objects in question is looked at.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from typing import TypeVar

from torch import Tensor
from torch.optim.optimizer import Optimizer

FEW = 4
"""Parameters whose holders are looked for at once."""

_FOLLOWED = frozenset({list, dict, tuple})

Kind = TypeVar("Kind")


def holders(things: Iterable[object], kind: type[Kind], depth: int) -> list[Kind]:
    """Return the objects of a type that hold one of some things, directly or in containers.

    Args:
        things: Few of them: each is compared with every reference there is.
        kind: The type, or a base of it.
        depth: Greatest number of references on the way, those of containers and of an object's own dictionary included.
    """
    found: dict[int, Kind] = {}
    known: set[int] = set()
    frontier = list(things)
    for _ in range(depth):
        if not frontier:
            break
        around = gc.get_referrers(*frontier)
        before, frontier = frontier, []
        for each in around:
            if each is before or id(each) in known:
                continue
            known.add(id(each))
            if kind in type(each).__mro__:  # asking an object for its class may run code of its owner
                found[id(each)] = each
            elif type(each) in _FOLLOWED:
                frontier.append(each)
        del around
    return list(found.values())


def optimizers_holding(parameters: Sequence[Tensor]) -> list[Optimizer]:
    """Return the optimizers that hold one of a few parameters, chosen evenly; whether they step or not."""
    count = min(len(parameters), FEW)
    chosen = [parameters[number * (len(parameters) - 1) // max(count - 1, 1)] for number in range(count)]
    # Each stands in a list, in a group, in the list of groups, in the dictionary of its optimizer.
    return holders(chosen, Optimizer, depth=5)
