"""The GPU kernel's logic equals the slow twins in triton's interpreter, it compiles, and its absence changes nothing."""

import math
import os
import pickle
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gradflow_export.metrics.arrays import one_launch as onelaunch
from gradflow_export.metrics.arrays.entries import ENTRY_STATISTICS
from gradflow_export.metrics.arrays.one_pass import native_statistics

KINDS = ("float32", "float64", "bfloat16", "float16")
BLOCK, PIECE = 1024, 16_384
COUNTS = (0, 1, 2, 31, BLOCK - 1, BLOCK, BLOCK + 1, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE + 5)
SPECIAL = (0.0, -0.0, math.nan, math.inf, -math.inf)


@contextmanager
def worker(interpreted, cache):
    """Ask a process that holds the kernel."""
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("triton_worker.py"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "TRITON_INTERPRET": "1" if interpreted else "0", "TRITON_CACHE_DIR": str(cache)},
    )

    def ask(name, *arguments):
        pickle.dump((name, arguments), process.stdin)
        process.stdin.flush()
        answer = pickle.load(process.stdout)
        if isinstance(answer, Exception):
            raise answer
        return answer

    try:
        yield ask
    finally:
        process.stdin.close()
        process.wait(100)
        process.stdout.close()


@pytest.fixture(scope="module")
def interpreter(tmp_path_factory):
    """Return a function that computes the kernel's rows of host tensors, which may be views."""
    with worker(True, tmp_path_factory.mktemp("triton")) as ask:

        def rows(tensors, joined=False):
            arrays = []
            for tensor in tensors:
                data = tensor.untyped_storage()
                raw = bytes(torch.tensor(data, dtype=torch.uint8).numpy()) if len(data) else b""
                arrays.append((raw, str(tensor.dtype)[6:], tensor.storage_offset(), tensor.numel()))
            return np.array(ask("interpret", arrays, joined))

        yield rows


def some_entries(count, kind, seed=0):
    """Random entries with exact zeros, negative zeros and subnormals among them."""
    dtype = getattr(torch, kind)
    entries = torch.randn(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)
    entries[::7], entries[3::11], entries[5::13] = 0.0, -0.0, torch.finfo(dtype).tiny / 2
    return entries


def expected(tensor):
    """Rows in float64, each by the operation it is defined by."""
    wide = tensor.double().numpy()
    known = wide[~np.isnan(wide)]
    with np.errstate(over="ignore", invalid="ignore"):
        norm, magnitudes = np.sqrt(np.sum(wide**2)), np.sum(np.abs(wide))
    return (
        norm,
        magnitudes,
        known.max(initial=-math.inf),
        known.min(initial=math.inf),
        np.count_nonzero(wide == 0),
        np.count_nonzero(~np.isfinite(wide)),
        wide.size,
    )


@pytest.mark.parametrize("kind", KINDS)
def test_all_rows_equal_the_reference(kind, interpreter, twin):
    """Lengths around the edges of blocks and pieces, in one call, give the twins' norms, sums, extremes and counts."""
    every = [some_entries(count, kind, count) for count in COUNTS]
    found = interpreter(every)
    for tensor, rows in zip(every, found.T, strict=True):
        assert rows == pytest.approx(expected(tensor), rel=1e-12)
    assert found[0] == pytest.approx([twin.l2(tensor) for tensor in every], rel=1e-12)
    assert found[:6] == pytest.approx(native_statistics(every), rel=2e-6)


def test_the_rows_of_the_exporter_are_those_of_the_twins(interpreter, twin):
    """L1, greatest, mean, zero share and non-finite of types mixed in one call, with NaN shown in all but the share."""
    every = [some_entries(2000, kind, seed) for seed, kind in enumerate(KINDS * 2)]
    norms, *rows = interpreter(every, joined=True)
    found = dict(zip(ENTRY_STATISTICS, rows, strict=True))
    assert norms == pytest.approx([twin.l2(tensor) for tensor in every])
    for name in ("l1", "linf", "mean", "zero_share"):
        assert found[name] == pytest.approx([getattr(twin, name)(tensor) for tensor in every]), name
    assert found["nonfinite"].tolist() == [0.0] * len(every)
    every[5][17] = math.nan
    sick = interpreter(every, joined=True)[:, 5]
    assert np.isnan(sick[:4]).all()
    assert sick[4:].tolist() == [twin.zero_share(every[5]), 1.0]


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(KINDS),
            st.one_of(st.sampled_from([0, 1, BLOCK, BLOCK + 1, PIECE, PIECE + 1]), st.integers(0, 3000)),
            st.integers(0, 3),
            st.dictionaries(st.integers(0, 20_000), st.sampled_from(SPECIAL), max_size=4),
            st.sampled_from([1e-42, 1e-30, 1e-4, 1.0, 1e20, 3e37]),
        ),
        min_size=1,
        max_size=5,
    )
)
def test_any_mixture_equals_the_reference(interpreter, cases):
    """Types, lengths, views that start anywhere, NaN, Inf, -0 and entries whose squares leave float32, all mixed."""
    every = []
    for kind, count, skip, special, scale in cases:
        entries = some_entries(count + skip, "float64", count).mul(scale).to(getattr(torch, kind))[skip:]
        for place, value in special.items():
            if count:
                entries[place % count] = value
        every.append(entries)
    found, reference = interpreter(every).T, np.array([expected(tensor) for tensor in every])
    assert found == pytest.approx(reference, rel=1e-12, abs=0.0, nan_ok=True)


def test_every_half_is_read_as_torch_reads_it(interpreter):
    """All 65 536 bit patterns of both half types: extremes, zeros, non-finite and the sum of the finite ones."""
    patterns = torch.from_numpy(np.arange(65536, dtype=np.uint16).view(np.int16))
    for dtype in (torch.float16, torch.bfloat16):
        values = patterns.view(dtype)
        finite = values[torch.isfinite(values)].contiguous()
        found = interpreter([finite, values])
        assert found[:, 0] == pytest.approx(expected(finite), rel=1e-12)
        assert found[4:, 1].tolist() == [2, len(values) - len(finite), 65536]


def test_it_compiles_for_gpus(tmp_path):
    """Both launches compile for an A100 without one being there, and load several entries at once where they may."""
    with worker(False, tmp_path) as ask:
        assert all(size > 1000 for size in ask("compile_for", 80).values())


def test_tensors_on_the_host_are_left_to_others(monkeypatch):
    """Only CUDA tensors are taken, and the environment can forbid those too."""
    assert onelaunch.device_statistics([torch.ones(3)]) is None
    assert onelaunch.available()
    monkeypatch.setenv("GRADFLOW_TRITON", "0")
    assert not onelaunch.available()


def test_channels_last_needs_no_copy_and_a_strided_view_gets_one():
    """What lies densely in memory is read where it is, in whatever order; other views are copied first."""
    image = torch.randn(2, 3, 4, 5)
    assert onelaunch._is_dense(image)
    assert onelaunch._is_dense(image.to(memory_format=torch.channels_last))
    assert not onelaunch._is_dense(image[..., ::2])
    assert not onelaunch._is_dense(image[0].transpose(0, 1))
