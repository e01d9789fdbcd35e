"""A layer that is killed at a known step: what is said of it, however late, is dated to a range that holds that step."""

import itertools

import pytest
import torch
from torch import nn

from gradflow_export import Exporter, IssueType, MemoryWriter

KINDS = {IssueType.DEAD, IssueType.COLLAPSE}


@pytest.mark.parametrize(("by_hand", "killed"), [(False, 120), (False, 157), (False, 301), (True, 157)])
def test_what_is_said_of_a_killed_layer_is_dated_to_its_death(killed, by_hand):
    torch.manual_seed(0)
    sizes, rule = (16, 32, 32, 32, 1), torch.randn(16, 1)
    layers = [layer for a, b in itertools.pairwise(sizes) for layer in (nn.Linear(a, b), nn.ReLU())]
    model = nn.Sequential(*layers[:-1])
    optimizer = None if by_hand else torch.optim.SGD(model.parameters(), 0.02, momentum=0.9)
    exporter = Exporter(model, backends=[MemoryWriter()], strict=True, budget=None, verbose=0).watch()
    for step in range(1, killed + 240):
        if step >= killed:
            with torch.no_grad():
                model[4].bias.fill_(-100.0)
        x = torch.randn(64, 16)
        model.zero_grad()
        nn.functional.mse_loss(model(x), torch.tanh(x @ rule * 0.3)).backward()
        if optimizer is not None:
            optimizer.step()
            continue
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(0.2 * parameter.grad)
    exporter.close()
    told = [issue for issue in exporter.issues if issue.issue_type in KINDS]
    assert told
    assert all(issue.step - (issue.before or 0) <= killed <= issue.step for issue in told)
