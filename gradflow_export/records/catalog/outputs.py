"""Loss, logits and confidence."""

from __future__ import annotations

from gradflow_export.records.catalog.metric import MetricSpec


def specs() -> tuple[MetricSpec, ...]:
    """Return the metrics of this family, in the order of the documentation."""
    s = MetricSpec
    # fmt: off
    return (
        s("loss", "loss", "loss", "run",
          "mean of observe(loss=...) over its calls in the step; without it the sum of all scalars that backward was "
          "called on, each times the gradient given with it: of losses divided by the number of micro-batches their "
          "mean, of undivided ones, and of sums over samples, their sum. Where backward was called on no scalar, the "
          "sum of the criterion's outputs that gradients came from, of several entries their mean. Nothing of "
          "backward passes whose gradients were cleared before the step. Where a step "
          "evaluates a closure several times it is of the first, at the weights before the step, and gradients are of "
          "the last. With several optimizers the sum over those that stepped, each backward pass once",
          "definition", "c", headline=True, across="mean"),
        s("optimizer.loss", "loss of an optimizer", "loss", "optimizer",
          "as loss, over the backward passes whose gradients this optimizer stepped with: those that reached a "
          "parameter it owns and were not cleared before", "definition", "c", across="mean"),
        s("loss.component", "loss component", "loss", "node",
          "observe(components={name: value}), mean over micro-batches", "definition", "c", across="mean"),
        s("loss.component_share", "share of a loss component", "share", "node",
          "|c_i| / sum_j |c_j| over the components of observe(components=...)", "definition", "c", low=0.0, high=1.0,
          across="mean"),
        s("upstream.norm", "gradient of the loss at the predictions", "gradient", "run",
          "(sum ||dL/dz||_2^2)^(1/2) over all micro-batches of the step, z the criterion's first argument or "
          "observe(logits=...)", "definition", "1 pass logits", low=0.0, scale="log", across="batch root"),
        s("upstream.mean_norm", "gradient of the loss at a prediction", "gradient", "run",
          "mean over samples of ||dL/dz_s||_2; (softmax - onehot) / samples for mean cross-entropy. A sample is a row "
          "of the first axis, ignored ones too: of outputs [B, C, T] it is a sequence, not one of its positions",
          "definition", "1 pass logits", low=0.0, scale="log", across="batch mean"),
        s("upstream.zero_share", "zero entries of the loss's gradient", "share", "run", "#{dL/dz == 0} / numel",
          "definition", "1 pass logits", low=0.0, high=1.0, across="mean"),
        s("upstream.nonfinite_share", "NaN or Inf entries of the loss's gradient", "share", "run",
          "#{dL/dz is NaN or Inf} / numel", "definition", "1 pass logits", low=0.0, high=1.0, across="mean"),
        s("logits.max", "maximum logit", "logit", "run",
          "max over samples and classes that are looked at", "definition", "1 pass logits", across="max"),
        s("logits.min", "minimum logit", "logit", "run",
          "min over samples and classes that are looked at", "definition", "1 pass logits", across="min"),
        s("logits.mean", "mean logit", "logit", "run", "mean over samples and classes", "definition", "1 pass logits",
          across="mean", error="logits.mean_error"),
        s("logits.std", "logit spread", "logit", "run", "standard deviation over samples and classes, ddof=0",
          "definition", "1 pass logits", low=0.0, across="rms", error="logits.std_error"),
        s("logits.margin", "top-2 margin", "logit", "run", "mean over samples of largest minus second largest logit",
          "definition", "1 pass logits", low=0.0, across="mean", error="logits.margin_error"),
        s("logits.log_z", "log normalizer", "nats", "run", "mean over samples of ln sum_k exp z_k",
          "Chowdhery et al. 2022, arXiv:2204.02311", "1 pass logits", across="mean", error="logits.log_z_error"),
        s("confidence.max", "confidence", "share", "run",
          "mean over all samples, ignored ones too, of max_k softmax(z)_k", "definition",
          "1 pass logits", low=0.0, high=1.0, headline=True, across="mean", error="confidence.max_error"),
        s("confidence.target", "confidence in the target", "share", "run",
          "mean over samples that the loss does not ignore of softmax(z)_y",
          "definition", "1 pass logits", low=0.0, high=1.0, across="mean", error="confidence.target_error"),
        s("confidence.entropy", "prediction entropy", "1", "run",
          "mean over all samples, ignored ones too, of H(softmax(z)) / ln K",
          "Shannon 1948", "1 pass logits", low=0.0, high=1.0, across="mean", error="confidence.entropy_error"),
        s("alignment.accuracy", "accuracy", "share", "run",
          "share of samples with argmax z = y, of those that the loss does not ignore", "definition",
          "1 pass logits", low=0.0, high=1.0, headline=True, across="mean", error="alignment.accuracy_error"),
        s("alignment.margin", "target margin", "1", "run",
          "mean over samples that the loss does not ignore of p_y - max_{k != y} p_k", "definition",
          "1 pass logits", low=-1.0, high=1.0, across="mean", error="alignment.margin_error"),
        *(
            s(f"{name}_error", f"standard error of the {title}", unit, "run",
              "of at least 32 samples, evenly spaced, where all have more than 2^20 entries, with the correction for a "
              "finite population; missing where all samples are looked at",
              "Cochran 1977, Sampling Techniques, sections 2.4 and 6.4", "c", low=0.0, across="max")
            for name, title, unit in (
                ("logits.mean", "mean logit", "logit"),
                ("logits.std", "logit spread", "logit"),
                ("logits.margin", "top-2 margin", "logit"),
                ("logits.log_z", "log normalizer", "nats"),
                ("confidence.max", "confidence", "1"),
                ("confidence.target", "confidence in the target", "1"),
                ("confidence.entropy", "prediction entropy", "1"),
                ("alignment.accuracy", "accuracy", "1"),
                ("alignment.margin", "target margin", "1"),
            )
        ),
    )
    # fmt: on
