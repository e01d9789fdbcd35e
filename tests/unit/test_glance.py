"""Steps between two records are glanced at, and one that is unlike those before it has the next ones recorded."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gradflow_export import Exporter, MemoryWriter
from gradflow_export.engine.pace import BURST
from gradflow_export.engine.step_timer import _Factor
from gradflow_export.instruments.gradients.glance import LEAST, STRAYS, Chart, Glance

BEGIN = 290
SPACING = 32


class Program:
    """A loop whose parts a fault may change while it runs."""

    def __init__(self):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.data, self.factor, self.clears = torch.Generator().manual_seed(1), 1.0, True

    def step(self):
        """Train one step."""
        x = torch.randn(16, 6, generator=self.data)
        if self.clears:
            self.optimizer.zero_grad()
        (self.factor * (self.model(x) - x.sum(1, keepdim=True)).square().mean()).backward()
        self.optimizer.step()


def recorded(monkeypatch, fault=lambda _program: None, program=None, steps=BEGIN + 80, **settings):
    """Return the steps that make a record where a budget leaves one of 32."""
    monkeypatch.setattr(_Factor, "book", lambda *_args, **_kwargs: None)
    program, memory = program or Program(), MemoryWriter()
    with Exporter(program.model, backends=[memory], verbose=0, strict=True, **settings) as exporter:
        exporter.watch()
        exporter._loop.clock._spacing.value = SPACING
        for step in range(1, steps + 1):
            if step == BEGIN + 1:
                fault(program)
            program.step()
    return [record.step for record in memory.records]


def rests(program):
    """Set the learning rate to 0."""
    program.optimizer.param_groups[0]["lr"] = 0.0


def rises(program):
    """Set a learning rate that is far too high."""
    program.optimizer.param_groups[0]["lr"] = 0.3


def freezes(program):
    """Freeze the first layer."""
    program.model[0].requires_grad_(False)


def shrinks(program):
    """Make gradients tiny."""
    program.factor = 1e-9


def keeps(program):
    """Clear no gradients any more."""
    program.clears = False


def breaks(program):
    """Make the loss NaN."""
    program.factor = math.nan


def dies(program):
    """Saturate the layer in the middle for ever."""
    with torch.no_grad():
        program.model[2].bias.fill_(50.0)


def evaluates(program):
    """Leave the model in evaluation mode, which shows in no gradient."""
    program.model.eval()


@pytest.mark.parametrize("fault", [rests, rises, freezes, shrinks, keeps, breaks, dies, evaluates])
def test_a_late_fault_has_the_next_steps_recorded(monkeypatch, fault):
    """Within a few steps of the fault a burst of records begins, though the next one was to come much later."""
    steps = [step for step in recorded(monkeypatch, fault) if step > BEGIN]
    assert steps[0] <= BEGIN + 9
    assert steps[:BURST] == list(range(steps[0], steps[0] + BURST))


def test_a_program_that_goes_on_has_no_more_records(monkeypatch):
    """Nothing but the steps that the budget leaves, of a loop that does the same again and again."""
    steps = recorded(monkeypatch)
    assert [step for step in steps if step > 100 and step % SPACING] == [BEGIN + 80]  # its last one


def test_an_optimizer_that_is_made_anew_is_seen(monkeypatch):
    """The first step of another optimizer ends the quiet; it holds fewer parameters, and a burst begins."""

    def rebuilds(program):
        program.optimizer = torch.optim.SGD(program.model[4].parameters(), lr=0.01)

    steps = [step for step in recorded(monkeypatch, rebuilds) if step > BEGIN]
    assert len(steps) >= BURST


def test_a_glance_changes_nothing_and_keeps_no_gradient(monkeypatch):
    """Weights are the same, bit for bit, and gradients end with the step."""
    watched, alone = Program(), Program()
    recorded(monkeypatch, shrinks, watched)
    for step in range(1, BEGIN + 81):
        alone.factor = 1.0 if step <= BEGIN else 1e-9
        alone.step()
    assert all(map(torch.equal, watched.model.state_dict().values(), alone.model.state_dict().values()))
    glance = Glance(alone.optimizer)
    glance.sees(alone.optimizer, 1)
    assert all(value is not alone.model[0].weight.grad for value in vars(glance).values())


def test_a_glance_that_fails_is_the_last_one(monkeypatch, caplog):
    """An error stays out of the loop, is logged once, and training goes on without glances."""

    def fails(*_args):
        raise ZeroDivisionError

    monkeypatch.setattr(Glance, "sees", fails)
    monkeypatch.setattr(_Factor, "book", lambda *_args, **_kwargs: None)
    program = Program()
    with Exporter(program.model, backends=[], verbose=0) as exporter:
        exporter.watch()
        exporter._loop.clock._spacing.value = SPACING
        for _ in range(250):
            program.step()
        assert exporter._guard.failures == {"glances": 1}
    assert caplog.text.count("glances") == 1


@given(st.integers(0, 10_000), st.floats(0.01, 1.0), st.sampled_from([-8.0, 8.0]))
def test_a_level_that_moves_is_seen_and_one_that_stays_is_not(seed, scatter, away):
    """By eight standard deviations: within eight numbers; noise about a slow trend is none."""
    noise = torch.randn(120, generator=torch.Generator().manual_seed(seed)).clamp(-2.5, 2.5).tolist()
    chart = Chart()
    assert not any(chart.leaves(scatter * value - 0.001 * number) for number, value in enumerate(noise))
    step = away * max(scatter, 0.2)
    assert any(chart.leaves(step + scatter * value - 0.1) for value in noise[:8])


def test_numbers_that_are_none_are_seen_once_the_others_are_known():
    """Three NaN after numbers tell; after NaN it does not, until there were numbers again."""
    chart = Chart()
    assert not chart.leaves(math.nan)
    assert not any(chart.leaves(1.0) for _ in range(LEAST + 1))
    assert [chart.leaves(math.nan) for _ in range(9)].index(True) == 2
    assert not any(chart.leaves(math.nan) for _ in range(9))


@pytest.mark.parametrize("stray", [50.0, -50.0, math.inf, math.nan])
def test_a_stray_number_tells_nothing(stray):
    """However far away one number is, with others where they were before and after it; it is doubted alone."""
    noise, doubted = torch.randn(395, generator=torch.Generator().manual_seed(0)).clamp(-2.5, 2.5).tolist(), []
    chart = Chart()
    for number, value in enumerate(noise):
        assert not chart.leaves(stray if number % 20 == 19 else 0.3 * value)
        doubted += [number] * chart.doubts
    assert doubted == list(range(19, 395, 20))
    assert [chart.leaves(20.0 * (-1) ** number) for number in range(STRAYS)].index(True) == STRAYS - 1


def test_what_was_reported_once_has_to_be_exceeded():
    """A level that goes to and fro for ever is reported a few times, and a jump far beyond it still is."""
    noise, chart = torch.randn(3_000, generator=torch.Generator().manual_seed(0)).tolist(), Chart()
    found = [n for n, value in enumerate(noise) if chart.leaves(0.5 * (n // 50 % 2) + 0.1 * value)]
    assert 1 <= len(found) <= 9
    assert any(chart.leaves(30.0) for _ in range(9))


def test_where_kinds_of_steps_are_many_another_one_is_no_news():
    """Each of some layers rests now and then by chance, in ever new ways: a few of these are reported, not all."""
    torch.manual_seed(0)
    layers = nn.ModuleList([nn.Linear(2, 1) for _ in range(4)])
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.01)
    glance, found = Glance(optimizer), []
    for number in range(1, 390):
        for p, rests in zip(layers.parameters(), torch.rand(8) < 0.06, strict=True):
            p.grad = None if rests else torch.ones_like(p)
        found += [number] * glance.sees(optimizer, number)
    assert len(glance._known) > 8
    assert len(found) <= 3


def gets_none(layer, _optimizer):
    """Have no gradient arrive."""
    for p in layer.parameters():
        p.grad = None


def is_frozen(layer, _optimizer):
    """Keep the gradient that there was, as zero_grad(set_to_none=False) does."""
    layer.requires_grad_(False)


def is_left_out(layer, optimizer):
    """Take the layer from the optimizer."""
    gone = {id(p) for p in layer.parameters()}
    for group in optimizer.param_groups:
        group["params"] = [p for p in group["params"] if id(p) not in gone]


@pytest.mark.parametrize("groups", [1, 120])
@pytest.mark.parametrize("stop", [gets_none, is_frozen, is_left_out])
@pytest.mark.parametrize("place", [0, 17, 90, 119])
def test_any_layer_that_rests_is_seen(place, stop, groups):
    """Not only those whose gradients are followed, of however many: within as many glances as there are parts."""
    layers = nn.ModuleList([nn.Linear(2, 1) for _ in range(120)])
    held = layers.parameters() if groups == 1 else [{"params": list(layer.parameters())} for layer in layers]
    optimizer, seen = torch.optim.SGD(held, lr=0.01), {True: [], False: []}
    for stops in seen:
        glance = Glance(optimizer)
        for number in range(1, 90):
            for p in layers.parameters():
                p.grad = torch.ones_like(p)
            if stops and number > 80:
                stop(layers[place], optimizer)
            seen[stops] += [number] * glance.sees(optimizer, number)
    assert not seen[False]
    assert 80 < seen[True][0] <= 82


def test_a_rate_that_comes_back_is_no_news():
    """What restarts a schedule again and again reaches no rate that was not there; a greater one is told."""
    program = Program()
    glance, rates = Glance(program.optimizer), [*([0.5**n for n in range(10)] * 9), 20.0]
    program.step()
    found = []
    for number, rate in enumerate(rates):
        program.optimizer.param_groups[0]["lr"] = rate
        found += [number] * glance.sees(program.optimizer, number + 1)
    assert found == [90]


@pytest.mark.parametrize("after", [1, 6])
def test_after_a_stray_step_the_next_one_is_looked_at(monkeypatch, after):
    """One odd step costs a glance and no record; where the next ones are as odd, they are recorded at once."""

    class Odd(Program):
        made = 0

        def step(self):
            self.made += 1
            self.factor = 1e-3 if 296 <= self.made < 296 + after else 1.0
            super().step()

    steps = [step for step in recorded(monkeypatch, program=Odd(), steps=340) if step > BEGIN and step % SPACING]
    assert len(steps) == 1 if after == 1 else steps[:3] == [299, 300, 301]
