"""What each policy about NaN promises, kept: faults at random steps, and what is left of them."""

import math
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradflow_export import (
    ArgumentTypeError,
    Exporter,
    GradientClippingConfig,
    IssueType,
    MemoryWriter,
    NaNHandlingConfig,
    NumericalAnomalyError,
    NumericalStabilityManager,
    PyTorchDebuggingConfig,
)

STEPS = 12
FAULTS = (0, 3, 4, 9)


class Net(nn.Module):
    """Batch statistics, dropout and weights: everything a forward pass changes or draws."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x):
        return self.last(F.dropout(F.relu(self.norm(self.first(x))), 0.3, self.training))


class Matrices(nn.Module):
    """Only matrices, which is all that Muon takes."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 8, bias=False), nn.Linear(8, 3, bias=False)

    def forward(self, x):
        return self.last(F.dropout(torch.tanh(self.first(x)), 0.3, self.training))


class Rows(nn.Module):
    """Sparse gradients only."""

    def __init__(self):
        super().__init__()
        self.rows = nn.Embedding(6, 3, sparse=True)

    def forward(self, x):
        return self.rows(x.argmax(dim=1)) * x.sum(dim=1, keepdim=True)


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "Adam": lambda p: torch.optim.Adam(p, weight_decay=0.1, amsgrad=True),
    "Adam fused": lambda p: torch.optim.Adam(p, fused=True),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, weight_decay=0.1, foreach=True),
    "NAdam": lambda p: torch.optim.NAdam(p, momentum_decay=0.1),
    "RAdam": torch.optim.RAdam,
    "Adamax": torch.optim.Adamax,
    "Adadelta": torch.optim.Adadelta,
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr_decay=0.1, weight_decay=0.1),
    "Rprop": torch.optim.Rprop,
    "RMSprop": lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
    "ASGD": lambda p: torch.optim.ASGD(p, t0=2, weight_decay=0.1),
    "Adafactor": torch.optim.Adafactor,
    "SparseAdam": lambda p: torch.optim.SparseAdam(list(p)),
    "Muon": lambda p: torch.optim.Muon(p, weight_decay=0.1),
}


def batches(faults=()):
    """The same batches each time; some of them with a NaN in them."""
    generator = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        x, y = torch.randn(5, 6, generator=generator), torch.randint(0, 3, (5,), generator=generator)
        if step in faults:
            x[step % 5, step % 6] = math.nan
        yield step, x, y


def train(name, manager=None, faults=(), left_out=(), after=lambda _step, _model: None):
    """Train and return everything that training leaves behind: weights, buffers, optimizer, schedule, generator."""
    torch.manual_seed(0)
    model = {"Muon": Matrices, "SparseAdam": Rows}.get(name, Net)()
    optimizer = OPTIMIZERS[name](model.parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    if manager is not None:
        manager = manager(scheduler).watch(model)
    results = []
    for step, x, y in batches(faults):
        if step in left_out:
            continue
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        if manager is not None:
            results.append(manager.step(model, loss, optimizer))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        after(step, model)
    if manager is not None:
        manager.close()
    left = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "schedule": scheduler.state_dict(),
        "generator": torch.get_rng_state(),
    }
    return left, results


def bits(value):
    """Bits of a nested value; NaN equals NaN and 0.0 differs from -0.0."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), value.detach().contiguous().numpy().tobytes()
    if isinstance(value, dict):
        return {key: bits(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [bits(item) for item in value]
    return value


def guard(policy, **settings):
    """Make a manager with a policy, when the scheduler is known."""
    config = NaNHandlingConfig(policy=policy, **settings)
    return lambda scheduler: NumericalStabilityManager(nan_config=config, schedulers=[scheduler])


@pytest.mark.parametrize("policy", ["skip", "rewind"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_batch_that_is_skipped_never_happened(name, policy):
    """Weights, buffers, optimizer state, schedule and random numbers are bit for bit those of a run without it."""
    ours, results = train(name, guard(policy), FAULTS)
    theirs, _ = train(name, left_out=FAULTS)
    assert [n for n, result in enumerate(results) if result["update_prevented"]] == list(FAULTS)
    for part in theirs:
        assert bits(ours[part]) == bits(theirs[part]), part


@pytest.mark.parametrize("policy", ["detect", "skip", "zero", "clamp", "rewind"])
def test_a_healthy_run_is_left_as_it_is(policy):
    """Without a fault no policy changes a bit."""
    ours, results = train("Adam", guard(policy))
    theirs, _ = train("Adam")
    assert bits(ours) == bits(theirs)
    assert {result["action"] for result in results} == {"none"}


@pytest.mark.parametrize("name", ["SGD", "Adam", "Adam fused", "Adagrad", "Muon", "SparseAdam"])
def test_rewind_takes_back_an_update_that_broke_the_weights(name):
    """Both the breaking step and the one that noticed never happened, optimizer state included."""

    def break_weights(step, model):
        if step == 5:
            with torch.no_grad():
                next(model.parameters()).fill_(math.nan)

    ours, results = train(name, guard("rewind"), after=break_weights)
    theirs, _ = train(name, left_out=(5, 6))
    assert results[6]["steps_back"] == 1
    assert [result["action"] for result in results].count("rewind") == 1
    assert bits(ours) == bits(theirs)


def test_rewind_notices_a_broken_optimizer_state_while_everything_else_is_finite():
    """A gradient of 1e30 leaves Adam's second moment infinite and its weight still for ever; that step is taken back."""
    weights = nn.Linear(4, 1, bias=False)
    optimizer = torch.optim.Adam(weights.parameters(), lr=0.1)
    with NumericalStabilityManager(nan_config=NaNHandlingConfig(policy="rewind")) as manager:
        for step in range(4):
            loss = weights(torch.ones(2, 4)).sum() * (1e30 if step == 1 else 1.0)
            loss.backward()
            result = manager.step(weights, loss, optimizer)
            if step == 2:
                assert [fault["type"] for fault in result["anomalies"]] == ["broken_state"]
                assert result["steps_back"] == 1
            optimizer.step()
            optimizer.zero_grad()
    assert torch.isfinite(optimizer.state[weights.weight]["exp_avg_sq"]).all()


def test_rewind_goes_back_when_finite_weights_give_no_finite_step_any_more():
    """Weights of 1e30 overflow with every batch: after the third in a row the last good state comes back."""

    def blow_up(step, model):
        if step == 5:
            with torch.no_grad():
                for p in model.parameters():
                    p.fill_(1e30)

    _, results = train("SGD", guard("rewind"), after=blow_up)
    assert [result["steps_back"] for result in results[6:9]] == [0, 0, 1]
    assert all(result["finite"] for result in results[9:])


def test_rewind_with_rare_snapshots_goes_back_further():
    """What was learned since the snapshot is lost with it, and told."""

    def break_weights(step, model):
        if step == 7:
            with torch.no_grad():
                next(model.parameters()).fill_(math.inf)

    ours, results = train("Adam", guard("rewind", snapshot_every=5), after=break_weights)
    theirs, _ = train("Adam", left_out=(5, 6, 7, 8))
    assert results[8]["steps_back"] == 3
    assert bits(ours["model"]) == bits(theirs["model"])


def test_the_memory_of_the_snapshot_is_told():
    """Weights once and Adam's two moments: three times the weights, the step counts and the buffers."""
    torch.manual_seed(0)
    model = nn.Linear(256, 256, bias=False)
    optimizer = torch.optim.Adam(model.parameters())
    manager = NumericalStabilityManager(nan_config=NaNHandlingConfig(policy="rewind"))
    for _ in range(2):
        loss = model(torch.randn(2, 256)).square().mean()
        loss.backward()
        manager.step(model, loss, optimizer)
        optimizer.step()
    assert manager.get_debug_summary()["snapshot_mb"] == pytest.approx(3 * 0.25, abs=1e-4)
    manager.close()


def test_zero_and_clamp_repair_gradients_entry_by_entry():
    """NaN becomes 0; Inf becomes 0 or the clamp value; the rest stays, or is brought into the range."""
    for policy, expected in (("zero", [0.0, 0.0, 0.0, 5.0]), ("clamp", [0.0, 2.0, -2.0, 2.0])):
        weights = nn.Linear(4, 1, bias=False)
        weights.weight.grad = torch.tensor([[math.nan, math.inf, -math.inf, 5.0]])
        optimizer = torch.optim.SGD(weights.parameters(), lr=1.0)
        manager = NumericalStabilityManager(nan_config=NaNHandlingConfig(policy=policy, clamp_value=2.0))
        result = manager.step(weights, 1.0, optimizer)
        assert weights.weight.grad.tolist() == [expected]
        assert (result["action"], result["update_prevented"]) == (policy, False)
        assert result["anomalies"][0]["entries"] == [3]


def test_detect_lets_the_update_through_and_raise_stops_before_it(tmp_path):
    """The two modes really differ: NaN weights on one side, an error and untouched weights on the other."""
    for mode in ("detect", "raise"):
        weights = nn.Linear(2, 1, bias=False)
        optimizer = torch.optim.SGD(weights.parameters(), lr=1.0)
        debug = PyTorchDebuggingConfig(
            enable_autograd_anomaly=True, autograd_anomaly_mode=mode, debug_output_dir=str(tmp_path / mode)
        )
        manager = NumericalStabilityManager(debug_config=debug)
        before = weights.weight.detach().clone()
        weights.weight.grad = torch.full((1, 2), math.inf)
        if mode == "raise":
            with pytest.raises(NumericalAnomalyError, match=r"must have .* got: the gradient of weight holds Inf"):
                manager.step(weights, 1.0, optimizer)
            assert torch.equal(weights.weight, before)
            assert manager.get_debug_summary()["anomalies_by_type"] == {"inf_gradient": 1}
            continue
        assert manager.step(weights, 1.0, optimizer)["action"] == "detect"
        optimizer.step()
        assert not torch.isfinite(weights.weight).any()


def test_a_step_that_the_gradient_scaler_skips_is_no_anomaly():
    """An overflow of scaled gradients is the scaler's business; a NaN loss is not, and leaves the scale alone."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=1000)
    manager = NumericalStabilityManager(
        GradientClippingConfig(), NaNHandlingConfig(policy="skip"), scaler=scaler
    ).watch(model)
    seen, scales = [], []
    for step in range(8):
        x = torch.full((3, 4), math.nan) if step == 6 else torch.randn(3, 4)
        loss = 10 * model(x).square().mean()
        scaler.scale(loss).backward()
        seen.append(manager.step(model, loss, optimizer))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    actions = [result["action"] for result in seen]
    assert actions[0] == "scaler"
    assert not any(result["anomalies"] for result in seen[:6])
    assert actions[4:] == ["none", "none", "skip", "none"]
    assert [fault["type"] for fault in seen[6]["anomalies"]] == ["nan_loss", "nan_gradient"]
    assert scales[7] == scales[5]
    assert manager.get_debug_summary()["scaler_skips"] == actions.count("scaler")
    assert torch.isfinite(model.weight).all()
    manager.close()


def test_a_scaler_that_skips_for_ever_is_an_anomaly():
    """Where every scale overflows it is not the scale."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    manager = NumericalStabilityManager(nan_config=NaNHandlingConfig(scaler_patience=3), scaler=scaler)
    for _ in range(3):
        scaler.scale(model(torch.ones(1, 2)).sum()).backward()
        model.weight.grad.fill_(math.inf)
        result = manager.step(model, 1.0, optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert [fault["type"] for fault in result["anomalies"]] == ["scaler"]


def test_optimizers_that_run_backward_themselves_are_refused():
    """Nobody can look between LBFGS's backward passes and its updates."""
    model = nn.Linear(2, 1)
    manager = NumericalStabilityManager(nan_config=NaNHandlingConfig(policy="skip"))
    with pytest.raises(ArgumentTypeError, match=r"got LBFGS.*use 'detect' or 'raise'"):
        manager.step(model, 1.0, torch.optim.LBFGS(model.parameters()))


@pytest.mark.parametrize("policy", ["detect", "zero", "clamp", "skip"])
@pytest.mark.parametrize("at", [131, 192])
def test_a_nan_is_dated_by_its_own_step_under_a_budget_too(policy, at):
    """The issue names the step that held it, recorded or not, and claims no operation where only the loss is known."""
    torch.manual_seed(0)
    model = Matrices()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with (
        Exporter(model, backends=[], strict=True).watch() as exporter,
        NumericalStabilityManager(nan_config=NaNHandlingConfig(policy=policy)).watch(model) as manager,
    ):
        exporter._loop.clock._spacing.value = 64
        for number in range(1, 261):
            x = torch.full((8, 6), math.nan) if number == at else torch.randn(8, 6)
            kept = [p.detach().clone() for p in model.parameters()]
            loss = model(x).square().mean()
            loss.backward()
            manager.step(model, loss, optimizer)
            optimizer.step()
            optimizer.zero_grad()
            if policy == "detect":  # the next step is finite
                with torch.no_grad():
                    for p, before in zip(model.parameters(), kept, strict=True):
                        p.copy_(before)
        (issue,) = [each for each in exporter.issues if each.issue_type is IssueType.NUMERICAL]
    assert issue.step == at
    if at == 131:
        assert issue.healed_step == 134
        assert "sqrt" not in issue.advice
        assert "torch.isfinite(x).all()" in issue.advice


def test_what_was_found_and_done_joins_the_exporter_s_records():
    """Anomalies, where they began, clipping and what was prevented are metrics and an issue like any other."""
    torch.manual_seed(0)
    model, memory = Net(), MemoryWriter()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    debug = PyTorchDebuggingConfig(enable_autograd_anomaly=True, save_debug_info=False)
    with (
        Exporter(model, backends=[memory], strict=True).watch() as exporter,
        NumericalStabilityManager(GradientClippingConfig(max_norm=0.01), NaNHandlingConfig(policy="skip"), debug).watch(
            model
        ) as manager,
    ):
        for _, x, y in batches({4}):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            manager.step(model, loss, optimizer)
            optimizer.step()
            optimizer.zero_grad()
        (issue,) = exporter.issues
    record = memory.records[4]
    assert record.value("debugging.anomalies") == 2
    assert record.value("debugging.prevented") == 1
    assert record.value("debugging.nonfinite", "first.weight") == 48
    assert record.get("origin.input") is not None
    assert memory.records[0].value("gradient.clip_scale") < 1
    assert memory.records[0].value("debugging.clipped_share") == 1
    assert (issue.issue_type.value, issue.step, issue.open) == ("NUMERICAL", 5, False)
    assert "in the input of the model" in issue.message
    assert all(p.isfinite().all() for p in model.parameters())


class Root(nn.Module):
    """Has an infinite slope where its input is 0."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 8, bias=False), nn.Linear(8, 3)

    def forward(self, x):
        return self.last(torch.sqrt(self.first(x).square()))


def test_an_operation_whose_backward_makes_nan_is_named_with_its_line_and_nothing_is_raised():
    """What nobody else saw, because the update was prevented, is told by the manager: operation, line, parameter."""
    torch.manual_seed(0)
    model = Root()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    debug = PyTorchDebuggingConfig(enable_autograd_anomaly=True, save_debug_info=False)
    with (
        Exporter(model, backends=(), strict=True).watch() as exporter,
        NumericalStabilityManager(nan_config=NaNHandlingConfig(), debug_config=debug).watch(model) as manager,
    ):
        for step in range(4):
            loss = F.cross_entropy(model(torch.zeros(2, 6) if step == 2 else torch.randn(2, 6)), torch.tensor([0, 1]))
            loss.backward()
            result = manager.step(model, loss, optimizer)
            if step == 2:
                (fault,) = result["anomalies"]
            optimizer.step()
            optimizer.zero_grad()
        (issue,) = exporter.issues
    assert fault["operation"]["operation"] == "SqrtBackward0"
    assert "return self.last(torch.sqrt(self.first(x).square()))" in fault["operation"]["traceback"]
    assert fault["origin"] == "in the backward pass at first.weight, by SqrtBackward0"
    assert (issue.layer, issue.step, issue.issue_type.value) == ("first.weight", 3, "NUMERICAL")
    assert not torch.is_anomaly_enabled()


def test_what_only_the_manager_sees_becomes_an_issue_that_heals():
    """A gradient that is broken by hand and then left out leaves no other trace; the issue says what was done."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        Exporter(model, backends=(), strict=True).watch() as exporter,
        NumericalStabilityManager(nan_config=NaNHandlingConfig(), exporter=exporter) as manager,
    ):
        for step in range(6):
            loss = model(torch.randn(3, 4)).square().mean()
            loss.backward()
            if step == 2:
                model.bias.grad[1] = math.inf
            manager.step(model, loss, optimizer)
            optimizer.step()
            optimizer.zero_grad()
        (issue,) = exporter.issues
    assert (issue.layer, issue.layers, issue.value) == ("bias", ("bias",), 1.0)
    assert (issue.step, issue.healed_step) == (3, 6)
    assert issue.message == "the gradient of bias holds Inf; the update was left out."


def test_backward_can_be_run_under_a_magnifying_glass():
    """Without raising, the first operation that makes NaN or Inf is named; Inf counts too."""
    manager = NumericalStabilityManager()
    x = torch.zeros(2, requires_grad=True)
    found = manager.backward(torch.sqrt(x * 1.0).sum())
    assert (found["found"], found["operation"], found["value"]) == (True, "SqrtBackward0", "Inf")
    assert manager.backward((x * x).sum()) == {"found": False}


def test_closing_leaves_the_model_as_it_was():
    """No hook stays, and a watched model pickles, copies and forgets the manager."""
    model = Net()
    manager = NumericalStabilityManager(nan_config=NaNHandlingConfig(policy="rewind")).watch(model)
    copy = pickle.loads(pickle.dumps(model))
    copy(torch.randn(3, 6))
    manager.close()
    manager.close()
    assert not model._forward_pre_hooks
    assert not model._forward_hooks
