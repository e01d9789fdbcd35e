"""The instruments of one exporter, and what the loop asks of them by name of an event."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from gradflow_export.engine.registry import stepped, taken
from gradflow_export.hooks.guards import Part
from gradflow_export.hooks.module_hooks import lay_aside
from gradflow_export.hooks.optimizer_steps import OptimizerStep
from gradflow_export.hooks.readings import Drained
from gradflow_export.instruments.base import Instrument, overrides
from gradflow_export.instruments.blocks import BlockInstrument
from gradflow_export.instruments.gradients.clipping import ClippingInstrument
from gradflow_export.instruments.gradients.parameters import GradientInstrument
from gradflow_export.instruments.loss import LossInstrument


@dataclass(frozen=True)
class Instruments:
    """The instruments of one exporter.

    Attributes:
        blocks: Of the spine, as are the next three: the loop calls them by name.
        gradients: Reads what the optimizers use.
        loss: Sees losses and backward passes.
        clipping: Sees what becomes of gradients between them.
        armed: Those of the registry, in the order in which they are armed, called and drained; the loop knows of them
            only what :class:`Instrument` says.
    """

    blocks: BlockInstrument
    gradients: GradientInstrument
    loss: LossInstrument
    clipping: ClippingInstrument
    armed: tuple[Instrument, ...] = ()

    @cached_property
    def stepped(self) -> tuple[Instrument, ...]:
        """Those that look around the steps of optimizers."""
        return tuple(each for each in self.armed if stepped(each))

    @cached_property
    def takes(self) -> frozenset[str]:
        """The arguments of ``observe()`` that instruments take."""
        return taken() | {each.takes for each in self.armed}

    def rest(self) -> Iterator[Callable[[], None]]:
        """See no calls of the model, of the criterion and of ``backward`` for a while; yield what ends that."""
        code = self.blocks.calls.code
        if code is None or not code.found:  # compiled code was made with the hooks that there were
            others = [placed for each in self.armed for placed in each.placed]
            yield lay_aside((*self.loss.placed, *others))
        yield self.loss.rest()

    def hand(self, name: str, value: object) -> None:
        """Hand something over to the instruments that take it."""
        for each in self.armed:
            if each.takes == name:
                each.take(value)

    def observe(self, tensors: dict[str, Any], part: Callable[[str], Part]) -> None:
        """Take what the user hands over by name; what one of them cannot use keeps the others from nothing."""
        for name in self.takes & tensors.keys():
            part(name)(self.hand)(name, tensors[name])
        rest = {name: value for name, value in tensors.items() if name not in self.takes}
        part("observe")(self.loss.observe)(rest, self.takes)

    @property
    def news(self) -> bool:
        """Whether an instrument holds what no further step may come to report."""
        return any(each.news for each in self.armed)

    @property
    def hooked(self) -> tuple[BlockInstrument | LossInstrument | ClippingInstrument | Instrument, ...]:
        """Those that see calls."""
        return (self.blocks, *self.armed, self.loss, self.clipping)

    def skip(self, step: OptimizerStep) -> None:
        """Forget gradients that are used for nothing; the loss counts."""
        self.gradients.forget(step.optimizer)
        self.blocks.forget()
        self.clipping.forget()
        self.loss.passes.note_step()
        for each in self.stepped:
            each.skip(step)

    def give_up(self) -> frozenset[str]:
        """Forget what was read of a step that has too many backward passes, or no end; return what is due: nothing."""
        self.arm(frozenset())
        self.blocks.forget()
        for each in self.armed:
            each.forget()
        return frozenset()

    def arm(self, due: frozenset[str]) -> None:
        """Have those look that are due, and no others."""
        self.loss.want_logits = "logits" in due
        self.clipping.armed = "clipping" in due
        self.blocks.sample_rows = "ranks" in due
        self.blocks.calls.arm(on=bool(due & {"blocks", "ranks"}))
        for each in self.armed:
            each.arm(on=each.instrument in due)


class _Drains(Protocol):
    def drain(self) -> Drained:
        """Give out what was collected since the last call, and forget it."""


def draining(each: _Drains, part: Part) -> Callable[[Drained], None]:
    """Return what adds what an instrument gives out to a list, under a guard."""
    return part(lambda into: into.extend(each.drain()))


class Asked:
    """What the loop asks of instruments in the step under way: of those that rest it asks nothing.

    Args:
        instruments: All of them.
        known: Names of those that have an interval; others are asked at every step.
        part: Returns what guards a part by name.

    Attributes:
        drains: Give out what was collected, in order.
    """

    def __init__(self, instruments: Instruments, known: Container[str], part: Callable[[str], Part]) -> None:
        self._blocks, self._loss = instruments.blocks, instruments.loss
        named: list[tuple[str, _Drains]] = [
            ("gradients", instruments.gradients),
            ("loss", instruments.loss),
            ("blocks", instruments.blocks),
            *((_due_name(each), each) for each in instruments.armed if overrides(each, "drain")),
        ]
        seeing = [each for each in instruments.armed if overrides(each, "see")]
        self._known = known
        self._drains = [(name, draining(each, part(name or "passes"))) for name, each in named]
        self._sees = [(_due_name(each), part(each.instrument)(each.see)) for each in seeing]
        self._late = draining(instruments.blocks, part("blocks"))
        self._all = True
        self.drains = [drain for _, drain in self._drains]

    def plan(self, due: frozenset[str], before: frozenset[str]) -> None:
        """Say who is asked.

        Args:
            due: Instruments that are due in the step under way.
            before: Those of the step before; they are drained once more, as a gradient may come late.
        """
        everywhere = due | before
        everywhere |= {"blocks"} if "ranks" in everywhere else set()
        if self._all or everywhere:
            self.drains = [drain for name, drain in self._drains if name in everywhere or name not in self._known]
            self._loss.on_root = [see for name, see in self._sees if name in due or name not in self._known]
            self._loss.follows = not due.isdisjoint(("blocks", "ranks"))
            self._all = bool(everywhere)

    def drain(self) -> Drained:
        """Return what was collected; of blocks that rest what came even later."""
        drained: Drained = []
        for drain in self.drains:
            drain(drained)
        if self._blocks.store.stirred:
            self._late(drained)
        return drained


def _due_name(each: Instrument) -> str:
    return "" if each.every_step else each.instrument


def guarded(some: Iterable[Instrument], event: str, part: Callable[[str], Part]) -> list[Callable[..., None]]:
    """Return a method of instruments, each under the guard of its own name.

    Guarded once: wrapping anew at every step would cost the training thread more than some of the readings.

    Args:
        some: Instruments.
        event: Name of a method of :class:`Instrument` that returns nothing.
        part: Returns what guards a part by name.
    """
    return [part(each.instrument)(getattr(each, event)) for each in some]


def gathered(
    some: Iterable[Instrument], event: str, part: Callable[[str], Part]
) -> list[tuple[str, Callable[[Callable[[Any], None]], None]]]:
    """Return what asks instruments that answer an event, and hands the answer on, each with the instrument's name.

    Args:
        some: Instruments.
        event: Name of a method of :class:`Instrument` that returns something.
        part: Returns what guards a part by name.
    """

    def asking(each: Instrument) -> Callable[[Callable[[Any], None]], None]:
        answer = getattr(each, event)
        return part(each.instrument)(lambda take: take(answer()))

    return [(each.instrument, asking(each)) for each in some if overrides(each, event)]
