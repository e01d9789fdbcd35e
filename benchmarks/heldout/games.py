"""Games of players with losses of their own: alternating and simultaneous, that go round or arrive."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from common import Case, Program, fault, healthy, twin
from torch import Tensor, nn
from torch.nn import functional as F

Losses = Callable[[nn.Module], list[Tensor]]


class Players(nn.Module):
    """A vector for each player."""

    def __init__(self, **vectors: Tensor) -> None:
        super().__init__()
        for name, vector in vectors.items():
            setattr(self, name, nn.Linear(1, len(vector), bias=False))
            getattr(self, name).weight.data.copy_(vector[:, None])

    def of(self, name: str) -> Tensor:
        """Return a player's vector."""
        return getattr(self, name).weight[:, 0]


def contest(m: nn.Module, losses: Losses, optimizers: list[Any], alternate: bool, steps: int = 80) -> Program:
    """Return a game whose players step at once or one after the other."""
    players = [[p for group in o.param_groups for p in group["params"]] for o in optimizers]

    def turn(p: Program, _t: int, tap: Callable[..., None]) -> float:
        if alternate:
            for i, optimizer in enumerate(optimizers):
                p.model.zero_grad()
                loss = p.losses(p.model)[i]
                loss.backward()
                if i == len(optimizers) - 1:
                    tap("backward", p)
                optimizer.step()
            tap("step", p)
            return float(loss.detach())
        values = p.losses(p.model)
        grads = [torch.autograd.grad(v, own, retain_graph=True) for v, own in zip(values, p.players, strict=True)]
        for own, grad in zip(p.players, grads, strict=True):
            for weight, g in zip(own, grad, strict=True):
                weight.grad = g
        tap("backward", p)
        for optimizer in optimizers:
            optimizer.step()
        tap("step", p)
        return float(values[0].detach())

    return Program(
        m, lambda mo, _b: losses(mo)[0], [None], optimizers, steps, turn=turn, players=players, losses=losses
    )


def descent(m: nn.Module, lr: float, *names: str) -> list[Any]:
    """Return an SGD for each player."""
    return [torch.optim.SGD(getattr(m, name).parameters(), lr=lr) for name in names]


def rotation_share(program: Program) -> float:
    """Return the antisymmetric share of the exact Jacobian of the players' gradients, in float64."""
    model = twin(program)
    where = {id(p): name for name, p in program.model.named_parameters()}
    players = [[model.get_parameter(where[id(p)]) for p in own] for own in program.players]
    flat = [p for own in players for p in own]
    field = []
    for value, own in zip(program.losses(model), players, strict=True):
        field += [g.flatten() for g in torch.autograd.grad(value, own, create_graph=True)]
    rows = []
    for entry in torch.cat(field):
        grads = (
            torch.autograd.grad(entry, flat, retain_graph=True, allow_unused=True)
            if entry.requires_grad
            else [None] * len(flat)
        )
        rows.append(
            torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for g, p in zip(grads, flat, strict=True)])
        )
    matrix = torch.stack(rows)
    odd, even = (matrix - matrix.T).square().sum(), (matrix + matrix.T).square().sum()
    return float(odd / (odd + even))


def journey(program: Program) -> tuple[float, float]:
    """Return turns round the run's centre in its two widest directions, and last distance from it over the first."""
    path = []
    for t in range(program.steps):
        path.append(torch.cat([p.detach().flatten().double() for p in program.model.parameters()]))
        program.step(t)
    points = torch.stack(path) - torch.stack(path).mean(0)
    plane = points @ torch.linalg.svd(points, full_matrices=False)[2][:2].T
    angles = torch.atan2(plane[:, 1], plane[:, 0])
    moves = (angles.diff() + math.pi).remainder(2 * math.pi) - math.pi
    sizes = points.norm(dim=1)
    return float(moves.sum().abs() / (2 * math.pi)), float(sizes[-10:].mean() / sizes[:10].mean())


def rotates(case: Case) -> tuple[bool, dict[str, Any]]:
    """Nine tenths of the exact Jacobian are rotation; the run goes round more than once and does not come nearer."""
    share = rotation_share(case.build())
    turns, nearer = journey(case.build())
    return share > 0.9 and turns > 1.2 and nearer > 0.8, {"rotation": share, "turns": turns, "last/first": nearer}


def arrives(case: Case) -> tuple[bool, dict[str, Any]]:
    """The players' gradients fall to under a twentieth."""
    program = case.build()

    def size() -> float:
        values = program.losses(program.model)
        return math.sqrt(
            sum(
                float(g.square().sum())
                for v, own in zip(values, program.players, strict=True)
                for g in torch.autograd.grad(v, own, retain_graph=True)
            )
        )

    start = size()
    program.train()
    return size() < 0.05 * start, {"gradient": (start, size()), "rotation": rotation_share(case.build())}


def rotate_critic() -> Program:
    """WGAN-like: a linear critic against the mean of a generator, one after the other."""
    m = Players(generator=torch.randn(3) + 2, critic=torch.randn(3))
    data = torch.zeros(3)

    def losses(mo: Any) -> list[Tensor]:
        value = mo.of("critic") @ (mo.of("generator") - data.to(mo.of("critic")))
        return [value, -value]

    return contest(m, losses, descent(m, 0.15, "generator", "critic"), alternate=True, steps=140)


def rotate_pennies() -> Program:
    """Matching pennies of two softmax players round the uniform mixture."""
    m = Players(odd=torch.tensor([0.3, -0.3]), even=torch.tensor([0.2, -0.2]))
    payoff = torch.tensor([[1.0, -1.0], [-1.0, 1.0]])

    def losses(mo: Any) -> list[Tensor]:
        value = mo.of("odd").softmax(0) @ payoff.to(mo.of("odd")) @ mo.of("even").softmax(0)
        return [value, -value]

    return contest(m, losses, descent(m, 0.5, "odd", "even"), alternate=True, steps=140)


def rotate_three() -> Program:
    """Three players in a ring: each chases the next and flees the one before."""
    m = Players(a=torch.randn(2), b=torch.randn(2), c=torch.randn(2))

    def losses(mo: Any) -> list[Tensor]:
        a, b, c = mo.of("a"), mo.of("b"), mo.of("c")
        return [a @ b - a @ c, b @ c - b @ a, c @ a - c @ b]

    return contest(m, losses, descent(m, 0.1, "a", "b", "c"), alternate=False, steps=100)


def rotate_momentum() -> Program:
    """Generator of two layers and a bilinear critic, Adam without momentum decay of its own, simultaneous."""
    m = Players(generator=torch.randn(4), critic=torch.randn(4))
    turn = torch.linalg.qr(torch.randn(4, 4))[0]

    def losses(mo: Any) -> list[Tensor]:
        value = mo.of("critic") @ turn.to(mo.of("critic")) @ mo.of("generator")
        return [value, -value]

    optimizers = [torch.optim.RMSprop(getattr(m, name).parameters(), lr=0.08) for name in ("generator", "critic")]
    return contest(m, losses, optimizers, alternate=False, steps=160)


def ok_regularised_critic() -> Program:
    """The critic of the WGAN with a penalty on its size, players one after the other: a spiral that arrives."""
    m = Players(generator=torch.randn(3) + 2, critic=torch.randn(3))

    def losses(mo: Any) -> list[Tensor]:
        value = mo.of("critic") @ mo.of("generator")
        return [value, -value + mo.of("critic").square().sum()]

    return contest(m, losses, descent(m, 0.2, "generator", "critic"), alternate=True, steps=120)


def ok_strongly_convex_game() -> Program:
    """A saddle that is strongly convex and concave, simultaneous."""
    m = Players(low=torch.randn(4), high=torch.randn(4))
    mix = 0.4 * torch.randn(4, 4)

    def losses(mo: Any) -> list[Tensor]:
        low, high = mo.of("low"), mo.of("high")
        cross = low @ mix.to(low) @ high
        return [low.square().sum() + cross, high.square().sum() - cross]

    return contest(m, losses, descent(m, 0.1, "low", "high"), alternate=False, steps=80)


class Gan(nn.Module):
    """A generator and a discriminator of two layers on points in the plane."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Linear(2, 2)
        self.critic = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))


def ok_gan() -> Program:
    """A small GAN with a gradient penalty finds the mean of its data, players one after the other."""
    m = Gan()
    real, noise = torch.randn(64, 2) + torch.tensor([2.0, -1.0]), torch.randn(64, 2)

    def losses(mo: Any) -> list[Tensor]:
        x, z = real.to(mo.generator.weight), noise.to(mo.generator.weight)
        fake = mo.generator(z)
        cost = F.softplus(-mo.critic(fake)).mean()
        points = x.clone().requires_grad_()
        slope = torch.autograd.grad(mo.critic(points).sum(), points, create_graph=True)[0]
        judge = (
            F.softplus(mo.critic(fake.detach())).mean()
            + F.softplus(-mo.critic(x)).mean()
            + 2 * slope.square().sum(1).mean()
        )
        return [cost, judge]

    optimizers = [torch.optim.Adam(m.generator.parameters(), lr=0.03, betas=(0.5, 0.9))]
    optimizers += [torch.optim.Adam(m.critic.parameters(), lr=0.03, betas=(0.5, 0.9))]
    program = contest(m, losses, optimizers, alternate=True, steps=150)
    program.facts = {"real": real, "noise": noise}
    return program


def finds_mean(case: Case) -> tuple[bool, dict[str, Any]]:
    """The mean of what is generated comes to within a fifth of its first distance from the data's mean."""
    program = case.build()
    goal, noise = program.facts["real"].mean(0), program.facts["noise"]
    start = float((program.model.generator(noise).mean(0) - goal).norm())
    program.train()
    end = float((program.model.generator(noise).mean(0) - goal).norm())
    return end < 0.3 * start, {"distance": (start, end)}


CASES = (
    fault("ROTATION", rotate_critic, rotates, "", "UNSTABLE"),
    fault("ROTATION", rotate_pennies, rotates, "", "UNSTABLE"),
    fault("ROTATION", rotate_three, rotates, "", "UNSTABLE"),
    fault("ROTATION", rotate_momentum, rotates, "", "UNSTABLE"),
    healthy(ok_regularised_critic, arrives),
    healthy(ok_strongly_convex_game, arrives),
    healthy(ok_gan, finds_mean),
)
