"""Loss, logits and targets: from the criterion module, handed over by the user, or what ``backward`` is called on."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from gradflow_export.autograd_graph.loss_graph import terms_of
from gradflow_export.errors import nearest
from gradflow_export.hooks import torch_private
from gradflow_export.hooks.backward_listener import Root, Roots, scale_of
from gradflow_export.hooks.gradient_hooks import TensorHooks
from gradflow_export.hooks.guards import Guard, unguarded
from gradflow_export.hooks.module_hooks import Placed
from gradflow_export.hooks.optimizer_steps import Owned
from gradflow_export.hooks.parameter_slots import briefly
from gradflow_export.hooks.readings import Drained, Pending
from gradflow_export.instruments.backward_passes import Passes
from gradflow_export.instruments.components import LossComponents
from gradflow_export.instruments.criterion import CriterionCalls
from gradflow_export.instruments.gradients.fingerprints import end_of
from gradflow_export.instruments.micro_batches import Part, loss_of, parts_of, statistics_of
from gradflow_export.metrics.arrays.local import local
from gradflow_export.metrics.logits import LOGIT_ERRORS, LOGIT_METRICS, TARGET_ERRORS, TARGET_METRICS, as_samples, fits
from gradflow_export.metrics.upstream import UPSTREAM_METRICS, upstream_statistics
from gradflow_export.records.catalog import MetricSpec, spec
from gradflow_export.records.step_record import RUN_SITE

_log = logging.getLogger("gradflow_export")

OBSERVABLE = ("loss", "logits", "targets", "components")
_KINDS = (
    ("loss", (Tensor, int, float), "a tensor or a number"),
    ("logits", (Tensor,), "a tensor"),
    ("targets", (Tensor,), "a tensor"),
    ("components", (Mapping,), "a dictionary of parts of the loss"),
)
"""What may be handed over under each name, and how to say so."""
NO_CLASS = -1
"""Stands for no target."""
Loss = Tensor | npt.NDArray[np.float64]


class LossInstrument:
    """Collects losses and statistics of logits and of the loss's gradient over all backward passes of a step.

    The loss is the mean of those that the user reports, else the sum of what ``backward`` is called on, see
    :class:`Roots`, because so add up their gradients: of losses divided by the number of micro-batches the sum is their
    mean. What a ``GradScaler`` multiplied is divided by its scale again; a gradient given to ``backward`` is a factor.
    Where no scalar is seen, it is the sum of what the criterion gave. Which passes count for which optimizer finds
    :class:`Passes`; the losses of several optimizers of one record are added up, each pass once.

    Args:
        criterion: The loss module, if there is one.
        model: Returns the model that is trained, so that backward passes can be distinguished.
        on_over: Called after each backward pass of the model.
        on_cleared: Called where the gradients of all passes so far were cleared.
        on_loss: Called with each loss that has a graph.
        guard: Wraps the hooks.

    Attributes:
        on_pass: Called before each backward pass of the model with the scalars that it begins at.
        on_root: Each is called with each tensor on which ``backward`` is called for this model.
        follows: Whether losses on which ``backward`` is called are reported as those with a graph.
        scale: What a gradient scaler multiplied the losses of the step under way by, ``None`` without one.
        root: How the loss was made in the latest of them, and its value where the host knows it.
    """

    def __init__(
        self,
        criterion: nn.Module | None = None,
        *,
        model: Callable[[], nn.Module | None] = lambda: None,
        on_over: Callable[[], None] = lambda: None,
        on_cleared: Callable[[], None] = lambda: None,
        on_loss: Callable[[Tensor], None] = lambda _loss: None,
        guard: Guard = unguarded,
    ) -> None:
        self._on_over, self._on_loss = on_over, on_loss
        self.passes = Passes(model, on_cleared)
        self._end_scanned = guard(self.passes.end)
        self._calls = CriterionCalls(criterion, passes=self.passes, read=self._read, on_call=self._follow, guard=guard)
        self.roots = Roots(model, self._pass_begins, self._pass_over, guard=guard)
        self._rooted, self._told, self._numbered = False, False, -2
        self._begun, self._sent = TensorHooks(guard(self._backward)), TensorHooks(guard(self._sent_back))
        self._joined: list[Loss] = []
        self._own, self._sites = dict[int, Loss](), tuple[str, ...]()
        self._awaited: dict[int, Callable[[], Tensor | None]] = {}
        self._refused: set[str] = set()
        self.want_logits, self.seen, self.follows = False, False, True
        self.on_pass: Callable[[Sequence[Root]], None] = lambda _roots: None
        self.on_root: Sequence[Callable[[Tensor], None]] = ()
        self.root: tuple[object, float | None] = (None, None)
        self.scale: Tensor | None = None
        self._components = LossComponents()
        self._spent = 0.0

    @property
    def specs(self) -> tuple[MetricSpec, ...]:
        """The metrics this instrument can give out."""
        losses = ("loss", "optimizer.loss", "loss.component", "loss.component_share")
        read = (*LOGIT_METRICS, *LOGIT_ERRORS, *TARGET_METRICS, *TARGET_ERRORS, *UPSTREAM_METRICS)
        return tuple(map(spec, (*losses, *read)))

    @property
    def placed(self) -> list[Placed]:
        """Hooks that are laid aside on steps that make no record."""
        return self._calls.placed

    def attach(self) -> contextlib.ExitStack:
        """Begin to watch the criterion's calls."""
        stack = contextlib.ExitStack()
        for what in (self._begun.remove, self._sent.remove, self.forget):
            stack.callback(what)
        stack.enter_context(self.roots.attach())
        stack.enter_context(self._calls.attach())
        return stack

    def rest(self) -> Callable[[], None]:
        """See no backward passes for a while; return a function that ends that."""
        return self.roots.rest()

    def observe(self, tensors: Mapping[str, Any], others: Collection[str] = ()) -> None:
        """Take what the user hands over by name; what cannot be used is reported once.

        Args:
            tensors: By name.
            others: Names that other instruments take.
        """
        for name in tensors.keys() - set(OBSERVABLE):
            self._refuse(name, f"does not know {name!r}{nearest(name, {*OBSERVABLE, *others})}")
        for name, kinds, wanted in _KINDS:
            value = tensors.get(name)
            if value is not None and not isinstance(value, kinds):
                self._refuse(name, f"expects {wanted} for {name!r}, got {type(value).__name__}; it is left out.")
        loss, logits, targets, components = (tensors.get(n) for n in ("loss", "logits", "targets", "components"))
        if isinstance(loss, (Tensor, int, float)):
            self.observe_loss(loss)
        if isinstance(logits, Tensor):
            root = loss if isinstance(loss, Tensor) else None
            self.observe_logits(logits, targets if isinstance(targets, Tensor) else None, root)
            self._await_gradient(logits)
        if isinstance(components, Mapping):
            self._components.add(components)

    def _refuse(self, name: str, why: str) -> None:
        if name not in self._refused:
            self._refused.add(name)
            _log.warning("gradflow: observe() %s", why)

    def observe_loss(self, loss: Tensor | float) -> None:
        """Take one loss. A tensor is kept as a device reference."""
        self.seen = True
        if not isinstance(loss, Tensor):
            self.passes.now.add_loss(torch.tensor(float(loss), dtype=torch.float64))
            return
        self.passes.now.add_loss(local(loss).detach())
        self._follow(loss)

    def observe_logits(self, logits: Tensor, targets: Tensor | None, loss: Tensor | None = None) -> None:
        """Take logits, and targets and their loss when they are known, if this step is due."""
        if targets is not None and self.want_logits and not fits(logits, targets):
            got = f"{list(targets.shape)} of {str(targets.dtype).removeprefix('torch.')} for {list(logits.shape)}"
            wanted = "an integer for each sample, or probabilities with the shape of the logits"
            self._refuse("targets", f"expects as 'targets' {wanted}, got {got}; they are left out.")
        for part in self._read(loss, logits, targets):
            self.passes.now.add_part(part)

    def _follow(self, loss: Tensor, predictions: Tensor | None = None) -> None:
        self.seen = True
        if loss.requires_grad and not torch.compiler.is_compiling():
            self._on_loss(loss)
            # Where calls of ``backward`` are seen anyway, a hook on the loss would tell nothing new.
            if not self._told:
                self._begun.place(loss)
        if predictions is not None:
            self._await_gradient(predictions)

    def _read(
        self, loss: Tensor | None, logits: Tensor, targets: Tensor | None, class_dim: int | None = None
    ) -> list[Part]:
        wanted = self.want_logits and logits.is_floating_point() and logits.dim() > 0
        return _parts(loss, logits, targets, class_dim) if wanted else []

    def use(self, number: int, sites: tuple[str, ...], owned: Owned) -> None:
        """Have one of several optimizers use the passes whose gradients it steps with; called before :meth:`drain`.

        Args:
            number: Of the optimizer.
            sites: Names of all optimizers, by number.
            owned: What this one owns.
        """
        self._sites = sites
        own, new = self.passes.take(number, owned)
        loss = loss_of(own, self.scale)
        if loss is not None:
            self._own[number] = loss
        added = loss if len(new) == len(own) else loss_of(new, self.scale)
        if added is not None:
            self._joined.append(added)

    def drain(self) -> Drained:
        """Give out loss and statistics; with several optimizers, of all passes of the record so far, until it ends."""
        if not self.passes.scan:
            self.passes.take_all()
            loss = loss_of(self.passes.used, self.scale)
            self._joined = [] if loss is None else [loss]
            self._told &= self._rooted or not self.passes.used
            self._rooted = False
        out: Drained = []
        if self._joined:
            out.append(Pending("loss", (RUN_SITE,), _total(self._joined)))
        if self._own and len(self._sites) > 1:
            where = [number for number in self._own if number < len(self._sites)]
            values = _stacked([self._own[number] for number in where])
            out.append(Pending("optimizer.loss", self._sites, values, np.array(where, dtype=np.int64)))
        out.extend(self.roots.drain())
        out.extend(statistics_of(self.passes.used))
        out.extend(self._components.drain())
        self._numbered = -2
        self._awaited.clear()
        if not self.passes.scan:
            self._joined, self.passes.used = [], []
        return out

    def finish(self) -> None:
        """Begin a new record."""
        self.passes.finish()
        self._joined = []
        self._spent = 0.0
        if self._own:
            self._own = {}

    def forget(self) -> None:
        """Forget what was collected, without any work on it: the step makes no record."""
        self.finish()
        self.passes.forget()
        self._components.forget()
        self._awaited.clear()
        self._rooted, self._numbered = False, -2
        self._calls.seconds = 0.0

    def scalars(self) -> dict[str, float]:
        """Return what the host knows of the losses and backward passes of the record so far."""
        out = self.passes.scalars()
        self._spent, self._calls.seconds = self._spent + self._calls.seconds, 0.0
        if self._spent:
            out["runtime.loss_time"] = self._spent
        return out

    def _await_gradient(self, predictions: Tensor) -> None:
        """Take what the loss sends back into the model when it comes, if this step is due."""
        if self.want_logits and predictions.requires_grad and predictions.numel() and not predictions.is_complex():
            known = self._awaited.get(id(predictions))
            if known is not None and known() is predictions:
                return  # handed over twice, or given to two losses
            self._awaited[id(predictions)] = briefly(predictions)
            self._sent.place(predictions)

    def _sent_back(self, gradient: Tensor) -> None:
        with torch.no_grad():
            held = local(gradient)
            samples, entries = held.shape[0] if held.dim() else 1, held.numel()
            part = Part(UPSTREAM_METRICS, upstream_statistics(held), samples, entries)
            self.passes.latest.add_part(part)

    def _pass_begins(self, roots: Sequence[Root]) -> None:
        """Begin a backward pass; what runs inside it has to be detected from there."""
        self.on_pass(roots)
        begun = self.passes.begin()
        self._rooted = self._told = True
        for root, given in roots:
            self.root = end_of(root)
            begun.rooted = True
            weight = None if given is None else local(given).detach()
            begun.roots.append((local(root).detach(), scale_of(root.grad_fn), weight))
            if self.follows and not self.seen:
                self._on_loss(root)
            for see in self.on_root:
                see(root)

    def _pass_over(self, seconds: float | None) -> None:
        passes = self.passes
        if threading.get_ident() in passes.under:
            (self._end_scanned if passes.scan else passes.end)(seconds)
            if seconds is not None:
                self._on_over()

    def _backward(self, _gradient: Tensor) -> None:
        # Of ``torch.autograd.grad``, which adds to no gradient, when no pass is seen; its losses may be several.
        before, self._numbered = self._numbered, torch_private.backward_number()
        if not (self.passes.under or self._numbered == before):
            self.passes.count(adds=False)


@torch.no_grad()
def _parts(loss: Tensor | None, logits: Tensor, targets: Tensor | None, class_dim: int | None) -> list[Part]:
    """Return the statistics of logits and targets; those that the loss ignores, as its graph tells, are none."""
    held, whole = None if targets is None else local(targets), local(logits)
    rows, numbers = as_samples(whole, held, class_dim)
    if not rows.numel() or rows.shape[1] < 2:
        return []
    if loss is not None and numbers is not None and loss.grad_fn is not None:
        ignored = {term.ignored for term in terms_of(loss)[0] if term.kind == "classes"}
        number = ignored.pop() if len(ignored) == 1 else None
        if number is not None:
            numbers = numbers.masked_fill(numbers.eq(number), NO_CLASS)
    return list(parts_of(rows, numbers, whole.numel()))


def _stacked(losses: Sequence[Loss]) -> Loss:
    """Join losses. Shape: ``[len(losses)]``."""
    if all(isinstance(loss, np.ndarray) for loss in losses):
        return np.concatenate([np.asarray(loss) for loss in losses])
    device = next(loss.device for loss in losses if isinstance(loss, Tensor))
    wide = [torch.as_tensor(loss, dtype=torch.float64).to(device, non_blocking=True) for loss in losses]
    return torch.stack([loss.reshape(()) for loss in wide])


def _total(losses: Sequence[Loss]) -> Loss:
    """Return the sum of losses. Shape: ``[1]``."""
    total: Loss = losses[0] if len(losses) == 1 else _stacked(losses).sum().reshape(1)
    return total
