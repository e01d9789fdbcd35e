"""Issues that a debugger finds when it is asked by name."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gradflow_export.debugging.inspect.gradients import GradientNorms
from gradflow_export.debugging.inspect.tensor_info import TensorInfo
from gradflow_export.records.step_record import Issue, IssueType, Severity
from gradflow_export.rules.base import number, some


def broken(what: str, names: tuple[str, ...], infos: Sequence[TensorInfo]) -> Issue | None:
    """Return the issue of tensors that hold NaN or Inf, ``None`` when none does.

    Args:
        what: Was looked at.
        names: Of the layers concerned; empty for what belongs to none.
        infos: Of the tensors.
    """
    count = sum(info.nan_count + info.inf_count for info in infos)
    if not count:
        return None
    return Issue(
        IssueType.NUMERICAL,
        Severity.CRITICAL,
        names[0] if names else "",
        0,
        float(count),
        0.0,
        f"{what}: {count} entries{f' of {some(names)}' if names else ''} are NaN or Inf.",
        "look at what made them: log, sqrt and divisions need clamp_min(1e-8), float16 overflows above 65504.",
        layers=names,
    )


def beyond(kind: IssueType, norms: GradientNorms, names: Sequence[str], threshold: float) -> Issue | None:
    """Return the issue of gradient norms beyond a threshold, ``None`` when there are none.

    Args:
        kind: ``EXPLODING`` or ``VANISHING``.
        norms: Of all gradients.
        names: Of those beyond.
        threshold: In the unit of the gradient.
    """
    if not names:
        return None
    values = dict(zip(norms.sites, norms.norms, strict=True))
    exploding = kind is IssueType.EXPLODING
    # A norm that is NaN compares false, and is the worst there is.
    worst = max(names, key=lambda name: (math.isnan(values[name]), values[name] if exploding else -values[name]))
    layers = (worst, *(name for name in names if name != worst))
    where = "above" if exploding else "below"
    return Issue(
        kind,
        Severity.HIGH,
        worst,
        0,
        values[worst],
        threshold,
        f"the gradient norm of {some(layers)} is {number(values[worst])}, {where} {number(threshold)}.",
        "lower the learning rate or clip: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)."
        if exploding
        else "add skip connections or normalisation before these layers; check that the loss is not scaled down.",
        layers=layers,
    )
