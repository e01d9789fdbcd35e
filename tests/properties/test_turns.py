"""A node that turns by an angle is said to turn by that angle, however many entries it has and however they are kept."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gradflow_export import Exporter, MemoryWriter
from gradflow_export.metrics.phase import row_changes, row_turns, wrap

LENGTHS = st.integers(1, 3000)
ANGLES = st.floats(1e-3, 3.0)


def holds_for(**strategies):
    """Try a law on sixty examples, the same ones every time."""
    return lambda law: settings(max_examples=60, deadline=None, derandomize=True)(given(**strategies)(law))


def turned(kind, entries, angle, dtype):
    """Return three nodes before and after a turn: named phases, complex weights, or real rows."""
    if kind == "phases":
        before = torch.rand(3, entries).to(dtype) - 0.5
        return before, before + angle
    if kind == "complex":
        before = torch.polar(torch.rand(3, entries) + 0.5, 6 * torch.rand(3, entries))
        return before.to(dtype), (before * complex(math.cos(angle), math.sin(angle))).to(dtype)
    u, v = torch.linalg.qr(torch.randn(entries, 2, dtype=torch.float64))[0].T
    before = u.expand(3, -1)
    return before.to(dtype), (math.cos(angle) * before + math.sin(angle) * v).to(dtype)


class Holder(nn.Module):
    """Holds nodes, which the caller moves."""

    def __init__(self, weights):
        super().__init__()
        self.w = nn.Parameter(weights.clone())
        if not weights.is_complex():
            self.size = nn.Parameter(torch.ones_like(weights))

    def forward(self, x):
        """Return something that depends on all of it."""
        return sum(p.abs().sum() for p in self.parameters()) * x


def told(kind, before, after):
    """Return what an exporter says when weights go from here to there between two forward passes."""
    model, memory = Holder(before), MemoryWriter()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    pairs = {"phases": [("w", "size")], "complex": None, "rows": "rows"}[kind]
    with Exporter(model, backends=[memory], strict=True).watch(pairs=pairs):
        model(torch.ones(())).real.backward()
        optimizer.step()
        with torch.no_grad():
            model.w.copy_(after)
    return memory.records[0].value("node.phase_change", "w")


@pytest.mark.parametrize(
    ("kind", "dtype", "tolerance"),
    [
        ("phases", torch.float64, 1e-6), ("phases", torch.float32, 1e-5), ("phases", torch.bfloat16, 2e-2),
        ("complex", torch.complex128, 1e-6), ("complex", torch.complex64, 1e-5),
        ("rows", torch.float64, 1e-6), ("rows", torch.float32, 1e-4), ("rows", torch.float16, 2e-2),
    ],
)  # fmt: skip
@pytest.mark.parametrize("entries", [2, 4, 64, 1024])
def test_a_turn_of_half_a_radian_reads_half_a_radian(kind, dtype, tolerance, entries):
    """Of rows of 2 to 1024 entries, in any number format, up to that format's own rounding."""
    torch.manual_seed(0)
    before, after = turned(kind, entries, 0.5, dtype)
    assert told(kind, before, after) == pytest.approx(0.5, rel=tolerance, abs=tolerance)


@holds_for(entries=LENGTHS, angle=ANGLES, seed=st.integers(0, 99))
def test_a_common_turn_is_the_turn_of_the_row(entries, angle, seed):
    """Of phases and of directions alike, within what float64 holds."""
    torch.manual_seed(seed)
    changes = wrap(torch.full((2, entries), angle, dtype=torch.float64) + 2 * math.pi * (seed % 3 - 1))
    assert row_turns(changes).tolist() == pytest.approx([angle] * 2, rel=1e-9)
    if entries > 1:
        before, after = turned("rows", entries, angle, torch.float64)
        assert row_changes(before, after)[0].tolist() == pytest.approx([angle] * 3, rel=1e-7)


@holds_for(row=st.lists(st.floats(-3, 3, width=16), min_size=1, max_size=40), repeats=st.integers(1, 20))
def test_a_row_repeated_turns_by_the_same(row, repeats):
    """The turn lies between the least and the greatest of its entries, and equals the plain root mean square."""
    once, often = (row_turns(torch.tensor([row * n], dtype=torch.float64)).item() for n in (1, repeats))
    sizes = [abs(angle) for angle in row]
    assert often == pytest.approx(once, rel=1e-9)
    assert once == pytest.approx(math.sqrt(math.fsum(x * x for x in sizes) / len(sizes)), rel=1e-12)
    assert min(sizes) * (1 - 1e-12) <= once <= max(sizes) * (1 + 1e-12)


def test_entries_without_a_phase_do_not_count():
    """A complex row of which half is zero turns by what the others turn by; one that is all zero turns by nothing."""
    before = torch.tensor([[1.0 + 0j, 0, 2, 0], [0, 0, 0, 0]], dtype=torch.complex128)
    after = before * complex(math.cos(0.5), math.sin(0.5))
    assert told("complex", before, after) == pytest.approx(0.25)
