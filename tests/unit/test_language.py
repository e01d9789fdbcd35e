"""Documents, docstrings, messages and labels are written in the terms of the field, in paragraphs that can be read."""

import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DIALECT = {
    r"told of|tells? of": "report, detect",
    r"(is|are|was|were|be|been) (\w+ )?told(?! of)": "reported, known from, notified",
    r"told apart|tells? apart": "distinguish",
    r"(is|are|was|were|been) set aside|set aside after": "disabled",
    r"way out\b": "fix",
    r"in sight": "target leakage",
    r"in peace": "not reported",
    r"(hold|holds|held) (its|their) tongues?": "suppressed",
    r"hold each other": "part of each other",
    r"kept aside": "held-out",
    r"chase each other|round instead of arriving": "limit cycle",
    r"nobody wants to know": "no-op",
    r"in a run of its own": "in a separate run",
    r"gains? of inf": "transitions with zero downstream gradient",
    r"in silence": "unreported",
    r"(without|has|have|no|nothing|none|that) (a )?bends?": "linear, without an activation",
    r"seen / do": "evidence / fix",
    r"loss of a choice": "classification loss",
    r"lonely pass(es)?": "backward passes without an optimizer step",
    r"whoever": "name who",
    r"taps?\b": "instrument",
}
"""What nobody would type into a search box, and what to write."""
WORDS = 120
"""Most words of a paragraph."""

PAGES = sorted([*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])
SOURCES = sorted(
    [*(ROOT / "gradflow_export").rglob("*.py"), *(ROOT / "tb_plugin" / "tensorboard_plugin_gradflow").rglob("*.py")]
)
PANEL = sorted((ROOT / "tb_plugin" / "frontend" / "src").rglob("*.ts"))


def prose(path):
    """Yield ``(line, text)`` of what people read in a file: all of a page, strings and comments of a source."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        kinds = (tokenize.STRING, tokenize.COMMENT, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING))
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type in kinds:
                yield token.start[0], token.string
    elif path.suffix == ".ts":
        for found in re.finditer(r"//[^\n]*|/\*.*?\*/|\"[^\"\n]*\"|`[^`]*`", text, re.DOTALL):
            yield text.count("\n", 0, found.start()) + 1, found[0]
    else:
        yield 1, text


def dialect(path):
    """Return each term of the private dialect in a file, with its line and what to write instead."""
    return [
        f"{path.relative_to(ROOT)}:{line + text.count(chr(10), 0, found.start())}: {found[0]!r}; write {instead!r}"
        for line, text in prose(path)
        for word, instead in DIALECT.items()
        for found in re.finditer(rf"\b(?:{word})", re.sub(r"\s", " ", text), re.IGNORECASE)
    ]


def paragraphs(text):
    """Yield the paragraphs and list items of a page; code, tables and comments are none."""
    text = re.sub(r"```.*?```|<!--.*?-->", "\n\n", text, flags=re.DOTALL)
    text = re.sub(r"^\|.*$", "", text, flags=re.MULTILINE)
    for block in re.split(r"\n\s*\n", text):
        yield from re.split(r"\n(?=\s*(?:[-*]|\d+\.) )", block)


def test_the_terms_are_those_of_the_field():
    """No docstring, message, label or page uses a term of the private dialect."""
    assert [line for path in (*PAGES, *SOURCES, *PANEL) for line in dialect(path)] == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_paragraphs_are_short(path):
    """No paragraph and no list item of a page has more than 120 words."""
    long = [part for part in paragraphs(path.read_text(encoding="utf-8")) if len(part.split()) > WORDS]
    assert [(len(part.split()), part[:80]) for part in long] == []


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("a.py", '"""It is told of once."""', 1),
        ("a.py", "told_of = 1  # no way out", 1),
        ("a.py", 'x = f"{n} were set\\\n aside"', 0),
        ("a.ts", 'const a = "left in peace"; // in sight', 2),
        ("a.md", "it is told\nof a loss", 1),
        ("a.md", "it is reported", 0),
    ],
)
def test_the_search_for_terms_finds_them(tmp_path, monkeypatch, name, text, found):
    """The check above sees docstrings, comments, strings and pages, also over the end of a line, and no code."""
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    (tmp_path / name).write_text(text)
    assert len(dialect(tmp_path / name)) == found


def test_the_search_for_long_paragraphs_finds_them():
    """Paragraphs and items count; tables and code do not."""
    long = " ".join(["word"] * 200)
    text = f"{long}\n\n- {long}\n- short\n\n| {long} |\n\n```\n{long}\n```\n"
    assert [len(part.split()) > WORDS for part in paragraphs(text) if part.strip()] == [True, True, False]
