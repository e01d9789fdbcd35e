"""What a step that makes no record is looked at for: a handful of numbers, a tenth of a record's cost."""

from __future__ import annotations

import math
from itertools import accumulate, pairwise
from operator import attrgetter

from torch import Tensor
from torch.optim.optimizer import Optimizer

from gradflow_export.hooks import torch_private
from gradflow_export.instruments.gradients.fingerprints import JUMP, MOST
from gradflow_export.metrics.arrays.one_pass import tensor_reader
from gradflow_export.native.tensors import HEAD

FOLLOWED = 4
"""Parameters whose gradients are looked at: evenly spaced, the first and the last among them."""
ENTRIES = 16
"""Entries of each. A glance takes its time for code that was not used for milliseconds, of which NumPy has much."""
PART, PARTS = 128, 16
"""Of all parameters so many are counted at a time that are frozen or get no gradient, or as many as make so many parts
of large models."""
FAINT = 1e-8
"""What a gradient counts at least, relative to all squares: one that vanishes shows, and one that is 0 is a number."""
LEAST = 16
"""Numbers after which it is known how they vary."""
FAST, SLOW = 0.25, 1 / 64
"""Weight of the newest number in what is compared, and in what it is compared with."""
FAR, FURTHER, FARTHEST = 1.75, 1.5, 3.0
"""How far the last numbers may be from those before, in standard deviations of one number: so far at first, then as far
as they ever were in this run, so many times as far as what was reported, and at most so far."""
CLIP, STRAYS = 4.0, 8
"""What a number counts at most, in the same unit, so that one alone tells nothing, and three in a row do; so many do
that lie on either side."""
RARELY = 64
"""Looks, for each kind of step that was seen once, until another new one is news: as many kinds as were seen once in so
many looks are about to come in as many again (Good 1953)."""
LEAST_DEVIATION = 0.1
"""Of logarithms: what varies less is taken to vary by a tenth."""

TINY = 1e-300

_GRADIENT = attrgetter("grad")
_GROUPS = attrgetter("param_groups")
_REQUIRES_GRAD = attrgetter("requires_grad")


class Chart:
    """Tells when numbers leave the level that they had: a control chart of a moving average (Roberts 1959).

    Its limit is learned from the run, whatever the distribution of the numbers: of averages that are alike but for
    chance the greatest so far is exceeded ever more rarely. What was reported once has to be exceeded as well.

    Attributes:
        doubts: How many of the last numbers in a row were far away, so that the next one is worth a look at once.
    """

    def __init__(self) -> None:
        self.doubts = 0
        self._count, self._limit = 0, FAR
        self._fast = self._mean = self._square = 0.0

    def leaves(self, value: float) -> bool:
        """Take a number; return whether the last ones lie far from those before. Then the next begin a new level."""
        known = self._count > LEAST
        if not (known or math.isfinite(value)):
            return False
        if not self._count:
            self._fast, self._mean, self._square = 0.0, value, 0.0
        deviation = max(math.sqrt(self._square), LEAST_DEVIATION)
        away = value - self._mean if math.isfinite(value) else math.inf
        most = CLIP * deviation if known else math.inf
        self.doubts = self.doubts + 1 if abs(away) >= most else 0
        self._fast += FAST * (min(max(away, -most), most) - self._fast)
        far = abs(self._fast) / deviation if known else 0.0
        left = far > self._limit or self.doubts == STRAYS
        if left or not self.doubts:
            self._limit = min(max(self._limit, FURTHER * far if left else far), FARTHEST)
        if left:
            self.doubts = self._count = 0
        elif not self.doubts:
            self._count += 1
            slow = max(SLOW, 1 / self._count)
            self._fast -= slow * away
            self._mean += slow * away
            self._square += slow * (away * away - self._square)
        return left


class Glance:
    """Compares steps of an optimizer with its earlier ones by a few descriptions and a few entries of gradients.

    Args:
        optimizer: The only one there is.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        parameters = [p for group in _GROUPS(optimizer) for p in group["params"] if isinstance(p, Tensor)]
        last = len(parameters) - 1
        places = sorted({last * part // (FOLLOWED - 1) for part in range(FOLLOWED)}) if parameters else []
        self._followed = [parameters[place] for place in places]
        copies = []
        for number, parameter in enumerate(self._followed):
            stride = max(-(-parameter.numel() // ENTRIES), 1)
            copies.append((number, stride, -(-parameter.numel() // stride)))
        ends = list(accumulate(count for _, _, count in copies))
        self._spans = list(pairwise([0, *ends]))
        plain = all(p.device.type == "cpu" and type(p.data) is Tensor for p in self._followed) and bool(copies)
        self._reader = tensor_reader(len(copies), 0, copies, sum(n for _, _, n in copies)) if plain else None
        self._known: set[tuple[object, ...]] = set()
        self._once: set[tuple[object, ...]] = set()  # of them those that were seen once
        self._versions: tuple[int | None, ...] = ()
        self._rate, self._at, self._looks = 0.0, 0, 0
        self._chart = Chart()

    @property
    def doubts(self) -> bool:
        """Whether only the next step can tell whether the last one looked at was a stray one."""
        return self._chart.doubts > 0

    def sees(self, optimizer: Optimizer, at: int, training: bool | None = None) -> bool:
        """Return whether a step that is about to be made is unlike those before it.

        Args:
            optimizer: Whose step.
            at: Its number.
            training: The mode of the model.
        """
        gradients = list(map(_GRADIENT, self._followed))
        if self.doubts:  # steps of different distances are not written to alike
            return self._jumps(gradients)
        passed, self._at = max(at - self._at, 1), at
        self._looks += 1
        before = self._versions
        self._versions = versions = tuple([None if g is None else torch_private.version(g) for g in gradients])
        written = [
            None if now is None else (now - (then or 0)) / passed
            for now, then in zip(versions, before or versions, strict=True)
        ]
        groups = _GROUPS(optimizer)
        rates = [r for r in [group.get("lr") for group in groups] if isinstance(r, (int, float))]
        rate, highest = max(rates, default=0.0), self._rate
        self._rate = max(rate, highest)
        kind = (rates.count(0.0), training, *self._counts(groups), *written)
        if before and kind not in self._known and len(self._known) < MOST:
            told = self._looks > LEAST + RARELY * len(self._once)
            self._known.add(kind)
            self._once.add(kind)
            if told:
                return True
        else:
            self._once.discard(kind)
        return rate > JUMP * highest > 0 or self._jumps(gradients)

    def _counts(self, groups: list[dict[str, list[Tensor]]]) -> tuple[int, ...]:
        """Return how many parameters there are, and how many of a part of them are trained and have a gradient."""
        held = [group["params"] for group in groups]
        count = sum(map(len, held))
        size = max(PART, -(-count // PARTS))
        begin = self._looks * size % (-(-count // size) * size or 1)
        some: list[Tensor] = []
        before = 0
        for parameters in held:  # of many groups no list of all
            some += parameters[max(begin - before, 0) : max(begin + size - before, 0)]
            before += len(parameters)
        present = [p is not None for p in map(_GRADIENT, some)]
        return count, begin, sum(map(_REQUIRES_GRAD, some)), sum(present)

    def _jumps(self, gradients: list[Tensor | None]) -> bool:
        """Return whether the size of the gradients has left its level, where that is known without a wait."""
        reader = self._reader
        if reader is None or {*map(type, gradients)} != {Tensor}:
            return False
        read = reader.read(gradients)
        if read is None:
            return False
        entries: list[float] = list(read.data[HEAD:])
        squares = [sum([x * x for x in entries[begin:end]]) for begin, end in self._spans]
        total: float = sum(squares)
        if math.isfinite(total):
            faint = FAINT * total + TINY
            total = sum([math.log(square + faint) for square in squares]) / (2 * len(squares))
        return self._chart.leaves(total)
