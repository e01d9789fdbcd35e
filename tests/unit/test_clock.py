"""Steps are timed, and intervals stretch until the exporter's own share keeps within its budget."""

import itertools
import time
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from gradflow_export import ArgumentError, Exporter, MemoryWriter
from gradflow_export.engine import quiet_steps
from gradflow_export.engine.step_timer import MOST, RELAXED, StepClock
from gradflow_export.errors import ArgumentTypeError
from gradflow_export.schedule import Schedule


class Drive:
    """Lets steps of one second pass, of which a clock says which are recorded; of those every fourth reads more."""

    def __init__(self, clock):
        self.clock, self.step, self.last, self.spent, self.theirs, self.judged = clock, 0, 0, 0.0, 0.0, 0

    def __call__(self, steps, plain, sampled=0.0, worker=0.0):
        """Return the values of each recorded step.

        Args:
            steps: How many.
            plain: What a plain record costs.
            sampled: What one costs at which more is read.
            worker: CPU seconds of the worker for each plain record.
        """
        out, clock = [], self.clock
        for _ in range(steps):
            self.step += 1
            if self.step % clock.spacing:
                continue
            more = self.step % (4 * clock.stretch) < clock.spacing
            self.spent += sampled if more else plain
            self.theirs += 0.0 if more else worker
            passed, self.last = self.step - self.last, self.step
            self.judged += not more
            done = (self.theirs, 0.0, 0.0), (self.judged, 0, 0)
            out.append(clock.lap(float(self.step), self.spent, sampled=more, steps=passed, worker=done))
        return out


def test_times_and_share_are_those_of_the_steps():
    """The first step has no beginning; then step time, throughput and share are given."""
    first, second, third = Drive(StepClock())(3, 0.25, 0.25)
    assert first == {}
    assert second == third == {"runtime.step_time": 1.0, "runtime.throughput": 1.0, "overhead": 0.25}


@pytest.mark.parametrize("plain", [1e-4, 0.01, 0.3, 3.0])
@pytest.mark.parametrize("sampled", [3.0, 40.0])
def test_any_cost_comes_within_the_budget(plain, sampled):
    """Plain records become rarer and instruments are read more seldom, each as far as needed, and then it rests."""
    clock = StepClock(0.01)
    drive = Drive(clock)
    drive(80_000, plain, sampled)
    settled, before = (clock.spacing, clock.stretch), drive.spent
    out = drive(80_000, plain, sampled)
    share = (drive.spent - before) / 80_000
    assert (clock.spacing, clock.stretch) == settled
    assert share <= 0.0101
    assert share >= 0.01 * RELAXED / 4 or settled == (1, 1)
    assert (out[-1]["schedule.spacing"], out[-1]["schedule.stretch"]) == settled


def test_the_worker_counts():
    """CPU time of the worker makes records rarer as the training thread's own does."""
    clock = StepClock(0.01)
    Drive(clock)(5_000, 0.0, worker=0.3)
    assert 0.3 / clock.spacing <= 0.01
    assert clock.spacing > 1


@pytest.mark.parametrize(("plain", "sampled"), [(0.006, 0.012), (0.0075, 0.002), (0.009, 0.0)])
def test_what_the_instruments_leave_is_for_records(plain, sampled):
    """Every step is recorded as soon as that and the instruments cost less than the budget together."""
    clock = StepClock(0.01)
    drive = Drive(clock)
    drive(2_000, plain, sampled)
    assert clock.spacing == 1
    before = drive.spent
    drive(20_000, plain, sampled)
    assert (drive.spent - before) / 20_000 <= 0.01


@pytest.mark.parametrize("needed", [1, 2, 8])
def test_after_a_dear_while_records_come_back(needed):
    """Spacing goes back to what the costs need, and no further."""
    clock = StepClock(0.01)
    drive = Drive(clock)
    drive(5_000, 3.0, 0.01)
    assert clock.spacing > needed
    drive(60_000, 0.0075 * needed, 0.0075 * needed)
    assert clock.spacing == needed


def test_short_steps_may_cost_what_is_little():
    """Where steps are short the budget is the least number of seconds a step, not the share."""
    clock = StepClock(1e-9, floor=0.2)
    drive = Drive(clock)
    drive(5_000, 0.09)
    assert clock.spacing == 1
    drive(5_000, 0.3)
    assert 1 < clock.spacing <= 4


def test_steps_whose_plan_is_fixed_decide_nothing():
    """However dear the first steps are, none later is left out for it."""
    clock = StepClock(0.01)
    for step in range(200):
        clock.lap(float(step), 10.0 * step, sampled=True, fixed=True)
    assert (clock.spacing, clock.stretch) == (1, 1)


def test_factors_go_back_when_steps_grow_cheap():
    """A factor that is no longer needed goes back to 1; one that cannot help stays bounded."""
    clock = StepClock(0.01)
    Drive(clock)(100_000, 1e6, 3e6)
    assert clock.spacing == clock.stretch == MOST
    clock = StepClock(0.01)
    drive = Drive(clock)
    drive(5_000, 0.1, 3.0)
    assert min(clock.spacing, clock.stretch) > 4
    drive(60_000, 1e-6, 1e-6)
    assert clock.spacing == clock.stretch == 1


def test_without_a_budget_nothing_is_left_out():
    """The factors are 1 and not recorded."""
    clock = StepClock()
    assert all("schedule.stretch" not in values for values in Drive(clock)(100, 0.9, 0.9))
    assert (clock.spacing, clock.stretch) == (1, 1)


def test_a_stretched_schedule_reads_less_often():
    """Each interval is longer by the factor; the first steps stay dense, and asking is still heard."""
    schedule = Schedule()
    assert [s for s in range(101, 400) if "blocks" in schedule.due(s, stretch=3.0)] == [150, 225, 300, 375]
    assert [s for s in range(11, 60) if "blocks" in schedule.due(s, stretch=3.0)] == [15, 30, 45]
    assert "blocks" in schedule.due(3, stretch=64.0)
    assert "blocks" in schedule.due(333, asked=True, stretch=64.0)


@pytest.mark.parametrize("spacing", [1, 2, 8, 64])
@pytest.mark.parametrize("stretch", [1, 4, 32])
@pytest.mark.parametrize("every", [1, 3])
def test_what_falls_due_between_two_records_is_read_at_the_next(spacing, stretch, every):
    """However far apart records are, each interval is read once for each time it is over."""
    schedule = Schedule(every=every)
    steps = range(101, 33_000)
    recorded = [step for step in steps if schedule.recorded(step, spacing)]
    assert recorded == [step for step in steps if step % (every * spacing) == 0]
    assert [schedule.next_recorded(step, spacing) for step in recorded[:50]] == recorded[:50]
    assert [schedule.next_recorded(step + 1, spacing) for step in recorded[:50]] == recorded[1:51]
    for name in ("blocks", "histograms"):
        read = sum(name in schedule.due(step, stretch=stretch, spacing=spacing) for step in recorded)
        interval = schedule.intervals[name] * stretch
        if every == 1:
            assert read == pytest.approx(min(len(steps) / interval, len(recorded)), abs=2)


@pytest.mark.parametrize(("value", "error"), [(0, ArgumentError), (1.5, ArgumentError), ("1%", ArgumentTypeError)])
def test_a_budget_is_a_share(value, error):
    """Anything else is refused with an example."""
    with pytest.raises(error, match=r"budget must be a share.*0\.01"):
        Exporter(nn.Linear(2, 2), budget=value)


def test_what_is_unusual_is_paid_back_slowly():
    """One record in which another process ran for thirty times as long at most doubles a factor."""
    clock = StepClock(0.01)
    drive = Drive(clock)
    drive(3_000, 0.15, 0.15)
    before = clock.spacing
    drive.spent += 5.0
    drive(1_000, 0.15, 0.15)
    assert clock.spacing <= 2 * before
    assert drive.spent <= 0.01 * drive.step + 5.0


def test_often_unusual_records_keep_the_budget():
    """Where a tenth of the records takes fifty times as long as the others, all of them together are in the budget."""
    clock = StepClock(0.01)
    drive = Drive(clock)
    spent = []
    for turn in range(4_000):
        drive(20, 0.05 if turn % 10 else 2.5)
        spent.append(drive.spent)
    assert spent[-1] - spent[1_999] <= 0.0105 * 40_000


def test_records_on_credit_are_paid_back():
    """A burst of records makes none of the next ones rarer at once by more than a half, and all is in the budget."""
    clock = StepClock(0.01)
    drive = Drive(clock)
    drive(5_000, 0.05)
    spacing, began = clock.spacing, drive.spent
    for _ in range(40):
        drive.step, drive.last, drive.spent = drive.step + 1, drive.step + 1, drive.spent + 0.05
        clock.lap(float(drive.step), drive.spent, worker=((0.0, 0.0, 0.0), (drive.judged, 0, 0)), credit=True)
    assert clock.spacing == spacing
    drive(20_000, 0.05)
    assert drive.spent - began <= 0.01 * 20_040
    assert clock.spacing <= 2 * spacing


def test_what_the_worker_does_later_is_booked_with_its_record():
    """Seconds of thirty records that the worker judges together are no more than those of thirty that it judges alone."""
    together, alone = StepClock(0.05), StepClock(0.05)
    for step in range(1, 400):
        for clock, every in ((together, 30), (alone, 1)):
            done = step // every * every
            clock.lap(float(step), 0.0, worker=((0.02 * done, 0.0, 0.0), (done, 0, 0)))
    assert together.spacing == alone.spacing == 1


def test_what_ends_steps_that_are_passed_by_is_the_exporters_own_time(monkeypatch):
    """Planning the next record and putting hooks back counts, although no guard is around it."""
    seconds = itertools.count(0.0, 100.0)
    monkeypatch.setattr(quiet_steps, "time", SimpleNamespace(perf_counter=lambda: next(seconds), time=time.time))
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Exporter(model, backends=[MemoryWriter()], every=4).watch() as exporter:
        for _ in range(4):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        assert exporter._loop._guard.spent >= 100.0
