"""Targets that are all the same, sorted, unrelated to the inputs, copied from them, or ignored: BAD_TARGETS."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from gradflow_export.records.statistics import median
from gradflow_export.records.step_record import IssueType, Severity, StepRecord
from gradflow_export.records.verdict import own_losses
from gradflow_export.rules.base import Check, Finding, number
from gradflow_export.rules.evidence import layers_of, no_better, past, seen
from gradflow_export.rules.history import History


@dataclass(frozen=True, kw_only=True)
class ConstantTargets(Check):
    """Report targets that are all the same, which teach a model to ignore its input.

    Checked only if a layer of the model itself makes the predictions and no other network takes part, or if each sample
    chooses among those of the batch. The targets of a GAN's player, or of a contrastive loss that puts the positive
    first, are constant by design.

    Why it is bad:
        One constant output minimizes the loss. The model learns to ignore its inputs, and the loss goes to 0 as if
        training worked.

    Example:
        dataset = [(x, 0) for x in images]  # the label was lost on the way

    Use instead:
        dataset = list(zip(images, labels))

    Not reported:
        Other terms have targets that differ (LOW); fewer than 128 targets or 8 batches were read; another network
        takes part, as in a GAN, or several optimizers have losses of their own; the targets are class 0 of a
        contrastive loss, which puts each positive before its negatives.

    Attributes:
        samples: Minimum number of targets read.
        readings: Minimum number of readings that contain them.
    """

    samples: int = 128
    readings: int = 8
    patience: int = 1

    raises: ClassVar[tuple[IssueType, ...]] = (IssueType.BAD_TARGETS,)
    evidence: ClassVar[tuple[str, ...]] = ("target.distinct",)
    remembers: ClassVar[tuple[str, ...]] = ("target.distinct",)

    def check(self, record: StepRecord, history: History) -> tuple[Finding, ...]:
        """Judge the targets seen so far."""
        # Beside targets that differ, constant ones are a penalty on what a layer gives, as on activations.
        differ = np.nanmax(history.at_sites("target.distinct").values, initial=0.0) > 1
        for site in () if own_losses(record.get("optimizer.loss")) else layers_of(record, "target.distinct"):
            counts, rows = past(history, "target.distinct", site), seen(record, "target.rows", site) or 0.0
            if len(counts) >= self.readings and counts.max() <= 1 and rows >= self.samples:
                return (
                    Finding(
                        IssueType.BAD_TARGETS,
                        Severity.LOW if differ else Severity.HIGH,
                        ("target",),
                        1.0,
                        2.0,
                        f"All {number(rows)} targets read so far, from {len(counts)} or more batches, are the same.",
                        "check torch.unique(targets, return_counts=True); if sorted by class, use shuffle=True.",
                        cause="constant",
                        origin="constant",
                    ),
                )
        return ()


@dataclass(frozen=True, kw_only=True)
class SortedTargets(Check):
    """Report batches that contain one class each, because the samples are sorted by class.

    Each step then forgets the classes before. Most batches may lack a rare class; if the entropy of the targets is at
    least ``mixed``, no class is that frequent. With two classes, the batches may come from two kinds of passes.

    If the targets of each batch are a single number, which differs between nearly all batches, they were averaged over
    the batch on the way to the loss; this is WRONG_LOSS. A batch may also consist of one object with one target; the
    loss then falls below ``learned`` of that of the best constant prediction.

    Why it is bad:
        Each step moves the model towards the class of its batch and away from all others. What was learned about a
        class is lost in the next batches.

    Example:
        loader = DataLoader(dataset_sorted_by_class, batch_size=32)

    Use instead:
        loader = DataLoader(dataset_sorted_by_class, batch_size=32, shuffle=True)

    Not reported:
        Fewer than three classes; batches of fewer than four samples; data dominated by one class.

    Attributes:
        share: Minimum fraction of the readings in which all targets were the same.
        mixed: Minimum entropy of the targets read.
        kinds: Minimum number of classes.
        size: Minimum number of samples in a batch.
        levels: Minimum number of different values among ten batches with one value each.
        learned: Minimum fraction of the loss of the best constant prediction for these.
        settle: Number of steps in which a code book may have one code in use.
        readings: Minimum number of readings.
    """

    size: int = 4
    share: float = 0.6
    mixed: float = 0.65
    kinds: int = 3
    levels: int = 7
    learned: float = 0.4
    settle: int = 40
    readings: int = 10
    patience: int = 2

    raises: ClassVar[tuple[IssueType, ...]] = (IssueType.BAD_TARGETS, IssueType.WRONG_LOSS)
    evidence: ClassVar[tuple[str, ...]] = ("target.uniform_share",)
    remembers: ClassVar[tuple[str, ...]] = ("target.uniform_share", "loss.over_constant")

    def check(self, record: StepRecord, history: History) -> tuple[Finding, ...]:
        """Judge the targets seen so far."""
        for site in layers_of(record, "target.uniform_share"):
            levels, uniform, kinds, entropy, count, chooses = (
                seen(record, fact, site) or 0.0
                for fact in (
                    "target.levels",
                    "target.uniform_share",
                    "target.distinct",
                    "loss.constant",
                    "loss.samples",
                    "loss.choice",
                )
            )
            if levels >= self.levels and uniform == 1.0:
                if history.seen < self.settle or no_better(history, site, self.learned, 5) is None:
                    continue
                return (
                    Finding(
                        IssueType.WRONG_LOSS,
                        Severity.MEDIUM,
                        ("loss",),
                        levels,
                        float(self.levels),
                        "All predictions of a batch are compared with a single number, which differs between "
                        "batches: the targets were averaged over the batch, or one target was broadcast to all "
                        "samples.",
                        "pass one target per sample, criterion(outputs, targets), with equal shapes, and average "
                        "only the loss; look for targets.mean(0) or expand() in the data pipeline.",
                        cause="averaged targets",
                        origin="averaged targets",
                    ),
                )
            few = count < self.size or len(past(history, "target.uniform_share", site)) < self.readings
            mixed = uniform < self.share or kinds < self.kinds or entropy < self.mixed
            if few or mixed or not chooses:
                continue
            return (
                Finding(
                    IssueType.BAD_TARGETS,
                    Severity.MEDIUM,
                    ("target",),
                    uniform,
                    self.share,
                    f"{number(100 * uniform)} % of the batches contain a single class, although there are "
                    f"{number(kinds)} classes: the data are sorted by class, and each batch undoes what earlier "
                    "ones taught.",
                    "use DataLoader(dataset, shuffle=True); for a streamed dataset, a shuffle buffer of many classes.",
                    cause="sorted",
                    origin="sorted",
                ),
            )
        return ()


@dataclass(frozen=True, kw_only=True)
class CopiedTargets(Check):
    """Report tokens that are predicted from themselves: each target equals the input token at the same position.

    The loss goes to 0 within some steps, and the model does not learn to predict the next token. Checked only if a path
    leads from each token to its own prediction, so masked tokens do not count. Ignored targets are excluded.

    Also reported: at least ``padding`` of the targets are padding where the input is padding too, by the
    ``padding_idx`` of an embedding.

    Why it is bad:
        The model learns to copy its input. The loss goes to 0 within some steps, and generated text repeats the prompt.
        Padding is learned at once, and a mean over it hides the loss of what matters.

    Example:
        logits = model(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1), tokens.flatten())

    Use instead:
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    Not reported:
        No path leads from a token to its own prediction, for example because it is masked; targets that the loss
        ignores.

    Attributes:
        readings: Minimum number of readings in which all targets were equal to the inputs.
        padding: Minimum fraction of targets that are padding, at the median.
    """

    readings: int = 4
    padding: float = 0.5
    patience: int = 2

    raises: ClassVar[tuple[IssueType, ...]] = (IssueType.BAD_TARGETS,)
    evidence: ClassVar[tuple[str, ...]] = ("target.copied", "target.padded")
    remembers: ClassVar[tuple[str, ...]] = evidence

    def check(self, record: StepRecord, history: History) -> tuple[Finding, ...]:
        """Judge the words read so far."""
        for site in layers_of(record, "target.copied"):
            shares = past(history, "target.copied", site)
            if len(shares) >= self.readings and shares.min() == 1.0:
                return (
                    Finding(
                        IssueType.BAD_TARGETS,
                        Severity.HIGH,
                        ("target",),
                        1.0,
                        1.0,
                        f"Each target equals the input token at the same position, in {len(shares)} batches: the model "
                        "only has to copy its input.",
                        "shift the targets by one, inputs, targets = tokens[:, :-1], tokens[:, 1:]; a model that "
                        "shifts them itself (labels= in Hugging Face) takes unshifted targets.",
                        cause="copied",
                        origin="targets are the inputs",
                    ),
                )
            padded = past(history, "target.padded", site)
            if len(padded) >= self.readings and median(padded) >= self.padding:
                return (
                    Finding(
                        IssueType.BAD_TARGETS,
                        Severity.MEDIUM,
                        ("target",),
                        median(padded),
                        self.padding,
                        f"{number(100 * median(padded))} % of the targets are padding, where the input is padding too: "
                        "the loss is mostly of what nobody wants to predict.",
                        "leave padding out of the loss: nn.CrossEntropyLoss(ignore_index=embedding.padding_idx), or "
                        "set these targets to -100.",
                        cause="padding",
                        origin="padding counts",
                    ),
                )
        return ()


@dataclass(frozen=True, kw_only=True)
class EmptyLoss(Check):
    """Report losses that are exactly 0, without any gradient, from the first step on: all targets are ignored.

    If the data alone caused a loss of 0, it would differ from 0 for one sample in ``least`` batches.

    Why it is bad:
        A loss of exactly 0 looks solved but has no gradient. No target counts, often because all of them are padding.

    Example:
        labels = torch.full_like(tokens, -100)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")

    Use instead:
        labels = tokens.masked_fill(tokens == pad, -100)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    Not reported:
        One of 20 losses, or one gradient, was not 0.

    Attributes:
        least: Minimum number of losses before anything is reported.
    """

    least: int = 20
    patience: int = 1
    heal: int = 1

    late: ClassVar[bool] = True
    raises: ClassVar[tuple[IssueType, ...]] = (IssueType.BAD_TARGETS,)
    needs: ClassVar[tuple[str, ...]] = ("loss",)
    remembers: ClassVar[tuple[str, ...]] = ("loss", "gradient.total_norm")

    def check(self, record: StepRecord, history: History) -> tuple[Finding, ...]:
        """Judge all losses so far."""
        loss, gradient = history.run("loss"), history.run("gradient.total_norm")
        if loss.count < self.least or not loss.low == loss.high == gradient.low == gradient.high == 0.0:
            return ()
        return (
            Finding(
                IssueType.BAD_TARGETS,
                Severity.HIGH,
                ("target",),
                0.0,
                0.0,
                f"All {loss.count} losses up to step {record.step} and all gradients were 0: each target is ignored.",
                "check that unmasked targets remain: (labels != -100).sum() must not be 0; check the mask, "
                "ignore_index and the weights of the loss.",
                since=1,
                cause="empty",
                origin="empty",
            ),
        )
