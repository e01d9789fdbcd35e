"""wandb, and modules that speak its language in part: what one can do is found out by looking, never by its name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, final

from gradflow_export.errors import ArgumentTypeError
from gradflow_export.writers.wandb import private as wandb_private
from gradflow_export.writers.wandb import runs as wandb_runs
from gradflow_export.writers.wandb.incidents import Alert

_NEEDED = ("init", "Table", "Histogram")
_NEEDED_OF_RUN = ("log", "finish")


def parameters(call: Callable[..., Any]) -> frozenset[str]:
    """Return the names of a call's parameters; none where Python cannot tell."""
    try:
        return frozenset(inspect.signature(call).parameters)
    except (TypeError, ValueError):
        return frozenset()


@final
class Module:
    """A module like wandb.

    Some, such as trackio, tell only the thread that began a run which run is active. Of these, the run is used that is
    active where this object is made.

    Args:
        module: wandb or a module like it.
        run: The one run to use; by default the one that is active.

    Attributes:
        module: The same.

    Raises:
        ArgumentTypeError: It has not what every such module has, or the run is none.
    """

    def __init__(self, module: Any, run: Any = None) -> None:
        missing = [name for name in _NEEDED if not callable(getattr(module, name, None))]
        if missing:
            raise ArgumentTypeError(
                f"module expects wandb or a module like it, got {module!r}, which has no {', '.join(missing)}; "
                "pass the module itself, such as module=trackio"
            )
        if run is not None and not all(callable(getattr(run, name, None)) for name in _NEEDED_OF_RUN):
            raise ArgumentTypeError(
                f"run expects what {getattr(module, '__name__', 'the module')}.init() returned, got {run!r}"
            )
        self.module, self._given, self._used = module, run, None
        self._current: Any = None
        if not self.tells_every_thread:
            self._current = getattr(getattr(module, "context_vars", None), "current_run", None)
        self._seen = self._look()

    @property
    def tells_every_thread(self) -> bool:
        """Whether the active run is seen from any thread; where it is not, ``run`` is a submodule or absent."""
        return hasattr(self.module, "run") and not isinstance(self.module.run, ModuleType)

    @property
    def run(self) -> Any:
        """The active run; ``None`` when there is none.

        One of ``reinit="create_new"`` does not become ``wandb.run``: it is used where it is the only one alive, and
        then for as long as it is.
        """
        if self._given is not None:
            return self._given
        if not self.tells_every_thread:
            return self._look() or self._seen
        if self.module.run is not None:
            return self.module.run
        alive = wandb_private.alive(self.module)
        if not any(run is self._used for run in alive):
            self._used = alive[0] if len(alive) == 1 else None
        return self._used

    @property
    def how_to_begin(self) -> str:
        """What a user does to get records into a run of this module."""
        name = getattr(self.module, "__name__", "the module")
        if self.tells_every_thread and len(wandb_private.alive(self.module)) > 1:
            return "several runs are alive and none is wandb.run: pass the one to use, WandbWriter(run=run)"
        if self.tells_every_thread:
            return f"records wait for {name}.init(). To have one started, pass WandbWriter(project='...') as a backend"
        return (
            f"nothing is sent. {name} tells only its own thread of a run: call {name}.init() before the writer is "
            "made, or pass WandbSink(module=..., project='...') as a backend"
        )

    def start(self, init: Mapping[str, Any]) -> Any:
        """Start a run.

        Args:
            init: Arguments of the module's ``init``.
        """
        limited = hasattr(getattr(self.module, "Settings", None), "model_fields")
        self._seen = wandb_runs.start(self.module, init) if limited else self.module.init(**init)
        return self._seen

    def start_beside(self, run: Any) -> Any:
        """Start a run of the same group as another one, beside it.

        Args:
            run: A run of the module.
        """
        return wandb_runs.start(
            self.module,
            {
                "project": run.project, "entity": run.entity or None, "group": run.group or run.id,
                "job_type": "gradflow", "name": f"{run.name or run.id}-gradflow", "reinit": "create_new",
                "mode": "offline" if getattr(run, "offline", False) else "online",
            },
        )  # fmt: skip

    def describe(self, run: Any, prefix: str, described: Mapping[str, Any]) -> None:
        """Put the run's description into its config."""
        config = getattr(run, "config", None)
        if isinstance(config, dict):
            config[prefix] = dict(described)
        elif config is not None:
            config.update({prefix: described}, allow_val_change=True)

    def conclude(self, run: Any, values: Mapping[str, Any]) -> None:
        """Put values into the run's summary, where it has one."""
        summary = getattr(run, "summary", None)
        if summary is not None:
            summary.update(values)

    def alert(self, run: Any, alert: Alert) -> None:
        """Raise an alert, where the module knows alerts.

        Args:
            run: A run of the module.
            alert: What to tell.
        """
        raise_it = getattr(run, "alert", None)
        if raise_it is None:
            return
        levels, known = getattr(self.module, "AlertLevel", None), parameters(raise_it)
        more: dict[str, Any] = {"level": alert.level if levels is None else levels[alert.level]}
        if "wait_duration" in known:
            # Our own cooldown rules; W&B would hold back the same title for a minute otherwise.
            more["wait_duration"] = 1
        if "step" in known:
            more["step"] = alert.step
        raise_it(alert.title, alert.text, **more)

    def _look(self) -> Any:
        return None if self._current is None else self._current.get()
