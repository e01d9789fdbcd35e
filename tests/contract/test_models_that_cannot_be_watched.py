"""What watch() answers when a model is not ready, or not of the right kind."""

import pytest
import torch
from torch import nn

from gradflow_export import Exporter, MemoryWriter
from gradflow_export.errors import ArgumentError, ArgumentTypeError


def test_lazy_parameters_are_asked_to_be_made_first():
    """A lazy layer has no shape before its first batch; after one it can be watched."""
    model = nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.LazyLinear(2))
    with pytest.raises(ArgumentError, match=r"'0.weight' of a lazy module, and 4 .* send one batch"):
        Exporter(model, backends=[MemoryWriter()])
    model(torch.ones(3, 5))
    Exporter(model, backends=[MemoryWriter()]).watch().close()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_a_scripted_model_is_answered():
    """TorchScript calls no Python hooks: the answer names the module to watch."""
    scripted = torch.jit.script(nn.Linear(3, 2))
    with pytest.raises(ArgumentTypeError, match=r"got RecursiveScriptModule.*given to torch.jit.script"):
        Exporter(scripted, backends=[MemoryWriter()])


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_a_scripted_part_does_no_harm():
    """A scripted layer inside a model is watched as far as its parameters go."""
    model, memory = nn.Sequential(torch.jit.script(nn.Linear(3, 4)), nn.ReLU(), nn.Linear(4, 2)), MemoryWriter()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Exporter(model, backends=[memory], strict=True).watch():
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(5, 3)).square().mean().backward()
            optimizer.step()
    reading = memory.records[-1].get("parameter.gradient_norm")
    assert "0.weight" in reading.sites
