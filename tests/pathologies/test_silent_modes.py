"""Evaluation with dropout and training without it, each beside a loop that is right."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradflow_export import Exporter, IssueType, MemoryWriter


class Net(nn.Module):
    """Dropout of several kinds beside BatchNorm."""

    def __init__(self, kind=""):
        super().__init__()
        self.kind, self.hidden = kind, [nn.Dropout(0.3)]
        self.first, self.drop, self.last = nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 2)
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x):
        h = F.relu(self.first(x))
        if self.kind == "functional":
            h = F.dropout(h, 0.3)
        elif self.kind == "unregistered":
            h = self.hidden[0](h)
        elif self.kind == "attention":
            h = F.scaled_dot_product_attention(h[None], h[None], h[None], dropout_p=0.2)[0]
        elif self.kind == "mask":
            h = h * torch.bernoulli(torch.full_like(h, 0.8))
        elif self.kind == "on purpose":
            h = F.dropout(h, 0.3, training=True)
        elif self.kind == "sampling":
            h = h + torch.randn_like(h)
        return self.last(self.drop(self.norm(h)))


def issues(model, *, steps=30, each=5, to_eval=True, to_train=True, quiet=0, after=False, passes=3, loss=None, every=1):
    """Train with an evaluation every ``each`` steps, ``quiet`` passes without gradients per step, or one at the end.

    Each evaluation is made of ``passes`` of the same data.
    """
    torch.manual_seed(0)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    x = torch.randn(32, 8)

    def evaluate():
        model.train(not to_eval)
        with torch.no_grad():
            for _ in range(passes):
                model(x)
        model.train(to_train)

    with Exporter(model, backends=[MemoryWriter()], every=every, strict=True).watch() as exporter:
        for step in range(steps):
            optimizer.zero_grad()
            out = model(x)
            (F.cross_entropy(out, (x[:, 0] > 0).long()) if loss is None else loss(out, x)).backward()
            optimizer.step()
            with torch.no_grad():
                for _ in range(quiet):
                    model(x)
            if each and step % each == each - 1:
                evaluate()
        if after:
            evaluate()
        found = [issue for issue in exporter.issues if issue.issue_type is IssueType.EVAL_RANDOM]
    return [(issue.cause, issue.layer) for issue in found]


@pytest.mark.parametrize("kind", ["functional", "unregistered", "attention", "mask"])
def test_dropout_that_does_not_know_the_mode_is_found_after_its_layer(kind):
    """A functional call, a layer in a plain list, an attention's probability and a mask by hand."""
    assert issues(Net(kind)) == [("dropout in evaluation", "first")]


def test_one_evaluation_after_training_suffices():
    """No step follows that could tell of it."""
    assert issues(Net("functional"), each=0, after=True) == [("dropout in evaluation", "first")]


def test_dropout_that_is_always_on_is_told_where_nobody_averages():
    """A literal True is a mistake where each evaluation is one pass, and wanted where it is several of the same data."""
    assert issues(Net("on purpose"), passes=1) == [("dropout in evaluation", "first")]
    assert issues(Net("on purpose"), passes=2) == []


def test_noise_in_the_evaluation_of_a_classifier_is_told_unless_the_same_data_are_repeated():
    """It is told at the second evaluation, where passes over the same data have not shown that it is averaged."""
    assert issues(Net("sampling"), passes=1) == [("noise in evaluation", "first")]
    assert issues(Net("sampling"), passes=2) == []


def test_noise_in_a_model_that_reconstructs_is_in_order():
    """Of several numbers for each sample nobody knows whether they are what the noise is for."""
    assert issues(Net("sampling"), passes=1, loss=lambda out, x: F.mse_loss(out, x[:, :2])) == []


@pytest.mark.parametrize("kind", ["", "on purpose", "sampling"])
def test_sampling_and_dropout_on_purpose_are_in_order(kind):
    """Noise is what some models are for, and a literal True is a decision."""
    assert issues(Net(kind)) == []


def test_a_layer_that_is_set_to_training_by_itself_is_in_order():
    """Dropout that is kept on in evaluation by its own train() is wanted."""
    model = Net()
    model.eval()
    model.drop.train()
    with Exporter(model, backends=[MemoryWriter()], strict=True).watch() as exporter, torch.no_grad():
        model(torch.randn(4, 8))
    assert exporter.issues == ()


def test_the_wrong_mode_is_told_of_with_the_layers_that_act():
    """Evaluation without eval(), and training after it without train()."""
    assert issues(Net(), to_eval=False) == [("evaluation in training mode", "drop")]
    assert issues(Net(), to_train=False) == [("training in evaluation mode", "drop")]


@pytest.mark.parametrize("every", [1, 5])
def test_passes_without_gradients_in_each_step_are_no_evaluation(every):
    """Pseudo-labels are made in training mode, and samples for a critic, however few of the steps are recorded."""
    assert issues(Net(), each=0, quiet=2, steps=60, every=every) == []


def test_a_model_without_dropout_may_be_in_any_mode():
    """Nothing acts differently."""
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    assert issues(model, to_eval=False) == []
    assert issues(model, to_train=False) == []


def test_looking_draws_no_random_number_and_puts_every_function_back():
    """Evaluation gives the same with an exporter as without, and so does training after it."""
    functions = (F.dropout, torch.bernoulli, F.scaled_dot_product_attention)
    results = []
    for watched in (False, True):
        torch.manual_seed(1)
        model = Net("functional")
        exporter = Exporter(model, backends=[MemoryWriter()], strict=True, enabled=watched).watch()
        model.eval()
        with torch.no_grad():
            results.append([model(torch.ones(4, 8)) for _ in range(5)])
        exporter.close()
        results[-1].append(torch.rand(3))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert (F.dropout, torch.bernoulli, F.scaled_dot_product_attention) == functions


class Parted(nn.Module):
    """A model of which a training loop calls the parts alone."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2))
        self.head = nn.Linear(16, 2)


@pytest.mark.parametrize(
    ("call", "expected"), [("never", True), ("train only", True), ("both", False), ("body", False)]
)
def test_parts_that_are_evaluated_in_the_wrong_mode_are_told(call, expected):
    """Parts that are called by a loop of their own stand for the model; a body alone answers nothing."""
    model = Parted()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    with Exporter(model, backends=[MemoryWriter()], strict=True).watch() as exporter:
        for step in range(40):
            x = torch.randn(32, 8)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model.head(model.body(x)), (x[:, 0] > 0).long()).backward()
            optimizer.step()
            if step % 8 == 7:
                if call in {"both", "train only"}:
                    model.eval()
                with torch.no_grad():
                    h = model.body(x)
                    if call != "body":
                        model.head(h)
                if call == "both":
                    model.train()
        found = [issue for issue in exporter.issues if str(issue.issue_type) == "EVAL_RANDOM"]
    assert bool(found) is expected
    assert all(issue.layer.startswith("body") for issue in found)
