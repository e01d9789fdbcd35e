"""Arithmetic of another machine, and margins: whether a verdict stands where the last bits differ.

``pytest --perturb products,inputs,seed=3,threads=2,deterministic tests/pathologies`` runs tests under what is named:

- ``products`` or ``products=K``: each matrix product and convolution is off by up to ``K * eps * (|a| @ |b|)``, the bound
  of summation in another order; sums of at most one product stay exact, as they do in every library. ``K`` is 8.
- ``inputs`` or ``inputs=R``: floating-point inputs of a watched model are off by up to ``R`` of themselves; equal values
  stay equal. ``R`` is 1e-6.
- ``seed=N``: every seed that a test sets is moved on by ``N``.
- ``threads=N``: how many threads torch computes with.
- ``deterministic``: ``torch.use_deterministic_algorithms(True)``.

``ATEN_CPU_CAPABILITY=default``, ``ONEDNN_MAX_CPU_ISA=AVX2`` and ``MKL_ENABLE_INSTRUCTIONS=AVX2`` choose other kernels
besides; they are read when torch is loaded, so they stand in front of the command.

``pytest --margins 0.05`` judges the records of each test again with each threshold of each rule moved by that share, up and
down, and prints which of them would change an issue: verdicts without a margin.
"""

from __future__ import annotations

import dataclasses
import functools
import random
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from gradflow_export import Exporter
from gradflow_export.records.step_record import StepRecord
from gradflow_export.rules.base import Rule
from gradflow_export.rules.judge import Judge

DEFAULTS: Mapping[str, float] = {"products": 8.0, "inputs": 1e-6, "seed": 1, "threads": 2, "deterministic": 1}


def parse(text: str) -> dict[str, float]:
    """Return what a value of ``--perturb`` names.

    Raises:
        ValueError: A name is unknown.
    """
    out = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        if name not in DEFAULTS:
            raise ValueError(f"--perturb takes {', '.join(DEFAULTS)}; got {name!r}")
        out[name] = float(value) if value else DEFAULTS[name]
    return out


def begin(wanted: Mapping[str, float]) -> None:
    """Perturb this process from now on."""
    if "threads" in wanted:
        torch.set_num_threads(int(wanted["threads"]))
    if wanted.get("deterministic"):
        torch.use_deterministic_algorithms(True, warn_only=True)
    if "seed" in wanted:
        _move_seeds(int(wanted["seed"]))
    if "inputs" in wanted:
        _move_inputs(wanted["inputs"])
    if "products" in wanted:
        _move_products(wanted["products"])


def _move_seeds(by: int) -> None:
    """Add a number to every seed that is set."""

    class Generator(torch.Generator):
        def manual_seed(self, seed: int) -> torch.Generator:
            super().manual_seed(seed + by)
            return self

    for owner, name in ((torch, "manual_seed"), (random, "seed"), (np.random, "seed"), (np.random, "default_rng")):
        setattr(owner, name, _plus(getattr(owner, name), by))
    torch.Generator = Generator


def _plus(draw: Callable[..., Any], by: int) -> Callable[..., Any]:
    @functools.wraps(draw)
    def moved(seed: Any = None, *args: Any, **kwargs: Any) -> Any:
        return draw(seed + by if isinstance(seed, int) else seed, *args, **kwargs)

    return moved


def _move_inputs(share: float) -> None:
    """Move each floating-point input of a watched model by a share of itself that its value decides."""
    roots: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
    make = Exporter.__init__

    @functools.wraps(make)
    def watched(self: Exporter, model: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(model, torch.nn.Module):
            roots.add(model)
        make(self, model, *args, **kwargs)

    # The same tensor in is the same tensor out: data that come again are known by that.
    known: Any = WeakTensorKeyDictionary()

    def moved(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point() or value.is_sparse:
            return value
        version, out = known.get(value, (None, None))
        if version != value._version or value.requires_grad:
            with torch.no_grad():
                noise = value * share * torch.sin(1e4 * value)
            out = value + noise
            known[value] = value._version, None if value.requires_grad else out
        return out

    def hook(module: torch.nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if torch.compiler.is_compiling() or module not in roots:
            return None
        return tuple(moved(value) for value in given)

    Exporter.__init__ = watched  # type: ignore[method-assign]
    register_module_forward_pre_hook(hook)


_PRODUCTS: Mapping[str, tuple[int, ...]] = {
    "mm": (0, 1),
    "bmm": (0, 1),
    "mv": (0, 1),
    "dot": (0, 1),
    "addmm": (1, 2),
    "addmv": (1, 2),
    "baddbmm": (1, 2),
    "convolution": (0, 1),
    "convolution_backward": (0, 1, 2),
}
"""Operators and the places of the factors among their arguments."""
_held: list[Any] = []


@functools.lru_cache(maxsize=256)
def _pattern(shape: tuple[int, ...]) -> Tensor:
    """Return numbers from -1 to 1, the same for each shape, as what a kernel does depends on the place."""
    state = torch._C.default_generator.get_state()
    count = int(np.prod(shape, dtype=np.int64))
    values = torch.from_numpy(np.random.Generator(np.random.PCG64(count)).uniform(-1, 1, shape))
    torch._C.default_generator.set_state(state)
    return values


def _move_products(times: float) -> None:
    """Put kernels in place of torch's own that round each product in another way."""
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, places in _PRODUCTS.items():
            kernel = torch.library.get_kernel(f"aten::{name}", "CPU")
            library.impl(name, _rounded(kernel, places, times), "CPU", with_keyset=True)
    _held.append(library)


def _rounded(kernel: Any, places: tuple[int, ...], times: float) -> Callable[..., Any]:
    def product(keys: Any, *args: Any) -> Any:
        out = kernel.call_boxed(keys, *args)
        with torch.no_grad():
            sizes = _with(kernel, keys, args, places, lambda factor: factor.abs())
            counts = _with(kernel, keys, args, places, lambda factor: (factor != 0).to(factor.dtype))
        one = isinstance(out, Tensor)
        for value, size, count in zip(*(((x,) if one else x) for x in (out, sizes, counts)), strict=True):
            if isinstance(value, Tensor) and value.dtype in {torch.float32, torch.float64}:
                noise = size * (times * torch.finfo(value.dtype).eps) * _pattern(tuple(value.shape)).to(value.dtype)
                value.add_(torch.where((count > 1) & torch.isfinite(noise), noise, torch.zeros_like(noise)))
        return out

    return product


def _with(
    kernel: Any, keys: Any, args: tuple[Any, ...], places: tuple[int, ...], of: Callable[[Tensor], Tensor]
) -> Any:
    """Call a kernel with other factors, and nothing added."""
    changed = [of(value) if place in places else value for place, value in enumerate(args)]
    if places[0] == 1:
        changed[0] = torch.zeros_like(args[0])
    elif len(places) == 2 and len(args) > 2:  # the bias of a convolution
        changed[2] = None
    return kernel.call_boxed(keys, *changed)


class Margins:
    """Judges what was judged again, with thresholds moved.

    Args:
        share: By which share of itself each threshold is moved.
        longest: Records of a run that are kept.
    """

    def __init__(self, share: float, longest: int = 2000) -> None:
        self._share, self._longest = share, longest
        self._runs: list[tuple[tuple[Rule, ...], list[StepRecord]]] = []
        self._paused = False
        make, check = Judge.__init__, Judge.check

        @functools.wraps(make)
        def made(judge: Judge, *args: Any, **kwargs: Any) -> None:
            make(judge, *args, **kwargs)
            if not self._paused:
                records: list[StepRecord] = []
                self._runs.append((judge._rules, records))
                judge._seen = records  # type: ignore[attr-defined]

        @functools.wraps(check)
        def checked(judge: Judge, record: StepRecord) -> Any:
            seen = getattr(judge, "_seen", None)
            if seen is not None and len(seen) < self._longest:
                seen.append(record)
            return check(judge, record)

        Judge.__init__, Judge.check = made, checked  # type: ignore[method-assign]

    def close(self) -> Iterator[str]:
        """Yield one line for each issue, and one for each threshold that decides, then forget the runs."""
        runs, self._runs = self._runs, []
        self._paused = True
        try:
            for rules, records in runs:
                issues = _judge(rules, records).issues
                yield from (f"{i.issue_type} {i.layer}: {i.value:.4g} against {i.threshold:.4g}" for i in issues)
                for index, rule in enumerate(rules):
                    yield from self._decides(rules, index, rule, records)
        finally:
            self._paused = False

    def _decides(self, rules: tuple[Rule, ...], index: int, rule: Rule, records: list[StepRecord]) -> Iterator[str]:
        needed = {*rule.needs, *rule.evidence}
        if all(needed.isdisjoint((*record.metrics, *record.facts)) for record in records):
            return
        alone = _opened((rule,), records)
        for field in dataclasses.fields(rule):
            value = getattr(rule, field.name)
            if isinstance(value, bool) or not isinstance(value, float) or value == 0:
                continue
            for factor in (1 - self._share, 1 + self._share):
                moved = dataclasses.replace(rule, **{field.name: value * factor})
                if _opened((moved,), records) == alone:
                    continue
                before, after = _opened(rules, records), _opened((*rules[:index], moved, *rules[index + 1 :]), records)
                if before != after:
                    change = ", ".join(
                        f"{'+' if n > 0 else '-'}{kind}"
                        for kind in sorted(before | after)
                        if (n := (kind in after) - (kind in before))
                    )
                    yield f"MARGIN {type(rule).__name__}.{field.name} {value:g} x {factor:g}: {change}"


def _judge(rules: tuple[Rule, ...], records: list[StepRecord]) -> Judge:
    judge = Judge(rules)
    for record in records:
        judge.check(record)
    return judge


def _opened(rules: tuple[Rule, ...], records: list[StepRecord]) -> set[tuple[str, str]]:
    return {(str(issue.issue_type), issue.cause) for issue in _judge(rules, records).issues}
