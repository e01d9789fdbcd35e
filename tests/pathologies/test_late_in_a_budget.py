"""What begins late is the same issue, since the same step, whether all steps are recorded or one of 32."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradflow_export import Exporter, IssueType
from gradflow_export.engine.step_timer import _Factor
from gradflow_export.records.causes import groups
from gradflow_export.records.issues import Severity

SPACING, STEPS = 32, 424


class Net(nn.Module):
    """Five layers, one of them with dropout behind it."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 32), *[nn.Linear(32, 32) for _ in range(3)], nn.Linear(32, 4)])
        self.units = nn.ModuleList([nn.ReLU() for _ in range(4)])
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        for layer, unit in zip(self.layers, self.units, strict=False):
            x = unit(layer(x))
        return self.layers[-1](self.drop(x))


def dies(model, _optimizer, place):
    """Set a bias from which no unit comes back."""
    with torch.no_grad():
        model.layers[place].bias.fill_(-1000.0)


def evaluates(model, _optimizer, _place):
    """Leave the model in evaluation mode."""
    model.eval()


def freezes(model, _optimizer, place):
    """Train one layer no more."""
    model.layers[place].requires_grad_(False)


def lets_go(model, optimizer, place):
    """Take one layer from the optimizer."""
    gone = {id(p) for p in model.layers[place].parameters()}
    group = optimizer.param_groups[0]
    group["params"] = [p for p in group["params"] if id(p) not in gone]


def blanks(model, _optimizer, _place):
    """Give it the same input for all samples."""
    model.register_forward_pre_hook(lambda _model, args: (torch.zeros_like(args[0]),))


def squashes(model, _optimizer, _place):
    """Give the loss, which takes logits, probabilities."""
    model.register_forward_hook(lambda _model, _args, out: out.softmax(1))


def watcher(monkeypatch, model, *, budget):
    """Return an exporter that records every step, or as few as a budget lets it, whatever the machine's speed."""
    monkeypatch.setattr(_Factor, "book", lambda *_args, **_kwargs: None)
    exporter = Exporter(model, backends=[], verbose=0, strict=True, **({} if budget else {"synchronous": True})).watch()
    if budget:
        exporter._loop.clock._spacing.value, exporter._loop.clock._stretch.value = SPACING, 16
    return exporter


def causes(monkeypatch, fault, place, begin, seed, *, budget):
    """Return the open issues that no other explains, of a program that learns until a fault begins."""
    torch.manual_seed(seed)
    model, data = Net(), torch.Generator().manual_seed(seed)
    optimizer, centres = torch.optim.Adam(model.parameters(), 2e-3), 2 * torch.randn(4, 8, generator=data)
    with watcher(monkeypatch, model, budget=budget) as exporter:
        for step in range(1, STEPS + 1):
            if step == begin:
                fault(model, optimizer, place)
            y = torch.randint(4, (32,), generator=data)
            x = centres[y] + torch.randn(32, 8, generator=data)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    return [g.head for g in groups(exporter.issues) if g.head.open and g.head.severity >= Severity.MEDIUM]


@pytest.mark.parametrize(("fault", "place", "begin", "kind", "budget"), [
    (dies, 1, 204, IssueType.DEAD, True), (dies, 2, 211, IssueType.DEAD, False),
    (dies, 3, 224, IssueType.DEAD, True), (dies, 0, 235, IssueType.DEAD, True),
    (evaluates, 0, 211, IssueType.EVAL_RANDOM, False), (evaluates, 0, 224, IssueType.EVAL_RANDOM, True),
    (freezes, 1, 207, IssueType.NOT_TRAINING, True), (freezes, 3, 214, IssueType.NOT_TRAINING, False),
    (lets_go, 1, 211, IssueType.NOT_TRAINING, False), (lets_go, 2, 215, IssueType.NOT_TRAINING, True),
    (blanks, 0, 204, IssueType.DATA_SCALE, False), (blanks, 0, 211, IssueType.DATA_SCALE, True),
    (squashes, 0, 207, IssueType.WRONG_LOSS, True), (squashes, 0, 224, IssueType.WRONG_LOSS, False),
])  # fmt: skip
def test_what_begins_late_has_one_cause_and_a_date_that_holds(monkeypatch, fault, place, begin, kind, budget):
    """The cause is named, not what came of it; and the fault began where the issue says that it may have begun."""
    (issue,) = causes(monkeypatch, fault, place, begin, begin % 2, budget=budget)
    assert issue.issue_type is kind
    assert issue.step - issue.before <= begin <= issue.step


@pytest.mark.parametrize("budget", [False, True])
def test_a_program_without_a_fault_has_no_cause(monkeypatch, budget):
    """The same program, undisturbed."""
    assert not causes(monkeypatch, lambda *_: None, 0, 204, int(budget), budget=budget)


@pytest.mark.parametrize(("depth", "budget"), [(3, False), (4, True)])
def test_a_middle_layer_of_few_is_frozen_late_until_it_trains_again(monkeypatch, depth, budget):
    """Long after the change is forgotten, the layer still lacks what it had; one alike that trains is enough."""
    torch.manual_seed(depth)
    layers = [nn.Linear(8 if i == 0 else 24, 4 if i == depth - 1 else 24) for i in range(depth)]
    model = nn.Sequential(*(part for layer in layers for part in (layer, nn.ReLU())))
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    exporter, x = watcher(monkeypatch, model, budget=budget), torch.randn(256, 8)
    with exporter:
        for step in range(1, 620):
            layers[1].requires_grad_(not 200 <= step < 310)
            rows = torch.randint(256, (32,))
            optimizer.zero_grad()
            F.mse_loss(model(x[rows]), x[rows, :4].abs()).backward()
            optimizer.step()
    (issue,) = [issue for issue in exporter.issues if issue.issue_type is IssueType.NOT_TRAINING]
    assert set(issue.layers) == {"2.weight", "2.bias"}
    assert issue.step - issue.before <= 200 <= issue.step
    assert budget or issue.healed_step is not None  # within the budget it may not have been read again by then
    assert (issue.healed_step or 310) >= 310
