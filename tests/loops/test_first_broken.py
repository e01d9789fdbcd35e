"""The place of the first NaN or Inf is read off the graph of the loss: one module, or the two layers around it."""

import math
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from gradflow_export import IssueType
from gradflow_export.schedule import INTERVALS

STEPS, BAD, WIDTH = 4, 3, 8


class Apply(nn.Module):
    """A module without parameters; ``broken`` makes it another function."""

    def __init__(self, well, ill):
        super().__init__()
        self.well, self.ill, self.broken = well, ill, False

    def forward(self, x):
        return (self.ill if self.broken else self.well)(x)


class Block(nn.Module):
    """Two layers with a function between them, and a residual."""

    def __init__(self, function):
        super().__init__()
        self.up, self.function, self.down = nn.Linear(WIDTH, 2 * WIDTH), function, nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(self.function(self.up(x)))


class Row(nn.Module):
    """Blocks one after the other, checkpointed or not, with a function behind each."""

    def __init__(self, *blocks, between=nn.Identity(), reentrant=None):  # noqa: B008 - it holds nothing
        super().__init__()
        self.blocks, self.between, self.head = nn.ModuleList(blocks), between, nn.Linear(WIDTH, 3)
        self.reentrant, self.calls = reentrant, 0

    def forward(self, x):
        self.calls += 1
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
            x = self.between(x)
        return self.head(x)


class Attention(nn.Module):
    """Attention of which one row may be masked as a whole."""

    def __init__(self):
        super().__init__()
        self.embed, self.query, self.key = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.value, self.head, self.broken = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3), False

    def forward(self, x):
        x = self.embed(x)
        mask = torch.ones(len(x), len(x)).tril().bool()
        if self.broken:
            mask[2] = False
        scores = (self.query(x) @ self.key(x).T).masked_fill(~mask, -math.inf)
        return self.head(x + scores.softmax(-1) @ self.value(x))


class Normalising(nn.Module):
    """Divides its input, in place, by a number that may be 0."""

    def __init__(self):
        super().__init__()
        self.first, self.scale = nn.Linear(WIDTH, 3), 1.0

    def forward(self, x):
        return self.first(x.div_(self.scale))


class Lookup(nn.Module):
    """Tokens, a recurrent layer, and a last function."""

    def __init__(self, function):
        super().__init__()
        self.embed, self.core, self.head = (
            nn.Embedding(5, WIDTH),
            nn.GRU(WIDTH, WIDTH, batch_first=True),
            nn.Linear(WIDTH, 3),
        )
        self.function = function

    def forward(self, tokens):
        return self.function(self.head(self.core(self.embed(tokens))[0][:, -1]))


def roots():
    return Apply(torch.tanh, lambda x: torch.sqrt(-x.abs() - 1))


def spoil(model):
    """Break the first thing in a model that can be broken."""
    first = next(module for module in model.modules() if hasattr(module, "broken"))
    first.broken = True


def spoil_scale(model):
    model.scale = 0.0


def blow_up(layer, count=None):
    """Return what makes one layer overflow, whose weights are finite."""

    def change(model):
        with torch.no_grad():
            for p in list(model.get_submodule(layer).parameters())[:count]:
                p.fill_(3e38)

    return change


def image(channels=3):
    return torch.randn(4, channels, 6, 6)


def convolutions():
    layers = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), roots(), nn.Conv2d(4, 4, 3), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16, 3))


def weight_normed():
    return Row(Block(nn.ReLU()), nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)), Block(nn.ReLU()))


def rows():
    return torch.randn(6, WIDTH)


def tokens():
    return torch.randint(5, (4, 6))


CASES = {
    "a module without parameters": (convolutions, image, spoil, "the forward pass at 2"),
    "inside a block": (lambda: Row(Block(nn.ReLU()), Block(roots())), rows, spoil, "the forward pass at blocks.1"),
    "the model's own code": (
        lambda: Row(Block(nn.ReLU()), Block(nn.ReLU()), between=roots()),
        rows,
        spoil,
        "the forward pass between blocks.0.down and blocks.1.up",
    ),
    "a layer that overflows": (
        lambda: Row(Block(nn.ReLU()), Block(nn.ReLU())),
        rows,
        blow_up("blocks.1.down"),
        "the forward pass at blocks.1.down",
    ),
    "a parametrized layer": (
        weight_normed,
        rows,
        blow_up("blocks.1.parametrizations.weight", 1),
        "the forward pass at blocks.1",
    ),
    "a masked row": (Attention, rows, spoil, "the forward pass between query and head"),
    "an input changed in place": (Normalising, rows, spoil_scale, "the forward pass between the input and first"),
    "behind the last layer": (
        lambda: Lookup(roots()),
        tokens,
        spoil,
        "the forward pass between head and the loss",
    ),
    "a checkpoint": (
        lambda: Row(Block(nn.ReLU()), Block(roots()), Block(nn.ReLU()), reentrant=False),
        rows,
        spoil,
        "the forward pass between blocks.0.up and blocks.2.down",
    ),
    "a reentrant checkpoint": (
        lambda: Row(Block(nn.ReLU()), Block(roots()), Block(nn.ReLU()), reentrant=True),
        rows,
        spoil,
        "the forward pass between the input and head",
    ),
}


def cause_of(model, data, change, watching, loss=functional.cross_entropy):
    """Train a few steps, of which one is broken; return what the issue says of where that began."""
    exporter = watching(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        x = data()
        if step == BAD:
            change(model)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            loss(model(x.requires_grad_() if x.is_floating_point() and getattr(model, "reentrant", 0) else x),
                 torch.randint(3, (len(x),))).backward()  # fmt: skip
        optimizer.step()
        if step == BAD:
            break
    exporter.close()
    (issue,) = [issue for issue in exporter.issues if issue.issue_type is IssueType.NUMERICAL]
    return issue


@pytest.mark.parametrize("case", CASES)
def test_the_place_is_named(case, watching):
    """One module is named where the graph tells it, else the two layers that it lies between."""
    make, data, change, words = CASES[case]
    torch.manual_seed(0)
    issue = cause_of(make(), data, change, watching)
    assert issue.cause.startswith(words)
    assert issue.step == BAD


@pytest.mark.parametrize("reentrant", [False, True])
def test_nothing_is_computed_again_for_it(reentrant, watching):
    """Looking at a graph with checkpoints calls neither forward nor a hook that unpacks saved tensors."""
    torch.manual_seed(0)
    model, unpacked, at_backward = Row(Block(nn.ReLU()), Block(roots()), reentrant=reentrant), [], []
    watching(model)
    blocks = []
    model.blocks[0].up.register_forward_hook(lambda *_: blocks.append(1) and None)
    for step in range(1, STEPS + 1):
        if step == BAD:
            spoil(model)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: unpacked.append(1) or t):
            loss = functional.cross_entropy(model(rows().requires_grad_()), torch.randint(3, (6,)))
        loss.register_hook(lambda _: at_backward.append((len(unpacked), len(blocks), model.calls)))
        before = len(unpacked), len(blocks), model.calls
        loss.backward()
        assert at_backward[-1] == before
        model.zero_grad()


def test_nothing_is_kept_alive_for_it(watching):
    """What a pass took and gave is freed when the user lets it go, as it is unwatched."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3))
    watching(model, intervals=dict.fromkeys(INTERVALS, 1000))
    for _ in range(3):
        x = rows().requires_grad_()
        out = model(x)
        gone = [weakref.ref(x), weakref.ref(out)]
        del x, out
        assert [reference() for reference in gone] == [None, None]


def test_a_mask_is_no_fault(watching):
    """Of -inf that softmax takes on purpose nothing is told where a NaN arises behind it."""
    torch.manual_seed(0)
    model = Attention()
    issue = cause_of(
        model,
        rows,
        lambda _: None,
        watching,
        lambda out, y: functional.cross_entropy(out, y) + (out * 0).sum().log() * 0,
    )
    assert issue.cause.startswith("the loss")


def test_a_transformed_call_is_left_alone(watching, recorded):
    """Under torch.func the tensors of a call are the transform's own, and none is kept."""
    model = nn.Linear(WIDTH, 3)
    exporter = watching(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    for _ in range(3):
        torch.func.vmap(lambda x: torch.func.functional_call(model, parameters, (x,)))(rows())
        optimizer.zero_grad()
        model(rows()).square().mean().backward()
        optimizer.step()
    assert len(recorded(exporter)) == 3


def test_half_precision_overflow_is_placed(watching):
    """A sum that overflows in bfloat16's and float16's range lies between the layers around it."""
    torch.manual_seed(0)
    model = Row(Block(nn.ReLU()), Block(nn.ReLU())).half()

    def grow(row):
        with torch.no_grad():
            row.blocks[0].down.bias.fill_(6e4)
            row.blocks[1].down.bias.fill_(6e4)
            row.blocks[1].down.weight.zero_()

    issue = cause_of(
        model, lambda: rows().half() * 0, grow, watching, lambda out, y: functional.cross_entropy(out.float(), y)
    )
    assert issue.cause.startswith("the forward pass")
    assert "blocks.1" in issue.cause


class Opaque(torch.autograd.Function):
    """Saves nothing, and gives out NaN."""

    @staticmethod
    def forward(ctx, x):
        return x * math.nan

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def test_a_loss_that_is_not_finite_is_never_blamed_on_the_backward_pass(watching):
    """Where the graph does not tell where a NaN of the forward pass began, nothing else is claimed."""
    torch.manual_seed(0)
    model = Row(reentrant=True)
    spoiled = []

    def loss(out, _):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            return Opaque.apply(out).sum() if spoiled else out.sum()

    model.head.register_forward_hook(lambda _m, _x, out: out.clone() if spoiled else None)
    issue = cause_of(model, rows, lambda _: spoiled.append(1), watching, loss)
    assert "backward" not in issue.cause
    assert "backward" not in issue.message
