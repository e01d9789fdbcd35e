"""Tells that a step was made in another way than those before it, by a few descriptions that cost next to nothing."""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass, field
from operator import attrgetter

from torch import Tensor

from gradflow_export.autograd_graph.nodes import head_of
from gradflow_export.hooks import torch_private
from gradflow_export.hooks.optimizer_steps import OptimizerStep, Owned

FOLLOWED = 4
"""Parameters of each optimizer whose gradients are looked at: evenly spaced, the first and the last among them."""
MOST = 64
"""Ways in which an optimizer steps, after which another one tells nothing."""
JUMP = 10.0
"""What times the last learning rate one is that begins something new."""
LEAST = 32
"""Numbers of a kind after which it is known between which they lie."""
BEYOND = 2.0
"""How far outside a number jumps, in widths of the range of those before it."""
FADES = 0.01
"""By how much of its width a range narrows with each number, so that it is that of the last ones."""
LOSS_WIDTH, GRADIENT_WIDTH = 0.1, 1.0
"""Least width of the range of losses, as a share of the greatest, and of the logarithms of the gradients' sizes."""

Fingerprint = tuple[object, ...]
_GRADIENT, _REQUIRES_GRAD = attrgetter("grad"), attrgetter("requires_grad")


class Range:
    """Between which numbers the last ones lay.

    Args:
        least: Its width at least.
        share: Its width at least, relative to the greatest of them: what never changed may change by rounding.
    """

    def __init__(self, least: float = 0.0, share: float = 0.0) -> None:
        self._least, self._share = least, share
        self._low, self._high, self._count = math.inf, -math.inf, 0

    def leaves(self, value: float | None) -> bool:
        """Take a number; return whether it lies far outside of those before it. One that is not finite is left out."""
        if value is None:
            return False
        low, high, outside = self._low, self._high, False
        self._count += 1
        if not low <= value <= high:  # nearly every number lies between, and costs no call
            if not math.isfinite(value):
                self._count -= 1
                return False
            if self._count == 1:
                low = high = value
            width = max(high - low, self._least, self._share * max(abs(low), abs(high)))
            outside = self._count > LEAST and not low - BEYOND * width <= value <= high + BEYOND * width
        narrower = FADES * (high - low)
        low, high = low + narrower, high - narrower
        self._low, self._high = (min(low, value)), (max(high, value))
        return outside


@dataclass
class _Known:
    """What is known of one optimizer."""

    owned: Owned
    followed: tuple[Tensor, ...]
    known: set[Fingerprint] = field(default_factory=set)
    versions: tuple[int | None, ...] = ()
    rate: float = math.inf
    at: int = 0
    loss: Range = field(default_factory=lambda: Range(share=LOSS_WIDTH))
    total: Range = field(default_factory=lambda: Range(least=GRADIENT_WIDTH))

    def jumps(self, rates: list[float], total: float | None, loss: float | None) -> bool:
        """Return whether the learning rate, the loss or the gradients left what they were."""
        rate, before = max(rates, default=self.rate), self.rate
        self.rate = rate
        size = None if total is None or not total > 0 else math.log(total)
        outside = self.loss.leaves(loss) | self.total.leaves(size)
        return outside or rate > JUMP * before > 0


class Fingerprints:
    """Compares each step of an optimizer with its earlier ones; descriptions are looked at, and no entry of a tensor.

    A fingerprint holds how many parameters have a gradient; of a few of them whether it is there, how often it was
    written to since the last step, and whether it may be; how many groups have a learning rate of 0; and what the last
    operations of the loss are. What was there once is known: players and losses that take turns show all they do
    soon. Besides, the learning rate, the loss and the size of the gradients may jump, where the host knows them.
    """

    def __init__(self) -> None:
        self._optimizers: weakref.WeakKeyDictionary[object, _Known] = weakref.WeakKeyDictionary()

    def is_new(
        self,
        step: OptimizerStep,
        at: int,
        *,
        arrived: int,
        total: float | None,
        rates: list[float],
        root: tuple[object, float | None],
    ) -> bool:
        """Return whether this step of an optimizer is unlike those before it.

        Args:
            step: It has been made.
            at: Its number.
            arrived: How many of the optimizer's parameters had a gradient.
            total: Sum of the norms of its gradients; ``None`` where nobody knows it without asking the device.
            rates: Learning rates of its groups, as far as the host knows them.
            root: What tells the last operations of the loss from others, and its value, as :func:`end_of` gives them.
        """
        known = self._optimizers.get(step.optimizer)
        anew = known is None or known.owned is not step.owned
        if known is None or anew:
            known = self._optimizers[step.optimizer] = _begun(step.owned)
        passed, known.at = max(at - known.at, 1), at
        versions = tuple([None if g is None else torch_private.version(g) for g in map(_GRADIENT, known.followed)])
        before, known.versions = known.versions or versions, versions
        written = [
            None if now is None else (now - (then or 0)) / passed for now, then in zip(versions, before, strict=True)
        ]
        print_ = (arrived, *written, *map(_REQUIRES_GRAD, known.followed), rates.count(0.0), root[0])
        unseen = print_ not in known.known and len(known.known) < MOST
        if unseen:
            known.known.add(print_)
        jumped = known.jumps(rates, total, root[1])
        return anew or unseen or jumped


def _begun(owned: Owned) -> _Known:
    """Return what is known of an optimizer before its first step."""
    last = len(owned.parameters) - 1
    places = sorted({last * part // (FOLLOWED - 1) for part in range(FOLLOWED)})
    return _Known(owned, tuple(owned.parameters[place] for place in places))


def end_of(root: Tensor) -> tuple[object, float | None]:
    """Return what the last operations of a loss are, and its value where that waits for no device."""
    known = type(root) is Tensor and root.is_cpu and root.numel() == 1 and not root.is_complex()
    return head_of(root.grad_fn), float(root.detach()) if known else None
