"""Models that train in threads of their own."""

import threading

import torch
from torch import nn

from gradflow_export import Exporter, MemoryWriter


class Waiting(nn.Module):
    """A model that, in the middle of its forward pass, waits for another thread to train another model."""

    def __init__(self, other):
        super().__init__()
        self.layer, self._train = nn.Linear(4, 4), other

    def forward(self, x):
        thread = threading.Thread(target=self._train)
        thread.start()
        thread.join(100)
        return self.layer(x)


def test_what_another_thread_calls_is_no_part_of_the_model():
    """Its layers are no hidden parameters, and its gradients, which it may be writing, are not looked at."""
    other = nn.Linear(4, 4)
    torch.manual_seed(0)

    def train():
        other.zero_grad()
        other(torch.ones(2, 4)).sum().backward()

    model, memory = Waiting(train), MemoryWriter()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Exporter(model, backends=[memory], strict=True).watch():
        for _ in range(8):
            optimizer.zero_grad()
            model(torch.randn(2, 4)).square().mean().backward()
            optimizer.step()
    assert len(memory.records) == 8
    assert ["hidden.state" in record.facts for record in memory.records] == [False] * 8
    assert [issue for record in memory.records for issue in record.issues] == []
