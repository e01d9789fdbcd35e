"""Which step reads what depends on the step numbers and on the records alone."""

import itertools
import math
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gradflow_export import ArgumentError, Exporter, MemoryWriter
from gradflow_export.engine import backlog, build
from gradflow_export.engine.pace import (
    AGAIN_STEPS,
    BURST,
    CLOSE_STEPS,
    DELAY,
    EARNED,
    LEAST_BURST,
    SLOWER,
    WHOLE_STEPS,
    Pace,
)
from gradflow_export.engine.step_timer import OWED_STEPS, StepClock
from gradflow_export.errors import ArgumentTypeError
from gradflow_export.schedule import INTERVALS, SETTLING_STEPS, Schedule


class Judge:
    """A worker that judges a record of each step some steps later, or when it is waited for."""

    def __init__(self, pace, requests, lags):
        self.pace, self.requests, self.lags = pace, requests, lags
        self.judged = 0

    def has_room(self, step):
        """There always is."""
        return True

    def wait_past(self, step):
        """Judge up to a step."""
        while self.judged < step:
            self.judged += 1
            if self.judged in self.requests:
                self.pace.ask(self.judged)

    def look(self, step):
        """Judge what it has time for."""
        self.wait_past(step - self.lags[step % len(self.lags)])


def dense_steps(requests, lags, every=1, steps=150):
    """Return the steps that are read densely, and how many requests were late."""
    pace, schedule = Pace(), Schedule(every)
    pace.worker = worker = Judge(pace, requests, lags)
    out = []
    for step in range(1, steps + 1):
        if pace.begin(step, schedule, paused=False, alone=True) and pace.dense:
            out.append(step)
            assert pace.end()["schedule.asked"] == 1.0
        worker.look(step)
    return out, pace.late


@given(st.sets(st.integers(1, 150)), st.lists(st.integers(0, 80), min_size=1), st.integers(1, 40))
def test_when_the_worker_judges_changes_nothing(requests, lags, every):
    """However soon or late each record is judged, the same steps are dense: those that follow from the requests."""
    found, late = dense_steps(requests, lags, every)
    assert (found, late) == dense_steps(requests, [0], every)
    assert late == 0
    expected = []
    for step in (s for s in range(1, 151) if s == 1 or s % every == 0):
        before = max((s for s in range(1, step) if s == 1 or s % every == 0), default=0)
        asked = any(before < r + DELAY <= step for r in requests)
        if asked and (not expected or step - expected[-1] >= AGAIN_STEPS):
            expected.append(step)
    assert found == expected


def close_steps(suspected, *, every=1, stretch=1, steps=500):
    """Return the steps that are read closely, and those of them in which everything is."""
    pace, schedule, close, whole = Pace(), Schedule(every), [], []
    pace.worker = Judge(pace, set(), [0])
    for step in range(1, steps + 1):
        if pace.begin(step, schedule, paused=False, alone=True):
            assert pace.wants == {"asked": pace.dense, "close": pace.close}
            close += [step] * pace.close
            whole += [step] * pace.dense
            assert pace.end() == ({"schedule.suspected": 1.0} if step in close else {})
        if step in suspected:
            pace.suspect(step, schedule, stretch)
    return close, whole


@given(st.sets(st.integers(1, 400)), st.integers(1, 9), st.integers(1, 4))
def test_a_step_unlike_others_has_the_next_ones_read_closely(suspected, every, stretch):
    """However many are: so many recorded steps after it, once in the stretched interval and once more in advance, none
    within another, and none until training has settled.
    """
    close, whole = close_steps(suspected, every=every, stretch=stretch, steps=700)
    expected, paid, until, earned = [], 0, 0, INTERVALS["wiring"] * stretch
    for step in sorted(suspected):
        if step > SETTLING_STEPS and step >= until and step + earned >= paid:
            paid = max(paid, step) + earned
            expected.append([s for s in range(step + 1, 701) if s % every == 0][:CLOSE_STEPS])
            until = expected[-1][-1]
    assert close == [step for some in expected for step in some]
    assert whole == [step for some in expected for step in some[:WHOLE_STEPS]]


def burst(pace, usual, steps, start=SETTLING_STEPS + 1):
    """Return the recorded steps of so many, where a budget leaves one of ``usual``."""
    out, schedule = [], Schedule()
    for step in range(start, start + steps):
        if pace.begin(step, schedule, spacing=pace.spacing(usual), paused=False, alone=True):
            out.append(step)
        pace.end()
    return out


@pytest.mark.parametrize("usual", [2, 4, 32, 256])
def test_a_suspicion_buys_a_burst_of_records(usual):
    """The next steps are recorded one by one, then ever fewer of them, until it is as before."""
    pace = Pace()
    pace.worker = Judge(pace, set(), [0])
    assert pace.suspect(200, Schedule(), 1.0, spacing=usual)
    found = burst(pace, usual, 40 * usual, 201)
    length = min(BURST, OWED_STEPS // usual)
    assert found[:length] == list(range(201, 201 + length))
    gaps = [after - before for before, after in itertools.pairwise(found)]
    assert gaps[length:] == sorted(gaps[length:])
    assert gaps[-1] == usual
    assert sum(gap < usual for gap in gaps) <= length + (length // SLOWER + 1) * math.log2(usual)
    assert not pace.on_credit


@pytest.mark.parametrize(("later", "again"), [(5, False), (40, True)])
def test_what_begins_in_the_last_part_of_a_burst_has_one_of_its_own(later, again):
    """In its first part everything new is read closely anyway; in advance there is one burst, and no third."""
    pace, schedule = Pace(), Schedule()
    pace.worker = Judge(pace, set(), [0])
    assert pace.suspect(200, schedule, 1.0, spacing=64)
    burst(pace, 64, later, 201)
    assert pace.suspect(200 + later, schedule, 1.0, spacing=64) is again
    burst(pace, 64, 60, 201 + later)
    assert pace.suspect(260 + later, schedule, 1.0, spacing=64) is not again


@pytest.mark.parametrize("usual", [2, 32])
def test_a_request_buys_a_burst_where_steps_are_skipped(usual):
    """What a rule needs in several steps in a row is read in them; without a budget they are read anyway."""
    for spacing in (usual, 1):
        pace = Pace()
        pace.worker = Judge(pace, set(), [0])
        pace.ask(300)
        found = burst(pace, spacing, 20 * usual, 301)
        assert pace.flagged == {}
        begin = next(step for step in found if step >= 300 + DELAY)
        assert (begin, begin + 1, begin + 2) == tuple(found[found.index(begin) :][:3])
        assert pace.on_credit == (spacing > 1 and pace.spacing(spacing) < spacing)


@given(st.lists(st.integers(101, 20_000), max_size=300), st.sampled_from([2, 16, 64]))
def test_bursts_are_earned(suspicions, usual):
    """However often steps are unlike others, what is recorded on credit is bounded by what is recorded in turn."""
    pace = Pace()
    pace.worker = Judge(pace, set(), [0])
    made = 0
    for step in sorted(suspicions):
        pace._look = None
        pace.suspect(step, Schedule(), 1.0, spacing=usual)
        made += pace.on_credit
        assert made <= 2 + step / (EARNED * usual)


def test_no_burst_without_a_budget():
    """Where every step is recorded there is nothing to record besides."""
    pace = Pace()
    pace.worker = Judge(pace, set(), [0])
    assert pace.suspect(200, Schedule(), 1.0)
    assert not pace.on_credit


def test_no_burst_that_the_budget_does_not_pay_for():
    """Where records are very rare a burst would cost more than all steps may for long."""
    pace = Pace()
    pace.worker = Judge(pace, set(), [0])
    assert pace.suspect(200, Schedule(), 1.0, spacing=2 * OWED_STEPS // LEAST_BURST)
    assert not pace.on_credit


@pytest.mark.parametrize(("asked", "bursts"), [(104, False), (190, False), (240, True)])
def test_a_request_soon_after_the_dense_start_buys_no_burst(asked, bursts):
    """What a burst would read, that start has read: it would cost a short run a share of its time."""
    pace = Pace()
    pace.worker = Judge(pace, set(), [0])
    pace.ask(asked)
    found = burst(pace, 4, DELAY + 20, asked + 1)
    assert (len(found) > (DELAY + 20) // 4 + 1) == bursts


@pytest.mark.parametrize("begin", [601, 602, 607, 613])
def test_a_burst_is_read_in_whole_from_its_first_step(begin):
    """Wherever it begins: what is exact is known from three steps in a row, and the first of them dates it."""
    pace, schedule, whole = Pace(), Schedule(), []
    pace.worker = Judge(pace, set(), [0])
    for step in range(101, begin + 10):
        if step == begin:
            pace.suspect(begin - 1, schedule, 1.0, spacing=32)
        if pace.begin(step, schedule, spacing=pace.spacing(32), paused=False, alone=True):
            due = schedule.due(step, **pace.wants, stretch=16.0, spacing=pace.passed(schedule, 32))
            whole += [step] * ({"activations", "blocks", "logits", "wiring"} <= due)
        pace.end()
    assert whole == [begin, begin + 1, begin + 2]


@pytest.mark.parametrize("usual", [4, 32])
def test_a_burst_reads_no_instrument_twice(usual):
    """What falls due is read once for each time its interval is over, in a burst and around it."""
    pace, schedule = Pace(), Schedule()
    pace.worker = Judge(pace, set(), [0])
    read, interval = [], schedule.intervals["blocks"]
    for step in range(101, 1_501):
        if step == 601:
            pace.suspect(600, schedule, 1.0, spacing=usual)
        begun = pace.begin(step, schedule, spacing=pace.spacing(usual), paused=False, alone=True)
        if begun and "blocks" in schedule.due(step, spacing=pace.passed(schedule, usual)):
            read.append(step)
        pace.end()
    assert [step // interval for step in read] == sorted({step // interval for step in read})
    assert {step // interval for step in read} >= set(range(112 // interval + 1, 1_400 // interval)) or usual > interval


def test_on_several_ranks_nothing_is_asked():
    """Where the others would not hear of it, a request is neither heard nor waited for."""
    pace = Pace()
    pace.worker = Judge(pace, set(), [0])
    pace.worker.wait_past = None
    pace.ask(1)
    for step in range(1, 100):
        assert pace.begin(step, Schedule(), paused=False, alone=False)
        assert not pace.dense


def train(model, optimizer, steps, *, spike=()):
    """Train; the loss of some steps is a million times as large."""
    data = torch.Generator().manual_seed(1)
    for step in range(1, steps + 1):
        x = torch.randn(8, 6, generator=data)
        optimizer.zero_grad()
        ((model(x) - x.sum(1, keepdim=True)).square().mean() * (1e6 if step in spike else 1)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def watched(*writers, analyzer=None, replay=None, **settings):
    """Return what a run with two spikes recorded, and its summary."""
    torch.manual_seed(0)
    model, memory = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1)), MemoryWriter()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    exporter = Exporter(model, backends=[memory, *writers], **settings)
    if analyzer is not None:
        exporter.register_analyzer("slow", lambda record: analyzer(exporter, record))
    exporter.watch()
    if replay is not None:
        exporter._loop.pace._is_asked = replay.__contains__
    train(model, optimizer, 260, spike=(120, 170))
    exporter.close()
    return memory.records, exporter.summary()


def asked(records):
    """Return the steps that were read densely because rules asked."""
    return [record.step for record in records if record.value("schedule.asked") is not None]


def bits(records):
    """Return what must be equal in every run: all but clocks and memory."""
    return [
        (
            record.step,
            record.issues,
            record.histograms,
            [
                (r.metric, r.sites, r.values.tobytes(), r.present.tobytes())
                for r in record.readings
                if r.metric != "overhead"
                and not r.metric.startswith(("runtime.", "schedule.", "custom."))
                | (r.metric in {"runtime.backward_passes", "runtime.accumulated_share"})
            ],
        )
        for record in records
    ]


class Sleepy:
    """A writer that sleeps now and then."""

    name = "sleepy"

    def __init__(self):
        self.pause = threading.Event()

    def open(self, run):
        """Begin."""

    def write(self, record):
        """Take a while."""
        if record.step % 7 == 0:
            self.pause.wait(0.01)

    def flush(self):
        """Do nothing."""

    def close(self):
        """Finish."""


def test_a_request_acts_a_fixed_number_of_steps_later():
    """Each issue that opens has everything read so many steps after its record, with a slow writer too."""
    for writers in ((), (Sleepy(),)):
        records, summary = watched(*writers)
        opened = [record.step for record in records if any(issue.open for issue in record.issues)]
        assert opened
        expected = []
        for step in opened:
            if step + DELAY <= 260 and (not expected or step + DELAY - expected[-1] >= AGAIN_STEPS):
                expected.append(step + DELAY)
        assert asked(records) == expected
        assert summary["late_requests"] == 0
        by_step = {record.step: record for record in records}
        assert all(by_step[step].get("parameter.update_norm") is not None for step in expected)
        assert any(step % 25 for step in expected)


def test_synchronous_and_default_records_are_the_same_bits():
    """Neither the mode nor a slow writer shows in records and issues."""
    runs = [watched(*writers, **mode) for mode in ({}, {"synchronous": True}) for writers in ((), (Sleepy(),))]
    first = bits(runs[0][0])
    assert any(issues for _, issues, _, _ in first)
    for records, summary in runs:
        assert summary["late_requests"] == 0
        assert bits(records) == first
        assert asked(records) == asked(runs[0][0])


def test_late_requests_are_counted_and_a_replay_gives_the_same_bits(monkeypatch):
    """A verdict that does not come in time acts later, is counted and recorded; asked for there again, all is equal."""
    monkeypatch.setattr(backlog, "JUDGE_SECONDS", 0.06)
    opened = {record.step for record in watched()[0] if any(issue.open for issue in record.issues)}
    held, pause = min(opened), threading.Event()

    def analyzer(exporter, record):
        while record.step == held and exporter._loop.steps < held + DELAY + 3:
            pause.wait(0.001)

    records, summary = watched(analyzer=analyzer)
    assert summary["late_requests"] > 0
    assert summary["waited"]["steps"] > 0
    late = [record.value("schedule.late_requests") or 0 for record in records]
    assert 0 < late[-1] <= summary["late_requests"]  # one may be seen to be late after the last record
    assert held + DELAY not in asked(records)
    again, _ = watched(replay=set(asked(records)))
    assert bits(again) == bits(records)


@pytest.mark.parametrize("budget", [0.3, 0.03, 0.002])
def test_a_run_with_a_budget_replayed_from_its_own_records_gives_the_same_bits(monkeypatch, budget):
    """Of all clocks nothing matters but the two factors, which each record holds: a run that is given them is equal."""
    records, _ = watched(budget=budget)
    factors = [(r.value("schedule.spacing"), r.value("schedule.stretch")) for r in records]
    factors = [(int(spacing), int(stretch)) for spacing, stretch in factors if spacing and stretch]  # the end has none
    assert len(records) < 260 or budget > 0.1

    class Told(StepClock):
        """Takes its factors from a list, one pair for each record."""

        number = 0
        spacing = property(lambda clock: factors[clock.number][0])
        stretch = property(lambda clock: factors[clock.number][1])

        def lap(self, *args, **settings):
            """Go on to the next pair."""
            out = super().lap(*args, **settings)
            self.number = min(self.number + 1, len(factors) - 1)
            return out

        def _book(self, *_args, **_settings):
            pass

    monkeypatch.setattr(build, "StepClock", Told)
    again, _ = watched(budget=budget)
    known = len(factors)  # the records after which the factors of the next one are known
    assert bits(again)[:known] == bits(records)[:known]


def test_everything_of_a_step_is_done_within_it():
    """With ``synchronous=True`` the record is in every writer when the optimizer's step returns, whatever it costs."""
    model, memory = nn.Linear(6, 1), MemoryWriter()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Exporter(model, backends=[Sleepy(), memory], synchronous=True).watch() as exporter:
        train(model, optimizer, 5)
        # The first step is known to be complete when its optimizer begins the second.
        assert [record.step for record in memory.records] == [1, 2, 3, 4, 5]
        assert exporter.summary()["waiting"] == 0


def test_an_error_inside_does_not_reach_a_synchronous_loop():
    """A writer and an analyzer that raise are set aside; training goes on."""

    class Broken(Sleepy):
        name = "broken"

        def write(self, record):
            raise OSError(28, "No space left on device")

    def analyzer(exporter, record):
        raise KeyError(record.step)

    records, summary = watched(Broken(), analyzer=analyzer, synchronous=True)
    assert len(records) == 260
    assert summary["set_aside"] == ["broken"]


def test_synchronous_keeps_no_budget():
    """Both together are refused; from a configuration it is taken like any other setting."""
    model = nn.Linear(2, 1)
    with pytest.raises(ArgumentError, match=r"synchronous=True .* keeps no budget, got budget=0\.01; leave one"):
        Exporter(model, synchronous=True, budget=0.01)
    with pytest.raises(ArgumentTypeError, match="synchronous must be true or false"):
        Exporter(model, synchronous=1)
    exporter = Exporter(model, backends=[MemoryWriter()], config={"diagnostics": {"synchronous": True}})
    assert exporter.settings.synchronous
    assert exporter.settings.as_json()["synchronous"] is True
    assert exporter.settings.budget is None


def test_doubts_are_settled_where_readings_are_stretched_a_few_in_an_interval():
    """Without a budget the next readings come soon enough; with one a doubt is settled after the delay of a request."""

    def dense(stretch, doubts, steps=600):
        pace, out = Pace(), []
        pace.worker = Judge(pace, {}, [0])
        for step in range(1, steps + 1):
            pace.begin(step, Schedule(), stretch=stretch, paused=False, alone=True)
            out += [step] if pace.dense else []
            assert ("schedule.asked" in pace.end()) == pace.dense
            if step in doubts:
                pace.doubt(step)
        return out, pace.late

    interval = INTERVALS["wiring"]
    assert dense(1, range(600)) == ([], 0)
    assert dense(4, {120}) == ([120 + DELAY], 0)
    for stretch in (2, 4):
        first = [120 + DELAY + AGAIN_STEPS * n for n in range(WHOLE_STEPS)]
        later = [step + stretch * interval * n for n in range(5) for step in first]
        assert dense(stretch, range(120, 600)) == ([step for step in later if step <= 600], 0)


@pytest.mark.parametrize(("stretch", "late"), [(1, 0), (2, 1)])
def test_a_doubt_is_late_only_where_it_could_act(stretch, late):
    """Where intervals are not stretched nobody waits for it."""
    pace = Pace()
    pace.worker = Judge(pace, {}, [0])
    for step in range(1, 101):
        pace.begin(step, Schedule(), stretch=stretch, paused=False, alone=True)
    pace.doubt(50)
    pace.begin(101, Schedule(), stretch=stretch, paused=False, alone=True)
    assert (pace.late, pace.dense) == (late, bool(late))


def test_doubts_that_nobody_settles_take_no_memory():
    """Of several ranks none asks; what the worker says is forgotten."""
    pace = Pace()
    pace.worker = Judge(pace, {}, [0])
    sizes = set()
    for step in range(1, 2000):
        pace.begin(step, Schedule(), stretch=2, paused=False, alone=False)
        pace.doubt(step)
        sizes.add(len(pace._doubts))
    assert max(sizes) <= 2 * DELAY
