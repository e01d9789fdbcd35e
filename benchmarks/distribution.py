"""Build sdist and wheel, and see whether both work: ``make dist``.

The wheel is made from the sdist, installed into an empty environment away from the checkout, and the first example of
the README is run there as it is written.

    python benchmarks/distribution.py              # build and try
    python benchmarks/distribution.py --try dist   # try what is there; pip takes the wheel of this platform
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
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
    parser.add_argument("--try", dest="folder", type=Path, help="build nothing; try what is in this folder")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        if args.folder:
            return try_wheel(args.folder, Path(scratch))
        copy_checkout(ROOT, Path(scratch, "tree"))
        sdist = build_sdist(Path(scratch, "tree"), args.out)
        print(f"{sdist.name}: {check_sdist(sdist)} files")
        with tarfile.open(sdist) as archive:
            archive.extractall(Path(scratch, "source"), filter="data")
        (source,) = Path(scratch, "source").iterdir()
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
        subprocess.run([*pip, "wheel", "--no-deps", "-w", str(args.out), str(source)], check=True)
        wheel = max(args.out.glob("*.whl"), key=lambda path: path.stat().st_mtime)
        print(wheel.name)
        return 0 if args.built_only else try_wheel(args.out, Path(scratch))


def copy_checkout(root: Path, to: Path) -> None:
    """Copy the files of a checkout that git knows or would take, as a build leaves others beside its sources."""
    command = ["git", "ls-files", "-z", "-co", "--exclude-standard"]
    listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (root / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, to / name)


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


def try_wheel(folder: Path, scratch: Path) -> int:
    """Install what pip takes from a folder into an empty environment and run the README's first example there.

    Returns 0 where the example reports its fault and the C library is there.
    """
    venv.create(scratch / "venv", with_pip=True)
    python = scratch / "venv" / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    pip = [python, "-m", "pip", "install", "--disable-pip-version-check", "-q"]
    # First the package, from nowhere else; then what it needs, in the versions that CI uses.
    subprocess.run([*pip, "--no-index", "--no-deps", "--find-links", folder, "gradflow-export"], check=True)
    subprocess.run([*pip, "-c", ROOT / "constraints.txt", "gradflow-export"], check=True)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.search(r"<!-- examples/quick_start.py -->\n```python\n(.*?)```", readme, re.DOTALL)
    (scratch / "first.py").write_text(found[1] if found else "", encoding="utf-8")
    environ = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "GRADFLOW_VERBOSE"}}
    asked = "import gradflow_export as g; from gradflow_export import native; print(g.__file__, native.available())"
    done, library = (
        subprocess.run([python, *words], cwd=scratch, env=environ, capture_output=True, text=True, check=True)
        for words in (["first.py"], ["-c", asked])
    )
    print(f"{done.stderr}\nimported from, C library there: {library.stdout}")
    return 0 if "gradflow: " in done.stderr and "VANISHING" in done.stderr and "True" in library.stdout else 1


if __name__ == "__main__":
    sys.exit(main())
