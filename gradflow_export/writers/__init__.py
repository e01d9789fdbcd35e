"""Places that records go to; they know records only (floor 1).

Importing this package loads no writer: each is loaded when its name is first used.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any, Literal

from gradflow_export.errors import ArgumentError, ArgumentTypeError, nearest
from gradflow_export.extensions import Extension, extensions, made
from gradflow_export.writers.base import NoWriter, Writer
from gradflow_export.writers.sinks import ScalarSink, SinkWriter

if TYPE_CHECKING:
    from gradflow_export.writers.console import ConsoleWriter
    from gradflow_export.writers.jsonl import JsonlWriter
    from gradflow_export.writers.memory import MemoryWriter
    from gradflow_export.writers.tensorboard import TensorBoardWriter
    from gradflow_export.writers.wandb import WandbWriter

__all__ = ["ConsoleWriter", "JsonlWriter", "MemoryWriter", "TensorBoardWriter", "WandbWriter", "Writer", "make_writer"]

Backend = Literal["console", "jsonl", "memory", "tensorboard", "wandb"]
"""Names of backends, for type checkers; what :func:`make_writer` takes."""

_WRITERS = (
    ("console", "ConsoleWriter", False),
    ("jsonl", "JsonlWriter", True),
    ("memory", "MemoryWriter", False),
    ("tensorboard", "TensorBoardWriter", True),
    ("wandb", "WandbWriter", False),
)


def make_writer(backend: str | Writer | ScalarSink, logdir: str | os.PathLike[str]) -> Writer:
    """Return the writer that a name stands for, or the writer itself.

    Args:
        backend: ``"tensorboard"``, ``"jsonl"``, ``"console"``, ``"memory"``, ``"wandb"``, the name of a writer of an
            installed package, an object with the four
            methods of :class:`Writer`, or one with the method of :class:`~gradflow_export.writers.sinks.ScalarSink`.
        logdir: Directory for the writers that write files.

    Raises:
        ArgumentError: The name is unknown; the message names the nearest.
        ArgumentTypeError: It is neither a name nor a writer.
        StorageError: ``logdir`` cannot be written to.
        MissingPackageError: The backend's package is not installed.
    """
    if not isinstance(backend, str):
        if isinstance(backend, Writer) and not isinstance(backend, type):
            return backend
        if isinstance(backend, ScalarSink) and not isinstance(backend, type):
            return SinkWriter(backend)
        raise ArgumentTypeError(
            f"a backend expects a name, a writer with name, open, write, flush and close, or a sink with log_scalars, "
            f"got {backend!r}; pass 'tensorboard', or an instance such as MemoryWriter()."
        )
    for name, class_name, needs_place in _WRITERS:
        if name == backend:
            made = __getattr__(class_name)(logdir) if needs_place else __getattr__(class_name)()
            assert isinstance(made, Writer)
            return made
    further = {extension.name: extension for extension in extensions("writers")}
    if backend in further:
        return _further_writer(further[backend], logdir)
    known = [*(name for name, _, _ in _WRITERS), *further]
    raise ArgumentError(f"unknown backend {backend!r}{nearest(backend, known)}")


def _further_writer(extension: Extension, logdir: str | os.PathLike[str]) -> Writer:
    """Return the writer of an installed package, or one that does nothing where that cannot be made."""

    def make(each: Extension) -> Writer:
        writer = each.made(logdir)
        if not isinstance(writer, Writer):
            raise TypeError(f"{type(writer).__name__} is no writer with name, open, write, flush and close")
        return writer

    return next(made([extension], make), NoWriter(extension.name))


def __getattr__(name: str) -> Any:
    """Load a writer's module when its class is first asked for."""
    for module, class_name, _ in _WRITERS:
        if class_name == name:
            return getattr(importlib.import_module(f"gradflow_export.writers.{module}"), class_name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
