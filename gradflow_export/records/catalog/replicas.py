"""Whether the ranks of a distributed run still train one model."""

from __future__ import annotations

from gradflow_export.records.catalog.metric import MetricSpec


def specs() -> tuple[MetricSpec, ...]:
    """Return the metrics of this family, in the order of the documentation."""
    s = MetricSpec
    # fmt: off
    return (
        s("parameter.replica_gap", "distance between replicas", "1", "parameter",
          "max over ranks of |c_r - c_0| / max(|c_r|, |c_0|), c = sum_i cos(i) w_i over at most 128 evenly spaced "
          "entries, before the step; once the replicas have been equal", "definition", "c sampled", low=0.0,
          scale="log", across="gap"),
        s("parameter.copy_gap", "distance between copies", "1", "parameter",
          "max |a - b| / max |a| over at most 256 evenly spaced entries, before the step, of copies named in "
          "watch(copies=) and of parameters that began alike and get parallel gradients", "definition", "c sampled",
          low=0.0, scale="log"),
        s("origin.rank", "rank at which NaN or Inf began", "count", "run",
          "first rank whose own loss, block outputs or input were not finite", "definition", "c", low=0.0),
    )
    # fmt: on
