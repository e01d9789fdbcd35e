"""Finds attention whose mask leaves out what the samples say, and keeps what is the same in all of them: padding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy.typing as npt
import torch
from torch import Tensor

from gradflow_export.autograd_graph.loss_graph import Node
from gradflow_export.autograd_graph.nodes import ATTENTION, Op, kind_of
from gradflow_export.checks.leakage import HIDDEN, LAYERS, Graph, owner_below, product_of
from gradflow_export.hooks.backward_listener import saved
from gradflow_export.hooks.readings import ClueSample
from gradflow_export.metrics.arrays.local import local
from gradflow_export.records.step_record import IssueType, Severity, StepRecord
from gradflow_export.rules.base import Check, Finding, number, some
from gradflow_export.rules.evidence import values_of
from gradflow_export.rules.history import History

SAMPLES, HEADS, QUERIES, KEYS = 64, 2, 16, 128
"""Samples, heads, queries and keys of an attention that are looked at."""
FEWEST = 8
"""Keys of each kind, less one at each place, that a comparison needs."""


def kept_apart(graph: Graph, names: Mapping[int, str], count: int) -> Iterator[ClueSample]:
    """Yield how far keys of different samples are apart, those that masks keep and those that they leave out.

    Args:
        graph: All that is behind a loss.
        names: Names of modules by the ``id`` of their parameters.
        count: Targets of the loss: one of each sample, or of each of its places.
    """
    found = ((node, _keys(node, count)) for node in reversed(graph.nodes))
    for node, (keys, kept) in [(node, each) for node, each in found if each is not None][:LAYERS]:
        told = torch.stack([part for mask in (kept, ~kept) for part in _spread(keys, mask)]).to(torch.float64)
        yield ClueSample("mask.apart", site := owner_below(node, names), told, partial(_told, site))


def _keys(node: Node, count: int) -> tuple[Tensor, Tensor] | None:
    """Return the keys of some samples, and which of them any query sees, where a mask differs between samples.

    Shapes: ``[samples, heads, keys, features]`` and ``[samples, keys]``.
    """
    if kind_of(node).startswith(ATTENTION):
        keys, mask = saved(node, "key"), saved(node, "attn_mask")
        mask = saved(node, "attn_bias") if mask is None else mask
        if keys is None or mask is None or keys.dim() != 4 or mask.dim() != 4 or len(mask) != len(keys):
            return None
        some = _some(local(mask))
        kept = some if some.dtype == torch.bool else some > HIDDEN
    elif kind_of(node) in {Op.SOFTMAX, Op.SAFE_SOFTMAX}:
        weights, made = saved(node, "result"), product_of(node)
        turned = None if made is None else saved(made, "mat2" if kind_of(made) == Op.BMM else "batch2")
        if weights is None or turned is None or weights.shape[-1] != turned.shape[-1]:
            return None
        rows, places = len(turned), turned.shape[-1]
        samples = (
            weights.shape[0]
            if weights.dim() == 4
            else next((n for n in (count, count // places) if n and not rows % n), 0)
        )
        if not samples or rows % samples or weights.numel() != rows * weights.shape[-2] * places:
            return None
        keys = turned.transpose(1, 2).reshape(samples, rows // samples, places, -1)
        kept = _some(local(weights).reshape(samples, -1, weights.shape[-2], places)) > 0
    else:
        return None
    kept = kept.flatten(1, -2).any(1)
    keys = local(keys)[:SAMPLES, :HEADS, :KEYS].to(torch.float32)
    return (keys, kept) if kept.shape == (len(keys), keys.shape[2]) and len(keys) > 1 else None


def _some(mask: Tensor) -> Tensor:
    """Return some queries of some samples, the last, which a causal mask shows most, among them. Dimensions: 4."""
    step = -(-mask.shape[2] // QUERIES)
    return mask[:SAMPLES, :HEADS, (mask.shape[2] - 1) % step :: step, :KEYS]


def _spread(keys: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the squared distances of some keys from the mean of all samples at their place, and how many are free."""
    chosen = mask[:, None, :, None].to(keys.dtype)
    each = mask.sum(0).clamp(min=1)
    mean = (keys * chosen).sum(0) / each[None, :, None]
    return ((keys - mean) * chosen).square().sum(), (mask.sum(0) - 1).clamp(min=0).sum().to(keys.dtype)


def _told(site: str, values: npt.NDArray[Any]) -> dict[str, dict[str, float]]:
    """Return how far apart keys are that count, in those that do not. Shape of the values: ``[4]``."""
    kept, many, hidden, more = map(float, values)
    few = min(many, more) < FEWEST or hidden <= 0
    return {} if few else {"mask.apart": {site: (kept / many) / (hidden / more)}}


@dataclass(frozen=True, kw_only=True)
class MaskedContent(Check):
    """Report attention whose mask leaves out what differs between samples and keeps what does not: an inverted mask.

    Padding is the same in every sample, or nearly so after dropout. If the keys that a mask keeps differ between
    samples far less than those that it leaves out, the mask was taken the wrong way round: the
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
        Masks that are the same for every sample, such as causal ones; padding that differs as much as the content; too
        few keys for a comparison.

    Attributes:
        apart: Maximum variance between samples of the keys that are kept, relative to that of those left out.
    """

    apart: float = 0.3
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
                f"the mask of {some(tuple(layers))} leaves out the content and keeps the padding: the keys that it "
                f"keeps have {number(least)} of the variance between samples of those that it leaves out.",
                "invert the mask: key_padding_mask and src_key_padding_mask are True for padding, which is ignored; "
                "the boolean attn_mask of F.scaled_dot_product_attention is True for keys that take part.",
                cause="inverted mask",
                origin="inverted mask",
            ),
        )
