"""Backward passes: what was seen with each, how long it took, and which optimizers used its gradients."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from torch import Tensor, nn

from gradflow_export.hooks.optimizer_steps import Owned
from gradflow_export.hooks.parameter_slots import Slot, slots, tensors_at
from gradflow_export.instruments.gradients.stamps import GradientStamps, Stamp, is_zeroed, stamp
from gradflow_export.instruments.micro_batches import Pass, fold

LOOKED_AT = 8
"""Parameters that are asked whether they hold a gradient already; all of them would cost more than it tells."""
FOLD_AT = 256
"""Passes that wait for an optimizer before they are joined into one."""
MOST_READ = 1000
"""Passes of one step with each of which something may be held that no later pass adds up."""

Mask = npt.NDArray[np.bool_]
_NONE = type(None)


class Passes:
    """Attributes each backward pass to the optimizers that use its gradients.

    A pass counts for an optimizer that steps after it and owns a parameter whose gradient the pass changed, until that
    gradient is cleared, or an optimizer has stepped with it and another pass begins. Which gradients a pass changed is
    known from their version counters before and after it. With one optimizer it is not looked at: all passes since its
    last step are its own. A gradient counts as cleared when it is ``None`` at the next pass, or on the CPU when it is
    all zeros, or when it was written to after an optimizer's step.

    Args:
        model: Returns the model whose parameters the passes fill in, ``None`` when it is gone.
        on_cleared: Called where the gradients of all passes so far were cleared, or where there was none.

    Attributes:
        now: What the user reported since the last pass began, which is no pass yet.
        aside: What has come back since then, as by ``torch.autograd.grad``: it counts where no pass is seen.
        used: The passes of the open record, each once.
        under: Passes under way, by thread, and the state of the gradients before them.
        scan: Whether to find out which parameters each pass reaches; needed with several optimizers.
        begun: How many have begun since the last record, whatever became of their gradients.
    """

    def __init__(self, model: Callable[[], nn.Module | None], on_cleared: Callable[[], None] = lambda: None) -> None:
        self._model, self._on_cleared = model, on_cleared
        self._gradients = GradientStamps(model)
        self._mark: Stamp = None
        self._chosen: list[Slot] = []
        self.used, self._waiting = list[Pass](), list[Pass]()
        self.under: dict[int, tuple[Pass, list[Stamp] | None]] = {}
        self._stamps: list[Stamp] | None = None
        self._count, self._onto, self._seconds = 0, 0, 0.0
        self.begun, self._told = 0, (0, 0, 0.0)
        self._closure, self._evaluated = False, list[Pass]()
        self.now, self.scan, self._first = Pass(), False, True
        self.aside: Pass | None = None

    @property
    def latest(self) -> Pass:
        """The pass under way, or what comes back without one."""
        if self.under:
            return next(reversed(self.under.values()))[0]
        self.aside = self.aside or Pass()
        return self.aside

    def enter(self) -> None:
        """Begin a step that evaluates a closure: of several evaluations the first is that of the weights before it."""
        self._closure, self._evaluated = True, []

    def _leave(self) -> None:
        self._waiting = self._evaluated or self._waiting
        self._closure, self._evaluated = False, []

    def begin(self) -> Pass:
        """Begin a pass; earlier ones whose gradients nobody will use any more are forgotten."""
        if not (self._waiting or self.used or self.under):
            self._on_cleared()
        stamps = self._drop_cleared() if self._waiting else None
        begun, self.now, self.aside = self.now, Pass(), None
        self.count()
        scan = self.scan or self._first  # how many optimizers step with the first is not known yet
        if scan and stamps is None:
            stamps = self._gradients.read()
        self.under[threading.get_ident()] = begun, stamps if scan else None
        return begun

    def count(self, *, adds: bool = True) -> None:
        """Count a pass, and where it adds to gradients, whether it finds any."""
        self.begun, self._count = self.begun + 1, self._count + 1
        if not adds:
            return
        held = tensors_at(self._chosen)
        if not held or _NONE in map(type, held):
            held = tensors_at(self._choose())
        self._onto += True in [p is not None and p.grad is not None for p in held]

    def end(self, seconds: float | None) -> None:
        """End the pass that this thread began.

        Args:
            seconds: How long it took; ``None`` where it raised, and is forgotten.
        """
        entry = self.under.pop(threading.get_ident(), None)
        if entry is None or seconds is None:
            return
        ended, before = entry
        self._seconds += seconds
        self._stamps, self._mark = None, stamp(self._marked())
        if before is not None:
            after = self._gradients.read()
            if len(after) == len(before):
                touched = np.array([old != new for old, new in zip(before, after, strict=True)], dtype=np.bool_)
                ended.touched = touched if touched.any() else None
        # An optimizer may have stepped in the middle of it.
        if not ended.users or ended.touched is not None:
            self._wait(ended)

    def take_all(self) -> None:
        """Have the only optimizer there is use all passes since its last step."""
        if self.aside is not None:
            self._look_aside(self.aside)
        if self.now:
            self._waiting.append(self.now)
            self.now = Pass()
        self._leave()
        passes = [one for one in self._waiting if not one.users]
        passes.extend(one for one, _ in self.under.values() if not one.users)
        for one in passes:
            one.users.add(0)
        self.used.extend(passes)
        self._waiting.clear()

    def take(self, number: int, owned: Owned) -> tuple[list[Pass], list[Pass]]:
        """Have one of several optimizers use the passes whose gradients it steps with.

        Args:
            number: Of the optimizer.
            owned: Its parameters.

        Returns:
            Those passes, and those of them that are new to the open record.
        """
        if len(owned.sites) != self._gradients.size:
            self._gradients.list_parameters()
        if self.aside is not None:
            self._look_aside(self.aside)
        if self.now:
            # Seen after the last pass, or without any: what came before in this way is over.
            self._waiting = [one for one in self._waiting if one.touched is not None or not one.users]
            self._wait(self.now)
            self.now = Pass()
        under = [one for one, _ in self.under.values()]
        self._leave()
        mine = [one for one in (*self._waiting, *under) if _reaches(one, owned) and number not in one.users]
        for one in mine:
            one.users.add(number)
            one.consumed = _mask(self._gradients.size, owned.where, one.consumed)
        self.note_step()
        known = set(map(id, self.used))
        new = [one for one in mine if id(one) not in known]
        self.used.extend(new)
        return mine, new

    def pass_by(self, owned: Owned) -> bool:
        """Say whether another model's optimizer has stepped with all that waits, and forget time and number of it then.

        The passes themselves are forgotten when their gradients are cleared: until then an optimizer may use them too.
        """
        self.note_step()
        others = ~_mask(self._gradients.size, owned.where, None)
        for one in self._waiting:
            if one.touched is None or len(one.touched) != len(others) or (one.touched & others).any():
                return False
        self._count, self._onto, self._seconds = 0, 0, 0.0
        return True

    def note_step(self) -> None:
        """Remember the gradients that wait while an optimizer steps: those written to before the next pass are gone."""
        if self._waiting and self._stamps is None:
            self._stamps = self._gradients.read()

    def settle(self, *, several: bool) -> None:
        """Say whether there are several optimizers, once one has stepped."""
        self.scan = several
        if not several:
            self._waiting = [one for one in self._waiting if not one.users]

    def finish(self) -> None:
        """Begin a new record; a pass that no optimizer has used yet belongs to it."""
        self.begun, self._told, self.used, self._first = 0, (0, 0, 0.0), [], False

    def forget(self) -> None:
        """Forget every pass, also those under way."""
        self.finish()
        self._count, self._onto, self._seconds = 0, 0, 0.0
        self.now, self.aside = Pass(), None
        self._waiting, self._closure, self._evaluated = [], False, []
        for one, _ in self.under.values():
            one.users.add(-1)

    def scalars(self) -> dict[str, float]:
        """Return number and time of the passes of the open record, and the share that added to gradients."""
        count, onto, seconds = self._told
        count, onto, seconds = count + self._count, onto + self._onto, seconds + self._seconds
        self._told = count, onto, seconds
        self._count, self._onto, self._seconds = 0, 0, 0.0
        if not count:
            return {}
        out = {"runtime.backward_passes": float(count), "runtime.accumulated_share": onto / count}
        if seconds:
            out["runtime.backward_time"] = seconds
        return out

    def _look_aside(self, aside: Pass) -> None:
        """Count what came back without a pass, unless an optimizer is about to use one."""
        self.aside = None
        if not self.under and all(one.users for one in self._waiting):
            self.now.roots += aside.roots
            self.now.parts += aside.parts

    def _wait(self, one: Pass) -> None:
        self._waiting.append(one)
        if len(self._waiting) > FOLD_AT:
            self._waiting = [fold(self._waiting)]

    def _drop_cleared(self) -> list[Stamp] | None:
        """Forget passes whose gradients are gone or were used; return the state of the gradients where it was read."""
        plain = self._stamps is None and all(one.touched is None and not one.users for one in self._waiting)
        if plain or self._closure or self._first:
            model = self._model()
            gone = model is None or not any(p.grad is not None for p in model.parameters())
            if gone or is_zeroed(self._marked(), self._mark):
                self._drop([])
            if plain or self._closure or not self._waiting:
                return None
        here, earlier = self._gradients.read(), self._stamps
        if earlier is None or len(earlier) != len(here):
            earlier = here
        standing = np.array([new is not None and new == old for new, old in zip(here, earlier, strict=True)], np.bool_)
        kept = []
        for one in self._waiting:
            live = _live(one, self._gradients.size) & standing
            live[self._gradients.zeroed(map(int, np.flatnonzero(live)))] = False
            if live.any():
                kept.append(one)
                if one.touched is not None:
                    one.touched = live
        self._drop(kept)
        return here

    def _drop(self, kept: list[Pass]) -> None:
        """Forget the passes that wait, but for these; where none is left, all that has come since the last step."""
        was, self._waiting = self._waiting, kept
        if kept or self.under:
            return
        unused = [one for one in was if not one.users]
        if self._closure:
            self._evaluated = self._evaluated or unused
        elif unused:
            self._count, self._onto, self._seconds = 0, 0, 0.0
        self._on_cleared()

    def _marked(self) -> Tensor | None:
        parameter = self._chosen[0]() if self._chosen else None
        return None if parameter is None else parameter.grad

    def _choose(self) -> list[Slot]:
        model = self._model()
        trained = [] if model is None else [slot for slot, p in slots(model) if p.requires_grad]
        self._chosen = trained[:: -(-len(trained) // LOOKED_AT) or 1]
        return self._chosen


def _reaches(one: Pass, owned: Owned) -> bool:
    touched = one.touched
    return touched is None or len(touched) != len(owned.sites) or bool(touched[owned.where].any())


def _live(one: Pass, size: int) -> Mask:
    """Say which parameters hold a gradient of this pass that somebody may still use. Shape: ``[size]``."""
    live = np.ones(size, dtype=np.bool_)
    if one.touched is not None and len(one.touched) == size:
        live &= one.touched
    if one.consumed is not None and len(one.consumed) == size:
        live &= ~one.consumed
    return live


def _mask(size: int, where: npt.NDArray[np.int64], known: Mask | None) -> Mask:
    """Mark places, and those that were marked. Shape: ``[size]``."""
    mask = np.zeros(size, dtype=np.bool_)
    mask[where[where < len(mask)]] = True
    return mask if known is None or len(known) != len(mask) else mask | known
