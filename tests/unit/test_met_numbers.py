"""Targets of losses that nobody knows by their form: what stands beside the answers, and what these are drawn to."""

import math

import numpy as np
import pytest
import torch
from torch import distributions, nn
from torch.nn import functional

from gradflow_export.autograd_graph.loss_graph import terms_of
from gradflow_export.autograd_graph.met_numbers import MOST_ENTRIES, met_numbers
from gradflow_export.metrics.answers import pulled


def _pinball(o, y):
    return torch.maximum(0.9 * (y - o), -0.1 * (y - o)).mean()


def _weibull(o, y):
    shape, scale = functional.softplus(o[:, :1]) + 0.1, functional.softplus(o[:, 1:]) + 0.1
    return -distributions.Weibull(scale, shape).log_prob(y.exp()).mean()


def _mixture(o, y):
    weight, mean, spread = o.chunk(3, 1)
    parts = distributions.Normal(mean, spread.exp()).log_prob(y)
    return -torch.logsumexp(weight.log_softmax(1) + parts, 1).mean()


IN_UNIT = {
    "logarithm of cosh": (1, lambda o, y: torch.log(torch.cosh(o - y)).mean()),
    "cosh by softplus": (1, lambda o, y: ((o - y) + functional.softplus(-2 * (o - y)) - math.log(2)).mean()),
    "turned round": (1, lambda o, y: torch.cosh(0.5 * (y - o)).mean()),
    "quantile": (1, _pinball),
    "Gaussian, library": (2, lambda o, y: functional.gaussian_nll_loss(o[:, :1], y, o[:, 1:].exp())),
    "Gaussian, logarithm of variance": (
        2, lambda o, y: (o[:, 1:] + (y - o[:, :1]) ** 2 * torch.exp(-o[:, 1:])).mean(),
    ),
    "Laplace": (2, lambda o, y: -distributions.Laplace(o[:, :1], o[:, 1:].exp()).log_prob(y).mean()),
    "Cauchy": (2, lambda o, y: -distributions.StudentT(1.0, o[..., :1], o[..., 1:].exp()).log_prob(y).mean()),
    "no one's": (1, lambda o, y: ((o - y).abs() + 0.1).log().add(0.1 * (o - y) ** 2).mean()),
    "of a column": (1, lambda o, y: torch.sqrt((o.squeeze(1) - y.squeeze(1)) ** 2 + 1e-3).mean()),
    "of the last step": (1, lambda o, y: (o.view(64, 1, 1)[:, -1] - y).cosh().log().mean()),
    "of positive answers": (1, lambda o, y: (functional.softplus(o) - y).cosh().log().mean()),
    "every second": (2, lambda o, y: (o[:, ::2] - y).cosh().log().mean() + o[:, 1].exp().mean()),
    "the last, unbound": (3, lambda o, y: (o.unbind(1)[-1] - y[:, 0]).cosh().log().mean()),
    "from the end": (3, lambda o, y: (o.transpose(0, 1)[-1:].t() - y).cosh().log().mean()),
    "sizes": (3, lambda o, y: (o.split([2, 1], 1)[1] - y).cosh().log().mean()),
    "mixture": (6, _mixture),
}  # fmt: skip
IN_ANOTHER = {
    "Poisson, library": (1, 1, lambda o, y: functional.poisson_nll_loss(o, y.exp().round())),
    "Poisson, by hand": (1, 1, lambda o, y: (o.exp() - y.exp().round() * o).sum()),
    "Poisson, rates": (
        1, 1, lambda o, y: -distributions.Poisson(functional.softplus(o)).log_prob(y.exp().round()).mean(),
    ),
    "negative binomial": (
        2, 1, lambda o, y: -distributions.NegativeBinomial(o[:, 1:].exp(), logits=o[:, :1]).log_prob(
            y.exp().round()
        ).mean(),
    ),
    "gamma": (1, 1, lambda o, y: (o + y.exp() * torch.exp(-o)).mean()),
    "exponential": (1, -1, lambda o, y: -distributions.Exponential(o.exp()).log_prob(y.exp()).mean()),
    "Weibull": (2, 1, _weibull),
    "correlation": (
        1, 1, lambda o, y: 1 - functional.cosine_similarity((o - o.mean()).squeeze(1), (y - y.mean()).squeeze(1), 0),
    ),
    "hinge": (1, 1, lambda o, y: functional.relu(1 - y.sign() * o).mean()),
    "divergence": (
        2, 1, lambda o, y: functional.kl_div(
            o.log_softmax(1), torch.cat([-y, y], 1).softmax(1), reduction="batchmean"
        ),
    ),
}  # fmt: skip


def _read(columns, loss, *, seed=0, spread=0.1):
    """Return answers, targets, what they met, and the pull on them; targets are none of the answers."""
    torch.manual_seed(seed)
    y = torch.randn(64, 1)
    o = (spread * torch.randn(64, columns)).requires_grad_()
    model = nn.Linear(columns, columns)
    nn.init.eye_(model.weight)
    nn.init.zeros_(model.bias)
    answers = model(o)
    answers.retain_grad()
    root = loss(answers, y)
    met = met_numbers(root.grad_fn, answers.grad_fn, answers.detach())
    root.backward()
    return answers.detach().double().numpy(), y.double().numpy(), met, answers.grad.double().numpy()


def _sure(answers, met, pull):
    columns = list(met.columns)
    said = answers[:, columns] if met.said is None else met.said.double().numpy()
    return pulled(said, pull[:, columns], met.numbers.double().numpy(), None if met.said is None else answers)


@pytest.mark.parametrize("name", IN_UNIT)
@pytest.mark.parametrize("sign", [1, -1])
def test_a_target_is_told_from_a_difference(name, sign):
    """Any loss of a difference shows what it was taken off from, and whether answers are drawn there or away."""
    columns, loss = IN_UNIT[name]
    answers, y, met, pull = _read(columns, lambda o, t: sign * loss(o, t))
    assert met
    assert met[0].said is not None
    assert np.abs(met[0].numbers.numpy() - y).max() <= 1e-5
    assert _sure(answers, met[0], pull) == sign or name == "mixture"  # another part of it may be the nearest


@pytest.mark.parametrize("name", IN_ANOTHER)
@pytest.mark.parametrize("sign", [1, -1])
def test_a_target_is_told_from_a_product(name, sign):
    """Of alike answers the one with the greater target is drawn up, or down where the loss is of rates."""
    columns, way, loss = IN_ANOTHER[name]
    answers, y, met, pull = _read(columns, lambda o, t: sign * loss(o, t))
    sure = [_sure(answers, each, pull) for each in met if each.said is None]
    best = max(range(len(sure)), key=lambda index: abs(sure[index]))
    assert sign * way * sure[best] >= 0.9
    numbers = met[best].numbers.numpy()[:, -1]
    assert abs(np.corrcoef(numbers, y[:, 0])[0, 1]) >= 0.5


WEIGHTS = {
    "of samples": lambda o, y: (torch.linspace(0.1, 2.0, 64)[torch.randperm(64), None] * (o - 3 * y).cosh().log()).sum(),
    "of a policy's actions": lambda o, y: -(distributions.Normal(o, 0.5).log_prob(o.detach() + y) * torch.rand(64, 1)).mean(),
    "of either sign": lambda o, y: -(distributions.Normal(o, 0.5).log_prob(o.detach() + torch.randn(64, 1)) * y).mean(),
    "one for all": lambda o, _: functional.relu(1.0 - o).mean() + (o - torch.full((64, 1), 2.0)).cosh().mean(),
}  # fmt: skip


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("seed", range(5))
def test_weights_and_returns_are_no_targets(name, seed):
    """What a sample counts, what an action has brought in, and one number for all draw no answer to themselves."""
    answers, _, met, pull = _read(1, WEIGHTS[name], seed=seed)
    sure = [_sure(answers, each, pull) for each in met]
    assert sure == [0.0] * len(met)


def test_what_is_chosen_from_the_batch_meets_nothing():
    """Differences of samples, of other sizes, and of more entries than are followed have no targets."""
    o = torch.randn(64, 1, requires_grad=True) * 1.0
    for loss in (
        (o[:32] - o[32:] - 1.0).cosh().mean(),
        (o - torch.randn(64)).cosh().mean(),
        (o.mean() - torch.randn(())).cosh(),
    ):
        assert met_numbers(loss.grad_fn, o.grad_fn, o.detach()) == []
    many = torch.zeros(MOST_ENTRIES + 1, 1, requires_grad=True) * 1.0
    loss = (many - torch.ones(len(many), 1)).cosh().mean()
    assert met_numbers(loss.grad_fn, many.grad_fn, many.detach()) == []


def test_a_power_whose_exponent_is_a_tensor_is_no_square():
    """A likelihood with a power that is learned is read like any other."""
    o = torch.randn(64, 2, requires_grad=True) * 1.0
    loss = _weibull(o, torch.randn(64, 1))
    assert terms_of(loss)[0] == []
