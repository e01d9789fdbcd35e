"""What clipping did and how noisy a micro-batch is, as delivered, against direct computation."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradflow_export import Exporter, MemoryWriter
from gradflow_export.metrics.noise import NoiseScale, noise_moments


def total(parameters):
    return math.sqrt(math.fsum(float(p.grad.double().square().sum()) for p in parameters if p.grad is not None))


def train(clip=lambda model: None, *, steps=6, micro_batches=1, divide=True, watch=True, optimizers=1):
    """Train; return model, records and per step (norm after the first pass, before clipping, as used)."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    groups = [model.parameters()] if optimizers == 1 else [model[0].parameters(), model[2].parameters()]
    steppers = [torch.optim.SGD(list(group), lr=0.1) for group in groups]
    memory, seen = MemoryWriter(), []
    exporter = Exporter(model, backends=[memory], strict=True)
    if watch:
        exporter.watch()
    for _ in range(steps):
        model.zero_grad()
        norms = []
        for _ in range(micro_batches):
            x, y = torch.randn(8, 6), torch.randint(3, (8,))
            loss = F.cross_entropy(model(x), y) / (micro_batches if divide else 1)
            exporter.observe(loss=loss)
            loss.backward()
            norms.append(total(model.parameters()))
        clip(model)
        seen.append((norms[0], norms[-1], total(model.parameters())))
        for optimizer in steppers:
            optimizer.step()
    exporter.close()
    return model, memory.records, seen


def by_norm(model):
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def by_value(model):
    nn.utils.clip_grad_value_(model.parameters(), 0.01)


@pytest.mark.parametrize("clip", [by_norm, by_value, lambda model: None], ids=["norm", "value", "none"])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_norms_before_and_after_clipping(clip, micro_batches):
    """Both norms, their ratio and the share of clipped steps are those of the loop."""
    _, records, seen = train(clip, micro_batches=micro_batches)
    scales = []
    for record, (first, before, after) in zip(records, seen, strict=True):
        assert record.value("gradient.first_norm") == pytest.approx(first, rel=1e-6)
        assert record.value("gradient.norm_before_clip") == pytest.approx(before, rel=1e-6)
        assert record.value("gradient.clip_scale") == pytest.approx(after / before, rel=1e-6)
        assert record.value("gradient.total_norm") == pytest.approx(after, rel=1e-6)
        scales.append(after / before)
    assert records[-1].value("gradient.clipped_share") == sum(scale < 0.999 for scale in scales) / len(scales)


def test_clipping_with_two_optimizers_is_each_ones_own():
    """An optimizer is compared with the gradients of its own parameters."""
    _, records, _ = train(optimizers=2)
    assert all(record.value("gradient.clip_scale") == pytest.approx(1.0) for record in records)


def test_looking_into_the_backward_pass_changes_nothing():
    """Weights are bit for bit those of an unwatched run."""
    ours, _, _ = train(by_norm, micro_batches=2)
    plain, _, _ = train(by_norm, micro_batches=2, watch=False)
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), plain.parameters(), strict=True))


def test_noise_moments_are_unbiased():
    """Over many draws of known gradient and covariance the estimates' means are |G|^2 and tr S."""
    generator = torch.Generator().manual_seed(0)
    truth, spread, ratio = torch.linspace(-1, 1, 20, dtype=torch.float64), 0.5, 4
    draws = truth + spread * torch.randn(4000, ratio, 20, generator=generator, dtype=torch.float64)
    small, big = draws[:, 0].square().sum(1), draws.mean(1).square().sum(1)
    signal, noise = zip(
        *(noise_moments(float(s), float(b), ratio) for s, b in zip(small, big, strict=True)), strict=True
    )
    assert sum(signal) / 4000 == pytest.approx(float(truth.square().sum()), rel=0.02)
    assert sum(noise) / 4000 == pytest.approx(20 * spread**2, rel=0.03)


def test_the_noise_scale_is_independent_of_the_loss_scale():
    """Multiplying every gradient changes nothing; it is unknown at first and while the signal is not above 0."""
    for factor in (1e-12, 1.0, 1e12):
        scale = NoiseScale()
        values = [scale.add(9.0 * factor, 3.0 * factor, 4) for _ in range(12)]
        assert values[:9] == [None] * 9
        assert values[-1] == pytest.approx(8.0)
    assert [NoiseScale().add(9.0, 1.0, 4) for _ in range(12)] == [None] * 12


@pytest.mark.parametrize("divide", [True, False])
def test_the_noise_scale_is_delivered_under_accumulation(divide):
    """It is the twin's running average over the steps, whether the user divides the loss or not; without, none."""
    _, records, seen = train(steps=14, micro_batches=4, divide=divide)
    twin = NoiseScale()
    read = [r.step for r in records if r.value("gradient.first_norm") is not None]
    for step in read:
        first, before, _ = seen[step - 1]
        expected = twin.add((4 * first) ** 2, before**2, 4)
        got = records[step - 1].value("gradient.noise_scale")
        assert (got is None) is (expected is None)
        assert got is None or got == pytest.approx(expected, rel=1e-5)
    assert len(read) >= 10
    _, single, _ = train(steps=14)
    assert all(record.value("gradient.noise_scale") is None for record in single)
