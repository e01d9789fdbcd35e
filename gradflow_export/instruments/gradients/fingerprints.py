"""Tells that a step was made in another way than those before it, by a few descriptions that cost next to nothing."""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass, field

from torch import Tensor

from gradflow_export.hooks import torch_private
from gradflow_export.hooks.optimizer_steps import OptimizerStep, Owned

FOLLOWED = 4
"""Parameters of each optimizer whose gradients are looked at: evenly spaced, the first and the last among them."""
MOST = 64
"""Ways in which an optimizer steps, after which another one tells nothing."""
JUMP = 10.0
"""How many times the greatest of the last gradients one is that begins something new; likewise of the least."""
FADES = 0.97
"""What is left, of what is known of the greatest gradient, after each step."""
LEAST = 32
"""Steps of an optimizer after which it is known how large its gradients are."""

Fingerprint = tuple[object, ...]


@dataclass
class _Known:
    """What is known of one optimizer."""

    owned: Owned
    followed: tuple[Tensor, ...]
    known: set[Fingerprint] = field(default_factory=set)
    versions: tuple[int | None, ...] = ()
    rate: float = math.inf
    at: int = 0
    count: int = 0
    high: float = 0.0
    low: float = math.inf

    def jumps(self, rates: list[float], total: float | None) -> bool:
        """Return whether the learning rate or the gradients left what they were."""
        rate, before = max(rates, default=self.rate), self.rate
        self.rate = rate
        jumped = rate > JUMP * before > 0
        if total is None or not math.isfinite(total):
            return jumped
        self.count += 1
        jumped |= self.count > LEAST and not self.low <= JUMP * total <= JUMP * JUMP * self.high
        self.high, self.low = max(total, FADES * self.high), min(total, self.low / FADES)
        return jumped


class Fingerprints:
    """Compares each step of an optimizer with its earlier ones; descriptions are looked at, and no entry of a tensor.

    A fingerprint holds how many parameters have a gradient; of a few of them whether it is there, how often it was
    written to since the last step, and whether it may be; how many groups have a learning rate of 0; and what the last
    operations of the loss are. What was there once is known: players and losses that take turns show all they do
    soon. Besides, the learning rate and the size of the gradients, where the host knows it, may jump.
    """

    def __init__(self) -> None:
        self._optimizers: weakref.WeakKeyDictionary[object, _Known] = weakref.WeakKeyDictionary()

    def is_new(
        self, step: OptimizerStep, at: int, *, arrived: int, total: float | None, rates: list[float], root: object
    ) -> bool:
        """Return whether this step of an optimizer is unlike those before it.

        Args:
            step: It has been made.
            at: Its number.
            arrived: How many of the optimizer's parameters had a gradient.
            total: Sum of the norms of its gradients; ``None`` where nobody knows it without asking the device.
            rates: Learning rates of its groups, as far as the host knows them.
            root: What tells the last operations of the loss from others.
        """
        known = self._optimizers.get(step.optimizer)
        anew = known is None or known.owned is not step.owned
        if known is None or anew:
            known = self._optimizers[step.optimizer] = _begun(step.owned)
        passed, known.at = max(at - known.at, 1), at
        gradients = [p.grad for p in known.followed]
        versions = tuple([None if g is None else torch_private.version(g) for g in gradients])
        before, known.versions = known.versions or versions, versions
        written = [
            None if now is None else (now - (then or 0)) / passed for now, then in zip(versions, before, strict=True)
        ]
        trained = [p.requires_grad for p in known.followed]
        print_ = (arrived, *written, *trained, rates.count(0.0), root)
        unseen = print_ not in known.known and len(known.known) < MOST
        if unseen:
            known.known.add(print_)
        jumped = known.jumps(rates, total)
        return anew or unseen or jumped


def _begun(owned: Owned) -> _Known:
    """Return what is known of an optimizer before its first step."""
    last = len(owned.parameters) - 1
    places = sorted({last * part // (FOLLOWED - 1) for part in range(FOLLOWED)})
    return _Known(owned, tuple(owned.parameters[place] for place in places))
