"""Laws of the metrics over arbitrary entries: scale, permutation, range, NaN and Inf."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradflow_export.engine.assemble import histogram_of, root_of_squares
from gradflow_export.metrics.arrays.entries import ENTRY_STATISTICS, entry_statistics
from gradflow_export.metrics.arrays.norms import l2_norms, norm
from gradflow_export.metrics.arrays.samples import even_sample, rows_of
from gradflow_export.metrics.direction import cosine
from gradflow_export.metrics.gains import depth_gain, gains, log_gains, summary_stats
from gradflow_export.metrics.logits import LOGIT_METRICS, logit_statistics, target_means, target_sums
from gradflow_export.metrics.outputs import ranks
from gradflow_export.metrics.units import greatest_outputs, zero_share
from gradflow_export.records.step_record import Reading, to_float32

UNIT = st.floats(-1, 1, width=32).map(lambda x: 0.0 if abs(x) < 1e-3 else x)
ENTRIES = st.lists(UNIT, min_size=1, max_size=40)
KINDS = ("l2", "l1", "linf", "mean")
NORMS = st.lists(st.none() | st.floats(1e-25, 1e25) | st.just(0.0), max_size=8)
ANY_NORMS = st.lists(st.none() | st.floats(min_value=0.0) | st.just(math.nan), max_size=8)
LEAST, LARGEST = float(np.finfo(np.float32).smallest_subnormal), float(np.finfo(np.float32).max)


def holds_for(*strategies):
    """Try a law on sixty examples, the same ones every time."""
    return lambda law: settings(max_examples=60, deadline=None, derandomize=True)(given(*strategies)(law))


def every_norm(tensor):
    """Return the four norms and the batched L2 norm of a tensor."""
    return [*(norm(tensor, kind).item() for kind in KINDS), l2_norms([tensor]).item()]


@holds_for(ENTRIES, st.integers(-80, 80))
def test_norms_scale_with_their_entries(entries, exponent):
    """Every norm of s x is |s| times the norm of x, from 1e-24 to 1e24, exactly for powers of two."""
    tensor, scale = torch.tensor(entries), -(2.0**exponent)
    assert every_norm(tensor * scale) == pytest.approx([2.0**exponent * n for n in every_norm(tensor)], rel=1e-6)


@holds_for(ENTRIES, st.integers(-600, 600))
def test_float64_norms_scale_with_their_entries(entries, exponent):
    """The same over the range of float64."""
    tensor, scale = torch.tensor(entries, dtype=torch.float64), 2.0**exponent
    expected = [scale * n for n in every_norm(tensor)]
    assert every_norm(tensor * scale) == pytest.approx(expected, rel=1e-12, abs=0.0)


@holds_for(ENTRIES, st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]))
def test_no_norm_of_finite_entries_is_infinite_and_none_of_others_is_zero(entries, dtype):
    """At both ends of each dtype's range a norm is 0 only for zeros, and always finite."""
    info = torch.finfo(dtype)
    for end in (info.max / 2, info.tiny):
        tensor = (torch.tensor(entries, dtype=torch.float64) * end).to(dtype)
        for value in every_norm(tensor)[1 if dtype is torch.float64 else 0 :]:
            assert (value == 0.0) is (not tensor.any().item())
            assert math.isfinite(value) or dtype is torch.float64


@holds_for(st.permutations(list(range(12))), st.integers(0, 99))
def test_norms_do_not_depend_on_order_or_shape(order, seed):
    """A permutation and a reshape change nothing beyond rounding."""
    torch.manual_seed(seed)
    tensor = torch.randn(12)
    mixed = tensor[list(order)].reshape(3, 4).t()
    assert every_norm(mixed) == pytest.approx(every_norm(tensor), rel=1e-6)


@holds_for(ENTRIES)
def test_norms_are_ordered(entries):
    """mean <= linf <= l2 <= l1, up to rounding."""
    l2, l1, linf, mean, batched = every_norm(torch.tensor(entries))
    slack = 1 + 1e-6
    assert mean <= linf * slack
    assert linf <= l2 * slack
    assert l2 <= l1 * slack
    assert batched == pytest.approx(l2)


@holds_for(
    ENTRIES, st.lists(st.sampled_from([math.nan, math.inf, -math.inf]), min_size=1, max_size=4), st.integers(0, 9)
)
def test_nan_and_inf_come_through_and_are_counted(entries, bad, place):
    """No norm of a tensor with a non-finite entry is finite; NaN wins over Inf; the count is exact."""
    place = min(place, len(entries))
    tensor = torch.tensor([*entries[:place], *bad, *entries[place:]])
    statistics = dict(zip(ENTRY_STATISTICS, entry_statistics([tensor])[1][:, 0].tolist(), strict=True))
    expected = math.nan if any(map(math.isnan, bad)) else math.inf
    values = [*every_norm(tensor), *(statistics[k] for k in ("l1", "linf", "mean"))]
    assert all(str(v) == str(expected) for v in values)
    assert statistics["nonfinite"] == len(bad)
    assert statistics["zero_share"] == pytest.approx(entries.count(0.0) / len(tensor))


@holds_for(st.lists(st.tuples(st.integers(0, 5), UNIT), min_size=1, max_size=12))
def test_sparse_tensors_count_touched_rows_after_coalescing(rows):
    """A row that is touched twice is added first; rows that were not touched do not count as zeros."""
    where, values = torch.tensor([[r for r, _ in rows]]), torch.tensor([[v, 2 * v] for _, v in rows])
    with torch.sparse.check_sparse_tensor_invariants():
        sparse = torch.sparse_coo_tensor(where, values, (6, 2))
    touched = sparse.to_dense()[sorted({r for r, _ in rows})]
    assert l2_norms([sparse]).tolist() == pytest.approx(l2_norms([touched]).tolist())
    assert entry_statistics([sparse])[1][:, 0].tolist() == pytest.approx(entry_statistics([touched])[1][:, 0].tolist())


@holds_for(st.lists(st.tuples(UNIT, UNIT), min_size=1, max_size=20), st.integers(-80, 80))
def test_complex_norms_are_norms_of_magnitudes(pairs, exponent):
    """All norms of complex entries are those of |x|, conjugated lazily or not, at any scale."""
    z = torch.tensor([complex(a, b) for a, b in pairs], dtype=torch.complex64) * 2.0**exponent
    sizes = torch.tensor([math.hypot(a, b) for a, b in pairs], dtype=torch.float64) * 2.0**exponent
    for tensor in (z, z.conj()):
        assert every_norm(tensor) == pytest.approx(every_norm(sizes), rel=1e-6)
        assert entry_statistics([tensor])[1][:3, 0].tolist() == pytest.approx(
            entry_statistics([sizes])[1][:3, 0].tolist(), rel=1e-6
        )


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64, torch.complex64])
def test_empty_tensors_have_zero_norms(dtype):
    """A tensor without entries has norm 0, no zeros and nothing non-finite."""
    for shape in ((0,), (3, 0), (0, 2, 2)):
        empty = torch.zeros(shape, dtype=dtype)
        assert every_norm(empty) == [0.0] * 5
        assert entry_statistics([empty, torch.ones(1)])[1][:, 0].tolist() == [0.0] * 5


@holds_for(st.lists(st.sampled_from(["f16", "bf16", "f32", "f64", "c64", "sparse", "empty"]), min_size=1, max_size=8))
def test_norms_of_many_tensors_are_those_of_each(kinds):
    """Mixing dtypes and layouts in one call changes no value and keeps the order."""
    torch.manual_seed(len(kinds))
    make = {
        "f16": lambda: torch.randn(5).half(),
        "bf16": lambda: torch.randn(5).bfloat16(),
        "f32": lambda: torch.randn(3, 4),
        "f64": lambda: torch.randn(2).double() * 1e-200,
        "c64": lambda: torch.randn(3, dtype=torch.complex64),
        "sparse": lambda: torch.eye(3).to_sparse(),
        "empty": lambda: torch.zeros(0),
    }
    tensors = [make[kind]() for kind in kinds]
    assert l2_norms(tensors).tolist() == pytest.approx([l2_norms([t]).item() for t in tensors], rel=1e-6, abs=0.0)


@holds_for(NORMS, st.floats(1e-3, 1e3))
def test_gains_do_not_change_when_the_loss_is_scaled(norms, scale):
    """Gains, log gains, depth gain and slope are ratios: a factor on every norm cancels."""
    scaled = [None if n is None else n * scale for n in norms]
    assert gains(scaled) == pytest.approx(gains(norms)) or gains(scaled) == gains(norms)
    positive = [n for n in norms if n != 0.0]
    a, b = depth_gain(positive), depth_gain([None if n is None else n * scale for n in positive])
    assert (a.total, a.slope) == pytest.approx((b.total, b.slope), abs=1e-9, nan_ok=True)
    counts = [summary_stats(n) for n in (norms, scaled)]
    assert counts[0]["num_missing"] == counts[1]["num_missing"]
    assert counts[0]["num_vanishing"] == counts[1]["num_vanishing"]


@holds_for(ANY_NORMS)
def test_every_transition_is_counted_exactly_once(norms):
    """The six counts add up to the number of transitions, whatever the norms are."""
    stats = summary_stats(norms)
    assert sum(v for k, v in stats.items() if k.startswith("num_")) == max(len(norms) - 1, 0)
    assert len(gains(norms)) == len(log_gains(norms)) == max(len(norms) - 1, 0)
    for gain, log_gain in zip(gains(norms), log_gains(norms), strict=True):
        assert (gain is None) is (log_gain is None)
        assert gain is None or math.isnan(gain) is math.isnan(log_gain)


@holds_for(st.lists(st.floats(1e-25, 1e25), min_size=2, max_size=8))
def test_log_gains_are_logarithms_and_add_up_to_the_depth_gain(norms):
    """Each log gain is the logarithm of its gain, and their sum is the depth gain."""
    logs = log_gains(norms)
    assert logs == pytest.approx([math.log(g) for g in gains(norms)], abs=1e-9)
    assert depth_gain(norms).total == pytest.approx(math.fsum(logs), abs=1e-9)


@holds_for(NORMS)
def test_gains_turned_round_are_inverse(norms):
    """The gains of the chain read backwards are the inverse gains, where both are defined."""
    for g, h in zip(gains(norms), reversed(gains(norms[::-1])), strict=True):
        assert (g is None) is (h is None)
        if g and h and math.isfinite(g) and math.isfinite(h):
            assert g * h == pytest.approx(1.0)


@holds_for(st.lists(st.floats(0, 1e300), max_size=20))
def test_root_of_squares_lies_between_the_greatest_and_the_sum(norms):
    """The total is at least the greatest part and at most the sum of parts."""
    total = root_of_squares(np.array(norms))
    assert max(norms, default=0.0) * (1 - 1e-9) <= total
    assert total <= math.fsum(norms) * (1 + 1e-9)


WIDE = st.floats() | st.sampled_from([1e-300, -1e-300, 1e300, -1e300, LEAST, LARGEST, -0.0, 5e-324])


@holds_for(st.lists(WIDE, max_size=20))
def test_to_float32_keeps_finite_finite_and_nonzero_nonzero(values):
    """The four states of a value survive rounding, with their sign; what fits is rounded to nearest."""
    for before, after in zip(values, to_float32(values).tolist(), strict=True):
        assert math.isnan(before) is math.isnan(after)
        assert math.isinf(before) is math.isinf(after)
        assert (before == 0.0) is (after == 0.0)
        if not math.isnan(before):
            assert math.copysign(1, before) == math.copysign(1, after)
        if LEAST <= abs(before) <= LARGEST:
            assert after == np.float32(before)


@holds_for(st.lists(st.none() | WIDE, max_size=10))
def test_a_reading_tells_missing_from_zero_and_nan(values):
    """``None`` comes back as ``None`` and everything else as its float32."""
    reading = Reading.of("loss", [str(i) for i in range(len(values))], values)
    back = list(reading.as_dict().values())
    expected = [None if v is None else float(to_float32([v])[0]) for v in values]
    assert [str(v) for v in back] == [str(v) for v in expected]
    assert to_float32(reading.values).tobytes() == reading.values.tobytes()


ROWS = st.integers(2, 12).flatmap(lambda n: st.lists(st.lists(UNIT, min_size=n, max_size=n), min_size=2, max_size=12))


@holds_for(ROWS, st.floats(0.1, 1e3), st.floats(-100, 100))
def test_effective_rank_does_not_change_with_scale_shift_or_order(rows, scale, shift):
    """The rank is about directions: scaling, moving and shuffling samples leaves it; it is 0 or within [1, min]."""
    matrix = np.array(rows)
    rank = ranks(matrix)[0]
    assert rank == 0.0 or 1 - 1e-9 <= rank <= min(matrix.shape) + 1e-9
    assert ranks(matrix[::-1] * scale)[0] == pytest.approx(rank, abs=1e-6)
    if rank:
        assert ranks(matrix + shift)[0] == pytest.approx(rank, abs=1e-4)


@holds_for(ROWS, st.floats(-50, 50))
def test_confidence_does_not_change_when_logits_are_shifted(rows, shift):
    """Softmax takes no notice of a constant; every share stays within its range."""
    logits = torch.tensor(rows, dtype=torch.float64)
    targets = torch.arange(len(rows)) % len(rows[0])
    moved = logit_statistics(logits + shift)
    plain = logit_statistics(logits)
    moves = [name in {"logits.max", "logits.min", "logits.mean", "logits.log_z"} for name in LOGIT_METRICS]
    assert moved.tolist() == pytest.approx(
        (plain + shift * torch.tensor(moves, dtype=torch.float64)).tolist(), abs=1e-9
    )
    assert target_means(target_sums(logits + shift, targets))[[0, 2]].tolist() == pytest.approx(
        target_means(target_sums(logits, targets))[[0, 2]].tolist(), abs=1e-9
    )
    assert 0 <= plain[LOGIT_METRICS.index("confidence.max")] <= 1 + 1e-9
    assert -1e-9 <= plain[LOGIT_METRICS.index("confidence.entropy")] <= 1 + 1e-9


@holds_for(ENTRIES, st.floats(1e-3, 1e3), st.floats(1e-3, 1e3))
def test_cosine_does_not_change_with_scale(entries, a, b):
    """It is 1 with itself, -1 with its opposite, at any length; NaN for zeros."""
    x = torch.tensor(entries)
    expected = 1.0 if x.any() else math.nan
    assert cosine(x * a, x * b).item() == pytest.approx(expected, abs=1e-5, nan_ok=True)
    assert cosine(x * a, x * -b).item() == pytest.approx(-expected, abs=1e-5, nan_ok=True)


@holds_for(st.lists(st.floats(), max_size=50))
def test_histograms_count_every_entry_once(entries):
    """Counts and non-finite entries add up to what came in, whatever came in, and edges rise."""
    histogram = histogram_of("parameter.weight", "a", np.array(entries, dtype=np.float64))
    assert histogram.counts.sum() + histogram.nonfinite == len(entries)
    assert histogram.nonfinite == sum(not math.isfinite(x) for x in entries)
    assert (np.diff(histogram.edges) > 0).all()


@holds_for(st.lists(st.integers(0, 9), min_size=1, max_size=4), st.integers(1, 40), st.integers(1, 8))
def test_samples_are_within_their_limits_and_entries_of_the_tensor(shape, rows, features):
    """Whatever the shape, a sample is no larger than asked for, not empty unless the tensor is, and made of entries."""
    tensor = torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)
    sample, flat = rows_of(tensor, rows, features), even_sample(tensor, rows)
    assert flat.numel() <= rows
    assert sample.dim() == 2
    assert (sample.numel() > 0) is (flat.numel() > 0) is (tensor.numel() > 0)
    assert set(sample.flatten().tolist()) | set(flat.tolist()) <= set(tensor.flatten().tolist())
    if tensor.numel():
        assert sample.shape[0] <= rows
        assert sample.shape[1] <= features


@holds_for(ROWS)
def test_a_dead_unit_is_one_that_never_fires(rows):
    """A unit is active where some output is positive, and only zeros count as zero."""
    output = torch.relu(torch.tensor(rows))
    assert (greatest_outputs(output, -1) > 0).tolist() == [
        any(x > 0 for x in column) for column in zip(*rows, strict=True)
    ]
    flat = [x for row in rows for x in row]
    assert zero_share(output).item() == pytest.approx(sum(x <= 0 for x in flat) / len(flat), abs=1e-6)
