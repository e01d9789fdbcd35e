"""``gradflow replay``: a finished run in W&B, step for step."""

from gradflow_export.cli import main
from gradflow_export.records import Reading, RunInfo, StepRecord
from gradflow_export.writers import TensorBoardWriter

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


def test_a_folder_without_runs_is_said_so(tmp_path, capsys):
    """The message names the folder and what to give."""
    assert main(["replay", str(tmp_path), "--to", "wandb"]) == 2
    assert "holds no gradflow run" in capsys.readouterr().err
