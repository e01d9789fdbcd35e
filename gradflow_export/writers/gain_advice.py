"""What to do where most blocks of a chain damp the gradient, or most amplify it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

DAMPING, AMPLIFYING = 0.5, 2.0

_DAMPED = (
    "add skip connections, x = x + block(x), so that the gradient also passes around each block",
    "normalize before each block and not on the residual path (Pre-LN): x = x + block(norm(x))",
    "initialize for the activation: torch.nn.init.kaiming_normal_ before a ReLU, xavier_normal_ before a tanh",
)
_AMPLIFIED = (
    "look for unstable layers: a LayerNorm on the residual path with a small spread amplifies the gradient",
    "clip the gradient: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0) before optimizer.step()",
    "lower the learning rate, first to a tenth",
    "check the initialization: torch.nn.init.kaiming_normal_ before a ReLU, xavier_normal_ before a tanh",
)


def gain_advice(gains: Iterable[float | None]) -> tuple[str, ...]:
    """Return what most of the gains of a chain have in common, and what to do about it.

    Args:
        gains: One for each transition between blocks; those that are missing or not finite say nothing.

    Returns:
        A sentence, then one piece of advice each, the most promising first; empty where no more than half as many
        transitions damp, or amplify, as there are blocks.
    """
    every = list(gains)
    known = [gain for gain in every if gain is not None and math.isfinite(gain)]
    most = (len(every) + 1) // 2
    damped, amplified = sum(gain < DAMPING for gain in known), sum(gain > AMPLIFYING for gain in known)
    if damped <= most and amplified <= most:
        return ()
    count, does, sign, mark, advice = (
        (damped, "damp", "<", DAMPING, _DAMPED)
        if damped > most
        else (amplified, "amplify", ">", AMPLIFYING, _AMPLIFIED)
    )
    said = f"{count} of {len(every)} transitions {does} the gradient (gamma {sign} {mark}).{_whole(every, known)}"
    return said, *advice


def _whole(every: Sequence[float | None], known: Sequence[float]) -> str:
    """Return what comes of all gains together, where all are known."""
    if len(known) < len(every) or min(known) <= 0:
        return ""
    logs = math.fsum(map(math.log, known)) / math.log(10)
    times = f"{10**logs:.3g}" if abs(logs) < 300 else f"1e{logs:+.0f}"
    return f" From the last block to the first it becomes {times} times as large."
