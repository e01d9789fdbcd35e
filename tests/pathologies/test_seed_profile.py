"""The fixed thresholds on real training: what is frozen is not accused."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradflow_export import Exporter, IssueType, MemoryWriter


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
def test_layer_frozen_in_the_middle_of_a_run_is_not_accused(frozen, to_none):
    """A layer that is frozen on purpose raises nothing; one that only gets zeros from then on is named."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(64, 8), torch.randint(3, (64,))
    with Exporter(model, backends=[MemoryWriter()], strict=True, profile="seed") as exporter:
        exporter.watch()
        for step in range(40):
            if step == 10 and frozen:
                model[0].requires_grad_(requires_grad=False)
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad(set_to_none=to_none)
            loss.backward()
            if step >= 10 and not frozen:
                for parameter in model[0].parameters():
                    parameter.grad.zero_()
            optimizer.step()
    kinds = {issue.issue_type for issue in exporter.issues if "0.weight" in issue.layers}
    # Shares of zeros are read when a rule asks for them, which may come after the last of these few steps.
    assert kinds - {IssueType.DEAD} == (set() if frozen else {IssueType.VANISHING, IssueType.STAGNATION})
    assert not (frozen and kinds)
