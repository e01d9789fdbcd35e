"""Where NaN or Inf began is said exactly, before the weights are lost, and looking changes nothing."""

import copy
import math
import pickle

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradflow_export import Exporter, IssueType, MemoryWriter
from gradflow_export.debugging import NumericalStabilityManager

STEPS, BAD = 12, 7


class Block(nn.Module):
    """Linear and tanh; ``factor`` is applied by the block's own code, between its children."""

    def __init__(self):
        super().__init__()
        self.linear, self.drop, self.norm = nn.Linear(8, 8), nn.Dropout(0.2), nn.BatchNorm1d(8)
        self.factor = 1.0

    def forward(self, x):
        return torch.tanh(self.norm(self.drop(self.linear(x) * self.factor)))


class Net(nn.Module):
    """Three blocks and a head."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, 4)

    def forward(self, x, *, mask=None):
        for block in self.blocks:
            x = block(x)
        out = self.head(x)
        return out if mask is None else out + torch.where(torch.isinf(mask), -1.0, 0.0)


def nothing(_model, _x):
    return 0.0


def poison_input(_model, x):
    x[3, 2] = math.nan
    return 0.0


def poison_forward(model, _x):
    model.blocks[1].factor = math.inf
    return 0.0


def poison_weight(model, _x):
    with torch.no_grad():
        model.blocks[2].linear.weight[0, 0] = math.inf
    return 0.0


def poison_loss(_model, _x):
    return lambda out: torch.log(torch.zeros(())) * out.sum()


def poison_backward(model, _x):
    return lambda _out: torch.sqrt((model.blocks[1].linear.weight * 0).sum())


def train(spoil=nothing, *, watched=True, micro_batches=2, bad_micro_batch=1, **options):
    """Train; at one micro-batch of one step something breaks. Return model, last finite losses, exporter, records."""
    torch.manual_seed(0)
    model, memory = Net(), MemoryWriter()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    exporter = Exporter(model, backends=[memory], strict=True, **options)
    losses = []
    if watched:
        exporter.watch()
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        for micro_batch in range(micro_batches):
            x, y = torch.randn(16, 8), torch.randint(4, (16,))
            extra = spoil(model, x) if (step, micro_batch) == (BAD, bad_micro_batch) else 0.0
            out = model(x, mask=torch.tensor([0.0, *3 * [-math.inf]]))
            loss = F.cross_entropy(out, y) + (extra(out) if callable(extra) else extra)
            loss.backward()
            exporter.observe(loss=loss)
            losses.append(loss.item())
        optimizer.step()
    exporter.close()
    return model, losses, exporter, memory.records


CASES = {
    "input": (poison_input, "", "the input of the model"),
    "forward": (poison_forward, "blocks.1", "the forward pass at blocks.1"),
    "weights": (poison_weight, "blocks.2.linear.weight", "the weights of blocks.2.linear.weight"),
    "loss": (poison_loss, "", "the loss"),
    "backward": (poison_backward, "blocks.1.linear.weight", "the backward pass at blocks.1.linear.weight"),
}


@pytest.mark.parametrize("kind", CASES)
def test_the_origin_is_named_exactly(kind):
    """One issue names one layer, the direction, the micro-batch, the step, the rank and the last finite loss."""
    spoil, layer, words = CASES[kind]
    _, losses, exporter, records = train(spoil)
    (issue,) = [issue for issue in exporter.issues if issue.issue_type is IssueType.NUMERICAL]
    assert issue.layers == (layer,)
    assert issue.step == BAD
    number = 0 if kind == "weights" else 2
    assert issue.cause.startswith(words)
    assert (f"micro-batch {number}" in issue.cause) is (number > 0)
    assert f"step {BAD}, rank 0" in issue.cause
    mean = (losses[2 * BAD - 4] + losses[2 * BAD - 3]) / 2
    assert f"loss {mean:.3g} at step {BAD - 1}" in issue.message or math.isfinite(losses[2 * BAD - 1])
    found = [(r.step, reading.metric) for r in records for reading in r.readings if reading.metric.startswith("origin")]
    assert found == [(BAD, f"origin.{kind}")]


@pytest.mark.parametrize("kind", CASES)
def test_a_batch_that_is_run_again_shows_the_same(kind):
    """With rerun_nonfinite=True the failing step's forward passes are repeated, which names the same places."""
    spoil, layer, words = CASES[kind]
    # A poisoned module stays poisoned when its batches are run again: the first one of the step shows it.
    bad = 0 if kind in {"forward", "weights"} else 1
    _, _, exporter, _ = train(spoil, bad_micro_batch=bad, rerun_nonfinite=True)
    (issue,) = [issue for issue in exporter.issues if issue.issue_type is IssueType.NUMERICAL]
    assert issue.layers == (layer,)
    assert issue.cause.startswith(words)


@pytest.mark.parametrize("rerun", [None, True])
@pytest.mark.parametrize("kind", CASES)
def test_looking_changes_nothing(kind, rerun):
    """Losses, weights, buffers and random numbers after the failing step are bit for bit those of an unwatched run."""
    spoil = CASES[kind][0]
    ours, losses, _, _ = train(spoil, rerun_nonfinite=rerun)
    after = torch.rand(4)
    plain, expected, _, _ = train(spoil, watched=False)
    assert torch.equal(after, torch.rand(4))
    assert torch.equal(torch.tensor(losses).isnan(), torch.tensor(expected).isnan())
    assert torch.tensor(losses).nan_to_num().tolist() == torch.tensor(expected).nan_to_num().tolist()
    for name, value in plain.state_dict().items():
        assert torch.equal(ours.state_dict()[name].nan_to_num(7.0), value.nan_to_num(7.0)), name


def test_a_healthy_run_has_no_origin():
    """Nothing is repeated and nothing given out while everything is finite, whatever masks hold."""
    _, _, exporter, records = train()
    assert not [issue for issue in exporter.issues if issue.issue_type is IssueType.NUMERICAL]
    assert not any(reading.metric.startswith("origin") for record in records for reading in record.readings)


@pytest.mark.parametrize("rerun", [None, False, True])
def test_forward_is_called_by_the_user_alone(rerun):
    """The model is called as often as by the user, and once more for each micro-batch with rerun_nonfinite=True alone."""
    calls = []

    def spoil(model, x):
        model.head.register_forward_hook(lambda *_: calls.append(1) and None)
        return poison_input(model, x)

    train(spoil, rerun_nonfinite=rerun)
    # A broken input is found before its pass is repeated; that of the first micro-batch is repeated before the hook.
    assert len(calls) == 2 * (STEPS - BAD) + 1 + (rerun is True)


def test_an_input_that_is_gone_is_no_error():
    """Of an input that nobody keeps it is not known whether the NaN was in it; it lies before the first layer."""

    class Shifted(Net):
        def forward(self, x):
            return super().forward(x + 1)

    torch.manual_seed(0)
    model = Shifted()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Exporter(model, backends=["memory"], strict=True) as exporter:
        exporter.watch()
        for step in range(1, STEPS + 1):
            optimizer.zero_grad()
            model(torch.full((16, 8), math.nan if step == BAD else 1.0)).sum().backward()
            optimizer.step()
    (issue,) = [issue for issue in exporter.issues if issue.issue_type is IssueType.NUMERICAL]
    assert issue.cause.startswith("the forward pass between the input and blocks.0.linear")


def test_a_watched_model_still_copies_and_pickles_and_is_left_clean():
    """The hook on the model does not travel with copies, and closing takes it away."""
    model = nn.Sequential(nn.Linear(4, 4))
    with Exporter(model, backends=["memory"], strict=True).watch():
        assert model._forward_pre_hooks
        twin, thawed = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
        assert torch.equal(twin(torch.ones(1, 4)), thawed(torch.ones(1, 4)))
    assert not model._forward_pre_hooks


def test_overflow_under_a_scaler_is_no_origin():
    """Steps that a gradient scaler may skip are its own business."""
    torch.manual_seed(0)
    model, memory = nn.Linear(4, 2), MemoryWriter()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    with Exporter(model, backends=[memory], strict=True).watch():
        for _ in range(4):
            optimizer.zero_grad()
            scaler.scale(model(torch.randn(8, 4)).square().sum() * 1e3).backward()
            scaler.step(optimizer)
            scaler.update()
    assert not any(reading.metric.startswith("origin") for record in memory.records for reading in record.readings)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("rerun", [None, True])
@pytest.mark.parametrize("passes", [1, 2])
def test_a_pass_whose_gradients_were_cleared_leaves_nothing(passes, rerun, set_to_none, watching, recorded):
    """A batch of NaN that the loop leaves out is in no record, and nothing is said of it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    exporter, losses = watching(model, rerun_nonfinite=rerun), []
    for step in range(24):
        optimizer.zero_grad(set_to_none=set_to_none)
        told = 0.0
        for number in range(passes):
            x = torch.full((8, 4), math.nan) if step in {4, 5, 12} and number == passes - 1 else torch.randn(8, 4)
            loss = model(x).square().mean()
            loss.backward()
            told += loss.item()
        if not all(p.grad.isfinite().all() for p in model.parameters()):
            continue
        losses.append(told)
        optimizer.step()
    records = recorded(exporter)
    assert [record.value("loss") for record in records] == pytest.approx(losses)
    assert {record.value("runtime.backward_passes") for record in records} == {float(passes)}
    for record in records:
        assert all(np.isfinite(record.get("block.gradient_norm").values))
        assert not [reading.metric for reading in record.readings if reading.metric.startswith("origin.")]
        assert math.isfinite(record.value("gradient.first_norm"))
    assert exporter.issues == ()


@pytest.mark.parametrize("rerun", [None, True])
def test_a_batch_that_a_manager_leaves_out_blames_no_layer(rerun, watching, recorded):
    """The loss of that step is NaN; where it began is the batch, or is not known, and never a layer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    manager, exporter = NumericalStabilityManager(), watching(model, rerun_nonfinite=rerun)
    for step in range(12):
        optimizer.zero_grad()
        loss = model(torch.full((8, 4), math.nan) if step == 4 else torch.randn(8, 4)).square().mean()
        loss.backward()
        manager.step(model, loss, optimizer)
        optimizer.step()
    records = recorded(exporter)
    (issue,) = [issue for issue in exporter.issues if issue.issue_type is IssueType.NUMERICAL]
    assert issue.layer == ""
    assert issue.step == 5
    assert "begins in the input" in issue.message
    assert [record.step for record in records if record.get("origin.input")] == [5]
