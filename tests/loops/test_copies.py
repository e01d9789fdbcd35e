"""A watched model pickles, deep-copies and saves as if nobody watched."""

import copy
import io
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.nn.modules import module as global_hooks

from gradflow_export.hooks.module_hooks import ModuleHook


class Net(nn.Module):
    """A model that keeps its criterion as a submodule."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
        self.criterion = nn.CrossEntropyLoss()

    def forward(self, x):
        return self.body(x)


def step(model, optimizer):
    """Train one step and return the loss."""
    optimizer.zero_grad()
    loss = model.criterion(model(torch.ones(5, 4)), torch.tensor([0, 1, 2, 0, 1]))
    loss.backward()
    optimizer.step()
    return loss


def saved(thing):
    """Return the bytes of torch.save."""
    buffer = io.BytesIO()
    torch.save(thing, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize("way", ["pickle", "deepcopy", "torch.save", "state_dict"])
def test_copies_hold_nothing_of_ours(way, steps, watching):
    """At any step, with module calls armed and the criterion inside the model, a copy is clean and trains unwatched."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    exporter = watching(model, model.criterion)
    for _ in range(steps):
        step(model, optimizer)
    assert exporter._loop.instruments.blocks.calls._unhook is not None
    if way == "pickle":
        data = pickle.dumps(model)
        twin = pickle.loads(data)
    elif way == "torch.save":
        data = saved(model)
        twin = torch.load(io.BytesIO(data), weights_only=False)
    elif way == "deepcopy":
        twin = copy.deepcopy(model)
        data = pickle.dumps(twin)
    else:
        data = saved({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        twin = Net()
        twin.load_state_dict(torch.load(io.BytesIO(data), weights_only=True)["model"])
    assert b"gradflow" not in data
    before = exporter._loop.steps, len(exporter._loop.instruments.loss.passes.now.losses)
    step(twin, torch.optim.SGD(twin.parameters(), lr=0.1))
    assert (exporter._loop.steps, len(exporter._loop.instruments.loss.passes.now.losses)) == before
    step(model, optimizer)
    assert exporter.summary()["steps"]["last"] == steps + 1


def test_the_optimizer_pickles_too(watching):
    """An optimizer whose steps are seen is deep-copied and pickled without anything of ours."""
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    watching(model, model.criterion)
    step(model, optimizer)
    assert b"gradflow" not in pickle.dumps(optimizer)
    assert b"gradflow" not in pickle.dumps(copy.deepcopy((model, optimizer)))


def test_six_hooks_on_the_model_are_all_that_modules_hold(watching):
    """Attributes and hooks of modules are the same before, while and after watching, but for six on the model."""

    def attributes(model):
        keys = [sorted(vars(m)) for m in model.modules()] + [sorted(vars(p)) for p in model.parameters()]
        return keys, [
            hook for m in model.modules() for k, v in vars(m).items() if k.endswith("hooks") for _, hook in v.items()
        ]

    model = Net().body
    before, none = attributes(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exporter = watching(model, nn.MSELoss())
    for _ in range(3):
        keys, hooks = attributes(model)
        assert keys == before
        assert len(hooks) == 6
        assert all(isinstance(hook, ModuleHook) for hook in hooks)
        places = (model._forward_pre_hooks, model._forward_hooks, model._load_state_dict_post_hooks)
        assert {*hooks} == {hook for place in places for _, hook in place.items()}
        optimizer.zero_grad(set_to_none=True)
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    exporter.close()
    assert attributes(model) == (before, none)
    assert not any(p._backward_hooks or p._post_accumulate_grad_hooks for p in model.parameters())
    assert not global_hooks._global_forward_hooks


def test_saving_the_loss_says_nothing_of_hooks(watching):
    """torch.save of a checkpoint that holds the loss and outputs themselves gives no warning about our tensor hooks."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watching(model, model.criterion)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = model(torch.ones(5, 4))
        loss = model.criterion(out, torch.tensor([0, 1, 2, 0, 1]))
        loss.backward()
        optimizer.step()
        assert b"gradflow" not in saved({"loss": loss, "out": out})
