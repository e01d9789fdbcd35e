"""Run the W&B tests on the oldest release of wandb that is declared, one between, and the newest.

``python benchmarks/wandb_versions.py``, or ``make test-versions``. Each release has an environment of its own below
``--environments`` that takes everything but wandb from the environment that this runs in. Prints a table; the exit
status is 1 where a test failed. ``--trackers`` runs ``tests/trackers`` in an environment with those trackers instead,
``--frameworks`` runs ``tests/frameworks`` in one with training frameworks.
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
TESTS = (
    "tests/wandb_core/test_patterns.py", "tests/wandb_core/test_life.py", "tests/wandb_core/test_online.py",
    "tests/wandb_core/test_offline.py", "tests/wandb_core/test_replay.py", "tests/wandb_core/test_exporter_life.py",
    "tests/wandb_matrix",
)  # fmt: skip
BETWEEN, NEWEST = "0.30", "newest"
TRACKERS = ("mlflow-skinny", "swanlab", "aim", "clearml")
FRAMEWORKS = (
    "accelerate", "fastai", "keras", "lightning", "pytorch-ignite", "skorch", "stable-baselines3", "transformers",
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
    """Run tests; return the release of wandb and the exit status."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tb_plugin")])}
    code = "import wandb; print(wandb.__version__)"
    version = subprocess.run([interpreter, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    command = [interpreter, "-m", "pytest", "--no-header", "-p", "no:cacheprovider", *tests]
    return version, subprocess.run(command, cwd=ROOT, check=False, env=environ).returncode


def main() -> int:
    """Run everything and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--environments", type=Path, default=ROOT / ".venv-versions")
    parser.add_argument("--trackers", action="store_true", help="run tests/trackers instead")
    parser.add_argument("--frameworks", action="store_true", help="run tests/frameworks instead")
    parser.add_argument("tests", nargs="*", help="tests to run in place of those of W&B")
    args = parser.parse_args()
    if args.trackers:
        interpreter = environment(args.environments.absolute() / "trackers", list(TRACKERS))
        return run(interpreter, args.tests or ["tests/trackers"])[1]
    if args.frameworks:
        interpreter = environment(args.environments.absolute() / "frameworks", list(FRAMEWORKS), shared_first=True)
        return run(interpreter, args.tests or ["--write", "tests/frameworks"])[1]
    results = []
    for release in (floor(), BETWEEN, NEWEST):
        wanted = "wandb" if release == NEWEST else f"wandb=={release}.*"
        interpreter = environment(args.environments.absolute() / f"wandb-{release}", [wanted])
        results.append(run(interpreter, args.tests or list(TESTS)))
    for version, status in results:
        print(f"wandb {version:<10} {'all tests passed' if status == 0 else f'pytest ended with {status}'}")
    return int(any(status for _, status in results))


if __name__ == "__main__":
    sys.exit(main())
