"""A check is found because its file lies in ``checks/``; nothing names it elsewhere."""

from __future__ import annotations

import sys
import textwrap

import pytest
import torch
from torch import nn

from gradflow_export import Exporter, MemoryWriter, checks
from gradflow_export.cli import main

FILE = '''
    """Sees models without a parameter that learns anything of the sort."""

    from dataclasses import dataclass

    import numpy as np

    from gradflow_export.hooks.readings import Clue
    from gradflow_export.instruments.base import Instrument
    from gradflow_export.records.step_record import IssueType, Severity
    from gradflow_export.rules.base import Check, Finding


    class Counter(Instrument):
        """Counts steps."""

        instrument, interval = "wiring", 100
        steps = 0

        def before(self, step):
            """Count one."""
            self.steps += self.armed

        def drain(self):
            """Give out the count."""
            return [Clue("brandnew.steps", ("",), np.array([self.steps]))] if self.steps else []


    @dataclass(frozen=True, kw_only=True)
    class BrandNew(Check):
        """Find that anything was trained.

        Why it is bad:
            It is not.
        """

        patience: int = 1

        name, raises, evidence = "brand-new", (IssueType.CAPACITY,), ("brandnew.steps",)

        def check(self, record, history):
            """Report the count."""
            count = float(record.fact("brandnew.steps", ""))
            return (Finding(IssueType.CAPACITY, Severity.LOW, ("",), count, 0.0, "it trains.", "nothing."),)
'''


@pytest.fixture
def lying_there(tmp_path, monkeypatch):
    """A file of a check in a folder of the package, for a while."""
    (tmp_path / "brandnew.py").write_text(textwrap.dedent(FILE))
    monkeypatch.setattr(checks, "__path__", [*checks.__path__, str(tmp_path)])
    monkeypatch.delitem(sys.modules, "gradflow_export.checks.brandnew", raising=False)
    checks.modules.cache_clear()
    yield
    sys.modules.pop("gradflow_export.checks.brandnew", None)
    checks.modules.cache_clear()


@pytest.mark.usefixtures("lying_there")
def test_a_file_with_a_check_is_all_that_a_check_needs(capsys):
    """Its reader reads, its judgement is asked, and its page is printed."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Exporter(model, backends=[MemoryWriter()], strict=True, synchronous=True).watch() as exporter:
        for _ in range(3):
            model(torch.randn(4, 2)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert [issue.message for issue in exporter.issues if str(issue.issue_type) == "CAPACITY"] == ["it trains."]
    capsys.readouterr()
    assert main(["rule", "brand-new"]) == 0
    assert "Find that anything was trained." in capsys.readouterr().out
