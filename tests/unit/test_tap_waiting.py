"""Tensors that wait to be read together are read as they were, and what torch reads is the same."""

import pytest
import torch
from torch import nn

from gradflow_export import Exporter, MemoryWriter
from gradflow_export.taps.waiting import BYTES, Waiting


class Reads:
    """Notes which sites were read together, and the values they had."""

    def __init__(self):
        self.batches, self.seen = [], []
        self.waiting = Waiting(self)

    def __call__(self, sites, tensors):
        self.batches.append(list(sites))
        self.seen += [(site, float(tensor.sum())) for site, tensor in zip(sites, tensors, strict=True)]


def test_quiet_sites_wait_for_each_other():
    """The first time each is read at once, afterwards together."""
    reads = Reads()
    for _ in range(2):
        for site in range(3):
            assert reads.waiting.offer(site, torch.full((2,), float(site)))
        reads.waiting.flush()
    assert reads.batches == [[0], [1], [2], [0, 1, 2]]
    assert reads.seen[3:] == [(0, 0.0), (1, 2.0), (2, 4.0)]


def test_what_changes_in_place_is_never_read_late():
    """Such a site is always read at once; one that begins to change later is left out once."""
    reads = Reads()
    for step in range(4):
        early, late = torch.ones(1), torch.ones(1)
        for site, tensor in enumerate((early, late)):
            assert reads.waiting.offer(site, tensor)
        early.zero_()
        if step == 2:
            late.zero_()
        reads.waiting.flush()
    assert reads.seen == [(0, 1.0), (1, 1.0), (0, 1.0), (1, 1.0), (0, 1.0), (0, 1.0), (1, 1.0)]


def test_little_waits_and_subclasses_do_not():
    """Beyond a few hundred kilobytes all is read; a subclass is left to torch."""
    reads = Reads()
    large = torch.ones(BYTES // 4 + 1)
    for _ in range(2):
        assert reads.waiting.offer(0, large)
    assert reads.batches == [[0], [0]]
    assert not reads.waiting.offer(1, large.as_subclass(type("Own", (torch.Tensor,), {})))


@pytest.mark.parametrize("inplace", [False, True])
def test_both_ways_of_reading_say_the_same(inplace, monkeypatch):
    """Block gains, output sizes and spreads, dead and zero shares, updates: with the C library as without."""
    readings = []
    for switch in ("1", "0"):
        monkeypatch.setenv("GRADFLOW_NATIVE", switch)
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(12, 12), nn.ReLU(inplace=inplace)) for _ in range(3)]
        model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(inplace=inplace), nn.Flatten(), *layers, nn.Linear(12, 1))
        model[0].bias.data[1] = -100.0
        optimizer, writer = torch.optim.SGD(model.parameters(), lr=0.1), MemoryWriter()
        with Exporter(model, backends=[writer], strict=True).watch():
            for _ in range(7):
                for _ in range(2):
                    model(torch.randn(5, 2, 4, 4)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        readings.append([{r.metric: list(r.values[r.present]) for r in record.readings} for record in writer.records])
    for native, plain in zip(*readings, strict=True):
        assert native.keys() == plain.keys()
        names = [name for name in native if not name.startswith(("runtime.", "overhead", "flow.", "loss.time"))]
        assert {"block.gradient_norm", "block.output_spread", "activation.dead_share"} <= set(names)
        for name in names:
            assert native[name] == pytest.approx(plain[name], rel=1e-4, abs=1e-6, nan_ok=True), name
    assert readings[0][-1]["activation.dead_share"][0] == pytest.approx(1 / 3)
