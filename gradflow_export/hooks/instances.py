"""Finds all objects of a type.

A list of all objects, as ``gc.get_objects`` returns it, also holds tuples that another thread is still building, and
CPython then fails in that thread with a ``SystemError``. Here only what refers to the type is looked at, as every
instance of a class does.
"""

from __future__ import annotations

import gc
from typing import TypeVar

Kind = TypeVar("Kind")


def instances(kind: type[Kind]) -> list[Kind]:
    """Return the living objects of a class that is written in Python, and of its subclasses.

    Args:
        kind: The class; the more subclasses it has, the longer the search takes, which looks at each object once.
    """
    kinds: dict[type[Kind], None] = {kind: None}
    waiting = [kind]
    while waiting:
        found = [each for each in type.__subclasses__(waiting.pop()) if each not in kinds]
        kinds.update(dict.fromkeys(found))
        waiting += found
    # By type: asking an object for its class may run code of its owner.
    return [each for each in gc.get_referrers(*kinds) if kind in type(each).__mro__]
