"""BackwardPassDiagnostics: what happened in each backward pass, from an exporter's records."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim.optimizer import Optimizer

from gradflow_export.config import THRESHOLDS, make_settings
from gradflow_export.diagnostics.analysis import (
    gradient_statistics,
    loss_analysis,
    notes,
    over_time,
    parameter_updates,
    performance,
)
from gradflow_export.diagnostics.console import report_lines
from gradflow_export.diagnostics.discrete import DiscreteUpdateAnalyzer
from gradflow_export.diagnostics.series import GRADIENTS, LOSS, TIMING, UPDATES, SeriesBook
from gradflow_export.diagnostics.stability import StabilityCounts
from gradflow_export.errors import ArgumentError, ArgumentTypeError, StorageError
from gradflow_export.exporter import Exporter
from gradflow_export.instruments.discrete.declared_grids import Grids
from gradflow_export.instruments.discrete.nodes import ROWS, Pairs
from gradflow_export.records.step_record import Issue, StepRecord, issue_to_json, number_to_json
from gradflow_export.report.flow_pattern import FlowPatterns
from gradflow_export.report.summary import write_json
from gradflow_export.rules.unclipped import before_clipping

if TYPE_CHECKING:
    from typing_extensions import Self

_EVERY_STEP = ("logits", "updates", "discrete")
_JSON_LOSS = ("total_loss", "logit_max_logit", "confidence_max_confidence")


class BackwardPassDiagnostics:
    """Coordinates the diagnosis of backward passes; it reads an exporter's records and attaches no hook of its own.

    It works in any loop::

        diagnostics = BackwardPassDiagnostics(model, criterion)
        ...                                               # train as ever
        diagnostics.print_diagnostic_report()
        diagnostics.save_diagnostic_data("logs/diagnostics.json")

    What the report calls phase and magnitude are direction and length of the rows of each weight, unless the weights
    are complex or ``pairs`` names parameters. Everything the report tells is read at every step, so that each list of
    the JSON export has an entry for each; ``intervals`` such as ``{"logits": 25, "updates": 50, "discrete": 100}`` cost
    less. An update is what changed from one forward pass to the next; asked for before that, the last one is measured
    by the weights as they are.

    Args:
        watched: The model, or an :class:`~gradflow_export.exporter.Exporter` that watches it.
        criterion: The loss module; leave it out and call ``diagnostics.exporter.observe(loss=loss)`` otherwise.
        optimizer: As in :meth:`Exporter.watch <gradflow_export.exporter.Exporter.watch>`.
        blocks: As there.
        pairs: As there, but ``"rows"`` by default.
        grid: As ``grids`` there: width of the grid that weights are rounded to when they are used, or widths by name.
        buffer: How many values of each series to keep; statistics cover the whole run.
        alert_thresholds: Fixed thresholds by name, such as ``{"gradient_explosion_threshold": 10.0}``.
        **settings: Anything :class:`~gradflow_export.exporter.Exporter` takes, such as ``config``; ``backends`` is
            empty by default.

    Attributes:
        exporter: The exporter whose records are read.
        update_analyzer: What reads the updates.

    Raises:
        ArgumentError: A value cannot be used, or settings are given for an exporter that exists already.
        ArgumentTypeError: An argument has the wrong type.
        StorageError: ``config`` cannot be read.
    """

    def __init__(
        self,
        watched: Exporter | nn.Module,
        criterion: nn.Module | None = None,
        *,
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        blocks: Iterable[str | nn.Module] | None = None,
        pairs: Pairs = ROWS,
        grid: Grids = None,
        buffer: int = 1000,
        alert_thresholds: Mapping[str, float] | None = None,
        **settings: Any,
    ) -> None:
        _check_buffer(buffer)
        given: dict[str, Any] = {**settings, **(alert_thresholds or {})}
        self._owns = not isinstance(watched, Exporter)
        if isinstance(watched, Exporter):
            named = [*given, *(name for name, value in (("criterion", criterion), ("grid", grid)) if value is not None)]
            if named:
                raise ArgumentError(
                    f"an Exporter that exists has its settings already, got {', '.join(sorted(named))}; pass them "
                    "to the Exporter or its watch(), or pass the model here."
                )
            self.exporter = watched
        else:
            given["intervals"] = _intervals(given)
            self.exporter = Exporter(watched, **{"backends": (), "budget": None, "verbose": 0, **given})
        thresholds = {**THRESHOLDS, **self.exporter.settings.thresholds}
        self.update_analyzer = DiscreteUpdateAnalyzer()
        self._lock = threading.Lock()
        self._book = SeriesBook(buffer)
        self._counts = StabilityCounts(thresholds)
        self._flow = FlowPatterns()
        self._records = self._last_step = 0
        self.exporter.register_analyzer(f"diagnostics-{id(self)}", self._take)
        if self._owns:
            self.exporter.watch(criterion, optimizer=optimizer, blocks=blocks, pairs=pairs, grids=grid)

    def get_diagnostic_summary(self) -> dict[str, Any]:
        """Return everything that was found so far; JSON-ready, ``None`` where nothing was read.

        Returns:
            ``backward_pass_diagnostics`` with ``gradient_statistics``, ``loss_analysis``, ``parameter_updates``,
            ``performance``, ``stability_counts``, ``alerts`` and ``warnings``; ``gradient_flow_analysis`` with
            ``pattern``, ``frequent_bottlenecks``, ``unusually_small``, ``small_nodes`` and
            ``phase_magnitude_correlation``;
            ``discrete_update_analysis`` with ``mean_effectiveness`` and the rest of
            :meth:`~gradflow_export.diagnostics.discrete.DiscreteUpdateAnalyzer.summary`.
        """
        self._catch_up()
        issues = self.exporter.issues
        with self._lock:
            book, counts = self._book, self._counts
            return {
                "backward_pass_diagnostics": {
                    "records": self._records,
                    "gradient_statistics": gradient_statistics(book),
                    "loss_analysis": {**loss_analysis(book), "loss_anomalies": counts.loss_anomalies},
                    "parameter_updates": parameter_updates(book),
                    "performance": performance(book),
                    "stability_counts": counts.as_dict(),
                    "alerts": [issue_to_json(issue) for issue in issues],
                    "warnings": notes(book, self._flow.damped_share()),
                },
                "gradient_flow_analysis": {
                    **self._flow.as_dict({issue.issue_type for issue in issues if issue.open}),
                    "small_nodes": self.update_analyzer.small_nodes(),
                    "phase_magnitude_correlation": over_time(book),
                },
                "discrete_update_analysis": self.update_analyzer.summary(),
            }

    def diagnostic_report(self) -> str:
        """Return the report as text."""
        self._catch_up()
        with self._lock:
            return "\n".join(report_lines(self._book, self._counts, self.update_analyzer.summary()))

    def print_diagnostic_report(self) -> None:
        """Print :meth:`diagnostic_report`."""
        print(self.diagnostic_report())

    def diagnostic_data(self) -> dict[str, Any]:
        """Return the last ``buffer`` values of each series, seconds for times, and the counts.

        Returns:
            ``gradient_stats``, ``loss_decomposition`` (with ``component_<name>`` for each loss component that was
            handed over), ``parameter_updates``, ``timing_stats``, ``stability_counts``. NaN and Inf are strings.
        """
        self._catch_up()
        with self._lock:
            parts = {f"component_{name}": _values(series.values) for name, series in self._book.components()}
            return {
                "gradient_stats": self._columns(GRADIENTS),
                "loss_decomposition": {**self._columns({name: LOSS[name] for name in _JSON_LOSS}), **parts},
                "parameter_updates": self._columns(UPDATES),
                "timing_stats": self._columns(TIMING),
                "stability_counts": self._counts.as_dict(),
            }

    def save_diagnostic_data(self, path: str | os.PathLike[str]) -> None:
        """Write :meth:`diagnostic_data` as JSON; folders that are missing are made.

        Raises:
            ArgumentError: The path does not end in ``.json``.
            StorageError: The file cannot be written.
        """
        target = Path(path)
        if target.suffix == ".json":
            _make_folder(target.parent)
        write_json(target, self.diagnostic_data())

    def register_analyzer(self, name: str, analyzer: Any) -> None:
        """Have an analyzer asked about every record; its numbers become metrics ``custom.<name>.<key>``.

        Args:
            name: A short word.
            analyzer: A callable, or an object with ``analyze_custom_metric``, that takes a
                :class:`~gradflow_export.records.step_record.StepRecord` and returns ``{key: number}`` or ``None``.

        Raises:
            ArgumentTypeError: ``analyzer`` is neither.
        """
        self.exporter.register_analyzer(name, analyzer)

    @property
    def alerts(self) -> tuple[Issue, ...]:
        """Every issue found so far, open ones first, worst first."""
        return self.exporter.issues

    def close(self) -> None:
        """Close the exporter if it was made here; what was read can still be asked for."""
        if self._owns:
            self.exporter.close()

    def __enter__(self) -> Self:
        """Return the diagnostics."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close."""
        self.close()

    def _take(self, record: StepRecord) -> None:
        with self._lock:
            self._records += 1
            self._last_step = record.step
            record = before_clipping(record)  # what the optimizer used reads the limit
            self._book.add(record)
            self._counts.add(record)
            self._flow.add(record)
            self.update_analyzer.add(record)

    def _catch_up(self) -> None:
        """Wait until every step so far is read, as long as there is any progress."""
        self.exporter.summary()  # ends the step under way, which may be the first of all
        wanted, before = self.exporter.current_step - 1, -1
        while before != self._records and self._last_step < wanted:
            before = self._records
            self.exporter.summary()

    def _columns(self, names: Mapping[str, str]) -> dict[str, list[Any]]:
        return {name: _values(self._book[metric].values) for name, metric in names.items()}


def _intervals(given: Mapping[str, Any]) -> dict[str, int]:
    """Return the intervals that were chosen, and 1 for what the report is about."""
    chosen = make_settings(given.get("config"), {"intervals": given.get("intervals")}).schedule
    return {**dict.fromkeys(_EVERY_STEP, 1), **{name: chosen.intervals[name] for name in chosen.chosen}}


def _values(values: Sequence[float]) -> list[Any]:
    return [number_to_json(value) for value in values]


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"save cannot make the folder {str(folder)!r}: {error.strerror or error}.") from error


def _check_buffer(buffer: object) -> None:
    if isinstance(buffer, bool) or not isinstance(buffer, int):
        raise ArgumentTypeError(f"buffer must be a number of values, got {buffer!r}; for example buffer=1000.")
    if buffer < 1:
        raise ArgumentError(f"buffer must be at least 1 value, got {buffer}; the default is 1000.")
