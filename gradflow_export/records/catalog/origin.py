"""Where NaN or Inf began."""

from __future__ import annotations

from gradflow_export.records.catalog.metric import MetricSpec


def specs() -> tuple[MetricSpec, ...]:
    """Return the metrics of this family, in the order of the documentation."""
    s = MetricSpec
    # fmt: off
    return (
        s("origin.input", "NaN or Inf in the model input", "count", "run",
          "number of the micro-batch whose input held it", "definition",
          "c; of the loss before its backward pass", low=0.0),
        s("origin.weights", "NaN or Inf in weights", "count", "parameter",
          "0; the parameter held it before the backward pass", "definition", "1P, once NaN or Inf was seen", low=0.0),
        s("origin.forward", "NaN or Inf from the forward pass", "count", "module",
          "number of the micro-batch in which the module made it out of finite input; of two sites it lies between "
          "them, the empty one being the input of the model or the loss", "definition",
          "1 read of what the graph saved, once NaN or Inf was seen", low=0.0),
        s("origin.loss", "NaN or Inf from the loss", "count", "run",
          "number of the micro-batch; its outputs are finite and its loss is not, or no gradient is", "definition",
          "1 read of what the graph saved, once NaN or Inf was seen", low=0.0),
        s("origin.backward", "NaN or Inf from the backward pass", "count", "parameter",
          "micro-batches of the step, at the last parameter in registration order whose gradient holds it",
          "definition", "c", low=0.0),
    )
    # fmt: on
