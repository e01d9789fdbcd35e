"""Dead, saturated and zero activations."""

from __future__ import annotations

from gradflow_export.records.catalog.metric import MetricSpec


def specs() -> tuple[MetricSpec, ...]:
    """Return the metrics of this family, in the order of the documentation."""
    s = MetricSpec
    # fmt: off
    return (
        s("activation.dead_share", "dead units", "share", "module",
          "units with no output > 0 for any sample or position in the window / units",
          "Lu et al. 2019, arXiv:1903.06733", "1 pass", low=0.0, high=1.0, marks=(0.9,), across="units"),
        s("activation.saturated_share", "saturated outputs", "share", "module",
          "outputs whose derivative is below 1 % of its maximum / outputs", "Glorot and Bengio 2010", "1 pass", low=0.0,
          high=1.0, marks=(0.8,), across="mean", batches="last"),
        s("activation.zero_share", "zero outputs", "share", "module", "#{output == 0} / numel", "definition", "1 pass",
          low=0.0, high=1.0, across="mean", batches="last"),
    )
    # fmt: on
