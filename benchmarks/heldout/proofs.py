"""Proofs that a label is true: float64 gradients, singular values, exact Jacobians, closed forms, learning curves."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from common import Case, Program, Proof, twin, whole_loss, wide
from torch import Tensor, nn

Figures = tuple[bool, dict[str, Any]]


def first_tensor(output: Any) -> Tensor:
    """Return the tensor, or the first of a tuple."""
    return output if isinstance(output, Tensor) else output[0]


def chain(program: Program) -> list[float]:
    """Return RMS of the float64 gradient at each block's output, over all batches."""
    model, outputs = twin(program), []
    for name in program.blocks or []:
        model.get_submodule(name).register_forward_hook(lambda _m, _i, o: outputs.append(first_tensor(o)))
    loss = program.loss(model, wide(program.batches[0]))
    return [float(g.square().mean().sqrt()) for g in torch.autograd.grad(loss, outputs)]


def vanishing(case: Case) -> Figures:
    """Gradient at the first block's output is less than 1e-5 of that at the last one's (healthy: above 1e-2)."""
    rms = chain(case.build())
    return rms[0] < 1e-5 * rms[-1], {"first/last": rms[0] / rms[-1]}


def exploding_chain(case: Case) -> Figures:
    """Gradient grows more than a thousandfold backward along the blocks (healthy: less than a hundredfold)."""
    rms = chain(case.build())
    return rms[0] > 1e3 * rms[-1], {"first/last": rms[0] / rms[-1]}


def diverges(case: Case) -> Figures:
    """The loss ends or passes above a hundred times its first value, or is no longer finite."""
    losses = case.build().train()
    peak = max(loss if math.isfinite(loss) else math.inf for loss in losses)
    return peak > 100 * losses[0], {"first": losses[0], "peak": peak}


def learns(
    drop: float = 0.7, still: tuple[str, ...] = (), bound: float = 100.0, more: Callable[[Case], Figures] | None = None
) -> Proof:
    """Return the proof of health: finite, float64 loss falls to ``drop``, all that can move does, chain is even."""

    def proof(case: Case) -> Figures:
        program = case.build()
        before = float(whole_loss(program).detach())
        ratio = 1.0
        if program.blocks:
            rms = chain(program)
            ratio = rms[0] / rms[-1]
        start = {name: p.detach().clone() for name, p in program.model.named_parameters() if p.requires_grad}
        losses = program.train()
        after = float(whole_loss(program).detach())
        same = [n for n, p in program.model.named_parameters() if n in start and torch.equal(p, start[n])]
        same = [name for name in same if not name.startswith(still or ("?",))]
        good, figures = more(case) if more else (True, {})
        good &= all(map(math.isfinite, losses)) and after < drop * before and not same and 1 / bound < ratio < bound
        return good, {"loss": (before, after), "chain": ratio, "still": same} | figures

    return proof


def active(program: Program, kinds: tuple[type, ...], flat: Callable[[nn.Module, Tensor], Tensor]) -> dict[str, Tensor]:
    """Return for each activation module the mean of ``flat`` over the data, unit by unit (float64)."""
    model, seen = twin(program), {}
    for name, module in model.named_modules():
        if isinstance(module, kinds):
            module.register_forward_hook(lambda m, _i, o, name=name: seen.setdefault(name, []).append(flat(m, o)))
    whole_loss(program, model)
    return {
        name: torch.cat([v.transpose(0, 1).flatten(1) if v.dim() == 4 else v.flatten(0, -2).T for v in values], 1)
        .double()
        .mean(1)
        for name, values in seen.items()
    }


def dead(after: bool = False) -> Proof:
    """Return the proof that over 95 % of the units of a named ReLU are off for all data (elsewhere: under 30 %)."""

    def proof(case: Case) -> Figures:
        program = case.build()
        if after:
            program.train()
        rates = active(program, (nn.ReLU,), lambda _m, o: o > 0)
        off = {name: float((rate == 0).double().mean()) for name, rate in rates.items()}
        hit = [v for name, v in off.items() if name.startswith(case.where)]
        return max(hit) > 0.95, {"dead": off}

    return proof


def flatness(module: nn.Module, output: Tensor) -> Tensor:
    """Return where the slope is under 1 % of the steepest one of the activation."""
    if isinstance(module, nn.Tanh):
        return 1 - output.square() < 0.01
    if isinstance(module, nn.Sigmoid):
        return 4 * output * (1 - output) < 0.01
    return output.abs() >= 1


def saturated(after: bool = False) -> Proof:
    """Return the proof that over 90 % of a named activation's outputs are flat, and the loss is far from solved."""

    def proof(case: Case) -> Figures:
        program = case.build()
        first = float(whole_loss(program).detach())
        losses = program.train()
        last = float(whole_loss(program).detach())
        program = program if after else case.build()
        rates = active(program, (nn.Tanh, nn.Sigmoid, nn.Hardtanh), flatness)
        flat = {name: float(rate.mean()) for name, rate in rates.items()}
        good = max(v for name, v in flat.items() if name.startswith(case.where)) > 0.9
        return good and not last < 0.3 * first and math.isfinite(losses[-1]), {"flat": flat, "loss": (first, last)}

    return proof


def numerical(case: Case) -> Figures:
    """Loss or a gradient stops being finite, at the very step that ``facts`` names."""
    program = case.build()
    for t in range(program.steps):
        loss = program.step(t)["loss"]
        weights = [p for p in program.model.parameters() if not torch.isfinite(p).all()]
        grads = [p for p in program.model.parameters() if p.grad is not None and not torch.isfinite(p.grad).all()]
        if weights or grads or not math.isfinite(loss):
            return t == program.facts["step"], {"step": t, "loss": loss, "grads": len(grads), "weights": len(weights)}
    return False, {}


def gradients(program: Program) -> Tensor:
    """Return the float64 gradient of each step at the weights the run visits."""
    rows = []
    for t in range(program.steps):
        model, batch = twin(program), program.batches[t % len(program.batches)]
        loss = program.loss(model, wide(batch))
        rows.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))]))
        program.step(t)
    return torch.stack(rows)


def swinging_norms(case: Case) -> Figures:
    """At three steps or more the exact norm is over 25 times the run's median (healthy: under 8 times)."""
    norms = gradients(case.build()).norm(dim=1)
    times = norms / norms.median()
    return int((times > 25).sum()) >= 3, {"max/median": float(times.max()), "steps": int((times > 25).sum())}


def zigzag(case: Case) -> Figures:
    """Successive exact gradients point against each other for half the run or more, and the loss gets no better."""
    program = case.build()
    rows = gradients(program)
    cosines = torch.cosine_similarity(rows[1:], rows[:-1], dim=1)
    first = float(whole_loss(case.build()).detach())
    last = float(whole_loss(program).detach())
    return float(cosines.median()) < -0.8 and last > 0.9 * first, {
        "cosine": float(cosines.median()),
        "loss": (first, last),
    }


def narrow(case: Case) -> Figures:
    """Entropy rank of the named block's exact Jacobian is a quarter of the other blocks' or less."""
    program, inputs, ranks = case.build(), {}, {}
    model = twin(program)
    for name in program.blocks or []:
        model.get_submodule(name).register_forward_pre_hook(lambda _m, i, name=name: inputs.update({name: i[0]}))
    program.loss(model, wide(program.batches[0]))
    for name, value in dict(inputs).items():
        x = value[:1].detach()
        module = model.get_submodule(name).eval()
        matrix = torch.autograd.functional.jacobian(module.forward, x).reshape(-1, x.numel())
        share = torch.linalg.svdvals(matrix)
        share = share / share.sum()
        ranks[name] = float(torch.special.entr(share).sum().exp())
    rest = sorted(v for name, v in ranks.items() if name not in case.where)
    return min(ranks[n] for n in case.where if n in ranks) <= rest[len(rest) // 2] / 4, {"ranks": ranks}


def stagnant(case: Case) -> Figures:
    """Every trainable parameter below ``where`` keeps its bits, and all others move."""
    program = case.build()
    start = {name: p.detach().clone() for name, p in program.model.named_parameters() if p.requires_grad}
    program.train()
    same = {n for n, p in program.model.named_parameters() if n in start and torch.equal(p, start[n])}
    wanted = {name for name in start if name.startswith(case.where)}
    return same == wanted and len(wanted) > 0, {"same": len(same), "wanted": len(wanted), "difference": same ^ wanted}


def spikes(case: Case) -> Figures:
    """At the named step the loss is over 8 times the largest of the eight before (healthy: under 7 times)."""
    program = case.build()
    losses, at = program.train(), program.facts["step"]
    times = losses[at] / max(losses[at - 8 : at])
    return times > 8 and math.isfinite(losses[at]), {"times": times, "before": losses[at - 1], "at": losses[at]}


def curve(shape: Callable[[list[float]], bool]) -> Callable[[Case], Figures]:
    """Return the proof that the losses have a shape."""

    def proof(case: Case) -> Figures:
        losses = case.build().train()
        return shape(losses), {"curve": [round(loss, 5) for loss in losses[:: max(len(losses) // 8, 1)]]}

    return proof


def leaks(case: Case) -> Figures:
    """Bytes kept grow by over a megabyte with every step, to the last one."""
    program = case.build()
    kept = []
    for t in range(program.steps):
        program.step(t)
        kept.append(program.facts["kept"]())
    steps = [b - a for a, b in itertools.pairwise(kept)]
    return min(steps) > 1e6, {"smallest step": min(steps), "kept": kept[-1]}


def fills_up(case: Case) -> Figures:
    """Bytes kept stop growing before the middle of the run."""
    program = case.build()
    kept = []
    for t in range(program.steps):
        program.step(t)
        kept.append(program.facts["kept"]())
    return kept[len(kept) // 2] == kept[-1] > 0, {"middle": kept[len(kept) // 2], "end": kept[-1]}
