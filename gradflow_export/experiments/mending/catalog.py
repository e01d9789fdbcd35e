"""The treatments that are tried only where a finding asks for them: each is the fix of what structure proves."""

from __future__ import annotations

from gradflow_export.experiments.mending import labels, passages
from gradflow_export.experiments.mending import losses as loss
from gradflow_export.experiments.mending.treatment import MENDING, Treatment
from gradflow_export.records.issues import IssueType

_T = IssueType

MENDED: tuple[Treatment, ...] = (
    Treatment(
        "give the loss logits",
        MENDING,
        loss.Logits,
        "a loss that takes logits or logarithms and is given something else",
        "loss = torch.nn.functional.cross_entropy(logits, targets)  # of the last layer, without softmax or sigmoid",
        (_T.WRONG_LOSS,),
    ),
    Treatment(
        "targets in the shape of the predictions",
        MENDING,
        loss.OwnPairs,
        "predictions and targets that are broadcast against each other",
        "targets = targets.reshape(predictions.shape)",
        (_T.WRONG_LOSS,),
    ),
    Treatment(
        "softmax over the classes",
        MENDING,
        loss.OwnAxis,
        "a softmax that runs over the batch, or over a single unit",
        "probabilities = logits.softmax(dim=-1)  # of a single unit: logits.sigmoid()",
        (_T.WRONG_LOSS,),
    ),
    Treatment(
        "targets between 0 and 1",
        MENDING,
        loss.TargetsAsShares,
        "targets of a binary cross-entropy that are no shares",
        "targets = targets / targets.max()  # such as masks / 255",
        (_T.WRONG_LOSS, _T.DATA_SCALE),
    ),
    Treatment(
        "labels as shares of one",
        MENDING,
        loss.LabelsAsShares,
        "several labels of a sample that a cross-entropy takes for one",
        "loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels)  # each label by itself",
        (_T.WRONG_LOSS,),
    ),
    Treatment(
        "labels of minus one and one",
        MENDING,
        labels.SignedLabels,
        "a loss of margins that is given labels of 0 and 1",
        "labels = 2 * labels - 1  # for hinge, margin and cosine embedding losses",
        (_T.WRONG_LOSS, _T.BAD_TARGETS),
    ),
    Treatment(
        "whole numbers that keep their differences",
        MENDING,
        labels.KeptDifferences,
        "targets that become one number when they are made whole",
        "# make numbers of classes whole before anything divides them: mask.long(), not (mask / 255).long()",
        (_T.BAD_TARGETS,),
        mistake=True,
        of_loop=True,
    ),
    Treatment(
        "no activation at the end",
        MENDING,
        loss.OpenEnd,
        "a last activation that cannot reach the targets",
        "# leave the activation behind the last layer away",
        (_T.WRONG_LOSS,),
    ),
    Treatment(
        "ReLU between linear layers",
        MENDING,
        passages.BentBetween,
        "linear layers that are one, because no activation lies between them",
        "torch.nn.ReLU()  # between layers that follow each other",
        (_T.CAPACITY,),
    ),
    Treatment(
        "no norm over a single number",
        MENDING,
        passages.OpenNorms,
        "norms over one number, which return their bias whatever it is",
        "# leave LayerNorm(1) and GroupNorm(c, c) of single places away, or norm over more",
        (_T.CAPACITY,),
    ),
    Treatment(
        "let gradients pass",
        MENDING,
        passages.OpenPassages,
        "gradients that no_grad, detach, NumPy or sample holds back between the weights and the loss",
        "# leave no_grad(), detach() and numpy() between the model and its loss away; rsample() in place of sample()",
        (_T.NOT_TRAINING, _T.STAGNATION),
    ),
    Treatment(
        "steps in single precision",
        MENDING,
        passages.LongWeights,
        "steps that are rounded away in half precision",
        "model.float()  # and torch.autocast(device, dtype=torch.bfloat16) around the forward pass",
        (_T.NOT_TRAINING, _T.STAGNATION),
    ),
    Treatment(
        "tie the copies",
        MENDING,
        passages.TiedCopies,
        "parameters that were meant to be the same and are copies",
        "second.weight = first.weight  # the same parameter, not a copy of it",
        (_T.DESYNC,),
    ),
    Treatment(
        "evaluate in evaluation mode",
        MENDING,
        passages.SteadyEvaluation,
        "dropout that acts in evaluation",
        "model.eval()  # before evaluation, model.train() after it; F.dropout(x, p, training=self.training)",
        (_T.EVAL_RANDOM,),
        mistake=True,
        of_loop=True,
    ),
)
"""In the order in which they are tried."""
