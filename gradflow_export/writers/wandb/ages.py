"""Of which step each value of a run's summary is: old values are named or taken back, so that none looks new."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, final

from gradflow_export.records.step_record import StepRecord

READ_AT = "read_at"
"""Key of the text that says of which steps the values are that are older than ``step``."""

_ENOUGH = 3
"""How often a key must have come before what came with it tells when it is due."""


def metric_of(key: str) -> str:
    """Return the metric of a key of a row: what stands before the layer."""
    return re.split("[/:]", key.removeprefix("flagged/"), maxsplit=1)[0]


@final
class Ages:
    """Knows the step of the newest value of every key, and which values a record should have had.

    W&B keeps the last value of each key in the run's summary. A row therefore names the steps of all values that are
    older than its own, those of earlier rows too, and takes back what its record could not give: a key whose metric it
    has, or one beside which a metric of the record came each time until now. Since the row itself says so, it holds
    for a process that is killed as well.
    """

    def __init__(self) -> None:
        self._steps: dict[str, int] = {}
        self._times: dict[str, int] = {}
        self._beside: dict[str, set[str]] = {}
        self._alone: dict[str, set[str]] = {}
        self._gone: set[str] = set()
        self._said = False

    def begin(self, known: Iterable[str], step: int) -> None:
        """Take over the keys that an earlier session left in the run's summary."""
        for key in known:
            self._steps.setdefault(key, step)

    def complete(self, record: StepRecord, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return a row with all that it has to say.

        Args:
            record: The record that the row was made of.
            row: Values by key, ``None`` for what the record has and cannot give.

        Returns:
            The values; ``None``, once, for each key that is taken back; and ``READ_AT``: at which steps what is not of
            this one was read last; empty where there is nothing of the kind any more.
        """
        here = {reading.metric for reading in record.readings if reading.present.any()}
        whole = {reading.metric for reading in record.readings} | {key for key, value in row.items() if value is None}
        out = {key: value for key, value in row.items() if value is not None}
        for key in [key for key in self._steps if key not in out]:
            due = self._times.get(key, 0) >= _ENOUGH and not self._beside[key].isdisjoint(here)
            self._alone.setdefault(key, set()).update(here)
            if key in self._beside:
                self._beside[key] -= here
            if key not in self._gone and (due or key in whole or metric_of(key) in whole):
                out[key] = None
                self._gone.add(key)
        for key in [key for key, value in out.items() if value is not None]:
            self._steps[key] = record.step
            self._gone.discard(key)
            self._times[key] = self._times.get(key, 0) + 1
            if self._times[key] <= _ENOUGH:
                self._beside[key] = here - self._alone.get(key, set())
        said = told({key: step for key, step in self._steps.items() if step != record.step})
        if said or self._said:
            out[READ_AT] = said
        self._said = bool(said)
        return out


def told(steps: Mapping[str, int]) -> str:
    """Return the steps of some keys as text: ``"block.gain 200, update.ratio 190 to 200"``."""
    spans: dict[str, tuple[int, int]] = {}
    for key, step in steps.items():
        first, last = spans.get(metric_of(key), (step, step))
        spans[metric_of(key)] = min(first, step), max(last, step)
    return ", ".join(
        f"{name} {first}" if first == last else f"{name} {first} to {last}"
        for name, (first, last) in sorted(spans.items())
    )
