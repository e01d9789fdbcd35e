"""What changed of the connections of parameters while a run went on, exactly and for several steps in a row."""

from __future__ import annotations

from itertools import compress

import numpy as np

from gradflow_export.records.evidence import Wiring
from gradflow_export.records.step_record import BoolArray
from gradflow_export.rules.history import History, SiteSeries
from gradflow_export.rules.signals import Codes, begun

_EACH_LINK = (Wiring.TRAINABLE, Wiring.OWNED, Wiring.ZERO_RATE, Wiring.GRADIENT)
LINKS = int(Wiring.TRAINABLE | Wiring.OWNED | Wiring.GRADIENT | Wiring.ZERO_RATE)
"""What may be lost while a run goes on."""


def changed_at(series: SiteSeries, codes: Codes, history: History) -> tuple[int, BoolArray] | None:
    """Return at which reading parameters lost a connection that they had in all before, and which they are.

    A gradient that came and went before, step by step, is not lost: players and experts take turns.
    """
    norms, n = history.at_sites("parameter.gradient_norm"), len(codes)
    gone = set(compress(norms.sites, begun(norms.steps, ~norms.present) < len(norms.steps)))
    lost = codes & LINKS ^ (LINKS & ~Wiring.ZERO_RATE)
    starts = [begun(series.steps, (lost & bit) > 0) for bit in _EACH_LINK]
    starts[-1] = np.where([site in gone for site in series.sites], starts[-1], n)
    changed = np.min(starts, axis=0)
    return (int(changed.min()), changed < n) if (changed < n).any() else None


def dropped_at_once(history: History, since: int, still: BoolArray, total: int) -> bool:
    """Whether the rate of all parameters fell to 0 at once, and not at the end of a schedule that lowered it."""
    rate = history.run("learning_rate")
    before = rate.values[(rate.steps < since) & (rate.values > 0)][-1:]
    return int(still.sum()) == total and bool((before >= 0.1 * rate.high).any())
