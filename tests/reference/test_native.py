"""The C library's statistics equal the slow twins, with any number of threads, and its absence changes nothing."""

import math
import shutil

import numpy as np
import pytest
import torch

from gradflow_export import native
from gradflow_export.metrics.arrays.entries import ENTRY_STATISTICS, entry_statistics
from gradflow_export.metrics.arrays.norms import l2_norms
from gradflow_export.metrics.arrays.one_pass import native_statistics, tensor_reader
from gradflow_export.metrics.arrays.sketch import signs
from gradflow_export.native.tensors import HEAD, Sums

KINDS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
COUNTS = (0, 1, 3, 15, 16, 17, 4095, 4096, 4097, 10_000)


def some_entries(count, dtype, seed=0):
    """Random entries with exact zeros, negative zeros and subnormals among them."""
    generator = torch.Generator().manual_seed(seed)
    entries = torch.randn(count, generator=generator, dtype=torch.float64).to(dtype)
    entries[::7] = 0.0
    entries[3::11] = -0.0
    entries[5::13] = torch.finfo(dtype).tiny / 2
    return entries


def test_the_library_is_there_where_a_compiler_is():
    """Installing builds it; without a compiler it is missing, and that is no error."""
    assert native.available() or shutil.which("cc") is None


@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_all_rows_equal_the_twin(dtype, twin, monkeypatch):
    """Norm, sum of magnitudes, greatest, mean, zeros, non-finite of arrays of many lengths, joined in one call."""
    every = [some_entries(count, dtype, count) for count in COUNTS]
    for switch in ("1", "0"):
        monkeypatch.setenv("GRADFLOW_NATIVE", switch)
        norms, rows = entry_statistics(every)
        found = dict(zip(ENTRY_STATISTICS, rows.tolist(), strict=True))
        assert norms.tolist() == pytest.approx([twin.l2(t) for t in every], rel=2e-6)
        assert l2_norms(every).tolist() == pytest.approx([twin.l2(t) for t in every], rel=2e-6)
        assert found["l1"] == pytest.approx([twin.l1(t) for t in every], rel=2e-6)
        assert found["linf"] == pytest.approx([twin.linf(t) for t in every])
        assert found["mean"] == pytest.approx([twin.mean(t) for t in every], rel=2e-6)
        assert found["zero_share"] == pytest.approx([twin.zero_share(t) for t in every])
        assert found["nonfinite"] == [0.0] * len(every)


@pytest.mark.parametrize("dtype", KINDS, ids=str)
@pytest.mark.parametrize("place", [0, 20, 4096, 4100])
def test_nan_and_inf_are_counted_and_shown(dtype, place):
    """A NaN is in norm, sum and greatest; an Inf makes them infinite; each is counted, wherever it stands."""
    entries = some_entries(4101, dtype)
    entries[place] = math.nan
    norm, magnitudes, _, _, _, nonfinite = native_statistics([entries])[:, 0]
    assert math.isnan(norm)
    assert math.isnan(magnitudes)
    assert nonfinite == 1
    assert math.isnan(entry_statistics([entries])[1][1, 0])
    entries[place], entries[7] = -math.inf, math.inf
    norm, magnitudes, high, low, _, nonfinite = native_statistics([entries])[:, 0]
    assert (norm, magnitudes, high, low, nonfinite) == (
        math.inf,
        math.inf,
        math.inf,
        -math.inf if place != 7 else low,
        2,
    )


def test_every_float16_is_read_as_torch_reads_it():
    """All 65 536 bit patterns of both half types: greatest, least, zeros, non-finite and sum of the finite ones."""
    patterns = torch.from_numpy(np.arange(65536, dtype=np.uint16).view(np.int16))
    for dtype in (torch.float16, torch.bfloat16):
        values = patterns.view(dtype)
        finite = values[torch.isfinite(values)].contiguous()
        norm, magnitudes, high, low, zeros, nonfinite = native_statistics([finite])[:, 0]
        wide = finite.double()
        assert (high, low) == (float(wide.max()), float(wide.min()))
        assert (zeros, nonfinite) == (2, 0)
        assert magnitudes == pytest.approx(float(wide.abs().sum()), rel=1e-6)
        assert norm == pytest.approx(float((wide / high).norm() * high), rel=1e-6)
        assert native_statistics([values])[5, 0] == len(values) - len(finite)
        singles = [finite[index : index + 1] for index in range(0, len(finite), 97)]
        assert native_statistics(singles)[0].tolist() == [abs(float(value)) for value in singles]


@pytest.mark.parametrize("scale", [1e-44, 1e-30, 1e-25, 1e-17, 1.0, 1e18, 1e25, 3e37])
def test_no_norm_over_or_underflows(scale):
    """float32 entries whose squares leave the range have the norm of their float64 copies."""
    entries = torch.tensor([1.0, -2.0, 0.0, 3.0]).mul(scale)
    norm, magnitudes = native_statistics([entries])[:2, 0]
    assert norm == pytest.approx(float(entries.double().norm()), rel=1e-6)
    assert magnitudes == pytest.approx(float(entries.double().abs().sum()), rel=1e-6)
    wide = entries.double() * 1e-200
    assert native_statistics([wide])[0, 0] == pytest.approx(float((wide / wide.abs().max()).norm() * wide.abs().max()))


def test_the_number_of_threads_does_not_matter():
    """Arrays longer than a chunk give the same bits with one, two and five threads."""
    every = [some_entries(count, torch.float32, count) for count in (600_001, 17, 262_144, 262_145)]
    pointers, counts = [t.data_ptr() for t in every], np.array([t.numel() for t in every])
    results = [native.statistics(pointers, counts, np.zeros(4, dtype=np.int32), threads) for threads in (1, 2, 5)]
    assert all(np.array_equal(results[0], other) for other in results)
    assert results[0][0] == pytest.approx([float(t.double().norm()) for t in every], rel=1e-6)


def test_what_it_cannot_read_takes_the_other_way(monkeypatch):
    """Strided, sparse, complex, whole-number tensors and a missing library are left to torch."""
    plain = torch.randn(6, 4)
    assert native_statistics([plain]) is not None
    for other in (plain.t(), plain[:, ::2], plain.to_sparse(), plain.to(torch.complex64), plain.int()):
        assert native_statistics([plain, other]) is None
    monkeypatch.setenv("GRADFLOW_NATIVE", "0")
    assert native_statistics([plain]) is None
    assert l2_norms([plain]).item() == pytest.approx(float(plain.norm()))


def test_a_missing_library_says_what_to_do(monkeypatch):
    """Calling without asking first is an error that names the way out."""
    monkeypatch.setattr(native, "_library", lambda: None)
    assert not native.available()
    with pytest.raises(RuntimeError, match="ask available"):
        native.statistics([], np.array([], dtype=np.int64), np.array([], dtype=np.int32))


def parts_of(reader, values, gradients):
    """Split what a reader returned: products, sum of the norms, copied entries, rows."""
    end = HEAD + reader.copied
    return values[:3], values[3], values[HEAD:end], values[end:].reshape(-1, gradients)


def sums_of(count):
    """Signed sums of tensors too long for places of their own."""
    return Sums(range(count), signs(), 2**14, direct=False)


@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_one_call_reads_norms_rows_copies_and_products(dtype):
    """Tensors told by their addresses give the norms and rows of the other way, and the copied entries themselves."""
    every = [some_entries(count, dtype, count) for count in (5000, 300_001, 3, 0)]
    reader = tensor_reader(4, 3, [(0, 7, 700), (2, 1, 3)], checked=700, sums=sums_of(3))
    for everything in (False, True):
        products, total, copied, rows = parts_of(reader, reader.read(every, everything=everything), gradients=3)
        assert rows[0].tolist() == pytest.approx(native_statistics(every[:3])[0].tolist(), rel=1e-6)
        assert total == pytest.approx(rows[0].sum())
        assert copied.tolist() == [*every[0][::7][:700].tolist(), *every[2].tolist()]
        if everything:
            assert rows[1:].tolist() == entry_statistics(every[:3])[1].tolist()
            assert products[0] == products[1] == products[2]
            assert products[0] == pytest.approx(float(np.square(rows[0]).sum()), rel=0.1)
        else:
            assert np.isnan(products).all()
    reader.forget()
    assert np.isnan(reader.read(every)[0])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e-30, 1e30, 0.0])
def test_norms_alone_are_those_with_all_rows(bad):
    """Also where squares leave the range, or an entry is not finite, both kernels say the same."""
    tensor = torch.full((300_000,), 1e-35 if bad < 1 else 1.0)
    tensor[77] = bad
    reader = tensor_reader(1, 1)
    quick, whole = (reader.read([tensor], everything=everything)[HEAD] for everything in (False, True))
    assert quick == pytest.approx(whole, rel=1e-6, nan_ok=True)


def test_what_cannot_be_read_in_one_call_is_refused():
    """Nothing is read of strided, sparse, complex, whole-number or shorter tensors, nor beyond a storage's end."""
    plain = torch.randn(6, 4)
    cut = torch.randn(64)
    cut.untyped_storage().resize_(32)
    others = (plain.t(), plain[:, ::2], plain.expand(2, 6, 4), plain.to_sparse(), plain.to(torch.complex64), cut)
    for other in (*others, plain.int(), torch.randn(5), plain.to("meta")):
        assert tensor_reader(2, 2, [(1, 4, 6)]).read([plain, other]) is None
    assert tensor_reader(2, 2, [(1, 4, 6)]).read([plain, plain[1:]]) is None
    assert tensor_reader(1, 1, [(0, 4, 5)]).read([plain[1:]]) is not None
    assert tensor_reader(1, 1).begin([plain[:, ::2]]) is None


@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_a_reading_that_is_begun_and_ended_is_the_same(dtype):
    """What a thread reads meanwhile is bit for bit what one call reads, and the next compares with it."""
    every = [some_entries(count, dtype, count) for count in (5000, 300_001, 3, 0)]
    one, other = (tensor_reader(4, 3, [(0, 7, 700), (2, 1, 3)], 700, sums_of(3)) for _ in range(2))
    for factor in (1.0, -2.0):
        now = [tensor * factor for tensor in every]
        whole, begun = one.read(now, everything=True), other.begin(now, everything=True)
        assert np.array_equal(begun[4 : HEAD + other.copied], whole[4 : HEAD + other.copied], equal_nan=True)
        assert other.end()
        assert np.array_equal(begun, whole, equal_nan=True)
        assert not other.end()
