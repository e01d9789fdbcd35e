"""Watching changes nothing: losses, gradients, parameters and random generators stay equal bit for bit."""

import functools
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

STEPS = 50


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(12, 12), nn.ReLU(inplace=True), nn.Dropout(0.2)) for _ in range(4)
        )
        self.head = nn.Linear(12, 3)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Cnn(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout2d(0.2), nn.Conv2d(4, 4, 3), nn.Hardtanh()
        )
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.body(x.reshape(-1, 1, 6, 2).repeat(1, 1, 1, 3)).mean(dim=(2, 3)))


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.core = kind(4, 8, num_layers=2, dropout=0.3, batch_first=True)
        self.gate = nn.Sigmoid()
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.gate(self.core(x.reshape(-1, 3, 4))[0][:, -1]))


class Cells(nn.Module):
    """A loop over a cell, whose states feed a packed layer."""

    def __init__(self):
        super().__init__()
        self.cell, self.core, self.head = nn.LSTMCell(4, 8), nn.GRU(8, 8, bidirectional=True), nn.Linear(16, 3)

    def forward(self, x):
        state, states = None, []
        for now in x.reshape(-1, 3, 4).unbind(1):
            state = self.cell(now, state)
            states.append(state[0])
        packed = pack_padded_sequence(torch.stack(states), [3, 2, 1, 3] * 4, enforce_sorted=False)
        return self.head(pad_packed_sequence(self.core(packed)[0])[0][0])


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.embed = nn.Linear(4, 8)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.encoder(self.embed(x.reshape(-1, 3, 4))).mean(dim=1))


MODELS = {
    "mlp": Mlp,
    "cnn": Cnn,
    "rnn": lambda: Recurrent(nn.RNN),
    "lstm": lambda: Recurrent(nn.LSTM),
    "gru": lambda: Recurrent(nn.GRU),
    "cells": Cells,
    "transformer": Transformer,
}


def bits(tensor):
    """Return a tensor's bytes, so that NaN equals NaN and 0.0 differs from -0.0."""
    return tensor.detach().contiguous().numpy().tobytes()


def train(build, watch):
    """Train for 50 steps; return every loss, gradient, buffer and parameter, and the generators' last states."""
    random.seed(1)
    np.random.seed(2)  # noqa: NPY002 - the global generator is what this is about
    torch.manual_seed(3)
    model, criterion = build(), nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    x, y = torch.randn(16, 12), torch.randint(0, 3, (16,))
    exporter = watch(model, criterion) if watch else None
    seen = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        seen.append(bits(loss))
        seen.extend(bits(p.grad) for p in model.parameters())
        optimizer.step()
        seen.extend(bits(p) for p in model.parameters())
    seen.extend(bits(b) for b in model.buffers())
    states = (random.getstate(), np.random.get_state()[1].tobytes(), bits(torch.get_rng_state()))  # noqa: NPY002
    return seen, states, exporter


@functools.cache
def unwatched(name):
    """Return the losses and weights, and the generators' states, of a training that nobody watched."""
    return train(MODELS[name], None)[:2]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("intervals", ["every step", "default"])
def test_watching_changes_no_bit(name, intervals, watching, recorded):
    """50 steps with dropout give the same losses, gradients, weights, buffers and generator states, watched or not."""
    plain, generators = unwatched(name)
    given = {"intervals": None} if intervals == "default" else {}
    watched, after, exporter = train(MODELS[name], lambda m, c: watching(m, c, **given))
    assert watched == plain
    assert after == generators
    records = recorded(exporter)
    assert [r.step for r in records] == list(range(1, STEPS + 1))
    assert all(r.value("loss") is not None for r in records)
    assert records[0].get("block.gradient_norm") is not None


def test_the_user_own_draws_are_the_same(watching):
    """Numbers drawn in the loop by the user come out the same with an exporter between the draws."""

    def draws(watch):
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002
        model = Mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if watch:
            watching(model)
        out = []
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.randn(4, 12)).square().mean().backward()
            optimizer.step()
            out.append((random.random(), np.random.rand(), float(torch.rand(()))))  # noqa: NPY002
        return out

    assert draws(watch=True) == draws(watch=False)


def test_modes_and_flags_are_left_alone(watching):
    """Training mode, requires_grad, grad mode, default dtype and thread count are as the user set them."""
    model = Mlp()
    model.layers[1].eval()
    model.head.bias.requires_grad_(False)
    before = ([m.training for m in model.modules()], [p.requires_grad for p in model.parameters()])
    world = (torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_num_threads())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watching(model)
    F.mse_loss(model(torch.randn(4, 12)), torch.zeros(4, 3)).backward()
    optimizer.step()
    assert ([m.training for m in model.modules()], [p.requires_grad for p in model.parameters()]) == before
    assert (torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_num_threads()) == world
