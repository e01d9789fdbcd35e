"""The modules and parameters of a model with the names of its sites, found without a generator for each level."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from gradflow_export.hooks import torch_private

_Own = Mapping[str, Tensor | None]

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
    sites, modules, _ = _walk(model)
    return list(zip(sites, modules, strict=True))


def member_parameters(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Return each parameter once, in the order of ``model.named_parameters()``, without the names of wrappers."""
    found: list[tuple[str, Tensor]] = []
    seen: set[int] = set()
    sites, _, owns = _walk(model)
    for site, own in zip(sites, owns, strict=True):
        if own:
            before = f"{site}." if site else ""
            for key, parameter in own.items():
                if parameter is not None and (number := id(parameter)) not in seen:
                    seen.add(number)
                    found.append((before + key, parameter))
    return found


def held_parameters(model: nn.Module) -> list[tuple[nn.Module, str, Tensor]]:
    """Return each parameter once after the module that holds it and its name there, ordered as by ``parameters()``."""
    found: list[tuple[nn.Module, str, Tensor]] = []
    seen: set[int] = set()
    _, modules, owns = _walk(model)
    for module, own in zip(modules, owns, strict=True):
        for key, parameter in own.items():
            if parameter is not None and (number := id(parameter)) not in seen:
                seen.add(number)
                found.append((module, key, parameter))
    return found


def _walk(model: nn.Module) -> tuple[list[str], list[nn.Module], list[_Own]]:
    """Return each module once: its name, itself, and its own parameters, those that are ``None`` too."""
    sites: list[str] = []
    modules: list[nn.Module] = []
    owns: list[_Own] = []
    seen: set[int] = set()
    held, wrappers = torch_private.held, torch_private.WRAPPERS
    waiting = [("", model)]
    while waiting:
        site, module = waiting.pop()
        number = id(module)
        if number in seen:
            continue
        seen.add(number)
        children, own = held(module)
        sites.append(site)
        modules.append(module)
        owns.append(own)
        if children:  # most have none
            before = f"{site}." if site else ""
            waiting += [
                (site if key in wrappers else before + key, child)
                for key, child in reversed(list(children.items()))
                if child is not None
            ]
    return sites, modules, owns
