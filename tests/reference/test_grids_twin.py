"""Weights on a grid, single nodes and their history: slow twins and known values."""

import math
from statistics import median

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gradflow_export import Exporter, MemoryWriter
from gradflow_export.instruments.discrete.node_history import (
    ALL,
    FEW,
    SMALL,
    WINDOW,
    NodeBook,
    Part,
    effectiveness,
    small,
)
from gradflow_export.metrics.discrete import SCORES, update_scores
from gradflow_export.metrics.grids import on_grid
from gradflow_export.schedule import INTERVALS

PLACES = st.lists(st.integers(-3000, 3000), min_size=2, max_size=12)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    start=PLACES, end=st.integers(0, 10**6), step=st.floats(1e-3, 10.0), shift=st.floats(-0.49, 0.49),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)  # fmt: skip
def test_an_entry_moves_by_whole_steps_or_not_at_all(start, end, step, shift, dtype):
    """On a grid of any width, shifted or not, the change is the number of steps between the two places."""
    rng = np.random.default_rng(end)
    stop = [place + int(rng.integers(-2, 3)) for place in start]
    before, after = (
        ((torch.tensor([p], dtype=torch.float64) + shift) * step).to(dtype).double() for p in (start, stop)
    )
    first, second, between = on_grid(before, after, step, torch.finfo(dtype).eps)
    steps = ((second - first) / step).round()
    assert steps[0].tolist() == [b - a for a, b in zip(start, stop, strict=True)]
    assert between.item() == 0.0
    assert torch.equal(first == second, steps == 0)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(places=st.lists(st.floats(-50, 50), min_size=3, max_size=20), step=st.floats(0.01, 10.0))
def test_weights_between_points_are_rounded_each_by_itself(places, step):
    """As a forward pass rounds them, where they do not all lie at one distance from the points."""
    spread = [place + 0.37 * (k % 3 - 1) for k, place in enumerate(np.round(places))]
    weights = torch.tensor([spread], dtype=torch.float64) * step
    first, _, between = on_grid(weights, weights, step, torch.finfo(torch.float64).eps)
    assert first[0].tolist() == pytest.approx([round(place) * step for place in spread], abs=1e-9)
    assert between.item() == 1.0


def test_one_weight_alone_lies_on_the_grid_as_it_was_declared():
    """It has no neighbours by which a shift would show."""
    first, second, between = on_grid(torch.tensor([[0.45]]).double(), torch.tensor([[0.55]]).double(), 1.0, 1e-7)
    assert (first.item(), second.item(), between.item()) == (0.0, 1.0, 1.0)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.tuples(*[st.floats(-8, 8).map(lambda x: round(x, 3))] * 4), min_size=1, max_size=20))
def test_the_score_of_a_node_is_that_of_a_parameter(rows):
    """The worker's sums give what the scores of whole tensors give."""
    values = torch.tensor(rows, dtype=torch.float64)
    d, e = values[:, :2], values[:, 2:]
    facts = torch.stack([d[:, 0], d[:, 0], (d * e).sum(1), d.square().sum(1), e.square().sum(1)], dim=1)
    expected = update_scores(list(d), list(e))[SCORES.index("effectiveness")].tolist()
    assert effectiveness(facts.numpy()).tolist() == pytest.approx(expected, abs=1e-9, nan_ok=True)


def small_twin(sizes):
    """Return the nodes with unusually small gradients, by plain loops."""
    centre = median(sizes)
    if len(sizes) < 3 or centre <= 0:
        return []
    logs = [math.log(size / centre) if size > 0 else -math.inf for size in sizes]
    limit = max(6 * 1.4826 * median([abs(x) for x in logs]), math.log(20))
    order = sorted(range(len(sizes)), key=lambda row: logs[row])
    return [row for row in order[:SMALL] if logs[row] < -limit]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(st.one_of(st.just(0.0), st.floats(1e-9, 1e9)), min_size=1, max_size=40))
def test_small_nodes_equal_the_twin(sizes):
    """Far below the median of their tensor, at most eight, least first; each with its share of the median."""
    found = list(small(np.array(sizes)))
    assert [row for row, _ in found] == small_twin(sizes)
    assert all(share == pytest.approx(sizes[row] / median(sizes)) for row, share in found)


@pytest.mark.parametrize("nodes", [1, 7, ALL, ALL + 1, 4000])
def test_nodes_are_named_and_remembered_in_bounded_memory(nodes):
    """All of few, and of many those that changed least often; frequencies are over the last fifty updates."""
    book = NodeBook()
    changed = np.zeros((80, nodes), dtype=bool)
    for update in range(80):
        changed[update] = (np.arange(nodes) + update) % (1 + np.arange(nodes) % 5) == 0
        facts = np.zeros((nodes, 5))
        facts[:, 1] = changed[update]
        told = book.take([Part("w", nodes, 3)], facts)["node.update_frequency"]
    expected = {f"w[{3 * row}]": changed[-WINDOW:, row].mean() for row in range(nodes)}
    assert told == pytest.approx({name: expected[name] for name in told})
    assert len(told) == (nodes if nodes <= ALL else FEW)
    assert max(told.values()) == (max(expected.values()) if nodes <= ALL else sorted(expected.values())[FEW - 1])
    assert sum(known.nbytes for known in book._changed.values()) == WINDOW * nodes


def test_a_tensor_that_is_resized_begins_anew():
    """Rows are told by their number; another number of rows are other nodes."""
    book = NodeBook()
    book.take([Part("w", 2, 1)], np.zeros((2, 5)))
    told = book.take([Part("w", 3, 1), Part("b", 1, 1, vector=True)], np.ones((4, 5)))
    assert told["node.update_frequency"] == {"w[0]": 1.0, "w[1]": 1.0, "w[2]": 1.0, "b": 1.0}


def test_what_a_record_says_of_a_declared_grid():
    """Change, share of entries read and effectiveness by node are those of the weights rounded to the grid, by hand."""
    torch.manual_seed(0)
    step, model, seen = 0.05, nn.Sequential(nn.Linear(4, 3)), []
    optimizer, memory = torch.optim.SGD(model.parameters(), lr=0.3), MemoryWriter()
    exporter = Exporter(model, backends=[memory], budget=None, strict=True, intervals=dict.fromkeys(INTERVALS, 1))
    with exporter.watch(grids={"0.weight": step}):
        for _ in range(6):
            before = model[0].weight.detach().double().clone()
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
            after = model[0].weight.detach().double()
            seen.append(((after / step).round() * step - (before / step).round() * step, after - before))
    for record, (change, _) in zip(memory.records, seen, strict=True):
        norm = pytest.approx(float(change.norm()), rel=1e-5)
        assert record.value("parameter.change_norm", "0.weight") == norm
        assert record.value("update.change_norm") == norm
        assert record.value("parameter.read_share", "0.weight") == 1.0
        assert record.value("parameter.grid", "0.weight") == pytest.approx(step)
        assert record.value("parameter.between", "0.weight") == 1.0
        assert not record.get("node.small")
    change, meant = seen[0]
    for row in range(3):
        cosine = float(change[row] @ meant[row] / (change[row].norm() * meant[row].norm()))
        ratio = float(change[row].norm() / meant[row].norm())
        told = memory.records[0].value("node.effectiveness", f"0.weight[{row}]")
        assert told == pytest.approx(max(cosine, 0.0) * min(ratio, 1 / ratio), rel=1e-4)
