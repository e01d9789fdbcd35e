"""What belongs to a step: times, told by a clock that only moves when it is pushed, and nested steps."""

import contextlib
import time

import pytest
import torch
from torch import nn

from gradflow_export import Exporter, MemoryWriter


class Pushes(torch.autograd.Function):
    """Pass through; backward takes three seconds of the clock."""

    @staticmethod
    def forward(ctx, x, clock):
        """Remember the clock."""
        ctx.clock = clock
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        """Push the clock."""
        ctx.clock[0] += 3.0
        return gradient, None


class Slow(torch.optim.SGD):
    """An optimizer whose own work takes a hundred seconds of the clock."""

    clock = None

    @torch.no_grad()
    def step(self, closure=None):
        """Run the closure if there is one, update, and push the clock."""
        if closure is not None:
            with torch.enable_grad():
                closure()
        super().step()
        self.clock[0] += 100.0


def test_backward_time_ends_before_the_optimizer_steps(monkeypatch):
    """The optimizer's own work is no part of the backward pass, inside a closure or not."""
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    torch.manual_seed(0)
    model, criterion, writer = nn.Linear(3, 2), nn.MSELoss(), MemoryWriter()
    torch.optim.SGD(model.parameters())  # from now on SGD.step has hooks too, which Slow runs through super().step()
    optimizer = Slow(model.parameters(), lr=0.1)
    optimizer.clock = clock
    x, y = torch.randn(4, 3), torch.randn(4, 2)

    def backward():
        optimizer.zero_grad()
        criterion(Pushes.apply(model(x), clock), y).backward()

    with Exporter(model, backends=[writer], strict=True).watch(criterion):
        for _ in range(4):
            backward()
            optimizer.step()
        optimizer.step(backward)
    times = [record.value("runtime.backward_time") for record in writer.records]
    assert times == [3.0, 3.0, 3.0, 3.0, 3.0]
    assert writer.records[3].value("runtime.step_time") == 103.0


class Twice(torch.optim.SGD):
    """An optimizer that does something of its own after the step it inherits."""

    @torch.no_grad()
    def step(self, closure=None):
        """Update as usual, then move every weight by one."""
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(1.0)


class Around(torch.optim.Optimizer):
    """An optimizer that looks ahead and has another one, which it shares its groups with, make the step itself."""

    def __init__(self, parameters, **options):
        super().__init__(parameters, options)
        self.base = torch.optim.SGD(self.param_groups, **options)
        self.param_groups = self.base.param_groups

    def step(self, closure=None):
        """Move the weights, evaluate the loss there, move them back, and step."""
        held = [p.detach().clone() for group in self.param_groups for p in group["params"]]
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    p.add_(p.grad, alpha=0.05)
        self.zero_grad()
        closure()
        with torch.no_grad():
            for p, before in zip((p for group in self.param_groups for p in group["params"]), held, strict=True):
                p.copy_(before)
        self.base.step()


@pytest.mark.parametrize("budget", [None, 0.05])
def test_a_step_inside_that_of_an_optimizer_which_wraps_it_is_no_step_of_its_own(budget):
    """One record for each turn of the loop, with its loss; another optimizer's parameters are another's."""
    torch.manual_seed(0)
    model, other, writer = nn.Linear(3, 2), nn.Linear(2, 1), MemoryWriter()
    optimizer, apart = Around(model.parameters(), lr=0.1), torch.optim.SGD(other.parameters(), lr=0.1)
    with Exporter(model, backends=[writer], strict=True, budget=budget).watch() as exporter:
        for _ in range(30):
            x = torch.randn(4, 3)

            def closure(x=x):
                loss = other(model(x)).square().mean()
                loss.backward()
                return loss

            optimizer.zero_grad()
            apart.zero_grad()
            closure()
            optimizer.step(closure)
            apart.step()
    assert exporter.summary()["steps"]["last"] == 30
    assert [record.step for record in writer.records] == list(range(1, 31))
    assert all(record.value("loss") is not None for record in writer.records)


def test_a_step_that_calls_the_inherited_one_is_one_step():
    """The update is that of the outer step, and a step that raised is none."""
    torch.manual_seed(0)
    model, writer = nn.Linear(3, 2), MemoryWriter()
    torch.optim.SGD(model.parameters())
    optimizer = Twice(model.parameters(), lr=0.0)

    def fail():
        raise ZeroDivisionError

    with Exporter(model, backends=[writer], strict=True).watch():
        for turn in range(6):
            optimizer.zero_grad()
            model(torch.randn(4, 3)).square().mean().backward()
            if turn == 3:
                with contextlib.suppress(ZeroDivisionError):
                    optimizer.step(fail)
            optimizer.step()
    assert len(writer.records) == 6
    for record in writer.records:
        assert record.value("parameter.update_norm", "weight") == pytest.approx(6**0.5, rel=1e-5)
