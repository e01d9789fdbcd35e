"""Calls of modules inside code that ``torch.compile`` made: an operator there calls back with what a module gave out.

Compiled code runs no Python hooks. So a hook is put on each module that is read, and where ``torch.compile`` traces
it, it leaves an operator in the graph: ``gradflow::seen(tensor, sink, number, backward)``. It reads nothing unless a
step is sampled and costs some microseconds; the graph stays one, and is never compiled anew for a sampled step.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from gradflow_export.hooks import torch_private
from gradflow_export.hooks.discover import is_compiled
from gradflow_export.hooks.guards import TURNS
from gradflow_export.hooks.members import nested
from gradflow_export.hooks.module_hooks import ModuleHook, hook_calls

Inside = Literal["exact", "always", "never"]
INSIDE: tuple[Inside, ...] = ("exact", "always", "never")
_EXACT_DTYPES = (torch.float32, torch.float64)


@dataclass(frozen=True)
class Reading:
    """What one module of compiled code is read for.

    Attributes:
        forward: Called with the module's output, which has no graph.
        backward: Called with the gradient that arrived at it.
    """

    forward: Callable[[Tensor], None]
    backward: Callable[[Tensor], None] | None = None


class _Site:
    """One module in compiled code; the operator finds it by its number."""

    def __init__(self, code: CompiledCode, module: int) -> None:
        self._code, self._module = weakref.ref(code), module

    def __call__(self, tensor: Tensor, *, backward: bool) -> None:
        code = self._code()
        if code is not None:
            code.called(self._module, tensor, backward=backward)


class _Operator:
    """The operator, and where its calls go.

    Numbers are constants of the compiled code. One that is free again is given out anew, lowest first, so that a model
    which is watched a second time needs no new code.
    """

    def __init__(self) -> None:
        library = cast("Any", torch.library.Library("gradflow", "DEF"))  # type: ignore[no-untyped-call]  # torch's own
        self._library = library
        # Mutates an argument, so that no compiler takes it for dead; any layout will do, so that none is copied.
        schema = "seen(Tensor x, Tensor(a!) sink, int number, bool backward) -> ()"
        library.define(schema, tags=(torch.Tag.flexible_layout,))
        library.impl("seen", self._called, "CompositeExplicitAutograd")
        torch.library.register_fake("gradflow::seen", _nothing, lib=library)
        self._sites: dict[int, _Site] = {}
        self._sinks: dict[torch.device, Tensor] = {}

    def take(self, site: _Site) -> int:
        with TURNS:
            number = next(n for n in range(len(self._sites) + 1) if n not in self._sites)
            self._sites[number] = site
        return number

    def release(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self._sites.pop(number, None)

    def sink(self, device: torch.device) -> Tensor:
        if device not in self._sinks:
            sink = self._sinks[device] = torch.zeros(1, device=device)
            if device.type != "cpu":  # an input that is mutated keeps a graph off CUDA graphs unless it stays in place
                torch_private.mark_static(sink)
        return self._sinks[device]

    def _called(self, x: Tensor, _sink: Tensor, number: int, backward: bool) -> None:
        site = self._sites.get(number)
        if site is not None:
            site(x, backward=backward)


def _nothing(*_args: Any) -> None:
    """Stand in for the operator while a graph is traced."""


def _operator() -> _Operator:
    with TURNS:  # torch takes it only once
        return _made()


@functools.lru_cache(maxsize=1)
def _made() -> _Operator:
    return _Operator()


class _PlacedHook(ModuleHook):
    """A forward hook of one module, for eager and for compiled calls."""

    def __init__(self, code: CompiledCode, number: int, sink: Tensor, *, exact: bool, backward: bool) -> None:
        super().__init__(code.called_eagerly)
        self.number, self.sink, self.exact, self.backward = number, sink, exact, backward

    def __call__(self, module: Any, args: Any, output: Any = None) -> None:
        """Leave the operator in a graph that is being compiled; hand over any other call."""
        if torch.compiler.is_compiling():
            _trace(output, self.number, self.sink, exact=self.exact, backward=self.backward)
        else:
            self._call(module, args, output)


def _trace(output: Any, number: int, sink: Tensor, *, exact: bool, backward: bool) -> None:
    """Put the operator behind a module's output. Everything in here is traced: pure functions of tensors only."""
    if torch.compiler.is_exporting() or not torch.is_grad_enabled():
        return
    tensor = _first_tensor(output)
    if tensor is None or (exact and not _keeps_bits(tensor)):
        return
    torch.ops.gradflow.seen.default(tensor.detach(), sink, number, False)
    if backward and not _backward_is_compiled():

        def arrived(gradient: Tensor) -> None:
            torch.ops.gradflow.seen.default(gradient, sink, number, True)

        tensor.register_hook(arrived)  # type: ignore[no-untyped-call]  # torch leaves it untyped


@torch_private.constant_when_traced
def _backward_is_compiled() -> bool:
    return torch_private.compiles_backward()


def _first_tensor(output: Any) -> Tensor | None:
    if type(output) is Tensor:
        return output if output.requires_grad and output.is_floating_point() else None
    if isinstance(output, (tuple, list)):
        for part in output:
            found = _first_tensor(part)
            if found is not None:
                return found
    return None


def _keeps_bits(tensor: Tensor) -> bool:
    """Whether storing a tensor for the operator cannot change what is computed from it.

    A tensor of reduced precision is rounded when it is stored and not when it stays inside a kernel.
    """
    return (
        tensor.dtype in _EXACT_DTYPES
        and tensor.device.type == "cpu"
        and not torch.is_autocast_enabled(tensor.device.type)
    )


class CompiledCode:
    """Whether a model runs inside compiled code, and the hooks on its modules once it does.

    Args:
        model: The unwrapped model.
        known: Whether it is compiled already; otherwise that shows when it is trained.
        inside: ``"exact"`` reads where training keeps its bits: on the CPU, in float32 and float64. ``"always"`` reads
            everywhere. ``"never"`` leaves compiled code alone.

    Attributes:
        found: Whether any part of the model runs inside compiled code. No process-wide hook may then come and go: each
            would have the model compiled anew. None may either where modules are nested too deep for hooks.
        deep: Whether they are.
        recursion: The recursion limit of Python under which they may have hooks.
        graphed: Whether it was passed over because it runs in a CUDA graph, which calls nobody back.
    """

    def __init__(self, model: nn.Module, *, known: bool = False, inside: Inside = "exact") -> None:
        modules, self.recursion = nested(model)
        self.known = known or any(map(is_compiled, modules))
        self.deep = self.recursion > sys.getrecursionlimit()
        self.found = self.known or self.deep
        self.graphed = False
        self._inside = "never" if self.deep or _is_sharded(model) else inside
        self._parts = [weakref.ref(module) for module in modules]
        self._readers: list[Any] = []
        self._placed = contextlib.ExitStack()
        self._graphs, self._begun = torch_private.graphs(), False

    @property
    def shows(self) -> bool:
        """Whether some part of the model seems to run inside compiled code; changes nothing, unlike :meth:`notice`."""
        return self.found or torch_private.graphs() > self._graphs

    @property
    def read(self) -> bool:
        """Whether what runs inside compiled code is read."""
        return self._inside != "never"

    def attach(self, reader: Any) -> contextlib.ExitStack:
        """Serve one :class:`~gradflow_export.hooks.module_calls.ModuleCalls`; closing the returned stack ends that."""
        self._readers.append(reader)
        stack = contextlib.ExitStack()
        stack.callback(self._placed.close)
        stack.callback(self._readers.clear)
        return stack

    def begin(self) -> None:
        """Put hooks on the modules of a model that is compiled already, whose code without them is forgotten."""
        begun, self._begun = self._begun, True
        if self.known and self.read and not begun:
            forget_code([module for part in self._parts if (module := part()) is not None])
            self._place()

    def notice(self) -> bool:
        """Look whether the model turned out to be compiled after it was watched; return whether it is.

        The process-wide hooks that were there when it was compiled go, which has it compiled once more, with hooks of
        its own.
        """
        if not self.found and torch_private.graphs() > self._graphs:
            self.found = True
            if self.read:
                self._place()
        return self.found

    def way_out(self) -> str:
        """Return what the user can do where compiled code shows nothing; empty where there is none."""
        if not torch_private.graphs():
            return ""
        if not self.read:
            return " Compiled code is left alone."
        if self.graphed:
            return " It runs in a CUDA graph (mode='reduce-overhead'), which cannot be looked into."
        return (
            " The process has compiled code: if it is older than watch(), call torch._dynamo.reset(); in reduced "
            "precision or not on the CPU, Exporter(..., compiled='always') reads it, but kernels may round elsewhere."
        )

    def called(self, module: int, tensor: Tensor, *, backward: bool) -> None:
        """Hand over what compiled code shows."""
        for reader in self._readers:
            if reader.armed:
                if tensor.is_cuda and _in_cuda_graph():
                    self.graphed = True
                    return
                reader.called_inside(module, tensor, backward=backward)

    def called_eagerly(self, module: nn.Module, args: Any, output: Any) -> None:
        """Hand over an eager call: of a part that is not compiled, or behind a break in the graph."""
        for reader in self._readers:
            reader.called_eagerly(module, args, output)

    def _place(self) -> None:
        operator, numbers, hooks = _operator(), [], []
        members = {id(part()) for part in self._parts}
        modules = {id(m): m for reader in self._readers for m in reader.modules() if id(m) in members}
        for key, module in modules.items():
            inside = [reading for reader in self._readers for reading in reader.readings(key)]
            number = operator.take(_Site(self, key))
            numbers.append(number)
            device = next((p.device for p in module.parameters()), torch.device("cpu"))
            hook = _PlacedHook(
                self,
                number,
                operator.sink(device),
                exact=self._inside == "exact",
                backward=any(reading.backward for reading in inside),
            )
            hooks.append((module, hook))
        self._placed.callback(hook_calls(hooks))
        self._placed.callback(operator.release, numbers)


def _is_sharded(model: nn.Module) -> bool:
    return any(hasattr(p, "placements") for p in model.parameters())


def _in_cuda_graph() -> bool:
    """Whether a CUDA graph is being captured, or this process keeps a pool of them, in which nothing may stay."""
    return torch_private.keeps_cuda_graphs() or torch.cuda.is_current_stream_capturing()


def forget_code(modules: Sequence[nn.Module]) -> None:
    """Forget the compiled code of some modules, which is compiled anew when it is called next.

    ``torch.compile`` does not look whether hooks were added since, nor whether an instance of the same class that it
    has code for had other hooks. Only code that exists is forgotten.
    """
    with contextlib.suppress(Exception):  # no public form: where it has changed, silence is noticed and reported
        torch_private.forget_code([getattr(type(module), "forward", nn.Module.forward) for module in modules])
