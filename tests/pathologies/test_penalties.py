"""Penalties that give many tensors the same gradient."""

import torch
from torch import nn
from torch.nn import functional

from gradflow_export import Exporter, IssueType, MemoryWriter


def test_tensors_that_a_penalty_alone_moves_alike_are_no_copies():
    """Norms that began alike and went apart get one gradient from a penalty: that is no DESYNC."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 3)
    )
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    with Exporter(model, backends=[MemoryWriter()], strict=True, verbose=0) as exporter:
        exporter.watch()
        for step in range(60):
            x = torch.randn(32, 8)
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(x), x[:, :3].argmax(1))
            penalty = torch.stack([q.abs().sum() for q in model.parameters()]).sum()
            (loss if step < 20 else 0 * loss + penalty).backward()
            optimizer.step()
    assert [issue for issue in exporter.issues if issue.issue_type is IssueType.DESYNC] == []
