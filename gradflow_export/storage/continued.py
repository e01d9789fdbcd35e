"""Which of the sessions in one folder continue each other (floor 1, part of the store)."""

from __future__ import annotations

from collections.abc import Sequence

from gradflow_export.records.run_info import RunInfo

LONGEST = 200
"""Letters of a model's name that are stored beside its description."""

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
