"""Which instruments there are: those that come with the package, in order, and those of installed packages."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial, partialmethod
from importlib import import_module
from types import MappingProxyType
from typing import Any

from torch import nn

from gradflow_export.checks import below
from gradflow_export.extensions import Extension, extensions, made
from gradflow_export.hooks.guards import Part
from gradflow_export.hooks.readings import Clue, ClueSample, Drained, Pending, Sample
from gradflow_export.hooks.shard_layout import is_spread
from gradflow_export.instruments.base import Instrument, Setting, overrides
from gradflow_export.records.catalog import CUSTOM_PREFIX
from gradflow_export.schedule import INTERVALS

RECURRENT = (nn.RNNBase, nn.RNNCellBase)


@dataclass(frozen=True)
class Entry:
    """One instrument.

    Attributes:
        where: Module below ``gradflow_export``, and class.
        types: Its module is loaded only for a model that has a layer of one of these; empty for every model.
    """

    where: str
    types: tuple[type[nn.Module], ...] = ()

    def load(self) -> type[Instrument]:
        """Return the class."""
        module, _, name = self.where.partition(":")
        found: type[Instrument] = getattr(import_module(f"gradflow_export.{module}"), name)
        return found


REGISTRY = (
    Entry("instruments.origin:OriginInstrument"),
    Entry("instruments.updates:UpdateInstrument"),
    Entry("instruments.moments:MomentInstrument"),
    Entry("instruments.runtime:RuntimeInstrument"),
    Entry("instruments.activations.modules:ActivationInstrument"),
    Entry("instruments.attention:AttentionInstrument"),
    Entry("instruments.policy:PolicyInstrument"),
    Entry("instruments.recurrent:RecurrentInstrument", RECURRENT),
    Entry("instruments.architecture:PictureInstrument"),
    Entry("instruments.discrete.updates:DiscreteInstrument"),
    Entry("instruments.replicas:ReplicaInstrument"),
    Entry("instruments.copies:CopyInstrument"),
)
"""The instruments that read metrics, in the order in which they are armed, called and drained.

After them come the readers of checks, which are found where they lie: ``gradflow_export.checks.below(Instrument)``.
"""


def kinds(types: Collection[type[nn.Module]] | None = None) -> Iterator[type[Instrument]]:
    """Yield the classes of all instruments that come with the package, in order.

    Args:
        types: Kinds of the modules of a model; those that read other kinds alone are then left out.
    """
    for entry in REGISTRY:
        if types is None or not entry.types or any(issubclass(each, entry.types) for each in types):
            yield entry.load()
    yield from below(Instrument)


def make_instruments(setting: Setting) -> tuple[Instrument, ...]:
    """Return the instruments that have something to read in a model.

    Args:
        setting: The model, and what is known of it.

    Raises:
        ArgumentError: An argument of ``watch()`` names something that the model does not have.
        ArgumentTypeError: An argument of ``watch()`` has the wrong type.
    """
    types = {type(module) for module in setting.model.modules()}
    own = (kind.make(setting) for kind in kinds(types) if _can_run(kind, setting))
    return tuple(each for each in (*own, *_further(setting)) if each.modules)


def stepped(instrument: Instrument) -> bool:
    """Return whether an instrument looks around the steps of optimizers."""
    return any(overrides(instrument, event) for event in ("before", "after", "skip", "settle"))


def taken() -> frozenset[str]:
    """Return the arguments of ``observe()`` that instruments of ours take, whether this model has them or not."""
    return frozenset(kind.takes for kind in kinds(())) - {""}


def _can_run(kind: type[Instrument], setting: Setting) -> bool:
    there = {"calls": not setting.code.found, "ranks": is_spread()}
    return all(there[need] for need in kind.needs)


def _further(setting: Setting) -> Iterator[Instrument]:
    """Yield the instruments of installed packages; one that fails is left out, and one line says so."""
    names = {*INTERVALS, *(kind.instrument for kind in kinds(()))}

    def make(extension: Extension) -> Instrument | None:
        kind = extension.made
        if not issubclass(kind, Instrument):
            raise TypeError(f"{kind.__name__} is no subclass of gradflow_export.instruments.base.Instrument")
        if kind.instrument in names:
            raise ValueError(f"there is an instrument called {kind.instrument!r} already; choose another name")
        if type(kind.interval) is not int or kind.interval < 1:
            raise ValueError(f"interval must be a number of steps of at least 1, got {kind.interval!r}")
        names.add(kind.instrument)
        if not _can_run(kind, setting):
            return None
        part = setting.part(str(extension))
        found: Instrument = kind.make(replace(setting, part=lambda _: part))
        found.__class__ = _shielded(type(found), part)
        return found

    return (each for each in made(extensions("instruments"), make) if each is not None)


def _shielded(kind: type[Instrument], part: Part) -> type[Instrument]:
    """Return a subclass whose errors disable the instrument, instead of reaching the user's loop.

    Args:
        kind: The class of an instrument that another package made.
        part: Logs the first error and stops the rest.
    """
    shields: dict[str, Any] = {}
    for name, default in _EVENTS.items():
        if getattr(kind, name) is not getattr(Instrument, name):
            found = inspect.getattr_static(kind, name)
            if isinstance(found, property) and found.fget is not None:
                shields[name] = property(partial(_kept, part, found.fget, default))
            elif callable(found):
                shields[name] = partialmethod(_call, part, found, default)
    shields["attach"] = partialmethod(_attach, part, kind.attach)
    for name, shield in (("drain", _drain), ("complete", _drain), ("last", _drain), ("numbers", _numbers)):
        if getattr(kind, name) is not getattr(Instrument, name):
            shields[name] = partialmethod(shield, part, getattr(kind, name))
    return type(kind.__name__, (kind,), shields)


_EVENTS: Mapping[str, Any] = MappingProxyType(
    {
        "modules": 0, "specs": (), "news": False, "waits": False, "arm": None, "forget": None, "see": None,
        "take": None, "cleared": None, "wants": False, "used": None, "noticed": None, "before": None, "after": None,
        "skip": None, "settle": None,
    }
)  # fmt: skip
"""What the loop asks an instrument, and the answer of one that failed."""


def _kept(part: Part, ask: Callable[..., Any], default: Any, *args: Any, **kwargs: Any) -> Any:
    answer = [default]

    def run() -> None:
        answer[0] = ask(*args, **kwargs)

    part(run)()
    return answer[0]


def _call(self: Instrument, part: Part, method: Callable[..., Any], default: Any, *args: Any, **kwargs: Any) -> Any:
    return _kept(part, method, default, self, *args, **kwargs)


def _attach(self: Instrument, part: Part, attach: Callable[[Any], Any]) -> contextlib.ExitStack:
    inner, outer = _kept(part, attach, None, self), contextlib.ExitStack()

    def close() -> None:
        try:  # also where it failed meanwhile: its hooks are to be taken away
            inner.close()
        except Exception as error:
            part.failed(error)

    if inner is not None:
        outer.callback(close)
    return outer


def _drain(self: Instrument, part: Part, drain: Callable[[Any], Drained]) -> Drained:
    def checked() -> Drained:
        return [_checked(item) for item in drain(self)]

    found: Drained = _kept(part, checked, [])
    return found


def _numbers(self: Instrument, part: Part, numbers: Callable[[Any], Mapping[str, float]]) -> Mapping[str, float]:
    def checked() -> dict[str, float]:
        return {_own(metric): float(value) for metric, value in numbers(self).items()}

    found: Mapping[str, float] = _kept(part, checked, {})
    return found


def _own(metric: str) -> str:
    """Return the name of a metric of somebody's own.

    Raises:
        ValueError: It has not the prefix of such metrics.
    """
    if not metric.startswith(CUSTOM_PREFIX):
        raise ValueError(f"the metric of an own instrument begins with {CUSTOM_PREFIX!r}, got {metric!r}")
    return metric


def _checked(item: Any) -> Any:
    """Return what an instrument gave out.

    Raises:
        TypeError: It is no reading.
        ValueError: It is of a metric without the prefix of own metrics, or values and sites do not fit together.
    """
    if not isinstance(item, (Pending, Sample)):
        raise TypeError(f"drain() must return Pending, Sample, Clue or ClueSample, got {type(item).__name__}")
    if isinstance(item, (Clue, ClueSample)):
        if "." not in item.metric:
            raise ValueError(f"a fact is called kind.name, got {item.metric!r}")
    else:
        _own(item.metric)
    if isinstance(item, Pending):
        count = len(item.sites) if item.where is None else len(item.where)
        if tuple(item.values.shape) != (count,):
            raise ValueError(f"{item.metric} has values of shape {tuple(item.values.shape)} for {count} sites")
    return item
