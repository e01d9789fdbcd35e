"""Gradients of parameters and gains from block to block."""

from __future__ import annotations

from gradflow_export.records.catalog.metric import MetricSpec


def specs() -> tuple[MetricSpec, ...]:
    """Return the metrics of this family, in the order of the documentation."""
    s = MetricSpec
    # fmt: off
    return (
        s("gradient.total_norm", "gradient norm, all parameters", "gradient", "run",
          "(sum_p ||g_p||_2^2)^(1/2); here and below p runs over the parameters of the optimizers that stepped",
          "torch.nn.utils.get_total_norm", "1G", low=0.0, scale="log", headline=True),
        s("gradient.mean_norm", "gradient norm, mean", "gradient", "run", "mean over parameters of ||g_p||_2",
          "definition", "c", low=0.0, scale="log"),
        s("gradient.std_norm", "gradient norm, spread", "gradient", "run",
          "standard deviation over parameters of ||g_p||_2, ddof=0", "definition", "c", low=0.0, scale="log"),
        s("gradient.max_norm", "gradient norm, maximum", "gradient", "run", "max over parameters of ||g_p||_2",
          "definition", "c", low=0.0, scale="log", headline=True),
        s("gradient.min_norm", "gradient norm, minimum", "gradient", "run", "min over parameters of ||g_p||_2",
          "definition", "c", low=0.0, scale="log", headline=True),
        s("gradient.with_grad", "parameters with a gradient", "count", "run", "number of tensors whose .grad arrived",
          "definition", "c", low=0.0),
        s("gradient.nonfinite", "parameters with NaN or Inf gradient", "count", "run",
          "number of tensors whose gradient norm is NaN or Inf", "definition", "c", low=0.0, headline=True),
        s("gradient.cosine", "cosine with the previous gradient", "1", "run",
          "<g_t, g_{t-1}> / (||g_t|| ||g_{t-1}||), g_{t-1} what the same optimizer used before; over optimizers "
          "without sparse gradients; what did not arrive counts as 0. Missing "
          "where the optimizer got parameters since, as from add_param_group. Of more than 2^14 entries over 2^14 "
          "signed sums of all of them. Without the C library over 16 pieces of 1024 entries drawn evenly over all, and "
          "missing where gradients of other parameters arrived than before", "Charikar et al. 2002, ICALP", "1G",
          low=-1.0, high=1.0, error="gradient.cosine_error"),
        s("gradient.cosine_error", "standard error of the cosine", "1", "run",
          "(1 - cosine^2) / 2^7 over signed sums; over pieces that of a ratio of sample means",
          "Cochran 1977, Sampling Techniques, section 6.3", "c", low=0.0),
        s("gradient.norm_before_clip", "gradient norm before clipping", "gradient", "run",
          "(sum_p ||g_p||_2^2)^(1/2) before clipping. At every step where torch.nn.utils.clip_grad_norm_ or "
          "clip_grads_with_norm_ is called: used norms divided by min(1, max_norm / (total_norm + 1e-6)); with "
          "clip_grad_value_ before it as left by backward; what was changed by hand before is not clipping. For any "
          "other change between backward and step: norms at the end of the last backward pass, on sampled steps, and "
          "at every step for 32 steps after one that shows such a change (on a GPU not one through .data). So of "
          "clipping by hand that is further apart only sampled steps have it. Of an optimizer that writes to gradients "
          "in a step of its own, by anything but these functions, this and total_norm are those before its step",
          "definition", "c; 1G sampled", low=0.0, scale="log", headline=True, across="root"),
        s("gradient.clip_scale", "gradient scale after clipping", "1", "run",
          "gradient.total_norm / gradient.norm_before_clip, at the same steps: without clipping 1 where it is sampled, "
          "and missing elsewhere and where no backward pass writes the gradients, as with torch.autograd.grad",
          "Pascanu et al. 2013, arXiv:1211.5063", "c", low=0.0, scale="log", marks=(1.0,)),
        s("parameter.clip_scale", "gradient scale after clipping, by parameter", "1", "parameter",
          "at steps where calls of torch's clipping left different shares of different parameters", "definition", "c",
          low=0.0, scale="log", marks=(1.0,)),
        s("gradient.clipped_share", "clipped steps", "share", "run",
          "share of the last 20 readings whose clip_scale is below 0.999", "definition", "c", low=0.0, high=1.0),
        s("gradient.first_norm", "gradient norm after the first micro-batch", "gradient", "run",
          "(sum_p ||g_p||_2^2)^(1/2) at the end of the first backward pass of the step; of several optimizers that of "
          "each one's first", "definition", "1G sampled",
          low=0.0, scale="log", across="root"),
        s("gradient.noise_scale", "gradient noise scale", "1", "run",
          "tr S / |G|^2 in micro-batches, from first_norm and norm_before_clip, averaged over readings; needs "
          "accumulation", "McCandlish et al. 2018, arXiv:1812.06162, appendix A.1", "c", low=0.0, scale="log"),
        s("gradient.loss_scale", "factor of the gradient scaler", "1", "run",
          "what torch.amp.GradScaler multiplied the losses of the step by; block.gradient_norm, upstream.norm and "
          "upstream.mean_norm are divided by it", "definition", "c", low=0.0, scale="log"),
        s("optimizer.gradient_norm", "gradient norm of an optimizer", "gradient", "optimizer",
          "(sum_p ||g_p||_2^2)^(1/2) over the parameters it owns, as it uses them", "definition", "c", low=0.0,
          scale="log"),
        s("parameter.gradient_norm", "gradient norm", "gradient", "parameter", "||g||_2 = (sum g^2)^(1/2)",
          "definition", "1G", low=0.0, scale="log", across="root"),
        s("parameter.gradient_l1", "gradient L1 norm", "gradient", "parameter", "sum |g|", "definition", "1G", low=0.0,
          scale="log", across="sum"),
        s("parameter.gradient_linf", "largest gradient entry", "gradient", "parameter", "max |g|", "definition", "1G",
          low=0.0, scale="log", across="max"),
        s("parameter.gradient_mean", "mean gradient entry", "gradient", "parameter",
          "sum |g| / numel (invariant to size, not to scale)", "definition", "1G", low=0.0, scale="log", across="mean"),
        s("parameter.zero_share", "zero gradient entries", "share", "parameter",
          "#{g == 0} / numel; over the touched rows of a sparse gradient", "definition", "1G", low=0.0, high=1.0,
          marks=(0.9,), across="mean"),
        s("parameter.nonfinite", "NaN or Inf gradient entries", "count", "parameter", "#{g is NaN or Inf}",
          "definition", "1G", low=0.0, across="sum"),
        s("block.gradient_norm", "gradient norm at the block's output", "gradient", "block",
          "||dL/dh_i||_2 over the whole output, of all micro-batches, without what torch.autograd.grad sends back "
          "before or after a backward pass", "definition", "1H", low=0.0, scale="log", across="batch root"),
        s("block.gain", "gain", "1", "block",
          "gamma_i = ||dL/dh_{i-1}|| / ||dL/dh_i||; inf where the denominator alone is below "
          "1e-30, missing where both are", "definition", "c", low=0.0,
          scale="log", marks=(0.5, 2.0)),
        s("block.log_gain", "log gain", "1", "block",
          "ln ||dL/dh_{i-1}|| - ln ||dL/dh_i||; missing where nothing passed: ||dL/dh_{i-1}|| below 1e-30",
          "definition", "c",
          marks=(-0.6931472, 0.6931472)),
        s("block.next", "next block on every path to the loss", "1", "block",
          "place of the immediate post-dominator among the blocks; -1 the loss, -2 not known",
          "Lengauer and Tarjan 1979, TOPLAS 1", "c", low=-2.0),
        s("block.output_rms", "output size", "activation", "block", "(mean h_i^2)^(1/2)", "definition", "1H", low=0.0,
          scale="log", across="rms", batches="last"),
        s("block.output_spread", "output spread over samples", "activation", "block",
          "root mean square over features of the standard deviation over samples and positions; of at most 32 of "
          "these and 64 features, evenly spaced",
          "Schoenholz et al. 2017, arXiv:1611.01232", "1H", low=0.0, scale="log", across="rms", batches="last",
          error="block.output_spread_error"),
        s("block.output_spread_error", "standard error of the output spread", "share", "block",
          "(var_j / n_j + var_r / n_r)^(1/2) / 2, var the variance over the n features, or rows, of their mean square "
          "as a share of that of all, with finite population correction",
          "Cochran 1977, Sampling Techniques, section 2.7", "c", low=0.0, across="max", batches="last"),
        s("block.effective_rank", "effective rank", "1", "block",
          "exp(H(sigma / sum sigma)) of centred outputs: of at most 512 rows of four batches and 512 features, evenly "
          "spaced, fewer the more blocks there are. The rank of what is looked at: of n rows or features of outputs "
          "with rank r it is low by a share of about r / (8 n); missing of a single row, 0 where all rows are equal",
          "Roy and Vetterli 2007, EUSIPCO", "small SVD", low=0.0, scale="log", batches="last",
          error="block.effective_rank_error"),
        s("block.rank_rows", "rows of the ranks", "count", "block",
          "samples and positions that both ranks were read from: of n rows none exceeds n - 1", "definition", "c",
          low=0.0, scale="log", batches="last"),
        s("block.stable_rank", "stable rank", "1", "block",
          "sum sigma^2 / max sigma^2 of the same outputs", "Rudelson and Vershynin 2007, J. ACM 54", "c", low=0.0,
          scale="log", batches="last", error="block.stable_rank_error"),
        *(
            s(f"block.{name}_error", f"standard error of the {title}", "share", "block",
              "(sum over rows (1 - f) (d ln R / d w)^2 + the same over features)^(1/2): w how often one counts, f the "
              "share of them that is looked at; missing where all are",
              "infinitesimal jackknife, Efron 1982, section 6", "small SVD", low=0.0, batches="last")
            for name, title in (("effective_rank", "effective rank"), ("stable_rank", "stable rank"))
        ),
        s("block.output_max", "largest output", "activation", "block", "max |h_i|, read with the ranks", "definition",
          "1H sampled", low=0.0, scale="log", across="max", batches="last"),
        s("block.peak_ratio", "massive activations", "1", "block", "max |h_i| / (mean h_i^2)^(1/2)",
          "Sun et al. 2024, arXiv:2402.17762", "c", low=0.0, scale="log", batches="last"),
        s("gain.depth", "depth gain", "1", "run", "sum of log gains over the whole chain of blocks; missing where it "
          "is cut",
          "Saxe et al. 2014, arXiv:1312.6120", "c", marks=(-9.21034, 4.60517), headline=True),
        s("gain.slope", "log gradient norm per block", "1", "run", "Theil-Sen slope of ln ||dL/dh_i|| over depth i",
          "Sen 1968", "c"),
        s("gain.min", "minimum gain", "1", "run", "min over finite gains", "definition", "c", low=0.0, scale="log",
          marks=(0.5,), headline=True),
        s("gain.max", "greatest gain", "1", "run", "max over finite gains", "definition", "c", low=0.0, scale="log",
          marks=(2.0,), headline=True),
        s("gain.mean_log", "mean log gain", "1", "run", "mean over finite log gains", "definition", "c"),
    )
    # fmt: on
