"""Treatments of single causes, the answers to questions, and the returns of environments: each piece by itself."""

from __future__ import annotations

import copy
import math
import types
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from gradflow_export.experiments.battery import Battery, left
from gradflow_export.experiments.decision import Baseline, Trial
from gradflow_export.experiments.measure import EPISODES, Returns, yardstick
from gradflow_export.experiments.mending.catalog import MENDED
from gradflow_export.experiments.mending.evaluations import QuietEvaluation
from gradflow_export.experiments.mending.labels import MovedOn
from gradflow_export.experiments.mending.losses import (
    Logits,
    OpenEnd,
    OtherSign,
    OwnPlaces,
    Probabilities,
    ScaledCosines,
)
from gradflow_export.experiments.mending.passages import SpentLosses
from gradflow_export.experiments.mending.sequences import HandedOn
from gradflow_export.experiments.probes import GradientNoise, OneBatch, Outputs
from gradflow_export.experiments.questions import _determinism, _noise
from gradflow_export.experiments.replaced_functions import ReplacedFunctions
from gradflow_export.experiments.runs import Result
from gradflow_export.experiments.survey import Training
from gradflow_export.experiments.watched import PROVED, needed
from gradflow_export.records import loss_mistakes as known
from gradflow_export.records.issues import Issue, IssueType, Severity


def test_only_what_is_meant_for_a_cause_is_tried():
    """Another treatment of the same type would make a finding disappear for a reason of its own."""

    def meant(cause, kind=IssueType.WRONG_LOSS):
        return {each.name for each in MENDED if each.causes and each.meant([(str(kind), cause)])}

    assert meant(known.SWAPPED) == {"predictions first, targets second"}
    assert meant(known.MAXIMISED) == {"the other sign of the loss"}
    assert meant("running sum", IssueType.STALE_GRAD) == {"no loss in the next one"}
    assert meant("noise in evaluation", IssueType.EVAL_RANDOM) == {"no noise in evaluation"}
    # What leaves an extreme behind has no treatment: the sign of one term among several.
    assert meant(known.WITHOUT_BOUND) == set()


def test_a_running_sum_keeps_no_graph_of_what_went_backward():
    """The gradient of four losses is that of their sum, and each is taken once."""
    weight = torch.ones(1, requires_grad=True)
    change, total = SpentLosses(), torch.zeros(1)
    for _ in range(4):
        (left, right), _ = change.function("__add__", (total, weight * 1), {})
        total = left + right
        change.before_backward(total)
        total.backward(retain_graph=True)
    assert change.acted
    assert (total.item(), weight.grad.item()) == (4.0, 4.0)


def test_losses_of_ones_own_get_probabilities_and_those_of_torch_logits():
    """Each number by itself, or the classes of one sample."""
    for shape, made in (((4, 1, 2), torch.sigmoid), ((4, 3), lambda given: given.softmax(1))):
        change, logits = Probabilities(), torch.randn(shape, requires_grad=True) * 1
        said = change.left(nn.Identity(), logits)
        torch.testing.assert_close(said, made(logits))
        given = change.function("binary_cross_entropy_with_logits", (said.flatten(1), None), {})[0][0]
        torch.testing.assert_close(given, logits.flatten(1))
        assert change.function("mse_loss", (said, None), {})[0][0] is said


def test_an_activation_is_left_away_before_a_loss_and_at_the_end():
    """Wherever it is called; one between layers stays."""
    change, before = OpenEnd(), torch.randn(4, 1, requires_grad=True) * 1
    after = change.result("relu", (before,), {}, before.relu())
    assert change.function("mse_loss", (after + 1, None), {})[0][0] is not before
    torch.testing.assert_close(change.function("mse_loss", (after.squeeze(1), None), {})[0][0], before.squeeze(1))
    after = change.result("tanh", (before,), {}, before.tanh())
    torch.testing.assert_close(change.left(nn.Identity(), after), before)


def test_functions_are_replaced_where_they_are_looked_up(monkeypatch):
    """An activation module and a plain backward() go through what an intervention says of them."""
    seen = []

    class Look(OtherSign):
        def result(self, name, args, kwargs, given):
            seen.append(name)
            return given

    for owner, names in (
        (torch, ("relu", "sigmoid", "softmax", "log_softmax", "sub", "mul", "add", "tanh")),
        (torch.Tensor, ("backward", "detach")),
    ):
        for name in names:
            monkeypatch.setattr(owner, name, getattr(owner, name))
    change = Look()
    functions = ReplacedFunctions(lambda: [change], lambda: False)
    for owner, name in ((torch, "sigmoid"), (torch.Tensor, "backward")):
        setattr(owner, name, functions._before(name, getattr(owner, name)))
    weight = torch.ones(1, requires_grad=True)
    nn.Sigmoid()(weight).sum()
    (weight * 3).sum().backward()
    assert seen == ["sigmoid", "backward"]
    assert float(weight.grad) == -3.0


def test_predictions_come_first_rates_are_rates_and_cosines_are_scaled():
    """What is in order already is left as it is."""
    said, true = torch.rand(4, requires_grad=True) * 1, torch.rand(4)
    assert OwnPlaces().function("mse_loss", (true, said), {})[0] == (said, true)
    assert OwnPlaces().function("mse_loss", (said, true), {})[0] == (said, true)
    assert Logits().function("poisson_nll_loss", (said, true), {})[1] == {"log_input": False}
    assert Logits().function("poisson_nll_loss", (said - 1, true), {})[1] == {}
    torch.testing.assert_close(ScaledCosines().function("cross_entropy", (said, true), {})[0][0], 16 * said)
    assert ScaledCosines().function("cross_entropy", (3 + said, true), {})[0][0].min() > 1


def test_words_that_entered_are_moved_on():
    """The last of each sequence has no target; other targets are kept."""
    change, words = MovedOn(), torch.arange(6).reshape(2, 3)
    change.called(nn.Identity(), (words,), {})
    assert change.function("cross_entropy", (None, words.flatten()), {})[0][1].tolist() == [1, 2, -100, 4, 5, -100]
    other = words.flatten() + 1
    assert change.function("cross_entropy", (None, other), {})[0][1] is other


@pytest.mark.parametrize("kind", [nn.GRUCell, nn.LSTMCell])
def test_a_state_is_handed_on_within_one_call_of_the_model(kind):
    """It is what a loop that hands it on would give; the next call begins anew, and another batch has its own."""
    cell, x = kind(2, 3), torch.randn(4, 5, 2)
    plain, change, state = copy.deepcopy(cell), HandedOn(), None
    change.root(cell)
    for _ in range(2):
        change.called(cell, (), {})
        state = None
        for t in range(5):
            state, given = plain(x[:, t], state), cell(x[:, t])
    torch.testing.assert_close(given, state)
    assert change.acted
    torch.testing.assert_close(cell(x[:2, 0]), plain(x[:2, 0]))


def test_what_is_drawn_in_evaluation_is_the_middle_and_moves_no_generator():
    """In training it stays what it is."""
    change, model = QuietEvaluation(), nn.Identity().eval()
    before = torch.random.get_rng_state()
    with torch.no_grad():
        change.called(model, (), {})
        drawn = [
            torch.rand(2),
            torch.randn_like(torch.ones(2)),
            torch.empty(2).exponential_(),
            torch.normal(3.0, 1.0, (2,)),
        ]
        change.left(model, None)
    assert [each.tolist() for each in drawn] == [[0.5] * 2, [0.0] * 2, [1.0] * 2, [3.0] * 2]
    assert torch.equal(before, torch.random.get_rng_state())
    change.called(model.train(), (), {})
    assert torch.randn(8).any()


def test_runs_are_as_long_as_it_took_to_prove_a_finding():
    """An evaluation may come late; what is of degree does not ask for it."""
    late = Issue(IssueType.EVAL_RANDOM, Severity.HIGH, "", 80, 1.0, 0.0, "", "")
    assert IssueType.EVAL_RANDOM in PROVED
    assert needed([late], 60) == 100
    assert needed([late, replace(late, step=40)], 60) == 60
    assert needed([Issue(IssueType.DEAD, Severity.HIGH, "", 80, 1.0, 0.0, "", "")], 60) == 60


def test_the_noise_of_a_gradient_says_which_batch_is_large_enough():
    """Gradients of 3 plus noise of a variance of 4, at a batch of 8: they are equal at a batch of about 8 * 4 / 9."""
    weight = nn.Parameter(torch.zeros(4000))
    optimizer, change = torch.optim.SGD([weight], lr=0.0), GradientNoise()
    change.called(nn.Identity(), (torch.zeros(8, 2),), {})
    generator = torch.Generator().manual_seed(0)
    for _ in range(8):
        weight.grad = 3 + 2 * torch.randn(4000, generator=generator)
        change.before_step(optimizer)
        change.measure()
    samples, spread, signal = change.told()["noise"]
    assert samples == 8
    assert spread / 4000 == pytest.approx(4, rel=0.1)
    assert signal / 4000 == pytest.approx(9, rel=0.1)
    answer = _noise(Result(1, facts=change.told()), 60)
    assert "both are equal at about 4 (" in answer.text
    assert answer.bars["batch of 16"] == pytest.approx(0.5 * answer.bars["batch of 8"])
    assert "same gradient" in _noise(Result(1, facts={"noise": (8, 0.0, 1.0)}), 60).text
    assert _noise(Result(1, facts={"noise": (0, 0.0, 1.0)}), 60) is None
    assert _noise(Result(1, facts={"noise": (8, 0.0, 0.0)}), 60) is None


def test_the_layer_in_which_two_runs_begin_to_differ_is_named():
    """A loss that differs later than its cause is traced back to it."""
    model, told = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1)), []
    for extra in (0.0, 1.0):
        twin, change = copy.deepcopy(model), Outputs()
        change.root(twin)
        for step in range(2):
            twin[2](twin[1](twin[0](torch.ones(1, 2))) + extra * step)
            change.after_step(None)
        told.append(Result(1, (1.0, 1.0 + extra), facts=change.told()))
    assert "first difference is in step 2, in 2" in _determinism(*told).text
    assert "bit for bit" in _determinism(told[0], told[0]).text


def test_one_batch_for_ever_is_one_though_each_epoch_makes_a_loader():
    """A second loader beside it, or one of other shapes, has a batch of its own."""

    class Loader:
        pass

    change, first = OneBatch(), torch.zeros(4, 2)
    loader = Loader()
    assert change.batch(loader, first) is first
    assert change.batch(loader, torch.ones(4, 2)) is first
    beside = torch.ones(4, 2)
    assert change.batch(Loader(), beside) is beside
    del loader
    assert change.batch(Loader(), torch.ones(4, 2)) is first
    other = torch.ones(4, 3)
    assert change.batch(Loader(), other) is other


def test_returns_of_environments_are_found_by_themselves(monkeypatch):
    """Each episode of the outermost environment counts once, whoever ends it; several at a time count each."""

    class Env:
        def reset(self):
            return 0, {}

    class World(Env):
        def step(self, action):
            return 0, action, action == 2, False, {}

    class Wrapper(Env):
        def __init__(self, inner):
            self.inner = inner

        def step(self, action):
            return self.inner.step(action)

        def reset(self):
            return self.inner.reset()

    class VectorEnv:
        def step(self, actions):
            return 0, np.array(actions), np.array(actions) == 2, np.zeros(2, bool), {}

    monkeypatch.setitem(
        __import__("sys").modules,
        "gymnasium",
        types.SimpleNamespace(Env=Env, vector=types.SimpleNamespace(VectorEnv=VectorEnv)),
    )
    returns, world, many = Returns(), Wrapper(World()), VectorEnv()
    assert math.isnan(returns.now())
    for action in (1, 1, 2):
        world.step(action)
    assert returns.now() == 4.0
    world.step(1)
    world.reset()
    assert returns.now() == 1.0
    for actions in ([1, 2], [1, 2], [2, 1]):
        many.step(actions)
    assert returns.now() == pytest.approx((2 + 2 + 4) / 3)


@pytest.mark.parametrize(("effect", "cured"), [(0.1, False), (0.95, True)])
def test_a_script_that_begins_to_learn_later_by_itself_needs_no_larger_steps(effect, cured):
    """What a plateau holds up is not tuned; a cure that makes no larger steps needs no such run."""
    made = []

    def run(requests):
        made.extend(requests)
        yield requests[0], Result(1, effect=effect)

    battery = Battery(types.SimpleNamespace(run=run), Training(0, 300, 1), steps=60)
    verdict = battery.verdict
    verdict.baseline = Baseline((1.0,) * 3, (0.99,) * 3)
    verdict.cures = [Trial(("clear old gradients",), {0: 0.1})]
    assert not battery._begins_later()
    assert made == []
    verdict.cures = [Trial(("learning rate x 10",), {0: 0.1})]
    assert battery._begins_later() is not cured
    assert [request.steps for request in made] == [240]
    assert (bool(verdict.cures), bool(verdict.faster), verdict.baseline.ill) == (cured, not cured, cured)


@pytest.mark.parametrize("learns", [True, False])
def test_what_tunes_is_given_more_steps_where_a_finding_names_its_cause(learns):
    """Not where the script has learned nearly all, nor what makes larger steps; what is exact is where it learns not."""
    names = ("standardize the inputs", "Kaiming initialization", "learning rate x 10", "learning rate x 0.1")
    trials = [Trial((name,), {0: 0.5}) for name in names]
    for suspect, named in ((IssueType.DATA_SCALE, names[0]), (IssueType.BAD_INIT, names[1]), (IssueType.DEAD, None)):
        battery = Battery(None, Training(0, 300, 1), steps=60, suspects=[suspect])
        battery.verdict.baseline = Baseline((1.0,) * 3, (0.5 if learns else 0.95,) * 3)
        battery.verdict.facts = {"scale": 0.0, "offset": 0.0, "gain": 0.0, "level": 0, "tables": 1}
        accused, others = left(trials, battery.verdict)
        assert [each.names[0] for each in accused] == ([named] if named else [])
        assert [each.names[0] for each in others] == ([] if learns else [names[3]])
        battery.verdict.baseline = Baseline((1.0,) * 3, (0.05,) * 3)
        assert left(trials, battery.verdict) == ([], [])


def test_returns_take_the_place_of_a_loss_that_says_nothing():
    """Where enough episodes ended; a loss that can be compared is compared."""
    facts = {"optimizers": 1, "places": 1, "digests": [], "echoes": 0.0}
    ended = tuple(map(float, range(EPISODES)))

    def rule(loss, measured):
        look = Result(1, (loss,), 1.0, facts=facts, measured=measured)
        return yardstick(None, [look], look, None)

    assert rule(-1.0, ended).scale is not None
    assert "returns" in rule(-1.0, ended).text
    assert rule(-1.0, ended[1:]).signed
    assert rule(1.0, ended).scale is None
