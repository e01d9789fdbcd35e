"""Which modules of a model form its chain of blocks, by how they are built: containers, repetition, weights, widths."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from torch import nn
from torch.nn.utils import parametrize

from gradflow_export.hooks import torch_private
from gradflow_export.hooks.shard_layout import fsdp_class

LEAST_BLOCKS = 3
LEAST_ALIKE = 4
"""Attributes of classes that come twice or more which make the module that holds them a chain, if it has others too."""
_CONVOLUTIONS = (
    nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
)  # fmt: skip
CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)

NamedModule = tuple[str, nn.Module]
Widths = tuple[int, int, frozenset[int]]


class Choice(NamedTuple):
    """Why modules of one place are blocks, or are not.

    Attributes:
        place: Name of the module that holds them.
        members: How many.
        kind: Class of most of them.
        chosen: Whether they are blocks.
        why: In a few words.
    """

    place: str
    members: int
    kind: str
    chosen: bool
    why: str


class Chains:
    """Finds the chain of one model.

    A *layer* is a module with one owner of weights inside, such as a convolution with its normalisation; a *block* has
    two or more. Lists of blocks in series are looked for from outside; where members are stages, whose weights lie in
    lists of their own and whose widths change, the blocks are those of the stages.

    Args:
        model: The unwrapped model.

    Attributes:
        choices: What was decided where, in the order of registration.
    """

    def __init__(self, model: nn.Module) -> None:
        self.choices: list[Choice] = []
        self._owners: dict[int, int] = {}
        self._sizes: dict[int, int] = {}
        self._measure(model)
        self._kinds = Counter(kind_of(m) for m in model.modules() if self._owners.get(id(m), 0) > 1)

    def find(self, name: str, module: nn.Module) -> list[NamedModule]:
        """Return the blocks inside a module, in the order of registration."""
        children = self._children(name, module)
        if self._is_list(module, children):
            return self._members(name, children, listed=isinstance(module, CONTAINERS))
        return self._inside(children)

    def size(self, blocks: Sequence[NamedModule]) -> int:
        """Return the number of entries of the weights of blocks."""
        return sum(self._sizes.get(id(module), 0) for _, module in blocks)

    def is_layer(self, module: nn.Module) -> bool:
        """Whether a module does something of its own with one layer at most, and is not torch's wrapper of another."""
        forward = getattr(type(module), "forward", None)  # a scripted class has none
        if self._owners.get(id(module), 0) > 1 or forward in (nn.Module.forward, nn.Sequential.forward):
            return False
        return torch_private.inside(module) is None and all(
            part not in torch_private.WRAPPERS for part, _ in module.named_children()
        )

    def _measure(self, module: nn.Module) -> tuple[int, int]:
        """Note for a module and what it holds how many modules in it own weights, and how many entries those have."""
        if id(module) in self._owners:  # shared
            return self._owners[id(module)], self._sizes[id(module)]
        self._owners[id(module)] = self._sizes[id(module)] = 0
        own = [p for p in own_parameters(module) if nn.parameter.is_lazy(p) or p.dim() > 1]
        entries = sum(0 if nn.parameter.is_lazy(p) else p.numel() for p in own)
        inner = [self._measure(child) for child in parts(module)]
        # A parametrised weight lies in modules of its own.
        owners = 1 if parametrize.is_parametrized(module) else bool(own) + sum(count for count, _ in inner)
        self._owners[id(module)], self._sizes[id(module)] = owners, entries + sum(size for _, size in inner)
        return self._owners[id(module)], self._sizes[id(module)]

    def _children(self, name: str, module: nn.Module) -> list[NamedModule]:
        """Return the children with weights."""
        prefix = f"{name}." if name else ""
        return [(f"{prefix}{key}", child) for key, child in module.named_children() if self._owners.get(id(child))]

    def _is_block(self, module: nn.Module) -> bool:
        return self._owners[id(module)] > 1

    def _is_whole(self, module: nn.Module) -> bool:
        """Whether a module holds others with weights, and is no single layer."""
        return bool(self._weighted(module)) and not parametrize.is_parametrized(module)

    def _is_list(self, module: nn.Module, children: Sequence[NamedModule]) -> bool:
        if isinstance(module, CONTAINERS):
            return True
        blocks = [child for _, child in children if self._is_block(child) and not isinstance(child, CONTAINERS)]
        counts = Counter(map(kind_of, blocks))
        alike = [child for child in blocks if counts[kind_of(child)] > 1]
        least = LEAST_BLOCKS if len(alike) == len(children) else LEAST_ALIKE
        return len(alike) >= least and not is_fan(alike)

    def _members(self, name: str, children: Sequence[NamedModule], *, listed: bool) -> list[NamedModule]:
        """Return the blocks of a list; attributes of one width may also be networks beside each other."""
        members = [child for child in self._flat(children) if self._is_whole(child[1])]
        blocks = [module for _, module in members if self._is_block(module)]
        if not blocks:
            if len(children) > 1:
                self._say(name, children, "single layers")
            return []
        if len(blocks) == 1 and self._kinds[kind_of(blocks[0])] == 1:
            return self._inside(children)
        if is_fan(module for _, module in members):
            self._say(name, members, "side by side: what one gives out does not fit into the next")
            return []
        if listed and len({_widths(module)[:2] for _, module in members}) == 1:
            return self._take(name, members, "in series, of one width")
        stages = {kind_of(module) for _, module in members if self._is_stage(module)}
        if stages:
            return [block for member in members for block in self._staged(*member, stages)]
        return self._networks(members, len(blocks)) or self._take(name, members, "in series")

    def _flat(self, children: Sequence[NamedModule]) -> Iterator[NamedModule]:
        """Yield members, and those of members that are nothing but lists of blocks."""
        for name, module in children:
            inner = self._children(name, module)
            if isinstance(module, CONTAINERS) and all(self._is_block(child) for _, child in inner):
                yield from self._flat(inner)
            else:
                yield name, module

    def _inside(self, children: Iterable[NamedModule]) -> list[NamedModule]:
        return [block for child in children for block in self.find(*child)]

    def _networks(self, members: Sequence[NamedModule], blocks: int) -> list[NamedModule]:
        """Return the blocks inside members that are whole networks: most weights, or blocks, lie in their chains."""
        before, total = len(self.choices), self.size(members)
        inner = [self.find(*member) for member in members]
        if blocks < LEAST_BLOCKS:
            found = sum(map(len, inner)) > blocks
        else:
            found = any(len(chain) >= LEAST_BLOCKS and 2 * self.size(chain) > total for chain in inner)
        if not found:
            del self.choices[before:]
        return [block for chain in inner for block in chain] if found else []

    def _is_stage(self, module: nn.Module) -> bool:
        """Whether the weights lie in lists of blocks, and in one module beside them at most."""
        children = self._weighted(module)
        if self._kin(module):
            return len(children) > 1
        lists = [c for c in children if isinstance(c, CONTAINERS) and self._is_series(self._weighted(c))]
        return bool(lists) and len(children) - len(lists) <= 1

    def _is_series(self, modules: Sequence[nn.Module]) -> bool:
        return all(map(self._is_block, modules)) and not is_fan(modules)

    def _weighted(self, module: nn.Module) -> list[nn.Module]:
        return [child for _, child in self._children("", module)]

    def _staged(self, name: str, module: nn.Module, stages: Collection[type]) -> list[NamedModule]:
        """Return the blocks of a stage, or what is none itself."""
        if kind_of(module) not in stages:
            single = [(name, module)] if self._is_block(module) else []
            return self._take(name.rpartition(".")[0], single, "between stages") if single else []
        out: list[NamedModule] = []
        kin = self._kin(module)
        for child, inside in self._children(name, module):
            if isinstance(inside, CONTAINERS):
                held = [block for block in self._children(child, inside) if self._is_block(block[1])]
                out += self._take(child, held, "in series, of a stage") if held else []
            elif any(inside is one for one in kin):
                out.append((child, inside))
        if kin:
            self._say(name, out, "in series, of a stage", chosen=True)
        return out

    def _kin(self, module: nn.Module) -> list[nn.Module]:
        """Return the children that are blocks, where a stage holds its blocks as attributes."""
        children = self._weighted(module)
        alike = len({kind_of(child) for child in children}) == 1 and not isinstance(children[0], CONTAINERS)
        return children if alike and all(map(self._is_block, children)) else []

    def _take(self, place: str, members: Sequence[NamedModule], why: str) -> list[NamedModule]:
        self._say(place, members, why, chosen=True)
        return list(members)

    def _say(self, place: str, members: Sequence[NamedModule], why: str, *, chosen: bool = False) -> None:
        self.choices.append(choice(place, [module for _, module in members], why, chosen=chosen))


def is_store(module: nn.Module) -> bool:
    """Whether neither a module nor anything in it can be called, as with ``nn.ParameterList``."""
    return all(
        getattr(type(part), "forward", None) is nn.Module.forward and "forward" not in vars(part)
        for part in module.modules()
    )


def parts(module: nn.Module) -> list[nn.Module]:
    """Return the children of a module that are called, or hold what is."""
    return [child for child in module.children() if not is_store(child)]


def own_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of a module itself, also those that lie in a store of it and in no other part."""
    own = list(module.parameters(recurse=False))
    stored = [parameter for child in module.children() if is_store(child) for parameter in child.parameters()]
    held = {id(p) for part in parts(module) for p in part.parameters()} if stored else set()
    return [*own, *(parameter for parameter in stored if id(parameter) not in held)]


def choice(place: str, members: Sequence[nn.Module], why: str, *, chosen: bool) -> Choice:
    """Return what was decided about modules of one place."""
    kind = Counter(kind_of(module).__name__ for module in members).most_common(1)[0][0]
    return Choice(place, len(members), kind, chosen, why)


def kind_of(module: nn.Module) -> type:
    """Return the class of a module, without the one that ``fully_shard`` puts before it."""
    kind = type(module)
    return kind.__bases__[1] if kind.__bases__[0] in fsdp_class("FSDPModule") else kind


def _widths(module: nn.Module) -> Widths | tuple[()]:
    """Return what the first layer takes, what the last gives out, and what any takes, as torch's own layers tell."""
    layers = [part for part in module.modules() if isinstance(part, (nn.Linear, *_CONVOLUTIONS))]
    if not layers:
        return ()
    takes = [part.in_features if isinstance(part, nn.Linear) else part.in_channels for part in layers]
    last = layers[-1]
    gives = last.out_features if isinstance(last, nn.Linear) else last.out_channels
    return takes[0], gives, frozenset(takes)


def is_fan(modules: Iterable[nn.Module]) -> bool:
    """Whether modules cannot follow each other.

    Most have no layer that takes as much as the one before gives out; or all give out the same, and none after takes
    that much; or inputs widen or narrow from each to the next, while all give out the same. What is put beside what was
    taken, as in dense blocks, explains a width too.
    """
    known = [widths for module in modules if (widths := _widths(module))]
    pairs = list(itertools.pairwise(known))
    if not pairs:
        return False
    if 2 * sum(max(after[2]) < before[1] for before, after in pairs) > len(pairs):
        return True
    if len({gives for _, gives, _ in known}) > 1:
        return False
    joined = [after[0] == before[0] + before[1] for before, after in pairs]
    if not any(join or before[1] in after[2] for join, (before, after) in zip(joined, pairs, strict=True)):
        return True
    fits = all(join or before[1] == after[0] for join, (before, after) in zip(joined, pairs, strict=True))
    monotone = {before[0] < after[0] for before, after in pairs}
    distinct = len({first for first, _, _ in known}) == len(known) > 2
    return distinct and len(monotone) == 1 and not fits
