"""Whether the weights went round during the passes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gradflow_export.analyzers.base import Recording
from gradflow_export.instruments.path import LEAST
from gradflow_export.rules.base import number


@dataclass(frozen=True)
class CircularFlow:
    """The path of the weights over the last passes; see the metrics ``flow.*``.

    Attributes:
        values: By short name: ``winding``, ``plane``, ``growth``, ``work``, ``straightness``, ``turning``; empty when
            the weights rested or there were too few passes.
        note: Why it is empty.
    """

    values: Mapping[str, float]
    note: str = ""

    def lines(self) -> list[str]:
        """Return the measurements as text."""
        if not self.values:
            return [f"Circular flow: {self.note}"]
        numbers = ", ".join(f"{name} {number(value)}" for name, value in self.values.items())
        return [f"Circular flow: {numbers} (rotation: winding >= 1, plane >= 0.8, growth >= 0.8, work <= -0.5)"]


def circular_flow(recording: Recording) -> CircularFlow:
    """Return what the last judged window of an analysis reported about the path of the weights."""
    for record in reversed(recording.records):
        found = {
            r.metric.partition(".")[2]: float(r.values[0])
            for r in record.readings
            if r.metric.startswith("flow.") and not r.metric.endswith("_error")
        }
        if "winding" in found:
            found.pop("radius", None)
            return CircularFlow(found)
    if recording.still:
        return CircularFlow({}, "the weights did not change; pass optimizer=...")
    return CircularFlow({}, f"needs at least {LEAST} passes")
