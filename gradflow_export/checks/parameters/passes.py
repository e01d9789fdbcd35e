"""What is said of backward passes that no step of an optimizer follows up."""

from __future__ import annotations

from gradflow_export.records.step_record import IssueType, Severity
from gradflow_export.rules.base import Finding, number


def blind_passes(passes: float, since: int) -> Finding:
    """Return what is said of losses that lead to no parameter.

    Args:
        passes: How many came in a row.
        since: First step.
    """
    cause = "loss without a graph"
    message = (
        f"backward() was called {number(passes)} times in a row on a loss that does not depend on any parameter of "
        "the model: the graph is cut, and requires_grad_(True) on the loss does not restore it."
    )
    advice = (
        "compute the loss from the model's own output, without .detach(), .data, .item(), .numpy(), "
        "torch.no_grad() or torch.tensor(...) in between, and without requires_grad_(True) on the loss."
    )
    return Finding(
        IssueType.NOT_TRAINING, Severity.CRITICAL, ("loss",), passes, 0.0, message, advice, since=since, cause=cause,
        origin=cause,
    )  # fmt: skip


def gathering_passes(passes: float) -> Finding:
    """Return what is said of gradients that are added up for ever.

    Args:
        passes: How many backward passes there were.
    """
    cause = "step never called"
    message = (
        f"{number(passes)} backward passes accumulated gradients, and no optimizer that holds the parameters has "
        "stepped."
    )
    advice = (
        "create the optimizer from the parameters of this model, and call its step(). If gradients are "
        "accumulated, count micro-batches over the whole training, not from 0 in each epoch, and also step at the "
        "end of an epoch: if (i + 1) % accumulate == 0 or i + 1 == len(loader): optimizer.step(); "
        "optimizer.zero_grad()."
    )
    return Finding(
        IssueType.NOT_TRAINING, Severity.MEDIUM, ("",), passes, 0.0, message, advice, since=1, cause=cause,
        urgent=True, origin=cause,
    )  # fmt: skip


def lonely_passes(passes: float, foreign: float) -> Finding:
    """Return what is said of gradients that come and go while no weight changes.

    Args:
        passes: How many backward passes there were.
        foreign: Share of the parameters of which an optimizer that steps holds copies.
    """
    copied = foreign >= 0.5
    message = f"{number(passes)} backward passes computed gradients, and no weight changed: " + (
        (
            f"the optimizer that steps holds copies of {number(100 * foreign)} % of the parameters, and none of "
            "this model."
        )
        if copied
        else "gradients are cleared each time, and no optimizer of this model stepped."
    )
    advice = (
        "create the optimizer from the model that is trained, after it was copied, moved, compiled or loaded: "
        "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)."
        if copied
        else "call optimizer.step() after loss.backward(), with an optimizer created from model.parameters()."
    )
    cause = "optimizer of a copy" if copied else "step never called"
    return Finding(
        IssueType.NOT_TRAINING, Severity.CRITICAL, ("",), passes, 0.0, message, advice, since=1, cause=cause,
        urgent=True, origin=cause,
    )  # fmt: skip
