"""The state of the optimizer as the exporter delivers it equals a slow twin that keeps its own moments."""

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradflow_export import Exporter, IssueType, MemoryWriter
from gradflow_export.metrics.moments import (
    epsilon_share,
    moments_of_many,
    ratio_error,
    second_moment_ratio,
    share_error,
)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def train(optimizer_of, *, steps=12, factor=1.0, watch=True, on_step=None):
    """Train on one batch; return exporter, records and every step's gradients by name."""
    model, memory, seen = net(), MemoryWriter(), []
    optimizer = optimizer_of(model.parameters())
    exporter = Exporter(model, backends=[memory], strict=True)
    if watch:
        exporter.watch()
    x, y = torch.randn(32, 6), torch.randint(3, (32,))
    for step in range(steps):
        optimizer.zero_grad()
        loss = factor * F.cross_entropy(model(x), y)
        loss.backward()
        exporter.observe(loss=loss)
        if on_step is not None:
            on_step(step, model)
        seen.append({name: p.grad.double().clone() for name, p in model.named_parameters()})
        optimizer.step()
    exporter.close()
    return exporter, memory.records, seen, model


def twin(gradients, name, beta1=0.9, beta2=0.99, eps=1e-4):
    """Adam's moments entry by entry, by the published recursion."""
    out = []
    m = [0.0] * gradients[0][name].numel()
    v = list(m)
    for t, each in enumerate(gradients, start=1):
        g = each[name].reshape(-1).tolist()
        m = [beta1 * a + (1 - beta1) * b for a, b in zip(m, g, strict=True)]
        v = [beta2 * a + (1 - beta2) * b * b for a, b in zip(v, g, strict=True)]
        hat = [a / (1 - beta2**t) for a in v]
        rms = math.sqrt(math.fsum(b * b / max(a, eps * eps) for a, b in zip(hat, g, strict=True)) / len(g))
        known = [a for a in hat if a > 0]
        share = sum(math.sqrt(a) < eps for a in known) / max(len(known), 1)
        out.append((math.sqrt(math.fsum(a * a for a in m)), rms, share))
    return out


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam])
def test_adam_moments_equal_the_twin(kind):
    """Norm of the first moment, ratio to the second, share below eps: per parameter and step."""
    _, records, gradients, _ = train(lambda p: kind(p, lr=1e-3, betas=(0.9, 0.99), eps=1e-4), steps=10)
    for name in gradients[0]:
        for record, (norm, rms, share) in zip(records, twin(gradients, name), strict=True):
            assert record.get("parameter.momentum_norm").as_dict()[name] == pytest.approx(norm, rel=1e-5)
            assert record.get("parameter.adam_rms").as_dict()[name] == pytest.approx(rms, rel=1e-4)
            assert record.get("parameter.epsilon_share").as_dict()[name] == pytest.approx(share, abs=1e-6)
    for record in records:
        ratios, shares = record.get("parameter.adam_rms"), record.get("parameter.epsilon_share")
        assert record.value("optimizer.adam_rms") == max(ratios.values)
        assert record.value("optimizer.epsilon_share") == pytest.approx(sum(sorted(shares.values)[1:3]) / 2)


def test_sgd_has_momentum_alone():
    """The momentum buffer's norm is given; plain SGD has nothing to give."""
    _, records, gradients, _ = train(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.5), steps=3)
    buffer = gradients[0]["0.weight"]
    for gradient in (gradients[1]["0.weight"], gradients[2]["0.weight"]):
        buffer = 0.5 * buffer + gradient
    assert records[2].get("parameter.momentum_norm").as_dict()["0.weight"] == pytest.approx(float(buffer.norm()), 1e-5)
    assert records[2].get("parameter.adam_rms") is None
    _, plain, _, _ = train(lambda p: torch.optim.SGD(p, lr=0.1), steps=2)
    assert plain[1].get("parameter.momentum_norm") is None


def test_a_steady_gradient_has_ratio_one():
    """g equal in every step: bias-corrected v is g^2, the ratio exactly 1, whatever the scale."""
    for scale in (1e-12, 1.0, 1e12):
        g = scale * torch.tensor([1.0, -2.0, 3.0])
        assert second_moment_ratio(g, g.square(), 0.0) == pytest.approx(1.0)
    assert second_moment_ratio(torch.full((4,), 10.0), torch.ones(4), 1e-8) == pytest.approx(10.0)


def test_epsilon_share_counts_touched_entries_only():
    """Rows of an embedding that were never looked up say nothing."""
    v = torch.tensor([0.0, 0.0, 1e-20, 1e-10, 1.0])
    assert epsilon_share(v, 1e-8) == pytest.approx(1 / 3)
    assert epsilon_share(torch.zeros(3), 1e-8) == 0


def test_a_scaled_down_loss_is_warned_of():
    """Gradients far below eps make Adam a slow SGD: one OPTIMIZER_STATE; with a fitting eps none."""
    exporter, _, _, _ = train(lambda p: torch.optim.Adam(p, lr=1e-3), steps=30, factor=1e-10)
    found = [issue for issue in exporter.issues if issue.issue_type is IssueType.OPTIMIZER_STATE]
    assert len(found) == 1
    assert set(found[0].layers) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    for factor, eps in ((1e-10, 1e-18), (1.0, 1e-8)):
        exporter, _, _, _ = train(lambda p, eps=eps: torch.optim.Adam(p, lr=1e-3, eps=eps), steps=30, factor=factor)
        assert not [issue for issue in exporter.issues if issue.issue_type is IssueType.OPTIMIZER_STATE]


def test_reading_the_state_changes_nothing():
    """Weights after twelve steps are bit for bit those of an unwatched run."""
    *_, ours = train(lambda p: torch.optim.AdamW(p, lr=1e-2))
    *_, plain = train(lambda p: torch.optim.AdamW(p, lr=1e-2), watch=False)
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), plain.parameters(), strict=True))


def test_many_parameters_at_once_are_each_as_alone():
    """Ratio and share of joined entries equal those of each parameter, also where moments are zero or not finite."""
    torch.manual_seed(5)
    gradients = [torch.randn(n).double() for n in (1, 40, 4096, 7)]
    moments = [torch.rand(len(g)).double() * 1e-8 for g in gradients]
    moments[1][::3], moments[3][:] = 0.0, 0.0
    gradients[2][5] = math.nan
    corrections, epsilons = np.array([0.1, 0.5, 0.9, 1.0]), np.array([1e-8, 1e-4, 3e-5, 1e-8])
    wholes, decays = np.array([1, 400, 4096, 8.0]), np.array([0.9, 0.99, 0.999, 0.9])
    ratios, ratio_errors, shares, share_errors = moments_of_many(
        gradients, moments, list(torch.from_numpy(corrections)), epsilons, wholes, decays
    )
    for place, (gradient, moment) in enumerate(zip(gradients, moments, strict=True)):
        corrected, epsilon = (moment / corrections[place]).float(), float(epsilons[place])
        alone = second_moment_ratio(gradient.float(), corrected, epsilon)
        assert ratios[place] == pytest.approx(float(alone), rel=1e-5, nan_ok=True)
        assert shares[place] == pytest.approx(float(epsilon_share(corrected, epsilon)))
        whole, most = int(wholes[place]), corrections[place] / (1 - decays[place])
        error = ratio_error(gradient.float(), corrected, epsilon, whole, most)
        assert ratio_errors[place] == pytest.approx(float(error), rel=1e-5, nan_ok=True)
        assert share_errors[place] == pytest.approx(float(share_error(corrected, epsilon, whole)), abs=1e-7)
