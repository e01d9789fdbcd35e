"""``gradflow report`` on runs written by the real writers."""

from __future__ import annotations

import json
import math
import os
import shlex
import subprocess
import sys

import pytest

from gradflow_export.cli import main
from gradflow_export.records.step_record import Issue, IssueType, Reading, RunInfo, Severity, StepRecord
from gradflow_export.storage.reader import read_run
from gradflow_export.writers import JsonlWriter, TensorBoardWriter, make_writer
from gradflow_export.writers.together import WriterSet

SICK = Issue(
    issue_type=IssueType.VANISHING,
    severity=Severity.HIGH,
    layer="blocks.3",
    step=2,
    value=1e-6,
    threshold=1e-4,
    message="The gradient shrinks.",
    advice="Look at blocks.3.",
    layers=("blocks.3", "blocks.2"),
)
HEALED = Issue(**{**vars(SICK), "healed_step": 4})
BROKEN = Issue(IssueType.NUMERICAL, Severity.CRITICAL, "", 4, math.nan, 0.0, "NaN in the loss.", "Look at the batch.")


def write(folder, losses, issues=None, backend="tensorboard"):
    """Write one run: a record per loss, and issues by step."""
    writer = make_writer(backend, folder)
    writer.open(RunInfo(session="1732143600123-0", started=1732143600.123, model="MLP", parameters=1234))
    for step, loss in enumerate(losses, start=1):
        readings = (Reading.run("loss", loss), Reading.run("logits.max", 3.0), Reading.of("block.gain", ["a"], [1.0]))
        writer.write(StepRecord(step, 1732143600.0 + step, readings, issues=tuple((issues or {}).get(step, ()))))
    writer.close()


def report(capsys, *argv):
    """Run the command; return its exit code, output and errors."""
    code = main(["report", *map(str, argv)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize("backend", ["tensorboard", "jsonl"])
@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
def test_damaged_files_are_not_called_healthy(tmp_path, capsys, backend, share):
    """Whichever part was overwritten: it is said, and a check of the status does not pass."""
    write(tmp_path, [4.0 / step for step in range(1, 200)], backend=backend)
    assert "healthy: no open problem" in report(capsys, tmp_path, "--fail-on", "HIGH")[1]
    (file,) = [path for path in tmp_path.iterdir() if path.is_file() and path.stat().st_size > 1000]
    data = bytearray(file.read_bytes())
    start = int(share * len(data))
    data[start : start + len(data) // 20] = bytes(len(data) // 20)
    file.write_bytes(bytes(data))
    code, out, err = report(capsys, tmp_path, "--fail-on", "HIGH")
    assert code == 2
    assert "damaged" in err
    assert "could not be read (damaged)" in out
    assert "  healthy: " not in out


def refuse(constant):
    """Refuse what is not JSON."""
    raise AssertionError(f"{constant} is not JSON")


def test_the_status_tells_of_open_issues_where_that_is_asked_for(tmp_path, capsys):
    """Of all runs below the folder; what has healed does not count."""
    write(tmp_path / "healed", [4.0] * 4, {2: [SICK], 4: [HEALED]})
    assert report(capsys, tmp_path, "--fail-on", "LOW")[0] == 0
    write(tmp_path / "open", [4.0] * 4, {2: [SICK]})
    wanted = {"LOW": 1, "MEDIUM": 1, "HIGH": 1, "CRITICAL": 0}
    assert {name: report(capsys, tmp_path, "--fail-on", name)[0] for name in wanted} == wanted
    assert report(capsys, tmp_path)[0] == 0


@pytest.mark.parametrize("backend", ["tensorboard", "jsonl"])
def test_json_holds_statistics_and_issues_with_all_fields(tmp_path, capsys, backend):
    """Both file forms give the same report: steps, headline statistics, and each issue once in its last state."""
    write(tmp_path / "a", [4.0, 2.0, math.nan, 3.0], {2: [SICK], 4: [HEALED, BROKEN]}, backend)
    code, out, _ = report(capsys, tmp_path, "--json")
    (run,) = json.loads(out, parse_constant=refuse)["runs"]
    assert code == 0
    assert run["path"] == str(tmp_path / "a")
    assert run["info"]["model"] == "MLP"
    assert run["steps"] == {"count": 4, "first": 1, "last": 4}
    assert run["headline"] == {
        "loss": {"last": 3.0, "mean": 3.0, "min": 2.0, "max": 4.0, "nonfinite": 1, "last_step": 4}
    }
    assert [issue["issue_type"] for issue in run["issues"]] == ["NUMERICAL", "VANISHING"]
    assert run["issues"][0]["value"] == "NaN"
    assert run["issues"][1] == {
        "issue_type": "VANISHING",
        "severity": "HIGH",
        "layer": "blocks.3",
        "step": 2,
        "value": 1e-6,
        "threshold": 1e-4,
        "message": "The gradient shrinks.",
        "advice": "Look at blocks.3.",
        "layers": ["blocks.3", "blocks.2"],
        "healed_step": 4,
        "cause": "",
        "explained_by": None,
        "before": 0,
    }


def test_text_names_layer_step_and_advice(tmp_path, capsys):
    """The text for people holds what the JSON holds."""
    write(tmp_path, [4.0, 2.0, 3.0], {2: [SICK], 3: [BROKEN]})
    code, out, _ = report(capsys, tmp_path)
    assert code == 0
    assert "MLP, 1,234 parameters" in out
    assert "steps 1 to 3, 3 records" in out
    assert "[HIGH] VANISHING in blocks.3 since step 2\n" in out
    assert "[CRITICAL] NUMERICAL in the whole model since step 4" in out
    assert "value    1e-06, threshold 0.0001" in out
    assert "layers   blocks.3, blocks.2" in out
    assert "fix      Look at blocks.3." in out
    assert out.index("NUMERICAL") < out.index("VANISHING") < out.index("  metric ")


@pytest.mark.parametrize("kind", [JsonlWriter, TensorBoardWriter])
def test_a_run_that_was_not_closed_says_so_first(kind, tmp_path, capsys):
    """Its verdict says that nobody knows what came after the last step; that of a closed one does not."""
    writer = kind(tmp_path)
    writer.open(RunInfo("1000-0", 1.0))
    for step in range(1, 4):
        writer.write(StepRecord(step, float(step), (Reading.run("loss", 1.0),)))
    writer.flush()
    _, out, _ = report(capsys, tmp_path)
    assert "in the 3 records; not closed: steps after 3 are unknown" in out.splitlines()[1]
    assert "note   not closed" in out
    writer.close()
    _, out, _ = report(capsys, tmp_path)
    assert "not closed" not in out


def test_every_run_below_a_folder_is_reported(tmp_path, capsys):
    """A folder of runs gives one line per run, those with problems first; in full each has its own report."""
    write(tmp_path / "a", [4.0] * 5 + [1.0] * 5)
    write(tmp_path / "deep" / "b", [math.inf])
    write(tmp_path / "flat", [1.0] * 10)
    write(tmp_path / "sick", [4.0, 2.0, 3.0], {2: [SICK]})
    write(tmp_path / "worse", [4.0, 2.0, 3.0], {2: [SICK], 3: [BROKEN]})
    code, out, _ = report(capsys, tmp_path)
    assert code == 0
    head, *lines = out.splitlines()
    assert head.startswith(f"5 runs in {tmp_path}, 4 to look at. One in full: gradflow report {tmp_path}/NAME; ")
    assert [line.split()[0] for line in lines] == ["worse", "sick", "deep/b", "flat", "a"]
    assert lines[1:] == [
        "  sick    [HIGH] 1 problem: VANISHING in blocks.3 since step 2. Fix: Look at blocks.3",
        "  deep/b  the loss is Inf: no open problem in 1 record",
        "  flat    the loss has not fallen: from 1 to 1 (medians of 5); no open problem in 10 records",
        "  a       healthy: no open problem in 10 records; the loss fell from 4 to 1 (medians of 5)",
    ]
    _, out, _ = report(capsys, tmp_path, "--details")
    assert sum(" record" in line and line.startswith("  steps ") for line in out.splitlines()) == 5
    assert "(1 NaN or Inf)" in out


@pytest.mark.parametrize("place", ["missing", "empty", "file"])
def test_a_wrong_place_is_one_clear_line(tmp_path, capsys, place):
    """A folder without a run, a file and a path that does not exist end with exit code 2 and one line."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("text")
    code, out, err = report(capsys, tmp_path / place)
    assert code == 2
    assert out == ""
    assert err.count("\n") == 1
    assert str(tmp_path / place) in err


def test_a_wrong_command_ends_with_2(capsys):
    """An unknown command is refused by the parser with its usage."""
    with pytest.raises(SystemExit) as stop:
        main(["reprot"])
    assert stop.value.code == 2
    assert "reprot" in capsys.readouterr().err


@pytest.mark.parametrize("kind", [TensorBoardWriter, JsonlWriter])
def test_sessions_that_began_again_have_a_report_each(kind, tmp_path, capsys):
    """A folder that was written to thrice from step 1 on has three runs; a session that was resumed is part of its run."""

    def session(number, steps):
        writer = kind(tmp_path)
        began = 1000.0 * number
        writer.open(RunInfo(f"{int(1000 * began)}-{number}", began, "Net", 10))
        for step in steps:
            writer.write(StepRecord(step, began + step, (Reading.run("loss", float(number)),)))
        writer.close()

    session(1, range(1, 10))
    session(2, range(1, 6))
    session(3, range(6, 8))  # goes on where the second ended
    session(4, range(1, 4))
    _, out, _ = report(capsys, tmp_path)
    assert "steps 1 to 3, 3 records" in out, "the newest in full"
    assert f"2 other runs in {tmp_path}, 0 to look at. In full: gradflow report {tmp_path} --details" in out
    _, out, _ = report(capsys, tmp_path, "--details")
    spans = [line.strip().partition(",")[0] for line in out.splitlines() if line.startswith("  steps ")]
    assert spans == ["steps 1 to 9", "steps 1 to 7", "steps 1 to 3"]
    _, out, _ = report(capsys, tmp_path, "--json")
    assert [len(run["replaced"]) for run in json.loads(out)["runs"]] == [0, 1, 2]


@pytest.mark.parametrize(
    ("output", "code", "says"),
    [("/dev/full", 2, "gradflow: [Errno 28] No space left on device\n"), (None, 0, ""), ("file", 0, "")],
)
def test_an_output_that_takes_nothing_or_not_all_letters_is_no_issue(tmp_path, output, code, says):
    """A full disk is an error of its own; where output is closed or in ASCII, the status says what was found."""
    write(tmp_path / "größer", [4.0, 1.0])
    shell = f"exec {sys.executable} -m gradflow_export.cli report {shlex.quote(str(tmp_path))}"
    shell += " >&-" if output is None else f" >{output if output.startswith('/') else tmp_path / output}"
    environ = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(["bash", "-c", shell], env=environ, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (code, says)
    if output == "file":
        assert "gr\\xf6\\xdfer" in (tmp_path / "file").read_text()


def session(folder, number, steps, *, loss=lambda step: 1.0 / step, kind=TensorBoardWriter, settings=None):
    """Write one of several sessions into a folder."""
    writer, began = kind(folder), 1000.0 * number
    writer.open(RunInfo(f"{int(1000 * began)}-{number}", began, "Net", 10, settings=settings or {}))
    for step in steps:
        writer.write(StepRecord(step, began + step, (Reading.run("loss", loss(step)),)))
    writer.close()


@pytest.mark.parametrize("kind", [TensorBoardWriter, JsonlWriter])
def test_runs_of_one_folder_have_names_of_their_own_by_which_they_are_read(kind, tmp_path, capsys):
    """The name of a run is that of its first session, and says when it began."""
    for number, steps in enumerate((range(1, 10), range(1, 6), range(6, 8)), 1):
        session(tmp_path, number, steps, kind=kind)
    _, out, _ = report(capsys, tmp_path, "--details")
    titles = [line for line in out.splitlines() if line.startswith(str(tmp_path))]
    names = [title.partition(" [")[2].split()[0] for title in titles]
    assert names == ["1000000-1", "2000000-2"]
    assert all(" began 19" in title for title in titles)
    assert [len(read_run(tmp_path, session=name).records) for name in names] == [9, 7]
    assert read_run(tmp_path, session="3000000-3").sessions == ("2000000-2", "3000000-3")
    _, out, _ = report(capsys, tmp_path, "--json")
    assert [run["sessions"] for run in json.loads(out)["runs"]] == [["1000000-1"], ["2000000-2", "3000000-3"]]


@pytest.mark.parametrize(("begins", "lost"), [(11, ""), (14, ""), (111, "steps 11 to 110: no session recorded them")])
def test_the_report_says_that_a_run_was_resumed_and_what_lies_between(tmp_path, capsys, begins, lost):
    """A few steps between two sessions may have been left out by the budget; a hundred were recorded by nobody."""
    session(tmp_path, 1, range(1, 11))
    session(tmp_path, 2, range(begins, begins + 10))
    _, out, _ = report(capsys, tmp_path)
    assert f"note   2 sessions: training was resumed at step {begins}\n" in f"{out}\n"
    assert (f"note   not in the files: {lost}" in out) is bool(lost)
    assert ("100 steps were lost (no session recorded them)" in out) is bool(lost)


def test_readings_that_lie_far_apart_are_named_where_they_make_the_last_loss(tmp_path, capsys):
    """The median of five losses that are hundreds of steps apart is not the loss of the last step."""
    session(tmp_path, 1, [*range(1, 101), 150, 200, 250, 300])
    _, out, _ = report(capsys, tmp_path)
    where = "(medians of 5, the last read at steps 100 to 300)"
    assert f"the loss fell from 0.3333 to 0.005 {where}" in out


@pytest.mark.parametrize("backend", ["tensorboard", "jsonl"])
def test_a_run_that_an_exception_ended_says_so(tmp_path, capsys, backend):
    """It is healthy only as far as recorded, and the exception has its step."""
    writer = make_writer(backend, tmp_path)
    outlets = WriterSet([writer])
    outlets.open(RunInfo("1000-0", 1.0))
    for step in range(1, 21):
        outlets.write(StepRecord(step, float(step), (Reading.run("loss", 1.0 / step),)))
    outlets.close("at step 21 (ValueError: bad batch)")
    _, out, _ = report(capsys, tmp_path)
    assert "healthy as far as recorded: no open problem in the 20 records; " in out
    assert "ended by an exception at step 21 (ValueError: bad batch)" in out.splitlines()[1]
    _, out, _ = report(capsys, tmp_path, "--json")
    (run,) = json.loads(out)["runs"]
    assert (run["closed"], run["error"]) == (True, "at step 21 (ValueError: bad batch)")


@pytest.mark.parametrize("kind", ["no step", "garbage"])
def test_the_status_is_2_where_nothing_can_be_said(tmp_path, capsys, kind):
    """A run without a step, or whose file cannot be read, passes no gate; one with an issue fails it all the same."""
    write(tmp_path / "empty", [])
    if kind == "garbage":
        for file in (tmp_path / "empty").iterdir():
            file.write_bytes(os.urandom(1000))
    code, _, err = report(capsys, tmp_path, "--fail-on", "LOW")
    assert code == 2
    assert f"--fail-on found no optimizer step in {tmp_path / 'empty'}" in err
    assert report(capsys, tmp_path)[0] == 0
    write(tmp_path / "open", [4.0] * 4, {2: [SICK]})
    assert report(capsys, tmp_path, "--fail-on", "LOW")[0] == 1
