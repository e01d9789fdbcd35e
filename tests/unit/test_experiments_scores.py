"""Treatments of scores, of rates that differ between groups, and of a limit of the gradient; functions that are ours."""

import pytest
import torch
from torch import nn

from gradflow_export.experiments.interventions import Intervention
from gradflow_export.experiments.mending.rates import KeptToOne, OneRate
from gradflow_export.experiments.mending.scores import ClassesLast, NoClamp, OverKeys, WithinSamples
from gradflow_export.experiments.replaced_functions import ReplacedFunctions


def softmax(change: Intervention, scores: torch.Tensor, *args: int, **kwargs: int) -> torch.Tensor:
    """Return the softmax of scores under a change."""
    args, kwargs = change.function("softmax", (scores, *args), kwargs)
    return torch.softmax(*args, **kwargs)


@pytest.mark.parametrize(("shape", "axis"), [((8, 5), 1), ((8, 5, 1), 1), ((8, 5, 3), 2)])
def test_a_softmax_over_samples_runs_over_the_entries_of_each(shape, axis):
    """By position and by name; other dimensions stay as they are."""
    scores = torch.randn(shape)
    change = WithinSamples()
    assert torch.equal(softmax(change, scores, 1), scores.softmax(1))
    assert not change.acted
    assert torch.equal(softmax(change, scores, 0), scores.softmax(axis))
    assert torch.equal(softmax(change, scores, dim=-len(shape)), scores.softmax(axis))
    assert change.acted


def test_a_softmax_over_queries_runs_over_keys_and_one_over_positions_stays():
    """A single score for each position has no keys."""
    scores, pooled = torch.randn(4, 6, 7), torch.randn(4, 6, 1)
    change = OverKeys()
    assert torch.equal(softmax(change, pooled, 1), pooled.softmax(1))
    assert not change.acted
    assert torch.equal(softmax(change, scores, dim=1), scores.softmax(-1))
    assert torch.equal(softmax(change, scores, -2), scores.softmax(-1))
    assert change.acted


@pytest.mark.parametrize("shape", [(-1, 3), (128, 3), ((-1, 3),)])
def test_a_table_of_classes_is_made_with_the_classes_last(shape):
    """Each row is one position; what is not flattened to classes is left alone."""
    logits = torch.randn(2, 3, 8, 8, requires_grad=True)
    change = ClassesLast()
    args, _ = change.function("view", (logits, -1, 8), {})
    assert args[0] is logits
    assert not change.acted
    args, _ = change.function("view", (logits, *shape), {})
    assert torch.equal(args[0].view(*args[1:]), logits.permute(0, 2, 3, 1).reshape(-1, 3))
    assert change.acted


def test_clamped_scores_become_probabilities_within_the_same_bounds():
    """Other bounds, and what has no gradient, are left alone."""
    scores = torch.tensor([-3.0, 0.4, 3.0], requires_grad=True)
    change = NoClamp()
    for bounds, given in (((-5, 5), scores), ((0, None), scores), ((0, 1), scores.detach())):
        plain = given.clamp(*bounds)
        assert change.result("clamp", (given, *bounds), {}, plain) is plain
    assert not change.acted
    made = change.result("clamp", (scores,), {"min": 0.001, "max": 0.999}, scores.clamp(0.001, 0.999))
    assert torch.allclose(made, 0.001 + 0.998 * scores.sigmoid())
    made.sum().backward()
    assert bool((scores.grad > 0).all())


def test_all_groups_get_the_greatest_rate_for_a_step():
    """Afterwards each has its own again."""
    one, other = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([{"params": [one], "lr": 1e-6}, {"params": [other], "lr": 0.5}], lr=0.1)
    change = OneRate()
    change.before_step(optimizer)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.5]
    change.after_step(optimizer)
    assert [group["lr"] for group in optimizer.param_groups] == [1e-6, 0.5]
    assert change.acted


def test_a_tight_limit_of_the_gradient_becomes_one_of_one():
    """The script has its own gradient again after the step."""
    layer = nn.Linear(3, 1, bias=False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    change = KeptToOne()
    change.root(layer)
    (100 * layer(torch.ones(1, 3))).sum().backward()
    change.after_backward()
    nn.utils.clip_grad_norm_(layer.parameters(), 1e-3)
    change.before_step(optimizer)
    assert float(layer.weight.grad.norm()) == pytest.approx(1.0, rel=1e-4)
    change.after_step(optimizer)
    assert float(layer.weight.grad.norm()) == pytest.approx(1e-3, rel=1e-4)
    assert change.acted


def test_replaced_contexts_keep_name_and_source_so_that_torchscript_compiles_them(monkeypatch):
    """It reads the source of no_grad() where a script imports torch.distributed.optim after the doctor has begun."""
    functions = ReplacedFunctions(list, lambda: False)
    for owner, name in ((torch.no_grad, "__enter__"), (torch.set_grad_enabled, "__init__")):
        plain = vars(owner)[name]
        made = {"__enter__": functions._entered, "__init__": functions._switched}[name](plain)
        assert (made.__name__, made.__wrapped__) == (name, plain)
        monkeypatch.setattr(owner, name, made)

    def doubled(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return x * 2

    assert torch.jit.script(doubled)(torch.ones(1)).item() == 2.0
