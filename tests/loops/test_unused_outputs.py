"""Outputs that nothing takes have no gradient, and what runs along several dimensions has no one of them."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradflow_export import Exporter, MemoryWriter


class Sequences(nn.Module):
    """Of all that a recurrent layer gives out one thing is used."""

    def __init__(self, kind, used, *, batch_first):
        super().__init__()
        self.read, self.last, self.used = kind(6, 5, batch_first=batch_first), nn.Linear(5, 3), used

    def forward(self, x):
        steps, state = self.read(x)
        every = (steps.mean(0), *state) if isinstance(state, tuple) else (steps.mean(0), state, state)
        return self.last(every[self.used].reshape(-1, 5))


class Product(torch.autograd.Function):
    """A product whose author gives no gradient to its weight."""

    @staticmethod
    def forward(context, x, weight):
        context.save_for_backward(weight)
        return x @ weight

    @staticmethod
    def backward(context, gradient):
        (weight,) = context.saved_tensors
        return gradient @ weight.T, None


class Own(nn.Module):
    """A layer that is trained, and a weight that no gradient comes to."""

    def __init__(self):
        super().__init__()
        self.layer, self.weight = nn.Linear(6, 4), nn.Parameter(torch.randn(4, 3))

    def forward(self, x):
        return Product.apply(self.layer(x), self.weight)


class Halves(nn.Module):
    """The model gives out two things of one node."""

    def __init__(self):
        super().__init__()
        self.both = nn.Linear(6, 6)

    def forward(self, x):
        return self.both(x).chunk(2, dim=1)


def trained(model, x, loss):
    """Train while watched, strictly, as what fails inside then raises; return how many records have gradients of blocks."""
    optimizer, memory = torch.optim.Adam(model.parameters()), MemoryWriter()
    with Exporter(model, backends=[memory], strict=True).watch():
        for _ in range(6):
            optimizer.zero_grad()
            loss(model(x + 0.1 * torch.randn_like(x))).backward()
            optimizer.step()
    return sum("block.gradient_norm" in record.metrics for record in memory.records)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("used", [0, 1, 2])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_of_a_recurrent_layer_one_output_may_be_used(kind, used, batch_first):
    """The steps, the last state or the cell, whichever dimension comes first."""
    model = Sequences(kind, used, batch_first=batch_first)
    read = trained(model, torch.randn(8, 8, 6), lambda out: F.cross_entropy(out, torch.randint(3, (len(out),))))
    assert read == 6


@pytest.mark.parametrize("used", [0, 1])
def test_of_two_outputs_of_one_node_one_may_be_used(used):
    """Whichever it is."""
    read = trained(Halves(), torch.randn(8, 6), lambda out: F.cross_entropy(out[used], torch.randint(3, (8,))))
    assert read == 6


@pytest.mark.parametrize("dims", [(2, 3), (-1, -2), (0,), 2])
def test_a_mean_along_any_dimensions_before_nll_is_read(dims):
    """An ensemble's mean, or one over all pixels."""
    model = nn.Conv2d(4, 3, 1)

    def loss(out):
        means = out.mean(dims).log_softmax(0).reshape(-1, 3)
        return F.nll_loss(torch.stack([means, means]).mean(0), torch.randint(3, (len(means),)))

    assert trained(model, torch.randn(3, 4, 3, 3), loss) == 6


def test_a_function_that_gives_a_weight_no_gradient_is_watched():
    """``None`` is what it says there is."""
    assert trained(Own(), torch.randn(8, 6), lambda out: F.cross_entropy(out, torch.randint(3, (8,)))) == 6


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_targets_that_are_infinite_warn_of_nothing():
    """The gradients are infinite or NaN, which is told as such."""
    trained(
        nn.Linear(6, 2), torch.randn(8, 6), lambda out: F.mse_loss(out, torch.tensor([1.0, float("inf")]).expand(8, 2))
    )
