"""The diffusion debugger against schedules: healthy samplers of four kinds raise nothing, broken latents are told."""

import itertools
import math
import types

import pytest
import torch
from torch import nn

from gradflow_export import (
    ArgumentError,
    ArgumentTypeError,
    DiffusionModelDebugger,
    Exporter,
    IssueType,
    MemoryWriter,
    NoiseSchedule,
)

BETAS = torch.linspace(5e-4, 0.1, 200)
ALPHAS = (1 - BETAS.double()).cumprod(0)
STEPS = 50


class Ideal(nn.Module):
    """The best guess of the clean data, which is normal with a given mean and spread in each entry."""

    def __init__(self, mean=0.3, spread=0.8):
        super().__init__()
        self.mean, self.spread = nn.Parameter(torch.tensor(mean)), nn.Parameter(torch.tensor(spread))

    def forward(self, latents, signal, noise):
        gain = signal * self.spread**2 / (signal**2 * self.spread**2 + noise**2)
        return self.mean + gain * (latents - signal * self.mean)


def ddpm(model, shape):
    """Ancestral sampling over all timesteps, each latents with the schedule's default order."""
    latents = torch.randn(shape)
    for step, t in enumerate(range(199, -1, -1)):
        here, before = ALPHAS[t], ALPHAS[t - 1] if t else torch.tensor(1.0)
        data = model(latents, here.sqrt(), (1 - here).sqrt())
        beta = 1 - here / before
        mean = before.sqrt() * beta / (1 - here) * data + (here / before).sqrt() * (1 - before) / (1 - here) * latents
        latents = (mean + (beta * (1 - before) / (1 - here)).sqrt() * torch.randn(shape)).float()
        yield step, latents


def ddim(model, shape, timesteps):
    """Deterministic sampling over some timesteps."""
    latents = torch.randn(shape)
    for step, t in enumerate(timesteps):
        here = ALPHAS[t]
        before = ALPHAS[timesteps[step + 1]] if step + 1 < len(timesteps) else torch.tensor(1.0)
        data = model(latents, here.sqrt(), (1 - here).sqrt())
        noise = (latents - here.sqrt() * data) / (1 - here).sqrt()
        latents = (before.sqrt() * data + (1 - before).sqrt() * noise).float()
        yield step, latents


def euler(model, shape, sigmas):
    """Karras' sampling from the greatest sigma down to 0."""
    latents = torch.randn(shape) * sigmas[0]
    for step, (here, after) in enumerate(itertools.pairwise(sigmas)):
        data = model(latents, torch.ones(()), here)
        latents = latents + (after - here) * (latents - data) / here
        yield step, latents


def flow(model, shape, sigmas):
    """Flow matching from noise to data along straight lines."""
    latents = torch.randn(shape)
    for step, (here, after) in enumerate(itertools.pairwise(sigmas)):
        data = model(latents, 1 - here, here)
        latents = latents + (after - here) * (latents - data) / here
        yield step, latents


def karras(greatest=80.0, least=0.002, rho=7.0):
    """Sigmas of Karras et al., equation 5, with a 0 at the end."""
    ramp = torch.linspace(0, 1, STEPS)
    sigmas = (greatest ** (1 / rho) + ramp * (least ** (1 / rho) - greatest ** (1 / rho))) ** rho
    return torch.cat([sigmas, torch.zeros(1)])


SOME = list(range(196, -1, -4))
LINE = torch.linspace(1, 0, STEPS + 1)

SAMPLERS = {
    "DDPM": (ddpm, (), lambda **more: NoiseSchedule.from_betas(BETAS, **more)),
    "DDIM": (ddim, (SOME,), lambda **more: NoiseSchedule.from_alphas_cumprod(ALPHAS, timesteps=SOME, **more)),
    "Karras": (euler, (karras(),), lambda **more: NoiseSchedule.from_sigmas(karras(), **more)),
    "flow": (flow, (LINE,), lambda **more: NoiseSchedule.from_sigmas(LINE.tolist(), flow=True, **more)),
}

SHAPES = ((1, 2), (64, 2), (2, 4, 8, 8))


def run(sampler, debugger, shape, change=lambda _step, latents: latents, model=None):
    """Sample, with latents changed on the way to the debugger, and return what it says of each step."""
    model = Ideal() if model is None else model
    pipeline = types.SimpleNamespace(unet=model)
    with torch.no_grad():
        steps = SAMPLERS[sampler][0](model, shape, *SAMPLERS[sampler][1])
        return [debugger.monitor_diffusion_step(pipeline, step, change(step, latents)) for step, latents in steps]


@pytest.mark.parametrize("declared", [True, False, None], ids=["data known", "data unknown", "no schedule"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_healthy_sampling_raises_nothing(sampler, shape, declared):
    """Whatever the sampler, few or many entries, spread and mean of the data, and run after run."""
    for seed, (mean, spread) in enumerate([(0.0, 0.1), (-3.0, 2.0)]):
        torch.manual_seed(seed)
        more = {"data_rms": math.hypot(mean, spread)} if declared else {}
        schedule = None if declared is None else SAMPLERS[sampler][2](**more)
        debugger = DiffusionModelDebugger(schedule=schedule)
        for _ in range(2):
            found = run(sampler, debugger, shape, model=Ideal(mean, spread))
            assert [info["anomalies"] for info in found if info["has_anomaly"]] == []
    assert debugger.get_debug_summary()["total_anomalies"] == 0


FAULTS = {
    "6e8": (
        lambda step, x: x * 6e8 if step >= 20 else x,
        IssueType.EXPLODING,
        "the root mean square of the latents is",
    ),
    "9e-16": (
        lambda step, x: x * 9e-16 if step >= 20 else x,
        IssueType.VANISHING,
        "the root mean square of the latents",
    ),
    "unchanged": (None, IssueType.STAGNATION, "the latents have not changed by a bit in"),
}


@pytest.mark.parametrize("known", [True, False], ids=["schedule", "no schedule"])
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_broken_latents_are_issues(sampler, fault, known):
    """Much too large, much too small, or the same for many steps: told, given to the exporter, healed by a good run."""
    torch.manual_seed(0)
    change, kind, words = FAULTS[fault]
    still = torch.randn(2, 4, 8, 8) * (80 if sampler == "Karras" else 1)
    change = change or (lambda _step, _latents: still)
    model = Ideal()
    exporter = Exporter(model, backends=[MemoryWriter()], strict=True).watch()
    debugger = DiffusionModelDebugger(schedule=SAMPLERS[sampler][2]() if known else None)
    found = run(sampler, debugger, (2, 4, 8, 8), change, model)
    told = [sentence for info in found for sentence in info["anomalies"]]
    assert any(sentence.startswith(words) for sentence in told)
    assert not found[4 if fault == "unchanged" else 19]["has_anomaly"]
    run(sampler, debugger, (2, 4, 8, 8), model=model)
    exporter.close()
    assert kind in {issue.issue_type for issue in exporter.issues}
    assert not [issue for issue in exporter.issues if issue.open and issue.issue_type is kind]


def test_what_is_expected_is_told_beside_what_is_there():
    """At each step, from the schedule's order or from the timestep that is given."""
    debugger = DiffusionModelDebugger(schedule=NoiseSchedule.from_sigmas([3.0, 1.0], data_rms=1.0))
    first = debugger.monitor_diffusion_step(nn.Linear(1, 1), 0, torch.full((8,), 2.0))
    assert (first["timestep"], first["rms"]) == (1.0, 2.0)
    assert first["expected_rms"] == pytest.approx([math.sqrt(2)] * 2)
    last = debugger.monitor_diffusion_step(nn.Linear(1, 1), 1, torch.arange(8.0))
    assert (last["timestep"], last["expected_rms"]) == (None, [1.0, 1.0])
    given = debugger.monitor_diffusion_step(nn.Linear(1, 1), 2, torch.arange(8.0), timestep=torch.tensor([0.5, 0.5]))
    assert given["expected_rms"] == pytest.approx([math.hypot(1, 0.5)] * 2)


def test_the_kinds_of_schedules_agree_with_their_formulas():
    """Signal and noise at each timestep, and the order of sampling."""
    betas, alphas = NoiseSchedule.from_betas(BETAS), NoiseSchedule.from_alphas_cumprod(ALPHAS.numpy())
    assert betas.table == pytest.approx(ALPHAS.tolist(), rel=1e-5)
    for schedule in (betas, alphas):
        signal, noise = schedule.level(60)
        assert (signal, noise) == pytest.approx((ALPHAS[60].sqrt().item(), (1 - ALPHAS[60]).sqrt().item()), rel=1e-4)
        assert (schedule.after(0), schedule.after(198), schedule.after(199)) == (198, 0, None)
    assert NoiseSchedule.from_sigmas([80.0, 1.0]).level(80.0) == (1.0, 80.0)
    assert NoiseSchedule.from_sigmas([1.0, 0.25], flow=True).level(0.25) == (0.75, 0.25)


def test_losses_are_told_by_noise_level():
    """A loss for each sample goes to its range; NaN is an issue that names the timestep, and heals."""
    model = nn.Linear(1, 1)
    exporter = Exporter(model, backends=[MemoryWriter()], strict=True).watch()
    debugger = DiffusionModelDebugger(schedule=NoiseSchedule.from_betas(BETAS))
    generator = torch.Generator().manual_seed(0)
    for step in range(200):
        timesteps = torch.randint(0, 200, (16,), generator=generator)
        found = debugger.monitor_diffusion_loss(model, timesteps, 1.0 - timesteps / 200, step)
        assert not found["has_anomaly"]
    table = debugger.get_loss_by_timestep()
    assert [row["from"] for row in table] == [place / 10 for place in range(10)]
    assert sum(row["count"] for row in table) == 3200
    assert [row["mean"] for row in table] == pytest.approx([0.95 - place / 10 for place in range(10)], abs=0.01)
    broken = debugger.monitor_diffusion_loss(model, [10, 190], [0.5, math.nan], 200)
    assert broken["anomalies"] == ["the loss at timestep 190 is NaN or Inf."]
    assert debugger.get_loss_by_timestep()[-1]["nonfinite"] == 1
    debugger.monitor_diffusion_loss(model, [10, 190], 0.5, 201)
    exporter.close()
    assert [(issue.issue_type, issue.open) for issue in exporter.issues] == [(IssueType.NUMERICAL, False)]
    assert DiffusionModelDebugger().get_loss_by_timestep() == []


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: NoiseSchedule.from_betas([0.1, 1.5]), ArgumentError, "betas must lie from 0 to 1, got 1.5"),
        (lambda: NoiseSchedule.from_betas([]), ArgumentError, "betas must hold a number for each noise level"),
        (lambda: NoiseSchedule.from_sigmas("x"), ArgumentTypeError, "sigmas must be a sequence of numbers"),
        (lambda: NoiseSchedule.from_sigmas([2.0], flow=True), ArgumentError, "sigmas must lie from 0 to 1, got 2"),
        (lambda: NoiseSchedule.from_sigmas([2.0], data_rms=0.0), ArgumentError, "data_rms must be above 0, got 0"),
        (
            lambda: NoiseSchedule.from_betas([0.1], timesteps=[3]),
            ArgumentError,
            "timesteps must lie from 0 to 0, got 3",
        ),
        (
            lambda: DiffusionModelDebugger(schedule=[0.1]),
            ArgumentTypeError,
            "schedule must be a NoiseSchedule, got list",
        ),
        (
            lambda: DiffusionModelDebugger().monitor_diffusion_step(nn.Linear(1, 1), 0, torch.ones(2), timestep="x"),
            ArgumentTypeError,
            "timestep must be a number, got 'x'",
        ),
        (
            lambda: DiffusionModelDebugger().monitor_diffusion_loss(nn.Linear(1, 1), [1], [0.1]),
            ArgumentError,
            "losses by noise level need the schedule",
        ),
        (
            lambda: DiffusionModelDebugger(schedule=NoiseSchedule.from_betas(BETAS)).monitor_diffusion_loss(
                nn.Linear(1, 1), [1, 2, 3], [0.1, 0.2]
            ),
            ArgumentError,
            "losses must be one for each of 3 timesteps, got 2",
        ),
    ],
)
def test_what_cannot_be_used_is_told(call, error, words):
    """At the call."""
    with pytest.raises(error, match=words):
        call()
