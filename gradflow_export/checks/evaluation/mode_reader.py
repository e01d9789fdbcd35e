"""In which mode the model runs: whether it evaluates without dropout, and trains with it."""

from __future__ import annotations

import contextlib
import itertools
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from gradflow_export.checks.evaluation.sizes import EvaluationSizes
from gradflow_export.hooks import torch_private
from gradflow_export.hooks.discover import site_name
from gradflow_export.hooks.function_spy import Spy, spies_on
from gradflow_export.hooks.guards import Guard, hook_all_calls
from gradflow_export.hooks.module_hooks import ModuleHook, Placed, hook_calls, is_plain_call
from gradflow_export.hooks.readings import Drained
from gradflow_export.instruments.base import Reader, Setting
from gradflow_export.metrics.arrays.samples import even_sample

FIRST_LOOKS = 2
"""Passes in evaluation mode that are looked at closely at first; later one whenever random numbers were drawn."""
SHOWN = 32
"""Modules named at most."""
PARTS = 32
"""Children of a model whose own forward pass is not called that are looked at, at most."""
DROPOUT, NOISE = "mode.evaluation_dropout", "mode.evaluation_noise"
DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
SOURCES = ("normal", "rand", "rand_like", "randn", "randn_like")
"""Functions that draw from a continuous distribution."""


class ModeInstrument(Reader):
    """Looks at the mode of each of the model's own forward passes, and at what is random in evaluation mode.

    Random numbers are detected by the state of the generators before and after a pass: at the first passes in
    evaluation mode, the 4th, the 8th and so on. Reported are dropout and noise of a continuous distribution; choices
    that are drawn, as of an action or a token, are what some models are for. Where a step has come and the model itself
    was not called, calls of its children are passes until it is: some training loops never call anything else.
    """

    every_step: ClassVar[bool] = True

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._sizes = EvaluationSizes(setting.model, setting.blocks, guard=self._guard)
        self._evaluations = 0
        self._close = False
        self._look: _Look | None = None
        self._before: list[Tensor] = []
        self._trained = self._slept = False
        self._training = self._quiet = self._asleep = 0
        self._later: dict[str, dict[str, float]] = {DROPOUT: {}, NOISE: {}}
        self._entered: _Given | None = None
        self._again = False
        self._parts = contextlib.ExitStack()
        self._unmeasured: tuple[str, ...] | None = None
        self._called = True
        self.placed: list[Placed] = []

    @property
    def news(self) -> bool:
        """Whether something was seen in evaluation that no step has reported yet."""
        return bool(self._facts[DROPOUT] or self._facts[NOISE])

    def attach(self) -> contextlib.ExitStack:
        """Begin; closing the returned stack takes the hooks away."""
        stack, model = super().attach(), self._model()
        if model is not None:
            begin, end = ModuleHook(self._guard(self._begin)), ModuleHook(self._guard(self._end))
            stack.callback(self._stop)
            self.placed = [hook_calls([(model, begin)], before=True), hook_calls([(model, end)], always=True)]
            for placed in self.placed:
                stack.callback(placed)
            stack.callback(self._parts.close)
            self._called = False
        return stack

    def forget(self) -> None:
        """Forget the passes since the last step."""
        self._out, self._facts, self._entered = [], defaultdict(dict), None
        self._training = self._quiet = self._asleep = 0

    def drain(self) -> Drained:
        """Give out what was seen since the last step; nothing where every pass ran in the mode it should."""
        model = self._model()
        quiet = acting(model, training=True) if self._quiet and model is not None else ()
        self._facts["mode.evaluation_training"] = dict.fromkeys(quiet, float(self._quiet))
        begins = model.named_modules() if model is not None and self._training and not self._trained else ()
        self._facts["mode.training_dropout"] = {
            site_name(name): m.p for name, m in begins if isinstance(m, torch_private.Dropout) and m.p > 0.5
        }
        asleep = self._asleep > 0 and self._training == 0
        if model is not None and asleep and not self._trained and self._unmeasured is None:
            self._unmeasured = unmeasured(model)  # once: in evaluation mode they stay as they are
        asleep = asleep and (self._trained or bool(self._unmeasured))
        if model is not None and (asleep or self._slept) and (names := acting(model, training=not asleep)):
            names = names if self._trained or self._unmeasured is None else self._unmeasured
            self._facts["mode.training_evaluation"] = dict.fromkeys(names, float(asleep))
            self._slept = asleep
        self._trained |= self._training > 0
        self._out, self._sizes.told = self._sizes.told, []
        if model is not None and not self._called:  # a step has come, and the model itself was not called for it
            self._called = True
            if not self._code.shows:  # compiled code calls nobody, and would be compiled anew
                part = ModuleHook(self._guard(self._part_begins))
                children = [(child, part) for child in itertools.islice(parts_of(model), PARTS)]
                self._parts.callback(hook_calls(children, before=True))
        return super().drain()

    def _begin(self, module: nn.Module, given: Any, _output: Any = None) -> None:
        self._called = True
        self._parts.close()
        gradients = torch.is_grad_enabled()
        if module.training:
            self._training += gradients
            self._quiet += not gradients and not _estimates(module)
            self._sizes.due |= gradients
            if gradients and self._sizes.waits:
                self._sizes.go_on()
            return
        if self._sizes.due and not gradients and is_plain_call() and not self._code.found:
            self._sizes.begin()
        self._asleep += gradients
        self._compare(given)
        self._evaluations += 1
        count = self._evaluations
        if self._look is None and (count <= FIRST_LOOKS or self._close or count & (count - 1) == 0):
            self._before = _states(module)
            if count <= FIRST_LOOKS or self._close:
                self._look = _Look(module, self._guard)

    def _part_begins(self, part: nn.Module, _given: Any, _output: Any = None) -> None:
        """Count a pass of one child, in the mode of the whole model."""
        model, gradients = self._model(), torch.is_grad_enabled()
        if model is None:
            return
        if gradients:
            self._training += model.training
            self._asleep += not model.training
        elif model.training:
            inside = {id(m) for m in part.modules()}
            names = [site_name(name) for name, m in model.named_modules() if id(m) in inside]
            passes = self._facts["mode.parts_training"]
            passes.setdefault(names[0], 0.0)  # that it was called counts too
            for name in set(names).intersection(acting(model, training=True)):
                passes[name] = passes.get(name, 0.0) + 1.0

    def _compare(self, given: Any) -> None:
        """Tell dropout that is always on from samples on purpose: those are several passes of the same data."""
        entered = _Given.of(given)
        if not self._again and self._entered is None:  # a later evaluation; none was repeated yet
            for fact, found in self._later.items():
                self._facts[fact].update(found)
        self._again |= self._entered is not None and entered.same(self._entered)
        self._entered = entered

    def _end(self, module: nn.Module, _args: Any, _output: Any) -> None:
        before, self._before = self._before, []
        look, self._look = self._look, None
        if self._sizes.looks:
            self._sizes.end()
        if look is not None:
            look.close()
        if not before:
            return
        drawn = any(not torch.equal(a, b) for a, b in zip(before, _states(module), strict=False))
        self._close = drawn and look is None
        if drawn and look is not None:
            self._facts[DROPOUT].update(look.found)
            for fact, found in look.later.items():
                self._later[fact].update(found)

    def _stop(self) -> None:
        self._end(nn.Identity(), (), None)
        self._sizes.stop()


class _Look:
    """One pass in evaluation mode, in which each call of a dropout function is seen, and the module that makes it."""

    def __init__(self, model: nn.Module, guard: Guard) -> None:
        self.found: dict[str, float] = {}
        self.later: dict[str, dict[str, float]] = {DROPOUT: {}, NOISE: {}}
        self._names = {id(m): site_name(name) for name, m in model.named_modules()}
        self._calls: list[nn.Module] = [model]
        self._done = ""
        self._stack = contextlib.ExitStack()
        enter, leave = guard(self._enter), guard(self._leave)
        self._stack.callback(hook_all_calls(enter, before=True))
        self._stack.callback(hook_all_calls(leave, always=True))
        dropped, masked, drew = guard(self._dropped), guard(self._masked), guard(self._drew)
        # Looked up now: another watcher may have put something in their place.
        shown = {getattr(nn.functional, name): dropped for name in DROPOUTS}
        shown |= {getattr(torch, name): drew for name in SOURCES}
        shown |= {nn.functional.scaled_dot_product_attention: guard(self._attended), torch.bernoulli: masked}
        self._spy(spies_on(shown))
        self._spy([Spy(Tensor, name, masked) for name in ("bernoulli_", "bernoulli")])
        self._spy([Spy(Tensor, name, drew) for name in ("exponential_", "normal_", "uniform_")])

    def close(self) -> None:
        """Put everything back."""
        self._stack.close()

    def _spy(self, spies: list[Spy]) -> None:
        for spy in spies:
            spy.always = True
            spy.install()
            self._stack.callback(spy.remove)

    def _enter(self, module: nn.Module, _args: Any) -> None:
        self._calls.append(module)

    def _leave(self, module: nn.Module, _args: Any, _output: Any) -> None:
        while len(self._calls) > 1 and self._calls.pop() is not module:
            pass
        self._done = self._names.get(id(module), self._done)

    def _dropped(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        share = float(args[1] if len(args) > 1 else kwargs.get("p", 0.5))
        module = self._calls[-1]
        said = len(args) > 2 or "training" in kwargs
        # A layer of the model that stands in training mode was put there by somebody, and so may a literal True be.
        drops = isinstance(module, torch_private.Dropout)
        if (drops and id(module) not in self._names and module.training) or (not said and not drops):
            self._tell(share)
        elif said and not drops and (args[2] if len(args) > 2 else kwargs["training"]):
            self._tell(share, self.later[DROPOUT])

    def _attended(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._tell(float(args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)))

    def _masked(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take a mask whose entries are all drawn alike, as dropout by hand and stochastic depth draw it."""
        p = args[1] if len(args) > 1 else kwargs.get("p")
        if p is None and isinstance(args[0], Tensor) and args[0].is_floating_point() and args[0].numel() > 1:
            low, high = torch.aminmax(args[0])
            p = float(low) if bool(low == high) else None
        if isinstance(p, float) and 0 < p < 1:
            self._tell(1 - p)

    def _drew(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._tell(1.0, self.later[NOISE])

    def _tell(self, share: float, found: dict[str, float] | None = None) -> None:
        found = self.found if found is None else found
        if not share > 0 or len(found) >= SHOWN:
            return
        caller = next((m for m in reversed(self._calls) if id(m) in self._names), None)
        name = "" if caller is None else self._names[id(caller)]
        # Of a module that calls others, the one just before tells where in it.
        within = caller is not None and any(True for _ in caller.children()) and self._done.startswith(name)
        found[self._done if within and self._done else name] = share


class _Given(NamedTuple):
    """What tells one tensor given to a model from another.

    Attributes:
        kind: Its address, type and shape; ``None`` where no tensor with an address was given, as no sparse one has.
        head: Some entries, as memory is used again; ``None`` on a device, for which nothing here waits.
    """

    kind: tuple[object, ...] | None
    head: Tensor | None

    @classmethod
    def of(cls, given: Any) -> _Given:
        first = next((value for value in given if isinstance(value, Tensor) and value.layout is torch.strided), None)
        if first is None:
            return cls(None, None)
        head = even_sample(first, 64).clone() if first.device.type == "cpu" else None
        return cls((first.data_ptr(), first.dtype, tuple(first.shape)), head)

    def same(self, other: _Given) -> bool:
        """Tell whether the same data were given again."""
        return self.kind == other.kind and (
            self.head is None or other.head is None or torch.equal(self.head, other.head)
        )


def parts_of(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the children of a model that can be called, those of containers among them.

    Args:
        model: Where to look.
    """
    for child in model.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from parts_of(child)
        else:
            yield child


def acting(model: nn.Module, *, training: bool) -> tuple[str, ...]:
    """Return the modules that do something else in training than in evaluation, and stand in that mode.

    Args:
        model: Where to look.
        training: The mode.
    """
    found = [
        site_name(name)
        for name, module in model.named_modules()
        if module.training is training
        and (
            (isinstance(module, torch_private.Dropout) and module.p > 0)
            or (isinstance(module, torch_private.BatchNorm) and module.track_running_stats)
            or (isinstance(module, nn.RNNBase | nn.MultiheadAttention) and module.dropout > 0)
        )
    ]
    return tuple(found[:SHOWN])


def unmeasured(model: nn.Module) -> tuple[str, ...]:
    """Return the normalisations in evaluation mode whose statistics are those they were made with, 0 and 1 throughout.

    Args:
        model: Where to look; statistics on a device, which would be waited for, count as measured.
    """
    found = [
        site_name(name)
        for name, module in model.named_modules()
        if isinstance(module, torch_private.BatchNorm)
        and not module.training
        and module.running_mean is not None
        and module.running_var is not None
        and module.running_mean.device.type == "cpu"
        and not bool(module.running_mean.any())
        and bool((module.running_var == 1).all())
    ]
    return tuple(found[:SHOWN])


def _estimates(model: nn.Module) -> bool:
    """Whether batch statistics are being averaged over all of the data, as ``torch.optim.swa_utils.update_bn`` does."""
    return any(isinstance(module, torch_private.BatchNorm) and module.momentum is None for module in model.modules())


def _states(model: nn.Module) -> list[Tensor]:
    """Return the states of the generators that a pass of the model may draw from."""
    states = [torch.get_rng_state()]
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return states
