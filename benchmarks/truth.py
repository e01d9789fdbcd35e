"""Every metric against float64 arithmetic on the loop's own tensors, and float32 loops against float64 ones.

``python benchmarks/truth.py`` trains small models in loops of many kinds, each watched with every instrument at every
step. Beside each step the loop computes what the record should say, from its own gradients and activations, in float64,
by the definitions; nothing of the package takes part in that. Metrics that say something only in certain loops (NaN,
attention, policies) have cases of their own in ``truth_cases.py``. Printed is, for each metric, the worst relative
error over all loops, steps and sites, the loop it was found in, and, where a value is an estimate, how far off it was
in units of the error that its record states. ``--write`` puts the tables into docs/accuracy.md.

The second table compares float32 loops with the same step in float64: what is lost there is lost by the arithmetic of
the model. Metrics that no arithmetic can check are listed by reason. The exit status is 1 when an error above 1e-5 is
not stated by the record, when a metric of the catalogue is neither compared nor listed, when a record lacks what it
should hold, or when a metric that the records of a kind of loop hold is compared in no loop of that kind.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import itertools
import math
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch
from torch import nn
from truth_cases import cases
from truth_kinds import (
    KINDS,
    POINTS,
    Everything,
    Small,
    attended,
    kinds_of,
    of_attention,
    of_policy,
    policies,
)
from truth_kinds import (
    Path as Way,
)

from gradflow_export import Exporter, MemoryWriter
from gradflow_export.records.catalog import CATALOG
from gradflow_export.rules.sampled import SURE
from gradflow_export.schedule import INTERVALS, RANK_STEPS

TOLERANCE = 1e-5
STEPS = 6
PAGE = Path(__file__).parents[1] / "docs" / "accuracy.md"
BEGIN, END = "<!-- truth: begin -->", "<!-- truth: end -->"

_PATH = Path(__file__).parents[1] / "tests" / "reference" / "twins.py"
_SPEC = importlib.util.spec_from_file_location("twins", _PATH)
twins = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(twins)

OF_PARAMETERS = {
    "optimizer.adam_rms": "parameter.adam_rms_error",
    "optimizer.epsilon_share": "parameter.epsilon_share_error",
}
"""Metrics that are off by no more than what they are the greatest or the median of."""

REASONS = {
    "a clock": ("runtime.step_time", "runtime.backward_time", "runtime.loss_time", "runtime.optimizer_time",
                "runtime.throughput", "runtime.waited", "overhead"),
    "decided by clocks": ("schedule.asked", "schedule.suspected", "schedule.late_requests", "schedule.stretch",
                          "schedule.spacing", "runtime.dropped"),
    "memory of the process": ("runtime.rss", "runtime.vms", "runtime.memory_limit", "runtime.kept"),
    "memory of a GPU": ("runtime.cuda_allocated", "runtime.cuda_reserved", "runtime.cuda_peak", "runtime.cuda_limit"),
    "needs several processes: tests/distributed": ("parameter.replica_gap", "origin.rank"),
    "the error that another metric states of itself": tuple(
        sorted({kind.error for kind in CATALOG.values() if kind.error} | set(OF_PARAMETERS.values()))),
}  # fmt: skip
"""Metrics that no arithmetic on a loop's tensors can tell, by reason."""


def flat(tensors):
    """Join tensors into one vector of float64; sparse ones by all their entries."""
    return torch.cat([(t.to_dense() if t.is_sparse else t).detach().double().reshape(-1) for t in tensors])


def thinned(rows, most, features):
    """Return at most so many rows and columns, evenly spaced."""
    across = max(-(-len(rows[0]) // features), 1)
    return [row[::across] for row in rows[:: max(-(-len(rows) // most), 1)]]


def names_of(model):
    """Return the name of each parameter by its identity."""
    return {id(p): name for name, p in model.named_parameters()}


class Loop:
    """One training loop that keeps what a record should be compared with.

    Args:
        model: Its children in ``model.blocks`` are the blocks.
        optimizers: They step one after the other.
        batches: Per step a list of micro-batches.
        clip: Greatest norm of the gradient.
        autocast: Type that the forward pass is cast to.
        scaler: A gradient scaler.
        pairs: As ``watch`` takes them; updates are then compared with those that plain SGD means.
        grids: As ``watch`` takes them.
        observed: Whether the logits are handed over as those of a policy, too.
    """

    def __init__(
        self,
        model,
        optimizers,
        batches,
        *,
        clip=None,
        autocast=None,
        scaler=None,
        pairs=None,
        grids=None,
        observed=False,
    ):
        self.model, self.optimizers, self.batches = model, optimizers, batches
        self.pairs, self.grids, self.changes = pairs, grids, defaultdict(list)
        self.clip, self.autocast, self.scaler = clip, autocast, scaler
        self.criterion, self.before, self.pools = nn.CrossEntropyLoss(), None, []
        self.scales, self.number = [], 0
        self.signal = self.noise = 0.0
        self.observed, self.way = observed, Way()
        self.whole = isinstance(model, Small)  # so few weights that their whole path is known
        self.fired, self.with_state = {}, set()
        self.blocks = {f"blocks.{i}": block for i, block in enumerate(model.blocks)}

    def run(self):
        """Train; yield records, what they should say, and the same in float64 where the loop is float32."""
        memory = MemoryWriter()
        intervals = {name: 1 for name in INTERVALS if name != "histograms"}
        exporter = Exporter(
            self.model, backends=[memory], intervals=intervals, alerts_enabled=False, strict=True, budget=None
        )
        told, wide = [], []
        with exporter.watch(self.criterion, blocks=list(self.blocks.values()), pairs=self.pairs, grids=self.grids):
            self.exporter = exporter
            for micro in self.batches:
                self.recurrent = {n: p.detach().clone() for m in self.model.modules() if isinstance(m, nn.GRU)
                                  for n, p in m.named_parameters()}  # fmt: skip
                narrow = self.autocast is not None or next(self.model.parameters()).element_size() < 4
                twin = None if narrow else copy.deepcopy(self.model).double()
                wide.append(None if twin is None else self.in_float64(twin, micro))
                told.append(self.step(micro))
        return zip(memory.records, told, wide, strict=True)

    def step(self, micro):
        """Do one step, and return what its record should say."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        losses, passes, first, attention = [], [], None, {}
        for x, y in micro:
            outputs, inputs = {}, {}
            hooks = [m.register_forward_hook(self.keeper(n, outputs, inputs)) for n, m in self.model.named_modules()]
            with torch.autocast("cpu", self.autocast or torch.bfloat16, enabled=self.autocast is not None):
                logits = self.model(x)
                kept = attended(self.model, inputs)
                seen = policies(logits) if self.observed else []
                loss = self.criterion(logits, y) / len(micro)
            logits.retain_grad()
            for hook in hooks:
                hook.remove()
            for policy in seen:
                self.exporter.observe(policy=policy)
            if not losses and kept:
                ends = {name: (inputs[name][0], outputs[name]) for name in kept}
                attention = of_attention(kept, ends)
            if self.pairs is not None:  # parts that a loss might have, negative ones among them
                self.exporter.observe(components={"whole": loss.detach(), "minus": -0.25 * loss.detach()})
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
        if self.whole:
            self.way.add(self.optimizers, names_of(self.model))
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
        out |= (
            attention
            | self.of_moments(gradients)
            | self.of_passes(passes, factor)
            | self.of_components(losses, len(micro))
        )
        if self.pairs is not None or self.grids is not None or next(iter(old.values())).element_size() < 4:
            out |= self.of_rounding(old, new, gradients)
        if self.pairs == "rows":
            out |= self.of_rows(old, new, gradients)
        if seen:
            tied = "head.weight" not in named
            out |= of_policy(seen, "first" if tied else "head")
        if self.whole:
            out |= self.way.told()
        if len(micro) > 1:
            out |= self.of_noise(first * len(micro), whole, len(micro))
        self.before = gradients
        return out

    def of_noise(self, first, whole, count):
        """Return the noise scale: both moments are averaged over steps, with a memory of 0.95, and then divided."""
        signal = (count * whole**2 - first**2) / (count - 1)
        noise = (first**2 - whole**2) / (1 - 1 / count)
        self.signal, self.noise = (0.95 * a + 0.05 * b for a, b in ((self.signal, signal), (self.noise, noise)))
        if self.number < 10 or self.signal <= 0:
            return {}
        return {"gradient.noise_scale": {"": max(self.noise, 0.0) / self.signal}}

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
        out, names = self.sizes_of(there), names_of(self.model)
        own = [[names[id(p)] for group in o.param_groups for p in group["params"]] for o in self.optimizers]
        dense = [
            n for some in own if not any(there[n].is_sparse for n in some if n in there) for n in some if n in there
        ]
        if self.before is not None and dense:
            a, b = (flat([gradients[n] for n in dense]) for gradients in (there, self.before))
            out["gradient.cosine"] = {"": float(a @ b / (a.norm() * b.norm()))}
        return out

    @staticmethod
    def sizes_of(there):
        """Return what each gradient says by itself, and all of them together."""
        functions = {"gradient_norm": twins.l2, "gradient_l1": twins.l1, "gradient_linf": twins.linf}
        functions |= {"gradient_mean": twins.mean, "zero_share": twins.zero_share, "nonfinite": twins.nonfinite}
        out = {f"parameter.{m}": {n: f(g) for n, g in there.items()} for m, f in functions.items()}
        norms = list(out["parameter.gradient_norm"].values())
        mean, std = twins.stats(norms)
        run = {"total_norm": math.sqrt(math.fsum(n * n for n in norms)), "mean_norm": mean, "std_norm": std,
               "max_norm": max(norms), "min_norm": min(norms), "with_grad": len(norms), "nonfinite": 0.0}  # fmt: skip
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

    def of_components(self, losses, count):
        """Return the parts of the loss that were handed over."""
        if self.pairs is None:
            return {}
        whole = sum(losses) / count
        return {"loss.component": {"whole": whole, "minus": -0.25 * whole},
                "loss.component_share": {"whole": 0.8, "minus": 0.2}}  # fmt: skip

    @property
    def rates(self):
        """The learning rate of each parameter."""
        names = names_of(self.model)
        return {names[id(p)]: g["lr"] for o in self.optimizers for g in o.param_groups for p in g["params"]}

    def of_rounding(self, old, new, gradients):
        """Return what arrives of the update ``e = -lr g`` of plain SGD, on declared grids of width ``h`` about 0."""
        rates, grids = self.rates, self.grids or {}
        out, sums = defaultdict(dict), np.zeros(5)
        for name, weight in old.items():
            if (grids and name not in grids) or gradients[name].is_sparse:
                continue
            e = -rates[name] * gradients[name].double().numpy()
            ends = [w.double().numpy() for w in (weight, new[name])]
            if name in grids:
                places = [w / grids[name] for w in ends]
                out["grid"][name] = float(np.float32(grids[name]))
                out["between"][name] = float(np.sqrt(np.mean([(p - p.round()) ** 2 for p in places])) > 1.1e-3)
                ends = [p.round() * grids[name] for p in places]
            d = ends[1] - ends[0]
            size, moved = np.sqrt((e**2).sum()), np.sqrt((d**2).sum())
            out["numel"][name], out["change_norm"][name], out["changed_share"][name] = d.size, moved, (d != 0).mean()
            out["read_share"][name], out["master"][name] = 1.0, 0.0
            out["intended_share"][name] = (e != 0).mean()
            if not size:
                continue
            lost = ((e != 0) & (d == 0)).sum()
            cosine = (d * e).sum() / (size * moved) if moved else 0.0
            score = max(cosine, 0.0) * min(moved / size, size / moved) if moved else 0.0
            out["lost_share"][name], out["update_effectiveness"][name] = lost / (e != 0).sum(), score
            out["update_error"][name] = ((d - e) ** 2).sum() / size**2
            if moved:
                out["update_cosine"][name] = cosine
            late = out["between"].get(name, 0.0) > 0
            sums += [0 if late else lost, 0 if late else (e != 0).sum(), score * d.size, d.size, moved**2]
        told = {f"parameter.{name}": values for name, values in out.items()}
        told["update.effectiveness"], told["update.change_norm"] = {"": sums[2] / sums[3]}, {"": math.sqrt(sums[4])}
        if sums[1]:
            told["update.lost_share"] = {"": sums[0] / sums[1]}
        norms = {n: (twins.l2(g), float((new[n].double() - old[n].double()).norm())) for n, g in gradients.items()}
        told["parameter.rate_effectiveness"] = {n: m / (rates[n] * g) for n, (g, m) in norms.items() if g}
        return told

    def of_rows(self, old, new, gradients):
        """Return how the rows of each matrix turned and grew, and their gradients across and along."""
        out, every, changed = defaultdict(dict), [], 0
        weights, total = 0, defaultdict(float)
        rates = self.rates
        for name, weight in old.items():
            if weight.dim() < 2 or gradients[name].is_sparse:
                continue
            a, b, g = (t.double().numpy().reshape(len(weight), -1) for t in (weight, new[name], gradients[name]))
            u, v = (w / np.linalg.norm(w, axis=1, keepdims=True) for w in (a, b))
            along = (g * u).sum(axis=1)
            across = np.linalg.norm(g - along[:, None] * u, axis=1)
            turned = 2 * np.arctan2(np.linalg.norm(u - v, axis=1), np.linalg.norm(u + v, axis=1))
            grown = np.linalg.norm(b, axis=1) - np.linalg.norm(a, axis=1)
            moved = (a != b).any(axis=1)
            values = {"phase_gradient": across.mean(), "magnitude_gradient": np.abs(along).mean(),
                      "phase_change": turned.mean(), "magnitude_change": np.abs(grown).mean(),
                      "changed_share": moved.mean(), "count": float(len(a)), "quiet_share": 0.0}  # fmt: skip
            sizes = np.hypot(across, along)
            with np.errstate(divide="ignore", invalid="ignore"):
                logs = np.log(sizes) - np.log(np.median(sizes))
            far = max(6 * 1.4826 * np.median(np.abs(logs)), math.log(20))
            quiet = np.flatnonzero(logs < -far) if np.median(sizes) else np.zeros(0, dtype=int)
            values["quiet_share"] = len(quiet) / len(a)
            for row in sorted(quiet, key=lambda row: (logs[row], row))[:8]:
                out["node.small"][f"{name}[{row}]"] = float(sizes[row] / np.median(sizes))
            for metric, value in values.items():
                out[f"node.{metric}"][name] = float(value)
                total[metric] += float(value) * len(a)
            weights += len(a)
            changed += int(moved.sum())
            every.append((across, np.abs(along)))
            self.changes[name].append(moved)
            d, e = b - a, -rates[name] * g
            for row in range(len(a)):
                known = np.array(self.changes[name])[:, row]
                out["node.update_frequency"][f"{name}[{row}]"] = float(known.mean())
                sizes = np.linalg.norm(d[row]), np.linalg.norm(e[row])
                if sizes[1]:
                    score = max((d[row] * e[row]).sum() / sizes[0] / sizes[1], 0) if sizes[0] else 0.0
                    score *= min(sizes[0] / sizes[1], sizes[1] / sizes[0]) if sizes[0] else 0.0
                    out["node.effectiveness"][f"{name}[{row}]"] = float(score)
        for which in ("phase", "magnitude"):
            for what in ("gradient", "change"):
                out[f"{which}.{what}"][""] = total[f"{which}_{what}"] / weights
        first, second = (np.concatenate(side) for side in zip(*every, strict=True))
        first, second = (side[(first > 0) & (second > 0)] for side in (first, second))
        out["phase.correlation"][""] = float(np.corrcoef(np.log(first), np.log(second))[0, 1])
        ranks = [side.argsort(kind="stable").argsort() for side in (first, second)]
        out["phase.rank_correlation"][""] = float(np.corrcoef(*ranks)[0, 1])
        out["update.changed_nodes"][""] = float(changed)
        return dict(out)

    def of_moments(self, gradients):
        """Return what follows from the state of the optimizers after the step."""
        names = {id(p): n for n, p in self.model.named_parameters()}
        ratios, small, momenta, horizons, kept = {}, {}, {}, defaultdict(dict), {}
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                rates = dict(zip(("momentum", "square"), group.get("betas", (group.get("momentum"),)), strict=False))
                for p in group["params"]:
                    state, name = optimizer.state.get(p, {}), names[id(p)]
                    for which, rate in rates.items():
                        if rate and not gradients[name].is_sparse:
                            horizons[f"parameter.{which}_steps"][name] = 1 / (1 - rate)
                    if state:
                        kept[name] = float(name in self.with_state)
                    momentum = state.get("momentum_buffer", state.get("exp_avg"))
                    if momentum is not None:
                        momenta[name] = float(momentum.double().norm())
                    if "exp_avg_sq" not in state or gradients[name].is_sparse:
                        continue
                    v = state["exp_avg_sq"].double() / (1 - group["betas"][1] ** float(state["step"]))
                    ratios[name] = float((gradients[name].double() ** 2 / v.clamp(min=group["eps"] ** 2)).mean().sqrt())
                    known = v[v > 0]
                    small[name] = float((known.sqrt() < group["eps"]).double().mean()) if len(known) else 0.0
        self.with_state |= set(kept)
        told = {"parameter.momentum_norm": momenta, "parameter.state_kept": kept}
        out = {**{metric: values for metric, values in told.items() if values}, **horizons}
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
        out, last = self.of_answers(passes, factor), passes[-1][0]
        out["runtime.backward_passes"] = {"": float(len(passes))}
        tanh, relu = ([n for n, m in self.model.named_modules() if isinstance(m, kind) and n in last]
                      for kind in (nn.Tanh, nn.ReLU))  # fmt: skip
        out["activation.zero_share"] = {n: float((last[n] == 0).double().mean()) for n in relu}
        for name in relu:  # the window is longer than these loops
            now = torch.stack([(p[0][name].detach() > 0).any(dim=0) for p in passes]).any(dim=0)
            self.fired[name] = now | self.fired.get(name, torch.zeros_like(now))
        out["activation.dead_share"] = {n: float((~self.fired[n]).double().mean()) for n in relu}
        flats = {n: float((1 - last[n].detach().double() ** 2 < 0.01).double().mean()) for n in tanh}
        out["activation.saturated_share"] = flats
        greatest = {n: float(last[n].detach().abs().max()) for n in self.blocks}
        # The metric is of so many rows and columns of the last micro-batch, evenly spaced.
        features = min(max(math.isqrt(2**18 // len(self.blocks)), 64), 512)
        taken = {n: twins.rows_of(last[n].detach().double()) for n in self.blocks}
        some = {n: thinned(rows, min(features // 2, 256), features) for n, rows in taken.items()}
        self.pools = [*self.pools[-3:], some]
        joined = {n: [row for pool in self.pools for row in pool[n]] for n in self.blocks}
        if self.number <= len(RANK_STEPS):
            sizes = out["block.output_rms"]
            out |= {"block.output_max": greatest, "block.peak_ratio": {n: greatest[n] / sizes[n] for n in sizes},
                    "block.effective_rank": {n: twins.effective_rank(rows) for n, rows in joined.items()},
                    "block.stable_rank": {n: twins.stable_rank(rows) for n, rows in joined.items()},
                    "block.rank_rows": {n: float(len(rows)) for n, rows in joined.items()}}  # fmt: skip
        return out | self.of_recurrence(passes)

    def of_answers(self, passes, factor):
        """Return what outputs, logits and targets of all micro-batches say by themselves."""
        logits = torch.cat([p[2].detach().double() for p in passes])
        rows, targets = logits.tolist(), [y for p in passes for y in p[3].tolist()]
        out = {n: {"": v} for n, v in (twins.logit_metrics(rows) | twins.target_metrics(rows, targets)).items()}
        if logits.numel() > 2**20:  # the extremes are of the samples that are looked at
            del out["logits.max"], out["logits.min"]
        sent = torch.cat([p[2].grad.double() for p in passes]) / factor
        out["upstream.norm"] = {"": float(sent.norm())}
        out["upstream.mean_norm"] = {"": float(sent.norm(dim=1).mean())}
        out["upstream.zero_share"] = {"": float((sent == 0).double().mean())}
        out["upstream.nonfinite_share"] = {"": 0.0}
        norms, sizes, spreads = {}, {}, {}
        for name in self.blocks:
            every = [p[0][name] for p in passes]
            norms[name] = float(flat([o.grad for o in every]).norm()) / factor
            sizes[name] = float(flat(every[-1:]).square().mean().sqrt())
            spreads[name] = twins.spread(twins.rows_of(every[-1].detach().double()))
        out |= {"block.gradient_norm": norms, "block.output_rms": sizes, "block.output_spread": spreads}
        values, sites = list(norms.values()), list(norms)[1:]
        gains, logs = twins.gains(values), twins.log_gains(values)
        out["block.gain"], out["block.log_gain"] = (dict(zip(sites, each, strict=True)) for each in (gains, logs))
        run = {"min": min(gains), "max": max(gains), "mean_log": twins.stats(logs)[0], "depth": math.fsum(logs),
               "slope": twins.depth_slope(values)}  # fmt: skip
        return out | {f"gain.{n}": {"": v} for n, v in run.items()}

    def of_recurrence(self, passes):
        """Return medians over all states of what autograd's Jacobian of one step says, for a GRU."""
        ((site, layer),) = [(n, m) for n, m in self.model.named_modules() if isinstance(m, nn.GRU)] or [(None, None)]
        if layer is None:
            return {}
        cell = nn.GRUCell(layer.input_size, layer.hidden_size).double()
        for part in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
            getattr(cell, part).data = self.states[f"{part}_l0"].double()
        given = [p[1][site][0].detach().double() for p in passes]
        radii, norms, ranks, chains = [], [], [], []
        for sequence in itertools.chain(*given):
            chains.append([])
            h = torch.zeros(1, layer.hidden_size, dtype=torch.float64)
            for now in sequence:
                jacobian = torch.autograd.functional.jacobian(lambda s, now=now: cell(now[None], s)[0], h)[:, 0].numpy()
                sigma = np.linalg.svd(jacobian, compute_uv=False)
                share = sigma / sigma.sum()
                radii.append(np.abs(np.linalg.eigvals(jacobian)).max())
                norms.append(sigma[0])
                ranks.append(math.exp(-(share * np.log(share)).sum()))
                chains[-1].append(jacobian)
                h = cell(now[None], h).detach()
        rank, rate = float(np.median(ranks)), float(np.mean([exponent(chain) for chain in chains]))
        return {"recurrent.lyapunov": {site: rate},
                "recurrent.decay": {site: math.exp(rate)},
                "recurrent.memory_length": {site: math.log(0.1) / rate if rate < 0 else math.inf},
                "recurrent.spectral_radius": {site: float(np.median(radii))},
                "recurrent.spectral_norm": {site: float(np.median(norms))},
                "recurrent.effective_rank": {site: rank},
                "recurrent.rank_share": {site: rank / layer.hidden_size},
                "recurrent.length": {site: float(given[0].shape[1])}}  # fmt: skip

    @property
    def states(self):
        """The weights of a recurrent layer before the step."""
        return self.recurrent

    def in_float64(self, twin, micro):
        """Return what the same step says in float64: losses, gradients, outputs and predictions."""
        losses, passes = [], []
        twin.zero_grad()
        for x, y in micro:
            outputs, inputs = {}, {}
            hooks = [m.register_forward_hook(self.keeper(n, outputs, inputs)) for n, m in twin.named_modules()]
            logits = twin(x.double() if x.is_floating_point() else x)
            for hook in hooks:
                hook.remove()
            logits.retain_grad()
            loss = nn.functional.cross_entropy(logits, y) / len(micro)
            loss.backward()
            losses.append(float(loss.detach()))
            passes.append((outputs, inputs, logits, y))
        there = {n: p.grad for n, p in twin.named_parameters() if p.grad is not None}
        total = float(flat(there.values()).norm())
        part = min(self.clip / (total + 1e-6), 1.0) if self.clip is not None else 1.0
        gradients = self.sizes_of({n: g * part for n, g in there.items()})
        answers = self.of_answers(passes, 1.0) if logits.numel() <= 2**16 else {}
        told = {"loss": {"": sum(losses)}, **gradients, **answers}
        # What is 0 in float32 is not always 0 in float64.
        return {metric: sites for metric, sites in told.items() if not metric.endswith("zero_share")}


def exponent(chain):
    """Return the mean growth of a direction along Jacobians, in nats a step, after one passage that turns it."""
    places = np.arange(len(chain[0]), dtype=np.float64)
    v = 1.0 + 0.5 * np.sin(1.0 + 1.7 * places**1.1)
    v *= np.where(np.sin(2.3 * places**1.3) < 0, -1.0, 1.0)
    for _ in range(2):
        v, grown = v / np.linalg.norm(v), 0.0
        for jacobian in chain:
            v = jacobian @ v
            grown += math.log(np.linalg.norm(v))
            v = v / np.linalg.norm(v)
    return grown / len(chain)


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


def layers(width, count=3, bend=nn.Tanh):
    """Return blocks of a linear layer and a bend each."""
    return [nn.Sequential(nn.Linear(width, width), bend()) for _ in range(count)]


def dense(dtype=torch.float32, width=16, bend=nn.Tanh):
    """Return a model of linear layers."""
    return Deep(nn.Linear(10, width), layers(width, bend=bend), nn.Linear(width, 5)).to(dtype)


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


def every_kind():
    """Yield four loops of each kind: updates of rows, on grids, by Adam, and the path of the weights."""
    for kind in KINDS:
        shape = {"sparse": kind == "sparse", "shared": kind == "shared parameter"}

        def made(model, rule, kind=kind):
            parts = [[model.first.weight], [p for n, p in model.named_parameters() if n != "first.weight"]]
            rate = 0.02 if rule is torch.optim.Adam else 0.1
            if kind == "sparse" and rule is torch.optim.Adam:
                return [torch.optim.SparseAdam(parts[0], lr=rate), rule(parts[1], lr=rate)]
            if kind == "several optimizers" or (kind == "sparse" and isinstance(model, Small)):
                return [rule(parts[0], lr=rate), rule(parts[1], lr=rate / 2)]
            return [rule(model.parameters(), lr=rate)]

        for name, given in {
            "rows": {"pairs": "rows", "observed": True},
            "grids": {"grids": {"blocks.3.0.weight": 0.02, "blocks.4.0.weight": 1e-3}},
            "Adam": {},
            "path": {},
        }.items():
            torch.manual_seed(1)
            model = (Small if name == "path" else Everything)(**shape)
            rule = torch.optim.Adam if name == "Adam" else torch.optim.SGD
            count, micro = len(model.first.weight), 3 if kind == "accumulated" else 1
            batches = [
                [(torch.randint(count, (2, 4)), torch.randint(count, (2,))) for _ in range(micro)]
                for _ in range(POINTS if name == "path" else STEPS)
            ]
            how = {"clip": 0.05} if kind == "clipped" else {}
            if kind == "AMP":
                how = {"autocast": torch.bfloat16, "scaler": torch.amp.GradScaler("cpu", init_scale=512.0)}
            yield f"{kind}, {name}", Loop(model, made(model, rule), batches, **how, **given)


PARTS = (
    *(name for name in CATALOG if name.startswith("attention.") and not name.endswith("_error")),
    "block.rank_residual", "block.input_residual", "recurrent.lyapunov", "recurrent.decay", "recurrent.memory_length",
)  # fmt: skip
"""Metrics of a few samples or sequences by definition, however many there are."""


def larger():
    """Return a loop of nine samples, of which attention is read at three and recurrence at four."""
    torch.manual_seed(2)
    model = Everything()
    batches = [[(torch.randint(20, (9, 4)), torch.randint(20, (9,)))] for _ in range(STEPS)]
    return Loop(model, sgd(model), batches)


def loops():
    """Yield the name of each loop and the loop, one after the other."""
    yield from every_kind()
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
    yield "dense, rows as nodes", Loop(model, sgd(model), numbers(micro=2), pairs="rows")
    model = dense()
    yield "dense, on grids", Loop(model, sgd(model), numbers(), grids={"first.weight": 0.02, "head.weight": 1e-3})
    model = dense(torch.bfloat16)
    yield "dense, bfloat16 weights", Loop(model, sgd(model), numbers(dtype=torch.bfloat16))
    model = dense(bend=nn.ReLU)
    with torch.no_grad():
        model.blocks[1][0].bias[:3] = -50.0  # units that never fire
    yield "rectified, accumulated", Loop(model, sgd(model), numbers(micro=2))
    model = dense()
    yield "accumulated", Loop(model, sgd(model), numbers(micro=3))
    model = dense()
    known = [[(x := torch.randn(32, 10), x[:, :5].argmax(1)) for _ in range(4)] for _ in range(16)]
    yield "accumulated, many steps", Loop(model, sgd(model), known)
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
    model = Deep(nn.Linear(10, 32), layers(32), nn.Linear(32, 2000))
    rows = [[(torch.randn(600, 10), torch.randint(2000, (600,)))] for _ in range(2)]
    yield "many predictions", Loop(model, sgd(model), rows)
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
            if math.isnan(value) and (got is None or math.isnan(got)):
                continue  # nothing can be said
            if got is None or math.isnan(got) or math.isnan(value):
                yield metric, math.inf, 0.0
                continue
            # What is a sum of terms that cancel is compared with their size, which for these is about 1.
            size = max(abs(value), 1e-3 * scale, 1.0 if kind.low is None or kind.low < 0 else 0.0)
            stated = (errors.get(site) or 0.0) * (abs(value) if share else 1.0) / (size or 1.0)
            yield metric, 0.0 if got == value else abs(got - value) / (size or 1.0), stated


class Worst:
    """The worst of what was compared, by metric.

    Attributes:
        exact: Relative error and loop, where the record states no error.
        kinds: Kinds of loops in which it was compared.
        held: Kinds of loops whose records hold it.
        absent: What should have been there, and where it was not.
        parts: How far metrics that are of a few samples by definition are from those of all, also in units of what
            the record states.
        narrow: The same against the step in float64.
        sampled: Greatest error in units of what the record states, and what it states there.
    """

    def __init__(self):
        self.exact, self.narrow = {}, {}
        self.sampled = defaultdict(lambda: (0.0, 0.0))
        self.kinds, self.held, self.absent = defaultdict(set), defaultdict(set), {}
        self.parts = defaultdict(lambda: (0.0, 0.0))

    def note(self, name, kinds, record, told):
        """Note what records of these kinds of loops hold, what is compared there, and what is missing."""
        for reading in record.readings:
            if reading.present.any():
                self.held[reading.metric] |= kinds
        for metric in (metric for metric, sites in told.items() if sites):
            if record.get(metric) is None:
                self.absent.setdefault(metric, f"{name}, step {record.step}")
            else:
                self.kinds[metric] |= kinds

    def uncompared(self, metric):
        """Return the kinds of loops whose records hold a metric that was compared in none of them."""
        return [kind for kind in KINDS if kind in self.held[metric] - self.kinds[metric]]

    def add(self, name, record, told):
        """Take what one record says and should say."""
        for metric, error, stated in compared(record, told):
            if stated > 0:
                self.sampled[metric] = max(self.sampled[metric], (error / stated, stated))
            elif metric not in self.exact or error > self.exact[metric][0]:
                self.exact[metric] = (error, name)

    def add_wide(self, name, record, wide):
        """Take what the same step is in float64."""
        for metric, error, stated in compared(record, wide):
            if not stated and (metric not in self.narrow or error > self.narrow[metric][0]):
                self.narrow[metric] = (error, name)

    def off(self, metric):
        """Whether a metric is off by more than the tolerance, or than it says."""
        error, times = self.exact.get(metric, (0.0, ""))[0], self.sampled.get(metric, (0.0, 0.0))[0]
        return error > TOLERANCE or times > 2 * SURE

    @property
    def metrics(self):
        """Every metric that was compared, in the order of the catalogue."""
        return [m for m in CATALOG if m in self.exact or m in self.sampled]


def measure(only=""):
    """Run all loops and cases whose name contains this; return the worst of what was found."""
    worst = Worst()
    for name, loop in loops():
        if only in name:
            for record, told, wide in loop.run():
                worst.note(name, kinds_of(loop), record, told)
                worst.add(name, record, told)
                if wide is not None:
                    worst.add_wide(name, record, wide)
    for record, told, _ in larger().run() if not only else ():
        for metric, error, stated in compared(record, {metric: told[metric] for metric in PARTS}):
            before, times = worst.parts[metric]
            worst.parts[metric] = max(before, error), max(times, error / stated if stated else 0.0)
        states = {m: sites for m, sites in told.items() if m.startswith("recurrent.") and m not in PARTS}
        worst.add("dense, nine samples", record, states)
    for name, case in cases(only):
        for record, told in case:
            worst.note(name, {"dense"}, record, told)
            worst.add(name, record, told)
    return worst


def tables(worst):
    """Yield the lines of the page."""
    yield (
        f"Torch {torch.__version__}, 1 thread: {len(worst.metrics)} of {len(CATALOG)} metrics compared, "
        f"{sum(map(worst.off, worst.metrics))} off by more than {TOLERANCE:g} or than they say.\n"
    )
    yield "| metric | worst relative error | in the loop | where estimated, in stated standard errors | loops |"
    yield "|---|---|---|---|---|"
    for metric in worst.metrics:
        error, name = worst.exact.get(metric, (None, ""))
        times, stated = worst.sampled.get(metric, (None, None))
        exact = "" if error is None else f"{error:.1e}"
        estimated = "" if times is None else f"{times:.1f} of {stated:.1e}"
        kinds = [kind for kind in KINDS if kind in worst.kinds[metric]]
        where = "all" if len(kinds) == len(KINDS) else ", ".join(kinds)
        yield f"| `{metric}`{' **off**' if worst.off(metric) else ''} | {exact} | {name} | {estimated} | {where} |"
    yield "\nFloat32 loops against the same step in float64:\n"
    yield "| metric | worst relative error | in the loop |\n|---|---|---|"
    for metric, (error, name) in sorted(worst.narrow.items()):
        yield f"| `{metric}` | {error:.1e} | {name} |"
    yield "\nOf three samples (attention) or four sequences (recurrence) by definition, against those of all nine:\n"
    yield "| metric | worst relative difference | in stated standard errors |\n|---|---|---|"
    for metric, (error, times) in worst.parts.items():
        yield f"| `{metric}` | {error:.1e} | {f'{times:.1f}' if times else 'none stated'} |"
    yield "\nNot compared:\n"
    yield "| why | metrics |\n|---|---|"
    for reason, metrics in REASONS.items():
        yield f"| {reason} | {', '.join(f'`{m}`' for m in metrics if m in CATALOG)} |"


def write(lines):
    """Put the tables between the markers of the page."""
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n" + "\n".join(lines) + f"\n{END}" + rest.split(END)[1], encoding="utf-8")


def main():
    """Print the tables; return how many metrics are off by more than they say, are missing, or are not compared."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="only loops whose name contains this")
    parser.add_argument("--write", action="store_true", help=f"also write the tables into docs/{PAGE.name}")
    given = parser.parse_args()
    torch.set_num_threads(1)
    worst = measure(given.only)
    lines = list(tables(worst))
    print("\n".join(lines))
    off = [m for m in worst.metrics if worst.off(m)]
    known = {m for metrics in REASONS.values() for m in metrics}
    missing = [] if given.only else [m for m in CATALOG if m not in worst.metrics and m not in known]
    for metric in off:
        print(f"- {metric} is off by more than {TOLERANCE:g}, or than it says")
    for metric in missing:
        print(f"- {metric} was compared nowhere")
    for metric, place in worst.absent.items():
        print(f"- {metric} should have been in a record: {place}")
    passed_by = {m: kinds for m in CATALOG if m not in known and (kinds := worst.uncompared(m))}
    for metric, kinds in passed_by.items():
        print(f"- {metric} is in records of these loops and was compared in none of them: {', '.join(kinds)}")
    wrong = len(off) + len(missing) + len(worst.absent) + len(passed_by)
    if given.write and not missing:
        write(lines)
    return wrong


if __name__ == "__main__":
    sys.exit(bool(main()))
