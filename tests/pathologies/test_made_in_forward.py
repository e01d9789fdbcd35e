"""Modules that forward makes anew: around layers that are kept they are in order, with new weights they are not."""

import functools

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from gradflow_export import Exporter, IssueType, MemoryWriter


class Around(nn.Module):
    """Holds a layer, or a matrix, that it is given."""

    def __init__(self, held):
        super().__init__()
        self.held = held

    def forward(self, x):
        return F.relu(self.held(x) if isinstance(self.held, nn.Module) else x @ self.held)


class Kept(nn.Module):
    """Goes through the same layers in each of the ways named, which make modules and no weights."""

    def __init__(self, *ways):
        super().__init__()
        self.ways, self.head = ways, nn.Linear(8, 2)
        self.layers = nn.Sequential(*(part for _ in range(2) for part in (nn.Linear(8, 8), nn.ReLU())))
        self.matrix, self.outside = nn.Parameter(torch.eye(8)), [nn.Parameter(torch.eye(8))]
        self.stacked = nn.Parameter(torch.stack([torch.eye(8)] * 2))

    def forward(self, x):
        x = Around(self.outside[0])(Around(self.matrix)(x))
        for weight in self.stacked:
            x = functional_call(nn.Linear(8, 8, bias=False), {"weight": weight}, x)
        for way in self.ways:
            x = x + getattr(self, way)(x)
        return self.head(x)

    def slices(self, x):
        return self.layers[2:](self.layers[:2](x))

    def unpacked(self, x):
        return nn.Sequential(*self.layers)(x)

    def again(self, x):
        return checkpoint(self.layers[:2], x, use_reentrant=False)

    def one_by_one(self, x):
        return functools.reduce(lambda h, layer: layer(h), nn.ModuleList(self.layers), x)

    def called_by_another(self, x):
        return functools.partial(Around(self.layers[:2]).forward)(x)


WAYS = ("slices", "unpacked", "again", "one_by_one", "called_by_another")
NEW = {
    "alone": lambda kept: nn.Linear(8, 8),
    "first": lambda kept: nn.Sequential(nn.Linear(8, 8), *kept),
    "last": lambda kept: nn.Sequential(*kept, nn.Linear(8, 8)),
    "held": lambda kept: Around(nn.Linear(8, 8)),
    "by its first call": lambda kept: nn.LazyLinear(8),
}


class New(Kept):
    """Makes one layer with new weights in each pass besides."""

    def __init__(self, place):
        super().__init__("slices")
        self.make = NEW[place]

    def forward(self, x):
        return super().forward(x + self.make(self.layers)(x))


def told(model, **settings):
    """Train, keeping each loss with its graph as a sum of them does, and return what is said of weights."""
    torch.manual_seed(0)
    optimizer, total = torch.optim.Adam([*model.parameters(), *model.outside], 1e-3), 0.0
    with Exporter(model, backends=[MemoryWriter()], strict=True, **settings).watch() as exporter:
        for _ in range(20):
            x = torch.randn(16, 8)
            loss = F.cross_entropy(model(x), (x[:, 0] > 0).long())
            total = total + loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return [(i.cause, i.layer) for i in exporter.issues if i.issue_type == IssueType.NOT_TRAINING]


@pytest.mark.parametrize("settings", [{}, {"budget": None}], ids=["default", "no budget"])
@pytest.mark.parametrize("ways", [WAYS, WAYS[::-1]], ids=["so", "the other way round"])
def test_modules_made_anew_around_kept_weights_are_in_order(ways, settings):
    """A container, slice, wrapper or template is new in each pass; what is trained is not."""
    assert told(Kept(*ways), **settings) == []


@pytest.mark.parametrize("place", NEW)
def test_a_layer_with_new_weights_is_found_wherever_it_stands(place):
    """Among kept ones, in a wrapper, or with weights that come with its first call, and while its graph lives on."""
    assert told(New(place)) == [("made in forward", "Linear")]
