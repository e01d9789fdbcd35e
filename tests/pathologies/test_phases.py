"""Training in phases: a body is pretrained with one head, then trained with another one and a new optimizer."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradflow_export import Exporter, IssueType, MemoryWriter, Severity


class Phases(nn.Module):
    """A body, a decoder for the first phase, and a classifier for the second."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 48), nn.ReLU(), nn.Linear(48, 12), nn.ReLU())
        self.decoder, self.head = nn.Linear(12, 16), nn.Linear(12, 4)

    def forward(self, x, first):
        """Return the inputs again, or scores."""
        h = self.body(x)
        return self.decoder(h) if first else self.head(h)


def found(seed, forgotten, lengths=(60, 60)):
    torch.manual_seed(seed)
    model, mixed = Phases(), torch.randn(4, 16)
    with Exporter(model, backends=[MemoryWriter()], synchronous=True, verbose=0) as exporter:
        exporter.watch()
        for first, steps in zip((True, False), lengths, strict=True):
            held = [*model.body.parameters()]
            held += model.decoder.parameters() if first else [] if forgotten else model.head.parameters()
            optimizer = torch.optim.Adam(held, 3e-3)
            for _ in range(steps):
                y = torch.randint(4, (64,))
                x = mixed[y] + 0.3 * torch.randn(64, 16)
                loss = F.mse_loss(model(x, first), x) if first else F.cross_entropy(model(x, first), y)
                optimizer.zero_grad()  # what the first phase left in the decoder stays there
                loss.backward()
                optimizer.step()
        return {(i.issue_type, layer) for i in exporter.issues if i.severity > Severity.LOW for layer in i.layers}


@pytest.mark.parametrize("seed", range(3))
def test_a_new_phase_begins_anew(seed):
    """Another loss may be larger, and what a phase does not use is left out on purpose."""
    assert found(seed, forgotten=False) == set()


@pytest.mark.parametrize("seed", range(2))
def test_a_head_that_the_second_optimizer_forgets_is_told(seed):
    """Gradients reach it, and nothing moves it; the decoder, whose gradients are left over, is not named."""
    told = found(seed, forgotten=True)
    assert {layer for kind, layer in told if kind is IssueType.NOT_TRAINING} == {"head.weight", "head.bias"}
    assert not any(layer.startswith("decoder") for _, layer in told)
