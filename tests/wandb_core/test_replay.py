"""``gradflow replay``: a finished run in W&B, step for step."""

import gzip
from pathlib import Path

import numpy as np
import pytest

from gradflow_export.cli import main
from gradflow_export.records.step_record import Reading, RunInfo, StepRecord
from gradflow_export.storage.reader import read_run
from gradflow_export.writers import TensorBoardWriter

STORED = Path(__file__).parents[1] / "stored"
INFO = RunInfo("1700000000123-0", 1700000000.123, "Net", 10, ("a",))


def test_a_finished_run_is_sent_step_for_step(place, offline, tmp_path, capsys):
    """Every recorded step has a row with its own number and values, in a W&B run named after the folder."""
    writer = TensorBoardWriter(tmp_path / "mine")
    writer.open(INFO)
    for step in range(1, 31):
        writer.write(StepRecord(2 * step, 1e9 + step, (Reading.run("loss", 1 / step),)))
    writer.close()
    before = set(place.glob("wandb/offline-run-*"))
    assert main(["replay", str(tmp_path), "--to", "wandb", "--project", "test", "--offline"]) == 0
    assert "mine: 30 steps sent to an offline run" in capsys.readouterr().out
    (folder,) = set(place.glob("wandb/offline-run-*")) - before
    rows = offline.wait_for_log(folder).history
    got = [(row["gradflow/step"], row["gradflow/loss"]) for row in rows if "gradflow/loss" in row]
    assert [step for step, _ in got] == [2 * step for step in range(1, 31)]
    assert [loss for _, loss in got] == [float(Reading.run("loss", 1 / step).values[0]) for step in range(1, 31)]


def test_the_files_of_a_run_are_sent_again(place, begin, make, read, offline, tmp_path, capsys):
    """What the artifact of a run holds becomes a run again: every step, its values and its issues."""
    run, writer = begin(), make.writer()
    for step in range(1, 31):
        gains = Reading.of("block.gain", ("a", "b"), [1.0 * step, None if step % 2 else float("nan")])
        writer.write(
            make.record(step, Reading.run("loss", 1 / step), gains, issues=(make.issue(),) if step == 3 else ())
        )
    writer.close()
    run.finish()
    (folder,) = Path(run.dir).parent.glob("gradflow/gradflow")
    before = set(place.glob("wandb/offline-run-*"))
    assert main(["replay", str(folder), "--to", "wandb", "--project", "test", "--offline"]) == 0
    assert "30 steps sent to an offline run" in capsys.readouterr().out
    (again,) = set(place.glob("wandb/offline-run-*")) - before
    log = offline.wait_for_log(again)
    rows = [row for row in log.history if "gradflow/loss" in row]
    assert [row["gradflow/step"] for row in rows] == list(range(1, 31))
    assert [row["gradflow/loss"] for row in rows] == [float(np.float32(1 / step)) for step in range(1, 31)]
    assert [row["gradflow/open_issues"] for row in rows] == [0, 0] + [1] * 28
    assert log.config["gradflow"]["model"] == "Net"


@pytest.mark.parametrize("form", ["gradflow", "jsonl"])
def test_a_run_stored_by_the_old_layout_is_sent(form, place, offline, tmp_path, capsys):
    """Every step has its row with its number and loss, and the last one counts all issues that are open."""
    (packed,) = STORED.glob(f"*.{form}.gz")
    (tmp_path / packed.stem).write_bytes(gzip.decompress(packed.read_bytes()))
    before = set(place.glob("wandb/offline-run-*"))
    assert main(["replay", str(tmp_path), "--to", "wandb", "--project", "test", "--offline"]) == 0
    assert "60 steps sent to an offline run" in capsys.readouterr().out
    (folder,) = set(place.glob("wandb/offline-run-*")) - before
    rows = [row for row in offline.wait_for_log(folder).history if "gradflow/loss" in row]
    assert [row["gradflow/step"] for row in rows] == list(range(1, 61))
    assert [row["gradflow/loss"] for row in rows] == [record.value("loss") for record in read_run(tmp_path).records]
    assert rows[-1]["gradflow/open_issues"] == 3


def test_a_folder_without_runs_is_said_so(tmp_path, capsys):
    """The message names the folder and what to give."""
    assert main(["replay", str(tmp_path), "--to", "wandb"]) == 2
    assert "holds no gradflow run" in capsys.readouterr().err
