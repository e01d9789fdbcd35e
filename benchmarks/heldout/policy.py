"""Policies: bandits and control with exact returns, PPO-like clipping, entropy bonus, actor and critic."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from common import Case, Program, Proof, adamw, cut, fault, fill, healthy, scale
from proofs import leaks
from torch import Tensor, nn
from torch.nn import functional as F


class Discrete(nn.Module):
    """Logits of actions, and a value."""

    def __init__(self, states: int = 6, actions: int = 5) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(states, 32), nn.Tanh())
        self.actor, self.critic = nn.Linear(32, actions), nn.Linear(32, 1)
        scale(0.1, self.actor.weight)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits and value."""
        h = self.body(x)
        return self.actor(h), self.critic(h)[..., 0]


class Gaussian(nn.Module):
    """Mean of each action, and a standard deviation that depends on the state or does not."""

    def __init__(self, states: int = 6, actions: int = 3, spread: float = 0.0, by_state: bool = False) -> None:
        super().__init__()
        self.mean = nn.Sequential(nn.Linear(states, 32), nn.Tanh(), nn.Linear(32, actions))
        self.log_std = nn.Parameter(torch.full((actions,), spread))
        self.spread = nn.Linear(states, actions) if by_state else None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and standard deviation."""
        mean = self.mean(x)
        if self.spread is not None:
            return mean, F.softplus(self.spread(x)) + 0 * self.log_std
        return mean, self.log_std.exp().expand_as(mean)


def bandit(n: int = 256, states: int = 6, actions: int = 5, gain: float = 1.0) -> list[Any]:
    """States, and the reward of each action in them: one is right, two in five are half right."""
    x = torch.randn(n, states)
    best = (x @ torch.randn(states, actions)).argmax(1)
    return cut(32, x, gain * (F.one_hot(best, actions) + 0.3 * torch.rand(n, actions)))


def exact_return(model: nn.Module, batches: list[Any], temperature: float = 1.0) -> float:
    """Expected reward over the data as a share of the best."""
    with torch.no_grad():
        got = torch.cat([((model(x)[0] / temperature).softmax(-1) * r).sum(-1) for x, r in batches])
    return float(got.mean() / torch.cat([r.amax(-1) for _, r in batches]).mean())


def share_of_entropy(logits: Tensor) -> float:
    """Entropy of a categorical distribution as a share of the largest."""
    p = logits.double().softmax(-1)
    return float(torch.special.entr(p).sum(-1).mean() / math.log(p.shape[-1]))


def categorical(
    m: Discrete,
    data: list[Any],
    lr: float,
    bonus: float = 0.0,
    temperature: float = 1.0,
    ratio: float = 0.0,
    steps: int = 80,
) -> Program:
    """Return a policy trained on sampled actions, with a value as its baseline, and PPO's clip if ``ratio``."""
    stream, old = torch.Generator().manual_seed(7), copy.deepcopy(m).requires_grad_(False)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        x, reward = batch
        logits, value = model(x)
        log_p = (logits / temperature).log_softmax(-1)
        chosen = torch.multinomial(log_p.detach().float().exp(), 1, generator=stream)
        got = reward.gather(1, chosen)[:, 0]
        advantage = got - value.detach()
        taken = log_p.gather(1, chosen)[:, 0]
        gain = taken * advantage
        if ratio:
            before = (old.to(x)(x)[0] / temperature).log_softmax(-1).gather(1, chosen)[:, 0]
            r = (taken - before).exp()
            gain = torch.minimum(r * advantage, r.clamp(1 - ratio, 1 + ratio) * advantage)
        entropy = -(log_p.exp() * log_p).sum(-1)
        return -gain.mean() + 0.5 * F.mse_loss(value, got) - bonus * entropy.mean()

    def finish(t: int) -> None:
        if t % 2:
            old.load_state_dict(m.state_dict())

    states = data[0][0]
    return Program(
        m,
        loss,
        data,
        adamw(m, lr, weight_decay=0.0),
        finish=finish,
        steps=steps,
        policy=lambda mo: {"logits": mo(states)[0] / temperature},
    )


def gaussian(m: Gaussian, lr: float, bonus: float = 0.0, steps: int = 80, **options: Any) -> Program:
    """Return a policy for control whose expected reward is known: minus the squared distance to the right action."""
    x = torch.randn(256, 6)
    data = cut(32, x, torch.tanh(x @ torch.randn(6, 3) / 2))

    def loss(model: nn.Module, batch: Any) -> Tensor:
        mean, std = model(batch[0])
        return ((mean - batch[1]).square() + std.square()).mean() - bonus * std.log().mean()

    return Program(m, loss, data, adamw(m, lr, **options), steps=steps, policy=lambda mo: {"std": mo(x[:32])[1]})


def collapsed(case: Case) -> tuple[bool, dict[str, Any]]:
    """For the last third of the run entropy is under 8 % of the largest, and the exact return is far from the best."""
    program = case.build()
    entropies = []
    for t in range(program.steps):
        program.step(t)
        entropies.append(share_of_entropy(program.policy(program.model)["logits"].detach()))
    reached = exact_return(program.model, program.batches)
    late = max(entropies[-program.steps // 3 :])
    return late < 0.08 and reached < 0.75, {"entropy": late, "return": reached}


def deviation(low: float, high: float) -> Proof:
    """Return the proof that the standard deviation stays within bounds from the middle of the run on."""

    def proof(case: Case) -> tuple[bool, dict[str, Any]]:
        program, seen = case.build(), []
        for t in range(program.steps):
            program.step(t)
            seen.append(float(program.policy(program.model)["std"].mean()))
        late = seen[len(seen) // 2 :]
        return low < min(late) and max(late) < high, {"std": (min(late), max(late))}

    return proof


def uniform(temperature: float = 1.0) -> Proof:
    """Return the proof that to the end the policy is uniform to 1 %, though a far better one is known."""

    def proof(case: Case) -> tuple[bool, dict[str, Any]]:
        program = case.build()
        program.train()
        entropy = share_of_entropy(program.policy(program.model)["logits"].detach())
        reached = exact_return(program.model, program.batches, temperature)
        return entropy > 0.99 and reached < 0.5, {"entropy": entropy, "return": reached}

    return proof


def improves(more: Callable[[Program], bool] = lambda _p: True) -> Proof:
    """Return the proof that the exact return rises to over 85 % of the best."""

    def proof(case: Case) -> tuple[bool, dict[str, Any]]:
        program = case.build()
        before = exact_return(program.model, program.batches)
        program.train()
        after = exact_return(program.model, program.batches)
        entropy = share_of_entropy(program.policy(program.model)["logits"].detach())
        return after > 0.85 and before < 0.6 and more(program), {"return": (before, after), "entropy": entropy}

    return proof


def collapse_raw_returns() -> Program:
    """Rewards of a hundred and a large rate: all is staked on the first action that paid."""
    m = Discrete()
    return categorical(m, bandit(gain=100.0), 0.3)


def collapse_logits_bias() -> Program:
    """A bias of 25 for one action: nothing else is ever tried."""
    m = Discrete()
    with torch.no_grad():
        m.actor.bias[1] = 25.0
    return categorical(m, bandit(), 1e-3, ratio=0.2)


def collapse_deviation() -> Program:
    """Control whose standard deviation begins at 0.005, PPO-like."""
    return gaussian(Gaussian(spread=-5.3), 1e-3, bonus=1e-6)


def explore_bonus() -> Program:
    """An entropy bonus of twenty times the reward."""
    return categorical(Discrete(), bandit(), 5e-3, bonus=20.0, steps=100)


def explore_temperature() -> Program:
    """Logits are divided by a temperature of five hundred, forgotten from an annealing."""
    return categorical(Discrete(), bandit(), 1e-3, temperature=500.0, steps=100)


def explore_deviation() -> Program:
    """A deviation by state whose bias begins at six, and a bonus that holds it there."""
    m = Gaussian(by_state=True)
    fill(6.0, m.spread.bias)
    return gaussian(m, 2e-3, bonus=100.0)


def explore_growing_deviation() -> Program:
    """A bonus of entropy that drives the deviation from one to five."""
    return gaussian(Gaussian(), 0.03, bonus=120.0, steps=120)


class Pair(nn.Module):
    """Actor and critic, apart."""

    def __init__(self) -> None:
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 5))
        self.critic = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits and value."""
        return self.actor(x), self.critic(x)[..., 0]


def two_optimizers(
    m: Pair, keep: Callable[[Tensor], None] = lambda _x: None, width: int = 0, steps: int = 120
) -> Program:
    """Return actor and critic that step one after the other, each with its own optimizer."""
    data = bandit()
    acting, judging = torch.optim.Adam(m.actor.parameters(), lr=2e-2), torch.optim.Adam(m.critic.parameters(), lr=1e-2)
    stream = torch.Generator().manual_seed(3)

    def turn(p: Program, t: int, tap: Callable[..., None]) -> float:
        x, reward = p.batches[t % len(p.batches)]
        keep(x if not width else x.repeat(1, width))
        logits, value = p.model(x)
        chosen = torch.multinomial(logits.detach().softmax(-1), 1, generator=stream)
        got = reward.gather(1, chosen)[:, 0]
        judging.zero_grad()
        F.mse_loss(value, got).backward()
        judging.step()
        acting.zero_grad()
        entropy = torch.special.entr(logits.softmax(-1)).sum(-1)
        loss = -(logits.log_softmax(-1).gather(1, chosen)[:, 0] * (got - value.detach())).mean() - 0.01 * entropy.mean()
        loss.backward()
        tap("backward", p)
        acting.step()
        tap("step", p)
        return float(loss.detach())

    return Program(
        m,
        lambda _m, _b: torch.zeros(()),
        data,
        [acting, judging],
        turn=turn,
        steps=steps,
        policy=lambda mo: {"logits": mo(data[0][0])[0]},
    )


def leak_replay() -> Program:
    """A replay buffer without an end."""
    buffer: list[Tensor] = []
    program = two_optimizers(Pair(), lambda x: buffer.append(x.clone()), 3000, steps=60)
    program.facts["kept"] = lambda: sum(x.numel() * 4 for x in buffer)
    return program


def ok_two_optimizers() -> Program:
    """Actor and critic with an optimizer each."""
    return two_optimizers(Pair(), steps=200)


def ok_becomes_certain() -> Program:
    """The expected reward itself is maximised: the policy becomes nearly certain as the return rises to the best."""
    m = Discrete()
    data = bandit()

    def loss(model: nn.Module, batch: Any) -> Tensor:
        logits, value = model(batch[0])
        got = (logits.softmax(-1) * batch[1]).sum(-1)
        return -got.mean() + 0.5 * F.mse_loss(value, got.detach())

    return Program(
        m, loss, data, adamw(m, 2e-2, weight_decay=0.0), steps=200, policy=lambda mo: {"logits": mo(data[0][0])[0]}
    )


def ok_clipped_ratio() -> Program:
    """PPO-like policy on samples, small entropy bonus."""
    return categorical(Discrete(), bandit(), 1e-2, bonus=0.01, ratio=0.2, steps=260)


def ok_narrowing_deviation() -> Program:
    """Control whose deviation falls from one to where bonus and cost agree, 0.3."""
    return gaussian(Gaussian(), 2e-2, bonus=0.18, steps=160)


def ok_target_network() -> Program:
    """Values learned against a target network that follows slowly and is in no optimizer."""
    m = nn.ModuleDict({"online": nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 5))})
    m["target"] = copy.deepcopy(m["online"]).requires_grad_(False)
    x = torch.randn(256, 6)
    reward, after = torch.randn(6, 5), torch.randn(256, 6)
    data = cut(32, x, torch.tanh(x @ reward), after)

    def loss(model: Any, batch: Any) -> Tensor:
        goal = batch[1] + 0.5 * model["target"](batch[2]).amax(1, keepdim=True)
        return F.huber_loss(model["online"](batch[0]), goal.detach())

    def finish(_t: int) -> None:
        with torch.no_grad():
            for slow, fast in zip(m["target"].parameters(), m["online"].parameters(), strict=True):
                slow.lerp_(fast, 0.05)

    return Program(m, loss, data, adamw(m, 5e-3), finish=finish, steps=150)


def follows(case: Case) -> tuple[bool, dict[str, Any]]:
    """The loss falls to under a third, and the target ends near the online network."""
    program = case.build()
    losses = program.train()
    return losses[-1] < losses[0] / 3, {"loss": (losses[0], losses[-1])}


CASES = (
    fault("POLICY_COLLAPSE", collapse_raw_returns, collapsed, "", "UNSTABLE LOSS_SPIKE EXPLODING SATURATION"),
    fault("POLICY_COLLAPSE", collapse_logits_bias, collapsed, "", "STAGNATION VANISHING"),
    fault("POLICY_COLLAPSE", collapse_deviation, deviation(0.0, 0.03), "", "UNSTABLE"),
    fault("EXCESS_EXPLORATION", explore_bonus, uniform()),
    fault("EXCESS_EXPLORATION", explore_temperature, uniform(500.0)),
    fault("EXCESS_EXPLORATION", explore_deviation, deviation(4.0, 30.0), "", "UNSTABLE STAGNATION"),
    fault("EXCESS_EXPLORATION", explore_growing_deviation, deviation(3.0, 30.0), "", "UNSTABLE"),
    fault("MEMORY_LEAK", leak_replay, leaks),
    healthy(ok_two_optimizers, improves()),
    healthy(ok_becomes_certain, improves()),
    healthy(ok_clipped_ratio, improves()),
    healthy(ok_narrowing_deviation, deviation(0.15, 0.9)),
    healthy(ok_target_network, follows),
)
