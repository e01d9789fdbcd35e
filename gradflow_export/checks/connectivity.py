"""Which parameters are connected: to a gradient, to an optimizer, to the model at all."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from gradflow_export.autograd_graph.nodes import sources
from gradflow_export.hooks import torch_private
from gradflow_export.hooks.called_modules import Calls
from gradflow_export.hooks.instances import instances
from gradflow_export.hooks.members import member_parameters, members
from gradflow_export.hooks.optimizer_steps import OptimizerStep
from gradflow_export.hooks.parameter_slots import Slot
from gradflow_export.hooks.readings import Clue, Drained, stack_scalars
from gradflow_export.instruments.base import Cost, Reader, Setting
from gradflow_export.metrics.arrays.samples import even_sample
from gradflow_export.records.evidence import Wiring
from gradflow_export.records.step_record import RUN_SITE

LOOKS = 8
"""Armed steps in which calls of modules are looked at."""
FROZEN_ENTRIES = 2**16
"""Entries of a frozen weight that are looked at; of more an even sample."""
HIDDEN = 256
"""Tensors outside ``model.parameters()`` that are followed at most."""
ENTRIES = 256
"""Entries of a plain container that are looked into."""
SEARCHES = (5, 10)
"""Armed steps at which optimizers that have not stepped are searched for, where a gradient has no optimizer."""

LASTING = 4
"""Looks at which a tensor that was made from another one must be the same, so that it is no output that was kept."""
SAMPLED = 16
"""Entries of each parameter that are compared with those of others of its shape, in the first look."""
STEPS_BACK = 4
"""Nodes of a graph between such a tensor and the one it was made from, at most."""

_OWN = frozenset(vars(nn.Module()))
_HOLDERS = (nn.Module, Tensor, list, tuple, dict)
_TRAINABLE, _OWNED, _GRADIENT = int(Wiring.TRAINABLE), int(Wiring.OWNED), int(Wiring.GRADIENT)
_ZERO_RATE, _WAITING, _VECTOR = int(Wiring.ZERO_RATE), int(Wiring.WAITING), int(Wiring.VECTOR)
_STEPPED = int(Wiring.STEPPED)
"""Plain numbers: flags are joined by a function of Python's."""


class WiringInstrument(Reader):
    """Reads, while armed, how each parameter is connected; looks at descriptions only, never at an entry."""

    cost: ClassVar[Cost] = "P"
    at_pass: ClassVar[bool] = True

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._waiting: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._calls = Calls(self._model, guard=self._guard)
        self._hidden: dict[str, Slot | None] = {}
        self._made: dict[str, tuple[weakref.ref[Tensor], int]] = {}
        self._steps = 0
        self._first: Drained = []
        self._codes: dict[str, int] = {}
        self._gradients: dict[str, tuple[int, int]] = {}  # which one, and its version
        self._hidden_codes: dict[str, int] = {}
        self._orphans, self._outside = 0, False
        self._frozen: Drained = []

    @property
    def modules(self) -> int:
        """Each parameter is looked at by itself, and how they hang together seldom changes."""
        model = self._model()
        return 1 if model is None else max(sum(1 for _ in model.parameters()) // 2 * 2, 1)

    def arm(self, *, on: bool) -> None:
        """Begin to read, or with ``on=False`` read no more."""
        self.armed = on
        self.forget()  # a record begins; what several optimizers of one record showed is joined until then
        self._calls.arm(on=on and self._steps < LOOKS and not self._code.found)
        if self._code.found:  # what was seen of its calls, from outside, is not what was called
            self._calls = Calls(self._model, guard=self._guard)

    def noticed(self, optimizer: Optimizer) -> None:
        """Take notice of an optimizer that steps and owns no parameter of the model."""
        self._optimizers.add(optimizer)

    def before(self, step: OptimizerStep) -> None:
        """Read the connections just before an optimizer uses them."""
        if isinstance(step.optimizer, Optimizer):
            self._optimizers.add(step.optimizer)
        model = self._model()
        if not self.armed or model is None:
            return
        self._steps += 1
        named = member_parameters(model)
        names = {id(p): name for name, p in named}
        if self._steps <= LOOKS:
            self._search_hidden(model, names)
        owned = _ids(self._optimizers)
        if not isinstance(step.optimizer, Optimizer):
            owned |= {id(p): False for p in step.owned.parameters}
        parameters = [p for _, p in named]
        if self._steps == 1:
            self._first = [*_first_entries(named), *_input_weights(model, names)]
        self._search_waiting(parameters, owned)
        self._outside |= step.owned.outside
        waiting, mine = _ids(self._waiting), {id(p) for p in step.owned.parameters}
        if self._steps == LOOKS:
            self._frozen = _frozen_sizes(named)
        for name, parameter in named:
            code = _code(parameter, owned, waiting) | _STEPPED * (id(parameter) in mine)
            self._codes[name] = self._codes.get(name, 0) | (code & ~self._left_over(name, parameter, code))
        outside = dict(_kept_outside(model)) if self._hidden else {}
        for path, slot in self._hidden.items():
            held = outside.get(path) if slot is None else slot()
            tensor = None if held is None else source_of(held)
            if tensor is not None and id(tensor) not in names:
                self._hidden_codes[path] = self._hidden_codes.get(path, 0) | _code(tensor, owned, waiting)
        anew = int(Wiring.MADE | Wiring.TRAINABLE | Wiring.GRADIENT)
        self._hidden_codes.update(dict.fromkeys(self._calls.made(), anew))
        self._orphans += _orphans(step.optimizer, parameters, owned)

    def drain(self) -> Drained:
        """Give out what was read since the last call."""
        if not self._codes:
            return []
        calls, taken = self._calls.codes(), self._calls.taken()
        codes = {name: code | calls.get(name.rpartition(".")[0], 0) for name, code in self._codes.items()}
        found: dict[str, Mapping[str, float]] = {
            "wiring.orphans": {RUN_SITE: self._orphans},
            "wiring.outside": {RUN_SITE: int(self._outside)},
            "layer.taken_steps": {name: steps for name, (steps, _) in taken.items()},
            "layer.taken_sequences": {name: count for name, (_, count) in taken.items()},
            "layer.cell_calls": self._calls.cells(),
        }
        told = [Clue.by_layer(fact, values) for fact, values in found.items() if values]
        hidden = [_states("hidden.state", self._hidden_codes)] if self._hidden_codes else []
        out: Drained = [_states("connection.state", codes), *told, *hidden, *self._first, *self._frozen]
        self._first, self._frozen = [], []
        return out

    def forget(self) -> None:
        """Forget what was read: the step makes no record."""
        self._codes, self._hidden_codes, self._orphans, self._frozen = {}, {}, 0, []

    def _left_over(self, name: str, parameter: Tensor, code: int) -> int:
        """Return the flag of a gradient that no optimizer holds, and that lay there unchanged at the last look."""
        if parameter.grad is None:
            return 0
        before, now = self._gradients.get(name), (id(parameter.grad), torch_private.version(parameter.grad))
        self._gradients[name] = now
        return _GRADIENT * (now == before and not code & _OWNED)

    def _search_hidden(self, model: nn.Module, names: Iterable[int]) -> None:
        known = set(names)
        outside = ((path, None, tensor) for path, tensor in _kept_outside(model))
        for path, slot, tensor in (*outside, *self._calls.strangers()):
            if id(tensor) in known or len(self._hidden) >= HIDDEN:
                continue
            if tensor.is_leaf or self._lasts(path, tensor):
                known.add(id(tensor))
                self._hidden.setdefault(path, slot)

    def _lasts(self, path: str, tensor: Tensor) -> bool:
        """Whether a tensor with a graph has been the same for several looks."""
        reference, looks = self._made.get(path, (None, 0))
        same = reference is not None and reference() is tensor
        self._made[path] = (weakref.ref(tensor), looks + 1 if same else 1)
        return self._made[path][1] >= LASTING

    def _search_waiting(self, parameters: Iterable[Tensor], owned: dict[int, bool]) -> None:
        """Find optimizers that were made and have not stepped yet: another player's, or one that was forgotten."""
        if self._steps not in SEARCHES:
            return
        loose = {id(p) for p in parameters if p.requires_grad and p.grad is not None and id(p) not in owned}
        if loose:
            found = [optimizer for optimizer in instances(Optimizer) if not loose.isdisjoint(_ids([optimizer]))]
            self._waiting.update(found)


def _kept_outside(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the trainable tensors that modules keep in plain attributes, lists and dicts, with a path as name."""
    for site, module in members(model):
        for key, value in list(vars(module).items()):
            # Most attributes are numbers and names; nothing is called for these.
            if key not in _OWN and isinstance(value, _HOLDERS):
                yield from _inside(f"{site}.{key}".lstrip("."), value, 2)


def _inside(path: str, value: object, depth: int) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, nn.Module):
        yield from ((f"{path}.{name}", p) for name, p in value.named_parameters() if p.requires_grad)
    elif isinstance(value, Tensor):
        if source_of(value) is not None:
            yield path, value
    elif depth and isinstance(value, (list, tuple, dict)):
        entries = list(value.items() if isinstance(value, dict) else enumerate(value))
        for key, entry in entries[:ENTRIES]:
            yield from _inside(f"{path}[{key!r}]", entry, depth - 1)


def source_of(tensor: Tensor) -> Tensor | None:
    """Return the trainable tensor that gets the gradient of this one: itself, or the only one it was made from."""
    if not tensor.requires_grad:
        return None
    node: Any = tensor.grad_fn
    for _ in range(STEPS_BACK if node is not None else 0):
        behind = sources(node)
        if len(behind) != 1:
            return None
        node = behind[0]
        source = getattr(node, "variable", None)
        if isinstance(source, Tensor):
            return source
    return tensor if tensor.is_leaf else None


def _ids(optimizers: Iterable[Optimizer]) -> dict[int, bool]:
    """Return by ``id`` of each tensor that optimizers own whether its learning rate is 0 in all of them."""
    out: dict[int, bool] = {}
    for optimizer in list(optimizers):
        for group in optimizer.param_groups:
            rate = group.get("lr")
            host = not isinstance(rate, Tensor) or rate.device.type == "cpu"
            zero = rate is not None and host and float(rate) == 0.0
            for parameter in group["params"]:
                out[id(parameter)] = out.get(id(parameter), True) and zero
    return out


def _code(tensor: Tensor, owned: dict[int, bool], waiting: dict[int, bool]) -> int:
    here = id(tensor)
    return (
        _TRAINABLE * (tensor.requires_grad and tensor.numel() > 0)
        | _OWNED * (here in owned)
        | _GRADIENT * (tensor.grad is not None)
        | _ZERO_RATE * owned.get(here, False)
        | _WAITING * (here in waiting)
        | _VECTOR * (tensor.dim() <= 1)
    )


def _first_entries(named: Iterable[tuple[str, Tensor]]) -> Drained:
    """Return one number of the entries of each matrix that has others of its shape; copies have the same.

    NaN where all entries are one number, which is no copy of another.
    """
    alike: dict[tuple[torch.Size, torch.dtype, torch.device], list[tuple[str, Tensor]]] = {}
    for name, p in named:
        if _is_matrix(p):
            alike.setdefault((p.shape, p.dtype, p.device), []).append((name, p))
    members = [each for group in alike.values() if len(group) > 1 for each in group]
    if not members:
        return []
    with torch.no_grad():
        told = stack_scalars([_number(even_sample(p, SAMPLED).double()) for _, p in members])
    return [Clue("parameter.first_entries", tuple(name for name, _ in members), told)]


def _is_matrix(p: Tensor) -> bool:
    return p.dim() > 1 and p.numel() > 0 and p.is_floating_point() and not hasattr(p, "placements")


def _input_weights(model: nn.Module, names: Mapping[int, str]) -> Drained:
    """Return which layer of its stack each input weight of a recurrent module belongs to, counted from 0."""
    stacks = (m for m in model.modules() if isinstance(m, nn.RNNBase) and m.num_layers > 1)
    held = {
        names[id(p)]: layer
        for m in stacks
        for own in (dict(torch_private.parameters(m)),)
        for layer in range(m.num_layers)
        if id(p := own.get(f"weight_ih_l{layer}")) in names
    }
    return [Clue.by_layer("parameter.recurrent_layer", held)] if held else []


def _number(entries: Tensor) -> Tensor:
    weights = torch.arange(1, len(entries) + 1, device=entries.device, dtype=torch.float64).cos()
    return torch.where((entries == entries[0]).all(), torch.nan, (entries * weights).sum())


def _frozen_sizes(named: Iterable[tuple[str, Tensor]]) -> Drained:
    """Return the largest entry of each frozen matrix, and its square against their mean square: 3 as it was drawn."""
    frozen = [(name, p) for name, p in named if not p.requires_grad and _is_matrix(p)][:HIDDEN]
    if not frozen:
        return []
    with torch.no_grad():
        entries = [even_sample(p, FROZEN_ENTRIES).abs().double() for _, p in frozen]
        told = stack_scalars([torch.stack([e.amax(), e.amax() ** 2 / e.square().mean()]) for e in entries])
    sites = tuple(name for name, _ in frozen)
    return [Clue("parameter.frozen_size", sites, told[:, 0]), Clue("parameter.frozen_peak", sites, told[:, 1])]


def _orphans(optimizer: object, parameters: Iterable[Tensor], owned: dict[int, bool]) -> int:
    """Return how many tensors of an optimizer have no gradient, left the model, and would fit a parameter left out."""
    groups = optimizer.param_groups if isinstance(optimizer, Optimizer) else []
    members = {id(p) for p in parameters}
    gone = Counter(p.shape for g in groups for p in g["params"] if id(p) not in members and p.grad is None)
    if not gone:
        return 0
    left_out = Counter(p.shape for p in parameters if p.requires_grad and id(p) not in owned)
    return sum((gone & left_out).values())


def _states(fact: str, codes: Mapping[str, int]) -> Clue:
    states = {code: Wiring(code) for code in set(codes.values())}
    return Clue(fact, tuple(codes), np.array([states[code] for code in codes.values()], dtype=np.object_))
