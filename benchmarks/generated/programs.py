"""A generated program: its parts, and the loop that trains it as its author would."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional

from generated.grammar import Recipe
from generated.networks import Network, network
from generated.tasks import TASKS, TEST, Data, skill

Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass
class Parts:
    """Everything a program is made of; operators change it before the optimizer is made, and what comes after.

    Attributes:
        recipe: What was drawn.
        data: Its task.
        model: Its network.
        loss: Scalar of outputs and targets.
        held: Parameters that the optimizer is given, all by default.
        rate: Learning rate.
        decay: Weight decay.
        clip: Limit of the gradient norm, 0 for none.
        extra: Further arguments of the optimizer.
        rows: Rows of the batch of a step.
        clears: Whether gradients are cleared before the backward pass of a step.
        clears_late: Whether they are cleared between the backward pass and the optimizer's step.
        factor: What multiplies the learning rate at a step, beside the schedule.
        evaluates: Calls ``eval()`` before an evaluation.
        resumes: Calls ``train()`` after an evaluation.
        batch: What the loop hands on of a batch.
        optimizer: Filled in by ``assemble``.
    """

    recipe: Recipe
    data: Data
    model: Network
    loss: Loss
    held: Callable[[], list[nn.Parameter]]
    rate: float
    decay: float
    clip: float
    rows: Callable[[int], Tensor]
    extra: dict[str, float] = field(default_factory=dict)
    clears: Callable[[int], bool] = lambda _t: True
    clears_late: bool = False
    factor: Callable[[int], float] = lambda _t: 1.0
    evaluates: bool = True
    resumes: bool = True
    batch: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = lambda x, y: (x, y)
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)


def criterion(recipe: Recipe, data: Data) -> Loss:
    """Return the loss of a recipe, a module, a function, or arithmetic."""

    def classes(out: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return out.reshape(-1, data.outputs), y.reshape(-1)

    def by_hand(out: Tensor, y: Tensor) -> Tensor:
        out, y = classes(out, y)
        return (torch.logsumexp(out, 1) - out.gather(1, y[:, None])[:, 0]).mean()

    def hinge(out: Tensor, y: Tensor) -> Tensor:
        return functional.multi_margin_loss(*classes(out, y))

    if data.kind == "classes":
        module = nn.CrossEntropyLoss()
        return {
            "CrossEntropyLoss": lambda out, y: module(*classes(out, y)),
            "cross_entropy": lambda out, y: functional.cross_entropy(*classes(out, y)),
            "log_softmax": lambda out, y: functional.nll_loss(
                functional.log_softmax(classes(out, y)[0], -1), y.reshape(-1)
            ),
            "smoothing": lambda out, y: functional.cross_entropy(*classes(out, y), label_smoothing=0.1),
            "by_hand": by_hand,
            "hinge": hinge,
        }[recipe.loss]
    if recipe.loss == "by_hand":
        if data.kind == "binary":
            return lambda out, y: (functional.softplus(out) - y * out).mean()
        return lambda out, y: ((out - y) ** 2).sum(1).mean() / y.shape[1]
    named = {
        "mse_loss": functional.mse_loss,
        "binary_cross_entropy": lambda out, y: functional.binary_cross_entropy(torch.sigmoid(out), y),
    }
    return named[recipe.loss] if recipe.loss in named else getattr(nn, recipe.loss)()


def parts(recipe: Recipe, seed: int, number: int) -> Parts:
    """Return the parts of a program. The task follows from its number; weights and order from the seed."""
    g = torch.Generator().manual_seed(number)
    data = TASKS[recipe.task](recipe.samples + TEST, g)
    torch.manual_seed(1000 * number + seed)
    model = network(recipe, data)
    order = torch.Generator().manual_seed(seed)
    state = {"epoch": torch.randperm(data.count, generator=order), "at": 0}

    def rows(_t: int) -> Tensor:
        if state["at"] + recipe.batch > data.count:
            state["epoch"], state["at"] = torch.randperm(data.count, generator=order), 0
        state["at"] += recipe.batch
        return state["epoch"][state["at"] - recipe.batch : state["at"]]

    return Parts(
        recipe, data, model, criterion(recipe, data), lambda: list(model.parameters()), recipe.rate, recipe.decay,
        recipe.clip, rows,
    )  # fmt: skip


def _optimizer(p: Parts, held: list[nn.Parameter]) -> torch.optim.Optimizer:
    name = p.recipe.optimizer
    extra = dict(p.extra)
    if name == "momentum":
        extra.setdefault("momentum", 0.9)
    kind = torch.optim.SGD if name == "momentum" else getattr(torch.optim, name)
    return kind(held, lr=p.rate, weight_decay=p.decay, **extra)  # type: ignore[no-any-return]


def assemble(p: Parts) -> None:
    """Make the optimizers; ``two`` gives the head one of its own."""
    held = p.held()
    if p.recipe.loop == "two":
        head = {id(q) for q in p.model.head.parameters()}
        groups = [[q for q in held if id(q) not in head], [q for q in held if id(q) in head]]
        p.optimizers = [_optimizer(p, group) for group in groups if group]
    else:
        p.optimizers = [_optimizer(p, held)]


def _schedules(p: Parts) -> list[torch.optim.lr_scheduler.LRScheduler]:
    steps, kind = p.recipe.steps, p.recipe.schedule
    make = {
        "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, steps),
        "step": lambda o: torch.optim.lr_scheduler.StepLR(o, max(steps // 2, 1), 0.3),
        "warmup": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda t: min(1.0, (t + 1) / 20)),
        "": lambda o: torch.optim.lr_scheduler.LambdaLR(o, p.factor),
    }
    return [make[kind](o) for o in p.optimizers]


def train(p: Parts) -> None:
    """The loop."""
    average = copy.deepcopy(p.model) if p.recipe.loop == "ema" else None
    schedules = _schedules(p)
    for t in range(p.recipe.steps):
        if p.clears(t):
            _clear(p)
        if p.recipe.loop == "closure":
            _by_closure(p, t)
        else:
            for _ in range(2 if p.recipe.loop == "accumulation" else 1):
                _backward(p, t)
            if p.clip:
                nn.utils.clip_grad_norm_(p.model.parameters(), p.clip)
            if p.clears_late:
                _clear(p)
            for optimizer in p.optimizers:
                optimizer.step()
        for schedule in schedules:
            schedule.step()
        if average is not None:
            with torch.no_grad():
                for old, new in zip(average.parameters(), p.model.parameters(), strict=True):
                    old.lerp_(new.to(old.dtype), 0.05)
        if p.recipe.evaluate and t % 25 == 24:
            _evaluate(p)


def _clear(p: Parts) -> None:
    for optimizer in p.optimizers:
        optimizer.zero_grad(set_to_none=p.recipe.loop != "in_place")


def _loss(p: Parts, t: int) -> Tensor:
    rows = p.rows(t)
    x, y = p.batch(p.data.inputs[rows], p.data.targets[rows])
    bf16 = torch.autocast("cpu", torch.bfloat16) if p.recipe.loop == "bf16" else contextlib.nullcontext()
    with bf16:
        out = p.model(x)
    return p.loss(out.float(), y)


def _backward(p: Parts, t: int) -> None:
    loss = _loss(p, t)
    (loss / 2 if p.recipe.loop == "accumulation" else loss).backward()


def _by_closure(p: Parts, t: int) -> None:
    def closure() -> Tensor:
        loss = _loss(p, t)
        loss.backward()
        if p.clip:
            nn.utils.clip_grad_norm_(p.model.parameters(), p.clip)
        if p.clears_late:
            _clear(p)
        return loss

    p.optimizers[0].step(closure)


def _evaluate(p: Parts) -> None:
    if p.evaluates:
        p.model.eval()
    with torch.no_grad():
        p.model(p.data.inputs[-TEST:])
    if p.resumes:
        p.model.train()


def score(p: Parts, held_out: tuple[Tensor, Tensor]) -> float:
    """Return the skill on held-out data as they were before an operator touched the program."""
    if p.evaluates:
        p.model.eval()
    with torch.no_grad():
        try:
            return skill(p.data, p.model(held_out[0]), held_out[1])
        except RuntimeError:  # an operator that broke the shapes
            return 0.0
