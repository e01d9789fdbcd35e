"""Loss, logits and targets: from the criterion module, handed over by the user, or what ``backward`` is called on."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils.hooks import unserializable_hook

from gradflow_export.catalog import MetricSpec, spec
from gradflow_export.errors import nearest
from gradflow_export.metrics.local import local
from gradflow_export.metrics.logits import (
    LOGIT_METRICS,
    TARGET_METRICS,
    as_samples,
    logit_statistics,
    target_statistics,
)
from gradflow_export.metrics.upstream import UPSTREAM_METRICS, upstream_statistics
from gradflow_export.records import RUN_SITE
from gradflow_export.taps.backward import BackwardPasses
from gradflow_export.taps.base import Drained, Guard, Pending, unguarded
from gradflow_export.taps.components import LossComponents
from gradflow_export.taps.hooks import ModuleHook, hook_calls
from gradflow_export.taps.root import Roots

_log = logging.getLogger("gradflow_export")

OBSERVABLE = ("loss", "logits", "targets", "components", "policy")
_KINDS = (
    ("loss", (Tensor, int, float), "a tensor or a number"),
    ("logits", (Tensor,), "a tensor"),
    ("targets", (Tensor,), "a tensor"),
    ("components", (Mapping,), "a dictionary of parts of the loss"),
)
"""What may be handed over under each name, and how to say so."""
MICRO_BATCHES = 1024
"""Losses kept until a step ends; beyond that the oldest are forgotten."""


class LossTap:
    """Collects losses over the micro-batches of a step (their mean), and statistics of the last logits.

    Where neither a criterion nor the user tells of a loss, it is what ``backward`` is called on, see :class:`Roots`.

    Args:
        criterion: The loss module, if there is one.
        model: Returns the model that is trained, so that backward passes can be told apart.
        on_backward: Called when a backward pass begins.
        wants_backward: Whether ``on_backward`` has any use for being called.
        on_loss: Called with each loss that has a graph.
        on_root: Called with each tensor on which ``backward`` is called for this model.
        guard: Wraps the hooks.
    """

    def __init__(
        self,
        criterion: nn.Module | None = None,
        *,
        model: Callable[[], nn.Module | None] = lambda: None,
        on_backward: Callable[[], None] = lambda: None,
        wants_backward: Callable[[], bool] = lambda: True,
        on_loss: Callable[[Tensor], None] = lambda _loss: None,
        on_root: Callable[[Tensor], None] = lambda _root: None,
        guard: Guard = unguarded,
    ) -> None:
        self._criterion = criterion
        self._guard, self._on_backward, self._on_loss = guard, on_backward, on_loss
        self._wants_backward, self._on_root = wants_backward, on_root
        self._roots = Roots(model, self._root, guard=guard)
        self._counted = self._rooted = False
        self._told = False
        self._begun = unserializable_hook(guard(self._backward))  # type: ignore[no-untyped-call]
        self._losses: deque[Tensor] = deque(maxlen=MICRO_BATCHES)
        self._statistics: list[tuple[tuple[str, ...], Tensor]] = []
        self._refused: set[str] = set()
        self.want_logits = False
        self.seen = False
        self._components = LossComponents()
        self._passes = BackwardPasses(model)
        self._called_at: float | None = None
        self._seconds = 0.0

    @property
    def specs(self) -> tuple[MetricSpec, ...]:
        """The metrics this tap can give out."""
        names = ("loss", "loss.component", "loss.component_share", *LOGIT_METRICS, *TARGET_METRICS, *UPSTREAM_METRICS)
        return tuple(spec(name) for name in (*names, "wiring.blind_passes"))

    def attach(self) -> contextlib.ExitStack:
        """Begin to watch the criterion's calls."""
        stack = contextlib.ExitStack()
        stack.callback(self.drain)
        stack.enter_context(self._roots.attach())
        if self._criterion is not None:
            begin, end = ModuleHook(self._guard(self._entered)), ModuleHook(self._guard(self._called))
            stack.callback(hook_calls([(self._criterion, begin)], before=True))
            stack.callback(hook_calls([(self._criterion, end)]))
        return stack

    def observe(self, tensors: Mapping[str, Any]) -> None:
        """Take what the user hands over by name; what cannot be used is told of once."""
        for name in tensors.keys() - set(OBSERVABLE) - self._refused:
            self._refused.add(name)
            _log.warning("gradflow: observe() does not know %r%s", name, nearest(name, OBSERVABLE))
        for name, kinds, wanted in _KINDS:
            value = tensors.get(name)
            if value is not None and not isinstance(value, kinds) and name not in self._refused:
                self._refused.add(name)
                kind = type(value).__name__
                _log.warning("gradflow: observe() expects %s for %r, got %s; it is left out.", wanted, name, kind)
        loss, logits, targets, components = (tensors.get(n) for n in ("loss", "logits", "targets", "components"))
        if isinstance(loss, (Tensor, int, float)):
            self.observe_loss(loss)
        if isinstance(logits, Tensor):
            self.observe_logits(logits, targets if isinstance(targets, Tensor) else None)
            self._await_gradient(logits)
        if isinstance(components, Mapping):
            self._components.add(components)

    def observe_loss(self, loss: Tensor | float) -> None:
        """Take one loss. A tensor is kept as a device reference; backward time is measured from its gradient."""
        self.seen, self._roots.keep = True, False
        if not isinstance(loss, Tensor):
            self._losses.append(torch.tensor(float(loss), dtype=torch.float64))
            return
        held = local(loss).detach()
        self._losses.append(held if held.numel() == 1 else held.mean())
        if loss.requires_grad and not torch.compiler.is_compiling():
            self._on_loss(loss)
            # Where calls of ``backward`` are seen anyway, a hook on the loss would tell nothing new.
            if not self._told or self._wants_backward():
                loss.register_hook(self._begun)  # type: ignore[no-untyped-call]

    def observe_logits(self, logits: Tensor, targets: Tensor | None, class_dim: int | None = None) -> None:
        """Take logits, and targets when they are known, if this step is due."""
        if not self.want_logits or not logits.is_floating_point() or logits.dim() < 1:
            return
        with torch.no_grad():
            held = None if targets is None else local(targets)
            rows, numbers = as_samples(local(logits), held, class_dim)
            if rows.numel() == 0 or rows.shape[1] < 2:
                return
            self._statistics = [(LOGIT_METRICS, logit_statistics(rows))]
            if numbers is not None:
                self._statistics.append((TARGET_METRICS, target_statistics(rows, numbers)))

    def drain(self) -> Drained:
        """Give out the mean loss and the last statistics, and forget them."""
        out: Drained = []
        if self._losses:
            self._told &= self._rooted
            out.append(Pending("loss", (RUN_SITE,), _mean(self._losses)))
        elif (loss := self._roots.loss()) is not None:
            out.append(Pending("loss", (RUN_SITE,), loss.reshape(1)))
        out.extend(self._roots.drain())
        for names, values in self._statistics:
            out.extend(Pending(name, (RUN_SITE,), value.reshape(1)) for name, value in zip(names, values, strict=True))
        out.extend(self._components.drain())
        self.forget()
        return out

    def forget(self) -> None:
        """Forget what was collected, without any work on it: the step makes no record."""
        self._losses.clear()
        self._roots.forget()
        self._components.forget()
        self._passes.forget()
        self._counted = self._rooted = False
        self._statistics, self._seconds = [], 0.0

    def scalars(self, backward_ended: float | None) -> dict[str, float]:
        """Return what the host knows of this step's losses and backward passes.

        Args:
            backward_ended: When the last backward pass was over, ``None`` when it is not known.
        """
        out = self._passes.scalars()
        if self._passes.began is not None and backward_ended is not None:
            out["runtime.backward_time"] = backward_ended - self._passes.began
        if self._seconds:
            out["runtime.loss_time"] = self._seconds
        return out

    def _entered(self, _module: nn.Module, _args: Any, _output: Any = None) -> None:
        self._called_at = time.perf_counter()

    def _called(self, _module: nn.Module, args: Any, output: Any) -> None:
        if not isinstance(output, Tensor) or not output.requires_grad:
            return
        if self._called_at is not None:
            self._seconds += time.perf_counter() - self._called_at
            self._called_at = None
        self.observe_loss(output)
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        if tensors:
            self._await_gradient(tensors[0])
        classification = len(tensors) > 1 and not tensors[1].is_floating_point() and tensors[0].dim() > 1
        if classification and tensors[0].dim() == tensors[1].dim() + 1:
            self.observe_logits(tensors[0], tensors[1], class_dim=1)

    def _await_gradient(self, predictions: Tensor) -> None:
        """Take what the loss sends back into the model when it comes, if this step is due."""
        if self.want_logits and predictions.requires_grad and predictions.numel() and not predictions.is_complex():
            hook = unserializable_hook(self._guard(self._sent_back))  # type: ignore[no-untyped-call]
            predictions.register_hook(hook)  # type: ignore[no-untyped-call]

    def _sent_back(self, gradient: Tensor) -> None:
        with torch.no_grad():
            earlier = [entry for entry in self._statistics if entry[0] != UPSTREAM_METRICS]
            self._statistics = [*earlier, (UPSTREAM_METRICS, upstream_statistics(local(gradient)))]

    def _root(self, root: Tensor) -> None:
        """Begin a backward pass; what runs inside it has to be told from there."""
        self._passes.begin()
        self._counted = self._rooted = self._told = True
        if not self.seen:
            self._on_loss(root)
            if self._wants_backward():
                root.register_hook(self._begun)  # type: ignore[no-untyped-call]
        self._on_root(root)

    def _backward(self, _gradient: Tensor) -> None:
        if not self._counted:  # by ``torch.autograd.grad``, or before the root was known to be of this model
            self._passes.begin()
        self._counted = False
        self._on_backward()


def _mean(losses: Iterable[Tensor]) -> Tensor | npt.NDArray[np.float64]:
    """Return the mean of scalars, on the host where they are there already. Shape: ``[1]``."""
    every = list(losses)
    if all(loss.is_cpu for loss in every):
        return np.array([sum(map(float, every)) / len(every)])
    return torch.stack([loss.reshape(1).to(every[0].device, torch.float64) for loss in every]).mean(dim=0)
