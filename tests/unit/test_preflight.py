"""``Exporter(model, preflight=True)``: dense reading at first, and one printed summary."""

import pytest
import torch
from torch import nn

from gradflow_export import Exporter
from gradflow_export.errors import ArgumentError, ArgumentTypeError
from gradflow_export.records.issues import Issue, IssueType, Severity
from gradflow_export.schedule import PREFLIGHT_STEPS
from gradflow_export.writers.preflight import PreflightWriter, findings


def train(steps, **given):
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.Adam(model[:1].parameters())
    with Exporter(model, backends=[], strict=True, **given).watch() as exporter:
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
        exporter.summary()
    return exporter


def test_the_summary_is_printed_once_after_the_steps(capsys):
    """It names the finding with its way out, and repeats nothing that follows from it."""
    exporter = train(25, preflight=12)
    said = capsys.readouterr().err
    assert said.count("preflight, 12 steps: 1 finding.") == 1
    assert "[HIGH] NOT_TRAINING in 2.weight" in said
    assert "] STAGNATION" not in said
    assert said.count("also     STAGNATION in 2.weight") == 1
    assert exporter.settings.schedule.dense == 12


def test_true_means_fifty_steps_and_a_short_run_is_summed_up_at_its_end(capsys):
    """Fewer steps than asked for are all there is."""
    exporter = train(8, preflight=True)
    assert exporter.settings.preflight == PREFLIGHT_STEPS
    assert "preflight, 8 steps" in capsys.readouterr().err


def test_without_it_nothing_is_printed(capsys):
    """The rules work all the same."""
    assert train(12).issues
    assert "preflight" not in capsys.readouterr().err


def test_bad_values_are_refused():
    """A number of steps or a truth value is expected."""
    model = nn.Linear(2, 2)
    with pytest.raises(ArgumentTypeError, match="preflight must be"):
        Exporter(model, preflight="yes")
    with pytest.raises(ArgumentError, match="at least 0"):
        Exporter(model, preflight=-1)
    with pytest.raises(ArgumentError, match="at least 1"):
        PreflightWriter(0)


def test_a_fix_of_several_lines_stands_below_itself():
    """It can be read, and copied, as code."""
    issue = Issue(
        IssueType.LEARNING_RATE, Severity.HIGH, "", 1, 1.0, 0.1, "Large.", "for group in groups:\n    change()"
    )
    assert findings([issue], 5).endswith("    fix      for group in groups:\n                 change()")
