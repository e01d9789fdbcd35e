"""The blocks of a model as a tree of places, with what was chosen and why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gradflow_export.hooks.chains import Choice


@dataclass(frozen=True)
class BlockTree(Sequence[str]):
    """The names of the blocks whose gains are measured; printed, a tree of where they lie, and why there.

    Attributes:
        model: Class of the model.
        names: From input to output, as far as known.
        choices: What was decided about which place.
    """

    model: str
    names: tuple[str, ...]
    choices: tuple[Choice, ...]

    def __len__(self) -> int:
        """Return the number of blocks."""
        return len(self.names)

    def __getitem__(self, index: int) -> str:  # type: ignore[override]  # slices are those of names
        """Return a name by its place."""
        return self.names[index]

    def __str__(self) -> str:
        """Return the tree."""
        lines: list[tuple[str, str]] = []
        _draw(_nested(self.choices), "", lines)
        width = max((len(left) for left, _ in lines), default=0)
        drawn = [f"{left:<{width}}  {right}".rstrip() for left, right in lines]
        return "\n".join([f"{self.model}: {len(self.names)} blocks", *drawn])

    __repr__ = __str__


class _Place(dict[str, "_Place"]):
    """The places inside one, by the last part of their names."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[str] = []


def _nested(choices: Sequence[Choice]) -> _Place:
    root = _Place()
    for place, members, kind, chosen, why in choices:
        here = root
        for part in place.split(".") if place else ():
            here = here.setdefault(part, _Place())
        here.told.append(f"{'blocks  ' if chosen else 'left out'}  {members} x {kind}: {why}")
    return root


def _draw(place: _Place, indent: str, lines: list[tuple[str, str]]) -> None:
    lines.extend((f"{indent}(here)", told) for told in (place.told if not indent else ()))
    for number, (name, inside) in enumerate(_short(place)):
        last = number == len(place) - 1
        told = inside.told or [""]
        lines.append((f"{indent}{'└─ ' if last else '├─ '}{name}", told[0]))
        below = f"{indent}{'   ' if last else '│  '}"
        lines.extend((below, more) for more in told[1:])
        _draw(inside, below, lines)


def _short(place: _Place) -> Iterator[tuple[str, _Place]]:
    """Yield what lies inside; where that is a single place, its name goes with it."""
    for name, inside in place.items():
        while len(inside) == 1 and not inside.told:
            ((more, inside),) = inside.items()  # noqa: PLW2901 - goes down
            name = f"{name}.{more}"  # noqa: PLW2901 - goes down
        yield name, inside
