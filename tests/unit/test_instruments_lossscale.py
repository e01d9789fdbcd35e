"""Scales and their logarithms: which losses hold them in balance, and which fall without bound."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributions import Normal, kl_divergence
from torch.nn import functional as F

from gradflow_export.autograd_graph.loss_balance import scales_that_fall


@pytest.fixture
def heads():
    out = nn.Linear(4, 6)(torch.randn(8, 4))
    return out.chunk(2, 1)


def falls(loss):
    return scales_that_fall(loss) is not None


def test_gaussian_likelihoods_hold_their_variance_in_balance(heads):
    """Error over variance rises as its logarithm falls; with a sign lost both fall."""
    mean, log_variance = heads
    error = (torch.randn(8, 3) - mean) ** 2
    assert not falls((0.5 * log_variance + 0.5 * error * torch.exp(-log_variance)).mean())
    assert falls((0.5 * log_variance + 0.5 * error * torch.exp(log_variance)).mean())
    sigma = F.softplus(log_variance) + 1e-3
    scaled = (torch.randn(8, 3) - mean) / sigma
    assert not falls((0.5 * scaled**2 + sigma.log()).mean())
    assert falls((0.5 * scaled**2 - sigma.log()).mean())
    assert not falls(-Normal(mean, sigma).log_prob(torch.randn(8, 3)).mean())


def test_divergences_of_autoencoders_hold_their_variance_in_balance(heads):
    """Minus one half, not one half."""
    mean, log_variance = heads
    inner = (1 + log_variance - mean.pow(2) - log_variance.exp()).sum(1).mean()
    assert not falls(-0.5 * inner)
    assert falls(0.5 * inner)
    divergence = kl_divergence(Normal(mean, (0.5 * log_variance).exp()), Normal(0.0, 1.0)).mean()
    assert not falls(divergence)
    assert falls(-divergence)


def test_flows_take_off_the_log_determinant_of_their_way(heads):
    """``z = x exp(s) + t`` with ``-s``, ``z = (x - t) exp(-s)`` with ``+s``."""
    log_scale, shift = heads
    log_scale = 1.5 * log_scale.tanh()
    x = torch.randn(8, 3)
    there = torch.cat([x, x * log_scale.exp() + shift], 1).flip(1)
    back = torch.cat([x, (x - shift) * (-log_scale).exp()], 1)
    total = torch.zeros(8) + log_scale.sum(1)

    def prior(z):
        return -0.5 * z.square().sum(1) - 1.8

    assert not falls(-(prior(there) + total).mean())
    assert falls(-(prior(there) - total).mean())
    assert not falls(-(prior(back) - total).mean())
    assert falls(-(prior(back) + total).mean())


def test_weights_of_several_tasks_are_held_in_balance(heads):
    """``exp(-s) loss + s``, as Kendall, Gal and Cipolla have it."""
    s = nn.Parameter(torch.zeros(2))
    losses = torch.stack([F.mse_loss(heads[0], torch.randn(8, 3)), F.cross_entropy(heads[1], torch.zeros(8).long())])
    assert not falls((torch.exp(-s) * losses + s).sum())
    assert falls((torch.exp(-s) * losses - s).sum())


def test_policies_may_be_moved_either_way(heads):
    """Returns have any sign, and an actor that seeks entropy adds log-probabilities of its own actions."""
    mean, log_sigma = heads
    policy = Normal(mean, log_sigma.exp())
    assert not falls((policy.log_prob(torch.randn(8, 3)) * torch.randn(8, 1)).mean())
    assert not falls(0.1 * policy.log_prob(policy.rsample()).mean())
    assert not falls(-0.01 * policy.entropy().mean())
    assert not falls(-policy.log_prob(torch.randn(8, 3)).sum() * -2.0)


@pytest.mark.parametrize("added", [-0.01, -0.001, 0.01])
def test_a_little_that_is_taken_off_again_leaves_a_scale_in_balance(added):
    """The logarithm stands in the sum with both signs, and no sign alone tells which of them counts."""
    error, log = torch.randn(8, requires_grad=True), torch.randn(8, requires_grad=True)
    held = log.clamp(-6, 6)
    loss = 0.5 * (error**2 * torch.exp(-held)).mean() + 0.5 * held.mean() + added * held.mean()
    assert scales_that_fall(loss) is None
    assert scales_that_fall(0.5 * (error**2 * torch.exp(-held)).mean() - 0.5 * held.mean()) is not None
