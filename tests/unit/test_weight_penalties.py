"""A penalty on weights is added to a loss; where it is taken off, nothing bounds the weights."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parameters_to_vector

from gradflow_export import Exporter, IssueType, MemoryWriter
from gradflow_export.autograd_graph.weight_penalty import weights_that_grow

SIZES = {
    "squares": lambda ps: sum(p.square().sum() for p in ps),
    "powers": lambda ps: sum((p**2).mean() for p in ps),
    "products": lambda ps: sum((p * p).sum() for p in ps),
    "absolute": lambda ps: sum(p.abs().sum() for p in ps),
    "norms": lambda ps: torch.stack([p.norm() for p in ps]).sum(),
    "norm_of_norms": lambda ps: torch.stack([torch.linalg.vector_norm(p) for p in ps]).norm(),
    "vector": lambda ps: parameters_to_vector(ps).pow(2).sum().sqrt(),
    "distance": lambda ps: sum((p - torch.ones_like(p)).square().sum() for p in ps),
    "mean_squared": lambda ps: sum(functional.mse_loss(p, torch.zeros_like(p)) for p in ps),
    "orthogonal": lambda ps: sum((p @ p.T - torch.eye(len(p))).square().sum() for p in ps if p.dim() == 2),
}
ADDED = {
    "plus": lambda loss, size: loss + 0.1 * size,
    "plus_tensor": lambda loss, size: loss + torch.tensor(0.1) * size / 2,
    "minus_of_minus": lambda loss, size: loss - (-0.1 * size),
    "scaled_together": lambda loss, size: (loss + size * 0.1) / 4,
}
TAKEN_OFF = {
    "minus": lambda loss, size: loss - 0.1 * size,
    "negative_factor": lambda loss, size: loss + -0.1 * size,
    "negative_tensor": lambda loss, size: loss + torch.tensor(-0.1) * size,
    "scaled_together": lambda loss, size: (loss - size / 10) / 4,
    "alone": lambda _, size: -size,
}


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def criterion(model):
    return functional.cross_entropy(model(torch.randn(5, 6)), torch.randint(3, (5,)))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("join", ADDED)
def test_a_penalty_that_is_added_keeps_weights_small(size, join, model):
    assert weights_that_grow(ADDED[join](criterion(model), SIZES[size](list(model.parameters())))) is None


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("join", TAKEN_OFF)
def test_a_penalty_that_is_taken_off_has_them_grow(size, join, model):
    assert weights_that_grow(TAKEN_OFF[join](criterion(model), SIZES[size](list(model.parameters())))) is not None


def test_what_is_no_size_of_weights_alone_may_be_taken_off(model):
    """Outputs that are to lie far apart, weights of length 1, biases, and weights whose sum is to be large."""
    x, loss = torch.randn(5, 6), criterion(model)
    weight = model[0].weight
    others = [
        model(x).square().mean(),
        (weight / weight.norm()).square().sum(),
        (weight * x[0]).tanh().square().sum(),
        model[0].bias.square().sum(),
        weight.sum(),
    ]
    assert [weights_that_grow(loss - each) for each in others] == [None] * 5


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_run_says_so(sign, model):
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    with Exporter(model, backends=[MemoryWriter()], strict=True, verbose=0) as exporter:
        exporter.watch()
        for _ in range(30):
            x = torch.randn(32, 6)
            loss = functional.cross_entropy(model(x), x[:, :3].argmax(1))
            optimizer.zero_grad()
            (loss + sign * 1e-3 * sum(p.square().sum() for p in model.parameters())).backward()
            optimizer.step()
    causes = {issue.cause for issue in exporter.issues if issue.issue_type is IssueType.WRONG_LOSS}
    assert causes == (set() if sign > 0 else {"penalty on the weights is taken off"})


def test_a_perturbation_that_is_to_stay_small_belongs_to_no_model(model):
    """What attacks a model, and not the model, is trained by what is taken off."""
    x, y = torch.randn(16, 6), torch.randint(3, (16,))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    with Exporter(model, backends=[MemoryWriter()], strict=True, verbose=0) as exporter:
        exporter.watch()
        for _ in range(20):
            attack = nn.Parameter(torch.zeros_like(x))
            gain = functional.cross_entropy(model(x + attack), y) - 0.1 * attack.square().sum()
            gain.backward()
            optimizer.zero_grad()
            functional.cross_entropy(model(x + attack.grad.sign() * 0.1), y).backward()
            optimizer.step()
    assert [issue for issue in exporter.issues if issue.issue_type is IssueType.WRONG_LOSS] == []


@pytest.mark.parametrize("layers", [1, 300, 3000])
def test_of_a_graph_that_is_too_long_nothing_is_said(layers):
    """Thousands of weights are no less a penalty; of more than are looked at, nobody knows that they are all."""
    weights = [nn.Parameter(torch.randn(2, 2)) for _ in range(layers)]
    found = weights_that_grow(torch.ones(1, requires_grad=True).sum() - torch.stack([w.norm() for w in weights]).norm())
    assert (found is not None) is (layers < 3000)
