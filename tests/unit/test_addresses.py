"""The address of the repository stands in pyproject.toml; everything else agrees with it."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_address_of_the_repository_is_the_declared_one():
    """A move changes ``Repository`` in pyproject.toml, and this test lists what has to follow; without one there is none."""
    declared = re.search(r'^Repository = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    name = declared[1].rpartition("/")[2] if declared else "gradflow-export"
    pages = [ROOT / "README.md", ROOT / "pyproject.toml", ROOT / "mkdocs.yml", *(ROOT / "docs").rglob("*.md")]
    found = [
        (page.relative_to(ROOT).as_posix(), address)
        for page in pages
        # Pictures come from a host of their own.
        for address in re.findall(
            rf"https?://[\w.]+/[\w-]+/{re.escape(name)}(?![\w-])",
            page.read_text().replace("raw.githubusercontent.com", "github.com"),
        )
    ]
    assert [each for each in found if declared is None or each[1] != declared[1]] == []
    assert bool(found) == bool(declared)
