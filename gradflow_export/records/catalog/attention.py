"""Attention: how it spreads over keys, how heads differ, whether tokens stay apart."""

from __future__ import annotations

from gradflow_export.records.catalog.metric import MetricSpec


def specs() -> tuple[MetricSpec, ...]:
    """Return the metrics of this family, in the order of the documentation."""
    s = MetricSpec
    # fmt: off
    return (
        s("attention.entropy", "attention entropy", "1", "head",
          "mean over samples and queries of -sum_k p_k ln p_k / ln #admissible keys; queries with one key left out. "
          "Like every metric of attention: of at most four samples and 512 queries, evenly spaced",
          "Zhai et al. 2023, arXiv:2303.06296", "1A sampled", low=0.0, high=1.0, marks=(0.15,), batches="first",
          error="attention.entropy_error"),
        s("attention.entropy_nats", "attention entropy, in nats", "nats", "module",
          "mean over samples, heads and queries of -sum_k p_k ln p_k", "Shannon 1948", "1A sampled", low=0.0,
          batches="first",
          error="attention.entropy_nats_error"),
        s("attention.entropy_bound", "minimum entropy for these logits", "nats", "module",
          "mean over queries of the least entropy that T logits at distance s from their mean can have",
          "Zhai et al. 2023, arXiv:2303.06296, theorem 3.1", "1A sampled", low=0.0, batches="first",
          error="attention.entropy_bound_error"),
        s("attention.sparsity", "attention near zero", "share", "module",
          "#{admissible weights < 0.1 / #keys} / #{admissible weights}", "definition", "1A sampled", low=0.0, high=1.0,
          batches="first",
          error="attention.sparsity_error"),
        s("attention.sink", "attention on one key", "share", "module",
          "mean over samples and heads of max_k mean over queries of p_k",
          "Xiao et al. 2023, arXiv:2309.17453; Gu et al. 2024, arXiv:2410.10781", "1A sampled", low=0.0, high=1.0,
          batches="first",
          error="attention.sink_error"),
        s("attention.max_logit", "largest attention logit", "logit", "module",
          "max over admissible keys, of the samples and queries that are looked at, of |scale q k + mask|",
          "Dehghani et al. 2023, arXiv:2302.05442; Wortsman et al. 2023, arXiv:2309.14322", "1A sampled", low=0.0,
          scale="log", batches="first"),
        s("attention.diversity", "head diversity", "1", "module",
          "1 - mean over pairs of heads of cos(p - uniform, p' - uniform)", "definition", "1A sampled", low=0.0,
          high=2.0, marks=(0.1,), batches="first",
          error="attention.diversity_error"),
        s("attention.divergence", "head divergence", "nats", "module",
          "mean over queries of H(mean over heads of p) - mean over heads of H(p)", "Lin 1991, IEEE Trans. IT 37",
          "1A sampled", low=0.0, batches="first",
          error="attention.divergence_error"),
        s("block.rank_residual", "token residual", "1", "block",
          "mean over sequences of ||X - 1 mean(X)^T||_F / ||X||_F at the output of a block with attention",
          "Dong et al. 2021, arXiv:2103.03404", "1H sampled", low=0.0, high=1.0, scale="log", marks=(0.05,),
          batches="first",
          error="block.rank_residual_error"),
        s("block.input_residual", "token residual at the block input", "1", "block",
          "the same at the input of the block", "Dong et al. 2021, arXiv:2103.03404", "1H sampled", low=0.0, high=1.0,
          scale="log", batches="first",
          error="block.input_residual_error"),
        *(
            s(f"{name}_error", f"standard error of the {title}", unit, kind,
              "of the ratio of two sums over samples and queries that are looked at: of two stages, samples and "
              "queries of each, with the correction for a finite population; missing where all are looked at",
              "Cochran 1977, Sampling Techniques, sections 6.3 and 10.3", "1A sampled", low=0.0, batches="first")
            for name, title, unit, kind in (
                ("attention.entropy", "attention entropy", "1", "head"),
                ("attention.entropy_nats", "attention entropy, in nats", "nats", "module"),
                ("attention.entropy_bound", "minimum entropy", "nats", "module"),
                ("attention.sparsity", "attention near zero", "1", "module"),
                ("attention.sink", "attention on one key", "1", "module"),
                ("attention.diversity", "head diversity", "1", "module"),
                ("attention.divergence", "head divergence", "nats", "module"),
                ("block.rank_residual", "token residual", "1", "block"),
                ("block.input_residual", "token residual at the block input", "1", "block"),
            )
        ),
    )
    # fmt: on
