"""What checks of silent mistakes saw, by layer and step, and how that is stored (floor 1, no dependencies).

Evidence is no metric: nobody draws it, and it says nothing without the check that reads it. It is stored beside the
issues, so that what a verdict was made of can be looked up.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from gradflow_export.records.issues import number_from_json, number_to_json


class Wiring(enum.IntFlag):
    """How a parameter is connected: the value of ``connection.state`` and ``hidden.state``."""

    TRAINABLE = 1
    OWNED = 2
    GRADIENT = 4
    ZERO_RATE = 8
    CALLED = 16
    UNCALLED = 32
    WAITING = 64
    MADE = 128
    STEPPED = 256
    VECTOR = 512
    """It has at most one dimension."""
    BESIDE = 1024
    """Its module is one of a list of which two were given the same tensor, or different numbers of samples."""
    LOOKED = 2048
    """Its module was called while gradients were off."""
    ROUTED = 4096
    """Its module is one of a list whose members are given some of the samples: chosen ones, or different numbers."""


Value = float | bool | Wiring | None
"""A number, a fact that is true or false, or ``None`` where it was looked for and nothing could be read."""

Facts = Mapping[str, Value]
"""One value at some layers, in the order in which these were looked at."""


@dataclass(frozen=True, eq=False)
class Evidence:
    """What was seen of one kind at one layer in one step.

    Attributes:
        kind: What was looked at: ``"input"``, ``"connection"``, ``"mode"`` ...
        layer: Name of the layer or parameter, ``""`` for the whole model.
        step: The step in which it was seen.
        values: By name; ``kind.name``, such as ``"input.rms"``, is what rules ask for.
    """

    kind: str
    layer: str
    step: int
    values: Mapping[str, Value] = field(default_factory=dict)

    def __eq__(self, other: object) -> bool:
        """Compare value by value, NaN equal to NaN."""
        if not isinstance(other, Evidence):
            return NotImplemented
        return self._key() == other._key()

    def __hash__(self) -> int:
        return hash((self.kind, self.layer, self.step))

    def _key(self) -> tuple[Any, ...]:
        return self.kind, self.layer, self.step, _plain(self.values)


def facts_of(evidence: Iterable[Evidence]) -> dict[str, dict[str, Value]]:
    """Return the values by ``kind.name`` and layer.

    >>> facts_of([Evidence("mode", "drop", 1, {"training": True})])
    {'mode.training': {'drop': True}}
    """
    out: dict[str, dict[str, Value]] = {}
    for each in evidence:
        for name, value in each.values.items():
            out.setdefault(f"{each.kind}.{name}", {})[each.layer] = value
    return out


def evidence_of(step: int, facts: Mapping[str, Facts]) -> tuple[Evidence, ...]:
    """Undo :func:`facts_of`: values of one kind that were looked at in the same layers stand together.

    Args:
        step: When they were seen.
        facts: By ``kind.name``.
    """
    groups: dict[tuple[str, tuple[str, ...]], dict[str, Facts]] = {}
    alike: dict[tuple[Any, ...], dict[str, Value]] = {}  # of a thousand parameters most are connected in the same way
    for name, values in facts.items():
        kind, _, rest = name.partition(".")
        groups.setdefault((kind, tuple(values)), {})[rest] = values
    return tuple(
        Evidence(kind, layer, step, alike.setdefault((kind, *named, *row), dict(zip(named, row, strict=True))))
        for (kind, layers), named in groups.items()
        for layer, row in zip(layers, zip(*(values.values() for values in named.values()), strict=True), strict=True)
    )


def evidence_to_json(evidence: Sequence[Evidence], table: Callable[[tuple[str, ...]], int]) -> list[dict[str, Any]]:
    """Return the evidence of one record ready for ``json.dumps``: an object for each kind.

    Args:
        evidence: In order.
        table: Returns the number of a table of layer names.

    Returns:
        ``kind``; ``layers``, the number of their table; ``values``, one mapping for each layer, or, where several
        layers have the same, the different ones and in ``which`` the place of each layer's own.
    """
    out = []
    for kind, bunch in groupby(evidence, lambda each: each.kind):
        items = list(bunch)
        different: dict[tuple[Any, ...], int] = {}
        which = [different.setdefault(tuple(_plain(item.values).items()), len(different)) for item in items]
        found: dict[str, Any] = {"kind": kind, "layers": table(tuple(item.layer for item in items))}
        found["values"] = [dict(values) for values in different]
        if len(different) < len(items):
            found["which"] = which
        out.append(found)
    return out


def evidence_from_json(step: int, data: Mapping[str, Any], layers: Sequence[str]) -> Iterator[Evidence]:
    """Yield the evidence of one object of :func:`evidence_to_json`.

    Args:
        step: Of the record.
        data: The object.
        layers: The table that it names.
    """
    values = [{str(name): _from_json(value) for name, value in each.items()} for each in data["values"]]
    for layer, place in zip(layers, data.get("which", range(len(layers))), strict=True):
        yield Evidence(str(data["kind"]), layer, step, values[place])


def _plain(values: Mapping[str, Value]) -> dict[str, Any]:
    return {name: _to_json(value) for name, value in values.items()}


def _to_json(value: Value) -> Any:
    if isinstance(value, Wiring):
        return tuple(flag.name for flag in Wiring if flag in value)
    return value if isinstance(value, bool) else number_to_json(value)


def _from_json(value: Any) -> Value:
    if isinstance(value, list):
        return Wiring(sum(Wiring[name] for name in value))
    return value if isinstance(value, bool) else number_from_json(value)
