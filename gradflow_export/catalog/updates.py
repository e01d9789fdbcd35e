"""Weights, their updates, learning rates."""

from __future__ import annotations

from gradflow_export.catalog.metric import MetricSpec


def specs() -> tuple[MetricSpec, ...]:
    """Return the metrics of this family, in the order of the documentation."""
    s = MetricSpec
    # fmt: off
    return (
        s("parameter.weight_norm", "weight norm", "weight", "parameter",
          "||w||_2 before the step, from an evenly spaced sample where the model has more than 1 Mi entries",
          "definition", "1P", low=0.0, scale="log", across="root"),
        s("parameter.update_norm", "update norm", "weight/step", "parameter",
          "||w_after - w_before||_2, from the same sample", "definition", "1P", low=0.0, scale="log", across="root"),
        s("parameter.update_ratio", "update to weight ratio", "1", "parameter",
          "||w_after - w_before|| / ||w_before||; missing where the weights are all zero",
          "definition", "c", low=0.0, scale="log", marks=(0.001,)),
        s("parameter.learning_rate", "learning rate", "1", "parameter",
          "lr of the parameter's group; missing when no optimizer owns it", "definition", "c", low=0.0, scale="log"),
        s("parameter.trainable", "trainable", "1", "parameter", "1 when requires_grad, else 0", "definition", "c",
          low=0.0, high=1.0),
        s("parameter.numel", "entries", "count", "parameter", "number of entries of the tensor", "definition", "c",
          low=0.0, scale="log"),
        s("update.total_norm", "update norm, all parameters", "weight/step", "run", "(sum_p ||update_p||^2)^(1/2)",
          "definition", "c", low=0.0, scale="log"),
        s("update.ratio", "update to weight ratio, all parameters", "1", "run", "||all updates|| / ||all weights||",
          "definition", "c", low=0.0, scale="log", marks=(0.001,), headline=True),
        s("learning_rate", "learning rate", "1", "run", "greatest lr over the optimizer's groups", "definition", "c",
          low=0.0, scale="log", headline=True),
    )
    # fmt: on
