"""Which optimizers step together, what each is called, and which train another model that shares parameters."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from torch import Tensor, nn

from gradflow_export.errors import ArgumentError, ArgumentTypeError, nearest
from gradflow_export.hooks.discover import site_name
from gradflow_export.hooks.optimizer_steps import OptimizerStep, Owned

GONE = 20
"""Records in a row without an optimizer after which it is taken for one that is used no more."""


class Joins(Enum):
    """How an optimizer that begins to step belongs to the record that is open."""

    BESIDE = auto()
    """It steps together with those that have, if any has."""
    ANEW = auto()
    """It has stepped already, or shares parameters with one that has: a new record begins."""
    INSTEAD = auto()
    """What has stepped was another model's optimizer: its part of the record is forgotten."""
    GUEST = auto()
    """It trains another model that shares parameters with this one, and makes no record."""


@dataclass(eq=False)
class Partner:
    """An optimizer.

    Attributes:
        number: Least that no other living optimizer has: 0 for the first that steps.
        site: The role of what it trains, else its class and number, ``"Adam.0"``.
        source: What it owns, to see whether that has changed.
        places: Numbers of the parameters it owns.
        guest: Whether it trains another model.
        steps: How often it has stepped.
        absent: Records in a row without it.
        awaited: Whether a record is complete only with it.
    """

    number: int
    site: str
    source: Owned
    places: frozenset[int]
    guest: bool = False
    steps: int = 0
    absent: int = 0
    awaited: bool = False


class Partners:
    """The optimizers that took part in a record, and those that have stepped for the next one.

    A record is complete when every optimizer that took part in the last ones has stepped once, but for those that own
    a parameter which another one has stepped with: they take turns, and each makes a record of its own. An optimizer
    that owns parameters outside the model, and of the model's fewer than another one does, trains another model.

    Attributes:
        roles: Names that the user gave to parts of the model.
    """

    def __init__(self) -> None:
        self._all: weakref.WeakKeyDictionary[object, Partner] = weakref.WeakKeyDictionary()
        self._stepped: list[Partner] = []
        self._taken: set[int] = set()
        # What follows from so many of them; nothing here keeps one, or its parameters, alive.
        self._count = 0
        self._names: tuple[str, ...] | None = None
        self._awaited: list[weakref.ref[Partner]] | None = None
        self._sole: weakref.ref[object] | None = None
        self._only: weakref.ref[Partner] | None = None
        self.roles: Roles | None = None

    def __bool__(self) -> bool:
        """Whether any optimizer has stepped yet."""
        return bool(self._all)

    def is_sole(self, optimizer: object) -> bool:
        """Whether this is the only one there has been: the usual case, which is known without a look at sets."""
        return self._sole is not None and self._sole() is optimizer

    @property
    def several(self) -> bool:
        """Whether it must be found out which backward pass is whose."""
        return self._sole is None or len(self._all) > 1

    @property
    def sites(self) -> tuple[str, ...]:
        """Names by number of the optimizers that train the model; empty unless there are several."""
        self._look()
        if self._names is None:
            names = {partner.number: partner.site for partner in self._all.values()}
            several = sum(not partner.guest for partner in self._all.values()) > 1
            every = range(max(names) + 1) if several else ()
            self._names = tuple(names.get(number, f"optimizer.{number}") for number in every)
        return self._names

    def admit(self, step: OptimizerStep) -> Joins:
        """Say how an optimizer that begins to step, and is not the only one, belongs to the open record."""
        partner = self._all.get(step.optimizer)
        replaced = False
        if partner is None or partner.source is not step.owned:
            partner = self._meet(step, partner)
            replaced = self._find_guests()
        if partner.guest:
            return Joins.GUEST
        self._sole = None
        if not partner.places.isdisjoint(self._taken):
            return Joins.ANEW
        return Joins.INSTEAD if replaced else Joins.BESIDE

    def partner(self, optimizer: object) -> Partner | None:
        """Return what is known of an optimizer, ``None`` where it never stepped."""
        return self._all.get(optimizer)

    def step(self, optimizer: object) -> bool:
        """Note a step; True when the record is complete."""
        only = None if self._only is None else self._only()
        if only is not None and self.is_sole(optimizer):
            only.steps += 1
            return True
        partner = self._all[optimizer]
        partner.steps += 1
        self._stepped.append(partner)
        self._taken |= partner.places
        self._look()
        if not partner.awaited:
            partner.awaited, partner.absent, self._awaited = True, 0, None
            return False
        if self._waits():
            return False
        own = self._own()
        if len(own) == 1:
            self._sole, self._only = weakref.ref(optimizer), weakref.ref(partner)
        for other in own:
            other.absent = 0
        self._start()
        return True

    def begin(self) -> None:
        """Begin a new record; what has long not stepped is waited for no more."""
        if self._sole is None and self._stepped:
            for partner in self._all.values():
                if partner.awaited and partner not in self._stepped:
                    partner.absent += 1
                    partner.awaited = partner.absent < GONE
            self._start()

    def _start(self, stepped: Sequence[Partner] = ()) -> None:
        """Begin a record that those have stepped for."""
        self._stepped, self._taken = list(stepped), set().union(*(partner.places for partner in stepped))
        self._awaited = None

    def _look(self) -> None:
        """Forget what follows from all of them where one has come or gone; a step among many asks no others."""
        if self._count != len(self._all):
            self._count, self._names, self._awaited = len(self._all), None, None

    def _own(self) -> list[Partner]:
        return [partner for partner in self._all.values() if partner.awaited and not partner.guest]

    def _waits(self) -> bool:
        """Whether the record waits for one that owns nothing of what has stepped."""
        if self._awaited is None:
            self._awaited = [weakref.ref(partner) for partner in self._own()]
        while self._awaited and ((one := self._awaited[-1]()) is None or not one.places.isdisjoint(self._taken)):
            self._awaited.pop()
        return bool(self._awaited)

    def _meet(self, step: OptimizerStep, known: Partner | None) -> Partner:
        """Take note of an optimizer, or of what it owns now."""
        places, self._count = step.owned.places, -1
        if known is not None:
            known.source, known.places = step.owned, places
            return known
        used = {partner.number for partner in self._all.values()}
        number = next(number for number in itertools.count() if number not in used)
        role = self.roles.of(step.owned.parameters) if self.roles is not None else None
        site = role or f"{type(step.optimizer).__name__}.{number}"
        if any(partner.site == site for partner in self._all.values()):
            site = f"{site}.{number}"
        partner = self._all[step.optimizer] = Partner(number, site, step.owned, places)
        return partner

    def _find_guests(self) -> bool:
        """Tell the model's own optimizers from others; True where one that has stepped turns out to be another's."""
        every = list(self._all.values())
        for partner in every:
            partner.guest = partner.source.outside and any(partner.places < other.places for other in every)
        mine = [partner for partner in self._stepped if not partner.guest]
        replaced = len(mine) < len(self._stepped)
        self._count = -1
        self._start(mine)
        return replaced


class Roles:
    """Parts of a model by name, such as actor and critic.

    Args:
        model: The unwrapped model; only weak references are kept.
        given: Modules of the model or their names, one or several for each role.

    Raises:
        ArgumentError: A name or module is no part of the model, or a role has none.
        ArgumentTypeError: It is no mapping of names to such.
    """

    def __init__(self, model: nn.Module, given: Mapping[str, Any] | None) -> None:
        if not isinstance(given or {}, Mapping) or not all(isinstance(name, str) and name for name in given or {}):
            raise ArgumentTypeError(
                f"roles expects names of parts of the model, such as roles={{'critic': model.critic}}, got {given!r}"
            )
        modules = {site_name(name): module for name, module in model.named_modules()}
        self._parts = {role: _modules(role, part, modules) for role, part in (given or {}).items()}

    def of(self, parameters: Iterable[Tensor]) -> str | None:
        """Return the role that holds all of these, the smallest of several; ``"a+b"`` where only several do together.

        ``None`` where a parameter has no role.
        """
        owned = {id(parameter) for parameter in parameters}
        held = {
            role: {id(p) for part in parts if (module := part()) is not None for p in module.parameters()}
            for role, parts in self._parts.items()
        }
        whole = [role for role, members in held.items() if owned <= members]
        if whole:
            return min(whole, key=lambda role: len(held[role]))
        some = [role for role, members in held.items() if owned & members]
        return "+".join(some) if owned <= set().union(*(held[role] for role in some)) else None


def _modules(role: str, part: Any, known: Mapping[str, nn.Module]) -> list[weakref.ref[nn.Module]]:
    several = isinstance(part, Sequence) and not isinstance(part, (str, nn.Module))
    parts = list(part) if several else [part]
    if not parts:
        raise ArgumentError(f"roles[{role!r}] is empty; name a module of the model.")
    out = []
    for one in parts:
        if isinstance(one, str):
            if one not in known:
                raise ArgumentError(
                    f"roles[{role!r}] names {one!r}, which is no module of the model{nearest(one, known)}"
                )
            out.append(weakref.ref(known[one]))
        elif isinstance(one, nn.Module):
            if all(one is not module for module in known.values()):
                raise ArgumentError(
                    f"roles[{role!r}] holds a {type(one).__name__} that is not part of the watched model; put networks "
                    "that are trained together into one nn.ModuleDict, and watch that."
                )
            out.append(weakref.ref(one))
        else:
            raise ArgumentTypeError(
                f"roles[{role!r}] must be a module of the model or its name, or a list of such, got "
                f"{type(one).__name__}; for example roles={{'critic': model.critic}}."
            )
    return out
