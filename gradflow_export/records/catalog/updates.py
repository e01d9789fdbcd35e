"""Weights, their updates, learning rates."""

from __future__ import annotations

from gradflow_export.records.catalog.metric import MetricSpec


def specs() -> tuple[MetricSpec, ...]:
    """Return the metrics of this family, in the order of the documentation."""
    s = MetricSpec
    # fmt: off
    return (
        s("parameter.weight_norm", "weight norm", "weight", "parameter", "||w||_2 before the step; after it "
          "at the last step of a run, where that was passed by", "definition", "1P", low=0.0, scale="log",
          across="root", error="parameter.weight_norm_error"),
        s("parameter.update_norm", "update norm", "weight/step", "parameter",
          "||w_after - w_before||_2; of tensors beyond the smallest that have 2^20 entries together, over the rows "
          "that the gradient touches and over 2^12 signed sums of all others",
          "Charikar et al. 2002, ICALP", "2P", low=0.0, scale="log", across="root",
          error="parameter.update_norm_error"),
        s("parameter.weight_norm_error", "standard error of the weight norm", "share", "parameter",
          "of the rows that a sparse gradient does not touch, 64 blocks of 1024 entries are read; 0 elsewhere",
          "Cochran 1977, Sampling Techniques, section 9.3", "c", low=0.0, across="max"),
        s("parameter.update_norm_error", "standard error of the update norm", "share", "parameter",
          "(1/2 / 2^12)^(1/2) times the share of ||update||^2 that is in the signed sums, or as for weight_norm_error",
          "Charikar et al. 2002, ICALP", "c", low=0.0, across="max"),
        s("parameter.update_ratio", "update to weight ratio", "1", "parameter",
          "||w_after - w_before|| / ||w_before||; missing where the weights are all zero",
          "definition", "c", low=0.0, scale="log", marks=(0.001,), error="parameter.update_ratio_error"),
        s("parameter.update_ratio_error", "standard error of the update to weight ratio", "share", "parameter",
          "(weight_norm_error^2 + update_norm_error^2)^(1/2)", "propagation of errors", "c", low=0.0),
        s("parameter.changed", "changed since the last reading", "1", "parameter",
          "1 when a bit of the tensor is another one than at the last reading of updates, by any writer, else 0: "
          "known from the update norm or by a checksum of all entries; missing without a reading before",
          "xxHash64", "1P of what rests", low=0.0, high=1.0, across="max"),
        s("parameter.learning_rate", "learning rate", "1", "parameter",
          "lr of the parameter's group; missing when no optimizer owns it", "definition", "c", low=0.0, scale="log"),
        s("parameter.trainable", "trainable", "1", "parameter", "1 when requires_grad, else 0", "definition", "c",
          low=0.0, high=1.0),
        s("parameter.numel", "entries", "count", "parameter", "number of entries of the tensor", "definition", "c",
          low=0.0, scale="log"),
        s("update.total_norm", "update norm, all parameters", "weight/step", "run",
          "(sum_p ||update_p||^2)^(1/2) over the parameters of the optimizers that stepped", "definition", "c",
          low=0.0, scale="log", error="update.norm_error"),
        s("update.norm_error", "standard error of the update norm, all parameters", "share", "run",
          "(sum_p (||update_p||^2 update_norm_error_p)^2)^(1/2) / sum_p ||update_p||^2", "propagation of errors", "c",
          low=0.0),
        s("update.ratio_error", "standard error of the update to weight ratio, all parameters", "share", "run",
          "as update.norm_error, with that of the weights", "propagation of errors", "c", low=0.0),
        s("update.ratio", "update to weight ratio, all parameters", "1", "run",
          "||all updates|| / ||all weights|| of the parameters of the optimizers that stepped", "definition", "c",
          low=0.0, scale="log", marks=(0.001,), headline=True, error="update.ratio_error"),
        s("learning_rate", "learning rate", "1", "run", "greatest lr over the optimizer's groups", "definition", "c",
          low=0.0, scale="log", headline=True),
    )
    # fmt: on
