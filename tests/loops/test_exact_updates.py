"""Updates of real loops: rows that gradients touch, weights that others move, and what rests bit for bit."""

import copy
import math

import pytest
import torch
from torch import nn

from gradflow_export import IssueType
from gradflow_export.instruments import updates
from gradflow_export.instruments.change_check import WALKS
from gradflow_export.metrics.arrays.sketch import NORM_ERROR

EVERY = {"updates": 1}


@pytest.fixture(params=["1", "0"], ids=["library", "torch"])
def _way(request, monkeypatch):
    monkeypatch.setenv("GRADFLOW_NATIVE", request.param)


class Words(nn.Module):
    """A table of which each batch touches a few rows."""

    def __init__(self, *, sparse, width=8, rows=4000):
        super().__init__()
        self.table, self.head = nn.Embedding(rows, width, sparse=sparse), nn.Linear(width, 3)

    def forward(self, x):
        return self.head(self.table(x).mean(dim=1))


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.5),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9),
    "decay": lambda p: torch.optim.SGD(p, lr=0.5, weight_decay=0.01),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
}
EXACT = {(True, "SGD"), (True, "momentum"), (True, "Adagrad"), (False, "SGD"), (False, "Adagrad"), (False, "RMSprop")}
"""Where nothing moves but rows that this gradient, or a sparse buffer, touches."""


ROOMS = (2_000, 30_000, 31_999, 32_000, 10**6)
"""How many entries may be copied: the table has 32 000."""
CASES = [
    *[(sparse, "SGD", room) for sparse in (False, True) for room in ROOMS],
    *[(False, name, room) for name in OPTIMIZERS if name != "SGD" for room in (2_000, 32_000)],
    *[(True, name, room) for name in ("momentum", "Adagrad") for room in (2_000, 32_000)],
]
"""Every size where an optimizer moves the rows of its gradient alone, and one on each side of the limit for the others."""


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize(("sparse", "name", "room"), CASES)
def test_an_update_norm_follows_the_rows_that_move(watching, recorded, monkeypatch, sparse, name, room):
    """Exact, or within the error that is stated, at sizes around the limit and however few rows move."""
    monkeypatch.setattr(updates, "ENTRIES", room)
    monkeypatch.setattr(updates.UpdateInstrument.__init__, "__defaults__", (room,))
    torch.manual_seed(0)
    model = Words(sparse=sparse)
    optimizer, exporter = OPTIMIZERS[name](model.parameters()), watching(model, intervals=EVERY)
    true = []
    for _ in range(8):
        x, y = torch.randint(200, (6, 3)), torch.randint(3, (6,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        optimizer.step()
        true.append(
            {n: (float(before[n].norm()), float((p.detach() - before[n]).norm())) for n, p in model.named_parameters()}
        )
    for record, sites in zip(recorded(exporter), true, strict=True):
        errors = record.get("parameter.update_norm_error")
        stated = {} if errors is None else errors.as_dict()
        for site, (size, moved) in sites.items():
            error = stated.get(site) or 0.0
            assert record.value("parameter.update_norm", site) == pytest.approx(moved, rel=5 * error + 1e-5)
            assert error <= NORM_ERROR * 1.001
            assert error == 0.0 or (sparse, name) not in EXACT or room == 2_000
            off = record.get("parameter.weight_norm_error")
            off = 0.0 if off is None else off.as_dict().get(site) or 0.0
            assert record.value("parameter.weight_norm", site) == pytest.approx(size, rel=5 * off + 1e-5)
            assert record.value("parameter.changed", site) == 1.0


def train(model, optimizer, steps, *, between=lambda _step: None, kind=torch.float32):
    """Train on noise, and do something else after each step."""
    generator = torch.Generator().manual_seed(0)
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 6, generator=generator).to(kind)).float().square().mean().backward()
        optimizer.step()
        between(step)


def stagnating(exporter):
    """Return the layers of all issues about parameters that rest."""
    return {layer for issue in exporter.issues if issue.issue_type is IssueType.STAGNATION for layer in issue.layers}


class Pair(nn.Module):
    """A network that is trained, and one of its kind beside it that no gradient reaches."""

    def __init__(self):
        super().__init__()
        self.online = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))
        self.target = copy.deepcopy(self.online)

    def forward(self, x):
        return self.online(x)


def average(pair, rate=0.05):
    for mine, other in zip(pair.online.parameters(), pair.target.parameters(), strict=True):
        other.data.mul_(1 - rate).add_(rate * mine.data)


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("every", [1, 7])
def test_what_something_else_moves_does_not_rest(watching, recorded, every):
    """An average that is written through ``.data`` at every step, or now and then, is told as changed and not accused."""
    torch.manual_seed(0)
    pair = Pair()
    optimizer, exporter = torch.optim.SGD(pair.online.parameters(), lr=0.01), watching(pair)
    train(pair, optimizer, 60, between=lambda step: None if step % every else average(pair))
    told = [
        r.get("parameter.changed").as_dict()["target.0.weight"]
        for r in recorded(exporter)
        if r.get("parameter.changed")
    ]
    assert told.count(1.0) >= (len(told) - 1 if every == 1 else 3)
    assert not {layer for layer in stagnating(exporter) if layer.startswith("target")}


def test_a_parameter_that_comes_late_and_has_no_optimizer_is_seen_to_rest(watching, recorded):
    """The model is not asked at each reading for what it has, but again and again."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 2))
    optimizer, exporter = torch.optim.SGD(model.parameters(), lr=0.01), watching(model, intervals=EVERY)
    train(model, optimizer, 5)
    model[1].late = nn.Parameter(torch.ones(3))
    train(model, optimizer, WALKS + 2)
    told = [record.get("parameter.changed").as_dict() for record in recorded(exporter)]
    assert told[-1].pop("1.late") == 0.0
    assert all(set(one.values()) == {1.0} and len(one) == 4 for one in (*told[:5], told[-1]))


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float64])
def test_what_rests_bit_for_bit_is_told(watching, recorded, kind):
    """Learning rates too small for any bit to change, in each type; one entry that changes heals it.

    In a coarse type the steps are still lost then, and only a rate that is felt heals it.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 2)).to(kind)
    optimizer, exporter = torch.optim.SGD(model.parameters(), lr=1e-30), watching(model)
    train(model, optimizer, 30, kind=kind)
    (issue,) = [i for i in exporter.issues if i.issue_type is IssueType.STAGNATION]
    assert (issue.step, set(issue.layers)) == (1, {"0.weight", "0.bias", "1.weight", "1.bias"})
    assert "rounding" in issue.message

    def nudge(_step):
        for parameter in model.parameters():
            parameter.data.view(-1)[-1] *= 1.01

    train(model, optimizer, 20, between=nudge, kind=kind)
    if kind is torch.bfloat16:
        optimizer.param_groups[0]["lr"] = 0.1
        train(model, optimizer, 40, kind=kind)
    recorded(exporter)
    (issue,) = [i for i in exporter.issues if i.issue_type is IssueType.STAGNATION]
    assert not issue.open


def test_a_table_that_learns_is_not_said_to_rest(watching, recorded):
    """A table of more entries than are copied, of which each step touches a few rows: no issue, and no reading of 0."""
    torch.manual_seed(0)
    model = Words(sparse=False, width=32, rows=40_000)
    answers = torch.randint(3, (40_000,))
    chosen = torch.randint(40_000, (100,))
    optimizer, exporter = torch.optim.Adagrad(model.parameters(), lr=0.5), watching(model)
    for _ in range(60):
        words = chosen[torch.randint(100, (16,))]
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(words[:, None].expand(-1, 4)), answers[words]).backward()
        optimizer.step()
    norms = [
        r.get("parameter.update_norm").as_dict()["table.weight"]
        for r in recorded(exporter)
        if r.get("parameter.update_norm")
    ]
    assert len(norms) >= 15
    assert min(norms) > 0
    assert not stagnating(exporter)


def test_a_dead_network_has_no_gains_and_one_cut_below_has_infinite_ones(watching, recorded):
    """0 / 0 is missing in records; a gradient over none is infinite; what is NaN stays NaN."""
    torch.manual_seed(0)
    blocks = [nn.Linear(4, 4) for _ in range(4)]
    model = nn.Sequential(*blocks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    exporter = watching(model, blocks=blocks, intervals={"blocks": 1})
    for factor in (1.0, 0.0, math.nan):
        optimizer.zero_grad()
        (model(torch.randn(3, 4)) * factor).sum().backward()
        optimizer.step()
    alive, dead, broken = recorded(exporter)[:3]
    assert all(0 < value < math.inf for value in alive.get("block.gain").as_dict().values())
    assert set(dead.get("block.gain").as_dict().values()) == {None}
    assert dead.value("gain.depth") is None
    assert all(math.isnan(value) for value in broken.get("block.gain").as_dict().values())


@pytest.mark.parametrize("shape", [(1, 4), (1, 3, 4)])
def test_a_rank_needs_more_than_one_row(watching, recorded, shape):
    """A batch of one row has no rank at the first step; with positions, or with steps that are pooled, it has."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exporter = watching(model, blocks=list(model), intervals={"ranks": 1})
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(shape)).square().sum().backward()
        optimizer.step()
    found = [record.get("block.effective_rank") for record in recorded(exporter)]
    assert (found[0] is None) is (len(shape) == 2)
    assert all(value >= 1 for value in found[2].as_dict().values())
