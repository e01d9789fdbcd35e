"""All instruments, in the order of the table. A new family is a module with ``INSTRUMENTS`` and a line here."""

from __future__ import annotations

import contextlib

from instruments import debug_levels, debugging, gradflow, rivals
from instruments.base import Instrument, Trainer

__all__ = ["INSTRUMENTS", "Instrument", "Trainer"]

INSTRUMENTS: tuple[Instrument, ...] = (
    Instrument("nothing", lambda _trainer, _logdir: contextlib.nullcontext()),
    *gradflow.INSTRUMENTS,
    *debug_levels.INSTRUMENTS,
    *debugging.INSTRUMENTS,
    *rivals.INSTRUMENTS,
)
