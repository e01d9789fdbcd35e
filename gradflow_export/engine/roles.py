"""Names that the user gives to parts of a model, by which their optimizers are known."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from gradflow_export.errors import ArgumentError, ArgumentTypeError, nearest
from gradflow_export.hooks.discover import site_name


class Roles:
    """Parts of a model by name, such as actor and critic.

    Args:
        model: The unwrapped model; only weak references are kept.
        given: Modules of the model or their names, one or several for each role.

    Raises:
        ArgumentError: A name or module is no part of the model, or a role has none.
        ArgumentTypeError: It is no mapping of names to such.
    """

    def __init__(self, model: nn.Module, given: Mapping[str, Any] | None) -> None:
        if not isinstance(given or {}, Mapping) or not all(isinstance(name, str) and name for name in given or {}):
            raise ArgumentTypeError(
                f"roles expects names of parts of the model, such as roles={{'critic': model.critic}}, got {given!r}"
            )
        modules = {site_name(name): module for name, module in model.named_modules()}
        self._parts = {role: _modules(role, part, modules) for role, part in (given or {}).items()}

    def of(self, parameters: Iterable[Tensor]) -> str | None:
        """Return the role that holds all of these, the smallest of several; ``"a+b"`` where only several do together.

        ``None`` where a parameter has no role.
        """
        owned = {id(parameter) for parameter in parameters}
        held = {
            role: {id(p) for part in parts if (module := part()) is not None for p in module.parameters()}
            for role, parts in self._parts.items()
        }
        whole = [role for role, members in held.items() if owned <= members]
        if whole:
            return min(whole, key=lambda role: len(held[role]))
        some = [role for role, members in held.items() if owned & members]
        return "+".join(some) if owned <= set().union(*(held[role] for role in some)) else None


def _modules(role: str, part: Any, known: Mapping[str, nn.Module]) -> list[weakref.ref[nn.Module]]:
    several = isinstance(part, Sequence) and not isinstance(part, (str, nn.Module))
    parts = list(part) if several else [part]
    if not parts:
        raise ArgumentError(f"roles[{role!r}] is empty; name a module of the model.")
    out = []
    for one in parts:
        if isinstance(one, str):
            if one not in known:
                raise ArgumentError(
                    f"roles[{role!r}] names {one!r}, which is no module of the model{nearest(one, known)}"
                )
            out.append(weakref.ref(known[one]))
        elif isinstance(one, nn.Module):
            if all(one is not module for module in known.values()):
                raise ArgumentError(
                    f"roles[{role!r}] holds a {type(one).__name__} that is not part of the watched model; put networks "
                    "that are trained together into one nn.ModuleDict, and watch that."
                )
            out.append(weakref.ref(one))
        else:
            raise ArgumentTypeError(
                f"roles[{role!r}] must be a module of the model or its name, or a list of such, got "
                f"{type(one).__name__}; for example roles={{'critic': model.critic}}."
            )
    return out
