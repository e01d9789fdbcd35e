"""The path of the weights: what is sampled, how optimizers are joined, and what the rule makes of it."""

from __future__ import annotations

import math
import pickle

import numpy as np
import pytest
import torch
from torch import nn

from gradflow_export import Exporter, IssueType, MemoryWriter
from gradflow_export.instruments.path import ENTRIES, LEAST, POINTS, Paths
from gradflow_export.records.step_record import Reading, StepRecord
from gradflow_export.rules.judge import Judge
from gradflow_export.rules.standstill import Rotation


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def circle(step, phase=0.0):
    """Weight and gradient of one player of a game that goes round, 16 steps a turn."""
    angle = math.tau * step / 16 + phase
    return np.array([math.cos(angle), math.sin(angle)])


def values(out, name):
    return out[f"flow.{name}"][""]


def test_optimizers_that_step_together_make_one_path():
    """Two players are joined: the path is a circle, although each moves along a line."""
    paths, seen = Paths(), []
    for step in range(POINTS):
        outs = [paths.take("gen", circle(step)), paths.take("disc", circle(step, -math.pi / 2))]
        assert outs[0] == {}
        seen += [out for out in outs if out]
    assert len(seen) == 1 + (POINTS - LEAST) // 8
    assert values(seen[-1], "winding") == pytest.approx((POINTS - 1) / 16, rel=0.05)
    assert values(seen[-1], "plane") == pytest.approx(1.0)
    assert set(seen[-1]["flow.radius"]) == {"gen", "disc"}


def test_an_optimizer_that_steps_less_often_stands_still_in_between():
    """One steps five times as often: every one of its steps is a point."""
    paths, count = Paths(), 0
    for step in range(5 * POINTS):
        count += bool(paths.take("disc", circle(step)))
        if step % 5 == 4:
            count += bool(paths.take("gen", circle(step)))
    assert count == pytest.approx(1 + (POINTS - LEAST) // 8 + 4 * POINTS // 16, abs=2)


def test_slow_rotations_show_in_long_windows():
    """A turn of 640 steps is seen in points sixteen steps apart, and only there."""
    paths, last = Paths(), {}
    for step in range(1100):
        last = paths.take("all", np.concatenate([circle(step / 40), circle(step / 40, -math.pi / 2)])) or last
    assert values(last, "winding") > 1
    assert values(last, "work") < -0.9


@pytest.mark.parametrize("what", ["nan", "shape", "newcomer"])
def test_a_break_begins_a_new_path(what):
    """What is not finite, has another shape or another player cannot be part of one path."""
    paths = Paths()
    for step in range(LEAST - 1):
        assert paths.take("all", circle(step)) == {}
    if what == "nan":
        assert paths.take("all", np.array([math.nan, 0.0])) == {}
    elif what == "shape":
        assert paths.take("all", np.zeros(6)) == {}
    else:
        assert paths.take("other", circle(0)) == {}
    assert all(paths.take("all", circle(step)) == {} for step in range(LEAST - 2))


def test_paths_do_not_grow():
    """Windows hold a fixed number of points."""
    paths, sizes = Paths(), []
    for step in range(3000):
        paths.take("all", circle(step))
        if step in {1500, 2999}:
            sizes.append(len(pickle.dumps(paths)))
    assert sizes[1] <= sizes[0] + 100


def game(weights, losses, optimizers, steps=80, every=(1, 1)):
    """Play simultaneously, as a user's loop would, and return the writer and the issues."""
    model = nn.Module()
    model.gen, model.disc = (nn.Module() for _ in range(2))
    model.gen.v, model.disc.v = (nn.Parameter(w.clone()) for w in weights)
    players = [make([p]) for make, p in zip(optimizers, (model.gen.v, model.disc.v), strict=True)]
    writer = MemoryWriter()
    with Exporter(model, backends=[writer], strict=True).watch(blocks=["gen", "disc"]) as exporter:
        for step in range(steps):
            found = losses(model.gen.v, model.disc.v)
            grads = [
                torch.autograd.grad(loss, p, retain_graph=True)[0]
                for loss, p in zip(found, model.parameters(), strict=True)
            ]
            for p, g in zip(model.parameters(), grads, strict=True):
                p.grad = g
            for player, interval in zip(players, every, strict=True):
                if step % interval == 0:
                    player.step()
    return writer, exporter.issues


def sgd(rate, **settings):
    return lambda p: torch.optim.SGD(p, lr=rate, **settings)


def bilinear(damping=0.0, sign=-1.0):
    def losses(x, y):
        value = (x * y).sum()
        return value + damping * x.square().sum(), sign * value + damping * y.square().sum()

    return losses


@pytest.mark.parametrize(
    ("losses", "optimizers", "every"),
    [
        (bilinear(), (sgd(0.2), sgd(0.2)), (1, 1)),
        (bilinear(), (sgd(0.4), sgd(0.1)), (1, 1)),
        (bilinear(), (sgd(0.3), sgd(0.1)), (2, 1)),
        (bilinear(), (sgd(0.1, momentum=0.5),) * 2, (1, 1)),
        (bilinear(), (lambda p: torch.optim.Adam(p, lr=0.1, betas=(0.5, 0.9)),) * 2, (1, 1)),
    ],
    ids=["equal", "rates", "rhythms", "momentum", "adam"],
)
def test_players_that_chase_each_other_are_an_issue(losses, optimizers, every):
    """x'y circles for ever, whatever the optimizers do."""
    _, issues = game((torch.randn(4), torch.randn(4)), losses, optimizers, 120, every)
    (issue,) = issues
    assert issue.issue_type is IssueType.ROTATION
    assert set(issue.layers) == {"gen.v", "disc.v"}
    assert issue.open


@pytest.mark.parametrize(
    ("losses", "optimizers"),
    [
        (bilinear(damping=0.3), (sgd(0.2), sgd(0.2))),
        (bilinear(sign=1.0, damping=1.0), (sgd(0.1), sgd(0.1))),
        (bilinear(sign=1.0, damping=1.0), (sgd(0.01, momentum=0.95),) * 2),
    ],
    ids=["spiral-inwards", "potential", "potential-momentum"],
)
def test_games_that_arrive_are_none(losses, optimizers):
    """A spiral that closes in, and a game with a common loss, converge."""
    writer, issues = game((torch.randn(4), torch.randn(4)), losses, optimizers, 120)
    assert issues == ()
    assert any(record.value("flow.winding") is not None for record in writer.records)


@pytest.mark.parametrize("momentum", [0.0, 0.95])
@pytest.mark.parametrize("shuffled", [True, False])
def test_noise_and_momentum_around_a_minimum_are_none(momentum, shuffled):
    """Two weights, batches that disagree: the path winds many times and does no work."""
    x = torch.randn(64, 2)
    y = x @ torch.tensor([1.0, -1.0]) + torch.randn(64)
    model = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum)
    generator = torch.Generator().manual_seed(1)
    writer = MemoryWriter()
    with Exporter(model, backends=[writer], strict=True).watch() as exporter:
        for step in range(250):
            rows = torch.randint(64, (4,), generator=generator) if shuffled else torch.arange(4) + step % 16 * 4
            optimizer.zero_grad()
            (model(x[rows])[:, 0] - y[rows]).square().mean().backward()
            optimizer.step()
    assert max(record.value("flow.winding") or 0 for record in writer.records) > 1
    assert IssueType.ROTATION not in {issue.issue_type for issue in exporter.issues}


def test_the_cosine_is_that_of_the_joint_gradient():
    """With two optimizers one number tells of both, not of the one that stepped last."""
    writer, _ = game((torch.randn(4), torch.randn(4)), bilinear(), (sgd(0.3), sgd(0.1)), 6)
    rates, x, y = (0.3, 0.1), None, None
    torch.manual_seed(0)
    x, y = torch.randn(4), torch.randn(4)
    gradients = []
    for _ in range(6):
        gradients.append(torch.cat([y, -x]))
        x, y = x - rates[0] * y, y + rates[1] * x
    for record, before, now in zip(writer.records[1:], gradients, gradients[1:], strict=False):
        assert record.value("gradient.cosine") == pytest.approx(
            float(torch.cosine_similarity(before, now, dim=0)), abs=1e-6
        )


def test_few_entries_are_sampled_and_no_generator_is_drawn_from():
    """Whatever the size of the model, at most about 64 weights are followed; the same run gives the same numbers."""
    runs = []
    for _ in range(2):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Conv2d(3, 64, 3), nn.Flatten(), nn.Linear(64 * 36, 50)).to(
            memory_format=torch.channels_last
        )
        optimizer, writer = torch.optim.SGD(model.parameters(), lr=0.01), MemoryWriter()
        with Exporter(model, backends=[writer], strict=True).watch() as exporter:
            tap = exporter._loop.instruments.gradients._path
            for _ in range(LEAST):
                optimizer.zero_grad()
                model(torch.randn(2, 3, 8, 8)).square().mean().backward()
                optimizer.step()
        ((_, followed),) = tap._chosen.values()
        assert sum(entry.count for entry in followed) <= 1.5 * ENTRIES
        wide = [entry for entry in followed if entry.parameter.dim() > 1]
        columns = {i * entry.stride % entry.parameter.shape[-1] for entry in wide for i in range(entry.count)}
        assert len(columns) > 8
        runs.append((writer.records[-1].get("flow.work"), torch.get_rng_state()))
    assert runs[0][0] == runs[1][0]
    assert runs[0][0] is not None
    assert torch.equal(runs[0][1], runs[1][1])


def judged(**changed):
    """The issues after four records of a path with these statistics."""
    judge = Judge([Rotation()], strict=True)
    seen = {"winding": 1.5, "plane": 0.95, "growth": 1.1, "work": -0.9, **changed}
    for step in range(8, 40, 8):
        judge.check(StepRecord(step, 0.0, tuple(Reading.run(f"flow.{name}", value) for name, value in seen.items())))
    return judge.issues


def test_the_rule_wants_all_four_signs():
    """Turns, a plane, a radius that does not shrink, and a way downhill: without one of them it is silent."""
    (issue,) = judged()
    assert (issue.issue_type, issue.step, issue.layer) == (IssueType.ROTATION, 8, "")
    for name, value in (("winding", 0.99), ("plane", 0.79), ("growth", 0.79), ("work", -0.49)):
        assert judged(**{name: value}) == ()


def test_a_solved_problem_may_go_round():
    """Once the loss is a tenth of where it began, the rule is silent."""
    judge = Judge([Rotation()], strict=True)
    for step in range(8, 80, 8):
        names = {"winding": 1.5, "plane": 0.95, "growth": 1.1, "work": -0.9}
        readings = [Reading.run(f"flow.{name}", value) for name, value in names.items()]
        judge.check(StepRecord(step, 0.0, (*readings, Reading.run("loss", 1.0 if step == 8 else 0.01))))
    assert all(issue.healed_step for issue in judge.issues)
