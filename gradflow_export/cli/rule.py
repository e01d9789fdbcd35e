"""``gradflow rule WRONG_LOSS``: the pages of the rules that open such issues, which are their docstrings.

Imports torch, as checks of silent mistakes do.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from gradflow_export.errors import ArgumentError, nearest
from gradflow_export.records.issues import IssueType
from gradflow_export.rules.base import Check, Rule

SECTIONS = ("Why it is bad", "Example", "Use instead", "Not reported")
CODE = ("Example", "Use instead")
_WIDTH = 116
_HEADING = re.compile(rf"^({'|'.join((*SECTIONS, 'Source', 'Attributes'))}):[ ]*(.*)$")


@dataclass(frozen=True)
class Page:
    """The docstring of a rule, taken apart; that of a check has all sections.

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
    def of(cls, rule: Rule) -> Page:
        """Take the docstring of a rule apart."""
        text = re.sub(r":\w+:`~?(?:\w+\.)*(\w+)`", r"``\1``", inspect.cleandoc(type(rule).__doc__ or ""))
        title, _, rest = text.partition("\n")
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
        thresholds = {name: (_line(text), getattr(rule, name)) for name, text in described.items()}
        return cls(rule.name, types_of(type(rule)), title, texts.pop(""), texts, thresholds)

    def lines(self) -> Iterator[str]:
        """Yield the page as it is printed on a terminal: why it is bad, how it is measured, then the code to use."""
        why, *code = (self.sections.get(name, "") for name in ("Why it is bad", *CODE))
        rest = {name: text for name, text in self.sections.items() if name not in {"Why it is bad", *CODE}}
        measured = "\n\n".join(filter(None, (self.title, self.what)))
        parts = {"Why it is bad": why, "How it is measured": measured, **rest, **dict(zip(CODE, code, strict=True))}
        for name, text in parts.items():
            if name == CODE[0] and self.thresholds:
                yield from self._thresholds()
            if text:
                yield from ("", f"{name}:", *(f"    {line}".rstrip() for line in text.splitlines()))

    def _thresholds(self) -> Iterator[str]:
        width = max(map(len, self.thresholds))
        yield from ("", "Thresholds:")
        for name, (text, value) in self.thresholds.items():
            yield f"    {name:<{width}}  {value!s:<8}  {text}"

    def markdown(self) -> Iterator[str]:
        """Yield what it says, less the thresholds, as Markdown."""
        yield from (self.title, "")
        if self.what:
            yield from (self.what, "")
        for name, text in self.sections.items():
            yield from (f"**{name}**", "", *(("```python", text, "```") if name in CODE else (text,)), "")


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "rule", help="explain an issue type: what it means, and for silent mistakes an example and its fix"
    )
    parser.add_argument("name", nargs="?", help="an issue type such as WRONG_LOSS, or a rule such as wrong-loss")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the pages of one type of issue or one rule; without a name, a list of all."""
    pages = all_pages()
    if args.name is None:
        width = max(len(page.name) for page in pages)
        for page in pages:
            print(f"{', '.join(map(str, page.types)):<14}  {page.name:<{width}}  {page.title}")
    else:
        print("\n".join(_text(args.name, chosen(args.name, pages))))
    return 0


def _text(name: str, pages: Sequence[Page]) -> Iterator[str]:
    """Yield what is wrong and why it is bad in two sentences, how each rule measures it, and what to do."""
    kind = next((each for each in pages[0].types if str(each) == name.upper()), pages[0].types[0])
    said = f"{kind.meaning[0].upper()}{kind.meaning[1:]}. {kind.harm}"
    names = [f"{page.name} ({', '.join(map(str, page.types))})" for page in pages]
    yield from (names[0] if len(pages) == 1 else str(kind), "", *textwrap.wrap(said, _WIDTH))
    for title, page in zip(names, pages, strict=True):
        yield from ("", "", title) if len(pages) > 1 else ()
        yield from page.lines()
    yield from ("", "", "What to do:", *(f"    {line}" for line in textwrap.wrap(kind.remedy, _WIDTH - 4)))


def all_pages() -> tuple[Page, ...]:
    """Return the pages of all rules, by type of issue and name; loads torch, which other commands need not."""
    from gradflow_export.profiles import profile

    pages = [Page.of(rule) for rule in profile()]
    order = list(IssueType)
    return tuple(sorted(pages, key=lambda page: (order.index(page.types[0]), page.name)))


def chosen(name: str, pages: Iterable[Page]) -> list[Page]:
    """Return the pages of a type of issue or of one rule.

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
        raise ArgumentError(f"no issue or rule is called {name!r}{nearest(name, known)}")
    return found


@functools.cache
def types_of(kind: type[Rule]) -> tuple[IssueType, ...]:
    """Return the types of the issues that a rule opens: what a check says, else what its source names.

    Args:
        kind: The class of the rule.
    """
    if issubclass(kind, Check):
        return kind.raises
    sources = [inspect.getsource(each) for each in kind.__mro__ if issubclass(each, Rule) and each is not Rule]
    beside = {name: made for name, made in vars(inspect.getmodule(kind)).items() if inspect.isfunction(made)}
    for source in sources:
        called = [name for name in beside if re.search(rf"\b{name}\b", source)]
        sources += [inspect.getsource(beside.pop(name)) for name in called]
    # What explains a finding is no type of its own.
    text = re.sub(r"follows_from=\(.*?\)", "", "".join(sources), flags=re.DOTALL)
    named = set(re.findall(r"IssueType\.([A-Z_]+)", text))
    return tuple(each for each in IssueType if each.name in named)


def _line(text: str) -> str:
    return " ".join(text.split())
