"""How much a policy explores."""

from __future__ import annotations

from gradflow_export.records.catalog.metric import MetricSpec


def specs() -> tuple[MetricSpec, ...]:
    """Return the metrics of this family, in the order of the documentation."""
    s = MetricSpec
    # fmt: off
    return (
        s("policy.entropy", "policy entropy", "1", "run",
          "mean over states of H(pi) / ln K, K the allowed actions; states with one allowed action are left out",
          "Shannon 1948", "1 pass logits", low=0.0, high=1.0, marks=(0.1, 0.5), headline=True, batches="last"),
        s("policy.std", "standard deviation of actions", "1", "run",
          "mean sigma, before squashing; in halves of the range of actions where that is given", "definition", "c",
          low=0.0, scale="log", marks=(0.1, 2.0), headline=True, batches="last"),
        s("policy.gaussian_entropy", "entropy per continuous action", "nats", "run",
          "mean over dimensions of ln(2 pi e sigma^2) / 2", "Cover and Thomas 2006, theorem 8.4.1", "c",
          batches="last"),
        s("policy.head_entropy", "policy entropy, by head", "1", "module",
          "H(pi) / ln K at the layer the logits come from", "Shannon 1948", "c", low=0.0, high=1.0, marks=(0.1, 0.5),
          batches="last"),
        s("policy.head_std", "standard deviation of actions, by head", "1", "module",
          "mean sigma at the layer or parameter it comes from", "definition", "c", low=0.0, scale="log",
          marks=(0.1, 2.0), batches="last"),
    )
    # fmt: on
