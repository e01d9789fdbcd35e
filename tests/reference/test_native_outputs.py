"""The C library's readings of outputs and of updates equal those that torch makes of the same tensors."""

import math

import numpy as np
import pytest
import torch

from gradflow_export.metrics.arrays.one_pass import interface
from gradflow_export.metrics.arrays.samples import rows_of, size_of_rows
from gradflow_export.metrics.outputs import output_spreads
from gradflow_export.metrics.units import dead_shares, greatest_outputs, zero_share
from gradflow_export.native.changes import ChangeReader
from gradflow_export.native.outputs import GradientReader, OutputReader, grid_of, read_rectified

KINDS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
SHAPES = ((), (7,), (1,), (3, 5), (100, 200), (128, 64), (2, 300, 90), (5, 3, 9, 11), (200, 4, 2, 3), (2, 70, 3, 3, 3))


def reader_of(grids, rows=256, columns=512):
    """Return a reader of outputs and the arrays that it writes: sizes, spreads, errors, each with marks."""
    count = len(grids)
    arrays = [array for _ in range(3) for array in (np.full(count, -1.0), np.zeros(count, dtype=bool))]
    reader = OutputReader(interface(), *arrays, rows, columns)
    for site, grid in enumerate(grids):
        reader.grids[site] = grid
    return reader, arrays


@pytest.mark.parametrize("dtype", KINDS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sizes_and_spreads_are_those_of_the_rows(shape, dtype):
    """The same rows and columns are taken as torch takes, and the spread is that of their centred entries."""
    torch.manual_seed(1)
    tensor = (torch.randn(shape) + 3).to(dtype)
    limits = ((32, 64), (256, 512), (1, 1))
    reader, (sizes, sized, spreads, spread, errors, told) = reader_of([grid_of(shape, *limit) for limit in limits])
    for site, (rows, features) in enumerate(limits):
        taken = rows_of(tensor, rows, features).double()
        assert reader.read(site, tensor)
        assert sizes[site] == pytest.approx(float(tensor.double().square().mean().sqrt()), rel=1e-6)
        value, error = output_spreads([taken], [size_of_rows(tensor)])[:, 0].tolist()
        assert spreads[site] == pytest.approx(value, rel=1e-6, abs=1e-12)
        assert errors[site] == pytest.approx(error, rel=1e-6, abs=1e-9)
    assert sized.all()
    assert spread.all()
    assert told.all()


def test_extreme_and_broken_outputs():
    """Equal rows spread 0, a NaN or Inf is passed on, nothing overflows, and what cannot be read leaves no mark."""
    equal, wide = torch.full((40, 3), 0.1), torch.tensor([[1e200], [-1e200]], dtype=torch.float64)
    broken, infinite = torch.ones(4, 4), torch.ones(4, 4)
    broken[2, 1], infinite[0, 0] = math.nan, math.inf
    tensors = [equal, wide, broken, infinite, torch.ones(4, 4).t()[:, 1:], torch.ones(3).int(), torch.ones(0)]
    grids = [grid_of(tensor.shape, 32, 64) for tensor in tensors[:-1]]
    reader, (sizes, sized, spreads, spread, *_) = reader_of([*grids, 0])
    assert [reader.read(*pair) for pair in enumerate(tensors)] == [True] * 4 + [False] * 3
    assert list(sized) == list(spread) == [True] * 4 + [False] * 3
    assert spreads[0] == 0.0
    assert spreads[1] == pytest.approx(1e200)
    assert np.isnan([spreads[2], sizes[2], spreads[3]]).all()
    assert sizes[3] == math.inf
    assert reader.read(6, equal)
    assert spreads[6] == 0.0
    assert not reader.read(0, equal[:2])


def test_a_grid_with_more_rows_or_columns_than_there_is_room_for_is_refused():
    """Nothing is written beyond the memory that was taken for it."""
    tensor = torch.randn(50, 70)
    reader, (_, sized, *_) = reader_of([grid_of(tensor.shape, *limits) for limits in ((4, 6), (9, 6), (4, 9))], 4, 6)
    assert [reader.read(site, tensor) for site in range(3)] == [True, False, False]
    assert list(sized) == [True, False, False]


def test_norms_of_gradients_add_up():
    """What comes to one site several times is one norm over all of it; what cannot be read is not counted."""
    norms, present, arrivals = np.full(2, 7.0), np.zeros(2, dtype=bool), np.zeros(2, dtype=np.int64)
    reader = GradientReader(interface(), norms, present, arrivals)
    for part in torch.arange(12.0).split(5):
        assert reader.read(1, part)
    assert norms[1] == pytest.approx(506**0.5, rel=1e-7)
    assert not reader.read(0, torch.ones(4, 4).t()[:, 1:])
    assert (list(present), list(arrivals), norms[0]) == ([False, True], [0, 3], 7.0)


@pytest.mark.parametrize("dtype", KINDS, ids=str)
@pytest.mark.parametrize(("shape", "dim"), [((9, 5), -1), ((2, 6, 7), -1), ((3, 4, 5, 5), 1), ((2, 6, 7), 1)], ids=str)
def test_units_that_fired_and_zeros(shape, dim, dtype):
    """Shares of dead units and of zeros are those of torch; several readings add up, and NaN is no sign of death."""
    torch.manual_seed(2)
    units, inner = shape[dim], math.prod(shape[2:]) if dim == 1 else 1
    fired, greatest = np.zeros(2 * units, dtype=np.uint8), None
    for seed in range(2):
        tensor = (torch.randn(shape) - 1.0).relu().to(dtype)
        if seed:
            tensor.movedim(dim, -1)[..., 0] = math.nan
        zeros = read_rectified(interface(), [tensor, tensor], [(units, inner)] * 2, [0, units], fired)
        now = greatest_outputs(tensor, dim)
        greatest = now if greatest is None else torch.maximum(greatest, now)
        assert 1 - zeros[0] / tensor.numel() == pytest.approx(1 - float(zero_share(tensor)))
    assert fired[:units].tolist() == fired[units:].tolist()
    assert 1 - fired[:units].mean() == pytest.approx(float(dead_shares([greatest])[0]))


def test_what_has_other_units_is_refused():
    """An output whose entries are no multiple of the units is not read, nor is one that is not contiguous."""
    fired = np.zeros(8, dtype=np.uint8)
    zeros = read_rectified(interface(), [torch.ones(3, 5), torch.ones(8, 8).t()], [(8, 1)] * 2, [0, 0], fired)
    assert zeros == [-1.0, -1.0]
    assert not fired.any()


@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_changes_are_those_of_copies(dtype):
    """Norms of the weights before and of what changed; a tensor of another size or layout is refused."""
    torch.manual_seed(3)
    tensors = [torch.randn(n).to(dtype) for n in (1, 17, 1000, 0)]
    reader = ChangeReader(interface(), [len(tensor) for tensor in tensors], dtype.itemsize)
    before = [tensor.double().clone() for tensor in tensors]
    assert reader.keep(tensors)
    for tensor in tensors:
        tensor.add_(0.01)
    norms, moved = reader.compare(tensors)
    changes = [float((after.double() - old).norm()) for after, old in zip(tensors, before, strict=True)]
    assert norms.tolist() == pytest.approx([float(old.norm()) for old in before], rel=1e-6)
    assert moved.tolist() == pytest.approx(changes, rel=1e-5)
    assert not reader.keep([*tensors[:2], tensors[2][:5], tensors[3]])
    assert not reader.keep(tensors[:2])
    assert reader.compare([torch.ones(4, 4).t(), *tensors[1:]]) is None
