"""Blocks are found where users put them, and carry the names users know."""

import pytest
import torch
from torch import nn

from gradflow_export import ArgumentError, ArgumentTypeError, Exporter, MemoryWriter
from gradflow_export.hooks.discover import find_blocks, named_blocks, site_name, unwrap
from gradflow_export.hooks.members import member_parameters, members


class Basic(nn.Module):
    """A residual block."""

    def __init__(self, width=4):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        return x + self.linear(x)


class Mixture(nn.Module):
    """A block with a list of experts inside that is longer than the list of blocks."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(4, 8)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(8))


def module(**children):
    """Return a module with named children."""
    out = nn.Module()
    for name, child in children.items():
        out.add_module(name, child)
    return out


def names(model):
    """Return the names of the blocks that are found, and whether they are leaves."""
    blocks, leaves, _ = find_blocks(model)
    assert all(dict(model.named_modules(remove_duplicate=False))[n] is m for n, m in blocks)
    return [name for name, _ in blocks], leaves


def test_a_module_list_of_like_modules_is_the_chain():
    """Embeddings and heads beside it are no blocks."""
    model = module(embedding=nn.Embedding(5, 4), blocks=nn.ModuleList(Basic() for _ in range(4)), head=nn.Linear(4, 2))
    assert names(model) == ([f"blocks.{i}" for i in range(4)], False)


def test_the_list_may_lie_deep_inside():
    """Names are dotted from the model's root."""
    model = module(transformer=module(h=nn.ModuleList(Basic() for _ in range(3))))
    assert names(model) == (["transformer.h.0", "transformer.h.1", "transformer.h.2"], False)


def test_the_stages_of_a_residual_net_are_joined():
    """Lists of blocks of one class follow one another; a stem and a head of other classes do not belong."""
    stages = {f"layer{i}": nn.Sequential(Basic(), Basic()) for i in range(1, 5)}
    model = module(stem=nn.Linear(4, 4), **stages, head=nn.Linear(4, 2))
    assert names(model) == ([f"layer{i}.{k}" for i in range(1, 5) for k in range(2)], False)


def test_experts_inside_blocks_are_no_chain():
    """The outermost list counts: experts run side by side, not one after the other."""
    model = module(blocks=nn.ModuleList(Mixture() for _ in range(3)))
    assert names(model) == (["blocks.0", "blocks.1", "blocks.2"], False)


def test_the_longest_list_wins():
    """Of two lists of different classes the longer one is the chain."""
    model = module(
        short=nn.ModuleList(nn.Linear(4, 4) for _ in range(3)), long=nn.ModuleList(Basic() for _ in range(5))
    )
    assert names(model)[0] == [f"long.{i}" for i in range(5)]


def test_a_sequential_of_sequentials_is_a_chain():
    """Members that are containers themselves are blocks, and are not joined with unrelated lists."""
    part = [nn.Linear(4, 4), nn.ReLU()]
    model = module(body=nn.Sequential(*(nn.Sequential(*part) for _ in range(3))), tail=nn.Sequential(*part))
    assert names(model) == (["body.0", "body.1", "body.2"], False)


def test_a_model_that_is_a_list_itself():
    """Names start with the number."""
    assert names(nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))) == (["0", "1", "2"], False)


def test_without_a_list_the_leaves_with_parameters_are_taken():
    """A mixed Sequential and lists of two leave only leaves; activations have nothing to learn."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.BatchNorm1d(4), nn.Linear(4, 2))
    assert names(model) == (["0", "2", "3"], True)
    assert names(module(pair=nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 4)))) == (
        ["pair.0.0", "pair.1"], True,
    )  # fmt: skip
    assert find_blocks(nn.Linear(2, 2))[0][0][0] == "Linear"


def test_what_is_written_around_a_layer_belongs_to_it():
    """A skip connection around one layer passes the gradient on, which the layer inside alone does not."""
    mixed = module(stem=nn.Linear(4, 4), body=nn.Sequential(Basic(), Basic(), Basic(), nn.Linear(4, 2)))
    assert names(mixed) == (["stem", "body.0", "body.1", "body.2", "body.3"], True)
    assert names(module(pair=nn.ModuleList([Basic(), Basic()]))) == (["pair.0", "pair.1"], True)
    assert names(module(wide=nn.MultiheadAttention(4, 2), held=nn.ModuleDict({"one": nn.Linear(4, 4)})))[0][-1] == (
        "held.one"
    )  # fmt: skip


class Backwards(nn.Module):
    """Leaves that are called in another order than they were registered in."""

    def __init__(self):
        super().__init__()
        self.last, self.middle, self.first = nn.Linear(4, 2), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.last(self.middle(self.first(x)))


def test_a_layer_with_observers_inside_is_a_layer():
    """What a layer holds without parameters, as in quantisation-aware training, does not hide it."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    for layer in (model[0], model[2]):
        layer.observer = nn.Identity()
    assert [name for name, _ in find_blocks(model)[0]] == ["0", "2"]


def test_leaves_come_in_the_order_they_are_called_in():
    """Depth is the order of calls, and the gains follow it."""
    torch.manual_seed(0)
    model, memory = Backwards(), MemoryWriter()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Exporter(model, backends=memory, strict=True).watch():
        model(torch.randn(3, 4)).sum().backward()
        optimizer.step()
    reading = memory.records[0].get("block.gradient_norm")
    assert reading.sites == ("first", "middle", "last")
    norms = reading.values.tolist()
    gains = memory.records[0].get("block.gain")
    assert gains.as_dict() == pytest.approx({"middle": norms[0] / norms[1], "last": norms[1] / norms[2]})


def test_wrappers_are_looked_through():
    """DataParallel and compiled wrappers, nested or not, are no part of the names."""
    inner = nn.Linear(2, 2)
    compiled = module(_orig_mod=nn.DataParallel(inner))
    assert unwrap(compiled) is inner
    assert unwrap(inner) is inner
    assert site_name("_orig_mod.blocks.0._checkpoint_wrapped_module.w") == "blocks.0.w"
    assert site_name("_fsdp_wrapped_module.a") == "a"
    assert site_name("") == ""


def test_blocks_may_be_named_or_handed_over():
    """Names and modules can be mixed and keep the order given."""
    model = module(a=nn.Linear(2, 2), b=module(c=nn.Linear(2, 2)))
    assert [n for n, _ in named_blocks(model, ["b.c", model.a])] == ["b.c", "a"]
    assert named_blocks(model, ["b.c"])[0][1] is model.b.c


@pytest.mark.parametrize(
    ("blocks", "kind", "text"),
    [
        (["blokcs"], ArgumentError, "'blokcs', which is no module of the model; did you mean 'blocks'"),
        ([nn.ReLU()], ArgumentError, "holds a ReLU that is not part of the watched model"),
        ([3], ArgumentTypeError, "must hold module names or modules, got int"),
        ([], ArgumentError, "blocks is empty"),
        (["blocks", "blocks"], ArgumentError, "same module twice, as 'blocks' and 'blocks'"),
    ],
)
def test_blocks_that_cannot_be_used_are_named(blocks, kind, text):
    """The message says what was expected, what came and what to do."""
    model = module(blocks=nn.Linear(2, 2))
    with pytest.raises(kind, match=text):
        named_blocks(model, blocks)
    with pytest.raises(kind, match=text):
        Exporter(model, backends="memory").watch(blocks=blocks)


def test_members_are_those_of_torch_without_the_names_of_wrappers():
    """Each module and parameter comes once, in torch's order, also where parts are shared, wrapped or missing."""
    shared = nn.Linear(2, 2)
    model = nn.ModuleDict({"a": nn.Sequential(shared, nn.ReLU()), "b": nn.ModuleList([shared, nn.Linear(2, 2)])})
    model.empty = None
    model["c"] = nn.Sequential()
    model["c"].add_module("_checkpoint_wrapped_module", nn.Linear(2, 1))
    model["b"][1].weight = shared.weight
    modules, parameters = members(model), member_parameters(model)
    assert [m for _, m in modules] == [m for _, m in model.named_modules()]
    assert [name for name, _ in modules] == [site_name(name) for name, _ in model.named_modules()]
    assert [name for name, _ in parameters] == [site_name(name) for name, _ in model.named_parameters()]
    assert all(a is b for (_, a), b in zip(parameters, model.parameters(), strict=True))


class Stored(nn.Module):
    """A layer whose parameters lie in what cannot be called."""

    def __init__(self, store):
        super().__init__()
        self.store = store
        self.names = [name for name, _ in store.named_parameters()]

    def forward(self, x):
        weight, bias = map(self.store.get_parameter, self.names)
        return torch.sigmoid(x @ weight + bias)


def stored(kind):
    """Return such a layer."""
    weight, bias = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.zeros(4))
    if kind == "list":
        return Stored(nn.ParameterList([weight, bias]))
    if kind == "dict":
        return Stored(nn.ParameterDict({"a": weight, "b": bias}))
    store = nn.Module()
    store.a, store.b = weight, bias
    return Stored(store if kind == "module" else nn.ModuleDict({"inner": store}))


@pytest.mark.parametrize("kind", ["list", "dict", "module", "nested"])
@pytest.mark.parametrize("number", [2, 5])
def test_a_store_of_parameters_is_no_block(kind, number, tmp_path, caplog):
    """The layer that holds it is, for nothing calls a store: gains are read."""
    model = module(**{f"a{index}": stored(kind) for index in range(number)})
    model.forward = lambda x: [x := layer(x) for layer in model.children()][-1]
    assert names(model)[0] == [f"a{index}" for index in range(number)]
    memory = MemoryWriter()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    exporter = Exporter(model, backends=[memory], logdir=tmp_path, synchronous=True).watch()
    for _step in range(6):
        optimizer.zero_grad()
        model.forward(torch.randn(8, 4)).sum().backward()
        optimizer.step()
    exporter.close()
    assert memory.records[0].get("block.gradient_norm").sites == tuple(f"a{index}" for index in range(number))
    assert "no call of a watched block" not in caplog.text


def test_a_model_that_is_nothing_but_a_store_has_no_blocks(tmp_path, caplog):
    """So that none is waited for."""
    model = nn.ParameterList([nn.Parameter(torch.randn(3, 3)) for _ in range(4)])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    exporter = Exporter(model, backends=[], logdir=tmp_path, synchronous=True).watch()
    for _step in range(8):
        optimizer.zero_grad()
        sum(p.square().sum() for p in model).backward()
        optimizer.step()
    exporter.close()
    assert "no call of a watched block" not in caplog.text
