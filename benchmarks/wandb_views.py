"""The pictures of docs/wandb.md: what the workspace of ``gradflow dashboard`` shows of two runs, and the gain report.

    python benchmarks/wandb_views.py     # needs matplotlib, wandb-workspaces and Chromium; under a minute

Two runs are recorded offline and read back. The panels, their titles, keys and scales are those of the workspace that
``gradflow dashboard --dry-run`` prints, with the values of the rows; W&B's own page is not drawn. The gain report is
the file that W&B would show. Writes ``docs/images/wandb-dashboard.png`` and ``docs/images/wandb-report.png``.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
import wandb
from torch import nn

from gradflow_export import Exporter
from gradflow_export.cli import main as gradflow

mpl.use("Agg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(Path(__file__).parent), str(ROOT / "tests" / "wandb_core")]
from browse import chromium, page_of  # noqa: E402 - lies beside this script
from offline import wait_for_log  # noqa: E402 - lies with the tests

IMAGES = ROOT / "docs" / "images"
LINES, BARS = "Run History Line Plot", "Bar Chart"
RUNS = {"too small weights": 0.3, "healthy": 1.0}
"""Two runs, by how many times as large as they should be their weights are in the beginning."""

STEPS, EVERY, DEPTH, COLUMNS = 200, 5, 12, 3


def record(name: str, factor: float) -> Path:
    """Train beside an offline run, which the user logs to every few steps; return its folder."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(DEPTH)]
    model = nn.Sequential(*layers, nn.Linear(32, 4))
    with torch.no_grad():
        for layer in layers:
            nn.init.xavier_normal_(layer[0].weight, factor)
    criterion, optimizer = nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1)
    run = wandb.init(project="views", name=name, mode="offline")
    exporter = Exporter(model, wandb=run, backends=["wandb"], budget=None, verbose=0).watch(criterion)
    for step in range(STEPS):
        x = torch.randn(64, 32)
        optimizer.zero_grad()
        loss = criterion(model(x), x[:, :4].argmax(1))
        loss.backward()
        optimizer.step()
        if step % EVERY == EVERY - 1:
            run.log({"train/loss": loss.item()}, step=step)
    exporter.close()
    run.finish()
    return Path(run.dir).parent


def panels() -> list[tuple[str, dict[str, Any]]]:
    """Return the panels of numbers that the workspace has: their kind, and what they are told."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        gradflow(["dashboard", "me/views", "--dry-run"])
    sections = json.loads(printed.getvalue())["spec"]["section"]["panelBankConfig"]["sections"]
    found = [(panel["viewType"], panel["config"]) for section in sections for panel in section["panels"]]
    return [(kind, told) for kind, told in found if kind in {LINES, BARS}]


def keys_of(told: dict[str, Any], log: Any) -> list[str]:
    """Return the keys of a run that a panel shows."""
    known = {key: None for row in log.history for key in row}
    pattern = told.get("metricRegex")
    return [key for key in known if (re.match(pattern, key) if pattern else key in told["metrics"])]


def draw(axes: Any, kind: str, told: dict[str, Any], logs: dict[str, Any]) -> bool:
    """Draw a panel; return whether it shows anything."""
    shown = False
    for number, (name, log) in enumerate(logs.items()):
        if kind == BARS:
            value = log.summary.get(told["metrics"][0])
            if value is not None:
                axes.barh([name], [value], color=f"C{number}")
                shown = True
            continue
        for place, key in enumerate(keys_of(told, log)):
            points = [(row["gradflow/step"], row[key]) for row in log.history if isinstance(row.get(key), (int, float))]
            if points:
                axes.plot(*zip(*points, strict=True), color=f"C{number}", alpha=1 - 0.16 * place, linewidth=1)
                shown = True
    if told.get("yLogScale"):
        axes.set_yscale("log")
    axes.set_title(told["chartTitle"], fontsize=8)
    axes.tick_params(labelsize=7)
    return shown


def dashboard(logs: dict[str, Any], path: Path) -> None:
    """Draw all panels that show anything."""
    kept = []
    for kind, told in panels():
        figure, axes = plt.subplots()
        if draw(axes, kind, told, logs):
            kept.append((kind, told))
        plt.close(figure)
    rows = -(-len(kept) // COLUMNS)
    figure, grid = plt.subplots(rows, COLUMNS, figsize=(11, 2.1 * rows), layout="constrained")
    for axes in grid.flat[len(kept) :]:
        axes.set_axis_off()
    for axes, (kind, told) in zip(grid.flat, kept, strict=False):
        draw(axes, kind, told, logs)
    names = [plt.Line2D([], [], color=f"C{number}", label=name) for number, name in enumerate(logs)]
    figure.legend(handles=names, loc="outside upper center", ncols=len(names), fontsize=8, frameon=False)
    figure.savefig(path, dpi=90)


def report(folder: Path, path: Path) -> None:
    """Photograph the newest gain report of a run."""
    page_file = max(folder.glob("files/media/html/**/*.html"), key=lambda file: file.stat().st_mtime)
    errors: list[str] = []
    with chromium() as browser, page_of(browser, errors, 1000, 620) as page:
        page.goto(page_file.as_uri())
        path.write_bytes(page.screenshot())


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        os.chdir(scratch)
        os.environ.update(WANDB_SILENT="true", WANDB_CONSOLE="off", WANDB_DIR=scratch)
        os.environ.update({f"WANDB_{name}_DIR": f"{scratch}/{name}" for name in ("DATA", "CACHE", "CONFIG")})
        folders = {name: record(name, factor) for name, factor in RUNS.items()}
        dashboard({name: wait_for_log(folder) for name, folder in folders.items()}, IMAGES / "wandb-dashboard.png")
        report(next(iter(folders.values())), IMAGES / "wandb-report.png")
        os.chdir(ROOT)


if __name__ == "__main__":
    main()
