"""The facade: the only place where instruments, rules and writers meet."""

from __future__ import annotations

import contextlib
import logging
import os
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

from torch import nn
from torch.optim.optimizer import Optimizer

from gradflow_export.config import make_settings, refuse_of_watch
from gradflow_export.engine.build import default_logdir, describe, is_compiled, join_ranks, make_judge, make_loop
from gradflow_export.engine.exporter_report import UNWATCHED, Reports, say_unwatched
from gradflow_export.engine.external_issues import Amendment
from gradflow_export.engine.isolation import Guard
from gradflow_export.engine.outlets import make_outlets
from gradflow_export.engine.training_loop import TrainingLoop
from gradflow_export.engine.transfer import Bundle
from gradflow_export.engine.worker import Worker
from gradflow_export.errors import ArgumentError, check_flag
from gradflow_export.hooks.compiled_calls import Inside
from gradflow_export.hooks.discover import unwrap
from gradflow_export.hooks.readings import Drained
from gradflow_export.instruments.copies import Copies
from gradflow_export.instruments.discrete.declared_grids import Grids
from gradflow_export.instruments.discrete.nodes import Pairs
from gradflow_export.instruments.runtime import MEGABYTE, device_memory
from gradflow_export.profiles import Profile, Thresholds
from gradflow_export.records.ignored import ignored
from gradflow_export.records.step_record import Issue
from gradflow_export.schedule import Instrument
from gradflow_export.validation import (
    check_ignored,
    check_logdir,
    check_model,
    check_on_issue,
    check_start,
    check_watch,
)
from gradflow_export.writers import Backend
from gradflow_export.writers.base import Writer
from gradflow_export.writers.sinks import ScalarSink

if TYPE_CHECKING:
    from typing_extensions import Never, Self, Unpack

_log = logging.getLogger("gradflow_export")


class Exporter(Reports):
    """Monitors a model during training and reports training problems: the layer, the first step, and the fix.

    >>> import torch
    >>> model = torch.nn.Linear(4, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> exporter = Exporter(model, backends=[], verbose=0).watch()
    >>> for _ in range(3):
    ...     optimizer.zero_grad()
    ...     model(torch.ones(8, 4)).square().mean().backward()
    ...     optimizer.step()
    >>> exporter.summary()["steps"], exporter.issues
    ({'count': 3, 'first': 1, 'last': 3}, ())

    The loop stays as it is. Watching never changes training: losses, gradients and parameters are the same, bit for
    bit. After ``watch()`` nothing raises into the loop. The exporter lives as long as the model and is closed
    automatically at exit; ``close()`` or ``with`` closes it earlier. docs/when-it-fires.md lists what is read when.

    Args:
        model: The model to watch; ``DataParallel``, ``DistributedDataParallel`` and compiled models are unwrapped.
        backends: Names (``"tensorboard"``, ``"wandb"``, ``"jsonl"``, ``"console"``, ``"memory"``) or writers.
        wandb: The W&B run to write to; or a dictionary of arguments for ``wandb.init`` and ``WandbWriter`` to start
            one, such as ``{"project": "mine"}``, offline if there is no login or server. Both add the backend
            ``"wandb"``, which without this argument uses the active run.
        logdir: Directory for files; by default ``runs/<time>_<model class>``.
        every: Steps between two records.
        profile: ``"robust"`` (scale-free rules) or ``"seed"`` (fixed thresholds).
        intervals: Steps between readings by instrument; see ``gradflow_export.schedule.INTERVALS``.
        config: Dictionary, or path of a YAML or TOML file, with any of these settings; may have a section
            ``diagnostics``. Keyword arguments take precedence.
        enabled: False disables the exporter.
        alerts_enabled: False disables all rules.
        rerun_nonfinite: If True, the forward passes of a step with NaN or Inf gradients are repeated before the
            optimizer steps, to name the module where it began. State that ``forward`` changes, other than buffers and
            random generators, then changes twice. If False (default), ``forward`` is never called: on the CPU the
            place is read from the graph of the NaN loss. On other devices this would make the training thread wait at
            every step, so only the readings of the step are used.
        budget: Maximum fraction of the time that watching may take, such as 0.01, or ``None`` for no limit. The default
            is the larger of 0.05 and 20 us a step. From step 101 on, intervals are stretched and steps skipped for it.
        synchronous: Judge and write each step before the next one. Records and issues are then reproducible bit for
            bit, apart from clocks, memory and ``overhead``. There is no budget then.
        preflight: Record the first 50 steps (or this number of steps) densely, and print a summary of their issues.
        compiled: What is read in code compiled by ``torch.compile``. ``"exact"`` (default): block gains and
            activations on the CPU in float32 and float64, where training stays the same bit for bit. ``"always"``: in
            reduced precision and on other devices too, where this can change the rounding of training. ``"never"``:
            nothing. See docs/loops.md.
        start_step: Number of completed steps, if training is resumed from a checkpoint into the same ``logdir``.
        verbose: What is printed to standard error or ``logging``: 0 warnings of errors; 1 the watched model, HIGH and
            CRITICAL issues, the verdict; 2 every issue and headline metrics. Default: ``GRADFLOW_VERBOSE``, else 1.
        on_issue: ``"try"``: a forked process tests fixes for each HIGH issue on a copy of the model and the last
            batches, and adds the result to the issue. CPU only. See docs/doctor.md.
        strict: Raise internal errors instead of logging them.
        **thresholds: Fixed thresholds by name, such as ``gradient_explosion_threshold=10.0``.

    Raises:
        ArgumentError: A value cannot be used, or a name is unknown; the message names the nearest.
        ArgumentTypeError: An argument has the wrong type.
        StorageError: ``logdir`` cannot be written to, or ``config`` cannot be read.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        backends: Backend | Writer | ScalarSink | Sequence[Backend | Writer | ScalarSink] = ("tensorboard",),
        wandb: object = None,
        logdir: str | os.PathLike[str] | None = None,
        every: int | None = None,
        profile: Profile | None = None,
        intervals: Mapping[Instrument, int] | None = None,
        config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
        enabled: bool | None = None,
        alerts_enabled: bool | None = None,
        rerun_nonfinite: bool | None = None,
        budget: float | Literal["auto"] | None = "auto",
        synchronous: bool | None = None,
        preflight: bool | int | None = None,
        compiled: Inside | None = None,
        start_step: int = 0,
        verbose: Literal[0, 1, 2] | None = None,
        on_issue: Literal["try"] | None = None,
        strict: bool = False,
        **thresholds: Unpack[Thresholds],
    ) -> None:
        check_model(model)
        check_start(start_step)
        check_logdir(logdir)
        check_on_issue(on_issue)
        check_flag("strict", strict)
        given = {
            "every": every, "profile": profile, "intervals": intervals, "enabled": enabled,
            "alerts_enabled": alerts_enabled, "rerun_nonfinite": rerun_nonfinite,
            "synchronous": synchronous, "preflight": preflight, "compiled": compiled, "verbose": verbose, **thresholds,
        }  # fmt: skip
        if budget != "auto":
            given["budget"] = budget
        self.settings = make_settings(config, given)
        self._model = weakref.ref(inner := unwrap(model))
        self._compiled = is_compiled(model)
        self._guard = Guard(strict=strict)
        self._start_step = start_step
        self._closed, self._tries = False, on_issue == "try"
        self._trials: _Trials | None = None
        self._hooks = contextlib.ExitStack()
        self._loop: TrainingLoop | None = None
        self.logdir = Path(logdir if logdir is not None else default_logdir(inner))
        info = describe(inner, self.settings)
        self._judge = make_judge(self.settings, strict=strict)
        self._writers = make_outlets(self.settings, info, backends, self.logdir, wandb, self._verdict)
        device, opened = partial(_read_memory, self._writers), self._on_issue
        self._worker = Worker(
            info, self._judge, self._writers, device=device, on_issue=opened, strict=strict,
            synchronous=self.settings.synchronous,
        )  # fmt: skip
        self._worker.summary.unread = UNWATCHED
        # Called when it is closed, collected or still there at exit.
        wanted = bool(self._writers and self.settings.verbose)
        self._unwatched = weakref.finalize(self, say_unwatched, wanted)

    def watch(
        self,
        criterion: nn.Module | None = None,
        *,
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        blocks: Iterable[str | nn.Module] | None = None,
        pairs: Pairs = None,
        grids: Grids = None,
        copies: Copies = None,
        roles: Mapping[str, str | nn.Module | Sequence[str | nn.Module]] | None = None,
        ignore: Iterable[str | tuple[str, str]] = (),
        **unknown: Never,
    ) -> Exporter:
        """Attach the hooks and start recording.

        Args:
            criterion: The loss module, whose calls provide logits and targets; without it they can be passed to
                :meth:`observe`. The loss is the tensor on which ``backward`` is called.
            optimizer: Count only steps of these optimizers; by default all that own a parameter of the model.
            blocks: Names or modules whose gains are measured, from input to output; by default they are detected.
            pairs: Names of parameters that are phase and magnitude of the same nodes, ``[("phase", "size")]``, or
                ``"rows"``: direction and norm of each row of each weight. Complex parameters are detected.
            grids: Step of the grid to which weights are quantized when used, by name,
                ``{"phase": 2 * math.pi / 512}``, or one number for what ``pairs`` names, or for every real parameter.
                An integer tensor, which may be a buffer, holds indices on its grid.
            copies: Groups of names of parameters, buffers or modules that should be equal: ``[("left", "right")]``.
            roles: Names of optimizers by the modules they train, ``{"critic": ["q1", "q2"]}``; default ``"Adam.0"``.
            ignore: Expected issues, in addition to the setting of that name: ``[("NOT_TRAINING", "pooler")]`` applies
                to everything in ``pooler``, ``("DEAD", "*.act")`` to matching names, a type alone to every layer.
            **unknown: Arguments that do not exist; the error names the nearest one that does.

        Returns:
            The exporter itself.

        Raises:
            ArgumentError: A name is unknown, the criterion is the model itself, or this exporter was closed.
            ArgumentTypeError: An argument is unknown or has the wrong type.
        """
        self._unwatched.detach()
        _check_open(self, unknown)
        if self._loop is not None:
            _log.warning("gradflow: this exporter is watching already; the second watch() is ignored.")
            return self
        check_watch(criterion, optimizer, self._model())
        self._judge.ignored = self.settings.ignored.joined(check_ignored(ignored(ignore), self._model()))
        self._worker.summary.unread = ""
        if not self.settings.enabled:
            return self
        model = self._model()
        if model is None:
            raise ArgumentError("the model of this Exporter is gone; keep a reference to the model that is trained.")
        loop = make_loop(
            model, self.settings, self._guard, self._worker.put, criterion=criterion, optimizer=optimizer,
            blocks=blocks, pairs=pairs, grids=grids, copies=copies, roles=roles, compiled=self._compiled,
        )  # fmt: skip
        loop.pace.worker, loop.paused, self._judge.on_doubt = self._worker, self._paused, loop.pace.doubt
        join_ranks(model, loop, self._worker)
        self._worker.describe(loop.instruments.blocks.names, loop.schedule.intervals)
        _close_earlier(model, self)
        _go_on(self, loop)
        self._loop = loop
        self._reference = _Watched(model)
        self._reference.exporter = weakref.ref(self)
        # Lives as long as the model and is called at exit too; holds the exporter, so that nobody has to.
        self._finalizer = weakref.finalize(model, self.close)
        self._worker.start()
        try:
            self._hooks.enter_context(loop.attach())
            if self._tries:
                self._trials = _trials(self, model, loop)
        except BaseException:
            self.close()
            raise
        return self

    def observe(self, **tensors: Any) -> None:
        """Record tensors that the exporter cannot read itself; call it before ``optimizer.step()``.

        Args:
            **tensors: ``loss`` (a tensor or number), ``logits`` (``[..., classes]``), ``targets`` (class indices, or
                probabilities with the shape of the logits), ``components`` (terms of the loss by name),
                ``validation_loss`` (the loss of an evaluation, for OVERFITTING), ``policy`` (a ``torch.distributions``
                object, or a mapping with any of ``logits``, ``probs``, ``mask``, ``std``, ``action_range``),
                ``intended`` (by name, the updates that your own update rule intends for integer tensors on
                ``grids``, before rounding and in units of the grid step).
        """
        if self._takes("observe") and self._loop is not None:
            self._loop.instruments.observe(tensors, self._guard.part)

    def step(self) -> None:
        """End a step in a loop without a ``torch.optim.Optimizer``; call it once after each update."""
        model = self._model()
        if self._loop is not None and model is not None and not self._closed:
            self._guard.part("step")(self._loop.step_by_hand)(model)

    def close(self) -> None:
        """Remove every hook, write pending records, close the writers; calling it again does nothing."""
        if self._closed:
            return
        self._unwatched()
        if self._worker.inherited:  # the thread and the files belong to the parent
            self._closed = True
            self._hooks.close()
            return
        if self._trials is not None:
            self._guard.part("trials")(self._trials.close)()
        if self._loop is not None:
            self._loop.quiet.end()
            self._guard.part("close")(self._loop.finish)(last=True)
            # What was found after the last record has one of its own.
            if self._loop.told:
                self._worker.put(Bundle(self._loop.steps + 1, time.time(), told=list(self._loop.told)))
        self._closed = True
        self._hooks.close()
        if self._loop is not None:
            self._finalizer.detach()
            self._end()

    def __enter__(self) -> Self:
        """Return the exporter."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close."""
        self.close()

    def _on_issue(self, issue: Issue, step: int) -> None:
        if issue.open and self._loop is not None:
            self._loop.pace.ask(step, issue.layers)
            if self._trials is not None:
                self._trials.opened(issue)


class _Watched(weakref.ref[nn.Module]):
    """A weak reference from which a later exporter finds the one that watches the same model."""

    exporter: weakref.ref[Exporter]


def suspended(model: nn.Module) -> contextlib.ExitStack:
    """Return a stack until whose closing the exporters that watch a model see nothing of what happens to it."""
    stack = contextlib.ExitStack()
    for exporter in watching(model):
        stack.enter_context(exporter._guard.suspended())  # noqa: SLF001 - same module
    return stack


def watching(model: nn.Module) -> list[Exporter]:
    """Return the open exporters that watch a model, wrapped or not."""
    known = [r.exporter() for r in weakref.getweakrefs(unwrap(model)) if isinstance(r, _Watched)]
    return [exporter for exporter in known if exporter is not None and not exporter._closed]  # noqa: SLF001 - same


def updates_by_hand(exporter: Exporter) -> int:
    """Return how many updates of the weights were found so far that no optimizer made."""
    loop = exporter._loop  # noqa: SLF001 - same module
    return 0 if loop is None else loop.hand.updates


def note(exporter: Exporter, readings: Drained) -> None:
    """Put readings that were made elsewhere into the record of the step under way; of one metric the last counts."""
    loop = exporter._loop  # noqa: SLF001 - same module
    if loop is not None and not exporter._closed:  # noqa: SLF001 - same module
        # Steps that are not recorded leave them waiting.
        loop.noted = [*({item.metric: item for item in (*loop.noted, *readings)}).values()]


def _check_open(exporter: Exporter, unknown: Iterable[str]) -> None:
    """Raise where an exporter cannot watch any more, or was passed arguments that ``watch()`` does not have."""
    refuse_of_watch(unknown)
    if exporter._closed:  # noqa: SLF001 - same module
        raise ArgumentError("this Exporter is closed; construct a new one to watch again.")


def _go_on(exporter: Exporter, loop: TrainingLoop) -> None:
    """Go on where an earlier session ended, if training is resumed in its log directory."""
    if exporter._start_step:  # noqa: SLF001 - same module
        from gradflow_export.engine.sessions.resumed import go_on  # noqa: PLC0415 - memory that most have no use for

        part, summary = exporter._guard.part("earlier sessions"), exporter._worker.summary  # noqa: SLF001 - same module
        part(go_on)(loop, exporter._judge, summary, exporter.logdir, exporter._start_step)  # noqa: SLF001 - same module


def _close_earlier(model: nn.Module, now: Exporter) -> None:
    for earlier in watching(model):
        if earlier is not now:
            where = f" ({earlier.logdir})" if earlier.logdir.exists() else ""
            _log.warning("gradflow: this model was being watched already; the earlier exporter%s is closed.", where)
            earlier.close()


class _Trials(Protocol):
    def opened(self, issue: Issue) -> None: ...

    def close(self) -> None: ...


def _trials(exporter: Exporter, model: nn.Module, loop: TrainingLoop) -> _Trials:
    """Return what tries; it stands on a higher floor, and is loaded where it is asked for."""

    def amend(issue: Issue, text: str) -> None:
        told = {each.name: getattr(issue, each.name) for each in fields(Issue)}
        loop.told.append(Amendment(**{**told, "message": text}))

    trials: Any = import_module("gradflow_export.experiments.in_run.trials").Trials(exporter, model, amend)
    trials.attach()
    return cast("_Trials", trials)


def _read_memory(writers: Sequence[Writer], waiting: float) -> dict[str, float]:
    """Return the memory of the device, and what writers and so many bytes of waiting steps take, in MB."""
    kept = sum(getattr(writer, "kept_bytes", 0) for writer in writers) + waiting * (waiting >= MEGABYTE)
    return device_memory() | ({"runtime.kept": kept / MEGABYTE} if kept else {})
