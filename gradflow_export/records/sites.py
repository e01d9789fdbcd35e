"""What the name of a site shows of where it is in the model, whatever things are called (floor 0)."""

from __future__ import annotations

import re
from functools import lru_cache

_INDEX = re.compile(r"(?<![^.])\d+(?![^.])")


@lru_cache(maxsize=100_000)
def pattern(name: str) -> str:
    """Return a name without its places in lists, which the members of one ``ModuleList`` or ``Sequential`` share.

    Numbers that are part of an attribute's name mean nothing.

    >>> pattern("blocks.3.conv1.weight")
    'blocks.#.conv1.weight'
    """
    return _INDEX.sub("#", name)


def rows(name: str) -> list[tuple[str, str]]:
    """Return for each list that a name lies in what the like of its other members have in common, and the member.

    >>> rows("blocks.3.0.weight")
    [('blocks.#.0.weight', 'blocks.3'), ('blocks.3.#.weight', 'blocks.3.0')]
    """
    return [(f"{name[: at.start()]}#{name[at.end() :]}", name[: at.end()]) for at in _INDEX.finditer(name)]
