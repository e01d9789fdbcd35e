"""Which parameters have histograms: some of every depth, and those of layers with an issue."""

import itertools

import pytest
import torch
from torch import nn

from gradflow_export import Exporter
from gradflow_export.engine.pace import DELAY, FLAGGED, Pace
from gradflow_export.instruments.gradients.parameters import HISTOGRAMS, by_depth
from gradflow_export.schedule import Schedule
from gradflow_export.writers import MemoryWriter


@pytest.mark.parametrize("length", [1, 15, 16, 17, 61, 64, 96, 1000])
def test_choices_are_spread_from_first_to_last(length):
    """Of as many equal parts one each, whatever the number."""
    chosen = by_depth(range(length), 16)
    assert chosen == sorted(set(chosen))
    assert len(chosen) == min(length, 16)
    assert chosen[0] == 0
    assert chosen[-1] >= length * 15 // 16 - 1
    gaps = [after - before for before, after in itertools.pairwise(chosen)]
    assert max(gaps, default=1) <= 2 * max(length / 16, 1) + 1


@pytest.mark.parametrize("period", range(2, 13))
def test_no_role_is_left_out_because_blocks_are_alike(period):
    """Of blocks with so many matrices each, more than one role is met, and of four at least three."""
    for blocks in range(8, 50):
        roles = {place % period for place in by_depth(range(blocks * period), 16)}
        assert len(roles) >= min(period, 4) - 1


def test_all_blocks_of_a_model_have_their_turn():
    """Of 24 blocks, neither the largest nor the first alone."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(24)), nn.Linear(8, 999))
    memory, optimizer = MemoryWriter(), torch.optim.SGD(model.parameters(), 0.1)
    with Exporter(model, backends=[memory], intervals={"histograms": 1}).watch():
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
    sites = [h.site for h in memory.records[0].histograms if h.metric == "parameter.gradient"]
    assert len(sites) == HISTOGRAMS
    blocks = [int(site.partition(".")[0]) for site in sites]
    assert min(blocks) == 0
    assert max(blocks) >= 22
    assert len(set(blocks)) >= 14
    assert {site.split(".")[1] for site in sites if site.count(".") == 2} == {"0", "1"}


def test_layers_with_an_issue_have_histograms_from_the_step_at_which_requests_act():
    """What is read depends on records alone, however late the worker is."""

    class Worker:
        spent = (0.0, 0.0)

        def wait_past(self, step):
            pass

        def has_room(self, step):
            return True

    pace = Pace()
    pace.worker = Worker()
    pace.ask(3, ("h.7", "h.9"))
    for step in range(4, 3 + DELAY):
        pace.begin(step, Schedule(), paused=False, alone=True)
        assert not pace.flagged
    pace.begin(3 + DELAY, Schedule(), paused=False, alone=True)
    assert list(pace.flagged) == ["h.7", "h.9"]
    pace.ask(40, tuple(f"x.{number}" for number in range(2 * FLAGGED)))
    pace.begin(40 + DELAY, Schedule(), paused=False, alone=True)
    assert len(pace.flagged) == FLAGGED


def test_parameters_of_a_flagged_layer_are_read_besides():
    """Whatever of it is not chosen already, up to a few."""
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(60)))
    memory, optimizer = MemoryWriter(), torch.optim.SGD(model.parameters(), 0.1)
    with Exporter(model, backends=[memory], intervals={"histograms": 1}).watch() as exporter:
        for _ in range(2):
            model(torch.randn(4, 2)).square().mean().backward()
            optimizer.step()
            exporter._loop.pace.flagged["33"] = None
    first, second = ({h.site for h in record.histograms} for record in memory.records[:2])
    assert len(first) == HISTOGRAMS
    assert {"33.weight", "33.bias"} <= second
    assert not {"33.weight", "33.bias"} <= first
