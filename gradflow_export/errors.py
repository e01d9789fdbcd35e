"""The few kinds of error this package raises, all at construction time.

After ``watch()`` nothing raises into the user's loop; see the failure rules in ``docs/architecture.md``.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_LISTED = 20
"""Known words an error message lists at most."""


class GradflowError(Exception):
    """Base class of all exceptions that this package raises."""


class ArgumentError(GradflowError, ValueError):
    """An argument has an invalid value. The message says what was expected, what was passed, and the fix."""


class ArgumentTypeError(GradflowError, TypeError):
    """An argument has the wrong type. The message says what was expected, what was passed, and the fix."""


class MissingPackageError(GradflowError, ImportError):
    """A required package is not installed. The message has the pip command."""


class StorageError(GradflowError, OSError):
    """A log directory or file cannot be written or read."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a hint with the known word closest to ``name``, for the end of an error message.

    Args:
        name: The word that is not known.
        known: All words that would have been accepted.

    Returns:
        ``"; did you mean 'x'?"`` when one is close, else ``"; known are: a, b, c"``.
    """
    words = sorted(word for word in known if word)
    close = difflib.get_close_matches(str(name), words, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {close[0]!r}?"
    more = f" and {len(words) - _LISTED} more" if len(words) > _LISTED else ""
    return f"; known are: {', '.join(words[:_LISTED])}{more}"


def check_flag(name: str, value: object) -> None:
    """Refuse what is no flag.

    Args:
        name: Of the argument.
        value: What was passed for it.

    Raises:
        ArgumentTypeError: It is neither ``True`` nor ``False``.
    """
    if not isinstance(value, bool):
        raise ArgumentTypeError(f"{name} must be true or false, got {value!r}; leave it out for the default.")
