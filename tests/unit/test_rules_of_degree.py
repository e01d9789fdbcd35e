"""Settings and steps that are far off in one place: momentum, the rate of a group, weights of classes."""

import numpy as np
import pytest

from gradflow_export.checks.unlearned_part import UnlearnedPart
from gradflow_export.metrics.batches import heavy_class
from gradflow_export.records.step_record import Evidence, IssueType, Reading, Severity, StepRecord
from gradflow_export.rules.judge import Judge
from gradflow_export.rules.learning_rate import LearningRate, UnevenSteps
from gradflow_export.rules.moments import LongMomentum, NewEachStep
from gradflow_export.rules.standstill import SameLoss


def judged(rule, readings, steps=range(5, 125, 5), early=(), loss=1.0):
    judge = Judge((rule,))
    for step in steps:
        told = early if early and step < 20 else readings
        judge.check(StepRecord(step, 0.0, (Reading.run("loss", loss if step > 60 else 1.0), *told)))
    return [(issue.issue_type, issue.layers) for issue in judge.issues]


@pytest.mark.parametrize("sites", [("a", "b", "c", "d"), ("z", "y", "x", "w")])
@pytest.mark.parametrize(
    ("ratios", "still"),
    [((1e-6, 2e-6, 1e-2, 5e-3), 2), ((1e-4, 1e-4, 1e-2, 5e-3), 0), ((1e-6, 1e-2, 1e-2, 1e-2), 0), ((1e-6,) * 4, 0)],
)
def test_layers_that_stay_as_they_were_drawn(sites, ratios, still):
    """Those that move a thousandth of the others and next to nothing in all; not one alone, and not all of them."""
    found = judged(UnevenSteps(), _steps(ratios, sites))
    assert found == ([(IssueType.LEARNING_RATE, sites[:still])] if still else [])


def _steps(ratios, sites="abcd", weights=(1.0, 1.0, 1.0, 1.0)):
    """Return what updates of weights of some norm would give."""
    norms = [ratio * weight for ratio, weight in zip(ratios, weights, strict=True)]
    return [Reading.of(f"parameter.update_{of}", tuple(sites), v) for of, v in (("ratio", ratios), ("norm", norms))]


@pytest.mark.parametrize("early", [1e-2, 1e-6])
@pytest.mark.parametrize("steps", [range(5, 125, 5), range(1, 3000)])
def test_layers_that_came_to_rest_are_not_as_they_were_drawn(early, steps):
    """What a layer has moved since the first step counts, however long ago; not what its latest steps were."""
    rest = _steps((1e-7, 1e-7, 1e-2, 1e-2))
    found = judged(UnevenSteps(), rest, steps, _steps((early, early, 1e-2, 1e-2)))
    assert found == ([(IssueType.LEARNING_RATE, ("a", "b"))] if early < 1e-3 else [])


def test_a_vector_next_to_zero_is_no_measure():
    """A bias near 0 changes by more than all of itself at each step, though its steps are as short as all others."""
    ratios = (1e-6, 1e-6, 3.0, 0.5)
    assert judged(UnevenSteps(), _steps(ratios))
    assert not judged(UnevenSteps(), _steps(ratios, weights=(1.0, 1.0, 1e-7, 1e-6)))


def test_layers_that_rest_where_nothing_is_left_to_learn():
    """A loss that has been brought to nothing needs no longer steps."""
    ratios = (1e-6, 1e-6, 1e-2, 1e-2)
    assert not judged(UnevenSteps(), _steps(ratios), range(30, 1500, 30), loss=0.01)


@pytest.mark.parametrize(
    ("first", "second", "kind"),
    [
        (1000.0, 10.0, IssueType.OPTIMIZER_STATE),
        (10.0, 1000.0, None),
        (10.0, 20.0, None),
        (2.0, 100.0, None),
        (333.0, None, IssueType.LEARNING_RATE),
        (100.0, None, None),
    ],
)
def test_momentum_that_outlasts_what_divides_it(first, second, kind):
    """Decays that were swapped, and momentum over hundreds of steps; not the usual settings, 0.9 to 0.99."""
    readings = [Reading.of("parameter.momentum_steps", ("w",), (first,))]
    if second is not None:
        readings.append(Reading.of("parameter.square_steps", ("w",), (second,)))
    assert [found for found, _ in judged(LongMomentum(), readings)] == ([kind] if kind else [])


@pytest.mark.parametrize(("first", "later", "found"), [(0.0, 0.0, True), (0.0, 1.0, False), (1.0, 0.0, False)])
def test_a_state_that_is_never_kept(first, later, found):
    """Of one of three parameters; a state that was kept once is not made at every step."""
    judge = Judge([NewEachStep()], strict=True)
    for step in range(1, 7):
        kept = (1.0, later if step > 3 else first, float(step > 1))
        judge.check(StepRecord(step, 0.0, (Reading.of("parameter.state_kept", ("a", "b", "c"), kept),)))
        assert bool(judge.issues) == (found and step >= 5)


@pytest.mark.parametrize("turned", [1, -1])
def test_weights_of_classes(turned):
    """Weights that balance are in order, those that are frequencies or that leave one class alone are not."""
    often = np.array([900.0, 100.0])[::turned]
    assert heavy_class(often, 1.0 / often) is None
    assert heavy_class(often, np.ones(2)) is None
    assert heavy_class(often, often)[0] == "turned"
    assert heavy_class(often, np.array([1.0, 45.0])[::turned]) is None
    assert heavy_class(often, np.array([1.0, 90.0])[::turned])[0] == "far"


@pytest.mark.parametrize("least", [1e-5, 1e-4])
def test_a_rate_that_has_decayed_is_not_one_that_was_always_too_low(least):
    """What all steps together moved counts, and the later ones of a schedule are short."""
    judges = [Judge((LearningRate(),)) for _ in range(2)]
    for step in range(1, 201):
        ratios = (2e-3 * (1 + np.cos(np.pi * step / 200)) / 2 + least, 4e-4)
        for judge, ratio in zip(judges, ratios, strict=True):
            values = {
                "loss": 1.0 - 0.0015 * step,
                "gradient.cosine": 0.4,
                "gradient.total_norm": 0.1,
                "learning_rate": 10 * ratio,
                "update.ratio": ratio,
                "update.total_norm": ratio,
            }
            judge.check(StepRecord(step, 0.0, tuple(Reading.run(name, value) for name, value in values.items())))
    decayed, constant = ({issue.severity for issue in judge.issues} for judge in judges)
    assert decayed <= {Severity.LOW}
    assert constant == {Severity.MEDIUM}


@pytest.mark.parametrize(
    ("share", "severity"), [(0.98, Severity.MEDIUM), (0.86, Severity.MEDIUM), (0.75, Severity.LOW)]
)
def test_a_part_that_has_begun_to_be_learned_is_a_remark(share, severity):
    """One of which the model has learned little beside one that is learned; a fit shows that it can be."""
    judge = Judge((UnlearnedPart(),))
    for step in range(10, 300, 10):
        facts = Evidence("column", "out[1]", step, {"over_constant": share, "attained": 0.1, "square": 1.0})
        least = Evidence("column", "out", step, {"least": 0.3})
        judge.check(StepRecord(step, 0.0, (Reading.run("loss", 1.0),), evidence=(facts, least)))
        assert step >= 200 or {issue.severity for issue in judge.issues} <= {Severity.LOW}
    assert {issue.severity for issue in judge.issues} == {severity}


@pytest.mark.parametrize(
    ("scatter", "drop", "cosine", "told"),
    [
        (1e-3, 0.0, 0.5, True),
        (0.0, 0.0, -0.1, True),
        (0.02, 0.0, 0.5, False),
        (1e-3, 4e-4, 0.5, False),
        (0.0, 0.0, 1.0, False),
    ],
)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_a_loss_that_no_batch_changes_is_told(scatter, drop, cosine, told, scale):
    """At any scale; not one that varies or falls, nor one of batches that may be the same."""
    rng, judge = np.random.default_rng(0), Judge((SameLoss(),))
    for step in range(1, 260):
        loss = scale * (0.69 + scatter * rng.standard_normal() - drop * max(step - 150, 0))
        judge.check(StepRecord(step, 0.0, (Reading.run("loss", loss), Reading.run("gradient.cosine", cosine))))
    assert [issue.issue_type for issue in judge.issues] == [IssueType.NOT_LEARNING] * told
