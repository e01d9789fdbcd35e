"""After a policy about NaN has acted nothing is broken that evaluation or training would meet later, or it is told."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradflow_export import Exporter, IssueType, MemoryWriter, NaNHandlingConfig, NumericalStabilityManager

ACTING = ("zero", "clamp", "skip", "rewind")


class Average(nn.Module):
    """Keeps a running average of what it sees, in a buffer that is replaced at every call, and a mask."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.linear, self.dtype = nn.Linear(6, 4), dtype
        self.register_buffer("average", torch.zeros(4, dtype=dtype))
        self.register_buffer("mask", torch.tensor([0.0, -math.inf, 0.0, 0.0]))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        out = self.linear(x)
        if self.training:
            self.average = 0.9 * self.average + 0.1 * out.detach().mean(0).to(self.dtype)
            self.calls += 1
        return out - self.average.real.to(out.dtype) + self.mask.exp()


MODELS = {
    "batch normalisation": lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4)),
    "no momentum": lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8, momentum=None), nn.Linear(8, 4)),
    "average": Average,
    "complex average": lambda: Average(torch.complex64),
    "half average": lambda: Average(torch.float16),
}


def batches(faults):
    """Batches; in some an entry is NaN or Inf."""
    generator = torch.Generator().manual_seed(1)
    for step in range(10):
        x, y = torch.randn(5, 6, generator=generator), torch.randint(0, 4, (5,), generator=generator)
        if step in faults:
            x[step % 5, step % 6] = math.nan if step % 2 else math.inf
        yield x, y


def train(model, manager, optimizer, faults, forward=None):
    """Train with a manager and return its results."""
    results = []
    for x, y in batches(faults):
        optimizer.zero_grad()
        loss = F.cross_entropy((forward or model)(x), y)
        loss.backward()
        results.append(manager.step(model, loss, optimizer))
        optimizer.step()
    return results


def is_finite(model):
    """Whether an evaluation is finite."""
    model.eval()
    with torch.no_grad():
        return bool(model(torch.ones(3, 6)).isfinite().all())


@pytest.mark.parametrize("policy", ACTING)
@pytest.mark.parametrize("kind", MODELS)
def test_evaluation_is_finite_after_broken_batches(kind, policy):
    """Whatever module keeps whatever average, its last finite value is put back, and the result names it."""
    torch.manual_seed(0)
    model = MODELS[kind]()
    optimizer = torch.optim.Adam(model.parameters())
    with NumericalStabilityManager(nan_config=NaNHandlingConfig(policy=policy)).watch(model) as manager:
        results = train(model, manager, optimizer, {3, 4, 7})
    assert is_finite(model)
    repaired = [number for number, result in enumerate(results) if result["buffers_repaired"]]
    assert repaired == ([3, 4, 7] if policy in {"zero", "clamp"} else [])
    assert manager.get_debug_summary()["buffers_repaired"] == len(repaired)
    assert not any(result["still_broken"] for result in results)
    if kind.endswith("average"):
        assert model.mask[1] == -math.inf


def test_a_repaired_buffer_is_the_last_finite_value():
    """Entries that stayed finite keep what the forward pass did; the others are bit for bit those of the step before."""
    model = Average()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    manager = NumericalStabilityManager(nan_config=NaNHandlingConfig(policy="zero")).watch(model)
    train(model, manager, optimizer, set())
    before = model.average.clone()
    loss = model(torch.ones(5, 6)).sum()
    loss.backward()
    after = model.average.clone()
    model.average[2] = math.nan
    next(model.parameters()).grad.fill_(math.nan)
    result = manager.step(model, loss, optimizer)
    assert model.average.tolist() == [after[0], after[1], before[2], after[3]]
    assert result["buffers_repaired"] == {"average": 1}
    assert result["anomalies"][-1]["type"] == "repaired_buffers"
    assert "last finite values" in result["anomalies"][-1]["message"]


def test_a_forward_pass_that_was_not_seen_leaves_no_broken_buffer():
    """Where the beginning of a step is not seen, buffers cannot go back as they were, but they become finite."""
    torch.manual_seed(0)
    model = MODELS["batch normalisation"]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    manager = NumericalStabilityManager(nan_config=NaNHandlingConfig(policy="skip")).watch(model)
    results = train(model, manager, optimizer, {3}, forward=model.forward)
    assert not results[3]["restored"]
    assert set(results[3]["buffers_repaired"]) == {"1.running_mean", "1.running_var"}
    assert is_finite(model)


def issues_of(model, policy, loop):
    """Issues of NaN that are open at the end of a loop, and all of them."""
    exporter = Exporter(model, backends=[MemoryWriter()], strict=True).watch()
    manager = NumericalStabilityManager(nan_config=NaNHandlingConfig(policy=policy), exporter=exporter)
    loop(manager)
    exporter.close()
    found = [issue for issue in exporter.issues if issue.issue_type is IssueType.NUMERICAL]
    return [issue for issue in found if issue.open], found


@pytest.mark.parametrize("policy", ["zero", "clamp"])
def test_an_issue_stays_open_while_a_buffer_is_broken(policy):
    """A buffer that was broken before anybody looked has no finite value: that is told at every step, and stays open."""
    torch.manual_seed(0)
    model = MODELS["batch normalisation"]()
    model(torch.full((5, 6), math.nan))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    told = []
    open_ones, _ = issues_of(model, policy, lambda manager: told.extend(train(model, manager, optimizer, set())))
    assert len(open_ones) == 1
    assert "buffers 1.running_mean" in open_ones[0].message
    assert all("1.running_mean" in result["still_broken"][0] for result in told)


@pytest.mark.parametrize("policy", ACTING)
def test_a_first_batch_of_nan_leaves_an_issue_about_its_buffers_open(policy):
    """Rules report the NaN of that step and heal; the buffers that nobody can repair are an issue of their own."""
    torch.manual_seed(0)
    model = MODELS["batch normalisation"]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    open_ones, found = issues_of(model, policy, lambda manager: train(model, manager, optimizer, {0}))
    assert not is_finite(model)
    assert len(found) == 2
    assert [issue.layer for issue in open_ones] == ["1.running_var"]
    assert open_ones[0].message.startswith("the buffers 1.running_var hold NaN")
    assert "reset_running_stats()" in open_ones[0].advice


@pytest.mark.parametrize("policy", ["zero", "clamp"])
def test_an_issue_heals_when_buffers_are_repaired(policy):
    """Where repair was enough the issue is over after some finite steps."""
    torch.manual_seed(0)
    model = MODELS["batch normalisation"]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def loop(manager):
        manager.watch(model)
        train(model, manager, optimizer, {2})

    open_ones, found = issues_of(model, policy, loop)
    assert found
    assert not open_ones


def test_an_optimizer_state_that_overflowed_keeps_its_issue_open():
    """Finite gradients may overflow when they are squared: the state is looked at after a repair, until it is finite."""
    model = nn.Linear(6, 4)
    optimizer = torch.optim.Adam(model.parameters())
    results = []

    def loop(manager):
        for step, (x, y) in enumerate(batches(set())):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            if step == 3:
                model.weight.grad[0, 0] = math.nan
                model.weight.grad[0, 1] = 1e30
            results.append(manager.step(model, loss, optimizer))
            optimizer.step()

    open_ones, _ = issues_of(model, "zero", loop)
    assert len(open_ones) == 1
    assert [bool(result["still_broken"]) for result in results] == [False] * 4 + [True] * 6
    assert results[-1]["still_broken"] == ["the optimizer state of weight hold NaN or Inf"]
    assert [result["action"] for result in results] == ["none"] * 3 + ["zero"] + ["none"] * 6
