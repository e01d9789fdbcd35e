"""Targets that have nothing to do with the inputs, and targets that are the inputs: BAD_TARGETS."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from gradflow_export.records.statistics import median
from gradflow_export.records.step_record import IssueType, Severity, StepRecord
from gradflow_export.rules.base import Finding, Rule, number
from gradflow_export.rules.evidence import layers_of, no_better, past, seen, still_falls
from gradflow_export.rules.history import History
from gradflow_export.rules.sampled import margins


@dataclass(frozen=True, kw_only=True)
class UnrelatedTargets(Rule):
    """Find targets that have nothing to do with the inputs, as when one of the two was shuffled alone.

    Three things have to come together, each of which is harmless alone. The loss lies at the level of the best
    constant answer and does not fall any more. Kernel tests on at least ``tested`` different samples find no trace of
    dependence: the greatest z is below ``sure`` now, and below ``usual`` in the middle of the last five readings (a
    linear relation to one of ten features that explains a fifth of the variance gives about 5 with 128 samples, a
    parity of three bits among twenty 5 with 256; one of five bits they cannot see). And gradients of consecutive
    batches do not agree, so that no direction helps them all; after ``many`` tests that need not be, since answers that
    are learned by heart, or a mean over places, have directions, and the loss may lie as low as ``heart``. In the first
    ``settle`` steps nothing is said.

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
            if not seen(record, "loss.known", site):
                continue
            tests = past(history, "target.dependence", site)
            if median(tests[-5:]) >= self.usual:
                continue
            share = no_better(history, site, self.level, 5)
            agreement = (history.run("gradient.cosine").values + margins(history, "gradient.cosine"))[-30:]
            if len(agreement) < 20 or (share is not None and median(np.asarray(agreement)) >= self.agree):
                share = None
            if share is None and len(tests) >= self.many:
                share = no_better(history, site, self.heart, 8)
            if share is None:
                continue
            if (seen(record, "target.uniform_share", site) or 0.0) > 0.5 or still_falls(history):
                continue
            return (
                Finding(
                    IssueType.BAD_TARGETS,
                    Severity.HIGH,
                    ("target",),
                    z,
                    self.sure,
                    f"Targets show no dependence on the inputs (z = {number(z)} over {number(rows)} samples), the loss "
                    f"stays at {number(share)} times that of the best constant answer, and gradients of consecutive "
                    "batches do not agree.",
                    "look at some samples with their targets, and keep them together: shuffle with one order, order = "
                    "torch.randperm(len(x)); x, y = x[order], y[order], or in one DataLoader(TensorDataset(x, y), "
                    "shuffle=True).",
                    cause="unrelated",
                    follows_from=(IssueType.WRONG_LOSS, IssueType.DATA_SCALE),
                ),
            )
        return ()


@dataclass(frozen=True, kw_only=True)
class CopiedTargets(Rule):
    """Find words that are to be told from themselves: each target is the word that entered at its own place.

    The loss goes to 0 within some steps, and nothing is learned of what comes next. Only where a path leads from each
    word to its own prediction; hidden words are other words, and what does not count is left out.

    Attributes:
        readings: Fewest readings in which all were the same.
    """

    readings: int = 4
    patience: int = 2

    name: ClassVar[str] = "copied-targets"
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
                    f"Each target is the very word that entered at its place, in {len(shares)} batches: the model sees "
                    "the answer, and learns to copy it.",
                    "move the targets on by one, inputs, targets = tokens[:, :-1], tokens[:, 1:]; a model that does so "
                    "itself (labels= of Hugging Face) is given them as they are.",
                    cause="copied",
                    origin="targets are the inputs",
                ),
            )
        return ()
