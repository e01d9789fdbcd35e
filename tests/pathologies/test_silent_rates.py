"""Learning rates and first weights with which nothing is learned, each beside some with which it is."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, StepLR

from gradflow_export import Exporter, IssueType, MemoryWriter

KINDS = (IssueType.LEARNING_RATE, IssueType.BAD_INIT)


def told(optimizer, *, init=lambda _model: None, schedule=lambda _optimizer: None, steps=60):
    """Train a classifier with an optimizer made from its parameters; return cause and layer of what is found."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2))
    init(model)
    optimizer = optimizer(model.parameters())
    scheduler = schedule(optimizer)
    with Exporter(model, backends=[MemoryWriter()], strict=True).watch() as exporter:
        for _ in range(steps):
            x = torch.randn(32, 8)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), (x[:, 0] > 0).long())
            exporter.observe(loss=loss)
            loss.backward()
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
        return [(issue.cause, issue.layer) for issue in exporter.issues if issue.issue_type in KINDS]


def adam(lr):
    return lambda parameters: torch.optim.Adam(parameters, lr)


def sgd(lr):
    return lambda parameters: torch.optim.SGD(parameters, lr)


@pytest.mark.parametrize(
    ("optimizer", "cause"),
    [(adam(1.0), "too large"), (adam(10.0), "too large"), (adam(1e-8), "too small"), (sgd(1e-5), "too small")],
    ids=["adam 1", "adam 10", "adam 1e-8", "sgd 1e-5"],
)
def test_rates_at_which_the_loss_cannot_fall(optimizer, cause):
    """Too large and too small, for two optimizers."""
    assert told(optimizer) == [(cause, "")]


@pytest.mark.parametrize("limit", [1e-6, 1e-4, 1.0])
def test_steps_that_clipping_made_small_are_laid_to_it(limit):
    """Its limit is what is to be raised, and not the rate; a usual limit is none to speak of."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Exporter(model, backends=[MemoryWriter()], strict=True).watch() as exporter:
        for _ in range(60):
            x = torch.randn(32, 8)
            optimizer.zero_grad()
            F.mse_loss(model(x), x[:, :3].sum(1, keepdim=True)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), limit)
            optimizer.step()
        found = [issue for issue in exporter.issues if issue.issue_type is IssueType.LEARNING_RATE]
    assert len(found) == (limit < 1.0)
    assert all("raise the limit of clipping" in issue.advice for issue in found)


@pytest.mark.parametrize("unscaled", [False, True])
def test_gradients_that_were_clipped_before_they_were_unscaled(unscaled):
    """What the scaler multiplied is clipped to next to nothing, and what to do is to unscale it first."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu")
    with Exporter(model, backends=[MemoryWriter()], strict=True).watch() as exporter:
        for _ in range(60):
            x = torch.randn(32, 8)
            optimizer.zero_grad()
            scaler.scale(F.mse_loss(model(x), x[:, :3].sum(1, keepdim=True))).backward()
            if unscaled:
                scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        found = [issue for issue in exporter.issues if issue.issue_type is IssueType.LEARNING_RATE]
    assert len(found) == (not unscaled)
    assert all("scaler.unscale_(optimizer) before clip_grad_norm_" in issue.advice for issue in found)


@pytest.mark.parametrize(
    "optimizer", [adam(1e-5), adam(1e-3), adam(1e-1), sgd(1e-2), sgd(1.0)], ids=["1e-5", "1e-3", "0.1", "0.01", "1"]
)
def test_rates_over_four_orders_are_in_order(optimizer):
    """Fine-tuning learns slowly, and a large rate that learns is no fault."""
    assert told(optimizer) == []


def test_a_schedule_that_runs_out_is_told_and_one_that_warms_up_or_anneals_is_not():
    """Ten epochs' numbers given in steps; a warm-up from nothing; a cosine to the last step."""
    assert told(adam(1e-3), schedule=lambda o: StepLR(o, 5, 0.1), steps=150) == [("decayed", "")]
    assert told(adam(1e-3), schedule=lambda o: LambdaLR(o, lambda step: 1e-6 + step / 200)) == []
    assert told(adam(1e-3), schedule=lambda o: CosineAnnealingLR(o, 60)) == []


def fill(value):
    def init(model):
        for parameter in model.parameters():
            nn.init.constant_(parameter, value)

    return init


def normal(model):
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    with torch.no_grad():
        model[2].weight.mul_(1.5)


def test_first_weights_from_which_nothing_is_learned():
    """Units that are copies, layers that stay at zero, weights that do not know their number of inputs."""
    assert told(adam(1e-3), init=fill(0.1)) == [("units are copies", "0.weight")]
    assert told(adam(1e-3), init=fill(0.0)) == [("zeros", "0.weight")]
    assert told(sgd(1e-4), init=normal) == [("too large", "2.weight")]


def test_a_head_of_variance_one_is_told_though_the_loss_comes_down():
    """A first loss that is many times that of guessing is the head's, whatever Adam makes of it later."""

    def head(model):
        nn.init.normal_(model[4].weight, std=4.0)

    assert told(adam(3e-2), init=head) == [("too large", "4.weight")]


def test_steps_of_adam_that_are_too_small_for_gradients_that_agree():
    """At 1e-6 the loss stays at a constant's while every gradient points the same way."""
    assert told(adam(1e-6), steps=90) == [("too small", "")]


@pytest.mark.parametrize("seed", [0, 1])
def test_steps_that_an_optimizer_lengthens_by_itself_are_not_judged_as_they_are(seed):
    """RAdam's first steps are a fiftieth of its rate, and grow for two thousand steps at a rate that stays as it is."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(32, 128), nn.LayerNorm(128), nn.GELU(), nn.Linear(128, 10))
    centres, optimizer = torch.randn(10, 32), torch.optim.RAdam(model.parameters(), lr=1e-3)
    with Exporter(model, backends=[MemoryWriter()], strict=True).watch() as exporter:
        for _ in range(200):
            y = torch.randint(10, (64,))
            optimizer.zero_grad()
            F.cross_entropy(model(centres[y] + 0.7 * torch.randn(64, 32)), y).backward()
            optimizer.step()
        assert [issue.cause for issue in exporter.issues if issue.issue_type in KINDS] == []


def test_zeros_and_constants_that_are_told_apart_by_others_are_in_order():
    """An output layer may begin with zeros, or with a constant."""
    assert told(adam(1e-3), init=lambda model: nn.init.zeros_(model[4].weight)) == []
    assert told(adam(1e-3), init=lambda model: nn.init.ones_(model[4].weight)) == []


@pytest.mark.parametrize(("factor", "found"), [(10.0, True), (0.1, False)])
def test_a_schedule_that_raises_the_rate_until_all_is_undone(factor, found):
    """A factor turned round is a rate that is too large, told with the step; the right one is left in peace."""
    causes = told(adam(3e-3), schedule=lambda optimizer: StepLR(optimizer, 30, factor), steps=130)
    assert (("too large", "") in causes) == found


@pytest.mark.parametrize(("rows", "seed", "steps"), [(32, 0, 120), (2, 2, 300)])
def test_tiny_steps_that_all_gradients_agree_on_are_told_though_the_loss_creeps_down(rows, seed, steps):
    """A regression with an offset of 3 falls by a few hundredths in a hundred steps, far above a constant; and it stays
    open, however much the lengths of the steps scatter."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), 2e-5)
    with Exporter(model, backends=[MemoryWriter()], strict=True).watch() as exporter:
        for _ in range(steps):
            x = torch.randn(rows, 8)
            optimizer.zero_grad()
            F.mse_loss(model(x), 3 + x[:, :1]).backward()
            optimizer.step()
        assert [(issue.cause, issue.open) for issue in exporter.issues if issue.issue_type in KINDS] == [
            ("too small", True)
        ]


def climbed(factor, seed, begin=0):
    """Train with a rate that is multiplied by ``factor`` at each step from one on; return what is told of the rate."""
    torch.manual_seed(seed)
    x = torch.randn(1000, 8)
    y = (x @ torch.randn(8, 4)).argmax(1)
    model = nn.Sequential(nn.Linear(8, 48), nn.Tanh(), nn.Linear(48, 4))
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    with Exporter(model, backends=[MemoryWriter()], strict=True, synchronous=True).watch() as exporter:
        for step in range(210):
            rows = torch.randint(1000, (32,))
            optimizer.zero_grad()
            scores = model(x[rows])
            (scores.logsumexp(1) - scores.gather(1, y[rows, None]).squeeze(1)).mean().backward()  # of no known kind
            optimizer.step()
            optimizer.param_groups[0]["lr"] *= factor if step > begin else 1.0
    return [issue.cause for issue in exporter.issues if issue.issue_type is IssueType.LEARNING_RATE]


@pytest.mark.parametrize("seed", [0, 2])
def test_a_rate_that_grows_a_little_with_each_step_is_told(seed):
    """ExponentialLR with a factor above 1: no single rise is large, and the loss rises with the rate in the end."""
    assert "too large" in climbed(1.03, seed)
    assert climbed(1.005, seed) == []


def test_a_value_that_grows_while_the_rate_warms_up_is_left_in_peace():
    """The loss grows with its targets, over the whole of a linear warm-up."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 48), nn.Tanh(), nn.Linear(48, 1))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    warm = LambdaLR(optimizer, lambda step: (step + 1) / 300)
    with Exporter(model, backends=[MemoryWriter()], strict=True, synchronous=True).watch() as exporter:
        for step in range(300):
            x = torch.randn(32, 8)
            optimizer.zero_grad()
            (model(x) - (1 + step / 30) * x[:, :1]).abs().pow(1.5).mean().backward()
            optimizer.step()
            warm.step()
    assert not [issue for issue in exporter.issues if issue.issue_type is IssueType.LEARNING_RATE]


class Drop(nn.Module):
    """Scores of items, behind dropout."""

    def __init__(self, p):
        super().__init__()
        wide = [layer for size in (12, 64) for layer in (nn.Linear(size, 64), nn.ReLU(), nn.Dropout(p))]
        self.net = nn.Sequential(*wide, nn.Linear(64, 1))

    def forward(self, x):
        return self.net(x)


def fitted(kind, *, sick):
    """Learn a curved function with one number right or wrong; return type, cause and advice of what is found."""
    torch.manual_seed(0)
    x = torch.randn(1200, 12)
    y = torch.tanh(x[:, :1] - x[:, 1:2]) + 0.8 * x[:, 2:3] * x[:, 3:4]
    model = Drop(0.95 if kind == "dropout" and sick else 0.0)
    optimizer = {
        "clip": lambda p: torch.optim.SGD(p, 0.02, momentum=0.9),
        "decay": lambda p: (torch.optim.Adam if sick else torch.optim.AdamW)(p, 3e-3, weight_decay=0.3),
        "dropout": lambda p: torch.optim.Adam(p, 3e-3),
        "loss": lambda p: torch.optim.SGD(p, 0.02, momentum=0.9),
    }[kind](model.parameters())
    with Exporter(model, backends=[MemoryWriter()], strict=True, synchronous=True, verbose=0).watch() as exporter:
        for _ in range(360 if kind == "dropout" else 200):
            i, j = torch.randint(1200, (2, 64))
            optimizer.zero_grad()
            pairs = F.softplus(-(model(x[i]) - model(x[j])) * (y[i] - y[j]).sign()).mean()
            loss = pairs if kind == "dropout" else F.mse_loss(model(x[i]), y[i] + 1.0)
            (loss / 100 if kind == "loss" and sick else loss).backward()
            if kind == "clip":
                nn.utils.clip_grad_norm_(model.parameters(), 0.005 if sick else 5.0)
            optimizer.step()
    return [(issue.issue_type, issue.cause, issue.advice) for issue in exporter.issues if issue.severity >= 2]


@pytest.mark.parametrize(
    ("kind", "cause", "word"),
    [
        ("clip", "too small", "raise the limit of clipping"),
        ("loss", "too small", "scales the loss down"),
        ("decay", "weights decay", "lower weight_decay"),
        ("dropout", "dropout", "lower p"),
    ],
)
def test_numbers_that_are_far_off_are_named(kind, cause, word):
    """A limit, a decay, a dropout and a scale of the loss by which less is learned than without them, each beside a usual one."""
    (found,) = [each for each in fitted(kind, sick=True) if each[0] in {*KINDS, IssueType.NOT_LEARNING}]
    assert found[1] == cause
    assert word in found[2]
    assert fitted(kind, sick=False) == []
