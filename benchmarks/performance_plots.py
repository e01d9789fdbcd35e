"""Pictures of what watching costs, on a light ground."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from scaling import WATCHED, Point
from scaling_runs import StepsRow
from timing import Row

OURS, RIVAL, BARE = "#1565c0", "#b26a00", "#757575"
COLOURS = {"gradflow_norms": "#1565c0", "gradflow_every_step": "#6a1b9a"}
TITLES = {"gradflow_norms": "loss and norms, every step", "gradflow_every_step": "statistics, gains, updates"}


def plot_overhead(rows: Sequence[Row], path: Path) -> None:
    """Draw the training thread's time with each instrument as bars, one chart for each workload."""
    programs = list(dict.fromkeys(row.workload for row in rows))
    figure, charts = plt.subplots(
        1, len(programs), figsize=(2.4 + 3.6 * len(programs), 4.4), sharey=True, squeeze=False
    )
    for chart, program in zip(charts[0], programs, strict=True):
        mine = [row for row in rows if row.workload == program][::-1]
        colours = [OURS if row.instrument.startswith(("gradflow", "debug_")) else RIVAL for row in mine]
        # Bars begin at the bare step: their length is what was added.
        added = [row.thread_ratio - 1 for row in mine]
        chart.barh([row.instrument for row in mine], added, left=1, color=colours)
        for place, row in enumerate(mine):
            chart.text(1.03 * max(row.thread_ratio, 1), place, f"{row.thread_ratio:.2f}", va="center", fontsize=8)
        chart.set(title=program, xlabel="CPU time of a step, with / without", xscale="log")
        chart.set_xlim(0.8, 1.6 * max(*(row.thread_ratio for row in mine), 2))
        chart.set_xticks([1, 2, 5], ["1", "2", "5"])
        chart.set_xticks([], minor=True)
        chart.axvline(1, color=BARE, linewidth=0.8)
        _plain(chart)
    _save(figure, path)


def plot_scaling(points: Sequence[Point], steps: Sequence[StepsRow], path: Path) -> None:
    """Draw added time over parameters and over tensors, and memory and bytes over the length of a run."""
    figure, charts = plt.subplots(2, 2, figsize=(10, 7.6))
    for chart, axis in zip(charts[0], ("parameters", "tensors"), strict=True):
        known = sorted((p for p in points if p.axis == axis), key=lambda p: p.size)
        if not known:
            continue
        bare = [p for p in known if p.row.instrument == WATCHED[0]]
        chart.plot([p.size for p in bare], [p.row.bare_ms for p in bare], "--", color=BARE, label="the bare step")
        for name, colour in COLOURS.items():
            mine = [p for p in known if p.row.instrument == name and p.row.added_ms > 0]
            added = [p.row.added_ms for p in mine]
            chart.plot([p.size for p in mine], added, "o-", color=colour, label=f"added: {TITLES[name]}")
        chart.set(xscale="log", yscale="log", xlabel=axis, ylabel="CPU of the training thread, ms per step")
        chart.legend(fontsize=8)
    lengths = [row.steps for row in steps]
    memory, size = charts[1]
    memory.plot(lengths, [row.memory_mb for row in steps], "o-", color=OURS)
    memory.set(ylabel="memory of the process, MB")
    size.plot(lengths, [row.bytes_per_step for row in steps], "o-", color=OURS)
    size.set(ylabel="log, bytes per step")
    for chart in charts[1] if steps else ():
        chart.set(xscale="log", xlabel="steps of one run of a tiny model", ylim=(0, 1.1 * chart.get_ylim()[1]))
    for chart in charts.flat:
        _plain(chart)
    _save(figure, path)


def _plain(chart: Axes) -> None:
    chart.spines[["top", "right"]].set_visible(False)
    chart.grid(alpha=0.25, linewidth=0.6)
    chart.set_axisbelow(True)


def _save(figure: plt.Figure, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=110, facecolor="white")
    plt.close(figure)
