"""Targets that do not depend on the inputs: BAD_TARGETS."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from gradflow_export.records.statistics import median
from gradflow_export.records.step_record import Issue, IssueType, Severity, StepRecord
from gradflow_export.rules.base import Check, Finding, number, surest
from gradflow_export.rules.evidence import (
    INVERTED_MASK,
    constant_level,
    layers_of,
    no_better,
    none_better,
    past,
    seen,
    still_falls,
)
from gradflow_export.rules.history import History
from gradflow_export.rules.sampled import margins


@dataclass(frozen=True, kw_only=True)
class UnrelatedTargets(Check):
    """Report targets that do not depend on the inputs, for example because one of the two was shuffled separately.

    Three conditions must hold together. First, the loss is at the level of the best constant prediction, or above it,
    and does not fall below it. Second, kernel tests on at least ``tested`` different samples, and an F-test of a linear
    relation on all stored samples, find no dependence: the largest z-score is below ``sure`` now, and below ``usual``
    in the median of the last five readings. For comparison, a linear relation to one of ten features that explains a
    fifth of the variance gives a z-score of about 5 with 128 samples; a parity of three bits among twenty gives 5 with
    256; a parity of five bits is not detected.

    Third, gradients of consecutive batches do not agree, so no direction improves them all. After ``many`` tests this
    is not required, because memorized targets, or a mean over positions, have such directions, and the loss may then be
    as low as ``heart``. Nothing is reported in the first ``settle`` steps.

    Why it is bad:
        There is nothing to learn. The loss stays at the level of a constant prediction, and later the model memorizes
        the training set.

    Example:
        x = x[torch.randperm(len(x))]  # the targets keep their order
        loader = DataLoader(TensorDataset(x, y), batch_size=32)

    Use instead:
        order = torch.randperm(len(x))
        loader = DataLoader(TensorDataset(x[order], y[order]), batch_size=32)

    Not reported:
        The loss falls below that of the best constant prediction, or is below 0.95 of it; fewer than 128 samples;
        consecutive gradients agree; predictions for new samples go with their targets; inputs of one to three numbers
        of words, as of a user and an item; a dependence that exists only in products of four or more features.

    Source: Bierens 1982, Journal of Econometrics 20; Zhang et al. 2017, arXiv:1611.03530.

    Attributes:
        tested: Minimum number of different samples tested.
        sure: Minimum z-score that counts as dependence.
        level: Minimum fraction of the loss of the best constant prediction.
        agree: Minimum typical cosine of consecutive gradients that counts as agreement.
        settle: Number of initial steps without a verdict.
        usual: Minimum typical z-score of the last tests that counts as dependence.
        many: Number of tests after which gradients need not disagree.
        heart: Minimum fraction of the loss of the best constant prediction then.
        repeated: Maximum fraction of samples that came before, where predictions that go with targets count as
            dependence.
    """

    usual: float = 2.0
    many: int = 6
    heart: float = 0.85
    repeated: float = 0.02
    tested: int = 128
    sure: float = 3.0
    level: float = 0.95
    agree: float = 0.3
    settle: int = 50
    patience: int = 2

    order: ClassVar[int] = 60
    raises: ClassVar[tuple[IssueType, ...]] = (IssueType.BAD_TARGETS,)
    evidence: ClassVar[tuple[str, ...]] = ("target.dependence",)
    remembers: ClassVar[tuple[str, ...]] = (
        "loss",
        "loss.over_constant",
        "loss.sense",
        "target.dependence",
        "target.repeated",
        "gradient.cosine",
        "gradient.cosine_error",
        "target.uniform_share",
    )

    def check(self, record: StepRecord, history: History) -> tuple[Finding, ...]:
        """Judge the newest test."""
        return surest(
            each for site in layers_of(record, "target.dependence") for each in self._of(record, history, site)
        )

    def _of(self, record: StepRecord, history: History, site: str) -> Iterable[Finding]:
        """Yield targets that show no dependence, for sure where there were samples enough, and nothing is learned."""
        z, rows = seen(record, "target.dependence", site), seen(record, "target.tested", site) or 0.0
        # Over many tasks targets may not depend on the inputs where weights are adapted to each of them.
        tasks = not seen(record, "loss.known", site) or seen(record, "target.distinct", site) is None
        if z is None or not z < self.sure or tasks:
            return
        tests = past(history, "target.dependence", site)
        share = no_better(history, site, self.level, 5)
        agreement = (history.run("gradient.cosine").values + margins(history, "gradient.cosine"))[-30:]
        if len(agreement) < 20 or (share is not None and median(np.asarray(agreement)) >= self.agree):
            share = None
        if share is None and len(tests) >= self.many:
            share = no_better(history, site, self.heart, 8)
        uniform = seen(record, "target.uniform_share", site) or 0.0
        enough = rows >= self.tested and history.seen >= self.settle and median(tests[-5:]) < self.usual
        # Down to the level of the best constant a loss falls without the inputs.
        falls = still_falls(history, most=constant_level(history))
        learns = share is None or uniform > 0.5 or falls or self._answered(history, site, self.usual)
        yield Finding(
            IssueType.BAD_TARGETS,
            Severity.HIGH,
            ("target",),
            z,
            self.sure,
            f"The targets do not depend on the inputs (z = {number(z)} over {number(rows)} samples), the loss stays "
            f"at {number(100 * (share or 0.0))} % of that of the best constant prediction, and gradients of "
            "consecutive batches do not agree.",
            "compare some samples with their targets, and shuffle both with the same permutation, order = "
            "torch.randperm(len(x)); x, y = x[order], y[order], or use one DataLoader(TensorDataset(x, y), "
            "shuffle=True).",
            cause="unrelated",
            origin="unrelated",
            follows_from=(IssueType.WRONG_LOSS, IssueType.DATA_SCALE, IssueType.NOT_TRAINING, INVERTED_MASK),
            sure=enough and not learns,
        )

    def lasts(self, issue: Issue, history: History) -> bool:
        """Return whether no loss is better than a constant still; a test that is nearly positive is no end of it."""
        return none_better(history, self.level, 5) is not None and not self.refuted(issue, history)

    def refuted(self, issue: Issue, history: History) -> bool:
        """Whether at every loss the last two tests found a dependence, later on there are few, or the model did."""
        sites = history.at_sites("target.dependence").sites
        return bool(sites) and all(
            median(past(history, "target.dependence", site)[-2:]) >= self.sure
            or self._answered(history, site, self.sure)
            for site in sites
        )

    def _answered(self, history: History, site: str, least: float) -> bool:
        """Whether the model answers samples that it has not seen before better than by chance."""
        goes, again = past(history, "loss.sense", site), past(history, "target.repeated", site)
        new = len(again) > 0 and float(again[-1]) <= self.repeated
        return new and len(goes) > 0 and float(goes.sum()) >= least * len(goes) ** 0.5
