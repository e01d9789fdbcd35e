"""``gradflow doctor script.py``: a training script is run for a few steps, and its silent mistakes are told."""

from __future__ import annotations

import json
import math
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest

from gradflow_export.cli import main, script_runner
from gradflow_export.cli.checkup import Report, _render
from gradflow_export.cli.sarif import address
from gradflow_export.experiments.decision import Baseline
from gradflow_export.experiments.runs import Place
from gradflow_export.experiments.survey import Training
from gradflow_export.experiments.target import Target
from gradflow_export.experiments.verdict import Verdict
from gradflow_export.records.issues import Issue, IssueType, Severity

SCRIPT = """
    import sys
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 2)
            self.extra = [nn.Linear(16, 16)] if "list" in sys.argv else nn.ModuleList([nn.Linear(16, 16)])

        def forward(self, x):
            h = self.first(x).relu()
            for layer in self.extra:
                h = layer(h).relu()
            return self.last(h)

    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0 if "still" in sys.argv else 1e-2)
    print("arguments", sys.argv[1:])
    for step in range(1000):
        if "fail" in sys.argv and step == 5:
            raise RuntimeError("no more data")
        optimizer.zero_grad()
        x = torch.randn(16, 8)
        nn.functional.cross_entropy(model(x), (x[:, 0] > 0).long()).backward()
        try:
            optimizer.step()
        except Exception:
            print("swallowed")
    print("ran to its end")
"""
STEP_LINE = 28


def test_an_issue_that_two_models_share_is_listed_once():
    """An encoder and a decoder have one loss; the line is that of the first."""
    issue = Issue(IssueType.WRONG_LOSS, Severity.HIGH, "loss", 1, 1.0, 0.1, "Out of reach.", "Scale them.")
    watch = script_runner.ScriptWatch(Path("train.py"), 5)
    watch._exporters = [(str(line), SimpleNamespace(issues=[issue], _loop=None), Place(line)) for line in (7, 9)]
    assert watch.outcome().issues == [(issue, Place(7))]


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(SCRIPT), encoding="utf-8")
    return path


def test_a_sound_script_passes_and_is_stopped(script, capsys):
    """It gets its own arguments, runs for the steps asked for, and everything is put back."""
    before = sys.argv, sys.path[:]
    assert main(["doctor", "--no-try", str(script), "--mine", "3", "--steps", "12"]) == 0
    out = capsys.readouterr().out
    assert "arguments ['--mine', '3']" in out
    assert "(Net), first 12 steps: nothing found." in out
    assert "ran to its end" not in out
    assert "swallowed" not in out
    assert before == (sys.argv, sys.path)


def test_findings_name_layer_line_and_way_out(script, capsys, monkeypatch):
    """Layers in a plain list are told of with the line of the step, and a grave finding is the exit status."""
    assert main(["doctor", "--no-try", str(script), "list", "--steps", "15"]) == 1
    text = capsys.readouterr().out
    assert "[HIGH] NOT_TRAINING in extra[0].weight (+1 more) since step 1" in text
    assert "nn.ModuleList" in text
    monkeypatch.setattr(script_runner, "MOST", 80)
    assert main(["doctor", "--no-try", "--format", "json", str(script), "still"]) == 1
    printed = capsys.readouterr()
    told = json.loads(printed.out)
    assert "arguments ['still']" in printed.err
    assert 50 <= told["steps"] <= script_runner.MOST
    assert told["models"] == ["Net"]
    first, second = told["findings"]
    assert [first[name] for name in ("issue_type", "severity", "line", "explained_by")] == [
        "NOT_TRAINING", "CRITICAL", STEP_LINE, None,
    ]  # fmt: skip
    assert (second["issue_type"], second["explained_by"][0]) == ("STAGNATION", "NOT_TRAINING")


@pytest.mark.parametrize(
    ("refused", "said"), [("", "the script does not learn"), ("its losses are a game's", "nothing found.")]
)
def test_a_script_whose_losses_cannot_be_compared_is_not_said_to_learn_nothing(script, refused, said):
    """A loss that does not fall means something only where a smaller one is a better one."""
    level = Verdict(Training(0, 80, 1), 60, refused=refused, baseline=Baseline((1.0,) * 3, (1.0,) * 3))
    report = Report(Target(script), script_runner.Outcome(steps=80, models=["Net"]), verdicts=[level])
    assert said in _render(report, "text").splitlines()[0]


@pytest.mark.parametrize(
    ("seconds", "words", "steps"), [(0.0, [], 50), (math.inf, [], 60), (math.inf, ["--steps", "9"], 9)]
)
def test_a_script_of_fast_steps_is_watched_longer(script, capsys, monkeypatch, seconds, words, steps):
    """For a bounded time and number of steps, unless a number of steps is asked for."""
    monkeypatch.setattr(script_runner, "SECONDS", seconds)
    monkeypatch.setattr(script_runner, "MOST", 60)
    assert main(["doctor", "--no-try", "--format", "json", str(script), *words]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == steps


def test_sarif_has_what_its_schema_requires(script, tmp_path, capsys):
    """Version, tool, rules by index, message, location with file and line, and nothing that is null."""
    target = tmp_path / "found.sarif"
    assert (
        main(
            [
                "doctor",
                "--no-try",
                str(script),
                "--steps",
                "15",
                "--format",
                "sarif",
                "--output",
                str(target),
                "--",
                "list",
            ]
        )
        == 1
    )
    assert capsys.readouterr().out == ""
    text = target.read_text(encoding="utf-8")
    log = json.loads(text)
    assert log["version"] == "2.1.0"
    (run,) = log["runs"]
    rules = run["tool"]["driver"]["rules"]
    assert run["tool"]["driver"]["name"] == "gradflow"
    assert run["invocations"] == [{"executionSuccessful": True}]
    (result,) = run["results"]
    assert rules[result["ruleIndex"]]["id"] == result["ruleId"] == "NOT_TRAINING"
    assert rules[0]["fullDescription"]["text"].startswith("Trainable parameters get no update")
    assert rules[0]["help"]["text"]
    assert result["level"] == "error"
    assert result["message"]["text"]
    place = result["locations"][0]["physicalLocation"]
    assert place["artifactLocation"]["uri"] == script.resolve().as_uri()
    assert place["region"]["startLine"] == STEP_LINE
    assert "null" not in text


def test_addresses_are_relative_below_the_current_folder_and_valid_everywhere(tmp_path, monkeypatch):
    """Blanks, colons and letters beyond ASCII are encoded; a script elsewhere has an absolute address."""
    monkeypatch.chdir(tmp_path)
    assert address(Path("a b/tr\u00e4in:1.py")) == "a%20b/tr%C3%A4in%3A1.py"
    assert address(tmp_path / "x.py") == "x.py"
    assert address(tmp_path.parent / "other one.py") == f"{tmp_path.resolve().parent.as_uri()}/other%20one.py"


def test_what_is_found_after_the_last_step_is_told(tmp_path, capsys):
    """An issue that waits for the next record, which never comes, is among the findings."""
    path = tmp_path / "late.py"
    path.write_text(
        "import torch\n"
        "from gradflow_export.exporter import watching\n"
        "from gradflow_export.records.issues import Issue, IssueType, Severity\n"
        "model = torch.nn.Linear(4, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "model(torch.ones(2, 4)).square().mean().backward()\n"
        "optimizer.step()\n"
        "issue = Issue(IssueType.UNSTABLE, Severity.LOW, 'weight', 1, 1.0, 0.0, 'it is late.', 'hurry.')\n"
        "watching(model)[0].add_issue(issue)\n",
        encoding="utf-8",
    )
    assert main(["doctor", "--no-try", str(path)]) == 0
    out = capsys.readouterr().out
    assert "1 step: 1 finding." in out
    assert "[LOW] UNSTABLE in weight" in out


def test_the_current_folder_is_put_back(tmp_path, capsys, monkeypatch):
    """A script that goes elsewhere does not take the file for its findings with it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "away").mkdir()
    (tmp_path / "go.py").write_text("import os\nos.chdir('away')\n", encoding="utf-8")
    assert main(["doctor", "--no-try", "go.py", "--output", "found.txt"]) == 2
    assert (tmp_path / "found.txt").is_file()
    assert "made no step" in capsys.readouterr().err


def test_a_script_that_fails_or_trains_nothing_is_status_2(script, tmp_path, capsys):
    """Its traceback is shown; a missing script, one without a step and a bad number are told apart."""
    assert main(["doctor", "--no-try", str(script), "fail"]) == 2
    err = capsys.readouterr().err
    assert "RuntimeError: no more data" in err
    assert "failed by itself after 5 steps" in err
    assert err.count('  File "') == 1, "frames that are not the script's own were shown"
    empty = tmp_path / "empty.py"
    empty.write_text("x = 1\n", encoding="utf-8")
    assert main(["doctor", "--no-try", str(empty)]) == 2
    assert "no step of a torch.optim.Optimizer" in capsys.readouterr().err
    assert main(["doctor", "--no-try", str(tmp_path / "none.py")]) == 2
    assert "is no file" in capsys.readouterr().err
    (tmp_path / "cut.ipynb").write_text("{}", encoding="utf-8")
    assert main(["doctor", "--no-try", str(tmp_path / "cut.ipynb")]) == 2
    assert capsys.readouterr().err.startswith("gradflow: doctor expects a notebook")
    assert main(["doctor", "--no-try", str(script), "--steps", "0"]) == 2
    assert "--steps expects" in capsys.readouterr().err
    assert main(["doctor", str(script), "--cpu-budget", "abc"]) == 2
    assert capsys.readouterr().err.startswith("gradflow: --cpu-budget expects")
    (tmp_path / "broken.py").write_text("def f(:\n", encoding="utf-8")
    assert main(["doctor", "--no-try", str(tmp_path / "broken.py")]) == 2
    assert capsys.readouterr().err.startswith('  File "')


@pytest.mark.parametrize(("options", "steps"), [((), 50), (("--all",), 90), (("--steps", "9", "--no-try"), 9)])
@pytest.mark.parametrize("sparse", [False, True])
def test_a_script_without_an_optimizer_is_watched_and_treated(tmp_path, capsys, monkeypatch, options, steps, sparse):
    """Its mistakes are found, and its updates are changed as steps are; of sparse ones it is said what to do."""
    monkeypatch.setattr(script_runner, "SECONDS", 0.0)
    script = tmp_path / "by_hand.py"
    script.write_text(
        f"import torch\nmodel = torch.nn.EmbeddingBag(4, 3, sparse={sparse})\nfor _ in range(90):\n"
        "    x = torch.randint(4, (8, 2))\n"
        "    torch.nn.functional.cross_entropy(model(x).softmax(1), x[:, 0].clamp(max=2)).backward()\n"
        "    with torch.no_grad():\n        for weight in model.parameters():\n"
        "            weight -= 0.1 * weight.grad\n            weight.grad = None\n",
        encoding="utf-8",
    )
    assert main(["doctor", "--format", "json", str(script), *options]) == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["steps"], told["stopped"], told["error"]) == (steps, steps < 90, None)
    assert [each["issue_type"] for each in told["findings"] if each["severity"] == "HIGH"] == ["WRONG_LOSS"]
    tried = "--no-try" not in options
    assert any("updates its weights by hand" in note for note in told["notes"]) == (sparse and tried)
    assert any("the loss is" in each["effect"] for run in told["experiments"] for each in run["in_vain"]) == (
        tried and not sparse
    )


def test_a_file_that_cannot_be_written_is_told_before_the_script_runs(script, tmp_path, capsys, monkeypatch):
    """A folder, a file in no folder, and options of a script without one; what fails later has no traceback either."""
    for place, what in ((tmp_path, "is a folder"), (tmp_path / "no" / "a.json", "a folder that does not exist")):
        assert main(["doctor", "--no-try", str(script), "--output", str(place)]) == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        assert printed.err.startswith("gradflow: --output expects a file to write to, got")
        assert what in printed.err
    monkeypatch.chdir(tmp_path)
    (tmp_path / "locked").symlink_to(tmp_path / "gone" / "file")
    assert main(["doctor", "--no-try", str(script), "--steps", "1", "--output", "locked"]) == 2
    assert "No such file" in capsys.readouterr().err
    assert main(["doctor", "--format", "json"]) == 2
    assert "--format expects a training script, got none" in capsys.readouterr().err


def test_all_lets_the_script_run_to_its_end(tmp_path, capsys):
    """The number of steps is not limited, and exit(0) is no failure."""
    path = tmp_path / "short.py"
    path.write_text(
        "import torch\n"
        "model = torch.nn.Linear(4, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "for _ in range(8):\n"
        "    optimizer.zero_grad()\n"
        "    model(torch.ones(2, 4)).square().mean().backward()\n"
        "    optimizer.step()\n"
        "raise SystemExit(0)\n",
        encoding="utf-8",
    )
    assert main(["doctor", "--no-try", str(path), "--steps", "3", "--all"]) == 0
    assert "(Linear), 8 steps" in capsys.readouterr().out
