"""Names of parameters by what was read of them."""

from __future__ import annotations

import numpy as np

from gradflow_export.records.evidence import Wiring
from gradflow_export.records.sites import pattern
from gradflow_export.records.step_record import BoolArray
from gradflow_export.rules.history import SiteSeries
from gradflow_export.rules.signals import Codes


def chosen(sites: tuple[str, ...], flags: BoolArray) -> tuple[str, ...]:
    """Return the names of flagged parameters."""
    return tuple(sites[index] for index in np.flatnonzero(flags))


def kin_of(sites: tuple[str, ...], codes: Codes, flags: BoolArray) -> set[str]:
    """Return the patterns of flagged sites in lists whose members stand side by side: a router may choose of them."""
    return {pattern(name) for name in chosen(sites, flags & ((codes & Wiring.BESIDE) > 0))}


def moved_since(weights: SiteSeries, since: int) -> set[str]:
    """Return the parameters whose norm changed between any two readings from a step on."""
    late = weights.steps >= since
    values, present = weights.values[late], weights.present[late]
    both = present[1:] & present[:-1]
    return set(chosen(weights.sites, (both & (values[1:] != values[:-1])).any(axis=0)))
