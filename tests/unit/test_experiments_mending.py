"""Treatments that a finding asks for: losses, passages of gradients, copies, linear layers, evaluation."""

from __future__ import annotations

import copy
import math
import textwrap

import pytest
import torch
from torch import nn
from torch.nn import functional

from gradflow_export.checks.evaluation.sizes import DIFFERS
from gradflow_export.checks.parameters.bad_init import COPIES, LARGE
from gradflow_export.cli import main
from gradflow_export.experiments.battery import Battery, fixed
from gradflow_export.experiments.decision import Baseline, Trial
from gradflow_export.experiments.facts import Facts
from gradflow_export.experiments.interventions import ClearedGradients
from gradflow_export.experiments.laboratory import Laboratory
from gradflow_export.experiments.mending.losses import (
    AnswersInUnits,
    LabelsAsShares,
    Logits,
    OwnAxis,
    OwnPairs,
    TargetsAsShares,
)
from gradflow_export.experiments.mending.passages import BentBetween, LongWeights, TiedCopies
from gradflow_export.experiments.survey import Training
from gradflow_export.experiments.target import Target
from gradflow_export.experiments.verdict import Verdict
from gradflow_export.experiments.watched import accused
from gradflow_export.records.issues import IssueType

SCRIPT = """
    import sys
    import torch
    from torch import nn
    from torch.nn import functional as F

    word = sys.argv[1]

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.middle, self.last = nn.Linear(8, 32), nn.Linear(32, 32), nn.Linear(32, 3)

        def forward(self, x):
            h = self.first(x).relu()
            if word == "detached":
                h = h.detach()
            h = self.middle(h) if word == "straight" else self.middle(h).relu()
            h = self.last(nn.Dropout(0.5)(h) if word == "noisy" else h)
            return h.softmax(1) if word == "softmax" else h

    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    x = torch.randn(256, 8)
    y = (x[:, :3] * x[:, 3:6]).argmax(1)
    for step in range(80):
        rows = torch.randint(256, (32,))
        optimizer.zero_grad()
        F.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
        if step % 10 == 9:
            model.eval()
            with torch.no_grad():
                model(x)
            model.train()
    """


@pytest.mark.parametrize(
    ("word", "kind", "cure"),
    [
        ("softmax", IssueType.WRONG_LOSS, "give the loss logits"),
        ("detached", IssueType.NOT_TRAINING, "let gradients pass"),
        ("noisy", IssueType.EVAL_RANDOM, "evaluate in evaluation mode"),
    ],
)
def test_what_structure_proves_is_cured_where_it_is_found_no_more(tmp_path, word, kind, cure):
    """The script learns, and its mistake is gone under its own treatment in three seeds; no other is prescribed."""
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(SCRIPT), encoding="utf-8")
    with Laboratory(Target(path, words=(word,)), jobs=2) as laboratory:
        survey = laboratory.look()
        verdict = Battery(laboratory, survey.trainings[-1], steps=60, suspects=[kind]).run()
    assert kind in verdict.accused
    assert [trial.names for trial in verdict.cures] == [(cure,)]


def test_a_sound_script_is_not_mended_though_a_symptom_accuses_it(tmp_path):
    """An accusation that a watched run does not show again licenses nothing."""
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(SCRIPT), encoding="utf-8")
    with Laboratory(Target(path, words=("sound",)), jobs=2) as laboratory:
        survey = laboratory.look()
        suspects = [IssueType.WRONG_LOSS, IssueType.EVAL_RANDOM]
        verdict = Battery(laboratory, survey.trainings[-1], steps=60, suspects=suspects).run()
    assert (verdict.accused, verdict.cures) == (frozenset(), [])


def test_relief_needs_three_seeds_without_the_finding_and_no_harm():
    """A finding that is left in one seed, or a loss that grows, refutes the treatment."""
    base = Baseline((1.0,) * 3, (0.5,) * 3)
    gone = {0: True, 1: True, 2: True}
    assert Trial(("x",), {0: 0.5, 1: 0.5, 2: 0.54}, gone=gone).relieves(base)
    assert not Trial(("x",), {0: 0.5, 1: 0.6, 2: 0.6}, gone=gone).relieves(base)
    assert Trial(("x",), {0: 0.5, 1: 0.6, 2: 0.6}, gone=gone).relieves(None)
    assert not Trial(("x",), {0: 0.5, 1: 0.5, 2: 0.5}, gone={**gone, 2: False}).relieves(base)
    assert not Trial(("x",), {0: 0.5}, gone={0: True}).relieves(base)
    assert not Trial(("x",), {0: 0.5, 1: 0.5, 2: 0.5}, acted=False, gone=gone).relieves(base)


def test_a_finding_of_degree_proves_nothing_by_its_absence():
    """First weights that are too large have another size once they are drawn anew; copies of units are a structure.

    A treatment of the inputs leaves those of evaluation as they are.
    """
    assert accused([("BAD_INIT", LARGE), ("DATA_SCALE", ""), ("EVAL_RANDOM", DIFFERS)]) == frozenset()
    assert accused([("EVAL_RANDOM", "dropout in evaluation")]) == {IssueType.EVAL_RANDOM}
    assert accused([("BAD_INIT", COPIES)]) == {IssueType.BAD_INIT}


def test_what_tunes_relieves_only_what_it_is_there_for():
    """Standardized targets change every script: targets that are found bad no more with them say nothing."""
    verdict = Verdict(Training(0, 80, 1), 60, accused=frozenset({IssueType.BAD_TARGETS, IssueType.BAD_INIT}))
    assert fixed(["standardize the targets"], verdict) == frozenset()
    assert fixed(["labels of minus one and one"], verdict) == {IssueType.BAD_TARGETS}
    assert fixed(["the layers' own initialization"], verdict) == {IssueType.BAD_INIT}


def test_losses_get_what_they_take():
    """Probabilities become logits, pairs keep their shape, a softmax runs over classes; what is right stays as it is."""
    logits = torch.randn(6, 4, requires_grad=True)
    change = Logits()
    (made, _), _ = change.function("cross_entropy", (logits.softmax(1), None), {})
    torch.testing.assert_close(made.softmax(1), logits.softmax(1))
    (made, _), _ = change.function("binary_cross_entropy_with_logits", (logits.sigmoid(), None), {})
    torch.testing.assert_close(made, logits, atol=1e-3, rtol=1e-3)
    assert change.acted
    for name, sound in (("cross_entropy", logits), ("nll_loss", logits.log_softmax(1)), ("mse_loss", logits.sigmoid())):
        quiet = Logits()
        assert quiet.function(name, (sound, None), {})[0][0] is sound
        assert not quiet.acted
    column, row = torch.randn(5, 1, requires_grad=True), torch.randn(5)
    # The column gives way: a row of other numbers, which it is multiplied with later, would be broadcast again.
    assert OwnPairs().function("mse_loss", (column, row), {})[0][0].shape == (5,)
    assert OwnPairs().function("mse_loss", (), {"input": column, "target": row})[1]["input"].shape == (5,)
    assert OwnPairs().function("__sub__", (row, column), {})[0][1].shape == (5,)
    assert OwnPairs().function("mse_loss", (column, column.detach().T), {})[0][1].shape == (5, 1)
    assert OwnAxis().function("softmax", (logits,), {"dim": 0})[1] == {"dim": -1}
    assert OwnAxis().function("softmax", (logits, 1), {})[0] == (logits, 1)
    shares = TargetsAsShares()
    assert shares.function("binary_cross_entropy", (row, torch.tensor([0.0, 255.0])), {})[0][1].tolist() == [0.0, 1.0]


def test_targets_in_thousands_leave_the_loss_in_its_unit():
    """The model then answers in units of their spread; targets near 1 are left as they are."""
    target = torch.tensor([200_000.0, 300_000.0, 400_000.0])
    change = AnswersInUnits()
    given, _ = change.function("mse_loss", (torch.tensor([-1.0, 0.0, 1.0]), target), {})
    torch.testing.assert_close(functional.mse_loss(given[0], target), torch.tensor(0.0))
    quiet = AnswersInUnits()
    quiet.function("mse_loss", (torch.zeros(3), torch.tensor([-1.0, 0.0, 1.0])), {})
    quiet.function("__sub__", (target[:, None], torch.ones(1, requires_grad=True)), {})
    assert (change.acted, quiet.acted) == (True, False)
    answer = torch.zeros(3, requires_grad=True)
    for at, pair in enumerate(((answer, target), (target, answer))):
        given, _ = AnswersInUnits().function("__sub__", pair, {})
        assert given[at].tolist() == [300_000.0] * 3


def test_steps_that_half_precision_rounds_away_are_taken():
    """A weight of 1 in bfloat16 never moves by steps of 1e-3, and does when they are taken in single precision."""
    weight = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([weight], lr=1e-3)
    change = LongWeights()
    for _ in range(20):
        weight.grad = torch.ones_like(weight)
        change.before_step(optimizer)
        optimizer.step()
        change.after_step(optimizer)
    assert weight.dtype is weight.grad.dtype is torch.bfloat16
    torch.testing.assert_close(weight.float(), torch.full((2,), 0.98), atol=0.01, rtol=0)


def test_copies_move_together_and_what_is_constant_is_none():
    """Two layers that begin alike stay alike; norms, which all begin with ones, are left in peace."""
    first = nn.Linear(3, 3)
    model = nn.Sequential(first, copy.deepcopy(first), nn.LayerNorm(3), nn.LayerNorm(3))
    change = TiedCopies()
    change.root(model)
    with torch.no_grad():
        first.weight += 1
        model[2].weight += 1
    change.after_step(torch.optim.SGD(model.parameters(), lr=0.1))
    torch.testing.assert_close(model[0].weight, model[1].weight)
    assert not torch.equal(model[2].weight, model[3].weight)


def test_only_layers_that_follow_each_other_directly_are_bent():
    """A ReLU or a softmax between them is enough; a view or a norm is not."""
    for between, acted in (
        (nn.Identity(), True),
        (nn.BatchNorm1d(4), True),
        (nn.Tanh(), False),
        (nn.Softmax(1), False),
    ):
        model = nn.Sequential(nn.Linear(3, 4), between, nn.Linear(4, 2))
        change = BentBetween()
        change.root(model)
        model(torch.randn(5, 3))
        assert change.acted is acted, between


def test_a_frozen_backbone_without_gradients_is_no_moving_target():
    """Only a model whose weights change between such calls may hold targets that depend on what was learned."""
    for frozen in (True, False):
        backbone, head = nn.Linear(4, 4), nn.Linear(4, 1)
        facts = Facts()
        optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
        for _ in range(10):
            with torch.no_grad():
                facts.called(backbone, (torch.ones(2, 4),), {})
                backbone.weight += 0.0 if frozen else 0.1
            facts.after_step(optimizer)
        assert (facts.told()["echoes"] > 0.5) is not frozen


def test_a_wrong_budget_is_a_usage_error(tmp_path, capsys):
    """It is told before the script runs, with status 2."""
    path = tmp_path / "train.py"
    path.write_text("raise SystemExit('ran')", encoding="utf-8")
    assert main(["doctor", str(path), "--cpu-budget", "abc"]) == 2
    assert "--cpu-budget expects" in capsys.readouterr().err


def test_without_a_backward_pass_the_report_says_so(tmp_path, capsys):
    """The reason is not that a budget was spent."""
    path = tmp_path / "train.py"
    text = SCRIPT.replace(".backward()", "").replace("word = sys.argv[1]", "word = 'none'")
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    main(["doctor", str(path), "--try"])
    told = capsys.readouterr().out
    assert "nothing calls backward()" in told
    assert "budget" not in told


def test_a_mistake_is_relieved_where_the_script_learns_without_it_though_later():
    """Old gradients make steps larger: without them the loss is behind, and falls; one that does not fall is harmed."""
    baseline = Baseline((2.3, 2.3, 2.4), (0.31, 0.27, 0.26))
    gone = {0: True, 1: True, 2: True}
    assert Trial(("clear old gradients",), {0: 1.0, 1: 0.99, 2: 0.98}, gone=gone, mistake=True).relieves(baseline)
    assert not Trial(("clear old gradients",), {0: 2.2, 1: 0.99, 2: 0.98}, gone=gone, mistake=True).relieves(baseline)
    assert not Trial(("clear old gradients",), {0: 1.0, 1: math.inf, 2: 0.98}, gone=gone, mistake=True).relieves(
        baseline
    )


@pytest.mark.parametrize("kind", [Facts, ClearedGradients])
def test_gradients_of_earlier_calls_of_a_closure_are_old(kind):
    """A step that calls its closure several times begins each with what the last one left, unless it is cleared."""
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.LBFGS([weight], max_iter=3)
    seen, change = [], kind()

    def closure():
        loss = (weight.square() * torch.tensor([1.0, 5.0])).sum()
        change.before_backward(loss)
        seen.append(weight.grad is not None)
        loss.backward()
        return loss

    change.before_step(optimizer)
    optimizer.step(closure)
    change.after_step(optimizer)
    assert len(seen) > 1
    if kind is Facts:
        assert change.stale == len(seen) - 1
    else:
        assert change.acted
        assert not any(seen)


def test_several_labels_become_shares_of_one():
    """Rows of a cross-entropy's targets are divided by their sum; what sums to one, and numbers of classes, stay."""
    change, scores = LabelsAsShares(), torch.randn(2, 3)
    one = torch.tensor([[1.0, 0.0, 0.0], [0.5, 0.5, 0.0]])
    for target in (one, torch.tensor([0, 2])):
        assert change.function("cross_entropy", (scores, target), {})[0][1] is target
    assert not change.acted
    _, named = change.function("cross_entropy", (scores,), {"target": torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 0.0]])})
    assert named["target"].tolist() == [[0.5, 0.5, 0.0], [0.0, 0.0, 0.0]]
    assert change.acted
