"""Layers whose outputs have another size in evaluation than in training: EVAL_RANDOM."""

from __future__ import annotations

import contextlib
import weakref
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from gradflow_export.hooks.guards import Guard, unguarded
from gradflow_export.hooks.module_calls import output_tensor
from gradflow_export.hooks.module_hooks import ModuleHook, hook_calls
from gradflow_export.hooks.readings import Clue, Drained, stack_scalars
from gradflow_export.metrics.arrays.local import local
from gradflow_export.metrics.arrays.samples import even_sample
from gradflow_export.metrics.outputs import output_rms
from gradflow_export.records.statistics import median
from gradflow_export.records.step_record import IssueType, Severity, StepRecord
from gradflow_export.rules.base import Check, Finding, number, some
from gradflow_export.rules.evidence import past, values_of
from gradflow_export.rules.history import History

SIZES = "evaluation.output_rms"
DIFFERS = "evaluation differs"
"""The cause that is named."""
MOST = 64
"""Blocks that are looked at, at most, evenly spread from input to output."""
ENTRIES = 16
"""Entries of a block's first parameter that tell whether other weights were evaluated than are trained."""


class EvaluationSizes:
    """Reads how large the outputs of blocks are in the first pass of each evaluation.

    An evaluation of other weights, such as an average of them, says nothing of these: it is left out unless the next
    training pass begins with the weights that were evaluated.

    Args:
        model: The unwrapped model; only weak references to it and its modules are kept.
        blocks: Names of the blocks, from input to output.
        guard: Wraps the hooks.

    Attributes:
        due: Whether training has gone on since an evaluation was looked at.
        looks: Whether a pass is being looked at.
        waits: Whether an evaluation waits for the next training pass.
        told: What is known since the last step.
    """

    def __init__(self, model: nn.Module, blocks: tuple[str, ...], *, guard: Guard = unguarded) -> None:
        self._guard = guard
        found = dict(model.named_modules())
        step = -(-max(len(blocks), 1) // MOST)
        self._blocks = {name: weakref.ref(found[name]) for name in blocks[::-1][::step][::-1] if name in found}
        self._hooked = contextlib.ExitStack()
        self._sizes: dict[str, Tensor] = {}
        self._weights: list[Tensor] = []
        self.due, self.looks, self.waits = True, False, False
        self.told: Drained = []

    def begin(self) -> None:
        """Look at a pass in evaluation mode that is about to begin."""
        self.due, self.looks, self.waits, self._sizes = False, True, False, {}
        blocks = [(block, name) for name, known in self._blocks.items() if (block := known()) is not None]
        hooks = [(block, ModuleHook(self._guard(partial(self._take, name)))) for block, name in blocks]
        self._hooked.callback(hook_calls(hooks))

    def end(self) -> None:
        """End that look."""
        self._hooked.close()
        self._weights = [sample.clone() for sample in self._sampled()]
        self.looks, self.waits = False, bool(self._sizes)

    def go_on(self) -> None:
        """Tell what was seen, now that training goes on, where it does so from the same weights."""
        pairs = zip(self._weights, self._sampled(), strict=False)
        moved = stack_scalars([(now - before).abs().sum() for before, now in pairs] or [torch.zeros(())])
        sizes = stack_scalars(list(self._sizes.values()))
        told = torch.where(moved.to(sizes.device).sum() == 0, sizes, torch.nan)
        self.told = [Clue(SIZES, tuple(self._sizes), told)]
        self.waits = False

    def stop(self) -> None:
        """Forget everything."""
        self._hooked.close()
        self._sizes, self._weights, self.told, self.looks, self.waits = {}, [], [], False, False

    def _take(self, name: str, _module: nn.Module, _given: Any, output: Any) -> None:
        tensor = output_tensor(output, learns=False)
        if tensor is not None and tensor.numel():
            self._sizes[name] = output_rms(tensor.detach())

    def _sampled(self) -> list[Tensor]:
        """Return entries of the first parameter of each block that has any."""
        blocks = (known() for known in self._blocks.values())
        first = (next(block.parameters(), None) for block in blocks if block is not None)
        held = (local(p.detach()) for p in first if p is not None and p.is_floating_point())
        return [even_sample(each, ENTRIES).float() for each in held]  # numbers of 8 bits know no difference


@dataclass(frozen=True, kw_only=True)
class EvaluationDiffers(Check):
    """Report blocks whose outputs are much larger or smaller in evaluation than in training, with the same weights.

    In each of the last ``evaluations`` after ``settle`` steps, the root mean square of a block's output is more than
    ``times`` above, or below, all of the last ``readings`` in training, of which the last is of the same weights: those
    of weights that still change a lot are far apart. Samples that are new to the model rarely change it by more than a
    third. Inputs that are prepared otherwise, statistics of batch norm that have not arrived, and dropout of nearly all
    units change it several times over.

    Why it is bad:
        The model is asked something else than what it was trained for. Its training loss is low, and its answers in
        evaluation, and later in use, are those of a model that has not learned.

    Example:
        nn.BatchNorm2d(64, momentum=0.001)  # the convention of other libraries; torch adds 0.1 % of a batch

    Use instead:
        nn.BatchNorm2d(64, momentum=0.1)

    Not reported:
        Other weights are evaluated than are trained, such as an average; the model is compiled; an evaluation after
        which training does not go on, or goes on with a step that is not recorded.

    Attributes:
        settle: Number of steps in which the statistics of batch norm arrive.
        times: Minimum ratio.
        evaluations: Number of evaluations in a row.
        readings: Number of readings in training that are compared.
        patience: One; the evaluations in a row already require persistence.
    """

    settle: int = 50
    times: float = 4.0
    evaluations: int = 2
    readings: int = 5
    patience: int = 1

    raises: ClassVar[tuple[IssueType, ...]] = (IssueType.EVAL_RANDOM,)
    evidence: ClassVar[tuple[str, ...]] = (SIZES,)
    remembers: ClassVar[tuple[str, ...]] = (SIZES, "block.output_rms")

    def check(self, record: StepRecord, history: History) -> tuple[Finding, ...]:
        """Compare the last evaluations with training."""
        found: dict[str, float] = {}
        for site in values_of(record, SIZES) if history.seen > self.settle else ():
            sizes = past(history, SIZES, site)[-self.evaluations :]
            trained = past(history, "block.output_rms", site)[-self.readings :]
            low, high = (trained.min(), trained.max()) if len(trained) and len(sizes) == self.evaluations else (0, 0)
            if low > 0 and max(sizes.min() / high, low / max(sizes.max(), 1e-30)) > self.times:
                found[site] = float(sizes[-1] / median(trained))
        if not found:
            return ()
        first = next(iter(found))
        return (
            Finding(
                IssueType.EVAL_RANDOM,
                Severity.MEDIUM,
                tuple(found),
                max(found[first], 1 / max(found[first], 1e-30)),
                self.times,
                f"with the same weights, the outputs of {some(tuple(found))} are {number(found[first])} times as large "
                f"in evaluation as in training, in {self.evaluations} evaluations in a row.",
                "prepare the inputs of evaluation as those of training (normalization, scale, units); let the "
                "statistics of batch norm arrive, with momentum=0.1 in torch, where other libraries write 0.9; lower a "
                "dropout of nearly all units: p is the fraction that is dropped.",
                cause=DIFFERS,
                origin=DIFFERS,
            ),
        )
