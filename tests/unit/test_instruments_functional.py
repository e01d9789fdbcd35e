"""Activations called as functions: seen in the model's own forward pass, named by the layer that feeds them."""

import copy
import functools
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradflow_export import Exporter, IssueType, MemoryWriter
from gradflow_export.checks.evaluation.mode_reader import _Look
from gradflow_export.hooks.guards import unguarded
from gradflow_export.hooks.module_calls import ModuleCalls
from gradflow_export.hooks.parameter_names import ParameterNames
from gradflow_export.instruments.activations import functional
from gradflow_export.instruments.activations.functional import FunctionalActivations
from gradflow_export.instruments.activations.modules import ActivationInstrument

WAYS = {
    "F.relu": F.relu,
    "F.relu in place": lambda x: F.relu(x, inplace=True),
    "torch.relu": lambda x: torch.relu(input=x),
    "torch.relu held by the model": torch.relu,
    "partial": functools.partial(torch.relu),
    "Tensor.relu": lambda x: x.relu(),
    "nn.ReLU": nn.ReLU(),
}


class Net(nn.Module):
    """Two rectified layers, the second with half of its units off, and a head; the loss is a hinge."""

    def __init__(self, rectify):
        super().__init__()
        self.one, self.two, self.head = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2)
        self.rectify = rectify
        with torch.no_grad():
            self.two.bias[:4] = -50.0

    def forward(self, x):
        """Return scores."""
        h = self.rectify(self.one(x))
        return self.head(self.rectify(self.two(h)))


def net(way):
    torch.manual_seed(0)
    return Net(WAYS[way])


def step(model, x):
    loss = torch.relu(1 - model(x)).mean()
    loss.backward()
    return loss


@pytest.mark.parametrize("way", [way for way in WAYS if way != "nn.ReLU"])
def test_units_behind_a_function_are_counted_at_the_layer_that_feeds_them(way):
    """Half the units of the second layer are dead, none of the hinge outside the model is looked at."""
    model = net(way)
    tap = ActivationInstrument(ModuleCalls(), model)
    with tap.attach():
        tap.arm(on=True)
        step(model, torch.randn(64, 4))
        tap.arm(on=False)
        shares = {item.metric: dict(zip(item.sites, item.values.tolist(), strict=True)) for item in tap.drain()}
    assert shares["activation.dead_share"] == {"one": 0.0, "two": 0.5}
    assert shares["activation.zero_share"]["two"] >= 0.5


def test_a_rectifier_that_is_a_module_is_counted_once():
    """``nn.ReLU`` calls the function itself, and keeps its own name."""
    model = net("nn.ReLU")
    tap = ActivationInstrument(ModuleCalls(), model)
    with tap.attach():
        tap.arm(on=True)
        step(model, torch.randn(64, 4))
        tap.arm(on=False)
        assert {site for item in tap.drain() for site in item.sites} == {"rectify"}


def test_a_forward_pass_that_fails_hides_nothing_of_the_next():
    """What was seen before the error goes with it, and the next pass is read whole."""
    model = net("F.relu")
    tap = ActivationInstrument(ModuleCalls(), model)
    with tap.attach():
        tap.arm(on=True)
        with pytest.raises(RuntimeError):
            model(torch.randn(2, 5))
        step(model, torch.randn(64, 4))
        tap.arm(on=False)
        assert {site for item in tap.drain() for site in item.sites} == {"one", "two"}


def test_what_the_model_was_given_is_not_read_again():
    """A cell that a loop by hand calls many times shows each of its calls once: the graph behind its input is not its."""
    cell, seen = net("F.relu"), []
    names = ParameterNames(lambda: cell)
    tap = FunctionalActivations(cell, names, lambda kind, *_: bool(seen.append(kind)) or True)
    with tap.attach():
        tap.arm(on=True)
        state = torch.randn(3, 4)
        for _ in range(5):
            state = cell(state).repeat(1, 2)
        tap.arm(on=False)
    assert seen == ["relu"] * 10


def test_no_more_than_some_nodes_are_looked_at_in_a_step(monkeypatch):
    """A loop by hand that gives the state by name shows at each call the graph of all calls before it."""
    monkeypatch.setattr(functional, "MOST_NODES", 300)
    cell, seen = net("F.relu"), []
    tap = FunctionalActivations(cell, ParameterNames(lambda: cell), lambda kind, *_: bool(seen.append(kind)) or True)
    with tap.attach():
        for _ in range(2):
            state = torch.randn(3, 4)
            tap.arm(on=True)
            for _ in range(60):
                state = cell(x=state).repeat(1, 2)
            tap.arm(on=False)
            assert 10 < len(seen) < 300
            seen.clear()


@pytest.mark.parametrize("way", ["F.relu", "F.relu in place", "Tensor.relu"])
def test_a_layer_that_a_function_shuts_is_dead_and_training_is_the_same(way):
    """DEAD names the layer, its resting parameters raise nothing else, and no bit of the weights differs."""
    watched = net(way)
    with torch.no_grad():
        watched.two.bias.fill_(-50.0)
    alone = copy.deepcopy(watched)
    batches = torch.randn(30, 16, 4)

    def train(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for x in batches:
            optimizer.zero_grad()
            step(model, x)
            optimizer.step()

    with Exporter(watched, backends=[MemoryWriter()]) as exporter:
        exporter.watch()
        train(watched)
        issues = [issue for issue in exporter.issues if issue.issue_type in {IssueType.DEAD, IssueType.STAGNATION}]
    train(alone)
    assert [(issue.issue_type, issue.layer) for issue in issues] == [(IssueType.DEAD, "two")]
    for mine, theirs in zip(watched.parameters(), alone.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_names_of_all_modules_are_read_once_for_all_functions_of_a_look(monkeypatch):
    """A process has thousands of modules: a look at an evaluation searches them once for the thirteen it is about."""
    reads = []

    class Module:
        @property
        def __dict__(self):
            reads.append(self)
            return {"noise": None}

    monkeypatch.setitem(sys.modules, "elsewhere", Module())
    before = F.dropout, torch.randn
    look = _Look(nn.Linear(2, 2), unguarded)
    assert not any(now is then for now, then in zip((F.dropout, torch.randn), before, strict=True))
    look.close()
    assert (F.dropout, torch.randn) == before
    assert len(reads) == 1
