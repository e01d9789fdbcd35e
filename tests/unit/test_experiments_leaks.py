"""Treatments that take answers away from a model, and the scaled loss of half precision."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from gradflow_export.checks.leakage import SeenAnswers
from gradflow_export.experiments.facts import Facts
from gradflow_export.experiments.mending.leaks import HiddenTargets, NothingLater, ScaledLoss
from gradflow_export.experiments.treatments import EXACT, MENDED, find, of_kind
from gradflow_export.experiments.watched import accused
from gradflow_export.records.issues import IssueType


@pytest.mark.parametrize("shape", [(32, 6), (32, 5, 6)])
def test_the_column_that_is_the_target_is_hidden_and_no_other(shape):
    """One that is it in the first batch alone by chance is given back; the script's own table is not written to."""
    change, model = HiddenTargets(), nn.Linear(6, 1)
    for step in range(3):
        x, y = torch.randn(shape), torch.randn(32)
        last = x if x.dim() == 2 else x[:, -1]
        last[:, 3] = 2 * y + 1
        if step == 0:
            last[:, 0] = -y
        kept = x.clone()
        (given,), _ = change.called(model, (x,), {})
        output = model(given if given.dim() == 2 else given[:, -1])
        change.function("mse_loss", (output, y[:, None]), {})
        change.function("__sub__", (x, x.mean(0)), {})
        change.after_step(None)
        assert torch.equal(x, kept)
    hidden = (given != x).flatten(0, -2).any(0).tolist()
    assert (change.acted, hidden) == (True, [False, False, False, True, False, False])


def test_a_second_target_that_is_no_column_gives_none_back():
    """Targets of one step are taken together: each may stand in a column of its own."""
    change, model = HiddenTargets(), nn.Linear(4, 1)
    for _ in range(2):
        x = torch.randn(16, 4)
        y = x[:, 2].clone()
        (given,), _ = change.called(model, (x,), {})
        for target in (y, torch.randn(16), torch.ones(16)):
            change.function("mse_loss", (model(given)[:, 0], target), {})
        change.after_step(None)
    assert (given != x).any(0).tolist() == [False, False, True, False]


@pytest.mark.parametrize("way", ["fused", "by hand", "module", "masked the wrong way"])
def test_no_word_depends_on_a_later_one(way):
    """Attention of words to themselves, however it is written."""
    change, words = NothingLater(), torch.randint(9, (2, 6))
    change.called(nn.Identity(), (words,), {})
    x = torch.randn(2, 6, 8, requires_grad=True)
    if way == "by hand":
        (scores, *_), _ = change.function("softmax", (x @ x.mT, -1), {})
        out = scores.softmax(-1) @ x
    else:
        mask = {"module": torch.zeros(6, 6), "masked the wrong way": torch.ones(6, 6).triu(1).bool()}.get(way)
        args, kwargs = change.function("scaled_dot_product_attention", (x, x, x, mask), {})
        out = functional.scaled_dot_product_attention(*args, **kwargs)
    out[:, 2].sum().backward()
    assert change.acted
    assert bool(out.isfinite().all())
    assert x.grad.abs().amax((0, 2)).gt(0).tolist()[2:] == [True, False, False, False]


def test_attention_that_is_causal_or_not_over_words_is_left_alone():
    """Images, another sequence, a mask that is there."""
    change = NothingLater()
    change.called(nn.Identity(), (torch.randint(9, (2, 6)),), {})
    x, y = torch.randn(2, 6, 8), torch.randn(2, 5, 8)
    for args, kwargs in (((x, x, x), {"is_causal": True}), ((x, y, y), {}), ((y, y, y), {})):
        assert change.function("scaled_dot_product_attention", args, kwargs) == (args, kwargs)
    assert not change.acted


def test_gradients_below_the_grid_of_half_precision_arrive_when_the_loss_is_scaled():
    """They are those of single precision, are added to what was there, and a pass that overflows counts for nothing."""
    torch.manual_seed(0)
    model, x = nn.Linear(4, 4), torch.randn(64, 4)
    change, facts = ScaledLoss(), Facts()

    def backward(factor: float) -> None:
        with torch.autocast("cpu", torch.float16):
            output = facts.left(model, model(x))
        loss = output.float().square().mean() * factor
        args, kwargs = change.function("backward", (loss,), {})
        change.before_backward(loss)
        args[0].backward(*args[1:], **kwargs)
        change.after_backward()

    backward(1e-7)
    once = model.weight.grad.clone()
    true = torch.autograd.grad(model(x).square().mean(), model.weight)[0] * 1e-7
    torch.testing.assert_close(once, true, rtol=0.05, atol=1e-10)
    backward(1e4)
    torch.testing.assert_close(model.weight.grad, once, rtol=0, atol=0)
    backward(1e-7)
    torch.testing.assert_close(model.weight.grad, 2 * once, rtol=0.05, atol=1e-10)
    assert facts.half == 3
    assert find("a scaled loss") not in of_kind(EXACT, {**Facts().told(), "half": 0})


def test_leaked_answers_are_proved_by_structure():
    """Their treatments are meant for their findings alone."""
    assert accused([("LEAKAGE", ""), ("UNDERFLOW", "")]) == {IssueType.LEAKAGE, IssueType.UNDERFLOW}
    leaked = [each.name for each in MENDED if each.meant([("LEAKAGE", "the target is among the inputs")])]
    ahead = [each.name for each in MENDED if each.meant([("BAD_TARGETS", "target leakage")])]
    assert leaked == ["no target among the inputs"]
    assert "a causal mask" in ahead
    assert SeenAnswers().raises == (IssueType.BAD_TARGETS,)
