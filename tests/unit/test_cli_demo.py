"""``gradflow demo``: healthy programs are left in peace, and each fault is named with its layer, step and advice."""

from __future__ import annotations

import re

import pytest

from gradflow_export.cli import main
from gradflow_export.cli.demo import COMPARED, PROGRAMS, TOUR
from gradflow_export.cli.programs import NAN_STEP, SPIKE_STEP
from gradflow_export.cli.report import summarise
from gradflow_export.records.step_record import IssueType, Severity
from gradflow_export.storage.reader import read_run

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
STEPS = {fault: NAN_STEP + 5 if fault == "nan" else 15 for fault in KINDS}
CHANCE = {"mlp": 0.1, "cnn": 0.1, "transformer": 0.16}  # the most frequent character, a blank, has a share below this


def demo(capsys, folder, *argv):
    """Run the command in a folder; return what it printed."""
    assert main(["demo", "--logdir", str(folder), *argv]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def test_nothing_bad_is_said_of_healthy_programs(tmp_path, capsys):
    """The three healthy programs learn, end without an issue, with an accuracy, and with the way to TensorBoard."""
    out = demo(capsys, tmp_path, "--fault", "none")
    assert out.count("healthy: no open problem") == len(PROGRAMS)
    assert "[" not in out.replace("[batch", "")
    accuracies = [float(percent) for percent in re.findall(r"held-out accuracy: (.*)%", out)]
    assert len(accuracies) == len(PROGRAMS)
    assert min(accuracies[:2]) > 90
    assert all(found > 150 * CHANCE[name] for found, name in zip(accuracies, PROGRAMS, strict=True))
    assert f"tensorboard --logdir {tmp_path}" in out
    for program in PROGRAMS:
        run = read_run(tmp_path / f"{program}-healthy")
        summary, losses = summarise(run), [record.value("loss") for record in run.records]
        assert (summary.steps, summary.issues) == (200, ())
        assert losses[79] < 0.75 * losses[0]


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("fault", sorted(KINDS))
def test_a_fault_is_named_with_its_layer_step_and_advice(tmp_path, capsys, program, fault):
    """The sick layer is named, from the step the fault began, with what to do; and that is what is stored."""
    out = demo(capsys, tmp_path, "--fault", fault, "--program", program, "--steps", str(STEPS[fault]))
    (*_, summary) = [summarise(read_run(path)) for path in sorted(tmp_path.iterdir())]
    found = [issue for issue in summary.issues if issue.issue_type is KINDS[fault]]
    named = [issue for issue in found if issue.layer.startswith(SICK[fault])]
    assert named, out
    assert named[0].severity >= Severity.MEDIUM
    assert named[0].step == NAN_STEP if fault == "nan" else named[0].step <= STEPS[fault]
    assert f"{KINDS[fault]} in " in out
    assert f"since step {named[0].step}" in out
    cause = next((issue for issue in summary.issues if issue.key == named[0].explained_by), named[0])
    assert cause.advice in out


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_broken_batch_is_a_loss_spike_that_passes(tmp_path, capsys, program):
    """The step of the broken batch is named, and that the loss came back."""
    out = demo(capsys, tmp_path, "--fault", "spike", "--program", program, "--steps", str(SPIKE_STEP + 4))
    assert "LOSS_SPIKE in the whole model" in out
    spikes = [issue for issue in _issues(tmp_path) if issue.issue_type is IssueType.LOSS_SPIKE]
    assert [(issue.step, issue.healed_step) for issue in spikes] == [(SPIKE_STEP, SPIKE_STEP + 2)]


def test_twelve_blocks_learn_without_a_warm_up_only_where_the_norms_come_first(tmp_path, capsys):
    """Pre-LN stays healthy; Post-LN loses its gradient on the way down and does not get past single letters."""
    demo(capsys, tmp_path, "--program", "pre-ln", "--steps", "40")
    assert _issues(tmp_path) == []
    demo(capsys, tmp_path, "--program", "post-ln", "--steps", "40")
    assert IssueType.VANISHING in {issue.issue_type for issue in _issues(tmp_path)}
    losses = [summarise(read_run(tmp_path / program)).headline["loss"].mean for program in COMPARED]
    assert losses[0] < losses[1] - 0.1


def test_the_tour_shows_each_kind_of_trouble_once(tmp_path, capsys):
    """One run for each program and fault of the tour, under its own name."""
    out = demo(capsys, tmp_path, "--tour", "--steps", "2")
    assert "[CURE] clear old gradients" in out
    names = {path.name for path in tmp_path.iterdir()}
    assert len(names) == len(TOUR)
    assert {
        "mlp-healthy",
        "mlp-vanishing",
        "transformer-exploding",
        "cnn-dead",
        "transformer-spike",
        *COMPARED,
    } <= names


def _issues(logdir):
    return [issue for path in logdir.iterdir() for issue in summarise(read_run(path)).issues]


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
