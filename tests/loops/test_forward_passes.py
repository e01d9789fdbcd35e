"""Discrete updates as forward passes see them: any grid, any place where weights are laid on it, any number format."""

import math
import threading
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.modules import module as world

from gradflow_export import (
    ArgumentError,
    ArgumentTypeError,
    BackwardPassDiagnostics,
    Exporter,
    IssueType,
    MemoryWriter,
)
from gradflow_export.hooks.forward_inputs import ForwardUse
from gradflow_export.metrics.discrete import SCORES, update_scores

PLACES = ("inside the step", "after the step", "before the forward pass", "in a hook of the layer", "in forward")


class Snapped(nn.Module):
    """Nodes with a phase and a size, whose weights are laid on a grid somewhere between the step and their use."""

    def __init__(self, nodes, entries, step, place="nowhere", dtype=torch.float32):
        super().__init__()
        self.phase = nn.Parameter(torch.rand(nodes, entries, dtype=dtype) * 6)
        self.size = nn.Parameter(torch.ones(nodes, entries, dtype=dtype))
        self.step, self.place, self.used = step, place, []
        self.snap()

    def snap(self):
        """Lay the phases on the grid."""
        with torch.no_grad():
            self.phase.copy_((self.phase.double() / self.step).round() * self.step)

    def forward(self, x):
        """Return one number for each sample and node."""
        if self.place == "in forward":
            self.snap()
        self.used.append((self.phase.detach().double() / self.step).round())
        return (self.size * torch.cos(self.phase + x[:, None])).sum(-1)


class Snapping(torch.optim.SGD):
    """Steps, and lays the phases on their grid in the step itself."""

    def __init__(self, model, **options):
        super().__init__(model.parameters(), **options)
        self.model = model

    def step(self, closure=None):
        """Step."""
        loss = super().step(closure)
        if self.model.place == "inside the step":
            self.model.snap()
        return loss


def train(model, *, rate, steps, grid=None, watch=True, plain=False, validate=False):
    """Train with one reading per step; return the records and the diagnostics' summary."""
    optimizer = torch.optim.SGD(model.parameters(), lr=rate) if plain else Snapping(model, lr=rate)
    if model.place == "in a hook of the layer":
        model.register_forward_pre_hook(lambda module, _: module.snap())
    memory = MemoryWriter()
    settings_ = {"pairs": [("phase", "size")], "grid": grid, "backends": memory, "strict": True, "enabled": watch}
    with BackwardPassDiagnostics(model, optimizer=optimizer, **settings_) as diagnostics:
        for step in range(steps):
            x = torch.randn(8, model.phase.shape[1], generator=torch.Generator().manual_seed(step)).to(
                model.phase.dtype
            )
            if model.place == "before the forward pass":
                model.snap()
            optimizer.zero_grad()
            (model(x) - 1).square().mean().backward()
            optimizer.step()
            if model.place == "after the step":
                model.snap()
            if validate:
                with torch.no_grad():
                    used = list(model.used)
                    model(x)
                    model.used = used
        if model.place == "before the forward pass":
            model.snap()
        if model.place in {"in a hook of the layer", "in forward"}:  # what the next forward pass would see
            model.snap()
        model.used.append((model.phase.detach().double() / model.step).round())
        summary = diagnostics.get_diagnostic_summary()
    return memory.records, summary


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    place=st.sampled_from(PLACES),
    steps_per_turn=st.integers(2, 2000),
    nodes=st.integers(1, 9),
    entries=st.integers(1, 6),
    rate=st.sampled_from([1e-6, 1e-2, 1.0, 30.0]),
    declared=st.booleans(),
    validate=st.booleans(),
)
def test_what_moved_is_what_the_next_forward_pass_saw_move(
    place, steps_per_turn, nodes, entries, rate, declared, validate
):
    """On any grid, wherever weights are laid on it: shares, frequencies and counts are those of the passes' own weights."""
    torch.manual_seed(nodes)
    width = 2 * math.pi / steps_per_turn
    model = Snapped(nodes, entries, width, place)
    records, summary = train(model, rate=rate, steps=4, grid={"phase": width} if declared else None, validate=validate)
    moved = [after != before for before, after in pairwise(model.used)]
    assert len(records) == len(moved) == 4
    for record, flags in zip(records, moved, strict=True):
        assert record.value("parameter.changed_share", "phase") == pytest.approx(flags.double().mean().item())
        turned = record.value("node.phase_change", "phase")
        assert (turned > 0) is bool(flags.any()) or steps_per_turn == 2  # whole turns are none
        lost, score = (record.value(f"parameter.{name}", "phase") for name in ("lost_share", "update_effectiveness"))
        if not flags.any() and lost is not None:
            assert (lost, score) == (1.0, 0.0)
    analysis = summary["discrete_update_analysis"]
    any_moved = [bool(flags.any()) for flags in moved]
    assert analysis["update_frequency"]["phase"] == pytest.approx(sum(any_moved) / 4)
    rows = torch.stack([flags.any(dim=1) for flags in moved]).double().mean(dim=0)
    for node, share in enumerate(rows.tolist()):
        assert analysis["nodes"]["update_frequency"][f"phase[{node}]"] == pytest.approx(share)
    resting = next((n for n, flag in enumerate(reversed(any_moved)) if flag), 4)
    assert analysis["stagnant"].get("phase", 0) == resting


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("place", PLACES)
def test_any_number_format_can_lie_on_a_grid(dtype, place):
    """In half precision a grid point is the number nearest to it."""
    torch.manual_seed(0)
    model = Snapped(4, 3, 0.25, place, dtype)
    records, _ = train(model, rate=2.0, steps=5, grid={"phase": 0.25})
    for record, before, after in zip(records, model.used, model.used[1:], strict=False):
        share = (before != after).double().mean().item()
        assert record.value("parameter.changed_share", "phase") == pytest.approx(share)
    assert 0 < sum(record.value("parameter.changed_share", "phase") for record in records) < 5


def test_without_a_declared_grid_the_number_format_is_the_grid():
    """A bfloat16 parameter nobody declared or paired: its bits count, from forward pass to forward pass."""
    torch.manual_seed(0)
    model = nn.Linear(6, 4).bfloat16()
    optimizer, memory, used = torch.optim.SGD(model.parameters(), lr=3e-3), MemoryWriter(), []
    with Exporter(model, backends=[memory], intervals={"discrete": 1}, strict=True).watch():
        for step in range(6):
            used.append(model.weight.detach().clone())
            optimizer.zero_grad()
            x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step)).bfloat16()
            model(x).float().square().mean().backward()
            optimizer.step()
        used.append(model.weight.detach().clone())
    shares = [(a != b).double().mean().item() for a, b in pairwise(used)]
    told = [record.value("parameter.changed_share", "weight") for record in memory.records]
    assert told == pytest.approx(shares)
    assert 0 < sum(shares) < 6


class Latent(nn.Module):
    """Full-precision weights behind a grid, which the gradient passes straight through."""

    def __init__(self, step):
        super().__init__()
        self.weight, self.step, self.used = nn.Parameter(torch.rand(5, 4)), step, []

    def forward(self, x):
        """Return a product with the weights on their grid."""
        rounded = torch.round(self.weight / self.step) * self.step
        self.used.append(rounded.detach().clone())
        return x @ (self.weight + (rounded - self.weight).detach()).T


def test_weights_between_the_points_of_a_grid_are_late_and_not_lost():
    """What forward passes see counts, and updates that add up before they show are no lost updates."""
    torch.manual_seed(0)
    model, memory = Latent(0.1), MemoryWriter()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with Exporter(model, backends=[memory], intervals={"discrete": 1}, strict=True).watch(grids={"weight": 0.1}):
        for _ in range(30):
            optimizer.zero_grad()
            model(torch.randn(16, 4)).square().mean().backward()
            optimizer.step()
        model(torch.ones(1, 4))
    shares = [(a != b).double().mean().item() for a, b in pairwise(model.used)]
    told = [record.value("parameter.changed_share", "weight") for record in memory.records]
    assert told == pytest.approx(shares)
    assert {record.value("parameter.between", "weight") for record in memory.records} == {1.0}
    assert all(record.value("update.lost_share") is None for record in memory.records)
    assert all(record.value("update.effectiveness") is not None for record in memory.records)


def test_a_grid_that_does_not_hold_zero_is_found():
    """Signs lie at -1 and 1 on a grid of width 2: one that flips has moved by one step."""

    class Signs(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6, 4).sign())

        def forward(self, x):
            return x @ self.weight.T

    torch.manual_seed(0)
    model, memory = Signs(), MemoryWriter()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with Exporter(model, backends=[memory], strict=True).watch(grids=2.0):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).square().mean().backward()
        before = model.weight.detach().clone()
        optimizer.step()
        with torch.no_grad():
            model.weight.copy_(before)
            model.weight[0, :2] *= -1
    assert memory.records[0].value("parameter.changed_share", "weight") == pytest.approx(2 / 24)
    assert memory.records[0].value("parameter.change_norm", "weight") == pytest.approx(math.sqrt(8))


@pytest.mark.parametrize("kind", ["buffers", "parameters"])
def test_tensors_of_whole_numbers_hold_places_on_a_grid(kind):
    """A store that somebody's own rule changes: turns, nodes and frequencies, though nothing was meant by an optimizer."""

    class Store(nn.Module):
        def __init__(self):
            super().__init__()
            for name in ("phase", "size"):
                places = torch.arange(12, dtype=torch.int32).reshape(6, 2)
                if kind == "buffers":
                    self.register_buffer(name, places)
                else:
                    setattr(self, name, nn.Parameter(places, requires_grad=False))
            self.linear = nn.Linear(2, 1)

        def forward(self, x):
            return self.linear(x * self.phase[0])

    model, memory = Store(), MemoryWriter()
    optimizer = torch.optim.SGD(model.linear.parameters(), lr=0.1)
    with BackwardPassDiagnostics(
        model, pairs=[("phase", "size")], grid={"phase": 2 * math.pi / 64, "size": 0.5}, backends=memory, strict=True
    ) as diagnostics:
        for step in range(4):
            optimizer.zero_grad()
            model(torch.ones(3, 2)).sum().backward()
            optimizer.step()
            with torch.no_grad():
                model.phase[step] += 1
                model.size[5, 0] += 1
        summary = diagnostics.get_diagnostic_summary()["discrete_update_analysis"]
    record = memory.records[0]
    assert record.value("node.changed_share", "phase") == pytest.approx(2 / 6)
    assert record.value("phase.change") == pytest.approx(2 * math.pi / 64 / 6)
    assert record.value("magnitude.change") == pytest.approx(0.5 / 6)
    assert record.value("update.changed_nodes") == 2
    assert record.get("node.phase_gradient") is None
    assert record.get("parameter.changed_share").as_dict() == pytest.approx(
        {"linear.weight": None, "linear.bias": None, "phase": 2 / 12, "size": 1 / 12}
        if kind == "buffers"
        else {"phase": 2 / 12, "size": 1 / 12, "linear.weight": None, "linear.bias": None}
    )
    assert record.value("parameter.change_norm", "phase") == pytest.approx(math.sqrt(2) * 2 * math.pi / 64)
    assert record.value("parameter.grid", "size") == 0.5
    assert record.value("parameter.numel", "phase") == 12
    assert summary["nodes"]["update_frequency"]["phase[2]"] == 0.25
    assert summary["nodes"]["update_frequency"]["size[5]"] == 1.0
    assert "effectiveness" not in summary["nodes"]


class Table(nn.Module):
    """Whole numbers in a buffer, which a rule of the loop's own moves along the gradient of what they stand for."""

    def __init__(self, step):
        super().__init__()
        self.step = step
        self.register_buffer("places", torch.randint(-40, 40, (6, 3)))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        """Return the products with the rows, and remember the weights so that their gradient can be asked for."""
        self.weights = (self.places.double() * self.step).requires_grad_()
        return self.scale * (x @ self.weights.T)


@pytest.mark.parametrize("rate", [0.3, 1e-6])
def test_updates_that_a_rule_of_ones_own_means_are_scored_by_tensor_and_by_node(rate):
    """``observe(intended=...)`` says what was meant before rounding; what places lose of it is an issue of its layer."""
    torch.manual_seed(0)
    step, model, memory, changes = 0.25, Table(0.25), MemoryWriter(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    exporter = Exporter(model, backends=[memory], intervals={"discrete": 1}, strict=True)
    with exporter.watch(grids={"places": step}):
        for _ in range(30):
            optimizer.zero_grad()
            (model(torch.randn(16, 3, dtype=torch.float64)) - 3).square().mean().backward()
            meant = -rate * model.weights.grad
            exporter.observe(intended={"places": meant})
            optimizer.step()
            before = model.places.clone()
            model.places += (meant / step).round().long()
            changes.append(((model.places - before).double() * step, meant))
    scores = update_scores(*zip(*changes, strict=True))[SCORES.index("effectiveness")].tolist()
    for record, score, (change, meant) in zip(memory.records, scores, changes, strict=True):
        assert record.value("parameter.update_effectiveness", "places") == pytest.approx(score, rel=1e-6)
        assert record.value("update.effectiveness") == pytest.approx(score, rel=1e-6)
        lost = ((change == 0) & (meant != 0)).double().mean()
        assert record.value("update.lost_share") == pytest.approx(float(lost))
        rows = update_scores(list(change), list(meant))[SCORES.index("effectiveness")].tolist()
        nodes = {f"places[{row}]": pytest.approx(value, rel=1e-6) for row, value in enumerate(rows)}
        assert record.get("node.effectiveness").as_dict() == nodes
    resting = [i.layers for i in exporter.issues if i.issue_type is IssueType.STAGNATION]
    assert (("places",) in resting) == (rate < 1e-3)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"place": torch.zeros(6, 3)}, "'place', which is no tensor of whole numbers.*did you mean 'places'"),
        ({"scale": torch.zeros(())}, "'scale', which is no tensor of whole numbers"),
        ({"places": torch.zeros(3)}, r"must have the shape of the tensor, \(6, 3\), got \(3,\)"),
    ],
)
def test_wrong_intended_updates_are_named(given, text):
    """The message says what was expected, what came and what to do."""
    model = Table(0.25)
    with (
        Exporter(model, backends=(), strict=True).watch(grids={"places": 0.25}) as exporter,
        pytest.raises(ArgumentError, match=text),
    ):
        exporter.observe(intended=given)


def test_a_loop_without_an_optimizer_is_measured_between_its_forward_passes():
    """A step by hand says when; what changed is what the next forward pass sees."""
    torch.manual_seed(0)
    model, memory = Snapped(3, 2, 0.5), MemoryWriter()
    with Exporter(model, backends=[memory], intervals={"discrete": 1}, strict=True).watch(
        pairs=[("phase", "size")], grids={"phase": 0.5}
    ) as exporter:
        for step in range(4):
            model.zero_grad()
            model(torch.ones(2, 2)).sum().backward()
            with torch.no_grad():
                model.phase[step % 3, 0] += 0.5
            exporter.step()
    assert [r.value("parameter.changed_share", "phase") for r in memory.records] == pytest.approx([1 / 6] * 4)
    assert all(record.value("update.effectiveness") is None for record in memory.records)


def test_phase_and_size_may_belong_to_two_optimizers():
    """The nodes are those of both, in the record of the step that both took part in."""
    torch.manual_seed(0)
    model, memory = Snapped(3, 2, 0.5), MemoryWriter()
    optimizers = [torch.optim.SGD([model.phase], lr=0.1), torch.optim.Adam([model.size], lr=0.1)]
    with Exporter(model, backends=[memory], intervals={"discrete": 1}, strict=True).watch(pairs=[("phase", "size")]):
        for _ in range(4):
            model.zero_grad()
            (model(torch.ones(2, 2)) - 1).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
    assert [record.step for record in memory.records] == [1, 2, 3, 4]
    for record in memory.records:
        assert record.value("update.changed_nodes") == 3
        assert record.value("node.magnitude_change", "phase") > 0


@pytest.mark.parametrize(("every", "interval"), [(1, 1), (1, 3), (2, 4), (5, 5)])
def test_each_record_holds_its_own_update_whenever_it_is_handed_over(every, interval):
    """Steps rise, none is left out or doubled, and intervals keep their meaning, in the middle of training too."""
    torch.manual_seed(0)
    model, memory = Snapped(2, 2, 0.1), MemoryWriter()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings_ = {"every": every, "intervals": {"discrete": interval}, "strict": True}
    recorded = sorted({1, *range(every, 21, every)})
    exporter = Exporter(model, backends=[memory], **settings_).watch(pairs="rows")
    for step in range(1, 21):
        optimizer.zero_grad()
        model(torch.ones(2, 2)).sum().backward()
        optimizer.step()
        if step == 7:  # the step that waits for a forward pass is told of too
            assert exporter.summary()["steps"]["last"] == max(r for r in recorded if r <= 7)
    exporter.close()
    assert [record.step for record in memory.records] == recorded
    measured = [r.step for r in memory.records if r.get("parameter.change_norm") is not None and r.step > 10]
    assert measured == [step for step in recorded if step > 10 and step % interval == 0]


def test_an_optimizer_that_changes_gradients_or_has_its_own_rule_is_not_scored():
    """A step that calls its base class means what that means; one that is not known to is left out of the scores."""

    class Changes(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    p.grad.mul_(2)
            return super().step(closure)

    class Own(torch.optim.SGD):
        def step(self, closure=None):
            with torch.no_grad():
                for group in self.param_groups:
                    for p in group["params"]:
                        p.sub_(group["lr"] * p.grad.sign())

    for kind, scored in ((Snapping, True), (Changes, False), (Own, False)):
        model, memory = Snapped(2, 2, 0.5), MemoryWriter()
        optimizer = kind(model, lr=0.1) if kind is Snapping else kind(model.parameters(), lr=0.1)
        with Exporter(model, backends=[memory], strict=True).watch(pairs="rows"):
            model(torch.ones(2, 2)).sum().backward()
            optimizer.step()
        assert (memory.records[0].get("parameter.update_effectiveness") is not None) is scored
        assert memory.records[0].value("parameter.change_norm", "size") > 0


def test_a_model_that_runs_without_its_modules_is_read_when_the_optimizer_steps():
    """No hook tells of a functional call: the weights before the next step are what it used."""
    torch.manual_seed(0)
    model, memory, used = nn.Linear(3, 2), MemoryWriter(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Exporter(model, backends=[memory], intervals={"discrete": 1}, strict=True).watch(grids=0.5):
        for _ in range(4):
            with torch.no_grad():
                model.weight.copy_((model.weight / 0.5).round() * 0.5)
            used.append(model.weight.detach().clone())
            optimizer.zero_grad()
            nn.functional.linear(torch.ones(4, 3), model.weight, model.bias).square().sum().backward()
            optimizer.step()
    shares = [(a != b).double().mean().item() for a, b in pairwise(used)]
    told = [record.value("parameter.changed_share", "weight") for record in memory.records]
    assert told[:3] == pytest.approx(shares)


def test_watching_updates_changes_no_bit_and_leaves_no_hook():
    """On a grid, in every place where weights can be laid on it."""
    hooks = dict(world._global_forward_hooks)
    for place in PLACES:
        results = []
        for watch in (True, False):
            torch.manual_seed(0)
            model = Snapped(4, 3, 0.05, place)
            train(model, rate=0.5, steps=4, grid={"phase": 0.05}, watch=watch)
            results.append([p.detach().tolist() for p in model.parameters()])
        assert results[0] == results[1]
    assert dict(world._global_forward_hooks) == hooks


@pytest.mark.parametrize(
    ("grids", "kind", "text"),
    [
        ({"wight": 0.5}, ArgumentError, "'wight', which is no parameter and no buffer of whole numbers; did you mean"),
        ({"weight": 0.0}, ArgumentError, "must be the width of a grid, above 0"),
        ({"weight": math.inf}, ArgumentError, "above 0 and finite"),
        ({"weight": "fine"}, ArgumentTypeError, "must be the width of a grid, got 'fine'"),
        ("fine", ArgumentTypeError, "must be the width of a grid or widths by name"),
        (True, ArgumentTypeError, "got True"),
    ],
)
def test_wrong_grids_are_named(grids, kind, text):
    """The message says what was expected, what came and what to do."""
    model = nn.Linear(2, 2)
    with pytest.raises(kind, match=text):
        Exporter(model, backends=()).watch(grids=grids)


def test_a_complex_parameter_has_no_grid():
    """Its phase and size would each need one of their own."""
    model = nn.Module()
    model.w = nn.Parameter(torch.ones(2, 2, dtype=torch.complex64))
    with pytest.raises(ArgumentError, match="which is complex; keep its phase and magnitude as two real parameters"):
        Exporter(model, backends=()).watch(grids={"w": 0.1})


def test_updates_that_a_declared_grid_takes_back_are_an_issue():
    """Nothing of what lies on the grid moves, though other layers learn: the phases are named."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), Snapped(6, 4, 0.1, "after the step"))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with BackwardPassDiagnostics(model, optimizer=optimizer, grid={"1.phase": 0.1}, strict=True) as diagnostics:
        for _ in range(25):
            optimizer.zero_grad()
            (model(torch.randn(8, 3)) - 1).square().mean().backward()
            optimizer.step()
            model[1].snap()
        found = {(issue.issue_type.name, issue.layer) for issue in diagnostics.alerts}
        summary = diagnostics.get_diagnostic_summary()
    assert ("STAGNATION", "1.phase") in found
    assert summary["discrete_update_analysis"]["mean_effectiveness"] == 0.0
    assert summary["discrete_update_analysis"]["stagnant"] == {"1.phase": 25}
    assert summary["backward_pass_diagnostics"]["stability_counts"]["parameter_stagnation_count"] == 25
    assert (
        "Parameters that should have changed and did not (measured steps): 1.phase (25)"
        in diagnostics.diagnostic_report()
    )


@pytest.mark.parametrize("place", [place for place in PLACES if place != "inside the step"])
@pytest.mark.parametrize("rate", [1e-3, 30.0])
def test_updates_that_something_takes_back_are_an_issue_without_a_declared_grid(place, rate):
    """Wherever that happens but in the step itself, which is a step that does nothing; not where they arrive."""
    torch.manual_seed(0)
    model = Snapped(6, 4, 0.1, place)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    if place == "in a hook of the layer":
        model.register_forward_pre_hook(lambda module, _: module.snap())
    with BackwardPassDiagnostics(model, optimizer=optimizer, strict=True) as diagnostics:
        for _ in range(20):
            if place == "before the forward pass":
                model.snap()
            optimizer.zero_grad()
            (model(torch.randn(8, 4)) - 1).square().mean().backward()
            optimizer.step()
            if place == "after the step":
                model.snap()
        found = [issue for issue in diagnostics.alerts if issue.issue_type.name == "STAGNATION"]
    assert [(issue.layers, issue.cause) for issue in found] == ([(("phase",), "taken back")] if rate < 1 else [])


def test_updates_that_add_up_behind_a_grid_are_no_issue():
    """Full-precision weights behind a declared grid may take many steps until one shows."""
    torch.manual_seed(0)
    model = Latent(10.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    with BackwardPassDiagnostics(model, optimizer=optimizer, grid={"weight": 10.0}, strict=True) as diagnostics:
        for _ in range(20):
            optimizer.zero_grad()
            (model(torch.randn(8, 4)) - 1).square().mean().backward()
            optimizer.step()
        assert "STAGNATION" not in {issue.issue_type.name for issue in diagnostics.alerts}
    assert diagnostics.update_analyzer.summary()["stagnant"] == {"weight": 20}


def test_another_thread_that_asks_does_not_end_a_step_early():
    """Between step and forward pass weights are not on their grid yet; only the thread that trains knows when they are."""
    torch.manual_seed(0)
    model, memory = Snapped(4, 3, 1.0, "after the step"), MemoryWriter()
    optimizer, told = torch.optim.SGD(model.parameters(), lr=1e-2), []
    with Exporter(model, backends=[memory], intervals={"discrete": 1}, strict=True).watch(pairs="rows") as exporter:
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.randn(8, 3)).square().mean().backward()
            optimizer.step()
            asks = threading.Thread(target=lambda: told.append(exporter.summary()["steps"]["count"]))
            asks.start()
            asks.join()
            model.snap()
        assert exporter.summary()["steps"]["count"] == 5
    assert told == [0, 1, 2, 3, 4]
    assert [record.value("parameter.changed_share", "phase") for record in memory.records] == [0.0] * 5


def test_what_a_thread_trained_can_be_asked_of_another_once_it_has_ended():
    """Nobody trains any more, so that the last step is complete."""
    torch.manual_seed(0)
    model = Snapped(4, 3, 1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)

    def run():
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.randn(8, 3)).square().mean().backward()
            optimizer.step()

    with BackwardPassDiagnostics(model, optimizer=optimizer, strict=True) as diagnostics:
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        assert diagnostics.get_diagnostic_summary()["discrete_update_analysis"]["samples"] == 4


@pytest.mark.parametrize("passes", [1, 3])
def test_an_update_begins_at_the_last_forward_pass_before_the_step(passes):
    """Weights that were loaded after an earlier pass are no update; of several micro-batches all use the same weights."""
    torch.manual_seed(0)
    model, memory = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).bfloat16(), MemoryWriter()
    start = {name: torch.full_like(p, 0.5) for name, p in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    with Exporter(model, backends=[memory], strict=True).watch():
        model(torch.ones(2, 3).bfloat16())
        for parameter, name in zip(model.parameters(), start, strict=True):
            parameter.data.copy_(start[name])  # counts no version
        for _ in range(passes):
            model(torch.randn(2, 3).bfloat16()).sum().backward()
        optimizer.step()
    assert set(memory.records[0].get("parameter.changed_share").values.tolist()) == {0.0}
    assert memory.records[0].value("update.lost_share") == 1.0


def test_each_tensor_is_copied_once_for_each_pass():
    """However deep it lies, and whether its own module is called or its parent reaches for it."""

    class Reaching(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(2, 2, bias=False)

        def forward(self, x):
            return x @ self.inner.weight

    model = nn.Sequential(nn.Sequential(nn.Sequential(nn.Linear(2, 2, bias=False)), Reaching()))
    seen = []
    use = ForwardUse(model, {"0.0.0.weight": 0, "0.1.inner.weight": 1}, seen.extend)
    with use.attach():
        use.arm(on=True)
        for _ in range(3):
            model(torch.ones(1, 2))
        use.arm(on=False)
    assert sorted(seen) == [0, 0, 0, 1, 1, 1]
