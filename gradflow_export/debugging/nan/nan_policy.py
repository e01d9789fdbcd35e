"""What happens to the update of a step whose numbers are wrong: skipped, repaired, or taken back."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import LBFGS
from torch.optim.optimizer import Optimizer

from gradflow_export.debugging.nan.batch import BatchState
from gradflow_export.debugging.nan.config import NaNHandlingConfig
from gradflow_export.debugging.nan.faults import Fault, clamp_nonfinite, drop_gradients, zero_nonfinite
from gradflow_export.debugging.nan.locate import names_of
from gradflow_export.debugging.nan.snapshot import Loops, Snapshot, broken_state, broken_weights, parameters_of
from gradflow_export.errors import ArgumentTypeError
from gradflow_export.hooks.discover import unwrap
from gradflow_export.rules.base import some

_log = logging.getLogger("gradflow_export")

ACTING = frozenset({"skip", "zero", "clamp", "rewind"})
"""Policies that let training go on with finite numbers."""

_REPAIRING = frozenset({"zero", "clamp"})


@dataclass(frozen=True)
class Outcome:
    """What was done about a step.

    Attributes:
        action: ``"none"``, the policy, or ``"scaler"`` where a ``GradScaler`` skips the step by itself.
        prevented: Whether the optimizer's next step changes nothing.
        restored: Whether buffers and generators are what they were before the step's first forward pass.
        back: How many steps of the optimizer the weights went back.
    """

    action: str = "none"
    prevented: bool = False
    restored: bool = False
    back: int = 0


class UpdateGuard:
    """Stands between one optimizer and gradients that are NaN or Inf.

    Args:
        model: What is trained; held weakly.
        optimizer: Whose next step is meant; held weakly.
        config: What to do.
        loops: Schedulers and scaler that step beside it.

    Raises:
        ArgumentTypeError: The optimizer runs backward passes of its own, so that nobody can look between them.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, config: NaNHandlingConfig, loops: Loops) -> None:
        if isinstance(optimizer, LBFGS) and config.policy in ACTING:
            raise ArgumentTypeError(
                f"policy {config.policy!r} needs an optimizer that steps once with the gradients there are, got "
                f"{type(optimizer).__name__}, which runs backward passes inside its step; use 'detect' or 'raise'."
            )
        self._model, self._optimizer = weakref.ref(unwrap(model)), weakref.ref(optimizer)
        self._config, self._loops = config, loops
        self._snapshot = Snapshot(optimizer) if config.policy == "rewind" else None
        self._since = self._bad = self._rewound = 0
        self._doubtful = False
        self._signature: tuple[int, ...] = ()
        self._names: list[str] = []
        self.pending: Any = None
        """State of schedulers and scaler to be put back before the next step, ``None`` for none."""

    @property
    def snapshot_bytes(self) -> int:
        """Memory that the copy of the last good state takes."""
        return 0 if self._snapshot is None else self._snapshot.bytes

    def named(self) -> list[tuple[str, Tensor]]:
        """Return the optimizer's parameters with their names."""
        model, optimizer = self._model(), self._optimizer()
        if model is None or optimizer is None:
            return []
        parameters = parameters_of(optimizer)
        # Walking through a deep model at every step would cost more than looking at its gradients.
        signature = tuple(map(id, parameters))
        if signature != self._signature:
            self._signature = signature
            self._names = [name for name, _ in names_of(model, parameters)]
        return list(zip(self._names, parameters, strict=True))

    def weights_fault(self, named: Sequence[tuple[str, Tensor]]) -> Fault | None:
        """Return what is wrong with weights, or with the state of the optimizer."""
        optimizer = self._optimizer()
        for kind, word, names in (
            ("broken_weights", "weights", broken_weights(named)),
            ("broken_state", "optimizer state", [] if optimizer is None else broken_state(named, optimizer)),
        ):
            if names:
                return Fault(kind, f"the {word} of {some(tuple(names))} hold NaN or Inf", tuple(names))
        return None

    def look(self, named: Sequence[tuple[str, Tensor]], faults: Sequence[Fault]) -> Fault | None:
        """Look at weights and optimizer state where that decides what is done, or whether a repair was enough.

        An optimizer squares gradients: what is finite after a repair may overflow in its state, and nobody would look
        there again.
        """
        if not (faults or self._doubtful or (self._snapshot is not None and self._due)):
            return None
        broken = self.weights_fault(named)
        self._doubtful = self._config.policy in _REPAIRING and (bool(faults) or broken is not None)
        return broken

    @property
    def acts_on_state(self) -> bool:
        """Whether weights or optimizer state that are NaN or Inf are by themselves a reason to act."""
        return self._config.policy not in _REPAIRING

    @property
    def _due(self) -> bool:
        snapshot = self._snapshot
        return snapshot is not None and (not snapshot.taken or self._since + 1 >= self._config.snapshot_every)

    def accept(self, batch: BatchState | None) -> Outcome:
        """Let a good step through; with ``"rewind"`` remember what there was before it."""
        self._bad = 0
        if self._snapshot is not None:
            if self._due:
                first = not self._snapshot.taken
                self._snapshot.save(batch, self._loops.save())
                self._since = 0
                if first:
                    _log.info("gradflow: policy 'rewind' keeps a copy of %.1f MB", self._snapshot.bytes / 2**20)
            else:
                self._since += 1
        return Outcome()

    def act(self, faults: Sequence[Fault], batch: BatchState | None) -> Outcome:
        """Do what the policy says about a bad step."""
        policy = self._config.policy
        parameters = [p for _, p in self.named()]
        self._bad += 1
        if policy == "zero":
            zero_nonfinite(parameters)
        elif policy == "clamp":
            clamp_nonfinite(parameters, self._config.clamp_value)
        elif policy in {"skip", "rewind"}:
            drop_gradients(parameters)
            broken = any(fault.kind in {"broken_weights", "broken_state"} for fault in faults)
            if policy == "rewind" and (broken or self._bad >= self._config.rewind_after):
                return self._go_back()
            self.pending = self._loops.save()
            if batch is not None:
                batch.restore()
            return Outcome(policy, prevented=True, restored=batch is not None)
        return Outcome(policy)

    def _go_back(self) -> Outcome:
        snapshot = self._snapshot
        if snapshot is None or not snapshot.taken:
            _log.warning("gradflow: policy 'rewind' has no good state to go back to: no step was finite so far.")
            return Outcome("rewind", prevented=True)
        snapshot.restore()
        self.pending = snapshot.loops
        back, self._since, self._bad = self._since + 1, -1, 0
        self._rewound += 1
        _log.log(
            logging.WARNING if self._rewound in {1, 10, 100} else logging.INFO,
            "gradflow: weights and optimizer state went back by %d step(s), %d time(s) so far. If that goes on, lower "
            "the learning rate or clip: the same update breaks the weights again.",
            back,
            self._rewound,
        )
        return Outcome("rewind", prevented=True, restored=True, back=back)

    def settle(self) -> None:
        """Put schedulers and scaler back to what they were before a step that did not happen."""
        if self.pending is not None:
            self._loops.restore(self.pending)
            self.pending = None
