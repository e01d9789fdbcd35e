"""Backward passes that ``torch.compile`` takes too, by ``compiled_autograd``: they run as if nobody watched."""

import contextlib

import pytest
import torch
import torch._dynamo
from torch import nn
from torch.nn import functional as F

from gradflow_export import Exporter, MemoryWriter

BACKEND = "aot_eager"


def trained(style, watch):
    """Train for ten steps; return everything that training made, and the records."""
    torch.manual_seed(0)
    torch.compiler.reset()
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3))
    optimizer, memory = torch.optim.Adam(model.parameters()), MemoryWriter()
    eager = style == "eager forward"
    with torch._dynamo.config.patch(compiled_autograd=not eager):
        called = torch.compile(model, backend=BACKEND) if style == "model" else model
        exporter = Exporter(called, backends=[memory], strict=True, verbose=0).watch() if watch else None

        def step(x, y):
            F.cross_entropy(called(x), y).backward()

        run = torch.compile(step, backend=BACKEND) if style == "step" else step
        compiler = torch.compile(backend=BACKEND)
        for _ in range(10):
            with torch._dynamo.compiled_autograd._enable(compiler) if eager else contextlib.nullcontext():
                run(torch.randn(16, 8), torch.randint(0, 3, (16,)))
            optimizer.step()
            optimizer.zero_grad()
        if exporter is not None:
            exporter.close()
    return [*model.state_dict().values(), torch.get_rng_state()], memory.records


@pytest.mark.parametrize("style", ["model", "step", "eager forward"])
def test_training_is_the_same_and_what_needs_no_hook_in_it_is_read(style):
    bare, _ = trained(style, watch=False)
    watched, records = trained(style, watch=True)
    assert all(map(torch.equal, bare, watched))
    assert len(records) == 10
    assert all("gradient.total_norm" in record.metrics and "loss" in record.metrics for record in records)
