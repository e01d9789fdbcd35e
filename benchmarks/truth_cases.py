"""Loops in which one family of metrics has something to say, and what the records should hold (see ``truth.py``).

Each case trains a small model of its own and returns its records, each beside what it should say by metric and site: in
float64, by the definitions, from copies that the loop itself keeps, or from what the loop plants.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Categorical, Normal

from gradflow_export import (
    Exporter,
    GradientClippingConfig,
    MemoryWriter,
    NaNHandlingConfig,
    NumericalStabilityManager,
    PyTorchDebuggingConfig,
)
from gradflow_export.records.step_record import StepRecord
from gradflow_export.schedule import INTERVALS

Told = dict[str, dict[str, float]]
"""What one record should say, by metric and site."""

Case = list[tuple[StepRecord, Told]]

RUN = ""


def watching(model: nn.Module) -> tuple[Exporter, MemoryWriter]:
    """Return a strict exporter with every instrument at every step, and where its records go."""
    memory = MemoryWriter()
    intervals = {name: 1 for name in INTERVALS if name != "histograms"}
    exporter = Exporter(model, backends=[memory], intervals=intervals, alerts_enabled=False, strict=True, budget=None)
    return exporter, memory


def joined(memory: MemoryWriter, told: list[Told]) -> Case:
    """Return the records, each with what it should say."""
    return list(zip(memory.records, told, strict=True))


class Heads(nn.Module):
    """Causal attention with three heads, behind a skip path."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(6, 18), nn.Linear(6, 6)

    def parts(self, x: Tensor) -> list[Tensor]:
        """Return queries, keys and values. Shape of each: ``[batch, heads, positions, 2]``."""
        return [part.unflatten(-1, (3, 2)).transpose(1, 2) for part in (3 * self.qkv(x)).chunk(3, dim=-1)]

    def forward(self, x: Tensor) -> Tensor:
        """Return tokens. Shape: that of ``x``."""
        q, k, v = self.parts(x)
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(seen.transpose(1, 2).flatten(2))


def attention(dtype: torch.dtype) -> Case:
    """Causal attention, two micro-batches a step; the metrics are of the first."""
    model = nn.Sequential(nn.Linear(6, 6), Heads(), Heads()).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    exporter, memory = watching(model)
    told = []
    with exporter.watch(blocks=[model[1], model[2]]):
        for _ in range(4):
            optimizer.zero_grad()
            batches = torch.randn(2, 2, 5, 6, dtype=dtype)
            with torch.no_grad():
                out: Told = {}
                x = model[0](batches[0])
                for site, block in enumerate(model[1:], start=1):
                    told_of_rows(out, str(site), *(part.double() for part in block.parts(x)[:2]))
                    ends = {"input": x, "rank": (x := block(x))}
                    for which, tokens in ends.items():
                        out.setdefault(f"block.{which}_residual", {})[str(site)] = residual(tokens.double())
            told.append(out)
            for part in batches:
                model(part).square().mean().backward()
            optimizer.step()
    return joined(memory, told)


def residual(tokens: Tensor) -> float:
    """Return the mean over sequences of the share of their norm that tells tokens apart."""
    apart = tokens - tokens.mean(dim=1, keepdim=True)
    return float((apart.norm(dim=(1, 2)) / tokens.norm(dim=(1, 2))).mean())


def told_of_rows(out: Told, site: str, q: Tensor, k: Tensor) -> None:
    """Add what each row of causal attention says; row ``r`` may look at its first ``r + 1`` keys."""
    logits = (q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])).numpy()
    samples, heads, length, _ = logits.shape
    rows = {p: logits[p][: p[2] + 1] for p in itertools.product(range(samples), range(heads), range(1, length))}
    weights = {p: np.exp(row - row.max()) / np.exp(row - row.max()).sum() for p, row in rows.items()}
    entropy = {p: -(row * np.log(row)).sum() for p, row in weights.items()}
    padded = np.zeros((samples, heads, length - 1, length))
    flat = np.zeros_like(padded)
    for (b, h, r), row in weights.items():
        padded[b, h, r - 1, : r + 1] = row
        flat[b, h, r - 1, : r + 1] = row - 1 / (r + 1)
    whole = flat.reshape(samples, heads, -1)
    pairs = list(itertools.combinations(range(heads), 2))
    cosines = [w[g] @ w[h] / np.linalg.norm(w[g]) / np.linalg.norm(w[h]) for w in whole for g, h in pairs]
    mixed = [padded[b, :, r].mean(axis=0)[: r + 2] for b in range(samples) for r in range(length - 1)]
    values = {
        "entropy_nats": np.mean(list(entropy.values())),
        "entropy_bound": np.mean([least_entropy(row) for row in rows.values()]),
        "sparsity": np.mean([p < 0.1 / len(row) for row in weights.values() for p in row]),
        "sink": padded.mean(axis=2).max(axis=2).mean(),
        "max_logit": max(np.abs(logits[b, h, r, : r + 1]).max() for b, h, r in np.ndindex(logits.shape[:3])),
        "diversity": 1 - np.mean(cosines),
        "divergence": np.mean([-(p * np.log(p)).sum() for p in mixed]) - np.mean(list(entropy.values())),
    }
    for name, value in values.items():
        out.setdefault(f"attention.{name}", {})[site] = float(value)
    shares = out.setdefault("attention.entropy", {})
    for head in range(heads):
        own = [value / math.log(p[2] + 1) for p, value in entropy.items() if p[1] == head]
        shares[f"{site}.head{head}"] = float(np.mean(own))


def least_entropy(row: np.ndarray) -> float:
    """Return the least entropy that so many logits at this distance from their mean can have (Zhai et al. 2023)."""
    n, size = len(row), float(np.linalg.norm(row - row.mean()))
    b = math.exp(-size * math.sqrt(n / (n - 1)))
    return math.log(1 + (n - 1) * b) + size * math.sqrt(n * (n - 1)) * b / (1 + (n - 1) * b)


def policy() -> Case:
    """Discrete and continuous actions that are observed."""
    model = nn.ModuleDict({"pi": nn.Linear(3, 4), "mean": nn.Linear(3, 2)})
    model.log_std = nn.Parameter(torch.tensor([-0.5, 0.3]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exporter, memory = watching(model)
    told = []
    with exporter.watch():
        for _ in range(4):
            optimizer.zero_grad()
            x = torch.randn(6, 3)
            logits, std = model["pi"](x), model.log_std.exp().expand(6, 2)
            exporter.observe(policy=Categorical(logits=logits))
            exporter.observe(policy=Normal(model["mean"](x), std))
            (logits.square().mean() + std.mean() + model["mean"](x).mean()).backward()
            p, spread = logits.detach().double().softmax(-1), std.detach().double()
            entropy = float(-(p * p.log()).sum(-1).mean() / math.log(4))
            size, nats = float(spread.mean()), float((0.5 * (2 * math.pi * math.e * spread.square()).log()).mean())
            told.append(
                {
                    "policy.entropy": {RUN: entropy},
                    "policy.head_entropy": {"pi": entropy},
                    "policy.std": {RUN: size},
                    "policy.head_std": {"log_std": size},
                    "policy.gaussian_entropy": {RUN: nats},
                }
            )
            optimizer.step()
    return joined(memory, told)


class Point(nn.Module):
    """Three weights and no forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([1.0, 0.2, 0.5], dtype=torch.float64))


def path() -> Case:
    """A path that winds about a point: 24 steps, after which it is judged."""
    model = Point()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    exporter, memory = watching(model)
    points, pulls = [], []
    with exporter.watch():
        for _ in range(24):
            x, y, z = model.w.tolist()
            model.w.grad = torch.tensor([y, -x, 0.3 * z], dtype=torch.float64)
            points.append([x, y, z])
            pulls.append(model.w.grad.tolist())
            optimizer.step()
            exporter.step()
    p, g = np.array(points), np.array(pulls)
    centred, moves = p - p.mean(axis=0), np.diff(p, axis=0)
    lengths = np.linalg.norm(moves, axis=1)
    variance, axes = np.linalg.eigh(np.cov(centred.T))
    plane = centred @ axes[:, 1:]
    turns = np.diff(np.unwrap(np.arctan2(plane[:, 1], plane[:, 0])))
    radii = (plane**2).sum(axis=1)
    units = g / np.linalg.norm(g, axis=1, keepdims=True)
    cosines = (moves[1:] * moves[:-1]).sum(axis=1) / lengths[1:] / lengths[:-1]
    effort = (lengths * np.linalg.norm(g[1:], axis=1)).sum()
    values = {
        "flow.winding": abs(turns.sum()) / math.tau,
        "flow.plane": variance[1:].sum() / variance.sum(),
        "flow.growth": math.sqrt(radii[12:].mean() / radii[:12].mean()),
        "flow.work": (moves * g[1:]).sum() / effort,
        "flow.straightness": np.linalg.norm(moves.sum(axis=0)) / lengths.sum(),
        "flow.turning": np.arccos(cosines).mean(),
        "gradient.coherence": np.mean([a @ b for a, b in itertools.combinations(units, 2)]),
    }
    told: Told = {name: {RUN: float(value)} for name, value in values.items()}
    told["flow.radius"] = {"w": math.sqrt((centred**2).sum(axis=1).mean())}
    return [(record, told) for record in memory.records if record.value("flow.winding") is not None]


def clipped_by_layer() -> Case:
    """Layers that are clipped each by itself."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exporter, memory = watching(model)
    told = []
    with exporter.watch():
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            named = dict(model.named_parameters())
            before = {name: float(p.grad.double().norm()) for name, p in named.items()}
            for layer, most in ((model[0], 0.01), (model[2], 0.05)):
                nn.utils.clip_grad_norm_(layer.parameters(), most)
            left = {name: float(p.grad.double().norm()) / before[name] for name, p in named.items()}
            told.append(
                {
                    "parameter.clip_scale": left,
                    "gradient.norm_before_clip": {RUN: math.hypot(*before.values())},
                }
            )
            optimizer.step()
    return joined(memory, told)


def quiet_rows() -> Case:
    """Rows as nodes, two of which get next to no gradient."""
    model = nn.Linear(5, 12, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    weights = torch.rand(12) + 0.5
    weights[3], weights[7] = 1e-5, 1e-4
    exporter, memory = watching(model)
    told = []
    with exporter.watch(pairs="rows"):
        for _ in range(4):
            optimizer.zero_grad()
            (model(torch.randn(20, 5)).square().mean(dim=0) * weights).sum().backward()
            sizes = model.weight.grad.double().norm(dim=1).numpy()
            share = {f"weight[{row}]": float(sizes[row] / np.median(sizes)) for row in (3, 7)}
            told.append({"node.small": share, "node.quiet_share": {"weight": 2 / 12}})
            optimizer.step()
    return joined(memory, told)


def copies() -> Case:
    """Two layers that should stay equal and do not."""
    model = nn.ModuleDict({"left": nn.Linear(4, 4), "right": nn.Linear(4, 4)})
    model["right"].load_state_dict(model["left"].state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exporter, memory = watching(model)
    told = []
    with exporter.watch(copies=[("left", "right")]):
        for _ in range(4):
            optimizer.zero_grad()
            (model["left"](torch.randn(5, 4)) - 2 * model["right"](torch.randn(5, 4))).square().mean().backward()
            gaps = {}
            for name in ("weight", "bias"):
                a, b = (getattr(model[side], name).detach().double() for side in ("left", "right"))
                size = max(float(a.abs().max()), float(b.abs().max()))
                gaps[f"right.{name} = left.{name}"] = float((a - b).abs().max()) / size
            told.append({"parameter.copy_gap": gaps})
            optimizer.step()
    return joined(memory, told)


def junctions() -> Case:
    """Layers one after the other, of which the second leads to two heads; -1 is the loss."""
    model = nn.ModuleDict({name: nn.Linear(4, 4) for name in "abcd"})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exporter, memory = watching(model)
    told = []
    with exporter.watch():
        for _ in range(2):
            optimizer.zero_grad()
            h = model["b"](model["a"](torch.randn(8, 4)))
            loss = model["c"](h).sum() + model["d"](h).square().sum()
            exporter.observe(loss=loss)
            loss.backward()
            optimizer.step()
            told.append({"block.next": {"a": 1.0, "b": -1.0, "c": -1.0, "d": -1.0}})
    return joined(memory, told)


class Breaks(nn.Module):
    """Overflows for large input."""

    def forward(self, x: Tensor) -> Tensor:
        """Return ``exp(x)``. Shape: that of ``x``."""
        return x.exp()


def origin(kind: str) -> Case:
    """Three micro-batches; in the second, or in the weights or the backward pass, NaN or Inf begins."""
    model = nn.Sequential(nn.Linear(3, 3), Breaks(), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exporter, memory = watching(model)
    with exporter.watch():
        for part in range(3):
            x = torch.randn(4, 3)
            if kind == "input" and part == 1:
                x[0, 0] = math.nan
            if kind == "forward" and part == 1:
                x = 1e6 * model[0].weight.detach().sign().sum(dim=0).expand(4, 3)
            if kind == "weights":
                with torch.no_grad():
                    model[0].weight[0, 0] = math.inf
            loss = model(x).square().mean() * (math.nan if kind == "loss" else 1.0)
            if kind == "backward":
                loss = loss + torch.sqrt((model[0].bias * 0).sum())
            loss.backward()
            exporter.observe(loss=loss)
        optimizer.step()
    site, number = {
        "input": (RUN, 2),
        "forward": ("1", 2),
        "weights": ("0.weight", 0),
        "loss": (RUN, 1),
        "backward": ("0.bias", 3),
    }[kind]
    return joined(memory, [{f"origin.{kind}": {site: float(number)}}])


def stability(policy: str, limit: float = 0.02) -> Case:
    """One batch of NaN under a policy, every other one clipped by value."""
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exporter, memory = watching(model)
    manager = NumericalStabilityManager(
        GradientClippingConfig(mode="value", clip_value=limit), NaNHandlingConfig(policy=policy, rewind_after=1)
    )
    told = []
    with exporter.watch(), manager.watch(model):
        for number in range(5):
            optimizer.zero_grad()
            x = torch.randn(5, 6)
            if number == 3:
                x[2, 1] = math.nan
            loss = nn.functional.cross_entropy(model(x), torch.randint(3, (5,)))
            loss.backward()
            gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
            bad = number == 3
            flat = torch.cat([g.flatten() for g in gradients.values()])
            manager.step(model, loss, optimizer)
            out: Told = {
                "debugging.anomalies": {RUN: 2.0 * bad},  # the loss, and the gradients
                "debugging.prevented": {RUN: float(number >= 3 and policy in {"skip", "rewind"})},
                "debugging.repaired": {RUN: float(number >= 3 and policy in {"zero", "clamp"})},
                "debugging.rewinds": {RUN: float(number >= 3 and policy == "rewind")},
            }
            if bad:
                counts = {name: float((~g.isfinite()).sum()) for name, g in gradients.items()}
                out["debugging.nonfinite"] = counts
            else:
                out["debugging.clipped_share"] = {RUN: float((flat.abs() > limit).double().mean())}
            told.append(out)
            optimizer.step()
    return joined(memory, told)


class Wrong(torch.autograd.Function):
    """A linear map whose weights get a gradient that is off by a share."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, share: float) -> Tensor:
        """Return the map of ``x``. Shape: ``[batch, outputs]``."""
        ctx.save_for_backward(x, weight)
        ctx.share = share
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        """Return gradients of input and weight."""
        x, weight = ctx.saved_tensors
        return gradient @ weight, (1 + ctx.share) * (gradient.t() @ x), None


class Map(nn.Module):
    """A linear layer with that backward."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.weight, self.share = nn.Parameter(torch.randn(4, 3)), share

    def forward(self, x: Tensor) -> Tensor:
        """Return the map of ``x``. Shape: ``[batch, 4]``."""
        return Wrong.apply(x, self.weight, self.share)


def gradient_check(share: float = 0.25) -> Case:
    """A backward pass that is wrong by a known share."""
    model = nn.Sequential(Map(share))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exporter, memory = watching(model)
    config = PyTorchDebuggingConfig(enable_grad_check=True, save_debug_info=False)
    manager = NumericalStabilityManager(nan_config=NaNHandlingConfig(policy="skip"), debug_config=config)
    with exporter.watch(), manager.watch(model):
        for _ in range(2):
            optimizer.zero_grad()
            loss = model(torch.randn(5, 3)).square().mean()
            loss.backward()
            manager.step(model, loss, optimizer)
            optimizer.step()
    told: Told = {"debugging.check_error": {RUN: share / (1 + share)}}
    return [(record, told) for record in memory.records if record.value("debugging.check_error") is not None]


def skipped() -> Case:
    """A gradient scaler that finds Inf in one of five steps."""
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    exporter, memory = watching(model)
    told: list[Told] = []
    times = 0
    with exporter.watch():
        for number in range(5):
            optimizer.zero_grad()
            loss = model(torch.randn(3, 4)).square().mean() * (math.inf if number == 2 else 1.0)
            scaler.scale(loss).backward()
            before = model.weight.detach().clone()
            scaler.step(optimizer)
            scaler.update()
            if torch.equal(before, model.weight):  # such a step has no record
                times += 1
            else:
                scale = {"gradient.loss_scale": {RUN: 1024.0 if number < 2 else 512.0}}
                told.append(scale | ({"runtime.skipped": {RUN: float(times)}} if times else {}))
    return joined(memory, told)


CASES: Mapping[str, Callable[[], Case]] = {
    "attention": lambda: attention(torch.float32),
    "attention, float64": lambda: attention(torch.float64),
    "policy": policy,
    "path of the weights": path,
    "clipped layer by layer": clipped_by_layer,
    "quiet rows": quiet_rows,
    "copies": copies,
    "two heads": junctions,
    **{f"NaN from {kind}": (lambda kind=kind: origin(kind)) for kind in
       ("input", "forward", "weights", "loss", "backward")},
    **{f"stability manager, {policy}": (lambda policy=policy: stability(policy)) for policy in
       ("skip", "zero", "clamp", "rewind")},
    "gradient check": gradient_check,
    "gradient scaler that skips": skipped,
}  # fmt: skip
"""Every case by name."""


def cases(only: str = "") -> Iterator[tuple[str, Case]]:
    """Yield the name of each case and its records, each with what it should say.

    Args:
        only: Part of the names that are wanted.
    """
    for name, case in CASES.items():
        if only in name:
            torch.manual_seed(0)
            yield name, case()
