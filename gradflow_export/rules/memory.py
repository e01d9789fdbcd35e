"""Memory of the process and the device: MEMORY_USAGE, MEMORY_LEAK."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from gradflow_export.records.statistics import median, theil_sen_bounds
from gradflow_export.records.step_record import IssueType, Severity, StepRecord
from gradflow_export.rules.base import Finding, Rule, number
from gradflow_export.rules.evidence import Floats
from gradflow_export.rules.history import History


@dataclass(frozen=True, kw_only=True)
class MemoryUsage(Rule):
    """Report a process or device that is about to run out of memory.

    Attributes:
        share: Fraction of the memory of the machine, container or device that is in use.
    """

    share: float = 0.9

    needs: ClassVar[tuple[str, ...]] = ("runtime.rss", "runtime.cuda_reserved")
    remembers: ClassVar[tuple[str, ...]] = ("runtime.memory_limit", "runtime.cuda_limit")
    quiet: ClassVar[bool] = False

    def check(self, record: StepRecord, history: History) -> tuple[Finding, ...]:
        """Compare what is used with what there is."""
        pairs = (
            (
                "runtime.rss",
                "runtime.memory_limit",
                "resident memory",
                "load less data at a time, or use fewer workers",
            ),
            (
                "runtime.cuda_reserved",
                "runtime.cuda_limit",
                "device memory",
                "use a smaller batch or torch.utils.checkpoint",
            ),
        )
        found = []
        for used_name, limit_name, what, advice in pairs:
            used, limit = record.value(used_name), history.run(limit_name).last
            if used is not None and limit > 0 and used > self.share * limit:
                found.append(
                    Finding(
                        IssueType.MEMORY_USAGE,
                        Severity.HIGH,
                        ("",),
                        used,
                        self.share * limit,
                        f"{what} is {number(used)} MB of {number(limit)} MB.",
                        f"{advice}; delete tensors that are no longer needed before the next step.",
                        cause=used_name,
                    )
                )
        return tuple(found)


@dataclass(frozen=True, kw_only=True)
class MemoryLeak(Rule):
    """Report memory use that grows with every step and does not level off.

    The first fifth of the run is ignored, because allocators warm up. The Theil-Sen slope of the rest must be positive
    with 95 % confidence. The growth must be at least ``rise`` without its largest increase, which may be something that
    is allocated once. The last third must be at least half as steep as the whole, because a buffer that fills levels
    off.

    While a buffer fills, it cannot be distinguished from a leak, and memory fragmentation also grows slowly. A growth
    that is not yet ``large`` must therefore last longer and follow a straight line: a leak grows by the same amount at
    each step. Memory that writers of the exporter use, and steps that wait to be recorded, is not counted.

    Source: Theil 1950; Sen 1968, JASA 63.

    Attributes:
        rise: Minimum growth in MB.
        large: Growth in MB from which on ``least`` readings suffice.
        share: Minimum growth as a fraction of the memory in use.
        lasting: Minimum slope of the last third relative to the whole.
        least: Minimum number of readings after the first fifth.
        lengthy: Minimum number of readings for a growth that is not large.
        straight: Minimum fraction of the variance explained by a straight line, for a growth that is not large.
    """

    rise: float = 24.0
    large: float = 64.0
    share: float = 0.05
    lasting: float = 0.5
    least: int = 24
    lengthy: int = 40
    straight: float = 0.9
    patience: int = 5
    heal: int = 20
    cooldown: int = 200

    needs: ClassVar[tuple[str, ...]] = ("runtime.rss", "runtime.cuda_allocated")
    remembers: ClassVar[tuple[str, ...]] = ("runtime.rss", "runtime.cuda_allocated", "runtime.kept")
    quiet: ClassVar[bool] = False

    def check(self, record: StepRecord, history: History) -> tuple[Finding, ...]:
        """Judge the memory of the run so far."""
        return tuple(filter(None, (self._judge(metric, history) for metric in self.needs)))

    def _judge(self, metric: str, history: History) -> Finding | None:
        series = history.run(metric)
        if series.high - series.low < self.rise:
            return None
        steps, values = series.whole()
        usable = np.isfinite(values)
        steps, values = steps[usable], values[usable]
        if metric == "runtime.rss":
            values = values - _kept(history, steps)
        skip, left = len(steps) // 5, len(steps) - len(steps) // 5
        # Of more than 64 of them as many: pairs of points grow with the square.
        chosen = skip + np.linspace(0, left - 1, min(left, 64)).round().astype(np.int64)
        steps, values = steps[chosen], values[chosen]
        if len(steps) < self.least:
            return None
        third = len(steps) // 3
        rise = median(values[-3:]) - median(values[:3])
        threshold = max(self.rise, self.share * float(values[0]))
        # What is allocated once, for another model say, is not a leak.
        again = rise - float(np.diff(np.minimum.accumulate(values[::-1])[::-1]).max())
        lasts = len(steps) >= self.lengthy  # and is a straight line
        if again <= threshold or (
            again < self.large and not (lasts and float(np.corrcoef(steps, values)[0, 1]) ** 2 >= self.straight)
        ):
            return None
        slope, low, _ = theil_sen_bounds(steps, values)
        # Memory that is read in bursts rises in stairs, whose pairwise slopes are mostly 0: the ends count.
        late = float(values[-1] - values[-third]) / float(steps[-1] - steps[-third])
        whole = max(slope, rise / float(steps[-1] - steps[0]))  # once it is level, the slope forgets how it rose
        if not (low > 0 and late >= self.lasting * whole):
            return None
        what = "resident memory" if metric == "runtime.rss" else "CUDA memory"
        return Finding(
            IssueType.MEMORY_LEAK,
            Severity.HIGH if rise > 0.25 * float(values[0]) else Severity.MEDIUM,
            ("",),
            whole,
            threshold / float(steps[-1] - steps[0]),
            f"{what} grew by {number(rise)} MB over {int(steps[-1] - steps[0])} steps, {number(whole)} MB per step, "
            "and keeps growing.",
            "store numbers, not tensors: history.append(loss.item()) instead of history.append(loss), which keeps "
            "the whole graph alive; remove retain_graph=True; limit the size of caches and lists that grow at each "
            "step.",
            since=int(steps[0]),
            cause=metric,
        )


def _kept(history: History, steps: Floats) -> Floats:
    """Return what writers kept of the run at these steps. Shape: that of ``steps``."""
    at, kept = history.run("runtime.kept").whole()
    known = np.isfinite(kept)
    at, kept = at[known], kept[known]
    return np.interp(steps, at, kept) if len(at) else np.zeros(len(steps))
