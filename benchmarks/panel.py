"""What the panel costs a person: the time to a painted map, to follow a hand, to zoom, and the memory it takes.

    python benchmarks/panel.py --cache /tmp/gradflow-logs   # the table, some minutes; the logs take 1.6 GB there
    python benchmarks/panel.py --live 10                    # ten minutes beside a growing run
    python benchmarks/panel.py --layers 20 --steps 2000 --visits 1 --wide 300 --runs 20   # whether all of it works
    python benchmarks/panel.py --server --cache /tmp/gradflow-logs   # the server alone, without a browser
    python benchmarks/panel.py --without                    # TensorBoard on other people's logs, with and without us

Real TensorBoard with its own content-security policy, headless Chromium, logs of the real writer: 200 layers and 8
metrics per layer, read at every step; then very many layers, and very many runs. All times end after the frame in which
the change is painted.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from playwright.sync_api import Browser, FloatRect, Frame, Page

sys.path.insert(0, str(Path(__file__).parent))
from browse import Cpu, chromium, get, heap, page_of, panel_of, rest, tensorboard, wait_for
from panel_live import measure_live
from panel_logs import LAYERS, cached_log, many_runs
from panel_server import RUNS, WIDE, WIDE_STEPS, measure_ready, measure_server
from panel_without import measure_without

BUNDLE = Path(__file__).parents[1] / "tb_plugin" / "tensorboard_plugin_gradflow" / "static" / "index.js"
GESTURES = 40
ZOOMS = 12

# Armed before a gesture: resolves with the milliseconds from the gesture to the frame in which the map is painted anew.
_ARM_TAB = """
() => {
  const probe = () => document.querySelector('iframe')?.contentWindow?.gradflowProbe;
  window.gradflowRepaint = new Promise((done) => addEventListener('pointerup', async (event) => {
    while (!(probe()?.paints.length > 0)) await new Promise(requestAnimationFrame);
    done(await probe().painted() - performance.timeOrigin - event.timeStamp);
  }, { capture: true, once: true }));
}
"""
_ARM_RUNS = """
() => {
  const rows = () => document.querySelector('iframe')?.contentDocument?.querySelectorAll('[data-part=runs] tbody tr');
  const probe = () => document.querySelector('iframe').contentWindow.gradflowProbe;
  window.gradflowRepaint = new Promise((done) => addEventListener('pointerup', async (event) => {
    window.gradflowBegun = performance.timeOrigin + event.timeStamp;
    while (!(rows()?.length > 0)) await new Promise(requestAnimationFrame);
    done(await probe().painted() - performance.timeOrigin - event.timeStamp);
  }, { capture: true, once: true }));
}
"""
# The first rows are there before all runs are read; the note says how many are left.
_WHOLE = """
async () => {
  const { contentDocument, contentWindow } = document.querySelector('iframe');
  const note = contentDocument.querySelector('[data-part=runs-note]');
  while (note.textContent.includes('reading')) await new Promise(requestAnimationFrame);
  return await contentWindow.gradflowProbe.painted() - window.gradflowBegun;
}
"""
# The panel stretches what it has at once; what counts is the repaint after the server's answer about the map.
_ARM_MAP = """
() => {
  const probe = window.gradflowProbe;
  const nextFrame = () => new Promise(requestAnimationFrame);
  window.gradflowRepaint = new Promise((done) => addEventListener('pointerup', async (event) => {
    const begun = performance.timeOrigin + event.timeStamp;
    const answer = () => performance.getEntriesByType('resource').find(
      (entry) => entry.startTime >= event.timeStamp && /series[?].*reduce=extreme/.test(entry.name));
    while (answer() === undefined) await nextFrame();
    const since = performance.timeOrigin + answer().responseEnd;
    while (!probe.paints.some((paint) => paint >= since)) await nextFrame();
    done(await probe.painted() - begun);
  }, { capture: true, once: true }));
}
"""
# On the way back the panel may ask nobody: what counts is the last repaint, after which there is none for a second.
_ARM_BACK = """
() => {
  const probe = window.gradflowProbe;
  const nextFrame = () => new Promise(requestAnimationFrame);
  window.gradflowRepaint = new Promise((done) => addEventListener('pointerup', async (event) => {
    const begun = performance.timeOrigin + event.timeStamp;
    let seen = probe.paints.length, last = 0;
    while (last === 0 || probe.now() - last < 1000) {
      if (probe.paints.length > seen) [seen, last] = [probe.paints.length, await probe.painted()];
      else await nextFrame();
    }
    done(last - begun);
  }, { capture: true, once: true }));
}
"""
_TOO_LONG = "new Promise((_, fail) => setTimeout(() => fail(new Error('no repaint within 60 s')), 60000))"


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        what: What was measured.
        limit: What it may be, in ``unit``; ``None`` where nothing was promised.
        measured: Median, in ``unit``.
        worst: Greatest of all, in ``unit``.
        unit: ms, MB, kB, or nothing for a count.
        count: Of how many the median is.
    """

    what: str
    limit: float | None
    measured: float
    worst: float
    unit: str
    count: int = 1

    @classmethod
    def of(cls, what: str, limit: float | None, values: Sequence[float], unit: str) -> Row:
        """Summarise several measurements."""
        return cls(what, limit, round(statistics.median(values), 3), round(max(values), 3), unit, len(values))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, help="where the generated logs are kept; a temporary folder without it")
    parser.add_argument("--steps", type=int, nargs="+", default=[20_000, 100_000], help="lengths of the runs")
    parser.add_argument("--layers", type=int, default=LAYERS, help="layers of the runs (default: %(default)s)")
    parser.add_argument("--visits", type=int, default=5, help="how often TensorBoard is started (default: %(default)s)")
    parser.add_argument("--wide", type=int, default=WIDE, help="layers of the widest run (default: %(default)s)")
    parser.add_argument("--runs", type=int, default=RUNS, help="runs of the overview (default: %(default)s)")
    parser.add_argument("--live", type=float, metavar="MINUTES", help="stay beside a growing run instead")
    parser.add_argument("--without", action="store_true", help="logs without our data instead, with and without us")
    parser.add_argument("--json", action="store_true", help="print a list of rows instead of the table")
    parser.add_argument("--server", action="store_true", help="the server by itself instead")
    args = parser.parse_args()
    if args.server:
        with tempfile.TemporaryDirectory() as scratch:
            found = measure_server(args.cache or Path(scratch), args.steps, args.layers)
        show([Row.of(*row) for row in found], as_json=args.json)
        return
    with tempfile.TemporaryDirectory() as scratch, chromium() as browser:
        version = f"Chromium {browser.version}, "
        if args.live is not None:
            rows = [Row(*row) for row in measure_live(browser, Path(scratch), args.live)]
        elif args.without:
            rows = [Row.of(*row) for row in measure_without(browser, Path(scratch))]
        else:
            cache = args.cache or Path(scratch)
            rows = measure_budget(browser, cache, args.steps, args.layers, args.visits)
            rows += measure_many(browser, cache, args.wide, args.runs, args.visits)
            rows += [Row.of(*row) for row in measure_ready(cache, args.steps, args.layers)]
    show(rows, version, as_json=args.json)


def show(rows: Sequence[Row], browser: str = "", *, as_json: bool) -> None:
    """Print what was measured."""
    if as_json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
        return
    load = " ".join(f"{number:.1f}" for number in os.getloadavg())
    print(f"{browser}{os.cpu_count()} cores, load {load}\n")
    print("| what | limit | median | worst | of |\n|---|---|---|---|---|")
    for row in rows:
        limit = "" if row.limit is None else f"{row.limit:g} {row.unit}"
        print(f"| {row.what} | {limit} | {row.measured:.4g} {row.unit} | {row.worst:.4g} {row.unit} | {row.count} |")


def measure_budget(browser: Browser, cache: Path, lengths: Sequence[int], layers: int, visits: int) -> list[Row]:
    """Return the rows of the budget."""
    size = len(gzip.compress(BUNDLE.read_bytes(), 9)) / 1e3
    rows = [Row("bundle, gzip", 90, round(size, 1), round(size, 1), "kB")]
    errors: list[str] = []
    for steps in lengths:
        rows += _measure_run(browser, cached_log(cache, steps, layers), steps, visits, errors)
    for error in errors:
        sys.stderr.write(f"console: {error}\n")
    rows.append(Row("console errors and CSP violations", 0, len(errors), len(errors), ""))
    return rows


def _measure_run(browser: Browser, logdir: Path, steps: int, visits: int, errors: list[str]) -> list[Row]:
    limit = 1000 if steps <= 20_000 else 2000
    named = f"{steps:,} steps".replace(",", " ")
    cold: list[float] = []
    warm: list[float] = []
    shifts: list[float] = []
    for number in range(visits):
        with tensorboard(logdir) as (address, _):
            wait_for(lambda: last_step(address) == steps)
            cold.append(visit(browser, address, errors, shifts))
            warm.append(visit(browser, address, errors, shifts))
            if number == visits - 1:
                with page_of(browser, errors) as page:
                    before, _ = heap(_settled(page, address))
                    _click_tab(page)
                    gestures = _gestures(page, panel_of(page), steps)
                    after, nodes = heap(page)
    return [
        Row.of(f"{named}: tab clicked to map painted, TensorBoard just started", limit, cold, "ms"),
        Row.of(f"{named}: the same, second visit", limit, warm, "ms"),
        *(Row.of(f"{named}: {what}", most, values, "ms") for what, most, values in gestures),
        Row.of(f"{named}: layout shift while loading", 0, shifts, ""),
        Row(f"{named}: heap of the whole page, TensorBoard's own {before:.0f} MB included", 100, after, after, "MB"),
        Row(f"{named}: DOM nodes of the whole page", None, nodes, nodes, ""),
    ]


def measure_many(browser: Browser, cache: Path, wide: int, runs: int, visits: int) -> list[Row]:
    """Return the rows about very many layers and very many runs."""
    errors: list[str] = []
    tables: list[float] = []
    whole: list[float] = []
    beside: list[float] = []
    with tensorboard(cached_log(cache, WIDE_STEPS, wide)) as (address, _):
        wait_for(lambda: last_step(address) == WIDE_STEPS)
        maps = [visit(browser, address, errors, []) for _ in range(visits)]
    with tensorboard(many_runs(cache, runs)) as (address, _):
        wait_for(lambda: len(json.loads(get(f"{address}/data/plugin/gradflow/runs"))["runs"]) == runs)
        for _ in range(visits):
            with page_of(browser, errors) as page:
                tables.append(_click_tab(_settled(page, address), _ARM_RUNS))
                whole.append(float(page.evaluate(_WHOLE)))
            with page_of(browser, errors) as page:
                beside.append(_click_tab(_loaded(page, address), _ARM_RUNS))
    for error in errors:
        sys.stderr.write(f"console: {error}\n")
    layers = f"{wide} layers x {WIDE_STEPS} steps"
    return [
        Row.of(f"{layers}: tab clicked to map painted", 2000, maps, "ms"),
        Row.of(f"{runs} runs: tab clicked to table painted", 1000, tables, "ms"),
        Row.of(f"{runs} runs: tab clicked to the verdicts of all of them", None, whole, "ms"),
        Row.of(f"{runs} runs: the table, while the server works for the tab that was left", None, beside, "ms"),
        Row("the same: console errors and CSP violations", 0, len(errors), len(errors), ""),
    ]


def last_step(address: str) -> int | None:
    """Return the last step that the panel's server knows of the first run."""
    runs = json.loads(get(f"{address}/data/plugin/gradflow/runs"))["runs"]
    return runs[0]["last"] if runs else None


def _settled(page: Page, address: str) -> Page:
    """Open TensorBoard on another tab and wait until page and server rest."""
    _loaded(page, address).wait_for_load_state("networkidle")
    return page


def _loaded(page: Page, address: str) -> Page:
    """Open TensorBoard on another tab and wait until its page rests; of many runs its server does not yet."""
    page.goto(f"{address}/#timeseries")
    page.get_by_role("tab", name="GradFlow").wait_for()
    rest(page)
    return page


def _click_tab(page: Page, arm: str = _ARM_TAB) -> float:
    page.evaluate(arm)
    page.get_by_role("tab", name="GradFlow").click()
    return _repainted(page)


def visit(browser: Browser, address: str, errors: list[str], shifts: list[float]) -> float:
    """Open TensorBoard in a new page, click the panel's tab, and return the milliseconds to a painted map."""
    with page_of(browser, errors) as page:
        took = _click_tab(_settled(page, address))
        frame = panel_of(page)
        rest(frame)
        shifts.append(round(sum(value for _, value in frame.evaluate("window.gradflowProbe.shifts")), 4))
    return took


def _gestures(page: Page, frame: Frame, steps: int) -> list[tuple[str, float | None, list[float]]]:
    """Move, click, step and zoom as a hand does; returns what, limit and milliseconds."""
    rest(frame)
    plot, card = (frame.locator(f"[data-part={part}]").bounding_box() for part in ("map", "verdict"))
    if plot is None or card is None:
        raise RuntimeError("expected a map on the page, found none; does the log hold metrics per layer?")
    for kind in ("pointermove", "pointerup", "input"):
        frame.evaluate(f"window.gradflowProbe.time('{kind}')")
    rows: list[tuple[str, float | None, list[float]]] = []
    gestures: tuple[tuple[str, float | None, Callable[[], list[float]]], ...] = (
        ("pointer moved where nothing happens, to its frame", None, lambda: _hover(page, frame, card)),
        ("hover to repaint", 16, lambda: _hover(page, frame, plot)),
        ("pin to repaint", 16, lambda: _pin(page, frame, plot)),
        ("step change to repaint", 16, lambda: _change_step(page, frame, steps)),
    )
    for what, limit, gesture in gestures:
        with Cpu(page) as cpu:
            lags = gesture()
        rows += [
            (what, limit, lags),
            (f"{what}: main thread's CPU, all that follows included", None, [cpu.ms / len(lags)]),
        ]
    return [*rows, *_zoom(page, frame, plot)]


def _lags(frame: Frame, count: int) -> list[float]:
    """Return what was timed since the last call, once there is enough of it."""
    frame.wait_for_function(f"window.gradflowProbe.lags.length >= {count}")
    return [float(lag) for lag in frame.evaluate("window.gradflowProbe.lags.splice(0)")][:count]


def _hover(page: Page, frame: Frame, box: FloatRect) -> list[float]:
    frame.evaluate("window.gradflowProbe.lags.length = 0")
    for i in range(GESTURES):
        share = (i * 0.618) % 1.0
        page.mouse.move(box["x"] + share * box["width"], box["y"] + ((i * 0.382) % 1.0) * box["height"])
        page.wait_for_timeout(20)
    return _lags(frame, GESTURES - 2)


def _pin(page: Page, frame: Frame, box: FloatRect) -> list[float]:
    out = []
    for i in range(GESTURES // 2):
        x, y = box["x"] + 0.3 * box["width"] + i, box["y"] + (i + 0.5) / GESTURES * 2 * box["height"]
        page.mouse.move(x, y)
        page.mouse.down()
        page.wait_for_timeout(40)
        frame.evaluate("window.gradflowProbe.lags.length = 0")
        page.mouse.up()
        out += _lags(frame, 1)
        rest(frame)
    if frame.locator("[data-part=names] .pinned").count() == 0:
        raise RuntimeError("expected the clicks on the map to pin layers, none is pinned")
    return out


def _change_step(page: Page, frame: Frame, steps: int) -> list[float]:
    out = []
    slider = frame.get_by_label("Step", exact=True)
    slider.focus()
    slider.evaluate(f"(slider) => {{ slider.value = {steps // 3}; }}")
    for _ in range(GESTURES // 2):
        frame.evaluate("window.gradflowProbe.lags.length = 0")
        page.keyboard.press("ArrowRight")
        out += _lags(frame, 1)
        page.wait_for_timeout(250)
    return out


def _zoom(page: Page, frame: Frame, box: FloatRect) -> list[tuple[str, float, list[float]]]:
    into, back = [], []
    for i in range(ZOOMS):
        left = box["x"] + (0.05 + 0.06 * i) * box["width"]
        page.mouse.move(left, box["y"] + 40)
        page.mouse.down()
        page.mouse.move(left + (0.1 + 0.02 * i) * box["width"], box["y"] + 60, steps=3)
        frame.evaluate(_ARM_MAP)
        page.mouse.up()
        into.append(_repainted(frame))
        rest(frame)
        frame.evaluate(_ARM_BACK)
        frame.locator("[data-part=reset]").click()
        back.append(_repainted(frame))
        rest(frame)
    return [("zoom, new data from the server", 250, into), ("zoom out to the last repaint", 250, back)]


def _repainted(where: Page | Frame) -> float:
    return float(where.evaluate(f"Promise.race([window.gradflowRepaint, {_TOO_LONG}])"))


if __name__ == "__main__":
    main()
