"""Starting a W&B run when asked to: never without a limit of time."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gradflow_export.errors import ArgumentError, MissingPackageError, nearest
from gradflow_export.writers.wandb import private as wandb_private

_log = logging.getLogger("gradflow_export")

FINISH_SECONDS = 5.0
INIT_SECONDS = 20.0


def load(name: str = "wandb") -> Any:
    """Import wandb.

    Raises:
        MissingPackageError: It is not installed; the message holds the pip command.
    """
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        raise MissingPackageError(
            f"the wandb backend expects the package {name}, got: {error}; install it with: pip install 'wandb>=0.28'"
        ) from error
    wandb_private.preload(name)
    return module


def check_init(module: Any, init: Mapping[str, Any]) -> None:
    """Raise unless ``wandb.init`` takes these arguments.

    Raises:
        ArgumentError: A name is unknown; the message names the nearest.
    """
    known = set(inspect.signature(module.init).parameters)
    for name in init:
        if name not in known:
            raise ArgumentError(
                f"WandbWriter and {module.__name__}.init know no argument {name!r}{nearest(name, known)}"
            )


def start(module: Any, init: Mapping[str, Any]) -> Any:
    """Start a run, offline where no server or login is there.

    Args:
        module: The wandb module.
        init: Arguments of ``wandb.init``.

    Returns:
        The run.
    """
    arguments = {**init, "settings": _with_limits(module, init.get("settings"))}
    try:
        return module.init(**arguments)
    except module.errors.Error as error:
        reason = " ".join(str(error).split())
    _log.warning(
        "gradflow: W&B could not start a run (%s); recording offline, `wandb sync <run directory>` sends it later",
        reason[:200],
    )
    if not wandb_private.alive(module):
        with contextlib.suppress(Exception):
            module.teardown()  # what is left of the attempt still holds the run's id
    offline = {**arguments, "mode": "offline"}
    try:
        return module.init(**offline)
    except module.errors.Error:
        if "id" not in init:
            raise
    _log.warning("gradflow: W&B does not record run %s a second time in this process; it gets another id", init["id"])
    return module.init(**{**offline, "id": None, "resume": None, "name": init.get("name") or init["id"]})


def finish_limit(run: Any) -> float:
    """Return the seconds after which the end of a run is given up; 0 where it waits for ever, or knows no limit."""
    return float(getattr(getattr(run, "settings", None), "finish_timeout", 0) or 0)


def finish(run: Any, try_to: Callable[[str, Callable[[], Any]], object]) -> bool:
    """Finish a run that :func:`start` began; W&B keeps to ``finish_timeout`` unless an alert waits for the server.

    Args:
        run: The run.
        try_to: Calls what it is given and never raises.

    Returns:
        Whether it ended within its limit and a second.
    """
    limit = finish_limit(run)
    ending = threading.Thread(target=try_to, args=("the end of the run", run.finish), daemon=True)
    ending.start()
    ending.join(limit + 1 if limit else None)
    if ending.is_alive():
        folder = Path(run.dir).parent
        _log.warning(
            "gradflow: W&B did not end the run within %.0f s and is left to it; should the process end first, "
            "`wandb sync --include-online %s` sends what is on disk",
            limit + 1,
            folder,
        )
    return not ending.is_alive()


def _with_limits(module: Any, settings: Any) -> Any:
    """By default ``finish()`` waits for ever and ``init()`` for 90 s when the server is gone; the user's wishes win."""
    known = getattr(module.Settings, "model_fields", {})
    limits = {"finish_timeout": FINISH_SECONDS, "init_timeout": INIT_SECONDS}
    limits = {name: value for name, value in limits.items() if name in known}
    if settings is None or isinstance(settings, Mapping):
        return module.Settings(**{**limits, **(settings or {})})
    given: frozenset[str] = frozenset(getattr(settings, "model_fields_set", ()))
    return settings.model_copy(update={name: value for name, value in limits.items() if name not in given})
