"""Every example runs, says what it should, and stands in the README word for word."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
README = (ROOT / "README.md").read_text(encoding="utf-8")

SAYS = {
    "quick_start.py": [r"\bloss\b"],
    "tensorboard_runs.py": [r"^relu nothing wrong$", r"^sigmoid .*VANISHING in 0\.\d", r"tensorboard --logdir runs"],
    "gain_monitor.py": [r"Transition  0 to  1: gamma=\d", r"damping transitions: 7"],
    "compare_architectures.py": [r"^Pre-LN: mean gain \d", r"^Post-LN: mean gain \d"],
    "stability.py": [r"^7 of 7 gradients agree", r"begins in the input of the model$", r"^updates prevented: 1$"],
    "config_file.py": [r"EXPLODING", r"since step 41\b"],
}


def test_every_example_is_run():
    """A new example is listed here, so that it is run."""
    assert sorted(SAYS) == sorted(path.name for path in EXAMPLES.glob("*.py"))


@pytest.mark.parametrize("name", sorted(SAYS))
def test_an_example_runs_and_says_what_it_should(name, tmp_path):
    """An example works from an empty folder, on the CPU, and prints what its text promises."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name)],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    for pattern in SAYS[name]:
        assert re.search(pattern, done.stdout, re.MULTILINE), f"{pattern} is not in:\n{done.stdout}"


def marked_blocks(text: str) -> dict[str, str]:
    """Code blocks of a Markdown text that a comment ascribes to a file, by the file's path."""
    return dict(re.findall(r"<!-- (\S+) -->\n```\w+\n(.*?)```\n", text, re.DOTALL))


def test_the_readme_shows_the_examples_as_they_are():
    """Code in the README is the code that the tests run."""
    blocks = marked_blocks(README)
    assert {f"examples/{name}" for name in SAYS} | {"examples/diagnostics.yaml"} == set(blocks)
    for path, code in blocks.items():
        assert code == (ROOT / path).read_text(encoding="utf-8"), f"README.md and {path} differ"


def test_the_readme_names_only_files_that_exist():
    """Every relative link and picture of the README leads somewhere."""
    targets = re.findall(r"\]\((?!https?://|#)([^)#]+)", README)
    assert targets
    assert [target for target in targets if not (ROOT / target).exists()] == []
