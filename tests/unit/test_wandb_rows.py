"""How rows ride, on a stand-in for a run that keeps W&B's rules of steps; and the lane of what may wait."""

import atexit
import threading
from types import SimpleNamespace

import pytest

from gradflow_export.writers.wandb_lane import Lane
from gradflow_export.writers.wandb_rows import PATIENCE, RideRows


class Run:
    """Merges rows of one step and drops those behind it, as W&B does."""

    def __init__(self, hooks=True, mode="online"):
        self.rows, self.open, self.at, self.defined = [], {}, 0, []
        self.settings = SimpleNamespace(mode=mode)
        self.broken = None
        if hooks:
            self._teardown_hooks = []

    @property
    def step(self):
        if self.broken or self.settings.mode == "shared":
            raise ConnectionError(self.broken or "shared")
        return self.at

    def log(self, row, step=None, commit=None):
        if self.broken:
            raise ConnectionError(self.broken)
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
        for hook in getattr(self, "_teardown_hooks", ()):
            hook.call()
        self._close(self.at)
        return [row["p/step"] for row in self.rows if "p/step" in row]


@pytest.fixture
def ride():
    """Make rows on a run; nothing is left for the interpreter's end."""
    made = []

    def make(run, **how):
        made.append(RideRows.of(run, "p", limit=100, **how))
        return made[-1]

    yield make
    for rows in made:
        atexit.unregister(rows.end)


def put(rows, *steps):
    for step in steps:
        rows.put({"p/step": step, "p/loss": float(step)})


def test_one_row_rides_on_each_step(ride):
    """The rest waits, and the step of the run is the user's alone."""
    run = Run()
    rows = ride(run)
    put(rows, 1, 2, 3)
    assert (run.at, rows.waiting) == (0, 2)
    run.log({"u": 1}, step=0)
    run.log({"u": 2}, step=1)
    rows.pump()
    assert (run.at, rows.waiting) == (1, 1)
    assert run.finish() == [1, 2, 3]
    assert [row["u"] for row in run.rows if "u" in row] == [1, 2]


def test_keys_are_defined_once_and_exactly(ride):
    """Every key has our step as its axis."""
    run = Run()
    put(ride(run, own=True), 1, 2)
    assert run.defined == [("p/step", None), ("p/loss", "p/step")]


@pytest.mark.parametrize("how", [{"own": True}, {"mode": "shared"}])
def test_own_rows_go_at_once(how, ride):
    """On request, and in shared mode, where no step is known and rows are independent."""
    run = Run(mode=how.get("mode", "online"))
    rows = ride(run, own=how.get("own", False))
    put(rows, 1, 2, 3)
    assert rows.waiting == 0
    assert [row["p/step"] for row in run.rows] == [1, 2, 3]


def test_without_a_teardown_hook_finish_sends_what_waits(ride):
    """Where wandb offers no hook, the writer's end has to do."""
    run = Run(hooks=False)
    rows = ride(run)
    put(rows, 1, 2, 3)
    assert not rows.hooked
    rows.finish()
    assert run.finish() == [1, 2, 3]


def test_rows_of_one_run_are_shared_by_writers_that_follow_each_other(ride):
    """A prefix in use is not given away; one that is free goes on where it was."""
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
    assert rows.waiting == 0
    run.broken = None
    put(rows, 99)
    assert run.finish() == []


def test_a_run_that_comes_back_goes_on(ride):
    """A question for the step that fails costs nothing: the rows wait."""
    run = Run()
    rows = ride(run)
    run.broken = "busy"
    put(rows, 1, 2, 3)
    run.broken = None
    put(rows, 4)
    assert run.finish() == [1, 2, 3, 4]


def test_an_end_that_fails_still_sends_the_rows(ride):
    """What the writer adds at the end is not worth the rows that wait."""
    run = Run()
    rows = ride(run)
    rows.before_end = lambda: 1 / 0
    put(rows, 1, 2)
    assert run.finish() == [1, 2]
    put(rows, 3)
    rows.end()
    assert rows.waiting == 0


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
