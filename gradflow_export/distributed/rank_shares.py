"""What a set of ranks reports of one step, in a form that adds up: two numbers a site, however many ranks there are."""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Sites = tuple[str, ...]

ADD, ROOT, MAX, MIN, GREATEST, LEAST = range(6)
"""How two values become one: sum, root of the sum of squares, extremes with and without regard to NaN."""

NEUTRAL = (0.0, 0.0, -np.inf, np.inf, -np.inf, np.inf)
"""By operation: the value that changes no other."""

SCHEMAS = 256
"""Schemas remembered; of long runs the oldest are made anew."""


def _root(a: Floats, b: Floats) -> Floats:
    root: Floats = np.hypot(a, b)
    if not np.isfinite(root).all():
        root[np.isnan(a) | np.isnan(b)] = np.nan  # hypot(inf, nan) is inf
    return root


_MERGE: tuple[Callable[[Floats, Floats], Floats], ...] = (
    np.add, _root, np.maximum, np.minimum, np.fmax, np.fmin,
)  # fmt: skip


class Field(NamedTuple):
    """The values of one metric at its sites."""

    operation: int
    metric: str
    sites: Sites


class Schema:
    """The fields of a share in the order of their operations, so that each operation is one call.

    Attributes:
        fields: Sorted by operation.
        digest: Of operations, metrics and sites; equal digests mean equal fields. 16 bytes.
        slices: Where the values of each operation lie.
        places: Where the values of each field lie, by metric.
        size: Values in all.
    """

    def __init__(self, fields: Sequence[Field]) -> None:
        self.fields = tuple(sorted(fields, key=lambda each: each.operation))
        self.digest = hashlib.sha256(self.as_bytes()).digest()[:16]
        self.places: dict[str, tuple[Field, slice]] = {}
        bounds: dict[int, list[int]] = {}
        start = 0
        for each in self.fields:
            end = start + len(each.sites)
            self.places[each.metric] = each, slice(start, end)
            bounds.setdefault(each.operation, [start, end])[1] = end
            start = end
        self.size = start
        self.slices = [(operation, slice(*ends)) for operation, ends in bounds.items()]

    def as_bytes(self) -> bytes:
        """Return the fields as JSON."""
        return json.dumps([[each.operation, each.metric, list(each.sites)] for each in self.fields]).encode()

    @classmethod
    def of_bytes(cls, data: bytes) -> Schema:
        """Undo :meth:`as_bytes`."""
        return cls([Field(operation, metric, tuple(sites)) for operation, metric, sites in json.loads(data)])


class Schemas:
    """Schemas by their fields. Names of sites are compared by identity: each step has the same tuple."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[tuple[int, str, int], ...], tuple[Schema, list[Sites]]] = OrderedDict()

    def of(self, fields: Sequence[Field]) -> Schema:
        """Return the schema of some fields."""
        key = tuple([(each.operation, each.metric, id(each.sites)) for each in fields])
        known = self._known.get(key)
        if known is None:
            # The tuples are kept with the schema, so that no other ever has their identity.
            known = self._known[key] = Schema(fields), [each.sites for each in fields]
            if len(self._known) > SCHEMAS:
                self._known.popitem(last=False)
        return known[0]


Told = Mapping[str, tuple[Sites, list[float], list[bool]]]
"""Sites, values and presence by metric, of a rank whose word is taken."""


@dataclass
class Share:
    """What a set of ranks reports of one step.

    Attributes:
        schema: What the values are of.
        values: Neutral to the operation where no rank reports. Shape: ``[schema.size]``.
        weights: How much went into each value: ranks, shards or entries; 0 where no rank reports. Shape: as values.
        ranks: The ranks that went in, as bits of a number.
        first: By kind of evidence, the first of these ranks that saw NaN or Inf, and what it reports of the place; by
            name of what an error has ended, the first rank on which it has.
    """

    schema: Schema
    values: Floats
    weights: Floats
    ranks: int
    first: dict[str, tuple[int, Told]] = field(default_factory=dict)

    def get(self, metric: str) -> tuple[Field, Floats, Floats] | None:
        """Return the field, values and weights of a metric, ``None`` where no rank reports it."""
        found = self.schema.places.get(metric)
        return None if found is None else (found[0], self.values[found[1]], self.weights[found[1]])


class Merger:
    """Makes one share of several. How those with different fields fit together is found once for each pair."""

    def __init__(self) -> None:
        self._fits: OrderedDict[tuple[bytes, bytes], tuple[Schema, Places, Places]] = OrderedDict()

    def merge(self, shares: Iterable[Share]) -> Share:
        """Return one share for several sets of ranks that have no rank in common; the first may be changed.

        Args:
            shares: At least one.
        """
        whole, *others = shares
        for other in others:
            if other.schema.digest == whole.schema.digest:
                values, weights = other.values, other.weights
            else:
                schema, mine, theirs = self._fit(whole.schema, other.schema)
                whole.values, whole.weights = mine.spread(schema, whole)
                values, weights = theirs.spread(schema, other)
                whole.schema = schema
            with np.errstate(all="ignore"):
                for operation, part in whole.schema.slices:
                    whole.values[part] = _MERGE[operation](whole.values[part], values[part])
            whole.weights += weights
            whole.ranks |= other.ranks
            for kind, told in other.first.items():
                if kind not in whole.first or told[0] < whole.first[kind][0]:
                    whole.first[kind] = told
        return whole

    def _fit(self, one: Schema, other: Schema) -> tuple[Schema, Places, Places]:
        key = one.digest, other.digest
        known = self._fits.get(key)
        if known is None:
            schema = _union(one, other)
            known = self._fits[key] = schema, Places(schema, one), Places(schema, other)
            if len(self._fits) > SCHEMAS:
                self._fits.popitem(last=False)
        return known


def _union(one: Schema, other: Schema) -> Schema:
    fields: dict[str, Field] = {}
    for each in (*one.fields, *other.fields):
        known = fields.setdefault(each.metric, each)
        # Ranks that disagree on how a metric adds up cannot both count; the first is taken.
        if known.operation == each.operation and known.sites != each.sites:
            fields[each.metric] = Field(known.operation, known.metric, tuple(dict.fromkeys(known.sites + each.sites)))
    return Schema(list(fields.values()))


class Places:
    """Where the values of one schema lie in another that holds all of its sites."""

    def __init__(self, whole: Schema, part: Schema) -> None:
        into: list[int] = []
        taken: list[int] = []
        for metric, (known, lies) in part.places.items():
            wanted, where = whole.places[metric]
            if wanted.operation == known.operation:
                places = {site: place for place, site in enumerate(wanted.sites, start=where.start)}
                into.extend(places[site] for site in known.sites)
                taken.extend(range(lies.start, lies.stop))
        self._into, self._taken = np.array(into, dtype=np.int64), np.array(taken, dtype=np.int64)

    def spread(self, whole: Schema, share: Share) -> tuple[Floats, Floats]:
        """Return values and weights of a share in the other schema, neutral where it has none."""
        values, weights = np.empty(whole.size), np.zeros(whole.size)
        for operation, part in whole.slices:
            values[part] = NEUTRAL[operation]
        values[self._into], weights[self._into] = share.values[self._taken], share.weights[self._taken]
        return values, weights


_HEAD = struct.Struct("<16sBIII")
_NARROW, _WIDE = 0, 1
_EXACT_IN_FLOAT32 = 2.0**24


def encode(share: Share, *, schema: bool) -> bytes:
    """Return a share as bytes: 12 or 16 for each value.

    Args:
        share: What is sent.
        schema: Whether the schema travels along, for a reader that cannot know it.
    """
    wide = bool(share.weights.size) and bool(share.weights.max() >= _EXACT_IN_FLOAT32)
    ranks = share.ranks.to_bytes(-(-share.ranks.bit_length() // 8), "little")
    first = json.dumps(share.first).encode() if share.first else b""
    names = zlib.compress(share.schema.as_bytes(), 1) if schema else b""
    head = _HEAD.pack(share.schema.digest, _WIDE if wide else _NARROW, len(ranks), len(first), len(names))
    weights = share.weights.astype("<f8" if wide else "<f4")
    return b"".join((head, ranks, first, names, share.values.astype("<f8").tobytes(), weights.tobytes()))


def decode(message: bytes, schema_of: Callable[[bytes], Schema]) -> Share:
    """Undo :func:`encode`.

    Args:
        message: The bytes.
        schema_of: Returns the schema with a digest, for messages that travel without theirs.
    """
    digest, form, *lengths = _HEAD.unpack_from(message)
    parts, start = [], _HEAD.size
    for length in lengths:
        parts.append(message[start : start + length])
        start += length
    ranks, first, names = parts
    schema = Schema.of_bytes(zlib.decompress(names)) if names else schema_of(digest)
    values = np.frombuffer(message, "<f8", schema.size, start).astype(np.float64)
    kind = "<f8" if form == _WIDE else "<f4"
    weights = np.frombuffer(message, kind, schema.size, start + 8 * schema.size).astype(np.float64)
    told: dict[str, Any] = json.loads(first) if first else {}
    return Share(
        schema,
        values,
        weights,
        int.from_bytes(ranks, "little"),
        {kind: (rank, {m: (tuple(s), v, p) for m, (s, v, p) in place.items()}) for kind, (rank, place) in told.items()},
    )
