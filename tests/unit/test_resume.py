"""Training that goes on from a checkpoint."""

import pytest
import torch
from torch import nn

from gradflow_export import ArgumentError, ArgumentTypeError, Exporter, read_run


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


@pytest.mark.parametrize(("value", "error"), [(-1, ArgumentError), (1.5, ArgumentTypeError), (True, ArgumentTypeError)])
def test_start_step_must_be_a_number_of_steps(value, error, tmp_path):
    """The message says what start_step is."""
    with pytest.raises(error, match="start_step must be"):
        Exporter(nn.Linear(1, 1), logdir=tmp_path, start_step=value)
