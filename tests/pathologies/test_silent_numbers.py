"""Answers among the inputs, zeros of float16, embeddings that are all one: told in every seed, and nothing like them."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradflow_export import Exporter, IssueType, MemoryWriter

NEW = {IssueType.LEAKAGE, IssueType.UNDERFLOW, IssueType.COLLAPSE}
SEEDS = pytest.mark.parametrize("seed", range(2))


def told(model, loss_of, steps=60, lr=0.003, scaler=None):
    """Train with Adam; return the new types that were told, and the exporter."""
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    with Exporter(model, backends=[MemoryWriter()], strict=True, synchronous=True, verbose=0) as exporter:
        exporter.watch()
        for _ in range(steps):
            optimizer.zero_grad()
            if scaler is None:
                loss_of().backward()
                optimizer.step()
            else:
                scaler.scale(loss_of()).backward()
                scaler.step(optimizer)
                scaler.update()
    return [issue for issue in exporter.issues if issue.issue_type in NEW]


def mlp(inputs, outputs, width=24):
    return nn.Sequential(
        nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, outputs)
    )


class Recurrent(nn.Module):
    """A recurrent layer, and a line at its last step."""

    def __init__(self, kind, *, batch_first):
        super().__init__()
        self.cell, self.head, self.batch_first = kind(1, 12, batch_first=batch_first), nn.Linear(12, 1), batch_first

    def forward(self, x):
        x = x[:, :, None]
        return self.head(self.cell(x)[0][:, -1] if self.batch_first else self.cell(x.transpose(0, 1))[0][-1])


def drawn(x, y):
    """Return what draws rows of both."""

    def batch():
        rows = torch.randint(0, len(x), (32,))
        return x[rows], y[rows]

    return batch


def regression(model, batch, loss=F.mse_loss):
    def one():
        x, y = batch()
        return loss(model(x), y)

    return one


def series(leak, width=20):
    """Return windows of a noisy series, and what comes next, or with ``leak`` what the window ends with."""
    time = 0.1 * torch.arange(2_000)
    values = torch.sin(time) + 0.3 * torch.sin(3.7 * time) + 0.05 * torch.randn(len(time))
    return values.unfold(0, width, 1)[:-1], (values[width - 1 : -1] if leak else values[width:])[:, None]


@SEEDS
@pytest.mark.parametrize("leak", [True, False])
@pytest.mark.parametrize("kind", ["mlp", nn.LSTM, nn.GRU])
def test_a_window_that_holds_its_forecast_leaks(kind, leak, seed):
    """The last step of the window being the target is LEAKAGE for any layer that reads it; a window before it is none."""
    torch.manual_seed(seed)
    model = mlp(20, 1) if kind == "mlp" else Recurrent(kind, batch_first=seed % 2 == 0)
    found = told(model, regression(model, drawn(*series(leak))))
    assert [issue.issue_type for issue in found] == [IssueType.LEAKAGE] * leak
    assert not leak or "Column 19 " in found[0].message


@SEEDS
@pytest.mark.parametrize("factor", [1.0, -0.25])
def test_a_target_that_is_a_column_leaks(factor, seed):
    """Scaled and moved, or as it is, in whatever column: the answer is among the inputs."""
    torch.manual_seed(seed)
    table = torch.randn(1_000, 8) * torch.rand(8)
    x, y = table, factor * table[:, seed : seed + 1] + (factor != 1.0)
    model = mlp(8, 1)
    (issue,) = told(model, regression(model, drawn(x, y)))
    assert issue.issue_type is IssueType.LEAKAGE
    assert f"Column {seed} " in issue.message


@SEEDS
def test_a_class_among_the_inputs_leaks(seed):
    """The number of the class as a feature, scaled or not, is LEAKAGE; features that only determine it are none."""
    torch.manual_seed(seed)
    features = torch.randn(1_000, 6)
    y = features[:, :3].argmax(1)
    leaked = y[:, None].float()
    for x in (features, *(torch.cat([features, column], 1) for column in (leaked, leaked / 3 - 1))):
        model = mlp(x.shape[1], 3)
        found = told(model, regression(model, drawn(x, y), F.cross_entropy))
        assert [issue.issue_type for issue in found] == [IssueType.LEAKAGE] * (x.shape[1] == 7)


@SEEDS
@pytest.mark.parametrize("first", [True, False])
def test_one_target_of_several_leaks(first, seed):
    """Of two tasks, whichever comes first, and of two numbers of one task."""
    torch.manual_seed(seed)
    x = torch.randn(1_000, 12)
    labels = (x[:, 0] * x[:, 1] > 0).long()
    numbers = torch.stack([x[:, 7], x[:, 1] * x[:, 2]], dim=1)
    model = nn.ModuleDict({"body": nn.Linear(12, 24), "label": nn.Linear(24, 2), "value": nn.Linear(24, 2)})

    def one():
        rows = torch.randint(0, len(x), (32,))
        h = F.relu(model["body"](x[rows]))
        both = F.cross_entropy(model["label"](h), labels[rows]), F.mse_loss(model["value"](h), numbers[rows])
        return both[first] + both[not first]

    (issue,) = told(model, one)
    assert issue.issue_type is IssueType.LEAKAGE
    assert "Column 7 of the inputs equals the target (value)" in issue.message


def honest(name):
    """Return inputs and targets that look like a leak and are none."""
    x = torch.randn(1_000, 8)
    return {
        "sum of columns": (x, x.sum(1, keepdim=True)),
        "product": (x, x[:, :1] * x[:, 1:2]),
        "autoencoder": (x, x),
        "half of the inputs": (x, x[:, :4]),
        "few columns": (x[:, :3], x[:, :1]),
        "sign": (x, (x[:, :1] > 0).float()),
        "near a column": (x, x[:, :1] + 0.01 * torch.randn(1_000, 1)),
        "a period": (torch.sin(2 * torch.pi * torch.arange(1_000)[:, None] / 16 + torch.arange(20) * torch.pi / 8),
                     torch.sin(2 * torch.pi * torch.arange(1_000)[:, None] / 16 + 20 * torch.pi / 8)),
        "one batch": (x[:32], x[:32, :1]),
    }[name]  # fmt: skip


@pytest.mark.parametrize(
    "name",
    ["sum of columns", "product", "autoencoder", "half of the inputs", "few columns", "sign", "near a column",
     "a period", "one batch"],
)  # fmt: skip
def test_what_determines_the_target_is_no_leak(name):
    """What follows from several columns, is told again as a whole, or is nearly a column, is no copy."""
    torch.manual_seed(0)
    x, y = honest(name)
    model = mlp(x.shape[1], y.shape[1])
    assert told(model, regression(model, drawn(x, y))) == []


class Patches(nn.Module):
    """Predicts every patch from one another, which is given by itself."""

    def __init__(self, size):
        super().__init__()
        self.enter, self.leave = nn.Linear(size, 24), nn.Linear(24, size)

    def forward(self, patches):
        return self.leave(torch.tanh(self.enter(patches)).roll(1, 1))


@pytest.mark.parametrize(("patches", "size"), [(16, 16), (6, 9), (40, 4)])
def test_all_patches_told_again_are_no_leak(patches, size):
    """However many there are, and however few of their numbers are looked at."""
    torch.manual_seed(0)
    x = torch.randn(1_000, patches, size)
    model = Patches(size)
    assert told(model, regression(model, drawn(x, x))) == []


@SEEDS
def test_the_first_of_a_sequence_may_be_what_is_to_be_remembered(seed):
    """A target that is an earlier step is a task of memory."""
    torch.manual_seed(seed)
    x = torch.randn(1_000, 12)
    model = Recurrent(nn.GRU, batch_first=True)
    assert told(model, regression(model, drawn(x, x[:, :1]))) == []


def lowered(model, dtype, size):
    x = torch.randn(512, 8)
    y = torch.sin(x[:, :1])

    def one():
        rows = torch.randint(0, 512, (32,))
        with torch.autocast("cpu", dtype):
            out = model(x[rows])
        return size * F.mse_loss(out.float(), y[rows])

    return one


@SEEDS
@pytest.mark.parametrize("size", [3e-6, 1e-6])
def test_small_losses_in_float16_underflow(size, seed):
    """Gradients below the smallest number of float16 are UNDERFLOW; what rests for them follows from it."""
    torch.manual_seed(seed)
    model = mlp(8, 1)
    (issue,) = told(model, lowered(model, torch.float16, size))
    assert issue.issue_type is IssueType.UNDERFLOW


@pytest.mark.parametrize(
    ("dtype", "size", "scaled"),
    [
        (torch.bfloat16, 1e-5, False),
        (torch.float16, 1.0, False),
        (torch.float16, 1e-5, True),
        (torch.float16, 1e-3, False),
    ],
)
def test_gradients_that_float16_holds_are_left_alone(dtype, size, scaled):
    """Other types, losses of a usual size and scaled ones do not underflow."""
    torch.manual_seed(0)
    model = mlp(8, 1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16) if scaled else None
    assert told(model, lowered(model, dtype, size), scaler=scaler) == []


def test_rows_that_were_not_looked_up_are_no_underflow():
    """Most of a gradient is 0 where few words were looked up: its other entries are of a usual size."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5_000, 8), nn.Flatten(), nn.Linear(32, 4))

    def one():
        with torch.autocast("cpu", torch.float16):
            out = model(torch.randint(0, 5_000, (16, 4)))
        return F.cross_entropy(out.float(), torch.randint(0, 4, (16,)))

    assert told(model, one) == []


def views(model, apart):
    def one():
        x = torch.randn(64, 16)
        a, b = (model(x + 0.1 * torch.randn_like(x)) for _ in range(2))
        if not apart:
            # A number of the data beside it: the bare distance is told as WRONG_LOSS before anything has collapsed.
            return F.mse_loss(a, b) + 0.01 * x.std()
        return F.cross_entropy(5 * F.normalize(a) @ F.normalize(b).t(), torch.arange(64))

    return one


@SEEDS
def test_embeddings_that_are_only_drawn_together_collapse(seed):
    """Without anything that holds them apart all become one, and COLLAPSE names the layer; with negatives none do."""
    torch.manual_seed(seed)
    model = mlp(16, 8)
    (issue,) = told(model, views(model, apart=False), steps=800, lr=0.005)
    assert (issue.issue_type, issue.layers[-1]) == (IssueType.COLLAPSE, "4")
    model = mlp(16, 8)
    assert told(model, views(model, apart=True), steps=200, lr=0.01) == []


def test_answers_that_hardly_differ_are_no_collapse():
    """A target with a mean of a thousand times its spread is learned as such, by a loss written by hand too."""
    torch.manual_seed(0)
    x = torch.randn(1_000, 6)
    y = 20 + 0.05 * x[:, :1]
    model = mlp(6, 1)
    loss = regression(model, drawn(x, y), lambda out, y: ((out - y).abs() ** 1.5).mean())
    assert told(model, loss, steps=300, lr=0.01) == []
