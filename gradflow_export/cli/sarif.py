"""Findings as SARIF 2.1.0, which code hosts and editors show beside the lines of a script."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from gradflow_export.records.issues import Issue, IssueType, Severity, number_to_json

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"

_LEVELS = ("note", "note", "warning", "error", "error")


def level(severity: Severity) -> str:
    """Return the level of a severity: CRITICAL and HIGH are errors, MEDIUM is a warning, the rest are notes."""
    return _LEVELS[severity]


def as_sarif(issues: Sequence[tuple[Issue, int]], script: Path, *, version: str, error: str = "") -> str:
    """Return findings as the text of a SARIF file.

    Args:
        issues: Each with the line of the script it belongs to, 0 where that is not known.
        script: The script that was run.
        version: Version of this package.
        error: The script's own error, empty when there was none.
    """
    kinds = list(dict.fromkeys(issue.issue_type for issue, _ in issues))
    driver = {"name": "gradflow", "version": version, "rules": list(map(_rule, kinds))}
    invocation: dict[str, Any] = {"executionSuccessful": not error}
    if error:
        invocation["toolExecutionNotifications"] = [{"level": "error", "message": {"text": error}}]
    run = {
        "tool": {"driver": driver},
        "invocations": [invocation],
        "columnKind": "utf16CodeUnits",
        "results": [_result(issue, line, address(script), kinds.index(issue.issue_type)) for issue, line in issues],
    }
    return json.dumps({"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2, allow_nan=False)


def address(script: Path) -> str:
    """Return a script's URI: relative where it lies below the current folder, as code hosts want it, else absolute."""
    whole, here = script.resolve(), Path.cwd().resolve()
    return quote(whole.relative_to(here).as_posix()) if whole.is_relative_to(here) else whole.as_uri()


def _rule(kind: IssueType) -> dict[str, Any]:
    words = kind.value.replace("_", " ").lower()
    meaning = f"{kind.meaning[0].upper()}{kind.meaning[1:]}."
    return {
        "id": kind.value,
        "name": "".join(word.capitalize() for word in words.split()),
        "shortDescription": {"text": f"{words[0].upper()}{words[1:]}."},
        "fullDescription": {"text": meaning},
        "help": {"text": f"{meaning} Each result says where, since when, the numbers, and what to do."},
        "defaultConfiguration": {"level": "warning"},
    }


def _result(issue: Issue, line: int, uri: str, rule: int) -> dict[str, Any]:
    place: dict[str, Any] = {"artifactLocation": {"uri": uri}}
    if line:
        place["region"] = {"startLine": line}
    names = [{"fullyQualifiedName": layer, "kind": "member"} for layer in issue.layers if layer]
    location: dict[str, Any] = {"physicalLocation": place}
    if names:
        location["logicalLocations"] = names
    return {
        "ruleId": issue.issue_type.value,
        "ruleIndex": rule,
        "level": level(issue.severity),
        "message": {"text": f"{issue.message} Fix: {issue.advice}"},
        "locations": [location],
        "partialFingerprints": {"gradflow/v1": f"{issue.issue_type.value}:{issue.layer}:{issue.cause}"},
        "properties": {
            "severity": issue.severity.name,
            "step": issue.step,
            "value": number_to_json(issue.value),
            "threshold": number_to_json(issue.threshold),
            "cause": issue.cause,
        },
    }
