"""Treatments that give a program another axis, mask, label or graph, and what they leave as it is."""

from __future__ import annotations

import textwrap
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import rnn

from gradflow_export.experiments.account import lines
from gradflow_export.experiments.battery import Battery
from gradflow_export.experiments.decision import Baseline, Trial
from gradflow_export.experiments.facts import Facts
from gradflow_export.experiments.interventions import ClearedGradients, EverythingTrained, FullRate
from gradflow_export.experiments.laboratory import Laboratory
from gradflow_export.experiments.mending.labels import KeptDifferences, SignedLabels
from gradflow_export.experiments.mending.losses import OwnAxis
from gradflow_export.experiments.mending.passages import OpenNorms, OpenPassages
from gradflow_export.experiments.mending.sequences import OtherAxis, OtherMasks, WithoutPadding
from gradflow_export.experiments.model_edits import Kaiming, Standardized
from gradflow_export.experiments.target import Target
from gradflow_export.experiments.treatments import EXACT, find, of_kind
from gradflow_export.records.issues import IssueType

SCRIPT = """
    import sys
    import torch
    from torch import nn
    from torch.nn import functional as F

    word = sys.argv[1]

    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.head = nn.GRU(4, 24, batch_first=word != "time"), nn.Linear(24, 3)

        def forward(self, x):
            return self.head(self.rnn(x)[0][:, -1])

    x = torch.randn(256, 6, 4)
    y = 2 * x[:, :4, :3].mean(1)
    model = nn.Sequential(nn.Flatten(), nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 3))
    if word == "time":
        model = Last()
    classes = torch.zeros(256).long() if word == "same" else y.argmax(1)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    for step in range(80):
        rows = torch.randint(256, (32,))
        optimizer.zero_grad()
        if word == "time":
            loss = F.mse_loss(model(x[rows]), y[rows])
        elif word == "margin":
            labels = (y[rows] > 0).float()
            loss = torch.clamp(1 - labels * model(x[rows]), min=0).mean()
        elif word == "divided":
            loss = F.cross_entropy(model(x[rows]), (classes[rows] / 255).long())
        elif word == "numbers":
            loss = F.cross_entropy(torch.from_numpy(model(x[rows]).detach().numpy()), classes[rows]).requires_grad_()
        else:
            loss = F.cross_entropy(model(x[rows]), classes[rows])
        loss.backward()
        optimizer.step()
    """


def examined(folder, word, *suspects):
    """Return what the experiments show of the script."""
    path = folder / "train.py"
    path.write_text(textwrap.dedent(SCRIPT), encoding="utf-8")
    with Laboratory(Target(path, words=(word,)), jobs=2) as laboratory:
        survey = laboratory.look()
        return Battery(laboratory, survey.trainings[-1], steps=60, suspects=suspects).run()


@pytest.mark.parametrize(
    ("word", "suspects", "cure"),
    [
        ("time", (), "the other axis for time"),
        ("margin", (IssueType.WRONG_LOSS,), "labels of minus one and one"),
        ("divided", (IssueType.BAD_TARGETS,), "whole numbers that keep their differences"),
        ("numbers", (IssueType.NOT_TRAINING,), "let gradients pass"),
    ],
)
def test_each_mistake_is_cured_by_its_own_treatment(tmp_path, word, suspects, cure):
    """No other treatment is named before it."""
    verdict = examined(tmp_path, word, *suspects)
    assert verdict.cures[0].names == (cure,)


def test_no_rate_is_prescribed_where_targets_tell_nothing(tmp_path):
    """A loss of targets that are all the same falls as far without inputs, and faster at another rate: no cure.

    That it learns from its inputs where targets follow from them confirms the cause.
    """
    verdict = examined(tmp_path, "same", IssueType.BAD_TARGETS)
    assert [(trial.names, trial.stands_in) for trial in verdict.cures] == [
        (("targets computed from the inputs",), True)
    ]
    assert any(line.startswith("  [CAUSE] targets computed") for line in lines(verdict))


def test_a_loss_that_falls_as_far_without_inputs_is_blind():
    """One that does not fall is ill for another reason, and one that falls further with them is well."""
    first = (1.0,) * 3
    assert Baseline(first, (0.1,) * 3, {"noise": 0.1}).blind
    assert not Baseline(first, (0.1,) * 3, {"noise": 0.2}).blind
    assert not Baseline(first, (0.95,) * 3, {"noise": 0.95}).blind
    assert not Baseline(first, (0.1,) * 3).blind


def test_layers_run_over_the_other_axis_each_once():
    """A layer that is part of two models is not turned back."""
    layer = nn.LSTM(3, 4)
    change = OtherAxis()
    change.root(nn.Sequential(layer))
    change.root(layer)
    assert (layer.batch_first, change.acted) == (True, True)
    quiet = OtherAxis()
    quiet.root(nn.Linear(3, 3))
    assert not quiet.acted


@pytest.mark.parametrize("first", [True, False])
def test_a_recurrent_layer_ends_before_the_padding(first):
    """Its last output and its state are those of the sequence alone; the same tail in all rows is what is left out."""
    layer = nn.LSTM(3, 4, 2, batch_first=first, bidirectional=True)
    given, change, quiet = torch.randn(2, 6, 3), WithoutPadding(), nn.LSTM(3, 4)
    given[1, 3:] = 0.0
    rows = [each if first else each.transpose(0, 1) for each in (given[1:, :3], given)]
    alone, (state, _) = layer(rows[0])
    change.root(layer)
    output, (other, _) = layer(rows[1])
    torch.testing.assert_close(output.select(int(first), -1)[1], alone.select(int(first), -1)[0])
    torch.testing.assert_close(other[:, 1], state[:, 0])
    assert change.acted
    facts, silent = Facts(), WithoutPadding()
    facts.root(layer)
    layer(rows[1])
    assert facts.told()["padding"] == 0.25
    silent.root(quiet)
    quiet(torch.randn(6, 2, 3))
    quiet(rnn.pack_sequence([given[0], given[1]]))
    assert not silent.acted


def test_a_mask_of_padding_is_turned_and_that_of_pairs_is_kept_beside_it():
    """A mask is one of truths or of scores that leave out; a bias of scores is none."""
    change, out = OtherMasks(), float("-inf")
    padding, causal = torch.tensor([[0.0, out]]), torch.tensor([[0.0, out], [0.0, 0.0]])
    _, given = change.function("multi_head_attention_forward", (), {"key_padding_mask": padding, "attn_mask": causal})
    assert given["key_padding_mask"].tolist() == [[out, 0.0]]
    assert given["attn_mask"] is causal
    _, given = change.function("multi_head_attention_forward", (), {"key_padding_mask": None, "attn_mask": causal})
    assert given["attn_mask"].tolist() == [[out, 0.0], [out, out]]
    args, _ = change.function("scaled_dot_product_attention", (None, None, None, causal == 0), {})
    assert args[3].tolist() == [[False, True], [False, False]]
    for name, mask in (
        ("multi_head_attention_forward", torch.tensor([[0.5]])),
        ("scaled_dot_product_attention", causal),
    ):
        quiet = OtherMasks()
        assert quiet.function(name, (), {"attn_mask": mask})[1]["attn_mask"] is mask
        assert not quiet.acted


def test_labels_of_zero_and_one_become_signs_where_a_margin_wants_them():
    """In a loss of torch, and in a product with what the model has just answered; a mask of anything else is kept."""
    change, labels = SignedLabels(), torch.tensor([0.0, 1.0])
    answer = torch.tensor([0.3, 0.4], requires_grad=True) * 1
    assert change.function("hinge_embedding_loss", (answer, labels), {})[0][1].tolist() == [-1.0, 1.0]
    assert change.function("margin_ranking_loss", (answer, answer), {"target": labels > 0})[1]["target"].tolist() == [
        -1,
        1,
    ]
    assert change.function("__mul__", (labels, answer), {})[0][0] is labels
    change.left(nn.Identity(), answer)
    assert change.function("__mul__", (labels, answer), {})[0][0].tolist() == [-1.0, 1.0]
    signs = torch.tensor([-1.0, 1.0])
    assert change.function("__mul__", (answer, signs), {})[0][1] is signs


def test_fractions_keep_their_differences_when_they_are_made_whole():
    """Classes that were divided by 255 come back; numbers above 1 and what stays a fraction are left alone."""
    change, classes = KeptDifferences(), torch.tensor([0, 2, 1, 2])
    for name, args in (("long", ()), ("to", (torch.int64,)), ("type", (torch.int32,))):
        given = change.function(name, (classes / 255, *args), {})[0][0]
        assert given.tolist() == classes.tolist()
    # A batch of one class alone is counted in the distance that is known.
    assert change.function("long", (torch.full((3,), 2 / 255),), {})[0][0].tolist() == [2, 2, 2]
    for name, tensor, args in (("long", torch.tensor([0.5, 3.0]), ()), ("to", classes / 255, (torch.float64,))):
        quiet = KeptDifferences()
        assert quiet.function(name, (tensor, *args), {})[0][0] is tensor
        assert not quiet.acted


def test_a_softmax_of_one_unit_is_a_sigmoid():
    """It is 1 whatever the unit says; of several units it stays what it is."""
    change, unit = OwnAxis(), torch.tensor([[2.0], [-1.0]])
    torch.testing.assert_close(change.result("softmax", (unit, 1), {}, unit.softmax(1)), unit.sigmoid())
    torch.testing.assert_close(
        change.result("log_softmax", (unit,), {"dim": -1}, unit.log_softmax(1)), functional.logsigmoid(unit)
    )
    wide = unit.T.softmax(1)
    assert change.result("softmax", (unit.T, 1), {}, wide) is wide


def test_a_loss_of_numbers_is_given_the_answer_that_has_them():
    """What went through NumPy has its graph again; a loss that has one, and other numbers, are left alone."""
    change, target = OpenPassages(), torch.tensor([0, 1])
    answer = torch.randn(2, 3, requires_grad=True) * 1
    change.left(nn.Identity(), answer)
    for lost in (torch.from_numpy(answer.detach().numpy()), answer.detach().clone()):
        assert change.function("cross_entropy", (lost, target), {})[0][0].grad_fn is not None
    other = torch.randn(2, 3)
    assert change.function("cross_entropy", (other, target), {})[0][0] is other
    assert change.function("mse_loss", (answer, answer.detach()), {})[0][1].grad_fn is None
    change.after_step(torch.optim.SGD([answer.detach()], lr=0.1))
    lost = answer.detach()
    assert change.function("cross_entropy", (lost, target), {})[0][0] is lost


def test_parameters_that_no_optimizer_has_wait_for_their_gradients():
    """Moved by the optimizer of another part between their forward and their backward pass, they would fail."""
    actor, value = nn.Linear(2, 1), nn.Linear(2, 1)
    first, second = torch.optim.SGD(actor.parameters(), lr=0.1), torch.optim.SGD(actor.parameters(), lr=0.1)
    change = EverythingTrained()
    change.root(nn.ModuleList([actor, value]))
    before, moved = value.weight.detach().clone(), []
    for optimizer, part in ((first, actor), (second, value)):
        part(torch.ones(1, 2)).sum().backward()
        change.before_step(optimizer)
        optimizer.step()
        change.after_step(optimizer)
        moved.append(not torch.equal(value.weight, before))
    assert moved == [False, True]


def test_an_offset_of_each_pixel_is_taken_away_from_images():
    """The mean of a sample's places is not one number; what is left has a spread of 1 over all of them."""
    offset = 100 * torch.randn(1, 1, 6, 6)
    change = Standardized()
    change.begin(nn.Identity())
    made = change.change(torch.rand(32, 1, 6, 6) + offset)
    torch.testing.assert_close(made.mean(0), torch.zeros(1, 6, 6), atol=1e-3, rtol=0)
    assert 0.9 < float(made.std()) < 1.1


def test_a_dropout_that_leaves_out_nearly_everything_is_evident():
    """The script learns, if slowly; one of a half is a choice."""
    dropped = find("dropout 0")
    assert dropped.evident({"dropout": 0.95})
    assert not dropped.evident({"dropout": 0.5})


def test_facts_count_what_reads_sequences():
    """Recurrent and attention layers, and the masks that attention is given."""
    facts = Facts()
    facts.root(nn.Sequential(nn.GRU(2, 2), nn.MultiheadAttention(2, 1), nn.Linear(2, 2)))
    facts.function("multi_head_attention_forward", (), {"key_padding_mask": torch.zeros(1, 2)})
    facts.function("multi_head_attention_forward", (), {"key_padding_mask": None, "attn_mask": None})
    told = facts.told()
    assert (told["sequences"], told["masked"]) == (2, 1)


@pytest.mark.parametrize(("same", "returned"), [(True, 2), (False, 0)])
def test_weights_that_are_put_back_to_the_same_numbers_are_evident(same, returned):
    """A checkpoint that is loaded again and again is a mistake; an average that is copied into the model goes on."""
    facts, model = Facts(), nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(7):
        if step % 2:
            with torch.no_grad():
                model.weight.fill_(1.0 if same else step)
                model.bias.fill_(0.0)
        model(torch.ones(1, 3)).sum().backward()
        facts.before_step(optimizer)
        optimizer.step()
        facts.after_step(optimizer)
    told = facts.told()
    assert (told["foreign"], told["returned"]) == (3, returned)
    assert find("pin the weights between steps").evident(told) == same


def test_the_sign_of_a_loss_is_tried_where_something_else_is_measured():
    """Of a loss that is itself the yardstick, the other sign makes a lower one of any script."""
    facts = {**Facts().told(), "measured": ""}
    assert find("minus the loss") not in of_kind(EXACT, facts)
    assert find("minus the loss") in of_kind(EXACT, {**facts, "measured": "higher:reward"})


def test_norms_over_a_single_number_are_left_away():
    """They return what they were given; a norm over more, or over several places, is kept."""
    change, one, wide = OpenNorms(), torch.randn(4, 1), torch.randn(4, 2)
    assert change.result("layer_norm", (one, (1,)), {}, torch.zeros(4, 1)) is one
    assert change.result("group_norm", (wide, 2), {}, torch.zeros(4, 2)) is wide
    normed, places = torch.zeros(4, 2), torch.randn(4, 2, 5)
    quiet = OpenNorms()
    assert quiet.result("layer_norm", (wide, (2,)), {}, normed) is normed
    assert quiet.result("group_norm", (places, 2), {}, normed) is normed
    assert not quiet.acted


def test_what_a_pass_of_another_part_left_is_cleared():
    """An actor's pass goes through its critic; the critic's own pass then begins with nothing."""
    critic, actor = torch.zeros(1, requires_grad=True), torch.zeros(1, requires_grad=True)
    change, left = ClearedGradients(), []
    optimizers = [torch.optim.SGD([each], lr=0.1) for each in (critic, actor)]
    for _ in range(2):
        for optimizer, loss in zip(optimizers, (critic * 1, critic + actor), strict=True):
            change.before_backward(loss)
            left.append(critic.grad is not None)
            loss.sum().backward()
            change.before_step(optimizer)
            change.after_step(optimizer)
    assert left == [False] * 4
    assert change.acted


def test_tables_of_one_number_are_drawn_whatever_layer_holds_them():
    """A layer of the script's own that begins with zeros is initialized; a bias, and a table of several numbers, stay."""
    layer = nn.Module()
    layer.table, layer.shift = nn.Parameter(torch.zeros(4, 50)), nn.Parameter(torch.zeros(4))
    layer.other = nn.Parameter(torch.arange(4.0).reshape(2, 2))
    facts, change = Facts(), Kaiming()
    facts.root(layer)
    change.root(layer)
    assert facts.told()["level"] == 1
    assert 0.1 < float(layer.table.detach().std()) < 0.3
    assert layer.shift.tolist() == [0.0] * 4
    assert layer.other.flatten().tolist() == [0.0, 1.0, 2.0, 3.0]


def test_evaluation_without_chance_needs_no_lower_loss():
    """It moves the random numbers of training, so that losses differ: enough that the script learns and the finding is gone."""
    baseline, gone = Baseline((0.7,) * 3, (0.2,) * 3), {0: True, 1: True, 2: True}
    names = ("evaluate in evaluation mode",)
    trial = Trial(names, {0: 0.25, 1: 0.3, 2: 0.22}, gone=gone, mistake=all(find(name).mistake for name in names))
    assert trial.relieves(baseline)


@pytest.mark.parametrize("scheduled", [True, False])
def test_a_warm_up_is_skipped_for_a_step_and_goes_on(scheduled):
    """Each group steps with the rate that it was made with, and the script's own rate is there again after it."""
    weights = [nn.Parameter(torch.zeros(1)) for _ in range(2)]
    optimizer = torch.optim.SGD([{"params": [each]} for each in weights], lr=0.5)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) / 1000) if scheduled else None
    facts, change = Facts(), FullRate()
    for _ in range(3):
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] if scheduled else 0.0005
        before = [group["lr"] for group in optimizer.param_groups]
        facts.before_step(optimizer)
        change.before_step(optimizer)
        assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.5]
        optimizer.step()
        change.after_step(optimizer)
        assert [group["lr"] for group in optimizer.param_groups] == before
        if scheduler is not None:
            scheduler.step()
    assert facts.told()["reached"] < 0.01
    assert change.acted


def test_a_blind_script_is_cured_by_what_makes_it_see():
    """A loss that falls further, and as far with meaningless inputs, is no cure of one that did so; else it is."""
    blind, seeing = Baseline((1.0,) * 3, (0.5,) * 3, {"noise": 0.5}), Baseline((1.0,) * 3, (0.95,) * 3, {"noise": 0.95})
    trial = Trial(("learning rate x 10",), {0: 0.1, 1: 0.1, 2: 0.1})
    assert trial.rescues(seeing)
    assert not trial.rescues(blind)
    assert not replace(trial, blind={0: 0.1, 1: 0.1, 2: 0.1}).rescues(blind)
    assert replace(trial, blind={0: 0.4, 1: 0.4, 2: 0.4}).rescues(blind)
