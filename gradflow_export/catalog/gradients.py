"""Gradients of parameters and gains from block to block."""

from __future__ import annotations

from gradflow_export.catalog.metric import MetricSpec


def specs() -> tuple[MetricSpec, ...]:
    """Return the metrics of this family, in the order of the documentation."""
    s = MetricSpec
    # fmt: off
    return (
        s("gradient.total_norm", "gradient norm, all parameters", "gradient", "run", "(sum_p ||g_p||_2^2)^(1/2)",
          "torch.nn.utils.get_total_norm", "1G", low=0.0, scale="log", headline=True),
        s("gradient.mean_norm", "gradient norm, mean", "gradient", "run", "mean over parameters of ||g_p||_2",
          "definition", "c", low=0.0, scale="log"),
        s("gradient.std_norm", "gradient norm, spread", "gradient", "run",
          "standard deviation over parameters of ||g_p||_2, ddof=0", "definition", "c", low=0.0, scale="log"),
        s("gradient.max_norm", "gradient norm, greatest", "gradient", "run", "max over parameters of ||g_p||_2",
          "definition", "c", low=0.0, scale="log", headline=True),
        s("gradient.min_norm", "gradient norm, least", "gradient", "run", "min over parameters of ||g_p||_2",
          "definition", "c", low=0.0, scale="log", headline=True),
        s("gradient.with_grad", "parameters with a gradient", "count", "run", "number of tensors whose .grad arrived",
          "definition", "c", low=0.0),
        s("gradient.nonfinite", "parameters with NaN or Inf gradient", "count", "run",
          "number of tensors whose gradient norm is NaN or Inf", "definition", "c", low=0.0, headline=True),
        s("gradient.cosine", "cosine with the previous gradient", "1", "run",
          "<g_t, g_{t-1}> / (||g_t|| ||g_{t-1}||) over an evenly spaced sample of at most 4096 entries",
          "gradient descent stability limit", "c", low=-1.0, high=1.0),
        s("parameter.gradient_norm", "gradient norm", "gradient", "parameter", "||g||_2 = (sum g^2)^(1/2)",
          "definition", "1G", low=0.0, scale="log"),
        s("parameter.gradient_l1", "gradient L1 norm", "gradient", "parameter", "sum |g|", "definition", "1G", low=0.0,
          scale="log"),
        s("parameter.gradient_linf", "greatest gradient entry", "gradient", "parameter", "max |g|", "definition", "1G",
          low=0.0, scale="log"),
        s("parameter.gradient_mean", "mean gradient entry", "gradient", "parameter",
          "sum |g| / numel (invariant to size, not to scale)", "definition", "1G", low=0.0, scale="log"),
        s("parameter.zero_share", "zero gradient entries", "share", "parameter",
          "#{g == 0} / numel; over the touched rows of a sparse gradient", "definition", "1G", low=0.0, high=1.0,
          marks=(0.9,)),
        s("parameter.nonfinite", "NaN or Inf gradient entries", "count", "parameter", "#{g is NaN or Inf}",
          "definition", "1G", low=0.0),
        s("block.gradient_norm", "gradient norm at the block's output", "gradient", "block",
          "||dL/dh_i||_2 over the whole output", "definition", "1H", low=0.0, scale="log"),
        s("block.gain", "gain", "1", "block",
          "gamma_i = ||dL/dh_{i-1}|| / ||dL/dh_i||; inf where the denominator is below eps", "definition", "c", low=0.0,
          scale="log", marks=(0.5, 2.0)),
        s("block.log_gain", "log gain", "1", "block", "ln ||dL/dh_{i-1}|| - ln ||dL/dh_i||", "definition", "c",
          marks=(-0.6931472, 0.6931472)),
        s("block.output_rms", "output size", "activation", "block", "(mean h_i^2)^(1/2)", "definition", "1H", low=0.0,
          scale="log"),
        s("block.output_spread", "output spread over samples", "activation", "block",
          "root mean square over features of the standard deviation over samples and positions, evenly sampled",
          "Schoenholz et al. 2017, arXiv:1611.01232", "1H", low=0.0, scale="log"),
        s("block.effective_rank", "effective rank", "1", "block",
          "exp(H(sigma / sum sigma)) of the centred outputs of at most 256 rows", "Roy and Vetterli 2007, EUSIPCO",
          "small SVD", low=0.0, scale="log"),
        s("gain.depth", "depth gain", "1", "run", "sum of log gains over the whole chain of blocks",
          "Saxe et al. 2014, arXiv:1312.6120", "c", marks=(-9.21034, 4.60517), headline=True),
        s("gain.slope", "log gradient norm per block", "1", "run", "Theil-Sen slope of ln ||dL/dh_i|| over depth i",
          "Sen 1968", "c"),
        s("gain.min", "least gain", "1", "run", "min over finite gains", "definition", "c", low=0.0, scale="log",
          marks=(0.5,), headline=True),
        s("gain.max", "greatest gain", "1", "run", "max over finite gains", "definition", "c", low=0.0, scale="log",
          marks=(2.0,), headline=True),
        s("gain.mean_log", "mean log gain", "1", "run", "mean over finite log gains", "definition", "c"),
    )
    # fmt: on
