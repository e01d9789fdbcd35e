"""Entropy and spread of policies against plain loops, closed forms and torch.distributions."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.distributions import (
    Bernoulli,
    Categorical,
    Independent,
    MultivariateNormal,
    Normal,
    OneHotCategorical,
    TanhTransform,
    TransformedDistribution,
)

from gradflow_export.instruments.policy import PolicyInstrument
from gradflow_export.metrics.policy import discrete_entropy, gaussian_entropy, mean_std


def plain_entropy(rows):
    """Mean over rows of H / ln K over the allowed actions, in plain Python; rows hold probabilities or None."""
    shares = []
    for row in rows:
        allowed = [p for p in row if p is not None]
        if len(allowed) >= 2:
            shares.append(-math.fsum(p * math.log(p) for p in allowed if p > 0) / math.log(len(allowed)))
    return math.fsum(shares) / len(shares) if shares else math.nan


def read(policy, model=None):
    """Return what the instrument gives out for one policy, ``{(metric, site): value}``."""
    tap = PolicyInstrument(model or nn.Linear(1, 1))
    tap.arm(on=True)
    tap.observe(policy)
    return {(i.metric, s): float(v) for i in tap.drain() for s, v in zip(i.sites, i.values, strict=True)}


def test_entropy_of_known_logits():
    """Logits (2, 0 x 7) give 0.788399, uniform ones 1, a one-hot policy 0."""
    assert float(discrete_entropy(torch.tensor([[2.0] + [0.0] * 7]))) == pytest.approx(0.788399, abs=1e-6)
    assert float(discrete_entropy(torch.zeros(3, 5))) == pytest.approx(1.0, abs=1e-6)
    assert float(discrete_entropy(torch.tensor([[0.0, 1000.0]]))) == 0.0


def test_masked_actions_do_not_count():
    """Masks, -inf and huge negative logits all take actions out; rows without a choice are left out."""
    torch.manual_seed(0)
    logits = torch.randn(6, 4)
    mask = torch.tensor([[1, 1, 0, 1], [1, 0, 0, 0], [1, 1, 1, 1], [0, 1, 1, 0], [0, 0, 0, 1], [1, 0, 1, 1]]).bool()
    rows = []
    for values, allowed in zip(logits.double().tolist(), mask.tolist(), strict=True):
        total = math.fsum(math.exp(v) for v, ok in zip(values, allowed, strict=True) if ok)
        rows.append([math.exp(v) / total if ok else None for v, ok in zip(values, allowed, strict=True)])
    expected = plain_entropy(rows)
    assert float(discrete_entropy(logits, mask)) == pytest.approx(expected, abs=1e-6)
    for low in (-math.inf, -1e8, torch.finfo(torch.float32).min):
        assert float(discrete_entropy(logits.masked_fill(~mask, low))) == pytest.approx(expected, abs=1e-6)
    assert math.isnan(float(discrete_entropy(logits[:2], mask[[1, 4]])))


@pytest.mark.parametrize(("std", "nats"), [(0.1, -0.88365), (0.5, 0.72579), (2.0, 2.11209)])
def test_gaussian_entropy_is_that_of_the_textbook(std, nats):
    """ln(2 pi e sigma^2) / 2 per dimension, which may be negative."""
    assert float(gaussian_entropy(torch.full((3, 2), std))) == pytest.approx(nats, abs=1e-5)
    assert float(gaussian_entropy(torch.full((3, 2), std))) == pytest.approx(float(Normal(0, std).entropy()), abs=1e-6)


def test_std_is_a_mean_in_halves_of_the_range():
    """A standard deviation of 1 in a range of width 4 is half of half the range."""
    assert float(mean_std(torch.tensor([0.5, 1.5]))) == 1.0
    assert float(mean_std(torch.tensor([0.5, 1.5]), 4.0)) == 0.5


def test_distributions_say_the_same_as_their_parts():
    """Categorical, one-hot, Gaussian, squashed and joint distributions are read for what they were made of."""
    torch.manual_seed(1)
    logits, std = torch.randn(5, 3), torch.rand(5, 2) + 0.1
    entropy, spread = read({"logits": logits}), read({"std": std})
    assert read(Categorical(logits=logits)) == pytest.approx(entropy)
    assert read(Categorical(probs=logits.softmax(-1))) == pytest.approx(entropy, abs=1e-5)
    assert read({"probs": logits.softmax(-1)}) == pytest.approx(entropy, abs=1e-5)
    assert read(OneHotCategorical(logits=logits)) == pytest.approx(entropy)
    normal = Normal(torch.zeros(5, 2), std)
    assert read(normal) == read(Independent(normal, 1)) == spread
    assert read(TransformedDistribution(Independent(normal, 1), TanhTransform())) == spread
    joint = MultivariateNormal(torch.zeros(5, 2), torch.diag_embed(std.square()))
    assert read(joint) == pytest.approx(spread)
    assert entropy[("policy.entropy", "")] == pytest.approx(
        float(Categorical(logits=logits).entropy().mean()) / math.log(3)
    )


def test_the_layer_a_distribution_comes_from_is_named():
    """Logits name the head that made them, a free standard deviation its parameter, a detached one nothing."""

    class Actor(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.pi = nn.Linear(3, 4), nn.Linear(4, 2)
            self.log_std = nn.Parameter(torch.zeros(2))

    actor = Actor()
    logits = actor.pi(actor.body(torch.randn(5, 3)).tanh())
    assert ("policy.head_entropy", "pi") in read(Categorical(logits=logits), actor)
    assert ("policy.head_std", "log_std") in read(Normal(logits, actor.log_std.exp()), actor)
    assert set(read({"logits": logits.detach()}, actor)) == {("policy.entropy", "")}


def test_heads_are_averaged():
    """Two heads of one step are told apart, and the policy's entropy is their mean."""
    model = nn.ModuleDict({"a": nn.Linear(2, 3), "b": nn.Linear(2, 4)})
    tap = PolicyInstrument(model)
    tap.arm(on=True)
    for head in model.values():
        tap.observe({"logits": 5 * head(torch.randn(6, 2))})
    whole, by_head = tap.drain()
    assert by_head.sites == ("a", "b")
    assert float(whole.values) == pytest.approx(float(by_head.values.mean()))


def test_what_cannot_be_read_is_told_of_once(caplog):
    """An unknown key is answered with the nearest, another kind of object with what is taken; nothing raises."""
    tap = PolicyInstrument(nn.Linear(1, 1))
    for on in (False, True):
        tap.arm(on=on)
        for policy in ({"logit": torch.zeros(2, 2)}, torch.zeros(2), Bernoulli(torch.tensor(0.5)), None):
            tap.observe(policy)
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == 4
    assert "does not know 'logit'; did you mean 'logits'" in texts[0]
    assert all("takes a mapping with logits" in text for text in texts[1:])
    assert tap.drain() == []


def test_nothing_is_read_while_it_is_not_due():
    """Between readings the instrument only looks at names."""
    tap = PolicyInstrument(nn.Linear(1, 1))
    tap.observe({"logits": torch.zeros(2, 2)})
    assert tap.drain() == []
