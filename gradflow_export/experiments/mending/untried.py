"""What no short run can confirm, and why."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from gradflow_export.records import loss_mistakes as known
from gradflow_export.records.issues import IssueType

UNTRIED: Mapping[IssueType, str] = MappingProxyType({
    IssueType.OVERFITTING: "it shows in evaluation after many epochs, and a trial has only a few training steps",
    IssueType.RECURRENT_SUBCRITICAL: "what is forgotten matters over long sequences, which few steps do not learn",
    IssueType.MEMORY_USAGE: "a trial has its own memory limit, and using less needs a smaller batch or model",
    IssueType.MEMORY_LEAK: "a reference in the script keeps the memory, and no outside change can drop it",
    IssueType.HEAD_REDUNDANCY: "redundant heads waste capacity, which the loss of a few steps does not show",
    IssueType.EXCESS_EXPLORATION: "the entropy bonus is part of the script's loss, and returns need many more steps",
    IssueType.ROTATION: "adversarial losses cannot be compared, and a cycle lasts longer than a trial",
})  # fmt: skip
"""Why no trial can confirm an issue of these types; of all others there is a treatment."""
UNTRIED_CAUSES: Mapping[str, str] = MappingProxyType({
    known.DRAWN_TOGETHER: "the loss of a collapsed model is the lowest of all, so that a lower one shows nothing",
    known.WITH_ITSELF: "the pairs are drawn by the script",
    known.OWN_POSITIVES: "the views are made by the script, and their loss is higher when they differ",
    known.PENALTY_TURNED: "without the penalty it is another loss, and the two cannot be compared",
    known.WITHOUT_BOUND: "which of the two signs is wrong depends on what the script means",
    known.OVERLAP_MINIMISED: "with the other sign it is another loss, and the two cannot be compared",
    known.ONE_NUMBER: "which of the outputs is meant only the script knows",
    known.DIMENSIONS_MIXED: "it stands in the code of the model, whose author alone knows the dimensions",
    known.FOCAL_OF_MEAN: "another weight for each sample is another loss, and the two cannot be compared",
})  # fmt: skip
"""Why no trial can confirm these causes, though there are treatments for others of their type."""
