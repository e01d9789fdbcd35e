"""Targets read off the gradient that comes back to the answers, whoever wrote the loss out."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from gradflow_export import Exporter, MemoryWriter
from gradflow_export.metrics.answers import meant
from gradflow_export.records.issues import IssueType

Loss = Callable[[Tensor, Tensor], Tensor]


def _read(answers: Tensor, loss: Loss, y: Tensor):
    z = answers.clone().requires_grad_()
    loss(z, y).backward()
    assert z.grad is not None
    rows = (z.detach().reshape(len(z), -1), z.grad.reshape(len(z), -1))
    return meant(*(np.asarray(part, dtype=np.float64) for part in rows))


def _log_softmax(z: Tensor) -> Tensor:
    e = (z - z.amax(1, keepdim=True)).exp()
    return (e / e.sum(1, keepdim=True)).log()


def _focal(z: Tensor, y: Tensor) -> Tensor:
    picked = _log_softmax(z).gather(1, y[:, None])[:, 0]
    return -((1 - picked.exp()) ** 2 * picked).mean()


def _clamped(z: Tensor, y: Tensor) -> Tensor:
    e = (z - z.amax(1, keepdim=True).detach()).exp()
    return -(e[torch.arange(len(y)), y] / e.sum(1)).clamp_min(1e-9).log().mean()


CLASSES: dict[str, Loss] = {
    "library": functional.cross_entropy,
    "by hand": lambda z, y: -_log_softmax(z)[torch.arange(len(y)), y].sum(),
    "focal": _focal,
    "clamped": _clamped,
    "weighted": lambda z, y: functional.cross_entropy(z, y, weight=torch.tensor([1.0, 3.0, 0.2])[: z.shape[1]]),
    "masked": lambda z, y: functional.cross_entropy(z[5:], y[5:]),
}


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("spread", [0.0, 2.0])
def test_classes_are_read_off_the_gradient(name: str, classes: int, spread: float) -> None:
    """The class that a cross-entropy wants, and the logarithm of its probability, in whatever form it is written."""
    torch.manual_seed(0)
    z, y = spread * torch.randn(64, classes), torch.randint(classes, (64,))
    read = _read(z, CLASSES[name], y)
    assert read is not None
    assert read.kind == "classes"
    assert read.targets[:, 0].tolist() == y[read.rows].tolist()
    likely = z.double().log_softmax(1).gather(1, y[:, None])[read.rows, 0]
    assert np.allclose(read.predictions[:, 0], likely, atol=1e-5)


@pytest.mark.parametrize("shown", ["softmax", "log_softmax"])
def test_probabilities_are_read_like_logits(shown: str) -> None:
    """A model may end with its softmax, or the logarithm of it, and the loss take it from there."""
    torch.manual_seed(0)
    z, y = torch.randn(64, 4), torch.randint(4, (64,))
    p = z.softmax(1) if shown == "softmax" else z.log_softmax(1)
    loss = (lambda q, t: -q.log().gather(1, t[:, None]).mean()) if shown == "softmax" else functional.nll_loss
    read = _read(p, loss, y)
    assert read is not None
    assert read.targets[:, 0].tolist() == y.tolist()


BINARY: dict[str, Loss] = {
    "library": functional.binary_cross_entropy_with_logits,
    "by hand": lambda z, y: -(y * functional.logsigmoid(z) + (1 - y) * functional.logsigmoid(-z)).sum(),
    "weighted": lambda z, y: functional.binary_cross_entropy_with_logits(z, y, pos_weight=torch.tensor(4.0)),
}


@pytest.mark.parametrize("name", BINARY)
@pytest.mark.parametrize("outputs", [1, 5])
def test_binary_targets_are_read_off_the_gradient(name: str, outputs: int) -> None:
    """Each entry is pulled to the side of its target, by its distance from there."""
    torch.manual_seed(0)
    z, y = 2 * torch.randn(64, outputs), torch.randint(2, (64, outputs)).float()
    read = _read(z, BINARY[name], y)
    assert read is not None
    assert read.kind == "binary"
    assert read.targets.tolist() == y.tolist()
    assert np.allclose(read.predictions, z.double().sigmoid(), atol=1e-6)


OTHERS: dict[str, Loss] = {
    "squared": lambda z, y: (z - y[:, None]).square().mean(),
    "absolute": lambda z, y: (z - y[:, None] + 0.5).abs().mean(),
    "returns": lambda z, y: -(z.log_softmax(1).gather(1, y[:, None])[:, 0] * torch.rand(len(y)) * 9).mean(),
    "advantages": lambda z, y: -(z.log_softmax(1).gather(1, y[:, None])[:, 0] * torch.randn(len(y))).mean(),
    "chosen action": lambda z, y: (z.gather(1, y[:, None])[:, 0] - 1).square().mean(),
    "robust": lambda z, y: (1.0 - z.softmax(1).gather(1, y[:, None])[:, 0] ** 0.7).mean() / 0.7,
    "mean absolute": lambda z, y: (1.0 - z.softmax(1).gather(1, y[:, None])[:, 0]).mean(),
    "ranks": lambda z, _y: functional.softplus(z[:, :1] - z[:, 1:]).mean() + z.square().mean(),
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("spread", [0.1, 2.0])
def test_other_losses_are_not_taken_for_a_cross_entropy(name: str, spread: float) -> None:
    """Distances, what a policy's returns multiply, values of chosen actions and comparisons tell no class.

    Nor does what gives up unlikely labels: the cross-entropy may rise while it falls.
    """
    torch.manual_seed(0)
    read = _read(spread * torch.randn(64, 3), OTHERS[name], torch.randint(3, (64,)))
    assert read is None


@pytest.mark.parametrize("classes", [1, 2, 4, 10])
@pytest.mark.parametrize("spread", [2.0, 40.0, 3000.0])
@pytest.mark.parametrize("favourite", [0.0, 2.0, 20.0])
def test_a_missing_sign_tells_no_targets(classes: int, spread: float, favourite: float) -> None:
    """Driven from its target an answer looks drawn to its likeliest other class, which no sample was of."""
    torch.manual_seed(0)
    y = torch.randint(max(classes, 2), (64,))
    named = functional.one_hot(y, max(classes, 2)).float()[:, :classes]
    z = spread * (torch.randn(64, classes) + favourite * (classes > 1) * torch.eye(classes)[-1] - 3 * named)
    loss = functional.binary_cross_entropy_with_logits if classes == 1 else functional.cross_entropy
    wanted = named if classes == 1 else y
    assert _read(z, lambda answers, _: -loss(answers, wanted), y) is None


@pytest.mark.parametrize("seed", range(20))
def test_weights_of_groups_do_not_turn_the_sign(seed: int) -> None:
    """What is drawn to one of two classes is driven from the other: sure answers with weights by group tell neither."""
    torch.manual_seed(seed)
    y, weight = torch.randint(2, (256,)), torch.rand(4)[torch.randint(4, (256,))]
    z = torch.where(y[:, None] == torch.arange(2), 2.0, -2.0) + torch.randn(256, 2)
    z.requires_grad_()
    (weight * functional.cross_entropy(z, y, reduction="none")).sum().backward()
    answers, gradients = (np.asarray(part.detach(), dtype=np.float64) for part in (z, z.grad))
    assert meant(answers, -gradients, turned=True) is None
    assert meant(answers, gradients / np.asarray(weight, dtype=np.float64)[:, None]) is not None


@pytest.mark.parametrize("classes", [1, 2, 4])
def test_those_that_are_left_are_no_sample_of_all(classes: int) -> None:
    """Answers that are sure and right have no gradient; of the others alone no statement on all targets is made."""
    torch.manual_seed(0)
    y = torch.randint(max(classes, 2), (64,))
    named = functional.one_hot(y, max(classes, 2)).float()[:, -classes:]
    z = torch.where((y == 0)[:, None], 60.0 * (named - (classes == 1) * (1 - named)) * 2, torch.randn(64, classes))
    loss = functional.binary_cross_entropy_with_logits if classes == 1 else functional.cross_entropy
    wanted = named if classes == 1 else y
    assert _read(z, lambda answers, _: loss(answers, wanted), y) is None
    masked = _read(z, lambda answers, _: loss(answers[y > 0], wanted[y > 0]), y)
    assert masked is None, "a mask over sure answers looks the same"
    unsure = _read(0.01 * z, lambda answers, _: loss(answers[y > 0], wanted[y > 0]), y)
    assert classes == 1 or unsure is not None


@pytest.mark.parametrize("written", ["library", "focal", "clamped"])
@pytest.mark.parametrize("kept", [True, False])
def test_a_loss_written_out_tells_as_much_as_the_library(written: str, kept: bool) -> None:
    """Inputs, targets and the level of a constant prediction are read however the loss is written, in a function too."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    optimizer, writer = torch.optim.Adam(model.parameters(), 1e-2), MemoryWriter()
    x = torch.randn(256, 6)
    y = x[:, :3].argmax(1)

    def loss_of(rows: Tensor) -> Tensor:
        return CLASSES[written](model(x[rows]), y[rows])  # nobody holds the answers any more when it returns

    with Exporter(model, backends=[writer], verbose=0) as exporter:
        exporter.watch()
        for step in range(12):
            rows = torch.arange(32) + 8 * step
            optimizer.zero_grad()
            if kept:
                out = model(x[rows])
                CLASSES[written](out, y[rows]).backward()
            else:
                loss_of(rows).backward()
            optimizer.step()
    seen = [record.fact("loss.over_constant", "2") for record in writer.records]
    level = [value for value in seen if value is not None]
    assert len(level) >= 10
    assert 0.5 < float(level[0]) < 2.0
    assert any(record.fact("input.rms", "0") is not None for record in writer.records)
    assert any(record.fact("target.dependence", "2") is not None for record in writer.records)


class _Pooled(nn.Module):
    """A model that takes a mean before its last layer, over a dimension of its choice."""

    def __init__(self, over: int) -> None:
        super().__init__()
        self.read, self.say, self.over = nn.Linear(6, 16), nn.Linear(16, 2), over

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.read(x))
        return self.say(h.mean(self.over, keepdim=True).expand_as(h))


def _watched(model: nn.Module, loss: Loss, steps: int = 60) -> tuple[Exporter, MemoryWriter]:
    torch.manual_seed(0)
    optimizer, writer = torch.optim.Adam(model.parameters(), 1e-2), MemoryWriter()
    x = torch.randn(256, 6)
    with Exporter(model, backends=[writer], verbose=0, budget=None) as exporter:
        exporter.watch()
        for _ in range(steps):
            rows = torch.randint(256, (32,))
            optimizer.zero_grad()
            loss(model(x[rows]), x[rows].sin()[:, :2]).backward()
            optimizer.step()
    return exporter, writer


@pytest.mark.parametrize("over", [0, 1])
def test_one_answer_for_all_samples_is_found_whatever_the_loss(over: int) -> None:
    """A mean over the batch makes all samples one; a mean over features does not."""
    torch.manual_seed(0)
    exporter, _ = _watched(_Pooled(over), lambda z, y: (z - y).cosh().log().mean())
    found = [issue for issue in exporter.issues if issue.issue_type is IssueType.NOT_LEARNING]
    assert bool(found) == (over == 0)


@pytest.mark.parametrize("averaged", [True, False])
def test_targets_averaged_over_the_batch_are_found(averaged: bool) -> None:
    """One number for all samples of a batch, and another in each batch, is no target."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))

    def loss(z: Tensor, y: Tensor) -> Tensor:
        return functional.mse_loss(z, y.mean(0, keepdim=True).expand_as(y) if averaged else y)

    exporter, _ = _watched(model, loss, 70)
    found = [issue for issue in exporter.issues if issue.issue_type is IssueType.WRONG_LOSS]
    assert bool(found) == averaged


class _Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.body, x, use_reentrant=False)
        return out


def test_inputs_are_what_the_model_was_given_where_no_layer_keeps_them() -> None:
    """What a checkpoint does not keep was an argument of the model; its size is no business of the first layer."""
    _, writer = _watched(_Checkpointed(), functional.mse_loss, 12)
    told = [record for record in writer.records if record.facts.get("target.dependence")]
    assert told
    assert not any(record.facts.get("input.rms") for record in writer.records)


def _one(z: Tensor) -> Tensor:
    return functional.binary_cross_entropy_with_logits(z, torch.ones_like(z))


def _zero(z: Tensor) -> Tensor:
    return functional.binary_cross_entropy_with_logits(z, torch.zeros_like(z))


def _losses(form: str, critic: nn.Module, x: Tensor, z: Tensor, step: int) -> list[Tensor]:
    """Return the losses of one step, each for a backward pass of its own."""
    up, down = lambda c: functional.softplus(-critic(c)).mean(), lambda c: functional.softplus(critic(c)).mean()
    calls = [*map(up, x.chunk(5)), *map(down, z.chunk(5))] if form.startswith("many") else []
    if form == "some rows are known":
        whole = critic(torch.cat([x, z]))
        return [_one(whole[: len(x)]) + functional.relu(1 + whole[len(x) :]).mean()]
    if form == "many that are known":
        return [*(_one(critic(c)) for c in x.chunk(5)), *(_zero(critic(c)) for c in z.chunk(5))]
    return {
        "one loss": lambda: [up(x) + down(z)],
        "logarithms": lambda: [-functional.logsigmoid(critic(x)).mean() - functional.logsigmoid(-critic(z)).mean()],
        "two losses": lambda: [up(x), down(z)],
        "in turns": lambda: [down(z) if step % 2 else up(x)],
        "many calls": lambda: [torch.stack(calls).sum()],
        "many losses": lambda: calls,
        "one of two is known": lambda: [down(z) if step % 2 else _one(critic(x))],
    }[form]()


CRITICS = ["one loss", "logarithms", "two losses", "in turns", "many calls", "many losses", "many that are known"]
CRITICS += ["one of two is known", "some rows are known"]


@pytest.mark.parametrize(("form", "seed"), [(form, number % 2) for number, form in enumerate(CRITICS)])
def test_samples_that_a_critic_tells_from_noise_are_no_equal_targets(form: str, seed: int) -> None:
    """Data may be read off their gradient and noise, whose answers are all alike, not: it is pulled the other way."""
    torch.manual_seed(seed)
    critic = nn.Sequential(nn.Linear(2, 24), nn.LeakyReLU(), nn.Linear(24, 1))
    optimizer, writer = torch.optim.Adam(critic.parameters(), 2e-3), MemoryWriter()
    with Exporter(critic, backends=[writer], verbose=0, budget=None).watch() as exporter:
        for step in range(130):
            optimizer.zero_grad()
            for loss in _losses(form, critic, 3 * torch.randn(80, 2), 0.006 * torch.randn(80, 2), step):
                loss.backward()
            optimizer.step()
    assert IssueType.BAD_TARGETS not in {issue.issue_type for issue in exporter.issues}


@pytest.mark.parametrize("wanted", [0.0, 1.0])
def test_equal_targets_are_told_though_nothing_says_so_but_the_gradient(wanted: float) -> None:
    """Where all answers are pulled one way, those that are read tell of the others."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))
    exporter, _ = _watched(model, lambda z, _: functional.softplus((1 - 2 * wanted) * z).mean())
    assert (IssueType.BAD_TARGETS, "constant") in {(issue.issue_type, issue.cause) for issue in exporter.issues}
