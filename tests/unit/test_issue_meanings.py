"""What issues mean is said in one place for users and in the same words for programs."""

import re
from pathlib import Path

import pytest

from gradflow_export import IssueType

README = Path(__file__).parents[2] / "README.md"


@pytest.mark.parametrize("kind", IssueType)
def test_the_meaning_is_the_readmes(kind):
    """Each issue type has a row in the README's table, and its meaning is that row's text."""
    rows = dict(re.findall(r"^\| `([A-Z_]+)` \| (.*?) \|$", README.read_text(encoding="utf-8"), re.MULTILINE))
    assert kind.meaning == rows[kind.value]
