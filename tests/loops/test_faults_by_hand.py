"""Loops that update the weights by hand: what is wrong with their gradients is told as it is of an optimizer's."""

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradflow_export import Exporter, IssueType, MemoryWriter, Severity

STEPS, LATE, AFTER = 120, 60, 40
"""Steps of a loop without a fault, the step at which a fault begins late, and the steps that follow its beginning."""

UPDATES = {
    "no_grad": lambda p, by: p.sub_(by),
    "data": lambda p, by: p.data.add_(-by),
    "copied": lambda p, by: p.copy_(p - by),
    "data_replaced": lambda p, by: setattr(p, "data", p.data - by),
}


def cleared(model, how):
    """Clear gradients in one of three ways."""
    for p in model.parameters():
        if how == "none":
            p.grad = None
        elif p.grad is not None:
            p.grad.zero_()


def update(model, how, rate=0.05):
    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None:
                UPDATES[how](p, rate * p.grad)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.middle, self.head = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 3)

    def forward(self, x, cut=False):
        h = torch.relu(self.body(x))
        return self.head(torch.relu(self.middle(h.detach() if cut else h)))


def told(model, loop):
    """Return what is said, MEDIUM and above, by type."""
    with Exporter(model, backends=[MemoryWriter()], strict=True, verbose=0) as exporter:
        exporter.watch()
        loop(exporter)
    return {issue.issue_type: issue for issue in exporter.issues if issue.severity >= Severity.MEDIUM}


def trained(how="no_grad", clears="none", micro=1, after=False, cut=None, uncleared=None, tells=False, steps=STEPS):
    """Return what is said of one loop; ``cut`` and ``uncleared`` are the steps at which a fault begins."""
    torch.manual_seed(0)
    model, truth = Net(), torch.randn(6, 3)

    def loop(exporter):
        for step in range(steps):
            if not after and (uncleared is None or step < uncleared):
                cleared(model, clears)
            for _ in range(micro):
                x = torch.randn(16, 6)
                (F.cross_entropy(model(x, cut is not None and step >= cut), (x @ truth).argmax(1)) / micro).backward()
            update(model, how)
            if after and (uncleared is None or step < uncleared):
                cleared(model, clears)
            if tells:
                exporter.step()

    return told(model, loop)


WAYS = [*itertools.product(UPDATES, ("none", "zeros"), (1, 3), (False, True), (False, True))]
SOME = WAYS[::9]


@pytest.mark.parametrize(("how", "clears", "micro", "after", "tells"), SOME)
def test_nothing_is_said_of_a_loop_that_clears(how, clears, micro, after, tells):
    assert trained(how, clears, micro, after, tells=tells) == {}


@pytest.mark.parametrize("begins", [0, LATE])
@pytest.mark.parametrize(("how", "clears", "micro", "after", "tells"), SOME)
def test_gradients_that_are_not_cleared_are_named(how, clears, micro, after, tells, begins):
    found = trained(how, clears, micro, after, uncleared=begins, tells=tells, steps=begins + AFTER)
    assert begins <= found[IssueType.STALE_GRAD].step <= begins + 5


@pytest.mark.parametrize("begins", [0, LATE])
@pytest.mark.parametrize(("how", "clears", "micro", "after", "tells"), [way for way in SOME if way[1] == "none"])
def test_a_graph_that_is_cut_is_named(how, clears, micro, after, tells, begins):
    found = trained(how, clears, micro, after, cut=begins, tells=tells, steps=begins + AFTER)
    issue = found.get(IssueType.NOT_TRAINING) or found[IssueType.STAGNATION]
    assert set(issue.layers) == {"body.weight", "body.bias"}
    assert begins <= issue.step <= begins + 10


@pytest.mark.parametrize(("fault", "kind"), [("copies", IssueType.BAD_INIT), ("decay", IssueType.LEARNING_RATE)])
@pytest.mark.parametrize(("how", "clears", "micro", "after", "tells"), SOME)
def test_weights_are_judged_by_how_they_began(how, clears, micro, after, tells, fault, kind):
    """Units that are copies of each other, and weights that a penalty pulls to 0, from what they were at first."""
    torch.manual_seed(0)
    model, truth = Net(), torch.randn(6, 3)
    if fault == "copies":
        for p in model.parameters():
            nn.init.constant_(p, 0.1)

    def loop(exporter):
        for _ in range(STEPS):
            cleared(model, clears)
            for _ in range(micro):
                x = torch.randn(16, 6)
                penalty = 0.5 * (fault == "decay") * sum(p.square().sum() for p in model.parameters())
                ((F.cross_entropy(model(x), (x @ truth).argmax(1)) + penalty) / micro).backward()
            update(model, how)
            if tells:
                exporter.step()

    assert kind in told(model, loop)


def test_two_players_that_update_in_turns_leave_nothing_over():
    """What one player's loss leaves in the other is cleared before that one's own pass."""
    torch.manual_seed(0)
    model = nn.ModuleDict(
        {"makes": nn.Linear(4, 2), "tells": nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))}
    )

    def loop(_exporter):
        for _ in range(STEPS):
            real, made = torch.randn(32, 2) + 2, model["makes"](torch.randn(32, 4))
            model["tells"].zero_grad()
            (F.softplus(-model["tells"](real)).mean() + F.softplus(model["tells"](made.detach())).mean()).backward()
            update(model["tells"], "no_grad")
            model["makes"].zero_grad()
            F.softplus(-model["tells"](made)).mean().backward()
            update(model["makes"], "no_grad")

    assert IssueType.STALE_GRAD not in told(model, loop)
    assert IssueType.NOT_TRAINING not in told(model, loop)


def test_gradients_that_are_returned_are_none_that_are_missing():
    torch.manual_seed(0)
    model, truth = Net(), torch.randn(6, 3)

    def loop(_exporter):
        for _ in range(STEPS):
            x = torch.randn(16, 6)
            parameters = list(model.parameters())
            found = torch.autograd.grad(F.cross_entropy(model(x), (x @ truth).argmax(1)), parameters)
            with torch.no_grad():
                for p, g in zip(parameters, found, strict=True):
                    p.sub_(0.05 * g)

    assert told(model, loop) == {}


@pytest.mark.parametrize("begins", [0, LATE])
@pytest.mark.parametrize("how", UPDATES)
def test_a_layer_that_is_left_out_is_named_and_nothing_is_called_rounding(how, begins):
    torch.manual_seed(0)
    model, truth = Net(), torch.randn(6, 3)

    def loop(_exporter):
        for step in range(begins + AFTER):
            model.zero_grad()
            x = torch.randn(16, 6)
            F.cross_entropy(model(x), (x @ truth).argmax(1)).backward()
            update(nn.ModuleList([model.body, model.head]) if step >= begins else model, how)

    issue = told(model, loop)[IssueType.STAGNATION]
    assert set(issue.layers) == {"middle.weight", "middle.bias"}
    assert begins <= issue.step <= begins + 15
    assert "rounding" not in issue.message


def test_steps_that_become_ever_shorter_leave_nobody_out():
    """A rate that is decayed once for each parameter: what rests first is not left out, and each issue has its words."""
    torch.manual_seed(0)
    model, truth, rate = Net(), torch.randn(6, 3), 0.05

    def loop(_exporter):
        nonlocal rate
        for _ in range(240):
            x = torch.randn(16, 6)
            cleared(model, "none")
            F.cross_entropy(model(x), (x @ truth).argmax(1)).backward()
            with torch.no_grad():
                for p in model.parameters():
                    p.sub_(rate * p.grad)
                    rate *= 0.97

    with Exporter(model, backends=[MemoryWriter()], strict=True, verbose=0) as exporter:
        exporter.watch()
        loop(exporter)
    resting = [issue for issue in exporter.issues if issue.issue_type is IssueType.STAGNATION]
    assert resting
    assert all("rounding" in issue.message and issue.layer in issue.message for issue in resting), resting
    lasted = [int(issue.message.split(" in ")[-1].split()[0]) for issue in resting]
    assert all(2 < steps <= 240 - issue.step + 1 for steps, issue in zip(lasted, resting, strict=True)), resting
