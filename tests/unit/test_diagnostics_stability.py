"""What a diagnostic report counts, and when it says that a run has come to rest."""

import itertools
import math

import numpy as np
import pytest

from gradflow_export.diagnostics.analysis import notes, over_time
from gradflow_export.diagnostics.series import SeriesBook
from gradflow_export.diagnostics.stability import StabilityCounts, converged, improvement, pflug, slope_of_log
from gradflow_export.profiles import THRESHOLDS
from gradflow_export.records.step_record import Reading, StepRecord


def record(step=1, **values):
    """Return a record of run-level values; two underscores stand for a dot."""
    readings = tuple(Reading.run(name.replace("__", "."), value) for name, value in values.items())
    return StepRecord(step, 0.0, readings)


def counted(*records):
    """Return the counts after some records."""
    counts = StabilityCounts(THRESHOLDS)
    for one in records:
        counts.add(one)
    return counts


def test_explosions_are_steps_above_the_threshold():
    """The greatest norm counts; exactly the threshold does not, NaN does."""
    norms = (9.0, 10.0, 10.1, math.nan, math.inf)
    assert counted(*(record(gradient__max_norm=n) for n in norms)).explosions == 3


def test_stagnations_are_measured_updates_below_the_threshold():
    """Steps without a measured update say nothing."""
    assert counted(*(record(update__total_norm=n) for n in (1e-9, 2e-8, 1.0, 0.0)), record()).stagnations == 2


def test_unstable_updates_are_long_ones_and_turns_that_grow():
    """Ten times the median of the last ones, or a gradient that turns round and grows; a turn that shrinks is none."""
    usual = [record(update__total_norm=1.0)] * 5
    assert counted(*usual, record(update__total_norm=9.9)).unstable == 0
    assert counted(*usual, record(update__total_norm=10.1)).unstable == 1
    assert counted(record(update__total_norm=1.0), record(update__total_norm=99.0)).unstable == 0
    turn = [record(gradient__total_norm=n, gradient__cosine=c) for n, c in ((1, 0), (2, -0.6), (1, -0.9), (2, -0.4))]
    assert counted(*turn).unstable == 1


def test_loss_anomalies_are_spikes_and_what_is_not_finite():
    """More than twice the loss before, literally, and NaN; after a negative loss there is no telling."""
    losses = (1.0, 2.0, 4.1, math.nan, 1.0, -1.0, 5.0)
    assert counted(*(record(loss=x) for x in losses)).loss_anomalies == 2


def test_logit_drift_is_the_slope_of_the_logarithm():
    """Logits that grow by a tenth at each step have a slope of ln 1.1, whatever their sign."""
    steps = np.arange(10)
    assert slope_of_log(steps, -(1.1**steps)) == pytest.approx(math.log(1.1))
    assert math.isnan(slope_of_log(steps, np.zeros(10)))


def test_the_pflug_statistic_is_the_sum_of_inner_products():
    """Of gradients in the plane, by hand; about a minimum it is negative."""
    g = np.random.default_rng(0).normal(size=(6, 2))
    norms = np.linalg.norm(g, axis=1)
    cosines = np.array([0.0, *(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)) for a, b in itertools.pairwise(g))])
    assert pflug(norms, cosines) == pytest.approx(sum(a @ b for a, b in itertools.pairwise(g)))
    assert pflug(np.ones(4), np.array([0.0, -1, -1, -1])) == -3.0
    assert math.isnan(pflug(np.ones(1), np.ones(1)))


def test_improvement_and_convergence():
    """A falling loss improves and has not converged; one at rest at its least has; one at rest above it has not."""
    falling, resting = np.linspace(2.0, 1.0, 20), np.full(20, 0.5)
    assert improvement(falling) == pytest.approx(1 - 1.2368 / 1.7632, rel=1e-3)
    assert not converged(falling, 1.0)
    assert converged(resting, 0.5)
    assert not converged(resting, 0.4)
    assert not converged(resting[:10], 0.5)
    assert math.isnan(improvement(np.array([1.0])))
    assert math.isnan(improvement(np.array([1.0, math.nan])))


def test_phase_and_magnitude_are_correlated_over_time():
    """Two series that rise together, and too few steps."""
    book = SeriesBook(100)
    for step in range(10):
        book.add(record(step, phase__gradient=2.0**step, magnitude__gradient=3.0 * 2.0**step, phase__correlation=0.5))
        if step == 3:
            assert over_time(book)["over_time"] is None
    assert over_time(book) == {"across_nodes": 0.5, "rank_across_nodes": None, "over_time": pytest.approx(1.0)}


def test_series_keep_what_the_buffer_holds_and_statistics_of_all():
    """The list is bounded, the mean is not."""
    book = SeriesBook(3)
    for step in range(10):
        book.add(record(step, loss=float(step)))
    assert book["loss"].values == [7.0, 8.0, 9.0]
    assert (book["loss"].seen.mean, book["loss"].seen.count) == (4.5, 10)
    assert [array.tolist() for array in book["loss"].last(2)] == [[8, 9], [8.0, 9.0]]


def test_much_damping_is_a_note():
    """More than half of the gains below one half; exactly half is none."""
    book = SeriesBook(3)
    assert notes(book, 0.5) == []
    assert "75 % of the transitions" in notes(book, 0.75)[0]
