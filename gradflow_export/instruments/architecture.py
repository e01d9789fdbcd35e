"""What the model looks like: its tree of modules, where each is defined, and in which order they are called."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

import torch
from torch import nn

from gradflow_export.hooks import torch_private
from gradflow_export.hooks.discover import site_name
from gradflow_export.hooks.guards import Guard, hook_all_calls, unguarded
from gradflow_export.hooks.readings import Drained
from gradflow_export.instruments.base import Instrument, Setting
from gradflow_export.records.catalog import MetricSpec
from gradflow_export.records.step_record import Note

MOST_MODULES = 10_000
"""Modules that are described; the rest of a larger model is counted."""
_CLASS = re.compile(r"\s*class\s+(\w+)\b")

_TORCH = os.path.join(os.path.dirname(torch.__file__), "")  # noqa: PTH118, PTH120 - a prefix of file names

Place = tuple[str, int] | tuple[None, None]


class PictureInstrument(Instrument):
    """Describes the model once, with the first record.

    Calls are seen until then, so that it costs nothing afterwards.

    Args:
        model: The unwrapped model; only weak references are kept.
        blocks: Names of the blocks whose gains are measured.
        calls: Whether calls can be seen; not where they run inside compiled code.
        guard: Wraps the hooks.

    Attributes:
        tell: Takes the description.
    """

    instrument: ClassVar[str] = "wiring"
    interval: ClassVar[int] = 100

    def __init__(
        self, model: nn.Module, blocks: tuple[str, ...], *, calls: bool = True, guard: Guard = unguarded
    ) -> None:
        self.tell: Callable[[Note], None] = _nobody
        self._model = weakref.ref(model)
        self._blocks = frozenset(blocks)
        self._unhook: Callable[[], None] | None = None
        self._see = guard(self._called)
        self._calls = calls
        self._order: dict[int, int] = {}
        self._times: dict[int, int] = {}
        self._places: dict[int, Place] = {}
        self._over = False

    @classmethod
    def make(cls, setting: Setting) -> PictureInstrument:
        """Make one for a model."""
        made = cls(setting.model, setting.blocks, calls=not setting.code.found, guard=setting.part(cls.instrument))
        made.tell = setting.note
        return made

    @property
    def modules(self) -> int:
        """Nothing is read for each module."""
        return 1

    @property
    def specs(self) -> tuple[MetricSpec, ...]:
        """It gives out no metric."""
        return ()

    def attach(self) -> contextlib.ExitStack:
        """Begin; closing the returned stack forgets everything."""
        stack = contextlib.ExitStack()
        stack.callback(self._end)
        return stack

    def arm(self, *, on: bool) -> None:
        """Begin to see calls, unless the description was given."""
        on = on and self._calls and not self._over
        if on and self._unhook is None:
            self._unhook = hook_all_calls(self._hook)
        elif not on and self._unhook is not None:
            self._unhook()
            self._unhook = None

    def forget(self) -> None:
        """Forget the calls that were seen."""
        self._order, self._times, self._places = {}, {}, {}

    def drain(self) -> Drained:
        """Give the description, once; there are no readings."""
        model = self._model()
        if not self._over and model is not None:
            self.tell(Note("architecture", type(model).__name__, 1, self._describe(model)))
        # The hook goes when those of others do: each change of the hooks of the process has code compiled anew.
        self._over = True
        self.forget()
        return []

    def _end(self) -> None:
        self._over = True
        self.arm(on=False)
        self.forget()

    def _hook(self, module: nn.Module, _args: Any, _output: Any) -> None:
        if not torch.compiler.is_compiling():  # first, so that a trace holds nothing of what follows
            self._see(module)

    def _called(self, module: nn.Module) -> None:
        if self._over or not torch.is_grad_enabled() or torch_private.is_tracing():
            return
        key = id(module)
        if key not in self._order:
            self._order[key] = len(self._order)
            self._places[key] = _calling()
        self._times[key] = self._times.get(key, 0) + 1

    def _describe(self, model: nn.Module) -> dict[str, Any]:
        """Return the modules in the order of registration, a parent before its children."""
        places: dict[type, Place] = {}
        near: dict[str, str | None] = {}
        modules: list[dict[str, Any]] = []
        total = 0
        for name, module, parent, first in _tree(model):
            total += 1
            if total > MOST_MODULES:
                continue
            kind, key = type(module), id(module)
            if kind not in places:
                places[kind] = definition(kind)
            file, line = places[kind]
            call_file, call_line = self._places.get(key, (None, None))
            if call_file is not None and call_file not in near:
                near[call_file] = _near(call_file)
            call_file = near.get(call_file or "")
            own = list(module.parameters(recurse=False)) if first is None else []
            modules.append(
                {
                    "name": name,
                    "kind": kind.__name__,
                    "parent": parent,
                    "order": self._order.get(key),
                    "calls": self._times.get(key),
                    "parameters": sum(p.numel() for p in own),
                    "trainable": sum(p.numel() for p in own if p.requires_grad),
                    "own": sum(p.numel() for p in own),
                    "file": file,
                    "line": line,
                    "call_file": call_file,
                    "call_line": None if call_file is None else call_line,
                    "block": name in self._blocks,
                    "shared": first,
                }
            )
        _add_up(modules)
        _rank(modules)
        return {"modules": modules, "total": total}


def _nobody(_note: Note) -> None:
    """No-op callback."""


def _tree(model: nn.Module) -> Iterator[tuple[str, nn.Module, int | None, str | None]]:
    """Yield name, module, place of the parent and, of a module that came before, the name under which it did.

    Nobody looks into a module a second time: one may lie in several places, even in itself.
    """
    seen: dict[int, str] = {}
    place = 0
    waiting: list[tuple[str, nn.Module, int | None]] = [("", model, None)]
    while waiting:
        name, module, parent = waiting.pop()
        first = seen.get(id(module))
        seen.setdefault(id(module), name)
        yield name, module, parent, first
        if first is None:
            below = [(site_name(f"{name}.{child}" if name else child), found) for child, found in _children(module)]
            waiting += [(child, found, place) for child, found in reversed(below)]
        place += 1


def _children(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules directly inside one, each as often as it has a name there."""
    # named_children() gives a module that has two names here only once.
    for name, child in vars(module)["_modules"].items():
        if child is not None:
            yield name, child


def _rank(modules: list[dict[str, Any]]) -> None:
    """Number the calls without the modules of others that were called between."""
    known = sorted({module["order"] for module in modules if module["order"] is not None})
    ranks = {order: rank for rank, order in enumerate(known)}
    for module in modules:
        if module["order"] is not None:
            module["order"] = ranks[module["order"]]


def _add_up(modules: list[dict[str, Any]]) -> None:
    """Give each module the entries of all below it; those of a shared one count where it comes first."""
    for module in reversed(modules):
        if module["parent"] is not None:
            for count in ("parameters", "trainable"):
                modules[module["parent"]][count] += module[count]


def definition(kind: type) -> Place:
    """Return the file and the line in which a class is defined, relative to the working directory where it is below.

    Args:
        kind: The class.

    Returns:
        Both ``None`` where there is no source. Of several classes of one name in a file it is the last one before the
        first method.
    """
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    if not isinstance(file, str) or not file.endswith(".py"):
        return None, None
    codes = [code for code in (getattr(entry, "__code__", None) for entry in vars(kind).values()) if code is not None]
    first = min((code.co_firstlineno for code in codes if code.co_filename == file), default=None)
    found = None
    try:
        with Path(file).open(encoding="utf-8", errors="replace") as lines:
            for number, line in enumerate(lines, 1):
                if first is not None and number >= first:
                    break
                match = _CLASS.match(line)
                if match is not None and match.group(1) == kind.__name__:
                    found = number
    except OSError:  # gone
        return None, None
    near = _near(file)
    return (None, None) if found is None or near is None else (near, found)


def _calling() -> Place:
    """Return the file and the line that led to the call of the module whose hook runs, as near as can be.

    A module inside ``nn.Sequential`` is called by a loop of PyTorch's; what says more is where that was called.
    """
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - no public form
    inside = False
    while frame is not None:
        file = frame.f_code.co_filename
        # What lies before PyTorch's own code is the hook; code that was generated has no file, but a name in brackets.
        if inside and not file.startswith(("<", _TORCH)):
            return file, frame.f_lineno
        inside = inside or file.startswith(_TORCH)
        frame = frame.f_back
    return None, None


def _near(file: str) -> str | None:
    """Return a file relative to the working directory where it is below; ``None`` where it is not there."""
    try:
        near = os.path.relpath(file)
    except ValueError:  # on another drive
        return None
    if not Path(file).is_file():
        return None
    return file if near.startswith(os.pardir) else near
