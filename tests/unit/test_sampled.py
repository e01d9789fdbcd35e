"""A rule uses an estimated value only where its error cannot change the answer."""

import numpy as np
import pytest

from gradflow_export.records.catalog import CATALOG
from gradflow_export.records.evidence import evidence_of
from gradflow_export.records.step_record import Reading, Severity, StepRecord
from gradflow_export.rules.history import History
from gradflow_export.rules.learning_rate import LearningRate
from gradflow_export.rules.progress import LostUpdates
from gradflow_export.rules.sampled import SURE, agreement, margin, margins, off, site_margins
from gradflow_export.rules.stability import Unstable
from gradflow_export.rules.standstill import Rotation


def record(step, **metrics):
    """Build a record; ``a__b=1.0`` is a run metric ``a.b``, ``a__b={site: value}`` one with sites, or a fact."""
    readings, facts = [], {}
    for key, value in metrics.items():
        name, sites = key.replace("__", "."), value if isinstance(value, dict) else {"": value}
        if name in CATALOG:
            readings.append(Reading.of(name, tuple(sites), tuple(sites.values())))
        else:
            facts[name] = sites
    return StepRecord(step, 0.0, tuple(readings), evidence=evidence_of(step, facts))


def test_every_error_is_a_metric_of_the_same_sites():
    """What a metric names as its error is in the catalogue, of its kind, and a share of it or of its unit.

    An error that is no share of a share has the unit 1.
    """
    named = [spec for spec in CATALOG.values() if spec.error]
    assert named
    for spec in named:
        error = CATALOG[spec.error]
        own = "1" if spec.unit == "share" else spec.unit
        assert (error.kind, error.unit in {"share", own}, error.low) == (spec.kind, True, 0.0)


def test_exact_values_have_no_margin_and_estimated_ones_three_errors():
    """As a share of the value, or as it is; where nothing is stated, or it is not finite, there is none."""
    known = record(1, update__total_norm=2.0, update__norm_error=0.1, gradient__cosine=-0.5, gradient__cosine_error=0.1)
    assert margin(known, "update.total_norm") == pytest.approx(SURE * 0.2)
    assert margin(known, "gradient.cosine") == pytest.approx(SURE * 0.1)
    assert margin(record(1, update__total_norm=2.0), "update.total_norm") == 0.0
    assert margin(known, "loss") == 0.0
    for value, error in ((np.inf, 0.1), (2.0, np.nan), (2.0, np.inf)):
        assert margin(record(1, update__total_norm=value, update__norm_error=error), "update.total_norm") == 0.0


def test_an_estimated_share_of_nothing_has_a_margin():
    """Where no entry that was drawn is decided by eps, others may be: the error of that share is none of the share."""
    known = record(1, parameter__epsilon_share={"w": 0.0}, parameter__epsilon_share_error={"w": 0.1})
    assert margin(known, "parameter.epsilon_share", "w") == pytest.approx(SURE * 0.1)
    assert off(known, known.get("parameter.epsilon_share")) == pytest.approx([SURE * 0.1])


def test_margins_belong_to_the_step_and_the_site_they_were_stated_for():
    """Readings with and without an error take turns, sites come in any order, and some have none."""
    history = History(
        ("gradient.cosine", "gradient.cosine_error", "parameter.update_ratio", "parameter.update_ratio_error")
    )
    for step in range(1, 7):
        metrics = {"gradient__cosine": 0.5, "parameter__update_ratio": {"a": 0.1, "b": 0.2, "c": None}}
        if step % 2:
            metrics["gradient__cosine_error"] = 0.01 * step
            metrics["parameter__update_ratio_error"] = {"b": 0.1 * step, "a": None}
        history.add(record(step, **metrics))
    assert margins(history, "gradient.cosine") == pytest.approx([0.03, 0, 0.09, 0, 0.15, 0])
    of_sites = site_margins(history, "parameter.update_ratio")
    assert of_sites[:, 0] == pytest.approx(0)
    assert of_sites[:, 1] == pytest.approx([0.06, 0, 0.18, 0, 0.3, 0])
    assert of_sites[:, 2] == pytest.approx(0)
    assert site_margins(History(()), "parameter.update_ratio").size == 0


@pytest.mark.parametrize(("error", "found"), [(None, 1), (0.01, 1), (0.2, 0)])
def test_gradients_turn_round_only_where_the_cosine_is_sure(error, found):
    """A cosine of -0.7 that may be -0.1 accuses nobody."""
    rule, history = Unstable(), History(Unstable.remembers)
    told = ()
    for step in range(1, 31):
        more = {} if error is None else {"gradient__cosine_error": error}
        now = record(step, gradient__total_norm=1.1**step, gradient__cosine=-0.7, loss=1.0 + 0.1 * step, **more)
        history.add(now)
        told = rule.check(now, history)
    assert len(told) == found


@pytest.mark.parametrize(("error", "found"), [(None, 1), (0.01, 1), (0.2, 0)])
def test_steps_replace_the_weights_only_where_that_is_sure(error, found):
    """An update of 0.25 of the weights that may be one of 0.1 is no sign of too large a rate."""
    rule, history = LearningRate(), History(LearningRate.remembers)
    told = ()
    for step in range(1, 31):
        more = {} if error is None else {"parameter__update_ratio_error": {"w": error}}
        now = record(
            step, loss=2.0, update__ratio=0.25, parameter__update_ratio={"w": 0.25}, learning_rate=1.0,
            parameter__initial_gain={"w": 1.0}, **more,
        )  # fmt: skip
        history.add(now)
        told = rule.check(now, history)
    assert len(told) == found


@pytest.mark.parametrize(
    ("lost", "arrived", "errors", "severities"),
    [
        (0.99, 0.01, (0.001, 0.001), {Severity.HIGH}),
        (0.99, 0.01, (0.02, 0.001), {Severity.MEDIUM}),
        (0.99, 0.01, (0.001, 0.05), {Severity.MEDIUM}),
        (0.7, 0.4, (0.01, 0.01), {Severity.MEDIUM}),
        (0.7, 0.4, (0.05, 0.01), set()),
        (0.7, 0.4, (0.01, 0.06), set()),
    ],
)
def test_updates_are_lost_only_where_those_of_other_rows_are(lost, arrived, errors, severities):
    """What some rows of large parameters say is used where three standard errors cannot change it."""
    rule, history = LostUpdates(), History(LostUpdates.remembers)
    now = record(
        1, update__lost_share=lost, update__lost_share_error=errors[0], update__effectiveness=arrived,
        update__effectiveness_error=errors[1], parameter__lost_share={"w": lost},
    )  # fmt: skip
    history.add(now)
    assert {finding.severity for finding in rule.check(now, history)} == severities


@pytest.mark.parametrize("ill", ["winding", "plane", "growth", "work"])
def test_weights_orbit_only_where_those_that_are_not_followed_do(ill):
    """Whichever of the four may lie on the other side of its threshold leaves nothing to report."""
    values = {"winding": 1.2, "plane": 0.9, "growth": 1.0, "work": -0.7}
    for error, found in ((0.001, 1), (0.08, 0)):
        errors = dict.fromkeys(values, 0.001) | {ill: error}
        told = {f"flow__{name}": value for name, value in values.items()}
        now = record(1, **told, **{f"flow__{name}_error": value for name, value in errors.items()})
        assert len(Rotation().check(now, History(Rotation.remembers))) == found
    assert Rotation().check(record(1, flow__winding=1.2), History(Rotation.remembers)) == ()


def test_gradients_agree_for_long_only_where_that_is_sure():
    """The agreement of a long window counts with the least that it may be."""
    history = History(("gradient.coherence", "gradient.coherence_error", "gradient.cosine", "gradient.cosine_error"))
    for step in range(1, 31):
        history.add(record(step, gradient__cosine=0.5, gradient__coherence=0.4, gradient__coherence_error=0.1))
    assert agreement(history) == pytest.approx(0.1)
