"""The same batch for ever, targets among the inputs, gradients that are cut off: facts, each beside programs without."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from gradflow_export import Exporter, IssueType, MemoryWriter

ROWS = 480


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


class Two(nn.Module):
    """Takes a table and a further number of each sample."""

    def __init__(self):
        super().__init__()
        self.table, self.beside, self.out = nn.Linear(6, 16), nn.Linear(1, 4), nn.Linear(20, 1)

    def forward(self, x, beside):
        return self.out(torch.cat([self.table(x), self.beside(beside)], 1).relu())


def net(inputs=6, outputs=3):
    return nn.Sequential(nn.Linear(inputs, 16), nn.ReLU(), nn.Linear(16, outputs))


def found(model, loss, steps, kind):
    """Train on a loss that draws its own batch; return the issues of a type."""
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    with Exporter(model, backends=[MemoryWriter()], strict=True, budget=None).watch() as exporter:
        for step in range(steps):
            optimizer.zero_grad()
            loss(step).backward()
            optimizer.step()
    return [issue for issue in exporter.issues if issue.issue_type is kind]


def drawn(x, y, which):
    """Return what draws the batch of a step; those that always hold the same samples begin with ``same``."""
    held = x[:24].clone(), y[:24].clone()
    order, first = torch.randperm(len(x)).split(24), torch.arange(24)
    loader = DataLoader(TensorDataset(x, y), batch_size=24)

    def augmented(_t):
        a, b = next(iter(loader))
        return a + 0.1 * torch.randn_like(a), b

    return {
        "same indices": lambda _t: (x[first], y[first]),
        "same slice": lambda _t: (x[:24], y[:24]),
        "same loader": lambda _t: next(iter(loader)),
        "same, augmented": augmented,
        "other indices": lambda t: (x[order[t % len(order)]], y[order[t % len(order)]]),
        "one tensor": lambda _t: held,
        "most data": lambda _t: (x[torch.arange(200)], y[torch.arange(200)]),
    }[which]


SAME = ("same indices", "same slice", "same loader", "same, augmented")
OTHER = ("other indices", "one tensor", "most data")


@pytest.mark.parametrize("which", SAME + OTHER)
def test_a_batch_that_is_drawn_anew_and_always_the_same_while_there_are_more_data(which):
    """However it is drawn; the same tensor, most of the data at once, or other samples are in order."""
    x = torch.randn(ROWS, 6)
    y = torch.randint(3, (ROWS,))
    batch = drawn(x, y, which)
    model = net()

    def loss(step):
        a, b = batch(step)
        return F.cross_entropy(model(a), b)

    issues = found(model, loss, 30, IssueType.BAD_TARGETS)
    assert [issue.cause for issue in issues] == (["same batch"] if which in SAME else [])


@pytest.mark.parametrize(
    ("begins", "size", "times", "told"),
    [(40, 16, 1, True), (100, 5, 1, True), (40, 48, 1, False), (0, 16, 1, False), (10**6, 16, 60, False)],
)
def test_one_batch_for_ever_after_others(begins, size, times, told):
    """An iterator that is exhausted; more samples at once than before, and some steps on each batch, are in order."""
    x, held = torch.randn(ROWS, 6), []
    y, model = x[:, :3].argmax(1), net()

    def loss(step):
        if not held or (step < begins and step % times == 0):
            rows = torch.randperm(ROWS)[: 24 if step < begins - 1 else size]
            held[:] = x[rows], y[rows]
        return F.cross_entropy(model(held[0]), held[1])

    issues = found(model, loss, 320 + begins % 1000, IssueType.BAD_TARGETS)
    assert [issue.cause for issue in issues] == (["same batch"] if told else [])


@pytest.mark.parametrize("leaks", [True, False])
@pytest.mark.parametrize("kind", ["classes", "half precision", "number beside"])
def test_targets_among_the_inputs_in_any_form(kind, leaks):
    """A column for each class, a rounded number, or an input of its own; those of other rows are none."""
    x, y = torch.randn(ROWS, 6), torch.randn(ROWS)
    labels = torch.randint(4, (ROWS,))
    rows = torch.arange(ROWS) if leaks else torch.randperm(ROWS)
    if kind == "classes":
        x = torch.cat([x, F.one_hot(labels[rows], 4)], 1)
    elif kind == "half precision":
        x = torch.cat([y[rows, None].half().float(), x], 1)
    beside, picks = 3.0 * y[rows, None] - 1.0, kind == "classes"
    model = Two() if kind == "number beside" else net(x.shape[1], 4 if picks else 1)

    def loss(_step):
        i = torch.randint(ROWS, (32,))
        out = model(x[i], beside[i]) if kind == "number beside" else model(x[i])
        return F.cross_entropy(out, labels[i]) if picks else F.mse_loss(out[:, 0], y[i])

    assert bool(found(model, loss, 40, IssueType.LEAKAGE)) is leaks


class Reads(nn.Module):
    """Reads the steps of sequences, by a recurrent layer or all at once."""

    def __init__(self, steps, numbers, recurrent, outputs=1):
        super().__init__()
        self.rnn = nn.GRU(numbers, 16, batch_first=True) if recurrent else nn.Linear(steps * numbers, 16)
        self.recurrent, self.head = recurrent, nn.Linear(16, outputs)

    def forward(self, x):
        return self.head(self.rnn(x)[0][:, -1] if self.recurrent else self.rnn(x.flatten(1)).relu()).squeeze(1)


def series(kind):
    """Return a long series of one or two numbers a step."""
    t, noise = torch.arange(1200.0), torch.randn(1200)
    walk, wave = noise.cumsum(0) / 10, torch.sin(t * 2 * torch.pi / 200)
    return {
        "walk": walk[:, None],
        "two": torch.stack([noise, walk], 1),
        "wave": wave[:, None],
        "ramp": t[:, None] / 600,
    }[kind]


@pytest.mark.parametrize("recurrent", [True, False])
@pytest.mark.parametrize(
    ("kind", "ahead", "leaks"),
    [
        ("walk", -1, True),
        ("two", -4, True),
        ("two", 1, False),
        ("walk", 1, False),
        ("wave", 1, False),
        ("ramp", 1, False),
    ],
)
def test_windows_that_hold_their_target_wherever_it_stands(kind, ahead, leaks, recurrent):
    """The wrong sign of a shift: what is to be forecast is one of the earlier steps. A ramp tells each step from any."""
    whole = series(kind)
    starts = torch.arange(len(whole) - 20)
    x = torch.stack([whole[i : i + 12] for i in starts.tolist()])
    y, model = whole[starts + 11 + ahead, -1], Reads(12, whole.shape[1], recurrent)

    def loss(_step):
        i = torch.randint(len(x), (32,))
        return F.mse_loss(model(x[i]), y[i])

    assert bool(found(model, loss, 40, IssueType.LEAKAGE)) is leaks


@pytest.mark.parametrize("recurrent", [True, False])
def test_an_earlier_step_of_sequences_of_their_own_may_be_what_is_to_be_remembered(recurrent):
    x, model = torch.randn(ROWS, 12, 2), Reads(12, 2, recurrent)

    def loss(_step):
        i = torch.randint(ROWS, (32,))
        return F.mse_loss(model(x[i]), x[i, 3, 1])

    assert bool(found(model, loss, 40, IssueType.LEAKAGE)) is not recurrent


@pytest.mark.parametrize("form", ["one-hot", "number"])
def test_an_earlier_symbol_may_be_what_is_to_be_remembered(form):
    """Symbols are few, and so stand in every place by chance: that makes no series of them."""
    symbols = torch.randint(20 if form == "number" else 4, (ROWS, 12))
    x = symbols[:, :, None].float() if form == "number" else F.one_hot(symbols, 4).float()
    model = Reads(12, x.shape[2], recurrent=True, outputs=20)

    def loss(_step):
        i = torch.randint(ROWS, (32,))
        return F.cross_entropy(model(x[i]), symbols[i, 3])

    assert not found(model, loss, 40, IssueType.LEAKAGE)


class Rounded(nn.Module):
    """Rounds its weights from some step on, with a straight-through estimator or without."""

    def __init__(self, passes):
        super().__init__()
        self.first, self.last, self.passes, self.rounds = nn.Linear(6, 16), nn.Linear(16, 3), passes, False

    def forward(self, x):
        return self.through(self.last, self.through(self.first, x).relu())

    def through(self, layer, x):
        w = layer.weight
        near = (8 * w).round() / 8 if self.rounds else w
        return F.linear(x, w + (near - w).detach() if self.passes else near, layer.bias)


@pytest.mark.parametrize("passes", [True, False])
def test_a_gradient_that_is_cut_off_while_the_biases_go_on(passes):
    """Momentum may still move the weights; an estimator that passes the gradient on is in order."""
    model = Rounded(passes)

    def loss(step):
        model.rounds = step >= 20
        x = torch.randn(32, 6)
        return F.cross_entropy(model(x), x[:, :3].argmax(1))

    issues = found(model, loss, 60, IssueType.STAGNATION)
    assert [set(issue.layers) for issue in issues] == ([] if passes else [{"first.weight", "last.weight"}])
    assert all("exactly 0" in issue.message and 20 <= issue.step <= 22 for issue in issues)


@pytest.mark.parametrize(("factor", "told"), [(30.0, True), (1.0, False), (0.1, False)])
def test_a_rate_that_leaps_late_and_the_losses_with_it(factor, told):
    """A rise by far more than the loss can bear is reported, however slowly it undoes what was learned."""
    model = net(outputs=1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    with Exporter(model, backends=[MemoryWriter()], strict=True, budget=None).watch() as exporter:
        for step in range(160):
            optimizer.param_groups[0]["lr"] = 1e-2 * (factor if step >= 100 else 1.0)
            x = torch.randn(32, 6)
            optimizer.zero_grad()
            (model(x)[:, 0] - x[:, 0].abs()).abs().mean().backward()
            optimizer.step()
    causes = [issue.cause for issue in exporter.issues if issue.issue_type is IssueType.LEARNING_RATE]
    assert causes == (["too large"] if told else [])


def test_a_loss_of_two_numbers_is_read_like_any_other():
    """A mean of scores against a mean of labels has no samples."""
    model = net(outputs=1)

    def loss(_step):
        return F.binary_cross_entropy_with_logits(model(torch.randn(16, 6)).mean(), torch.rand(16).mean())

    assert not found(model, loss, 8, IssueType.NUMERICAL)


class Inputs(nn.Module):
    """Several inputs that enter layers of their own, of which the last says the same of all samples."""

    def __init__(self):
        super().__init__()
        self.wide, self.narrow, self.time = nn.Linear(12, 16), nn.Linear(3, 16), nn.Linear(2, 16)
        self.last = nn.Linear(16, 2)

    def forward(self, wide, narrow, time):
        return self.last(F.relu(self.wide(wide) + self.narrow(narrow) + self.time(time)))


@pytest.mark.parametrize(("where", "told"), [("wide", True), ("narrow", True), ("nowhere", False)])
def test_the_size_of_each_of_several_inputs_is_read(where, told):
    """Far from 0 its samples are hardly told apart, whichever of them it is; what is one number for all may be a time."""
    model, rule = Inputs(), torch.randn(15, 2)
    optimizer = torch.optim.SGD(model.parameters(), 1e-4 if told else 0.1)
    with Exporter(model, backends=[MemoryWriter()], strict=True).watch() as exporter:
        for step in range(70):
            wide, narrow = torch.randn(32, 12), torch.randn(32, 3)
            y = (torch.cat([wide, narrow], 1) @ rule).argmax(1)
            far = [x + 500.0 * (name == where) for x, name in ((wide, "wide"), (narrow, "narrow"))]
            optimizer.zero_grad()
            F.cross_entropy(model(*far, torch.full((32, 2), 1.0 + step / 70)), y).backward()
            optimizer.step()
    assert (IssueType.DATA_SCALE in {issue.issue_type for issue in exporter.issues}) is told
