"""Loops drawn at random: what a record says is what the loop itself computes."""

import random

import pytest
import torch
from torch import nn

from gradflow_export.schedule import INTERVALS

STEPS, LIMIT = 7, 0.05
CHOICES = {
    "passes": (1, 1, 2, 3, 5), "alike": (True, False), "reduction": ("mean", "sum"), "named": (True, False),
    "divided": ("not", "by passes", "by samples"), "optimizers": (1, 1, 2), "optimizer": ("SGD", "Adam", "AdamW"),
    "clip": ("not", "norm", "value", "by hand", "each"), "autocast": (True, False, False), "tied": (True, False, False),
    "scale": (None, None, 512.0, 1000.0), "asks": (True, False), "penalty": (True, False), "looks": (True, False),
    "none": (True, False), "every": (1, 1, 3),
}  # fmt: skip


class Tied(nn.Module):
    """Two layers share a weight."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 4)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))


def norm(parameters):
    return float(torch.stack([p.grad.double().norm() for p in parameters]).norm())


def clip(how, parameters):
    if how == "norm":
        nn.utils.clip_grad_norm_(parameters, LIMIT)
    elif how == "value":
        nn.utils.clip_grad_value_(parameters, LIMIT / 5)
    elif how == "each":
        for p in parameters:
            nn.utils.clip_grad_norm_([p], LIMIT / 2)
    elif how == "by hand":
        factor = min(1.0, LIMIT / norm(parameters))
        for p in parameters:
            p.grad.mul_(factor)


def draw(size):
    return torch.randn(size, 6), torch.randint(4, (size,))


def step_of(chosen, random_, model, criterion, optimizers, scaler):
    """Make one step; return what it is about, by metric."""
    parameters = list(model.parameters())
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=chosen["none"])
    sizes = [5 if chosen["alike"] else random_.choice((1, 2, 3, 7, 11)) for _ in range(chosen["passes"])]
    share = {"not": 1, "by passes": len(sizes), "by samples": sum(sizes)}[chosen["divided"]]
    whole, hits, sure = 0.0, 0, 0.0
    for size in sizes:
        if chosen["asks"] and random_.random() < 0.5:
            x, y = draw(4)
            torch.autograd.grad(criterion(model(x), y), parameters)
        x, y = draw(size)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=chosen["autocast"]):
            logits = model(x)
            loss = criterion(logits, y) / share
        if chosen["looks"]:
            criterion(model(draw(9)[0]), draw(9)[1])
        if chosen["penalty"]:
            loss = loss + 1e-2 * sum(p.square().sum() for p in parameters)
        (loss if scaler is None else scaler.scale(loss)).backward()
        whole += loss.item()
        hits += int((logits.argmax(1) == y).sum())
        sure += float(logits.detach().float().softmax(1).amax(1).sum())
    for optimizer in optimizers if scaler is not None else ():
        scaler.unscale_(optimizer)
    before = norm(parameters)
    clip(chosen["clip"], parameters)
    after = norm(parameters)
    for optimizer in optimizers:
        optimizer.step() if scaler is None else scaler.step(optimizer)
    if scaler is not None:
        scaler.update()
    truth = {"loss": whole, "gradient.total_norm": after, "gradient.norm_before_clip": before}
    predicted = {"alignment.accuracy": hits / sum(sizes), "confidence.max": sure / sum(sizes)}
    return truth | (predicted if chosen["named"] else {})


@pytest.mark.parametrize("seed", range(60))
def test_what_a_record_says_is_what_the_loop_computes(seed, watching, recorded):
    """Loss, norms before and after clipping, accuracy and confidence, of all micro-batches and optimizers of a step."""
    random_ = random.Random(seed)
    chosen = {name: random_.choice(values) for name, values in CHOICES.items()}
    torch.manual_seed(seed)
    model = Tied() if chosen["tied"] else nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    criterion = nn.CrossEntropyLoss(reduction=chosen["reduction"])
    parameters, kind = list(model.parameters()), getattr(torch.optim, chosen["optimizer"])
    groups = (parameters,) if chosen["optimizers"] == 1 else (parameters[:2], parameters[2:])
    optimizers = [kind(group, lr=0.01) for group in groups]
    scale = chosen["scale"]
    scaler = None if scale is None else torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=5)
    settings = {"every": chosen["every"], "intervals": dict.fromkeys(INTERVALS, 1), "budget": None}
    exporter = watching(model, criterion if chosen["named"] else None, **settings)
    wanted = [step_of(chosen, random_, model, criterion, optimizers, scaler) for _ in range(STEPS)]
    records = [record for record in recorded(exporter) if record.value("loss") is not None]
    assert [record.step for record in records] == [n for n in range(1, STEPS + 1) if n == 1 or not n % chosen["every"]]
    for record in records:
        for metric, value in wanted[record.step - 1].items():
            rough = chosen["autocast"] and metric == "confidence.max"
            assert record.value(metric) == pytest.approx(value, rel=1e-2 if rough else 1e-4, abs=1e-7), (metric, chosen)
