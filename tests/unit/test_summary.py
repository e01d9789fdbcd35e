"""The verdict in words."""

import math

import numpy as np
import pytest

from gradflow_export.records.evidence import Evidence
from gradflow_export.records.run_info import info_from_json, info_to_json
from gradflow_export.records.step_record import Issue, IssueType, Reading, RunInfo, Severity, StepRecord
from gradflow_export.report.summary import HEALED, RunSummary


def summed(losses, issues=()):
    """Return a summary of a run with these losses, and these issues at its last step."""
    summary = RunSummary()
    for step, loss in enumerate(losses, start=1):
        found = tuple(issues) if step == len(losses) else ()
        summary.add(StepRecord(step, float(step), (Reading.run("loss", loss),), issues=found))
    return summary


def issue(severity, layer, healed=None):
    """Return an issue since step 3."""
    return Issue(IssueType.DEAD, severity, layer, 3, 1.0, 0.9, "seen", "do", healed_step=healed)


@pytest.mark.parametrize("late", [[1.03], [1.1, 1.02]])
def test_a_fall_that_the_newest_reading_contradicts_is_not_healthy(late):
    """Where readings lie apart, one or two stand for many steps, and the median for those of long ago."""
    fall = [1.1, 1.0, 1.05, 1.2, 1.06, 0.12, 0.03, 0.15, 0.06, 0.07, 0.02, 0.11, 0.06, 0.05, *late]
    apart = RunSummary()
    for place, loss in enumerate(fall):
        apart.add(StepRecord(64 * place + 64, 1.0, (Reading.run("loss", loss),)))
    last = 64 * len(fall)
    assert apart.judged.tone == "warn"
    assert apart.judged.headline == "the loss fell, but was far higher when last read"
    assert f" (medians of 5), then {late[-1]:.4g} at step {last}; no open problem in" in apart.verdict
    assert summed(fall).verdict.startswith("healthy: "), "of adjacent steps one batch may be odd"
    calm = RunSummary()
    for place, loss in enumerate([*fall[: -len(late)], 0.18]):
        calm.add(StepRecord(64 * place + 64, 1.0, (Reading.run("loss", loss),)))
    assert calm.verdict.startswith("healthy: "), "a reading within the scatter"


def test_one_reading_far_above_a_loss_that_is_next_to_nothing_takes_back_nothing():
    """A spike of a thousandth of the first loss leaves the fall what it was."""
    summary = RunSummary()
    for place, loss in enumerate([1.0] * 6 + [1e-6, 2e-6] * 6 + [1e-3]):
        summary.add(StepRecord(64 * place + 64, 1.0, (Reading.run("loss", loss),)))
    assert summary.verdict.startswith("healthy: ")


def test_a_falling_loss_is_told_in_the_verdict():
    """Medians of either end are named, so that one odd batch does not matter."""
    verdict = summed([2.0, 2.0, 9.0, 2.0, 2.0, 1.5, 1.0, 0.5, 0.5, 0.5, 7.0, 0.5]).verdict
    assert verdict == "healthy: no open problem in 12 records; the loss fell from 2 to 0.5 (medians of 5)"


def test_a_loss_that_does_not_fall_is_told_too():
    """No open problem is not the same as learning, and such a run is not called healthy."""
    assert (
        summed([1.0] * 12).verdict
        == "the loss has not fallen: from 1 to 1 (medians of 5); no open problem in 12 records"
    )
    slow = [1.384] * 6 + [1.379] * 6
    assert (
        summed(slow).verdict
        == "the loss hardly fell: from 1.384 to 1.379 (medians of 5); no open problem in 12 records"
    )
    assert summed([-loss for loss in reversed(slow)]).verdict.startswith("healthy"), "relative to what, below 0?"


def test_a_loss_that_ends_without_a_number_is_not_healthy():
    """Although no rule has reported it yet, and although the losses before it fell."""
    verdict = summed([2.0] * 6 + [1.0] * 6 + [math.nan]).judged
    assert (verdict.tone, verdict.headline, verdict.detail) == (
        "bad", "the loss is NaN", "no open problem in 13 records",
    )  # fmt: skip
    assert summed([2.0] * 6 + [1.0] * 6 + [math.nan, 1.0]).judged.headline == "healthy"


def test_a_cause_comes_before_what_it_explains():
    """The first issue is the one to mend, although what it explains is more severe."""
    cause = Issue(IssueType.LEARNING_RATE, Severity.MEDIUM, "", 3, 1.0, 0.9, "seen", "do")
    resting = [Issue(IssueType.STAGNATION, Severity.HIGH, layer, 8, 1.0, 0.9, "seen", "do") for layer in "ab"]
    other, over = issue(Severity.MEDIUM, "c"), issue(Severity.CRITICAL, "d", healed=5)
    found = summed([1.0] * 12, [over, *resting, other, cause]).issues
    assert [each.layer for each in found] == ["", "a", "b", "c", "d"]
    assert found[0].severity is Severity.MEDIUM, "as it was reported"


def test_the_worst_open_problem_comes_first():
    """Healed issues are not counted as problems."""
    found = [issue(Severity.LOW, "a"), issue(Severity.HIGH, "b"), issue(Severity.CRITICAL, "c", healed=5)]
    assert summed([1.0] * 6, found).verdict == "2 problems: DEAD in b since step 3; DEAD in a since step 3"
    assert "(1 healed)" in summed([1.0] * 6, found[2:]).verdict
    resting = Issue(IssueType.STAGNATION, Severity.LOW, "c", 3, 1.0, 0.9, "seen", "do", healed_step=5)
    stuck = Issue(IssueType.NOT_TRAINING, Severity.HIGH, "c", 3, 1.0, 0.9, "seen", "do", healed_step=5)
    assert "(1 healed)" in summed([1.0] * 6, [resting, stuck]).verdict, "what another explains is none of its own"


def test_what_is_low_at_most_is_a_possible_problem():
    """LOW says that the evidence is weak; one that is sure makes the whole a problem."""
    low, sure = issue(Severity.LOW, "a"), issue(Severity.MEDIUM, "b")
    verdict = summed([1.0] * 6, [low]).judged
    assert (verdict.tone, verdict.headline) == ("warn", "1 possible problem")
    assert summed([1.0] * 6, [low, sure]).judged.headline == "2 problems"


def test_issues_that_come_and_go_are_forgotten_in_the_end():
    """Memory does not grow with them: the newest healed ones and all open ones stay, and all are counted."""
    summary = RunSummary()
    summary.add(StepRecord(1, 1.0, issues=(issue(Severity.LOW, "open"),)))
    for step in range(2, HEALED + 7):
        healed = issue(Severity.HIGH, f"layer {step}", healed=step)
        summary.add(StepRecord(step, 1.0, (Reading.run("loss", 1.0),), issues=(healed,)))
    assert (len(summary.issues), summary.left_out) == (HEALED + 1, 5)
    assert summary.issues[0].layer == "open"
    assert {one.layer for one in summary.issues}.isdisjoint(f"layer {step}" for step in range(2, 7))
    assert "  5 older healed issues are not listed" in summary.as_text("run").splitlines()
    assert summary.as_dict()["issues_left_out"] == 5
    summary.add(StepRecord(HEALED + 7, 1.0, issues=(issue(Severity.LOW, "open", healed=9),)))
    assert f"({HEALED + 6} healed)" in summary.verdict


def test_the_share_of_the_run_counts_steps_without_a_record_too():
    """A dense start of ten steps at a half and ninety steps of which few were recorded are not told as a half."""
    summary = RunSummary()
    shares = {**dict.fromkeys(range(1, 11), 0.5), 55: 0.02, 100: 0.02}
    for step, share in shares.items():
        readings = (Reading.run("overhead", share), Reading.run("runtime.step_time", 0.25))
        summary.add(StepRecord(step, float(step), readings))
    assert abs(summary.as_dict()["overhead"] - (10 * 0.5 + 90 * 0.02) / 100) < 1e-6
    assert "overhead 6.8% of the time of all steps" in summary.as_text("run")
    assert summed([1.0] * 12).as_dict()["overhead"] is None


def test_the_last_loss_of_the_table_is_the_last_that_was_read():
    """As of every other metric; the verdict compares medians. A loss that ended in NaN is shown as it is."""
    summary = RunSummary()
    for step in range(1, 41):
        summary.add(StepRecord(step, float(step), (Reading.run("loss", 3.0 / step + (0.5 if step == 40 else 0.0)),)))
    told = summary.as_dict()
    last = 3.0 / 40 + 0.5
    assert told["headline"]["loss"]["last"] == pytest.approx(last)
    assert told["loss"]["last"] == pytest.approx(3.0 / 37)
    assert f"to {told['loss']['last']:.4g}" in summary.verdict
    (row,) = [line for line in summary.as_text("run").splitlines() if line.split()[:1] == ["loss"]]
    assert float(row.split()[1]) == pytest.approx(last, rel=1e-3)
    summary.add(StepRecord(41, 41.0, (Reading.run("loss", math.nan),)))
    assert summary.as_dict()["headline"]["loss"]["last"] == "NaN"


def test_readings_of_another_step_say_so():
    """A norm that is read now and then does not stand beside that of the last step as if of one."""
    summary = RunSummary()
    for step in range(1, 21):
        every = [Reading.run("gradient.total_norm", 1.0), Reading.run("loss", 1.0)]
        summary.add(StepRecord(step, 0.0, (*every, *[Reading.run("gradient.norm_before_clip", 2.0)] * (step == 15))))
    lines = {line.split()[0]: line for line in summary.as_text("run").splitlines()}
    assert lines["gradient.norm_before_clip"].endswith("(read at 1 of 20 steps, last read at step 15)")
    assert "read at" not in lines["gradient.total_norm"] + lines["loss"]
    steps = {name: row["last_step"] for name, row in summary.as_dict()["headline"].items()}
    assert steps == {"loss": 20, "gradient.total_norm": 20, "gradient.norm_before_clip": 15}


def test_three_problems_are_named_and_the_others_counted():
    """Each with its layer and its own first step."""
    found = [issue(Severity.HIGH, layer) for layer in "abcde"]
    named = "; ".join(f"DEAD in {layer} since step 3" for layer in "abc")
    assert summed([1.0] * 6, found).verdict == f"5 problems: {named}; and 2 more"


def test_a_run_without_a_loss_is_not_called_healthy_without_a_word():
    """It is said that none was seen."""
    summary = RunSummary()
    summary.add(StepRecord(1, 1.0))
    assert summary.verdict == "no verdict: neither loss nor gradients nor updates were read in 1 record"
    summary.add(StepRecord(2, 1.0, (Reading.run("gradient.total_norm", 1.0),)))
    assert summary.verdict == "healthy: no open problem in 2 records; no loss was recorded"


def test_what_an_earlier_session_left_open_is_no_problem_of_this_one():
    """It is named as such, in the report of the folder and in that of the later session alone; reported again, it is one issue."""
    early = issue(Severity.HIGH, "a")
    report, later = summed([1.0] * 12, [early]), summed([4.0] * 6 + [1.0] * 6)
    report.resumed = (13,)
    for step, loss in enumerate([4.0] * 6 + [1.0] * 6, start=13):
        report.add(StepRecord(step, float(step), (Reading.run("loss", loss),)))
    later.earlier = (early,)
    named = "1 problem left open by an earlier session: DEAD in a since step 3; no other open problem in"
    assert report.verdict == f"{named} 24 records; the loss has not fallen from 1 to 1 (medians of 5)"
    assert later.verdict == f"{named} 12 records; the loss fell from 4 to 1 (medians of 5)"
    again = Issue(**{**vars(early), "step": 25})
    for summary in (report, later):
        summary.add(StepRecord(25, 25.0, issues=(again,)))
    assert report.verdict == "1 problem: DEAD in a since step 3"
    assert later.verdict == "1 problem: DEAD in a since step 25"
    healed = Issue(**{**vars(again), "healed_step": 26})
    report.add(StepRecord(26, 26.0, issues=(healed,)))
    assert [(each.step, each.open) for each in report.issues] == [(3, False)]


def test_two_open_issues_of_one_session_remain_two():
    """Of the same type and layer, as a rule and a fixed threshold find them; one heals, and the other does not."""
    one, other = issue(Severity.HIGH, "a"), Issue(**{**vars(issue(Severity.HIGH, "a")), "step": 5})
    summary = summed([1.0] * 4, [one])
    summary.resumed = (2,)
    summary.add(StepRecord(5, 5.0, issues=(other,)))
    assert [(each.step, each.open) for each in summary.issues] == [(3, True), (5, True)]
    summary.add(StepRecord(6, 6.0, issues=(Issue(**{**vars(one), "healed_step": 6}),)))
    assert {each.step: each.open for each in summary.issues} == {3: False, 5: True}


@pytest.mark.parametrize(("losses", "told"), [
    ([(1.0, 2.0)] * 12, False), ([(1.0, 1.0)] * 12, True), ([(1.0, None), (None, 2.0)] * 6, False),
    ([(1.0, None), (1.0, 1.0)] * 6, True),
])  # fmt: skip
def test_the_sum_of_the_losses_of_several_players_is_no_progress(losses, told):
    """Where optimizers have losses of their own nothing is said of the sum; where they share one, it is."""
    summary = RunSummary()
    for step, pair in enumerate(losses, start=1):
        own = Reading(
            "optimizer.loss", ("g", "d"), np.float32([v or 0.0 for v in pair]), np.array([v is not None for v in pair])
        )  # fmt: skip
        summary.add(StepRecord(step, float(step), (Reading.run("loss", sum(v or 0.0 for v in pair)), own)))
    assert ("the loss " in summary.verdict) is told


def test_passes_without_a_step_are_no_steps():
    """Neither the verdict nor the report names a step where no optimizer has stepped."""
    summary, alone = RunSummary(), Evidence("wiring", "", 1, {"lonely_passes": 20.0})
    summary.add(StepRecord(1, 1.0, issues=(issue(Severity.HIGH, "a"),), evidence=(alone,)))
    assert summary.verdict == "1 problem: DEAD in a"
    assert "  no optimizer step was seen" in summary.as_text("run").splitlines()
    assert summary.as_dict()["steps"] == {"count": 0, "first": 0, "last": 0}


def test_what_is_frozen_is_told():
    """Of all parameters, how many train."""
    assert RunInfo("1-0", 1.0, "Net", 1443, entries=1443, tensors=6).size == "1,443 parameters"
    info = RunInfo("1-0", 1.0, "Net", 387, entries=1443, tensors=6, frozen=2)
    assert info.size == "387 of 1,443 parameters train (2 of 6 tensors frozen)"
    assert info_from_json(info_to_json(info)) == info


def test_what_thaws_and_what_is_frozen_later_is_told():
    """The head line says what trained when watching began, and what trains now."""
    summary = RunSummary(RunInfo("1-0", 1.0, "Net", 60, entries=100, tensors=2, frozen=1))
    for step, trains in ((1, (1.0, 0.0)), (2, (0.0, 1.0))):
        rows = {"parameter.trainable": trains, "parameter.numel": (60.0, 40.0)}
        readings = [Reading(name, ("a", "b"), np.float32(row), np.ones(2, dtype=bool)) for name, row in rows.items()]
        summary.add(StepRecord(step, 0.0, tuple(readings)))
        first = "run  Net, 60 of 100 parameters train (1 of 2 tensors frozen)"
        assert summary.as_text("run").splitlines()[0] == first + "; at the end 40 train" * (step == 2)
