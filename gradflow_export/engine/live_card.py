"""The card of a run in a notebook, updated while the cell trains."""

from __future__ import annotations

import importlib
from typing import Any, final

from gradflow_export.errors import ArgumentError, MissingPackageError
from gradflow_export.records.step_record import RunInfo, StepRecord
from gradflow_export.report.card import card
from gradflow_export.report.summary import RunSummary

COMMAND = "exporter, or exporter.show()"


@final
class LiveCard:
    """A writer that shows verdict, issues and loss below the training cell of a notebook.

    Use it as ``Exporter(model, backends=["tensorboard", LiveCard()])``. The card is updated at most once per interval
    and a last time at the end. It does not slow down the training thread. Outside of a notebook nothing is shown.

    Args:
        seconds: Minimum interval between two updates.

    Raises:
        ArgumentError: ``seconds`` is not positive.
        MissingPackageError: IPython is not installed.
    """

    name = "card"

    def __init__(self, seconds: float = 1.0) -> None:
        if not seconds > 0:
            raise ArgumentError(f"LiveCard expects seconds above 0, got {seconds}; 1 is the default.")
        try:
            self._screen: Any = importlib.import_module("IPython.display")
            shell: Any = importlib.import_module("IPython").get_ipython()
        except ImportError as error:
            raise MissingPackageError(
                "LiveCard expects IPython, which is not installed; run: pip install ipython"
            ) from error
        self._seconds = seconds
        self._shown = shell is not None and getattr(shell, "kernel", None) is not None
        self._summary = RunSummary()
        self._handle: Any = None
        self._drawn = 0.0

    def open(self, run: RunInfo) -> None:
        """Show the card of a run without steps."""
        self._summary, self._drawn, self._handle = RunSummary(run), 0.0, None
        if self._shown:
            self._handle = self._screen.display(self._card(), display_id=True)

    def write(self, record: StepRecord) -> None:
        """Take in one record."""
        self._summary.add(record)
        if record.wall_time - self._drawn >= self._seconds:
            self._drawn = record.wall_time
            self._draw()

    def flush(self) -> None:
        """Draw what was taken in; asked for when no record has come for a while."""
        self._draw()

    def close(self) -> None:
        """Draw the last state; what comes later is not shown."""
        self._draw()
        self._handle = None

    def _draw(self) -> None:
        if self._handle is not None:
            self._handle.update(self._card())

    def _card(self) -> Any:
        return self._screen.HTML(card(self._summary, "", COMMAND))
