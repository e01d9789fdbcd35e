"""Wiring between model, graph and optimizer that came apart, and gradients that outlive their pass."""

from __future__ import annotations

import copy
import itertools

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from silent import data
from silent.common import Bug, Program, accuracy, explained, loader


class _Reviews(nn.Module):
    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(vocabulary, 8)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 24, dropout=0.0, batch_first=True, norm_first=True)
        self.classifier = nn.Linear(8, 3)

    def resize_token_embeddings(self, size: int) -> None:
        old = self.word_embeddings
        self.word_embeddings = nn.Embedding(size, old.embedding_dim)
        self.word_embeddings.weight.data[: old.num_embeddings] = old.weight.data

    def forward(self, tokens: Tensor) -> Tensor:
        return self.classifier(self.encoder(self.word_embeddings(tokens)).mean(1))


def vocabulary_resized_after_optimizer(fixed: bool) -> Program:
    """Words of the trade are added to the vocabulary when the optimizer is made already: it keeps the old table."""
    leaning = torch.randint(3, (96,))
    y = torch.randint(3, (900,))
    x = torch.randint(96, (900, 14))
    own = torch.multinomial((leaning == torch.arange(3)[:, None]).float()[y], 14, replacement=True)
    x = torch.where(torch.rand(900, 14) < 0.4, own, x)
    model = _Reviews(80)
    if fixed:
        model.resize_token_embeddings(96)
    plain = [p for n, p in model.named_parameters() if "norm" in n or n.endswith("bias")]
    decayed = [p for n, p in model.named_parameters() if not ("norm" in n or n.endswith("bias"))]
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, total_iters=150)
    if not fixed:
        model.resize_token_embeddings(96)

    def train() -> None:
        for xb, yb in loader(48, 150, x[:650], y[:650]):
            optimizer.zero_grad()
            F.cross_entropy(model(xb), yb).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()

    return Program(model, train, lambda: accuracy(model, x[650:], y[650:]), 0.82)


class _GraphNet(nn.Module):
    def __init__(self, adjacency: Tensor, fixed: bool) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(4, 24), nn.ReLU(), nn.Linear(24, 3))
        self.readout = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 2))
        self.adjacency, self.fixed = adjacency, fixed

    def propagate(self, h: Tensor) -> Tensor:
        if self.fixed:
            return self.adjacency @ h
        return torch.from_numpy(self.adjacency.numpy() @ h.detach().numpy())

    def forward(self, features: Tensor) -> Tensor:
        return self.readout(self.propagate(self.encode(features)))


def messages_through_numpy(fixed: bool) -> Program:
    """Messages between nodes are summed by a routine in NumPy, and no gradient comes back to those who sent them."""
    edges = (torch.rand(900, 900) < 0.004).float() + torch.eye(900)
    adjacency = edges / edges.sum(1, keepdim=True)
    features = torch.randn(900, 4)
    y = (adjacency @ (features[:, 0] * features[:, 1]).sign() > 0).long()
    model = _GraphNet(adjacency, fixed)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=1e-4)

    def train() -> None:
        for _ in range(250):
            optimizer.zero_grad()
            F.cross_entropy(model(features)[:650], y[:650]).backward()
            optimizer.step()

    def score() -> float:
        with torch.no_grad():
            return (model(features)[650:].argmax(1) == y[650:]).float().mean().item()

    return Program(model, train, score, 0.78)


class _Planner(nn.Module):
    def __init__(self, fixed: bool) -> None:
        super().__init__()
        self.policy = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))
        self.log_std = nn.Parameter(torch.full((2,), -1.0))
        self.dynamics = nn.Sequential(nn.Linear(4, 48), nn.SiLU(), nn.Linear(48, 2))
        self.fixed = fixed

    def act(self, state: Tensor) -> Tensor:
        normal = torch.distributions.Normal(self.policy(state), self.log_std.exp())
        return normal.rsample() if self.fixed else normal.sample()

    def forward(self, state: Tensor, action: Tensor) -> Tensor:
        return state + self.dynamics(torch.cat([state, action], 1))


def sample_instead_of_rsample(fixed: bool) -> Program:
    """A policy is to be improved through a learned model of the world, but its actions are drawn without a graph."""
    push = torch.tensor([[0.8, 0.3], [-0.2, 0.9]])

    def world(state: Tensor, action: Tensor) -> Tensor:
        return state + 0.2 * torch.sin(state.flip(1)) + action @ push

    model = _Planner(fixed)
    model_optimizer = torch.optim.Adam(model.dynamics.parameters(), lr=1e-2)
    policy_optimizer = torch.optim.Adam([*model.policy.parameters(), model.log_std], lr=1e-2)

    def train() -> None:
        for _ in range(220):
            state = torch.randn(64, 2)
            action = model.act(state).detach() + 0.5 * torch.randn(64, 2)
            model_optimizer.zero_grad()
            F.mse_loss(model(state, action), world(state, action)).backward()
            model_optimizer.step()
            start = torch.randn(64, 2)
            cost = model(start, model.act(start)).square().sum(1).mean()
            policy_optimizer.zero_grad()
            cost.backward()
            policy_optimizer.step()

    def score() -> float:
        state = torch.randn(500, 2)
        with torch.no_grad():
            return 1 - (world(state, model.policy(state)).square().mean() / state.square().mean()).item()

    return Program(model, train, score, 0.8)


class _Forecaster(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(2, 24, batch_first=True)
        self.norm, self.out = nn.LayerNorm(24), nn.Linear(24, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(self.gru(x)[0][:, -1]))


class _Trainer:
    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, keep: bool) -> None:
        self.model = copy.deepcopy(model) if keep else model
        self.optimizer = optimizer

    def fit(self, x: Tensor, y: Tensor) -> None:
        self.model.train()
        for xb, yb in loader(32, 200, x, y):
            self.optimizer.zero_grad()
            loss = F.huber_loss(self.model(xb), yb)
            loss.backward()
            self.optimizer.step()


def optimizer_of_the_original(fixed: bool) -> Program:
    """A trainer keeps a copy of the network to leave the caller's alone; the optimizer still holds the original."""
    x, y, x_test, y_test = data.series()
    model = _Forecaster()
    trainer = _Trainer(model, torch.optim.NAdam(model.parameters(), lr=5e-3), keep=not fixed)
    own = trainer.model
    return Program(own, lambda: trainer.fit(x, y), lambda: explained(own, x_test, y_test), 0.8)


class _SoftActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 32), nn.ELU())
        self.pi = nn.Sequential(nn.Linear(32, 32), nn.ELU(), nn.Linear(32, 1), nn.Tanh())
        self.q1 = nn.Sequential(nn.Linear(33, 48), nn.ELU(), nn.Linear(48, 1))
        self.q2 = nn.Sequential(nn.Linear(33, 48), nn.ELU(), nn.Linear(48, 1))

    def forward(self, state: Tensor, action: Tensor, *, frozen: bool = False) -> tuple[Tensor, Tensor]:
        h = self.encoder(state)
        both = torch.cat([h.detach() if frozen else h, action], 1)
        return self.q1(both).squeeze(1), self.q2(both).squeeze(1)


def critics_frozen_by_spent_iterator(fixed: bool) -> Program:
    """Critics are frozen for the actor's step by a loop over a chain, which is empty when they should be freed."""
    model = _SoftActorCritic()
    chained = itertools.chain(model.q1.parameters(), model.q2.parameters())
    q_params = list(chained) if fixed else chained
    q_optimizer = torch.optim.Adam(
        [*model.encoder.parameters(), *model.q1.parameters(), *model.q2.parameters()], lr=1e-2
    )
    pi_optimizer = torch.optim.Adam(model.pi.parameters(), lr=3e-3)

    def best(state: Tensor) -> Tensor:
        return 0.7 * torch.tanh(state[:, 0])

    def train() -> None:
        for _ in range(300):
            state = torch.randn(128, 4)
            action = 2 * torch.rand(128, 1) - 1
            reward = 1 - 2 * (action[:, 0] - best(state)).square()
            q_optimizer.zero_grad()
            q1, q2 = model(state, action)
            (F.mse_loss(q1, reward) + F.mse_loss(q2, reward)).backward()
            q_optimizer.step()
            for p in q_params:
                p.requires_grad = False
            pi_optimizer.zero_grad()
            action = model.pi(model.encoder(state).detach())
            (-torch.min(*model(state, action, frozen=True)).mean()).backward()
            pi_optimizer.step()
            for p in q_params:
                p.requires_grad = True

    def score() -> float:
        state = torch.randn(800, 4)
        with torch.no_grad():
            error = model.pi(model.encoder(state))[:, 0] - best(state)
        return 1 - (error.square().mean() / best(state).var()).item()

    return Program(model, train, score, 0.6)


class _Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(24, 24)
        self.mix = nn.Sequential(nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 24))
        self.lm_head = nn.Linear(24, 24, bias=False)
        self.lm_head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embedding(tokens)
        return self.lm_head(F.layer_norm(h + self.mix(h), (24,)))


class _Adapter(nn.Module):
    def __init__(self, base: _Language, fixed: bool) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(24, 6, bias=False), nn.Linear(6, 24, bias=False)
        nn.init.zeros_(self.up.weight)
        self.saved_embedding = copy.deepcopy(base.embedding).requires_grad_(True)
        self.saved_head = copy.deepcopy(base.lm_head).requires_grad_(True)
        if fixed:
            self.saved_head.weight = self.saved_embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.saved_embedding(tokens)
        h = h + self.base.mix(h) + self.up(F.silu(self.down(h)))
        return self.saved_head(F.layer_norm(h, (24,)))


def tie_lost_in_saved_modules(fixed: bool) -> Program:
    """A tied table and head are both to be trained beside an adapter: each is copied, and the copies drift apart."""
    before, _ = data.text()
    base = _Language()
    pretraining = torch.optim.Adam(base.parameters(), lr=5e-3)
    for (xb,) in loader(48, 60, before):
        pretraining.zero_grad()
        F.cross_entropy(base(xb[:, :-1]).flatten(0, 1), xb[:, 1:].flatten()).backward()
        pretraining.step()
    base.zero_grad()
    tokens, tokens_test = data.text()
    model = _Adapter(base, fixed)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)

    def train() -> None:
        for (xb,) in loader(32, 180, tokens):
            optimizer.zero_grad()
            F.cross_entropy(model(xb[:, :-1]).transpose(1, 2), xb[:, 1:]).backward()
            optimizer.step()

    return Program(model, train, lambda: accuracy(model, tokens_test[:, :-1], tokens_test[:, 1:]), 0.8)


BUGS = (
    Bug(
        vocabulary_resized_after_optimizer,
        "https://github.com/huggingface/transformers/pull/3532",
        "Resizing embedding matrix before sending it to the optimizer.",
        ("NOT_TRAINING", "STALE_GRAD"),
        ("word_embeddings",),
        ("STAGNATION",),
    ),
    Bug(
        messages_through_numpy,
        "https://github.com/ligerlac/torchlogix/pull/17",
        "export mode forward pass of conv layer passes tests now",
        ("NOT_TRAINING",),
        ("encode",),
        ("STAGNATION", "NOT_LEARNING", "VANISHING"),
    ),
    Bug(
        sample_instead_of_rsample,
        "https://github.com/jankrepl/deepdow/pull/106",
        "Fix rsample bug",
        ("NOT_TRAINING",),
        ("policy", "log_std"),
        ("STAGNATION", "NOT_LEARNING", "VANISHING"),
    ),
    Bug(
        optimizer_of_the_original,
        "https://github.com/skorch-dev/skorch/issues/317",
        "module weights don't update after copy.deepcopy",
        ("NOT_TRAINING", "STALE_GRAD"),
        ("*", ""),
        ("STAGNATION", "NOT_LEARNING", "EXPLODING"),
    ),
    Bug(
        critics_frozen_by_spent_iterator,
        "https://github.com/openai/spinningup/issues/329",
        "serious BUG in sac pytorch implementation",
        ("NOT_TRAINING",),
        ("q1", "q2"),
        ("STAGNATION", "NOT_LEARNING", "VANISHING"),
    ),
    Bug(
        tie_lost_in_saved_modules,
        "https://github.com/unslothai/unsloth/pull/3711",
        "FIX: weight tying for LoRA embeddings and lm_head",
        ("DESYNC",),
        ("saved_embedding", "saved_head"),
    ),
)
