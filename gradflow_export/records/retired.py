"""Metrics of earlier versions that are evidence today: logs hold them still, and readers leave them out (floor 1)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "input": "rms mean std max feature_ratio constant_share whole_share squeezed_share normalised",
        "layer": "row merged taken_steps taken_sequences cell_calls cut_off discarded repeated",
        "loss": "mistake constant over_constant known samples choice supervised affine_depth idle_activations "
        "affine_norms unbent nested",
        "mode": "evaluation_dropout evaluation_noise evaluation_training parts_training training_evaluation",
        "parameter": "wiring hidden stale_gradient kept_gradient foreign_gradient frozen_size initial_gain "
        "initial_mean row_spread row_parting row_doubles sibling_gap",
        "target": "rms reach distinct rows uniform_share copied dependence ahead tested",
        "wiring": "reloads orphans lonely_passes gathering_passes blind_passes foreign",
    }
)

RETIRED = frozenset(f"{family}.{name}" for family, names in _NAMES.items() for name in names.split())
"""Names that readers of stored logs pass over; the issues that were raised by them are stored beside them, and stay."""
