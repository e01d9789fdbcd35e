"""Which instruments are due at a step: everything at first, then each on its own interval."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from gradflow_export.errors import ArgumentError, ArgumentTypeError, nearest

Instrument = Literal[
    "blocks", "logits", "policy", "activations", "attention", "updates", "recurrent", "inputs", "statistics",
    "discrete", "moments", "clipping", "replicas", "wiring", "ranks", "histograms",
]  # fmt: skip
"""What has an interval of its own."""
INTERVALS: Mapping[str, int] = MappingProxyType(
    {
        "blocks": 25,
        "logits": 25,
        "policy": 25,
        "activations": 50,
        "attention": 50,
        "updates": 50,
        "recurrent": 100,
        "inputs": 100,
        "statistics": 100,
        "discrete": 100,
        "moments": 100,
        "clipping": 50,
        "replicas": 50,
        "wiring": 100,
        "ranks": 500,
        "histograms": 500,
    }
)
"""Steps between two readings once training has settled, by instrument.

Loss, gradient norms, cosine and runtime are read every step.
"""

DENSE_STEPS = 10
PREFLIGHT_STEPS = 50
SETTLING_STEPS = 100
SETTLING_INTERVAL = 5
SETTLING_AT_MOST = SETTLING_STEPS
"""Steps between two readings of a large model until training has settled."""
LARGE_DENSE = (1, 2, 10)
"""Of the first steps those in which what there is much of in a large model is read."""
SHOWN_STEPS = 400
SHOWN_INTERVAL = 25
SHOWN_AT_FIRST = 3
"""Whether a model learns shows in its first hundreds of steps: until then inputs and targets are read oftener.

Most often until training has settled, as tests of whether the two belong together need hundreds of samples.
"""
SITES_PER_INTERVAL = 100
BOUNDED = frozenset(("moments",))
"""What reads no more of a large model than of one of a hundred tensors, but that too is much for its first steps."""
RANK_STEPS = (1, 2, 3, 4)
RARE_STEPS = (1, 10, 50, 100)
CLOSE = frozenset(("updates", "wiring"))
"""What shows whether parameters still hang together, and still move."""


@dataclass(frozen=True)
class Schedule:
    """A plan that depends on the step number alone, and on what a rule asked for.

    The dense start is what lets a run of 30 steps be judged; the long intervals are what keeps a long run cheap.

    Attributes:
        every: Steps between two records.
        intervals: Overrides of ``INTERVALS`` by instrument; afterwards the interval of every instrument.
        dense: First steps in which everything but what is dear is read.
        known: The default interval of every instrument there is.
        grown: By what factor default intervals have grown with what there is to read, by instrument.
        chosen: Instruments whose interval was overridden.
        begun: Steps that were completed before the session: what resumes is read as densely as what begins.
        shown: Whether inputs are read in the first hundreds of steps whatever a budget leaves.
        settled: Last step of the dense start.
        shown_until: Last step at which inputs may be read whatever a budget leaves; 0 where none is.
    """

    every: int = 1
    intervals: Mapping[str, int] = field(default_factory=dict)
    dense: int = DENSE_STEPS
    known: Mapping[str, int] = field(default_factory=lambda: INTERVALS)
    grown: Mapping[str, int] = field(default_factory=dict)
    begun: int = 0
    shown: bool = False
    chosen: frozenset[str] = field(init=False)
    settled: int = field(init=False, repr=False, compare=False, default=SETTLING_STEPS)
    shown_until: int = field(init=False, repr=False, compare=False, default=0)
    _rare: int = field(init=False, repr=False, compare=False, default=1)

    def __post_init__(self) -> None:
        object.__setattr__(self, "chosen", frozenset(self.intervals))
        object.__setattr__(self, "settled", self.begun + SETTLING_STEPS)
        object.__setattr__(self, "shown_until", (self.begun + SHOWN_STEPS) * self.shown)
        _check_interval("every", self.every)
        for name, interval in self.intervals.items():
            if name not in self.known:
                raise ArgumentError(f"intervals names {name!r}, which is no instrument{nearest(name, self.known)}")
            _check_interval(f"intervals[{name!r}]", interval)
        object.__setattr__(self, "intervals", MappingProxyType({**self.known, **self.intervals}))
        # Nearly all steps of a long run are multiples of none of them, which one division tells.
        object.__setattr__(self, "_rare", math.gcd(*(n for name, n in self.intervals.items() if name != "ranks")))

    def for_sites(self, sites: Mapping[str, int]) -> Schedule:
        """Return a schedule whose default intervals grow with what there is to read, so that its cost does not.

        Until training has settled a few readings are made where intervals grow: at the steps of ``LARGE_DENSE``, and
        then at every ``SETTLING_AT_MOST``-th step. A dense start that the user asked for is read whole.

        Args:
            sites: Number of sites by instrument. Intervals the user chose stay as they are.
        """
        factors = {
            name: max(-(-count // SITES_PER_INTERVAL), 1) for name, count in sites.items() if name not in self.chosen
        }
        grown = {name: self.intervals[name] * factor for name, factor in factors.items() if name not in BOUNDED}
        return Schedule(
            self.every, {**self.intervals, **grown}, self.dense, self.known, factors, self.begun, self.shown
        )

    def recorded(self, step: int, spacing: int = 1) -> bool:
        """Return whether this step makes a record at all.

        Args:
            step: Counted from 1.
            spacing: Of how many steps that would be recorded one is, to stay within a budget.

        >>> [step for step in range(1, 25) if Schedule(every=10).recorded(step)]
        [1, 10, 20]
        """
        return step == self.begun + 1 or step % (self.every * spacing) == 0 or self.shows(step)

    def shows(self, step: int) -> bool:
        """Return whether a step after the dense start makes a record whatever a budget leaves, to read inputs."""
        return self.settled < step <= self.shown_until and step % math.lcm(SHOWN_INTERVAL, self.every) == 0

    def next_recorded(self, step: int, spacing: int = 1) -> int:
        """Return the first step from this one on that makes a record."""
        usual = step if self.recorded(step, spacing) else -(-step // (self.every * spacing)) * self.every * spacing
        apart = math.lcm(SHOWN_INTERVAL, self.every)
        shown = -(-step // apart) * apart
        return min(usual, shown) if self.shows(shown) else usual

    def due(
        self, step: int, *, asked: bool = False, close: bool = False, stretch: float = 1.0, spacing: int = 1
    ) -> frozenset[str]:
        """Return the instruments to read at a step.

        Args:
            step: Counted from 1.
            asked: Whether a rule wants to see everything now, whatever the interval.
            close: Whether what ``CLOSE`` names is read now, because a step was unlike those before it.
            stretch: By what factor intervals are longer than they are set, to stay within a budget.
            spacing: Steps since the last record. What fell due in them is read then.
        """
        if not self.recorded(step):
            return frozenset()
        read = CLOSE.intersection(self.intervals) if close else frozenset()
        if self._is_quiet(step, asked, stretch, spacing):
            return read
        return read.union(name for name in self.intervals if self._is_due(name, step, asked, stretch, spacing))

    def _is_quiet(self, step: int, asked: bool, stretch: float, spacing: int) -> bool:
        """Whether nothing can be due, known without a look at each instrument."""
        between = step - self.begun > max(SETTLING_STEPS, self.dense) and not asked and stretch == spacing == 1
        return between and step % self._rare > 0 and step % self.intervals["ranks"] >= len(RANK_STEPS)

    def _is_due(self, name: str, step: int, asked: bool, stretch: float, spacing: int) -> bool:
        interval, age = math.ceil(self.intervals[name] * stretch), step - self.begun
        large = self.grown.get(name, 1) > 1
        if name == "ranks":
            # Four steps in a row: their samples are pooled.
            return age in RANK_STEPS[: 1 if large else None] or (
                age > SETTLING_STEPS and step % interval < len(RANK_STEPS) * spacing
            )
        if name in {"statistics", "histograms"}:
            return age in RARE_STEPS or step % interval < spacing or (asked and name == "statistics")
        begins = age <= self.dense and (not large or self.dense > DENSE_STEPS or age in LARGE_DENSE)
        # What the discrete instrument tells changes slowly, and it takes longer than the others.
        between = SETTLING_AT_MOST if large else SETTLING_INTERVAL
        settling = (
            name != "discrete" and age <= SETTLING_STEPS and age % min(math.ceil(between * stretch), interval) == 0
        )
        shown = SETTLING_AT_MOST if large else SHOWN_AT_FIRST if age <= SETTLING_STEPS else SHOWN_INTERVAL
        often = shown if self.shown else min(math.ceil(shown * stretch), interval)
        showing = name == "inputs" and age <= SHOWN_STEPS and step % often < spacing
        return asked or begins or settling or showing or step % interval < spacing


def _check_interval(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ArgumentTypeError(f"{name} must be a whole number of steps, got {value!r}; for example {name}=10.")
    if value < 1:
        raise ArgumentError(f"{name} must be at least 1 step, got {value}; use exporter.pause() to stop recording.")
