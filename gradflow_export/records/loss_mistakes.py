"""What can be wrong with a loss, by name: the values of evidence of the kind ``mistake`` (floor 1, no dependencies)."""

from __future__ import annotations

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
LOGARITHMS_IN_KL = "logarithms given to kl_div as targets"
SOFTMAX_OF_ONE = "softmax over one class"
SOFTMAX_OVER_BATCH = "softmax over the batch"
OVER_POSITIONS = "softmax over positions"
OVER_SAMPLES = "softmax over the samples within the model"
DIMENSIONS_MIXED = "dimensions mixed by a change of shape"
OVER_QUERIES = "attention that is shared out over the queries"
SWAPPED = "predictions and targets swapped"
TWICE = "probabilities of probabilities"
POSITIONS_MIXED = "classes of several positions"
BROADCAST = "predictions and targets broadcast"
ONE_NUMBER = "one number for all outputs"
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
WEIGHTS_TURNED = "weights of classes turned round"
WEIGHTS_FAR = "weights of classes beyond balance"
DRAWN_TOGETHER = "predictions drawn together alone"
WITH_ITSELF = "output compared with itself"
OWN_POSITIVES = "samples that are their own positives"
PENALTY_TURNED = "penalty on the weights is taken off"

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
    LOGARITHMS_IN_KL,
    SOFTMAX_OF_ONE,
    SOFTMAX_OVER_BATCH,
    OVER_POSITIONS,
    OVER_SAMPLES,
    DIMENSIONS_MIXED,
    OVER_QUERIES,
    SWAPPED,
    TWICE,
    POSITIONS_MIXED,
    BROADCAST,
    ONE_NUMBER,
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
    WEIGHTS_TURNED,
    WEIGHTS_FAR,
    DRAWN_TOGETHER,
    WITH_ITSELF,
    OWN_POSITIVES,
    PENALTY_TURNED,
)
"""All of them."""
