"""Every example runs, says what it should, and stands in the README or a page word for word; `make test-docs`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = sorted((ROOT / "docs").rglob("*.md"))
TASKS = sorted((ROOT / "docs" / "tasks").glob("*.md"))

SAYS = {
    "quick_start.py": [
        r"^gradflow: watching Sequential",
        r"\[CRITICAL\] VANISHING in 0\.0",
        r"Next: gradflow report runs/",
    ],
    "tutorial.py": [
        r"^sick: accuracy [45]\d%$",
        r"^mended: accuracy (9\d|100)%$",
        r"VANISHING in 0\.0",
        r"after step 320: healthy",
    ],
    "tensorboard_runs.py": [r"^relu no issues$", r"^sigmoid .*VANISHING in 0\.\d", r"tensorboard --logdir runs"],
    "gain_monitor.py": [r"Transition  0 to  1: gamma=\d", r"damping transitions: 7"],
    "compare_architectures.py": [r"^Pre-LN: mean gain \d", r"^Post-LN: mean gain \d"],
    "stability.py": [r"^7 of 7 gradients agree", r"begins in the input of the model$", r"^updates prevented: 1$"],
    "config_file.py": [r"EXPLODING", r"since step 41\b"],
}


def test_every_example_is_run():
    """A new example is listed here, so that it is run."""
    assert sorted(SAYS) == sorted(path.name for path in EXAMPLES.glob("*.py"))


def run(script, folder, **environment):
    """Run a script in a folder as a user does; both streams as one text."""
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=folder,
        env={key: value for key, value in os.environ.items() if key != "GRADFLOW_VERBOSE"}
        | {"OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=250,
    )
    assert done.returncode == 0, done.stdout
    assert "Traceback" not in done.stdout
    return done.stdout


@pytest.mark.parametrize("name", sorted(SAYS))
def test_an_example_runs_and_says_what_it_should(name, tmp_path):
    """An example works from an empty folder, on the CPU, and prints what its text promises."""
    said = run(EXAMPLES / name, tmp_path)
    for pattern in SAYS[name]:
        assert re.search(pattern, said, re.MULTILINE), f"{pattern} is not in:\n{said}"
    if name == "quick_start.py":
        shown = re.search(r"<!-- what examples/quick_start.py prints -->\n```text\n(.*?)```", README, re.DOTALL)[1]
        assert words(said) == words(shown)


def words(text):
    """A text without its numbers and times, and without how many layers are worst, which rounding decides."""
    return re.sub(r"\(\+\d+ more\)", "", re.sub(r"\d[\d.,e_-]*", "0", text)).split()


def test_the_quick_start_needs_nothing_but_the_package(tmp_path):
    """It runs with what `pip install gradflow-export` brings: no extra is imported."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = {re.split(r"[<>=\[; ]", line)[0] for lines in project["optional-dependencies"].values() for line in lines}
    modules = {"scikit-learn": "sklearn"}
    absent = sorted({modules.get(name, name.replace("-", "_")) for name in extras} - {"gradflow_export", "triton"})
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({absent!r}))\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    assert "VANISHING" in run(EXAMPLES / "quick_start.py", tmp_path, PYTHONPATH=path)


@pytest.mark.parametrize("page", TASKS, ids=lambda page: page.stem)
def test_the_code_of_a_task_runs(page, tmp_path):
    """The Python of a page, put together, runs from an empty folder; what it asserts is true, what it prints is shown."""
    text = page.read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert blocks or page.stem == "frameworks"
    (tmp_path / "task.py").write_text("\n".join(blocks), encoding="utf-8")
    said = run(tmp_path / "task.py", tmp_path)
    for shown in re.findall(r"<!-- what this page prints -->\n```text\n(.*?)```", text, re.DOTALL):
        assert sorted(words(said)) == sorted(words(shown))  # the order of two streams is not known


def marked_blocks(text: str) -> dict[str, str]:
    """Code blocks of a Markdown text that a comment ascribes to a file, by the file's path."""
    return dict(re.findall(r"<!-- (\S+) -->\n```\w+\n(.*?)```\n", text, re.DOTALL))


def test_the_code_of_the_page_on_wandb_runs(tmp_path):
    """A run that is watched, and one that is resumed, as typed, one after the other and offline."""
    text = (ROOT / "docs" / "wandb.md").read_text(encoding="utf-8")
    watched, resumed, *_ = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    script = tmp_path / "page.py"
    script.write_text(f"{watched}\n{resumed}\nexporter.close()\nrun.finish()\n", encoding="utf-8")
    said = run(script, tmp_path, WANDB_MODE="offline", WANDB_CONSOLE="off", WANDB_ERROR_REPORTING="false")
    assert "gradflow: watching Sequential" in said
    assert len(list(tmp_path.glob("wandb/offline-run-*"))) == 2


def test_pages_show_the_examples_as_they_are():
    """Code in the README and in the pages is the code that the tests run."""
    texts = [README, *(page.read_text(encoding="utf-8") for page in PAGES)]
    shown = [item for text in texts for item in marked_blocks(text).items()]
    assert {f"examples/{name}" for name in SAYS} | {"examples/diagnostics.yaml"} == {path for path, _ in shown}
    for path, code in shown:
        assert code == (ROOT / path).read_text(encoding="utf-8"), f"{path} and the page that shows it differ"


def test_links_of_the_readme_lead_to_files():
    """They work wherever the repository lies: each is a file in it."""
    targets = re.findall(r"\]\(([^)#]+)", README)
    assert targets
    assert [path for path in targets if not (ROOT / path).is_file()] == []


def test_the_readme_is_one_screen_and_a_half():
    """What is longer has a page."""
    assert len(README.splitlines()) <= 95


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_names_only_files_that_exist(page):
    """Every relative link and picture leads somewhere, and none out of the folder of the site."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    targets = re.findall(r"\]\((?!https?://|#|mailto:)([^)#\s]+)", text)
    places = [(page.parent / target).resolve() for target in targets]
    assert [str(place) for place in places if not place.exists() or ROOT / "docs" not in place.parents] == []
