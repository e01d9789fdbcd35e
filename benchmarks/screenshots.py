"""The pictures of the documentation: the panel over the runs of ``gradflow demo --tour``, in a real TensorBoard.

    python benchmarks/screenshots.py                     # trains the demo's runs anew, about a minute and a half
    python benchmarks/screenshots.py --logdir runs/demo  # over runs that are there already
    python benchmarks/screenshots.py --only tutorial     # those of docs/tutorial.md

Writes ``docs/images/<scene>-<width>-<theme>.png``.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from urllib.parse import quote

from playwright.sync_api import Page

from gradflow_export.cli import main as gradflow

sys.path.insert(0, str(Path(__file__).parent))
from browse import chromium, get, page_of, panel_of, rest, tensorboard, wait_for

ROOT = Path(__file__).parents[1]
IMAGES, EXAMPLE = ROOT / "docs" / "images", ROOT / "examples" / "tutorial.py"
SCENES: dict[str, dict[str, str]] = {
    "runs": {},
    "healthy": {"run": "transformer-healthy"},
    "sick": {"run": "mlp-vanishing"},
    "compare": {"run": "post-ln", "other": "pre-ln"},
}
TUTORIAL: dict[str, dict[str, str]] = {
    "tutorial-runs": {},
    "tutorial-sick": {"run": "sick"},
    "tutorial-mended": {"run": "mended"},
}
SIZES = {1280: 1100, 1920: 1320}
THEMES = ("light", "dark")
LARGEST = 300_000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--logdir", type=Path, help="runs of the demo; trained anew when left out")
    parser.add_argument("--out", type=Path, default=IMAGES, help="where the pictures go (default: docs/images)")
    parser.add_argument("--only", choices=("demo", "tutorial"), help="take only these (default: all)")
    args = parser.parse_args()
    errors: list[str] = []
    if args.only != "tutorial":
        with tempfile.TemporaryDirectory() as scratch:
            logdir = args.logdir or Path(scratch)
            if args.logdir is None:
                gradflow(["demo", "--tour", "--logdir", scratch])
            _photograph_all(logdir, SCENES, SIZES, args.out, errors)
    if args.only != "demo":
        with tempfile.TemporaryDirectory() as scratch:
            shutil.copy(EXAMPLE, scratch)  # the picture shows where a layer is called
            subprocess.run([sys.executable, EXAMPLE.name], cwd=scratch, check=True)
            _photograph_all(Path(scratch) / "runs", TUTORIAL, {1280: SIZES[1280]}, args.out, errors)
    for error in errors:
        sys.stderr.write(f"console: {error}\n")
    return 1 if errors else 0


def _photograph_all(
    logdir: Path, scenes: dict[str, dict[str, str]], sizes: dict[int, int], out: Path, errors: list[str]
) -> None:
    with tensorboard(logdir) as (address, _), chromium() as browser:
        wait_for(lambda: all(f'"{scene["run"]}"'.encode() in _runs(address) for scene in scenes.values() if scene))
        for width, height in sizes.items():
            for scene, state in scenes.items():
                with page_of(browser, errors, width, height) as page:
                    _photograph(page, address, state, out / f"{scene}-{width}")


def _runs(address: str) -> bytes:
    return bytes(get(f"{address}/data/plugin/gradflow/runs"))


def _photograph(page: Page, address: str, state: dict[str, str], path: Path) -> None:
    """Take one picture of a view in each theme."""
    words = "".join(f"&p.gradflow.{key}={quote(value)}" for key, value in state.items())
    page.goto(f"{address}/#gradflow{words}")
    frame = panel_of(page)
    if state:
        frame.wait_for_function("window.gradflowProbe.paints.length > 0")
    else:
        frame.wait_for_selector("[data-part=runs] tbody tr")
    for theme in THEMES:
        page.evaluate("(dark) => document.body.classList.toggle('dark-mode', dark)", theme == "dark")
        rest(frame)
        page.wait_for_timeout(700)
        picture = path.with_name(f"{path.name}-{theme}.png")
        picture.write_bytes(page.screenshot())
        size = picture.stat().st_size
        print(f"{picture}: {size / 1e3:.0f} kB")
        if size > LARGEST:
            sys.stderr.write(f"{picture.name} is above {LARGEST / 1e3:.0f} kB: take fewer steps or a smaller window\n")


if __name__ == "__main__":
    sys.exit(main())
