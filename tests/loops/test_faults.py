"""One step with NaN in it: watching changes no bit of what follows, whatever state forward passes have of their own."""

import functools
import math
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from gradflow_export import IssueType
from gradflow_export.schedule import INTERVALS

STEPS, BAD, WIDTH = 9, 5, 8
ALL = dict.fromkeys(INTERVALS, 1)


class Stateful(nn.Module):
    """Two layers around something that is different at each call."""

    def __init__(self):
        super().__init__()
        self.first, self.last = self.layer(), nn.Linear(WIDTH, 3)
        self.calls, self.seen, self.hidden = 0, [], torch.zeros(WIDTH)
        self.generator = torch.Generator().manual_seed(1)
        self.register_buffer("centre", torch.zeros(WIDTH))
        self.norm = nn.BatchNorm1d(WIDTH)

    def layer(self):
        return nn.Linear(WIDTH, WIDTH)

    def between(self, h):
        raise NotImplementedError

    def forward(self, x):
        self.calls += 1
        return self.last(self.between(torch.relu(self.first(x))))


class Assigned(Stateful):
    def between(self, h):
        self.centre = self.centre * 0.9 + h.detach().nan_to_num().mean(0) * 0.1
        return h - self.centre


class InPlace(Stateful):
    def between(self, h):
        self.centre.mul_(0.9).add_(h.detach().nan_to_num().mean(0), alpha=0.1)
        return h - self.centre


class Hidden(Stateful):
    def between(self, h):
        h = h + 0.1 * self.hidden
        self.hidden = h.detach().nan_to_num().mean(0)
        return h


class NumpyRandom(Stateful):
    def between(self, h):
        return h * (np.random.rand() * 0.2 + 0.9)  # noqa: NPY002 - the generator of the whole process


class PythonRandom(Stateful):
    def between(self, h):
        return h * (random.random() * 0.2 + 0.9)


class Counter(Stateful):
    def between(self, h):
        return h * (1 + 0.01 * (self.calls % 7))


class TorchRandom(Stateful):
    def between(self, h):
        return h * (torch.rand(()) * 0.2 + 0.9)


class OwnGenerator(Stateful):
    def between(self, h):
        return h * (torch.rand((), generator=self.generator) * 0.2 + 0.9)


class Dropping(Stateful):
    def between(self, h):
        return functional.dropout(h, 0.2, training=self.training)


class Normalised(Stateful):
    def between(self, h):
        return self.norm(h)


class Spectral(Stateful):
    def layer(self):
        return torch.nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH))

    def between(self, h):
        return h


class Cache(Stateful):
    def between(self, h):
        self.seen.append(h.detach().nan_to_num().mean().item())
        return h * (1 + 0.1 * math.tanh(sum(self.seen[-4:])))


MODELS = (
    Assigned, InPlace, Hidden, NumpyRandom, PythonRandom, Counter, TorchRandom, OwnGenerator, Dropping, Normalised,
    Spectral, Cache,
)  # fmt: skip
PLACES = ("input", "weight", "loss")


class Careful(torch.optim.SGD):
    """Leaves out steps whose gradients are not finite."""

    @torch.no_grad()
    def step(self, closure=None):
        if all(
            bool(p.grad.isfinite().all()) for group in self.param_groups for p in group["params"] if p.grad is not None
        ):
            super().step(closure)


def train(kind, place, watch=None):
    """Train with one NaN; return the losses, all state there is at the end, and the exporter."""
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - as above
    torch.manual_seed(0)
    model = kind()
    optimizer = Careful(model.parameters(), lr=0.1, momentum=0.9)
    exporter = None if watch is None else watch(model)
    losses = []
    for step in range(1, STEPS + 1):
        x, y = torch.randn(6, WIDTH), torch.randint(3, (6,))
        bad, held = step == BAD, model.last.weight.detach().clone()
        if bad and place == "input":
            x[2, 1] = math.nan
        if bad and place == "weight":
            with torch.no_grad():
                model.last.weight[0, 0] = math.nan
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        if bad and place == "loss":
            loss = loss * torch.tensor(0.0).log() * 0
        loss.backward()
        optimizer.step()
        if bad and place == "weight":
            with torch.no_grad():
                model.last.weight.copy_(held)
        losses.append(loss.item())
    state = [*model.state_dict().values(), model.hidden, model.generator.get_state(), torch.get_rng_state()]
    rest = (model.calls, model.seen, random.random(), np.random.rand())  # noqa: NPY002 - as above
    return torch.tensor(losses), state, rest, exporter


CASES = [
    *[(kind, place, None) for kind in MODELS for place in PLACES],
    *[(kind, PLACES[number % 3], ALL) for number, kind in enumerate(MODELS)],
]
"""Each place for each model, and once with everything read at every step."""


@pytest.mark.parametrize(("kind", "place", "intervals"), CASES)
def test_training_goes_on_with_the_same_bits(kind, place, intervals, watching):
    """Losses, weights, buffers, generators and the model's own state are those of the unwatched run."""
    expected, state, rest, _ = train(kind, place)
    losses, ours, also, exporter = train(kind, place, functools.partial(watching, intervals=intervals))
    assert not expected[BAD - 1].isfinite()
    assert expected[BAD:].isfinite().all()
    assert torch.equal(losses.nan_to_num(7.0), expected.nan_to_num(7.0))
    assert all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(ours, state, strict=True))
    assert also == rest
    exporter.close()
    (issue,) = [issue for issue in exporter.issues if issue.issue_type is IssueType.NUMERICAL]
    words = {"input": "the input of the model", "weight": "the weights of last.weight", "loss": "the loss"}[place]
    assert issue.step == BAD
    assert issue.cause.startswith(words)
