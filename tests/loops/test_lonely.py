"""Backward passes inside an optimizer's step, however many, lead to that step."""

import logging

import pytest
import torch
from torch import nn

from gradflow_export import Exporter, MemoryWriter


class Searching(torch.optim.Optimizer):
    """An optimizer of one's own that calls its closure many times before it changes anything."""

    def __init__(self, params, calls):
        super().__init__(params, {"calls": calls})

    def step(self, closure):
        """Look around, then go downhill."""
        with torch.enable_grad():
            for _ in range(self.param_groups[0]["calls"]):
                loss = closure()
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                p.sub_(0.1 * p.grad)
        return loss


OPTIMIZERS = {
    "at its defaults": lambda p: torch.optim.LBFGS(p, lr=0.8),
    "few iterations": lambda p: torch.optim.LBFGS(p, lr=0.8, max_iter=4),
    "hundreds of iterations": lambda p: torch.optim.LBFGS(
        p, lr=0.05, max_iter=300, tolerance_change=0, tolerance_grad=0
    ),
    "line search": lambda p: torch.optim.LBFGS(p, max_iter=60, line_search_fn="strong_wolfe"),
    "one's own": lambda p: Searching(p, 250),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_passes_within_a_step_are_not_lonely(kind, caplog):
    """No word of a missing step, and every step is recorded."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = OPTIMIZERS[kind](model.parameters())
    writer = MemoryWriter()
    x = torch.randn(64, 4)
    y = x.sin().sum(1, keepdim=True)

    def closure():
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        return loss

    with caplog.at_level(logging.WARNING), Exporter(model, backends=[writer], strict=True).watch() as exporter:
        for _ in range(3):
            optimizer.step(closure)
    assert not [record for record in caplog.records if "no optimizer step" in record.getMessage()]
    assert [record.step for record in writer.records] == [1, 2, 3]
    assert not [issue for issue in exporter.issues if "step" in issue.message and issue.issue_type == "NOT_TRAINING"]
