"""A writer to Weights & Biases: rows beside the user's own, alerts, tables of layers and issues."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, final

from gradflow_export.errors import ArgumentError
from gradflow_export.records import RunInfo, StepRecord, info_to_json
from gradflow_export.writers import wandb_runs
from gradflow_export.writers.wandb_alerts import Alerts
from gradflow_export.writers.wandb_gains import GainViews
from gradflow_export.writers.wandb_lane import Lane
from gradflow_export.writers.wandb_module import Module
from gradflow_export.writers.wandb_picks import PER_SITE, Picks
from gradflow_export.writers.wandb_rows import RideRows, RowQueue
from gradflow_export.writers.wandb_tables import (
    HEALTH_COLUMNS,
    ISSUE_COLUMNS,
    HealthBook,
    IssueBook,
)

_log = logging.getLogger("gradflow_export")

_QUIET_SECONDS, _SETTLE_SECONDS, _LAST_SECONDS = 0.3, 5.0, 2.0


@final
class WandbWriter:
    """Writes to the user's active W&B run, or to one of its own when asked.

    With no further arguments the active run is used, looked up anew each time; what is recorded before the first
    ``wandb.init`` waits for it. With arguments of ``wandb.init`` a run is started where none is active, offline when
    there is no server or login, and finished by ``close``.

    Rows ride on the user's own (see :class:`~gradflow_export.writers.wandb_rows.RideRows`): neither the user's nor
    ours are lost, whatever ``step=`` or ``commit=`` the user passes. The axis of every chart is ``gradflow/step``.

    Args:
        prefix: First part of every key.
        metrics: Per-layer metrics of which the worst layers are sent.
        top: How many of the worst layers of each.
        layers: Names or patterns (``"encoder.*"``) of layers that are always sent.
        rows: ``"ride"``, or ``"own"``: a row of its own per record, at once. ``"own"`` is for runs in which nobody
            passes ``step=`` to ``log``, for W&B drops the user's rows otherwise.
        max_waiting: Rows that may wait; beyond that neighbours are merged.
        table_seconds: Least time between two tables, by the records' clock; one comes with the first issue and at the
            end.
        alert_cooldown: Seconds before the same problem in the same layer raises an alert again.
        most_alerts: Alerts in a run; 0 sends none.
        module: Another module that speaks wandb's language, such as ``trackio``; what it cannot do is left out.
        **init: Arguments of ``wandb.init``, such as ``project="..."``.

    Raises:
        MissingPackageError: wandb is not installed.
        ArgumentError: A value cannot be used.
        ArgumentTypeError: ``module`` is not like wandb.
    """

    name = "wandb"

    def __init__(
        self,
        *,
        prefix: str = "gradflow",
        metrics: Sequence[str] = PER_SITE,
        top: int = 8,
        layers: str | Sequence[str] = (),
        rows: str = "ride",
        max_waiting: int = 1024,
        table_seconds: float = 300.0,
        alert_cooldown: float = 600.0,
        most_alerts: int = 50,
        module: Any = None,
        **init: Any,
    ) -> None:
        if rows not in ("ride", "own"):
            raise ArgumentError(f"rows expects 'ride' or 'own', got {rows!r}; leave it out for 'ride'")
        if top < 0 or max_waiting < 2:
            raise ArgumentError(
                f"top expects a number >= 0 and max_waiting one >= 2, got {top} and {max_waiting}; leave them out"
            )
        self._picks = Picks(metrics, top, (layers,) if isinstance(layers, str) else layers)
        self._wandb = Module(wandb_runs.load() if module is None else module)
        wandb_runs.check_init(self._wandb.module, init)
        self._init, self._own_rows, self._limit, self._prefix = init, rows == "own", max_waiting, prefix
        self._every = table_seconds
        self._tabled: float | None = None
        self._alerts = Alerts(self._wandb, alert_cooldown, most_alerts)
        self._health, self._issues, self._gains = HealthBook(), IssueBook(), GainViews(self._wandb.module)
        self._early, self._lane = RowQueue(max_waiting), Lane()
        self._lock = threading.RLock()
        self._info: RunInfo | None = None
        self._rows: RideRows | None = None
        self._own: Any = None
        self._last: StepRecord | None = None
        self._heard, self._unsaid, self._closed = time.monotonic(), True, False

    def open(self, run: RunInfo) -> None:
        """Find the run, or start one when asked.

        Raises:
            wandb.errors.Error: A run was asked for and cannot be started, not even offline.
        """
        self._info = run
        if self._init:
            if self._wandb.run is None:
                self._own = self._wandb.start(self._init)
            else:
                _log.warning("gradflow: a W&B run is active and is used; %s is ignored", ", ".join(self._init))
        if self._attach() is None:
            self._say_missing()

    def write(self, record: StepRecord) -> None:
        """Send one record, or keep it for when it can be sent; ignored after ``close``."""
        self._heard = time.monotonic()
        with self._lock:
            if self._closed:
                return
            self._last = record
            self._health.add(record)
            self._gains.add(record)
            before = self._issues.found
            for issue in record.issues:
                if self._issues.add(issue) and issue.open:
                    self._alerts.add(issue, record.wall_time)
            row = self._row(record)
            if self._tabled is None:
                self._tabled = record.wall_time
            if record.wall_time - self._tabled >= self._every or (self._issues.found and not before):
                self._send_tables(record)
            self._put(row)

    def flush(self) -> None:
        """Send what can be sent now."""
        with self._lock:
            rows = None if self._closed else self._attach()
            if rows is not None:
                rows.pump()

    def close(self) -> None:
        """Hand the last tables over, and finish the run if this writer started it.

        In a run of the user's, rows that cannot ride yet wait for its end: sending them now would move its step, and
        W&B would then drop rows that the user still logs with ``step=``.
        """
        with self._lock:
            if self._closed:
                return
            self._conclude()
            self._closed = True
            rows, self._rows = self._rows, None
            if rows is not None:
                rows.before_end, rows.used = None, False
                if not rows.hooked:
                    rows.finish()
        own, self._own = self._own, None
        if own is not None and not wandb_runs.finish(own, rows.try_to if rows is not None else _try) and rows:
            rows.ended = True

    def _attach(self) -> RideRows | None:
        """Find the active run; a new one gets the run's description and what waited for it."""
        run = self._wandb.run
        if run is None or getattr(run, "disabled", False):
            return None
        rows = self._rows
        if rows is not None and rows.run is run:
            return None if rows.ended else rows
        if rows is not None:
            rows.before_end, rows.used = None, False
        rows = self._rows = RideRows.of(run, self._prefix, limit=self._limit, own=self._own_rows)
        rows.before_end = self._before_end
        if self._info is not None:
            described = info_to_json(self._info)
            rows.try_to("the run's config", partial(self._wandb.describe, run, rows.prefix, described))
        while len(self._early):
            rows.put(self._keys(self._early.take(), rows))
        return rows

    def _put(self, row: dict[str, Any]) -> None:
        rows = self._attach()
        if rows is not None:
            rows.put(self._keys(row, rows))
            self._alerts.send(rows)
        elif self._rows is None:
            self._early.put(row)
        elif self._unsaid and not self._rows.refused:
            self._say_missing()

    def _keys(self, row: dict[str, Any], rows: RideRows) -> dict[str, Any]:
        return {f"{rows.prefix}/{name}": value for name, value in row.items()}

    def _row(self, record: StepRecord) -> dict[str, Any]:
        row: dict[str, Any] = {"step": record.step, **self._picks.scalars(record)}
        if record.histograms:
            row.update(self._picks.histograms(record, self._wandb.module.Histogram))
        row["alerts"], row["open_issues"] = self._issues.found, len(self._issues.open)
        return row

    def _send_tables(self, record: StepRecord) -> None:
        """Send tables and the gain report as they are now, made anew: what was only changed is not sent again."""
        rows = self._attach()
        if rows is None:
            return
        self._tabled = record.wall_time
        tables = (
            ("health", HEALTH_COLUMNS, self._health.rows(self._issues.open, record.step)),
            ("issues", ISSUE_COLUMNS, self._issues.rows()),
        )
        views = self._gains.views(self._issues, record.step, self._info.model if self._info else "")
        make = partial(self._log_tables, rows, [table for table in tables if table[2]], views, record.step)
        self._lane.put(make)

    def _log_tables(self, rows: RideRows, tables: Sequence[Any], views: Sequence[Any], step: int) -> None:
        made: dict[str, Any] = {}
        # Each on its own: pages are files, and a full disk must not cost the tables or the rows.
        for name, columns, cells in tables:
            make = partial(self._wandb.module.Table, columns=list(columns), data=cells)
            rows.try_to(f"the table {name}", partial(_put_into, made, name, make))
        for name, make in views:
            rows.try_to(f"the {name}", partial(_put_into, made, name, make))
        if made:
            rows.add(self._keys(made, rows), step)

    def _conclude(self) -> None:
        """Add the last tables and the run's summary."""
        rows = self._attach()
        if rows is None or self._last is None:
            return
        deadline = time.monotonic() + _LAST_SECONDS
        self._send_tables(self._last)
        self._alerts.finish(rows, deadline)
        still = self._issues.open
        verdict = f"{still[0].issue_type} in {still[0].layer or 'the whole model'}" if still else "healthy"
        summary = {"verdict": verdict, "issues_found": self._issues.found, "last_step": self._last.step}
        rows.try_to("the summary", partial(self._wandb.conclude, rows.run, self._keys(summary, rows)))
        if not self._lane.wait(max(0.0, deadline - time.monotonic())):
            _log.warning("gradflow: W&B did not take the last tables within %.0f s", _LAST_SECONDS)

    def _before_end(self) -> None:
        """The run ends before this writer does: wait, a moment, for records that are on their way."""
        deadline = time.monotonic() + _SETTLE_SECONDS
        self._heard = max(self._heard, time.monotonic())
        while time.monotonic() < min(self._heard + _QUIET_SECONDS, deadline):
            time.sleep(0.02)
        with self._lock:
            self._conclude()

    def _say_missing(self) -> None:
        self._unsaid = False
        run = self._wandb.run
        if run is not None and getattr(run, "disabled", False):
            _log.warning("gradflow: wandb is disabled; nothing is sent to it")
        elif self._rows is None:
            _log.warning("gradflow: no W&B run is active yet; %s", self._wandb.how_to_begin)
        else:
            _log.warning("gradflow: the W&B run has ended; later steps are not sent to it")


def _try(_what: str, call: Callable[[], Any]) -> None:
    with contextlib.suppress(Exception):
        call()


def _put_into(made: dict[str, Any], name: str, make: Callable[[], Any]) -> None:
    made[name] = make()
