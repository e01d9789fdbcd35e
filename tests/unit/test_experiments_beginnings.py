"""Treatments of weights, inputs and losses that keep a script from beginning to learn, and what they leave alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from gradflow_export.cli.script_runner import run_script
from gradflow_export.experiments.battery import best
from gradflow_export.experiments.decision import Baseline, Trial
from gradflow_export.experiments.facts import off_center
from gradflow_export.experiments.interventions import Intervention
from gradflow_export.experiments.mending.beginnings import DrawnZeros
from gradflow_export.experiments.mending.leaks import NothingLater
from gradflow_export.experiments.mending.losses import LogTargets, Unweighted
from gradflow_export.experiments.mending.passages import OpenPassages
from gradflow_export.experiments.mending.penalties import NoPenalty, Penalties, without
from gradflow_export.experiments.model_edits import Finite, Relu
from gradflow_export.experiments.target import Target
from gradflow_export.experiments.treatments import find
from gradflow_export.records.issues import IssueType
from gradflow_export.writers.preflight import findings


def trained(change, model, steps=10, rate=0.1):
    """Train a model on random numbers while an intervention is active."""
    optimizer = torch.optim.SGD([weight for weight in model.parameters() if weight.requires_grad], rate)
    x = torch.randn(32, 6)
    for _ in range(steps):
        optimizer.zero_grad()
        (model(x) - x[:, :2]).square().mean().backward()
        change.before_step(optimizer)
        optimizer.step()
        change.after_step(optimizer)


@pytest.mark.parametrize("zeros", [(), (0,), (1,), (0, 1), (0, 1, 2)])
def test_zeros_are_drawn_only_where_they_block_each_other(zeros):
    """One table of zeros gets a gradient; of two or more in a row as many are drawn as it takes, and all learn."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in ((6, 5), (5, 4), (4, 2))))
    for at in zeros:
        nn.init.zeros_(model[at].weight)
    change = DrawnZeros()
    trained(change, model)
    assert change.acted == (len(zeros) > 1)
    assert all(layer.weight.any() for layer in model)


def test_what_removes_a_mistake_goes_before_training_what_the_script_froze():
    """The treatment of zeros is a mistake in any script; frozen layers are a choice where nothing else is untrained."""
    assert find("random weights in place of zeros").mistake
    everything = find("train every parameter")
    assert everything.chosen({"untrained": 3, "frozen": 3})
    assert not everything.chosen({"untrained": 3, "frozen": 2})
    trial = Trial(("train every parameter",), dict.fromkeys(range(3), 0.1))
    assert best([trial]) == [trial]
    assert trial.rescues(Baseline((1.0,) * 3, (1.0,) * 3))


class _Sums:
    """Adds scalars as a script would while interventions stand before the sum."""

    def __init__(self, *changes: Intervention) -> None:
        self._changes = changes

    def __call__(self, one: Tensor, other: Tensor) -> Tensor:
        args, kwargs = (one, other), {}
        for each in self._changes:
            args, kwargs = each.function("__add__", args, kwargs)
        given = args[0] + args[1]
        for each in self._changes:
            given = each.result("__add__", args, kwargs, given)
        return given


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("factor", [1e-3, 10.0])
def test_a_penalty_is_known_and_can_be_left_out(first, factor):
    """On either side of the sum, whatever its size; its gradient goes with it, and that of the data stays."""
    torch.manual_seed(0)
    model, known, change = nn.Linear(4, 2), Penalties(), NoPenalty()
    x, answers = torch.randn(8, 4), []
    for changes in ((known,), (change, known)):
        model.zero_grad()
        output = model(x)
        for each in changes:
            each.left(model, output)
        data = output.square().mean()
        penalty = factor * _Sums(*changes)(model.weight.abs().sum(), model.bias.abs().sum())
        loss = _Sums(*changes)(*((data, penalty) if first else (penalty, data)))
        loss.backward()
        answers.append((known.of(loss), float(penalty.detach()), float(loss.detach()), model.weight.grad.clone()))
    (part, whole, _, _), (none, _, left, gradient) = answers
    assert (part, none, change.acted) == (pytest.approx(whole), 0.0, True)
    model.zero_grad()
    model(x).square().mean().backward()
    assert left == pytest.approx(model(x).square().mean().item())
    assert torch.allclose(gradient, model.weight.grad)


def test_no_penalty_is_seen_in_terms_of_the_data_or_of_single_numbers():
    """Two losses of answers, and a weight of a loss that is learned, belong to the loss."""
    model, known, scale = nn.Linear(4, 2), Penalties(), nn.Parameter(torch.ones(()))
    output = model(torch.randn(8, 4))
    known.left(model, output)
    both = _Sums(known)(output.square().mean(), output.abs().mean())
    assert known.of(both) == known.of(_Sums(known)(both * torch.exp(-scale), scale * 1.0)) == 0.0


def test_a_penalty_stays_the_same_while_no_weight_changes():
    """Otherwise it depends on the data after all, and the loss is compared as it is."""
    assert without([3.0, 2.0, 2.5], [1.0, 0.5, 0.5], 1) == [2.0, 1.5, 2.0]
    assert without([3.0, 2.0, 2.5], [1.0, 0.5, 0.6], 1) == [3.0, 2.0, 2.5]
    assert without([3.0, 2.0], [], 1) == without([3.0, 2.0], [0.0, 0.0], 1) == [3.0, 2.0]


@pytest.mark.parametrize("ends", [True, False])
def test_activations_that_saturate_are_replaced_but_for_the_answer(ends):
    """Those of functions as well; a call without gradients is left as it is."""
    change, model, x = Relu(), nn.Linear(3, 3), torch.randn(5, 3)

    def forward() -> Tensor:
        change.called(model, (x,), {})
        hidden = model(x)
        for name in ("tanh", "sigmoid") if ends else ("tanh",):
            hidden = change.result(name, (hidden,), {}, getattr(torch, name)(hidden))
        return change.left(model, hidden if ends else 2 * hidden)

    plain = forward()
    again = forward()
    h = model(x)
    assert torch.equal(plain, h.tanh().sigmoid() if ends else 2 * h.tanh())
    assert torch.equal(again, h.relu().sigmoid() if ends else 2 * h.relu())
    with torch.no_grad():
        assert torch.equal(forward(), plain)


def test_inputs_are_made_finite_and_their_center_is_that_of_a_typical_column():
    """Whole numbers and finite entries stay; a column without spread says nothing of a center."""
    given = torch.tensor([[1.0, float("nan")], [float("inf"), 2.0]])
    assert Finite().change(given).tolist() == [[1.0, 0.0], [0.0, 2.0]]
    assert Finite().change(given.isnan().long()).dtype is torch.int64
    torch.manual_seed(0)
    x = torch.randn(200, 3)
    assert off_center(x) < 0.5
    assert off_center(x + 20) == pytest.approx(20, rel=0.2)
    assert off_center(torch.cat([x, torch.full((200, 4), 7.0)], 1)) < 0.5
    assert off_center(x[:4] + 20) == 0.0


def test_a_model_that_is_trained_and_gets_no_gradient_is_cut_off():
    """One that no optimizer has, such as a teacher, is not; nor is one whose optimizer has not stepped by then."""
    change, encoder, head, teacher = OpenPassages(), nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(4, 4)
    optimizer = torch.optim.SGD([*encoder.parameters(), *head.parameters()], 0.1)
    assert not change.cut(encoder)
    x = torch.randn(8, 4)
    head(encoder(x).detach()).sum().backward()
    change.before_step(optimizer)
    assert [change.cut(each) for each in (encoder, head, teacher)] == [True, False, False]
    output = change.left(encoder, encoder(x))
    assert change.handed(output)
    assert not change.handed(head(output))
    assert change.told()["opened"]


@pytest.mark.parametrize("kind", [torch.bool, torch.float32])
def test_a_mask_that_is_the_wrong_way_round_is_turned(kind):
    """Where it lets nothing but later positions in, the causal one lets all earlier ones in; others are narrowed."""
    change = NothingLater()
    change.called(nn.Identity(), (torch.zeros(2, 12, dtype=torch.int64),), {})
    later = torch.ones(12, 12, dtype=torch.bool).triu()
    query = torch.randn(2, 1, 12, 4)
    causal = torch.ones(12, 12, dtype=torch.bool).tril()
    window = causal & causal.T.roll(3, 0)
    for given, wanted in ((later, causal), (causal, causal), (window | later, (window | later) & causal)):
        mask = given if kind is torch.bool else torch.zeros(12, 12).masked_fill(~given, -torch.inf)
        _, kwargs = change.function("scaled_dot_product_attention", (query, query, query, mask), {})
        open_pairs = functional.softmax(torch.zeros(12, 12).masked_fill(~kwargs["attn_mask"], -torch.inf), -1) > 0
        assert torch.equal(open_pairs, wanted | torch.eye(12, dtype=torch.bool))


@pytest.mark.parametrize("at", [2, 3])
def test_losses_are_given_what_their_options_say(at):
    """Weights of classes go, by place or name; log-probabilities are known by their sign, and probabilities stay."""
    given, target, weight = torch.zeros(2, 3), torch.tensor([0, 1]), torch.ones(3)
    change = Unweighted()
    assert change.function("cross_entropy", (given, target), {"weight": None}) == ((given, target), {"weight": None})
    assert not change.acted
    by_place = change.function("cross_entropy", (given, target, weight), {})
    assert by_place == ((given, target, None), {})
    assert change.function("cross_entropy", (given, target), {"weight": weight})[1] == {"weight": None}
    logarithms = LogTargets()
    assert logarithms.function("kl_div", (given, given + 0.5), {})[1] == {}
    assert logarithms.function("kl_div", (given, given - at), {})[1] == {"log_target": True}


@pytest.mark.parametrize("steps", [(40, 20), (30, 80)])
def test_steps_of_all_trainings_are_counted_and_a_stop_is_said(tmp_path, steps):
    """A model that is trained on another task is not found to diverge there."""
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\nmodel = torch.nn.Linear(4, 4)\nx = torch.randn(64, 4)\n"
        f"for task, count in enumerate({steps}):\n"
        "    optimizer = torch.optim.SGD(model.parameters(), 0.3)\n"
        "    for _ in range(count):\n        optimizer.zero_grad()\n"
        "        (model(x) - 9 * (-1) ** task * x).square().mean().backward()\n        optimizer.step()\n"
    )
    outcome = run_script(Target(script), 60)
    assert (outcome.steps, outcome.stopped) == (min(sum(steps), steps[0] + 60), steps[1] > 60)
    kinds = {issue.issue_type for issue, _ in outcome.issues if issue.step == steps[0] + 1}
    assert kinds.isdisjoint({IssueType.DIVERGING, IssueType.LOSS_SPIKE})
    assert findings([], 90, stopped=True).startswith("first 90 steps: ")
    assert findings([], 90).startswith("90 steps: ")
