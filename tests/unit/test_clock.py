"""Steps are timed, and intervals stretch until the exporter's own share keeps within its budget."""

import itertools
import math

import pytest
import torch
from torch import nn

from gradflow_export import ArgumentError, Exporter, MemoryWriter
from gradflow_export.clock import MOST, WINDOW, StepClock
from gradflow_export.errors import ArgumentTypeError
from gradflow_export.schedule import Schedule


def drive(clock, steps, cost, start=0.0, spent=0.0):
    """Let steps of one second pass, of which ``cost(clock)`` is our own; return the values of each."""
    out = []
    for step in range(steps):
        spent += cost(clock)
        out.append(clock.lap(start + step, spent))
    return out


def test_times_and_share_are_those_of_the_steps():
    """The first step has no beginning; then step time, throughput and share are given."""
    first, second, third = drive(StepClock(), 3, lambda _: 0.25)
    assert first == {}
    assert second == third == {"runtime.step_time": 1.0, "runtime.throughput": 1.0, "overhead": 0.25}


def test_intervals_stretch_until_the_budget_is_kept():
    """Costs that fall with the interval come below the budget; the factor is told at every step and then rests."""
    clock = StepClock(0.01)
    out = drive(clock, 40 * WINDOW, lambda clock: 0.06 / clock.stretch)
    assert out[0] == {"schedule.stretch": 1.0}
    assert 0.005 <= 0.06 / clock.stretch <= 0.01
    assert out[-1]["schedule.stretch"] == out[-20 * WINDOW]["schedule.stretch"] == clock.stretch


def test_they_relax_when_steps_grow_cheap():
    """A factor that is no longer needed goes back to 1; one that cannot help stays bounded."""
    clock = StepClock(0.01)
    drive(clock, 20 * WINDOW, lambda _: 0.5)
    assert clock.stretch == MOST
    drive(clock, 60 * WINDOW, lambda _: 1e-4, start=1e6, spent=1e6)
    assert clock.stretch == 1.0


@pytest.mark.parametrize("cost", [0.004, 0.006, 0.009, 0.011, 0.019, 0.021, 0.06, 0.3, 0.9])
def test_the_factor_is_a_power_of_two_and_comes_to_rest(cost):
    """Whatever watching costs, and with a tenth of noise on it, the factor does not go back and forth."""
    clock = StepClock(0.01)
    noise = itertools.cycle([0.9, 1.1, 1.0])
    out = drive(clock, 60 * WINDOW, lambda clock: cost * next(noise) / clock.stretch)
    factors = [values["schedule.stretch"] for values in out]
    assert all(math.log2(factor).is_integer() for factor in factors)
    assert len(set(factors[-40 * WINDOW :])) == 1
    assert factors == sorted(factors)


def test_without_a_budget_nothing_stretches():
    """The factor is 1 and not recorded."""
    clock = StepClock()
    assert all("schedule.stretch" not in values for values in drive(clock, 3 * WINDOW, lambda _: 0.9))
    assert clock.stretch == 1.0


def test_a_stretched_schedule_reads_less_often():
    """Each interval is longer by the factor; the first steps stay dense, and asking is still heard."""
    schedule = Schedule()
    assert [s for s in range(101, 400) if "blocks" in schedule.due(s, stretch=3.0)] == [150, 225, 300, 375]
    assert [s for s in range(11, 60) if "blocks" in schedule.due(s, stretch=3.0)] == [15, 30, 45]
    assert "blocks" in schedule.due(3, stretch=64.0)
    assert "blocks" in schedule.due(333, asked=True, stretch=64.0)


@pytest.mark.parametrize(("value", "error"), [(0, ArgumentError), (1.5, ArgumentError), ("1%", ArgumentTypeError)])
def test_a_budget_is_a_share(value, error):
    """Anything else is refused with an example."""
    with pytest.raises(error, match=r"budget must be a share.*0\.01"):
        Exporter(nn.Linear(2, 2), budget=value)


def test_a_run_with_a_budget_keeps_the_sentinel_and_records_its_factor():
    """A budget that cannot be kept stretches far; norms and the factor are still in every record."""
    model, memory = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6))), MemoryWriter()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Exporter(model, backends=[memory], budget=1e-6, strict=True).watch():
        for _ in range(5 * WINDOW):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).square().sum().backward()
            optimizer.step()
    assert all(record.value("gradient.total_norm") is not None for record in memory.records)
    assert memory.records[-1].value("schedule.stretch") == MOST
    late = [r.step for r in memory.records[WINDOW + 1 :] if r.get("block.gain") is not None]
    early = [r.step for r in memory.records[: WINDOW + 1] if r.get("block.gain") is not None]
    assert len(late) < len(early)
