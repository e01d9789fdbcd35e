"""What is read when: dense at first, then each instrument on its own interval."""

import pytest

from gradflow_export.errors import ArgumentError, ArgumentTypeError
from gradflow_export.schedule import (
    CLOSE,
    DENSE_STEPS,
    INTERVALS,
    LARGE_DENSE,
    RANK_STEPS,
    RARE_STEPS,
    SETTLING_AT_MOST,
    SETTLING_INTERVAL,
    SETTLING_STEPS,
    SHOWN_AT_FIRST,
    SHOWN_INTERVAL,
    SHOWN_STEPS,
    Schedule,
)

OFTEN = {
    "blocks",
    "logits",
    "policy",
    "activations",
    "attention",
    "updates",
    "recurrent",
    "wiring",
    "inputs",
    "discrete",
    "moments",
    "clipping",
    "replicas",
}


def test_every_instrument_has_an_interval_beyond_settling():
    """The names are the public ones, and a settled run is read no more often than a settling one."""
    assert set(INTERVALS) == {
        "blocks",
        "logits",
        "activations",
        "attention",
        "policy",
        "recurrent",
        "wiring",
        "inputs",
        "updates",
        "statistics",
        "discrete",
        "moments",
        "clipping",
        "replicas",
        "ranks",
        "histograms",
    }
    assert min(INTERVALS.values()) >= 5


def test_the_first_steps_are_dense():
    """Every cheap instrument is read in each of the first steps, ranks in a row of four, rare ones at their marks."""
    schedule = Schedule()
    for step in range(1, DENSE_STEPS + 1):
        due = schedule.due(step)
        assert due >= OFTEN
        assert ("ranks" in due) is (step in RANK_STEPS)
        assert ({"statistics", "histograms"} <= due) is (step in RARE_STEPS)


def test_settling_steps_are_read_every_fifth():
    """Until step 100 cheap instruments come every five steps, however long their interval is; one is not so cheap.

    Inputs and targets come every three as well.
    """
    schedule = Schedule()
    for step in range(DENSE_STEPS + 1, SETTLING_STEPS + 1):
        fifth = OFTEN - {"discrete"} if step % 5 == 0 else {"inputs"} if step % SHOWN_AT_FIRST == 0 else set()
        expected = {name for name in OFTEN if name in fifth or step % INTERVALS[name] == 0}
        assert schedule.due(step) & OFTEN == expected


def test_later_each_instrument_has_its_interval():
    """Beyond step 100 the interval counts; ranks come four in a row, and inputs every 25 steps until step 400."""
    schedule = Schedule()
    for step in range(SETTLING_STEPS + 1, 2100):
        due = schedule.due(step)
        for name, interval in INTERVALS.items():
            shown = name == "inputs" and step <= SHOWN_STEPS and step % SHOWN_INTERVAL == 0
            assert (name in due) is (shown or step % interval < (4 if name == "ranks" else 1)), (name, step)


def test_an_interval_below_the_settling_one_is_kept():
    """A shorter interval than five is never stretched."""
    schedule = Schedule(intervals={"blocks": 2})
    assert [step for step in range(10, 21) if "blocks" in schedule.due(step)] == [10, 12, 14, 16, 18, 20]
    assert schedule.intervals["logits"] == INTERVALS["logits"]


def test_every_thins_out_records_but_never_the_first():
    """Step 1 and multiples of every make a record; nothing is read in between, asked for or not."""
    schedule = Schedule(every=7)
    assert [step for step in range(1, 22) if schedule.recorded(step)] == [1, 7, 14, 21]
    assert schedule.due(8) == frozenset()
    assert schedule.due(8, asked=True) == frozenset()
    assert schedule.due(7) >= OFTEN


def test_a_rule_that_asks_gets_everything_but_ranks_and_histograms():
    """What is dear stays on its interval."""
    assert Schedule().due(103) == frozenset()
    assert Schedule().due(103, asked=True) == OFTEN | {"statistics"}


def test_a_close_look_reads_connections_and_updates_beside_the_plan():
    """After a step unlike those before it little is read more, at each recorded step, however large the model is."""
    for schedule in (Schedule(), Schedule().for_sites(dict.fromkeys(INTERVALS, 5_000))):
        for step in range(1, 300):
            assert schedule.due(step, close=True) == schedule.due(step) | CLOSE
    assert Schedule(every=7).due(8, close=True) == frozenset()


def test_the_plan_cannot_be_changed_afterwards():
    """A schedule is frozen, and does not follow the dictionary it was made from."""
    mine = {"blocks": 3}
    schedule = Schedule(intervals=mine)
    mine["blocks"] = 99
    assert schedule.intervals["blocks"] == 3
    with pytest.raises(TypeError):
        schedule.intervals["blocks"] = 1
    with pytest.raises(AttributeError):
        schedule.every = 2


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        ({"every": 0}, ArgumentError, "every must be at least 1 step, got 0; use exporter.pause"),
        ({"every": -3}, ArgumentError, "every must be at least 1 step"),
        ({"every": True}, ArgumentTypeError, "every must be a whole number of steps, got True"),
        ({"every": 2.0}, ArgumentTypeError, "whole number of steps, got 2.0"),
        ({"every": "5"}, ArgumentTypeError, "whole number of steps, got '5'"),
        ({"intervals": {"block": 5}}, ArgumentError, "'block', which is no instrument; did you mean 'blocks'"),
        ({"intervals": {3: 5}}, ArgumentError, "3, which is no instrument; known are: activations, attention"),
        ({"intervals": {"blocks": 0}}, ArgumentError, r"intervals\['blocks'\] must be at least 1"),
        ({"intervals": {"blocks": None}}, ArgumentTypeError, r"intervals\['blocks'\] must be a whole number"),
    ],
)
def test_bad_plans_are_named(arguments, kind, text):
    """The message says what was expected, what came and what to do."""
    with pytest.raises(kind, match=text):
        Schedule(**arguments)


def test_intervals_grow_with_what_there_is_to_read():
    """A hundred sites more, one interval more; what the user chose stays."""
    schedule = Schedule(1, {"updates": 7}).for_sites({"blocks": 199, "activations": 100, "updates": 1000})
    assert schedule.intervals["blocks"] == 2 * INTERVALS["blocks"]
    assert schedule.intervals["activations"] == INTERVALS["activations"]
    assert schedule.intervals["updates"] == 7
    assert schedule.intervals["ranks"] == INTERVALS["ranks"]


def test_settling_grows_with_what_there_is_to_read():
    """Until training has settled, what there is much of in a large model is read a few times, and always at first."""
    small, large = Schedule().for_sites({"blocks": 100}), Schedule().for_sites({"blocks": 350, "updates": 10_000})
    for step in range(1, SETTLING_STEPS + 1):
        seldom = step in LARGE_DENSE or step % SETTLING_AT_MOST == 0
        assert ("blocks" in small.due(step)) == (step <= DENSE_STEPS or step % SETTLING_INTERVAL == 0)
        assert ("blocks" in large.due(step)) == ("updates" in large.due(step)) == seldom
        assert "logits" in large.due(step) or step > DENSE_STEPS
        assert "blocks" in large.due(step, asked=True)


def test_a_large_model_has_fewer_readings_of_ranks_and_inputs_at_first():
    """Ranks once instead of four times in a row, and inputs at every hundredth step instead of every 25th."""
    large = Schedule().for_sites({"ranks": 350, "inputs": 350})
    first = range(1, SETTLING_STEPS + 1)
    assert [step for step in first if "ranks" in large.due(step)] == [1]
    assert [step for step in first if "inputs" in large.due(step)] == [1, 2, 10, 100]


def test_a_dense_start_that_was_asked_for_is_read_whole():
    """A longer dense start than the default is read at each of its steps, however much there is to read."""
    large = Schedule(dense=20).for_sites({"blocks": 350})
    assert all("blocks" in large.due(step) for step in range(1, 21))


def test_what_is_bounded_grows_at_the_start_alone():
    """Moments of no more than some parameters are read: a large model has them as often as any, once it has settled."""
    large = Schedule().for_sites({"moments": 350})
    assert [step for step in range(1, 401) if "moments" in large.due(step)] == [1, 2, 10, 100, 200, 300, 400]


def test_what_the_user_chose_does_not_grow():
    """An interval of the user's is that of any model, until training has settled too."""
    chosen = Schedule(1, {"blocks": 50})
    large = chosen.for_sites({"blocks": 5_000})
    assert all(("blocks" in large.due(step)) == ("blocks" in chosen.due(step)) for step in range(1, 400))


@pytest.mark.parametrize("begun", [0, 1010])
@pytest.mark.parametrize("every", [1, 2, 10, 7, 500])
def test_inputs_are_read_in_the_first_hundreds_of_steps_whatever_a_budget_leaves(every, begun):
    """By default alone: a budget that the user set is kept; the first step from any on is what comes next."""
    usual, shown = Schedule(every, begun=begun), Schedule(every, begun=begun, shown=True)
    steps = range(begun + 101, begun + 600)
    wanted = [s for s in steps if s <= begun + 400 and s % 25 == 0 and s % every == 0]
    for spacing in (1, 3, 64, 4096):
        for plan in (usual, shown):
            recorded = [step for step in steps if plan.recorded(step, spacing)]
            assert recorded == [s for s in steps if s % (every * spacing) == 0 or (plan is shown and s in wanted)]
            coming = {step: plan.next_recorded(step, spacing) for step in steps}
            assert all(coming[step] == next((s for s in recorded if s >= step), coming[step]) for step in steps)
    assert all("inputs" in shown.due(step, stretch=64.0) for step in wanted)
    assert not any(usual.shows(step) for step in steps)
