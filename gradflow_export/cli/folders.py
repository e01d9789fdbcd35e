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


def runs_in(path: Path) -> list[Run]:
    """Return the runs in one folder, those that began first before others.

    There are several where more than one process or exporter wrote to it at the same time, and where a session began
    again at its first step, as when the cell of a notebook is run twice, or trained another model.

    Args:
        path: The folder.

    Raises:
        StorageError: It holds no run, or a newer version wrote it.
    """
    first = read_run(path)
    latest = [first, *(read_run(path, session=name) for name in first.beside)]
    return [each for run in latest for each in (*(read_run(path, session=name) for name in run.replaced), run)]


def read_newest(path: Path) -> Run:
    """Return the run in a folder that was begun last; where there are others, name them.

    Raises:
        StorageError: It holds no run, or a newer version wrote it.
    """
    newest, *others = newest_first(path)
    if others:
        names = ", ".join(run.sessions[-1] for run in others)
        sys.stderr.write(
            f"gradflow: {path} holds {len(others) + 1} runs; only the newest, session {newest.sessions[-1]}, is "
            f"used. gradflow_export.read_run({str(path)!r}, session=...) reads the others: {names}\n"
        )
    return newest


def newest_first(path: Path) -> list[Run]:
    """Return the runs in one folder, the one that was begun last before all others.

    Raises:
        StorageError: It holds no run, or a newer version wrote it.
    """
    return sorted(runs_in(path), key=lambda run: 0.0 if run.info is None else run.info.started, reverse=True)


def check_folder(logdir: Path) -> None:
    """Raise unless this is a folder."""
    if not logdir.is_dir():
        raise ArgumentError(f"{logdir} is not a folder; give the logdir of an Exporter, such as runs/")


def no_run(logdir: Path) -> ArgumentError:
    """Return the error that says that a folder holds nothing of ours."""
    return ArgumentError(f"{logdir} holds no gradflow run; give the logdir of an Exporter, such as runs/")
