"""The panel beside a growing run: memory, flicker, and how far behind the writer it is."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from browse import heap, page_of, panel_of, rest, tensorboard
from panel_logs import LiveRun
from playwright.sync_api import Browser

RELOAD_SECONDS, POLL_SECONDS = 5, 4
SAMPLES = 20

# Notes when each step is first shown, and looks at every frame whether a chart is gone, without size or unpainted.
_WATCH = """
() => {
  const watch = window.gradflowWatch = { shown: [], blank: 0, frames: 0 };
  const output = document.querySelector('[data-part=step]');
  new MutationObserver(() => watch.shown.push([Number(output.textContent.replace(/\\D/g, '')), Date.now() / 1000]))
    .observe(output, { childList: true, characterData: true, subtree: true });
  const small = new OffscreenCanvas(24, 24).getContext('2d', { willReadFrequently: true });
  const painted = (canvas) => {
    if (canvas.width === 0 || canvas.clientHeight === 0) return false;
    small.clearRect(0, 0, 24, 24);
    small.drawImage(canvas, 0, 0, 24, 24);
    return small.getImageData(0, 0, 24, 24).data.some((value) => value > 0);
  };
  const look = () => {
    const all = [...document.querySelectorAll('main canvas')].filter((canvas) => canvas.clientWidth > 0);
    watch.frames += 1;
    if (all.length < watch.least || !all.every(painted)) watch.blank += 1;
    watch.least = Math.max(watch.least ?? 0, all.length);
    requestAnimationFrame(look);
  };
  look();
}
"""


def measure_live(browser: Browser, scratch: Path, minutes: float) -> list[tuple[Any, ...]]:
    """Return rows: what, limit, median or last, worst, unit, count."""
    errors: list[str] = []
    run = LiveRun(scratch / "run")
    try:
        with (
            tensorboard(scratch, f"--reload_interval={RELOAD_SECONDS}") as (address, _),
            page_of(browser, errors) as page,
        ):
            page.goto(f"{address}/#gradflow")
            frame = panel_of(page)
            rest(frame)
            frame.evaluate(_WATCH)
            frame.evaluate("window.gradflowProbe.shifts.length = 0")
            samples = []
            for _ in range(SAMPLES):
                page.wait_for_timeout(minutes * 60_000 / SAMPLES)
                samples.append(heap(page))
            watch = frame.evaluate("window.gradflowWatch")
            shifts = [value for _, value in frame.evaluate("window.gradflowProbe.shifts")]
    finally:
        run.close()
    behind = _behind(run.written, watch["shown"])
    megabytes, nodes = [size for size, _ in samples], [count for _, count in samples]
    return [
        _row("heap of the whole page", 100, statistics.median(megabytes), max(megabytes), "MB", SAMPLES),
        _row("heap, last fifth less first fifth", None, *2 * [_growth(megabytes)], "MB", SAMPLES),
        _row("DOM nodes of the whole page", None, statistics.median(nodes), max(nodes), "", SAMPLES),
        _row("DOM nodes, last fifth less first fifth", None, *2 * [_growth(nodes)], "", SAMPLES),
        _row(
            "step on disk to step shown",
            RELOAD_SECONDS + POLL_SECONDS,
            statistics.median(behind),
            max(behind),
            "s",
            len(behind),
        ),
        _row("frames in which a chart was blank", 0, watch["blank"], watch["blank"], "", watch["frames"]),
        _row("layout shift", 0, sum(shifts), max(shifts, default=0), "", len(shifts)),
        _row("console errors and CSP violations", 0, len(errors), len(errors), ""),
    ]


def _row(what: str, limit: float | None, median: float, worst: float, unit: str, count: int = 1) -> tuple[Any, ...]:
    return what, limit, round(median, 3), round(worst, 3), unit, count


def _growth(values: list[float] | list[int]) -> float:
    fifth = max(1, len(values) // 5)
    return statistics.median(values[-fifth:]) - statistics.median(values[:fifth])


def _behind(written: dict[int, float], shown: list[tuple[int, float]]) -> list[float]:
    """Return, for each chunk that was written, the seconds until it or a later one was shown."""
    out = []
    for step, at in written.items():
        seen = next((time for number, time in shown if number >= step), None)
        if seen is not None:
            out.append(seen - at)
    return out
