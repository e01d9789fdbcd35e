"""Targets that are all the same, sorted, unrelated to the inputs, copied from them, or ignored: BAD_TARGETS."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from gradflow_export.records.statistics import median
from gradflow_export.records.step_record import Issue, IssueType, Severity, StepRecord
from gradflow_export.rules.base import Check, Finding, number
from gradflow_export.rules.evidence import layers_of, no_better, past, seen, still_falls
from gradflow_export.rules.history import History
from gradflow_export.rules.sampled import margins


@dataclass(frozen=True, kw_only=True)
class ConstantTargets(Check):
    """Find targets that are all the same, which teach a model to ignore its input.

    Only where a layer of the model itself makes the predictions and no other network takes part, or where each sample
    chooses among those of the batch: the targets of a game's player, or of a contrastive loss that puts the right
    answer first, are constant on purpose.

    Why it is bad:
        One constant output has the least loss: the model learns to ignore its inputs, and the loss goes to 0 as if all
        were well.

    Example:
        dataset = [(x, 0) for x in images]  # the label was lost on the way

    Use instead:
        dataset = list(zip(images, labels))

    Not reported:
        Fewer than 128 targets or 8 batches were read; another network takes part, as in a game; the targets are the
        right answers of a contrastive loss, which puts each before the wrong ones of its own.

    Attributes:
        samples: Least number of targets seen.
        readings: Least number of readings in which they were.
    """

    samples: int = 128
    readings: int = 8
    patience: int = 1

    name: ClassVar[str] = "constant-targets"
    raises: ClassVar[tuple[IssueType, ...]] = (IssueType.BAD_TARGETS,)
    evidence: ClassVar[tuple[str, ...]] = ("target.distinct",)
    remembers: ClassVar[tuple[str, ...]] = ("target.distinct",)

    def check(self, record: StepRecord, history: History) -> tuple[Finding, ...]:
        """Judge the targets seen so far."""
        for site in layers_of(record, "target.distinct"):
            counts = past(history, "target.distinct", site)
            rows = seen(record, "target.rows", site) or 0.0
            if len(counts) < self.readings or counts.max() > 1 or rows < self.samples:
                continue
            return (
                Finding(
                    IssueType.BAD_TARGETS,
                    Severity.HIGH,
                    ("target",),
                    1.0,
                    2.0,
                    f"All {number(rows)} targets read so far, from {len(counts)} or more batches, are the same.",
                    "check the targets of the loader, print(torch.unique(targets, return_counts=True)); if the "
                    "data are sorted by class, use DataLoader(dataset, shuffle=True).",
                    cause="constant",
                ),
            )
        return ()


@dataclass(frozen=True, kw_only=True)
class SortedTargets(Check):
    """Find batches that hold one class each, though there are several: samples come in the order of their classes.

    Each step then forgets the classes before. Classes that are rare leave most batches without them too; where the
    entropy of the targets is at least ``mixed``, no class is as frequent as that. Two classes may be two kinds of pass.

    Numbers that are one for all samples of each batch, and another in nearly every batch, are no targets of samples:
    they were averaged over the batch on the way to the loss, which is WRONG_LOSS. A batch may be of one thing that has
    one answer; there the loss falls below ``learned`` of the best constant's.

    Why it is bad:
        Each step moves the model towards the one class of its batch and away from all others: what was learned of a
        class is lost when the next one comes.

    Example:
        loader = DataLoader(dataset_sorted_by_class, batch_size=32)

    Use instead:
        loader = DataLoader(dataset_sorted_by_class, batch_size=32, shuffle=True)

    Not reported:
        Fewer than three classes; batches below four samples; classes that are rare, where one class is most of the
        data.

    Attributes:
        share: Least share of the readings in which all targets were the same.
        mixed: Least entropy of the targets seen.
        kinds: Fewest classes seen.
        size: Fewest samples of a batch.
        levels: Fewest different numbers among ten batches of one number each.
        learned: Least share of the best constant's loss for these.
        readings: Fewest readings.
    """

    size: int = 4
    share: float = 0.6
    mixed: float = 0.65
    kinds: int = 3
    levels: int = 7
    learned: float = 0.4
    readings: int = 10
    patience: int = 2

    name: ClassVar[str] = "sorted-targets"
    raises: ClassVar[tuple[IssueType, ...]] = (IssueType.BAD_TARGETS, IssueType.WRONG_LOSS)
    evidence: ClassVar[tuple[str, ...]] = ("target.uniform_share",)
    remembers: ClassVar[tuple[str, ...]] = ("target.uniform_share", "loss.over_constant")

    def check(self, record: StepRecord, history: History) -> tuple[Finding, ...]:
        """Judge the targets seen so far."""
        for site in layers_of(record, "target.uniform_share"):
            levels = seen(record, "target.levels", site) or 0.0
            if levels >= self.levels and seen(record, "target.uniform_share", site) == 1.0:
                if no_better(history, site, self.learned, 5) is None:
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
                    ),
                )
            uniform, kinds = (
                seen(record, "target.uniform_share", site) or 0.0,
                seen(record, "target.distinct", site) or 0.0,
            )
            entropy, count = seen(record, "loss.constant", site) or 0.0, seen(record, "loss.samples", site) or 0.0
            few = count < self.size or len(past(history, "target.uniform_share", site)) < self.readings
            mixed = uniform < self.share or kinds < self.kinds or entropy < self.mixed
            if few or mixed or not seen(record, "loss.choice", site):
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
                    "shuffle: DataLoader(dataset, batch_size=32, shuffle=True); for a streamed dataset, use a "
                    "shuffle buffer that holds many classes.",
                    cause="sorted",
                ),
            )
        return ()


@dataclass(frozen=True, kw_only=True)
class UnrelatedTargets(Check):
    """Find targets that have nothing to do with the inputs, as when one of the two was shuffled alone.

    Three things have to come together, each of which is harmless alone. The loss lies at the level of the best constant
    answer and does not fall any more. Kernel tests on at least ``tested`` different samples, and an F-test of a linear
    relation on all that are remembered, find no trace of dependence: the greatest z is below ``sure`` now, and below
    ``usual`` in the middle of the last five readings (a linear relation to one of ten features that explains a fifth of
    the variance gives about 5 with 128 samples, a parity of three bits among twenty 5 with 256; one of five bits they
    cannot see).

    And gradients of consecutive batches do not agree, so that no direction helps them all; after ``many`` tests that
    need not be, since answers that are learned by heart, or a mean over places, have directions, and the loss may lie
    as low as ``heart``. In the first ``settle`` steps nothing is said.

    Why it is bad:
        There is nothing to learn: the loss rests at the level of a constant prediction, and later the model learns the
        training set by heart.

    Example:
        x = x[torch.randperm(len(x))]  # the targets keep their order
        loader = DataLoader(TensorDataset(x, y), batch_size=32)

    Use instead:
        order = torch.randperm(len(x))
        loader = DataLoader(TensorDataset(x[order], y[order]), batch_size=32)

    Not reported:
        The loss falls, or is below 0.95 of the best constant's; fewer than 128 samples; consecutive gradients agree; a
        dependence that only shows in products of four and more features.

    Source: Bierens 1982, Journal of Econometrics 20; Zhang et al. 2017, arXiv:1611.03530.

    Attributes:
        tested: Least number of different samples tested.
        sure: Least z-score that counts as dependence.
        level: Least share of the best constant's loss.
        agree: Least typical cosine of consecutive gradients that counts as agreement.
        settle: Steps in which a model may find its feet.
        usual: Least typical z-score of the last tests that counts as dependence.
        many: Tests after which they are trusted further.
        heart: Least share of the best constant's loss then.
    """

    usual: float = 2.0
    many: int = 6
    heart: float = 0.85
    tested: int = 128
    sure: float = 3.0
    level: float = 0.95
    agree: float = 0.3
    settle: int = 50
    patience: int = 2

    name: ClassVar[str] = "unrelated-targets"
    order: ClassVar[int] = 60
    raises: ClassVar[tuple[IssueType, ...]] = (IssueType.BAD_TARGETS,)
    evidence: ClassVar[tuple[str, ...]] = ("target.dependence",)
    remembers: ClassVar[tuple[str, ...]] = (
        "loss",
        "loss.over_constant",
        "target.dependence",
        "gradient.cosine",
        "gradient.cosine_error",
        "target.uniform_share",
    )

    def check(self, record: StepRecord, history: History) -> tuple[Finding, ...]:
        """Judge the newest test."""
        for site in layers_of(record, "target.dependence"):
            z, rows = seen(record, "target.dependence", site), seen(record, "target.tested", site) or 0.0
            if z is None or not z < self.sure or rows < self.tested or record.step < self.settle:
                continue
            tests = past(history, "target.dependence", site)
            # Over many tasks targets may not depend on the inputs where weights are adapted to each of them.
            tasks = not seen(record, "loss.known", site) or seen(record, "target.distinct", site) is None
            if tasks or median(tests[-5:]) >= self.usual:
                continue
            share = no_better(history, site, self.level, 5)
            agreement = (history.run("gradient.cosine").values + margins(history, "gradient.cosine"))[-30:]
            if len(agreement) < 20 or (share is not None and median(np.asarray(agreement)) >= self.agree):
                share = None
            if share is None and len(tests) >= self.many:
                share = no_better(history, site, self.heart, 8)
            uniform = seen(record, "target.uniform_share", site) or 0.0
            if share is None or uniform > 0.5 or still_falls(history):
                continue
            return (
                Finding(
                    IssueType.BAD_TARGETS,
                    Severity.HIGH,
                    ("target",),
                    z,
                    self.sure,
                    f"The targets do not depend on the inputs (z = {number(z)} over {number(rows)} samples), the "
                    f"loss stays at {number(100 * share)} % of that of the best constant prediction, and gradients "
                    "of consecutive batches do not agree.",
                    "compare some samples with their targets, and shuffle both with the same permutation, order = "
                    "torch.randperm(len(x)); x, y = x[order], y[order], or use one DataLoader(TensorDataset(x, y), "
                    "shuffle=True).",
                    cause="unrelated",
                    follows_from=(IssueType.WRONG_LOSS, IssueType.DATA_SCALE, IssueType.NOT_TRAINING),
                ),
            )
        return ()

    def refuted(self, issue: Issue, history: History) -> bool:
        """Whether the last two tests found a dependence at every loss: later on there are few."""
        tests = [past(history, "target.dependence", site)[-2:] for site in history.at_sites("target.dependence").sites]
        return bool(tests) and min(map(median, tests)) >= self.sure


@dataclass(frozen=True, kw_only=True)
class CopiedTargets(Check):
    """Find words that are to be predicted from themselves: each target is the word that entered at its own place.

    The loss goes to 0 within some steps, and nothing is learned of what comes next. Only where a path leads from each
    word to its own prediction; hidden words are other words, and what does not count is left out.

    Why it is bad:
        The model learns to copy its input. The loss goes to 0 within some steps, and generated text repeats the prompt.

    Example:
        logits = model(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1), tokens.flatten())

    Use instead:
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    Not reported:
        No path leads from a word to its own prediction, as where it is hidden; what does not count in the loss.

    Attributes:
        readings: Fewest readings in which all were the same.
    """

    readings: int = 4
    patience: int = 2

    name: ClassVar[str] = "copied-targets"
    raises: ClassVar[tuple[IssueType, ...]] = (IssueType.BAD_TARGETS,)
    evidence: ClassVar[tuple[str, ...]] = ("target.copied",)
    remembers: ClassVar[tuple[str, ...]] = ("target.copied",)

    def check(self, record: StepRecord, history: History) -> tuple[Finding, ...]:
        """Judge the words read so far."""
        for site in layers_of(record, "target.copied"):
            shares = past(history, "target.copied", site)
            if len(shares) < self.readings or not bool((shares == 1.0).all()):
                continue
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
        return ()


@dataclass(frozen=True, kw_only=True)
class EmptyLoss(Check):
    """Find losses that are exactly 0, and send back nothing, from the first step on: no target counts.

    A loss that starts at 0 by the data alone would differ from it for one sample in ``least`` batches.

    Why it is bad:
        A loss of exactly 0 looks solved and sends back nothing: no target counts, often because all of them are
        padding.

    Example:
        labels = torch.full_like(tokens, -100)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")

    Use instead:
        labels = tokens.masked_fill(tokens == pad, -100)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    Not reported:
        One loss of 20 or one gradient was not 0.

    Attributes:
        least: Fewest losses, and half as many gradients, before anything is said.
    """

    least: int = 20
    patience: int = 1
    heal: int = 1

    name: ClassVar[str] = "empty-loss"
    late: ClassVar[bool] = True
    raises: ClassVar[tuple[IssueType, ...]] = (IssueType.BAD_TARGETS,)
    needs: ClassVar[tuple[str, ...]] = ("loss",)
    remembers: ClassVar[tuple[str, ...]] = ("loss", "gradient.total_norm")

    def check(self, record: StepRecord, history: History) -> tuple[Finding, ...]:
        """Judge all losses so far."""
        loss, gradient = history.run("loss"), history.run("gradient.total_norm")
        if loss.count < self.least or 2 * gradient.count < self.least:
            return ()
        if not (loss.low == loss.high == gradient.low == gradient.high == 0.0):
            return ()
        return (
            Finding(
                IssueType.BAD_TARGETS,
                Severity.HIGH,
                ("target",),
                0.0,
                0.0,
                f"All {loss.count} losses up to step {record.step} were exactly 0, and so was every gradient: every "
                "target is masked or ignored.",
                "check that unmasked targets remain: (labels != -100).sum() must not be 0; check the mask, "
                "ignore_index and the weights of the loss.",
                since=int(loss.steps[0]) if loss.count <= len(loss.steps) else 1,
                cause="empty",
            ),
        )
