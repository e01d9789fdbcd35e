"""What the recurrent tap copies, what it leaves out, and what becomes of it on the worker."""

import logging

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from gradflow_export import Exporter, MemoryWriter
from gradflow_export.engine.assemble import Assembler
from gradflow_export.engine.transfer import Bundle, pack
from gradflow_export.hooks.module_calls import ModuleCalls
from gradflow_export.hooks.readings import Pending, Sample
from gradflow_export.instruments.recurrent import LARGE, LEAST_STEPS, SEQUENCES, STEPS, WORK, RecurrentInstrument


class Own(nn.LSTMCell):
    """A cell with a recurrence of its own."""

    def forward(self, x, state=None):
        h, c = super().forward(x, state)
        return nn.functional.layer_norm(h, h.shape[-1:]), c


def tap_of(model):
    return RecurrentInstrument(ModuleCalls(), model)


def sampled(tap, call):
    """Return what one armed call makes the instrument give out."""
    with tap.attach():
        tap.arm(on=True)
        call()
        return tap.drain()


@pytest.mark.parametrize(
    "model",
    [nn.Linear(2, 2), Own(3, 4), weight_norm(nn.RNN(3, 4), "weight_hh_l0"), nn.LSTM(2000, 2000)],
    ids=["none", "own recurrence", "parametrized", "too large"],
)
def test_what_cannot_be_known_is_left_out(model):
    """Without a layer that can be read there is no instrument."""
    assert tap_of(model).modules == 0


def test_few_sequences_and_steps_are_copied():
    """Of a long, wide batch 4 sequences and 64 steps travel, in float32, and the true length is told."""
    module = nn.GRU(3, 4).to(torch.bfloat16)
    (sample,) = sampled(tap_of(module), lambda: module(torch.randn(100, 9, 3, dtype=torch.bfloat16)))
    weights = sum(parameter.numel() for parameter in module.parameters())
    assert sample.values.dtype is torch.float32
    assert sample.values.numel() == weights + STEPS * SEQUENCES * 3
    assert sample.analyse(sample.values.numpy())["recurrent.length"] == {"GRU": 100.0}


def test_a_loop_beyond_the_bound_is_counted():
    """A cell called 90 times is copied 64 times, and its sequence has 90 steps."""
    cell = nn.GRUCell(3, 4)

    def loop():
        h = torch.zeros(2, 4)
        for _ in range(90):
            h = cell(torch.randn(2, 3), h)

    (sample,) = sampled(tap_of(cell), loop)
    assert len(sample.analyse.calls) == STEPS
    assert sample.analyse(sample.values.numpy())["recurrent.length"] == {"GRUCell": 90.0}


def test_a_large_layer_costs_no_more():
    """Fewer sequences and steps of a wide layer are copied, and not at every sample; work stays bounded."""
    module = nn.LSTM(600, 600)
    tap = tap_of(module)
    (known,) = tap._known
    assert known.weights > 5 * LARGE
    assert (known.sequences, known.steps) == (1, 32)
    assert known.sequences * known.steps * known.weights <= WORK
    with tap.attach():
        given = []
        for _ in range(2 * known.every):
            tap.arm(on=True)
            module(torch.randn(LEAST_STEPS, 1, 600))
            given.append(len(tap.drain()))
            tap.arm(on=False)
    assert given == [1, *[0] * (known.every - 1)] * 2


def test_what_was_copied_stays_as_it_was():
    """Weights and inputs that change after the call do not change the sample."""
    module, x = nn.RNN(3, 4), torch.randn(5, 2, 3)
    tap = tap_of(module)
    with tap.attach():
        tap.arm(on=True)
        module(x)
        with torch.no_grad():
            x.zero_()
            for parameter in module.parameters():
                parameter.zero_()
        (sample,) = tap.drain()
    assert torch.count_nonzero(sample.values) == sample.values.numel()


def test_calls_without_gradients_and_odd_arguments_are_passed_over():
    """Validation is not read, a call without positional arguments neither; nothing raises."""
    module = nn.GRU(3, 4)
    tap = tap_of(module)
    with torch.no_grad():
        assert sampled(tap, lambda: module(torch.randn(5, 2, 3))) == []
    assert sampled(tap_of(module), lambda: module(input=torch.randn(5, 2, 3))) == []


def test_a_failing_analysis_is_told_once_and_leaves_the_rest(caplog):
    """The record lacks its metrics and has all others, step after step."""

    def fails(_values):
        raise ZeroDivisionError

    def works(values):
        return {"recurrent.length": {"b": float(values.sum())}}

    assembler = Assembler()
    with caplog.at_level(logging.WARNING):
        for step in (1, 2):
            drained = [
                Sample("broken", "a", torch.ones(3), fails),
                Sample("whole", "b", torch.ones(3), works),
                Pending("loss", ("",), torch.ones(1)),
            ]
            readings, histograms, _ = assembler.assemble(Bundle(step, 0.0, packed=pack(drained)))
            assert histograms == []
            assert {r.metric: r.as_dict() for r in readings} == {"recurrent.length": {"b": 3.0}, "loss": {"": 1.0}}
    assert [r.getMessage() for r in caplog.records] == ["gradflow: the analysis of broken failed and is disabled"]


def test_a_sample_with_an_analysis_travels_alone_and_as_it_is():
    """It is neither widened nor copied once more; of what has none, numbers share one tensor, and samples another."""
    mine = torch.ones(4)
    samples = [
        Sample("m", "a", mine, lambda _: {}),
        Sample("parameter.weight", "w", torch.ones(2, dtype=torch.float64)),
    ]
    numbers = [Pending("loss", ("",), torch.ones(1)), Pending("gain.depth", ("",), torch.ones(1, dtype=torch.float64))]
    narrow = [Sample("block.effective_rank", site, torch.ones(2, 3)) for site in "ab"]
    alone, *shared = pack([*samples, *narrow, *numbers])
    assert [(len(packed.items), packed.host.dtype) for packed in shared] == [
        (1, torch.float64),
        (2, torch.float32),
        (2, torch.float64),
    ]
    assert alone.host.data_ptr() == mine.data_ptr()
    assert np.asarray(alone.host).dtype == np.float32


def test_a_watched_run_holds_the_metrics_of_each_layer():
    """Under an exporter each layer and direction has its readings from the first step, and none without such layers."""
    model = nn.LSTM(3, 4, num_layers=2, bidirectional=True)
    optimizer, writer = torch.optim.SGD(model.parameters(), lr=0.1), MemoryWriter()
    with Exporter(model, backends=[writer], strict=True) as exporter:
        exporter.watch()
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(6, 2, 3))[0].square().mean().backward()
            optimizer.step()
    for record in writer.records:
        reading = record.get("recurrent.decay")
        assert reading.sites == ("LSTM.l0", "LSTM.l0_reverse", "LSTM.l1", "LSTM.l1_reverse")
        assert all(0.1 < value < 1.2 for value in reading.as_dict().values())


def test_a_cell_called_many_times_is_one_backward_pass(caplog):
    """Thirty calls in one forward pass are no thirty backward passes without an optimizer step."""

    class Loop(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.head = nn.GRUCell(3, 4), nn.Linear(4, 1)

        def forward(self, x):
            state, out = None, []
            for now in x:
                state = self.cell(now, state)
                out.append(self.head(state))
            return torch.stack(out)

    model = Loop()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Exporter(model, backends=[MemoryWriter()], strict=True) as exporter:
        exporter.watch()
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(30, 2, 3)).square().mean().backward()
            optimizer.step()
    assert [record.getMessage() for record in caplog.records if "backward passes" in record.getMessage()] == []
