"""PyTorch's autograd anomaly mode, put back to what it was, whatever happens."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch


class _Holders:
    """Who has the anomaly mode on; it is one switch for the whole process.

    PyTorch's own context managers each put back what they found: two that overlap without being nested, as in two
    threads, leave the mode on for ever. Here the mode is what the holder that came last wants, and what it was before
    the first one came once the last one has gone.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wanted: dict[object, tuple[bool, bool]] = {}
        self._before = (False, True)

    def enter(self, holder: object, enabled: bool, check_nan: bool) -> None:
        """Set the mode for one more holder."""
        with self._lock:
            if not self._wanted:
                self._before = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
            self._wanted[holder] = enabled, check_nan
            torch.set_anomaly_enabled(enabled, check_nan)

    def leave(self, holder: object) -> None:
        """Take a holder away; one that has gone already is passed over."""
        with self._lock:
            if self._wanted.pop(holder, None) is not None:
                left = list(self._wanted.values())
                torch.set_anomaly_enabled(*(left[-1] if left else self._before))


_HOLDERS = _Holders()


class AnomalyMode:
    """Autograd's anomaly mode, for things that begin and end at different places in the code.

    Args:
        check_nan: Whether a backward pass that makes NaN raises; otherwise only the tracebacks of forward calls are
            kept.
    """

    def __init__(self, *, check_nan: bool = True) -> None:
        self._check_nan = check_nan

    def start(self) -> None:
        """Switch it on; starting again changes nothing."""
        _HOLDERS.enter(self, True, self._check_nan)

    def stop(self) -> None:
        """Put the mode back; stopping again does nothing."""
        _HOLDERS.leave(self)


@contextlib.contextmanager
def anomaly_mode(*, enabled: bool = True, check_nan: bool = True) -> Iterator[None]:
    """Have autograd's anomaly mode on, or off, within a block.

    Unlike ``torch.autograd.detect_anomaly`` it may overlap with others of its kind in other threads: the mode is what
    it was before once all of them have ended. It gives no warning, so that it can be used at every step::

        with anomaly_mode():
            loss = criterion(model(x), y)
            loss.backward()                # raises where NaN is made, with the traceback of the forward call

    Args:
        enabled: False switches the mode off within the block.
        check_nan: Whether a backward pass that makes NaN raises; otherwise only the tracebacks of forward calls are
            kept.
    """
    holder = object()
    _HOLDERS.enter(holder, enabled, check_nan)
    try:
        yield
    finally:
        _HOLDERS.leave(holder)
