"""Tables of numbers that a model multiplies with and that no optimizer can see: buffers and plain tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer
from torch.overrides import TorchFunctionMode

from gradflow_export.experiments.interventions import EverythingTrained, Intervention
from gradflow_export.experiments.mending.treatment import EXACT, Treatment
from gradflow_export.experiments.model_edits import tensors
from gradflow_export.records.issues import IssueType

PRODUCTS = frozenset((
    "linear", "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "addmm", "einsum", "conv1d", "conv2d", "conv3d",
    "embedding",
))  # fmt: skip
"""Functions in which weights stand."""
AGAIN = 2
"""Steps in which the same table takes part before it is taken for weights."""


class Tables(Intervention):
    """Finds tables that modules hold and multiply with in several steps, and that are no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self._held = contextlib.ExitStack()
        self._own: dict[int, Tensor] = {}
        self._used: dict[int, set[int]] = {}
        self._steps = 0

    def root(self, module: nn.Module) -> None:
        """Take note of what its parts hold."""
        super().root(module)
        for member in module.modules():
            for each in (*vars(member).values(), *member.buffers(recurse=False)):
                if isinstance(each, Tensor) and each.is_floating_point() and each.dim() > 1 and not each.requires_grad:
                    self._own[_place(each)] = each

    def called(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Begin to look."""
        self._held.close()
        if torch.is_grad_enabled() and self._steps < AGAIN and self._own:
            self._held.enter_context(_Products(self.multiplied))
        return super().called(module, args, kwargs)

    def left(self, module: nn.Module, output: Any) -> Any:
        """End it."""
        self._held.close()
        return super().left(module, output)

    def multiplied(self, factors: Iterable[Tensor]) -> None:
        """Take note of those among the factors of a product; a view has the place of its table."""
        for place in {_place(each) for each in factors}.intersection(self._own) - {0}:
            self._used.setdefault(place, set()).add(self._steps)

    def after_step(self, optimizer: Optimizer) -> None:
        """Count the steps."""
        super().after_step(optimizer)
        self._steps += 1

    def tables(self) -> list[Tensor]:
        """Return those that took part in each of the first steps."""
        return [self._own[place] for place, steps in self._used.items() if len(steps) >= AGAIN]


class TablesTrained(Tables, EverythingTrained):
    """Trains them, with the first optimizer's options."""

    def after_step(self, optimizer: Optimizer) -> None:
        """Let gradients reach them from now on."""
        super().after_step(optimizer)
        for table in self.tables() if self._steps == AGAIN else ():
            self._known[id(table)] = table.requires_grad_(True)


class _Products(TorchFunctionMode):
    def __init__(self, tell: Callable[[Iterable[Tensor]], None]) -> None:
        super().__init__()
        self._tell = tell

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        del types
        if getattr(func, "__name__", "") in PRODUCTS:
            self._tell(tensors([args, dict(kwargs or {})]))
        return func(*args, **dict(kwargs or {}))


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0


LOOSE = """\
# in __init__(): self.layers = torch.nn.ModuleList(layers) in place of a plain list (ModuleDict for a dict,
# nn.Parameter for a tensor); after that create the optimizer, with model.parameters()"""
FROZEN = "model.requires_grad_(True)  # before the optimizer is created"
UNOWNED = """\
held = {id(weight) for group in optimizer.param_groups for weight in group['params']}
missing = [weight for weight in model.parameters() if id(weight) not in held]
optimizer.add_param_group({'params': missing})  # once all layers are created, before the first step"""


def _patch(facts: Mapping[str, Any]) -> str:
    """Return what trains the rest: parameters that no module holds, that are frozen, or that are in no optimizer."""
    loose, frozen = facts.get("loose", 0), facts.get("frozen", 0)
    counts = loose, frozen, facts.get("untrained", 1) - loose - frozen
    return "\n".join(code for code, count in zip((LOOSE, FROZEN, UNOWNED), counts, strict=True) if count > 0)


EVERYTHING_TRAINED = Treatment(
    "train every parameter",
    EXACT,
    EverythingTrained,
    "parameters that are frozen, or that are in no optimizer",
    _patch,
    (IssueType.NOT_TRAINING, IssueType.STAGNATION),
    lambda facts: facts["untrained"] > 0,
    chosen=lambda facts: facts["untrained"] == facts["frozen"],
)
TABLES_TRAINED = Treatment(
    "train every table",
    EXACT,
    TablesTrained,
    "weights that are buffers or plain tensors, which no optimizer trains",
    "self.weight = torch.nn.Parameter(weight)  # in place of a plain tensor or register_buffer()",
    (IssueType.NOT_TRAINING, IssueType.STAGNATION),
    lambda facts: facts["plain"] > 0,
    choice=True,
    chosen=lambda facts: facts["plain"] > 0,
)
