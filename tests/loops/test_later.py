"""Statistics taken by a thread of the library while the optimizer steps are those taken before it."""

import gc
import math

import numpy as np
import pytest
import torch
from torch import nn

from gradflow_export import IssueType
from gradflow_export.hooks.optimizer_steps import only_reads
from gradflow_export.instruments.gradients import parameters
from gradflow_export.instruments.gradients import reader as reading
from gradflow_export.native.tensors import HEAD
from gradflow_export.schedule import INTERVALS

STEPS = 18
LATER = (11, 12, 13, 14, 16, 17, 18)
"""Steps at which the gradients of the backward pass are not to be compared with those that the optimizer uses."""
OFTEN = {**dict.fromkeys(INTERVALS, 10**9), **dict.fromkeys(("statistics", "blocks", "updates"), 1)}
STATISTICS = ("gradient_norm", "gradient_l1", "gradient_linf", "gradient_mean", "zero_share", "nonfinite")


def three_blocks():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3)))


def train(exporter_of, optimizer_of, *, between=None, steps=STEPS):
    """Train; ``between`` is called with model, optimizer and step before each step of the optimizer."""
    model = three_blocks()
    optimizer = optimizer_of(model)
    exporter = exporter_of(model, intervals=OFTEN)
    generator = torch.Generator().manual_seed(1)
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        model(torch.randn(4, 16, generator=generator)).square().sum().backward()
        if between is not None:
            between(model, optimizer, step)
        optimizer.step()
    return exporter, model


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


@pytest.fixture
def later(monkeypatch):
    """Let every model be long enough for a thread; return the steps that were left for later, and those that came."""
    monkeypatch.setattr(reading, "LATER_ENTRIES", 1)
    begun, ended = [], []
    end = parameters.GradientReader.end
    read = parameters.GradientReader.read

    def reads(self, **options):
        sketch = read(self, **options)
        if sketch is not None and sketch.total is None:
            begun.append(sketch)
        return sketch

    def ends(self):
        sketch = end(self)
        if sketch is not None:
            ended.append(sketch)
        return sketch

    monkeypatch.setattr(parameters.GradientReader, "read", reads)
    monkeypatch.setattr(parameters.GradientReader, "end", ends)
    return begun, ended


def statistics_of(records):
    """Return ``[steps, metrics, parameters]``."""
    return np.array([[record.get(f"parameter.{name}").values for name in STATISTICS] for record in records])


@pytest.mark.parametrize("optimizer_of", [adam, lambda m: torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9)])
def test_what_is_read_while_the_optimizer_steps_is_what_was_there_before(
    watching, recorded, later, monkeypatch, optimizer_of
):
    """Every statistic of every step is bit for bit that of a reading before the step, and training is the same."""
    begun, ended = later
    exporter, model = train(watching, optimizer_of)
    found = statistics_of(recorded(exporter))
    assert len(begun) == len(ended) == len(LATER)
    monkeypatch.setattr(reading, "LATER_ENTRIES", 10**9)
    exporter, twin = train(watching, optimizer_of)
    assert np.array_equal(found, statistics_of(recorded(exporter)))
    assert len(begun) == len(LATER)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


class Doubling(torch.optim.SGD):
    """Changes gradients in its step."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.mul_(2)
        return super().step(closure)


@pytest.mark.parametrize(
    "optimizer_of",
    [
        lambda m: Doubling(m.parameters(), lr=0.01),
        lambda m: torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9, nesterov=True, foreach=True),
        lambda m: torch.optim.Adam(m.parameters(), fused=True),
        lambda m: torch.optim.RMSprop(m.parameters()),
    ],
)
def test_an_optimizer_that_may_change_gradients_waits(watching, recorded, later, optimizer_of):
    """Of optimizers that write to gradients, or are not known, they are read before the step, as they are then."""
    norms = []

    def between(model, _optimizer, _step):
        norms.append([float(p.grad.norm()) for p in model.parameters()])

    exporter, _ = train(watching, optimizer_of, between=between)
    found = statistics_of(recorded(exporter))[:, 0]
    assert later[0] == []
    assert found == pytest.approx(np.array(norms), rel=1e-5)


def test_an_optimizer_with_hooks_of_its_own_waits():
    """What somebody hooked before or after a step may change gradients too."""
    optimizer = adam(three_blocks())
    assert only_reads(optimizer)
    for register in (optimizer.register_step_pre_hook, optimizer.register_step_post_hook):
        handle = register(lambda *_: None)
        assert not only_reads(optimizer)
        handle.remove()
    assert only_reads(optimizer)


def test_gradients_changed_in_the_middle_are_not_told_and_read_before_from_then_on(
    watching, recorded, later, monkeypatch
):
    """A step whose gradients somebody changed while they were read has no statistics; the next are read in time."""
    begun, ended = later
    step_of = torch.optim.AdamW._init_group

    def changes(self, group, *lists):
        for p in group["params"]:
            p.grad.mul_(3.0)
        return step_of(self, group, *lists)

    monkeypatch.setattr(torch.optim.AdamW, "_init_group", changes)
    norms = []

    def between(model, _optimizer, _step):
        norms.append([float(p.grad.norm()) for p in model.parameters()])

    exporter, _ = train(watching, adam, between=between)
    records = recorded(exporter)
    assert (len(begun), len(ended)) == (1, 0)
    assert records[LATER[0] - 1].get("parameter.gradient_norm") is None
    del records[LATER[0] - 1], norms[LATER[0] - 1]
    assert statistics_of(records)[:, 0] == pytest.approx(np.array(norms), rel=1e-5)


def test_a_gradient_that_is_broken_alone_is_told_by_its_name(watching, recorded, later):
    """Finite outputs and gradients of blocks, NaN in one parameter's: its record, issue and place of origin are there."""

    def between(model, _optimizer, step):
        if step == LATER[4]:
            model[1][0].bias.grad[3] = math.nan

    exporter, _ = train(watching, adam, between=between, steps=LATER[4])
    last = recorded(exporter)[-1]
    assert len(later[1]) == 5
    broken = last.get("parameter.gradient_norm")
    assert [name for name, value in zip(broken.sites, broken.values, strict=True) if not math.isfinite(value)] == [
        "1.0.bias"
    ]
    assert last.get("origin.backward").sites == ("1.0.bias",)
    assert any(issue.issue_type is IssueType.NUMERICAL for issue in exporter.issues)


def test_gradients_whose_sample_is_not_finite_are_read_before_the_step(watching, recorded, later):
    """What breaks the weights' gradients far and wide is judged before they are used, with weights still whole."""
    begun, _ = later

    def between(model, _optimizer, step):
        if step == LATER[2]:
            with torch.no_grad():
                model[1][0].weight[0, 0] = math.inf

    exporter, _ = train(watching, adam, between=between, steps=LATER[3])
    records = recorded(exporter)
    assert len(begun) == 3
    assert "1.0.weight" in records[-1].get("origin.weights").sites


class Masked(nn.Module):
    """Makes NaN at one place of the forward pass, which a mask hides from the loss and from nearly all gradients."""

    def __init__(self, seen):
        super().__init__()
        self.scale, self.inner = nn.Parameter(torch.ones(16)), nn.Tanh()
        self.broken, self.seen = False, seen

    def forward(self, x):
        factor = torch.ones(16)
        if self.broken:
            factor[3] = math.nan
        inner = x.detach() * self.scale * factor
        inner = self.inner(inner) if self.seen else inner.tanh()
        return x + torch.where(torch.isnan(inner), 0.0, inner)


@pytest.mark.parametrize(("seen", "rerun"), [(True, True), (False, True), (True, None)])
def test_where_a_pass_broke_is_found_when_the_weights_were_already_stepped(watching, recorded, later, seen, rerun):
    """A masked NaN is of the backward pass; one repeated without the entries that the step broke names its module."""
    torch.manual_seed(0)
    masked = Masked(seen)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), masked, nn.Linear(16, 16), nn.Linear(16, 4))
    optimizer, exporter = adam(model), watching(model, intervals=OFTEN, rerun_nonfinite=rerun)
    for step in range(1, LATER[1] + 1):
        optimizer.zero_grad()
        masked.broken = step == LATER[1]
        model(torch.ones(4, 16)).square().sum().backward()
        optimizer.step()
    record = recorded(exporter)[-1]
    assert len(later[1]) == 2
    assert int(torch.isnan(masked.scale).sum()) == 1
    if seen and rerun:
        assert record.get("origin.forward").sites == ("2",)
    else:
        assert record.get("origin.backward").sites == ("2.scale",)


def test_a_step_that_raises_leaves_nothing_behind(watching, recorded, later, monkeypatch):
    """A reading that nobody asked for is waited for before the next, and training goes on to be watched."""
    begun, ended = later
    step_of = torch.optim.AdamW._init_group
    calls = []

    def raises(self, group, *lists):
        calls.append(1)
        if len(calls) == LATER[1]:
            raise RuntimeError("no memory")
        return step_of(self, group, *lists)

    monkeypatch.setattr(torch.optim.AdamW, "_init_group", raises)
    model = three_blocks()
    optimizer, exporter = adam(model), watching(model, intervals=OFTEN)
    for step in range(1, LATER[3] + 1):
        optimizer.zero_grad()
        model(torch.ones(4, 16)).square().sum().backward()
        if step == LATER[1]:
            with pytest.raises(RuntimeError, match="no memory"):
                optimizer.step()
        else:
            optimizer.step()
    records = recorded(exporter)
    assert (len(begun), len(ended)) == (4, 3)
    assert np.isfinite(statistics_of(records)).all()


def test_a_reader_that_goes_while_it_reads_waits_for_its_thread():
    """Memory that a thread of the library reads or writes is given back only after it has ended."""
    many = [torch.full((2**20,), 2.0) for _ in range(8)]
    for _ in range(5):
        reader = reading.tensor_reader(8, 8)
        values = reader.begin(many)
        del reader
        gc.collect()
        assert values[HEAD : HEAD + 8].tolist() == [2.0 * 2**10] * 8
    assert not reading.tensor_reader(1, 1).end()
