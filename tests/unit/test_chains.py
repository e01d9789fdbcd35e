"""The chain of blocks is found by how a model is built: stages, both sides, unlike members, and nothing side by side."""

import itertools

import pytest
import torch
from torch import nn

from gradflow_export import Exporter, MemoryWriter
from gradflow_export.hooks.discover import find_blocks


class Block(nn.Module):
    """A residual block of two layers."""

    def __init__(self, width=8, after=None):
        super().__init__()
        self.inner, self.outer = nn.Linear(width, 2 * width), nn.Linear(2 * width, after or width)

    def forward(self, x):
        out = self.outer(self.inner(x).relu())
        return out + x if out.shape == x.shape else out


class Other(Block):
    """A block of another class."""


class Stage(nn.Module):
    """Blocks behind what changes the width."""

    def __init__(self, before, width, depth):
        super().__init__()
        self.change = nn.Linear(before, width)
        self.body = nn.Sequential(*(Block(width) for _ in range(depth)))


class Attributes(nn.Module):
    """A stage that holds its blocks as attributes."""

    def __init__(self, before, width, depth):
        super().__init__()
        for number in range(depth):
            self.add_module(f"b{number}", Block(before if not number else width, width))


class Mixture(nn.Module):
    """A block with experts that are blocks by themselves."""

    def __init__(self):
        super().__init__()
        self.attention, self.gate = nn.Linear(8, 8), nn.Linear(8, 4)
        self.experts = nn.ModuleList(Block() for _ in range(4))


class Double(nn.Module):
    """Two convolutions, as hand-written U-Nets have them."""

    def __init__(self, before, after):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(before, after, 3), nn.ReLU(), nn.Conv2d(after, after, 3), nn.ReLU())


def module(**children):
    """Return a module with named children."""
    out = nn.Module()
    for name, child in children.items():
        out.add_module(name, child)
    return out


def chain(model):
    """Return the names of the blocks."""
    return [name for name, _ in find_blocks(model).blocks]


@pytest.mark.parametrize("stage", [Stage, Attributes])
def test_stages_are_looked_into(stage):
    """The blocks of all stages are the chain, however a stage holds them, and what lies between is none."""
    widths, depths = (4, 8, 16, 32), (1, 2, 3, 1)
    model = module(
        stem=nn.Linear(3, 4),
        stages=nn.Sequential(
            *(stage(widths[max(n - 1, 0)], w, d) for n, (w, d) in enumerate(zip(widths, depths, strict=True)))
        ),
        head=nn.Linear(32, 2),
    )
    inside = "body.{}" if stage is Stage else "b{}"
    assert chain(model) == [f"stages.{n}.{inside.format(k)}" for n, d in enumerate(depths) for k in range(d)]


def test_lists_in_a_list_are_looked_into():
    """A ``Sequential`` of blocks is no block, whatever it lies in."""
    model = nn.Sequential(*(nn.Sequential(Block(), Other()) for _ in range(3)))
    assert chain(model) == [f"{n}.{k}" for n in range(3) for k in range(2)]


def test_both_sides_are_found():
    """An encoder and a decoder of other classes, wherever they lie."""
    model = module(
        front=module(layers=nn.ModuleList(Block() for _ in range(2))),
        back=module(deep=module(layers=nn.ModuleList(Other() for _ in range(5)))),
    )
    assert chain(model) == [*(f"front.layers.{n}" for n in range(2)), *(f"back.deep.layers.{n}" for n in range(5))]


def test_members_may_be_unlike():
    """Blocks of several classes alternate; single layers among them belong to the chain, activations do not."""
    conv = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    model = module(layers=nn.Sequential(conv, Block(), nn.ReLU(), Other(), Block(), Other()), head=nn.Linear(8, 2))
    assert chain(model) == [f"layers.{n}" for n in (0, 1, 3, 4, 5)]


def test_what_cannot_follow_is_side_by_side():
    """Heads on levels, branches and towers on one input are no chain."""
    levels = nn.ModuleList(nn.Sequential(nn.Linear(w, 8), nn.Linear(8, 8)) for w in (16, 32, 64, 128))
    same = nn.ModuleList(nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 1)) for _ in range(5))
    wider = nn.ModuleList(nn.Sequential(nn.Linear(w, w), nn.Linear(w, 4 * w)) for w in (8, 16, 32, 64))
    for heads in (levels, same, wider):
        model = module(body=nn.ModuleList(Block() for _ in range(3)), heads=heads)
        found = find_blocks(model)
        assert [name for name, _ in found.blocks] == ["body.0", "body.1", "body.2"]
        assert [c.place for c in found.choices if not c.chosen] == ["heads"]


def test_what_is_put_beside_its_input_follows():
    """Dense blocks take all that was given out before."""
    model = module(layers=nn.ModuleDict({f"l{n}": Block(16 + 4 * n, 4) for n in range(5)}))
    assert chain(model) == [f"layers.l{n}" for n in range(5)]


def test_nobody_looks_inside_a_block():
    """Experts that are blocks themselves are parts of the block that holds them."""
    assert chain(module(layers=nn.ModuleList(Mixture() for _ in range(3)))) == [f"layers.{n}" for n in range(3)]


def test_attributes_of_like_classes_are_a_chain():
    """A U-Net whose parts have names instead of places in a list."""
    widths = (3, 8, 16, 32, 64)
    down = {f"down{n}": Double(a, b) for n, (a, b) in enumerate(itertools.pairwise(widths))}
    up = {f"up{n}": Double(b, a) for n, (a, b) in reversed(list(enumerate(itertools.pairwise(widths[1:]))))}
    assert chain(module(**down, **up, last=nn.Conv2d(8, 2, 1))) == [*down, *up]


def test_critics_beside_each_other_are_no_chain():
    """Networks of one class on one input have no blocks; their layers are read."""
    critics = {f"q{n}": nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 1)) for n in range(4)}
    kinds = {f"k{n}": Block(6, 1) for n in range(4)}
    assert find_blocks(module(**critics)).leaves
    assert find_blocks(module(**kinds)).leaves


def test_a_list_of_whole_networks_is_looked_into():
    """What is bought as a backbone has its blocks inside."""
    backbone = module(stem=nn.Linear(3, 8), layers=nn.ModuleList(Block() for _ in range(6)), head=nn.Linear(8, 5))
    model = nn.Sequential(backbone, nn.Sequential(nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 2)))
    assert chain(model) == [f"0.layers.{n}" for n in range(6)]


def test_a_block_held_twice_comes_once():
    """By the name it was registered under first."""
    shared = nn.ModuleList(Block() for _ in range(3))
    assert chain(module(left=shared, right=shared)) == ["left.0", "left.1", "left.2"]


@pytest.mark.parametrize("seed", range(3))
def test_names_decide_nothing(seed):
    """The same modules are blocks under any names of classes and attributes."""
    order = torch.randperm(26, generator=torch.Generator().manual_seed(seed)).tolist()
    letter = iter("abcdefghijklmnopqrstuvwxyz"[n] for n in order)
    kind, stage = type(next(letter), (Block,), {}), type(next(letter), (Stage,), {})
    model = module(
        **{
            next(letter): nn.Linear(3, 4),
            next(letter): nn.Sequential(stage(4, 4, 2), stage(4, 8, 2)),
            next(letter): nn.ModuleList(kind(8) for _ in range(3)),
        }
    )
    blocks = [block for _, block in find_blocks(model).blocks]
    assert blocks == [m for m in model.modules() if isinstance(m, Block)]


class Skips(nn.Module):
    """Two lists, the later registered first, of which a member is left out in the first step."""

    def __init__(self):
        super().__init__()
        self.back, self.front = (nn.ModuleList(Block() for _ in range(3)) for _ in range(2))
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        for n, layer in enumerate((*self.front, *self.back)):
            if not (self.calls == 1 and n == 1):
                x = layer(x)
        return x


def test_lists_are_in_the_order_of_their_calls():
    """A block that the first step left out has its place once it is called."""
    torch.manual_seed(0)
    model, memory = Skips(), MemoryWriter()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with Exporter(model, backends=memory, strict=True, synchronous=True).watch() as exporter:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
        wanted = (*(f"front.{n}" for n in range(3)), *(f"back.{n}" for n in range(3)))
        assert tuple(exporter.blocks) == wanted
    assert memory.records[-1].get("block.gradient_norm").sites == wanted


def test_the_tree_says_where_and_why():
    """Every place that was looked at is in it, with what became of it; nothing is there before watch()."""
    heads = nn.ModuleList(nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 1)) for _ in range(5))
    model = module(net=module(body=nn.ModuleList(Block() for _ in range(3))), heads=heads)
    with Exporter(model, backends="memory") as exporter:
        assert str(exporter.blocks) == "Module: 0 blocks"
        exporter.watch()
        assert str(exporter.blocks).splitlines() == [
            "Module: 3 blocks",
            "├─ net.body  blocks    3 x Block: in series, of one width",
            "└─ heads     left out  5 x Sequential: side by side: what one gives out does not fit into the next",
        ]
        assert list(exporter.blocks) == ["net.body.0", "net.body.1", "net.body.2"]


def test_the_tree_names_what_users_chose():
    """And says that it was they."""
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    with Exporter(model, backends="memory").watch(blocks=["0", "2"]) as exporter:
        assert "2 x Linear: named by watch(blocks=...)" in str(exporter.blocks)
