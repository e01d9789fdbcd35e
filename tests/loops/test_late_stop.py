"""Loops that stop stepping in the middle are found; those that have a reason for passes without a step are not."""

import pytest
import torch
from torch import nn

from gradflow_export import Exporter, MemoryWriter

STEPS, AFTER = 40, 60


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))


def loss_of(model, x=None):
    x = torch.randn(16, 4) if x is None else x
    return (model(x) - x[:, :1].detach().sin()).square().mean()


def by_hand(model):
    with torch.no_grad():
        for p in model.parameters():
            p.sub_(0.05 * p.grad)


def trained(model, steps, passes=1, hand=False):
    """Take steps of several passes each; return the optimizer."""
    optimizer = None if hand else torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(steps):
        model.zero_grad()
        for _ in range(passes):
            loss_of(model).backward()
        by_hand(model) if hand else optimizer.step()
    return optimizer


def passed(model, passes, clear=True, make=loss_of):
    for _ in range(passes):
        if clear:
            model.zero_grad()
        make(model).backward()


def stops(exporter):
    return [i for i in exporter.issues if i.issue_type == "NOT_TRAINING" and "last optimizer step" in i.message]


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(("hand", "per_step"), [(False, 1), (True, 1), (False, 4)])
def test_a_late_stop_is_found(hand, per_step, zeros):
    """Of every form of loop, dated by the last step, and no step is counted that did not take place."""
    model = net()
    with Exporter(model, backends=[MemoryWriter()], strict=True, synchronous=True).watch() as exporter:
        optimizer = trained(model, STEPS, per_step, hand)
        for _ in range(AFTER):
            model.zero_grad(set_to_none=not zeros) if optimizer is None else optimizer.zero_grad(set_to_none=not zeros)
            loss_of(model).backward()
    (issue,) = stops(exporter)
    assert issue.step == STEPS
    summary = exporter.summary()
    assert summary["steps"] == {"count": STEPS, "first": 1, "last": STEPS}
    assert not summary["verdict"].startswith("healthy")


def test_a_stop_between_two_records_is_found():
    """Steps that are passed by are counted by the optimizer's hooks alone, which hear nothing of one that is missing."""
    model = net()
    with Exporter(model, backends=[MemoryWriter()], strict=True, synchronous=True, every=50).watch() as exporter:
        trained(model, 70)
        assert exporter._loop.quiet.steps.left
        passed(model, 3 * AFTER)
    assert [issue.step for issue in stops(exporter)] == [70]


@pytest.mark.parametrize("every", [1, 50])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("first", [1, 70])
def test_losses_that_are_skipped_are_found(first, value, every):
    """From the first batch on or later, at a step that makes a record or at none; nothing else is said of them."""
    model, scaler = net(), torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with Exporter(model, backends=[MemoryWriter()], strict=True, synchronous=True, every=every).watch() as exporter:
        for step in range(1, first + AFTER):
            optimizer.zero_grad()
            scaler.scale(loss_of(model) * (value if step >= first else 1)).backward()
            scaler.step(optimizer)
            scaler.update()
    found = [(issue.issue_type, issue.step) for issue in exporter.issues if issue.issue_type != "LOSS_SPIKE"]
    assert found == [("NUMERICAL", first)]
    assert exporter.summary()["steps"]["last"] == first - 1


def attacked(model):
    return loss_of(model, torch.randn(16, 4, requires_grad=True))


def evaluated(model, optimizer):
    model.eval()
    passed(model, AFTER)


def with_another(model, optimizer):
    head = nn.Linear(1, 1)
    other = torch.optim.SGD(head.parameters(), lr=0.05)
    for _ in range(AFTER):
        model.zero_grad()
        head(model(torch.randn(16, 4))).square().mean().backward()
        other.step()


def moved(model, optimizer):
    for _ in range(AFTER):
        model.zero_grad()
        loss_of(model).backward()
        by_hand(model)


def searched(model, optimizer):
    def closure():
        lbfgs.zero_grad()
        loss = loss_of(model, x)
        loss.backward()
        return loss

    x = torch.randn(16, 4)
    lbfgs = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=AFTER, tolerance_change=0, tolerance_grad=0)
    lbfgs.step(closure)


def returned(model, optimizer):
    for _ in range(AFTER):
        torch.autograd.grad(loss_of(model), list(model.parameters()))


SOUND = {
    "attacks": lambda m, _: passed(m, AFTER, make=attacked),
    "gradients of inputs alone": lambda m, _: [
        loss_of(m, x).backward(inputs=[x]) for x in torch.randn(AFTER, 16, 4, requires_grad=True).unbind()
    ],
    "evaluation": evaluated,
    "accumulation": lambda m, _: passed(m, AFTER, clear=False),
    "another player": with_another,
    "weights that move": moved,
    "a line search": searched,
    "gradients that are returned": returned,
    "another loss": lambda m, _: passed(m, AFTER, make=lambda model: model(torch.randn(16, 4)).logsumexp(0).sum()),
    "few passes": lambda m, _: passed(m, 15),
}


@pytest.mark.parametrize("what", SOUND)
def test_passes_for_something_else_are_no_stop(what):
    """After training and between its steps."""
    model = net()
    with Exporter(model, backends=[MemoryWriter()], strict=True, synchronous=True).watch() as exporter:
        optimizer = trained(model, STEPS)
        SOUND[what](model, optimizer)
        assert not stops(exporter)
        model.train()
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()
        SOUND[what](model, optimizer)
    assert not stops(exporter)


def test_several_times_the_usual_passes_are_waited_for():
    """A loop that has needed many passes for a step may need more, and one that is paused is not listened to."""
    model = net()
    with Exporter(model, backends=[MemoryWriter()], strict=True, synchronous=True).watch() as exporter:
        trained(model, STEPS, passes=20)
        passed(model, AFTER)
        exporter.pause()
        passed(model, 3 * AFTER)
    assert not stops(exporter)
