"""One file per silent mistake, or family of them: what reads its evidence, and what judges that.

A file is found because it lies here; nothing names it elsewhere.
"""

from __future__ import annotations

import functools
import inspect
import pkgutil
from importlib import import_module
from types import ModuleType
from typing import TypeVar

T = TypeVar("T")


@functools.cache
def modules() -> tuple[ModuleType, ...]:
    """Return the modules of this package and of the packages within it, by name."""
    return tuple(map(import_module, sorted(each.name for each in pkgutil.walk_packages(__path__, f"{__name__}."))))


@functools.cache
def _classes(among: tuple[ModuleType, ...]) -> tuple[type, ...]:
    """Return the public classes of modules that can be made, by file and place in it."""
    return tuple(
        value
        for module in among
        for value in vars(module).values()
        if inspect.isclass(value)
        and value.__module__ == module.__name__
        and not (inspect.isabstract(value) or value.__name__.startswith("_"))
    )


def below(base: type[T]) -> tuple[type[T], ...]:
    """Return the public classes with a base that files of this package define, by file and place in it.

    Args:
        base: :class:`~gradflow_export.rules.base.Check` or :class:`~gradflow_export.instruments.base.Instrument`.
    """
    return tuple(each for each in _classes(modules()) if issubclass(each, base))
