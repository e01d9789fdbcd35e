"""What every instrument is: how it is made, when it reads, and what the loop reports to it."""

from __future__ import annotations

import contextlib
import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from gradflow_export.hooks.compiled_calls import CompiledCode
from gradflow_export.hooks.guards import Part
from gradflow_export.hooks.module_hooks import Placed
from gradflow_export.hooks.readings import Clue, Drained
from gradflow_export.records.catalog import MetricSpec
from gradflow_export.records.step_record import Issue, Note

if TYPE_CHECKING:
    from gradflow_export.hooks.optimizer_steps import OptimizerStep, Owned

Cost = Literal["c", "G", "P", "H"]
"""Passes over tensors on a step at which it reads: constant, all gradients, all parameters, outputs of modules."""

Need = Literal["calls", "ranks"]
"""Without which an instrument is left out: calls of modules outside compiled code, several processes."""


@dataclass(frozen=True)
class Setting:
    """What an instrument is made from.

    Attributes:
        model: The unwrapped model; an instrument keeps weak references to it and its modules only.
        code: Whether calls of modules happen inside compiled code.
        part: Returns the decorator for hooks of a part, by name: an error is logged once and the part is disabled.
        blocks: Names of the blocks whose gains are measured, from input to output.
        note: Takes a remark or an issue for the record of the step under way.
        given: Further arguments of :class:`gradflow_export.Exporter` and its ``watch`` by name.
    """

    model: nn.Module
    code: CompiledCode
    part: Callable[[str], Part]
    blocks: tuple[str, ...] = ()
    note: Callable[[Note | Issue], None] = lambda _: None
    given: Mapping[str, Any] = field(default_factory=dict)


class Instrument:
    """Reads something of a model while it trains; a subclass overrides what it needs.

    Hooks return ``None`` and own only their own handles. An instrument never waits for the device: no ``.item()``,
    ``.cpu()`` or ``.tolist()``. After the stack that ``attach`` returns is closed the model is exactly as it was.
    """

    instrument: ClassVar[str]
    """Its name: of its interval, in the settings and in messages. Several may share one."""
    interval: ClassVar[int]
    """Steps between two readings once training has settled; 1 for one that reads at every recorded step."""
    cost: ClassVar[Cost] = "c"
    """What a step costs at which it reads."""
    needs: ClassVar[frozenset[Need]] = frozenset()
    """Without which it is left out."""
    every_step: ClassVar[bool] = False
    """Whether it is drained at each recorded step, due or not."""
    by_hand: ClassVar[bool] = False
    """Whether what lies between two calls of :meth:`gradflow_export.Exporter.step` is a step for it."""
    at_pass: ClassVar[bool] = False
    """Whether, where no optimizer steps, it looks at what the end of a backward pass left, as if a step began."""
    takes: ClassVar[str] = ""
    """The argument of :meth:`gradflow_export.Exporter.observe` that :meth:`take` is handed."""

    placed: Sequence[Placed] = ()
    """Hooks that are laid aside on steps that make no record."""
    armed = False
    """Whether it reads now."""

    @classmethod
    def make(cls, setting: Setting) -> Instrument:  # noqa: ARG003 - most need it
        """Make one for a model.

        Args:
            setting: The model, and what is known of it.

        Raises:
            ArgumentError: An argument of ``watch()`` names something that the model does not have.
            ArgumentTypeError: An argument of ``watch()`` has the wrong type.
        """
        return cls()

    @property
    def modules(self) -> int:
        """How many sites it reads: its interval grows with them; 0 when the model has none, and it is left out."""
        return 1

    @property
    def specs(self) -> tuple[MetricSpec, ...]:
        """The metrics it can give out."""
        return ()

    @property
    def news(self) -> bool:
        """Whether it holds what no further step may come to report."""
        return False

    @property
    def waits(self) -> bool:
        """Whether the record of the last step is held for :meth:`settle`."""
        return False

    def attach(self) -> contextlib.ExitStack:
        """Begin; closing the returned stack disarms it and gives up everything it holds."""
        stack = contextlib.ExitStack()
        stack.callback(self.forget)
        stack.callback(self.arm, on=False)
        return stack

    def arm(self, *, on: bool) -> None:
        """Begin to read, or with ``on=False`` read no more; calling it again does nothing."""
        self.armed = on

    def forget(self) -> None:
        """Forget what was collected: the step makes no record."""

    def drain(self) -> Drained:
        """Give out what was collected since the last call, and forget it."""
        return []

    def complete(self) -> Drained:
        """Give out what shows once all optimizers of a record have stepped; asked where it is due."""
        return []

    def last(self, owned: Sequence[Owned]) -> Drained:  # noqa: ARG002 - most have nothing to tell
        """Give out the state in which training has ended, where its last step made no record.

        Args:
            owned: The parameters of optimizers; where the model is gone, they are what there is.
        """
        return []

    def numbers(self) -> Mapping[str, float]:
        """Return metrics of the run that the host knows, as a record is made; no device is asked."""
        return {}

    def see(self, root: Tensor) -> None:
        """Look at a loss that is about to be propagated back, of whose graph nothing has been freed."""

    def take(self, value: Any) -> None:
        """Take what the user hands over with ``observe(<takes>=value)``."""

    def cleared(self) -> None:
        """Forget the backward passes so far: their gradients were cleared, and no optimizer has used one."""

    def wants(self, total: float | None) -> bool:  # noqa: ARG002 - most never do
        """Return whether :meth:`used` is to be called in this step.

        Args:
            total: Sum of the norms of the gradients; ``None`` where nobody knows it without asking the device.
        """
        return False

    def used(self, step: OptimizerStep, norms: Tensor, total: float | None, *, stepped: bool) -> None:
        """Look at the gradients that an optimizer uses.

        Args:
            step: The optimizer.
            norms: Norms of its gradients. Shape: ``[n]``, in the order of ``step.owned`` without those that have none.
            total: Their sum, where it is known.
            stepped: Whether they have been used already.
        """

    def noticed(self, optimizer: Optimizer) -> None:
        """Take notice of an optimizer that steps and owns no parameter of the model."""

    def before(self, step: OptimizerStep) -> None:
        """Look before an optimizer steps."""

    def after(self, step: OptimizerStep) -> None:
        """Look after it has stepped."""

    def skip(self, step: OptimizerStep) -> None:
        """Forget what was looked at before a step that a gradient scaler skipped."""

    def settle(self) -> None:
        """Read what came of the last step, now that the next forward pass has begun."""


class Reader(Instrument):
    """An instrument that reads evidence of silent mistakes; they share one part, one interval and one constructor.

    Args:
        setting: The model, of which only a weak reference is kept, and what is known of it.
    """

    instrument: ClassVar[str] = "wiring"
    interval: ClassVar[int] = 100
    looks: ClassVar[float] = math.inf
    """Armed steps in which it reads, from the first on: structure seldom changes."""

    def __init__(self, setting: Setting) -> None:
        self._model = weakref.ref(setting.model)
        self._code, self._guard = setting.code, setting.part(self.instrument)
        self._out: Drained = []
        self._facts: defaultdict[str, dict[str, float]] = defaultdict(dict)  # that the host knows, by layer
        self._looked = 0
        self._hooked = contextlib.ExitStack()

    @classmethod
    def make(cls, setting: Setting) -> Reader:
        """Make one for a model."""
        return cls(setting)

    def arm(self, *, on: bool) -> None:
        """Begin to read, in ``looks`` steps at most, or with ``on=False`` read no more."""
        on = on and self._looked < self.looks
        self._looked += on
        if on != self.armed:
            self.armed = on
            if on:
                self.listen(self._hooked)
            else:
                self._hooked.close()

    def listen(self, until: contextlib.ExitStack) -> None:
        """Begin to see calls, or whatever is seen only while it reads.

        Args:
            until: Is closed when it reads no more.
        """

    def forget(self) -> None:
        """Forget what was collected: the step makes no record."""
        self._out, self._facts = [], defaultdict(dict)

    def drain(self) -> Drained:
        """Give out what was collected since the last call, and forget it."""
        out = self._out
        for fact, values in self._facts.items():
            if values:
                out.append(Clue.by_layer(fact, values))
        self.forget()
        return out


def overrides(instrument: Instrument, method: str) -> bool:
    """Return whether an instrument does something when the loop reports an event.

    Args:
        instrument: Any.
        method: Name of a method of :class:`Instrument`.
    """
    return getattr(type(instrument), method) is not getattr(Instrument, method)
