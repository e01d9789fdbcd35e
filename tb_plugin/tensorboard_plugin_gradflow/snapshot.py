"""A log as one HTML file that needs no server: the page, its code and what it shows."""

from __future__ import annotations

import base64
import gzip
import html
import json
from pathlib import Path
from typing import Any

from tensorboard.backend import json_util

from tensorboard_plugin_gradflow.cache import Remembered
from tensorboard_plugin_gradflow.data import catalog, list_runs, run_issues, run_meta
from tensorboard_plugin_gradflow.histograms import list_histograms, read_all_histograms
from tensorboard_plugin_gradflow.metadata import FORMAT
from tensorboard_plugin_gradflow.moment import MOST_METRICS, read_moment
from tensorboard_plugin_gradflow.overview import overview
from tensorboard_plugin_gradflow.series import Query, read_series
from tensorboard_plugin_gradflow.source import Source
from tensorboard_plugin_gradflow.story import architecture, time_axis

DEFAULT_COLUMNS = 400
_REDUCERS = ("extreme", "mean", "min", "max")
_RIDGES = 28
_MOST_HISTOGRAM_SITES = 200
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"


def render_snapshot(source: Source, title: str, columns: int = DEFAULT_COLUMNS, logdir: Path | None = None) -> str:
    """Return one self-contained HTML page.

    Args:
        source: Where to read.
        title: What the browser's tab is called.
        columns: About how many columns each series keeps; the page cannot ask for more later.
        logdir: The log directory, beside which settings of W&B may lie; ``None`` when it is not on this machine.
    """
    runs = list_runs(source)
    kept = {run["run"]: _run(source, run["run"], columns) for run in runs["runs"]}
    held = {
        "v": FORMAT,
        "runs": runs["runs"],
        "overview": overview(source, Remembered(), logdir),
        "catalog": catalog()["metrics"],
        "kept": kept,
    }
    data = json.dumps(json_util.Cleanse(held), allow_nan=False).replace("<", "\\u003c")
    code = (Path(__file__).parent / "static" / "index.js").read_text(encoding="utf-8")
    code = code.replace("</script", "<\\/script")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title></head><body>"
        f'<script type="application/json" id="gradflow-snapshot">{data}</script>'
        f'<script type="module">{code}</script></body></html>'
    )


def _run(source: Source, run: str, columns: int) -> dict[str, Any]:
    meta = run_meta(source, run)
    names = [metric["name"] for metric in meta["metrics"]]
    return {
        "meta": meta,
        "issues": run_issues(source, run)["issues"],
        "annotations": time_axis(source, run)["annotations"],
        "architecture": architecture(source, run)["modules"],
        "moment": _moment(source, run, names),
        "series": {
            name: _packed(read_series(source, run, Query(name, None, None, columns, _REDUCERS))) for name in names
        },
        "histograms": _histograms(source, run),
    }


def _histograms(source: Source, run: str) -> list[dict[str, Any]]:
    metrics = dict.fromkeys(item["metric"] for item in list_histograms(source, run)["items"])
    found = [
        {"metric": metric, **item}
        for metric in metrics
        for item in read_all_histograms(source, run, metric, most=_RIDGES)["sites"]
    ]
    return found[:_MOST_HISTOGRAM_SITES]


def _moment(source: Source, run: str, names: list[str]) -> dict[str, Any]:
    metrics: dict[str, Any] = {}
    for start in range(0, len(names), MOST_METRICS):
        metrics |= read_moment(source, run, None, names[start : start + MOST_METRICS])["metrics"]
    return metrics


def _packed(body: bytearray) -> str:
    return base64.b64encode(gzip.compress(body, mtime=0)).decode("ascii")
