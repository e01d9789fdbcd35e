"""Build sdist and wheel, and see whether both work: ``make dist``.

The wheel is made from the sdist, installed into an empty environment away from the checkout, and the first example of
the README is run there as it is written.

    python benchmarks/distribution.py [--index ARGUMENT ...]
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tarfile
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NEEDED = (
    "pyproject.toml", "setup.py", "README.md", "LICENSE", "gradflow_export/py.typed",
    "gradflow_export/native/statistics.c",
    "gradflow_export/native/statistics.h", "tb_plugin/tensorboard_plugin_gradflow/static/index.js",
)  # fmt: skip


def main() -> int:
    """Build, install, run; return 1 when the example does not speak."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="where both go (default: dist)")
    parser.add_argument("--built-only", action="store_true", help="build and look inside; install nothing")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        sdist = build_sdist(ROOT, args.out)
        print(f"{sdist.name}: {check_sdist(sdist)} files")
        with tarfile.open(sdist) as archive:
            archive.extractall(scratch, filter="data")
        source = next(Path(scratch).iterdir())
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
        subprocess.run([*pip, "wheel", "--no-deps", "-w", str(args.out), str(source)], check=True)
        wheel = max(args.out.glob("*.whl"), key=lambda path: path.stat().st_mtime)
        print(wheel.name)
        return 0 if args.built_only else try_wheel(wheel, Path(scratch))


def build_sdist(root: Path, out: Path) -> Path:
    """Return the sdist of a checkout, built by its own backend."""
    out.mkdir(parents=True, exist_ok=True)
    script = f"import setuptools.build_meta as b; print(b.build_sdist({str(out)!r}))"
    done = subprocess.run([sys.executable, "-c", script], cwd=root, check=True, capture_output=True, text=True)
    return out / done.stdout.split()[-1]


def check_sdist(sdist: Path) -> int:
    """Return how many files an sdist holds; raise when one is missing that a build needs."""
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    missing = [name for name in NEEDED if name not in names]
    if missing:
        raise SystemExit(f"{sdist.name} lacks {', '.join(missing)}")
    return len(names)


def try_wheel(wheel: Path, scratch: Path) -> int:
    """Install a wheel into an empty environment and run the README's first example there."""
    venv.create(scratch / "venv", with_pip=True)
    python = scratch / "venv" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--disable-pip-version-check", "-q", wheel], check=True)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.search(r"<!-- examples/quick_start.py -->\n```python\n(.*?)```", readme, re.DOTALL)
    (scratch / "first.py").write_text(found[1] if found else "", encoding="utf-8")
    done = subprocess.run([python, "first.py"], cwd=scratch, capture_output=True, text=True, check=True)
    print(done.stderr)
    return 0 if "gradflow: " in done.stderr and "VANISHING" in done.stderr else 1


if __name__ == "__main__":
    sys.exit(main())
