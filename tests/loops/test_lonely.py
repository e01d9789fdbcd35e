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
        for _ in range(2):
            optimizer.step(closure)
    assert not [record for record in caplog.records if "no optimizer step" in record.getMessage()]
    assert [record.step for record in writer.records] == [1, 2]
    assert not [issue for issue in exporter.issues if "step" in issue.message and issue.issue_type == "NOT_TRAINING"]


def trained(model, optimizer, steps, clear=True, step=True):
    for _ in range(steps):
        if clear:
            optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        if step:
            optimizer.step()


@pytest.mark.parametrize("watched", [True, False])
def test_an_optimizer_of_another_watched_model_holds_no_copies(watched, caplog):
    """Models of one shape that are trained one after the other are told of only where the other is not watched."""
    one, other = nn.Linear(8, 2), nn.Linear(8, 2)
    with caplog.at_level(logging.WARNING), Exporter(one, backends=[MemoryWriter()], strict=True).watch():
        second = Exporter(other, backends=[MemoryWriter()], strict=True)
        if watched:
            second.watch()
        trained(other, torch.optim.SGD(other.parameters(), lr=0.05), 30)
        trained(one, torch.optim.SGD(one.parameters(), lr=0.05), 3)
        second.close()
    assert any("no step of the model's own" in record.getMessage() for record in caplog.records) is not watched


@pytest.mark.parametrize(("clear", "passes", "said"), [(True, 20, "were cleared"), (False, 200, "add up")])
def test_a_step_that_is_missing_is_told_of(clear, passes, said, caplog):
    """One line says that the optimizer has not stepped: soon where gradients are cleared, else they may be gathered."""
    model = nn.Linear(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with caplog.at_level(logging.WARNING), Exporter(model, backends=[MemoryWriter()], strict=True).watch():
        trained(model, optimizer, passes - 1, clear, step=False)
        assert not [record for record in caplog.records if "has not stepped" in record.getMessage()]
        trained(model, optimizer, 21, clear, step=False)
    (line,) = [record.getMessage() for record in caplog.records if "has not stepped" in record.getMessage()]
    assert said in line
    assert str(passes) in line
