"""Loss, logits and confidence."""

from __future__ import annotations

from gradflow_export.catalog.metric import MetricSpec


def specs() -> tuple[MetricSpec, ...]:
    """Return the metrics of this family, in the order of the documentation."""
    s = MetricSpec
    # fmt: off
    return (
        s("loss", "loss", "loss", "run", "the criterion's output, or observe(loss=...)", "definition", "c",
          headline=True),
        s("logits.max", "greatest logit", "logit", "run", "max over samples and classes", "definition",
          "1 pass logits"),
        s("logits.min", "least logit", "logit", "run", "min over samples and classes", "definition", "1 pass logits"),
        s("logits.mean", "mean logit", "logit", "run", "mean over samples and classes", "definition", "1 pass logits"),
        s("logits.std", "logit spread", "logit", "run", "standard deviation over samples and classes, ddof=0",
          "definition", "1 pass logits", low=0.0),
        s("logits.margin", "top-2 margin", "logit", "run", "mean over samples of largest minus second largest logit",
          "definition", "1 pass logits", low=0.0),
        s("confidence.max", "confidence", "share", "run", "mean over samples of max_k softmax(z)_k", "definition",
          "1 pass logits", low=0.0, high=1.0, headline=True),
        s("confidence.target", "confidence in the target", "share", "run", "mean over samples of softmax(z)_y",
          "definition", "1 pass logits", low=0.0, high=1.0),
        s("confidence.entropy", "prediction entropy", "1", "run", "mean over samples of H(softmax(z)) / ln K",
          "Shannon 1948", "1 pass logits", low=0.0, high=1.0),
        s("alignment.accuracy", "accuracy", "share", "run", "share of samples with argmax z = y", "definition",
          "1 pass logits", low=0.0, high=1.0, headline=True),
        s("alignment.margin", "target margin", "1", "run", "mean over samples of p_y - max_{k != y} p_k", "definition",
          "1 pass logits", low=-1.0, high=1.0),
    )
    # fmt: on
