"""Which block's output goes to the loss through which other block: read once from the autograd graph."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gradflow_export.autograd_graph.nodes import edges, sources_in

LEARN_STEPS = 3
"""Sampled steps that are followed from the loss back; a new block called later is followed again."""
LOSS = -1


@dataclass(frozen=True)
class Call:
    """One call of a block that a loss depends on.

    Attributes:
        block: Which block.
        number: Which of all calls; one call may give out several tensors.
        through: The call that everything of it passes next on its way, an index into the walk, or ``LOSS``.
    """

    block: int
    number: int
    through: int


class _Walk:
    """The tree of calls found on the way back from one loss."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._depth: list[int] = []

    def add(self, call: Call) -> int:
        self._depth.append(1 if call.through == LOSS else self._depth[call.through] + 1)
        self.calls.append(call)
        return len(self.calls) - 1

    def common(self, a: int, b: int) -> int:
        """Return the first call that both must pass."""
        while a != b:
            if b == LOSS or (a != LOSS and self._depth[a] >= self._depth[b]):
                a = self.calls[a].through
            else:
                b = self.calls[b].through
        return a


class Junctions:
    """Finds for every block the next one that all it gives must pass on its way to the loss.

    That is the immediate post-dominator among the blocks (Lengauer and Tarjan 1979, TOPLAS 1). Only between these two
    is the ratio of gradient norms what a block does to the gradient, and only there is a direction lost that the block
    drops: heads side by side, branches, a loss on an inner layer, and players of a game come out as what they are.

    The node of each output gets an entry in its autograd metadata, which dies with the graph: no tensor is kept. A pass
    that is not seen (its loss was not handed over) shows in how many gradients arrive; what it feeds is cut.

    Attributes:
        steps: How many were learned from.
        left: Steps in which calls are still worth marking.
    """

    def __init__(self) -> None:
        self._key = f"gradflow_block_{id(self)}"
        self.steps = 0
        self._past: set[int] = set()
        self.left = LEARN_STEPS
        self._numbers = itertools.count()
        self._walks: list[list[Call]] = []
        self._reached: Counter[int] = Counter()
        self._arrived: Counter[int] = Counter()
        self._targets: defaultdict[int, set[int]] = defaultdict(set)
        self._fed: Counter[tuple[int, int]] = Counter()

    def mark(self, index: int, output: Any) -> None:
        """Mark what a call of block ``index`` gave out."""
        entry = (index, next(self._numbers))
        for tensor in tensors_of(output):
            if tensor.grad_fn is not None:
                metadata: Any = tensor.grad_fn.metadata  # annotated in torch as a function, which it is not
                metadata[self._key] = entry

    def follow(self, loss: Tensor) -> None:
        """Go from a loss back through its graph, once, if a step is being learned."""
        if self.left <= 0 or loss.grad_fn is None:
            return
        root: Any = loss.grad_fn
        behind = sources_in(root)
        if behind is None:
            self.left = 0
            return
        waiting = Counter(itertools.chain.from_iterable(behind.values()))
        walk = _Walk()
        ready, through = [root], {root: LOSS}
        while ready:
            node = ready.pop()
            here = through.pop(node)
            own = behind[node]
            entry = node.metadata.get(self._key) if own or edges(node) else None
            if entry is not None and entry[1] not in self._past:
                here = walk.add(Call(entry[0], entry[1], here))
            for below in own:
                through[below] = walk.common(through[below], here) if below in through else here
                waiting[below] -= 1
                if not waiting[below]:
                    ready.append(below)
        if walk.calls:
            self._walks.append(walk.calls)

    def settle(self, arrivals: Mapping[int, int]) -> None:
        """End a step.

        Args:
            arrivals: How many gradients came to the outputs of each block.
        """
        if self._walks:
            self.left -= 1
            self.steps += 1
            self._arrived.update(arrivals)
            known = len(self._reached)
            for calls in self._walks:
                self._learn(calls)
            if len(self._reached) > known:  # there may be more players, whose losses come after this one's step
                self.left = max(self.left, 1)
        self.forget()

    def forget(self) -> None:
        """Forget a step: calls that its losses reached no longer count.

        Those that none reached still do: where each of several optimizers has a loss of its own, all players are often
        called before the first loss.
        """
        self._past.update(call.number for calls in self._walks for call in calls)
        self._walks = []
        if self.left <= 0:
            self._past.clear()

    def again(self) -> None:
        """Follow one more step, because a block was called for the first time."""
        if self._reached:
            self.left = max(self.left, 1)

    def _learn(self, calls: Sequence[Call]) -> None:
        fed: defaultdict[tuple[int, int], set[int]] = defaultdict(set)
        reached: defaultdict[int, set[int]] = defaultdict(set)
        for call in calls:
            reached[call.block].add(call.number)
            above = call.through
            while above != LOSS and calls[above].block == call.block:  # a block that is called on its own output
                above = calls[above].through
            target = LOSS if above == LOSS else calls[above].block
            self._targets[call.block].add(target)
            while above != LOSS and calls[above].block == target:
                fed[call.block, target].add(calls[above].number)
                above = calls[above].through
        self._reached.update({block: len(numbers) for block, numbers in reached.items()})
        self._fed.update({pair: len(numbers) for pair, numbers in fed.items()})

    def following(self, order: Sequence[int]) -> dict[int, int]:
        """Return for each block that was reached the next one it must pass, ``LOSS`` where there is none.

        Args:
            order: Blocks in the order of their first calls.
        """
        out: dict[int, int] = {}
        for block in reversed([block for block in order if self._reached[block]]):
            after = _common(self._targets[block], out)
            out[block] = after if after != LOSS and self._comparable(block, after) else LOSS
        return out

    def _comparable(self, block: int, after: int) -> bool:
        """Whether the gradients at both come from the same passes, and all that enters ``after`` holds ``block``."""
        if self._arrived[block] * self._reached[after] != self._arrived[after] * self._reached[block]:
            return False
        return len(self._targets[block]) > 1 or self._fed[block, after] == self._reached[after]


def _common(targets: Iterable[int], following: Mapping[int, int]) -> int:
    """Return the first block that all ways from some blocks pass, themselves included, ``LOSS`` where there is none."""
    first, *others = targets
    if not others:  # nearly always: a way to the loss is as long as the model is deep
        return first
    routes = [_route(target, following) for target in others]
    return next((step for step in _route(first, following) if all(step in route for route in routes)), LOSS)


def _route(block: int, following: Mapping[int, int]) -> dict[int, None]:
    """Return a block and all it must pass, in their order."""
    route: dict[int, None] = {}
    while block != LOSS and block not in route:
        route[block] = None
        block = following.get(block, LOSS)
    return route


def tensors_of(output: Any) -> Iterable[Tensor]:
    """Yield the tensors of an output, in nested lists, tuples and mappings too."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, (tuple, list, Mapping)):
        for part in output.values() if isinstance(output, Mapping) else output:
            yield from tensors_of(part)
