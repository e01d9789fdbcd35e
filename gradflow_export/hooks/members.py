"""The modules and parameters of a model with the names of its sites, found without a generator for each level."""

from __future__ import annotations

from torch import Tensor, nn

from gradflow_export.hooks import torch_private

_FRAMES = 6
"""Frames for a level: what ``nn.Module`` takes for a call with hooks, and one for a function around it."""
_ROOM = 100
"""Frames above the model and below its innermost module."""


def nested(model: nn.Module) -> tuple[list[nn.Module], int]:
    """Return each module once, inner ones first, and the recursion limit of Python under which all may have hooks.

    ``nn.Module`` takes a frame more for a call that has hooks, the process-wide ones too.
    """
    found: list[nn.Module] = []
    heights: dict[int, int] = {}
    waiting = [(model, False)]
    while waiting:
        module, done = waiting.pop()
        if done:
            below = (heights.get(id(child), 0) for _, child in torch_private.named_children(module))
            heights[id(module)] = 1 + max(below, default=0)
            found.append(module)
        elif id(module) not in heights:
            heights[id(module)] = 0  # until it is left: a module may hold one that it lies in
            waiting.append((module, True))
            waiting += [(child, False) for _, child in torch_private.named_children(module)]
    return found, _FRAMES * heights[id(model)] + _ROOM


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
