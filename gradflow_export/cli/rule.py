"""``gradflow rule WRONG_LOSS``: the page of a check of silent mistakes, which is its docstring. Imports torch."""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from gradflow_export.errors import ArgumentError, nearest
from gradflow_export.records.issues import IssueType
from gradflow_export.rules.base import Check

SECTIONS = ("Why it is bad", "Example", "Use instead", "Not reported")
CODE = ("Example", "Use instead")
_HEADING = re.compile(rf"^({'|'.join((*SECTIONS, 'Source', 'Attributes'))}):[ ]*(.*)$")


@dataclass(frozen=True)
class Page:
    """The docstring of a check, taken apart.

    Attributes:
        name: Of the rule, ``"wrong-loss"``.
        types: Types of the issues that it opens.
        title: The first line.
        what: What it does: the paragraphs before the first section.
        sections: Text or code by heading.
        thresholds: What each threshold is, and its value, by name.
    """

    name: str
    types: tuple[IssueType, ...]
    title: str
    what: str
    sections: Mapping[str, str]
    thresholds: Mapping[str, tuple[str, object]]

    @classmethod
    def of(cls, check: Check) -> Page:
        """Take the docstring of a check apart."""
        title, _, rest = inspect.cleandoc(type(check).__doc__ or "").partition("\n")
        parts: dict[str, list[str]] = {"": []}
        here = ""
        for line in rest.splitlines():
            heading = _HEADING.match(line)
            if heading is None:
                parts[here].append(line)
            else:
                here = heading[1]
                parts[here] = [heading[2]]
        texts = {name: inspect.cleandoc("\n".join(lines)).strip() for name, lines in parts.items()}
        described = dict(re.findall(r"^(\w+): (.*(?:\n[ ]+.*)*)", texts.pop("Attributes", ""), re.MULTILINE))
        thresholds = {name: (_line(text), getattr(check, name)) for name, text in described.items()}
        return cls(check.name, check.raises, title, texts.pop(""), texts, thresholds)

    def lines(self) -> Iterator[str]:
        """Yield the page as it is printed on a terminal."""
        yield from (f"{self.name} ({', '.join(map(str, self.types))})", "", self.title)
        if self.what:
            yield from ("", self.what)
        for name, text in self.sections.items():
            yield from ("", f"{name}:", *(f"    {line}".rstrip() for line in text.splitlines()))
        if self.thresholds:
            width = max(map(len, self.thresholds))
            yield from ("", "Thresholds:")
            for name, (text, value) in self.thresholds.items():
                yield f"    {name:<{width}}  {value!s:<8}  {text}"

    def markdown(self) -> Iterator[str]:
        """Yield the page as a section of docs/checks.md."""
        yield from (f"### {self.name}", "", self.title)
        if self.what:
            yield from ("", self.what.replace("``", "`"))
        for name, text in self.sections.items():
            shown = ("```python", text, "```") if name in CODE else (text.replace("``", "`"),)
            yield from ("", f"**{name}**", "", *shown)
        if self.thresholds:
            yield from ("", "**Thresholds**", "")
            for name, (text, value) in self.thresholds.items():
                yield f"- `{name}` = {value}: {text.replace('``', '`')}"


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("rule", help="explain a check of silent mistakes, with an example and its fix")
    parser.add_argument("name", nargs="?", help="type of an issue, as WRONG_LOSS, or a check, as wrong-loss")
    parser.add_argument("--markdown", action="store_true", help="all of them, as docs/checks.md")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the pages of one type of issue or one check; without a name, a list of all."""
    pages = all_pages()
    if args.markdown:
        print(markdown(pages), end="")
    elif args.name is None:
        width = max(len(page.name) for page in pages)
        for page in pages:
            print(f"{', '.join(map(str, page.types)):<14}  {page.name:<{width}}  {page.title}")
    else:
        print("\n\n\n".join("\n".join(page.lines()) for page in chosen(args.name, pages)))
    return 0


def all_pages() -> tuple[Page, ...]:
    """Return the pages of all checks, by type of issue and name; loads torch, which other commands need not."""
    from gradflow_export.profiles import profile

    pages = [Page.of(rule) for rule in profile() if isinstance(rule, Check)]
    order = list(IssueType)
    return tuple(sorted(pages, key=lambda page: (order.index(page.types[0]), page.name)))


def chosen(name: str, pages: Iterable[Page]) -> list[Page]:
    """Return the pages of a type of issue or of one check.

    Args:
        name: ``"WRONG_LOSS"`` or ``"wrong-loss"``, in upper or lower case.
        pages: All of them.

    Raises:
        ArgumentError: No page has that name.
    """
    pages = list(pages)
    wanted = name.lower()
    found = [page for page in pages if wanted in {page.name, *(str(each).lower() for each in page.types)}]
    if not found:
        known = [*dict.fromkeys(str(each) for page in pages for each in page.types), *(page.name for page in pages)]
        if name.upper() in IssueType.__members__:
            kind = IssueType[name.upper()]
            raise ArgumentError(f"{kind} is no silent mistake: {kind.meaning}. docs/when-it-fires.md says when.")
        raise ArgumentError(f"no check is called {name!r}{nearest(name, known)}")
    return found


def markdown(pages: Iterable[Page]) -> str:
    """Return docs/checks.md.

    Args:
        pages: By type of issue.

    Returns:
        The whole page, ending with a newline.
    """
    lines = [
        "# Checks of silent mistakes",
        "",
        "Written by `gradflow rule --markdown` from the docstrings in `gradflow_export/checks/`; a test compares them.",
        "`gradflow rule WRONG_LOSS` prints a page on the terminal. What is found is counted in",
        "[silent-mistakes.md](silent-mistakes.md).",
    ]
    kind = None
    for page in pages:
        if page.types[0] is not kind:
            kind = page.types[0]
            lines += ["", f"## {kind}", "", f"{kind.meaning[0].upper()}{kind.meaning[1:]}."]
        lines += ["", *page.markdown()]
    return "\n".join(lines) + "\n"


def _line(text: str) -> str:
    return " ".join(text.split())
