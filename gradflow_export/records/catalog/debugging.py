"""What the stability manager found and did."""

from __future__ import annotations

from gradflow_export.records.catalog.metric import MetricSpec


def specs() -> tuple[MetricSpec, ...]:
    """Return the metrics of this family, in the order of the documentation."""
    s = MetricSpec
    # fmt: off
    return (
        s("debugging.anomalies", "anomalies found", "count", "run",
          "NaN or Inf in loss, gradients, weights or optimizer state that the stability manager found at this step, "
          "counted by kind", "definition", "1G", low=0.0),
        s("debugging.nonfinite", "NaN or Inf gradient entries that were found", "count", "parameter",
          "#{g is NaN or Inf} as backward left it, before the stability manager acted", "definition",
          "1G, once NaN or Inf was seen", low=0.0),
        s("debugging.prevented", "updates prevented", "count", "run",
          "running total of updates that the policies skip and rewind kept from happening", "definition", "c", low=0.0),
        s("debugging.repaired", "gradients repaired", "count", "run",
          "running total of steps whose gradients the policies zero and clamp changed", "definition", "c", low=0.0),
        s("debugging.rewinds", "returns to the last good state", "count", "run",
          "running total of steps at which the policy rewind put weights and optimizer state back", "definition", "c",
          low=0.0),
        s("debugging.clipped_share", "clipped share", "share", "run",
          "of rows (adaptive), entries (value), layers (per_layer) or all together (norm) at this step",
          "Brock et al. 2021, arXiv:2102.06171, equation 3; Pascanu et al. 2013, arXiv:1211.5063", "1G", low=0.0,
          high=1.0),
        s("debugging.check_error", "gradient check, greatest relative error", "1", "run",
          "max over parameters of |analytic - numeric| / max(|analytic|, |numeric|), float64 derivatives along a line",
          "central differences; torch.autograd.gradcheck", "4 forward per line, 2 to 4 lines per group of tensors",
          low=0.0, scale="log"),
    )
    # fmt: on
