"""Statistics of tensors against a slow twin in exact arithmetic, for every kind of tensor."""

import math
from fractions import Fraction

import pytest
import torch

from gradflow_export.metrics.arrays import tensors as module
from gradflow_export.metrics.arrays.tensors import EntryStatistics, entries_of_each, quick_entries_of_each


def slow(entries):
    """Return the statistics of a list of Python numbers, in fractions, one sum after the other."""
    numbers = [abs(x) if isinstance(x, complex) else float(x) for x in entries]
    finite = [Fraction(x) for x in numbers if math.isfinite(x)]
    n = len(finite)
    mean = sum(finite, Fraction()) / n if n else Fraction()
    spread = sum(((x - mean) ** 2 for x in finite), Fraction()) / max(n - 1, 1)
    return EntryStatistics(
        finite=n,
        mean=float(mean) if n else math.nan,
        std=root(spread) if n else math.nan,
        low=float(min(finite)) if n else math.nan,
        high=float(max(finite)) if n else math.nan,
        norm=root(sum((x * x for x in finite), Fraction())),
        zeros=sum(x == 0 for x in numbers),
        nan=sum(math.isnan(x) for x in numbers),
        inf=sum(math.isinf(x) for x in numbers),
    )


def root(value):
    """Square root of a fraction beyond the range of floats."""
    half = max((value.numerator.bit_length() - value.denominator.bit_length()) // 2, 0)
    return math.ldexp(math.sqrt(value / 4**half), half)


def kinds():
    """Tensors of every kind, and their entries as Python numbers."""
    torch.manual_seed(0)
    x = torch.randn(7, 9)
    broken = torch.tensor([1.0, math.nan, -2.0, math.inf, -math.inf, 0.0, 5.0])
    given = {
        "float32": x,
        "float64": x.double(),
        "half": x.half(),
        "bfloat16": x.bfloat16(),
        "float8": x.to(torch.float8_e4m3fn),
        "parameter": torch.nn.Parameter(x),
        "needs grad": (x.clone().requires_grad_() * 2),
        "broken": broken,
        "broken half": broken.half(),
        "nothing finite": torch.full((3,), math.nan),
        "one": torch.tensor(3.0),
        "constant": torch.full((100,), 0.1),
        "far from 0": x + 1e4,
        "zeros": torch.zeros(5),
        "tiny": x * 1e-42,
        "large": x * 1e38,
        "larger": x.double() * 1e300,
        "transposed": x.t(),
        "strided": x[:, ::2],
        "expanded": x[:, :1].expand(7, 4),
        "whole": torch.arange(-5, 12),
        "byte": torch.arange(250, 256, dtype=torch.uint8),
        "boolean": x > 0,
        "complex": torch.complex(x, x * 2),
        "conjugated": torch.complex(x, x * 2).conj(),
        "empty": torch.empty(0, 3),
    }
    out = [(name, tensor, tensor.detach().flatten().tolist()) for name, tensor in given.items()]
    coo = torch.tensor([[0.0, 2.0], [3.0, 0.0]]).to_sparse()
    doubled = torch.sparse_coo_tensor([[0, 0, 1]], [1.0, 2.0, 5.0], (4,))
    return [
        *out,
        ("sparse", coo, [2.0, 3.0]),
        ("not coalesced", doubled, [3.0, 5.0]),
        ("rows", torch.tensor([[0.0, 2.0], [3.0, 0.0]]).to_sparse_csr(), [2.0, 3.0]),
        ("nested", torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)]), [1.0, 1.0, 0.0, 0.0, 0.0]),
        ("quantised", torch.quantize_per_tensor(torch.tensor([0.5, 1.0]), 0.5, 0, torch.qint8), [0.5, 1.0]),
    ]


def close(found, wanted):
    """Whether two statistics agree: counts exactly, numbers to float32's digits of the size of the entries."""
    assert (found.finite, found.zeros, found.nan, found.inf) == (wanted.finite, wanted.zeros, wanted.nan, wanted.inf)
    size = 0.0 if not wanted.finite else max(abs(wanted.low), abs(wanted.high))
    for name in ("mean", "std", "low", "high", "norm"):
        assert getattr(found, name) == pytest.approx(getattr(wanted, name), rel=1e-4, abs=1e-6 * size, nan_ok=True), (
            name
        )


@pytest.mark.parametrize("native", ["1", "0"])
@pytest.mark.parametrize("chunk", [4, 2**16])
@pytest.mark.filterwarnings("ignore")  # PyTorch calls nested, sparse and quantised tensors beta
def test_every_kind_of_tensor_agrees_with_the_slow_twin(native, chunk, monkeypatch):
    """All kinds at once, in one chunk and in many, with the C library and without."""
    monkeypatch.setenv("GRADFLOW_NATIVE", native)
    monkeypatch.setattr(module, "_CPU_CHUNK", chunk)
    given = kinds()
    before = [tensor.detach().clone() for name, tensor, _ in given if name not in {"nested", "rows"}]
    found = entries_of_each([tensor for _, tensor, _ in given])
    for (name, _, entries), statistics in zip(given, found, strict=True):
        try:
            close(statistics, slow(entries))
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error
    after = [tensor for name, tensor, _ in given if name not in {"nested", "rows"}]
    assert all(str(old) == str(new.detach()) for old, new in zip(before, after, strict=True))


def test_chunks_are_joined_without_losing_digits(monkeypatch):
    """A spread that is a hundred-millionth of the mean is exact in float64, whatever the size of the chunks."""
    x = 1.0 + torch.arange(1000, dtype=torch.float64) * 1e-11
    monkeypatch.setattr(module, "_CPU_CHUNK", 7)
    assert entries_of_each([x])[0].std == pytest.approx(slow(x.tolist()).std, rel=1e-4)


def test_what_is_quick_is_finite_and_plain():
    """Broken, constant and unusual tensors are left to the slow way, so that a copy can be taken of them."""
    x = torch.randn(64)
    given = [x, torch.full((3,), math.nan), torch.ones(9), torch.arange(3), x[::2]]
    found = quick_entries_of_each(given)
    assert found[1:] == [None] * 4
    assert found[0] is None or found[0].finite == 64


def test_no_tensor_is_no_statistics():
    """An empty list gives an empty list."""
    assert entries_of_each([]) == []
