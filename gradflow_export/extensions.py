"""What installed packages add: instruments, rules, checks and writers, found by their entry points.

A package names a class of its own in its ``pyproject.toml``::

    [project.entry-points."gradflow_export.rules"]
    quiet-layers = "my_package:QuietLayers"

A class that cannot be loaded or made is left out, and one line says which and why.
``GRADFLOW_EXTENSIONS=0`` loads none.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from types import MappingProxyType
from typing import Any, Literal, TypeVar

_log = logging.getLogger("gradflow_export")

Kind = Literal["instruments", "rules", "checks", "writers"]
KINDS: tuple[Kind, ...] = ("instruments", "rules", "checks", "writers")
VARIABLE = "GRADFLOW_EXTENSIONS"
_NEEDED: Mapping[Kind, tuple[str, ...]] = MappingProxyType(
    {
        "instruments": ("instrument", "interval", "make", "drain"),
        "rules": ("name", "check"),
        "checks": ("name", "raises", "evidence", "check"),
        "writers": ("open", "write", "flush", "close"),
    }
)

T = TypeVar("T")


@dataclass(frozen=True)
class Extension:
    """One class that an installed package adds.

    Attributes:
        kind: What it is.
        name: Of its entry point.
        package: Name and version of the package, as ``"my-package 1.0"``.
        value: Where it stands, as ``"my_package:QuietLayers"``.
        made: The class; ``None`` where it could not be loaded.
        error: Why not; empty where it was loaded.
    """

    kind: Kind
    name: str
    package: str
    value: str
    made: Any = None
    error: str = ""

    def __str__(self) -> str:
        """Return what it is, and where it is from."""
        return f"{self.kind.removesuffix('s')} {self.name!r} of {self.package}"

    def broken(self, error: BaseException) -> None:
        """Say in one line that it is left out.

        Args:
            error: What it raised.
        """
        _log.warning("gradflow: the %s is left out: %s", self, _one_line(error))


@functools.cache
def extensions(kind: Kind) -> tuple[Extension, ...]:
    """Return what installed packages add of one kind, by name; what cannot be loaded is reported once, in one line.

    Args:
        kind: One of ``KINDS``.
    """
    if os.environ.get(VARIABLE, "").strip().lower() in {"0", "off"}:
        return ()
    return tuple(_load(kind, point) for point in _points(kind))


def active() -> tuple[Extension, ...]:
    """Return everything that installed packages add, also what cannot be loaded."""
    return tuple(extension for kind in KINDS for extension in extensions(kind))


def intervals(known: Mapping[str, int]) -> dict[str, int]:
    """Return the intervals of the instruments that installed packages add, in steps by name.

    Args:
        known: Those that come with the package; no extension changes them.
    """
    found = ((each.made.instrument, each.made.interval) for each in extensions("instruments") if each.made is not None)
    return {
        name: interval
        for name, interval in found
        if isinstance(name, str) and name not in known and type(interval) is int and interval >= 1
    }


def made(some: Iterable[Extension], make: Callable[[Extension], T]) -> Iterator[T]:
    """Yield what is made of extensions; where that raises, one is left out, and a line says so.

    Args:
        some: Extensions; those that could not be loaded are passed over.
        make: Called with each.
    """
    for extension in some:
        if extension.made is not None:
            try:
                found = make(extension)
            except Exception as error:
                extension.broken(error)
            else:
                yield found


def _points(kind: Kind) -> list[metadata.EntryPoint]:
    try:
        points = metadata.entry_points(group=f"gradflow_export.{kind}")
        return sorted(points, key=lambda point: (point.name, point.value))
    except Exception as error:  # the metadata of some package cannot be read
        _log.warning("gradflow: extensions cannot be looked for: %s", _one_line(error))
        return []


def _load(kind: Kind, point: metadata.EntryPoint) -> Extension:
    package = "an unnamed package"
    try:
        if point.dist is not None:
            package = f"{point.dist.name} {point.dist.version}"
        found = point.load()
        _check(kind, found)
    except Exception as error:
        broken = Extension(kind, point.name, package, point.value, error=_one_line(error))
        broken.broken(error)
        return broken
    return Extension(kind, point.name, package, point.value, found)


def _check(kind: Kind, found: Any) -> None:
    if not inspect.isclass(found):
        raise TypeError(f"it must name a class, got {type(found).__name__}")
    missing = [name for name in _NEEDED[kind] if not hasattr(found, name)]
    if missing:
        raise TypeError(f"{found.__name__} has no {', '.join(missing)}, as {kind} have")


def _one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
