"""The pictures of the documentation: the panel over the runs of ``gradflow demo --tour``, in a real TensorBoard.

    python benchmarks/screenshots.py                     # trains the demo's runs anew, about a minute and a half
    python benchmarks/screenshots.py --logdir runs/demo  # over runs that are there already

Writes ``docs/images/<scene>-<width>-<theme>.png``.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from urllib.parse import quote

from playwright.sync_api import Page

from gradflow_export.cli import main as gradflow

sys.path.insert(0, str(Path(__file__).parent))
from browse import chromium, get, page_of, panel_of, rest, tensorboard, wait_for

IMAGES = Path(__file__).parents[1] / "docs" / "images"
SCENES: dict[str, dict[str, str]] = {
    "runs": {},
    "healthy": {"run": "transformer-healthy"},
    "sick": {"run": "mlp-vanishing"},
    "compare": {"run": "post-ln", "other": "pre-ln"},
}
SIZES = {1280: 1100, 1920: 1320}
THEMES = ("light", "dark")
LARGEST = 300_000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--logdir", type=Path, help="runs of the demo; trained anew when left out")
    parser.add_argument("--out", type=Path, default=IMAGES, help="where the pictures go (default: docs/images)")
    args = parser.parse_args()
    errors: list[str] = []
    with tempfile.TemporaryDirectory() as scratch:
        logdir = args.logdir or Path(scratch)
        if args.logdir is None:
            gradflow(["demo", "--tour", "--logdir", scratch])
        with tensorboard(logdir) as (address, _), chromium() as browser:
            wait_for(lambda: all(f'"{scene["run"]}"'.encode() in _runs(address) for scene in SCENES.values() if scene))
            for width, height in SIZES.items():
                for scene, state in SCENES.items():
                    with page_of(browser, errors, width, height) as page:
                        _photograph(page, address, state, args.out / f"{scene}-{width}")
    for error in errors:
        sys.stderr.write(f"console: {error}\n")
    return 1 if errors else 0


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
