"""Training that goes on from a checkpoint."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from gradflow_export import ArgumentError, ArgumentTypeError, Exporter, read_run
from gradflow_export.cli.folders import runs_in
from gradflow_export.cli.report import summarise
from gradflow_export.records.step_record import Issue, IssueType, Severity
from gradflow_export.storage import reader


def train(logdir, steps, start_step=0):
    """Train a few steps into a log directory."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Exporter(model, logdir=logdir, start_step=start_step, strict=True).watch() as exporter:
        for _ in range(steps):
            optimizer.zero_grad()
            loss = model(torch.randn(3, 4)).square().mean()
            exporter.observe(loss=loss)
            loss.backward()
            optimizer.step()


def test_a_resumed_run_goes_on_where_it_was_saved(tmp_path):
    """Steps after the checkpoint replace those that were lost, and all others stand."""
    train(tmp_path, 12)
    train(tmp_path, 5, start_step=8)
    run = read_run(tmp_path)
    assert run.records.steps == tuple(range(1, 14))
    assert len(run.sessions) == 2


SICK = Issue(IssueType.LEAKAGE, Severity.HIGH, "", 3, 1.0, 0.5, "The target is an input.", "Remove it.")


@pytest.mark.parametrize("backend", ["tensorboard", "jsonl"])
@pytest.mark.parametrize(("over", "start", "width", "left"), [
    (False, 12, 4, True), (False, 5, 4, True), (True, 12, 4, False), (False, 2, 4, False), (False, 0, 4, False),
    (False, 12, 8, False), ("long", 12, 4, False),
])  # fmt: skip
def test_a_resumed_run_says_what_was_left_open(tmp_path, monkeypatch, backend, over, start, width, left):
    """Unless it healed, came after the checkpoint, was another model's, or its log is long; it is no issue of the later session."""
    monkeypatch.setattr(reader, "QUICK", 100 if over == "long" else reader.QUICK)

    def session(steps, first, width, issues):
        torch.manual_seed(0)
        model = nn.Linear(width, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        watched = Exporter(
            model, backends=[backend], logdir=tmp_path, start_step=first, strict=True, verbose=0, alerts_enabled=True
        ).watch()
        with watched as exporter:
            for step in range(1, steps + 1):
                optimizer.zero_grad()
                model(torch.ones(3, width)).square().mean().backward()
                if step in issues:
                    exporter.add_issue(issues[step])
                optimizer.step()
        return exporter

    session(12, 0, 4, {3: SICK, **({6: replace(SICK, healed_step=6)} if over is True else {})})
    later = session(12, start, width, {})
    named = "1 problem left open by an earlier session: LEAKAGE in the whole model since step 3; no other open"
    assert later.summary()["verdict"].startswith(named) is left
    assert later.issues == ()
    whole = summarise(runs_in(tmp_path)[-1])
    assert (SICK.issue_type in [issue.issue_type for issue in whole.issues if issue.open]) is (left or over == "long")


@pytest.mark.parametrize(("value", "error"), [(-1, ArgumentError), (1.5, ArgumentTypeError), (True, ArgumentTypeError)])
def test_start_step_must_be_a_number_of_steps(value, error, tmp_path):
    """The message says what start_step is."""
    with pytest.raises(error, match="start_step must be"):
        Exporter(nn.Linear(1, 1), logdir=tmp_path, start_step=value)
