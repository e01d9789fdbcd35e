"""Gradients of a model as a debugger reads them: one pass over all of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from gradflow_export.debugging.inspect.tensor_info import TensorInfos, queued, wait_for
from gradflow_export.hooks.discover import site_name, unwrap
from gradflow_export.metrics.arrays.entries import entry_statistics
from gradflow_export.metrics.arrays.local import local
from gradflow_export.metrics.arrays.one_pass import native_statistics
from gradflow_export.metrics.arrays.tensors import flat_entries
from gradflow_export.records.step_record import Reading


@dataclass(frozen=True)
class GradientNorms:
    """Norms of some gradients, read once.

    Attributes:
        sites: Names of the parameters.
        norms: L2 norm of each gradient; NaN or Inf where an entry is.
        nonfinite: How many entries of each are NaN or Inf.
        has_nan: Whether an entry is NaN.
    """

    sites: tuple[str, ...] = ()
    norms: tuple[float, ...] = ()
    nonfinite: tuple[int, ...] = ()
    has_nan: tuple[bool, ...] = ()

    @property
    def total(self) -> float:
        """Norm of all together, NaN where one is; 0 without any."""
        return math.nan if any(map(math.isnan, self.norms)) else math.hypot(*self.norms)

    def extreme(self, choose: Callable[[Sequence[float]], float]) -> float | None:
        """Return what ``max`` or ``min`` chooses among the norms, NaN where one is, ``None`` without any."""
        if any(map(math.isnan, self.norms)):
            return math.nan
        return choose(self.norms) if self.norms else None

    @property
    def bad(self) -> tuple[str, ...]:
        """Names of those with a NaN or Inf entry."""
        return tuple(site for site, count in zip(self.sites, self.nonfinite, strict=True) if count)

    @property
    def with_nan(self) -> tuple[str, ...]:
        """Names of those with a NaN entry."""
        return tuple(site for site, nan in zip(self.sites, self.has_nan, strict=True) if nan)

    def above(self, threshold: float) -> list[str]:
        """Return the names of those whose norm is above a threshold, or NaN or Inf."""
        return [site for site, norm in zip(self.sites, self.norms, strict=True) if not norm <= threshold]

    def below(self, threshold: float) -> list[str]:
        """Return the names of those whose norm is below a threshold."""
        return [site for site, norm in zip(self.sites, self.norms, strict=True) if norm < threshold]

    def readings(self) -> list[Reading]:
        """Return what rules judge; empty without a gradient."""
        if not self.sites:
            return []
        return [
            Reading.of("parameter.gradient_norm", self.sites, self.norms),
            Reading.of("parameter.nonfinite", self.sites, self.nonfinite),
        ]


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the gradients that have arrived, by the names of their parameters."""
    return {name: p.grad for name, p in parameters_of(model).items() if p.grad is not None}


def parameters_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters by name."""
    return {site_name(name) if "._" in name or name[:1] == "_" else name: p for name, p in _named(model)}


def _named(model: nn.Module) -> Iterable[tuple[str, Tensor]]:
    return unwrap(model).named_parameters()


class CapturedGradients:
    """Gradients as they are at one moment, to be judged later and in another thread.

    Those that the C library can read are read at once, which takes less time than a copy; of those that are broken,
    and of all others, a copy is taken.

    Args:
        gradients: By name. Shape of each: any.
    """

    def __init__(self, gradients: Mapping[str, Tensor]) -> None:
        held = {name: local(gradient) for name, gradient in gradients.items() if not gradient.is_meta}
        known = native_statistics(list(held.values())) if held else None
        self._read: GradientNorms | None = None
        if known is not None:
            norms, magnitudes, _, _, _, nonfinite = known
            nan = np.isnan(magnitudes).tolist()
            counts = tuple(int(count) for count in nonfinite)
            self._read = GradientNorms(tuple(held), tuple(norms.tolist()), counts, tuple(nan))
            held = {name: held[name] for name in self._read.bad}
        self._copies = {name: gradient.detach().clone() for name, gradient in held.items()}
        self._queued = queued(self._copies.values())

    def norms(self) -> GradientNorms:
        """Return the norms."""
        wait_for(self._queued)
        return read_norms(self._copies) if self._read is None else self._read

    def with_inf(self) -> list[str]:
        """Return the names of those that hold Inf."""
        return [name for name, copy in self._copies.items() if holds_inf(copy)]


def holds_inf(gradient: Tensor) -> bool:
    """Return whether an entry is plus or minus Inf. Shape: any."""
    return bool(torch.isinf(flat_entries(gradient)).any())


def read_norms(gradients: Mapping[str, Tensor]) -> GradientNorms:
    """Return the norms of gradients, each read once.

    Args:
        gradients: By name; those on the meta device are left out. Shape of each: any.
    """
    held = {name: local(gradient) for name, gradient in gradients.items() if not gradient.is_meta}
    groups: dict[torch.device, list[str]] = {}
    for name, gradient in held.items():
        groups.setdefault(gradient.device, []).append(name)
    read: dict[str, tuple[float, float, float]] = {}
    with torch.no_grad():
        for names in groups.values():
            norms, rows = entry_statistics([held[name] for name in names])
            table: Sequence[Sequence[float]] = torch.stack([norms.to(rows), rows[0], rows[4]], dim=1).tolist()
            read.update((name, (row[0], row[1], row[2])) for name, row in zip(names, table, strict=True))
    return GradientNorms(
        tuple(held),
        tuple(read[name][0] for name in held),
        tuple(int(read[name][2]) for name in held),
        tuple(math.isnan(read[name][1]) for name in held),
    )


def norms_of(infos: TensorInfos) -> GradientNorms:
    """Return the norms of gradients that were described already."""
    seen = infos.seen.values()
    return GradientNorms(
        tuple(infos.seen),
        tuple(math.nan if each.nan else math.inf if each.inf else each.norm for each in seen),
        tuple(each.nan + each.inf for each in seen),
        tuple(each.nan > 0 for each in seen),
    )
