"""Writes docs/issues: one page per issue type, from the rules that raise it. ``make schema`` runs it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from gradflow_export import IssueType
from gradflow_export.cli.rule import Page, types_of
from gradflow_export.profiles import profile
from gradflow_export.records.catalog import CATALOG
from gradflow_export.rules.base import Rule

FOLDER = Path(__file__).resolve().parents[1] / "issues"
_EVERY = frozenset(item.name for item in fields(Rule))


def pages() -> dict[str, str]:
    """Return every page of the folder by its file name."""
    robust, seed = profile("robust"), profile("seed")
    found = {f"{kind.value.lower()}.md": _page(kind, robust, seed) for kind in IssueType}
    return {"index.md": _index(), **found}


def _index() -> str:
    rows = [f"| [`{kind}`]({kind.value.lower()}.md) | {kind.meaning} |" for kind in IssueType]
    return "\n".join([
        "# Issues",
        "",
        "```python",
        "for issue in exporter.issues:",
        "    print(issue)",
        "```",
        "",
        "The table describes each issue type of the default profile, `robust`. Its rules compare layers with each",
        "other and with the history of the run, so scaling the loss does not change the result. An issue opens when",
        "its condition has held for several readings. It is reported once per cause, and closes when the condition no",
        "longer holds.",
        "",
        "| issue | meaning |",
        "|---|---|",
        *rows,
        "",
    ])  # fmt: skip


def _page(kind: IssueType, robust: tuple[Rule, ...], seed: tuple[Rule, ...]) -> str:
    lines = [f"# {kind}", "", f"{kind.meaning[0].upper()}{kind.meaning[1:]}. {kind.harm}", "", *_code(kind)]
    lines += ["## What to do", "", kind.remedy, ""]
    lines += ["## How it is detected", ""]
    for rule in (rule for rule in robust if kind in types_of(type(rule))):
        lines += list(_section(rule))
    fixed = [rule for rule in seed if rule.fixed and kind in types_of(type(rule))]
    if fixed:
        lines += [
            'With `profile="seed"`, and if its threshold is set by name, a fixed threshold is applied:',
            "",
        ]
    for rule in fixed:
        lines += list(_section(rule))
    lines += ["[All issues](index.md) · [all metrics](../metrics.md) · [how often it is right](../detection.md)", ""]
    return "\n".join(lines)


def _code(kind: IssueType) -> list[str]:
    return [
        "```python",
        f'found = [issue for issue in exporter.issues if issue.issue_type == "{kind}"]',
        "for issue in found:",
        "    print(issue.layer, issue.step, issue.message, issue.advice)",
        "```",
        "",
    ]


def _section(rule: Rule) -> Iterator[str]:
    page = Page.of(rule)
    yield f"### {_title(type(rule).__name__)}"
    yield ""
    yield from map(_markdown, page.markdown())
    metrics = [f"`{name}`" for name in rule.needs if name in CATALOG]
    kinds = [f"`{kind}`" for kind in dict.fromkeys(name.partition(".")[0] for name in rule.evidence)]
    read = [*metrics, *([f"evidence of the kind {', '.join(kinds)}"] if kinds else [])]
    yield f"Reads {', '.join(read)}."
    yield f"Opens after {_readings(rule.patience, 'consecutive ')}, closes after {_readings(rule.heal)} without it."
    yield ""
    own = [item for item in fields(rule) if item.name not in _EVERY]
    if own:
        yield "| threshold | default | meaning |"
        yield "|---|---|---|"
        for item in own:
            meaning = _markdown(page.thresholds.get(item.name, ("", ""))[0]).replace("|", "\\|")
            yield f"| `{item.name}` | {_value(getattr(rule, item.name))} | {meaning} |"
        yield ""


def _readings(count: int, kind: str = "") -> str:
    return "1 reading" if count == 1 else f"{count} {kind}readings"


def _title(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", " ", name).capitalize()


def _value(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _markdown(text: str) -> str:
    text = re.sub(r":\w+:`~?([^`]+)`", lambda match: f"`{match[1].rpartition('.')[2]}`", text)
    return re.sub(r"(?<!`)``(?!`)", "`", text)


def main() -> None:
    """Write the folder; pages that are no more are removed."""
    FOLDER.mkdir(exist_ok=True)
    made = pages()
    for path in FOLDER.glob("*.md"):
        if path.name not in made:
            path.unlink()
    for name, text in made.items():
        (FOLDER / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
