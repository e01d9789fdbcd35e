"""Every name of wandb that is not public, in one place: each may be gone, and what is then missing is known."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from typing import Any

from gradflow_export.writers.wandb.fold import HOOK


def before_end(run: Any, call: Callable[[], None]) -> bool:
    """Have something called when the run ends, while it still takes values.

    Returns:
        Whether wandb offers that; where it does not, the end of the exporter has to do.
    """
    try:
        runs = importlib.import_module("wandb.sdk.wandb_run")
        run._teardown_hooks.append(runs.TeardownHook(call, runs.TeardownStage.EARLY))  # noqa: SLF001 - no public one
    except Exception:
        return False
    return True


def leave_out_of_recap(run: Any, prefix: str) -> bool:
    """Keep our keys out of the ten that a run prints on the terminal when it ends.

    Returns:
        Whether that could be done.
    """
    finish = getattr(run, "_on_finish", None)
    if not callable(finish) or not hasattr(run, "_sampled_history"):
        return False

    def finish_without_ours() -> None:
        finish()
        with contextlib.suppress(Exception):
            for name in ("_sampled_history", "_final_summary"):
                items = getattr(run, name).item
                for number in reversed(range(len(items))):
                    if items[number].key.startswith(f"{prefix}/"):
                        del items[number]

    run._on_finish = finish_without_ours  # noqa: SLF001 - no public one
    return True


def alive(module: Any) -> list[Any]:
    """Return the runs of a module that have begun and not ended, ``wandb.run`` or not; none where that is not known."""
    with contextlib.suppress(Exception):
        setup = importlib.import_module(f"{module.__name__}.sdk.wandb_setup")
        return list(setup.singleton()._active_runs)  # noqa: SLF001 - only the newest is public
    return []


def preload(name: str) -> bool:
    """Import what W&B imports with the first table, on a thread beside the training loop, which would wait for the GIL.

    Returns:
        Whether all of it is there.
    """
    try:
        generated = importlib.import_module(f"{name}.sdk.artifacts._generated")
        importlib.import_module(f"{name}.sdk.artifacts._internal_artifact")
        _ = generated.ARTIFACT_TYPE_GQL, generated.ArtifactType
    except Exception:
        return False
    return True


def missing(module: Any) -> list[str]:
    """Return what this release of wandb lacks, each as a sentence that says what follows.

    Args:
        module: wandb.
    """
    found = []
    run = getattr(getattr(module, "sdk", None), "wandb_run", None)
    kind = getattr(run, "Run", None)
    if not hasattr(kind, HOOK):
        found.append(f"Run.{HOOK}: rows logged through a reference to log() taken before the exporter get no values")
    if not (hasattr(run, "TeardownHook") and hasattr(run, "TeardownStage") and hasattr(kind, "_set_teardown_hooks")):
        found.append("Run teardown hooks: call exporter.close() before run.finish(), or W&B misses the end of the run")
    if not hasattr(kind, "_on_finish"):
        found.append("Run._on_finish: the recap on the terminal shows our keys")
    try:
        setup = importlib.import_module(f"{module.__name__}.sdk.wandb_setup")
        _ = setup.singleton, setup._WandbSetup.remove_active_run  # noqa: SLF001 - only the newest is public
    except Exception:
        found.append("the list of active runs: pass run= where wandb.run is None")
    if not preload(module.__name__):
        found.append("sdk.artifacts._generated: the first table may make a training step wait")
    return found
