"""What enters the model and the loss: inputs, targets, and what the loss's own graph shows."""

from __future__ import annotations

from gradflow_export.records.catalog.metric import MetricSpec

SOFTMAX_BEFORE_CE = "softmax before cross-entropy"
SIGMOID_BEFORE_CE = "sigmoid before cross-entropy"
TANH_BEFORE_CE = "tanh before cross-entropy"
RELU_BEFORE_CE = "ReLU before cross-entropy"
PROBABILITIES_IN_NLL = "probabilities given to nll_loss"
LOGITS_IN_NLL = "logits given to nll_loss"
SIGMOID_BEFORE_BCE = "sigmoid before binary cross-entropy with logits"
SOFTMAX_BEFORE_BCE = "softmax before binary cross-entropy with logits"
TANH_BEFORE_BCE = "tanh before binary cross-entropy with logits"
RELU_BEFORE_BCE = "ReLU before binary cross-entropy with logits"
PROBABILITIES_IN_KL = "probabilities given to kl_div"
SOFTMAX_OF_ONE = "softmax over one class"
SOFTMAX_OVER_BATCH = "softmax over the batch"
OVER_POSITIONS = "softmax over positions"
TWICE = "probabilities of probabilities"
POSITIONS_MIXED = "classes of several positions"
BROADCAST = "predictions and targets broadcast"
OUT_OF_REACH = "targets out of reach"
TARGETS_NO_SHARE = "targets outside 0 to 1"
MAXIMISED = "loss is maximised"
LOGITS_IN_CTC = "logits given to ctc_loss"
PROBABILITIES_IN_CTC = "probabilities given to ctc_loss"
UNSIGNED = "0 and 1 given to a margin loss"
MANY_LABELS = "several labels given to cross-entropy"
CLAMPED_SCORES = "scores cut off at 0 and 1 before binary cross-entropy"
COSINES_IN_CE = "cosines given to cross-entropy"
FOCAL_OF_MEAN = "focal weight of a mean"
OVERLAP_MINIMISED = "overlap is minimised"
RATES_IN_POISSON = "rates given to poisson_nll_loss"
SCORES_IN_LOGARITHM = "logarithm of scores"
SCORES_IN_OVERLAP = "scores given to an overlap"
UNLIKELY = "log-probabilities without a minus"
WITHOUT_BOUND = "scale without balance"

MISTAKES = (
    SOFTMAX_BEFORE_CE,
    SIGMOID_BEFORE_CE,
    TANH_BEFORE_CE,
    RELU_BEFORE_CE,
    PROBABILITIES_IN_NLL,
    LOGITS_IN_NLL,
    SIGMOID_BEFORE_BCE,
    SOFTMAX_BEFORE_BCE,
    TANH_BEFORE_BCE,
    RELU_BEFORE_BCE,
    PROBABILITIES_IN_KL,
    SOFTMAX_OF_ONE,
    SOFTMAX_OVER_BATCH,
    OVER_POSITIONS,
    TWICE,
    POSITIONS_MIXED,
    BROADCAST,
    OUT_OF_REACH,
    TARGETS_NO_SHARE,
    MAXIMISED,
    LOGITS_IN_CTC,
    PROBABILITIES_IN_CTC,
    UNSIGNED,
    MANY_LABELS,
    CLAMPED_SCORES,
    COSINES_IN_CE,
    FOCAL_OF_MEAN,
    OVERLAP_MINIMISED,
    RATES_IN_POISSON,
    SCORES_IN_LOGARITHM,
    SCORES_IN_OVERLAP,
    UNLIKELY,
    WITHOUT_BOUND,
)
"""Sites of ``loss.mistake``."""


def specs() -> tuple[MetricSpec, ...]:
    """Return the metrics of this family, in the order of the documentation."""
    s = MetricSpec
    # fmt: off
    return (
        s("loss.mistake", "what the graph of the loss shows", "1", "node",
          "by mistake: best loss that can be reached, share of the targets' variance out of reach, or 1; absent where "
          "nothing was found", "autograd graph", "c sampled"),
        s("loss.constant", "loss of the best constant", "loss", "module",
          "least mean loss over the targets seen of one prediction for all samples: entropy of the classes, variance, "
          "or mean distance from the median; in the unit of the loss function itself", "definition", "c sampled",
          low=0.0),
        s("loss.over_constant", "loss against the best constant", "1", "module",
          "mean loss of sampled predictions / loss.constant; 1 where nothing of the input is used", "definition",
          "c sampled", low=0.0, scale="log", marks=(1.0,)),
        s("loss.known", "loss is known", "1", "module",
          "1 where the loss is a sum of known losses of predictions and targets, and penalties of weights",
          "autograd graph", "c sampled", low=0.0, high=1.0),
        s("loss.samples", "predictions of a batch", "count", "module",
          "predictions that a loss compares with targets in one backward pass", "definition", "c sampled", low=0.0,
          batches="last"),
        s("loss.choice", "loss of a choice", "1", "module", "1 for a cross-entropy of one class of several, else 0",
          "autograd graph", "c sampled", low=0.0, high=1.0),
        s("loss.supervised", "answers are not the inputs", "1", "module",
          "1 where loss.known is 1, no other network takes part, and predictions are classes or one number for each "
          "sample", "autograd graph", "c sampled", low=0.0, high=1.0),
        s("loss.affine_depth", "layers without a non-linearity", "count", "module",
          "layers with weights before the loss when nothing between them bends; 0 where something does",
          "autograd graph", "c sampled", low=0.0),
        s("loss.idle_activations", "activations that do nothing", "count", "module",
          "activation modules of a model whose loss depends on its inputs by an affine map", "autograd graph",
          "c sampled", low=0.0),
        s("layer.row", "layers in a row", "count", "module",
          "length of the longest row of layers with nothing but affine steps between them, at each of its layers; of "
          "low rank left out, and convolutions where anything bends", "autograd graph", "c sampled", low=0.0),
        s("loss.affine_norms", "normalisations without a non-linearity", "count", "module",
          "layers of an affine map that a normalisation follows, the last left out", "autograd graph", "c sampled",
          low=0.0),
        s("layer.merged", "layers that could be one", "1", "module",
          "width between two layers of one module with nothing but affine steps between them and used by nothing else "
          "/ lesser of the widths before and behind, at both; only where 1 or more, and the network bends elsewhere",
          "autograd graph", "c sampled", low=1.0),
        s("loss.unbent", "what a linear model leaves", "1", "module",
          "z of the kernel test that residuals of the best linear fit still depend on the input; only for networks "
          "without a non-linearity", "Bierens 1982, J. Econometrics 20", "c sampled"),
        s("input.rms", "input size", "activation", "module",
          "(mean x^2)^(1/2) of what enters the first layer, as autocast casts it", "definition", "c sampled", low=0.0,
          scale="log", marks=(1.0,), batches="last"),
        s("input.mean", "input mean", "activation", "module", "mean x", "definition", "c sampled", batches="last"),
        s("input.std", "input spread", "activation", "module", "standard deviation over all entries, ddof=0",
          "definition", "c sampled", low=0.0, scale="log", batches="last"),
        s("input.max", "greatest input", "activation", "module", "max |x|", "definition", "c sampled", low=0.0,
          scale="log", batches="last"),
        s("input.feature_ratio", "greatest against typical feature", "1", "module",
          "max over features of rms / median over features of rms, features that are 0 left out", "definition",
          "c sampled", low=1.0, scale="log", batches="last"),
        s("input.constant_share", "constant features", "share", "module",
          "share of features that are the same in all sampled rows", "definition", "c sampled", low=0.0, high=1.0,
          batches="last"),
        s("input.whole_share", "whole numbers among inputs", "share", "module", "#{x == round(x)} / entries",
          "definition", "c sampled", low=0.0, high=1.0, batches="last"),
        s("input.squeezed_share", "squeezed features", "share", "module",
          "share of features whose middle half is not all the same, and spans less than 1/1000 of the standard "
          "deviation of all inputs", "definition", "c sampled", low=0.0, high=1.0, batches="last"),
        s("input.normalised", "input is normalised in the model", "1", "module",
          "1 where a normalisation stands before or directly behind the first layer", "autograd graph", "c sampled",
          low=0.0, high=1.0, batches="last"),
        s("target.rms", "target size", "loss", "module", "(mean y^2)^(1/2) of real targets", "definition",
          "c sampled", low=0.0, scale="log"),
        s("target.reach", "prediction size against target size", "1", "module",
          "(mean prediction^2)^(1/2) / (mean y^2)^(1/2)", "definition", "c sampled", low=0.0, scale="log"),
        s("target.distinct", "distinct targets", "count", "module", "different targets among the rows remembered",
          "definition", "c sampled", low=1.0),
        s("target.rows", "targets seen", "count", "module", "targets read so far", "definition", "c sampled", low=0.0,
          scale="log"),
        s("target.uniform_share", "batches with one target", "share", "module",
          "share of readings in which all targets are the same", "definition", "c sampled", low=0.0, high=1.0),
        s("target.copied", "targets that are the input", "share", "module",
          "share of class targets that are the words which entered at the same places; only where a path leads from "
          "each to its own prediction", "autograd graph", "c sampled", low=0.0, high=1.0),
        s("target.dependence", "dependence of targets on inputs", "1", "module",
          "greatest z of five kernel tests that targets depend on the input (three widths, products of two and of "
          "three features), rows remembered, equal inputs once",
          "Bierens 1982, J. Econometrics 20; Gretton et al. 2005, ALT", "c sampled"),
        s("target.ahead", "answers in sight", "share", "module",
          "share of places of a sequence that see the next one, where that is the target: attention to it, or a "
          "recurrent layer from the end", "autograd graph", "c sampled", low=0.0, high=1.0),
        s("target.tested", "rows behind that test", "count", "module", "different inputs among the rows remembered",
          "definition", "c sampled", low=0.0),
    )
    # fmt: on
