"""Measure all of docs/performance.md that is not the panel's, and write tables and pictures there: `make performance`.

    python benchmarks/performance.py                     # everything: one to two hours on a quiet machine
    python benchmarks/performance.py --part overhead     # one part; the others stay as they are
    python benchmarks/performance.py --quick --note "preliminary, on a busy machine"
    python benchmarks/performance.py --saved build/performance.json   # write again without measuring

Tables stand between markers in docs/performance.md, pictures in docs/images. What was measured is kept in
build/performance.json, part by part with its date and load, so that one part can be measured again alone.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
import overhead
import scaling
import small_steps
from performance_plots import plot_overhead, plot_scaling
from scaling_runs import Opening, StepsRow
from timing import Row
from workloads import workloads

from instruments import INSTRUMENTS

ROOT = Path(__file__).parents[1]
PAGE, IMAGES, SAVED = ROOT / "docs" / "performance.md", ROOT / "docs" / "images", ROOT / "build" / "performance.json"
PARTS = ("overhead", "short", "parameters", "tensors", "steps", "opening")
QUICK_MOST, QUICK_STEPS = 1_000_000, 20
SHORT_STEPS = 10_000


def measure_part(part: str, *, quick: bool, rounds: int) -> Any:
    """Measure one part, as lists and numbers."""
    if part == "overhead":
        names = [instrument.name for instrument in INSTRUMENTS]
        rows = overhead.rows_of([w.name for w in workloads()], names, QUICK_STEPS if quick else None)
        return [asdict(row) for row in rows]
    if part == "short":
        steps = 10 * QUICK_STEPS * small_steps.LONGER if quick else SHORT_STEPS
        pairs = (*small_steps.rows(), *small_steps.dense_rows())
        return [small_steps.apart(workload, setting, steps) for workload, setting in pairs]
    most = {"tensors": 1_000, "steps": 1_000, "opening": 1_000, "parameters": 5_000_000}[part] if quick else None
    found = asdict(scaling.collect([part], most, rounds))
    return found[{"steps": "steps", "opening": "openings"}.get(part, "points")]


def points_of(rows: list[dict[str, Any]]) -> list[scaling.Point]:
    """Return saved points as objects."""
    return [scaling.Point(p["axis"], p["size"], Row(**p["row"])) for p in rows]


def table_of(part: str, rows: list[dict[str, Any]]) -> str:
    """Return the Markdown of one part."""
    if part == "overhead":
        return table_of_overhead([Row(**row) for row in rows])
    if part == "short":
        return "\n".join((small_steps.heading(), *map(small_steps.line, rows))) + "\n"
    if part == "steps":
        return scaling.table_of_steps([StepsRow(**row) for row in rows])
    if part == "opening":
        return scaling.table_of_openings([Opening(**row) for row in rows])
    return scaling.table_of_points(points_of(rows), part)


def table_of_overhead(rows: list[Row]) -> str:
    """Return what each instrument costs on each workload as Markdown."""
    lines = [
        "| workload | instrument | thread | process | wall | added, ms | x ours | bytes per step | memory, MB | ± |",
        "|---" * 10 + "|",
    ]
    for r in rows:
        times = "" if r.times_ours is None else f"{r.times_ours:.2f}"
        lines.append(
            f"| {r.workload} | `{r.instrument}` | {r.thread_ratio:.3f} | {r.process_ratio:.3f} | {r.wall_ratio:.3f} "
            f"| {r.added_ms:.2f} | {times} | {r.bytes_per_step:,} | {r.memory_mb:.0f} | {r.noise:.3f} |"
        )
    return "\n".join(lines) + "\n"


def rows_on_page(text: str) -> list[Row]:
    """Return what the table of the page says of each instrument, where nothing else is left of the measurement."""
    table = text.partition("<!-- measured: overhead -->")[2].partition("<!-- end: overhead -->")[0]
    found = []
    for line in table.splitlines()[5:]:
        cells = [cell.strip(" `").replace(",", "") for cell in line.split("|")[1:-1]]
        if len(cells) == 10:
            thread, process, wall, added = map(float, cells[2:6])
            size, memory, noise = (float(cell) for cell in cells[7:])
            bare = added / (thread - 1.0) if thread != 1.0 else 0.0
            times = float(cells[6]) if cells[6] else None
            found.append(
                Row(*cells[:2], thread, process, wall, bare, added, int(size), memory, noise, 0.0, 0, times_ours=times)
            )
    return found


def measured_again(saved: dict[str, Any], names: list[str], note: str) -> dict[str, Any]:
    """Measure some instruments of the first part again; the others stay as they are."""
    text = PAGE.read_text()
    before = saved.get("overhead") or {
        "rows": [asdict(row) for row in rows_on_page(text)],
        "said": text.partition("<!-- measured: overhead -->\n")[2].partition(".\n\n|")[0],
    }
    fresh = {(row.workload, row.instrument): row for row in overhead.rows_of([w.name for w in workloads()], names)}
    rows = [fresh.get((row["workload"], row["instrument"]), Row(**row)) for row in before["rows"]]
    date = dt.datetime.now(dt.timezone.utc).date().isoformat()
    again = f"{', '.join(f'`{name}`' for name in names)}: {date}; {note}"
    return {
        "rows": [asdict(row) for row in overhead.compare(rows)],
        "said": f"{before['said']}. Measured again, {again}",
    }


def write_between(text: str, part: str, body: str) -> str:
    """Return a page with what stands between the markers of a part replaced.

    Raises:
        ValueError: The page has no such markers.
    """
    begin, end = f"<!-- measured: {part} -->", f"<!-- end: {part} -->"
    pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
    if not pattern.search(text):
        raise ValueError(f"expected the markers {begin} and {end} in {PAGE.name}, found none; put them back.")
    return pattern.sub(lambda _: f"{begin}\n{body}{end}", text)


def measured_now(part: str, *, quick: bool, rounds: int, note: str) -> dict[str, Any]:
    """Measure one part and say when and under what load."""
    before = os.getloadavg()[0]
    rows = measure_part(part, quick=quick, rounds=rounds)
    date = dt.datetime.now(dt.timezone.utc).date().isoformat()
    said = f"{date}, torch {torch.__version__}, 1 thread, {os.cpu_count()} cores, load {before:.1f} before"
    return {"rows": rows, "said": f"{said}; {note}" if note else said}


def write_page(saved: dict[str, Any]) -> None:
    """Write tables and pictures of all saved parts."""
    text = PAGE.read_text()
    for part, found in saved.items():
        text = write_between(text, part, f"{found['said']}.\n\n{table_of(part, found['rows'])}")
    PAGE.write_text(text)
    if "overhead" in saved:
        plot_overhead([Row(**row) for row in saved["overhead"]["rows"]], IMAGES / "overhead.png")
    points = [point for axis in ("parameters", "tensors") for point in points_of(saved.get(axis, {}).get("rows", []))]
    steps = [StepsRow(**row) for row in saved.get("steps", {}).get("rows", [])]
    if points or steps:
        plot_scaling(points, steps, IMAGES / "scaling.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", action="append", choices=PARTS, help="measure this part; all without it")
    parser.add_argument("--quick", action="store_true", help="small sizes and few steps: to see that all of it works")
    parser.add_argument("--rounds", type=int, default=1, help="repeat each point of parameters and tensors")
    parser.add_argument("--note", default="", help="said above each table that is measured now")
    parser.add_argument(
        "--again", nargs="+", metavar="INSTRUMENT", help="measure these of the first part, keep the rest"
    )
    parser.add_argument("--saved", type=Path, help="measure nothing, write page and pictures from this file")
    args = parser.parse_args()
    path = args.saved or SAVED
    saved: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    if args.again:
        saved["overhead"] = measured_again(saved, args.again, args.note)
    for part in () if args.saved or args.again else args.part or PARTS:
        print(f"measuring {part}", file=sys.stderr)
        saved[part] = measured_now(part, quick=args.quick, rounds=args.rounds, note=args.note)
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(saved, indent=1))
    write_page(saved)


if __name__ == "__main__":
    main()
