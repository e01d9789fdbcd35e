"""Gradients of one pass that are still there in the next."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from silent import data
from silent.common import Bug, Program, explained, loader


class _Fingerprint(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(1, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()
        )
        self.projection = nn.Linear(192, 16)

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(self.projection(self.stem(x)).float(), dim=1)


def zero_grad_without_parentheses(fixed: bool) -> Program:
    """Triplets in mixed precision; ``optimizer.zero_grad`` stands in the loop without parentheses: it isn't called."""
    x, y, x_test, y_test = data.images()
    model = _Fingerprint()
    optimizer = torch.optim.SGD(
        [{"params": model.stem.parameters(), "lr": 0.05}, {"params": model.projection.parameters(), "lr": 0.1}],
        momentum=0.9, nesterov=True,
    )  # fmt: skip
    members = [x[y == digit] for digit in range(10)]

    def other(labels: Tensor) -> Tensor:
        return torch.stack([members[c][int(torch.randint(len(members[c]), ()))] for c in labels.tolist()])

    def train() -> None:
        for xb, yb in loader(48, 140, x, y):
            positive, negative = other(yb), other((yb + torch.randint(1, 10, yb.shape)) % 10)
            if fixed:
                optimizer.zero_grad()
            else:
                optimizer.zero_grad  # noqa: B018 -- this line is the mistake
            with torch.autocast("cpu", torch.bfloat16):
                anchor, positive, negative = model(torch.cat([xb, positive, negative])).chunk(3)
            loss = F.triplet_margin_loss(anchor, positive, negative, margin=0.5)
            loss.backward()
            optimizer.step()

    def score() -> float:
        model.eval()
        with torch.no_grad():
            near = (model(x_test) @ model(x).T).topk(5).indices
        return (y[near].mode(1).values == y_test).float().mean().item()

    return Program(model, train, score, 0.95)


class _Deterministic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Linear(32, 1), nn.Tanh())
        self.critic = nn.Sequential(nn.Linear(4, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 1))

    def forward(self, state: Tensor, action: Tensor) -> Tensor:
        return self.critic(torch.cat([state, action], 1)).squeeze(1)


def critic_keeps_gradient_of_actor(fixed: bool) -> Program:
    """The critic's gradients are cleared before the actor's pass goes through the critic, and not after it."""
    model = _Deterministic()
    actor_optimizer = torch.optim.Adam(model.actor.parameters(), lr=3e-3)
    critic_optimizer = torch.optim.Adam(model.critic.parameters(), lr=3e-3)

    def best(state: Tensor) -> Tensor:
        return torch.sin(state[:, 0]) * 0.8

    def train() -> None:
        for _ in range(280):
            state = torch.randn(64, 3)
            actor_optimizer.zero_grad()
            critic_optimizer.zero_grad()
            (-model(state, model.actor(state)).mean()).backward()
            actor_optimizer.step()
            with torch.no_grad():
                action = (model.actor(state) + 0.4 * torch.randn(64, 1)).clamp(-1, 1)
            reward = state[:, 1] - 2 * (action[:, 0] - best(state)).square()
            if fixed:
                critic_optimizer.zero_grad()
            F.mse_loss(model(state, action), reward).backward()
            critic_optimizer.step()

    def score() -> float:
        state = torch.randn(800, 3)
        with torch.no_grad():
            action = model.actor(state)
            reward = state[:, 1] - 2 * (action[:, 0] - best(state)).square()
            error = model(state, action) - reward
        return 1 - (error.square().mean() / reward.var()).item()

    return Program(model, train, score, 0.8)


class _Temporal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv1d(2, 16, 3, padding=2, dilation=2), nn.ELU(), nn.Conv1d(16, 16, 3, padding=1), nn.ELU()
        )
        self.head = nn.Linear(160, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x.transpose(1, 2)).flatten(1))


def losses_summed_before_each_backward(fixed: bool) -> Program:
    """Eight small batches make a step, and each backward pass goes through the sum of all losses so far."""
    x, y, x_test, y_test = data.series(900)
    model = _Temporal()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.012, momentum=0.9)

    def train() -> None:
        total = torch.zeros(())
        for i, (xb, yb) in enumerate(loader(8, 8 * 70, x, y)):
            loss = F.mse_loss(model(xb), yb) / 8
            total = total + loss
            if fixed:
                loss.backward()
            else:
                total.backward(retain_graph=True)
            if i % 8 == 7:
                optimizer.step()
                optimizer.zero_grad()
                total = torch.zeros(())

    return Program(model, train, lambda: explained(model, x_test, y_test), 0.85)


BUGS = (
    Bug(
        zero_grad_without_parentheses,
        "https://github.com/snakers4/silero-vad/pull/699",
        "fix bug in tuning/utils.py: add optimizer.zero_grad() before loss.bac…",
        ("STALE_GRAD",),
        ("*", ""),
        ("UNSTABLE", "EXPLODING", "LEARNING_RATE", "NOT_LEARNING", "STAGNATION", "VANISHING", "LOSS_SPIKE"),
    ),
    Bug(
        critic_keeps_gradient_of_actor,
        "https://github.com/ray-project/ray/pull/65125",
        "[RLlib] Fix TQC critic divergence: stop actor-loss gradients from leaking into the critics",
        ("STALE_GRAD",),
        ("critic", ""),
        ("UNSTABLE", "EXPLODING", "NOT_LEARNING", "DEAD", "LOSS_SPIKE"),
    ),
    Bug(
        losses_summed_before_each_backward,
        "https://github.com/lucidrains/denoising-diffusion-pytorch/issues/251",
        "Question about self.accelerator.backward(loss)",
        ("STALE_GRAD", "WRONG_LOSS"),
        ("*", "loss", ""),
        ("UNSTABLE", "EXPLODING", "LEARNING_RATE", "NOT_LEARNING", "LOSS_SPIKE"),
    ),
)
