"""Finds the blocks of a model and gives modules and parameters their names."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from torch import nn

from gradflow_export.errors import ArgumentError, ArgumentTypeError, nearest
from gradflow_export.hooks import torch_private
from gradflow_export.hooks.chains import (
    CONTAINERS,
    LEAST_BLOCKS,
    Chains,
    Choice,
    NamedModule,
    choice,
    is_fan,
    is_store,
    kind_of,
    own_parameters,
    parts,
)


def unwrap(model: nn.Module) -> nn.Module:
    """Return the model inside ``DataParallel``, ``DistributedDataParallel`` and ``torch.compile`` wrappers."""
    while True:
        parallel = isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel))
        inner = model.module if parallel else torch_private.inside(model)
        if not isinstance(inner, nn.Module):
            return model
        model = inner


@functools.lru_cache(maxsize=2**14)
def site_name(name: str) -> str:
    """Strip the wrapper prefixes that ``torch.compile``, FSDP and checkpointing put into dotted names."""
    return ".".join(part for part in name.split(".") if part not in torch_private.WRAPPERS)


class Found(NamedTuple):
    """The chain of blocks whose gains are worth knowing.

    Attributes:
        blocks: Names and modules in registration order.
        leaves: Whether they are single layers.
        choices: Why these, and what was left out.
    """

    blocks: list[NamedModule]
    leaves: bool
    choices: tuple[Choice, ...]

    @property
    def joined(self) -> bool:
        """Whether their depth order is known only once they have been called."""
        return self.leaves or sum(choice.chosen for choice in self.choices) > 1


def find_blocks(model: nn.Module) -> Found:
    """Find the chain of blocks whose gains are worth knowing.

    :class:`~gradflow_export.hooks.chains.Chains` looks for blocks of several layers. Where those are fewer than
    ``LEAST_BLOCKS`` or hold the lesser part, the longest outermost ``ModuleList`` or ``Sequential`` of like modules is
    taken; further lists whose members are of the same class are joined to it in order. Without one of at least
    ``LEAST_BLOCKS`` members single layers are taken, each with what is written around it, such as a skip connection.

    Args:
        model: The unwrapped model.
    """
    chains = Chains(model)
    chain = list({id(module): (name, module) for name, module in reversed(chains.find("", model))}.values())[::-1]
    longest = _longest(model)
    if len(chain) >= LEAST_BLOCKS and 2 * chains.size(chain) >= chains.size(longest):
        choices = tuple(Choice(site_name(one.place), *one[1:]) for one in chains.choices)
        return Found([(site_name(name), module) for name, module in chain], leaves=False, choices=choices)
    if len(longest) >= LEAST_BLOCKS:
        return Found(longest, leaves=False, choices=_choices(longest, "the longest list of like modules"))
    leaves = [(site_name(name) or type(module).__name__, module) for name, module in _layers(model, chains)]
    return Found(leaves, leaves=True, choices=_choices(leaves, "single layers, for there is no list of blocks"))


def _layers(model: nn.Module, chains: Chains) -> Iterator[NamedModule]:
    """Yield the outermost modules with a ``forward`` of their own around one layer, and layers that have none such."""
    within: set[int] = set()
    for name, module in model.named_modules():
        if id(module) in within or is_store(module) or not any(True for _ in module.parameters()):
            continue
        # What a layer holds without parameters, such as the observers of fake quantisation, is a part of it.
        single = not any(True for child in parts(module) for _ in child.parameters())
        if (single and own_parameters(module)) or (module is not model and chains.is_layer(module)):
            within.update(map(id, module.modules()))
            yield name, module


def _choices(blocks: Sequence[NamedModule], why: str) -> tuple[Choice, ...]:
    places: dict[str, list[nn.Module]] = {}
    for name, module in blocks:
        places.setdefault(name.rpartition(".")[0], []).append(module)
    return tuple(choice(place, members, why, chosen=True) for place, members in places.items())


def _longest(model: nn.Module) -> list[NamedModule]:
    """Return the longest list of like modules, with those of the same class."""
    lists = list(_like_lists(model, ""))
    if not lists:
        return []
    longest = max(lists, key=len)
    kind = kind_of(longest[0][1])
    if issubclass(kind, CONTAINERS):
        return longest
    return [member for members in lists if kind_of(members[0][1]) is kind for member in members]


def _like_lists(module: nn.Module, prefix: str) -> Iterator[list[NamedModule]]:
    """Yield every outermost container of like modules that may follow each other, without looking into its members."""
    members = [(f"{prefix}{name}", child) for name, child in module.named_children()]
    like = isinstance(module, (nn.Sequential, nn.ModuleList)) and len({kind_of(child) for _, child in members}) == 1
    if like and len(members) > 1:
        if not is_fan(child for _, child in members):
            yield [(site_name(name), child) for name, child in members]
        return
    for name, child in members:
        yield from _like_lists(child, f"{name}.")


def named_blocks(model: nn.Module, blocks: Iterable[str | nn.Module]) -> list[NamedModule]:
    """Resolve the user's own choice of blocks.

    Args:
        model: The unwrapped model.
        blocks: Dotted module names or modules of the model, in depth order.

    Returns:
        Names and modules.

    Raises:
        ArgumentError: A name or module is not part of the model, comes twice, or nothing was named.
        ArgumentTypeError: It is no list, or an entry is neither a name nor a module.
    """
    if isinstance(blocks, str) or not isinstance(blocks, Iterable):
        came = repr(blocks) if isinstance(blocks, str) else type(blocks).__name__
        raise ArgumentTypeError(
            f"blocks must be a list of module names or modules, got {came}; for example "
            "blocks=['encoder.0', 'encoder.1'] or blocks=model.encoder."
        )
    by_name = {site_name(name): module for name, module in model.named_modules()}
    by_identity = {id(module): name for name, module in by_name.items()}
    out: list[NamedModule] = []
    for block in blocks:
        if isinstance(block, str):
            if block not in by_name:
                raise ArgumentError(f"blocks names {block!r}, which is no module of the model{nearest(block, by_name)}")
            out.append((block, by_name[block]))
        elif isinstance(block, nn.Module):
            if id(block) not in by_identity:
                raise ArgumentError(
                    f"blocks holds a {type(block).__name__} that is not part of the watched model; pass modules of the "
                    "model itself, or their names from model.named_modules()."
                )
            out.append((by_identity[id(block)], block))
        else:
            raise ArgumentTypeError(
                f"blocks must hold module names or modules, got {type(block).__name__}; for example "
                "blocks=['encoder.0', 'encoder.1'] or blocks=model.encoder."
            )
    return check_blocks(out)


def given_blocks(model: nn.Module, blocks: Iterable[str | nn.Module]) -> Found:
    """Return the user's own choice, as :func:`named_blocks` resolves it."""
    chosen = named_blocks(model, blocks)
    return Found(chosen, leaves=False, choices=_choices(chosen, "named by watch(blocks=...)"))


def check_blocks(blocks: Sequence[NamedModule]) -> list[NamedModule]:
    """Raise unless there is at least one block and none comes twice."""
    if not blocks:
        raise ArgumentError("blocks is empty; name at least one module, or leave it out to have the blocks found.")
    seen: dict[int, str] = {}
    for name, module in blocks:
        if id(module) in seen:
            raise ArgumentError(
                f"blocks holds the same module twice, as {seen[id(module)]!r} and {name!r}; each block must be a "
                "separate nn.Module, because gains are measured between different ones."
            )
        seen[id(module)] = name
    return list(blocks)


def is_compiled(module: nn.Module) -> bool:
    """Whether calls of this module run inside compiled code."""
    return torch_private.inside(module) is not None or torch_private.compiles_calls(module)
