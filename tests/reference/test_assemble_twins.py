"""What the assembler derives from per-site values equals its slow twin."""

import math

import numpy as np
import pytest
import torch

from gradflow_export.engine.assemble import Assembler, histogram_of, root_of_squares
from gradflow_export.engine.transfer import Bundle, pack
from gradflow_export.hooks.readings import Pending, RowSample

SITES = ("a", "b", "c", "d")


def assemble(*items, step=1, assembler=None):
    """Return readings by metric and the histograms of one step."""
    readings, histograms, _ = (assembler or Assembler()).assemble(Bundle(step, 0.0, packed=pack(list(items))))
    return {reading.metric: reading for reading in readings}, histograms


def pending(metric, values, where=None):
    """Return values of a metric at SITES."""
    place = None if where is None else np.array(where, dtype=np.int64)
    return Pending(metric, SITES, torch.tensor(values, dtype=torch.float64), place)


@pytest.mark.parametrize("norms", [[1.0, 2.0, 3.0, 4.0], [1e-30, 1e30, 0.0, 5.0], [0.0] * 4])
def test_gradient_totals_equal_the_twin(norms, twin):
    """Total, mean, spread, extremes and counts of gradient norms are those of plain loops."""
    readings, _ = assemble(pending("parameter.gradient_norm", norms))
    mean, std = twin.stats(norms)
    expected = {
        "total_norm": twin.l2(torch.tensor(norms, dtype=torch.float64)),
        "mean_norm": mean,
        "std_norm": std,
        "max_norm": max(norms),
        "min_norm": min(norms),
        "with_grad": 4,
        "nonfinite": 0,
    }
    for name, value in expected.items():
        assert readings[f"gradient.{name}"].values.tolist() == pytest.approx([value], rel=1e-6)


def test_a_parameter_without_gradient_is_left_out_of_the_totals():
    """Missing is neither zero nor counted."""
    readings, _ = assemble(pending("parameter.gradient_norm", [3.0, 4.0], where=[0, 2]))
    assert readings["parameter.gradient_norm"].as_dict() == {"a": 3.0, "b": None, "c": 4.0, "d": None}
    assert readings["gradient.total_norm"].values.tolist() == [5.0]
    assert readings["gradient.min_norm"].values.tolist() == [3.0]
    assert readings["gradient.with_grad"].values.tolist() == [2.0]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nonfinite_norms_are_counted_and_carried_into_the_totals(bad):
    """One NaN or Inf gradient makes the total NaN or Inf, and the count says how many there were."""
    readings, _ = assemble(pending("parameter.gradient_norm", [1.0, bad, bad, 2.0]))
    assert readings["gradient.nonfinite"].values.tolist() == [2.0]
    assert str(float(readings["gradient.total_norm"].values[0])) == str(bad)
    assert readings["gradient.with_grad"].values.tolist() == [4.0]


def test_two_optimizers_fill_one_reading():
    """Values of one metric that arrive in two parts are joined."""
    first, second = (
        pending("parameter.gradient_norm", [1.0, 2.0], [0, 1]),
        pending("parameter.gradient_norm", [3.0], [3]),
    )
    readings, _ = assemble(first, second)
    assert readings["parameter.gradient_norm"].as_dict() == {"a": 1.0, "b": 2.0, "c": None, "d": 3.0}


@pytest.mark.parametrize("norms", [[1.0, 2.0, 0.5, 4.0], [1e-31, 1.0, 2.0, 0.0]])
def test_gain_readings_equal_the_twin(norms, twin):
    """Gains stand at the block the gradient passed back through, and the run-level ones follow from them."""
    readings, _ = assemble(pending("block.gradient_norm", norms))
    gains, logs = twin.gains(norms), twin.log_gains(norms)
    assert readings["block.gain"].sites == SITES[1:]
    assert readings["block.gain"].values.tolist() == pytest.approx(gains)
    logs = [log if norm >= 1e-30 else None for log, norm in zip(logs, norms, strict=False)]
    written = readings["block.log_gain"]
    assert list(written.as_dict().values()) == [None if log is None else pytest.approx(log) for log in logs]
    finite = [g for g in gains if math.isfinite(g)]
    assert readings["gain.min"].values[0] == pytest.approx(min(finite))
    assert readings["gain.max"].values[0] == pytest.approx(max(finite))
    assert readings["gain.mean_log"].values[0] == pytest.approx(
        twin.stats([x for x in logs if x is not None and math.isfinite(x)])[0]
    )
    arrived = [norm if norm >= 1e-30 else None for norm in norms]
    if None not in arrived:
        assert readings["gain.depth"].values[0] == pytest.approx(math.log(norms[0] / norms[-1]))
    assert readings["gain.slope"].values[0] == pytest.approx(twin.depth_slope(arrived))


@pytest.mark.parametrize("zeros", [1, 2, 3])
def test_where_nothing_passed_no_logarithm_stands_for_it(zeros):
    """However small the norm behind it: not the logarithm of the least norm, and neither a mean nor a depth gain of it."""
    norms = [0.0] * zeros + [1e-20] * (4 - zeros)
    readings, _ = assemble(pending("block.gradient_norm", norms))
    assert list(readings["block.log_gain"].as_dict().values()) == [None] * zeros + [0.0] * (3 - zeros)
    assert readings["block.gain"].as_dict()[SITES[zeros]] == 0.0
    assert "gain.depth" not in readings
    mean = readings.get("gain.mean_log")
    assert mean is None if zeros == 3 else mean.values.tolist() == [0.0]


def test_gains_beside_an_infinite_norm_have_no_mean():
    """Where the gradient's norm has overflowed the gain is 0, and no record is lost for want of a logarithm."""
    readings, _ = assemble(pending("block.gradient_norm", [3.0, math.inf], where=[0, 1]))
    assert readings["block.gain"].as_dict() == {"b": 0.0, "c": None, "d": None}
    assert "gain.mean_log" not in readings


def test_gains_beside_a_missing_block_are_missing():
    """A block without a gradient has no gain on either side; the depth gain spans it."""
    readings, _ = assemble(pending("block.gradient_norm", [8.0, 4.0, 1.0], where=[0, 1, 3]))
    assert readings["block.gain"].as_dict() == {"b": 2.0, "c": None, "d": None}
    assert readings["gain.depth"].values[0] == pytest.approx(math.log(8))


def test_update_ratios_equal_the_twin(twin):
    """The ratio is update over weight, per parameter and over all that were updated; there is none to zero weights."""
    weights, updates = [2.0, 0.0, 1e-20, 5.0], [0.02, 0.1, 1e-25, 0.0]
    readings, _ = assemble(pending("parameter.weight_norm", weights), pending("parameter.update_norm", updates))
    expected = [u / w if w else None for u, w in zip(updates, weights, strict=True)]
    ratios = list(readings["parameter.update_ratio"].as_dict().values())
    assert [None if r is None else pytest.approx(r) for r in ratios] == expected
    total, size = (twin.l2(torch.tensor(v, dtype=torch.float64)) for v in (updates, weights))
    assert readings["update.total_norm"].values[0] == pytest.approx(total)
    assert readings["update.ratio"].values[0] == pytest.approx(total / size)


def test_root_of_squares_is_exact_at_the_ends_of_the_range():
    """No square overflows or underflows on the way."""
    assert root_of_squares(np.full(4, 1e-200)) == pytest.approx(2e-200)
    assert root_of_squares(np.full(4, 1e200)) == pytest.approx(2e200)
    assert root_of_squares(np.array([])) == 0.0
    assert math.isnan(root_of_squares(np.array([math.nan, 1.0])))
    assert root_of_squares(np.array([math.inf, 1.0])) == math.inf


def test_ranks_pool_four_batches_and_forget_older_weights(twin):
    """Batches of consecutive steps are pooled up to four; after a gap the pool starts anew."""
    generator = np.random.default_rng(0)
    assembler, pool = Assembler(), []
    for step in (2, 3, 4, 5, 6, 500, 501):
        rows = generator.normal(size=(2, 12)).astype(np.float32)
        pool = [*pool[-3:], rows] if step != 500 else [rows]
        sample = RowSample("block.effective_rank", "a", torch.from_numpy(rows))
        readings, _ = assemble(sample, step=step, assembler=assembler)
        expected = twin.effective_rank(np.concatenate(pool))
        assert readings["block.effective_rank"].values[0] == pytest.approx(expected, rel=1e-3)


def test_a_change_of_width_starts_the_pool_anew():
    """Rows of another length cannot be pooled with the earlier ones."""
    assembler, found = Assembler(), []
    for width, rows in ((3, 8), (5, 1)):
        sample = RowSample(
            "block.effective_rank", "a", torch.randn(rows, width, generator=torch.Generator().manual_seed(0))
        )
        readings, _ = assemble(sample, step=2, assembler=assembler)
        found.append("block.effective_rank" in readings)
    assert found == [True, False]  # one row has no spread


@pytest.mark.parametrize("scale", [1e-200, 1e-3, 1.0, 1e200])
def test_histogram_counts_equal_the_twin(scale, twin):
    """Bins are even over the finite range, and every finite entry falls into one of them."""
    entries = np.random.default_rng(0).normal(size=400) * scale
    histogram = histogram_of("parameter.weight", "a", np.append(entries, [np.nan, np.inf, -np.inf]))
    assert histogram.nonfinite == 3
    assert histogram.counts.sum() == 400
    assert histogram.edges[[0, -1]].tolist() == [entries.min(), entries.max()]
    assert histogram.counts.tolist() == twin.bin_counts(entries.tolist(), histogram.edges.tolist())


@pytest.mark.parametrize(
    "entries",
    [
        [3.0, 3.0],
        [0.0],
        [1.0, 1.0 + 2e-16],
        [5e-324, 0.0],
        [-1.7e308, 1.7e308],
        [1.7976931348623157e308] * 2,
        [math.nan],
        [],
    ],
)
def test_histograms_of_degenerate_entries_have_rising_edges(entries):
    """Equal entries, entries that differ by rounding, and the ends of the range are counted all the same."""
    histogram = histogram_of("parameter.weight", "a", np.array(entries, dtype=np.float64))
    assert np.isfinite(histogram.edges).all()
    assert (np.diff(histogram.edges) > 0).all()
    assert histogram.counts.sum() + histogram.nonfinite == len(entries)
