"""What is said of backward passes that no step of an optimizer follows up, or of whose gradients it gets none."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from gradflow_export.records.step_record import IssueType, Severity
from gradflow_export.rules.base import Finding, number
from gradflow_export.rules.progress import TAKEN_AWAY


class Told(NamedTuple):
    """What one mistake is called, where it is, what is wrong, what to do, and whether there is no doubt."""

    cause: str
    names: tuple[str, ...]
    what: str
    advice: str
    sure: bool = True


ALONE = ("wiring.lonely_passes", "wiring.gathering_passes", "wiring.stopped_passes")
"""Evidence of backward passes that nothing else is recorded with."""
BLIND = Finding(
    IssueType.NOT_TRAINING,
    Severity.CRITICAL,
    ("loss",),
    0.0,
    0.0,
    "backward() was called {passes} times in a row on a loss that does not depend on any parameter of the model: the "
    "graph is cut, and requires_grad_(True) on the loss does not restore it.",
    "compute the loss from the model's own output, without .detach(), .data, .item(), .numpy(), torch.no_grad() or "
    "torch.tensor(...) in between, and without requires_grad_(True) on the loss.",
    cause="loss without a graph",
    origin="loss without a graph",
)
"""Losses that lead to no parameter."""
GATHERING = Finding(
    IssueType.NOT_TRAINING,
    Severity.MEDIUM,
    ("",),
    0.0,
    0.0,
    "{passes} backward passes accumulated gradients, and no optimizer that holds the parameters has stepped.",
    "create the optimizer from the parameters of this model, and call its step(). If gradients are accumulated, count "
    "micro-batches over the whole training, not from 0 in each epoch, and also step at the end of an epoch: if (i + 1) "
    "% accumulate == 0 or i + 1 == len(loader): optimizer.step(); optimizer.zero_grad().",
    cause="step never called",
    urgent=True,
    origin="step never called",
)
"""Gradients that are added up for ever."""
LONELY = replace(
    GATHERING,
    severity=Severity.CRITICAL,
    message="{passes} backward passes computed gradients, and no weight changed: gradients are cleared each time, and "
    "no optimizer of this model stepped.",
    advice="call optimizer.step() after loss.backward(), with an optimizer created from model.parameters().",
)
"""Gradients that come and go while no weight changes."""
STOPPED = replace(
    LONELY,
    severity=Severity.HIGH,
    message="{passes} backward passes computed gradients after the last optimizer step, and no weight changed: "
    "gradients are cleared each time, and no step follows any more.",
    advice="look for what keeps step() from being called: a condition around it, a counter, an optimizer that was "
    "replaced, a scheduler called in its place. If training has ended and these passes serve another purpose, call "
    "exporter.pause() or exporter.close() before them.",
    cause="steps stopped",
    before=0,
    origin="steps stopped",
)
"""The same where there were steps before."""
COPIED = replace(
    LONELY,
    message="{passes} backward passes computed gradients, and no weight changed: the optimizer that steps holds copies "
    "of {percent} % of the parameters, and none of this model.",
    advice="create the optimizer from the model that is trained, after it was copied, moved, compiled or loaded: "
    "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3).",
    cause="optimizer of a copy",
    origin="optimizer of a copy",
)
"""The same, where the optimizer that steps holds copies of the parameters."""


def counted(what: Finding, passes: float, since: int = 1, foreign: float = 0.0) -> Finding:
    """Return what is said of some passes.

    Args:
        what: One of those above.
        passes: How many there were.
        since: First step.
        foreign: Share of the parameters of which an optimizer that steps holds copies.
    """
    message = what.message.format(passes=number(passes), percent=number(100 * foreign))
    return replace(what, value=passes, message=message, since=since)


def taken(names: tuple[str, ...], gone: set[str]) -> Iterable[Told]:
    """Yield what is said of gradients that are taken away between the backward pass and the step.

    Args:
        names: Parameters without an update.
        gone: Those of them whose gradient had come.
    """
    if gone:
        yield Told(
            TAKEN_AWAY,
            tuple(name for name in names if name in gone),
            "gradients reach them in the backward pass, and are gone when the optimizer steps",
            "search the code between backward() and step() for what sets .grad to None or 0; meant for a while, as to "
            "hold a layer at the start, it must end; to freeze them for good, call requires_grad_(False).",
            False,
        )
