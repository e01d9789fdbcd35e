"""``gradflow demo``: healthy programs are left in peace, and each fault is named with its layer, step and advice."""

from __future__ import annotations

import re

import pytest

from gradflow_export.cli import main
from gradflow_export.cli.demo import PROGRAMS
from gradflow_export.cli.programs import NAN_STEP
from gradflow_export.cli.report import summarise
from gradflow_export.records import IssueType, Severity

KINDS = {
    "vanishing": IssueType.VANISHING,
    "exploding": IssueType.EXPLODING,
    "dead": IssueType.DEAD,
    "nan": IssueType.NUMERICAL,
    "stagnation": IssueType.STAGNATION,
}
SICK = {
    "vanishing": "blocks.0",
    "exploding": "blocks.0",
    "dead": "blocks.3",
    "nan": "blocks.3",
    "stagnation": "blocks.3",
}


def demo(capsys, folder, *argv):
    """Run the command in a folder; return what it printed."""
    assert main(["demo", "--logdir", str(folder), *argv]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def test_nothing_bad_is_said_of_healthy_programs(tmp_path, capsys):
    """The three healthy programs end without an issue, with an accuracy, and with the way to TensorBoard."""
    out = demo(capsys, tmp_path, "--fault", "none")
    assert out.count("healthy: no open problem") == len(PROGRAMS)
    assert "[" not in out.replace("[batch", "")
    accuracies = [float(percent) for percent in re.findall(r"accuracy on data kept aside: (.*)%", out)]
    assert len(accuracies) == len(PROGRAMS)
    assert min(accuracies[:2]) > 90
    assert f"tensorboard --logdir {tmp_path}" in out
    for program in PROGRAMS:
        summary = summarise(tmp_path / f"{program}-healthy")
        assert (summary.steps, summary.issues) == (200, ())


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("fault", sorted(KINDS))
def test_a_fault_is_named_with_its_layer_step_and_advice(tmp_path, capsys, program, fault):
    """The sick layer is named, from the step the fault began, with what to do; and that is what is stored."""
    out = demo(capsys, tmp_path, "--fault", fault, "--program", program, "--steps", "60")
    (*_, summary) = [summarise(path) for path in sorted(tmp_path.iterdir())]
    found = [issue for issue in summary.issues if issue.issue_type is KINDS[fault]]
    named = [issue for issue in found if issue.layer.startswith(SICK[fault])]
    assert named, out
    assert named[0].severity >= Severity.MEDIUM
    assert named[0].step == NAN_STEP if fault == "nan" else named[0].step <= 60
    assert f"{KINDS[fault]} in " in out
    assert f"since step {named[0].step}" in out
    assert named[0].advice in out


def test_a_second_demo_does_not_touch_the_first(tmp_path, capsys):
    """The same demo again goes into a folder of its own."""
    for _ in range(2):
        demo(capsys, tmp_path, "--program", "mlp", "--steps", "3")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mlp-healthy", "mlp-healthy-2"]


@pytest.mark.parametrize(
    "words", [["--steps", "0"], ["--steps", "many"], ["--fault", "headache"], ["--program", "gan"]]
)
def test_wrong_words_are_refused(capsys, words):
    """A wrong value ends with exit code 2 and names the word."""
    with pytest.raises(SystemExit) as stop:
        main(["demo", *words])
    assert stop.value.code == 2
    assert words[1] in capsys.readouterr().err
