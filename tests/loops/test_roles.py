"""Optimizers carry the names of what they train, where the user gives these."""

import pytest
import torch
from torch import nn

from gradflow_export import ArgumentError, ArgumentTypeError, Exporter, MemoryWriter


def agent():
    """Return an actor with two critics and a target network."""
    torch.manual_seed(0)
    names = ("actor", "q1", "q2", "target")
    model = nn.ModuleDict({n: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)) for n in names})
    model["target"].requires_grad_(False)
    return model


def play(model, optimizers, roles, tmp_path, steps=8):
    """Train each group of networks with its own loss; return the records and what each optimizer's gradients were."""
    memory, seen = MemoryWriter(), []
    exporter = Exporter(model, backends=[memory], logdir=tmp_path, synchronous=True, verbose=0).watch(roles=roles)
    for _step in range(steps):
        row = []
        for networks, optimizer in optimizers:
            x = torch.randn(16, 4)
            optimizer.zero_grad()
            loss = sum((model[name](x) - x[:, :1]).square().mean() for name in networks)
            loss.backward()
            grads = [p.grad.flatten() for group in optimizer.param_groups for p in group["params"]]
            row.append((float(loss.detach()), float(torch.cat(grads).norm())))
            optimizer.step()
        seen.append(row)
    exporter.close()
    return memory.records, seen


def parameters(model, *names):
    return [p for name in names for p in model[name].parameters()]


def test_loss_norm_and_steps_of_each_role_stand_under_its_name(tmp_path):
    """Whichever way a role is given, in any order, and with two networks in one of them."""
    model = agent()
    optimizers = [
        (["q1", "q2"], torch.optim.Adam(parameters(model, "q1", "q2"))),
        (["actor"], torch.optim.Adam(parameters(model, "actor"))),
    ]
    roles = {"the policy": model["actor"], "critic": ["q2", model["q1"]], "all": model}
    records, seen = play(model, optimizers, roles, tmp_path)
    for metric, place in (("optimizer.loss", 0), ("optimizer.gradient_norm", 1)):
        reading = records[-1].get(metric)
        assert set(reading.sites) == {"critic", "the policy"}
        values = dict(zip(reading.sites, reading.values, strict=True))
        for site, expected in zip(("critic", "the policy"), seen[-1], strict=True):
            assert values[site] == pytest.approx(expected[place], rel=1e-5)
    assert set(records[-1].get("optimizer.steps").sites) == {"critic", "the policy"}


@pytest.mark.parametrize(
    ("roles", "names"),
    [
        (None, ["Adam.0", "SGD.1"]),
        ({}, ["Adam.0", "SGD.1"]),
        ({"one": "q1", "two": "q2"}, ["one+two", "SGD.1"]),
        ({"one": "q1"}, ["Adam.0", "SGD.1"]),
        ({"net": ["q1", "q2", "actor"]}, ["net", "net.1"]),
    ],
)
def test_what_has_no_role_of_its_own_keeps_its_number(roles, names, tmp_path):
    """Several roles of one optimizer are joined, and no two optimizers have one name."""
    model = agent()
    optimizers = [
        (["q1", "q2"], torch.optim.Adam(parameters(model, "q1", "q2"))),
        (["actor"], torch.optim.SGD(parameters(model, "actor"), 0.01)),
    ]
    records, _ = play(model, optimizers, roles, tmp_path, steps=4)
    assert list(records[-1].get("optimizer.gradient_norm").sites) == names


@pytest.mark.parametrize(
    ("roles", "error", "said"),
    [
        ({"critic": "q"}, ArgumentError, "no module of the model; did you mean 'q"),
        ({"critic": nn.Linear(1, 1)}, ArgumentError, "not part of the watched model"),
        ({"critic": []}, ArgumentError, "is empty"),
        ({"critic": 3}, ArgumentTypeError, "must be a module"),
        ({3: "q1"}, ArgumentTypeError, "expects names"),
        (["q1"], ArgumentTypeError, "expects names"),
    ],
)
def test_a_wrong_role_is_an_error_that_helps(roles, error, said, tmp_path):
    """Before anything is attached, and the exporter may be used again."""
    model = agent()
    exporter = Exporter(model, backends=[], logdir=tmp_path, verbose=0)
    with pytest.raises(error, match=said):
        exporter.watch(roles=roles)
    exporter.watch(roles={}).close()
