"""Attention weights, recomputed from what enters the attention of a few samples and queries."""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from gradflow_export.autograd_graph.provenance import is_plain, is_product
from gradflow_export.hooks.compiled_calls import CompiledCode
from gradflow_export.hooks.discover import is_compiled, site_name
from gradflow_export.hooks.forward_trace import Call, ForwardPasses
from gradflow_export.hooks.function_spy import attention_spies
from gradflow_export.hooks.guards import Guard, unguarded
from gradflow_export.hooks.module_calls import output_tensor
from gradflow_export.hooks.readings import Drained, Pending, stack_scalars
from gradflow_export.instruments.base import Cost, Instrument, Need, Setting
from gradflow_export.metrics.attention import (
    SAMPLES,
    Rows,
    Terms,
    as_heads,
    attention_rows,
    entropy_bound,
    head_divergence,
    head_diversity,
    head_entropies,
    masked_logits,
    max_logit,
    mean_entropy,
    rank_residual,
    ratio,
    ratio_error,
    sampled_scores,
    sink_share,
    sparsity,
)
from gradflow_export.records.catalog import MetricSpec, spec

UNSEEN_STEPS = 5
"""Sampled steps without any attention after which a model is taken to have none."""

_OF_ANY: tuple[tuple[str, Callable[[Rows], Terms]], ...] = (
    ("attention.entropy_nats", mean_entropy),
    ("attention.entropy_bound", entropy_bound),
    ("attention.sparsity", sparsity),
    ("attention.sink", sink_share),
)
_OF_SEVERAL: tuple[tuple[str, Callable[[Rows], Terms]], ...] = (
    ("attention.diversity", head_diversity),
    ("attention.divergence", head_divergence),
)
_RESIDUALS = ("block.rank_residual", "block.input_residual")
_HEADS = ("num_heads", "n_heads", "n_head", "nhead", "heads", "num_attention_heads")
_CONTAINERS = (nn.Sequential, nn.ModuleList)
_PARTS = (nn.Softmax, nn.Dropout)


@dataclass(frozen=True)
class _Known:
    """What is known of one module of the model before it is called."""

    module: weakref.ref[nn.Module]
    site: str
    place: int
    heads: int | None
    member: bool
    tokens_first: bool
    part: bool


class AttentionInstrument(Instrument):
    """Watches attention on sampled steps, however the model computes it, and what it leaves of its tokens.

    Seen are calls of ``scaled_dot_product_attention`` (and so ``nn.MultiheadAttention`` and ``TransformerEncoderLayer``
    while they train), and a softmax over the last dimension of a batched product of two activations
    (``need_weights=True``, attention written by hand). The functions are watched only while the model's own forward
    pass runs. Not seen: FlexAttention and other kernels, attention bound to an attribute or by ``functools.partial``,
    what runs without gradients, and models of which any part is compiled. Of a module that is called several times in
    a step the first call is read.

    Args:
        model: The unwrapped model; only weak references to its modules are kept.
        enabled: False never sees a call.
        keep_weights: Also hold the weights of the first sample until the next drain, in :attr:`weights`.
        code: Knows whether the model turned out to be compiled.
        guard: Keeps errors out of the user's loop.

    Attributes:
        weights: Attention weights of the first sample by layer. Shape of each: ``[heads, queries, keys]``.
    """

    instrument: ClassVar[str] = "attention"
    interval: ClassVar[int] = 50
    cost: ClassVar[Cost] = "H"
    needs: ClassVar[frozenset[Need]] = frozenset({"calls"})

    def __init__(
        self,
        model: nn.Module,
        *,
        enabled: bool = True,
        keep_weights: bool = False,
        code: CompiledCode | None = None,
        guard: Guard = unguarded,
    ) -> None:
        self.weights: dict[str, Tensor] = {}
        self._keep_weights = keep_weights
        self._enabled = enabled and not any(is_compiled(module) for module in model.modules())
        self._modules = sum(1 for module in model.modules() if _may_attend(module)) if self._enabled else 0
        known = dict(_describe(model)) if self._enabled else {}
        self._passes: ForwardPasses[_Known] = ForwardPasses(known, code=code, left=guard(self._left))
        self._see_attention, self._see_softmax = guard(self._attended), guard(self._normalised)
        self._unseen = 0
        self._heads: dict[int, int] = {}
        self._sites: dict[int, str] = {}
        self._blocks: dict[int, str] = {}
        self._of_heads: dict[str, dict[int, Tensor]] = {}
        self._values: dict[str, dict[int, Tensor]] = {}
        self._residuals: dict[str, dict[int, Tensor]] = {}

    @classmethod
    def make(cls, setting: Setting) -> AttentionInstrument:
        """Make one for a model."""
        return cls(setting.model, code=setting.code, guard=setting.part(cls.instrument))

    @property
    def modules(self) -> int:
        """How many modules may hold attention: those of the user's own classes, and ``nn.MultiheadAttention``."""
        return self._modules

    @property
    def specs(self) -> tuple[MetricSpec, ...]:
        """The metrics this instrument can give out."""
        names = ("attention.entropy", *(name for name, _ in (*_OF_ANY, *_OF_SEVERAL)), *_RESIDUALS)
        errors = (spec(name).error for name in names)
        return tuple(map(spec, (*names, "attention.max_logit", *errors)))

    def attach(self) -> contextlib.ExitStack:
        """Begin; closing the returned stack puts every function back."""
        stack = contextlib.ExitStack()
        stack.callback(self.forget)
        spies = attention_spies(self._see_attention, self._see_softmax) if self._modules else []
        stack.enter_context(self._passes.attach(spies))
        return stack

    def arm(self, *, on: bool) -> None:
        """Begin to see calls, or with ``on=False`` see no more."""
        self._passes.arm(on=on and self._unseen < UNSEEN_STEPS)

    def _attended(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take the arguments of ``scaled_dot_product_attention``."""
        call = self._reader()
        if call is None:
            return
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        query, key, mask = given.get("query"), given.get("key"), given.get("attn_mask")
        if not (is_plain(query) and is_plain(key) and query.dim() >= 2 and key.shape[-2] > 1 and query.numel()):
            return
        if mask is not None and not is_plain(mask):
            return
        with torch.no_grad(), torch.autocast(query.device.type, enabled=False):
            causal, scale = bool(given.get("is_causal")), given.get("scale")
            logits = masked_logits(query, key, mask=mask, causal=causal, scale=scale, heads=call.known.heads)
            self._read(call, logits, as_heads(query, call.known.heads).shape)

    def _normalised(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take what enters a softmax, if it is a batched product of two activations."""
        scores = args[0] if args else kwargs.get("input")
        dim = args[1] if len(args) > 1 else kwargs.get("dim")
        call = self._reader()
        if call is None or not is_plain(scores) or scores.dim() < 3 or dim not in (-1, scores.dim() - 1):
            return
        if scores.shape[-1] > 1 and scores.numel() and is_product(scores.grad_fn):
            with torch.no_grad(), torch.autocast(scores.device.type, enabled=False):
                shape = as_heads(scores, call.known.heads).shape
                self._read(call, sampled_scores(scores, call.known.heads), shape)

    def _reader(self) -> Call[_Known] | None:
        """Return the call that attention belongs to, ``None`` where it was read in this step already."""
        for call in reversed(self._passes.calls):
            if not call.known.part:
                return None if call.known.place in self._of_heads.get("attention.entropy", ()) else call
        return None

    def _read(self, call: Call[_Known], logits: Tensor, whole: torch.Size) -> None:
        """Take the attention of some samples and queries of all. Shape of the whole: that of the logits, but keys."""
        rows, place, heads = attention_rows(logits), call.known.place, logits.shape[1]
        self._heads[place], self._sites[place] = heads, call.known.site
        measures = (*_OF_ANY, *(_OF_SEVERAL if heads > 1 else ()))
        parts = [head_entropies(rows), *(measure(rows) for _, measure in measures)]
        above, below = (torch.cat(each, dim=2) for each in zip(*parts, strict=True))
        told = {"": ratio((above, below))}
        if logits.shape[0] < whole[0] or logits.shape[2] < whole[2]:
            told["_error"] = ratio_error((above, below), whole[0], whole[2])
        for end, values in told.items():
            self._of_heads.setdefault(f"attention.entropy{end}", {})[place] = values[:heads]
            for (name, _), value in zip(measures, values[heads:].unbind(), strict=True):
                self._values.setdefault(f"{name}{end}", {})[place] = value
        self._values.setdefault("attention.max_logit", {})[place] = max_logit(rows)
        if self._keep_weights:
            self.weights[call.known.site] = rows.weights[0]
        block = _block(self._passes.calls)
        if block is not None:
            block.marked = True
            self._tell_apart("block.input_residual", block.known, block.given)

    def _tell_apart(self, metric: str, known: _Known, value: Any) -> None:
        """Take how much tells the tokens of a block's input or output apart, once in a step."""
        tokens, place = _tokens(value, known), known.place
        if tokens is None or place in self._residuals.get(metric, ()):
            return
        self._blocks[place] = known.site
        terms, whole = rank_residual(tokens[:: -(-len(tokens) // SAMPLES)]), len(tokens)
        self._residuals.setdefault(metric, {})[place] = ratio(terms).squeeze(0)
        if len(terms[0]) < whole:
            self._residuals.setdefault(f"{metric}_error", {})[place] = ratio_error(terms, whole, 1).squeeze(0)

    def _left(self, call: Call[_Known], output: Any) -> None:
        """Take what a block with attention gives out."""
        with torch.no_grad():
            self._tell_apart("block.rank_residual", call.known, output)

    def drain(self) -> Drained:
        """Give out what was read since the last call, and forget it."""
        if self._passes.ran:
            self._unseen = self._unseen + 1 if not self._sites else 0
        out: Drained = [self._each_head(name, values) for name, values in self._of_heads.items()]
        for sites, metrics in ((self._sites, self._values), (self._blocks, self._residuals)):
            out += [_pending(name, sites, values) for name, values in metrics.items()]
        self.forget()
        return out

    def _each_head(self, metric: str, values: dict[int, Tensor]) -> Pending:
        sites, where, start = [], [], 0
        for place in sorted(self._heads):
            many = self._heads[place]
            sites += [f"{self._sites[place]}.head{head}" for head in range(many)]
            where += list(range(start, start + many)) if place in values else []
            start += many
        parts = [values[place] for place in sorted(values)]
        joined = torch.cat([part.to(parts[0].device, parts[0].dtype) for part in parts])
        return Pending(metric, tuple(sites), joined, np.array(where, dtype=np.int64))

    def forget(self) -> None:
        """Forget what was collected: the step makes no record."""
        self._of_heads, self._values, self._residuals, self.weights = {}, {}, {}, {}
        self._passes.ran = False


def _pending(metric: str, sites: dict[int, str], values: dict[int, Tensor]) -> Pending:
    """Join the values of some of the sites, in order of registration."""
    places = sorted(sites)
    where = [index for index, place in enumerate(places) if place in values]
    stacked = stack_scalars([values[places[index]] for index in where])
    return Pending(metric, tuple(sites[place] for place in places), stacked, np.array(where, dtype=np.int64))


def _may_attend(module: nn.Module) -> bool:
    own = not type(module).__module__.startswith("torch.nn.modules")
    return own or isinstance(module, nn.MultiheadAttention)


def _describe(model: nn.Module) -> Iterator[tuple[int, _Known]]:
    """Yield what is known of every module, by identity."""
    modules = dict(model.named_modules())
    tokens_first = {
        name[:end]
        for name, module in modules.items()
        if isinstance(module, nn.MultiheadAttention) and not module.batch_first
        for end in [*(index for index, letter in enumerate(name) if letter == "."), len(name)]
    }
    stacks = {name: _alike(module) for name, module in modules.items() if isinstance(module, _CONTAINERS)}
    for place, (name, module) in enumerate(modules.items()):
        stack = stacks.get(name.rpartition(".")[0], frozenset())
        heads = [getattr(module, attribute, None) for attribute in _HEADS]
        yield (
            id(module),
            _Known(
                weakref.ref(module),
                site_name(name) or type(module).__name__,
                place,
                next((count for count in heads if isinstance(count, int) and count > 0), None),
                bool(name) and type(module) in stack,
                name in tokens_first,
                isinstance(module, _PARTS),
            ),
        )


def _alike(container: nn.Module) -> frozenset[type]:
    """Return the classes of which a list holds several members, or of which it holds its only one."""
    kinds = Counter(type(member) for member in container.children())
    return frozenset(kind for kind, count in kinds.items() if count > 1 or kinds.total() == 1)


def _block(stack: list[Call[_Known]]) -> Call[_Known] | None:
    """Return the block whose attention was called: the innermost member of a list of like modules."""
    return next((call for call in reversed(stack) if call.known.member), None)


def _tokens(value: Any, known: _Known) -> Tensor | None:
    """Return a block's input or output as ``[batch, positions, features]``, if it is a sequence."""
    tensor = output_tensor(value)
    if tensor is None or not is_plain(tensor) or tensor.dim() != 3 or tensor.is_complex() or not tensor.numel():
        return None
    tokens = tensor.detach().transpose(0, 1) if known.tokens_first else tensor.detach()
    return tokens if tokens.shape[1] > 1 else None
