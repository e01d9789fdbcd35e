"""``gradflow dashboard ENTITY/PROJECT``: a W&B workspace for what the W&B writer sends. Never imports torch."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from typing import Any

from gradflow_export.errors import ArgumentError, GradflowError, MissingPackageError
from gradflow_export.records.catalog import CATALOG
from gradflow_export.writers.wandb.fold import Span
from gradflow_export.writers.wandb.gains import CHART
from gradflow_export.writers.wandb.picks import CHAIN, FLAGGED, HISTOGRAM_KEYS, NO_CHAIN

PLACE = re.compile(r"[\w.-]+/[\w .-]+")


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("dashboard", help="create a W&B workspace for the data of the wandb backend")
    parser.add_argument("place", metavar="ENTITY/PROJECT", help="the W&B project")
    parser.add_argument("--name", default="GradFlow", help="name of the workspace (default: %(default)s)")
    parser.add_argument("--prefix", default="gradflow", help="first part of the keys (default: %(default)s)")
    parser.add_argument("--report", action="store_true", help="save a report instead of a workspace")
    parser.add_argument(
        "--dry-run", action="store_true", help="print what would be saved as JSON, without contacting a server"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Save the workspace and print its address, or print its description."""
    workspace = build(args.place, args.name, args.prefix, report=args.report)
    if args.dry_run:
        print(json.dumps(spec(workspace), indent=2))
        return 0
    print(f"saved: {save(workspace)}")
    return 0


def build(place: str, name: str, prefix: str, *, report: bool = False) -> Any:
    """Lay the workspace or report out; nothing is sent.

    Args:
        place: ``"ENTITY/PROJECT"``.
        name: Name of the workspace.
        prefix: First part of every key.
        report: Whether to lay out a report.

    Returns:
        A ``Workspace`` of ``wandb_workspaces.workspaces``, or a ``Report`` of ``wandb_workspaces.reports.v2``.

    Raises:
        MissingPackageError: wandb-workspaces is not installed.
        ArgumentError: The place or the name cannot be used.
    """
    if not PLACE.fullmatch(place):
        raise ArgumentError(
            f"dashboard expects ENTITY/PROJECT, got {place!r}; both are in the URL of the project, "
            "wandb.ai/ENTITY/PROJECT"
        )
    workspaces, panels = _load()
    entity, _, project = place.partition("/")
    try:
        if report:
            return _report(panels, entity, project, name, _sections(workspaces, panels, prefix))
        return workspaces.Workspace(
            entity=entity,
            project=project,
            name=name,
            sections=_sections(workspaces, panels, prefix),
            settings=workspaces.WorkspaceSettings(x_axis=f"{prefix}/step"),
            runset_settings=workspaces.RunsetSettings(
                pinned_columns=[f"summary:{prefix}/verdict", f"summary:{prefix}/issues_found"]
            ),
        )
    except ValueError as error:
        said = " ".join(str(error).split()).partition(" [type=")[0]
        raise ArgumentError(f"--name expects a name that W&B takes, got {name!r}; W&B says: {said}") from error


def spec(workspace: Any) -> dict[str, Any]:
    """Return what would be sent to the server.

    Args:
        workspace: What :func:`build` made.
    """
    try:
        view = workspace._to_model()  # noqa: SLF001 - the package shows the description nowhere else
        described: dict[str, Any] = json.loads(view.spec.model_dump_json(by_alias=True, exclude_none=True))
    except Exception as error:
        raise GradflowError(
            "--dry-run expects a release of wandb-workspaces that shows what it would send, and for --report a login, "
            f"got: {error}; run `wandb login`, or leave --dry-run out"
        ) from error
    name = getattr(workspace, "title", None) or getattr(workspace, "name", "")
    return {"entity": workspace.entity, "project": workspace.project, "name": name, "spec": described}


def save(workspace: Any) -> str:
    """Save a workspace as a view of its own.

    Args:
        workspace: What :func:`build` made.

    Returns:
        Its address.

    Raises:
        GradflowError: Nobody is logged in, or the server refused it or did not answer.
    """
    import wandb

    place = f"{workspace.entity}/{workspace.project}"
    try:
        workspace.save()
    except wandb.errors.UsageError as error:
        raise GradflowError(
            f"dashboard expects a login to W&B, got: {error} Run `wandb login`, or set WANDB_API_KEY"
        ) from error
    except Exception as error:
        said = " ".join(str(error).split())[:300]
        raise GradflowError(
            f"dashboard expects a W&B server that takes a view of {place}, got: {said}; check that the project exists "
            "and is yours to change, or use --dry-run"
        ) from error
    return str(workspace.url)


def _load() -> tuple[Any, Any]:
    try:
        from wandb_workspaces import workspaces
        from wandb_workspaces.reports import v2
    except ImportError as error:
        raise MissingPackageError(
            f"dashboard expects the package wandb-workspaces, got: {error}; install it with: "
            "pip install 'gradflow-export[dashboard]'"
        ) from error
    return workspaces, v2


def _report(panels: Any, entity: str, project: str, name: str, sections: Sequence[Any]) -> Any:
    """Return a report with the panels of these sections, a grid of each, over all runs of the project."""
    runs = panels.Runset(entity=entity, project=project)
    blocks = [
        block
        for section in sections
        for block in (panels.H2(text=section.name), panels.PanelGrid(runsets=[runs], panels=list(section.panels)))
    ]
    return panels.Report(entity=entity, project=project, title=name, blocks=blocks)


def _sections(workspaces: Any, panels: Any, prefix: str) -> list[Any]:
    named = {
        "Verdict": _verdict(panels, prefix),
        "Compare runs": _compare(panels, prefix),
        "Flagged layers": [_all_of(panels, prefix, "Flagged layers", FLAGGED)],
        "Gain report": [
            panels.MediaBrowser(
                title="Gain by depth and step",
                num_columns=1,
                media_keys=[f"{prefix}/gain_report"],
                layout=panels.Layout(w=24, h=14),
            )
        ],
        "Gains": [_curve(panels, prefix, "gain.depth"), _by_layer(panels, prefix, CHAIN), _gain_chart(panels, prefix)],
        "Gradients and updates": [
            _lines(
                panels,
                prefix,
                "Gradient norm, and its extremes since the last row",
                (
                    "gradient.total_norm",
                    "gradient.norm_before_clip",
                    *(key for key in Span.KEYS if "gradient_norm" in key),
                ),
                log=True,
            ),
            _by_layer(panels, prefix, NO_CHAIN),
            _curve(panels, prefix, "update.ratio"),
            _curve(panels, prefix, "learning_rate"),
        ],
        "Loss and policy": [
            _lines(panels, prefix, "Loss, and its greatest since the last row", ("loss", "since_last/loss_max")),
            _curve(panels, prefix, "policy.entropy"),
        ],
        "Histograms": [
            panels.MediaBrowser(
                title="Two tensors; which they are says the summary's histograms",
                num_columns=2,
                media_keys=[f"{prefix}/{key}" for key in HISTOGRAM_KEYS],
                layout=panels.Layout(w=24, h=10),
            )
        ],
    }
    return [
        workspaces.Section(name=name, is_open=name != "Histograms", pinned=name == "Verdict", panels=charts)
        for name, charts in named.items()
    ]


def _verdict(panels: Any, prefix: str) -> list[Any]:
    said = (
        f"The verdict of each run is in the column `{prefix}/verdict`; its layers and issues are below. Each issue "
        "has the step, the layer and the fix."
    )
    return [
        panels.MarkdownPanel(markdown=said, layout=panels.Layout(w=8, h=6)),
        _lines(panels, prefix, "Open issues", ("open_issues",)),
        panels.WeavePanelSummaryTable(table_name=f"{prefix}/health", layout=panels.Layout(w=24, h=10)),
        panels.WeavePanelSummaryTable(table_name=f"{prefix}/issues", layout=panels.Layout(w=24, h=8)),
        panels.WeavePanelSummaryTable(table_name=f"{prefix}/steps", layout=panels.Layout(w=24, h=8)),
    ]


def _compare(panels: Any, prefix: str) -> list[Any]:
    """Return panels that set runs against each other: a bar a run, at the same layers."""
    numbers = ("gain.depth", "since_last/gradient_norm_max", "issues_found")
    bars = [panels.BarPlot(title=f"{name}, by run", metrics=[f"{prefix}/{name}"]) for name in numbers]
    axes = [f"summary:{prefix}/{name}" for name in ("gain.depth", "gradient.total_norm", "update.ratio", "loss")]
    return [
        *bars,
        panels.ParallelCoordinatesPlot(
            title="Gain, gradient, update and loss of each run",
            columns=[panels.ParallelCoordinatesPlotColumn(metric=axis) for axis in axes],
            layout=panels.Layout(w=24, h=8),
        ),
        panels.RunComparer(diff_only=True, layout=panels.Layout(w=24, h=10)),
    ]


def _curve(panels: Any, prefix: str, name: str) -> Any:
    metric = CATALOG[name]
    return _lines(panels, prefix, metric.title, (name,), log=metric.scale == "log")


def _lines(panels: Any, prefix: str, title: str, names: Sequence[str], *, log: bool = False) -> Any:
    keys = [f"{prefix}/{name}" for name in names]
    return panels.LinePlot(title=title, x=f"{prefix}/step", y=keys, log_y=log or None)


def _by_layer(panels: Any, prefix: str, name: str) -> Any:
    metric = CATALOG[name]
    title = f"{metric.title}, layers spread over depth"
    return _all_of(panels, prefix, title, name, log=metric.scale == "log")


def _all_of(panels: Any, prefix: str, title: str, first: str, *, log: bool = False) -> Any:
    return panels.LinePlot(
        title=title,
        x=f"{prefix}/step",
        metric_regex=f"^{re.escape(f'{prefix}/{first}/')}.*",
        log_y=log or None,
        layout=panels.Layout(w=16, h=8),
    )


def _gain_chart(panels: Any, prefix: str) -> Any:
    return panels.CustomChart(
        query={"summaryTable": {"tableKey": f"{prefix}/gain_chart_table"}},
        chart_name=CHART,
        chart_fields={"step": "depth", "lineKey": "moment", "lineVal": "gain as a power of 2"},
        chart_strings={"title": "Gain by depth (power of 2; 0 keeps the gradient)", "xname": "depth"},
    )
