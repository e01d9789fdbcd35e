"""What alerts say, and which issues are worth one."""

import pytest

from gradflow_export.records.step_record import Issue, IssueType, Severity
from gradflow_export.writers.wandb.incidents import Incidents, alert_text, alert_title, level


def issue(kind=IssueType.EXPLODING, severity=Severity.HIGH, layer="a", step=3, healed=None, layers=()):
    return Issue(kind, severity, layer, step, 38.0, 2.0, "It explodes.", "Clip.", layers, healed)


def play(incidents, script, records=200, seconds=0.001, start=0.0):
    """Feed records, some with issues; return the steps at which something was told, and what."""
    out = []
    for step in range(1, records + 1):
        out += [(step, alert) for alert in incidents.add(script.get(step, ()), start + step * seconds)]
    return [*out, *((records, alert) for alert in incidents.rest())]


def titles(told):
    return [alert.title for _, alert in told]


@pytest.mark.parametrize("layer", ["a", "", "transformer.h.11.attn.c_proj.weight", "x" * 300, "é" * 70])
@pytest.mark.parametrize("kind", list(IssueType))
def test_titles_fit(layer, kind):
    """W&B takes 64 characters; the end of a name tells layers apart."""
    title = alert_title(issue(kind, layer=layer), "gradflow")
    assert len(title) <= 64
    assert title.startswith(f"gradflow: {kind.value} in ")
    assert title.endswith((layer or "the whole model")[-10:])


def test_the_text_says_everything():
    """Layer, value, threshold, since when and advice."""
    text = alert_text(issue(layers=("a", "b", "c")))
    for part in ("It explodes.", "Layer: a and 2 more", "Value: 38", "threshold 2", "Since step: 3", "Fix: Clip."):
        assert part in text


def test_levels_follow_severity():
    """W&B has three."""
    assert [level(severity) for severity in Severity] == ["INFO", "INFO", "WARN", "ERROR", "ERROR"]


def test_an_incident_is_told_once_with_what_followed():
    """Issues that open within some records of each other are one alert: the first is the cause, the worst the level."""
    script = {
        20: (issue(severity=Severity.MEDIUM, step=20),),
        22: (issue(IssueType.NUMERICAL, Severity.CRITICAL, "b", 22),),
        24: (issue(IssueType.LOSS_SPIKE, layer="", step=24),),
    }
    ((step, alert),) = play(Incidents(600.0, 50), script)
    assert alert.title == "gradflow: EXPLODING in a"
    assert (alert.level, alert.step) == ("ERROR", 20)
    assert "Followed by: NUMERICAL in b since step 22, LOSS_SPIKE in the model since step 24" in alert.text
    assert 24 < step < 40


def test_what_comes_later_is_another_incident():
    """Each has its own alert."""
    script = {20: (issue(step=20),), 90: (issue(IssueType.MEMORY_LEAK, layer="b", step=90),)}
    assert titles(play(Incidents(600.0, 50), script)) == ["gradflow: EXPLODING in a", "gradflow: MEMORY_LEAK in b"]


def test_slow_steps_do_not_hold_an_alert_for_long():
    """After a minute of the records' clock it is told, and what follows is still of the same incident."""
    script = {2: (issue(step=2),), 8: (issue(IssueType.DEAD, layer="b", step=8),)}
    ((step, alert),) = play(Incidents(600.0, 50), script, seconds=30.0)
    assert step == 4
    assert "Followed" not in alert.text


def test_what_waits_is_told_at_the_end():
    """A run that breaks in its last step has its alert."""
    assert titles(play(Incidents(600.0, 50), {10: (issue(step=10),)}, records=10)) == ["gradflow: EXPLODING in a"]


def test_the_same_problem_is_told_again_only_after_a_while():
    """A layer that opens and heals all the time raises one alert."""
    script = {step: (issue(step=step),) for step in range(20, 1000, 50)}
    assert len(play(Incidents(600.0, 50), script, records=1000, seconds=1.0)) == 2


def test_an_earlier_session_is_remembered():
    """What it told is not told again; what is new is, and is the title."""
    first = Incidents(600.0, 50)
    play(first, {20: (issue(step=20),)})
    second = Incidents(600.0, 50)
    second.remember(first.known)
    script = {20: (issue(step=20),), 22: (issue(IssueType.MEMORY_LEAK, layer="b", step=22),), 90: (issue(step=90),)}
    assert titles(play(second, script, start=1e6)) == ["gradflow: MEMORY_LEAK in b"]


def test_alerts_are_capped():
    """A run sends no more than it may, and none when it may none."""
    script = {step: (issue(layer=f"layer{step}", step=step),) for step in range(20, 200, 30)}
    assert len(play(Incidents(0.0, 3), script)) == 3
    assert play(Incidents(0.0, 0), script) == []


@pytest.mark.parametrize("asked", [False, True])
def test_that_an_incident_is_over_is_told_on_request(asked):
    """One alert of level INFO once all of its issues have healed."""
    script = {
        20: (issue(step=20), issue(IssueType.DEAD, layer="b", step=20)),
        50: (issue(step=20, healed=50),),
        70: (issue(IssueType.DEAD, layer="b", step=20, healed=70),),
    }
    told = play(Incidents(600.0, 50, healed=asked), script)
    assert [(step, alert.level) for step, alert in told][1:] == ([(70, "INFO")] if asked else [])
    if asked:
        assert told[1][1].title == "gradflow: healed: EXPLODING in a"
