"""Named sets of rules, with every check that lies in ``checks/``, and the fixed thresholds a user may add by name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from types import MappingProxyType
from typing import Literal, TypedDict

from gradflow_export.checks import below
from gradflow_export.config import THRESHOLDS
from gradflow_export.errors import ArgumentError, nearest
from gradflow_export.extensions import Extension, extensions, made
from gradflow_export.rules.attention import AttentionCollapse, HeadRedundancy, RankCollapse
from gradflow_export.rules.base import Check, Rule
from gradflow_export.rules.bottleneck import Bottleneck, RankBottleneck, TokenBottleneck
from gradflow_export.rules.diverging import Diverging
from gradflow_export.rules.learning_rate import LearningRate, UnevenSteps
from gradflow_export.rules.memory import MemoryLeak, MemoryUsage
from gradflow_export.rules.moments import EpsilonDominated, LongMomentum, NewEachStep
from gradflow_export.rules.numerical import Numerical
from gradflow_export.rules.policy import ExcessExploration, PolicyCollapse
from gradflow_export.rules.progress import LostUpdates, Stagnation, TakenBack
from gradflow_export.rules.recurrent import Subcritical, Supercritical
from gradflow_export.rules.replicas import Desync
from gradflow_export.rules.stability import LossSpike, Unstable
from gradflow_export.rules.standstill import Rotation, SameLoss
from gradflow_export.rules.units import Dead, Saturated
from gradflow_export.rules.vanishing_exploding import ExplodingDepth, Vanishing, VanishingParameters
from gradflow_export.rules.weight_decay import WeightDecay

Profile = Literal["robust", "seed"]
PROFILES: tuple[Profile, ...] = ("robust", "seed")


class Thresholds(TypedDict, total=False):
    """The names of :data:`THRESHOLDS`, for type checkers: a misspelt one is an error there too."""

    gradient_explosion_threshold: float
    gradient_vanishing_threshold: float
    parameter_stagnation_threshold: float
    loss_spike_threshold: float
    memory_usage_threshold: float
    exploding_threshold: float
    vanishing_threshold: float
    dead_threshold: float
    unstable_cv_threshold: float


_SAME = MappingProxyType(
    {"exploding_threshold": "gradient_explosion_threshold", "vanishing_threshold": "gradient_vanishing_threshold"}
)


def profile(name: str = "robust", thresholds: Mapping[str, float] | None = None) -> tuple[Rule, ...]:
    """Return the rules of a profile.

    Args:
        name: ``"robust"`` judges by ratios that no scaling of the loss moves; ``"seed"`` by fixed numbers alone.
        thresholds: Fixed thresholds by name, see :data:`THRESHOLDS`. In the robust profile each adds its fixed rule
            beside the others; in the seed profile it replaces the default. ``exploding_threshold`` and
            ``vanishing_threshold`` are other names of ``gradient_explosion_threshold`` and
            ``gradient_vanishing_threshold``.

    Returns:
        Frozen rules, ready for :class:`gradflow_export.rules.judge.Judge`; in the robust profile those of installed
        packages too.

    Raises:
        ArgumentError: The profile or a threshold is unknown, given under both its names with two values, not a
            number, NaN or negative.
    """
    if name not in PROFILES:
        raise ArgumentError(f"unknown profile {name!r}{nearest(str(name), PROFILES)}")
    chosen = _checked(thresholds or {})
    if name == "seed":
        return (Numerical(), *_fixed({key: chosen.get(key, THRESHOLDS[key]) for key in THRESHOLDS if key not in _SAME}))
    found: tuple[type[Check], ...] = below(Check)  # type: ignore[type-abstract]  # only such as can be made
    checks = sorted((kind() for kind in found), key=lambda check: (check.order, check.name))
    return (
        Numerical(),
        *(check for check in checks if not check.late),
        Vanishing(),
        VanishingParameters(),
        ExplodingDepth(),
        Bottleneck(),
        RankBottleneck(),
        TokenBottleneck(),
        Dead(),
        Saturated(),
        AttentionCollapse(),
        HeadRedundancy(),
        RankCollapse(),
        Unstable(),
        LossSpike(),
        Diverging(),
        EpsilonDominated(),
        LongMomentum(),
        NewEachStep(),
        Stagnation(),
        LostUpdates(),
        TakenBack(),
        Subcritical(),
        Supercritical(),
        PolicyCollapse(),
        ExcessExploration(),
        Rotation(),
        SameLoss(),
        Desync(),
        LearningRate(),
        UnevenSteps(),
        WeightDecay(),
        MemoryUsage(),
        MemoryLeak(),
        *(check for check in checks if check.late),
        *_fixed(chosen),
        *made((*extensions("rules"), *extensions("checks")), _further),
    )


def _further(extension: Extension) -> Rule:
    """Return a rule of an installed package."""
    rule = extension.made()
    if not isinstance(rule, Check if extension.kind == "checks" else Rule):
        base = "Check" if extension.kind == "checks" else "Rule"
        raise TypeError(f"{type(rule).__name__} is no subclass of gradflow_export.rules.base.{base}")
    if not (rule.needs or rule.evidence):
        raise ValueError("it names neither metrics in needs nor facts in evidence, so that it would never be asked")
    return rule


def _fixed(values: Mapping[str, float]) -> tuple[Rule, ...]:
    if not values:
        return ()
    from gradflow_export.rules.seed import FIXED  # noqa: PLC0415 - memory that most runs have no use for

    return tuple(FIXED[key](threshold=value) for key, value in values.items())


def _checked(thresholds: Mapping[str, float]) -> dict[str, float]:
    out: dict[str, float] = {}
    for key, value in thresholds.items():
        if key not in THRESHOLDS:
            raise ArgumentError(f"unknown threshold {key!r}{nearest(str(key), THRESHOLDS)}")
        if isinstance(value, bool) or not isinstance(value, Real) or math.isnan(value) or value < 0:
            raise ArgumentError(f"threshold {key!r} must be a number of at least 0; got {value!r}. Pass a float.")
        same = _SAME.get(key, key)
        if out.get(same, value) != value:
            raise ArgumentError(
                f"threshold {same!r} was given twice, as {out[same]!r} and {value!r}; pass one of the two."
            )
        out[same] = float(value)
    return out
