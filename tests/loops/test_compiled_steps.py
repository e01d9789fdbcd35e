"""Optimizer steps inside code of torch.compile: recorded where the graph may break, and told of where it may not."""

import pytest
import torch
from torch import nn

from gradflow_export import Exporter, MemoryWriter


class Plain(torch.optim.Optimizer):
    """Gradient descent that torch.compile can put into one graph."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    def step(self):
        """Update the parameters."""
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.add_(parameter.grad, alpha=-0.1)


def said(caplog):
    """Return the lines of this package."""
    return [record.getMessage() for record in caplog.records if record.name == "gradflow_export"]


def train(kind, optimizer_of, fullgraph, watched):
    """Train six steps; return the weights, the records, and what went wrong."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer, memory, error = optimizer_of(model.parameters()), MemoryWriter(), None
    exporter = Exporter(model, backends=[memory], strict=True).watch() if watched else None

    def update():
        optimizer.step()

    def whole(x):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    compiled = torch.compile(whole if kind == "whole" else update, fullgraph=fullgraph, backend="eager")
    data = torch.Generator().manual_seed(0)
    try:
        for _ in range(6):
            x = torch.randn(6, 4, generator=data)
            if kind == "whole":
                compiled(x)
            else:
                optimizer.zero_grad()
                model(x).square().mean().backward()
                compiled()
    except torch._dynamo.exc.Unsupported as problem:
        error = str(problem).splitlines()[0]
    if exporter is not None:
        exporter.close()
    torch._dynamo.reset()
    return [p.detach().clone() for p in model.parameters()], memory.records, error


@pytest.mark.parametrize(
    ("kind", "optimizer_of"),
    [("step", Plain), ("whole", Plain), ("whole", torch.optim.SGD), ("step", torch.optim.Adam)],
)
def test_a_compiled_step_is_recorded(kind, optimizer_of, caplog):
    """Whether the optimizer's step or the whole training step is compiled: six records, weights bit for bit."""
    weights, records, error = train(kind, optimizer_of, fullgraph=False, watched=True)
    assert error is None
    assert [record.step for record in records] == [1, 2, 3, 4, 5, 6]
    assert all(record.value("gradient.total_norm") > 0 for record in records)
    assert records[0].value("update.total_norm") > 0
    assert all(record.value("loss") > 0 for record in records)
    assert said(caplog) == []
    alone, _, _ = train(kind, optimizer_of, fullgraph=False, watched=False)
    assert all(map(torch.equal, weights, alone))


@pytest.mark.parametrize("optimizer_of", [Plain, torch.optim.SGD])
def test_one_graph_stays_one_graph(optimizer_of, caplog):
    """With fullgraph=True compiling ends as it does unwatched, and one line names the ways that are recorded."""
    weights, records, error = train("step", optimizer_of, fullgraph=True, watched=True)
    alone, _, as_alone = train("step", optimizer_of, fullgraph=True, watched=False)
    assert error == as_alone
    assert (error is None) == (optimizer_of is Plain)  # torch's own break the graph by themselves
    assert all(map(torch.equal, weights, alone))
    assert records == []
    assert [line.count("exporter.step() after each call") for line in said(caplog)] == [1]
