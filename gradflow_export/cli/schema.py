"""``gradflow schema``: every metric of the catalogue, as text, Markdown or JSON."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict

from gradflow_export.records.catalog import CATALOG, MetricSpec

KIND_TITLES: tuple[tuple[str, str, str], ...] = (
    ("run", "One value per step", "Written as the tag `gradflow/<metric>` where it is a headline metric."),
    ("block", "One value per block and step", "Sites are the names of the blocks, in depth order."),
    ("parameter", "One value per parameter tensor and step", "Sites are the names of `model.named_parameters()`."),
    ("module", "One value per activation module and step", "Sites are the names of `model.named_modules()`."),
    ("head", "One value per attention head and step", "Sites are `<module>/<head>`."),
    ("node", "One value per node and step", "Sites are the names of the nodes."),
    (
        "optimizer",
        "One value per optimizer and step",
        "Recorded for several optimizers. Sites are class and number, `Adam.0`, in the order of first steps.",
    ),
)


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("schema", help="list every metric: unit, range, formula, source, cost")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--markdown", action="store_true", help="as docs/metrics.md")
    form.add_argument("--json", action="store_true", help="as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the catalogue."""
    if args.json:
        print(json.dumps([asdict(spec) for spec in CATALOG.values()], indent=2))
    elif args.markdown:
        print(markdown(CATALOG), end="")
    else:
        width = max(map(len, CATALOG))
        for spec in CATALOG.values():
            print(f"{spec.name:<{width}}  {spec.unit:<11}  {spec.kind:<9}  {spec.formula}")
    return 0


def markdown(catalog: Mapping[str, MetricSpec]) -> str:
    """Return docs/metrics.md.

    Args:
        catalog: Metrics by name.

    Returns:
        The whole page, ending with a newline.
    """
    lines = [
        "# What is measured",
        "",
        "Written by `gradflow schema --markdown` from `gradflow_export/records/catalog/`; a test compares the two.",
        "",
        "Cost counts passes over tensors: G all gradients, P all parameters, H all block outputs, c a constant.",
        "Batches says which micro-batches of a step a metric covers if gradients are accumulated.",
        "Ranks says how the values of several processes are combined: see [when-it-fires.md](when-it-fires.md).",
        "*Missing*, `0.0`, NaN and Inf are four different things in every reading, every file and the panel.",
        "Metrics in **bold** are headline metrics: TensorBoard's stock Scalars page shows them too.",
        "",
        "Values are float32. Values of a float64 model outside that range are recorded as 3.4028e38 or 1.4e-45.",
        "",
        "`logits.*`, `confidence.*` and `alignment.*` are read where a criterion given to `watch` takes class numbers.",
        "If targets are probabilities, or the loss is a function, pass them with `observe(logits=..., targets=...)`.",
    ]
    for kind, title, note in KIND_TITLES:
        specs = [spec for spec in catalog.values() if spec.kind == kind]
        if specs:
            lines += ["", f"## {title}", "", note, "", *_table(specs)]
    return "\n".join(lines) + "\n"


def _table(specs: Iterable[MetricSpec]) -> list[str]:
    columns = ("metric", "what it is", "unit", "range", "formula", "source", "cost", "batches", "ranks")
    rows = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for spec in specs:
        name = f"**`{spec.name}`**" if spec.headline else f"`{spec.name}`"
        known = (spec.title, spec.unit, _range(spec), _code(_formula(spec)), spec.source, spec.cost)
        cells = (name, *known, spec.batches, spec.across)
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return rows


def _formula(spec: MetricSpec) -> str:
    return spec.formula + (f"; exact where `{spec.error}` is missing or 0" if spec.error else "")


def _range(spec: MetricSpec) -> str:
    if spec.low is None and spec.high is None:
        return "any"
    low = "" if spec.low is None else f"{spec.low:g}"
    high = "" if spec.high is None else f"{spec.high:g}"
    return f"{low} to {high}" if low and high else (f"at least {low}" if low else f"at most {high}")


def _code(formula: str) -> str:
    return formula.replace("_", "\\_").replace("*", "\\*").replace("<", "&lt;")
