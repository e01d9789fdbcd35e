"""NumericalStabilityManager: looks at each step before the optimizer does, and keeps NaN out of the weights."""

from __future__ import annotations

import weakref
from collections.abc import MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from gradflow_export.debugging.nan.batch import BatchState, BatchWatch
from gradflow_export.debugging.nan.clipping import Clipped, clip
from gradflow_export.debugging.nan.config import GradientClippingConfig, NaNHandlingConfig, PyTorchDebuggingConfig
from gradflow_export.debugging.nan.faults import Fault, NumericalAnomalyError, gradient_fault, loss_fault
from gradflow_export.debugging.nan.keeper import BufferKeeper, Kept
from gradflow_export.debugging.nan.locate import NO_NORMS, Locator, Origin, norms_of
from gradflow_export.debugging.nan.nan_policy import ACTING, Outcome, UpdateGuard
from gradflow_export.debugging.nan.reporting import Reporting
from gradflow_export.debugging.nan.scaling import Scaling, is_enabled
from gradflow_export.debugging.nan.snapshot import Loops
from gradflow_export.debugging.nan.trace import backward
from gradflow_export.debugging.service.manager import PyTorchDebuggingManager
from gradflow_export.debugging.service.session import StepFacts
from gradflow_export.errors import ArgumentTypeError
from gradflow_export.exporter import Exporter
from gradflow_export.hooks import torch_private
from gradflow_export.hooks.discover import unwrap
from gradflow_export.hooks.shard_layout import is_spread
from gradflow_export.metrics.arrays.norms import l2_norms
from gradflow_export.validation import check_module, check_optimizer

if TYPE_CHECKING:
    from typing_extensions import Self

_LASTING = frozenset({"broken_weights", "broken_state", "broken_buffers"})
_RESTORING = frozenset({"skip", "rewind"})
_CLIPPED = frozenset({"none", "zero", "clamp"})


class NumericalStabilityManager:
    """Looks at gradients between the backward pass and the optimizer's step, clips them, and keeps NaN out of weights.

    The loop stays the user's; one line goes between ``backward()`` and ``optimizer.step()``::

        loss.backward()
        result = manager.step(model, loss, optimizer)
        optimizer.step()                       # changes nothing where result["update_prevented"]
        optimizer.zero_grad()

    What each policy promises is described in ``docs/debugging.md``. Findings also go to every exporter that watches the
    model. Looking at gradients before each step makes the training thread wait for the device.

    Args:
        clipping_config: How gradients are clipped; by default they are not.
        nan_config: What to do about NaN and Inf; by default they are reported only.
        debug_config: What is debugged while a session lasts; by default nothing is.
        exporter: The exporter to tell; by default every one that watches the model.
        scaler: The loop's ``torch.amp.GradScaler``. A step that it will skip because gradients overflowed is no
            anomaly.
        schedulers: Learning-rate schedulers that step once after each optimizer step; they are put back after an update
            that did not happen. Leave out those that step once per epoch.

    Attributes:
        debugging: The part that keeps sessions, files and checks.

    Raises:
        ArgumentTypeError: An argument has the wrong type.
    """

    def __init__(
        self,
        clipping_config: GradientClippingConfig | None = None,
        nan_config: NaNHandlingConfig | None = None,
        debug_config: PyTorchDebuggingConfig | None = None,
        *,
        exporter: Exporter | None = None,
        scaler: Any = None,
        schedulers: Sequence[Any] = (),
    ) -> None:
        _check("clipping_config", clipping_config, GradientClippingConfig)
        _check("nan_config", nan_config, NaNHandlingConfig)
        _check("exporter", exporter, Exporter)
        self._clipping = clipping_config or GradientClippingConfig(mode="none")
        self._nan = nan_config or NaNHandlingConfig(policy="detect")
        self.debugging = PyTorchDebuggingManager(debug_config, exporter=exporter)
        self._reporting = Reporting(exporter)
        self._scaling = Scaling(scaler, self._nan.scaler_patience)
        self._loops = Loops(schedulers, scaler if is_enabled(scaler) else None)
        self._guards: weakref.WeakKeyDictionary[Optimizer, UpdateGuard] = weakref.WeakKeyDictionary()
        self._batches: MutableMapping[nn.Module, BatchWatch] = WeakIdKeyDictionary()
        self._keepers: MutableMapping[nn.Module, BufferKeeper] = WeakIdKeyDictionary()
        self._locators: MutableMapping[nn.Module, Locator] = WeakIdKeyDictionary()
        self._steps = self._buffers_repaired = 0

    def watch(self, model: nn.Module) -> Self:
        """See the model's forward passes from now on; without it the first step's beginning is not seen.

        Args:
            model: What is trained, as it is called: with its wrappers.
        """
        check_module(model)
        debug = self.debugging
        if self._nan.policy in ACTING and model not in self._keepers:
            self._keepers[model] = BufferKeeper(unwrap(model))
        if model not in self._batches:
            locates, checks = debug.locates, debug.checks_gradients
            keeps = self._nan.policy in _RESTORING
            if locates or checks or keeps or len(self._loops):
                # The model's hooks must not keep the manager, nor the manager's end the model.
                settle = weakref.WeakMethod(self._settle)
                watch = BatchWatch(model, keep_state=keeps, keep_calls=locates or checks, before=settle)
                self._batches[model] = watch
                weakref.finalize(self, _close, weakref.ref(watch))
            if locates:
                locator = self._locators[model] = Locator(unwrap(model))
                weakref.finalize(self, locator.close)
        return self

    def step(self, model: nn.Module, loss: Tensor | float, optimizer: Optimizer) -> dict[str, Any]:
        """Look at the gradients of a step, clip them or act on NaN; call it before ``optimizer.step()``.

        Args:
            model: What is trained.
            loss: The loss, without a gradient scaler's factor.
            optimizer: Whose step comes next.

        Returns:
            ``step``, ``loss``, ``finite``, ``action``, ``update_prevented``, ``restored``, ``steps_back``,
            ``buffers_repaired`` (entries that are their last finite values again, by name of the buffer),
            ``still_broken`` (sentences: what is NaN or Inf and could not be repaired), ``clipping`` (``mode``,
            ``clipped``, ``scale``, ``share``, ``norm_before``, ``norm_after``), ``anomalies`` and ``debug_info``.

        Raises:
            NumericalAnomalyError: The step holds NaN or Inf, and the policy or the debugging mode is ``"raise"``.
            ArgumentTypeError: An argument has the wrong type.
        """
        with torch_private.no_functions():
            return self._step(model, loss, optimizer)

    def _step(self, model: nn.Module, loss: Tensor | float, optimizer: Optimizer) -> dict[str, Any]:
        check_module(model)
        check_optimizer(optimizer)
        value = _number(loss)
        self.watch(model)
        self.debugging.begin()
        self._settle()
        self._steps += 1
        guard = self._guards.get(optimizer)
        if guard is None:
            guard = self._guards[optimizer] = UpdateGuard(model, optimizer, self._nan, self._loops)
        self._scaling.unscale(optimizer)
        watch = self._batches.get(model)
        batch = None if watch is None else watch.state_for(optimizer)
        every = guard.named()
        named = [(name, p) for name, p in every if p.grad is not None]
        read = l2_norms([p.grad for _, p in named if p.grad is not None]) if named else NO_NORMS
        norms = norms_of(named, read)
        faults, scaled = self._faults(value, gradient_fault(named, norms), optimizer)
        broken = guard.look(every, faults)
        lasting: list[Fault] = []
        if broken is not None:
            (faults if faults or guard.acts_on_state else lasting).append(broken)
        locator = None if scaled else self._locators.get(model)
        origin = Origin() if locator is None else locator.find(named, read, batch)
        clipped: Clipped | None = None
        if faults:
            _explain(faults, origin)
            outcome = self._act(guard, faults, batch)
        elif scaled:
            outcome = Outcome("scaler", prevented=True)
        else:
            outcome = guard.accept(batch)
        if outcome.action in _CLIPPED:
            if faults:
                norms = norms_of(
                    named, l2_norms([p.grad for _, p in named if p.grad is not None]) if named else NO_NORMS
                )
            clipped = clip(named, self._clipping, norms)
        keeper = self._keepers.get(model)
        kept = Kept() if keeper is None else keeper.look()
        lasting += kept.faults()
        self._buffers_repaired += bool(kept.repaired)
        told = [*faults, *lasting]
        self._reporting.step(model, faults, outcome, origin, named, clipped, lasting)
        facts = StepFacts(len(every), norms, [fault.as_dict() for fault in told], outcome.action, batch)
        info = self.debugging.step(model, facts)
        if watch is not None:
            watch.end(optimizer)
        if outcome.action == "raise":
            self.stop_debug_session()
            raise _error(self._steps, faults)
        return {
            "step": self._steps, "loss": value, "finite": not faults and not scaled, "action": outcome.action,
            "update_prevented": outcome.prevented, "restored": outcome.restored, "steps_back": outcome.back,
            "buffers_repaired": kept.repaired, "still_broken": [f.message for f in told if f.kind in _LASTING],
            "clipping": (clipped or clip([], self._clipping, norms)).as_dict(),
            "anomalies": info["anomaly_details"], "debug_info": info,
        }  # fmt: skip

    def backward(self, loss: Tensor) -> dict[str, Any]:
        """Run ``loss.backward()`` and name the operation that makes NaN or Inf first, without raising for it.

        Dear: every operation is looked at. With debugging of autograd anomalies on, the place of its forward call is
        told too.

        Args:
            loss: Without a gradient scaler's factor, which is put on here.

        Returns:
            ``found``, and then ``operation``, ``value`` and ``traceback``.
        """
        culprit = backward(self._scaling.scaled(loss))
        return {"found": False} if culprit is None else {"found": True, **vars(culprit)}

    def start_debug_session(self, name: str = "session") -> None:
        """Begin a debugging session; without a call the first step begins one.

        Args:
            name: For the summary.
        """
        self.debugging.start_debug_session(name)

    def stop_debug_session(self) -> None:
        """End the session: files are written, autograd's anomaly mode is what it was."""
        self.debugging.stop_debug_session()

    def get_debug_summary(self) -> dict[str, Any]:
        """Return counts of the session under way, or of the last one."""
        return {
            **self.debugging.get_debug_summary(),
            "updates_prevented": self._reporting.prevented,
            "gradients_repaired": self._reporting.repaired,
            "buffers_repaired": self._buffers_repaired,
            "rewinds": self._reporting.rewinds,
            "scaler_skips": self._scaling.skipped,
            "snapshot_mb": sum(guard.snapshot_bytes for guard in self._guards.values()) / 2**20,
        }

    def close(self) -> None:
        """End the session and take every hook away; calling it again does nothing."""
        self.stop_debug_session()
        self._settle()
        for watch in self._batches.values():
            watch.close()
        for locator in self._locators.values():
            locator.close()
        self._batches.clear()
        self._locators.clear()
        self._keepers.clear()

    def __enter__(self) -> Self:
        """Return the manager."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close."""
        self.close()

    def _faults(self, loss: float, gradients: Fault | None, optimizer: Optimizer) -> tuple[list[Fault], bool]:
        """Return what is wrong, and whether a gradient scaler takes care of it."""
        bad_loss = loss_fault(loss)
        if self._scaling.skips(optimizer, overflowed=gradients is not None and bad_loss is None):
            tired = self._scaling.fault()
            return ([] if tired is None else [tired]), True
        # Of several ranks one alone may see a broken loss, and all of them must step or none.
        if gradients is None and (not self._nan.check_loss or is_spread()):
            return [], False
        return [fault for fault in (bad_loss, gradients) if fault is not None], False

    def _act(self, guard: UpdateGuard, faults: list[Fault], batch: BatchState | None) -> Outcome:
        if faults[0].kind == "scaler":
            return Outcome("scaler", prevented=True)
        if self._nan.policy == "raise" or self.debugging.raises:
            return Outcome("raise", prevented=True)
        return guard.act(faults, batch)

    def _settle(self) -> None:
        for guard in list(self._guards.values()):
            guard.settle()


def _close(watch: weakref.ref[BatchWatch]) -> None:
    found = watch()
    if found is not None:
        found.close()


def _error(step: int, faults: list[Fault]) -> NumericalAnomalyError:
    told = " and ".join(fault.message for fault in faults)
    where = f"; it begins {faults[0].origin}" if faults[0].origin else ""
    return NumericalAnomalyError(
        f"step {step} must have a finite loss and finite gradients, got: {told}{where}. The update has not happened; "
        "leave the batch out, or use policy 'skip' to go on."
    )


def _explain(faults: list[Fault], origin: Origin) -> None:
    for fault in faults:
        fault.origin = origin.words
        if origin.culprit is not None:
            fault.operation = dict(vars(origin.culprit))


def _number(loss: object) -> float:
    if isinstance(loss, Tensor):
        return float(loss.detach()) if loss.numel() == 1 else float(loss.detach().float().mean())
    if isinstance(loss, bool) or not isinstance(loss, (int, float)):
        raise ArgumentTypeError(
            f"loss must be a tensor or a number, got {type(loss).__name__}; pass what backward() ran on."
        )
    return float(loss)


def _check(name: str, value: object, kind: type[Any]) -> None:
    if value is not None and not isinstance(value, kind):
        raise ArgumentTypeError(
            f"{name} must be of the type {kind.__name__}, got {type(value).__name__}; pass {name}={kind.__name__}(...)."
        )


class TrainingWrapper(NumericalStabilityManager):
    """A stability manager that is called instead of its :meth:`step`."""

    def __call__(self, model: nn.Module, loss: Tensor | float, optimizer: Optimizer) -> dict[str, Any]:
        """Do what :meth:`NumericalStabilityManager.step` does."""
        return self.step(model, loss, optimizer)


def create_training_wrapper(
    clipping_config: GradientClippingConfig | None = None,
    nan_config: NaNHandlingConfig | None = None,
    debug_config: PyTorchDebuggingConfig | None = None,
    **settings: Any,
) -> TrainingWrapper:
    """Return a callable that is put between ``backward()`` and ``optimizer.step()``.

    Args:
        clipping_config: As for :class:`NumericalStabilityManager`.
        nan_config: As there.
        debug_config: As there.
        **settings: Its other arguments.
    """
    return TrainingWrapper(clipping_config, nan_config, debug_config, **settings)
