"""The documentation site: every page is in its navigation, and what people look for is near."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest
import yaml

from gradflow_export.cli import make_parser

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
SITE = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))


def named(entry):
    """Pages of an entry of the navigation."""
    if isinstance(entry, str):
        return [entry]
    return [page for item in (entry if isinstance(entry, list) else entry.values()) for page in named(item)]


def links(page):
    """Pages that a page leads to."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    targets = re.findall(r"\]\((?!https?://|#)([^)#\s]+\.md)", text)
    return {(page.parent / target).resolve() for target in targets}


def test_every_page_is_in_the_navigation_once():
    """A new page has its place, and nothing leads nowhere."""
    assert sorted(named(SITE["nav"])) == sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))


def test_the_site_asks_nobody():
    """Nothing of it comes from the network: no fonts, no statistics, no stars."""
    assert SITE["theme"]["font"] is False
    assert SITE["strict"] is True
    assert not {"repo_url", "extra_javascript", "extra_css", "google_analytics"} & set(SITE)


@pytest.mark.parametrize("goal", [*sorted((DOCS / "issues").glob("*.md")), *sorted((DOCS / "tasks").glob("*.md"))])
def test_every_task_and_issue_is_within_three_clicks(goal):
    """From the first page, by links in the text alone."""
    reached = {DOCS / "index.md"}
    for _ in range(3):
        reached |= {target for page in reached for target in links(page)}
    assert goal in reached


def test_from_a_loss_that_is_nan_to_the_layer_in_three_clicks():
    """The first page names the trouble; the page behind it says which line names the layer, and leads to the map of layers."""
    (row,) = [line for line in (DOCS / "index.md").read_text(encoding="utf-8").splitlines() if "My loss is NaN" in line]
    (first,) = re.findall(r"\]\(([^)]+)\)", row)
    page = DOCS / first
    assert "names the layer where the NaN began" in page.read_text(encoding="utf-8")
    assert {DOCS / "tasks/which-layer.md", DOCS / "issues/numerical.md"} <= links(page)
    ends = set.union(*({second, *links(second)} for second in links(page)))
    assert {DOCS / "gallery.md", DOCS / "panel.md"} & ends


def test_every_command_has_its_line():
    """The page lists what the command line knows, in its order and words, and what it shows can be typed."""
    (commands,) = (act for act in make_parser()._actions if isinstance(act, argparse._SubParsersAction))
    page = (DOCS / "commands.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `gradflow (\S+)` \| (.*) \|$", page, re.MULTILINE)
    assert listed == [(command.dest, command.help) for command in commands._choices_actions]
    typed = [line.split() for line in re.findall(r"^gradflow (.+)$", page, re.MULTILINE)]
    assert [line[0] for line in typed] == [name for name, _ in listed]
    for line in typed:
        make_parser().parse_args(line)
