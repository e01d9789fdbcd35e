"""What an exporter goes on with in a forked child: the thread and the files of before belong to the parent."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import replace

from gradflow_export.records.step_record import RunInfo
from gradflow_export.writers.base import Writer

_log = logging.getLogger("gradflow_export")


def new_session(now: float, rank: int) -> str:
    """Return a name that no other session has.

    Args:
        now: Seconds since the epoch.
        rank: Of this process.
    """
    return f"{int(now * 1000)}-{os.urandom(4).hex()}-{rank}"


def begun_here(info: RunInfo | None) -> RunInfo | None:
    """Return a run's description as of a session that begins now."""
    now = time.time()
    return None if info is None else replace(info, session=new_session(now, info.rank), started=now)


def writers_here(writers: Iterable[Writer]) -> list[Writer]:
    """Return what takes the place of a parent's writers in this process, those that can; the others are reported."""
    here: list[Writer] = []
    for writer in writers:
        again: Callable[[], Writer] | None = getattr(writer, "in_child", None)
        try:
            if again is not None:
                here.append(again())
                continue
            reason = "it is bound to the process that made it"
        except Exception as error:
            reason = str(error)
        _log.warning(
            "gradflow: training goes on in a forked process, where the %s writer is left out: %s. Construct the "
            "Exporter in that process to have it there.",
            writer.name,
            reason,
        )
    return here


def call_at_exit(close: Callable[[], None]) -> None:
    """Have a function called when a child of ``multiprocessing`` ends, which skips what ``atexit`` knows."""
    util = sys.modules.get("multiprocessing.util")
    if util is not None:
        util.Finalize(None, close, exitpriority=0)
