"""Changes of tensors too long to be copied, checksums, and the cosine of all gradients, against plain float64."""

import math

import numpy as np
import pytest
import torch

from gradflow_export.metrics.arrays import sketch
from gradflow_export.metrics.arrays.change import Kept, KeptAll
from gradflow_export.metrics.arrays.checksum import checksum
from gradflow_export.metrics.arrays.one_pass import tensor_reader
from gradflow_export.metrics.arrays.sketch import BLOCK, NORM_ERROR, seed_of, signed_sums, signs, touched_rows
from gradflow_export.metrics.direction import (
    BUCKETS,
    COSINE_ERROR,
    EXACT,
    Products,
    cosine_of,
    gradient_pieces,
    products,
)
from gradflow_export.native.tensors import Sums

KINDS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
SHAPES = ((1, 1), (3, 7), (2, BLOCK), (1025, 1), (5, 3, 7), (777, 53), (1, 5000))


@pytest.fixture(params=["1", "0"], ids=["library", "torch"])
def _way(request, monkeypatch):
    monkeypatch.setenv("GRADFLOW_NATIVE", request.param)


def moved_by(kept_of, before, after):
    """Return the change that is told and the true one, as float64."""
    kept = kept_of(before)
    true = float((after.double() - before.double()).norm())
    return kept.compare(after), true


@pytest.mark.parametrize("dtype", KINDS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sums_of_the_library_are_those_of_torch(dtype, shape):
    """Whatever the shape and type, and whichever rows are left out."""
    torch.manual_seed(0)
    x = torch.randn(shape).to(dtype)
    for rows in (None, torch.zeros(1, dtype=torch.int64), torch.arange(shape[0])[::2], torch.arange(shape[0])):
        sums, squares = signed_sums(x, seed_of(5), rows)
        other, others = sketch._by_torch(x, seed_of(5), rows)
        assert torch.allclose(sums, other, rtol=1e-12, atol=1e-12)
        kept = torch.ones(shape[0], dtype=torch.bool)
        if rows is not None:
            kept[rows] = False
        assert float(squares) == pytest.approx(float(x[kept].double().square().sum()), rel=1e-12)
        assert float(others) == pytest.approx(float(squares), rel=1e-12)


def test_long_tensors_are_summed_alike_by_any_number_of_threads():
    """Stretches are cut in the same places, rows that are left out may cross them."""
    x = torch.randn(2**20 // 48 + 5, 48)
    rows = torch.arange(len(x))[:: len(x) // 7]
    found = []
    for threads in (1, 2, 3):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            found.append(signed_sums(x, 1, rows)[0])
        finally:
            torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    assert torch.allclose(found[0], sketch._by_torch(x, 1, rows)[0], rtol=1e-9, atol=1e-9)


MOVES = {
    "all alike": lambda x, _g: x + 1e-3,
    "all at random": lambda x, g: x + 1e-3 * torch.randn(x.shape, generator=g),
    "one column": lambda x, g: x + 1e-3 * torch.randn(len(x), 1, generator=g) * (torch.arange(x.shape[1]) == 3),
    "a few rows": lambda x, g: x + 1e-3 * torch.randn(x.shape, generator=g) * (torch.arange(len(x)) % 97 == 5)[:, None],
    "one entry": lambda x, _g: x + (torch.arange(x.numel()).reshape(x.shape) == 1234),
}


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("move", MOVES)
def test_a_change_that_is_estimated_is_unbiased_within_the_error_it_states(move):
    """Over many readings the mean of the squares is the true one, and they scatter as far as is said, at most."""
    generator = torch.Generator().manual_seed(0)
    before = torch.randn(400, 64, generator=generator)
    after = MOVES[move](before, generator)
    readings = 200
    ratios, stated = [], []
    none = torch.zeros(0, dtype=torch.int64)
    for number in range(readings):
        change, true = moved_by(lambda x, n=number: Kept(x, none, n, sparse=False), before, after)
        ratios.append((float(change.moved) / true) ** 2)
        stated.append(float(change.moved_error))
        assert float(change.before) == pytest.approx(float(before.double().norm()), rel=1e-6)
        assert float(change.before_error) == 0.0
    spread = np.std(ratios)
    assert np.mean(ratios) == pytest.approx(1.0, abs=5 * max(spread, 1e-9) / math.sqrt(readings))
    assert spread <= 1.25 * 2 * NORM_ERROR
    assert stated == pytest.approx([NORM_ERROR] * readings)


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("dtype", KINDS, ids=str)
@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize("touched", [0, 1, 7, 300])
def test_rows_that_are_told_are_exact(dtype, sparse, touched):
    """Any number of touched rows: where nothing else moves, the change is exact and the error 0."""
    torch.manual_seed(touched)
    before = torch.randn(300, 5, 3).to(dtype)
    rows = torch.randperm(300)[:touched].sort().values
    after = before.clone()
    after[rows] += 0.25
    change, true = moved_by(lambda x: Kept(x, rows, 1, sparse=sparse), before, after)
    assert float(change.moved) == pytest.approx(true, rel=1e-12)
    assert float(change.moved_error) == 0.0


def test_what_a_sparse_gradient_leaves_is_sampled_with_its_error():
    """Weights that decay everywhere are told from blocks; the truth lies within a few of the errors that are stated."""
    torch.manual_seed(0)
    before = torch.randn(40_000, 16) * torch.rand(40_000, 1)
    rows = torch.arange(0, 40_000, 997)
    after = before * 0.99
    after[rows] += 1.0
    off, far = [], []
    for number in range(60):
        change, true = moved_by(lambda x, n=number: Kept(x, rows, n, sparse=True), before, after)
        assert 0 < float(change.moved_error) < 0.2
        off.append((float(change.moved) / true - 1.0) / float(change.moved_error))
        far.append((float(change.before) / float(before.double().norm()) - 1.0) / float(change.before_error))
    for scores in (off, far):
        assert abs(np.mean(scores)) < 5 / math.sqrt(60)
        assert 0.5 < np.std(scores) < 2.0


def test_a_tensor_of_another_shape_has_no_change():
    """What became something else between is not compared."""
    none = torch.zeros(0, dtype=torch.int64)
    assert Kept(torch.ones(4, 4), none, 1, sparse=False).compare(torch.ones(4, 5)) is None


@pytest.mark.usefixtures("_way")
@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_many_tensors_are_kept_as_each_of_them_is(dtype):
    """Dense ones by one call, and beside them some with rows, a sparse one and one that is not contiguous."""
    torch.manual_seed(0)
    shapes = ((300, 70), (40, 30), (1025, 1030), (64, 64), (50, 3, 3), (7, BLOCK))
    before = [torch.randn(shape).to(dtype) for shape in shapes]
    before[3] = before[3].t()
    none = torch.zeros(0, dtype=torch.int64)
    rows = [
        (none, False),
        (torch.tensor([1, 5]), False),
        *[(none, False)] * 2,
        (torch.tensor([2]), True),
        (none, False),
    ]
    after = [x + 0.25 * torch.randn(x.shape).to(dtype) for x in before]
    after[5][:] = before[5]
    alone = [Kept(x, found, 3, sparse=sparse) for x, (found, sparse) in zip(before, rows, strict=True)]
    told = KeptAll(before, rows, 3).compare(after)
    for place, kept in enumerate(alone):
        change = kept.compare(after[place])
        expected = (change.before, change.moved, change.before_error, change.moved_error)
        assert [float(column[place]) for column in told] == pytest.approx([float(e) for e in expected], rel=1e-9)
    assert float(told[1][5]) == float(told[3][5]) == 0.0


@pytest.mark.usefixtures("_way")
def test_what_many_tensors_became_meanwhile_is_told_where_it_can_be():
    """One that is no longer contiguous is; of one that has another shape nothing is known."""
    before = [torch.randn(64, 64), torch.randn(30, 50)]
    none = torch.zeros(0, dtype=torch.int64)
    kept = KeptAll(before, [(none, False)] * 2, 1)
    plain = kept.compare([before[0] + 1.0, before[1]])
    turned = kept.compare([(before[0] + 1.0).t().contiguous().t(), before[1]])
    assert [list(map(float, column)) for column in turned] == [pytest.approx(list(map(float, c))) for c in plain]
    assert kept.compare([before[0], before[1].t()]) is None


@pytest.mark.parametrize("dtype", KINDS, ids=str)
@pytest.mark.parametrize("width", [1, 3, 64, 1000])
def test_touched_rows_are_those_that_are_not_all_zero(dtype, width):
    """Rows of any width; -0.0 is zero, NaN is not; beyond the limit nothing is told."""
    gradient = torch.zeros(50, width, dtype=dtype)
    gradient[3, 0], gradient[17, -1], gradient[49, width // 2] = 1.0, math.nan, -1e-7
    gradient[20] = -0.0
    assert touched_rows(gradient, 3).tolist() == [3, 17, 49]
    assert touched_rows(gradient, 2) is None
    assert touched_rows(torch.zeros(5, width, dtype=dtype), 0).tolist() == []


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("kind", [*KINDS, torch.complex64, torch.int32, torch.uint8, torch.bool], ids=str)
@pytest.mark.parametrize("size", [1, 7, 31, 32, 33, 1000])
def test_a_checksum_tells_every_entry_that_changes(kind, size):
    """Any one entry, by its last bit or its sign, written in whichever way; the same bits give the same number."""
    torch.manual_seed(0)
    x = (torch.randn(size) * 100).to(kind)
    known = int(checksum(x))
    assert int(checksum(x.clone())) == known
    bits = x.view(torch.uint8)
    for place in {0, size // 2, size - 1}:
        for byte in (0, x.element_size() - 1):
            old = int(bits[place * x.element_size() + byte])
            bits.data[place * x.element_size() + byte] = old ^ 1
            assert int(checksum(x)) != known
            bits.data[place * x.element_size() + byte] = old
    assert int(checksum(x)) == known
    if kind.is_floating_point and size > 1:
        assert int(checksum(-x)) != known
        assert int(checksum(x.flip(0))) != known
        assert checksum(x[::2].expand(2, -1)) is not None


def test_what_has_no_bits_has_no_checksum():
    """Sparse tensors and those without memory are left out."""
    assert checksum(torch.eye(3).to_sparse()) is None
    assert checksum(torch.ones(3, device="meta")) is None


def angle(sizes, share, dtype=torch.float32):
    """Return two lists of tensors, and the cosine of the vectors that they make."""
    torch.manual_seed(0)
    first = [torch.randn(n).to(dtype) for n in sizes]
    second = [share * a + (1 - share) * torch.randn(a.shape).to(dtype) for a in first]
    x, y = (torch.cat([t.double() for t in each]) for each in (first, second))
    return first, second, float(x @ y / (x.norm() * y.norm()))


@pytest.mark.parametrize("dtype", KINDS, ids=str)
@pytest.mark.parametrize("total", [1, 100, EXACT - 1, EXACT, EXACT + 1, 100_000, 2**20 + 7])
def test_the_cosine_is_exact_up_to_a_size_and_within_its_error_beyond(dtype, total):
    """By the library, over all entries, whatever tensors they are in; the next reading compares with this one."""
    sizes = [total // 3, total - total // 3 - total // 2, total // 2]
    direct = total <= EXACT
    places = [0, sizes[0], sizes[0] + sizes[1]] if direct else [0, 1, 2]
    sums = Sums(places, signs(), total if direct else BUCKETS, direct, dtype is torch.float64)
    for share in (0.0, 0.4, 1.0):
        first, second, true = angle(sizes, share, dtype)
        reader = tensor_reader(3, 3, sums=sums, entries=total)
        reader.read(first)
        value, error = cosine_of([Products(reader.read(second)[None, :3], summed=not direct)])
        assert error <= COSINE_ERROR
        assert value == pytest.approx(true, abs=max(5 * error, 2e-6)), share
        assert (error == 0.0) is (direct or abs(value) == 1.0)


def test_gradients_that_come_and_go_are_compared_as_zeros():
    """A reader of other tensors goes on from the one before it, each tensor in its place."""
    a, b = torch.randn(500), torch.randn(300)
    one = tensor_reader(2, 2, sums=Sums([0, 500], signs(), 800, direct=True))
    one.read([a, b])
    other = tensor_reader(1, 1, sums=Sums([500], signs(), 800, direct=True))
    other.follow(one)
    both, first, second = other.read([2 * b])[:3].tolist()
    assert both == pytest.approx(2 * float(b.double() @ b.double()), rel=1e-6)
    assert first == pytest.approx(float(a.double() @ a.double() + b.double() @ b.double()), rel=1e-6)
    assert second == pytest.approx(4 * float(b.double() @ b.double()), rel=1e-6)
    longer = tensor_reader(1, 1, sums=Sums([500], signs(), 900, direct=True))
    longer.follow(one)
    assert not longer.compares


def test_pieces_are_drawn_over_all_entries_with_an_error_that_holds():
    """Without the library: tensors of all sizes, one of which alone says something, and vectors that are all alike."""
    for sizes in ([50_000, 3, 200_000, 1, 70_000], [500] * 300):
        inside = 0
        for seed in range(40):
            generator = torch.Generator().manual_seed(seed)
            first = [torch.randn(n, generator=generator) for n in sizes]
            second = [0.5 * a + torch.randn(a.shape, generator=generator) for a in first]
            x, y = (torch.cat(each).double() for each in (first, second))
            true = float(x @ y / (x.norm() * y.norm()))
            (a, weights), (b, _) = gradient_pieces(first), gradient_pieces(second)
            value, error = cosine_of([Products(products(a, b, weights))])
            assert 0 < float(error) < 0.1
            inside += abs(float(value) - true) < 3 * float(error)
        assert inside >= 36
