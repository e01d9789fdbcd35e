"""What issues mean is said in one place, and each type has a page made of the rules that raise it."""

import importlib.util
import re
from pathlib import Path

import pytest

from gradflow_export import IssueType
from gradflow_export.profiles import profile

DOCS = Path(__file__).resolve().parents[2] / "docs"
_spec = importlib.util.spec_from_file_location("issue_pages", DOCS / "_site" / "issue_pages.py")
issue_pages = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(issue_pages)


@pytest.fixture(scope="module")
def made():
    return issue_pages.pages()


def test_the_pages_are_up_to_date(made):
    """docs/issues is what `make schema` writes: no page more, none less."""
    written = {path.name: path.read_text(encoding="utf-8") for path in (DOCS / "issues").glob("*.md")}
    assert written == made, "run: make schema"


@pytest.mark.parametrize("kind", IssueType)
def test_every_issue_has_its_row_and_its_rule(kind, made):
    """The table has the meaning that programs get, and the page at least one rule that raises the type."""
    rows = dict(re.findall(r"^\| \[`([A-Z_]+)`\]\(.*?\) \| (.*?) \|$", made["index.md"], re.MULTILINE))
    assert kind.meaning == rows[kind.value]
    assert re.search(r"^### .*?^Reads `", made[f"{kind.value.lower()}.md"], re.MULTILINE | re.DOTALL)


def test_every_rule_is_on_a_page(made):
    """No rule of either profile raises a type that the pages do not know of."""
    text = "".join(made.values())
    titles = [issue_pages._title(type(rule).__name__) for name in ("robust", "seed") for rule in profile(name)]
    assert [title for title in titles if f"### {title}\n" not in text] == []
