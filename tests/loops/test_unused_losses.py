"""Losses that no backward pass comes from: they are part of no step, and nothing of them is held."""

import gc
import itertools
import weakref

import pytest
import torch
from torch import nn

from gradflow_export.hooks.instances import instances
from gradflow_export.instruments.criterion import _Call

CLASSES = 5


def model_of(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.ReLU(), nn.Linear(16, CLASSES))


def batch(size):
    return torch.randn(size, 8), torch.randint(0, CLASSES, (size,))


def evaluated(model, criterion):
    model.eval()
    x, y = batch(40)
    criterion(model(x), y).item()
    model.train()


def without_graph(model, criterion):
    with torch.no_grad():
        evaluated(model, criterion)


def thrown_away(model, criterion):
    x, y = batch(7)
    criterion(model(x), y)


ASIDE = (without_graph, evaluated, thrown_away)


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("sizes", [(16,), (8, 5, 3)])
def test_only_losses_that_a_backward_pass_comes_from_count(given, sizes, watching, recorded):
    """Whatever else the criterion is called for, loss and accuracy are those of the step's own batches."""
    model, criterion = model_of(), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    exporter, losses, hits = watching(model, criterion if given else None), [], []
    aside = itertools.cycle(((), *itertools.permutations(ASIDE, 1), *itertools.permutations(ASIDE, 2)))
    for _ in range(11):
        around = next(aside)
        optimizer.zero_grad()
        terms, right = [], 0
        for number, size in enumerate(sizes):
            x, y = batch(size)
            logits = model(x)
            loss = criterion(logits, y)
            if around[:1] and number == 0:  # before the pass, and after the loss it comes from
                around[0](model, criterion)
            (loss / len(sizes)).backward()
            terms.append(loss.item() / len(sizes))
            right += int((logits.argmax(-1) == y).sum())
        for look in around[1:]:
            look(model, criterion)
        optimizer.step()
        losses.append(sum(terms))
        hits.append(right / sum(sizes))
    records = recorded(exporter)
    assert [record.value("loss") for record in records] == pytest.approx(losses, rel=1e-6)
    if given:
        assert [record.value("alignment.accuracy") for record in records] == pytest.approx(hits, rel=1e-6)


def made_of(kind, criterion, model):
    """One step's backward passes by several ways, and the loss that counts."""
    (x, y), (other_x, other_y) = batch(16), batch(16)
    if kind == "the first of two":
        first, second = criterion(model(x), y), criterion(model(other_x), other_y)
        first.backward()
        return first.item() + 0 * second.item()
    if kind == "both":
        first, second = criterion(model(x), y), criterion(model(other_x), other_y)
        (first + second).backward()
        return first.item() + second.item()
    if kind == "divided in place":
        loss = criterion(model(x), y)
        loss /= 2
        loss.backward()
        return loss.item()
    if kind == "twice":
        loss = criterion(model(x), y)
        loss.backward(retain_graph=True)
        loss.backward()
        return 2 * loss.item()
    if kind == "only looked at":  # what is trained on is a loss of its own
        criterion(model(x), y)
        loss = model(x).square().mean()
        loss.backward()
        return loss.item()
    x.requires_grad_()
    loss = criterion(model(x), y)
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    whole = loss + slope.square().sum()
    whole.backward()
    return whole.item()


@pytest.mark.parametrize(
    "kind", ["the first of two", "both", "divided in place", "twice", "only looked at", "with a penalty"]
)
def test_a_loss_counts_by_the_pass_that_reaches_it(kind, watching, recorded):
    """What ``backward`` is called on counts, with all that goes into it, and once for each pass."""
    model, criterion = model_of(), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    exporter, losses = watching(model, criterion), []
    for _ in range(3):
        optimizer.zero_grad()
        losses.append(made_of(kind, criterion, model))
        optimizer.step()
    assert [record.value("loss") for record in recorded(exporter)] == pytest.approx(losses, rel=1e-6)


def test_what_no_pass_comes_from_is_not_held(watching):
    """The graph of a loss that was only looked at goes as soon as the loop lets go of it, and what it gave with it."""
    model, criterion = model_of(), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    exporter = watching(model, criterion)
    for _ in range(12):  # at the first ones other readers hold what a layer was called with until the next call
        made_of("divided in place", criterion, model)
        optimizer.step()
    gc.collect()
    gc.disable()
    try:
        x, y = batch(16)
        saved = weakref.ref(x)  # the first layer's node holds it
        loss = criterion(model(x), y)
        del x, y
        assert saved() is not None
        assert list(instances(_Call))
        del loss
        assert saved() is None
        assert not list(instances(_Call))
    finally:
        gc.enable()
    assert not exporter._loop.instruments.loss.passes.now
