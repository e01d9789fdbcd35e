"""Every metric this package can emit: the one place from which tags, documentation and the panel's labels derive."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from gradflow_export.errors import ArgumentError, nearest
from gradflow_export.records.catalog import (
    activations,
    attention,
    debugging,
    discrete,
    flow,
    gradients,
    moments,
    origin,
    outputs,
    policy,
    recurrent,
    replicas,
    runtime,
    updates,
)
from gradflow_export.records.catalog.metric import SITE_KINDS, UNITS, MetricSpec

__all__ = ["CATALOG", "CUSTOM_PREFIX", "SITE_KINDS", "UNITS", "MetricSpec", "spec"]

CUSTOM_PREFIX = "custom."
_FAMILIES = (
    outputs,
    gradients,
    updates,
    moments,
    flow,
    discrete,
    activations,
    attention,
    recurrent,
    policy,
    origin,
    replicas,
    debugging,
    runtime,
)

CATALOG: Mapping[str, MetricSpec] = MappingProxyType(
    {spec.name: spec for family in _FAMILIES for spec in family.specs()}
)
"""Every metric by name; read-only."""


def spec(name: str) -> MetricSpec:
    """Return the description of a metric.

    Args:
        name: A name of the catalogue, or ``"custom.<analyzer>.<key>"`` for a user's own analyzer.

    Raises:
        ArgumentError: The name is unknown; the message names the nearest.
    """
    if name in CATALOG:
        return CATALOG[name]
    if name.startswith(CUSTOM_PREFIX):
        return MetricSpec(
            name, name.removeprefix(CUSTOM_PREFIX), "1", "run", "computed by a registered analyzer", "user", "c"
        )
    raise ArgumentError(f"unknown metric {name!r}{nearest(name, CATALOG)}")
