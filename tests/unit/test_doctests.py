"""Examples in docstrings are run, and those functions that users call on their own numbers have one."""

from __future__ import annotations

import doctest
import re
from importlib import import_module
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
MODULES = tuple(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in sorted((ROOT / "gradflow_export").rglob("*.py"))
    if re.search(r"^ +>>> ", path.read_text(encoding="utf-8"), re.MULTILINE)
)
"""Every module with an example."""
PURE = {
    "metrics.gains": ("gains", "log_gains"),
    "metrics.direction": ("cosine",),
    "metrics.discrete": ("signal_to_noise",),
    "metrics.noise": ("noise_moments",),
    "metrics.phase": ("wrap",),
    "records.evidence": ("facts_of",),
    "records.sites": ("pattern",),
    "records.statistics": ("theil_sen",),
    "rules.base": ("number", "some"),
    "rules.evidence": ("fall",),
}
"""What somebody calls who writes a rule or a metric."""


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_give_what_they_say(name):
    """Each example prints what stands below it."""
    failed, tried = doctest.testmod(import_module(name), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert tried > 0
    assert failed == 0


@pytest.mark.parametrize("name", PURE)
def test_pure_functions_have_an_example(name):
    """What a rule or metric of somebody's own calls shows what it returns."""
    module = import_module(f"gradflow_export.{name}")
    assert [each for each in PURE[name] if ">>> " not in getattr(module, each).__doc__] == []


def test_every_block_of_code_in_the_readme_runs(tmp_path, monkeypatch):
    """Whole programs are files of ``examples/``, which ``test_examples.py`` runs; the rest runs with a model at hand."""
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"(<!-- examples/\S+\.py -->\n)?```python\n(.*?)```", text, re.DOTALL)
    assert blocks
    for mark, code in blocks:
        if not mark:
            model = torch.nn.Linear(2, 2)
            names = {"model": model}
            exec(compile(code, "README.md", "exec"), names)
            model(torch.ones(1, 2)).sum().backward()
            names["exporter"].close()
