"""Other trackers: anything that takes named numbers at a step can be written to."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, final, runtime_checkable

from gradflow_export.records.step_record import RunInfo, StepRecord, info_to_json
from gradflow_export.writers.wandb.incidents import Alert, Incidents
from gradflow_export.writers.wandb.picks import LAYERS, Picks
from gradflow_export.writers.wandb.tables import HEALTH_COLUMNS, ISSUE_COLUMNS, Cell, HealthBook, IssueBook

_log = logging.getLogger("gradflow_export")

PREFIX = "gradflow"


@runtime_checkable
class ScalarSink(Protocol):
    """A tracker that takes numbers; an object with this one method is a backend of ``Exporter``.

    What it has besides is used: ``log_histogram(name, counts, edges, step)``, ``log_table(name, columns, rows, step)``,
    ``alert(title, text, level, step)``, ``log_config(values)`` and ``close()``.
    """

    def log_scalars(self, values: Mapping[str, float], step: int) -> None:
        """Take in the numbers of one step; NaN and Inf are among them where they were read."""


@final
class SinkWriter:
    """Writes what W&B gets in a row to a sink: few numbers per step, tables at the end, one alert per incident.

    Args:
        sink: Where to.
        metrics: As for ``WandbWriter``.
        top: As for ``WandbWriter``.
        layers: As for ``WandbWriter``.
        alert_cooldown: As for ``WandbWriter``.
        most_alerts: As for ``WandbWriter``.
    """

    def __init__(
        self,
        sink: ScalarSink,
        *,
        metrics: Sequence[str] | None = None,
        top: int = LAYERS,
        layers: Sequence[str] = (),
        alert_cooldown: float = 600.0,
        most_alerts: int = 50,
    ) -> None:
        self._sink, self._picks = sink, Picks(metrics, top, layers)
        self._incidents = Incidents(alert_cooldown, most_alerts)
        self._health, self._issues = HealthBook(), IssueBook()
        self._last: StepRecord | None = None
        self._told: set[str] = set()
        self._closed = False

    @property
    def name(self) -> str:
        """Name of the sink's class, for messages."""
        return type(self._sink).__name__

    def open(self, run: RunInfo) -> None:
        """Describe the run."""
        self._picks.begin(run.blocks)
        self._use("log_config", {PREFIX: info_to_json(run)})

    def write(self, record: StepRecord) -> None:
        """Hand one record over."""
        if self._closed:
            return
        self._last = record
        self._health.add(record)
        for issue in record.issues:
            self._issues.add(issue)
        values = {**self._picks.scalars(record), "open_issues": float(len(self._issues.open))}
        self._sink.log_scalars({f"{PREFIX}/{name}": value for name, value in values.items()}, record.step)
        if hasattr(self._sink, "log_histogram"):
            for name, bins in self._picks.histograms(record, lambda np_histogram: np_histogram).items():
                if isinstance(bins, tuple):
                    self._use("log_histogram", f"{PREFIX}/{name}", *bins, record.step)
        for alert in self._incidents.add(record.issues, record.wall_time):
            self._alert(alert)

    def flush(self) -> None:
        """Do nothing: a sink takes everything at once."""

    def close(self) -> None:
        """Hand the tables over, and end the sink where it has an end."""
        if self._closed:
            return
        self._closed = True
        for alert in self._incidents.rest():
            self._alert(alert)
        if self._last is not None:
            step = self._last.step
            tables: tuple[tuple[str, Sequence[str], list[list[Cell]]], ...] = (
                ("health", HEALTH_COLUMNS, self._health.rows(self._issues.open, step)),
                ("issues", ISSUE_COLUMNS, self._issues.rows()),
            )
            for name, columns, rows in tables:
                if rows:
                    self._use("log_table", f"{PREFIX}/{name}", list(columns), rows, step)
        self._use("close")

    def _alert(self, alert: Alert) -> None:
        self._use("alert", alert.title, alert.text, alert.level, alert.step)

    def _use(self, what: str, *given: Any) -> None:
        """Call a method that a sink need not have; what it raises costs that call alone, and is said once."""
        call: Callable[..., Any] | None = getattr(self._sink, what, None)
        if call is None:
            return
        try:
            call(*given)
        except Exception as error:
            if what not in self._told:
                self._told.add(what)
                _log.warning("gradflow: %s refused %s; the numbers go on: %r", self.name, what, error)
