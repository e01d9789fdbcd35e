"""A program of the unseen half: its parts, and the loop as its author would write it."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from generated.unseen.fields import FIELDS
from generated.unseen.grammar import TEST, Spec
from generated.unseen.layers import Data, Family, Loss, Places, fill
from generated.unseen.tabular import TABULAR
from generated.unseen.vision import VISION

FAMILY = {**VISION, **TABULAR, **FIELDS}
_RATES = {"nesterov": 10.0, "SGD": 30.0, "manual": 30.0, "RMSprop": 0.5, "Adamax": 1.5}
Rows = tuple[Tensor, ...]


@dataclass
class Program:
    """What an operator may change.

    Attributes:
        number: Which program.
        spec: What was drawn of it.
        family: Its task.
        data: Training samples.
        test: Held-out samples, which no operator changes.
        model: The network.
        places: Its layers by part.
        draw: Draws degrees; the same for a program, whatever the seed.
        loss: Of output and targets.
        rate: Learning rate.
        where: Sites at fault, told by the operator.
        reads: Turns inputs into what the model is called with, in training and afterwards.
        alters: Changes a training batch.
        calls: Calls the model.
        finishes: Changes the model's output, in training and afterwards.
        factor: Of the rate by step, in place of the schedule.
        steps_at, clears_at: At which steps gradients are used and cleared.
        groups: Parameter groups for the optimizer.
        before, graded, after: Called before a step, between backward and step, and after the step.
        propagates: Calls backward.
        options: More options of the optimizer.
        size: Samples of a step.
        optimizers: Filled in by ``assemble``.
    """

    number: int
    spec: Spec
    family: Family
    data: Data
    test: Data
    model: nn.Module
    places: Places
    draw: random.Random
    order: torch.Generator
    loss: Loss
    rate: float
    decay: float
    clip: float
    size: int
    where: tuple[str, ...] = ()
    reads: Callable[[Rows], Rows] = lambda x: x
    alters: Callable[[Rows, Rows], tuple[Rows, Rows]] = lambda x, y: (x, y)
    calls: Callable[[nn.Module, Rows], Any] = lambda model, x: model(*x)
    finishes: Callable[[Any], Any] = lambda out: out
    factor: Callable[[int], float] | None = None
    steps_at: Callable[[int], bool] = lambda _t: True
    clears_at: Callable[[int, int], bool] = lambda _t, _which: True
    groups: Callable[[], list[dict[str, Any]]] | None = None
    before: list[Callable[[int], None]] = field(default_factory=list)
    graded: list[Callable[[int], None]] = field(default_factory=list)
    after: list[Callable[[int], None]] = field(default_factory=list)
    propagates: Callable[[Tensor], None] = lambda loss: loss.backward()
    options: dict[str, Any] = field(default_factory=dict)
    batches: Callable[[Program], Iterator[tuple[Rows, Rows]]] | None = None
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)


def parts(spec: Spec, seed: int, number: int) -> Program:
    """Return the parts of a program: the task follows from its number, weights and order from the seed."""
    family = FAMILY[spec.family]
    data = family.data(spec.samples + TEST, torch.Generator().manual_seed(7_000_000 + number))
    torch.manual_seed(1000 * number + seed + 17)
    model, places = family.model(spec)
    fill(model, spec.init if spec.family != "field" else "")
    train = Data(tuple(x[:-TEST].clone() for x in data.inputs), tuple(y[:-TEST].clone() for y in data.targets))
    test = Data(tuple(x[-TEST:] for x in data.inputs), tuple(y[-TEST:] for y in data.targets))
    return Program(
        number, spec, family, train, test, model, places, random.Random(f"degree {number}"),
        torch.Generator().manual_seed(seed), family.losses[spec.variant % len(family.losses)],
        spec.rate * family.rate * _RATES.get(spec.optimizer, 1.0), spec.decay, spec.clip, spec.batch,
    )  # fmt: skip


def held_out(p: Program) -> Data:
    """Return the held-out samples."""
    return p.test


def _groups(p: Program) -> list[dict[str, Any]]:
    if p.groups is not None:
        return p.groups()
    held = [q for q in p.model.parameters() if q.requires_grad]
    if p.spec.loop == "two":
        head = {id(q) for name in p.places.heads for q in p.model.get_submodule(name).parameters()}
        return [
            {"params": [q for q in held if id(q) not in head], "weight_decay": p.decay},
            {"params": [q for q in held if id(q) in head], "weight_decay": p.decay},
        ]
    if p.spec.grouped:
        return [
            {"params": [q for q in held if q.dim() > 1], "weight_decay": p.decay},
            {"params": [q for q in held if q.dim() < 2], "weight_decay": 0.0},
        ]
    return [{"params": held, "weight_decay": p.decay}]


def _optimizer(p: Program, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    name, options = p.spec.optimizer, dict(p.options)
    if name == "nesterov":
        return torch.optim.SGD(groups, lr=p.rate, **{"momentum": 0.9, "nesterov": True, **options})
    return getattr(torch.optim, name)(groups, lr=p.rate, **options)


def assemble(p: Program) -> None:
    """Make the optimizers; a loop that moves the weights by hand has none."""
    groups = [g for g in _groups(p) if g["params"]]
    if p.spec.optimizer == "manual":
        p.optimizers = []
    elif p.spec.loop == "two":
        p.optimizers = [_optimizer(p, [g]) for g in groups]
    else:
        p.optimizers = [_optimizer(p, groups)]


def _schedules(p: Program) -> list[Any]:
    n, kind = p.spec.steps, p.spec.schedule
    if p.factor is not None:
        return [lr_scheduler.LambdaLR(o, p.factor) for o in p.optimizers]
    make: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
        "one_cycle": lambda o: lr_scheduler.OneCycleLR(o, 2 * p.rate, total_steps=n + 1, cycle_momentum=False),
        "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, max(n // 4, 1), eta_min=0.1 * p.rate),
        "linear": lambda o: lr_scheduler.LinearLR(o, 1.0, 0.1, n),
        "exponential": lambda o: lr_scheduler.ExponentialLR(o, 0.2 ** (1 / n)),
        "warm_cosine": lambda o: lr_scheduler.SequentialLR(
            o, [lr_scheduler.LinearLR(o, 0.1, 1.0, 25), lr_scheduler.CosineAnnealingLR(o, n)], [25]
        ),
        "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=5),
    }
    return [make[kind](o) for o in p.optimizers] if kind else []


def _manual_factor(p: Program, t: int) -> float:
    if p.factor is not None:
        return p.factor(t)
    return 0.55 + 0.45 * math.cos(math.pi * t / p.spec.steps) if p.spec.schedule else 1.0


def batches(p: Program) -> Iterator[tuple[Rows, Rows]]:
    """Yield training batches for ever."""
    count, inputs = len(p.data.inputs[0]), len(p.data.inputs)
    everything = (*p.data.inputs, *p.data.targets)
    size = min(p.size, count)
    if p.spec.reads == "loader":
        loader = DataLoader(TensorDataset(*everything), size, shuffle=True, drop_last=True, generator=p.order)
        while True:
            for rows in loader:
                yield tuple(rows[:inputs]), tuple(rows[inputs:])
    while True:
        if p.spec.reads == "random":
            chosen = [torch.randint(count, (size,), generator=p.order)]
        else:
            chosen = [c for c in torch.randperm(count, generator=p.order).split(size) if len(c) == size]
        for rows in chosen:
            yield tuple(x[rows] for x in p.data.inputs), tuple(y[rows] for y in p.data.targets)


def _loss(p: Program, x: Rows, y: Rows) -> Tensor:
    x, y = p.alters(x, y)
    x = p.reads(x)
    with torch.autocast("cpu", torch.bfloat16) if p.spec.loop == "autocast" else contextlib.nullcontext():
        if p.spec.loop == "checkpoint":
            out = checkpoint(lambda *z: p.calls(p.model, z), *x, use_reentrant=False)
        else:
            out = p.calls(p.model, x)
        return p.loss(p.finishes(out), *y)


def train(p: Program) -> None:
    """The loop."""
    average = AveragedModel(p.model, multi_avg_fn=get_ema_multi_avg_fn(0.95)) if p.spec.loop == "average" else None
    schedules, source = _schedules(p), (p.batches or batches)(p)
    if p.spec.early:
        validate(p)
    p.model.train()
    for t in range(p.spec.steps):
        for call in p.before:
            call(t)
        _clear(p, t)
        x, y = next(source)
        pieces = 2 if p.spec.loop == "micro" and len(y[0]) > 3 else 1
        total = 0.0
        for k in range(pieces):
            loss = _loss(p, tuple(v.chunk(pieces)[k] for v in x), tuple(v.chunk(pieces)[k] for v in y)) / pieces
            p.propagates(loss)
            total += loss.item() if t % 10 == 0 else 0.0
        for call in p.graded:
            call(t)
        if p.clip:
            nn.utils.clip_grad_norm_(p.model.parameters(), p.clip)
        if p.steps_at(t):
            _step(p, t)
        for schedule in schedules:
            if not isinstance(schedule, lr_scheduler.ReduceLROnPlateau):
                schedule.step()
            elif t % 10 == 0:
                schedule.step(total)
        for call in p.after:
            call(t)
        if average is not None:
            average.update_parameters(p.model)
        if p.spec.validates and t % p.spec.validates == p.spec.validates - 1:
            validate(average or p, p.test.inputs) if average is not None and p.number % 2 else validate(p)


def _clear(p: Program, t: int) -> None:
    for which, optimizer in enumerate(p.optimizers):
        if p.clears_at(t, which):
            optimizer.zero_grad()
    if not p.optimizers and p.clears_at(t, 0):
        for q in p.model.parameters():
            q.grad = None


def _step(p: Program, t: int) -> None:
    for optimizer in p.optimizers:
        optimizer.step()
    if not p.optimizers:
        rate = p.rate * _manual_factor(p, t)
        with torch.no_grad():
            for group in _groups(p):
                for q in group["params"]:
                    if q.grad is not None:
                        q.sub_(rate * group.get("scale", 1.0) * (q.grad + group.get("weight_decay", 0.0) * q))


def validate(p: Program | AveragedModel, inputs: Rows | None = None) -> None:
    """Call the model, or an average of it, on held-out samples."""
    model = p.model if isinstance(p, Program) else p
    model.eval()
    with torch.no_grad():
        if isinstance(p, Program):
            p.finishes(p.calls(p.model, p.reads(p.test.inputs)))
        else:
            model(*(inputs or ()))
    model.train()


def score(p: Program, held: Data) -> float:
    """Return the skill on held-out samples, at least -1."""
    p.model.eval()
    with torch.no_grad():
        try:
            got = p.family.skill(p.finishes(p.calls(p.model, p.reads(held.inputs))), *held.targets)
        except RuntimeError:  # an operator that broke the shapes
            return -1.0
    return max(got, -1.0) if math.isfinite(got) else -1.0
