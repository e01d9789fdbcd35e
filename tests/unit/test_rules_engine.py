"""The history's bounded windows, and the judge's hysteresis, grouping and failure handling."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradflow_export.records.step_record import IssueType, Reading, Severity, StepRecord
from gradflow_export.rules.base import Finding, Rule
from gradflow_export.rules.evidence import fell_since
from gradflow_export.rules.history import History, RunSeries
from gradflow_export.rules.judge import Judge
from gradflow_export.rules.numerical import Numerical


def record(step, phase="train", **runs):
    return StepRecord(
        step, float(step), tuple(Reading.run(k.replace("__", "."), v) for k, v in runs.items()), phase=phase
    )


@dataclass(frozen=True, kw_only=True)
class Above(Rule):
    """Finds a loss above 1."""

    name: ClassVar[str] = "above"
    needs: ClassVar[tuple[str, ...]] = ("loss",)
    urgent_above: float = math.inf
    kind: IssueType = IssueType.LOSS_SPIKE

    def check(self, record, history):
        value = record.value("loss")
        if value is None or not value > 1:
            return ()
        urgent = value > self.urgent_above
        severity = Severity.HIGH if value > 50 else Severity.LOW
        return (Finding(self.kind, severity, ("",), value, 1.0, f"{value} is high", "lower it", urgent=urgent),)


@dataclass(frozen=True, kw_only=True)
class Since(Rule):
    """Finds in a loss above 1 what began at a step of its own."""

    name: ClassVar[str] = "since"
    needs: ClassVar[tuple[str, ...]] = ("loss",)
    severity: Severity = Severity.LOW
    since: int = 3
    heal: int = 1

    def check(self, record, history):
        found = Finding(
            IssueType.LOSS_SPIKE, self.severity, ("",), 2.0, 1.0, "high", "lower it", since=self.since, urgent=True
        )
        return (found,) if record.value("loss") > (5 if self.severity > Severity.LOW else 1) else ()


@pytest.mark.parametrize(
    ("since", "found"), [(3, [Severity.HIGH]), (2, [Severity.HIGH]), (6, [Severity.HIGH, Severity.LOW])]
)
def test_a_remark_on_what_began_as_a_worse_issue_that_is_over_is_none_beside_it(since, found):
    """Both would be one issue, with the severity and the fix of the remark, and two dates for one event."""
    judge = Judge([Since(severity=Severity.HIGH), Since(since=since)], strict=True)
    for step, loss in enumerate((0.0, 0.0, 9.0, 9.0, 2.0, 2.0), 1):
        judge.check(record(step, loss=loss))
    assert [issue.severity for issue in judge.issues] == found
    assert judge.issues[0].healed_step == 5


@dataclass(frozen=True, kw_only=True)
class Often(Above):
    """Finds what is read now and then."""

    needs: ClassVar[tuple[str, ...]] = ("activation.norm",)
    severity: Severity = Severity.MEDIUM

    def check(self, record, history):
        return (Finding(self.kind, self.severity, ("",), 2.0, 1.0, "high", "lower it"),)


@pytest.mark.parametrize(("severity", "doubts"), [(Severity.MEDIUM, [2, 4]), (Severity.LOW, [])])
def test_a_rule_asks_for_its_next_reading_before_it_is_sure(severity, doubts):
    """A remark is no reason."""
    judge, asked = Judge([Often(severity=severity)]), []
    judge.on_doubt = asked.append
    for step in range(1, 9):
        judge.check(record(step, loss=2.0, **({"activation__norm": 1.0} if step % 2 == 0 else {})))
    assert asked == doubts
    assert [issue.step for issue in judge.issues] == [2]


def test_a_rule_that_judges_every_record_asks_for_none():
    """The next reading comes at the next step."""
    judge, asked = Judge([Above()]), []
    judge.on_doubt = asked.append
    for step in range(1, 9):
        judge.check(record(step, loss=60.0))
    assert (asked, len(judge.issues)) == ([], 1)


@dataclass(frozen=True, kw_only=True)
class Sites(Rule):
    """Finds dead sites, each with a hysteresis of its own."""

    name: ClassVar[str] = "sites"
    needs: ClassVar[tuple[str, ...]] = ("activation.dead_share",)
    by_layer: ClassVar[bool] = True

    def check(self, record, history):
        reading = record.get("activation.dead_share")
        layers = tuple(s for s, v in zip(reading.sites, reading.values, strict=True) if v > 0.5)
        return (Finding(IssueType.DEAD, Severity.HIGH, layers, 1.0, 0.5, "dead", "revive"),) if layers else ()


@dataclass(frozen=True, kw_only=True)
class Broken(Rule):
    """Raises."""

    name: ClassVar[str] = "broken"
    needs: ClassVar[tuple[str, ...]] = ("loss",)

    def check(self, record, history):
        raise ZeroDivisionError


@dataclass(frozen=True, kw_only=True)
class Seldom(Above):
    """Judges readings that are far apart; a loss below 1 refutes it."""

    needs: ClassVar[tuple[str, ...]] = ("gradient.total_norm",)
    remembers: ClassVar[tuple[str, ...]] = ("loss",)

    def refuted(self, issue, history):
        return history.run("loss").last < 1


def dead(step, **values):
    return StepRecord(step, 0.0, (Reading.of("activation.dead_share", tuple(values), tuple(values.values())),))


def feed(judge, values, start=1):
    return [judge.check(record(start + i, loss=v)) for i, v in enumerate(values)]


def test_issue_opens_after_patience_and_remembers_the_first_step():
    """Three evaluations in a row open an issue whose step is the first of them."""
    judge = Judge([Above(patience=3)])
    assert feed(judge, [0, 2, 3]) == [(), (), ()]
    (opened,) = judge.check(record(4, loss=4.0))
    assert (opened.step, opened.value, opened.open) == (2, 4.0, True)


def test_interrupted_evidence_does_not_open():
    """Patience counts consecutive evaluations only."""
    judge = Judge([Above(patience=3)])
    feed(judge, [2, 2, 0, 2, 2, 0, 2, 2])
    assert judge.issues == ()


def test_records_without_the_needed_metric_are_no_evaluation():
    """A record that lacks every needed metric neither confirms nor interrupts."""
    judge = Judge([Above(patience=2)])
    judge.check(record(1, loss=2.0))
    judge.check(record(2, overhead=0.1))
    assert len(judge.check(record(30, loss=2.0))) == 1
    assert judge.issues[0].step == 1


@dataclass(frozen=True, kw_only=True)
class Either(Above):
    """Finds a loss or a norm above 1; there is more than one way of finding it."""

    needs: ClassVar[tuple[str, ...]] = ("loss", "gradient.norm")

    def check(self, record, history):
        values = [record.value(name) for name in self.needs]
        if not any(value is not None and value > 1 for value in values):
            return ()
        return (Finding(self.kind, Severity.HIGH, ("",), 2.0, 1.0, "high", "lower it"),)


HIGH_NORM, NO_NORM, LOW_NORM = {"loss": 0.0, "gradient__norm": 2.0}, {"loss": 0.0}, {"loss": 0.0, "gradient__norm": 0.0}


@pytest.mark.parametrize("between", [0, 1, 7])
def test_a_record_that_lacks_what_a_finding_was_read_in_neither_heals_it_nor_begins_anew(between):
    """What is read at every tenth step would otherwise be forgotten in the nine between, or be over after three."""
    judge, step = Judge([Either()], strict=True), 0

    def take(*kinds):
        nonlocal step
        for kind in kinds:
            step += 1
            judge.check(record(step, **kind))
        return [issue.healed_step is None for issue in judge.issues]

    assert take(LOW_NORM, *[HIGH_NORM, *[NO_NORM] * between] * 2) == []
    assert take(HIGH_NORM, *[NO_NORM] * 9) == [True]
    assert take(*[LOW_NORM, *[NO_NORM] * between] * 2) == [True]
    assert take(LOW_NORM) == [False]


def test_what_is_read_only_where_something_is_found_heals_without_it():
    judge = Judge([Either(patience=1)], strict=True)
    for step, kind in enumerate([HIGH_NORM, HIGH_NORM, *[NO_NORM] * 3], 1):
        judge.check(record(step, **kind))
    assert [issue.healed_step for issue in judge.issues] == [5]


def test_what_is_found_in_records_of_two_kinds_is_over_when_either_shows_it():
    judge = Judge([Either(patience=2)], strict=True)
    for step, kind in enumerate([HIGH_NORM, {"loss": 9.0}, *[NO_NORM] * 3], 1):
        judge.check(record(step, **kind))
    assert [issue.healed_step for issue in judge.issues] == [5]


def test_urgent_evidence_opens_at_once():
    """A finding beyond noise does not wait for patience."""
    judge = Judge([Above(patience=5, urgent_above=10.0)])
    assert len(judge.check(record(1, loss=11.0))) == 1


def test_issue_heals_after_enough_negative_evaluations_and_cools_down():
    """Healing takes ``heal`` evaluations, and within the cooldown the same cause stays silent."""
    judge = Judge([Above(patience=1, heal=2, cooldown=10)])
    events = feed(judge, [2, 0, 0])
    assert [len(e) for e in events] == [1, 0, 1]
    assert events[2][0].healed_step == 3
    assert events[2][0].key == events[0][0].key
    assert feed(judge, [2] * 10, start=4) == [()] * 10
    assert len(judge.check(record(14, loss=2.0))) == 1
    assert [i.open for i in judge.issues] == [False, True]


def test_one_open_issue_per_cause():
    """However long a condition lasts, it is one issue."""
    judge = Judge([Above(patience=1)])
    feed(judge, [2] * 100)
    assert len(judge.issues) == 1


def test_open_issue_keeps_its_worst_state():
    """A worse finding raises the severity of the open issue and leaves its key alone."""
    judge = Judge([Above(patience=1)])
    feed(judge, [2, 99, 3])
    (issue,) = judge.issues
    assert (issue.severity, issue.value, issue.step) == (Severity.HIGH, 99.0, 1)


def test_layers_that_fall_ill_together_share_one_issue():
    """Forty layers with one cause are one issue naming the first."""
    judge = Judge([Sites(patience=2)])
    sites = {f"l{i}": 1.0 for i in range(40)}
    judge.check(dead(1, **sites))
    (issue,) = judge.check(dead(2, **sites))
    assert (issue.layer, len(issue.layers)) == ("l0", 40)


def test_layer_that_falls_ill_later_opens_its_own_issue():
    """A new layer is news; the old one is not reported again."""
    judge = Judge([Sites(patience=2)])
    for step in (1, 2):
        judge.check(dead(step, a=1.0, b=0.0))
    for step in (3, 4):
        judge.check(dead(step, a=1.0, b=1.0))
    assert [(i.layers, i.step) for i in judge.issues] == [(("a",), 1), (("b",), 3)]


def test_group_heals_when_its_last_layer_does():
    """An issue stays open while any of its layers is ill."""
    judge = Judge([Sites(patience=1, heal=1)])
    judge.check(dead(1, a=1.0, b=1.0))
    assert judge.check(dead(2, a=0.0, b=1.0)) == ()
    (healed,) = judge.check(dead(3, a=0.0, b=0.0))
    assert healed.healed_step == 3


def test_failing_rule_is_logged_once_and_set_aside(caplog):
    """A rule that raises is counted once, and the others go on."""
    judge = Judge([Broken(), Above(patience=1)])
    events = feed(judge, [2, 2])
    assert len(events[0]) == 1
    assert dict(judge.failures) == {"broken": 1}
    assert len(caplog.records) == 1


def test_strict_judge_raises():
    """In tests a failing rule shows itself."""
    with pytest.raises(ZeroDivisionError):
        Judge([Broken()], strict=True).check(record(1, loss=1.0))


def test_quiet_rules_hold_their_tongue_while_the_run_is_non_finite():
    """With an open NUMERICAL issue, other rules are not asked."""

    @dataclass(frozen=True, kw_only=True)
    class Loud(Above):
        quiet: ClassVar[bool] = False
        kind: IssueType = IssueType.NUMERICAL

    judge = Judge([Above(patience=1), Loud(patience=1)])
    feed(judge, [2, 2, 2])
    assert [i.issue_type for i in judge.issues] == [IssueType.NUMERICAL]


def test_validation_records_are_left_alone():
    """A high validation loss is nobody's spike."""
    judge = Judge([Above(patience=1)])
    assert judge.check(record(1, phase="val", loss=9.0)) == ()


def test_healed_issues_are_forgotten_beyond_the_limit():
    """The list of issues is bounded; open ones are never dropped."""
    judge = Judge([Above(patience=1, heal=1, cooldown=0)], keep=5)
    feed(judge, [2, 0] * 50 + [2])
    assert len(judge.issues) == 6
    assert judge.issues[-1].open


def test_run_series_keeps_bounded_windows_and_true_extremes():
    """A long series keeps its window, a thinned whole, its first value and its extremes."""
    series = RunSeries(window=16, thinned=32)
    for step in range(1, 10_001):
        series.add(step, float(step))
    assert series.values.tolist() == list(range(9985, 10_001))
    steps, _values = series.whole()
    assert 16 <= len(steps) < 32
    assert np.all(np.diff(steps) == np.diff(steps)[0])
    assert (series.first, series.low, series.high, series.count) == (1.0, 1.0, 10_000.0, 10_000)


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True, width=32), max_size=200), st.integers(1, 20))
def test_run_series_window_equals_the_tail_of_the_list(values, window):
    """For any series, the window is the end of the list."""
    series = RunSeries(window=window)
    for step, value in enumerate(values):
        series.add(step, value)
    np.testing.assert_array_equal(series.values, np.array(values[-window:], dtype=np.float64))


@given(
    st.lists(st.dictionaries(st.sampled_from("abcd"), st.none() | st.floats(-9, 9, width=32), min_size=2), max_size=40)
)
def test_site_series_agrees_with_a_list_of_dictionaries(rows):
    """Sites that come and go keep their columns; what was not read is missing."""
    history = History({"block.gain"}, site_window=8)
    for step, row in enumerate(rows):
        history.add(StepRecord(step, 0.0, (Reading.of("block.gain", tuple(row), tuple(row.values())),)))
    series = history.at_sites("block.gain")
    for column, site in enumerate(series.sites):
        for index, row in enumerate(rows[-8:]):
            wanted = row.get(site)
            assert bool(series.present[index, column]) == (wanted is not None)
            assert wanted is None or series.values[index, column] == np.float32(wanted)


def test_history_is_bounded_in_steps_and_sites():
    """Neither many steps nor ever new site names make the arrays grow without end."""
    history = History({"block.gain"}, site_window=4)
    series = history.at_sites("block.gain")
    series._limit = 10
    for step in range(100):
        names = (f"s{step}", f"t{step}")
        history.add(StepRecord(step, 0.0, (Reading.of("block.gain", names, (1.0, 2.0)),)))
    assert len(series.sites) <= 10
    assert series.values.shape[0] <= 4


def test_history_ignores_what_no_rule_remembers():
    """Metrics nobody asked for leave no trace."""
    history = History({"loss"})
    history.add(record(1, overhead=1.0))
    assert history.run("overhead").count == 0


def test_nothing_heals_because_the_run_is_no_longer_finite():
    """What a rule finds no more in losses that are NaN is as it was; it heals in finite ones."""

    @dataclass(frozen=True, kw_only=True)
    class Spoken(Above):
        """As above, and asked while the run is not finite."""

        quiet: ClassVar[bool] = False

    judge = Judge([Spoken(patience=1, heal=3), Numerical()])
    feed(judge, [0, 5, *[math.nan] * 20])
    assert [(issue.issue_type, issue.open) for issue in judge.issues] == [
        (IssueType.LOSS_SPIKE, True), (IssueType.NUMERICAL, True),
    ]  # fmt: skip
    feed(judge, [0] * 8, start=23)
    assert not any(issue.open for issue in judge.issues)


def test_an_issue_that_is_refuted_heals_though_its_rule_is_not_asked():
    """Where what it judges is read rarely, the next loss may show that it is over; what opens is not closed at once."""
    judge = Judge([Seldom(patience=1, heal=9)], strict=True)
    (issue,) = judge.check(record(1, loss=2.0, gradient__total_norm=1.0))
    assert judge.check(record(2, loss=2.0)) == ()
    (healed,) = judge.check(record(3, loss=0.5))
    assert (healed.key, healed.healed_step) == (issue.key, 3)


@pytest.mark.parametrize("every", [1, 4, 10])
def test_a_run_that_learns_later_is_no_longer_one_that_does_not(every):
    """However rarely the loss is read, its fall since the issue opened is seen; noise alone is none."""
    draw = np.random.default_rng(0)
    for falls in (True, False):
        history, healed = History(("loss",)), []
        for step in range(1, 1001, every):
            level = 3.0 - 0.002 * max(step - 150, 0) * falls
            history.add(record(step, loss=level + draw.normal(scale=0.4)))
            healed += [fell_since(history, 150)] if step > 150 else []
        assert any(healed) == falls


@dataclass(frozen=True, kw_only=True)
class Remembering(Above):
    """Remembers the loss, as many rules do."""

    remembers: ClassVar[tuple[str, ...]] = ("loss",)


@pytest.mark.parametrize(("steps", "since", "before"), [
    ([*range(1, 9), 9, 10, 11], 9, 0), ([*range(1, 9), 24, 25, 40], 24, 15), ([1, 10, 20, 30, 40, 50, 60, 70, 80, 90, 91], 80, 9),
])  # fmt: skip
def test_an_issue_knows_how_many_steps_before_it_were_not_recorded(steps, since, before):
    """It may have begun in any of them; without a gap in none."""
    judge = Judge([Remembering()], strict=True)
    for step in steps:
        judge.check(record(step, loss=3.0 if step >= since else 0.5))
    (issue,) = judge.issues
    assert (issue.step, issue.before) == (since, before)


def test_what_holds_from_the_first_record_on_has_nothing_before_it():
    """Also where training was resumed: what another session read is not known here."""
    judge = Judge([Remembering()], strict=True)
    for step in (301, 302, 303):
        judge.check(record(step, loss=3.0))
    (issue,) = judge.issues
    assert (issue.step, issue.before) == (301, 0)


def test_a_rule_is_named_after_its_class_unless_it_has_a_name():
    """The name is written once; a rule that extends another has one of its own."""

    class TooManyWords(Above):
        pass

    class Other(Above):
        name = "of its own"

    assert (TooManyWords.name, Other.name) == ("too-many-words", "of its own")


@dataclass(frozen=True, kw_only=True)
class Hopeful(Rule):
    """Finds a loss above 1, a remark while it may still fall."""

    name: ClassVar[str] = "hopeful"
    needs: ClassVar[tuple[str, ...]] = ("loss",)
    final: ClassVar[bool] = True
    follows_from: tuple[str, ...] = ()
    worst: Severity = Severity.MEDIUM

    def check(self, record, history):
        severity = self.worst if history.ended else Severity.LOW
        found = Finding(
            IssueType.NOT_LEARNING, severity, ("",), 2.0, 1.0, "high", "wait", follows_from=self.follows_from,
            urgent=history.ended,
        )  # fmt: skip
        return (found,) if record.value("loss") > 1 else ()


def test_what_was_spared_because_it_might_come_is_judged_at_the_end():
    """What has opened becomes worse, and what is urgent at the end needs no patience; other rules are not asked."""
    for records, patience in ((4, 3), (1, 3), (1, 1)):
        judge = Judge([Hopeful(patience=patience), Above(patience=9)], strict=True)
        for step in range(1, records + 1):
            judge.check(record(step, loss=2.0))
        assert {issue.severity for issue in judge.issues} <= {Severity.LOW}
        (told,) = judge.end()
        assert (told.issue_type, told.severity) == (IssueType.NOT_LEARNING, Severity.MEDIUM)
        assert judge.issues == (told,)
        assert judge.end() == ()


def test_the_end_says_nothing_of_a_run_that_came_down():
    judge = Judge([Hopeful(patience=1)], strict=True)
    for step, loss in enumerate([2.0, 2.0, 0.5, 0.5, 0.5, 0.5], 1):
        judge.check(record(step, loss=loss))
    assert judge.end() == ()
    assert [issue.severity for issue in judge.issues] == [Severity.LOW]


def test_the_end_is_no_time_for_remarks():
    judge = Judge([Hopeful(patience=2, worst=Severity.LOW)], strict=True)
    judge.check(record(1, loss=2.0))
    assert judge.end() == ()


def test_what_is_explained_becomes_no_worse():
    judge = Judge([Hopeful(patience=1, follows_from=(IssueType.LOSS_SPIKE,)), Above(patience=3)], strict=True)
    for step in range(1, 6):
        judge.check(record(step, loss=60.0))
    assert judge.end() == ()
    assert {issue.issue_type: issue.severity for issue in judge.issues} == {
        IssueType.NOT_LEARNING: Severity.LOW,
        IssueType.LOSS_SPIKE: Severity.HIGH,
    }
