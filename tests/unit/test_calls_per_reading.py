"""How much Python a reading of everything takes, in calls: per block, and walks of the model's modules."""

import itertools
import sys
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import gradflow_export
from gradflow_export import Exporter, MemoryWriter
from gradflow_export.engine.assemble import derived
from gradflow_export.hooks import torch_private
from gradflow_export.hooks.members import held_parameters, member_parameters, members
from gradflow_export.metrics.gains import gains, log_gains
from gradflow_export.profiles import profile
from gradflow_export.records.column import Column
from gradflow_export.rules.judge import Judge
from gradflow_export.schedule import INTERVALS

EVERY = dict.fromkeys(("statistics", "blocks", "updates"), 1)
HOME = str(Path(gradflow_export.__file__).parent)


class Chain(nn.Module):
    """Blocks of a linear layer each, with rectifiers between them."""

    def __init__(self, depth):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(depth))
        self.rectifiers = nn.ModuleList(nn.ReLU() for _ in range(depth))

    def forward(self, x):
        for layer, rectifier in zip(self.layers, self.rectifiers, strict=True):
            x = x + rectifier(layer(x))
        return x


def steps(model, count, around, intervals=EVERY, writer=None):
    """Watch some steps at which much is read; each is made within ``around()``."""
    optimizer, criterion = torch.optim.AdamW(model.parameters()), nn.MSELoss()
    settings = {"intervals": intervals, "budget": None, "synchronous": True}
    with Exporter(model, backends=[writer or MemoryWriter()], **settings) as exporter:
        exporter.watch(criterion)
        for _ in range(count):
            x = torch.randn(4, 8)
            around(lambda x=x: (optimizer.zero_grad(), criterion(model(x), x).backward(), optimizer.step()))


def calls_of(work):
    """Return how many functions of the package are called on this thread."""
    seen = Counter()

    def profile(frame, event, _argument):
        seen[event == "call" and frame.f_code.co_filename.startswith(HOME)] += 1

    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(None)
    return seen[True]


def calls_of_a_step(depth):
    """Return the fewest calls of functions of the package, on the training thread, that a step of a chain took."""
    counts = []

    def around(step):
        counts.append(calls_of(step))

    steps(Chain(depth), 12, around)
    return min(counts)


def test_a_block_costs_few_calls_at_every_step():
    """Each further block, of two modules and two parameters, takes ten calls at most where all is read."""
    few, many = calls_of_a_step(4), calls_of_a_step(24)
    assert (many - few) / 20 <= 10


MOST_CALLS = 226
"""Of functions of the package at a step that makes a record and reads nothing else. Between two steps of the model
their code leaves the processor's caches, so that each counts more than what it does."""


def test_a_plain_record_takes_few_calls():
    """What rests is asked for nothing, and what is handed on stays on the host."""
    counts = []
    never = dict.fromkeys(INTERVALS, 10**9)
    steps(Chain(4), 108, lambda step: counts.append(calls_of(step)), never)
    assert min(counts) <= MOST_CALLS


MOST_JUDGING = 215
"""Calls of functions, C's among them, that judging such a record takes."""


def calls_to_judge(depth):
    """Return the fewest calls of functions, C's among them, that judging a record without dear readings takes."""
    writer, never = MemoryWriter(), dict.fromkeys(INTERVALS, 10**9)
    steps(Chain(depth), 140, lambda step: step(), never, writer)
    judge, counts = Judge(profile()), []
    for record in writer.records:
        seen, clocks = Counter(), {reading for reading in record.readings if reading.metric.startswith("runtime.")}
        plain = replace(record, readings=tuple(reading for reading in record.readings if reading not in clocks))

        def profiled(_frame, event, _argument, seen=seen):
            seen[event] += 1

        sys.setprofile(profiled)
        try:
            judge.check(plain)
        finally:
            sys.setprofile(None)
        counts.append(seen["call"] + seen["c_call"])
    return min(counts[120:])


def test_judging_a_plain_record_takes_few_calls_whatever_the_number_of_parameters():
    """Rules asked at every record look at what is long only where something short gives cause."""
    few, many = calls_to_judge(3), calls_to_judge(40)
    assert many <= few + 20
    assert few <= MOST_JUDGING


def test_a_walk_asks_each_module_once(monkeypatch):
    """The model is not asked for its names by its own generators, and each module is looked at once for all it holds."""
    model, asked = Chain(50), Counter()
    held = torch_private.held

    def asking(module):
        asked[id(module)] += 1
        return held(module)

    monkeypatch.setattr(torch_private, "held", asking)
    for walk in (members, member_parameters, held_parameters):
        asked.clear()
        walk(model)
        assert set(asked) == set(map(id, model.modules()))
        assert set(asked.values()) == {1}


def walks_of_a_step(intervals, monkeypatch):
    """Return the fewest walks of a model's modules that a step took."""
    model, walks, held = Chain(3), [0], torch_private.held

    def asking(module):
        walks[-1] += module is model
        return held(module)

    def around(step):
        walks.append(0)
        step()

    monkeypatch.setattr(torch_private, "held", asking)
    steps(model, 14, around, intervals)
    monkeypatch.setattr(torch_private, "held", held)
    return min(walks[11:])


def test_a_reading_walks_the_model_once(monkeypatch):
    """Beside a step that reads gradients alone, one that reads connections or updates lists the parameters once."""
    never = dict.fromkeys(INTERVALS, 10**9)
    for name in ("wiring", "updates"):
        assert walks_of_a_step({**never, name: 1}, monkeypatch) <= 1 + walks_of_a_step(never, monkeypatch)


def test_updates_that_move_everything_walk_no_model(monkeypatch):
    """What the optimizer is known to have moved needs no list of the model's parameters at each reading."""
    never = dict.fromkeys(INTERVALS, 10**9)
    assert walks_of_a_step({**never, "updates": 1}, monkeypatch) == walks_of_a_step(never, monkeypatch)


class Odd(nn.Module):
    """Shares modules and parameters, and holds places without any."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 3, bias=False)
        self.same = self.first
        self.none = None
        self.register_module("absent", None)
        self.tied = nn.Linear(3, 3)
        self.tied.weight = self.first.weight
        self.own = nn.Parameter(torch.zeros(2))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
@pytest.mark.parametrize("make", [Odd, lambda: Chain(3), lambda: nn.Linear(2, 2), lambda: torch.jit.script(Chain(2))])
def test_a_walk_finds_what_the_model_names(make):
    """Shared, absent and scripted members have the names and the order that the model's own lists give them."""
    model = make()
    assert [(name, id(m)) for name, m in members(model)] == [(name, id(m)) for name, m in model.named_modules()]
    assert [name for name, _ in member_parameters(model)] == [name for name, _ in model.named_parameters()]
    for (module, key, found), p in zip(held_parameters(model), model.parameters(), strict=True):
        assert torch.equal(found, p)
        assert key in dict(module.named_parameters(recurse=False))


def test_members_of_a_model_without_the_private_names_are_found(monkeypatch):
    """A release of torch whose modules hold their members elsewhere is asked by its public lists."""
    model = Odd()
    expected = members(model), member_parameters(model)
    monkeypatch.setattr(torch_private, "held", torch_private._held)
    assert [name for name, _ in members(model)] == [name for name, _ in expected[0]]
    assert [(name, id(p)) for name, p in member_parameters(model)] == [(name, id(p)) for name, p in expected[1]]


def test_gains_take_no_call_for_each_block():
    """What the worker derives from the norms of blocks takes as many calls for five hundred of them as for five."""

    def columns(count):
        sites = tuple(f"blocks.{place}" for place in range(count))
        after = np.append(np.arange(1.0, count), -1.0)
        norms = np.linspace(1.0, 2.0, count)
        here = np.ones(count, dtype=np.bool_)
        return {"block.gradient_norm": Column(sites, norms, here), "block.next": Column(sites, after, here.copy())}

    def calls(count):
        return min(calls_of(partial(lambda read: list(derived(read)), columns(count))) for _ in range(3))

    assert calls(500) <= calls(5)  # of three, as a garbage collection in between may call what waits for it


@pytest.mark.parametrize("norm", [0.0, 1e-31, 1e-30, 1e300, np.inf, np.nan, None])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_gains_beside_an_odd_norm_are_those_of_each_pair(norm, place):
    """Usable norms are taken together, and one by one where any of them is not: both give the same bits."""
    norms = [3.0, 1e-29, 0.7]
    norms[place] = norm
    pairs = list(itertools.pairwise(norms))
    for whole in (gains, log_gains):
        assert repr(whole(norms)) == repr([one for pair in pairs for one in whole(list(pair))])
