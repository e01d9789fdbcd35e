"""Recurrent layers: on sampled steps their weights, inputs and states are copied, and the worker runs them anew."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.nn.utils.rnn import PackedSequence

from gradflow_export.hooks.discover import site_name
from gradflow_export.hooks.guards import Guard, unguarded
from gradflow_export.hooks.module_calls import ModuleCalls
from gradflow_export.hooks.readings import Drained, Sample
from gradflow_export.instruments.base import Cost, Instrument, Setting
from gradflow_export.metrics.unrolled import CallLayout, LayerLayout, Unrolled
from gradflow_export.records.catalog import MetricSpec, spec

SEQUENCES = 4
STEPS = 64
WORK = 2**27
"""Multiplications of one run over the copied steps; of a large layer fewer sequences, then fewer steps are copied."""
LEAST_STEPS = 16
MOST_WEIGHTS = 10_000_000
"""A module with more weights than this is not read."""
LARGE = 2**19
"""A module with k times as many weights is read at every k-th sample, at least at every tenth."""

RECURRENT_METRICS = (
    "spectral_radius", "spectral_norm", "lyapunov", "decay", "memory_length", "effective_rank", "rank_share", "length",
    "spectral_radius_error", "spectral_norm_error", "effective_rank_error", "lyapunov_error", "decay_error",
    "memory_length_error",
)  # fmt: skip

_PARTS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr")
_FORWARDS = (
    nn.RNN.forward, nn.LSTM.forward, nn.GRU.forward, nn.RNNCell.forward, nn.LSTMCell.forward, nn.GRUCell.forward,
)  # fmt: skip


@dataclass(frozen=True)
class _Known:
    """What is known of a recurrent module before it is called.

    Attributes:
        site: Its name.
        kind: ``"RNN_TANH"``, ``"RNN_RELU"``, ``"LSTM"`` or ``"GRU"``.
        suffixes: What follows the names of the weights, by layer and direction.
        directions: 1 or 2.
        cell: Whether one call is one step.
        batch_first: Whether the batch is the first dimension.
        weights: Number of entries.
    """

    site: str
    kind: str
    suffixes: tuple[str, ...]
    directions: int
    cell: bool
    batch_first: bool
    weights: int

    @property
    def sequences(self) -> int:
        """Sequences to copy."""
        return next((n for n in (SEQUENCES, 2) if n * STEPS * self.weights <= WORK), 1)

    @property
    def steps(self) -> int:
        """Steps to copy of each."""
        return next((n for n in (STEPS, 32) if n * self.sequences * self.weights <= WORK), LEAST_STEPS)

    @property
    def every(self) -> int:
        """Samples between two readings."""
        return min(-(-self.weights // LARGE), 10)

    def site_of(self, place: int) -> str:
        """Return the name of one layer and direction."""
        return self.site if len(self.suffixes) == 1 else f"{self.site}.{self.suffixes[place].removeprefix('_')}"


@dataclass
class _Taken:
    """What was copied of one module in this step."""

    layers: tuple[LayerLayout, ...]
    weights: Tensor
    calls: list[CallLayout] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    steps: int = 0
    uncopied: int = 0


class RecurrentInstrument(Instrument):
    """Copies a few steps of a few sequences of RNN, LSTM and GRU modules, and of RNNCell, LSTMCell and GRUCell.

    Left out are subclasses with a ``forward`` of their own, whose recurrence cannot be known, and modules whose
    weights are parametrized, because looking at those may change them. A state that is given by keyword is not seen
    and counts as zero.
    """

    instrument: ClassVar[str] = "recurrent"
    interval: ClassVar[int] = 100
    cost: ClassVar[Cost] = "H"

    def __init__(self, calls: ModuleCalls, model: nn.Module, *, guard: Guard = unguarded) -> None:
        self._calls, self._guard = calls, guard
        found = [(site_name(name) or type(module).__name__, module) for name, module in model.named_modules()]
        self._found = [(known, module) for name, module in found if (known := _describe(name, module)) is not None]
        self._modules = len(self._found)
        self._armed = False
        self._samples = -1
        self._taken: dict[int, _Taken] = {}
        self._known: tuple[_Known, ...] = tuple(known for known, _ in self._found)

    @classmethod
    def make(cls, setting: Setting) -> RecurrentInstrument:
        """Make one for a model."""
        return cls(ModuleCalls(code=setting.code), setting.model, guard=setting.part(cls.instrument))

    @property
    def modules(self) -> int:
        """How many modules are read."""
        return self._modules

    @property
    def specs(self) -> tuple[MetricSpec, ...]:
        """The metrics this instrument can give out."""
        return tuple(spec(f"recurrent.{name}") for name in RECURRENT_METRICS)

    def attach(self) -> contextlib.ExitStack:
        """Begin to watch the modules' calls."""
        for index, (_, module) in enumerate(self._found):
            self._calls.add(module, self._guard(partial(self._called, index)))
        self._found = []
        stack = self._calls.attach()
        stack.callback(self.forget)
        return stack

    def arm(self, *, on: bool) -> None:
        """Begin to see calls, or with ``on=False`` see no more."""
        self._samples += on
        self._calls.arm(on=on)

    def _called(self, index: int, module: nn.Module, args: tuple[Any, ...], _output: Any) -> None:
        known = self._known[index]
        if not args or self._samples % known.every:
            return
        with torch.no_grad():
            call = _read_call(known, args[0], args[1] if len(args) > 1 else None)
            if call is None:
                return
            taken = self._taken.get(index)
            if taken is None:
                layers = _weights(known, module)
                if layers is None:
                    return
                taken = self._taken[index] = layers
            room = known.steps - taken.steps
            layout, values = call.within(room)
            taken.uncopied += call.length - len(layout.sizes)
            if not layout.sizes:
                return
            taken.steps += len(layout.sizes)
            taken.calls.append(layout)
            taken.values.extend(value.to(taken.weights.dtype, copy=True).reshape(-1) for value in values)

    def drain(self) -> Drained:
        """Give out one sample for each module that was called since the last one."""
        out: Drained = []
        for index, taken in self._taken.items():
            known = self._known[index]
            if taken.calls:
                unrolled = Unrolled(known.kind, taken.layers, known.directions, tuple(taken.calls), taken.uncopied)
                flat = torch.cat([taken.weights, *(value.to(taken.weights.device) for value in taken.values)])
                out.append(Sample("recurrent", known.site, flat, unrolled))
        self.forget()
        return out

    def forget(self) -> None:
        """Forget what was copied: the step makes no record."""
        self._taken = {}


@dataclass(frozen=True)
class _Read:
    """One call's tensors, nothing copied yet.

    Attributes:
        inputs: One tensor ``[steps, sequences, features]``, or of a packed batch one ``[still going, features]`` per
            step.
        sizes: Sequences that are still going at each step.
        features: Width of the input.
        length: Steps of the longest sequence.
        batch: Sequences of the call, of which a few are copied.
        states: States before the call. Shape of each: ``[layers * directions, sequences, width]``.
    """

    inputs: tuple[Tensor, ...]
    sizes: tuple[int, ...]
    features: int
    length: int
    batch: int
    states: tuple[Tensor, ...]

    def within(self, room: int) -> tuple[CallLayout, list[Tensor]]:
        """Return the layout of at most ``room`` steps, and their tensors."""
        room = max(room, 0)
        inputs = [self.inputs[0][:room]] if self.inputs[0].dim() == 3 else list(self.inputs[:room])
        shapes = tuple(tuple(state.shape) for state in self.states)
        layout = CallLayout(self.sizes[:room], self.features, shapes, self.batch)
        return layout, [*inputs, *self.states]


def _read_call(known: _Known, inputs: Any, state: Any) -> _Read | None:
    """Bring the arguments of one call to one form, a few sequences and steps of it; ``None`` when it has another."""
    states = () if state is None else tuple(state) if isinstance(state, (tuple, list)) else (state,)
    if not all(isinstance(each, Tensor) for each in states):
        return None
    if isinstance(inputs, PackedSequence):
        if inputs.sorted_indices is not None:
            states = tuple(each.index_select(1, inputs.sorted_indices[: known.sequences]) for each in states)
        sizes = tuple(map(int, inputs.batch_sizes[: known.steps]))
        batch = sizes[0] if sizes else 0
        starts = (0, *accumulate(sizes))
        sizes = tuple(min(size, known.sequences) for size in sizes)
        given = tuple(inputs.data[start : start + size] for start, size in zip(starts, sizes, strict=False))
        features, length = inputs.data.shape[-1], len(inputs.batch_sizes)
    else:
        if not isinstance(inputs, Tensor):
            return None
        batched = 2 if known.cell else 3
        if inputs.dim() != batched:  # no batch
            inputs = inputs.unsqueeze(1 if batched == 3 else 0)
            states = tuple(each.unsqueeze(-2) for each in states)
        elif known.batch_first:
            inputs = inputs.transpose(0, 1)
        if known.cell:
            inputs = inputs.unsqueeze(0)
            states = tuple(each.unsqueeze(0) for each in states)
        given, batch = (inputs[: known.steps, : known.sequences],), inputs.shape[1]
        sizes = (given[0].shape[1],) * given[0].shape[0]
        features, length = inputs.shape[-1], inputs.shape[0]
    if not sizes or sizes[0] == 0:
        return None
    return _Read(given, sizes, features, length, batch, tuple(each[:, : known.sequences] for each in states))


def _weights(known: _Known, module: nn.Module) -> _Taken | None:
    """Copy the weights of a module; ``None`` when they have no shape of their own, as under sharding."""
    layouts: list[LayerLayout] = []
    tensors: list[Tensor] = []
    for place, suffix in enumerate(known.suffixes):
        found = [getattr(module, part + suffix, None) for part in _PARTS]
        parts = [part if isinstance(part, Tensor) else None for part in found]
        if any(part is None or part.dim() != 2 for part in parts[:2]):
            return None
        layouts.append(LayerLayout(known.site_of(place), tuple(None if p is None else tuple(p.shape) for p in parts)))
        tensors.extend(part for part in parts if part is not None)
    dtype = torch.float64 if tensors[0].dtype == torch.float64 else torch.float32
    return _Taken(tuple(layouts), torch.cat([tensor.detach().reshape(-1).to(dtype) for tensor in tensors]))


def _describe(name: str, module: nn.Module) -> _Known | None:
    """Return what is known of a recurrent module, ``None`` for any other."""
    if not isinstance(module, (nn.RNNBase, nn.RNNCellBase)) or type(module).forward not in _FORWARDS:
        return None
    weights = sum(parameter.numel() for parameter in module.parameters(recurse=False))
    if is_parametrized(module) or weights > MOST_WEIGHTS:
        return None
    if isinstance(module, nn.RNNCellBase):
        kind = {"RNNCell": f"RNN_{getattr(module, 'nonlinearity', '').upper()}", "LSTMCell": "LSTM", "GRUCell": "GRU"}
        base = next(base.__name__ for base in type(module).__mro__ if base.__name__ in kind)
        return _Known(name, kind[base], ("",), 1, cell=True, batch_first=False, weights=weights)
    directions = 2 if module.bidirectional else 1
    suffixes = tuple(_suffixes(module.num_layers, directions))
    return _Known(
        name, module.mode, suffixes, directions, cell=False, batch_first=bool(module.batch_first), weights=weights
    )


def _suffixes(layers: int, directions: int) -> Iterator[str]:
    for layer in range(layers):
        yield from (f"_l{layer}", f"_l{layer}_reverse")[:directions]
