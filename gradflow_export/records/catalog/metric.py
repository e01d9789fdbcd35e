"""What a metric is: its name, unit, kind of site, formula and how it is drawn."""

from __future__ import annotations

from dataclasses import dataclass

from gradflow_export.errors import ArgumentError, nearest

UNITS = frozenset(
    {
        "1",
        "share",
        "count",
        "nats",
        "MB",
        "s",
        "steps/s",
        "loss",
        "gradient",
        "weight",
        "weight/step",
        "activation",
        "logit",
    }
)
ACROSS = frozenset({"first", "sum", "root", "rms", "mean", "max", "min", "units", "batch root", "batch mean", "gap"})
"""How the values of several ranks become one: see ``gradflow_export/distributed/rank_reduce.py``."""

BATCHES = frozenset({"all", "last", "first"})
"""Which micro-batches of a step a metric is of, where gradients are accumulated."""

SITE_KINDS = frozenset({"run", "block", "parameter", "module", "head", "node", "optimizer"})


@dataclass(frozen=True)
class MetricSpec:
    """What one metric is.

    Attributes:
        name: Unique, dotted, lower case.
        title: A few words for axis labels and tables.
        unit: One of ``UNITS``; "gradient" is the unit of the loss per unit of the weight or activation.
        kind: One of ``SITE_KINDS``: what a site of this metric is.
        formula: How it is computed, in one line.
        source: Paper, equation or "definition".
        cost: Passes over tensors: G all gradients, P all parameters, H block outputs; c constant.
        low: Least possible value, ``None`` when unbounded.
        high: Greatest possible value, ``None`` when unbounded.
        scale: ``"log"`` or ``"linear"``: how it is best drawn.
        marks: Values worth a line in a chart, such as the gains 0.5 and 2.
        headline: Whether it is written to TensorBoard's stock Scalars page.
        across: One of ``ACROSS``: how it aggregates over the ranks of a distributed run. ``"first"`` is rank 0's value;
            of a parameter the others join the shards, of everything else the batches of all ranks.
        batches: One of ``BATCHES``: ``"all"`` where it covers every micro-batch of a step or is none of their matter,
            ``"last"`` or ``"first"`` where it is of that one's forward pass alone.
        error: The metric that holds the standard error where the value was estimated, as a share of the value where its
            unit is "share" (one that is no share of a share has the unit "1"); where it is missing, or none is named,
            the value is exact but for rounding.
    """

    name: str
    title: str
    unit: str
    kind: str
    formula: str
    source: str
    cost: str
    low: float | None = None
    high: float | None = None
    scale: str = "linear"
    marks: tuple[float, ...] = ()
    headline: bool = False
    across: str = "first"
    batches: str = "all"
    error: str = ""

    def __post_init__(self) -> None:
        if self.unit not in UNITS:
            raise ArgumentError(f"metric {self.name!r} has unit {self.unit!r}{nearest(self.unit, UNITS)}")
        if self.kind not in SITE_KINDS:
            raise ArgumentError(f"metric {self.name!r} has site kind {self.kind!r}{nearest(self.kind, SITE_KINDS)}")
        if self.across not in ACROSS:
            raise ArgumentError(f"metric {self.name!r} aggregates as {self.across!r}{nearest(self.across, ACROSS)}")
        if self.batches not in BATCHES:
            raise ArgumentError(f"metric {self.name!r} is of {self.batches!r} batches{nearest(self.batches, BATCHES)}")
