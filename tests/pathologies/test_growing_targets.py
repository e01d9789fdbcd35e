"""Values that a model bootstraps grow as it learns, and its loss with them: that is no divergence, and no failure."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradflow_export import Exporter, IssueType, MemoryWriter, Severity


def found(seed, discount, copied_every, steps=500):
    """Learn the values of a chain of states whose every step is rewarded, against a copy of the network."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    target, optimizer = copy.deepcopy(model), torch.optim.Adam(model.parameters(), 1e-3)
    turn = torch.linalg.qr(torch.randn(6, 6))[0]
    with Exporter(model, backends=[MemoryWriter()], synchronous=True, verbose=0) as exporter:
        exporter.watch()
        for step in range(steps):
            if step % copied_every == 0:
                target.load_state_dict(model.state_dict())
            state, action = torch.randn(32, 6), torch.randint(2, (32,))
            ends = (state[:, 0] > 1.0).float()
            with torch.no_grad():
                wanted = 1.0 + 0.5 * state[:, 1] + discount * (1.0 - ends) * target(state @ turn).amax(1)
            optimizer.zero_grad()
            F.smooth_l1_loss(model(state)[torch.arange(32), action], wanted).backward()
            optimizer.step()
        return {i.issue_type for i in exporter.issues if i.severity > Severity.LOW}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("copied_every", [20, 50])
def test_values_that_grow_are_in_order(copied_every, seed):
    """However often the target network is brought up to date."""
    assert found(seed, 0.98, copied_every) & {IssueType.NOT_LEARNING, IssueType.DIVERGING} == set()
