"""Which steps are unlike those before them: what is looked at next to nothing, and what it tells."""

import functools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gradflow_export import Exporter, MemoryWriter
from gradflow_export.engine.pace import CLOSE_STEPS
from gradflow_export.instruments.gradients.fingerprints import BEYOND, LEAST, Range

BEGIN, STEPS = 150, 190
"""The last step before a fault, and the last of all."""


SETTINGS = [{}, {"to_none": False}, {"kind": torch.optim.AdamW, "clip": 1.0, "passes": 2}]


class Program:
    """A loop whose parts a fault may change while it runs."""

    def __init__(self, *, to_none=True, kind=torch.optim.SGD, passes=1, clip=0.0):
        torch.manual_seed(0)
        self.first, self.head = nn.Linear(6, 16), nn.Linear(16, 1)
        self.model = nn.Sequential(self.first, nn.Tanh(), self.head)
        self.kind, self.to_none, self.passes, self.clip = kind, to_none, passes, clip
        self.optimizer = self.new_optimizer()
        self.clears, self.clears_late, self.cuts, self.factor, self.turned = True, False, False, 1.0, False

    def new_optimizer(self):
        """Return an optimizer of all parameters."""
        return self.kind(self.model.parameters(), lr=0.05)

    def step(self, x):
        """Train one step."""
        if self.clears:
            self.optimizer.zero_grad(set_to_none=self.to_none)
        for part in x.chunk(self.passes):
            h = torch.tanh(self.first(self.factor * part))
            out = self.head(h.detach() if self.cuts else h)
            loss = (out - part.sum(1, keepdim=True)).square().mean()
            (-loss if self.turned else loss).backward()
        if self.clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        if self.clears_late:
            self.optimizer.zero_grad(set_to_none=self.to_none)
        self.optimizer.step()


def suspected(program, fault=lambda _program: None, steps=STEPS, **settings):
    """Return the steps that were read closely, and the records, of a program in which a fault begins."""
    memory, data = MemoryWriter(), torch.Generator().manual_seed(1)
    with Exporter(program.model, backends=[memory], verbose=0, **{"budget": None, **settings}) as exporter:
        exporter.watch()
        for step in range(1, steps + 1):
            if step == BEGIN + 1:
                fault(program)
            program.step(torch.randn(16, 6, generator=data))
    return [r.step for r in memory.records if r.value("schedule.suspected") is not None], memory.records


@functools.cache
def late(fault, settings=0):
    """Return the same of a program with some settings, which is trained once for all that is asked of it."""
    return suspected(Program(**SETTINGS[settings]), fault)


def never_clears(program):
    """Leave gradients where they are."""
    program.clears = False


def clears_late(program):
    """Clear gradients before the step."""
    program.clears_late = True


def cuts(program):
    """Cut the graph before the head."""
    program.cuts = True


def freezes(program):
    """Freeze a layer by mistake."""
    program.first.requires_grad_(False)


def rests(program):
    """Set the learning rate to 0."""
    program.optimizer.param_groups[0]["lr"] = 0.0


def rebuilds(program):
    """Build the optimizer anew."""
    program.optimizer = program.new_optimizer()


def turns(program):
    """Turn the sign of the loss."""
    program.turned = True


def subtracts(program):
    """Train with inputs on another scale."""
    program.factor = 1000.0


FAULTS = [never_clears, clears_late, cuts, freezes, rests, rebuilds, turns, subtracts]


@pytest.mark.parametrize("settings", range(len(SETTINGS)))
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_that_begins_late_is_looked_at_closely(fault, settings):
    """The step after the first one with the fault, and those that follow it, are read, however gradients are cleared."""
    steps, _ = late(fault, settings)
    assert len(steps) in {CLOSE_STEPS, 2 * CLOSE_STEPS}, "a fault that goes on in another way is looked at once more"
    assert steps == list(range(BEGIN + 2, BEGIN + 2 + len(steps)))


@pytest.mark.parametrize("settings", SETTINGS)
def test_a_program_that_goes_on_as_it_began_is_not_looked_at(settings):
    """No step of a loop that does the same again and again is unlike the others."""
    assert suspected(Program(**settings), steps=220)[0] == []


def test_ways_that_take_turns_are_known():
    """Parts of the model that rest at every other step, and an accumulation with a rest, are seen before it counts."""
    program = Program()
    step, count = program.step, [0]

    def alternating(x):
        count[0] += 1
        program.first.requires_grad_(count[0] % 2 == 0)
        program.passes = 1 if count[0] % 5 == 0 else 2
        step(x)

    program.step = alternating
    assert suspected(program, steps=220)[0] == []


def test_a_look_begins_where_records_are_few():
    """With a record at each tenth step alone, the next sixteen of these are read."""
    steps, _ = suspected(Program(), cuts, steps=BEGIN + 250, every=10)
    assert steps == list(range(BEGIN + 20, BEGIN + 20 + 10 * CLOSE_STEPS, 10))


def test_fingerprints_change_nothing_of_training():
    """Weights are the same, bit for bit, with a fault too."""
    watched, alone = Program(), Program()
    suspected(watched, cuts)
    data = torch.Generator().manual_seed(1)
    for step in range(1, STEPS + 1):
        alone.cuts = step > BEGIN
        alone.step(torch.randn(16, 6, generator=data))
    for one, other in zip(watched.model.parameters(), alone.model.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("fault", "issue", "within"),
    [
        (never_clears, "STALE_GRAD", 10),
        (clears_late, "NOT_TRAINING", 8),
        (cuts, "NOT_TRAINING", 20),
        (cuts, "STAGNATION", 14),
        (rests, "STAGNATION", 14),
        (rests, "NOT_TRAINING", 20),
    ],
)
def test_what_hangs_together_no_longer_is_told_within_twenty_steps(fault, issue, within):
    """An issue of the right type opens soon after the fault, not at the second sampled reading after it."""
    _, records = late(fault)
    opened = [r.step - BEGIN for r in records for i in r.issues if i.open and str(i.issue_type) == issue]
    assert opened
    assert 0 < opened[0] <= within


@given(st.lists(st.floats(-1e3, 1e3), min_size=LEAST, max_size=200), st.floats(0.1, 10))
def test_a_range_is_left_far_outside_of_it_alone(values, least):
    """Whatever came before: what lies between the extremes is inside, what lies beyond both widths is outside."""
    known = Range(least=least)
    for value in values:
        known.leaves(value)
    assert not known.leaves(values[-1])
    width = max(values) - min(values) + least
    assert known.leaves(max(values) + 2 * BEYOND * width)
    assert not known.leaves(math.nan)
    assert not known.leaves(None)


def test_a_range_says_nothing_before_it_is_known():
    """The first numbers of a run are what they are."""
    known = Range(share=0.1)
    assert not any(known.leaves(10.0**n) for n in range(LEAST))
