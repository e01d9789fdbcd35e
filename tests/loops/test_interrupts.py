"""An interrupt that comes in the midst of a reading, as Ctrl-C in a notebook, and a loop that goes on after it."""

import sys

import pytest
import torch
from torch import nn

from gradflow_export import Exporter, MemoryWriter
from gradflow_export.schedule import INTERVALS


class Interrupt:
    """Raises ``KeyboardInterrupt`` when ``torch.no_grad()`` of a reading has switched and is not yet in charge."""

    def __init__(self, number):
        self.left = number

    def __call__(self, frame, event, argument):
        """Follow calls; raise at the return of the one that was asked for."""
        name, home = frame.f_code.co_name, frame.f_code.co_filename
        ours = frame.f_back is not None and "gradflow_export" in frame.f_back.f_code.co_filename
        if event == "return" and name == "__enter__" and home.endswith("grad_mode.py") and ours:
            self.left -= 1
            if self.left == 0:
                sys.setprofile(None)
                raise KeyboardInterrupt


def train(model, optimizer, steps):
    """Train for some steps."""
    for _ in range(steps):
        optimizer.zero_grad()
        x = torch.randn(8, 4)
        nn.functional.cross_entropy(model(x), (x[:, 0] > 0).long()).backward()
        optimizer.step()


@pytest.mark.parametrize("number", [1, 2, 3, 5, 8, 13])
def test_gradients_are_on_after_an_interrupt(number):
    """The loop goes on where it was: gradients are enabled, and the steps that follow are recorded."""
    torch.manual_seed(0)
    model, memory = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), MemoryWriter()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Exporter(model, backends=[memory], intervals=dict.fromkeys(INTERVALS, 1), strict=True).watch() as exporter:
        train(model, optimizer, 1)
        sys.setprofile(Interrupt(number))
        try:
            with pytest.raises(KeyboardInterrupt):
                train(model, optimizer, 4)
        finally:
            sys.setprofile(None)
        assert torch.is_grad_enabled()
        assert exporter._guard.depth == 0
        before = exporter._loop.steps
        train(model, optimizer, 3)
        assert exporter._loop.steps >= before + 3
