"""The writers of an exporter: those that the user named, and what speaks on the terminal."""

from __future__ import annotations

import logging
import os
import shlex
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from gradflow_export.config import Settings
from gradflow_export.records.step_record import RunInfo
from gradflow_export.validation import make_preflight, make_writers
from gradflow_export.writers import ConsoleWriter
from gradflow_export.writers.base import Writer

_log = logging.getLogger("gradflow_export")

IN_FILES = frozenset({"tensorboard", "jsonl"})
_SILENT = frozenset({"console", "health", "preflight", "memory"})


def make_outlets(
    settings: Settings,
    info: RunInfo,
    backends: object,
    logdir: Path,
    wandb: object,
    verdict: Callable[[], str],
) -> tuple[Writer, ...]:
    """Return everything that records go to; nothing on ranks above 0, and when nothing is watched.

    Args:
        settings: Whether it is watched, and how much is printed.
        info: The run.
        backends: Names or writers.
        logdir: Directory for the writers that write files.
        wandb: As in :func:`~gradflow_export.validation.make_writers`.
        verdict: Asked for at the end of the run.

    Raises:
        ArgumentError: A backend is unknown.
        ArgumentTypeError: A backend is neither a name nor a writer.
    """
    if not settings.enabled:
        return ()
    if info.rank:
        _log.info("gradflow: rank %d of %d writes nothing; rank 0 does", info.rank, info.world_size)
        return ()
    named = make_writers(backends, logdir, wandb)  # type: ignore[arg-type]  # it says what it expects
    speaks = settings.verbose and not any(isinstance(writer, ConsoleWriter) for writer in named) and not _above_zero()
    console: list[Writer] = [ConsoleWriter(verbose=settings.verbose)] if speaks else []
    writers = (*named, *make_preflight(settings.preflight), *console)
    for writer in writers:
        if isinstance(writer, ConsoleWriter):
            writer.about(*_directions(writers, logdir), verdict)
    return writers


def _above_zero() -> bool:
    """Whether torchrun started this process as another rank than 0, before it has joined a process group."""
    return os.environ.get("RANK", "0").strip() not in {"", "0"}


def _directions(writers: Sequence[Writer], logdir: Path) -> tuple[str, Callable[[], str]]:
    """Return where records go and what to open, and what tells the command for the end of the run."""
    names = [writer.name for writer in writers if writer.name not in _SILENT]
    elsewhere = ", ".join(name for name in names if name not in IN_FILES)
    place = shlex.quote(str(logdir))
    if not IN_FILES & set(names):
        where = f"; records go to {elsewhere}" if elsewhere else "; nothing is written to disk"
        return where, lambda: ". Next: exporter.print_report()"
    viewer = "tensorboard --logdir" if "tensorboard" in names else "gradflow view"
    also = f" and {elsewhere}" if elsewhere else ""
    report = partial(_report, logdir, logdir.absolute())
    return f"; records go to {place}{also}; open them with: {viewer} {place}", report


def _report(logdir: Path, absolute: Path) -> str:
    """Return the command that shows a report, which holds in the folder that the script has changed to."""
    return f". Next: gradflow report {shlex.quote(str(logdir if logdir.absolute() == absolute else absolute))}"
