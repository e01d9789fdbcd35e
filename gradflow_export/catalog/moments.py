"""The state of the optimizer."""

from __future__ import annotations

from gradflow_export.catalog.metric import MetricSpec


def specs() -> tuple[MetricSpec, ...]:
    """Return the metrics of this family, in the order of the documentation."""
    s = MetricSpec
    # fmt: off
    return (
        s("parameter.momentum_norm", "momentum norm", "gradient", "parameter",
          "||m||_2 of Adam's first moment or SGD's momentum buffer, after the step", "definition", "1P sampled",
          low=0.0, scale="log", across="root"),
        s("parameter.adam_rms", "gradient against second moment", "1", "parameter",
          "(mean g^2 / max(v, eps^2))^(1/2) with bias-corrected v, over at most 4096 evenly spaced entries",
          "Wortsman et al. 2023, arXiv:2304.13013", "c sampled", low=0.0, scale="log", marks=(1.0,), across="rms"),
        s("parameter.epsilon_share", "steps decided by eps", "share", "parameter",
          "#{v > 0 and v^(1/2) < eps} / #{v > 0} with bias-corrected v, over at most 4096 evenly spaced entries",
          "Kingma and Ba 2015, arXiv:1412.6980", "c sampled", low=0.0, high=1.0, marks=(0.5,), across="mean"),
        s("optimizer.adam_rms", "gradient against second moment, greatest", "1", "run",
          "max over parameters of parameter.adam_rms", "Wortsman et al. 2023, arXiv:2304.13013", "c", low=0.0,
          scale="log", marks=(1.0,)),
        s("optimizer.epsilon_share", "steps decided by eps, all parameters", "share", "run",
          "median over parameters of parameter.epsilon_share", "Kingma and Ba 2015, arXiv:1412.6980", "c", low=0.0,
          high=1.0, marks=(0.5,)),
        s("optimizer.steps", "steps of an optimizer", "count", "optimizer", "since watch()", "definition", "c",
          low=0.0),
    )
    # fmt: on
