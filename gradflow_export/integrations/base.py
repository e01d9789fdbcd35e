"""What all integrations share: an exporter that lives as long as one run of a framework's trainer."""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final

import torch
from torch import nn

from gradflow_export.errors import ArgumentError, MissingPackageError, nearest
from gradflow_export.exporter import Exporter
from gradflow_export.records.step_record import Issue, IssueType, RunInfo, Severity, StepRecord

HEALTH = "gradflow/health"
"""Key under which the health of the run stands among the numbers that a framework logs."""

_WATCH = frozenset(inspect.signature(Exporter.watch).parameters) - {"self"}


@contextlib.contextmanager
def needed(package: str) -> Iterator[None]:
    """Turn a failed import of a framework into an error that holds the pip command.

    Args:
        package: What ``pip install`` takes.

    Raises:
        MissingPackageError: The import inside failed.
    """
    try:
        yield
    except ImportError as error:
        raise MissingPackageError(
            f"this integration expects the package {package}, got: {error}; install it with: pip install {package}"
        ) from error


@final
class Health:
    """A writer that keeps the open issues of the newest record; it may be read from any thread and never waits."""

    name = "health"

    def __init__(self) -> None:
        self._open: Mapping[tuple[str, str, int], Issue] = {}

    def open(self, run: RunInfo) -> None:
        """Begin without issues."""
        self._open = {}

    def write(self, record: StepRecord) -> None:
        """Take in the issues that opened or healed."""
        if record.issues:
            newest = {**self._open, **{issue.key: issue for issue in record.issues}}
            self._open = {key: issue for key, issue in newest.items() if issue.open}

    def flush(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""

    @property
    def value(self) -> float:
        """1 without open issues; 0.75, 0.5, 0.25 and 0 where the worst is LOW, MEDIUM, HIGH or CRITICAL."""
        return 1 - max((issue.severity for issue in self._open.values()), default=Severity.INFO) / Severity.CRITICAL

    def holds(self, kinds: frozenset[IssueType]) -> bool:
        """Return whether an issue of one of these types is open."""
        return any(issue.issue_type in kinds for issue in self._open.values())


@final
class Session:
    """Begins an exporter when a framework's training begins, and closes it when that ends.

    Args:
        stop_on: Types of issues at which training is to stop.
        options: Arguments of :class:`~gradflow_export.Exporter` and of its ``watch``; they go before what the framework
            says.

    Attributes:
        exporter: The exporter of the run under way, or of the last one.

    Raises:
        ArgumentError: A type in ``stop_on`` is unknown; the message names the nearest.
    """

    def __init__(self, stop_on: Sequence[str], options: Mapping[str, Any]) -> None:
        names = (stop_on,) if isinstance(stop_on, str) else tuple(stop_on)
        known = {kind.value for kind in IssueType}
        for name in names:
            if name not in known:
                raise ArgumentError(f"stop_on expects types of issues, got {name!r}{nearest(name, known)}")
        self._stop_on = frozenset(IssueType(name) for name in names)
        self._options = dict(options)
        self._health = Health()
        self.exporter: Exporter | None = None

    def anew(self) -> Session:
        """Return a session with the same settings that has not begun."""
        return Session([kind.value for kind in self._stop_on], self._options)

    def start(self, model: nn.Module, *, logdir: str | os.PathLike[str] | None, step: int = 0, run: Any = None) -> None:
        """Watch a model from now on; a run that was under way is closed.

        Args:
            model: What is trained.
            logdir: The framework's directory for this run, or ``None`` where it has none.
            step: Steps that were done before, when training is resumed.
            run: The framework's W&B run, or ``None``.
        """
        self.close()
        options = {"logdir": logdir, "start_step": step, "wandb": run, **self._options}
        backends = options.pop("backends", ("tensorboard",))
        several = isinstance(backends, Sequence) and not isinstance(backends, str)
        backends = (*(backends if several else (backends,)), self._health)
        watch = {name: options.pop(name) for name in _WATCH & set(options)}
        self.exporter = Exporter(model, backends=backends, **options).watch(**watch)

    def close(self) -> None:
        """End the run under way, if there is one."""
        if self.exporter is not None:
            self.exporter.close()

    @property
    def health(self) -> float:
        """Health of the run as a number that trackers can draw: 1 healthy, 0 with an issue that is CRITICAL."""
        return self._health.value

    def logs(self) -> dict[str, float]:
        """Return :attr:`health` under its key."""
        return {HEALTH: self.health}

    def wants_stop(self) -> bool:
        """Return whether an issue of ``stop_on`` is open, on any rank; all ranks have to ask at the same time."""
        if not self._stop_on:
            return False
        here = self._health.holds(self._stop_on)
        distributed = torch.distributed
        if not (distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1):
            return here
        device = "cpu" if "gloo" in distributed.get_backend() else torch.accelerator.current_accelerator()
        anywhere = torch.tensor(float(here), device=device)
        distributed.all_reduce(anywhere, op=distributed.ReduceOp.MAX)
        return bool(anywhere.item())
