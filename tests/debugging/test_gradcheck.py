"""Gradient checks: every healthy model passes, every wrong backward that can be told from noise is found."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradflow_export import ArgumentTypeError, check_gradients

SEEDS = range(20)


class Last(nn.Module):
    """The last state of a recurrent network."""

    def __init__(self, kind):
        super().__init__()
        self.recurrent, self.out = kind(5, 7, 2, batch_first=True), nn.Linear(7, 3)

    def forward(self, x):
        return self.out(self.recurrent(x)[0][:, -1])


class Words(nn.Module):
    """Embedding, attention and normalisation."""

    def __init__(self):
        super().__init__()
        self.rows, self.out = nn.Embedding(11, 16), nn.Linear(16, 11)
        self.layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)

    def forward(self, x):
        return self.out(self.layer(self.rows(x)))


class Complex(nn.Module):
    """Complex weights and a complex output."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 4, dtype=torch.complex64))

    def forward(self, x):
        return torch.tanh(x.to(self.weight.dtype) @ self.weight)


class Coarse(nn.Module):
    """Rounds to float32 on its way."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)).float().to(x.dtype))


class Centred(nn.Module):
    """Replaces a buffer at every call, and draws from three generators."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.register_buffer("centre", torch.zeros(8))

    def forward(self, x):
        hidden = torch.tanh(self.first(x)) * (1 + random.random() + np.random.rand() + torch.rand(()))  # noqa: NPY002
        out = hidden - self.centre
        self.centre = 0.9 * self.centre + hidden.detach().mean(0)
        return out


class FirstClass(nn.Module):
    """A loss with float32 weights of its own."""

    def __init__(self):
        super().__init__()
        self.inner = nn.CrossEntropyLoss(weight=torch.rand(3) + 0.5)

    def forward(self, out):
        return self.inner(out, torch.tensor(1))


def stack(*layers):
    """A sequential model."""
    return nn.Sequential(*layers)


def rectified():
    """Twelve rectified layers: many kinks."""
    return stack(*(layer for _ in range(12) for layer in (nn.Linear(32, 32), nn.ReLU())))


HEALTHY = {
    "deep ReLU": lambda: (rectified(), torch.randn(128, 32), None),
    "ReLU at its kink": lambda: (stack(nn.Linear(6, 9, bias=False), nn.ReLU()), torch.zeros(8, 6), None),
    "convolution": lambda: (
        stack(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(392, 4)),
        torch.randn(8, 3, 16, 16),
        None,
    ),
    "cross entropy": lambda: (
        stack(nn.Linear(10, 30), nn.LayerNorm(30), nn.GELU(), nn.Linear(30, 4)),
        torch.randn(16, 10),
        lambda out: F.cross_entropy(out, torch.arange(16) % 4),
    ),
    "loss module": lambda: (nn.Linear(6, 3), torch.randn(6), FirstClass()),
    "softmax": lambda: (stack(nn.Linear(10, 30), nn.Softmax(-1), nn.Linear(30, 4)), torch.randn(16, 10), None),
    "absolute loss": lambda: (
        stack(nn.Linear(6, 40), nn.LeakyReLU()),
        torch.randn(80, 6),
        lambda out: out.abs().mean(),
    ),
    "attention": lambda: (Words(), torch.randint(0, 11, (4, 7)), None),
    "LSTM": lambda: (Last(nn.LSTM), torch.randn(4, 6, 5), None),
    "GRU": lambda: (Last(nn.GRU), torch.randn(4, 6, 5), None),
    "dropout": lambda: (stack(nn.Linear(6, 9), nn.Dropout(0.5)).train(), torch.randn(8, 6), None),
    "dropout called": lambda: (lambda x: F.dropout(x, 0.5, True) * x, torch.randn(8, 6), None),
    "complex": lambda: (Complex(), torch.randn(6, 5, dtype=torch.complex64), None),
    "float32 inside": lambda: (Coarse(), torch.randn(6, 6), None),
    "state of its own": lambda: (Centred(), torch.randn(6, 6), None),
    "sparse rows": lambda: (
        stack(nn.Embedding(50, 8, sparse=True), nn.Linear(8, 3)),
        torch.randint(0, 50, (9,)),
        None,
    ),
}


@pytest.mark.parametrize("kind", HEALTHY)
def test_healthy_models_pass_whatever_their_weights(kind):
    """Kinks, normalisation, recurrence, complex and coarse numbers: none fails for any of twenty seeds."""
    for seed in SEEDS:
        torch.manual_seed(seed)
        model, inputs, loss = HEALTHY[kind]()
        found = check_gradients(model, inputs, loss=loss)
        assert found, f"seed {seed}: {found}"


class Faulty(torch.autograd.Function):
    """A linear map whose weight gradient passes through a fault."""

    @staticmethod
    def forward(ctx, x, weight, fault):
        ctx.save_for_backward(x, weight)
        ctx.fault = fault
        return x @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight, ctx.fault(gradient.t() @ x), None


class Layer(nn.Module):
    """A linear layer whose backward may be wrong; remembers by what share of its norm."""

    def __init__(self, inputs, outputs, fault=None):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) / inputs**0.5)
        self.fault = fault

    def forward(self, x):
        return Faulty.apply(x, self.weight, self.fault or (lambda gradient: gradient))


def scaled(mask, error):
    """A fault that enlarges the entries of a mask."""
    return lambda gradient: gradient * (1 + error * mask(gradient))


def tenth(gradient):
    """A tenth of the entries."""
    return torch.rand(gradient.shape, generator=torch.Generator().manual_seed(7)) < 0.1


def largest_of_a_row(gradient):
    """One entry of one row."""
    mask = torch.zeros_like(gradient)
    mask.view(-1)[gradient.abs().argmax()] = 1
    return mask


FAULTS = {
    "all by 0.1 %": scaled(torch.ones_like, 1e-3),
    "all by 1 %": scaled(torch.ones_like, 1e-2),
    "a tenth by 0.1 %": scaled(tenth, 1e-3),
    "a tenth by 1 %": scaled(tenth, 1e-2),
    "one entry by 0.1 %": scaled(largest_of_a_row, 1e-3),
    "one entry by 1 %": scaled(largest_of_a_row, 1e-2),
    "wrong sign": torch.neg,
    "missing": torch.zeros_like,
    "a missing term": lambda gradient: gradient - gradient.mean(0, keepdim=True),
}


@pytest.mark.parametrize("activation", [nn.Tanh, nn.ReLU])
@pytest.mark.parametrize("depth", [3, 12])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_backward_is_found_and_named(fault, depth, activation):
    """By however little it is wrong, in whichever entries, among few tensors or many: that tensor alone fails."""
    for seed in range(3 if depth == 3 else 1):  # what is deep takes four times as long
        torch.manual_seed(seed)
        layers = [Layer(32, 32, FAULTS[fault] if place == 1 else None) for place in range(depth)]
        model = nn.Sequential(*(each for layer in layers for each in (layer, activation())))
        found = check_gradients(model, torch.randn(64, 32))
        failed = [name for name, check in found.parameters.items() if not check.passed]
        assert failed == ["2.weight"], f"seed {seed}: {found}"
        assert found.parameters["2.weight"].tolerance < found.parameters["2.weight"].relative_error


def test_the_tolerance_follows_the_noise():
    """In float64 far less than 0.1 % is told from nothing; where a model rounds to float32, more is allowed, and said."""
    torch.manual_seed(0)
    smooth = check_gradients(nn.Sequential(nn.Linear(6, 8), nn.Tanh()), torch.randn(4, 6))
    coarse = check_gradients(Coarse(), torch.randn(4, 6))
    assert max(check.tolerance for check in smooth.parameters.values()) < 1e-5
    assert 1e-6 < max(check.tolerance for check in coarse.parameters.values()) < 1e-2
    assert check_gradients(nn.Sequential(Layer(8, 8, FAULTS["all by 0.1 %"])), torch.randn(4, 8), tolerance=0.01)


def test_a_function_that_is_all_noise_settles_nothing():
    """Where no two values agree nothing can be said, and the check does not pass."""
    state = np.random.default_rng(0)
    found = check_gradients(lambda x: x.sum() + float(state.normal()), torch.ones(3))
    assert not found
    assert "do not settle" in str(found)


def everything(model):
    """The bits that a check must leave alone."""
    return [
        *(value.detach().clone() for value in model.state_dict().values()),
        *(p.grad.clone() for p in model.parameters()),
    ]


def states():
    """The state of three generators."""
    return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002


@pytest.mark.parametrize("how", ["module", "method", "closure"])
def test_nothing_is_changed(how):
    """Weights, gradients, buffers, versions and the state of three generators are what they were."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3)).double().train()
    x = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    loss = model(x).square().sum()
    loss.backward(retain_graph=True)
    before, generators = everything(model), states()
    versions = [t._version for t in (x, *model.parameters(), *model.buffers())]
    function = {"module": model, "method": model.forward, "closure": lambda x: model(x) * 2}[how]
    assert check_gradients(function, x)
    assert all(torch.equal(one, other) for one, other in zip(before, everything(model), strict=True))
    assert generators == states()
    assert versions == [t._version for t in (x, *model.parameters(), *model.buffers())]
    assert model.training
    loss.backward()


def test_a_loss_that_cannot_be_called_is_told():
    """The message says what was expected."""
    with pytest.raises(ArgumentTypeError, match="loss must be callable, got float"):
        check_gradients(nn.Linear(2, 1), torch.ones(1, 2), loss=0.5)
