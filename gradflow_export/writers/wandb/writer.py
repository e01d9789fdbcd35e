"""A writer to Weights & Biases: values within the user's own rows, alerts, tables, and every value as files."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, final

from gradflow_export.errors import ArgumentError, check_flag
from gradflow_export.records.step_record import RunInfo, StepRecord, info_to_json
from gradflow_export.writers.wandb import runs as wandb_runs
from gradflow_export.writers.wandb.ages import Ages
from gradflow_export.writers.wandb.alerts import Alerts
from gradflow_export.writers.wandb.files import FOLDER, StepFiles
from gradflow_export.writers.wandb.fold import Row
from gradflow_export.writers.wandb.lane import Lane
from gradflow_export.writers.wandb.module import Module
from gradflow_export.writers.wandb.picks import LAYERS, Picks, worst
from gradflow_export.writers.wandb.rows import RowQueue, Rows
from gradflow_export.writers.wandb.views import Views

_log = logging.getLogger("gradflow_export")

_QUIET_SECONDS, _SETTLE_SECONDS, _LAST_SECONDS = 0.3, 5.0, 2.0
_ROWS = ("fold", "own", "companion")


@final
class WandbWriter:
    """Writes to the user's active W&B run, or to one of its own when asked.

    With no further arguments the active run is used, looked up anew each time; what is recorded before the first
    ``wandb.init`` waits for it. With arguments of ``wandb.init`` a run is started where none is active, offline when
    there is no server or login, and finished by ``close``.

    No row is added to a run of the user's: the newest values go within the next row that the user logs, with the
    extremes since the last one (see :class:`~gradflow_export.writers.wandb.fold.Fold`). The axis of every chart is
    ``gradflow/step``. What no row took stands in the run's summary, and every value in an artifact of Parquet files.

    Args:
        run: The run to write to, as ``wandb.init`` returned it; by default the active one.
        prefix: First part of every key.
        metrics: Metrics to send in place of the default ones: of the whole model, or per layer.
        top: How many layers of each metric that is read per layer: evenly spread over depth, the same in every run.
        layers: Names or patterns (``"encoder.*"``) of layers that are always sent.
        rows: ``"fold"``; ``"own"``: a row of its own per record, at once, for runs in which nobody passes ``step=`` to
            ``log``, for W&B drops the user's rows otherwise; ``"companion"``: such rows in a second run of the same
            group, which is started and finished here.
        max_waiting: Rows that may wait for the first run; beyond that neighbours are merged.
        table_seconds: Least time between two tables, by the records' clock; one comes with the first issue and at the
            end.
        file_seconds: Least time between two uploads of the Parquet files to a server; ``None`` writes none.
        alert_cooldown: Seconds before the same problem in the same layer raises an alert again.
        most_alerts: Alerts in a run; 0 sends none.
        alert_healed: Whether an alert of level INFO tells that an incident is over.
        module: Another module that speaks wandb's language, such as ``trackio``; what it cannot do is left out.
        **init: Arguments of ``wandb.init``, such as ``project="..."``.

    Attributes:
        ask: Called when a row of the user's took the newest values, for newer ones to be ready for the next.

    Raises:
        MissingPackageError: wandb is not installed.
        ArgumentError: A value cannot be used.
        ArgumentTypeError: ``module`` is not like wandb, or ``run`` is none of its runs.
    """

    name = "wandb"

    def __init__(
        self,
        *,
        run: Any = None,
        prefix: str = "gradflow",
        metrics: Sequence[str] | None = None,
        top: int = LAYERS,
        layers: str | Sequence[str] = (),
        rows: str = "fold",
        max_waiting: int = 1024,
        table_seconds: float = 300.0,
        file_seconds: float | None = 900.0,
        alert_cooldown: float = 600.0,
        most_alerts: int = 50,
        alert_healed: bool = False,
        module: Any = None,
        **init: Any,
    ) -> None:
        if rows not in _ROWS:
            raise ArgumentError(f"rows expects one of {', '.join(_ROWS)}; got {rows!r}; leave it out for 'fold'")
        if top < 0 or max_waiting < 2:
            raise ArgumentError(
                f"top expects a number >= 0 and max_waiting one >= 2, got {top} and {max_waiting}; leave them out"
            )
        check_flag("alert_healed", alert_healed)
        if run is not None and init:
            raise ArgumentError(
                f"run= names a run that has begun, so that {', '.join(init)} cannot be used; leave one out"
            )
        self._picks = Picks(metrics, top, (layers,) if isinstance(layers, str) else layers)
        self._wandb = Module(wandb_runs.load() if module is None else module, run)
        wandb_runs.check_init(self._wandb.module, init)
        self._init, self._how, self._prefix = init, rows, prefix
        self._table_seconds, self._file_seconds = table_seconds, file_seconds
        self._tabled = self._filed = 0.0
        self._alerts = Alerts(self._wandb, alert_cooldown, most_alerts, healed=alert_healed)
        self._views, self._ages = Views(self._wandb.module), Ages()
        self._early, self._lane, self._lock = RowQueue(max_waiting), Lane(), threading.RLock()
        self._files = self._make_files(None)
        self._info: RunInfo | None = None
        self._rows: Rows | None = None
        self._own: Any = None
        self._last: StepRecord | None = None
        self._heard, self._unsaid, self._closed = time.monotonic(), True, False
        self.ask: Callable[[], None] | None = None

    def open(self, run: RunInfo) -> None:
        """Find the run, or start one when asked.

        Raises:
            wandb.errors.Error: A run was asked for and cannot be started, not even offline.
        """
        self._info, self._files = run, self._make_files(run)
        self._picks.begin(run.blocks)
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
            if self._last is None:
                self._tabled = self._filed = record.wall_time
            self._last = record
            first_issue = self._views.add(record)
            self._alerts.add(record)
            if self._files is not None:
                self._files.add(record)
            rows, row = self._attach(), self._row(record)
            if rows is not None:
                rows.put(row, worst(record))
                self._alerts.send(rows)
                self._send_views(rows, record, at_once=first_issue)
            elif self._rows is None:
                self._early.put(row)
            elif self._unsaid and not self._rows.refused:
                self._say_missing()

    def flush(self) -> None:
        """Find the run, if it has begun meanwhile."""
        with self._lock:
            if not self._closed:
                self._attach()

    def close(self) -> None:
        """Hand the last tables and the run's summary over, and finish the run if this writer started it."""
        with self._lock:
            if self._closed:
                return
            self._conclude(_LAST_SECONDS)
            self._closed = True
            rows, self._rows = self._rows, None
            if rows is not None:
                rows.before_end, rows.used = None, False
        own, self._own = self._own, None
        if own is not None and not wandb_runs.finish(own, rows.try_to if rows is not None else _try) and rows:
            rows.ended = True

    def _attach(self) -> Rows | None:
        """Find the run to write to; a new one gets the run's description and what waited for it."""
        run = self._wandb.run
        if run is None or getattr(run, "disabled", False):
            return None
        if self._how == "companion":
            self._own = run = self._own or self._wandb.start_beside(run)
        rows = self._rows
        if rows is not None and rows.run is run:
            return None if rows.ended else rows
        if rows is not None:
            rows.before_end, rows.used = None, False
            self._files, self._ages = self._make_files(self._info), Ages()
        rows = self._rows = Rows.of(self._wandb.module, run, self._prefix, own=self._how != _ROWS[0])
        rows.before_end, rows.ask = self._before_end, self._ask
        if self._info is not None:
            described = info_to_json(self._info)
            rows.try_to("the run's config", partial(self._wandb.describe, run, rows.prefix, described))
        self._alerts.begin(rows)
        self._ages.begin(*rows.left())
        if self._files is not None and getattr(run, "dir", None):
            self._files.begin(Path(run.dir).parent / FOLDER / rows.prefix)
        while len(self._early):
            rows.put(self._early.take())
        return rows

    def _ask(self) -> None:
        if self.ask is not None:
            self.ask()

    def _row(self, record: StepRecord) -> Row:
        row: Row = {"step": record.step, "open_issues": len(self._views.issues.open), **self._picks.scalars(record)}
        row.update(self._picks.histograms(record, self._wandb.module.Histogram))
        return self._ages.complete(record, row)

    def _send_views(self, rows: Rows, record: StepRecord, *, at_once: bool) -> None:
        """Send tables and files where they are due, on a thread that may wait for the server."""
        tables = at_once or record.wall_time - self._tabled >= self._table_seconds
        online = not getattr(rows.run, "offline", True)
        files = online and self._file_seconds is not None and record.wall_time - self._filed >= self._file_seconds
        if tables or files:
            self._lane.put(self._sender(rows, record, files=files))

    def _sender(self, rows: Rows, record: StepRecord, *, files: bool) -> Callable[[], None]:
        self._tabled = record.wall_time
        views, upload = self._views.sender(rows, record.step, self._info), None
        if files:
            self._filed = record.wall_time
            upload = self._files.upload(self._wandb.module, rows.run, rows.prefix) if self._files else None

        def send() -> None:
            views()
            if upload is not None:
                rows.try_to("the Parquet files", upload)

        return send

    def _conclude(self, alert_seconds: float) -> None:
        """Add the last tables and files, and the run's summary."""
        rows = self._attach()
        if self._files is not None:
            self._files.close()
        if rows is None or self._last is None:
            return
        now = time.monotonic()
        drawn = {key: f"{metric} of {site}" for (metric, site), key in self._picks.drawn.items()}
        rows.conclude({**self._views.verdict, "last_step": self._last.step, **({"histograms": drawn} if drawn else {})})
        self._lane.put(self._sender(rows, self._last, files=True))
        self._alerts.finish(rows, now + alert_seconds)
        if not self._lane.wait(max(0.0, now + _LAST_SECONDS - time.monotonic())):
            _log.warning("gradflow: W&B did not take the last tables within %.0f s", _LAST_SECONDS)

    def _before_end(self) -> None:
        """The run ends before this writer does: wait, a moment, for records that are on their way."""
        deadline = time.monotonic() + _SETTLE_SECONDS
        self._heard = max(self._heard, time.monotonic())
        self._ask()
        while time.monotonic() < min(self._heard + _QUIET_SECONDS, deadline):
            time.sleep(0.02)
        with self._lock:
            run = self._rows.run if self._rows is not None else None
            self._conclude(max(_LAST_SECONDS, wandb_runs.finish_limit(run)))

    def _make_files(self, info: RunInfo | None) -> StepFiles | None:
        """Return where all values go; ``None`` where they are not wanted, or what is needed for it is not there."""
        if self._file_seconds is None or not hasattr(self._wandb.module, "Artifact"):
            return None
        if importlib.util.find_spec("pyarrow") is None:
            _log.info(
                "gradflow: no Parquet files go with the W&B run, for pyarrow is not installed: "
                "pip install 'gradflow-export[parquet]'"
            )
            return None
        return StepFiles(info)

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
