"""Folders of runs that commands are given; never imports torch."""

from __future__ import annotations

import sys
from pathlib import Path

from gradflow_export.errors import ArgumentError
from gradflow_export.storage.reader import Run, find_runs, read_run


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


def read_first(path: Path) -> Run:
    """Return the run in a folder; where others were written to it at the same time, say that they are left out.

    Raises:
        StorageError: It holds no run, or a newer version wrote it.
    """
    run = read_run(path)
    if run.beside:
        sys.stderr.write(
            f"gradflow: {len(run.beside) + 1} runs wrote to {path} at the same time; only session {run.sessions[0]} is "
            "taken. store.read_run(path, session=...) reads the others.\n"
        )
    return run


def check_folder(logdir: Path) -> None:
    """Raise unless this is a folder."""
    if not logdir.is_dir():
        raise ArgumentError(f"{logdir} is not a folder; give the logdir of an Exporter, such as runs/")


def no_run(logdir: Path) -> ArgumentError:
    """Return the error that says that a folder holds nothing of ours."""
    return ArgumentError(f"{logdir} holds no gradflow run; give the logdir of an Exporter, such as runs/")
