"""Every metric against float64 arithmetic on the loop's own tensors, and float32 loops against float64 ones.

``python benchmarks/truth.py`` trains small models in loops of many kinds, each watched with every instrument at every
step. Beside each step the loop computes what the record should say, from its own gradients and activations, in float64,
by the definitions; nothing of the package takes part in that. Printed is, for each metric, the worst relative error
over all loops, steps and sites, the loop it was found in, and, where a value is an estimate, the error that its record
states.
The second table compares float32 loops with the same step in float64: what is lost there is lost by the arithmetic of
the model. Metrics that no formula can check are listed by kind. The exit status is 1 when an error above 1e-5 is not
stated by the record.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import math
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch
from torch import nn

from gradflow_export import Exporter, MemoryWriter
from gradflow_export.records.catalog import CATALOG
from gradflow_export.rules.sampled import SURE
from gradflow_export.schedule import INTERVALS

TOLERANCE = 1e-5
STEPS = 6
EPS = 1e-30

_PATH = Path(__file__).parents[1] / "tests" / "reference" / "twins.py"
_SPEC = importlib.util.spec_from_file_location("twins", _PATH)
twins = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(twins)

OF_PARAMETERS = {
    "optimizer.adam_rms": "parameter.adam_rms_error",
    "optimizer.epsilon_share": "parameter.epsilon_share_error",
}
"""Metrics that are off by no more than what they are the greatest or the median of."""

UNCHECKED = {
    "clocks": ("runtime.step_time", "runtime.backward_time", "runtime.loss_time", "runtime.optimizer_time",
               "runtime.throughput", "overhead", "schedule."),
    "memory of the machine": ("runtime.rss", "runtime.vms", "runtime.memory_limit", "runtime.cuda_"),
    "counts of what went wrong or was left out": ("runtime.skipped", "runtime.dropped", "runtime.lost",
                                                  "debugging.", "origin."),
    "evidence of silent mistakes; each has programs with and without the mistake in tests/pathologies": (
        "parameter.copy_gap", "block.rank_residual", "block.input_residual", "block.next"),
    "gaps between processes; tests/distributed": ("parameter.replica_gap",),
    "windows of many steps, or analyses of the worker; each has a twin in tests/reference": (
        "flow.", "gradient.coherence", "gradient.noise_scale", "node.", "phase.", "magnitude.", "attention.",
        "policy.", "recurrent.lyapunov", "recurrent.decay", "recurrent.memory_length", "update.lost_share",
        "update.effectiveness", "update.changed_nodes", "gradient.clipped_share", "activation.",
        "runtime.accumulated_share", "parameter.lost_share", "parameter.intended_share",
        "parameter.changed_share", "parameter.update_error", "parameter.update_cosine",
        "parameter.update_effectiveness", "parameter.master", "parameter.rate_effectiveness", "loss.component"),
}  # fmt: skip


def flat(tensors):
    """Join tensors into one vector of float64; sparse ones by all their entries."""
    return torch.cat([(t.to_dense() if t.is_sparse else t).detach().double().reshape(-1) for t in tensors])


def thinned(rows, most, features):
    """Return at most so many rows and columns, evenly spaced."""
    across = max(-(-len(rows[0]) // features), 1)
    return [row[::across] for row in rows[:: max(-(-len(rows) // most), 1)]]


class Loop:
    """One training loop that keeps what a record should be compared with.

    Args:
        model: Its children in ``model.blocks`` are the blocks.
        optimizers: They step one after the other.
        batches: Per step a list of micro-batches.
        clip: Greatest norm of the gradient.
        autocast: Type that the forward pass is cast to.
        scaler: A gradient scaler.
    """

    def __init__(self, model, optimizers, batches, *, clip=None, autocast=None, scaler=None):
        self.model, self.optimizers, self.batches = model, optimizers, batches
        self.clip, self.autocast, self.scaler = clip, autocast, scaler
        self.criterion, self.before, self.pools = nn.CrossEntropyLoss(), None, []
        self.scales, self.number, self.rows, self.uniform = [], 0, 0, []
        self.blocks = {f"blocks.{i}": block for i, block in enumerate(model.blocks)}

    def run(self):
        """Train; yield records, what they should say, and the same in float64 where the loop is float32."""
        memory = MemoryWriter()
        intervals = {name: 1 for name in INTERVALS if name != "histograms"}
        exporter = Exporter(
            self.model, backends=[memory], intervals=intervals, alerts_enabled=False, strict=True, budget=None
        )
        told, wide = [], []
        with exporter.watch(self.criterion, blocks=list(self.blocks.values())):
            for micro in self.batches:
                twin = copy.deepcopy(self.model).double() if self.autocast is None else None
                wide.append(None if twin is None else self.in_float64(twin, micro))
                told.append(self.step(micro))
        return zip(memory.records, told, wide, strict=True)

    def step(self, micro):
        """Do one step, and return what its record should say."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        losses, passes, first = [], [], None
        for x, y in micro:
            outputs, inputs = {}, {}
            hooks = [m.register_forward_hook(self.keeper(n, outputs, inputs)) for n, m in self.model.named_modules()]
            with torch.autocast("cpu", self.autocast or torch.bfloat16, enabled=self.autocast is not None):
                logits = self.model(x)
                loss = self.criterion(logits, y) / len(micro)
            logits.retain_grad()
            for hook in hooks:
                hook.remove()
            (loss if self.scaler is None else self.scaler.scale(loss)).backward()
            passes.append((outputs, inputs, logits, y))
            losses.append(float(loss.detach().double()))
            first = self.norm(scaled=True) if first is None else first
        factor = 1.0 if self.scaler is None else self.scaler.get_scale()
        if self.scaler is not None:
            for optimizer in self.optimizers:
                self.scaler.unscale_(optimizer)
        whole = self.norm(scaled=False)
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        named = dict(self.model.named_parameters())
        gradients = {n: None if p.grad is None else p.grad.detach().clone() for n, p in named.items()}
        old = {n: p.detach().clone() for n, p in named.items()}
        for optimizer in self.optimizers:
            optimizer.step() if self.scaler is None else self.scaler.step(optimizer)
        if self.scaler is not None:
            self.scaler.update()
        new = {n: p.detach() for n, p in named.items()}
        out = {"loss": {"": sum(losses)}, **self.of_gradients(gradients), **self.of_weights(old, new)}
        self.number += 1
        self.scales = [*self.scales[-19:], out["gradient.total_norm"][""] / whole]
        out |= self.of_players(gradients, sum(losses))
        out |= {"gradient.clipped_share": {"": sum(s < 0.999 for s in self.scales) / len(self.scales)},
                "runtime.accumulated_share": {"": (len(micro) - 1) / len(micro)}}  # fmt: skip
        if self.scaler is not None:
            out["gradient.loss_scale"] = {"": factor}
        out |= {"gradient.norm_before_clip": {"": whole}, "gradient.first_norm": {"": first},
                "gradient.clip_scale": {"": out["gradient.total_norm"][""] / whole}}  # fmt: skip
        out |= self.of_moments(gradients) | self.of_passes(passes, factor)
        self.before = gradients
        return out

    def keeper(self, name, outputs, inputs):
        """Return a hook that keeps a module's output with its gradient."""

        def keep(_module, args, output):
            output = output[0] if isinstance(output, tuple) else output
            if isinstance(output, torch.Tensor) and output.requires_grad:
                output.retain_grad()
                outputs[name], inputs[name] = output, args

        return keep

    def norm(self, *, scaled):
        """Return the norm of all gradients as they are now, without what a gradient scaler put in."""
        there = [p.grad for p in self.model.parameters() if p.grad is not None]
        return float(flat(there).norm()) / (self.scaler.get_scale() if scaled and self.scaler is not None else 1.0)

    def of_gradients(self, gradients):
        """Return what follows from the gradients that the optimizers used."""
        there = {n: g for n, g in gradients.items() if g is not None}
        functions = {"gradient_norm": twins.l2, "gradient_l1": twins.l1, "gradient_linf": twins.linf}
        functions |= {"gradient_mean": twins.mean, "zero_share": twins.zero_share, "nonfinite": twins.nonfinite}
        out = {f"parameter.{m}": {n: f(g) for n, g in there.items()} for m, f in functions.items()}
        norms = list(out["parameter.gradient_norm"].values())
        mean, std = twins.stats(norms)
        run = {"total_norm": math.sqrt(math.fsum(n * n for n in norms)), "mean_norm": mean, "std_norm": std,
               "max_norm": max(norms), "min_norm": min(norms), "with_grad": len(norms), "nonfinite": 0.0}  # fmt: skip
        if self.before is not None and not any(g.is_sparse for g in there.values()):
            a, b = flat(there.values()), flat([self.before[n] for n in there])
            run["cosine"] = float(a @ b / (a.norm() * b.norm()))
        return out | {f"gradient.{n}": {"": v} for n, v in run.items()}

    def of_players(self, gradients, loss):
        """Return what each of several optimizers did; all of them use every backward pass of these loops."""
        if len(self.optimizers) < 2 or self.number < 2:  # in the first step nobody knows how many there will be
            return {}
        names = {id(p): n for n, p in self.model.named_parameters()}
        sites = [f"{type(optimizer).__name__}.{number}" for number, optimizer in enumerate(self.optimizers)]
        own = [[gradients[names[id(p)]] for g in o.param_groups for p in g["params"]] for o in self.optimizers]
        norms = [float(flat([g for g in some if g is not None]).norm()) for some in own]
        return {
            "optimizer.gradient_norm": dict(zip(sites, norms, strict=True)),
            "optimizer.loss": dict.fromkeys(sites, loss),
            "optimizer.steps": dict.fromkeys(sites, float(self.number)),
        }

    def of_weights(self, old, new):
        """Return what follows from the weights before and after."""
        sizes = {n: float(w.double().norm()) for n, w in old.items()}
        moves = {n: float((new[n].double() - w.double()).norm()) for n, w in old.items()}
        owned = {id(p): g["lr"] for o in self.optimizers for g in o.param_groups for p in g["params"]}
        named = dict(self.model.named_parameters())
        total, size = (math.sqrt(math.fsum(v * v for v in values.values())) for values in (moves, sizes))
        return {
            "parameter.weight_norm": sizes,
            "parameter.update_norm": moves,
            "parameter.update_ratio": {n: moves[n] / sizes[n] for n in old if sizes[n]},
            "parameter.changed": {n: float(not torch.equal(new[n], old[n])) for n in old},
            "parameter.learning_rate": {n: owned[id(p)] for n, p in named.items()},
            "parameter.trainable": {n: float(p.requires_grad) for n, p in named.items()},
            "parameter.numel": {n: float(p.numel()) for n, p in named.items()},
            "update.total_norm": {"": total},
            "update.ratio": {"": total / size},
            "learning_rate": {"": max(owned.values())},
        }

    def of_moments(self, gradients):
        """Return what follows from the state of the optimizers after the step."""
        names = {id(p): n for n, p in self.model.named_parameters()}
        ratios, small, momenta = {}, {}, {}
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                for p in group["params"]:
                    state, name = optimizer.state.get(p, {}), names[id(p)]
                    momentum = state.get("momentum_buffer", state.get("exp_avg"))
                    if momentum is not None:
                        momenta[name] = float(momentum.double().norm())
                    if "exp_avg_sq" not in state or gradients[name].is_sparse:
                        continue
                    v = state["exp_avg_sq"].double() / (1 - group["betas"][1] ** float(state["step"]))
                    ratios[name] = float((gradients[name].double() ** 2 / v.clamp(min=group["eps"] ** 2)).mean().sqrt())
                    known = v[v > 0]
                    small[name] = float((known.sqrt() < group["eps"]).double().mean()) if len(known) else 0.0
        out = {"parameter.momentum_norm": momenta} if momenta else {}
        if ratios:
            out |= {
                "parameter.adam_rms": ratios,
                "parameter.epsilon_share": small,
                "optimizer.adam_rms": {"": max(ratios.values())},
                "optimizer.epsilon_share": {"": float(np.median(list(small.values())))},
            }
        return out

    def of_passes(self, passes, factor):
        """Return what follows from outputs, logits and targets of all micro-batches together."""
        logits = torch.cat([p[2].detach().double() for p in passes])
        rows, targets = logits.tolist(), [y for p in passes for y in p[3].tolist()]
        out = {n: {"": v} for n, v in (twins.logit_metrics(rows) | twins.target_metrics(rows, targets)).items()}
        sent = torch.cat([p[2].grad.double() for p in passes]) / factor
        out["upstream.norm"] = {"": float(sent.norm())}
        out["upstream.mean_norm"] = {"": float(sent.norm(dim=1).mean())}
        out["upstream.zero_share"] = {"": float((sent == 0).double().mean())}
        out["upstream.nonfinite_share"] = {"": 0.0}
        last = passes[-1][0]
        tanh = [n for n, m in self.model.named_modules() if isinstance(m, nn.Tanh) and n in last]
        out["activation.zero_share"] = {n: float((last[n] == 0).double().mean()) for n in tanh}
        flats = {n: float((1 - last[n].detach().double() ** 2 < 0.01).double().mean()) for n in tanh}
        out["activation.saturated_share"] = flats
        norms, sizes, spreads = {}, {}, {}
        for name in self.blocks:
            every = [p[0][name] for p in passes]
            norms[name] = float(flat([o.grad for o in every]).norm()) / factor
            sizes[name] = float(flat(every[-1:]).square().mean().sqrt())
            spreads[name] = twins.spread(twins.rows_of(every[-1].detach().double()))
        greatest = {n: float(passes[-1][0][n].detach().abs().max()) for n in self.blocks}
        out |= {"block.gradient_norm": norms, "block.output_rms": sizes, "block.output_spread": spreads,
                "block.output_max": greatest, "block.peak_ratio": {n: greatest[n] / sizes[n] for n in sizes},
                "runtime.backward_passes": {"": float(len(passes))}}  # fmt: skip
        if len(passes) == 1:
            # The metric is of so many rows and columns, evenly spaced.
            features = min(max(math.isqrt(2**18 // len(self.blocks)), 64), 512)
            taken = {n: twins.rows_of(passes[0][0][n].detach().double()) for n in self.blocks}
            some = {n: thinned(rows, min(features // 2, 256), features) for n, rows in taken.items()}
            self.pools = [*self.pools[-3:], some]
            joined = {n: [row for pool in self.pools for row in pool[n]] for n in self.blocks}
            out |= {"block.effective_rank": {n: twins.effective_rank(rows) for n, rows in joined.items()},
                    "block.stable_rank": {n: twins.stable_rank(rows) for n, rows in joined.items()}}  # fmt: skip
        values = list(norms.values())
        gains, logs = twins.gains(values), twins.log_gains(values)
        sites = list(norms)[1:]
        out["block.gain"], out["block.log_gain"] = (
            dict(zip(sites, gains, strict=True)),
            dict(zip(sites, logs, strict=True)),
        )
        run = {"min": min(gains), "max": max(gains), "mean_log": twins.stats(logs)[0], "depth": math.fsum(logs),
               "slope": twins.depth_slope(values)}  # fmt: skip
        out |= {f"gain.{n}": {"": v} for n, v in run.items()}
        return out | self.of_recurrence(passes) | self.of_data(passes)

    def of_data(self, passes):
        """Return what enters the first layer, where that takes rows of numbers, and how many targets there were."""
        targets = [p[3] for p in passes]
        self.rows += sum(map(len, targets))
        self.uniform += [float(len(set(y.tolist())) == 1) for y in targets]
        out = {"target.rows": {"head": float(self.rows)},
               "target.uniform_share": {"head": float(np.mean(self.uniform))}}  # fmt: skip
        x = passes[-1][1]["first"][0].detach()
        if not x.is_floating_point() or x.dim() != 2:
            return out
        x = (x if self.autocast is None else x.to(self.autocast)).double().numpy()  # what the layer computes with
        sizes = np.sqrt((x**2).mean(axis=0))
        told = {"rms": np.sqrt((x**2).mean()), "mean": x.mean(), "std": x.std(), "max": np.abs(x).max(),
                "feature_ratio": sizes.max() / np.median(sizes[sizes > 0]), "whole_share": (x == x.round()).mean(),
                "constant_share": (x == x[:1]).all(axis=0).mean()}  # fmt: skip
        return out | {f"input.{name}": {"first": float(value)} for name, value in told.items()}

    def of_recurrence(self, passes):
        """Return medians over all states of what autograd's Jacobian of one step says, for a GRU."""
        ((site, layer),) = [(n, m) for n, m in self.model.named_modules() if isinstance(m, nn.GRU)] or [(None, None)]
        if layer is None:
            return {}
        cell = nn.GRUCell(layer.input_size, layer.hidden_size).double()
        for part in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
            getattr(cell, part).data = self.states[f"{part}_l0"].double()
        x = passes[-1][1][site][0].detach().double()
        radii, norms, ranks = [], [], []
        for sequence in x:
            h = torch.zeros(1, layer.hidden_size, dtype=torch.float64)
            for now in sequence:
                jacobian = torch.autograd.functional.jacobian(lambda s, now=now: cell(now[None], s)[0], h)[:, 0].numpy()
                sigma = np.linalg.svd(jacobian, compute_uv=False)
                share = sigma / sigma.sum()
                radii.append(np.abs(np.linalg.eigvals(jacobian)).max())
                norms.append(sigma[0])
                ranks.append(math.exp(-(share * np.log(share)).sum()))
                h = cell(now[None], h).detach()
        rank = float(np.median(ranks))
        return {"recurrent.spectral_radius": {site: float(np.median(radii))},
                "recurrent.spectral_norm": {site: float(np.median(norms))},
                "recurrent.effective_rank": {site: rank},
                "recurrent.rank_share": {site: rank / layer.hidden_size},
                "recurrent.length": {site: float(x.shape[1])}}  # fmt: skip

    @property
    def states(self):
        """The weights of a recurrent layer before the step."""
        return self.recurrent

    def in_float64(self, twin, micro):
        """Return losses and gradient norms of the same step in float64; also keep the weights before it."""
        self.recurrent = {n: p.detach().clone() for m in self.model.modules() if isinstance(m, nn.GRU)
                          for n, p in m.named_parameters()}  # fmt: skip
        losses = []
        twin.zero_grad()
        for x, y in micro:
            loss = nn.functional.cross_entropy(twin(x.double() if x.is_floating_point() else x), y) / len(micro)
            loss.backward()
            losses.append(float(loss.detach()))
        there = {n: p.grad for n, p in twin.named_parameters() if p.grad is not None}
        total = float(flat(there.values()).norm())
        part = min(self.clip / (total + 1e-6), 1.0) if self.clip is not None else 1.0
        return {"loss": {"": sum(losses)}, "gradient.total_norm": {"": total * part},
                "parameter.gradient_norm": {n: twins.l2(g) * part for n, g in there.items()}}  # fmt: skip


class Deep(nn.Module):
    """Blocks between an input layer and a head."""

    def __init__(self, first, blocks, head):
        super().__init__()
        self.first, self.blocks, self.head = first, nn.ModuleList(blocks), head

    def forward(self, x):
        """Return logits. Shape: ``[batch, classes]``."""
        x = self.first(x)
        x = x.mean(dim=1) if x.dim() == 3 and not isinstance(self.blocks[0], nn.GRU) else x
        for block in self.blocks:
            x = block(x)
            x = x[0] if isinstance(x, tuple) else x
        return self.head(x[:, -1] if x.dim() == 3 else x)


class Tied(nn.Module):
    """Embedding and head share one matrix."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Embedding(30, 12), nn.Linear(12, 30, bias=False)
        self.head.weight = self.first.weight
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(12, 12), nn.Tanh()) for _ in range(3))

    def forward(self, x):
        """Return logits. Shape: ``[batch, 30]``."""
        x = self.first(x).mean(dim=1)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def layers(width, count=3):
    """Return blocks of a linear layer and a bend each."""
    return [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(count)]


def dense(dtype=torch.float32, width=16):
    """Return a model of linear layers."""
    return Deep(nn.Linear(10, width), layers(width), nn.Linear(width, 5)).to(dtype)


def numbers(micro=1, dtype=torch.float32, size=8):
    """Return batches of rows and classes."""
    return [[(torch.randn(size, 10).to(dtype), torch.randint(5, (size,))) for _ in range(micro)] for _ in range(STEPS)]


def words(vocabulary, classes, size=8):
    """Return batches of words and classes."""
    return [[(torch.randint(vocabulary, (size, 4)), torch.randint(classes, (size,)))] for _ in range(STEPS)]


def sequences(length=9):
    """Return batches of sequences and classes."""
    return [[(torch.randn(3, length, 6), torch.randint(5, (3,)))] for _ in range(STEPS)]


def sgd(model, **given):
    """Return one optimizer over all of it."""
    return [torch.optim.SGD(model.parameters(), lr=0.1, **given)]


def loops():
    """Yield the name of each loop and the loop, one after the other."""
    torch.manual_seed(0)
    model = dense()
    yield "dense, SGD", Loop(model, sgd(model, momentum=0.9), numbers())
    model = dense()
    yield "dense, AdamW", Loop(model, [torch.optim.AdamW(model.parameters(), lr=1e-2)], numbers())
    model = dense(torch.float64)
    yield "dense, float64", Loop(model, sgd(model), numbers(dtype=torch.float64))
    model = dense(width=600)
    yield "dense, long", Loop(model, sgd(model, momentum=0.9), numbers())
    model = Deep(nn.Embedding(50, 16, sparse=True), layers(16), nn.Linear(16, 5))
    rest = [p for n, p in model.named_parameters() if "first" not in n]
    split = [torch.optim.SparseAdam(model.first.parameters(), lr=1e-2), torch.optim.Adam(rest, lr=1e-2)]
    yield "sparse, two optimizers", Loop(model, split, words(50, 5))
    for sparse in (True, False):
        model = Deep(nn.Embedding(40_000, 32, sparse=sparse), layers(32), nn.Linear(32, 5))
        yield f"long table, {'sparse' if sparse else 'dense'}, SGD", Loop(model, sgd(model), words(40_000, 5))
    model = Deep(nn.Embedding(40_000, 32), layers(32), nn.Linear(32, 5))
    yield "long table, Adam", Loop(model, [torch.optim.Adam(model.parameters(), lr=1e-2)], words(40_000, 5))
    model = dense()
    yield "accumulated", Loop(model, sgd(model), numbers(micro=3))
    model = dense()
    yield "clipped", Loop(model, sgd(model), numbers(), clip=0.05)
    model = dense()
    yield "accumulated and clipped", Loop(model, sgd(model), numbers(micro=3), clip=0.05)
    model = dense()
    yield "bfloat16 autocast", Loop(model, sgd(model), numbers(), autocast=torch.bfloat16)
    model = dense()
    yield (
        "gradient scaler",
        Loop(
            model, sgd(model), numbers(), autocast=torch.bfloat16, scaler=torch.amp.GradScaler("cpu", init_scale=1024.0)
        ),
    )
    model = dense()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**15)
    yield (
        "gradient scaler, accumulated and clipped",
        Loop(model, sgd(model), numbers(micro=2), clip=0.05, scaler=scaler),
    )
    model = dense()
    pair = [
        torch.optim.SGD(model.first.parameters(), lr=0.1),
        torch.optim.Adam([*model.blocks.parameters(), *model.head.parameters()]),
    ]
    yield "two optimizers, accumulated and clipped", Loop(model, pair, numbers(micro=3), clip=0.05)
    model = dense()
    halves = [list(model.first.parameters()) + list(model.blocks.parameters()), list(model.head.parameters())]
    yield "two optimizers", Loop(model, [torch.optim.SGD(halves[0], lr=0.1), torch.optim.Adam(halves[1])], numbers())
    model = Tied()
    yield "shared parameter", Loop(model, sgd(model), words(30, 30))
    for length in (9, 40):
        model = Deep(nn.Linear(6, 8), [nn.GRU(8, 8, batch_first=True), nn.Sequential(nn.Linear(8, 8), nn.Tanh())],
                     nn.Linear(8, 5))  # fmt: skip
        yield f"recurrent, {length} states a sequence", Loop(model, sgd(model), sequences(length))


def compared(record, told):
    """Yield metric, relative error, and the error that the record states, for each value that should be there."""
    for metric, sites in told.items():
        reading, kind = record.get(metric), CATALOG[metric]
        if reading is None:
            continue
        found = reading.as_dict()
        name = OF_PARAMETERS.get(metric, kind.error)
        errors = record.get(name).as_dict() if name and record.get(name) is not None else {}
        if metric in OF_PARAMETERS and errors:
            errors = {"": max(error or 0.0 for error in errors.values())}
        share = kind.error and CATALOG[kind.error].unit == "share"
        scale = max((abs(v) for v in sites.values()), default=0.0)
        for site, value in sites.items():
            got = found.get(site)
            if got is None:
                yield metric, math.inf, 0.0
                continue
            # What is a sum of terms that cancel is compared with their size, which for these is about 1.
            size = max(abs(value), 1e-3 * scale, 1.0 if kind.low is None or kind.low < 0 else 0.0)
            stated = (errors.get(site) or 0.0) * (abs(value) if share else 1.0) / (size or 1.0)
            yield metric, 0.0 if got == value else abs(got - value) / (size or 1.0), stated


def measure():
    """Return, by metric, worst error, loop and stated error of both comparisons, and what was ever compared."""
    exact, narrow = {}, {}
    sampled = defaultdict(lambda: (0.0, 0.0))
    for name, loop in loops():
        for record, told, wide in loop.run():
            for metric, error, stated in compared(record, told):
                if stated > 0:
                    sampled[metric] = max(sampled[metric], (error / stated, stated))
                elif metric not in exact or error > exact[metric][0]:
                    exact[metric] = (error, name)
            if wide is not None:
                for metric, error, stated in compared(record, wide):
                    if not stated and (metric not in narrow or error > narrow[metric][0]):
                        narrow[metric] = (error, name)
    return exact, narrow, sampled


BY_VERDICTS = ("memory of the machine", "counts of what", "evidence of silent mistakes")
"""Kinds of metrics that nothing but the verdicts of programs with and without a mistake may test."""


def tell(metrics, tests):
    """Print which files of tests name each metric; return how many are named by none."""
    missing = 0
    for metric in metrics:
        family, _, name = metric.partition(".")
        words = [f'"{metric}"'], [f'"{family}.{{', f'"{name}"'], [f'"{family}.', f"{{{name}}}"]
        found = [path.stem for path, text in tests.items() if any(all(w in text for w in every) for every in words)]
        missing += not found
        print(f"  {metric:34} {', '.join(found[:3]) or 'in no test by its name'}{' ...' if len(found) > 3 else ''}")
    return missing


def main():
    """Print the tables; return how many metrics are off by more than they say."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    torch.set_num_threads(1)
    exact, narrow, sampled = measure()
    print(f"{'metric':36} {'worst relative error':>21}  loop")
    wrong = 0
    for metric in sorted(exact.keys() | sampled.keys()):
        error, name = exact.get(metric, (0.0, "-"))
        off = not error <= TOLERANCE
        words = f"{error:>21.1e}  {name}"
        if metric in sampled:
            times, stated = sampled[metric]
            words += f"; where estimated: {times:.1f} standard errors of {stated:.1e}"
            off |= times > 2 * SURE
        wrong += off
        print(f"{metric:36} {words}{'  TOO MUCH' if off else ''}")
    print(f"\nfloat32 loops against the same step in float64\n{'metric':36} {'worst relative error':>21}  loop")
    for metric, (error, name) in sorted(narrow.items()):
        print(f"{metric:36} {error:>21.1e}  {name}")
    left = [m for m in CATALOG if m not in exact and m not in sampled]
    print("\nnot compared here, with the files of tests that do")
    tests = {path: path.read_text(encoding="utf-8") for path in sorted(_PATH.parents[1].rglob("test_*.py"))}
    for kind, names in UNCHECKED.items():
        mine = [m for m in left if m.startswith(names)]
        left = [m for m in left if m not in mine]
        print(f"- {kind}")
        missing = tell(mine, tests)
        wrong += 0 if kind.startswith(BY_VERDICTS) else missing
    print("- the stated errors themselves, in the first table; else")
    wrong += tell(
        [m for m in left if not m.endswith("_error") or not any(CATALOG[n].error == m for n in sampled)], tests
    )
    print(f"\n{wrong} metrics are off by more than {TOLERANCE:g}, or than they say")
    return wrong


if __name__ == "__main__":
    sys.exit(bool(main()))
