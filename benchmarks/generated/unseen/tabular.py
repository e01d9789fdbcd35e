"""Families with pairs, lists, ids and tables: pairs, vae, rank, tasks, ratings, chars, counts."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn
from torch.nn import functional

from generated.unseen.grammar import Spec
from generated.unseen.layers import (
    Data,
    Family,
    Heads,
    Places,
    Plain,
    Residual,
    cross_entropy,
    cross_entropy_by_hand,
    explained,
    focal,
    hits,
    huber,
    squared,
)


def views(n: int, g: torch.Generator) -> Data:
    """Two views of the same five hidden numbers: (n, 10) and (n, 14)."""
    z = torch.randn(n, 5, generator=g)
    a, b = torch.randn(5, 10, generator=g), torch.randn(5, 14, generator=g)
    left = torch.tanh(z @ a) + 0.1 * torch.randn(n, 10, generator=g)
    right = torch.sin(0.7 * z @ b) + 0.1 * torch.randn(n, 14, generator=g)
    return Data((left, right), (torch.arange(n).float(),))


class Towers(nn.Module):
    """Two towers that end in the same space."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        w, d = spec.width, min(spec.depth, 3)
        self.left_in, self.right_in = nn.Linear(10, w), nn.Linear(14, w)
        self.left = nn.Sequential(*(Residual(spec, w) for _ in range(d)), nn.Linear(w, 16))
        self.right = nn.Sequential(*(Residual(spec, w) for _ in range(d)), nn.Linear(w, 16))
        self.log_scale = nn.Parameter(torch.tensor(1.6))

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        a, b = self.left(self.left_in(a)), self.right(self.right_in(b))
        return functional.normalize(a, dim=1), functional.normalize(b, dim=1), self.log_scale.exp()


def towers(spec: Spec) -> tuple[nn.Module, Places]:
    """Return the network."""
    d = min(spec.depth, 3)
    return Towers(spec), Places("left_in", [f"left.{i}" for i in range(d)], [f"left.{d}", f"right.{d}"])


def info_nce(out: tuple[Tensor, Tensor, Tensor], _ids: Tensor) -> Tensor:
    """Cross-entropy of the pairs of a batch, both ways."""
    a, b, scale = out
    logits = scale * a @ b.T
    own = torch.arange(len(a))
    return (functional.cross_entropy(logits, own) + functional.cross_entropy(logits.T, own)) / 2


def info_nce_by_hand(out: tuple[Tensor, Tensor, Tensor], _ids: Tensor) -> Tensor:
    """The same, from a log-sum-exp."""
    logits = out[2] * out[0] @ out[1].T
    return (torch.logsumexp(logits, 1) - logits.diagonal()).mean()


def found(out: tuple[Tensor, Tensor, Tensor], _ids: Tensor) -> float:
    """Share of partners found among twenty."""
    a, b = out[0].view(-1, 20, 16), out[1].view(-1, 20, 16)
    best = (a @ b.transpose(1, 2)).argmax(2)
    return (float((best == torch.arange(20)).float().mean()) - 0.05) / 0.95


def curves(n: int, g: torch.Generator) -> Data:
    """Points of a curved surface with three dimensions: (n, 20)."""
    z, w = torch.randn(n, 3, generator=g), torch.randn(3, 20, generator=g)
    x = torch.tanh(0.6 * z @ w) * 1.4 + 0.1 * torch.randn(n, 20, generator=g)
    return Data((x,), (x.clone(),))


class Vae(nn.Module):
    """A variational autoencoder."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        w = spec.width
        self.enter = nn.Linear(20, w)
        self.encode = nn.Sequential(*(Plain(spec, w, w) for _ in range(min(spec.depth, 2))))
        self.mu, self.logvar = nn.Linear(w, 6), nn.Linear(w, 6)
        self.decode = nn.Sequential(Plain(spec, 6, w), nn.Linear(w, 20))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = self.encode(self.enter(x))
        mu, logvar = self.mu(h), self.logvar(h).clamp(-8, 4)
        z = mu + torch.randn_like(mu) * (0.5 * logvar).exp() if self.training else mu
        return self.decode(z), mu, logvar


def vae(spec: Spec) -> tuple[nn.Module, Places]:
    """Return the network."""
    return Vae(spec), Places("enter", [f"encode.{i}.map" for i in range(min(spec.depth, 2))], ["decode.1"])


def elbo(out: tuple[Tensor, Tensor, Tensor], x: Tensor, weight: float = 1.0) -> Tensor:
    """Reconstruction with a known noise, and the divergence from the prior."""
    rec, mu, logvar = out
    kl = -0.5 * (1 + logvar - mu**2 - logvar.exp()).sum(1).mean()
    return ((rec - x) ** 2).sum(1).mean() / 0.2 / 20 + weight * 0.05 * kl


def rebuilt(out: tuple[Tensor, Tensor, Tensor], x: Tensor) -> float:
    """Share of the variance that is rebuilt."""
    return explained(out[0], x)


def lists(n: int, g: torch.Generator) -> Data:
    """How relevant each of six documents is: (n, 6, 9) to (n, 6)."""
    x, w = torch.randn(n, 6, 9, generator=g), torch.randn(9, 3, generator=g) / 3
    y = torch.tanh(1.5 * x @ w).prod(2) * 3 + (x @ w)[..., 0] + 0.1 * torch.randn(n, 6, generator=g)
    return Data((x,), (y,))


class Ranker(nn.Module):
    """A score for each document."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        sizes = [9] + [spec.width] * (spec.depth + 1)
        self.layers = nn.ModuleList(Plain(spec, a, b) for a, b in itertools.pairwise(sizes))
        self.score = nn.Linear(spec.width, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.score(x).squeeze(-1)


def ranker(spec: Spec) -> tuple[nn.Module, Places]:
    """Return the network."""
    return Ranker(spec), Places("layers.0.map", [f"layers.{i + 1}.map" for i in range(spec.depth)], ["score"])


def _pairs(v: Tensor) -> Tensor:
    return v.unsqueeze(2) - v.unsqueeze(1)


def rank_net(out: Tensor, y: Tensor) -> Tensor:
    """Logistic loss of all pairs of a list."""
    return functional.softplus(-_pairs(out) * _pairs(y).sign()).mean()


def rank_hinge(out: Tensor, y: Tensor) -> Tensor:
    """Hinge loss of all pairs of a list."""
    return torch.relu(1 - _pairs(out) * _pairs(y).sign()).mean()


def list_net(out: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy of softmaxes over a list."""
    return -(torch.softmax(2 * y, 1) * torch.log_softmax(out, 1)).sum(1).mean()


def ordered(out: Tensor, y: Tensor) -> float:
    """Share of pairs in the right order, above a half."""
    right = (_pairs(out).sign() * _pairs(y).sign()).triu(1) if out.shape == y.shape else torch.zeros(1)
    return float(right.sum() / max(_pairs(y).sign().abs().triu(1).sum(), 1))


def two_tasks(n: int, g: torch.Generator) -> Data:
    """A class and two numbers that share what they depend on: (n, 12)."""
    x, w = torch.randn(n, 12, generator=g), torch.randn(12, 6, generator=g) / 3
    h = torch.sin(1.1 * x @ w)
    numbers = h @ torch.randn(6, 2, generator=g) + 0.2 * torch.randn(n, 2, generator=g)
    return Data((x,), ((h @ torch.randn(6, 3, generator=g)).argmax(1), (numbers - numbers.mean(0)) / numbers.std(0)))


class Shared(nn.Module):
    """A trunk with a head for each task."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.trunk_in = nn.Linear(12, spec.width)
        self.trunk = nn.ModuleList(Residual(spec, spec.width) for _ in range(spec.depth))
        self.label, self.value = nn.Linear(spec.width, 3), nn.Linear(spec.width, 2)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.trunk_in(x)
        for block in self.trunk:
            x = block(x)
        return {"label": self.label(x), "value": self.value(x)}


def shared(spec: Spec) -> tuple[nn.Module, Places]:
    """Return the network."""
    return Shared(spec), Places("trunk_in", [f"trunk.{i}" for i in range(spec.depth)], ["label", "value"])


def both(out: dict[str, Tensor], y: Tensor, v: Tensor) -> Tensor:
    """The sum of the two losses."""
    return functional.cross_entropy(out["label"], y) + 0.5 * functional.mse_loss(out["value"], v)


def both_by_hand(out: dict[str, Tensor], y: Tensor, v: Tensor) -> Tensor:
    """The same by hand."""
    return cross_entropy_by_hand(out["label"], y) + (out["value"] - v).abs().mean()


def both_skills(out: dict[str, Tensor], y: Tensor, v: Tensor) -> float:
    """The mean of the two skills."""
    return (hits(out["label"], y) + max(explained(out["value"], v), -1.0)) / 2


def likes(n: int, g: torch.Generator) -> Data:
    """How much one of 15 users likes one of 20 things."""
    u, i = torch.randint(15, (n,), generator=g), torch.randint(20, (n,), generator=g)
    a, b = torch.randn(15, 3, generator=g), torch.randn(20, 3, generator=g)
    y = (a[u] * b[i]).sum(1) + 0.7 * torch.randn(20, generator=g)[i] + 0.2 * torch.randn(n, generator=g)
    return Data((u, i), ((y - y.mean()) / y.std(),))


class Recommender(nn.Module):
    """Embeddings of users and things; their product, and a network beside it."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        w = spec.width // 2
        self.user, self.item, self.item_bias = nn.Embedding(15, w), nn.Embedding(20, w), nn.Embedding(20, 1)
        for table in (self.user, self.item):
            nn.init.normal_(table.weight, std=0.4)
        self.deep = nn.ModuleList(Plain(spec, 2 * w if i == 0 else w, w) for i in range(spec.depth))
        self.final = nn.Linear(2 * w, 1)

    def forward(self, u: Tensor, i: Tensor) -> Tensor:
        a, b = self.user(u), self.item(i)
        h = torch.cat([a, b], 1)
        for layer in self.deep:
            h = layer(h)
        return (self.final(torch.cat([h, a * b], 1)) + self.item_bias(i)).squeeze(1)


def recommender(spec: Spec) -> tuple[nn.Module, Places]:
    """Return the network."""
    return Recommender(spec), Places("user", [f"deep.{i}.map" for i in range(spec.depth)], ["final"])


def chain(n: int, g: torch.Generator) -> Data:
    """Sequences of 9 of 10 tokens in which two tokens decide the next, mostly."""
    table = torch.randint(10, (10, 3), generator=g)
    x = torch.randint(10, (n, 10), generator=g)
    for t in range(2, 10):
        follows = table[x[:, t - 1], x[:, t - 2] % 3]
        keep = torch.rand(n, generator=g) < 0.85
        x[:, t] = torch.where(keep, follows, x[:, t])
    return Data((x[:, :9].clone(),), (x[:, 1:].clone(),))


class Gpt(nn.Module):
    """A causal transformer; the embedding is the head too."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        w, d = spec.width, min(spec.depth, 2)
        self.wte, self.wpe = nn.Embedding(10, w), nn.Parameter(0.1 * torch.randn(9, w))
        nn.init.normal_(self.wte.weight, std=0.2)
        self.attn = nn.ModuleList(Heads(spec, w, True) for _ in range(d))
        self.mlp = nn.ModuleList(Residual(spec, w) for _ in range(d))
        self.ln, self.lm_head = nn.LayerNorm(w), nn.Linear(w, 10, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.wte(x) + self.wpe
        for a, m in zip(self.attn, self.mlp, strict=True):
            h = m(a(h))
        return self.lm_head(self.ln(h))


def gpt(spec: Spec) -> tuple[nn.Module, Places]:
    """Return the network."""
    return Gpt(spec), Places("wte", [f"mlp.{i}" for i in range(min(spec.depth, 2))], ["lm_head"])


def visits(n: int, g: torch.Generator) -> Data:
    """Counts that follow from seven numbers and a category of ten."""
    x, c = torch.randn(n, 7, generator=g), torch.randint(10, (n,), generator=g)
    rate = 2.4 + 0.5 * torch.tanh(x @ torch.randn(7, 2, generator=g)).sum(1) + 0.5 * torch.randn(10, generator=g)[c]
    return Data((x, c), (torch.poisson(rate.exp(), generator=g), rate))


class Counter(nn.Module):
    """A category and numbers to the logarithm of a count."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        w = spec.width
        self.category, self.numeric = nn.Embedding(10, 6), nn.Linear(7, w)
        self.stack = nn.ModuleList(Plain(spec, w + 6 if i == 0 else w, w) for i in range(spec.depth))
        self.log_rate = nn.Linear(w, 1)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        h = torch.cat([self.numeric(x), self.category(c)], 1)
        for layer in self.stack:
            h = layer(h)
        return self.log_rate(h).squeeze(1)


def counter(spec: Spec) -> tuple[nn.Module, Places]:
    """Return the network."""
    return Counter(spec), Places("numeric", [f"stack.{i}.map" for i in range(spec.depth)], ["log_rate"])


def poisson(out: Tensor, y: Tensor, _rate: Tensor) -> Tensor:
    """Poisson likelihood by hand."""
    return (out.clamp(max=12).exp() - y * out).mean() / 10


def poisson_library(out: Tensor, y: Tensor, _rate: Tensor) -> Tensor:
    """PyTorch's own, of counts of a tenth."""
    return functional.poisson_nll_loss(out, y) / 10


def log_rates(out: Tensor, _y: Tensor, rate: Tensor) -> float:
    """Share of the variance of the true rates that is explained."""
    return explained(out, rate)


TABULAR = {
    "pairs": Family(views, towers, (info_nce, info_nce_by_hand), found, "pairs"),
    "vae": Family(curves, vae, (elbo,), rebuilt, "rebuild"),
    "rank": Family(lists, ranker, (rank_net, rank_hinge, list_net), ordered, "order"),
    "tasks": Family(two_tasks, shared, (both, both_by_hand), both_skills, "several"),
    "ratings": Family(likes, recommender, (squared, huber), explained, "numbers", 2e-2),
    "chars": Family(chain, gpt, (cross_entropy, cross_entropy_by_hand, focal), hits, "classes", 5e-3),
    "counts": Family(visits, counter, (poisson, poisson_library), log_rates, "counts"),
}
