"""Batches that are drawn anew at each step and always hold the same samples: BAD_TARGETS."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.data import DataLoader

from gradflow_export.autograd_graph.layer_graph import FirstLayer
from gradflow_export.hooks.instances import instances
from gradflow_export.hooks.readings import ClueSample
from gradflow_export.metrics.arrays.local import local
from gradflow_export.records.step_record import IssueType, Severity, StepRecord
from gradflow_export.rules.base import Check, Finding, number
from gradflow_export.rules.evidence import layers_of, seen, values_of
from gradflow_export.rules.history import History

ROWS, COLUMNS = 256, 64
"""Samples of a batch, at most, and numbers of each that are compared."""
TIMES = 10
"""How many times as many numbers there must be elsewhere as a batch holds."""
PROBES, RUN = 8, 16
"""Samples that are searched for in memory, and successive numbers of each."""
ROUNDING = 1e-5
"""Difference of equal numbers, as a share of the greatest: some targets are known from a difference alone."""
AGAIN = 3
"""Equal batches in a row after which memory is searched for more data."""
VARIED = 3
"""Readings at which another batch came than before, and as large a one, until one that stays is worth a look."""
CHUNK, MOST = 2**20, 2**26
"""Numbers that are compared at once, and altogether: the search takes little memory, and about a second at most."""


class Draws:
    """Counts the batches in a row that hold the same samples, although each is a new tensor and more data exist.

    More data are known from a loader that draws batches of this size, from a larger tensor of which the batch is a
    part, or from one that holds the same numbers among others; the last is looked for on the CPU only, and once.
    """

    def __init__(self) -> None:
        self._entered: dict[str, StorageWeakRef] = {}
        self._sizes: dict[str, list[int]] = {}  # of the batches that were replaced by others
        self._drawn: frozenset[int] | None = None
        self._probes: dict[str, tuple[Tensor, int]] = {}
        self._more: dict[str, bool] = {}
        self._firsts: dict[str, tuple[list[Tensor], bool]] = {}
        self._last: dict[str, tuple[npt.NDArray[np.float32], int]] = {}

    def see(self, first: FirstLayer | None, targets: Tensor | None) -> Iterator[ClueSample]:
        """Yield what the worker compares with the batch before, if this one was drawn from more data.

        Args:
            first: The layer that the batch enters.
            targets: What the loss compares predictions with, if known.
        """
        if first is None or first.entered is None or not 1 < len(first.entered) <= ROWS:
            return
        x = local(first.entered)
        storage = x.untyped_storage()
        before = self._entered.get(first.name)
        self._entered[first.name] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        gone = before is not None and before.expired()  # type: ignore[no-untyped-call]
        sizes = self._sizes.setdefault(first.name, [])
        if gone and len(sizes) < VARIED:
            sizes.append(len(x))
        kept = (
            before is not None and before == self._entered[first.name] and len(sizes) == VARIED and len(x) <= max(sizes)
        )
        part = before is not None and storage.nbytes() >= TIMES * x.numel() * x.element_size()
        y = None if targets is None or targets.shape[:1] != x.shape[:1] else local(targets)
        known = [torch.view_as_real(each) if each.is_complex() else each for each in (x, y) if each is not None]
        loaded = gone and self._may_be_again(first.name, known) and self._is_loaded(len(x))
        if not (part or loaded or kept or (gone and self._is_held(first.name, x))):
            return
        parts = [each.reshape(len(x), -1)[:, :COLUMNS].to(x.device, torch.float32) for each in known]
        fact = "input.kept" if kept else "input.repeats"
        read = partial(self._count, fact, first.name, parts[0].shape[1], loaded)
        yield ClueSample(fact, first.name, torch.cat(parts, dim=1).contiguous(), read)

    def clear(self) -> None:
        """Forget all batches, but for what the worker, which may be behind, compares."""
        for kept in (self._entered, self._sizes, self._probes, self._more, self._firsts):
            kept.clear()

    def _may_be_again(self, name: str, known: list[Tensor]) -> bool:
        """Whether the first numbers of samples or targets are those before, or were last time; no device is asked."""
        if any(each.device.type != "cpu" for each in known):
            return True
        firsts = [each.reshape(len(each), -1)[:, :1].float() for each in known]
        before, was = self._firsts.get(name, ([], False))
        same = any(a.shape == b.shape and torch.allclose(a, b, ROUNDING) for a, b in zip(before, firsts, strict=False))
        self._firsts[name] = [first.clone() for first in firsts], same
        return same or was

    def _is_loaded(self, count: int) -> bool:
        if self._drawn is None:  # only now: the search looks at every object there is
            self._drawn = frozenset(size for loader in instances(DataLoader) if (size := _drawn_by(loader)))
        return count in self._drawn

    def _is_held(self, name: str, x: Tensor) -> bool:
        """Whether a batch is the same as before, and its numbers stand in memory among many others."""
        if x.device.type != "cpu" or x.layout is not torch.strided or self._more.get(name) is False:
            return False
        run = min(RUN, x.shape[-1]) if x.dim() > 1 else 1
        probe = x.reshape(len(x), -1)[:: -(-len(x) // PROBES), :run].clone()
        before, times = self._probes.get(name, (probe[:0], 0))
        times = times + 1 if torch.equal(before, probe) else 0
        self._probes[name] = probe, times
        if times == AGAIN and name not in self._more:
            self._more[name] = _is_held_elsewhere(probe, TIMES * x.numel())
        return times >= AGAIN and self._more[name]

    def _count(
        self, fact: str, name: str, inputs: int, loaded: bool, values: npt.NDArray[np.float32]
    ) -> dict[str, dict[str, float]]:
        """Return how many batches in a row held the same; augmented inputs differ, and targets tell them."""
        y = values[:, inputs:]
        batch = (y if loaded and _is_irregular(y) else values).copy()  # of a buffer that is used again
        before, times = self._last.get(name, (values[:0], 0))
        alike = before.shape == batch.shape and np.allclose(before, batch, ROUNDING, ROUNDING * np.abs(batch).max())
        self._last[name] = batch, times + 1 if alike else 0
        return {fact: {name: float(self._last[name][1])}}


def _drawn_by(loader: DataLoader[Any]) -> int:
    """Return the samples of a loader's batch, 0 where one batch holds all of its data or the number is not known."""
    try:
        whole = len(loader.dataset)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return 0
    return loader.batch_size if loader.batch_size and loader.batch_size < whole else 0


def _is_held_elsewhere(probe: Tensor, least: int) -> bool:
    """Whether each row of a probe stands in one tensor of so many numbers. Shape: ``[rows, successive numbers]``."""
    if len(torch.unique(probe)) < PROBES // 2:
        return False
    left = MOST
    for tensor in instances(Tensor):
        if type(tensor) is not Tensor or tensor.dtype != probe.dtype or tensor.device != probe.device:
            continue
        plain = tensor.layout is torch.strided and tensor.is_contiguous() and not tensor.requires_grad
        if plain and least <= tensor.numel() <= left:
            left -= tensor.numel()
            if all(_stands_in(tensor.reshape(-1), row) for row in probe):
                return True
    return False


def _stands_in(every: Tensor, run: Tensor) -> bool:
    """Whether numbers stand one after the other in a tensor of one dimension."""
    starts = every[: len(every) - len(run) + 1]
    for first in range(0, len(starts), CHUNK):
        at = (starts[first : first + CHUNK] == run[0]).nonzero()[:, 0] + first
        for place, value in enumerate(run[1:], 1):
            at = at[every[at + place] == value]
        if len(at):
            return True
    return False


def _is_irregular(y: npt.NDArray[np.float32]) -> bool:
    """Whether targets come in no order that somebody would choose: neither sorted nor repeated nor nearly all alike."""
    if len(y) < 2 * PROBES or not y.shape[1]:
        return False
    first, order = y[:, 0], np.sign(np.diff(y[:, 0]))
    mixed = bool((order > 0).any() and (order < 0).any())
    return mixed and all(float((first[:-lag] == first[lag:]).mean()) < 0.9 for lag in range(1, len(first) // 2))


@dataclass(frozen=True, kw_only=True)
class SameBatch(Check):
    """Report loops whose batches hold the same samples in the same order at each step, although each is loaded anew.

    Training on all data at once, or overfitting one batch as a test, keeps the same tensor. A batch that is loaded,
    indexed or sliced again at each step with the same content, while there are more data, is a mistake. If a loader
    draws it, equal targets in an irregular order suffice, because augmented inputs differ.

    Where batches varied at first, a tensor that stays for ``stays`` steps is a mistake too: several steps are made on
    one batch on purpose, but not so many.

    Why it is bad:
        The model memorizes a few samples. The loss goes to 0 as if training worked, and nothing is learned from the
        rest of the data.

    Example:
        for step in range(1000):
            x, y = next(iter(loader))  # begins again each time, and is not shuffled
            loss = F.cross_entropy(model(x), y)

    Use instead:
        for epoch in range(10):
            for x, y in loader:
                loss = F.cross_entropy(model(x), y)

    Not reported:
        The same tensor at each step from the first on; all data are one batch; no loader draws batches of this size,
        and no tensor on the CPU holds the batch among ten times as many numbers; more than 256 samples; another order
        of the samples.

    Attributes:
        repeats: Number of consecutive readings with the same samples.
        steps: Number of steps before anything is reported.
        stays: Number of steps over which readings show the same tensor, after others.
        patience: One; ``repeats`` already requires persistence.
    """

    repeats: int = 8
    steps: int = 20
    stays: int = 150
    patience: int = 1

    raises: ClassVar[tuple[IssueType, ...]] = (IssueType.BAD_TARGETS,)
    evidence: ClassVar[tuple[str, ...]] = ("input.repeats", "input.kept")
    remembers: ClassVar[tuple[str, ...]] = ("input.kept",)

    def check(self, record: StepRecord, history: History) -> tuple[Finding, ...]:
        """Judge the batches read so far."""
        for site in layers_of(record, "input.kept"):
            times, steps = seen(record, "input.kept", site) or 0.0, history.at_sites("input.kept").steps
            began = int(steps[max(len(steps) - 1 - int(times), 0)]) if 1 < times < math.inf else record.step
            if record.step - began >= self.stays:
                text = f"all batches from step {began} to {record.step} held the same samples, after others before"
                return (_finding(text, float(record.step - began), float(self.stays), began),)
        for times in values_of(record, "input.repeats").values():
            if times >= self.repeats and history.seen >= self.steps:
                text = f"{number(times + 1)} consecutive batches, each loaded anew, held the same samples"
                return (_finding(text, times, float(self.repeats)),)
        return ()


def _finding(text: str, value: float, threshold: float, since: int | None = None) -> Finding:
    return Finding(
        IssueType.BAD_TARGETS,
        Severity.MEDIUM,
        ("input",),
        value,
        threshold,
        f"{text}: the rest of the data is never used.",
        "iterate over the loader, for x, y in loader, instead of calling next(iter(loader)) at each step, and make a "
        "new iterator when one is exhausted; with indices, draw new ones at each step, torch.randperm(len(x))[:n], "
        "without resetting the seed.",
        since=since,
        cause="same batch",
        origin="same batch",
    )
