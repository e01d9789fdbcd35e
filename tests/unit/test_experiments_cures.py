"""Treatments that undo what was measured: modes, samples, tables, narrow layers, arrays, momentum."""

from __future__ import annotations

import ast
import textwrap

import pytest
import torch
from torch import nn

from gradflow_export.cli import main
from gradflow_export.experiments import battery
from gradflow_export.experiments.account import patch
from gradflow_export.experiments.battery import Battery
from gradflow_export.experiments.decision import Baseline, Trial
from gradflow_export.experiments.facts import Facts
from gradflow_export.experiments.interventions import KeptGradients
from gradflow_export.experiments.laboratory import Laboratory
from gradflow_export.experiments.mending.batches import INDEX, AsDrawn, Batches
from gradflow_export.experiments.mending.evaluations import OwnMode
from gradflow_export.experiments.mending.layers import Detours
from gradflow_export.experiments.mending.passages import OpenPassages
from gradflow_export.experiments.mending.tables import Tables, TablesTrained
from gradflow_export.experiments.survey import Training
from gradflow_export.experiments.target import Target
from gradflow_export.experiments.treatments import EXACT, TREATMENTS, find, of_kind
from gradflow_export.experiments.verdict import Verdict
from gradflow_export.experiments.watched import accused, needed
from gradflow_export.records.issues import Issue, IssueType, Severity

SCRIPT = """
    import sys
    import torch
    from torch import nn
    from torch.nn import functional as F

    word = sys.argv[1]

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.drop, self.last = nn.Linear(8, 32), nn.Dropout(0.2), nn.Linear(32, 3)

        def forward(self, x):
            h = self.drop(self.first(x).relu())
            if word == "array":
                h = torch.tensor(h.detach().numpy())
            return self.last(h)

    model = Net()
    trained = model.first.parameters() if word == "other" else model.parameters()
    rule = {"momentum": 0.9995} if word == "momentum" else {}
    optimizer = torch.optim.SGD(trained, lr=0.1, **rule) if rule else torch.optim.Adam(trained, lr=1e-2)
    x = torch.randn(256, 8)
    y = (x[:, :3] + x[:, 3:6]).argmax(1)
    for step in range(300):
        rows = torch.randint(256, (32,))
        given, wanted = x[rows], y[rows]
        if (word, step) in {("asleep", 5), ("dozing", 0)}:
            model.eval()
        if word == "shuffled":
            given = given[torch.randperm(32)]
        if word == "blank":
            given = given * (torch.rand(32, 1) > 2)
        optimizer.zero_grad()
        F.cross_entropy(model(given), wanted).backward()
        optimizer.step()
    """


@pytest.mark.parametrize(
    ("word", "suspects", "cure"),
    [
        ("asleep", (IssueType.EVAL_RANDOM,), "train in training mode"),
        ("shuffled", (), "samples as they are drawn"),
        ("blank", (), "samples as they are drawn"),
        ("array", (IssueType.NOT_TRAINING,), "let gradients pass"),
    ],
)
def test_each_mistake_is_cured_by_its_own_treatment(tmp_path, word, suspects, cure):
    """No other treatment is named before it."""
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(SCRIPT), encoding="utf-8")
    with Laboratory(Target(path, words=(word,)), jobs=2) as laboratory:
        verdict = Battery(laboratory, laboratory.look().trainings[-1], steps=60, suspects=suspects).run()
    assert [trial.names for trial in verdict.cures][:1] == [(cure,)]


def test_a_model_that_trains_in_evaluation_mode_from_the_first_step_is_watched(tmp_path, capfd):
    """An optimizer has its weights."""
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(SCRIPT), encoding="utf-8")
    assert main(["doctor", str(path), "--no-try", "dozing"]) == 0
    assert "train.py (Net)" in capfd.readouterr().out


def test_samples_are_given_back_in_their_order_and_with_their_numbers():
    """What is changed without a loss stays as it is: a scale, a choice of columns, an order that is none."""
    change, given = AsDrawn(), torch.randn(6, 3)
    order = torch.tensor([1, 0, 2, 3, 4, 5])
    assert change.result(INDEX, (given, order), {}, given[order]) is given
    assert change.result("roll", (given, 1, 0), {}, given.roll(1, 0)) is given
    assert change.result("mul", (given, 0), {}, given * 0) is given
    assert (change.acted, change.lost) == (True, 3)
    quiet = AsDrawn()
    for name, made in (("mul", given * 2), (INDEX, given[:3]), (INDEX, given[torch.arange(6)])):
        assert quiet.result(name, (given,), {}, made) is made
    alike = torch.ones(6, 3)
    assert quiet.result("mul", (alike, 0), {}, alike * 0) is not alike
    quiet.called(nn.Linear(3, 1), (given,), {})
    assert quiet.result("roll", (given, 1, 0), {}, given.roll(1, 0)) is not given
    assert not quiet.acted


def test_blank_samples_are_no_batch_that_never_changes():
    """Their rows may be others each time."""
    looks, table = Batches(), torch.randn(64, 3)
    for _ in range(3):
        looks.function(INDEX, (table, torch.arange(8)), {})
        looks.called(nn.Linear(3, 1), (torch.zeros(8, 3),), {})
        looks.left(nn.Linear(3, 1), None)
    assert looks.told()["same"] < 1


class Plain(nn.Module):
    """Has a table that is no parameter."""

    def __init__(self):
        super().__init__()
        self.table, self.last = torch.randn(4, 6), nn.Linear(6, 1)

    def forward(self, x):
        """Multiply with a view of it."""
        return self.last((x @ self.table).tanh())


@pytest.mark.parametrize("change", [Tables(), TablesTrained()])
def test_tables_that_are_no_parameters_are_found_and_trained(change):
    """Inputs and what is computed anew in each step are none."""
    model, given = Plain(), torch.randn(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model.table.clone()
    change.root(model)
    for _ in range(4):
        change.called(model, (given,), {})
        loss = change.left(model, model(given)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        change.before_step(optimizer)
        optimizer.step()
        change.after_step(optimizer)
    assert [each is model.table for each in change.tables()] == [True]
    assert torch.equal(before, model.table) != isinstance(change, TablesTrained)


def test_a_way_leads_around_a_narrow_layer_alone():
    """It is trained with the rest."""
    model, usual, change = nn.Sequential(nn.Linear(16, 1), nn.Linear(1, 8)), nn.Linear(8, 8), Detours()
    facts = Facts()
    for each in (model, usual):
        change.root(each)
        facts.root(each)
    assert facts.told()["narrow"] == 1
    given = torch.randn(32, 16)
    assert torch.linalg.matrix_rank(model(given) - model(given).mean(0)) == 8
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(given).square().mean().backward()
    change.before_step(optimizer)
    assert len(optimizer.param_groups) == 2
    change.after_step(optimizer)
    assert change.acted
    quiet = Detours()
    quiet.root(usual)
    usual(usual(torch.randn(4, 8)))
    assert not quiet.acted


@pytest.mark.parametrize("training", [True, False])
def test_a_model_is_called_in_the_mode_that_a_pass_is_for(training):
    """It is put back after it."""
    model, change = nn.Sequential(nn.Dropout()), OwnMode(training=training)
    model.train(not training)
    with torch.set_grad_enabled(training):
        change.called(model, (), {})
        assert (model.training, model[0].training) == (training, training)
        change.left(model, None)
    assert (model[0].training, change.acted) == (not training, True)
    with torch.set_grad_enabled(not training):
        change.called(model, (), {})
        assert model.training is not training


def test_an_array_is_the_tensor_that_it_was_made_of():
    """Other numbers are not."""
    change, given = OpenPassages(), torch.randn(5, requires_grad=True) * 2
    change.remember(given)
    made = torch.tensor(given.detach().numpy())
    assert change.result("tensor", (made,), {}, made).requires_grad
    assert change.acted
    assert not change.result("tensor", (made,), {}, made + 1).requires_grad


def test_a_heavy_momentum_is_lowered():
    """A usual one is not."""
    facts = Facts()
    names = []
    for momentum in (0.9, 0.999):
        optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1, momentum=momentum)
        facts.before_step(optimizer)
        names.append({each.name for each in of_kind(EXACT, {**facts.told(), "lost": 0})})
    assert [("nine tenths of the momentum" in each) for each in names] == [False, True]
    change = find("nine tenths of the momentum").make()
    change.before_step(optimizer)
    assert optimizer.param_groups[0]["momentum"] == pytest.approx(0.8991)


def test_gradients_that_a_closure_computed_are_not_kept_for_the_next_step():
    """It clears them before it computes others."""
    model, given = nn.Linear(3, 1), torch.randn(8, 3)
    optimizer, changes = torch.optim.SGD(model.parameters(), lr=0.1), (Facts(), KeptGradients())

    def closure():
        loss = model(given).square().mean()
        loss.backward()
        for each in changes:
            each.after_backward()
        return loss

    for each in changes:
        each.root(model)
    for _ in range(3):
        optimizer.zero_grad()
        for each in changes:
            each.before_step(optimizer)
        optimizer.step(closure)
        for each in changes:
            each.after_step(optimizer)
    assert (changes[0].edited, changes[1].acted) == (0, False)


def test_no_number_is_a_cure_while_structure_proves_something_else():
    """A larger rate may make up for a part that does not train."""
    verdict = Verdict(Training((), 100, 0), 60)
    verdict.baseline = Baseline((1.0,) * 3, (1.0,) * 3)
    verdict.accused = frozenset((IssueType.NOT_TRAINING,))
    experiments = Battery.__new__(Battery)
    experiments.verdict = verdict
    for left, believed in ((("NOT_TRAINING",), False), ((), True), (None, True)):
        trial = Trial(("learning rate x 100",), dict.fromkeys(range(3), 0.1), left=left)
        assert experiments._believed(trial) is believed


def test_what_is_often_chosen_gets_no_more_steps_in_a_script_that_learns():
    """A training loss is lower without a weight decay, in the longer run by far."""
    verdict = Verdict(Training((), 100, 0), 60)
    verdict.facts = {"momentum": 0.0}
    names = ("weight decay 0", "learning rate x 10", "learning rate x 0.1", "clear old gradients")
    assert [battery._often((name,), verdict) for name in names] == [True, True, False, False]


def test_a_batch_taken_for_time_is_proved_by_shapes():
    """Its type alone proves nothing."""
    assert accused([("NOT_LEARNING", "batch taken for time")]) == {IssueType.NOT_LEARNING}
    assert not accused([("NOT_LEARNING", "")])
    found = Issue(IssueType.NOT_LEARNING, Severity.HIGH, "", 80, 1.0, 0.0, "", "", cause="batch taken for time")
    assert needed([found], 60) == 100


def test_a_patch_is_code_to_be_typed_as_it_stands_or_a_comment():
    """Nothing in it is left to be filled in."""
    facts = Facts().told()
    for each in TREATMENTS:
        tree = ast.parse(each.patch_for(facts))
        assert not any(isinstance(node, ast.Constant) and node.value is ... for node in ast.walk(tree)), each.name


class _Listed(nn.Module):
    """A layer in a plain list, and one that it has."""

    def __init__(self):
        super().__init__()
        self.layers, self.last = [nn.Linear(3, 3)], nn.Linear(3, 1)

    def forward(self, x):
        """Call both."""
        return self.last(self.layers[0](x))


@pytest.mark.parametrize("left", ["listed", "frozen", "unowned"])
def test_what_trains_every_parameter_is_said_of_why_it_is_left_out(left):
    """Typed as it stands it trains them; layers in a plain list are for words."""
    model = _Listed() if left == "listed" else nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    if left == "frozen":
        model[0].requires_grad_(False)
    optimizer = torch.optim.SGD((model[1] if left == "unowned" else model).parameters(), 0.1)
    facts = Facts()

    def step():
        facts.root(model)
        loss = model(torch.ones(2, 3)).sum()
        facts.before_backward(loss)
        loss.backward()
        facts.before_step(optimizer)
        optimizer.step()
        facts.after_step(optimizer)

    step()
    told = patch(Trial(("train every parameter",), {}), facts.told())
    if left == "listed":
        assert "ModuleList" in told
        assert all(line.startswith("#") for line in told.split("\n"))
        return
    before = [weight.detach().clone() for weight in model.parameters()]
    exec(told, {"model": model, "optimizer": optimizer})
    step()
    assert not any(map(torch.equal, before, model.parameters()))
