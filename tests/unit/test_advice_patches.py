"""What benchmarks/advice.py does in a user's place follows the words of an issue, and nothing else."""

import ast
import importlib
import re
from pathlib import Path

import pytest
import torch

from gradflow_export.records.issues import Issue, IssueType, Severity

ROOT = Path(__file__).parents[2]


@pytest.fixture
def advice(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("advice_patches")


@pytest.fixture
def program(advice):
    programs, grammar = importlib.import_module("generated.programs"), importlib.import_module("generated.grammar")
    return advice.Program(programs.parts(grammar.draw(5), 0, 5))


def _issue(kind, words, *layers):
    return Issue(IssueType(kind), Severity.HIGH, layers[0] if layers else "", 1, 1.0, 1.0, "", words, layers or ("",))


def _texts():
    for folder in ("rules", "checks"):
        for path in (ROOT / "gradflow_export" / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.JoinedStr):
                    yield "".join(part.value if isinstance(part, ast.Constant) else "5" for part in node.values)
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield node.value


def test_each_patch_is_for_words_that_some_advice_has(advice):
    """A change whose words no rule and no check prints any more is never made."""
    texts = list(_texts())
    assert [words for _, words, _ in advice.PATCHES if not any(re.search(words, text) for text in texts)] == []


def test_numbers_and_layers_are_those_of_the_issue(advice, program):
    """A learning rate and weights change by what the advice says, in the layers that the issue names."""
    rate, weights = program.parts.rate, {n: q.detach().clone() for n, q in program.parts.model.named_parameters()}
    assert advice.follow(program, _issue("LEARNING_RATE", "lower the learning rate from 0.5 to about 0.05."), 0)
    assert program.parts.rate == pytest.approx(rate / 10)
    words = "scale the initial weights of head by about 0.5 (nn.init.kaiming_normal_ for ReLU)."
    assert advice.follow(program, _issue("EXPLODING", words, "head"), 0)
    changed = [n for n, q in program.parts.model.named_parameters() if not torch.equal(q, weights[n])]
    assert changed == ["head.weight"]
    assert torch.equal(program.parts.model.head.weight, weights["head.weight"] / 2)


def test_advice_that_only_says_where_to_look_changes_nothing(advice):
    """No change is made up where the words have none."""
    assert advice.patches(_issue("BAD_TARGETS", "compare some samples with their targets.")) == []
