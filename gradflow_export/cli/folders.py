"""Folders of runs that commands are given; never imports torch."""

from __future__ import annotations

from pathlib import Path

from gradflow_export.errors import ArgumentError
from gradflow_export.store import find_runs


def runs_below(logdir: Path) -> dict[str, Path]:
    """Return the runs below a folder by name, ``"."`` for the folder itself.

    Raises:
        ArgumentError: It is no folder, or holds no run.
    """
    check_folder(logdir)
    runs = find_runs(logdir)
    if not runs:
        raise no_run(logdir)
    return runs


def check_folder(logdir: Path) -> None:
    """Raise unless this is a folder."""
    if not logdir.is_dir():
        raise ArgumentError(f"{logdir} is not a folder; give the logdir of an Exporter, such as runs/")


def no_run(logdir: Path) -> ArgumentError:
    """Return the error that says that a folder holds nothing of ours."""
    return ArgumentError(f"{logdir} holds no gradflow run; give the logdir of an Exporter, such as runs/")
