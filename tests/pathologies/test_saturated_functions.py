"""Activations that are called as functions saturate as modules do: SATURATION names the layer that feeds them."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradflow_export import Exporter, IssueType, MemoryWriter

FORMS = {
    "torch.tanh": torch.tanh,
    "Tensor.tanh": lambda x: x.tanh(),
    "Tensor.tanh_": lambda x: x.tanh_(),
    "F.tanh": F.tanh,
    "torch.sigmoid": torch.sigmoid,
    "F.sigmoid": F.sigmoid,
    "nn.Tanh": nn.Tanh(),
}


class Deep(nn.Module):
    """Two hidden layers whose weights are far too large, or of the usual size, and a head."""

    def __init__(self, form, size):
        super().__init__()
        self.one, self.two, self.head = nn.Linear(20, 64), nn.Linear(64, 64), nn.Linear(64, 3)
        self.form = form
        if size:
            nn.init.normal_(self.two.weight, std=size)

    def forward(self, x):
        """Return scores."""
        return self.head(self.form(self.two(self.form(self.one(x)))))


class Cell(nn.Module):
    """A recurrent layer written out, of 8 steps."""

    def __init__(self, size):
        super().__init__()
        self.enter, self.again, self.head = nn.Linear(4, 32), nn.Linear(32, 32), nn.Linear(32, 3)
        if size:
            nn.init.normal_(self.enter.weight, std=size)

    def forward(self, x):
        """Return scores after the last step."""
        state = torch.zeros(len(x), 32)
        for step in x.view(len(x), 5, 4).unbind(1):
            state = torch.tanh(self.enter(step) + self.again(state))
        return self.head(state)


class Certain(nn.Module):
    """A layer whose answers are probabilities, or pixels, or hide a part of the input."""

    def __init__(self, last):
        super().__init__()
        self.body, self.out, self.last = nn.Linear(20, 32), nn.Linear(32, 20), last

    def forward(self, x):
        """Return one answer for each input."""
        return self.last(self.out(self.body(x).relu()), x)


def issues_of(model, measure, seed, rate=0.05):
    torch.manual_seed(seed)
    weight = torch.randn(20, 3)
    optimizer = torch.optim.SGD(model.parameters(), rate)
    with Exporter(model, backends=[MemoryWriter()], synchronous=True, verbose=0) as exporter:
        exporter.watch()
        for _ in range(60):
            x = torch.randn(32, 20)
            optimizer.zero_grad()
            measure(model(x), x, x @ weight).backward()
            optimizer.step()
        return {issue.layers for issue in exporter.issues if issue.issue_type is IssueType.SATURATION}


def classes(out, _x, scores):
    return F.cross_entropy(out, scores.argmax(1))


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("form", FORMS)
def test_saturated_activations_are_named_by_the_layer_that_feeds_them(form, seed):
    """Whatever the function is called by; weights of the usual size are silent."""
    torch.manual_seed(seed)
    found = issues_of(Deep(FORMS[form], 12.0), classes, seed)
    assert found == ({("form",)} if form == "nn.Tanh" else {("two",)})
    assert issues_of(Deep(FORMS[form], None), classes, seed) == set()


def test_a_written_out_recurrent_layer_is_seen():
    """Its function is called at every step of the sequence."""
    torch.manual_seed(0)
    found = issues_of(Cell(12.0), classes, 0)
    assert len(found) == 1
    assert found <= {("enter",), ("again",)}
    assert issues_of(Cell(None), classes, 0) == set()


@pytest.mark.parametrize(
    "last",
    [
        lambda out, _x: torch.sigmoid(40.0 * out),
        lambda out, _x: torch.tanh(40.0 * out).view(-1, 4, 5),
        lambda out, x: torch.sigmoid(40.0 * out) * x,
        lambda out, _x: {"pixels": (torch.tanh(40.0 * out), out)},
    ],
)
def test_certain_answers_are_no_saturation(last):
    """What a model gives out lies at the bounds where it is certain: probabilities, pixels, masks."""

    def measure(out, x, _scores):
        pixels = out["pixels"][0] if isinstance(out, dict) else out
        return (pixels.reshape(len(x), -1) - (x > 0).float()).square().mean()

    torch.manual_seed(0)
    assert issues_of(Certain(last), measure, 0, rate=0.5) == set()
