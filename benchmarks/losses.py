"""Print which mistakes are reported with which form of loss: a table of docs/detection.md.

    python benchmarks/losses.py                         # all, some ten minutes
    python benchmarks/losses.py --only Poisson hinge
    python benchmarks/losses.py --write                 # and put the table into the page

One small perceptron learns the same kind of data under each loss, 300 steps with Adam and the bare line
``Exporter(model).watch()``, with the right targets, and with one of four mistakes: targets that were shuffled, inputs
that are noise, inputs far from zero, and a loss of the other sign. Counted are issues of MEDIUM or above.
"""

from __future__ import annotations

import argparse
import math
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch import distributions as d
from torch.nn import functional as F
from tqdm import tqdm

from gradflow_export import Exporter, MemoryWriter
from gradflow_export.records.issues import Severity

PAGE = Path(__file__).resolve().parent.parent / "docs" / "detection.md"
BEGIN, END = "<!-- losses: begin -->", "<!-- losses: end -->"
MISTAKES = ("none", "targets shuffled", "inputs are noise", "inputs far from zero", "sign of the loss")
COUNT, FEATURES, BATCH, STEPS = 2048, 12, 64, 300
Loss = Callable[[Tensor, Tensor], Tensor]


def data(kind: str, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return inputs, and targets of one kind that depend on them."""

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator)

    x = normal(COUNT, FEATURES)
    h = torch.tanh(0.6 * x @ normal(FEATURES, 5)) @ normal(5, 6) + 0.5 * x @ normal(FEATURES, 6) / FEATURES**0.5
    h = (h - h.mean(0)) / h.std(0)
    one, four = h[:, :1] + 0.2 * normal(COUNT, 1), 2 * h[:, :4] + 0.3 * normal(COUNT, 4)
    kinds = {
        "number": lambda: one,
        "vector": lambda: h[:, :3] + 0.2 * normal(COUNT, 3),
        "positive": one.exp,
        "count": lambda: torch.poisson((0.8 * h[:, :1] + 0.7).exp(), generator=generator),
        "time": lambda: -torch.rand(COUNT, 1, generator=generator).clamp(min=1e-6).log() * h[:, :1].exp(),
        "class": lambda: four.argmax(1),
        "yes or no": (one > 0).float,
        "labels": (four > 0.6).float,
        "shares": lambda: (2 * h[:, :4]).softmax(1),
        "sign": lambda: (one > 0).float() * 2 - 1,
    }
    return x, kinds[kind]()


def scale(o: Tensor) -> Tensor:
    """Return a positive scale from the second column."""
    return F.softplus(o[:, 1:]) + 1e-3


def quantile(o: Tensor, y: Tensor, q: float = 0.9) -> Tensor:
    """Return the pinball loss."""
    return torch.maximum(q * (y - o), (q - 1) * (y - o)).mean()


def focal(o: Tensor, y: Tensor) -> Tensor:
    """Return the focal loss of classes."""
    each = F.cross_entropy(o, y, reduction="none")
    return ((1 - torch.exp(-each)) ** 2 * each).mean()


def dice(o: Tensor, y: Tensor) -> Tensor:
    """Return the soft Dice loss."""
    p = o.sigmoid()
    return (1 - (2 * (p * y).sum(0) + 1) / (p.sum(0) + y.sum(0) + 1)).mean()


def divergence(o: Tensor, y: Tensor) -> Tensor:
    """Return the divergence of Jensen and Shannon."""
    p = o.softmax(1).clamp(min=1e-6)
    middle = 0.5 * (p + y)
    return 0.5 * ((p * (p / middle).log()).sum(1) + (y * (y / middle).log()).sum(1)).mean()


def mixture(o: Tensor, y: Tensor) -> Tensor:
    """Return the likelihood of three Gaussians with a minus."""
    weight, mean, spread = o.chunk(3, 1)
    parts = d.Normal(mean, spread.exp().clamp(min=0.05)).log_prob(y)
    return -torch.logsumexp(weight.log_softmax(1) + parts, 1).mean()


def by_hand(o: Tensor, y: Tensor) -> Tensor:
    """Return the binary cross-entropy as it is often written out."""
    p = o.sigmoid().clamp(1e-6, 1 - 1e-6)
    return -(y * p.log() + (1 - y) * (1 - p).log()).mean()


def crammer_singer(o: Tensor, y: Tensor) -> Tensor:
    """Return the margin loss of classes, written out."""
    return F.relu(1 + o - o.gather(1, y[:, None])).mul(1 - F.one_hot(y, 4)).sum(1).mean()


def contrastive(o: Tensor, y: Tensor) -> Tensor:
    """Return the contrastive loss of two halves of the batch."""
    n = len(o) // 2
    same, away = (y[:n] == y[n : 2 * n]).float(), (o[:n] - o[n : 2 * n]).norm(dim=1)
    return (same * away**2 + (1 - same) * F.relu(1 - away) ** 2).mean()


def pairs(o: Tensor, y: Tensor) -> Tensor:
    """Return RankNet's loss of two halves of the batch."""
    n = len(o) // 2
    return F.binary_cross_entropy_with_logits(o[:n] - o[n : 2 * n], (y[:n] > y[n : 2 * n]).float())


def cox(o: Tensor, y: Tensor) -> Tensor:
    """Return the partial likelihood of proportional hazards with a minus."""
    risk = o.squeeze(1)[y.squeeze(1).argsort(descending=True)]
    return -(risk - risk.logcumsumexp(0)).mean()


LOSSES: dict[str, tuple[str, int, Loss]] = {
    "squared": ("number", 1, F.mse_loss),
    "squared, by hand": ("vector", 3, lambda o, y: ((o - y) ** 2).sum(1).mean()),
    "root of the mean square": ("number", 1, lambda o, y: F.mse_loss(o, y).sqrt()),
    "absolute": ("number", 1, F.l1_loss),
    "Huber": ("number", 1, F.huber_loss),
    "logarithm of cosh": ("number", 1, lambda o, y: torch.log(torch.cosh(o - y)).mean()),
    "cosh, stable": ("number", 1, lambda o, y: ((o - y) + F.softplus(-2 * (o - y)) - math.log(2)).mean()),
    "Charbonnier": ("vector", 3, lambda o, y: torch.sqrt((o - y) ** 2 + 1e-3).mean()),
    "quantile": ("number", 1, quantile),
    "three quantiles": (
        "number", 3, lambda o, y: torch.stack(
            [quantile(o[:, i : i + 1], y, q) for i, q in enumerate((0.1, 0.5, 0.9))]
        ).sum(),
    ),
    "Gaussian, library": ("number", 2, lambda o, y: F.gaussian_nll_loss(o[:, :1], y, scale(o))),
    "Gaussian, by hand": ("number", 2, lambda o, y: (o[:, 1:] + (y - o[:, :1]) ** 2 * torch.exp(-o[:, 1:])).mean()),
    "Gaussian, distribution": ("number", 2, lambda o, y: -d.Normal(o[:, :1], scale(o)).log_prob(y).mean()),
    "Laplace": ("number", 2, lambda o, y: -d.Laplace(o[:, :1], scale(o)).log_prob(y).mean()),
    "Student": ("number", 2, lambda o, y: -d.StudentT(4.0, o[:, :1], scale(o)).log_prob(y).mean()),
    "mixture of Gaussians": ("number", 9, mixture),
    "squared logarithms": ("positive", 1, lambda o, y: ((F.softplus(o) + 1).log() - (y + 1).log()).pow(2).mean()),
    "percentage": ("positive", 1, lambda o, y: ((o - y).abs() / y.clamp(min=0.1)).mean()),
    "symmetric percentage": (
        "positive", 1, lambda o, y: ((F.softplus(o) - y).abs() / (F.softplus(o) + y)).mean(),
    ),
    "cosine": ("vector", 3, lambda o, y: (1 - F.cosine_similarity(o, y)).mean()),
    "cosine, by hand": ("vector", 3, lambda o, y: -(F.normalize(o, dim=1) * F.normalize(y, dim=1)).sum(1).mean()),
    "correlation": (
        "number", 1, lambda o, y: 1 - F.cosine_similarity((o - o.mean()).squeeze(1), (y - y.mean()).squeeze(1), 0),
    ),
    "Poisson, library": ("count", 1, F.poisson_nll_loss),
    "Poisson, by hand": ("count", 1, lambda o, y: (o.exp() - y * o).mean()),
    "Poisson, rates": ("count", 1, lambda o, y: -d.Poisson(F.softplus(o) + 1e-4).log_prob(y).mean()),
    "negative binomial": (
        "count", 2, lambda o, y: -d.NegativeBinomial(scale(o), logits=o[:, :1]).log_prob(y).mean(),
    ),
    "gamma": ("positive", 1, lambda o, y: (o + y * torch.exp(-o)).mean()),
    "Tweedie": ("positive", 1, lambda o, y: (2 * y * torch.exp(-0.5 * o) + 2 * torch.exp(0.5 * o)).mean()),
    "exponential": ("time", 1, lambda o, y: -d.Exponential(o.exp()).log_prob(y).mean()),
    "Weibull": (
        "time", 2, lambda o, y: -d.Weibull(F.softplus(o[:, :1]) + 0.1, scale(o) + 0.1).log_prob(
            y.clamp(min=1e-3)
        ).mean(),
    ),
    "cross-entropy": ("class", 4, F.cross_entropy),
    "cross-entropy, by hand": ("class", 4, lambda o, y: -o.log_softmax(1)[torch.arange(len(y)), y].mean()),
    "cross-entropy, one-hot": ("class", 4, lambda o, y: -(F.one_hot(y, 4) * o.log_softmax(1)).sum(1).mean()),
    "label smoothing": ("class", 4, lambda o, y: F.cross_entropy(o, y, label_smoothing=0.1)),
    "focal": ("class", 4, focal),
    "Brier": ("class", 4, lambda o, y: ((o.softmax(1) - F.one_hot(y, 4)) ** 2).sum(1).mean()),
    "generalized cross-entropy": (
        "class", 4, lambda o, y: ((1 - o.softmax(1).gather(1, y[:, None]) ** 0.7) / 0.7).mean(),
    ),
    "margin of classes, library": ("class", 4, F.multi_margin_loss),
    "margin of classes, by hand": ("class", 4, crammer_singer),
    "binary, logits": ("yes or no", 1, F.binary_cross_entropy_with_logits),
    "binary, by hand": ("yes or no", 1, by_hand),
    "labels": ("labels", 4, F.multilabel_soft_margin_loss),
    "Dice": ("labels", 4, dice),
    "hinge": ("sign", 1, lambda o, y: F.relu(1 - y * o).mean()),
    "squared hinge": ("sign", 1, lambda o, y: F.relu(1 - y * o).pow(2).mean()),
    "logistic margin": ("sign", 1, lambda o, y: F.softplus(-y * o).mean()),
    "divergence, library": ("shares", 4, lambda o, y: F.kl_div(o.log_softmax(1), y, reduction="batchmean")),
    "soft targets, by hand": ("shares", 4, lambda o, y: -(y * o.log_softmax(1)).sum(1).mean()),
    "Jensen and Shannon": ("shares", 4, divergence),
    "proportional hazards": ("time", 1, cox),
    "pairs that are ranked": ("number", 1, pairs),
    "contrastive": ("class", 6, contrastive),
}  # fmt: skip


def told(name: str, mistake: str, seed: int = 0) -> list[str]:
    """Return the types of the issues that are reported of one program, the worst first."""
    kind, columns, loss = LOSSES[name]
    generator = torch.Generator().manual_seed(seed)
    x, y = data(kind, generator)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(FEATURES, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, columns))
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    with Exporter(model, backends=[MemoryWriter()], verbose=0) as exporter:
        exporter.watch()
        for _ in range(STEPS):
            rows = torch.randint(0, COUNT, (BATCH,), generator=generator)
            given, wanted = x[rows], y[rows]
            if mistake == "targets shuffled":
                wanted = wanted[torch.randperm(BATCH, generator=generator)]
            elif mistake == "inputs are noise":
                given = torch.randn(BATCH, FEATURES, generator=generator)
            elif mistake == "inputs far from zero":
                given = given + 100.0
            value = loss(model(given), wanted)
            if not bool(torch.isfinite(value)):
                break  # as a distribution that refuses such answers would
            optimizer.zero_grad()
            (-value if mistake == "sign of the loss" else value).backward()
            optimizer.step()
    found = sorted(exporter.issues, key=lambda issue: -issue.severity)
    return list(dict.fromkeys(str(issue.issue_type) for issue in found if issue.severity >= Severity.MEDIUM))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--only", nargs="*", default=[], help="words, of which the name of a loss must hold one")
    parser.add_argument("--write", action="store_true", help="put the table into docs/detection.md")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    d.Distribution.set_default_validate_args(False)  # a loss that is infinite ends the run, not an exception
    names = [name for name in LOSSES if not arguments.only or any(word in name for word in arguments.only)]
    cells: dict[str, list[str]] = {}
    for name in tqdm(names):
        cells[name] = [", ".join(told(name, mistake)[:2]) or "-" for mistake in MISTAKES]
    counts = [sum(row[column] != "-" for row in cells.values()) for column in range(len(MISTAKES))]
    lines = [
        f"`python benchmarks/losses.py`, {time.strftime('%Y-%m-%d')}, seed 0.",
        "",
        "| loss | " + " | ".join(MISTAKES) + " |",
        "|---" * (len(MISTAKES) + 1) + "|",
        *(f"| {name} | " + " | ".join(row) + " |" for name, row in cells.items()),
        f"| **reported, of {len(names)}** | " + " | ".join(map(str, counts)) + " |",
    ]
    print("\n".join(lines))
    if arguments.write:
        head, rest = PAGE.read_text(encoding="utf-8").split(BEGIN, 1)
        PAGE.write_text(f"{head}{BEGIN}\n" + "\n".join(lines) + f"\n{END}{rest.split(END, 1)[1]}", encoding="utf-8")


if __name__ == "__main__":
    main()
