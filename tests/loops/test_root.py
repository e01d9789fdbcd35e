"""Losses that nobody tells of: what ``backward`` is called on, in all the ways loops call it."""

from __future__ import annotations

import contextlib
import functools
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from gradflow_export import Exporter, MemoryWriter
from gradflow_export.hooks.backward_listener import listen

X, Y = torch.linspace(-1, 1, 64).reshape(16, 4), torch.linspace(0, 1, 16).reshape(16, 1)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def seen(model, step, optimizer, **watch):
    """Train three steps; return the losses that ``step`` tells as true, and those recorded."""
    writer = MemoryWriter()
    with Exporter(model, backends=[writer], strict=True).watch(**watch) as exporter:
        truth = []
        for _ in range(3):
            optimizer.zero_grad()
            truth.append(step(exporter))
            optimizer.step()
    return truth, [record.value("loss") for record in writer.records]


def mean_squared(model, rows=slice(None)):
    return F.mse_loss(model(X[rows]), Y[rows])


def plainly(loss):
    loss.backward()
    return loss.item()


def in_parts(model):
    return sum(plainly(mean_squared(model, slice(k, None, 4)) / 4) for k in range(4))


def scaled(model):
    loss = mean_squared(model)
    (loss * torch.tensor(1024.0)).backward()
    return loss.item()


def through_a_list(model):
    losses = [mean_squared(model), 0.5 * mean_squared(model)]
    torch.autograd.backward(losses)
    return sum(loss.item() for loss in losses)


def with_graph(loss):
    loss.backward(create_graph=True)
    return loss.item()


WAYS = {
    "plain": lambda m: plainly(mean_squared(m)),
    "accumulated": in_parts,
    "scaled by a power of two, as GradScaler does": scaled,
    "scaled by the user's own number": lambda m: plainly(mean_squared(m) * torch.tensor(3.0)),
    "list": through_a_list,
    "create_graph": lambda m: with_graph(mean_squared(m)),
    "reentrant checkpoint": lambda m: plainly(
        F.mse_loss(checkpoint(m, X.clone().requires_grad_(), use_reentrant=True), Y)
    ),
    "checkpoint": lambda m: plainly(checkpoint(lambda x: F.mse_loss(m(x), Y), X, use_reentrant=False)),
}


@pytest.mark.parametrize("way", WAYS)
def test_loss_is_what_backward_is_called_on(way):
    """Without criterion and observe the record holds the loss, whichever way the loop calls ``backward``."""
    model = network()
    truth, got = seen(model, lambda _: WAYS[way](model), torch.optim.SGD(model.parameters(), lr=0.1))
    assert got == pytest.approx(truth, rel=1e-6)


def test_real_scaler_is_divided_out():
    """A GradScaler's factor is not part of the loss, and halving it changes nothing."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
    writer, truth = MemoryWriter(), []
    with Exporter(model, backends=[writer], strict=True).watch():
        for _ in range(3):
            optimizer.zero_grad()
            loss = mean_squared(model)
            truth.append(loss.item())
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update(scaler.get_scale() / 2)
    assert [record.value("loss") for record in writer.records] == pytest.approx(truth, rel=1e-6)


def test_what_is_told_wins():
    """Observe, before or after the pass, is believed against the root; a criterion is not: it may be a part of it."""
    criterion, model = nn.MSELoss(), network()

    def by_criterion(_):
        loss = criterion(model(X), Y)
        (7.0 * loss).backward()
        return 7.0 * loss.item()

    def by_hand(exporter):
        loss = mean_squared(model)
        loss.backward()
        exporter.observe(loss=3.0 * loss)
        return 3.0 * loss.item()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    truth, got = seen(model, by_criterion, optimizer, criterion=criterion)
    assert got == pytest.approx(truth, rel=1e-6)
    truth, got = seen(model, by_hand, optimizer)
    assert got == pytest.approx(truth, rel=1e-6)


@pytest.mark.parametrize("whose", ["generator", "critic"])
def test_each_player_has_its_own_loss(whose):
    """Of two players the one that is watched has its loss recorded, not the other's that runs through it."""
    torch.manual_seed(0)
    players = {"generator": nn.Linear(2, 4), "critic": nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))}
    made, judged = players["generator"], players["critic"]
    optimizers = {name: torch.optim.SGD(player.parameters(), lr=0.1) for name, player in players.items()}
    writer, truth = MemoryWriter(), {"generator": [], "critic": []}
    with Exporter(players[whose], backends=[writer], strict=True).watch():
        for _ in range(3):
            noise = torch.randn(8, 2)
            optimizers["critic"].zero_grad()
            truth["critic"].append(plainly(judged(made(noise).detach()).mean() - judged(torch.randn(8, 4)).mean()))
            optimizers["critic"].step()
            optimizers["generator"].zero_grad()
            truth["generator"].append(plainly(-judged(made(noise)).mean()))
            optimizers["generator"].step()
    assert [record.value("loss") for record in writer.records] == pytest.approx(truth[whose], rel=1e-6)


def test_what_is_no_scalar_is_no_loss():
    """A gradient handed to a vector of losses says nothing of one number."""
    model = network()

    def step(_):
        model(X).backward(torch.ones(16, 1))

    _, got = seen(model, step, torch.optim.SGD(model.parameters(), lr=0.1))
    assert got == [None, None, None]


class Heard:
    """Keeps what it is told."""

    def __init__(self):
        self.roots, self.given, self.seconds = [], [], []

    def see(self, tensors, gradients):
        """Take what ``backward`` is called on."""
        self.roots.append(tensors)
        self.given.append(gradients)

    def over(self, seconds):
        """Take how long it took."""
        self.seconds.append(seconds)


def test_backward_is_put_back_by_whoever_leaves_last():
    """One function stands in for all listeners, in whatever order they leave, and none is left behind."""
    original = torch.autograd.backward
    first, second = listen(Heard()), listen(Heard())
    stand_in = torch.autograd.backward
    first.close()
    assert torch.autograd.backward is stand_in
    second.close()
    assert torch.autograd.backward is original


def test_listeners_beneath_somebody_elses_wrapper_still_hear():
    """Who wraps ``backward`` after us keeps working when we leave, and we when we come again."""
    original, heard = torch.autograd.backward, Heard()
    with contextlib.ExitStack() as stack:
        stack.callback(setattr, torch.autograd, "backward", original)
        first = listen(heard)
        ours = torch.autograd.backward
        torch.autograd.backward = functools.partial(ours)
        first.close()
        loss = torch.ones(1, requires_grad=True).sum()
        loss.backward()
        assert heard.roots == []
        with listen(heard):
            loss = torch.ones(1, requires_grad=True).sum()
            loss.backward()
        assert heard.roots == [loss]


def test_a_pass_that_raises_is_over_without_a_time():
    """A listener hears of the end of each pass; of one that raised nothing else."""
    heard = Heard()
    loss = torch.ones(1, requires_grad=True).square().sum()
    with listen(heard):
        loss.backward(torch.tensor(2.0))
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
    assert heard.given == [torch.tensor(2.0), None]
    assert heard.seconds[0] > 0
    assert heard.seconds[1:] == [None]


@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("criterion", [None, nn.MSELoss()])
def test_the_loss_of_a_closure_is_that_of_the_weights_before_the_step(
    micro, set_to_none, criterion, watching, recorded
):
    """LBFGS evaluates many times; the record has what ``step`` returns, and the gradient norm of the last evaluation."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
    x, y, returned, last = torch.randn(micro, 8, 4), torch.randn(micro, 8, 1), [], []
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=6)
    exporter = watching(model, criterion, blocks=list(model))

    def closure():
        optimizer.zero_grad(set_to_none=set_to_none)
        total, sizes = 0.0, []
        for part, target in zip(x, y, strict=True):
            out = model(part)
            loss = (criterion or nn.functional.mse_loss)(out, target) / micro
            out.register_hook(lambda g: sizes.append(float(g.norm())))
            loss.backward()
            total += loss.item()
        last[:] = sizes
        return torch.tensor(total)

    norms = []
    for _ in range(5):
        returned.append(float(optimizer.step(closure)))
        norms.append(sum(size**2 for size in last) ** 0.5)
    records = recorded(exporter)
    assert [record.value("loss") for record in records] == pytest.approx(returned, rel=1e-6)
    assert [record.value("block.gradient_norm", "2") for record in records] == pytest.approx(norms, rel=1e-5)


def test_what_grad_sends_back_before_training_begins_is_no_gradient_of_a_step():
    """A stage of a pipeline rehearses with whatever is in memory, to learn shapes."""
    norms = []
    for rehearsed in (False, True):
        torch.manual_seed(0)
        model, memory = network(), MemoryWriter()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with Exporter(model, backends=[memory], budget=None, strict=True).watch():
            if rehearsed:
                x = torch.full((4, 4), float("nan"), requires_grad=True)
                torch.autograd.grad(model(x).sum(), x)
            for _ in range(3):
                optimizer.zero_grad()
                mean_squared(model).backward()
                optimizer.step()
        norms.append([record.get("block.gradient_norm").values.tolist() for record in memory.records])
    assert norms[0] == norms[1]


def trained(layers, width=8):
    """Return a model and what makes a step of it."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step():
        optimizer.zero_grad()
        model(torch.ones(2, width)).square().mean().backward()
        optimizer.step()

    return model, step


def calls_of(step):
    """Return how many functions of Python's and of C a step calls."""
    calls = []

    def note(_frame, event, _what):
        if event in {"call", "c_call"}:
            calls.append(event)

    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
    return len(calls)


def test_passes_of_others_cost_the_same_whatever_their_length():
    """Beside an exporter a step of a model that nobody watches takes a few calls more, as many for any depth."""
    added = []
    for layers in (4, 64):
        _, stranger = trained(layers)
        stranger()
        alone = min(calls_of(stranger) for _ in range(5))  # the least: a collection of garbage may call something too
        watched, step = trained(3)
        with Exporter(watched, backends=[MemoryWriter()], budget=None, verbose=0).watch():
            for _ in range(30):
                step()
                stranger()
            counts = []
            for _ in range(5):
                step()
                counts.append(calls_of(stranger))
            added.append(min(counts) - alone)
    assert added[0] == added[1] < 250


@pytest.mark.parametrize("alone", [1, 20, 70])
def test_a_pass_through_others_is_the_models_however_long_they_trained_alone(alone):
    """A generator's passes through its discriminator are all recorded, after a discriminator that trained by itself."""
    torch.manual_seed(0)
    generator, discriminator = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    its, others = (torch.optim.SGD(part.parameters(), lr=0.01) for part in (generator, discriminator))
    writer, truth = MemoryWriter(), []
    with Exporter(generator, backends=[writer], strict=True, budget=None, verbose=0).watch():
        for _ in range(alone):
            others.zero_grad()
            discriminator(X).square().mean().backward()
            others.step()
        for _ in range(60):
            others.zero_grad()
            discriminator(generator(X).detach()).square().mean().backward()
            others.step()
            its.zero_grad()
            loss = discriminator(generator(X)).mean()
            loss.backward()
            its.step()
            truth.append(loss.item())
    assert [record.value("loss") for record in writer.records] == pytest.approx(truth)
