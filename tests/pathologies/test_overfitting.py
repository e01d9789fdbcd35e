"""Losses of evaluation that rise while those of training fall are told; evaluations that only scatter, or rest, are not."""

import copy

import pytest
import torch
from torch import nn

from gradflow_export import Exporter, IssueType, MemoryWriter

SEEDS = pytest.mark.parametrize("seed", range(1))


def network(outputs=3, dropout=0.0, width=64):
    return nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Dropout(dropout), nn.Linear(width, outputs))


def classes(count, flipped=0.0):
    """Return samples of three classes, some of them with a label that is wrong."""
    x = torch.randn(count, 6)
    y = x[:, :3].argmax(1)
    return x, torch.where(torch.rand(count) < flipped, torch.randint(0, 3, (count,)), y)


def told(model, batch, evaluate, steps=200, every=10, lr=0.02, loss=nn.functional.cross_entropy, decay=0.0):
    """Train with Adam, evaluate now and then; return the issues of overfitting."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=decay)
    with Exporter(model, backends=[MemoryWriter()], strict=True, synchronous=True, verbose=0).watch() as exporter:
        for step in range(steps):
            x, y = batch(step)
            optimizer.zero_grad()
            loss(model(x), y).backward()
            optimizer.step()
            if step % every == every - 1:
                model.eval()
                with torch.no_grad():
                    evaluate(model)
                model.train()
    return [issue for issue in exporter.issues if issue.issue_type is IssueType.OVERFITTING]


def of_few(flipped=0.25, count=48):
    """Return what draws batches of a few samples."""
    x, y = classes(count, flipped)

    def batch(_step):
        rows = torch.randint(0, count, (16,))
        return x[rows], y[rows]

    return batch


def on(x, y, loss=None, size=100):
    """Return an evaluation of all of these samples, in batches, by a loss module."""
    loss = loss or nn.CrossEntropyLoss()
    return lambda model: [loss(model(x[i : i + size]), y[i : i + size]) for i in range(0, len(x), size)]


@SEEDS
def test_samples_learned_by_heart_are_overfitting(seed):
    """The issue is of MEDIUM, names the best step, and says by how much it is worse now."""
    torch.manual_seed(seed)
    (issue,) = told(network(), of_few(), on(*classes(200)))
    assert issue.severity.name == "MEDIUM"
    assert issue.layers == ("",)
    assert issue.step < 150
    assert issue.value > 1.25


class WithLoss(nn.Module):
    """Gives out its own loss beside the scores, as language models do."""

    def __init__(self):
        super().__init__()
        self.body = network()

    def forward(self, x, y):
        """Return both by name."""
        scores = self.body(x)
        return {"scores": scores, "loss": nn.functional.cross_entropy(scores, y)}


@SEEDS
def test_a_model_that_gives_out_its_loss_needs_no_loss_module(seed):
    """The loss is found by training's own backward call, divided or not, whatever its name."""
    torch.manual_seed(seed)
    model, batch, (x_test, y_test) = WithLoss(), of_few(), classes(200)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    with Exporter(model, backends=[MemoryWriter()], strict=True, synchronous=True, verbose=0).watch() as exporter:
        for step in range(250):
            optimizer.zero_grad()
            for _ in range(2):
                (model(*batch(step))["loss"] / 2).backward()
            optimizer.step()
            if step % 10 == 9:
                with torch.inference_mode():
                    model(x_test, y_test)
    assert kinds(exporter) == [("OVERFITTING", "MEDIUM")]


@SEEDS
@pytest.mark.parametrize("number", [float, lambda loss: loss], ids=["number", "tensor"])
def test_a_loss_that_is_handed_over_counts(seed, number):
    """What is handed over counts alone; what cannot be a loss is left out."""
    torch.manual_seed(seed)
    model, batch, (x_test, y_test) = network(), of_few(), classes(200)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    with Exporter(model, backends=[MemoryWriter()], strict=True, synchronous=True, verbose=0).watch() as exporter:
        for step in range(250):
            x, y = batch(step)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            if step % 10 == 9:
                with torch.no_grad():
                    exporter.observe(validation_loss=number(nn.functional.cross_entropy(model(x_test), y_test)))
                exporter.observe(validation_loss="low")
    assert kinds(exporter) == [("OVERFITTING", "MEDIUM")]


def kinds(exporter):
    """Return types and severities of the issues of overfitting."""
    found = [issue for issue in exporter.issues if issue.issue_type is IssueType.OVERFITTING]
    return [(str(issue.issue_type), issue.severity.name) for issue in found]


@SEEDS
def test_noise_of_numbers_learned_by_heart_is_overfitting(seed):
    """The same with numbers for targets."""
    torch.manual_seed(seed)
    x, x_test = torch.randn(40, 6), torch.randn(200, 6)
    y, y_test = (t[:, :1] + torch.randn(len(t), 1) for t in (x, x_test))
    evaluate, model = on(x_test, y_test, nn.MSELoss()), network(1, width=128)
    assert len(told(model, lambda _: (x, y), evaluate, loss=nn.MSELoss(), lr=0.003, steps=400)) == 1


@SEEDS
def test_an_evaluation_that_came_to_rest_is_none(seed):
    """More data than the model can learn by heart: the loss of evaluation falls, and stays."""
    torch.manual_seed(seed)
    assert told(network(), lambda _: classes(32), on(*classes(100))) == []


@SEEDS
def test_a_small_evaluation_scatters(seed):
    """Eight other samples at each evaluation say little, and no more is made of it."""
    torch.manual_seed(seed)
    criterion = nn.CrossEntropyLoss()

    def redrawn(model):
        on(*classes(8, 0.3), criterion)(model)

    assert told(network(), lambda _: classes(32, 0.3), redrawn, every=5) == []


@SEEDS
def test_dropout_that_keeps_the_evaluation_flat_is_none(seed):
    """Dropout and decay of the weights hold the evaluation near its best, with the training loss above it."""
    torch.manual_seed(seed)
    assert told(network(dropout=0.5), of_few(0.0, 400), on(*classes(200)), decay=0.1) == []


@SEEDS
def test_what_was_never_gained_is_a_note(seed):
    """An evaluation on wrong labels grows worse from the start: nothing that was learned is lost."""
    torch.manual_seed(seed)
    issues = told(network(), lambda _: classes(32), on(*classes(200, 1.0)), lr=0.002)
    assert all(issue.severity.name == "LOW" for issue in issues)


@SEEDS
def test_the_same_few_samples_say_little(seed):
    """Eight samples at each evaluation, always the same: a few that are wrong make their mean rise."""
    torch.manual_seed(seed)
    assert told(network(), of_few(0.1, 150), on(*classes(8, 0.3))) == []


@SEEDS
def test_training_data_are_no_evaluation(seed):
    """What is evaluated is what is trained on, as some programs do to print both."""
    torch.manual_seed(seed)
    x, y = classes(48, 0.3)
    assert told(network(), lambda _: (x, y), on(x, y)) == []


@SEEDS
def test_weights_that_begin_again_for_another_fold_are_none(seed):
    """Three folds with one model: its first weights and a new evaluation every hundred steps."""
    torch.manual_seed(seed)
    model = network()
    first, folds = copy.deepcopy(model.state_dict()), [(classes(300), classes(100)) for _ in range(3)]

    def batch(step):
        if step % 100 == 0:
            model.load_state_dict(first)
        rows = torch.randint(0, 300, (32,))
        return tuple(part[rows] for part in folds[step // 100][0])

    turn = iter([on(*test, nn.CrossEntropyLoss()) for _, test in folds for _ in range(20)])

    def evaluate(model):
        next(turn)(model)

    assert told(model, batch, evaluate, every=5, steps=300) == []


@SEEDS
def test_of_several_loss_modules_none_counts(seed):
    """Which of them is the loss, nobody knows."""
    torch.manual_seed(seed)
    x, y = classes(200)
    evaluations = [on(x, y, loss) for loss in (nn.CrossEntropyLoss(), nn.MultiMarginLoss())]

    def evaluate(model):
        for each in evaluations:
            each(model)

    assert told(network(), of_few(), evaluate) == []


@SEEDS
def test_a_short_rise_is_none(seed):
    """The loss of evaluation rises over three evaluations, and falls again."""
    torch.manual_seed(seed)
    x, y = classes(200)
    far = iter([0.0] * 10 + [1.0, 2.0, 1.0] + [0.0] * 17)
    evaluate = on(x, y)
    assert told(network(), lambda _: classes(32), lambda m: evaluate(m if next(far) == 0 else worse(m))) == []


def worse(model):
    """Return a copy with noise in its last weights."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        other[-1].weight.add_(torch.randn_like(other[-1].weight))
    return other


@SEEDS
def test_a_mean_of_weights_is_none(seed):
    """What is evaluated is a mean of the weights, as another model; the watched one is not called for it."""
    torch.manual_seed(seed)
    model = network()
    mean = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.95))
    test = classes(200)

    def evaluate(_model):
        mean.update_parameters(model)
        on(*test)(mean)

    assert told(model, of_few(0.0, 500), evaluate) == []


@SEEDS
def test_both_losses_that_rise_are_none(seed):
    """Steps that grow too large raise the training loss too: that is another fault."""
    torch.manual_seed(seed)
    x, y = classes(200)
    assert told(network(), lambda step: classes(32, min(step / 300, 1.0)), on(x, y)) == []
