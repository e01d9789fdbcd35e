"""Lines on standard error that tear no progress bar, and go to ``logging`` where that is set up."""

from __future__ import annotations

import contextlib
import logging
import sys
from typing import Any

_log = logging.getLogger("gradflow_export")


def say(line: str, level: int = logging.INFO) -> None:
    """Print a line for the user, from any thread; it never raises and never touches standard output.

    A program that has set up ``logging`` gets the line there. One that has not, or whose root logger is at the level
    that it has by default and lets no line of this level through, gets it on standard error: above the bars of tqdm
    where there are any, and through ``sys.stderr`` as it is at this moment, which rich and notebooks replace.

    Args:
        line: Without a line break at its end.
        level: One of ``logging``.
    """
    with contextlib.suppress(Exception):
        if _log.hasHandlers() and _log.isEnabledFor(level):
            _log.log(level, "%s", line)
        elif not _muted(level):
            _print(line)


def _muted(level: int) -> bool:
    """Whether the user has silenced this level; WARNING at the root is what it begins with, and nobody's choice."""
    own = _log.level or (_log.root.level if _log.root.level > logging.WARNING else logging.NOTSET)
    return _log.disabled or _log.manager.disable >= level or own > level


def _print(line: str) -> None:
    stream: Any = sys.stderr
    if stream is None:  # a program without a console
        return
    bars = getattr(sys.modules.get("tqdm.std"), "tqdm", None)
    if bars is not None and any(_in_the_way(bar) for bar in tuple(getattr(bars, "_instances", ()))):
        bars.write(line, file=stream)
    else:
        stream.write(f"{line}\n")
    stream.flush()


def _in_the_way(bar: Any) -> bool:
    """Whether a bar draws into a terminal's line; bars of notebooks are no text."""
    return not getattr(bar, "disable", False) and not hasattr(bar, "container") and hasattr(bar, "fp")
