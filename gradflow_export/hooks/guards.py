"""How hooks are wrapped, so that an error of ours never reaches the user's loop."""

from __future__ import annotations

from collections.abc import Callable

Guard = Callable[[Callable[..., None]], Callable[..., None]]
"""Wraps a hook so that an error in it never reaches the user's loop."""


class Part:
    """Wraps the hooks of one part; one that is called too often to be wrapped asks and tells it instead.

    This one lets errors through; an exporter's keeps them from the user's loop.

    Attributes:
        off: Whether hooks are to do nothing.
    """

    def __init__(self) -> None:
        self.off = False

    def __call__(self, hook: Callable[..., None]) -> Callable[..., None]:
        """Return the hook, wrapped."""
        return hook

    def failed(self, error: Exception) -> None:
        """Take an error out of a hook that is not wrapped."""
        raise error

    def took(self, seconds: float) -> None:
        """Count the time of hooks that are not wrapped."""


def unguarded(hook: Callable[..., None]) -> Callable[..., None]:
    """Return the hook as it is; for use outside an exporter."""
    return hook
