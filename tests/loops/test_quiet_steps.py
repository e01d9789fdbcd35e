"""Steps that a budget leaves out are counted, cost next to nothing, and change nothing of what is recorded."""

import copy
from collections import OrderedDict

import pytest
import torch
from torch import nn

from gradflow_export import Exporter, IssueType, MemoryWriter
from gradflow_export.hooks import backward_listener

DENSE = 100
"""Steps that are always recorded."""


def make(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def step(model, optimizer, x=None):
    optimizer.zero_grad()
    loss = model(torch.ones(2, 4) if x is None else x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()


def spaced(exporter, spacing):
    """Have one of so many steps recorded, as a budget would in the end."""
    exporter._loop.clock._spacing.value = spacing


def watched(model, **settings):
    memory = MemoryWriter()
    return Exporter(model, backends=[memory], strict=True, **settings).watch(), memory


def steps_of(memory):
    return [record.step for record in memory.records]


@pytest.mark.parametrize("spacing", [2, 16])
@pytest.mark.parametrize("every", [1, 10])
def test_records_are_those_of_the_same_steps_without_a_budget(spacing, every):
    """Which steps are recorded follows from the factor; their values are those that every step would have had."""
    found = []
    for factor in (1, spacing):
        model, optimizer = make()
        exporter, memory = watched(model, every=every)
        torch.manual_seed(1)
        for number in range(400):
            if number == DENSE - 1:
                spaced(exporter, factor)
            step(model, optimizer, torch.randn(2, 4))
        exporter.close()
        assert exporter._loop.steps == 400
        found.append({r.step: (r.value("loss"), r.value("gradient.total_norm")) for r in memory.records})
        assert memory.records[-1].step == 400
    everything, few = found
    wanted = [s for s in everything if s <= DENSE or s % (every * spacing) == 0]
    assert [s for s in few if s != 400] == [s for s in wanted if s != 400]
    assert all(few[s] == pytest.approx(everything[s], rel=1e-6) for s in few if s != 400)
    skipped = exporter.summary()["skipped"]
    assert sum(skipped.values()) + len(few) == 400
    assert skipped["budget"] > 0


def test_training_keeps_its_bits():
    """With a budget that nothing can keep, most steps are passed by, and the weights are those of the bare loop."""
    results = []
    for watch in (False, True):
        model, optimizer = make()
        exporter = Exporter(model, backends=["memory"], budget=1e-6).watch() if watch else None
        torch.manual_seed(1)
        for _ in range(600):
            step(model, optimizer, torch.randn(2, 4))
        if exporter is not None:
            exporter.close()
            assert exporter.summary()["skipped"]["budget"] > 200
            assert "to keep to the budget; budget=None records every step" in exporter.report()
        results.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def quiet_for_a_while(model, optimizer):
    """Return an exporter, its memory and the number of the last step, behind which 27 steps are passed by."""
    exporter, memory = watched(model)
    for number in range(1, 101):
        if number == DENSE - 1:
            spaced(exporter, 32)
        step(model, optimizer)
    for _ in range(30):
        step(model, optimizer)
    assert exporter._loop.quiet.steps.left > 20
    return exporter, memory


def test_between_two_records_calls_of_the_model_run_none_of_our_hooks():
    """The model has no hooks and backward passes are counted alone, until the next step that is recorded."""
    own = torch.autograd.backward
    model, optimizer = make()
    exporter, memory = quiet_for_a_while(model, optimizer)
    (listener,) = vars(torch.autograd.backward)[backward_listener._MARK].current
    assert listener is exporter._loop.quiet
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    for _ in range(29):
        step(model, optimizer)
    assert torch.autograd.backward is not own
    assert model._forward_hooks
    for _ in range(40):
        step(model, optimizer)
    exporter.close()
    assert torch.autograd.backward is own
    assert type(model._forward_hooks) is OrderedDict
    assert [(r.step, r.value("loss") is not None) for r in memory.records if 128 <= r.step < 199] == [
        (128, True),
        (160, True),
        (192, True),
    ]


@pytest.mark.parametrize("close_early", [False, True])
def test_a_hook_that_the_user_adds_meanwhile_stays(close_early):
    """It runs once at each call, before and after ours are back, and its handle takes it away."""
    model, optimizer = make()
    exporter, _ = quiet_for_a_while(model, optimizer)
    called = []
    handle = model.register_forward_hook(lambda *_: called.append(1))
    if close_early:
        exporter.close()
    for _ in range(70):
        step(model, optimizer)
    assert len(called) == 70
    copied = copy.deepcopy(model)
    assert list(copied._forward_hooks) == list(model._forward_hooks if close_early else copied._forward_hooks)
    assert len(copied._forward_hooks) == 1
    handle.remove()
    step(model, optimizer)
    assert len(called) == 70
    exporter.close()
    assert not model._forward_hooks
    assert type(model._forward_hooks) is OrderedDict


def test_two_who_watch_the_same_criterion_both_hear_of_it():
    """Hooks that stand beside those of another exporter stay, and each reads the losses of its own model."""
    criterion, found = nn.MSELoss(), []
    made = [make(seed) for seed in range(2)]
    both = [Exporter(model, backends=["memory"], strict=True).watch(criterion) for model, _ in made]
    for number in range(300):
        if number == DENSE:
            spaced(both[0], 32)
        for model, optimizer in made:
            optimizer.zero_grad()
            criterion(model(torch.ones(2, 4)), torch.zeros(2, 1)).backward()
            optimizer.step()
    for exporter in both:
        exporter.close()
        found.append(exporter.summary()["steps"]["count"])
    assert found[0] < 120
    assert found[1] > 250
    assert not criterion._forward_hooks


def test_a_model_compiled_after_it_was_watched_is_compiled_no_more_often():
    """Hooks that come and go between two records would have the graph made again and again."""
    model, optimizer = make()
    exporter, _ = watched(model)
    graphs = []

    def backend(graph, _inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, backend=backend)
    for number in range(300):
        if number == 60:
            early = len(graphs)
        if number == DENSE:
            spaced(exporter, 8)
        step(compiled, optimizer)
    exporter.close()
    assert exporter._loop.steps == 300
    assert len(graphs) == early


def test_another_models_optimizer_does_not_disturb():
    """Steps of a stranger in between are neither counted nor an end of the quiet."""
    (model, optimizer), (other, stranger) = make(), make(1)
    exporter, memory = watched(model)
    for number in range(300):
        if number == DENSE - 1:
            spaced(exporter, 32)
        step(model, optimizer)
        step(other, stranger)
    exporter.close()
    assert exporter._loop.steps == 300
    assert [s for s in steps_of(memory) if s > DENSE] == [*range(128, 300, 32), 300]


@pytest.mark.parametrize("when", [104, 127, 130])
def test_an_optimizer_that_appears_meanwhile_is_noticed(when):
    """From its first step on both are counted as everywhere else, once the next ones have been recorded closely."""
    model, optimizer = make()
    exporter, memory = watched(model)
    second = torch.optim.Adam(model[2].parameters(), lr=1e-3)
    first = torch.optim.SGD(model[0].parameters(), lr=0.01)
    for number in range(1, 400):
        if number == DENSE:
            spaced(exporter, 32)
        step(model, optimizer if number < when else first)
        if number >= when:
            second.step()
    exporter.close()
    recorded = [s for s in steps_of(memory) if s > when + 200]
    assert recorded
    assert all(s % 32 == 0 for s in recorded[:-1])
    assert abs(exporter._loop.steps - 399) <= 2


class Nested(torch.optim.SGD):
    """Steps with super().step(), whose hooks run twice."""

    def step(self, closure=None):
        return super().step(closure)


class Failing(torch.optim.SGD):
    """Raises every seventh time."""

    calls = 0

    def step(self, closure=None):
        self.calls += 1
        if self.calls % 7 == 0:
            raise RuntimeError("no")
        return super().step(closure)


@pytest.mark.parametrize("kind", [Nested, Failing])
def test_steps_are_counted_once_however_they_are_made(kind):
    """One step within another counts once, and one that raises not at all."""
    model, _ = make()
    optimizer = kind(model.parameters(), lr=0.01)
    exporter, memory = watched(model)
    made = 0
    for number in range(300):
        if number == DENSE - 1:
            spaced(exporter, 16)
        try:
            step(model, optimizer)
            made += 1
        except RuntimeError:
            pass
    exporter.close()
    assert exporter._loop.steps == made
    assert all(s % 16 == 0 for s in steps_of(memory) if DENSE < s < made)


def test_a_pause_ends_where_it_is_ended():
    """Nothing is recorded while paused; steps are counted, and recorded again from the next one on."""
    model, optimizer = make()
    exporter, memory = watched(model)
    for number in range(60):
        if number == 20:
            exporter.pause()
        if number == 40:
            exporter.resume()
        step(model, optimizer)
    exporter.close()
    assert exporter._loop.steps == 60
    assert steps_of(memory) == [*range(1, 21), *range(41, 61)]


def test_closing_between_two_records_leaves_nothing_behind():
    """The steps passed by are counted, and no hook of ours is left."""
    model, optimizer = make()
    exporter, _ = watched(model)
    for number in range(120):
        if number == DENSE - 1:
            spaced(exporter, 1024)
        step(model, optimizer)
    exporter.close()
    assert exporter._loop.steps == 120
    assert exporter.summary()["skipped"]["budget"] == 19  # the last has a record after all
    again, memory = watched(model)
    step(model, optimizer)
    again.close()
    assert steps_of(memory) == [1]


def test_nan_that_begins_between_two_records_is_not_blamed_on_the_weights():
    """Weights that one broken batch made NaN, in a step that was left out: the steps are named, and no false cause."""
    model, optimizer = make()
    exporter, _ = watched(model)
    for number in range(1, 300):
        if number == DENSE:
            spaced(exporter, 64)
        step(model, optimizer, torch.full((2, 4), float("nan")) if number == 150 else None)
    exporter.close()
    (issue,) = [issue for issue in exporter.issues if issue.issue_type is IssueType.NUMERICAL]
    assert issue.step == 192
    assert "begins in one of the steps 129 to 191, which were not recorded" in issue.message
    assert "overflowed" not in issue.advice


LEAVES_OUT = {"budget": {"budget": 1e-6}, "every": {"every": 7, "budget": None}}


@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.parametrize("why", LEAVES_OUT)
def test_a_run_ends_with_its_last_step(why, broken):
    """Where the last step was passed by, its record has the weights it left, and the verdict says what loss is the last."""
    model, optimizer = make()
    exporter, memory = watched(model, **LEAVES_OUT[why])
    steps = 403
    losses = [step(model, optimizer) for _ in range(steps - 1)]
    losses.append(step(model, optimizer, torch.full((2, 4), float("nan")) if broken else None))
    exporter.close()
    record, before = memory.records[-1], [r.step for r in memory.records if r.value("loss") is not None]
    assert (record.step, record.value("loss")) == (steps, None)
    assert before[-1] < steps
    sizes = {name: float(p.detach().norm()) for name, p in model.named_parameters()}
    assert record.get("parameter.weight_norm").as_dict() == pytest.approx(sizes, rel=1e-6, nan_ok=True)
    summary = exporter.summary()
    assert summary["steps"]["last"] == steps
    assert sum(summary["skipped"].values()) + len(memory.records) == steps
    ends = [sorted(losses[s - 1] for s in some)[2] for some in (before[:5], before[-5:])]
    assert summary["loss"] == {
        "first": pytest.approx(ends[0], rel=1e-6),
        "last": pytest.approx(ends[1], rel=1e-6),
        "last_step": before[-1],
    }
    found = [i.message for i in exporter.issues if i.issue_type is IssueType.NUMERICAL]
    if broken:
        assert f"in one of the steps {before[-1] + 1} to {steps}, which were not recorded" in found[0]
    else:
        assert found == []
        assert summary["verdict"].endswith(f", read up to step {before[-1]}")


def test_no_record_is_made_up_for_steps_that_were_not_to_be_recorded():
    """What was recorded has one record, and what was paused has none."""
    for pause in (False, True):
        model, optimizer = make()
        exporter, memory = watched(model, budget=None)
        step(model, optimizer)
        if pause:
            exporter.pause()
            step(model, optimizer)
        exporter.close()
        assert steps_of(memory) == [1]


def test_a_gradient_that_comes_late_is_in_the_record_of_its_step():
    """Blocks that rest are not asked for anything, unless a graph from when they were read brings one."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 1)])
    optimizer, intervals = torch.optim.SGD(model.parameters(), lr=0.01), {"blocks": 1000}
    memory = MemoryWriter()
    exporter = Exporter(model, backends=[memory], strict=True, budget=None, intervals=intervals)
    exporter.watch(blocks=["0", "1"])
    x, kept = torch.ones(2, 4), None
    for number in range(1, DENSE + 8):
        optimizer.zero_grad()
        hidden = model[0](x)
        model[1](hidden).square().mean().backward()
        if number == DENSE:
            kept = model[0](x).square().mean()
        if number == DENSE + 5:
            kept.backward()
        optimizer.step()
    exporter.close()
    found = {
        record.step for record in memory.records if "block.gradient_norm" in {each.metric for each in record.readings}
    }
    assert DENSE + 5 in found
    assert found.isdisjoint({DENSE + 2, DENSE + 3, DENSE + 4})
