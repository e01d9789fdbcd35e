"""Verdicts depend on what is measured, never on what a class, module or parameter is called."""

import copy
import importlib
import random
import string
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradflow_export import Exporter, IssueType, MemoryWriter

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def on_path(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def words(count, seed=0):
    chance = random.Random(seed)
    return ["q" + "".join(chance.choices(string.ascii_lowercase, k=7)) for _ in range(count)]


def found(model, loss, *, steps=40, each=lambda: None, optimizer=None):
    """Train; return type and layers of every issue."""
    optimizer = optimizer or torch.optim.Adam(model.parameters(), lr=1e-2)
    with Exporter(model, backends=[MemoryWriter()], strict=True, synchronous=True).watch() as exporter:
        for _ in range(steps):
            optimizer.zero_grad()
            loss().backward()
            optimizer.step()
            each()
        return {(str(issue.issue_type), layer) for issue in exporter.issues for layer in issue.layers}


class Held(nn.Module):
    """Holds modules under names of choice, and runs by a function of them."""

    def __init__(self, run, **modules):
        super().__init__()
        self.run = run
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, x):
        return self.run(x)


@pytest.mark.parametrize("names", [("online", "target"), ("net", "momentum_encoder"), tuple(words(2))])
@pytest.mark.parametrize("called", [True, False])
def test_a_follower_is_known_by_what_becomes_of_it(names, called):
    """A copy that is called without gradients rests between two copies; one that nobody calls is NOT_TRAINING."""
    torch.manual_seed(0)
    online = nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 2))
    follower = copy.deepcopy(online)
    model = Held(online.forward, **dict(zip(names, (online, follower), strict=True)))

    def loss():
        x = torch.randn(16, 6)
        with torch.no_grad():
            wanted = follower(x) if called else x[:, :2]
        return F.mse_loss(model(x), 0.9 * wanted + torch.randn(16, 2))

    layers = {layer.split(".")[0] for kind, layer in found(model, loss) if kind == "NOT_TRAINING"}
    assert layers == (set() if called else {names[1]})


def test_layers_that_are_copies_of_one_and_cut_off_are_no_followers():
    """``nn.TransformerEncoder`` copies its layers; all of it under ``no_grad`` is NOT_TRAINING as a whole."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    encoder, head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(8, 2)

    def run(x):
        with torch.no_grad():
            x = encoder(x)
        return head(x.mean(1))

    model = Held(run, target=encoder, head=head)

    def loss():
        x = torch.randn(8, 4, 8)
        return F.cross_entropy(model(x), (x[:, 0, 0] > 0).long())

    layers = {layer.split(".")[0] for kind, layer in found(model, loss) if kind == "NOT_TRAINING"}
    assert layers == {"target"}


def test_what_a_forward_pass_calls_without_gradients_is_called():
    """The reason is that the graph is cut, not that nobody calls the layers; nor are targets to blame for it."""
    torch.manual_seed(0)
    backbone, head = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16)), nn.Linear(16, 2)

    def run(x):
        with torch.no_grad():
            x = backbone(x)
        return head(x)

    x = torch.randn(400, 8)
    y = (x[:, :4].prod(1) > 0).long()
    model = Held(run, backbone=backbone, head=head)

    def loss():
        rows = torch.randint(0, 400, (32,))
        return F.cross_entropy(model(x[rows]), y[rows])

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    with Exporter(model, backends=[MemoryWriter()], strict=True, synchronous=True).watch() as exporter:
        for _ in range(120):
            optimizer.zero_grad()
            loss().backward()
            optimizer.step()
        (issue,) = (each for each in exporter.issues if each.explained_by is None)
    assert issue.issue_type is IssueType.NOT_TRAINING
    assert "no gradient ever came back" in issue.message


def test_what_a_layer_without_gradients_reads_of_its_parts_is_called():
    """Attention reads the weights of ``out_proj`` and does not call it: all of it is cut off, for one reason."""
    torch.manual_seed(0)
    attention, head = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 2)

    def run(x):
        with torch.no_grad():
            x = attention(x, x, x, need_weights=False)[0]
        return head(x.mean(1))

    model = Held(run, attention=attention, head=head)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    with Exporter(model, backends=[MemoryWriter()], strict=True, synchronous=True).watch() as exporter:
        for _ in range(40):
            x = torch.randn(32, 4, 8)
            optimizer.zero_grad()
            F.cross_entropy(model(x), (x.mean((1, 2)) > 0).long()).backward()
            optimizer.step()
        (issue,) = (each for each in exporter.issues if each.issue_type is IssueType.NOT_TRAINING)
    assert set(issue.layers) == {f"attention.{name}" for name, _ in attention.named_parameters()}
    assert "no gradient ever came back" in issue.message


@pytest.mark.parametrize("name", ["experts", *words(1)])
@pytest.mark.parametrize("sparse", [True, False])
def test_layers_behind_a_router_are_known_by_what_they_are_given(name, sparse):
    """Members of a list that get some of the rows, or the same input, may stay unchosen for long."""
    torch.manual_seed(0)
    experts = nn.ModuleList(nn.Linear(8, 2) for _ in range(4))

    def run(x):
        if not sparse:
            return sum(weight * expert(x) for weight, expert in zip((1.0, 0.0, 0.0, 0.0), experts, strict=True))
        first = x[:, 0] > 0.5
        out = x.new_zeros(len(x), 2)
        out[first], out[~first] = experts[0](x[first]), experts[1](x[~first])
        return out

    model = Held(run, **{name: experts})

    def loss():
        x = torch.randn(16, 8)
        return F.cross_entropy(model(x), (x[:, 0] > 0).long())

    assert {kind for kind, _ in found(model, loss) if kind == "NOT_TRAINING"} == set()


@pytest.mark.parametrize("names", [("base", "lora_a", "lora_b"), tuple(words(3))])
def test_a_frozen_factor_of_zeros_is_known_by_its_entries(names):
    """An adapter that is frozen before it has learned adds nothing, whatever it is called."""
    torch.manual_seed(0)
    base, down, up = nn.Linear(8, 8), nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)
    nn.init.zeros_(up.weight)
    for part in (base, down, up):
        part.requires_grad_(False)
    head = nn.Linear(8, 2)
    model = Held(lambda x: head((base(x) + up(down(x))).relu()), **dict(zip(names, (base, down, up), strict=True)))
    model.head = head

    def loss():
        x = torch.randn(16, 8)
        return F.cross_entropy(model(x), (x[:, 0] > 0).long())

    optimizer = torch.optim.Adam(head.parameters(), lr=1e-2)
    layers = {layer for kind, layer in found(model, loss, optimizer=optimizer) if kind == "NOT_TRAINING"}
    assert layers == {f"{names[2]}.weight"}


@pytest.mark.parametrize("name", ["shared_layers", "iterations", "layers", *words(1)])
def test_one_layer_in_all_places_of_a_list_is_told_whatever_the_list_is_called(name):
    """``[layer] * 3`` behind each other is CAPACITY; what is meant is registered besides, or ignored."""
    torch.manual_seed(0)
    layers, head = nn.ModuleList([nn.Linear(6, 6)] * 3), nn.Linear(6, 2)

    def run(x):
        for layer in layers:
            x = x + layer(x).relu()
        return head(x)

    model = Held(run, **{name: layers, "head": head})

    def loss():
        x = torch.randn(16, 6)
        return F.cross_entropy(model(x), (x[:, 0] > 0).long())

    assert {layer for kind, layer in found(model, loss, steps=10) if kind == "CAPACITY"} == {f"{name}.0"}


@pytest.mark.parametrize(("split", "kind", "name"), [
    ("dev", "healthy", "auxiliary_head_rarely_used"), ("heldout", "healthy", "lora"),
    ("second", "sick", "adapters_frozen_by_trainer"), ("dev", "sick", "activation_after_the_loop"),
])  # fmt: skip
def test_programs_with_random_names_have_the_same_issues(split, kind, name):
    """Names of all classes and attributes are drawn at random; ``benchmarks/renamed.py`` does so with more programs."""
    renamed, unchanged = importlib.import_module("renamed"), importlib.import_module("unchanged")
    cases = importlib.import_module(f"silent.{split}")
    bunch = cases.HEALTHY if kind == "healthy" else cases.BUGS
    (index,) = [place for place, case in enumerate(bunch) if case.name == name]
    plain, other = (renamed.issues(lambda: unchanged.silent(split, kind, index), seed) for seed in (None, 3))
    assert plain == other
    assert bool(plain) is (kind == "sick")


@pytest.mark.parametrize("names", [("weight", "weight_copy"), tuple(words(2))])
def test_parameters_that_begin_alike_are_copies_whatever_they_are_called(names):
    """Two parameters with one gradient that drift apart are DESYNC; what they share is their entries, not a name."""
    torch.manual_seed(0)
    head = nn.Linear(8, 2)
    model = Held(lambda x: head(x @ one + x @ other), head=head)
    for name in names:
        model.register_parameter(name, nn.Parameter(torch.linspace(-1, 1, 64).sin().reshape(8, 8)))
    one, other = (getattr(model, name) for name in names)
    other.register_hook(lambda gradient: 0.5 * gradient)

    def loss():
        x = torch.randn(16, 8)
        return F.cross_entropy(model(x), (x[:, 0] > 0).long())

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert {layer for kind, layer in found(model, loss, steps=15, optimizer=optimizer) if kind == "DESYNC"} == {*names}
