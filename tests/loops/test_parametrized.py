"""Weights that are computed whenever somebody looks at them."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from gradflow_export import Exporter


def trained(parametrize, *, watched):
    """Losses and the final state of a network whose table and layers are all parametrized."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(16, 16), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16), nn.Linear(16, 3))
    for layer in (*model[:2], *model[3:]):
        parametrize(layer)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randint(16, (32,)), torch.randint(3, (32,))
    exporter = Exporter(model, backends=["memory"], strict=True).watch() if watched else None
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    if exporter is not None:
        exporter.close()
    return losses, {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize(
    "parametrize", [parametrizations.spectral_norm, parametrizations.weight_norm, parametrizations.orthogonal]
)
def test_watching_does_not_compute_parametrized_weights(parametrize):
    """spectral_norm takes a step of its power iteration at each look: losses, weights and its vectors stay the same."""
    losses, state = trained(parametrize, watched=False)
    seen, after = trained(parametrize, watched=True)
    assert seen == losses
    assert all(torch.equal(after[name], tensor) for name, tensor in state.items())
