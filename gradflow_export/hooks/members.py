"""The modules and parameters of a model with the names of its sites, found without a generator for each level."""

from __future__ import annotations

from torch import Tensor, nn

from gradflow_export.hooks import torch_private


def members(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return each module once, in the order of ``model.named_modules()``, without the names of wrappers.

    ``named_modules()`` hands each module up through a generator for each level above it.
    """
    found: list[tuple[str, nn.Module]] = []
    seen: set[int] = set()
    waiting = [("", model)]
    while waiting:
        site, module = waiting.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        found.append((site, module))
        if torch_private.is_childless(module):  # most are: nothing more is called for these
            continue
        before = f"{site}." if site else ""
        waiting += [
            (site if key in torch_private.WRAPPERS else before + key, child)
            for key, child in reversed(torch_private.named_children(module))
        ]
    return found


def member_parameters(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Return each parameter once, in the order of ``model.named_parameters()``, without the names of wrappers."""
    found: list[tuple[str, Tensor]] = []
    seen: set[int] = set()
    for site, module in members(model):
        for key, parameter in torch_private.parameters(module):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                found.append((f"{site}.{key}" if site else key, parameter))
    return found
