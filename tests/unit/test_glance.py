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
from gradflow_export.instruments.gradients.glance import LEAST, Chart, Glance

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


@pytest.mark.parametrize("fault", [rests, rises, freezes, shrinks, keeps, breaks, dies])
def test_a_late_fault_has_the_next_steps_recorded(monkeypatch, fault):
    """Within a few steps of the fault a burst of records begins, though the next one was to come much later."""
    steps = [step for step in recorded(monkeypatch, fault) if step > BEGIN]
    assert steps[0] <= BEGIN + 8
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
    """NaN after numbers tells; after NaN it does not, until there were numbers again."""
    chart = Chart()
    assert not chart.leaves(math.nan)
    assert not any(chart.leaves(1.0) for _ in range(LEAST + 1))
    assert chart.leaves(math.nan)
    assert not chart.leaves(math.nan)
