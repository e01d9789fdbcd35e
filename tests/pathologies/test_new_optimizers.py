"""Optimizers that lose their state: before every step, or now and then."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradflow_export import Exporter, IssueType, MemoryWriter

MAKERS = {
    "Adam": lambda parameters: torch.optim.Adam(parameters, 1e-3),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, 1e-3, weight_decay=0.1),
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, 1e-3),
    "Adamax": lambda parameters: torch.optim.Adamax(parameters, 1e-3),
    "NAdam": lambda parameters: torch.optim.NAdam(parameters, 1e-3),
    "momentum": lambda parameters: torch.optim.SGD(parameters, 0.02, momentum=0.9, weight_decay=1e-4),
}


def found(name, every, how="new", clip=None, seed=0):
    """Train on three classes; every so many steps the state is lost."""
    torch.manual_seed(seed)
    model, way = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 3)), torch.randn(16, 3)
    optimizer = MAKERS[name](model.parameters())
    with Exporter(model, backends=[MemoryWriter()], strict=True).watch() as exporter:
        for step in range(120):
            if every and step % every == 0:
                if how == "new":
                    optimizer = MAKERS[name](model.parameters())
                else:
                    optimizer.state.clear()
            x = torch.randn(32, 16)
            optimizer.zero_grad()
            F.cross_entropy(model(x), (x @ way).argmax(1)).backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
    return [issue for issue in exporter.issues if issue.issue_type is IssueType.OPTIMIZER_STATE]


@pytest.mark.parametrize("clip", [None, 0.3])
@pytest.mark.parametrize("how", ["new", "cleared"])
@pytest.mark.parametrize("name", MAKERS)
def test_a_state_that_is_lost_before_every_step_is_told_at_once(name, how, clip):
    (issue,) = found(name, 1, how, clip)
    assert issue.cause == "new each step"
    assert issue.step == 1


@pytest.mark.parametrize("every", [0, 2, 30])
@pytest.mark.parametrize("name", MAKERS)
def test_a_state_that_lasts_for_some_steps_is_not(name, every):
    """As for the folds of a cross-validation; with momentum that holds two gradients something is averaged."""
    assert found(name, every) == []
