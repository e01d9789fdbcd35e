"""Which issue explains which: one graph of types, and what people read names each cause once."""

import io
import itertools
from dataclasses import replace

import pytest

from gradflow_export.cli.checkup import findings
from gradflow_export.records.causes import (
    BEGINS,
    ENDS_IN,
    EXPLAINS,
    STANDING,
    Where,
    groups,
    layers_explained_by,
    with_causes,
)
from gradflow_export.records.ignored import ignored
from gradflow_export.records.step_record import Issue, IssueType, Severity, StepRecord, issue_from_json, issue_to_json
from gradflow_export.report.summary import RunSummary
from gradflow_export.writers.console import ConsoleWriter
from gradflow_export.writers.wandb.incidents import Incidents


def issue(kind, layer="block", step=10, severity=Severity.HIGH, **more):
    return Issue(kind, severity, layer, step, 1.0, 0.5, f"{kind} was seen.", "mend it.", **more)


def reachable(kind):
    found, waiting = set(), [kind]
    while waiting:
        last = waiting.pop()
        for other in {*EXPLAINS[last], *BEGINS.get(last, ())}:
            if other not in found:
                found.add(other)
                waiting.append(other)
    return found


def test_every_type_says_what_it_explains_and_none_explains_itself():
    """All types stand in the table, and no chain of explanations comes back."""
    assert set(EXPLAINS) == set(IssueType) >= STANDING
    assert not [kind for kind in IssueType if kind in reachable(kind)]


@pytest.mark.parametrize("one", IssueType, ids=lambda kind: kind.value)
def test_of_two_issues_at_once_one_is_a_consequence_where_the_table_says_so(one):
    """Of all pairs in either order: both stay in the list, the consequence names its cause, and people read one."""
    for other in IssueType:
        check_pair(one, other)


def check_pair(one, other):
    pair = issue(one), issue(other, step=11 if one is other else 10)
    for order in (pair, pair[::-1]):
        found = {each.issue_type: each.explained_by for each in with_causes(order)}
        assert len(with_causes(order)) == 2
        if other in EXPLAINS[one] or other in BEGINS.get(one, ()):
            assert found == {one: None, other: pair[0].key}
            assert [(group.head.issue_type, len(group.consequences)) for group in groups(order)] == [(one, 1)]
        elif one not in EXPLAINS[other] and one not in BEGINS.get(other, ()):
            assert set(found.values()) == {None}
            assert len(groups(order)) == 2


@pytest.mark.parametrize(("cause", "effect", "explained"), [
    ({"layer": "a"}, {"layer": "a.weight"}, True),
    ({"layer": "a.weight"}, {"layer": "a"}, True),
    ({"layer": ""}, {"layer": "a"}, True),
    ({"layer": "a"}, {"layer": ""}, False),
    ({"layer": "a"}, {"layer": "ab.weight"}, False),
    ({"layer": "a"}, {"layer": "a", "layers": ("a", "b")}, False),
    ({"step": 90}, {"step": 5}, True),
    ({"healed_step": 20}, {}, False),
    ({"healed_step": 20}, {"healed_step": 30}, True),
    ({"severity": Severity.LOW}, {}, False),
    ({"severity": Severity.LOW}, {"severity": Severity.LOW}, True),
    ({"severity": Severity.MEDIUM}, {"severity": Severity.CRITICAL}, True),
])  # fmt: skip
def test_layers_times_and_severities_must_fit(cause, effect, explained):
    """NOT_TRAINING explains STAGNATION of the same parameters, while it is there."""
    assert EXPLAINS[IssueType.NOT_TRAINING][IssueType.STAGNATION] is Where.LAYERS
    first, second = issue(IssueType.NOT_TRAINING, **cause), issue(IssueType.STAGNATION, **effect)
    assert with_causes([first, second])[1].explained_by == (first.key if explained else None)


@pytest.mark.parametrize(
    ("cause", "effect", "explained"), [(10, 10, True), (10, 9, True), (10, 8, False), (10, 50, True)]
)
def test_an_event_explains_what_begins_with_it_or_later(cause, effect, explained):
    """NaN in a step explains the spike of the loss in it, and not one that was there long before."""
    first, second = issue(IssueType.NUMERICAL, step=cause), issue(IssueType.LOSS_SPIKE, layer="", step=effect)
    assert (with_causes([first, second])[1].explained_by is not None) is explained


@pytest.mark.parametrize(("kind", "end"), [(kind, end) for kind, ends in ENDS_IN.items() for end in sorted(ends)])
@pytest.mark.parametrize(("step", "severity", "explained"), [
    (5, Severity.CRITICAL, True), (9, Severity.HIGH, True), (10, Severity.CRITICAL, False), (5, Severity.MEDIUM, False),
])  # fmt: skip
def test_growth_explains_what_it_ends_in_later(kind, end, step, severity, explained):
    """What began in earlier steps is the cause, in any layer and order, and is not explained by its end."""
    one, other = issue(kind, "a", step, severity), issue(end, "b", 10)
    for order in ((one, other), (other, one)):
        found = {each.issue_type: each.explained_by for each in with_causes(order)}
        assert (found[end] == one.key) is explained
        assert found[kind] is None or not explained


@pytest.mark.parametrize(("kind", "effect"), [(kind, each) for kind, every in BEGINS.items() for each in sorted(every)])
@pytest.mark.parametrize(("step", "before", "later", "unread", "explained"), [
    (300, 0, 300, 0, True), (308, 7, 307, 0, True), (311, 0, 311, 22, True), (350, 49, 307, 0, True),
    (312, 0, 320, 31, True), (320, 0, 312, 0, False), (15, 0, 300, 0, False), (350, 20, 307, 0, False),
])  # fmt: skip
def test_a_loss_that_leaps_as_units_die_is_explained_by_them(kind, effect, step, before, later, unread, explained):
    """As long as both may have begun in one step by what was read; one that leaps long after it is other news."""
    pair = issue(kind, step=step, before=before), issue(effect, "", step=later, before=unread)
    for order in (pair, pair[::-1]):
        found = {each.issue_type: each.explained_by for each in with_causes(order)}
        assert found[effect] == (pair[0].key if explained else None)
        if explained:
            assert found[kind] is None
        elif kind in ENDS_IN.get(effect, ()) and later < step:
            assert found[kind] == pair[1].key


@pytest.mark.parametrize(("before", "explained"), [(0, False), (1, True), (62, True)])
def test_a_rate_explains_units_that_died_in_the_steps_that_were_not_read(before, explained):
    """Both are first seen in one record, and the rate may have been so high in the steps before it."""
    rate, dead = (
        issue(IssueType.LEARNING_RATE, "", step=319, before=before),
        issue(IssueType.DEAD, step=319, before=110),
    )
    assert with_causes([dead, rate])[0].explained_by == (rate.key if explained else None)


def test_no_issue_explains_itself_whatever_the_steps():
    """Of all steps near each other of five types that may lead round, one is the head and each group has one."""
    kinds = (IssueType.EXPLODING, IssueType.NUMERICAL, IssueType.DIVERGING, IssueType.DEAD, IssueType.LOSS_SPIKE)
    for steps in itertools.product((8, 9, 10), repeat=len(kinds)):
        found = with_causes([issue(kind, "", step) for kind, step in zip(kinds, steps, strict=True)])
        heads = {each.key for each in found if each.explained_by is None}
        assert heads
        assert {each.explained_by for each in found} - {None} <= heads


@pytest.mark.parametrize(("cause", "effect"), [
    (IssueType.WRONG_LOSS, IssueType.EXPLODING), (IssueType.BAD_INIT, IssueType.DEAD),
])  # fmt: skip
def test_a_sign_and_zeros_explain_what_they_lead_to_in_other_layers(cause, effect):
    """A loss that is maximised explodes; of weights that are 0 the units behind them are dead."""
    found = with_causes([issue(effect, "2", 1, Severity.CRITICAL), issue(cause, "loss", 35)])
    assert found[0].explained_by == found[1].key


def test_a_chain_of_causes_ends_at_the_first_one():
    """BAD_INIT explains DEAD units, which explain the VANISHING gradient, which explains STAGNATION."""
    kinds = (IssueType.STAGNATION, IssueType.VANISHING, IssueType.DEAD, IssueType.BAD_INIT)
    found = with_causes([issue(kind) for kind in kinds])
    assert {each.explained_by for each in found[:-1]} == {found[-1].key}
    (group,) = groups(found)
    assert [each.issue_type for each in group.consequences] == list(kinds[:-1])


def test_a_cause_is_as_severe_as_what_it_explains_while_that_lasts():
    """A weight decay that is MEDIUM by itself is CRITICAL where the gradient vanishes for it, until it no longer does."""
    cause, effect = issue(IssueType.LEARNING_RATE), issue(IssueType.VANISHING, severity=Severity.CRITICAL)
    cause = replace(cause, severity=Severity.MEDIUM)
    assert [group.head.severity for group in groups([cause, effect])] == [Severity.CRITICAL]
    assert [group.head.severity for group in groups([cause, replace(effect, healed_step=9)])] == [Severity.MEDIUM]


@pytest.mark.parametrize("order", [1, -1])
def test_of_causes_as_bad_the_one_in_the_same_layers_explains(order):
    """Weights that rest because no optimizer has them rest for that, though the loss is wrong as well; worse counts more."""
    effect = issue(IssueType.STAGNATION, "a")
    near, far = issue(IssueType.NOT_TRAINING, "a"), issue(IssueType.WRONG_LOSS, "loss", step=1)
    assert with_causes([effect, *[near, far][::order]])[0].explained_by == near.key
    worse = replace(far, severity=Severity.CRITICAL)
    assert with_causes([effect, *[near, worse][::order]])[0].explained_by == worse.key


def test_what_explains_an_issue_survives_json_and_old_logs_have_none():
    """The key of the cause is stored as a list."""
    whole = issue(IssueType.STAGNATION, explained_by=("DEAD", "a", 3))
    assert issue_from_json(issue_to_json(whole)) == whole
    old = {key: value for key, value in issue_to_json(whole).items() if key != "explained_by"}
    assert issue_from_json(old).explained_by is None


CAUSE, EFFECT = issue(IssueType.NOT_TRAINING, "a.weight"), issue(IssueType.STAGNATION, "a.weight", 1, Severity.CRITICAL)


@pytest.mark.parametrize("order", [(CAUSE, EFFECT), (EFFECT, CAUSE)])
def test_a_report_lists_the_consequence_within_its_cause(order):
    """One problem, of the worse severity's rank; programs read both."""
    summary = RunSummary()
    summary.add(StepRecord(1, 0.0, issues=order))
    text = summary.as_text("run")
    assert "1 problem: NOT_TRAINING in a.weight" in summary.verdict
    assert text.count("[HIGH]") + text.count("[CRITICAL]") == 1
    assert "also     STAGNATION in a.weight" in text
    found = {item["issue_type"]: item["explained_by"] for item in summary.as_dict()["issues"]}
    assert found == {"NOT_TRAINING": None, "STAGNATION": ["NOT_TRAINING", "a.weight", 10]}
    assert findings(order, 5).startswith("5 steps: 1 finding.")


def test_a_consequence_raises_no_alert_of_its_own():
    """Neither together with its cause nor long after it; what heals beside it may be told."""
    incidents = Incidents(cooldown=0.0, most=10)
    assert incidents.add([CAUSE], 0.0) == []
    (alert,) = [alert for _ in range(12) for alert in incidents.add([], 1.0)]
    assert "NOT_TRAINING" in alert.title
    assert [alert for count in range(20) for alert in incidents.add([EFFECT] if count == 0 else [], 2.0)] == []
    other = issue(IssueType.DESYNC, "b")
    (second,) = [alert for count in range(20) for alert in incidents.add([other] if count == 0 else [], 3.0)]
    assert "DESYNC" in second.title


def test_an_alert_begins_with_the_cause_though_its_consequence_came_first():
    """Both open within a few records of each other."""
    incidents = Incidents(cooldown=0.0, most=10)
    told = [alert for given in ([EFFECT], [CAUSE], *[[]] * 12) for alert in incidents.add(given, 0.0)]
    assert [alert.title for alert in told] == ["gradflow: NOT_TRAINING in a.weight"]
    assert "Followed by: STAGNATION" in told[0].text


def test_the_console_prints_a_consequence_in_one_short_line():
    """Its cause is printed in full."""
    out = io.StringIO()
    writer = ConsoleWriter(out, every=1e9)
    writer.write(StepRecord(1, 0.0, issues=(CAUSE,)))
    writer.write(StepRecord(2, 0.0, issues=(EFFECT,)))
    writer.write(StepRecord(3, 0.0, issues=(replace(EFFECT, healed_step=3),)))
    lines = out.getvalue().splitlines()
    assert "also seen: STAGNATION in a.weight since step 1, which NOT_TRAINING explains" in lines[-2]
    assert lines[-1].startswith("gradflow: healed [CRITICAL] STAGNATION")


def test_a_cause_that_was_not_grave_is_printed_when_what_it_explains_is():
    """A consequence alone would name a cause that nobody was told of."""
    out = io.StringIO()
    writer = ConsoleWriter(out, every=1e9, verbose=1)
    writer.write(StepRecord(1, 0.0, issues=(replace(CAUSE, severity=Severity.MEDIUM),)))
    assert not out.getvalue()
    writer.write(StepRecord(2, 0.0, issues=(EFFECT,)))
    first, second = out.getvalue().splitlines()
    assert first.startswith("gradflow: [CRITICAL] NOT_TRAINING in a.weight")
    assert "also seen: STAGNATION" in second


def test_what_an_ignored_issue_explains_in_its_layers_is_ignored_with_it():
    """To say that a layer rests on purpose is to say so of its updates as well."""
    meant = ignored([("NOT_TRAINING", "pooler")])
    assert IssueType.STAGNATION in layers_explained_by(IssueType.NOT_TRAINING)
    assert meant.covers(IssueType.STAGNATION, "pooler.weight")
    assert not meant.covers(IssueType.STAGNATION, "head.weight")
    assert not meant.covers(IssueType.DEAD, "pooler")
