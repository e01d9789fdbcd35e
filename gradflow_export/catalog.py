"""Every metric this package can emit: the one place from which tags, documentation and the panel's labels derive."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from gradflow_export.errors import ArgumentError, nearest

UNITS = frozenset(
    {
        "1",
        "share",
        "count",
        "nats",
        "MB",
        "s",
        "steps/s",
        "loss",
        "gradient",
        "weight",
        "weight/step",
        "activation",
        "logit",
    }
)
SITE_KINDS = frozenset({"run", "block", "parameter", "module", "head", "node"})
CUSTOM_PREFIX = "custom."


@dataclass(frozen=True)
class MetricSpec:
    """What one metric is.

    Attributes:
        name: Unique, dotted, lower case.
        title: A few words for axis labels and tables.
        unit: One of ``UNITS``; "gradient" is the unit of the loss per unit of the weight or activation.
        kind: One of ``SITE_KINDS``: what a site of this metric is.
        formula: How it is computed, in one line.
        source: Paper, equation or "definition".
        cost: Passes over tensors: G all gradients, P all parameters, H block outputs; c constant.
        low: Least possible value, ``None`` when unbounded.
        high: Greatest possible value, ``None`` when unbounded.
        scale: ``"log"`` or ``"linear"``: how it is best drawn.
        marks: Values worth a line in a chart, such as the gains 0.5 and 2.
        headline: Whether it is written to TensorBoard's stock Scalars page.
    """

    name: str
    title: str
    unit: str
    kind: str
    formula: str
    source: str
    cost: str
    low: float | None = None
    high: float | None = None
    scale: str = "linear"
    marks: tuple[float, ...] = ()
    headline: bool = False

    def __post_init__(self) -> None:
        if self.unit not in UNITS:
            raise ArgumentError(f"metric {self.name!r} has unit {self.unit!r}{nearest(self.unit, UNITS)}")
        if self.kind not in SITE_KINDS:
            raise ArgumentError(f"metric {self.name!r} has site kind {self.kind!r}{nearest(self.kind, SITE_KINDS)}")


def _specs() -> tuple[MetricSpec, ...]:
    s = MetricSpec
    # fmt: off
    return (
        # --- loss, logits, confidence
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
        # --- gradients
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
        # --- gains
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
        # --- updates
        s("parameter.weight_norm", "weight norm", "weight", "parameter",
          "||w||_2 before the step, from an evenly spaced sample where the model has more than 4 Mi entries",
          "definition", "1P", low=0.0, scale="log"),
        s("parameter.update_norm", "update norm", "weight/step", "parameter",
          "||w_after - w_before||_2, from the same sample", "definition", "1P", low=0.0, scale="log"),
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
        # --- activations
        s("activation.dead_share", "dead units", "share", "module",
          "units with no output > 0 for any sample or position in the window / units",
          "Lu et al. 2019, arXiv:1903.06733", "1 pass", low=0.0, high=1.0, marks=(0.9,)),
        s("activation.saturated_share", "saturated outputs", "share", "module",
          "outputs whose derivative is below 1 % of its maximum / outputs", "Glorot and Bengio 2010", "1 pass", low=0.0,
          high=1.0, marks=(0.8,)),
        s("activation.zero_share", "zero outputs", "share", "module", "#{output == 0} / numel", "definition", "1 pass",
          low=0.0, high=1.0),
        # --- runtime
        s("runtime.rss", "resident memory", "MB", "run", "resident set size / 2^20", "psutil", "c", low=0.0,
          headline=True),
        s("runtime.vms", "virtual memory", "MB", "run", "virtual size / 2^20", "psutil", "c", low=0.0),
        s("runtime.memory_limit", "memory of this machine or container", "MB", "run", "total memory / 2^20", "psutil",
          "c", low=0.0),
        s("runtime.cuda_allocated", "CUDA memory, allocated", "MB", "run", "torch.cuda.memory_allocated / 2^20",
          "PyTorch", "c", low=0.0, headline=True),
        s("runtime.cuda_reserved", "CUDA memory, reserved", "MB", "run", "torch.cuda.memory_reserved / 2^20", "PyTorch",
          "c", low=0.0),
        s("runtime.cuda_peak", "CUDA memory, peak", "MB", "run", "torch.cuda.max_memory_allocated / 2^20", "PyTorch",
          "c", low=0.0),
        s("runtime.cuda_limit", "CUDA memory of the device", "MB", "run", "total memory of the current device / 2^20",
          "PyTorch", "c", low=0.0),
        s("runtime.step_time", "step time", "s", "run", "time between the ends of two optimizer steps", "definition",
          "c", low=0.0, scale="log", headline=True),
        s("runtime.backward_time", "backward time", "s", "run",
          "from the loss's gradient to the optimizer's pre-step hook (host clock)", "definition", "c", low=0.0,
          scale="log"),
        s("runtime.throughput", "steps per second", "steps/s", "run", "1 / median step time of the last 32 steps",
          "definition", "c", low=0.0, headline=True),
        s("runtime.skipped", "optimizer steps skipped by the gradient scaler", "count", "run", "running total",
          "torch.amp.GradScaler", "c", low=0.0),
        s("runtime.dropped", "steps dropped because the queue was full", "count", "run", "running total", "definition",
          "c", low=0.0),
        s("overhead", "own share of the step", "share", "run", "time inside our hooks / step time", "definition", "c",
          low=0.0, high=1.0, headline=True),
    )
    # fmt: on


CATALOG: Mapping[str, MetricSpec] = MappingProxyType({spec.name: spec for spec in _specs()})
"""Every metric by name; read-only."""


def spec(name: str) -> MetricSpec:
    """Return the description of a metric.

    Args:
        name: A name of the catalogue, or ``"custom.<analyzer>.<key>"`` for a user's own analyzer.

    Raises:
        ArgumentError: The name is unknown; the message names the nearest.
    """
    if name in CATALOG:
        return CATALOG[name]
    if name.startswith(CUSTOM_PREFIX):
        return MetricSpec(
            name, name.removeprefix(CUSTOM_PREFIX), "1", "run", "computed by a registered analyzer", "user", "c"
        )
    raise ArgumentError(f"unknown metric {name!r}{nearest(name, CATALOG)}")
