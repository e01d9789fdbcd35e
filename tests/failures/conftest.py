"""A small training loop, and lines logged by this package."""

import logging

import pytest
import torch
from torch import nn


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """Compute with one thread: tiny tensors gain nothing from more, and tests share the machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def said(caplog):
    """Return a function that gives the lines logged so far that hold a word."""
    caplog.set_level(logging.INFO, logger="gradflow_export")

    def lines(word=""):
        return [r.getMessage() for r in caplog.records if r.name == "gradflow_export" and word in r.getMessage()]

    return lines


class Loop:
    """A model, a criterion, an optimizer, and what an unwatched twin's weights would be."""

    def __init__(self):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
        self.criterion = nn.CrossEntropyLoss()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def train(self, steps=5):
        """Train on data that depends on nothing but the step."""
        data = torch.Generator().manual_seed(0)
        for _ in range(steps):
            self.optimizer.zero_grad()
            x = torch.randn(6, 4, generator=data)
            self.criterion(self.model(x), torch.tensor([0, 1, 2, 0, 1, 2])).backward()
            self.optimizer.step()

    def trained_as_unwatched(self, steps=5):
        """Return whether the weights are those of a twin that nobody watched."""
        twin = Loop()
        twin.train(steps)
        pairs = zip(self.model.parameters(), twin.model.parameters(), strict=True)
        return all(torch.equal(a, b) for a, b in pairs)


@pytest.fixture
def loop():
    """Return a fresh loop."""
    return Loop()
