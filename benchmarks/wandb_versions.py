"""Run the W&B tests on the oldest release of wandb that is declared, one between, and the newest.

``python benchmarks/wandb_versions.py``, or ``make test-versions``. Each release has an environment of its own below
``--environments`` that takes everything but wandb, Lightning and transformers from the environment that this runs in.
Prints a table, also into ``docs/wandb.md``; the exit status is 1 where a test failed. ``--interpreter PYTHON`` runs the
tests in an environment that is there already and writes its row. ``--trackers`` runs ``tests/trackers`` in an
environment with those trackers instead, ``--frameworks`` runs ``tests/frameworks`` in one with training frameworks.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MATRIX, CORE = "tests/wandb_matrix", "tests/wandb_core"
PARTS = {
    MATRIX: [MATRIX],
    CORE: [
        f"{CORE}/test_{name}.py"
        for name in ("patterns", "life", "online", "ends", "offline", "replay", "exporter", "exporter_life")
    ],
}
PAGE, BEGIN, END = ROOT / "docs" / "wandb.md", "<!-- releases -->", "<!-- end of releases -->"
HEAD = [f"| wandb | `{MATRIX}` | `{CORE}` |", "|---|---|---|"]
BETWEEN, NEWEST = "0.30", "newest"
TRACKERS = ("mlflow-skinny", "swanlab", "aim", "clearml")
IN_MATRIX = ("accelerate", "lightning", "transformers")
FRAMEWORKS = (
    "accelerate", "fastai", "keras", "lightning", "pytorch-ignite", "skorch", "stable-baselines3", "transformers",
    "ultralytics",
)  # fmt: skip


def floor() -> str:
    """Return the oldest release that is declared."""
    found = re.search(r'"wandb>=([0-9.]+)"', (ROOT / "pyproject.toml").read_text())
    assert found, "pyproject.toml declares no least version of wandb"
    return found.group(1)


def environment(place: Path, packages: list[str], *, shared_first: bool = False) -> Path:
    """Make an environment with these packages, or use the one that is there; return its interpreter.

    Args:
        place: Its folder.
        packages: What is installed.
        shared_first: Do not install what the environment that this runs in has, such as torch.
    """
    interpreter = place / "bin" / "python"
    if not interpreter.exists():
        venv.create(place, with_pip=True)
    (folder,) = place.glob("lib/python*/site-packages")
    # Last on the path, so that what is installed here goes first and torch need not be there twice.
    shared = folder / "zz_shared.pth"
    shared.unlink(missing_ok=True)
    if shared_first:
        shared.write_text(f"{sysconfig.get_paths()['purelib']}\n")
    command = [interpreter, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages]
    subprocess.run(command, check=True)
    shared.write_text(f"{sysconfig.get_paths()['purelib']}\n")
    return interpreter


def run(interpreter: Path, tests: list[str]) -> tuple[str, int]:
    """Run tests; return the last line of pytest and the exit status."""
    command = [interpreter, "-m", "pytest", "--no-header", "-p", "no:cacheprovider", *tests]
    playing = subprocess.Popen(command, cwd=ROOT, env=surroundings(), stdout=subprocess.PIPE, text=True)
    assert playing.stdout is not None
    last = ""
    for line in playing.stdout:
        sys.stdout.write(line)
        sys.stdout.flush()
        last = line.strip() or last
    return last, playing.wait()


def surroundings() -> dict[str, str]:
    """Return the environment of the tests."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    places = [str(ROOT), str(ROOT / "tb_plugin"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(places)}


def outcome(last: str) -> str:
    """Return what pytest's last line says of its tests: how many passed, or how many of all."""
    counts = {what: int(count) for count, what in re.findall(r"(\d+) (passed|failed|error)", last)}
    passed, rest = counts.get("passed", 0), sum(count for what, count in counts.items() if what != "passed")
    return f"{passed} passed" if not rest else f"{passed} of {passed + rest} passed"


def play(interpreter: Path, parts: list[str]) -> tuple[str, dict[str, str], int]:
    """Run parts of the tests; return the release of wandb, what became of each, and the exit status."""
    code = "import wandb; print(wandb.__version__)"
    asked = subprocess.run([interpreter, "-c", code], capture_output=True, text=True, check=True, env=surroundings())
    results = {part: run(interpreter, PARTS[part]) for part in parts}
    said = {part: outcome(last) for part, (last, _) in results.items()}
    return asked.stdout.strip(), said, max(status for _, status in results.values())


def note(version: str, said: dict[str, str]) -> list[str]:
    """Put a release's row into the page; return the table."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    table, _, after = rest.partition(END)
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.split("\n") if line[:3] != "|--"]
    known = {row[0]: row[1:] for row in cells if len(row) == 3 and row[0][:1].isdigit()}
    old = dict(zip(PARTS, known.get(version, [""] * len(PARTS)), strict=True))
    known[version] = [said.get(part, old[part]) for part in PARTS]
    order = sorted(known, key=lambda name: [int(number) for number in re.findall(r"\d+", name)])
    lines = [*HEAD, *(f"| {' | '.join([name, *known[name]])} |" for name in order)]
    PAGE.write_text(before + "\n".join([BEGIN, *lines, END]) + after, encoding="utf-8")
    return lines


def main() -> int:
    """Run everything and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--environments", type=Path, default=ROOT / ".venv-versions")
    parser.add_argument("--trackers", action="store_true", help="run tests/trackers instead")
    parser.add_argument("--frameworks", action="store_true", help="run tests/frameworks instead")
    parser.add_argument("--interpreter", type=Path, help="run in this environment alone, and install nothing")
    parser.add_argument("--part", choices=PARTS, action="append", help="run these tests alone (default: all)")
    args = parser.parse_args()
    if args.trackers:
        return run(environment(args.environments.absolute() / "trackers", list(TRACKERS)), ["tests/trackers"])[1]
    if args.frameworks:
        interpreter = environment(args.environments.absolute() / "frameworks", list(FRAMEWORKS), shared_first=True)
        return run(interpreter, ["--write", "tests/frameworks"])[1]
    interpreters = [args.interpreter] if args.interpreter else []
    for release in () if interpreters else (floor(), BETWEEN, NEWEST):
        place = args.environments.absolute() / f"wandb-{release}"
        environment(place, ["wandb" if release == NEWEST else f"wandb=={release}.*"])
        interpreters.append(environment(place, list(IN_MATRIX), shared_first=True))
    worst, table = 0, HEAD
    for interpreter in interpreters:
        version, said, status = play(interpreter, args.part or list(PARTS))
        worst, table = max(worst, status), note(version, said)
    print("\n".join(table))
    return int(worst > 0)


if __name__ == "__main__":
    sys.exit(main())
