"""Sinks for MLflow, SwanLab, Aim and ClearML: each writes to a run that the user began.

``trackio`` speaks wandb's language: use ``WandbSink(module=trackio)``.
"""

from __future__ import annotations

import importlib
import logging
import re
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, final

from gradflow_export.errors import ArgumentError, MissingPackageError

_LEVELS = MappingProxyType({"INFO": logging.INFO, "WARN": logging.WARNING, "ERROR": logging.ERROR})


@final
class MlflowSink:
    """Writes to an MLflow run: metrics, tables as JSON artifacts, alerts as tags.

    Args:
        run_id: The run; by default the active one, which MLflow tells only the thread that began it.

    Raises:
        MissingPackageError: mlflow is not installed.
        ArgumentError: No run is active.
    """

    def __init__(self, run_id: str | None = None) -> None:
        mlflow = _load("mlflow")
        active = mlflow.active_run()
        if run_id is None and active is None:
            raise ArgumentError("MlflowSink expects an active run, got none; call mlflow.start_run() first.")
        self._id = run_id or active.info.run_id
        self._client, self._metric = mlflow.MlflowClient(), mlflow.entities.Metric

    def log_scalars(self, values: Mapping[str, float], step: int) -> None:
        """Log one batch of metrics."""
        now = int(time.time() * 1000)
        metrics = [self._metric(_plain(name), float(value), now, step) for name, value in values.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        """Log a JSON artifact."""
        self._client.log_dict(self._id, {"step": step, "columns": list(columns), "data": list(rows)}, f"{name}.json")

    def log_config(self, values: Mapping[str, Any]) -> None:
        """Log the run's description as a JSON artifact: parameters of a run cannot be changed when it is resumed."""
        self._client.log_dict(self._id, dict(values), "gradflow/run.json")

    def alert(self, title: str, text: str, level: str, step: int) -> None:
        """Set a tag."""
        self._client.set_tag(self._id, f"gradflow.alert.{step}", f"{level}: {title}\n{text}")


@final
class SwanlabSink:
    """Writes to a SwanLab run.

    Args:
        run: What ``swanlab.init`` returned; by default the active one.

    Raises:
        MissingPackageError: swanlab is not installed.
        ArgumentError: No run is active.
    """

    def __init__(self, run: Any = None) -> None:
        swanlab = _load("swanlab")
        self._run = swanlab.get_run() if run is None and swanlab.has_run() else run
        if self._run is None:
            raise ArgumentError("SwanlabSink expects an active run, got none; call swanlab.init() first.")

    def log_scalars(self, values: Mapping[str, float], step: int) -> None:
        """Log one row."""
        self._run.log({name: float(value) for name, value in values.items()}, step=step)


@final
class AimSink:
    """Writes to an Aim run: metrics, tables and description as parameters, alerts as log messages.

    Args:
        run: An ``aim.Run``.
    """

    def __init__(self, run: Any) -> None:
        self._run = run

    def log_scalars(self, values: Mapping[str, float], step: int) -> None:
        """Track each number."""
        for name, value in values.items():
            self._run.track(float(value), name=name, step=step)

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        """Set a parameter of the run."""
        self._run[name] = {"step": step, "columns": list(columns), "data": [list(row) for row in rows]}

    def log_config(self, values: Mapping[str, Any]) -> None:
        """Set parameters of the run."""
        for name, value in values.items():
            self._run[name] = value

    def alert(self, title: str, text: str, level: str, step: int) -> None:
        """Log a message of the run."""
        say = {"INFO": self._run.log_info, "WARN": self._run.log_warning}.get(level, self._run.log_error)
        say(f"{title}\n{text}", step=step)


@final
class ClearmlSink:
    """Writes to a ClearML task: scalars, tables and messages.

    Args:
        task: A ``clearml.Task``.
    """

    def __init__(self, task: Any) -> None:
        self._task, self._logger = task, task.get_logger()

    def log_scalars(self, values: Mapping[str, float], step: int) -> None:
        """Report each number; layers of one metric share a plot."""
        for name, value in values.items():
            title, _, series = name.rpartition("/")
            self._logger.report_scalar(title or name, series, value=float(value), iteration=step)

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        """Report a table."""
        title, _, series = name.rpartition("/")
        self._logger.report_table(title, series, iteration=step, table_plot=[list(columns), *map(list, rows)])

    def log_config(self, values: Mapping[str, Any]) -> None:
        """Connect the run's description."""
        self._task.set_configuration_object("gradflow", config_dict=dict(values))

    def alert(self, title: str, text: str, level: str, step: int) -> None:
        """Report a message."""
        self._logger.report_text(f"step {step}: {title}\n{text}", level=_LEVELS[level], print_console=False)


def _load(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingPackageError(
            f"the {name} sink expects the package {name}, got: {error}; install it with: pip install {name}"
        ) from error


def _plain(name: str) -> str:
    """Return a name of the characters that MLflow takes."""
    return re.sub(r"[^\w\-. :/]", "_", name)
