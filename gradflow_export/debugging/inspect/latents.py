"""Latents from step to step: their size against the schedule, whether they change, and the loss by noise level."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gradflow_export.debugging.inspect.schedules import NoiseSchedule
from gradflow_export.debugging.inspect.tensor_info import TensorInfo
from gradflow_export.records.step_record import Issue, IssueType, Severity
from gradflow_export.rules.base import number

FACTOR = 3.0
"""Latents may be this much larger or smaller than expected, beside what chance does to few entries."""

RARE = 1e-6
"""Probability of a size that chance alone does not explain."""

LEAST, MOST = 1e-6, 1e5
"""Root mean square of latents whose schedule is not known."""

UNCHANGED = 5
"""Steps after each of which latents are the same, bit for bit, before that is reported."""

BINS = 10
"""Ranges of noise levels whose losses are distinguished."""

_RECENT = 0.05

_LARGE = (
    "compare the order of the sampler's timesteps with the schedule, the prediction type of the model (noise, data or "
    "velocity) with the sampler's, and lower the guidance."
)
_SMALL = (
    "look at what scales the latents: the initial noise by the greatest sigma, the factor of the decoder, float16 that "
    "underflows."
)
_SAME = "pass on what the sampler's step returns, as in latents = step(...), and look whether its timesteps differ."


@dataclass(frozen=True)
class Look:
    """What one look at latents found.

    Attributes:
        timestep: Noise level that they should be at, where it is known.
        rms: Root mean square of their entries.
        expected: Least and greatest root mean square that they should have; ``None`` without a schedule.
        issues: By kind, ``None`` where nothing is wrong.
    """

    timestep: float | None
    rms: float | None
    expected: tuple[float, float] | None
    issues: dict[str, Issue | None]

    def as_dict(self) -> dict[str, Any]:
        """Return what the debugger reports about it."""
        norm = None if self.expected is None else list(self.expected)
        return {"timestep": self.timestep, "rms": self.rms, "expected_rms": norm}


class LatentWatch:
    """Follows the latents of one sampling run after another.

    Args:
        schedule: What they should be, if it is known.
    """

    def __init__(self, schedule: NoiseSchedule | None) -> None:
        self._schedule = schedule
        self._step: int | None = None
        self._last: tuple[int | None, float | None] = (None, None)
        self._same = 0

    def look(self, step: int, info: TensorInfo, mark: int | None, timestep: float | None) -> Look:
        """Look at the latents after one step; a step that is not above the last one begins another run.

        Args:
            step: Its number.
            info: Of the latents.
            mark: The same for the same entries.
            timestep: Noise level that they are at; by default what the schedule says.
        """
        schedule = self._schedule
        if self._step is None or step <= self._step:
            self._same, self._last = 0, (None, None)
        known = timestep is not None or schedule is None
        at = timestep if known or schedule is None else schedule.after(step)
        level = None if schedule is None else schedule.level(at)[1]
        # A sampler may look twice at one noise level; of those that it goes through at another the latents change.
        same = mark is not None and mark == self._last[0] and (schedule is None or level != self._last[1])
        self._same = self._same + 1 if same else 0
        self._step, self._last = step, (mark, level)
        rms = None if info.norm is None or not info.numel else info.norm / math.sqrt(info.numel)
        expected = None if schedule is None else schedule.expected_rms(at)
        large, small = self._size(rms, expected, info.numel, step) if info.is_finite else (None, None)
        issues = {"large": large, "small": small, "unchanged": self._unchanged(step)}
        return Look(at, rms, expected, issues)

    def _size(
        self, rms: float | None, expected: tuple[float, float] | None, numel: int, step: int
    ) -> tuple[Issue | None, Issue | None]:
        if rms is None:
            return None, None
        least, most, told = LEAST, MOST, "without a schedule"
        if expected is not None:
            # Of few entries the root mean square scatters: by the tails of the chi distribution with so many of them.
            least = expected[0] / FACTOR * 0.6 * RARE ** (1 / numel)
            most = expected[1] * FACTOR * (1 + math.sqrt(-2 * math.log(RARE) / numel))
            told = f"the schedule has {number(expected[0])}"
            told += f" to {number(expected[1])}" if expected[1] > expected[0] else ""
        what = (
            f"the root mean square of the latents is {number(rms)} after step {step} of the diffusion, {told}, and at "
        )
        if rms > most:
            what += f"most {number(most)} is usual."
            return _issue(IssueType.EXPLODING, step, rms, most, what, _LARGE), None
        if rms < least:
            what += f"least {number(least)} is usual."
            return None, _issue(IssueType.VANISHING, step, rms, least, what, _SMALL)
        return None, None

    def _unchanged(self, step: int) -> Issue | None:
        if self._same < UNCHANGED:
            return None
        message = f"the latents have not changed by a bit in {self._same} steps up to step {step} of the diffusion."
        return _issue(IssueType.STAGNATION, step, float(self._same), float(UNCHANGED), message, _SAME)


def _issue(kind: IssueType, step: int, value: float, threshold: float, message: str, advice: str) -> Issue:
    return Issue(kind, Severity.HIGH, "", step, value, threshold, message, advice)


class LossByLevel:
    """Losses of training by the noise level that they were taken at, in a fixed number of ranges.

    Args:
        schedule: What a timestep stands for.
    """

    def __init__(self, schedule: NoiseSchedule) -> None:
        self._schedule = schedule
        self._counts, self._broken = [0] * BINS, [0] * BINS
        self._sums, self._recent = [0.0] * BINS, [0.0] * BINS

    def add(self, timesteps: Sequence[float], losses: Sequence[float]) -> list[float]:
        """Take in losses, each with its timestep.

        Returns:
            Timesteps whose loss is NaN or Inf.
        """
        broken = []
        for timestep, loss in zip(timesteps, losses, strict=True):
            share = self._schedule.share(timestep)
            place = min(max(int(share * BINS), 0), BINS - 1) if math.isfinite(share) else 0
            if not math.isfinite(loss):
                self._broken[place] += 1
                broken.append(timestep)
                continue
            first = not self._counts[place]
            self._counts[place] += 1
            self._sums[place] += loss
            self._recent[place] = loss if first else self._recent[place] + _RECENT * (loss - self._recent[place])
        return broken

    def table(self) -> list[dict[str, Any]]:
        """Return one row for each range, from the least noise to the most."""
        return [
            {
                "from": place / BINS,
                "to": (place + 1) / BINS,
                "count": count,
                "mean": self._sums[place] / count if count else None,
                "recent": self._recent[place] if count else None,
                "nonfinite": self._broken[place],
            }
            for place, count in enumerate(self._counts)
        ]
