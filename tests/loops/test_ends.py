"""The last steps of a run that a budget left out, where nobody closes the exporter and the model is gone by then."""

import gc

import pytest
import torch
from torch import nn

from gradflow_export import Exporter, IssueType, MemoryWriter, read_run
from gradflow_export.cli.report import summarise

STEPS = 150


class Root(nn.Module):
    """A model that holds a parameter of its own beside a module."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.inner = nn.Linear(4, 1)

    def forward(self, x):
        return self.inner(x * self.scale)


def watched(model, where):
    """Return an exporter of which one step in 64 is recorded once it decides, and what it writes to."""
    memory = MemoryWriter()
    exporter = Exporter(model, backends=["tensorboard", memory], logdir=where, strict=True).watch()
    exporter._loop.clock._spacing.value = 64
    return exporter, memory


def train(model, optimizer, broken=True, steps=STEPS):
    """Train; the last batch holds a NaN."""
    for number in range(1, steps + 1):
        x = torch.ones(2, 4) if number < steps or not broken else torch.full((2, 4), torch.nan)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def in_a_function(where, broken):
    """Local variables go in the order in which they came."""
    model = Root()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    found = watched(model, where)
    train(model, optimizer, broken)
    return found


def optimizer_first(where, broken):
    """The optimizer is gone before the model."""
    model = Root()
    found = watched(model, where)
    train(model, torch.optim.SGD(model.parameters(), lr=0.001), broken)
    return found


def in_a_cycle(where, broken):
    """Garbage collection finds both at once."""

    class Trainer:
        pass

    trainer = Trainer()
    trainer.self, trainer.model = trainer, Root()
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.001)
    found = watched(trainer.model, where)
    train(trainer.model, trainer.optimizer, broken)
    return found


def several(where, broken):
    """Two optimizers that step together."""
    model = Root()
    optimizers = [torch.optim.SGD(each, lr=0.001) for each in ([model.scale], model.inner.parameters())]
    found = watched(model, where)
    for number in range(1, STEPS + 1):
        x = torch.ones(2, 4) if number < STEPS or not broken else torch.full((2, 4), torch.nan)
        model(x).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return found


@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.parametrize("way", [in_a_function, optimizer_first, in_a_cycle, several])
def test_the_weights_at_the_end_are_read_though_the_model_is_gone(tmp_path, way, broken):
    """The record of the last step holds the weights of every parameter that an optimizer had."""
    exporter, memory = way(tmp_path, broken)
    gc.collect()
    assert exporter._closed
    last = memory.records[-1]
    assert (last.step, last.value("loss")) == (STEPS, None)
    sizes = last.get("parameter.weight_norm").as_dict()
    assert set(sizes) == {"scale", "inner.weight", "inner.bias"}
    found = [issue.issue_type for issue in exporter.issues]
    assert (IssueType.NUMERICAL in found) == broken
    assert "not seen" not in exporter.summary()["verdict"]
    assert all(value == value for value in sizes.values()) != broken


def test_an_end_that_nobody_could_read_is_not_healthy(tmp_path):
    """A loop without an optimizer leaves nothing to read once its model is gone, and every verdict says so."""

    def loop():
        model = Root()
        found = watched(model, tmp_path)
        for _ in range(STEPS):
            model(torch.ones(2, 4)).square().mean().backward()
            with torch.no_grad():
                for p in model.parameters():
                    p.sub_(p.grad, alpha=0.001)
                    p.grad = None
            found[0].step()
        return found

    exporter, memory = loop()
    gc.collect()
    said = exporter.summary()["verdict"]
    read = max(r.step for r in memory.records if r.value("loss") is not None)
    assert said.startswith("healthy as far as recorded: ")
    assert f"the end was not seen: nothing was read after step {read}" in said
    assert summarise(read_run(tmp_path)).verdict == said


def test_optimizers_that_come_and_go_are_read_no_more_often_than_records(tmp_path, monkeypatch):
    """Each is gone after two steps; what the last one leaves is read by the model, which is still there."""
    model = Root()
    exporter, memory = watched(model, tmp_path)
    train(model, torch.optim.SGD(model.parameters(), lr=0.001), broken=False)
    read, updates = [], next(each for each in exporter._loop.instruments.armed if each.instrument == "updates")
    own = type(updates).last
    monkeypatch.setattr(type(updates), "last", lambda self, owned: read.append(1) or own(self, owned))
    for _ in range(128):
        train(model, torch.optim.SGD(model.parameters(), lr=0.001), broken=False, steps=2)
    assert len(read) <= 5
    exporter.close()
    assert memory.records[-1].step == STEPS + 256
