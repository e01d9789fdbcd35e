"""What a run without any change shows of a training script, so that only treatments are tried that could change it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from gradflow_export.experiments.interventions import Intervention, leaves, made_with, weights
from gradflow_export.experiments.mending.layers import narrows
from gradflow_export.experiments.mending.losses import LOSSES
from gradflow_export.experiments.mending.passages import starved
from gradflow_export.experiments.mending.rates import terms
from gradflow_export.experiments.mending.scores import mixes, tempered
from gradflow_export.experiments.mending.sequences import SEQUENCES, STEPWISE, masks, real_lengths
from gradflow_export.experiments.mending.tables import Tables
from gradflow_export.experiments.model_edits import LAYERS, SQUASHING, level, tensors

SAME = 1e-6
"""Share of a norm below which a change is taken for rounding."""

ROWS = 16
"""Least rows of which columns have a mean and a spread."""
FADED = 0.01
"""Share of the greatest learning rate below which next to nothing is learned."""


class Facts(Intervention):
    """Looks, and changes nothing.

    Attributes:
        decay: Whether an optimizer has a weight decay.
        momentum: The greatest momentum of an optimizer that has one number for it.
        schedule: Whether a learning rate changes.
        rising: Share of the steps after which a learning rate was the greatest so far for the last time.
        reached: The greatest learning rate so far as a share of that which its group was made with.
        apart: The greatest learning rate of an optimizer's groups as a multiple of the least, in the first step.
        faded: Share of the steps at which each learning rate was below a hundredth of the greatest so far.
        dropout: The greatest share that a dropout leaves out in training; 0 without one.
        stale: How often gradients of an earlier step, or of an earlier call of its closure, were left when the next
            were added.
        foreign: At how many steps weights were changed by something other than the optimizer.
        returned: How often such a change put the weights back to what the one before it had made of them.
        edited: At how many steps gradients were changed between the backward pass and the step.
        kept: Share of the gradient's norm that was left at the least, 1 when none was taken away.
        untrained, frozen: Parameters of the model that no optimizer has or that are frozen; the latter alone.
        loose: Those that can be trained and that neither an optimizer nor a module has, as layers in a plain list.
        plain: Tables that the model multiplies with in each step, and that are neither parameters nor inputs.
        unreached: Parameters that an optimizer has and that no gradient reached.
        layers: Linear and convolutional layers.
        level, tables: Tables of weights that hold one number throughout; all tables of weights.
        sequences, recurrent: Recurrent and attention layers; the former alone.
        narrow: Linear layers that give far fewer numbers than they take and than the next one gives.
        padding: Share of the steps of recurrent layers that repeat the last one of a sequence.
        masked: How often attention was given a mask.
        starved: How often a norm is over a single number, or in training over a few samples.
        tempered: Spread of the first scores of a cross-entropy that are divided by a temperature; 0 without one.
        terms: How many numbers the first loss adds up.
        half: How often a model that is called with gradients computes in float16.
        squashing: Sigmoids and hyperbolic tangents before the first step.
        resettable: Whether layers can be initialized anew.
        gain: The greatest root mean square of a layer's weights, times the root of its number of inputs.
        endless: How many inputs and targets with entries that are not finite a model or a loss is given.
        broken: How many gradients of finite losses have such entries.
        mixed: How often a tensor with samples along one of two dimensions is reshaped as if these were exchanged.
        offset: The greatest mean of an input's columns as a multiple of their spread: of a typical column.
        scale: Largest of the inputs' absolute mean and spread, and of the inverse of the latter; 0 without such inputs.
        echoes: Share of steps before which a model whose parameters change was called without gradients.
        adam: Learning rate with which the first optimizer begins, where it is Adam; 0 where it is another.
        optimizers: How many optimizers step.
        digests: A number for the first input of each of the first steps.
    """

    STEPS = 40

    def __init__(self) -> None:
        super().__init__()
        self.decay = self.schedule = self.resettable = False
        self.stale = self.foreign = self.edited = self.untrained = self.layers = self.squashing = 0
        self.sequences = self.recurrent = self.masked = self.level = self.half = self.returned = 0
        self.frozen = self.endless = self.unreached = self.tables = self.starved = self.broken = 0
        self.mixed = self.narrow = self.loose = 0
        self._counts: set[int] = set()
        self._sane, self._echoed = True, False
        self._reached: set[int] = set()
        self.gain = self.offset = self.tempered = self.momentum = 0.0
        self.apart = self.terms = 1.0
        self.kept, self.scale, self.dropout, self.adam, self.reached = 1.0, 0.0, 0.0, 0.0, 0.0
        self.digests: list[float | None] = []
        self._steps = self._echoes = self._padded = self._read = 0
        self._fixed: dict[int, tuple[float, ...]] = {}
        self._digest: float | None = None
        self._written: float | None = None
        self._rates: dict[tuple[int, int], float] = {}
        self._greatest: dict[tuple[int, int], float] = {}
        self._rose = self._faded = 0
        self._roots: dict[int, nn.Module] = {}
        self._known: dict[int, nn.Parameter] = {}
        self._owned: set[int] = set()
        self._optimizers: dict[int, Optimizer] = {}
        self._stepped: dict[int, Optimizer] = {}
        self._inside: dict[int, Optimizer] = {}
        self._after: dict[int, tuple[Tensor, Tensor]] = {}
        self._tables = Tables()
        self._gradients: dict[int, tuple[Tensor, Tensor]] = {}

    def root(self, module: nn.Module) -> None:
        """Look at its layers."""
        self._tables.root(module)
        self._roots[id(module)] = module
        self._known.update((id(weight), weight) for weight in module.parameters())
        members = list(module.modules())
        self.layers += sum(isinstance(layer, LAYERS) for layer in members)
        self.sequences += sum(isinstance(layer, SEQUENCES) for layer in members)
        self.recurrent += sum(isinstance(layer, STEPWISE) for layer in members)
        for layer in members:
            if isinstance(layer, nn.RNNBase):
                layer.register_forward_pre_hook(self._reads)
        self.narrow += sum(map(narrows, *(linear := [e for e in members if isinstance(e, nn.Linear)], linear[1:])))
        self.level += len(level(module))
        self.tables += sum(weight.dim() > 1 for weight in module.parameters())
        for layer in members:
            if isinstance(layer, LAYERS) and layer.weight.requires_grad and layer.weight.numel():
                self.gain = max(self.gain, float(layer.weight.detach().float().norm()) / len(layer.weight) ** 0.5)
        self.resettable |= any(callable(getattr(layer, "reset_parameters", None)) for layer in members)

    def called(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Look at the inputs, and whether gradients are wanted."""
        self._tables.called(module, args, kwargs)
        if not torch.is_grad_enabled():
            self._echoed |= self._changes(module) and self._steps > 0
            return args, kwargs
        given = [each for each in tensors([args, kwargs]) if not each.requires_grad and each.numel()]
        if given and self._digest is None and not given[0].is_sparse:
            self._digest = float(given[0].detach().double().abs().sum())
        self.endless += sum(map(_is_endless, given))
        self._counts = {len(each) for each in given if each.dim()}
        if not self._steps and next(module.parameters(), None) is not None:
            for each in given:
                if each.is_floating_point() and each.numel() > 1:
                    spread, mean = float(each.std()), abs(float(each.mean()))
                    self.scale = max(self.scale, mean, spread, 1 / spread if spread else 0.0)
                    self.offset = max(self.offset, off_center(each))
        return args, kwargs

    def _reads(self, layer: nn.RNNBase, args: Any) -> None:
        """Count the steps of a recurrent layer."""
        given, lengths = (args[0] if args else None), real_lengths(layer, args)
        if isinstance(given, Tensor) and given.dim() == 3:
            steps = given.shape[0] * given.shape[1]
            self._read += steps
            self._padded += 0 if lengths is None else steps - int(lengths.sum())

    def left(self, module: nn.Module, output: Any) -> Any:
        """Look at the precision in which it was computed."""
        self._tables.left(module, output)
        self.half += any(each.requires_grad and each.dtype is torch.float16 for each in tensors([output]))
        return output

    def function(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
        """Look for masks and activations that saturate."""
        self.masked += bool(masks(name, args, kwargs))
        self.starved += starved(name, args, kwargs)
        self.tempered = self.tempered or tempered(name, args, kwargs)
        self.endless += name in LOSSES and any(map(_is_endless, tensors([args, dict(kwargs)])))
        self.mixed += bool(mixes(name, args, self._counts))
        given = args[0] if args else kwargs.get("input")
        self.squashing += not self._steps and name in SQUASHING and isinstance(given, Tensor) and given.requires_grad
        return args, kwargs

    def _changes(self, module: nn.Module) -> bool:
        """Return whether a model is not what it was at its first such call; what never changes holds no answer back."""
        now = tuple(float(weight.detach().double().sum()) for weight in module.parameters())
        return str(now) != str(self._fixed.setdefault(id(module), now))

    def before_backward(self, loss: Tensor) -> None:
        """Look for gradients of earlier steps."""
        for optimizer in (self._stepped | self._inside).values():
            self.stale += any(weight.grad is not None and bool(weight.grad.any()) for weight in weights(optimizer))
        self._stepped.clear()
        self._sane = bool(loss.isfinite().all())
        if self._steps < 2:
            self.terms = max(self.terms, terms(loss.grad_fn))
            self._known.update((id(weight), weight) for weight in leaves(loss))

    def after_backward(self) -> None:
        """Save the gradients."""
        if self._steps < self.STEPS:
            for key, weight in self._known.items():
                if weight.grad is not None and not weight.grad.is_sparse:
                    self.broken += self._sane and not bool(weight.grad.isfinite().all())
                    self._gradients[key] = weight, weight.grad.detach().clone()

    def before_step(self, optimizer: Optimizer) -> None:
        """Look at what has changed since the last step, and at the optimizer's options."""
        self._inside[id(optimizer)] = optimizer
        if not self._optimizers and isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)):
            self.adam = float(optimizer.param_groups[0]["lr"])
        self._optimizers[id(optimizer)] = optimizer
        self._owned.update(id(weight) for weight in weights(optimizer) if weight.requires_grad)
        rates = [float(group.get("lr", 0.0)) for group in optimizer.param_groups]
        if not self._steps and min(rates) > 0:
            self.apart = max(self.apart, max(rates) / min(rates))
        faded = True
        for number, group in enumerate(optimizer.param_groups):
            self.decay |= bool(group.get("weight_decay"))
            self.momentum = max(self.momentum, float(group.get("momentum") or 0.0))
            rate = float(group.get("lr", 0.0))
            made = float(made_with(optimizer, number, rate))
            self.reached = max(self.reached, rate / made if made else 1.0)
            self.schedule |= abs(rate - self._rates.setdefault((id(optimizer), number), rate)) > SAME * abs(rate)
            if rate > self._greatest.setdefault((id(optimizer), number), rate) * (1 + SAME):
                self._greatest[id(optimizer), number], self._rose = rate, self._steps
            faded &= rate < FADED * self._greatest[id(optimizer), number]
        self._faded += faded
        if self._steps >= self.STEPS:
            return
        self._reached.update(id(weight) for weight in weights(optimizer) if weight.grad is not None)
        own = [id(weight) for weight in weights(optimizer)]
        known = [self._after[key] for key in own if key in self._after and not self._after[key][0].is_sparse]
        if any(not torch.equal(*pair) for pair in known):
            self.foreign += 1
            written = sum(float(weight.detach().double().sum()) for weight, _ in known)
            self.returned += written == self._written
            self._written = written
        before = after = 0.0
        changed = False
        for key in own:
            if key in self._gradients:
                weight, saved = self._gradients.pop(key)
                before += float(saved.double().square().sum())
                after += 0.0 if weight.grad is None else float(weight.grad.double().square().sum())
                changed |= weight.grad is None or not torch.equal(weight.grad, saved)
        if changed and before:
            self.edited += 1
            self.kept = min(self.kept, (after / before) ** 0.5)

    def after_step(self, optimizer: Optimizer) -> None:
        """Save the weights."""
        self._tables.after_step(optimizer)
        self._inside.pop(id(optimizer), None)
        self._stepped[id(optimizer)] = optimizer
        self._echoes += self._echoed
        self._steps, self._echoed = self._steps + 1, False
        if self._steps < self.STEPS:
            self.digests.append(self._digest)
            self._digest = None
            for weight in weights(optimizer):
                self._after[id(weight)] = weight, weight.detach().clone()
                self._gradients.pop(id(weight), None)  # what a closure computed within the step has been used

    def told(self) -> dict[str, Any]:
        """Return everything, ready for JSON."""
        self.untrained = sum(
            key not in self._owned or not weight.requires_grad
            for key, weight in self._known.items()
            if weight.is_floating_point()
        )
        held = {id(weight) for root in self._roots.values() for weight in root.parameters()} | self._owned
        self.loose = sum(key not in held and each.requires_grad for key, each in self._known.items())
        self.frozen = sum(not weight.requires_grad for weight in self._known.values() if weight.is_floating_point())
        self.unreached = len(self._owned - self._reached)
        names = (
            "decay", "schedule", "dropout", "stale", "foreign", "returned", "edited", "kept", "untrained", "layers",
            "squashing", "sequences", "recurrent", "masked", "level", "half", "resettable", "scale", "digests", "adam",
            "reached", "frozen", "endless", "gain", "offset", "unreached", "tables", "apart", "starved",
            "tempered", "terms", "broken", "mixed", "narrow", "momentum", "loose",
        )  # fmt: skip
        told = {name: getattr(self, name) for name in names}
        steps = max(self._steps, 1)
        shares = {
            "padding": self._padded / max(self._read, 1),
            "echoes": self._echoes / steps,
            "rising": self._rose / steps,
            "faded": self._faded / steps,
        }
        return {**told, **shares, "optimizers": len(self._optimizers), "plain": len(self._tables.tables())}


def _is_endless(given: Tensor) -> bool:
    dense = given.layout is torch.strided and given.is_floating_point() and not given.requires_grad
    return dense and not bool(given.isfinite().all())


def off_center(inputs: Tensor) -> float:
    """Return the mean of a typical column as a multiple of its spread; 0 for few rows."""
    rows = inputs.detach().flatten(0, -2).double() if inputs.dim() > 1 else inputs.detach().double()[:, None]
    if len(rows) < ROWS:
        return 0.0
    means, spreads = rows.mean(0).abs(), rows.std(0)
    ratios = means[spreads > 0] / spreads[spreads > 0]
    return float(ratios.median()) if ratios.numel() and bool(ratios.isfinite().all()) else 0.0
