"""TensorBoard on logs without our data: the same with this plugin and without it, by turns in one run."""

from __future__ import annotations

import json
import time
from pathlib import Path

import psutil
from browse import get, page_of, panel_of, tensorboard, wait_for
from panel_logs import scalar_log
from playwright.sync_api import Browser

TURNS = 5
REQUESTS = 40
RUNS, TAGS, STEPS = 5, 200, 1000
Row = tuple[str, float | None, list[float], str]


def measure_without(browser: Browser, scratch: Path) -> list[Row]:
    """Return rows: what, limit, values, unit."""
    figures: dict[tuple[str, bool], list[float]] = {}
    for turn in range(TURNS):
        for plugin in (True, False) if turn % 2 else (False, True):
            logdir = scratch / f"{turn}-{plugin}"
            scalar_log(logdir, RUNS, TAGS, steps=STEPS)
            for what, values in _one(logdir, plugin).items():
                figures.setdefault((what, plugin), []).extend(values)
    rows: list[Row] = []
    for what in dict.fromkeys(what for what, _ in figures):
        unit = "MB" if "memory" in what else "ms"
        rows += [(f"{what}, {word} us", None, figures[what, word == "with"], unit) for word in ("without", "with")]
        # Other work on the machine only ever adds, so the least of each is compared.
        ratio = min(figures[what, True]) / min(figures[what, False])
        rows.append((f"{what}: least with / least without", None, [round(ratio, 3)], ""))
    return rows + _how_to(browser, logdir)


def _one(logdir: Path, plugin: bool) -> dict[str, list[float]]:
    begun = time.perf_counter()
    with tensorboard(logdir, "--reload_interval=1", plugin=plugin) as (address, process):
        started, busy = time.perf_counter() - begun, _cpu(process)
        wait_for(lambda: _last(address) == STEPS - 1)
        listing = []
        for _ in range(REQUESTS):
            before = time.perf_counter()
            get(f"{address}/data/plugins_listing")
            listing.append(time.perf_counter() - before)
        reloads = []
        for first in range(STEPS, STEPS + 5):
            scalar_log(logdir, RUNS, TAGS, first, 1)
            before = time.perf_counter()
            wait_for(lambda wanted=first: _last(address) == wanted)
            reloads.append(time.perf_counter() - before)
        memory = sum(part.memory_info().rss for part in (process, *process.children(recursive=True)))
        cpu = sum(_cpu(part) for part in (process, *process.children(recursive=True)))
    return {
        "start to first answer": [1e3 * started],
        "CPU time of the start": [1e3 * busy],
        "/data/plugins_listing": [1e3 * value for value in listing],
        "new scalars on disk to answered, reload every second": [1e3 * value for value in reloads],
        "CPU time of the server for all of it": [1e3 * cpu],
        "memory of the server": [memory / 1e6],
    }


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _last(address: str) -> int | None:
    """Return the last step of the last tag of the last run, ``None`` before it is loaded."""
    try:
        answer = json.loads(
            get(f"{address}/data/plugin/scalars/scalars?run=run-{RUNS - 1}&tag=group19/metric{TAGS - 1}")
        )
    except OSError:
        return None
    return int(answer[-1][1]) if answer else None


def _how_to(browser: Browser, logdir: Path) -> list[Row]:
    """Open the tab all the same: it is inactive and tells what to do."""
    errors: list[str] = []
    with tensorboard(logdir) as (address, _), page_of(browser, errors) as page:
        listing = json.loads(get(f"{address}/data/plugins_listing"))
        page.goto(f"{address}/#gradflow")
        lines = panel_of(page).locator("[data-part=empty] pre").inner_text().splitlines()
    return [
        ("tab active (0 is no)", 0, [float(listing["gradflow"]["enabled"])], ""),
        ("lines of the how-to", 5, [float(len(lines))], ""),
        ("console errors and CSP violations", 0, [float(len(errors))], ""),
    ]
