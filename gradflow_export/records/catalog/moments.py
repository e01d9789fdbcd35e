"""The state of the optimizer."""

from __future__ import annotations

from gradflow_export.records.catalog.metric import MetricSpec


def specs() -> tuple[MetricSpec, ...]:
    """Return the metrics of this family, in the order of the documentation."""
    s = MetricSpec
    # fmt: off
    return (
        s("parameter.momentum_norm", "momentum norm", "gradient", "parameter",
          "||m||_2 of Adam's first moment or SGD's momentum buffer, after the step", "definition", "1P sampled",
          low=0.0, scale="log", across="root"),
        s("parameter.state_kept", "state kept by the optimizer", "share", "parameter",
          "1 where the optimizer had a state for it before the step, 0 where the step made one", "definition",
          "c sampled", low=0.0, high=1.0, across="mean"),
        s("parameter.momentum_steps", "steps that momentum averages over", "count", "parameter",
          "1 / (1 - beta1) of Adam and its kin, 1 / (1 - momentum) of SGD", "Kingma and Ba 2015, arXiv:1412.6980", "c",
          low=1.0, scale="log", across="max"),
        s("parameter.square_steps", "steps that the second moment averages over", "count", "parameter",
          "1 / (1 - beta2) of Adam and its kin", "Kingma and Ba 2015, arXiv:1412.6980", "c",
          low=1.0, scale="log", across="max"),
        s("parameter.adam_rms", "gradient against second moment", "1", "parameter",
          "(mean g^2 / max(v, eps^2))^(1/2) with bias-corrected v; of more than 2^12 entries over 2^12 drawn evenly",
          "Wortsman et al. 2023, arXiv:2304.13013",
          "c sampled", low=0.0, scale="log", marks=(1.0,), across="rms", error="parameter.adam_rms_error"),
        s("parameter.adam_rms_error", "standard error of the ratio to the second moment", "1", "parameter",
          "(m + d)^(1/2) - m^(1/2), m the mean of r = g^2 / max(v, eps^2) over the n entries drawn, d = s / n^(1/2) + "
          "b / n, s their standard deviation and b = (1 - beta2^t) / (1 - beta2) the greatest r there can be among "
          "those left out (t without limit on other devices than the CPU)",
          "Cochran 1977, Sampling Techniques, section 2.7", "c", low=0.0, across="max"),
        s("parameter.epsilon_share", "updates dominated by eps", "share", "parameter",
          "#{v > 0 and v^(1/2) < eps} / #{v > 0} with bias-corrected v, over the same entries",
          "Kingma and Ba 2015, arXiv:1412.6980", "c sampled",
          low=0.0, high=1.0, marks=(0.5,), across="mean", error="parameter.epsilon_share_error"),
        s("parameter.epsilon_share_error", "standard error of the share that eps decides", "1", "parameter",
          "(p (1 - p) / k)^(1/2) + 1 / k, p the share and k = #{v > 0} among the entries drawn; 1 without any",
          "Cochran 1977, Sampling Techniques, section 3.2", "c", low=0.0, high=1.0, across="max"),
        s("optimizer.adam_rms", "gradient against second moment, greatest", "1", "run",
          "max over parameters of parameter.adam_rms; off by no more than the parameter that is off most",
          "Wortsman et al. 2023, arXiv:2304.13013", "c", low=0.0, scale="log", marks=(1.0,)),
        s("optimizer.epsilon_share", "updates dominated by eps, all parameters", "share", "run",
          "median over parameters of parameter.epsilon_share; off by no more than the parameter that is off most",
          "Kingma and Ba 2015, arXiv:1412.6980", "c", low=0.0, high=1.0, marks=(0.5,)),
        s("optimizer.steps", "steps of an optimizer", "count", "optimizer", "since watch()", "definition", "c",
          low=0.0),
    )
    # fmt: on
