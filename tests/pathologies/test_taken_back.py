"""Steps that something takes back before the next one."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from gradflow_export import Exporter, MemoryWriter


def _put_back(model, slow):
    for old, q in zip(slow, model.parameters(), strict=True):
        q.copy_(old.lerp_(q, 0.005))


def _pruned(model, slow):
    for old, q in zip(slow, model.parameters(), strict=True):
        q.copy_(torch.where(torch.arange(q.numel()).reshape(q.shape) % 20 == 0, q, old))


def _clamped(model, _slow):
    for q in model.parameters():
        q.clamp_(-0.05, 0.05)


def _looked_ahead(model, slow, _count=[0]):  # noqa: B006 - counts the calls
    _count[0] += 1
    if _count[0] % 3 == 0:
        for old, q in zip(slow, model.parameters(), strict=True):
            q.copy_(old.lerp_(q, 0.02))


@pytest.mark.parametrize(
    ("change", "told"), [(_put_back, True), (_pruned, False), (_clamped, False), (_looked_ahead, False)]
)
def test_steps_that_are_taken_back_are_told(change, told):
    """An average copied into the model after each step is NOT_TRAINING; pruning, clamping and looking ahead are not."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    slow = [q.detach().clone() for q in model.parameters()]
    with Exporter(model, backends=[MemoryWriter()], strict=True, verbose=0) as exporter:
        exporter.watch()
        for _ in range(60):
            x = torch.randn(32, 8)
            optimizer.zero_grad()
            functional.cross_entropy(model(x), x[:, :3].argmax(1)).backward()
            optimizer.step()
            with torch.no_grad():
                change(model, slow)
    assert [issue.cause for issue in exporter.issues if issue.cause == "taken back"] == ["taken back"] * told
