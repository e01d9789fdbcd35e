"""``gradflow rule``: pages of checks on the terminal."""

from __future__ import annotations

import pytest

from gradflow_export import IssueType
from gradflow_export.cli import main


def test_a_type_of_issue_prints_the_pages_of_its_checks(capsys):
    """Each check that opens such issues says what it does, why that is bad, and the fix as code."""
    assert main(["rule", "STALE_GRAD"]) == 0
    out = capsys.readouterr().out
    for words in (
        "stale-gradient (STALE_GRAD)",
        "nested-losses (STALE_GRAD)",
        "Why it is bad:",
        "optimizer.zero_grad()",
    ):
        assert words in out
    assert "wrong-loss" not in out


@pytest.mark.parametrize("name", [*map(str, IssueType), "wrong-loss", "vanishing"])
def test_a_page_begins_with_what_is_wrong_and_ends_with_what_to_do(capsys, name):
    """Two sentences first, then how it is measured, then the remedy."""
    assert main(["rule", name]) == 0
    out = capsys.readouterr().out
    kind = IssueType(name) if name in IssueType.__members__ else IssueType(name.upper().replace("-", "_"))
    _, opening, *_ = out.split("\n\n")
    said, _, harm = " ".join(opening.split()).rpartition(f" {kind.harm}")
    assert (said.lower(), harm) == (f"{kind.meaning}.".lower(), "")
    assert kind.harm.endswith(".")
    assert 0 < out.index(kind.harm.split()[0]) < out.index("How it is measured:") < out.rindex("What to do:")
    assert " ".join(out.rpartition("What to do:")[2].split()) == kind.remedy


def test_a_check_is_found_by_its_own_name_in_any_case(capsys):
    """One page, with its thresholds and their values."""
    assert main(["rule", "Wrong-Loss"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("wrong-loss (WRONG_LOSS)\n")
    assert "reach" in out.partition("Thresholds:")[2]
    assert "0.05" in out.partition("Thresholds:")[2]


def test_without_a_name_all_checks_are_listed(capsys):
    """One line each: type, name, what it finds."""
    assert main(["rule"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split()[:2] == ["WRONG_LOSS", "wrong-loss"] for line in lines)
    assert all(len(line.split()) > 3 for line in lines)


def test_every_type_of_issue_has_a_page(capsys):
    """Rules over metrics are explained as well, from the same docstrings as the documentation."""
    for kind in IssueType:
        assert main(["rule", kind.value]) == 0, kind
    assert "vanishing (VANISHING)" in capsys.readouterr().out


def test_a_misspelt_name_has_the_nearest_beside_it(capsys):
    """It is called wrongly, and says how it is called rightly."""
    assert main(["rule", "wrongloss"]) == 2
    assert "did you mean 'wrong-loss'" in capsys.readouterr().err
