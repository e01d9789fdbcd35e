"""Steps that something takes back before the next one."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

from gradflow_export import Exporter, MemoryWriter


def _put_back(model, slow):
    for old, q in zip(slow, model.parameters(), strict=True):
        q.copy_(old.lerp_(q, 0.005))


def _pruned(model, slow):
    for old, q in zip(slow, model.parameters(), strict=True):
        q.copy_(torch.where(torch.arange(q.numel()).reshape(q.shape) % 20 == 0, q, old))


def _clamped(model, _slow):
    for q in model.parameters():
        q.clamp_(-0.05, 0.05)


def _every(steps, change):
    count = iter(range(10**6))
    return lambda model, slow: next(count) % steps == steps - 1 and change(model, slow)


def _averaged(share, written):
    def change(model, slow):
        for old, q in zip(slow, model.parameters(), strict=True):
            written(q, old.lerp_(q, share).clone())

    return change


def _loaded(model, slow):
    model.load_state_dict(dict(zip(model.state_dict(), slow, strict=True)))


def _tried(model, _slow):
    """Evaluate with other weights, and put those that are trained back."""
    kept = copy.deepcopy(model.state_dict())
    model.load_state_dict({name: torch.zeros_like(value) for name, value in kept.items()})
    model.load_state_dict(kept)


def _in_place(q, value):
    q.data.copy_(value)


def _anew(q, value):
    q.data = value


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (_put_back, True),
        (_every(3, _averaged(0.02, torch.Tensor.copy_)), True),
        (_every(9, _averaged(0.02, _in_place)), True),
        (_every(13, _averaged(0.001, _anew)), True),
        (_every(13, _loaded), True),
        (_every(3, _averaged(0.3, _in_place)), False),
        (_every(5, _tried), False),
        (_pruned, False),
        (_clamped, False),
    ],
)
def test_steps_that_are_taken_back_are_told(change, told):
    """Weights written over those that were learned are NOT_TRAINING; pruned, clamped and slow ones are not, nor tries."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    slow = [q.detach().clone() for q in model.parameters()]
    with Exporter(model, backends=[MemoryWriter()], strict=True, verbose=0) as exporter:
        exporter.watch()
        for _ in range(60):
            x = torch.randn(32, 8)
            optimizer.zero_grad()
            functional.cross_entropy(model(x), x[:, :3].argmax(1)).backward()
            optimizer.step()
            with torch.no_grad():
                change(model, slow)
    assert [issue.cause for issue in exporter.issues if issue.cause == "taken back"] == ["taken back"] * told


@pytest.mark.parametrize("how", ["none", "zero", "late", "detached"])
def test_gradients_taken_away_before_the_step_are_told_from_a_cut(how):
    """A layer whose gradients come and are gone at the step is not said to be cut off from the loss."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))
    exporter = Exporter(model, backends=[MemoryWriter()], verbose=0, synchronous=True).watch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(60):
        x = torch.randn(32, 4)
        optimizer.zero_grad()
        hidden = model[:4](x)
        hidden = hidden.detach() if how == "detached" else hidden
        functional.mse_loss(model[4](hidden), x[:, :1] * x[:, 1:2]).backward()
        for parameter in model[4].parameters() if how in {"none", "zero"} or (how == "late" and step > 35) else ():
            parameter.grad = None if how != "zero" else parameter.grad.zero_()
        optimizer.step()
    exporter.close()
    found = [i for i in exporter.issues if i.issue_type.name in {"NOT_TRAINING", "STAGNATION"}]
    assert found
    if how == "detached":
        assert not any("gone when" in i.message + i.advice for i in found)
        return
    assert {i.layers for i in found} == {("4.weight", "4.bias")}
    assert all("are gone when the optimizer steps" in i.message + i.advice for i in found)
    assert not any(word in i.message + i.advice for i in found for word in ("graph is cut", "does not contain"))
