"""Every metric function equals its slow twin."""

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from gradflow_export.metrics.arrays.entries import ENTRY_STATISTICS, entry_statistics
from gradflow_export.metrics.arrays.norms import (
    dense_entries,
    l2_norms,
    linf,
    norm,
    scaled_l2,
)
from gradflow_export.metrics.arrays.samples import even_sample, rows_of
from gradflow_export.metrics.direction import TENSORS, cosine, evenly_chosen, gradient_pieces
from gradflow_export.metrics.gains import depth_gain, gains, log_gains, summary_stats
from gradflow_export.metrics.logits import (
    LOGIT_METRICS,
    TARGET_METRICS,
    as_samples,
    logit_statistics,
    target_means,
    target_sums,
)
from gradflow_export.metrics.outputs import is_floating, output_rms, output_spreads, rank_of_spectrum, ranks
from gradflow_export.metrics.units import dead_shares, greatest_outputs, saturated_share, zero_share

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)


def tensors(seed=0):
    """Return tensors of many shapes, dtypes and layouts, with zeros among the entries."""
    torch.manual_seed(seed)
    out = []
    for dtype in DTYPES:
        for shape in ((), (7,), (5, 3), (2, 3, 4), (0,), (3, 0)):
            tensor = torch.randn(shape, dtype=torch.complex64 if dtype.is_complex else torch.float32).to(dtype)
            out += [tensor, tensor * (torch.rand(shape) > 0.5)]
    out.append(torch.randn(6, 4).t())
    with torch.sparse.check_sparse_tensor_invariants():
        where = torch.tensor([[0, 0, 2]])
        out.append(torch.sparse_coo_tensor(where, torch.tensor([[1.0, 2.0], [1.0, -2.0], [0.0, 4.0]]), (4, 2)))
        out.append(torch.sparse_coo_tensor(where, torch.randn(3, 2, dtype=torch.complex64), (4, 2)))
    out.append(torch.randn(4, dtype=torch.complex64).conj())
    return out


def test_l2_norms_equal_the_twin(twin):
    """The L2 norm of many tensors at once, of any dtype, layout and shape, is that of plain loops."""
    every = tensors()
    expected = [twin.l2(t) for t in every]
    assert l2_norms(every).tolist() == pytest.approx(expected, rel=1e-6)
    for tensor, value in zip(every, expected, strict=True):
        assert l2_norms([tensor]).tolist() == pytest.approx([value], rel=1e-6)
        assert scaled_l2(dense_entries(tensor)).item() == pytest.approx(value, rel=1e-6)


def test_entry_statistics_equal_the_twin(twin):
    """Sum, greatest, mean, zero share and non-finite count are those of plain loops; complex entries count by |x|."""
    every = tensors(1)
    every.append(torch.tensor([math.nan, math.inf, -math.inf, 0.0, 1.0]))
    rows = dict(zip(ENTRY_STATISTICS, entry_statistics(every)[1].tolist(), strict=True))
    finite = len(every) - 1
    twins = {"l1": twin.l1, "linf": twin.linf, "mean": twin.mean}
    for name, function in twins.items():
        assert rows[name][:finite] == pytest.approx([function(t) for t in every[:finite]], rel=1e-6)
    assert rows["zero_share"] == pytest.approx([twin.zero_share(t) for t in every])
    assert rows["nonfinite"] == [twin.nonfinite(t) for t in every]


@pytest.mark.parametrize("kind", ["l2", "l1", "linf", "mean"])
def test_single_norms_equal_the_twin(kind, twin):
    """Each norm of one tensor is that of plain loops; the mean of a sparse tensor is over all of its entries."""
    for tensor in tensors(2):
        expected = getattr(twin, kind)(tensor)
        if kind == "mean" and tensor.layout is not torch.strided:
            expected = twin.l1(tensor) / tensor.numel()
        assert norm(tensor, kind).item() == pytest.approx(expected, rel=1e-6)


def test_linf_of_real_entries_equals_the_twin(twin):
    """The greatest magnitude is found on either side of zero."""
    for entries in ([-3.0, 2.0], [3.0, -2.0], [-1.0], [0.0, -0.0]):
        assert linf(torch.tensor(entries)).item() == twin.linf(torch.tensor(entries))


NORMS = (
    [1.0, 2.0, 0.5, 0.25],
    [0.5, 1, 0, 2, None, 4],
    [None, None],
    [0.0, 0.0, 1.0],
    [1e-31, 1e-29, 1e3],
    [3.0],
    [],
)


@pytest.mark.parametrize("norms", NORMS)
@pytest.mark.parametrize("eps", [1e-30, 1e-3])
def test_gains_equal_the_twin(norms, eps, twin):
    """Gains and log gains follow the written-out rules for missing and vanished norms."""
    assert gains(norms, eps) == twin.gains(norms, eps)
    assert log_gains(norms, eps) == pytest.approx(twin.log_gains(norms, eps))


@pytest.mark.parametrize("norms", NORMS[:2] + NORMS[3:5])
def test_depth_gain_equals_the_twin(norms, twin):
    """The depth gain is the first over the last norm, none where one is zero; its slope the median of pairwise slopes."""
    known = [n for n in norms if n is not None]
    result = depth_gain(norms)
    cut = known[0] < 1e-30 or known[-1] < 1e-30
    assert result.total == pytest.approx(math.nan if cut else math.log(known[0]) - math.log(known[-1]), nan_ok=True)
    read = [n if n is not None and n >= 1e-30 else None for n in norms]
    slope = twin.depth_slope(read) if sum(n is not None for n in read) > 1 else math.nan
    assert result.slope == pytest.approx(slope, nan_ok=True)


def test_depth_gain_without_two_norms_is_nan():
    """One usable norm has no depth."""
    for norms in ([], [1.0], [None, 2.0], [math.nan, 1.0], [math.inf, 1.0]):
        result = depth_gain(norms)
        assert math.isnan(result.total)
        assert math.isnan(result.slope)


def test_summary_means_equal_the_twin(twin):
    """The means are over finite gains and finite log gains."""
    norms = [3.0, 1.0, 0.0, 7.0, None, 2.0, 8.0]
    finite = [g for g in twin.gains(norms) if g is not None and math.isfinite(g)]
    logs = [g for g in twin.log_gains(norms) if g is not None and math.isfinite(g)]
    stats = summary_stats(norms)
    assert stats["mean_gain"] == pytest.approx(twin.stats(finite)[0])
    assert stats["mean_log_gain"] == pytest.approx(twin.stats(logs)[0])
    assert (stats["min_gain"], stats["max_gain"]) == (min(finite), max(finite))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(1, 2), (6, 3), (5, 10)])
def test_logit_statistics_equal_the_twin(dtype, shape, twin):
    """Logit and confidence statistics are those of plain loops."""
    torch.manual_seed(3)
    logits = torch.randn(shape, dtype=dtype) * 3
    expected = twin.logit_metrics(logits.tolist())
    assert tuple(expected) == LOGIT_METRICS
    assert logit_statistics(logits).tolist() == pytest.approx(list(expected.values()), rel=1e-5, abs=1e-6)


def test_target_statistics_equal_the_twin(twin):
    """Target statistics leave out the ignore index."""
    torch.manual_seed(4)
    logits, targets = torch.randn(7, 4), torch.tensor([0, 3, -100, 1, 2, 4, 0])
    expected = twin.target_metrics(logits.tolist(), targets.tolist())
    assert tuple(expected) == TARGET_METRICS
    assert target_means(target_sums(logits, targets)).tolist() == pytest.approx(list(expected.values()), rel=1e-5)


def test_targets_that_are_all_ignored_give_nan():
    """Nothing to average is NaN, not zero."""
    assert target_means(target_sums(torch.randn(2, 3), torch.tensor([-100, -100]))).isnan().all()


def test_as_samples_brings_every_layout_to_one_row_per_sample():
    """Classes in the last or in the second dimension, and targets as numbers or probabilities, come out alike."""
    torch.manual_seed(5)
    logits, targets = torch.randn(2, 5, 3), torch.randint(3, (2, 5))
    rows, numbers = as_samples(logits, targets)
    assert torch.equal(rows, logits.reshape(10, 3))
    assert torch.equal(numbers, targets.reshape(-1))
    for class_dim in (None, 1):
        rows, numbers = as_samples(logits.movedim(-1, 1), targets, class_dim)
        assert torch.equal(rows, logits.reshape(10, 3))
        assert torch.equal(numbers, targets.reshape(-1))
    soft = functional.one_hot(targets, 3).float()
    assert torch.equal(as_samples(logits, soft)[1], targets.reshape(-1))
    assert as_samples(logits, None)[1] is None
    assert as_samples(logits, torch.zeros(4, dtype=torch.long))[1] is None
    assert as_samples(logits.half(), None)[0].dtype is torch.float32


def test_as_samples_thins_out_large_logits_together_with_their_targets():
    """Above the limit every n-th row is kept, and its own target with it."""
    rows, numbers = as_samples(torch.arange(2**21).reshape(-1, 2).float(), torch.arange(2**20))
    assert rows.numel() <= 2**20
    assert torch.equal(rows[:, 0].long() // 2, numbers)


def test_output_statistics_equal_the_twin(twin):
    """Size and spread of block outputs of two to four dimensions are those of plain loops."""
    torch.manual_seed(6)
    for output in (torch.randn(5, 4), torch.randn(2, 3, 4), torch.randn(2, 3, 4, 5), torch.randn(3, 4).double()):
        rows = rows_of(output, 256, 512)
        assert rows.tolist() == twin.rows_of(output)
        assert output_rms(output).item() == pytest.approx(twin.rms(output), rel=1e-6)
        assert output_spreads([rows])[0, 0].item() == pytest.approx(twin.spread(twin.rows_of(output)), rel=1e-5)


def test_rows_are_thinned_evenly_to_the_limits():
    """No more rows and columns than asked for are taken, evenly spaced and the same every time."""
    torch.manual_seed(7)
    for shape in ((1000, 30), (100, 7, 30), (3, 40, 16, 16), (300, 9, 3, 3), (5,), ()):
        rows = rows_of(torch.randn(shape), 64, 8)
        assert rows.shape[0] <= 64
        assert rows.shape[1] <= 8
    flat = torch.arange(10.0)
    assert rows_of(flat[:, None], 4, 1)[:, 0].tolist() == [0.0, 3.0, 6.0, 9.0]
    assert even_sample(flat, 4).tolist() == [0.0, 3.0, 6.0, 9.0]
    assert even_sample(flat, 10).data_ptr() == flat.data_ptr()


def test_complex_rows_hold_real_and_imaginary_parts():
    """Complex features become two columns each."""
    rows = rows_of(torch.tensor([[1 + 2j, 3 - 4j]]), 8, 8)
    assert rows.tolist() == [[1.0, 2.0, 3.0, -4.0]]
    assert rows_of(torch.randn(4, 3).half(), 8, 8).dtype is torch.float32


def test_effective_rank_equals_the_twin(twin):
    """The rank from singular values equals the one from the eigenvalues of the Gram matrix."""
    generator = np.random.default_rng(0)
    for shape in ((10, 3), (40, 12), (6, 2)):
        rows = generator.normal(size=shape)
        assert ranks(rows) == pytest.approx((twin.effective_rank(rows), twin.stable_rank(rows)), rel=1e-5)


def test_effective_rank_of_equal_rows_is_zero_and_of_nan_is_nan():
    """No spread is rank 0, even where rounding leaves some; a NaN makes the rank NaN."""
    for value in (0.1, np.float32(0.1), 0.0, 1e300):
        assert ranks(np.full((7, 3), value)) == (0.0, 0.0)
    assert all(map(math.isnan, ranks(np.array([[1.0, math.nan], [2.0, 3.0]]))))
    assert rank_of_spectrum(np.array([])) == 0.0


def test_only_floating_tensors_are_floating():
    """Integer tensors and non-tensors are no activations."""
    assert is_floating(torch.zeros(1))
    assert is_floating(torch.zeros(1, dtype=torch.complex64))
    assert not is_floating(torch.zeros(1, dtype=torch.long))
    assert not is_floating("x")


def test_unit_statistics_equal_the_twin(twin):
    """Active units and zero shares of rectified outputs are those of plain loops."""
    torch.manual_seed(8)
    for output in (torch.relu(torch.randn(3, 9) - 1), torch.relu(torch.randn(2, 9, 3, 3) - 2)):
        active = greatest_outputs(output, 1) > 0
        assert 1 - active.float().mean().item() == pytest.approx(twin.dead_share([output]))
        assert zero_share(output).item() == pytest.approx(twin.zero_share(output))
    assert greatest_outputs(torch.tensor([[[1.0, 0.0]]]), -1).tolist() == [1.0, 0.0]
    assert dead_shares([torch.tensor([1.0, 0.0]), torch.tensor([-1.0, 0.0, 2.0])]).tolist() == pytest.approx(
        [1 / 2, 2 / 3]
    )


@pytest.mark.parametrize(
    ("kind", "module", "derivative", "greatest"),
    [
        ("tanh", nn.Tanh(), lambda o: 1 - o * o, 1.0),
        ("sigmoid", nn.Sigmoid(), lambda o: o * (1 - o), 0.25),
        ("clipped:-1.0:1.0", nn.Hardtanh(), lambda o: float(-1 < o < 1), 1.0),
        ("clipped:0:1", nn.Hardsigmoid(), lambda o: float(0 < o < 1) / 6, 1 / 6),
    ],
)
def test_saturated_share_equals_the_twin(kind, module, derivative, greatest, twin):
    """An output is saturated where the derivative there is below 1 % of the greatest."""
    torch.manual_seed(9)
    output = module(torch.randn(20, 20).double() * 4)
    share = twin.saturated_share(output, derivative, greatest)
    assert 0.05 < share < 0.95
    assert saturated_share(output, kind).item() == pytest.approx(share)


def test_cosine_and_gradient_sample_equal_the_twin(twin):
    """A small gradient is taken whole; the cosine is that of plain loops, NaN when one side is zero."""
    torch.manual_seed(10)
    gradients = [torch.randn(3, 2), torch.randn(5)]
    pieces, weights = gradient_pieces(gradients)
    (sample,) = pieces
    assert sample.tolist() == [x for g in gradients for x in g.flatten().tolist()]
    assert weights.tolist() == [1.0]
    other = torch.randn(11)
    assert cosine(sample, other).item() == pytest.approx(twin.cosine(sample.tolist(), other.tolist()), rel=1e-5)
    assert cosine(sample, torch.zeros(11)).isnan()
    many = evenly_chosen([torch.randn(2**14).double() for _ in range(20)])
    assert len(many) <= TENSORS
    assert cosine(sample * 1e-30, other * 1e30).item() == pytest.approx(cosine(sample, other).item(), rel=1e-5)
