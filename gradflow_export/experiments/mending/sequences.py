"""Changes to layers that read sequences: the axis they take for time, what a mask leaves out, the state handed on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import rnn

from gradflow_export.experiments.interventions import Intervention
from gradflow_export.experiments.model_edits import tensors

SEQUENCES = (nn.RNNBase, nn.MultiheadAttention, nn.Transformer)
"""Layers of torch that take the batch for their first or their second axis."""
ATTENTION = frozenset(("multi_head_attention_forward", "scaled_dot_product_attention"))
STEPWISE = (nn.RNNCellBase, nn.RNNBase)
"""Layers that can be called once for each step of a sequence."""
PADDED = 2
"""Steps at the end of a sequence that are the same from which on they are padding."""
CLOSED = -1e3
"""Number that is added to a score from which on, downwards, it counts as left out."""


class OtherAxis(Intervention):
    """Lets recurrent and attention layers run over the other one of their first two axes."""

    stays = True

    def __init__(self) -> None:
        super().__init__()
        self._turned: set[int] = set()

    def root(self, module: nn.Module) -> None:
        """Turn its layers, each once."""
        for layer in module.modules():
            if isinstance(layer, SEQUENCES) and id(layer) not in self._turned:
                self._turned.add(id(layer))
                layer.batch_first = not layer.batch_first
                self.acted = True


class OtherMasks(Intervention):
    """Lets attention look where its mask leaves out, and leave out where it looks."""

    stays = True

    def function(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
        """Turn the mask of padding, or where there is none that of pairs."""
        found = masks(name, args, kwargs)
        key = next(iter(found), None)
        turned = None if key is None else _turned(name, found[key])
        if key is None or turned is None:
            return args, kwargs
        self.acted = True
        if isinstance(key, int):
            return (*args[:key], turned, *args[key + 1 :]), kwargs
        return args, {**kwargs, key: turned}


class WithoutPadding(Intervention):
    """Lets recurrent layers end each sequence before its padding, where they keep what they gave last."""

    stays = True

    def __init__(self) -> None:
        super().__init__()
        self._hooked: set[int] = set()

    def root(self, module: nn.Module) -> None:
        """Hook its layers, each once."""
        for layer in module.modules():
            if isinstance(layer, nn.RNNBase) and id(layer) not in self._hooked:
                self._hooked.add(id(layer))
                layer.register_forward_hook(self._ended, with_kwargs=True)

    def _ended(self, layer: nn.RNNBase, args: Any, kwargs: Any, _output: Any) -> Any:
        lengths = real_lengths(layer, args)
        if lengths is None:
            return None
        self.acted = True
        first = layer.batch_first
        packed = rnn.pack_padded_sequence(args[0], lengths.cpu(), first, enforce_sorted=False)
        given, state = layer.forward(packed, *args[1:], **kwargs)
        steps = args[0].shape[1 if first else 0]
        out = rnn.pad_packed_sequence(given, batch_first=True, total_length=steps)[0]
        last = torch.arange(steps, device=out.device).minimum(lengths[:, None] - 1)
        out = out.gather(1, last[..., None].expand_as(out))
        return (out if first else out.transpose(0, 1)), state


def real_lengths(layer: nn.RNNBase, args: Any) -> Tensor | None:
    """Return the steps of each sequence before those at the end that are all the same; ``None`` without such.

    Args:
        layer: A recurrent layer.
        args: What it is called with.
    """
    given = args[0] if args else None
    if not isinstance(given, Tensor) or given.dim() != 3 or not given.numel():
        return None
    rows = given.detach() if layer.batch_first else given.detach().transpose(0, 1)
    repeated = (rows == rows[:, -1:]).all(-1).flip(1).int().cumprod(1).sum(1)
    most = int(repeated.max())
    if most < PADDED:
        return None
    # Of a batch the same number stands for nothing in every row.
    filler = rows[int(repeated.argmax()), -1]
    ends = (rows == filler).all(-1).flip(1).int().cumprod(1).sum(1)
    return (rows.shape[1] - ends).clamp(min=1)


class HandedOn(Intervention):
    """Gives a recurrent layer the state that it left, where one call of the model calls it again without any."""

    stays = True

    def __init__(self) -> None:
        super().__init__()
        self._hooked: set[int] = set()
        self._states: dict[int, tuple[int, Any]] = {}

    def root(self, module: nn.Module) -> None:
        """Hook its layers, each once."""
        for layer in module.modules():
            if isinstance(layer, STEPWISE) and id(layer) not in self._hooked:
                self._hooked.add(id(layer))
                layer.register_forward_pre_hook(self._begins, with_kwargs=True)
                layer.register_forward_hook(self._ended)

    def called(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Forget the states: another sequence begins."""
        del module
        self._states = {}
        return args, kwargs

    def _begins(self, layer: nn.Module, args: Any, kwargs: Any) -> Any:
        count, left = self._states.get(id(layer), (0, None))
        given = args[1] if len(args) > 1 else kwargs.get("hx")
        if not count or _stepped(layer, args) != count or any(bool(each.any()) for each in tensors([given])):
            return None
        self.acted = True
        return (args[0], left), {name: value for name, value in kwargs.items() if name != "hx"}

    def _ended(self, layer: nn.Module, args: Any, output: Any) -> None:
        self._states[id(layer)] = _stepped(layer, args), output[1] if isinstance(layer, nn.RNNBase) else output


def _stepped(layer: nn.Module, args: Any) -> int:
    """Return of how many sequences a recurrent layer is given one step; 0 where it is given something else."""
    given = args[0] if args else None
    if not isinstance(given, Tensor):
        return 0
    if not isinstance(layer, nn.RNNBase):
        return len(given) if given.dim() == 2 else 0
    time = 1 if layer.batch_first else 0
    return given.shape[1 - time] if given.dim() == 3 and given.shape[time] == 1 else 0


def masks(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[int | str, Tensor]:
    """Return the masks that a function of attention is given, by where they stand; that of padding first."""
    if name not in ATTENTION:
        return {}
    places: list[int | str] = ["key_padding_mask", "attn_mask"]
    if name == "scaled_dot_product_attention":
        places.append(3)
    given = {each: args[each] if isinstance(each, int) else kwargs.get(each) for each in places if _stands(each, args)}
    return {each: mask for each, mask in given.items() if isinstance(mask, Tensor)}


def _stands(place: int | str, args: tuple[Any, ...]) -> bool:
    return not isinstance(place, int) or len(args) > place


def _turned(name: str, mask: Tensor) -> Tensor | None:
    """Return the opposite of a mask; ``None`` of one that is no mask but a bias."""
    if mask.dtype is torch.bool:
        return ~mask
    # What scaled_dot_product_attention is given by multi_head_attention_forward was turned there.
    if name == "scaled_dot_product_attention" or not mask.is_floating_point() or mask.requires_grad:
        return None
    closed = mask <= CLOSED
    if not bool((closed | (mask == 0)).all()):
        return None
    return torch.zeros_like(mask).masked_fill(~closed, -torch.inf)
