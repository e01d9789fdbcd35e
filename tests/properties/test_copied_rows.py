"""Rows that began alike and differ by rounding count as copies, of any size and format; rows that were drawn do not."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradflow_export.checks import initial_weights as initial

TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def doubles(weight):
    """Return the share of rows with a double."""
    tolerance = max(initial.ROUNDING, initial._rounding(weight.dtype))
    return initial._doubles("w", tolerance, initial._mixed(weight).numpy())["parameter.row_doubles"]["w"]


def rounded(weight, seed):
    """Return the weight with each entry off by at most one rounding."""
    noise = torch.rand(weight.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) - 0.5
    return (weight.double() * (1 + torch.finfo(weight.dtype).eps * noise)).to(weight.dtype)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@given(groups=st.integers(1, 40), times=st.integers(2, 6), columns=st.integers(2, 300), seed=st.integers(0, 99))
def test_rows_that_differ_by_rounding_are_doubles(dtype, groups, times, columns, seed):
    """Any number of groups of like rows, of any length, in any order."""
    draw = torch.Generator().manual_seed(seed)
    rows = torch.randn(groups, columns, generator=draw).repeat(times, 1)[torch.randperm(groups * times, generator=draw)]
    assert doubles(rounded(rows.to(dtype), seed)) == 1.0


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@given(columns=st.integers(2, 300), scale=st.floats(1e-3, 1e3), seed=st.integers(0, 99))
def test_the_spread_of_rows_that_differ_by_rounding_is_none(dtype, columns, scale, seed):
    """Below what the rule takes for copies."""
    row = scale * torch.randn(1, columns, generator=torch.Generator().manual_seed(seed))
    assert initial._row_spreads(rounded(row.expand(17, -1).to(dtype), seed)[None]) <= 1e-5


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("rows", [2, 10, 300, 1000])
@pytest.mark.parametrize("columns", [16, 64, 1000])
def test_rows_that_were_drawn_are_no_doubles(rows, columns, dtype):
    """Not all of them have a double by chance, and their spread is great."""
    weight = torch.randn(rows, columns).to(dtype)
    assert doubles(weight) < 0.5
    assert initial._row_spreads(weight.reshape(1, len(weight), -1)) > 0.1


@given(rows=st.integers(2, 50), columns=st.integers(2, 50), noise=st.floats(0.0, 0.1), seed=st.integers(0, 99))
def test_rows_that_move_together_have_not_parted(rows, columns, noise, seed):
    """What parts them is measured against how far they have come, not against how large they are."""
    rng = np.random.default_rng(seed)
    common, own = rng.choice([-1.0, 1.0], columns), rng.uniform(-1, 1, (rows, columns))
    level = torch.tensor(0.25, dtype=torch.float64)
    assert initial._parting(0.25 + torch.from_numpy(0.01 * (common + noise * own)), level) <= 0.12
    if rows > 9:
        assert initial._parting(0.25 + torch.from_numpy(0.01 * own), level) > 0.3
