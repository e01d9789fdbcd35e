"""Pictures of a debugging session, as PNG files."""

from __future__ import annotations

import importlib
import json
import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gradflow_export.errors import ArgumentError, MissingPackageError, StorageError
from gradflow_export.records.step_record import number_from_json

PLOTS = ("anomalies", "gradients", "memory", "distribution")
"""The pictures, in the order in which they are written."""


def plot_debug_session(history: Sequence[Mapping[str, Any]] | str | os.PathLike[str], folder: Any) -> dict[str, Path]:
    """Draw anomalies over time, gradient norms, memory, and which kinds of anomalies there were.

    Drawn with matplotlib's own objects, so that the user's ``pyplot`` figures and backend stay as they are.

    Args:
        history: Step records, or the path of a ``..._history_<timestamp>.json`` file.
        folder: Where the pictures go; made where it is missing.

    Returns:
        The file of each picture: ``anomalies``, ``gradients``, ``memory``, ``distribution``.

    Raises:
        ArgumentError: There is no step in it.
        MissingPackageError: matplotlib is not installed.
        StorageError: The file cannot be read or a picture cannot be written.
    """
    records = _read(history) if isinstance(history, (str, os.PathLike)) else list(history)
    if not records:
        raise ArgumentError(
            "history must hold at least one step, got none; run some steps in a debugging session first."
        )
    figures = {
        "anomalies": _anomalies(records), "gradients": _gradients(records), "memory": _memory(records),
        "distribution": _distribution(records),
    }  # fmt: skip
    target = Path(folder)
    paths = {name: target / f"debug_{name}.png" for name in PLOTS}
    try:
        target.mkdir(parents=True, exist_ok=True)
        for name in PLOTS:
            figures[name].savefig(paths[name])
    except OSError as error:
        raise StorageError(
            f"pictures must go into a folder that can be written, got {str(target)!r}: {error.strerror or error}; "
            "choose another."
        ) from error
    return paths


def _read(path: str | os.PathLike[str]) -> list[Any]:
    try:
        records = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StorageError(
            f"history must be a file of step records, got {os.fspath(path)!r}: {error}; pass the path of a "
            "..._history_<timestamp>.json file."
        ) from error
    return list(records)


def _axes(title: str, x: str, y: str) -> Any:
    """Return axes of a figure that no backend but Agg knows of."""
    try:
        figures = importlib.import_module("matplotlib.figure")
        agg = importlib.import_module("matplotlib.backends.backend_agg")
    except ImportError as error:
        raise MissingPackageError(
            "pictures need matplotlib, which is not installed; pip install 'gradflow-export[plots]'."
        ) from error
    figure = figures.Figure(figsize=(8, 4), dpi=100, layout="constrained")
    agg.FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set(title=title, xlabel=x, ylabel=y)
    axes.grid(visible=True, alpha=0.3)
    axes.set_axisbelow(True)
    return axes


def _series(records: Sequence[Mapping[str, Any]], *path: str) -> list[float]:
    """Return one number per record, NaN where there is none."""
    out = []
    for record in records:
        value: Any = record
        for key in path:
            value = value.get(key) if isinstance(value, Mapping) else None
        number = number_from_json(value)
        out.append(math.nan if number is None or math.isinf(number) else number)
    return out


def _line(axes: Any, steps: Sequence[float], values: Sequence[float], label: str) -> None:
    axes.plot(steps, values, label=label, marker="." if len(steps) < 60 else None, linewidth=1.2)


def _anomalies(records: Sequence[Mapping[str, Any]]) -> Any:
    axes = _axes("Anomalies over time", "step", "anomalies at the step")
    counts = [len(record["anomaly_details"]) for record in records]
    axes.bar(_series(records, "iteration"), counts, width=1.0, color="tab:red")
    axes.set_ylim(0, max(1, *counts) * 1.1)
    axes.yaxis.get_major_locator().set_params(integer=True)
    return axes.figure


def _gradients(records: Sequence[Mapping[str, Any]]) -> Any:
    axes = _axes("Gradient norms", "step", "L2 norm")
    steps = _series(records, "iteration")
    drawn = False
    for key, label in (("total_norm", "all together"), ("mean_norm", "mean over parameters"), ("std_norm", "spread")):
        values = _series(records, "gradient_stats", key)
        drawn |= any(value > 0 for value in values)
        _line(axes, steps, values, label)
    if drawn:
        axes.set_yscale("log")
    axes.legend()
    return axes.figure


def _memory(records: Sequence[Mapping[str, Any]]) -> Any:
    axes = _axes("Memory", "step", "MB")
    steps = _series(records, "iteration")
    for device, key, label in (
        ("cpu_memory", "rss", "resident"),
        ("cuda_memory", "allocated", "CUDA, allocated"),
        ("cuda_memory", "cached", "CUDA, reserved"),
    ):
        values = _series(records, "memory_info", device, key)
        if not all(map(math.isnan, values)):
            _line(axes, steps, values, label)
    if axes.lines:
        axes.legend()
    else:
        axes.text(0.5, 0.5, "memory was not read", ha="center", transform=axes.transAxes)
    return axes.figure


def _distribution(records: Sequence[Mapping[str, Any]]) -> Any:
    axes = _axes("Anomalies by kind", "kind", "steps")
    kinds = Counter(str(detail["type"]) for record in records for detail in record["anomaly_details"])
    if kinds:
        names = [name for name, _ in kinds.most_common()]
        axes.bar(names, [kinds[name] for name in names], color="tab:red", width=0.5)
        axes.yaxis.get_major_locator().set_params(integer=True)
    else:
        axes.text(0.5, 0.5, "no anomaly", ha="center", transform=axes.transAxes)
    return axes.figure
