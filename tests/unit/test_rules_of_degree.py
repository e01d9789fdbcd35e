"""Settings and steps that are far off in one place: momentum, the rate of a group, weights of classes."""

import numpy as np
import pytest

from gradflow_export.metrics.batches import heavy_class
from gradflow_export.records.step_record import IssueType, Reading, StepRecord
from gradflow_export.rules.judge import Judge
from gradflow_export.rules.learning_rate import UnevenSteps
from gradflow_export.rules.moments import LongMomentum


def judged(rule, readings, steps=range(5, 125, 5)):
    judge = Judge((rule,))
    for step in steps:
        judge.check(StepRecord(step, 0.0, (Reading.run("loss", 1.0), *readings)))
    return [(issue.issue_type, issue.layers) for issue in judge.issues]


@pytest.mark.parametrize("sites", [("a", "b", "c", "d"), ("z", "y", "x", "w")])
@pytest.mark.parametrize(
    ("ratios", "still"),
    [((1e-6, 2e-6, 1e-2, 5e-3), 2), ((1e-4, 1e-4, 1e-2, 5e-3), 0), ((1e-6, 1e-2, 1e-2, 1e-2), 0), ((1e-6,) * 4, 0)],
)
def test_layers_that_stay_as_they_were_drawn(sites, ratios, still):
    """Those that move a thousandth of the others and next to nothing in all; not one alone, and not all of them."""
    found = judged(UnevenSteps(), [Reading.of("parameter.update_ratio", sites, ratios)])
    assert found == ([(IssueType.LEARNING_RATE, sites[:still])] if still else [])


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


@pytest.mark.parametrize("turned", [1, -1])
def test_weights_of_classes(turned):
    """Weights that balance are in order, those that are frequencies or that leave one class alone are not."""
    often = np.array([900.0, 100.0])[::turned]
    assert heavy_class(often, 1.0 / often) is None
    assert heavy_class(often, np.ones(2)) is None
    assert heavy_class(often, often)[0] == "turned"
    assert heavy_class(often, np.array([1.0, 500.0])[::turned])[0] == "far"
