"""Gradients as backward passes leave them: before they are clipped, and after the first micro-batch of a step."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from gradflow_export.catalog import MetricSpec, spec
from gradflow_export.hooks import torch_private
from gradflow_export.metrics.norms import dense_entries, l2_norms
from gradflow_export.records import RUN_SITE
from gradflow_export.taps.base import Drained, Guard, Pending, unguarded
from gradflow_export.taps.optimizers import OptimizerStep


class ClippingTap:
    """Takes gradient norms at the end of the first and of the last backward pass of a sampled step.

    Compared with the gradients that the optimizer uses they show what clipping did; compared with each other, where
    gradients are accumulated, how noisy a micro-batch's gradient is. Needs the loss to be seen.

    Args:
        model: Gives the model, or ``None`` when it is gone.
        guard: Wraps what runs inside the backward pass.
    """

    def __init__(self, model: Callable[[], nn.Module | None], *, guard: Guard = unguarded) -> None:
        self._model = model
        self._when_over = guard(self._over)
        self._once_more = guard(self._wait)
        self._owners: list[int] = []
        self._first: Tensor | None = None
        self._last: Tensor | None = None
        self._out: Drained = []
        self.armed = False

    @property
    def specs(self) -> tuple[MetricSpec, ...]:
        """The metrics this tap can give out."""
        return tuple(spec(f"gradient.{name}") for name in ("norm_before_clip", "clip_scale", "first_norm"))

    @property
    def waits(self) -> bool:
        """Whether norms were taken in this step that are still to be compared."""
        return self._last is not None

    def begin(self) -> None:
        """Notice that a backward pass has begun; called from within it."""
        if self.armed:
            torch_private.queue_callback(self._once_more)

    def compare(self, step: OptimizerStep, norms: Tensor) -> None:
        """Compare with the gradients an optimizer is about to use.

        Args:
            step: The optimizer. Where a ``GradScaler`` has divided its gradients already, there is nothing to compare.
            norms: Norms of its gradients. Shape: ``[n]``, without the parameters that have none.
        """
        if self._first is None or self._last is None or (step.scaled and step.scale is None):
            return
        owned = {id(p) for p in step.owned.parameters}
        counted = {id(p) for p, here in zip(step.owned.parameters, step.owned.layout.counted, strict=True) if here}
        mine = [index for index, owner in enumerate(self._owners) if owner in owned]
        if len(mine) != len(norms):
            return
        with torch.no_grad():
            scale = _total(norms) / _total(_chosen(self._last, mine))
            # Of a parameter that lies on several ranks each tells its own part, and of replicas the first rank.
            told = [index for index, owner in enumerate(self._owners) if owner in owned and owner in counted]
            before, first = (_total(_chosen(values, told)) for values in (self._last, self._first))
            if step.scale is not None:
                before, first, scale = before / step.scale, first / step.scale, scale * step.scale
        for name, value in (("norm_before_clip", before), ("clip_scale", scale), ("first_norm", first)):
            self._out.append(Pending(f"gradient.{name}", (RUN_SITE,), value.reshape(1)))

    def drain(self) -> Drained:
        """Give out what was compared since the last call, and forget this step's norms."""
        out, self._out = self._out, []
        self.forget()
        return out

    def forget(self) -> None:
        """Forget this step's norms."""
        self._first = self._last = None

    def _wait(self) -> None:
        # Queued from within the queue, so that it runs after those that average gradients over processes.
        torch_private.queue_callback(self._when_over)

    def _over(self) -> None:
        model = self._model()
        parameters = [] if model is None else [p for p in model.parameters() if p.grad is not None]
        if not parameters:
            return
        owners = [id(p) for p in parameters]
        with torch.no_grad():
            norms = l2_norms([dense_entries(p.grad) for p in parameters if p.grad is not None])
        if self._first is None or owners != self._owners:
            self._first, self._owners = norms, owners
        self._last = norms


def _chosen(norms: Tensor, places: list[int]) -> Tensor:
    return norms if len(places) == len(norms) else norms[places]


def _total(norms: Tensor) -> Tensor:
    total: Tensor = torch.linalg.vector_norm(norms.double())
    return total
