"""Text of the commands on a terminal: folded to its width, with colours. Piped text stays as it is."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

LABELS = ("evidence", "value", "layers", "also", "fix", "note", "cause", "patch")
"""First words of a line below which what is folded is indented."""
_LABEL = re.compile(rf"^ *(?:(?:{'|'.join(LABELS)}) +)?")
_STYLES = MappingProxyType({
    r"^\S.*$": "bold",
    r"\[CRITICAL\]|\[HIGH\]": "bold red",
    r"\[MEDIUM\]": "yellow",
    r"\[LOW\]|\[INFO\]": "cyan",
    r"\[CURE\]": "bold green",
    r"^  healthy: .*$": "green",
    r"^  \d+ problems?: .*$": "bold red",
    rf"^ +(?:{'|'.join(LABELS)})(?= )": "dim",
    r"^  metric .*$": "dim",
    r"\(\d+ NaN or Inf\)|\bnan\b|\binf\b": "red",
})  # fmt: skip


def show(text: str) -> None:
    """Print a text on standard output: on a terminal folded to its width and coloured, else as it is.

    ``NO_COLOR`` leaves the colours out, and ``FORCE_COLOR`` treats a pipe as a terminal.

    Args:
        text: Lines; those that begin with one of ``LABELS`` are folded below their text.
    """
    if not sys.stdout.isatty() and not os.environ.get("FORCE_COLOR"):
        print(text, flush=True)
        return
    from rich.console import Console

    console = Console(highlight=False)
    for line in folded(text.splitlines(), console):
        console.print(line, soft_wrap=True)


def agreed(question: str) -> bool:
    """Ask whether something is wanted; nobody who cannot be asked wants it."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return False
    sys.stderr.write(f"gradflow: {question} [y/N] ")
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in {"y", "yes"}


def folded(lines: Sequence[str], console: Console) -> Iterator[Text]:
    """Yield lines that are no wider than a console, with the styles of what they say.

    Args:
        lines: Without line breaks.
        console: Whose width counts.
    """
    from rich.text import Text

    for line in lines:
        found = _LABEL.match(line)
        indent = found.end() if found and found.end() <= console.width // 2 else 0
        whole = Text(line)
        for pattern, style in _STYLES.items():
            whole.highlight_regex(pattern, style)
        if whole.cell_len <= console.width:
            yield whole
            continue
        head, body = whole[:indent], whole[indent:]
        for number, part in enumerate(body.wrap(console, console.width - indent, overflow="fold")):
            part.rstrip()
            yield (head if number == 0 else Text(" " * indent)) + part
