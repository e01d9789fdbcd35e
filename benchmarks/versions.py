"""Run the tests on the oldest and newest release of torch: `python benchmarks/versions.py`, or `make test-versions`.

Makes a virtual environment for each pair of Python and torch below `--environments`, which takes several GB each and is
kept for the next time, runs the unit, contract and loop tests there, and writes a table into `docs/versions.md`. The
oldest release is that which `pyproject.toml` declares, the newest that which pip finds. Each folder of tests has a row
of its own, written as soon as it has run: `--python 3.13 --torch 2.13 --tests tests/loops` runs one again, and the
other rows stay. What pytest prints goes into `build/versions`.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS = ("tests/unit", "tests/contract", "tests/loops")
PYTHONS = ("3.10", "3.13")
NEWEST = "newest"
WHY = """\
The oldest release is the one on which everything works. Before it, `torch.compile` refuses a graph with a hook on a
gradient in it, so block gains inside compiled code cannot be read. Up to 2.8 the graph of a loss also saves other
things, so NaN is not traced to the layer where it began. A fallback for each would be a second way to read the same,
for releases that `make test` never runs on; it runs on the oldest one. Where the newest release has no build for a
Python, pip takes the newest that has."""


@dataclass(frozen=True)
class Result:
    """What tests gave on one pair: versions, which tests, their counts, and the names of those that failed."""

    python: str
    torch: str
    tests: str
    counts: str
    failed: tuple[str, ...]


def floor() -> str:
    """Return the oldest release that is declared."""
    found = re.search(r'"torch>=([0-9.]+)"', (ROOT / "pyproject.toml").read_text())
    assert found, "pyproject.toml declares no least version of torch"
    return found.group(1)


def environment(folder: Path, python: str, torch: str) -> Path | str:
    """Make an environment, or use the one that is there; return its interpreter, or why there is none.

    Args:
        folder: Where environments are kept.
        python: A version such as ``"3.10"``.
        torch: A version, or ``"newest"``.
    """
    place = folder / f"python{python}-torch-{torch}"
    interpreter = place / "bin" / "python"
    if not interpreter.exists():
        base = shutil.which(f"python{python}")
        if base is None:
            return f"python{python} is not installed"
        done = subprocess.run([base, "-m", "venv", str(place)], capture_output=True, text=True, check=False)
        if done.returncode:
            shutil.rmtree(place, ignore_errors=True)
            return f"python{python} makes no environment"
    wanted = "torch" if torch == NEWEST else f"torch=={torch}.*"
    # Editable, so that the C library is built for this interpreter beside the sources that the tests import.
    command = [interpreter, "-m", "pip", "install", "--quiet", "--upgrade", "-e", f"{ROOT}[test]", wanted]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return interpreter if done.returncode == 0 else f"not installed: {(done.stderr.strip().splitlines() or ['?'])[-1]}"


def run(interpreter: Path, tests: str, more: list[str]) -> Result:
    """Run a folder or a file of tests."""
    code = "import platform, torch; print(platform.python_version(), torch.__version__)"
    versions = subprocess.run([interpreter, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    options = ["-rfE", "--no-header", "-p", "no:cacheprovider", "-n", "2", "--dist", "loadfile"]  # as `make test` does
    command = [interpreter, "-m", "pytest", *options, tests, *more]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    log = ROOT / "build" / "versions" / f"python{versions[0]}-torch-{versions[1]}-{Path(tests).stem}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as file:
        done = subprocess.run(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, check=False, env=environ)
    lines = log.read_text(errors="replace").strip().splitlines() or ["nothing was printed"]
    failed = tuple(line.split()[1] for line in lines if line.startswith(("FAILED ", "ERROR ")))
    counts = next((line.strip("= ") for line in reversed(lines) if re.search(r"\d+ (passed|failed|error)", line)), "")
    return Result(versions[0], versions[1], tests, counts or f"pytest ended with {done.returncode}", failed)


def earlier(page: Path) -> list[Result]:
    """Return the results that a page holds."""
    text = page.read_text() if page.exists() else ""
    failed = {}
    for section in text.split("\n## ")[1:]:
        title, _, names = section.partition("\n")
        failed[title] = tuple(re.findall(r"`([^`]+)`", names))
    rows = re.findall(r"^\| (\d\S*) \| (\S+) \| (\S+) \| (.*) \|$", text, re.MULTILINE)
    return [Result(*row, failed.get(f"Python {row[0]}, torch {row[1]}, {row[2]}", ())) for row in rows]


def joined(results: list[Result], more: list[Result]) -> list[Result]:
    """Return results, each pair of versions and folder once and as it came out last, in the order of versions."""
    latest = {(r.python, r.torch, r.tests): r for r in (*results, *more)}

    def place(key: tuple[str, str, str]) -> tuple[list[list[int]], int, str]:
        versions = [list(map(int, re.findall(r"\d+", version))) for version in key[:2]]
        return versions, TESTS.index(key[2]) if key[2] in TESTS else len(TESTS), key[2]

    return [latest[key] for key in sorted(latest, key=place)]


def table(results: list[Result]) -> str:
    """Return the results as a Markdown page."""
    rows = [f"| {r.python} | {r.torch} | {r.tests} | {r.counts} |" for r in results]
    page = [
        "# Versions",
        "",
        "Written by `make test-versions`: unit, contract and loop tests on the oldest and the newest release of torch.",
        "",
        WHY,
        "",
        "| Python | torch | tests | result |",
        "|---|---|---|---|",
        *rows,
    ]
    for result in results:
        if result.failed:
            page += ["", f"## Python {result.python}, torch {result.torch}, {result.tests}", ""]
            page += [f"- `{name}`" for name in result.failed]
    return "\n".join(page) + "\n"


def main() -> int:
    """Run every pair; 1 when a test failed anywhere."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--environments", type=Path, default=ROOT / ".venv-versions", help="where they are kept")
    parser.add_argument("--python", nargs="+", default=list(PYTHONS), help="versions of Python")
    parser.add_argument("--torch", nargs="+", default=[floor(), NEWEST], help="versions of torch")
    parser.add_argument("--interpreter", type=Path, help="test in this environment as it is, and in no other")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "versions.md")
    parser.add_argument("--tests", nargs="+", default=list(TESTS))
    parser.add_argument("more", nargs="*", help="for pytest, after --")
    args = parser.parse_args()
    results: list[Result] = []

    def test(interpreter: Path) -> None:
        for folder in args.tests:
            results.append(run(interpreter, folder, args.more))
            print(f"  {folder}: {results[-1].counts}", flush=True)
            args.output.write_text(table(joined(earlier(args.output), results)))

    if args.interpreter is not None:
        test(args.interpreter)
    else:
        for python in args.python:
            for torch in args.torch:
                print(f"Python {python}, torch {torch}", flush=True)
                found = environment(args.environments, python, torch)
                if isinstance(found, Path):
                    test(found)
                else:
                    results.append(Result(python, torch, "-", found, ()))
    page = table(joined(earlier(args.output), results))
    args.output.write_text(page)
    print(page)
    return int(any(result.failed or "passed" not in result.counts for result in results))


if __name__ == "__main__":
    sys.exit(main())
