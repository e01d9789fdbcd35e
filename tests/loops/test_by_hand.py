"""Loops whose optimizer is no torch.optim.Optimizer."""

import pytest
import torch
from torch import nn


def net():
    """Return a small float64 model, so that the twin's numbers are exact."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def backward(model):
    """One backward pass on fresh gradients."""
    model.zero_grad()
    loss = model(torch.randn(6, 4)).square().mean()
    loss.backward()
    return loss


def apply(model, lr=0.1):
    """Update the weights by hand."""
    with torch.no_grad():
        for p in model.parameters():
            p.sub_(lr * p.grad)


@pytest.mark.parametrize("intervals", [None, {}])
def test_a_loop_without_optimizer_is_told_once(intervals, watching, said):
    """After 20 backward passes without a step the way out is named, once."""
    model = net()
    watching(model, intervals=intervals)
    for done in range(1, 61):
        backward(model)
        apply(model)
        assert len(said("exporter.step()")) == (1 if done >= 20 else 0), done
    assert "20 backward passes and no optimizer step seen" in said("exporter.step()")[0]


def test_told_of_the_loss_of_a_criterion_too(watching, recorded, said):
    """exporter.step() ends steps: gradients, updates since the last call, and the loss are right."""
    model, criterion = net(), nn.MSELoss()
    exporter = watching(model, criterion)
    names = [n for n, _ in model.named_parameters()]
    losses, gradients, updates = [], [], [dict.fromkeys(names)]
    for number in range(6):
        model.zero_grad()
        loss = criterion(model(torch.randn(6, 4)), torch.zeros(6, 1))
        loss.backward()
        losses.append(loss.item())
        gradients.append({n: float(p.grad.double().norm()) for n, p in model.named_parameters()})
        before = {n: p.detach().double().clone() for n, p in model.named_parameters()}
        apply(model)
        if number:
            updates.append({n: float((p.detach().double() - before[n]).norm()) for n, p in model.named_parameters()})
        exporter.step()
    records = recorded(exporter)
    assert [r.step for r in records] == [1, 2, 3, 4, 5, 6]
    for record, loss, norms, changes in zip(records, losses, gradients, updates, strict=True):
        assert record.value("loss") == pytest.approx(loss)
        for name in names:
            assert record.value("parameter.gradient_norm", name) == pytest.approx(norms[name], rel=1e-6)
            seen = record.value("parameter.update_norm", name)
            assert seen == (None if record.step == 1 else pytest.approx(changes[name], rel=1e-3))
    assert said() == []


def test_beside_an_optimizer_it_is_ignored(watching, recorded, said):
    """Where a torch optimizer steps, exporter.step() changes nothing and one line says so."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exporter = watching(model)
    for _ in range(5):
        backward(model)
        optimizer.step()
        exporter.step()
    assert [r.step for r in recorded(exporter)] == [1, 2, 3, 4, 5]
    assert len(said("exporter.step() is ignored")) == 1
    assert len(said()) == 1


def test_a_frozen_parameter_is_missing_by_hand_too(watching, recorded):
    """A frozen parameter has no gradient and no update; missing, not zero."""
    model = net()
    model[0].weight.requires_grad_(False)
    exporter = watching(model)
    for _ in range(3):
        model.zero_grad()
        model(torch.randn(6, 4)).square().mean().backward()
        with torch.no_grad():
            for p in model.parameters():
                if p.requires_grad:
                    p.sub_(0.1 * p.grad)
        exporter.step()
    for record in recorded(exporter):
        assert record.value("parameter.gradient_norm", "0.weight") is None
        assert record.value("parameter.gradient_norm", "0.bias") > 0
        assert record.value("parameter.update_norm", "0.weight") is None


def test_an_endless_loop_without_steps_keeps_nothing(watching):
    """Hundreds of losses and backward passes without any step do not pile up."""
    model, criterion = net(), nn.MSELoss()
    exporter = watching(model, criterion)
    out = model(torch.randn(6, 4))
    for _ in range(1100):
        criterion(out, torch.zeros(6, 1))
    assert len(exporter._loop.taps.loss._losses) == 1024
