"""GradientFlowAnalyzer: what it finds in a few passes, what it refuses, and that it leaves everything as it was."""

from __future__ import annotations

import copy
import math
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradflow_export import (
    ArgumentError,
    ArgumentTypeError,
    Exporter,
    GradientFlowAnalyzer,
    IssueSeverity,
    IssueType,
    MemoryWriter,
)

OPTIMIZERS = {
    "none": None,
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3),
}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def network(depth=4, act=nn.ReLU, width=16):
    """A chain of linear layers with activations and a head."""
    blocks = [nn.Sequential(nn.Linear(width, width), act()) for _ in range(depth)]
    for block in blocks:
        nn.init.normal_(block[0].weight, 0, math.sqrt((2.0 if act is nn.ReLU else 1.0) / width))
    return nn.Sequential(nn.Sequential(*blocks), nn.Linear(width, 4))


def task():
    """Input and loss function of a classification."""
    targets = torch.randint(0, 4, (32,))
    return lambda: torch.randn(32, 16), lambda output: F.cross_entropy(output, targets)


class Game(nn.Module):
    """Two players and what one pays the other: x'Ay, with what each pays for being large."""

    def __init__(self, damping=0.0):
        super().__init__()
        self.first, self.second = nn.Linear(3, 1, bias=False), nn.Linear(3, 1, bias=False)
        self.damping = damping

    def forward(self, a):
        x, y = self.first.weight, self.second.weight
        value = (x @ a @ y.T).sum()
        return value + self.damping * x.square().sum(), -value + self.damping * y.square().sum()


def types(issues):
    return {issue.issue_type for issue in issues}


def everything(model, optimizer):
    """A copy of all that an analysis might change."""
    return copy.deepcopy(
        (
            model.state_dict(),
            [p.grad for p in model.parameters()],
            [m.training for m in model.modules()],
            [{k: len(v) for k, v in vars(m).items() if "hooks" in k} for m in model.modules()],
            None if optimizer is None else optimizer.state_dict(),
            (torch.get_rng_state(), np.random.get_state(), random.getstate()),  # noqa: NPY002 - the global one
        )
    )


def same(a, b):
    """Whether two nests of containers hold the same bits."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return np.array_equal(a, b)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("used", [False, True], ids=["fresh", "used"])
def test_everything_is_left_as_it_was(kind, used):
    """Parameters, gradients, buffers, flags, optimizer, hooks and random generators, whatever the passes did to them."""
    model = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 4))
    model[2].eval()
    optimizer = OPTIMIZERS[kind] and OPTIMIZERS[kind](model.parameters())
    input_fn, loss_fn = task()

    def noisy():
        return input_fn() + float(np.random.rand()) + random.random()  # noqa: NPY002 - the global ones

    def backward():
        loss = loss_fn(model(noisy()))
        loss.backward()
        return loss

    if used and optimizer is not None:
        optimizer.step(backward)
    tensors = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters())]
    before = everything(model, optimizer)
    analyzer = GradientFlowAnalyzer(
        model, enable_jacobian=True, enable_vector_analysis=True, enable_circular_flow_analyser=True
    )
    analyzer.analyze(noisy, loss_fn, steps=3, optimizer=optimizer)
    assert same(before, everything(model, optimizer))
    after = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters())]
    assert [id(t) for t in after] == [id(t) for t in tensors]


def test_an_error_of_the_users_own_leaves_everything_too():
    """A loss function that raises in the third pass is heard of, and nothing has moved."""
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    input_fn, loss_fn = task()
    before, calls = everything(model, optimizer), []

    def failing(output):
        calls.append(1)
        if len(calls) == 3:
            raise ZeroDivisionError
        return loss_fn(output)

    with pytest.raises(ZeroDivisionError):
        GradientFlowAnalyzer(model).analyze(input_fn, failing, optimizer=optimizer)
    assert same(before, everything(model, optimizer))


@pytest.mark.parametrize("steps", [1, 5])
def test_a_quick_check_finds_what_the_rules_are_patient_about(steps):
    """One pass is enough for vanishing, exploding, dead and non-finite gradients."""
    input_fn, loss_fn = task()
    explodes, dead, broken = network(8), network(), network()
    with torch.no_grad():
        for block in explodes[0]:
            block[0].weight.mul_(3)
        dead[0][1][0].bias.fill_(-30)
        broken[0][2][0].weight[0, 0] = math.nan
    for model, kind, layer in (
        (network(16, nn.Sigmoid), IssueType.VANISHING, "0.0"),
        (explodes, IssueType.EXPLODING, "0.0"),
        (dead, IssueType.DEAD, "0.1.1"),
        (broken, IssueType.NUMERICAL, None),
    ):
        found = {i.issue_type: i for i in GradientFlowAnalyzer(model).analyze(input_fn, loss_fn, steps)}
        assert kind in found
        assert found[kind].step == 1
        assert layer in {None, found[kind].layer}
        assert found[kind].severity >= IssueSeverity.MEDIUM


@pytest.mark.parametrize("make", [network, lambda: network(6, nn.Tanh), lambda: nn.LSTM(16, 4)])
def test_healthy_models_have_no_issue(make):
    """Nothing is said of a plain network, with or without an optimizer."""
    model = make()
    input_fn, loss_fn = task()

    def loss(output):
        return loss_fn(output[0] if isinstance(output, tuple) else output)

    analyzer = GradientFlowAnalyzer(model)
    assert analyzer.analyze(input_fn, loss) == []
    assert analyzer.analyze(input_fn, loss, optimizer=torch.optim.SGD(model.parameters(), lr=0.05)) == []


def test_a_parameter_that_no_optimizer_owns_is_told_of_only_when_one_is_given():
    """Without an optimizer nothing moves, and that is no stagnation."""
    model = network()
    input_fn, loss_fn = task()
    assert GradientFlowAnalyzer(model).analyze(input_fn, loss_fn) == []
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.05)
    found = GradientFlowAnalyzer(model).analyze(input_fn, loss_fn, optimizer=optimizer)
    assert {issue.issue_type for issue in found} == {IssueType.STAGNATION, IssueType.NOT_TRAINING}
    assert [(issue, set(issue.layers)) for issue in found] == [(issue, {"1.weight", "1.bias"}) for issue in found]


def test_thresholds_are_judged_literally_beside_the_other_rules():
    """A number that every gradient exceeds is reported; a stricter one for vanishing reports fewer, not more."""
    model = network()
    input_fn, loss_fn = task()
    (issue,) = GradientFlowAnalyzer(model, exploding_threshold=1e-6).analyze(input_fn, loss_fn, steps=5)
    assert (issue.issue_type, len(issue.layers)) == (IssueType.EXPLODING, 10)
    many, few = (
        GradientFlowAnalyzer(model, vanishing_threshold=t).analyze(input_fn, loss_fn, steps=5) for t in (1e3, 1e-7)
    )
    assert types(many) == {IssueType.VANISHING}
    assert few == []
    assert types(GradientFlowAnalyzer(model, dead_threshold=0.0).analyze(input_fn, loss_fn, 5)) == {IssueType.DEAD}
    varied = GradientFlowAnalyzer(model, unstable_cv_threshold=1e-3).analyze(input_fn, loss_fn, 5)
    assert types(varied) == {IssueType.UNSTABLE}


@pytest.mark.parametrize(
    ("inputs", "shape"),
    [
        (lambda: torch.zeros(2, 3), (2, 3)),
        (lambda: (torch.zeros(2, 3), torch.ones(1)), (2, 3)),
        (lambda: {"x": torch.zeros(4, 3), "shift": torch.ones(1)}, (4, 3)),
    ],
    ids=["tensor", "tuple", "mapping"],
)
def test_inputs_reach_the_model_as_it_takes_them(inputs, shape):
    """One argument, several, or keywords."""
    seen = []

    class Model(nn.Linear):
        def forward(self, x, shift=0.0):
            seen.append(tuple(x.shape))
            return super().forward(x + shift)

    GradientFlowAnalyzer(Model(3, 1)).analyze(inputs, lambda output: output.sum(), steps=1)
    assert seen == [shape]


def test_analysis_inside_no_grad_works():
    """A diagnostic that is called from validation code sees gradients."""
    with torch.no_grad():
        assert GradientFlowAnalyzer(network()).analyze(*task(), steps=2) == []


def test_a_watching_exporter_sees_nothing_of_an_analysis():
    """Records and issues of a run are the same with an analysis in the middle of it."""

    def train(*, analyse):
        torch.manual_seed(1)
        model, criterion = network(), nn.CrossEntropyLoss()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        targets, writer = torch.randint(0, 4, (32,)), MemoryWriter()
        with Exporter(model, backends=[writer], strict=True).watch(criterion):
            for step in range(8):
                optimizer.zero_grad()
                criterion(model(torch.randn(32, 16)), targets).backward()
                if analyse and step in {3, 5}:
                    GradientFlowAnalyzer(model).analyze(
                        lambda: torch.randn(32, 16), lambda o: criterion(o, targets), 3, optimizer
                    )
                optimizer.step()
        kept = [
            [r for r in record.readings if not r.metric.startswith(("runtime.", "overhead"))]
            for record in writer.records
        ]
        return kept, [p.detach().clone() for p in model.parameters()]

    plain, watched = train(analyse=False), train(analyse=True)
    assert plain[0] == watched[0]
    assert same(plain[1], watched[1])


def test_vector_analysis_of_one_loss():
    """The Hessian of a mean of squares contracts, one loss cannot rotate, and equal batches agree."""
    model = nn.Linear(5, 2)
    analyzer = GradientFlowAnalyzer(model, enable_vector_analysis=True)
    x = torch.randn(8, 5)
    analyzer.analyze(lambda: x, lambda output: output.square().mean(), steps=1)
    flow = analyzer.vector
    inner = torch.cat([x, torch.ones(8, 1)], dim=1).square().sum() / 8
    assert flow.divergence == pytest.approx(-float(inner) * 2 * 2 / 2 / 12, rel=0.5)
    assert (flow.players, flow.curl, flow.expanding) == (1, 0.0, 0.0)
    assert flow.coherence == pytest.approx(1.0)
    assert flow.noise.noise == pytest.approx(0.0, abs=1e-6)
    assert "single objective" in "\n".join(flow.lines())


@pytest.mark.parametrize("declare", ["names", "modules", "parameters", "optimizers"])
def test_a_game_that_rotates_is_an_issue(declare):
    """However the players are named, x'Ay is all rotation and says so; damped strongly enough it is no issue."""
    found = {}
    for damping in (0.0, 20.0):
        game = Game(damping)
        players = {
            "names": ["first", "second"],
            "modules": [game.first, game.second],
            "parameters": [game.first.parameters(), [game.second.weight]],
        }.get(declare)
        optimizers = [torch.optim.SGD(m.parameters(), lr=1e-3) for m in (game.first, game.second)]
        analyzer = GradientFlowAnalyzer(game, enable_vector_analysis=True)
        found[damping] = analyzer.analyze(
            lambda: torch.eye(3),
            lambda losses: losses,
            3,
            optimizers if declare == "optimizers" else None,
            players=players,
        )
        assert analyzer.vector.curl == pytest.approx(1 / (1 + (2 * damping) ** 2), rel=1e-4)
        assert analyzer.vector.divergence == pytest.approx(-2 * damping, rel=1e-5)
    (issue,) = found[0.0]
    assert (issue.issue_type, issue.layers) == (IssueType.ROTATION, ("first.weight", "second.weight"))
    assert found[20.0] == []


def test_a_game_that_goes_round_while_it_is_played_is_an_issue():
    """Sixty simultaneous steps at rate 0.2 wind twice, and the circular report says so."""
    game = Game()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.2) for m in (game.first, game.second)]
    analyzer = GradientFlowAnalyzer(game, enable_circular_flow_analyser=True)
    issues = analyzer.analyze(lambda: torch.eye(3), lambda losses: losses, 60, optimizers)
    assert types(issues) == {IssueType.ROTATION}
    assert analyzer.circular.values["winding"] >= 1
    assert analyzer.circular.values["plane"] == pytest.approx(1.0, abs=0.01)
    assert (
        GradientFlowAnalyzer(game).analyze(lambda: torch.eye(3), lambda losses: losses, 60, players=["first", "second"])
        == []
    )


def test_jacobians_of_known_blocks():
    """Half an orthogonal map has gain, radius and norm 0.5 and full rank; a projection has low rank."""
    chain = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
    with torch.no_grad():
        nn.init.orthogonal_(chain[0].weight).mul_(0.5)
        chain[1].weight.zero_()[0, 0] = 1.0
    analyzer = GradientFlowAnalyzer(chain, enable_jacobian=True)
    analyzer.analyze(lambda: torch.randn(8, 16), lambda output: output.square().mean(), steps=1)
    half, single, plain = (analyzer.jacobian[name] for name in "012")
    assert (half.gain, half.spectral_radius, half.greatest) == pytest.approx((0.5, 0.5, 0.5), rel=1e-5)
    assert half.effective_rank == pytest.approx(16, rel=1e-5)
    assert single.effective_rank == pytest.approx(1.0)
    assert plain.condition == pytest.approx(float(torch.linalg.cond(chain[2].weight.detach())), rel=1e-3)
    assert "rank 1 (low)" in "\n".join(analyzer.jacobian.lines())


def test_jacobians_see_one_sample_of_a_batch_with_everything_else_fixed():
    """In-place activations, batch statistics, dropout and residual additions: equal to autograd's Jacobian."""
    block = nn.Sequential(
        nn.BatchNorm2d(2), nn.ReLU(inplace=True), nn.Conv2d(2, 2, 3, padding=1), nn.ReLU(inplace=True)
    )
    model = nn.Sequential(block, copy.deepcopy(block), copy.deepcopy(block))
    x = torch.randn(4, 2, 5, 5)
    analyzer = GradientFlowAnalyzer(model, enable_jacobian=True)
    analyzer.analyze(lambda: x, lambda output: output.mean(), steps=1)
    dense = torch.autograd.functional.jacobian(lambda s: block(torch.cat([s, x[1:]]))[:1], x[:1]).reshape(50, 50)
    found = analyzer.jacobian["0"]
    assert found.greatest == pytest.approx(float(torch.linalg.matrix_norm(dense, 2)), rel=1e-4)
    assert found.spectral_radius == pytest.approx(float(torch.linalg.eigvals(dense).abs().max()), rel=1e-4)


def test_blocks_without_a_jacobian_say_why():
    """An embedding takes numbers of words, which nothing can be differentiated by."""
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    analyzer = GradientFlowAnalyzer(model, enable_jacobian=True)
    analyzer.analyze(lambda: torch.randint(0, 10, (8,)), lambda output: output.square().mean(), steps=1)
    assert analyzer.jacobian["0"] is None
    assert "floating tensor" in analyzer.jacobian.lines()[1]
    assert analyzer.jacobian["2"] is not None


def test_what_cannot_be_differentiated_twice_is_a_note():
    """The analysis goes on without divergence."""

    class Once(torch.autograd.Function):
        @staticmethod
        def forward(_ctx, x):
            return x * 2

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(_ctx, g):
            return g * 2

    class Model(nn.Linear):
        def forward(self, x):
            return Once.apply(super().forward(x))

    analyzer = GradientFlowAnalyzer(Model(3, 2), enable_vector_analysis=True)
    analyzer.analyze(lambda: torch.randn(4, 3), lambda output: output.square().mean(), steps=1)
    assert math.isnan(analyzer.vector.divergence)
    assert "second derivative" in analyzer.vector.note
    assert math.isfinite(analyzer.vector.coherence)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"steps": 0}, ArgumentError, "at least 1"),
        ({"steps": 2.0}, ArgumentTypeError, "whole number"),
        ({"input_fn": torch.zeros(2, 16)}, ArgumentTypeError, "input_fn must be a function"),
        ({"loss_fn": None}, ArgumentTypeError, "loss_fn must be a function"),
        ({"loss_fn": lambda output: output}, ArgumentError, "scalar"),
        ({"loss_fn": lambda output: output.detach().sum()}, ArgumentError, "depends on no parameter"),
        ({"loss_fn": lambda output: float(output.detach().sum())}, ArgumentTypeError, "scalar tensor"),
        ({"loss_fn": lambda output: (output.sum(), output.sum())}, ArgumentError, "players"),
        ({"optimizer": "sgd"}, ArgumentTypeError, "optimizer must be"),
        ({"optimizer": torch.optim.SGD([torch.zeros(1)])}, ArgumentError, "owns no parameter"),
        ({"players": ["0", "one"]}, ArgumentError, "one"),
        ({"players": [3]}, ArgumentTypeError, "players"),
        ({"players": ["0", "0"], "loss_fn": lambda output: (output.sum(), output.sum())}, ArgumentError, "one player"),
    ],
)
def test_bad_arguments_are_refused_with_the_way_out(arguments, error, words):
    """What was expected, what came, what to do."""
    input_fn, loss_fn = task()
    with pytest.raises(error, match=words):
        GradientFlowAnalyzer(network()).analyze(**{"input_fn": input_fn, "loss_fn": loss_fn, **arguments})


def test_a_bad_model_or_threshold_is_refused_at_once():
    """The constructor says so, not the analysis."""
    with pytest.raises(ArgumentTypeError, match="must be a torch"):
        GradientFlowAnalyzer("model")
    with pytest.raises(ArgumentError, match="vanishing_threshold"):
        GradientFlowAnalyzer(network(), vanishing_threshold=-1.0)


def test_recurrent_layers_and_circular_flow_are_printed_on_request(capsys):
    """Both flags add a section; what could not be measured says why."""
    model = nn.LSTM(16, 8)
    analyzer = GradientFlowAnalyzer(model, enable_rnn_analyzer=True, enable_circular_flow_analyser=True)
    analyzer.print_summary(
        analyzer.analyze(lambda: torch.randn(12, 4, 16), lambda output: output[0].square().mean(), 3)
    )
    text = capsys.readouterr().out
    assert "spectral_radius" in text
    assert "pass optimizer=" in text
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    analyzer.analyze(lambda: torch.randn(12, 4, 16), lambda output: output[0].square().mean(), 3, optimizer)
    assert "at least 24 passes" in analyzer.circular.lines()[0]
    plain = GradientFlowAnalyzer(network(), enable_rnn_analyzer=True)
    plain.print_summary(plain.analyze(*task(), steps=1))
    assert "none were seen" in capsys.readouterr().out
