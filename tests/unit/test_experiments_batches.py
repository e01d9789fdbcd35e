"""Treatments of what a batch holds, of layers that are one or several by mistake, and of gradients that are NaN."""

from __future__ import annotations

import textwrap

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gradflow_export.experiments.battery import Battery, confirmations
from gradflow_export.experiments.decision import Baseline, Trial
from gradflow_export.experiments.laboratory import Laboratory
from gradflow_export.experiments.mending.batches import ComputedTargets, EarlierInputs, OtherRows
from gradflow_export.experiments.mending.layers import KeptLayers, OwnLayers
from gradflow_export.experiments.mending.passages import OpenPassages
from gradflow_export.experiments.mending.penalties import Penalties
from gradflow_export.experiments.mending.rates import FiniteGradients
from gradflow_export.experiments.mending.scores import Transposed, mixes
from gradflow_export.experiments.runs import Request
from gradflow_export.experiments.survey import Training
from gradflow_export.experiments.target import Target
from gradflow_export.experiments.treatments import find
from gradflow_export.experiments.verdict import Verdict
from gradflow_export.records.issues import IssueType

SCRIPT = """
    import sys
    import torch
    from torch import nn
    from torch.nn import functional as F

    word = sys.argv[1]
    torch.manual_seed(0)
    x = torch.randn(1024, 8)
    y = (x[:, :3] + 0.3 * x[:, 3:6]).argmax(1)
    if word.startswith("permuted"):
        y = y[torch.randperm(1024)]
    if word == "sorted":
        order = y.argsort()
        x, y = x[order], y[order]

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(8, 32)
            block = nn.Linear(32, 32)
            self.blocks = nn.ModuleList([block] * 3 if word == "shared" else [nn.Linear(32, 32) for _ in range(3)])
            self.last = nn.Linear(32, 3)

        def forward(self, x):
            x = self.first(x).relu()
            for block in self.blocks:
                x = block(x).relu()
            return self.last(nn.Linear(32, 32)(x) if word == "made" else x)

    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-7 if word == "permuted still" else 3e-3)
    late = y[:32]
    for step in range(300):
        rows = slice(0, 32) if word == "same" else torch.arange(32 * step, 32 * step + 32) % 1024
        batch, labels = x[rows], y[rows]
        if word == "late":
            late, labels = labels, late
        loss = F.cross_entropy(model(batch), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""


@pytest.mark.parametrize(
    ("word", "suspect", "cure"),
    [
        ("same", IssueType.BAD_TARGETS, "other rows in each batch"),
        ("sorted", IssueType.BAD_TARGETS, "shuffled rows"),
        ("late", IssueType.BAD_TARGETS, "the inputs of the batch before"),
        ("late", IssueType.SATURATION, "the inputs of the batch before"),
        ("permuted", IssueType.BAD_TARGETS, "targets computed from the inputs"),
        ("shared", IssueType.CAPACITY, "a layer for each place"),
        ("made", IssueType.NOT_TRAINING, "one layer for all calls"),
        ("permuted still", IssueType.BAD_TARGETS, None),
        ("sound", IssueType.BAD_TARGETS, None),
        ("sound", IssueType.CAPACITY, None),
    ],
)
def test_what_a_batch_or_a_container_holds_is_cured(tmp_path, word, suspect, cure):
    """A sound script is given no cure, whatever accuses it; nor is what stands in where the script cannot learn at all."""
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(SCRIPT), encoding="utf-8")
    with Laboratory(Target(path, words=(word,)), jobs=2) as laboratory:
        survey = laboratory.look(steps=120)
        verdict = Battery(laboratory, survey.trainings[-1], steps=120, suspects=[suspect]).run()
    assert next((trial.names[0] for trial in verdict.cures), None) == cure


def test_rows_are_exchanged_alike_for_all_tables_and_not_within_a_model():
    """So are those of a slice; single rows, masks and whole tables are left as they are."""
    x, y = torch.arange(40.0)[:, None], torch.arange(40)
    for mixed in (True, False):
        change = OtherRows(mixed=mixed)
        change.after_step(None)
        for index in (torch.tensor([3, 4, 5]), slice(3, 6)):
            (_, one), _ = change.function("__getitem__", (x, index), {})
            (_, other), _ = change.function("__getitem__", (y, index), {})
            assert torch.equal(x[one][:, 0].long(), y[other])
            assert one.tolist() != [3, 4, 5]
            assert (one.diff() % 40 == 1).all() or mixed
        for index in (3, x[:, 0] > 5, slice(None), torch.tensor([2]), (slice(0, 3), 0)):
            assert change.function("__getitem__", (x, index), {})[0][1] is index
        change.called(nn.Identity(), (x,), {})
        assert change.function("__getitem__", (x, slice(3, 6)), {})[0][1] == slice(3, 6)
        change.left(nn.Identity(), x)


def test_a_loader_gives_samples_that_are_drawn():
    """One that streams is left alone."""
    loader = DataLoader(TensorDataset(torch.arange(64)), batch_size=4)
    change = OtherRows(mixed=True)
    (first,), (second,) = change.batch(loader, None), change.batch(loader, None)
    assert first.shape == (4,)
    assert not torch.equal(first, second)
    assert change.batch(object(), "given") == "given"


def test_inputs_come_one_call_late():
    """Without gradients they come as they are."""
    change, model = EarlierInputs(), nn.Identity()
    assert [change.called(model, (at,), {})[0][0] for at in range(3)] == [0, 0, 1]
    with torch.no_grad():
        assert change.called(model, (7,), {})[0] == (7,)


@pytest.mark.parametrize("kind", ["classes", "numbers", "shares", "words"])
def test_targets_follow_from_the_inputs(kind):
    """Equal inputs have equal targets; classes are about as frequent, numbers keep mean and spread."""
    torch.manual_seed(0)
    x = torch.randint(50, (256, 1)) if kind == "words" else torch.randn(256, 5)
    out = torch.randn(256, 1 if kind in {"numbers", "shares"} else 3, requires_grad=True)
    y = {
        "classes": torch.zeros(256, dtype=torch.long),
        "numbers": 5 + 2 * torch.randn(256, 1),
        "shares": torch.randint(2, (256, 1)).float(),
        "words": torch.randint(3, (256,)),
    }[kind]
    change = ComputedTargets()
    change.called(nn.Identity(), (x,), {})
    name = {"numbers": "mse_loss", "shares": "binary_cross_entropy"}.get(kind, "cross_entropy")
    (_, made), _ = change.function(name, (out, y), {})
    (_, again), _ = change.function(name, (out, y), {})
    assert change.acted
    assert (made.shape, made.dtype) == (y.shape, y.dtype)
    assert torch.equal(made, again)
    if kind == "numbers":
        assert made.mean().item() == pytest.approx(y.mean().item(), abs=1e-3)
    else:
        assert made.unique(return_counts=True)[1].min() > 40


def test_what_stands_in_has_to_be_learned_from_the_inputs():
    """That the finding is gone says nothing then: the targets were made so that it is."""
    base = Baseline((1.0,) * 3, (1.0,) * 3, {"shuffled inputs": 1.0, "noise as inputs": 0.9})
    seeds = range(3)
    gone = dict.fromkeys(seeds, True)
    trial = Trial(("targets computed from the inputs",), dict.fromkeys(seeds, 0.9), gone=gone, stands_in=True)
    assert not trial.relieves(base)
    assert not trial.relieves(None)
    verdict = Verdict(Training(0, 300, 1), 60, baseline=base, trials=[trial])
    (asked,) = confirmations(verdict, Request(trial.names, 0), trial)
    assert asked.names == ("targets computed from the inputs", "noise as inputs")
    seen = Trial(trial.names, trial.effects, gone=gone, stands_in=True, blind=dict.fromkeys(seeds, 1.1))
    assert seen.relieves(base)
    assert not Trial(trial.names, dict.fromkeys(seeds, 1.05), gone=gone, stands_in=True, blind=seen.blind).relieves(
        base
    )


def test_each_place_has_a_layer_of_its_own_that_is_trained():
    """Activations, and layers that stand in one place, are left as they are."""
    shared, relu = nn.Linear(4, 4), nn.ReLU()
    model = nn.Sequential(shared, relu, shared, relu, nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    change = OwnLayers()
    change.root(model)
    assert model[0] is shared
    assert model[1] is model[3] is relu
    before = model[2].weight.detach().clone()
    assert not torch.equal(before, shared.weight)
    loss = model(torch.randn(8, 4)).square().mean()
    change.before_backward(loss)
    loss.backward()
    change.before_step(optimizer)
    optimizer.step()
    change.after_step(optimizer)
    assert not torch.equal(before, model[2].weight)
    assert len(optimizer.param_groups) == 1


def test_the_layer_that_was_made_first_is_called_again():
    """Layers of the model itself are called as they are."""
    change, model = KeptLayers(), nn.Sequential(nn.Linear(2, 2))
    change.root(model)
    made = [nn.Linear(2, 2), nn.Linear(2, 2)]
    change.called(model, (), {})
    assert change.inner(model[0]) is model[0]
    assert change.inner(made[0]) is made[0]
    change.called(model, (), {})
    assert change.inner(made[1]) is made[0]


def test_a_reshape_that_exchanges_samples_with_features_is_a_transpose():
    """One that keeps samples apart is left alone."""
    x, change = torch.randn(8, 3), Transposed()
    change.called(nn.Identity(), (x,), {})
    args, _ = change.function("reshape", (x.t(), (8, 3)), {})
    assert torch.equal(args[0].reshape(8, 3), x)
    longer = torch.randn(8, 4, 3)
    args, _ = change.function("view", (longer.transpose(0, 2), 8, 4, 3), {})
    assert torch.equal(args[0].reshape(8, 4, 3), longer)
    assert not mixes("view", (longer, 8, 3, 4), {8})
    assert not mixes("view", (torch.randn(3, 8), (3, 2, 4)), {3})
    assert not mixes("view", (torch.randn(5, 4), (4, 5)), {8})
    assert not mixes("view", (torch.randn(1, 8), (8, 1)), {8})


def test_gradients_that_are_no_numbers_become_zero():
    """The others stay."""
    weight, change = nn.Parameter(torch.zeros(3)), FiniteGradients()
    weight.grad = torch.tensor([torch.nan, 1.0, torch.inf])
    change.before_step(torch.optim.SGD([weight], 0.1))
    assert weight.grad.tolist() == [0.0, 1.0, 0.0]
    assert change.acted


def test_a_gradient_passes_what_is_flat():
    """Its value stays."""
    x, change = torch.tensor([0.3, 1.7], requires_grad=True), OpenPassages()
    given = change.result("round", (x,), {}, x.round())
    given.sum().backward()
    assert given.tolist() == [0.0, 2.0]
    assert x.grad.tolist() == [1.0, 1.0]


@pytest.mark.parametrize(("kind", "part"), [("squares", -1.0), ("determinant", 0.0)])
def test_a_penalty_that_is_taken_off_is_one_of_sizes(kind, part):
    """The logarithm of a determinant belongs to the loss of a flow."""
    layer, change = nn.Linear(2, 2, bias=False), Penalties()
    nn.init.constant_(layer.weight, 0.5)
    out = layer(torch.randn(4, 2))
    change.left(layer, out)
    term = layer.weight.square().sum() if kind == "squares" else (layer.weight + torch.eye(2)).logdet()
    data = out.mean()
    args, _ = change.function("__sub__", (data, term), {})
    loss = change.result("__sub__", args, {}, args[0] - args[1])
    assert change.of(loss) == pytest.approx(part)


def test_a_stand_in_is_no_fix():
    """Its patch says what the author has to do."""
    assert [name for name in ("targets computed from the inputs", "shuffled rows") if find(name).stands_in] == [
        "targets computed from the inputs"
    ]
