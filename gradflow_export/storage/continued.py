"""Which of the sessions in one folder continue each other, and what lies between them (floor 1, part of the store)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from gradflow_export.records.lost import KILLED, NOBODY
from gradflow_export.records.run_info import RunInfo
from gradflow_export.records.step_record import Gap

LONGEST = 200
"""Letters of a model's name that are stored beside its description."""

RECENT = 16
"""Records at the end of a session whose distance shows of how many steps it recorded one."""

SEVERAL = RECENT
"""Records that lie between two sessions for an interval or budget at most."""

Identity = tuple[str, int]
"""The class of a model and how many entries its parameters have."""


def identity(info: RunInfo | None) -> Identity | None:
    """Return what tells one model from another, ``None`` where it was not written."""
    return None if info is None else identity_of(info.model, info.entries)


def identity_of(model: object, entries: object) -> Identity | None:
    """Return the same from what was stored, ``None`` where that is not of the right types."""
    if not isinstance(model, str) or not isinstance(entries, int) or not model or entries < 1:
        return None
    return model[:LONGEST], entries


def chains(starts: Sequence[tuple[int | None, Identity | None]]) -> list[range]:
    """Divide sessions that follow each other in time into runs.

    A session that begins after the first step of the one before it was reported so, as when training is resumed from a
    checkpoint: it continues that one. One that begins again at or before the first step, as when a notebook's cell is
    run twice, or that trains another model, does not.

    Args:
        starts: For each session, earliest first, its first step, ``None`` where it has none, and its model, ``None``
            where that is not known.

    Returns:
        The places of the sessions of each run. A session without a step belongs to the run before it.
    """
    edges = [0]
    first: int | None = None
    known: Identity | None = None
    for place, (began, model) in enumerate(starts):
        if began is None:
            continue
        other = known is not None and model is not None and known != model
        if first is not None and (began <= first or other):
            edges.append(place)
            first = known = None
        first = began if first is None else min(first, began)
        known = model or known
    return [range(*pair) for pair in zip(edges, [*edges[1:], len(starts)], strict=True)]


def before(gap: Gap, cut: float) -> Iterator[Gap]:
    """Yield the part of a gap before a step, where there is one.

    >>> [str(part) for part in before(Gap(3, 12, 10, "disk full"), 6)]
    ['steps 3 to 5: disk full']
    """
    if gap.first < cut:
        last = int(min(gap.last, cut - 1))
        share = (last - gap.first + 1) / (gap.last - gap.first + 1)
        yield replace(gap, last=last, steps=math.ceil(gap.steps * share))


def between(steps: Sequence[int], until: int, settings: object, *, closed: bool) -> Gap | None:
    """Return the steps that lie between two sessions of one run and are in neither.

    A session that was not closed has lost what it had recorded last. One that was closed has lost nothing: steps after
    it were recorded by nobody, or left out by its interval or budget. Where one of several was recorded, they count as
    missing only if there would have been ``SEVERAL`` records.

    Args:
        steps: The last ones of the earlier session that are accounted for, rising.
        until: The first one that the later session accounts for.
        settings: Those of the earlier session; anything but a mapping where they are not known.
        closed: Whether the earlier session was closed.

    >>> print(between([140, 141, 142], 162, None, closed=False))
    steps 143 to 161: the session before ended before they were written
    >>> print(between([120, 130, 140], 162, None, closed=False))
    steps 150 to 160 (2 of them): the session before ended before they were written
    >>> print(between([120, 130, 140], 162, None, closed=True), between([120, 130, 140], 401, None, closed=True))
    None steps 150 to 400 (26 of them): no session recorded them
    """
    known = settings if isinstance(settings, Mapping) else {}
    every = known.get("every", 1)
    apart = sorted(later - earlier for earlier, later in pairwise(steps[-RECENT - 1 :]))
    usual = max([1, *apart[len(apart) // 2 :][:1], *([every] if isinstance(every, int) else [])])
    count = (until - 1 - steps[-1]) // usual
    least = SEVERAL if closed and (every != 1 or known.get("budget", 0) is not None) else 1
    reason = NOBODY if closed else KILLED
    return Gap(steps[-1] + usual, steps[-1] + count * usual, count, reason) if count >= least else None
