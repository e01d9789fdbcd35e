"""Each check opens an issue on a program with its mistake, from the evidence alone, and none on the mended program."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
import torch

from gradflow_export import Exporter, MemoryWriter
from gradflow_export.cli.rule import CODE, SECTIONS, Page
from gradflow_export.profiles import profile
from gradflow_export.rules.base import Check
from gradflow_export.rules.judge import Judge

CHECKS = tuple(rule for rule in profile() if isinstance(rule, Check))
EACH = pytest.mark.parametrize("check", CHECKS, ids=[check.name for check in CHECKS])
FIXTURES = Path(__file__).with_name("fixtures")


def judged(check, *, fixed):
    """Train the check's program while watched; return the issues that the check alone finds in what was recorded."""
    torch.manual_seed(0)
    model, train = importlib.import_module(f"checks.fixtures.{check.name.replace('-', '_')}").program(fixed)
    memory = MemoryWriter()
    with Exporter(model, backends=[memory], strict=True, synchronous=True, alerts_enabled=False).watch():
        train()
    judge = Judge([check], strict=True)
    for record in memory.records:
        judge.check(record)
    return judge.issues


@EACH
def test_a_check_tells_the_mistake_from_its_fix(check):
    """The program with the mistake has an issue of a type that the check names, the mended one has none."""
    issues = judged(check, fixed=False)
    assert issues
    assert {issue.issue_type for issue in issues} <= set(check.raises)
    assert judged(check, fixed=True) == ()


@EACH
def test_a_check_has_a_page(check):
    """Its docstring says what it does, why that is bad, with an example and its fix, and what is not reported."""
    page = Page.of(check)
    assert set(page.sections) >= set(SECTIONS)
    assert all(page.sections[name] for name in SECTIONS)
    for name in CODE:
        compile(page.sections[name], check.name, "exec")
    assert not re.search(r"^\s*$", page.title)
    assert all(len(part.split()) <= 120 for part in "\n".join(page.markdown()).split("\n\n"))


def test_every_program_belongs_to_a_check():
    """No program is left over from a check that is gone."""
    names = {path.stem for path in FIXTURES.glob("*.py")} - {"__init__"}
    assert names == {check.name.replace("-", "_") for check in CHECKS}
