"""How values get into rows, on a stand-in for a run that keeps W&B's rules of steps; and the lane of what may wait."""

import atexit
import math
import os
import threading
from itertools import pairwise
from types import SimpleNamespace

import pytest

from gradflow_export.writers.wandb.lane import Lane
from gradflow_export.writers.wandb.rows import FIRST, PATIENCE, RowQueue, Rows


class Run:
    """Merges rows of one step and drops those behind it, as W&B does."""

    def __init__(self, hook=True):
        self.rows, self.open, self.at, self.defined, self.summary = [], {}, 0, [], {}
        self.broken = None
        self._teardown_hooks = []
        if hook:
            self._partial_history_callback = self._publish

    def log(self, row, step=None, commit=None):
        if self.broken:
            raise ConnectionError(self.broken)
        getattr(self, "_partial_history_callback", self._publish)(row, step, commit)

    def _publish(self, row, step=None, commit=None):
        if step is not None and step < self.at:
            return
        if step is not None and step > self.at:
            self._close(step)
        self.open.update(row)
        if commit or (commit is None and step is None):
            self._close(self.at + 1)

    def _close(self, step):
        if self.open:
            self.rows.append(self.open)
        self.open, self.at = {}, step

    def define_metric(self, name, **how):
        self.defined.append((name, how.get("step_metric")))

    def finish(self):
        for hook in self._teardown_hooks:
            hook.call()
        self._close(self.at)
        return [row["p/step"] for row in self.rows if "p/step" in row]


@pytest.fixture
def ride():
    """Make rows on a run; nothing is left for the interpreter's end."""
    made = []

    def make(run, module=None, **how):
        made.append(Rows.of(module, run, "p", **how))
        return made[-1]

    yield make
    for rows in made:
        atexit.unregister(rows.end)


def put(rows, *steps):
    for step in steps:
        rows.put({"step": step, "loss": float(step)})


def test_the_newest_values_go_within_the_users_row(ride):
    """Nothing is logged for us; extremes and worst layer are those since the last row."""
    run = Run()
    rows = ride(run)
    for step, norm in ((1, 5.0), (2, 0.1), (3, 1.0)):
        rows.put({"step": step, "gradient.total_norm": norm}, (norm, f"layer{step}"))
    assert (run.rows, run.open) == ([], {})
    run.log({"u": 1})
    rows.put({"step": 4, "gradient.total_norm": 2.0}, (2.0, "layer4"))
    run.log({"u": 2})
    run.log({"u": 3})
    extremes = [
        {key.removeprefix("p/since_last/"): value for key, value in row.items() if "since_last" in key}
        for row in run.rows
    ]
    assert [row.get("p/step") for row in run.rows] == [3, 4, None]
    assert extremes == [
        {"gradient_norm_max": 5.0, "gradient_norm_min": 0.1, "worst_layer": "layer1"},
        {"gradient_norm_max": 2.0, "gradient_norm_min": 2.0, "worst_layer": "layer4"},
        {},
    ]


def test_extremes_of_one_row_cover_all_its_pieces(ride):
    """A row that is logged in pieces has the extremes since the row before."""
    run = Run()
    rows = ride(run)
    for step, norm in ((1, 5.0), (2, 1.0)):
        rows.put({"step": step, "gradient.total_norm": norm})
        run.log({f"u{step}": step}, step=7)
    run.log({"u": 3}, step=8)
    assert run.rows[0]["p/since_last/gradient_norm_max"] == 5.0
    assert run.rows[0]["p/step"] == 2


def test_nan_is_an_extreme(ride):
    """A loss that was NaN between two rows of the user's is not hidden."""
    run = Run()
    rows = ride(run)
    for step, loss in enumerate((1.0, math.nan, 2.0), 1):
        rows.put({"step": step, "loss": loss})
    run.log({"u": 1})
    assert math.isnan(run.rows[0]["p/since_last/loss_max"])
    assert run.rows[0]["p/loss"] == 2.0


def test_rows_that_are_dropped_or_empty_get_nothing(ride):
    """What W&B drops would take our values with it, and an empty row is none."""
    run = Run()
    rows = ride(run)
    run.log({"u": 1}, step=5)
    put(rows, 1)
    run.log({"u": 2}, step=3)
    run.log({})
    put(rows, 2)
    run.log({"u": 3}, step=6)
    assert run.finish() == [2]
    assert [row["u"] for row in run.rows] == [1, 3]


def test_the_users_keys_go_before_ours(ride):
    """A key of the same name keeps the user's value, and the user's dictionary is not changed."""
    run, mine = Run(), {"p/loss": "mine"}
    put(ride(run), 1)
    run.log(mine)
    assert run.rows[0]["p/loss"] == "mine"
    assert mine == {"p/loss": "mine"}


def test_a_reader_asks_for_newer_values_when_it_took_some(ride):
    """So that they are ready for its next row."""
    run, asked = Run(), []
    rows = ride(run)
    rows.ask = lambda: asked.append(1)
    run.log({"u": 1})
    put(rows, 1)
    run.log({"u": 2})
    assert asked == [1]


def test_the_end_fills_the_row_that_is_open_and_the_summary(ride):
    """A row that W&B still keeps open gets the newest values; where there is none, none is made."""
    for step, wanted in ((3, [2]), (None, [1])):
        run = Run()
        rows = ride(run)
        put(rows, 1)
        run.log({"u": 1}, **({} if step is None else {"step": step}))
        put(rows, 2)
        rows.conclude({"verdict": "healthy"})
        assert run.finish() == wanted
        assert run.summary["p/step"] == 2
        assert run.summary["p/verdict"] == "healthy"


def test_what_is_taken_back_is_in_no_later_row_and_gone_from_the_summary(ride):
    """W&B keeps the last value of a key: ``None`` takes it back, from what waits for a row too."""
    run = Run()
    rows = ride(run)
    rows.put({"step": 1, "a": 1.0, "b": math.nan})
    run.log({"u": 1})
    rows.put({"step": 2, "b": 2.0})
    rows.put({"step": 3, "a": None, "b": None})
    run.log({"u": 2})
    assert [(row.get("p/a"), "p/b" in row) for row in run.rows] == [(1.0, True), (None, False)]
    rows.conclude({})
    assert (run.summary["p/a"], run.summary["p/b"], run.summary["p/step"]) == (None, None, 3)


def test_nan_in_the_summary_is_not_missing(ride):
    """wandb makes null of NaN in what is put into a summary."""
    run = Run()
    rows = ride(run)
    rows.put({"step": 1, "loss": math.nan, "norm": math.inf})
    rows.conclude({})
    assert (run.summary["p/loss"], run.summary["p/norm"]) == ("NaN", math.inf)


def test_where_nothing_is_logged_the_summary_lives(ride, caplog, monkeypatch):
    """The newest values stand there while the run lives, and one line says what to do."""
    now = [1000.0]
    monkeypatch.setattr("gradflow_export.writers.wandb.rows.time", SimpleNamespace(monotonic=lambda: now[0]))
    run = Run()
    rows = ride(run)
    for step in range(100):
        now[0] += 1
        put(rows, step)
    assert run.summary["p/step"] >= 80
    assert run.rows == []
    assert len([r for r in caplog.records if "nothing was logged to this W&B run" in r.getMessage()]) == 1


def test_without_the_private_method_the_public_ones_are_used(ride):
    """Rows logged through ``run.log`` and the module's ``log`` get the newest values all the same."""
    run = Run(hook=False)
    module = SimpleNamespace(log=run.log)
    rows = ride(run, module=module)
    put(rows, 1)
    run.log({"u": 1})
    put(rows, 2)
    module.log({"u": 2}, step=5)
    assert run.finish() == [1, 2]


def test_a_forked_child_logs_its_own(ride, monkeypatch):
    """The values of the parent's exporter are none of a child's."""
    run = Run()
    put(ride(run), 1)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    run.log({"u": 1})
    assert run.rows == [{"u": 1}]


def test_keys_are_defined_once_and_exactly(ride):
    """Every key has our step as its axis."""
    run = Run()
    put(ride(run, own=True), 1, 2)
    assert run.defined[0] == ("p/step", None)
    assert ("p/loss", "p/step") in run.defined
    assert len(run.defined) == len({name for name, _ in run.defined}) == 6


def test_own_rows_go_at_once(ride):
    """On request."""
    run = Run()
    put(ride(run, own=True), 1, 2, 3)
    assert [row["p/step"] for row in run.rows] == [1, 2, 3]


def test_a_prefix_in_use_is_not_given_away(ride):
    """One that is free goes on where it was."""
    run = Run()
    first, second = ride(run), ride(run)
    first.used = False
    assert (first.prefix, second.prefix) == ("p", "p_2")
    assert ride(run) is first
    assert ride(run).prefix == "p_3"


def test_a_run_that_refuses_is_given_up(ride):
    """Nothing raises, and after some failures nothing is tried."""
    run = Run()
    rows = ride(run, own=True)
    run.broken = "gone"
    put(rows, *range(PATIENCE + 5))
    assert rows.refused
    run.broken = None
    put(rows, 99)
    assert run.finish() == []


def test_an_end_that_fails_is_no_failure_of_the_run(ride, caplog):
    """What is added at the end is not worth the user's ``finish``."""
    run = Run()
    rows = ride(run)
    rows.before_end = lambda: 1 / 0
    put(rows, 1)
    run.finish()
    assert rows.ended
    assert "could not be made" in caplog.text


@pytest.mark.parametrize("limit", [2, 3, 7, 64])
@pytest.mark.parametrize("count", [1, 2, 5, 64, 65, 500, 1000])
def test_kept_rows_cover_the_whole_run(limit, count):
    """No more than the limit, evenly, the last step among them, and no NaN lost."""
    rows = RowQueue(limit)
    for step in range(1, count + 1):
        rows.put({FIRST: step, "step": step, "loss": math.nan if step == (count + 1) // 2 else 1.0})
    kept = rows.rows()
    steps = [row["step"] for row in kept]
    assert len(kept) <= limit
    assert len(kept) >= min(limit, count) // 2
    assert steps[-1] == count
    assert sum(math.isnan(row["loss"]) for row in kept) == 1
    assert [row[FIRST] for row in kept] == [1, *(step + 1 for step in steps[:-1])]
    assert max(b - a for a, b in pairwise([0, *steps])) <= max(1, 4 * count // limit)


def test_the_lane_does_the_last_thing_asked():
    """One thing at a time; what comes meanwhile takes the place of what waits."""
    lane, done, started, hold = Lane(), [], threading.Event(), threading.Event()

    def slow():
        started.set()
        hold.wait(100)
        done.append("slow")

    lane.put(slow)
    started.wait(100)
    for name in "abc":
        lane.put(lambda name=name: done.append(name))
    assert not lane.wait(0.01)
    hold.set()
    assert lane.wait(100)
    assert done == ["slow", "c"]


def test_a_lane_works_where_no_thread_can_start(monkeypatch):
    """At the interpreter's end it does the thing itself."""
    lane, done = Lane(), []

    def no_thread(self):
        raise RuntimeError("can't start new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", no_thread)
    lane.put(lambda: done.append(1))
    assert lane.wait(0)
    assert done == [1]
