"""A watched model can be traced for another purpose, and goes on to train."""

import warnings

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.tensorboard import SummaryWriter

from gradflow_export import Exporter, MemoryWriter


def trace(model, x, _folder):
    """Make a graph of the model, as for deployment."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        traced = torch.jit.trace(model, x)
    assert torch.equal(traced(x), model(x))


def add_graph(model, x, folder):
    """Show the model in TensorBoard."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        with SummaryWriter(str(folder)) as writer:
            writer.add_graph(model, x)


def export(model, x, _folder):
    """Make a program of the model."""
    assert torch.equal(torch.export.export(model, (x,)).module()(x), model(x))


def make_graph(model, x, _folder):
    """Make a graph of the model's operations, which holds nothing else."""
    graph = make_fx(model)(x)
    assert torch.equal(graph(x), model(x))
    assert [node.target.__name__ for node in graph.graph.nodes if node.op == "call_function"] == [
        "t.default", "addmm.default", "relu.default", "detach.default", "t.default", "addmm.default"
    ]  # fmt: skip


def estimate(model, x, _folder):
    """Run the model on shapes alone, as estimates of memory do."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert model(mode.from_tensor(x)).shape == (16, 2)


@pytest.mark.parametrize("use", [trace, add_graph, export, make_graph, estimate])
@pytest.mark.parametrize("trained", [0, 3])
def test_a_watched_model_can_be_traced(use, trained, tmp_path):
    """torch.jit.trace runs the model twice and compares; hooks of ours must not show, and later steps are recorded."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.randn(16, 4)
    optimizer, memory = torch.optim.SGD(model.parameters(), lr=0.1), MemoryWriter()
    exporter = Exporter(model, backends=[memory], strict=True, intervals={"blocks": 1, "statistics": 1}).watch()

    def train(steps):
        for _ in range(steps):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

    train(trained)
    use(model, x, tmp_path)
    train(3)
    exporter.close()
    assert [record.step for record in memory.records] == list(range(1, trained + 4))
    assert all(record.get("block.output_rms") is not None for record in memory.records[-3:])
