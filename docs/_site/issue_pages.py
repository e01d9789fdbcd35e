"""Writes docs/issues: one page per issue type, from the rules that raise it. ``make schema`` runs it."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from gradflow_export import IssueType
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
        "What each issue means in the `robust` profile, which judges by ratios between layers and by a run's own past:",
        "scaling the loss changes nothing. An issue opens when its condition has held for some steps, is reported once",
        "per cause, and is closed when the condition has gone.",
        "",
        "| issue | what it means |",
        "|---|---|",
        *rows,
        "",
    ])  # fmt: skip


def _page(kind: IssueType, robust: tuple[Rule, ...], seed: tuple[Rule, ...]) -> str:
    lines = [f"# {kind}", "", f"{kind.meaning[0].upper()}{kind.meaning[1:]}.", "", *_code(kind)]
    lines += ["## How it is detected", ""]
    for rule in (rule for rule in robust if kind in _raised(type(rule))):
        lines += list(_section(rule))
    fixed = [rule for rule in seed if rule.fixed and kind in _raised(type(rule))]
    if fixed:
        lines += [
            'With `profile="seed"`, and where its threshold is given by name, a fixed threshold:',
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
    text = inspect.cleandoc(type(rule).__doc__ or "")
    about, _, attributes = text.partition("Attributes:\n")
    listed = attributes.partition("\n\n")[0] + "\n"
    told = dict(re.findall(r"^    (\w+): (.*?)(?=^    \w+: |^\S|\Z)", listed, re.MULTILINE | re.DOTALL))
    yield f"### {_title(type(rule).__name__)}"
    yield ""
    yield _markdown(about.strip())
    yield ""
    metrics = ", ".join(f"`{name}`" for name in rule.needs if name in CATALOG)
    yield f"Reads {metrics}. Opens after {rule.patience} readings in a row, closes after {rule.heal} without it."
    yield ""
    own = [item for item in fields(rule) if item.name not in _EVERY]
    if own:
        yield "| threshold | default | what it is |"
        yield "|---|---|---|"
        for item in own:
            meaning = _markdown(" ".join(told.get(item.name, "").split())).replace("|", "\\|")
            yield f"| `{item.name}` | {_value(getattr(rule, item.name))} | {meaning} |"
        yield ""


def _title(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", " ", name).capitalize()


def _value(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _markdown(text: str) -> str:
    text = re.sub(r":\w+:`~?([^`]+)`", lambda match: f"`{match[1].rpartition('.')[2]}`", text)
    return text.replace("``", "`")


@functools.cache
def _raised(kind: type[Rule]) -> frozenset[IssueType]:
    """Return the types that a rule raises: those that its class, and what that calls in its module, name."""
    sources = [inspect.getsource(each) for each in kind.__mro__ if issubclass(each, Rule) and each is not Rule]
    beside = {name: made for name, made in vars(inspect.getmodule(kind)).items() if inspect.isfunction(made)}
    for source in sources:
        called = [name for name in beside if re.search(rf"\b{name}\b", source)]
        sources += [inspect.getsource(beside.pop(name)) for name in called]
    # What explains a finding is no type of its own.
    text = re.sub(r"follows_from=\(.*?\)", "", "".join(sources), flags=re.DOTALL)
    known = IssueType.__members__
    return frozenset(known[name] for name in re.findall(r"IssueType\.([A-Z_]+)", text) if name in known)


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
