"""What is said of where NaN began is true for any model, any fault and any place: never another layer's name."""

import itertools
import math
import random

import pytest
import torch
from torch import nn
from torch.nn import functional

from gradflow_export.autograd_graph.first_broken import _in_order, _Search, first_broken

WIDTH, PROGRAMS = 6, 150
MARK = "given_out"


class Fault(nn.Module):
    """A module without parameters that makes values that are not finite, if it is switched on."""

    ways = (
        lambda x: torch.sqrt(-x.abs() - 1),
        lambda x: x / torch.zeros(()),
        lambda x: torch.log(x * 0) * 0,
        lambda x: torch.exp(x.abs() * 1e4),
        lambda x: x * math.inf,
        lambda x: x + torch.full((WIDTH,), math.nan),
        lambda x: x.detach() * math.nan + x * 0,
        lambda x: x.clone().mul_(math.inf),
        lambda x: x.pow(-1.0 / 3.0) * x.sign().log(),
        lambda x: x - x.mean(0) + (x.sum() * 0).log(),
        lambda x: torch.where(x > 0, math.nan, x),
        lambda x: (x * 0) @ torch.full((WIDTH, WIDTH), math.inf),
    )

    def __init__(self, way):
        super().__init__()
        self.way = way

    def forward(self, x):
        return Fault.ways[self.way](x)


class Residual(nn.Module):
    """Something around which its input goes."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return x + self.inner(x)


class Twice(nn.Module):
    """Two ways side by side whose results are multiplied or joined."""

    def __init__(self, left, right, mix):
        super().__init__()
        self.left, self.right, self.mix = left, right, mix
        self.out = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        left, right = self.left(x), self.right(x)
        return self.out(torch.cat([left, right], -1)) if self.mix else left * torch.sigmoid(right)


class Model(nn.Module):
    """A row of parts and a head."""

    def __init__(self, parts):
        super().__init__()
        self.parts, self.head = nn.ModuleList(parts), nn.Linear(WIDTH, 3)

    def forward(self, x):
        for part in self.parts:
            x = part(x)
        return self.head(x)


def a_part(rng, depth, fault):
    """Return a random part; ``fault`` is a list, of which one is taken and put somewhere."""
    if fault and rng.random() < 0.3:
        return fault.pop()
    kinds = [
        lambda: nn.Linear(WIDTH, WIDTH, bias=rng.random() < 0.8),
        lambda: nn.LayerNorm(WIDTH),
        lambda: nn.BatchNorm1d(WIDTH),
        nn.ReLU, nn.Tanh, nn.GELU,
        lambda: nn.Dropout(0.1),
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
    ]  # fmt: skip
    if depth:
        kinds += [
            lambda: nn.Sequential(*(a_part(rng, depth - 1, fault) for _ in range(rng.randint(1, 4)))),
            lambda: Residual(a_part(rng, depth - 1, fault)),
            lambda: Twice(a_part(rng, depth - 1, fault), a_part(rng, depth - 1, fault), rng.random() < 0.5),
        ]
    return rng.choice(kinds)()


def called(model, x):
    """Call a model; return its output and the names of its modules by when their calls began and ended."""
    names, times, clock = {id(m): name for name, m in model.named_modules()}, {}, iter(range(10**6))
    handles = []
    for module in model.modules():
        handles.append(module.register_forward_pre_hook(lambda m, _: times.update({names[id(m)]: [next(clock)]})))
        handles.append(module.register_forward_hook(lambda m, _a, _o: times[names[id(m)]].append(next(clock))))
    out = model(x)
    for handle in handles:
        handle.remove()
    return out, times


def a_broken_program(rng):
    """Return a model with a fault, its output, a loss that is not finite, and when each of its modules was called."""
    while True:
        torch.manual_seed(rng.randrange(2**31))
        fault = [Fault(rng.randrange(len(Fault.ways)))]
        parts = [a_part(rng, 2, fault) for _ in range(rng.randint(2, 5))]
        model = Model([*parts, *fault])
        out, times = called(model, torch.randn(8, WIDTH, requires_grad=rng.random() < 0.3))
        loss = functional.cross_entropy(out, torch.randint(3, (8,))) if rng.random() < 0.5 else out.square().mean()
        if not loss.isfinite():  # a rectifier or a sigmoid may have hidden it
            return model, out, loss, times


@pytest.mark.parametrize("seed", range(PROGRAMS))
def test_no_wrong_place_is_named(seed):
    """One module named holds the fault; of two the first began before it and the second ended after it."""
    rng = random.Random(seed)
    model, out, loss, times = a_broken_program(rng)
    out.grad_fn.metadata[MARK] = True
    begin = first_broken(loss, model, MARK, [out] if rng.random() < 0.5 else [])
    assert begin is not None
    place = next(name for name, module in model.named_modules() if isinstance(module, Fault))
    assert begin.sites, "the loss is not where it began"
    if len(begin.sites) == 1:
        assert f"{place}.".startswith(f"{begin.sites[0]}.")
    else:
        before, after = begin.sites
        assert not before or times[before][0] < times[place][0]
        assert not after or times[after][1] > times[place][1]


@pytest.mark.parametrize("seed", range(20))
def test_a_fault_of_the_loss_is_of_the_loss(seed):
    """Where the model gave out finite values no layer is named."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    model = Model([a_part(rng, 2, []) for _ in range(rng.randint(1, 4))])
    out = model(torch.randn(8, WIDTH))
    out.grad_fn.metadata[MARK] = True
    ways = (
        lambda o: (o * 0).sum().log(),
        lambda o: functional.cross_entropy(o, torch.full((8,), -100)),
        lambda o: o.norm() / 0,
    )
    begin = first_broken(rng.choice(ways)(out), model, MARK, [out])
    assert begin is not None
    assert begin.sites == ()


def nested():
    inner = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    return nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), inner, nn.ModuleDict({"a": nn.Linear(2, 2)}))


@pytest.mark.parametrize("model", [nested()[:3], nested(), nested()[4], Residual(nested()[3])])
def test_any_end_may_be_the_model_or_the_loss(model):
    """Between any two ends, of which each may be a layer or have no name, layers of the model are named or none."""
    root = next(model.parameters()).sum()
    search = _Search(_in_order(root.grad_fn), model, MARK, ())
    names = [name for name, _ in model.named_modules()]
    for a, b in itertools.product(names, repeat=2):
        assert set(search._named(a, b)) <= set(names)


def test_a_loss_that_overflows_behind_a_sequential_model_is_looked_at():
    """Its outputs are gone, so that all between the last layer and the loss is possible."""
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    with torch.no_grad():
        model[2].weight.fill_(1e25)
    begin = first_broken((model(torch.randn(64, 8)) ** 2).mean(), model, MARK)
    assert begin is not None
    assert set(begin.sites) <= {"", "0", "1", "2"}
