"""The two summaries that tools ask for by name: how often something went wrong, counted from the log."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import Any

from gradflow_export.records.step_record import IssueType
from tensorboard_plugin_gradflow.data import all_issues
from tensorboard_plugin_gradflow.index import RunIndex
from tensorboard_plugin_gradflow.metadata import FORMAT
from tensorboard_plugin_gradflow.said import recorded_steps
from tensorboard_plugin_gradflow.source import Source

_LOSS = frozenset({IssueType.LOSS_SPIKE.value, IssueType.STAGNATION.value})
_MEMORY = frozenset({IssueType.MEMORY_USAGE.value, IssueType.MEMORY_LEAK.value})


def training_summary(source: Source, run: str | None = None) -> dict[str, Any]:
    """Return counts and rates of what went wrong during training.

    A step is anomalous when at least one issue other than a note began at it; a rate is a count per recorded step.

    Args:
        source: Where to read.
        run: TensorBoard's name of the run, ``None`` for the one written last.
    """
    index = _chosen(source, run)
    if index is None:
        return {"v": FORMAT, "run": None} | _rates(0, [])
    return {"v": FORMAT, "run": index.run} | _rates(recorded_steps(source, index), _problems(source, index))


def summary(source: Source, run: str | None = None) -> dict[str, Any]:
    """Return the totals, the share that concerns training, and issues by type.

    Args:
        source: Where to read.
        run: TensorBoard's name of the run, ``None`` for the one written last.
    """
    index = _chosen(source, run)
    issues = [] if index is None else all_issues(source, index)
    problems = [issue for issue in issues if issue["severity"] != "INFO"]
    steps = 0 if index is None else recorded_steps(source, index)
    rates = _rates(steps, problems)
    by_type = {kind.value: sum(issue["issue_type"] == kind.value for issue in problems) for kind in IssueType}
    training = [issue for issue in problems if issue["issue_type"] not in _MEMORY]
    return {
        "v": FORMAT,
        "run": None if index is None else index.run,
        "open": sum(issue["state"] == "open" for issue in problems),
        "by_type": {name: count for name, count in by_type.items() if count},
        "training_debugger": {
            "total_anomalies": len(training),
            "debug_history_length": len(issues),
            "total_steps": steps,
            "anomaly_rate": rates["anomaly_rate"],
            "gradient_explosion_rate": rates["gradient_explosion_rate"],
        },
        "general_debugger": {"total_anomalies": len(problems), "debug_history_length": len(issues)},
    }


def _chosen(source: Source, run: str | None) -> RunIndex | None:
    if run is not None:
        return source.index(run)
    return next(iter(source.indexes()), None)


def _problems(source: Source, index: RunIndex) -> list[dict[str, Any]]:
    return [issue for issue in all_issues(source, index) if issue["severity"] != "INFO"]


def _rates(steps: int, problems: list[dict[str, Any]]) -> dict[str, Any]:
    counts = {
        "anomaly_steps": len({issue["step"] for issue in problems}),
        "gradient_explosions": _of_types(problems, {IssueType.EXPLODING.value}),
        "gradient_vanishing": _of_types(problems, {IssueType.VANISHING.value}),
        "loss_anomalies": _of_types(problems, _LOSS),
    }
    total = max(1, steps)
    return {
        "total_steps": steps,
        **counts,
        "anomaly_rate": counts["anomaly_steps"] / total,
        "loss_anomaly_rate": counts["loss_anomalies"] / total,
        "gradient_explosion_rate": counts["gradient_explosions"] / total,
        "gradient_vanishing_rate": counts["gradient_vanishing"] / total,
    }


def _of_types(problems: list[dict[str, Any]], kinds: AbstractSet[str]) -> int:
    return sum(issue["issue_type"] in kinds for issue in problems)
