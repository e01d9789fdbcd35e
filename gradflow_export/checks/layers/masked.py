"""Finds attention whose mask leaves out what the samples say, and keeps what is the same in all of them: padding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar

import numpy.typing as npt
import torch
from torch import Tensor

from gradflow_export.autograd_graph.loss_graph import Node
from gradflow_export.autograd_graph.nodes import ATTENTION, Op, below, kind_of
from gradflow_export.checks.leakage import HIDDEN, LAYERS, Graph, owner_below, product_of
from gradflow_export.hooks.backward_listener import saved
from gradflow_export.hooks.readings import ClueSample
from gradflow_export.metrics.arrays.local import local
from gradflow_export.records.step_record import IssueType, Severity, StepRecord
from gradflow_export.rules.base import Check, Finding, number, some
from gradflow_export.rules.evidence import INVERTED_MASK, values_of
from gradflow_export.rules.history import History

HEADS, QUERIES, KEYS, INPUTS = 2, 16, 128, 8
"""Heads, queries and keys of an attention, and inputs of a model, that are looked at."""
ADDED = 2
"""Tokens that a model puts before or behind its inputs, at most."""
ROUNDING = 1e-5
"""Difference of equal numbers, as a share of their mean size."""
FEWEST = 8
"""Keys of each kind, less one at each place, that a comparison needs."""
_ENTERED = MappingProxyType(
    {Op.ADDMM: ("mat1", 1), Op.EMBEDDING: ("indices", 0), Op.LINEAR: ("input", 0), Op.MM: ("self", 0)}
)
"""What keeps the data that enters a layer, and in which place."""


def kept_apart(graph: Graph, names: Mapping[int, str]) -> Iterator[ClueSample]:
    """Yield how many of the data differ between samples, of those that a mask keeps, and of those it leaves out.

    Args:
        graph: All that is behind a loss.
        names: Names of modules by the ``id`` of their parameters.
    """
    found = [(node, seen) for node in reversed(graph.nodes) if (seen := _kept(node)) is not None][:LAYERS]
    data = [each for node in graph.nodes if found and (each := _entered(node)) is not None][-INPUTS:]
    for node, (kept, keys) in found:
        told = [
            part
            for held, mask in (pair for each in data for pair in _paired(each, kept, keys))
            for part in ((mask.any(0) & ~mask.all(0)).sum(), *_different(held, mask), *_different(held, ~mask))
        ]
        if told:
            site, values = owner_below(node, names), torch.stack(told).to(torch.float64)
            yield ClueSample("mask.apart", site, values, partial(_told, site))


def _kept(node: Node) -> tuple[Tensor, int] | None:
    """Return which keys any of some queries sees, and how many keys there are. Shape: ``[samples, keys]``.

    Samples may be as many times as many as heads.
    """
    kind = kind_of(node)
    if kind.startswith(ATTENTION):
        mask = saved(node, "attn_mask") if hasattr(node, "_saved_attn_mask") else saved(node, "attn_bias")
        if mask is None or mask.dim() != 4:
            return None
        least = HIDDEN
    else:
        mask = saved(node, "result") if kind in {Op.SOFTMAX, Op.SAFE_SOFTMAX} and product_of(node) else None
        if mask is None or mask.dim() not in {3, 4}:
            return None
        least = 0.0
    held = local(mask if mask.dim() == 4 else mask[:, None])
    step = max(-(-held.shape[2] // QUERIES), 1)  # the last one, which a causal mask shows most, is among them
    some = held[:, :HEADS, (held.shape[2] - 1) % step :: step, :KEYS]
    seen = some if some.dtype == torch.bool else some > least
    return seen.flatten(1, -2).any(1), held.shape[3]


def _entered(node: Node) -> Tensor | None:
    """Return data that enters a layer, ``None`` where the layer is given what another one made."""
    name, place = _ENTERED.get(kind_of(node), ("", 0))
    held = saved(node, name) if name and (kind_of(node) == Op.EMBEDDING or below(node, place) is None) else None
    return None if held is None or held.layout is not torch.strided else local(held)


def _paired(entered: Tensor, kept: Tensor, keys: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield data by sample and place, and the mask of the samples. Shapes: ``[n, keys, features]``, ``[n, keys]``."""
    numbers = entered if entered.is_floating_point() else entered[..., None]
    for added in range(ADDED + 1):
        places = keys - added
        flat = numbers.dim() == 2 and places > 0 and not len(numbers) % places
        rows = numbers.reshape(-1, places, numbers.shape[-1]) if flat else numbers
        for held in (rows, rows.transpose(0, 1)) if rows.dim() == 3 else ():
            samples = len(held)
            if held.shape[1] == places and samples > 1 and not len(kept) % samples and held.device == kept.device:
                for start in {0, added}:
                    mask = kept[:: len(kept) // samples, start : start + places]
                    yield held[:, : mask.shape[1]], mask


def _different(held: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many of the data in a mask differ from the first one there at their place, and of how many."""
    first = held[mask.to(torch.uint8).argmax(0), torch.arange(held.shape[1], device=held.device)]
    far = ROUNDING * held.abs().mean() if held.is_floating_point() else 0
    return (((held - first).abs() > far).any(-1) & mask).sum(), (mask.sum(0) - 1).clamp(min=0).sum()


def _told(site: str, values: npt.NDArray[Any]) -> dict[str, dict[str, float]]:
    """Return the least share of the data that differ, of those that a mask keeps, where most of those left out do."""
    shares = [
        float(kept / many)
        for mixed, kept, many, hidden, more in values.reshape(-1, 5)
        if mixed and min(many, more) >= FEWEST and hidden >= 0.5 * more
    ]
    return {"mask.apart": {site: min(shares)}} if shares else {}


@dataclass(frozen=True, kw_only=True)
class MaskedContent(Check):
    """Report attention whose mask leaves out what differs between samples and keeps what does not: an inverted mask.

    Padding is the same in every sample. If the data that a mask keeps do not differ between samples at the same place,
    and those that it leaves out do, the mask was taken the wrong way round: the
    ``key_padding_mask`` of ``nn.MultiheadAttention`` and the ``src_key_padding_mask`` of ``nn.TransformerEncoder`` are
    True for what is ignored, the ``attn_mask`` of ``F.scaled_dot_product_attention`` is True for what takes part.

    Why it is bad:
        Attention returns the same for every sample. What a position itself contains may still reach the output on the
        residual path, so that the loss falls, but no context does.

    Example:
        real = tokens != 0
        y = nn.TransformerEncoder(layer, 2)(x, src_key_padding_mask=real)

    Use instead:
        y = nn.TransformerEncoder(layer, 2)(x, src_key_padding_mask=tokens == 0)

    Not reported:
        Masks that are the same for every sample, such as causal ones; padding that differs between samples; keys that
        are not one for each place of an input and at most two more; too few keys for a comparison.

    Attributes:
        apart: Maximum fraction of the data that differ between samples, of those that are kept.
    """

    apart: float = 0.02
    patience: int = 2
    heal: int = 100

    raises: ClassVar[tuple[IssueType, ...]] = (IssueType.NOT_LEARNING,)
    evidence: ClassVar[tuple[str, ...]] = ("mask.apart",)

    def check(self, record: StepRecord, history: History) -> tuple[Finding, ...]:
        """Judge the masks of this record."""
        layers = {site: value for site, value in values_of(record, "mask.apart").items() if value < self.apart}
        if not layers:
            return ()
        least = min(layers.values())
        return (
            Finding(
                IssueType.NOT_LEARNING,
                Severity.HIGH,
                tuple(layers),
                least,
                self.apart,
                f"the mask of {some(tuple(layers))} leaves out the content and keeps the padding: of the inputs at the "
                f"keys that it keeps, {number(100 * least)} % differ between samples, and most of those that it leaves "
                "out do.",
                "invert the mask: key_padding_mask and src_key_padding_mask are True for padding, which is ignored; "
                "so is memory_key_padding_mask; the boolean attn_mask of F.scaled_dot_product_attention is True for "
                "keys that take part.",
                cause=INVERTED_MASK,
                origin=INVERTED_MASK,
            ),
        )
