"""Runs that begin late, end early, are disabled, are several, or are our own."""

import io
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import wandb

from gradflow_export.records.step_record import RunInfo, StepRecord
from gradflow_export.writers import WandbWriter, Writer, make_writer


def steps(log, ours, prefix="gradflow"):
    """Return the steps of our rows of numbers."""
    return [row["step"] for row in ours(log, prefix) if "loss" in row]


def test_it_is_a_writer_by_name(place):
    """``make_writer`` knows it."""
    writer = make_writer("wandb", place)
    assert isinstance(writer, Writer)
    assert isinstance(writer, WandbWriter)
    assert writer.name == "wandb"
    writer.close()


def test_records_wait_for_the_first_run(begin, make, read, ours, said):
    """What was recorded before ``wandb.init`` counts for the first row, and one line says what is waited for."""
    writer = make.writer()
    for step in (1, 2, 3):
        writer.write(make.record(step))
    run = begin()
    writer.write(make.record(4))
    run.log({"mine": 4})
    writer.close()
    run.finish()
    (row,) = ours(read(run))
    assert (row["step"], row["loss"], row["since_last/loss_max"]) == (4, 0.25, 1.0)
    assert len(said("no W&B run is active yet")) == 1
    assert len(said()) == 1


def test_the_end_of_the_run_keeps_the_newest_values(begin, make, read, ours, monkeypatch):
    """After ``run.finish()`` before ``close`` the summary has them, of a record that comes meanwhile too, and no row is added."""
    run, writer, late = begin(), make.writer(), [30]

    def sleep(seconds):
        """Have another thread write while ``run.finish()`` waits."""
        while late:
            thread = threading.Thread(target=writer.write, args=(make.record(late.pop()),))
            thread.start()
            thread.join()
        time.sleep(seconds)

    monkeypatch.setattr(
        "gradflow_export.writers.wandb.writer.time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep)
    )
    for step in range(1, 30):
        writer.write(make.record(step))
    run.finish()
    writer.close()
    log = read(run)
    assert log.history == []
    assert [log.summary[f"gradflow/{name}"] for name in ("step", "last_step")] == [30, 30]
    assert log.summary["gradflow/verdict"].startswith("healthy: no open problem in 30 records; the loss fell ")


def test_steps_after_the_end_are_not_kept(begin, make, read, ours, said):
    """A finished run is left alone, which is said once, and a later run gets the later records only."""
    first, writer = begin(), make.writer()
    writer.write(make.record(1))
    first.log({"mine": 1})
    first.finish()
    for step in (2, 3):
        writer.write(make.record(step))
    second = begin()
    for step in (4, 5):
        writer.write(make.record(step))
        second.log({"mine": step})
    second.finish()
    writer.close()
    assert steps(read(first), ours) == [1]
    assert steps(read(second), ours) == [4, 5]
    assert read(second).config["gradflow"]["model"] == "Net"
    assert [line for line in said() if "has ended" not in line] == []
    assert len(said("has ended")) == 1


def test_a_closed_writer_adds_no_row(begin, make, read, ours):
    """Rows with ``step=`` that come later are as without us; the first has the last values, once."""
    run, writer = begin(), make.writer()
    for step in range(1, 21):
        writer.write(make.record(step))
    writer.close()
    for i in range(5):
        run.log({"mine": i}, step=i)
    run.finish()
    log = read(run)
    assert [(row["_step"], row["mine"]) for row in log.history] == [(i, i) for i in range(5)]
    assert steps(log, ours) == [20]


def test_a_second_exporter_after_the_first_goes_on_under_the_same_keys(begin, make, read, ours):
    """Watching again in a notebook makes no second set of charts, and rows of the first are not overwritten."""
    run = begin()
    for first in (1, 11):
        writer = make.writer()
        for step in range(first, first + 10):
            writer.write(make.record(step))
            run.log({"mine": step})
        writer.close()
    run.finish()
    assert steps(read(run), ours) == list(range(1, 21))


def test_two_exporters_in_one_run_have_keys_of_their_own(begin, make, read, ours, said):
    """As for the two models of a GAN: all rows of both are there, and one line says which keys the second has."""
    run, one, two = begin(), make.writer(), make.writer()
    for step in range(1, 21):
        one.write(make.record(step))
        two.write(make.record(step * 2))
        run.log({"mine": step}, step=step)
    one.close()
    run.finish()
    two.close()
    log = read(run)
    assert steps(log, ours) == list(range(1, 21))
    assert steps(log, ours, "gradflow_2") == list(range(2, 41, 2))
    assert {"gradflow", "gradflow_2"} <= set(log.config)
    assert len(said("begin with gradflow_2/")) == 1


def test_a_disabled_wandb_costs_one_line(place, make, said, monkeypatch):
    """Nothing is sent and nothing fails."""
    monkeypatch.setattr(wandb, "run", None)  # and again afterwards: a disabled run stays there when it is finished
    with wandb.init(mode="disabled") as run:
        writer = make.writer()
        for step in (1, 2):
            writer.write(make.record(step, issues=(make.issue(),)))
        writer.flush()
        writer.close()
        assert run.disabled
    assert said() == ["gradflow: wandb is disabled; nothing is sent to it"]


def test_a_run_of_our_own_is_started_and_finished(place, make, read, ours, said):
    """It begins with ``open``, takes every row at once on request, and ends with ``close`` within limits."""
    writer = make.writer(project="mine", rows="own", config={"a": 1})
    run = wandb.run
    for step in range(1, 11):
        writer.write(make.record(step))
    writer.close()
    assert wandb.run is None
    log = read(run)
    assert steps(log, ours) == list(range(1, 11))
    assert log.config["a"] == 1
    assert run.settings.finish_timeout > 0
    assert said() == []


def test_an_active_run_goes_before_one_of_our_own(begin, make, read, ours, said):
    """The user's run is used and left open."""
    run = begin()
    writer = make.writer(project="other")
    writer.write(make.record(1))
    run.log({"mine": 1})
    writer.close()
    assert wandb.run is run
    run.finish()
    assert steps(read(run), ours) == [1]
    assert len(said("a W&B run is active and is used; project is ignored")) == 1


def test_without_a_login_the_run_is_recorded_offline(place, make, read, ours, said, monkeypatch):
    """A server that wants a key is no reason not to record; the line says how to send it later."""
    monkeypatch.setattr(sys, "stdin", io.StringIO())  # nobody to ask for a key
    monkeypatch.setenv("NETRC", str(place / "netrc"))
    writer = make.writer(project="mine", mode="online")
    run = wandb.run
    writer.write(make.record(1))
    run.log({"mine": 1})
    writer.close()
    assert run.offline
    assert steps(read(run), ours) == [1]
    (line,) = said()
    assert "recording offline" in line
    assert "wandb sync" in line


def test_what_wandb_refuses_is_said_once(begin, make, read, ours, said, monkeypatch):
    """A call that fails costs its row, not the run's other rows, and never raises."""
    run, writer = begin(), make.writer(rows="own")
    log = run.log

    def sometimes(row, **how):
        if row["gradflow/step"] % 2:
            raise ValueError("odd")
        log(row, **how)

    monkeypatch.setattr(run, "log", sometimes)
    for step in range(1, 7):
        writer.write(make.record(step))
    writer.close()
    run.finish()
    assert steps(read(run), ours) == [2, 4, 6]
    assert len(said("W&B refused a row")) == 1


def test_a_run_that_refuses_everything_is_left_alone(begin, make, said, monkeypatch):
    """After ten failures in a row nothing more is tried."""
    run, writer, calls = begin(), make.writer(rows="own"), []

    def never(*args, **how):
        calls.append(args)
        raise ConnectionError("gone")

    monkeypatch.setattr(run, "log", never)
    for step in range(1, 50):
        writer.write(make.record(step))
    writer.close()
    run.finish()
    assert 5 <= len(calls) <= 10
    assert len(said("W&B refused")) == 2
    assert len(said("nothing more is sent to this run")) == 1


def test_the_users_synced_tensorboard_values_arrive_once(begin, make, read, ours, place):
    """Beside ``sync_tensorboard=True`` the user's values come once, under their names, and nothing of ours twice."""
    from torch.utils.tensorboard import SummaryWriter

    run = begin(sync_tensorboard=True)
    theirs = SummaryWriter(str(place / "board"))
    board, writer = make_writer("tensorboard", place / "board"), make.writer()
    board.open(make.info)
    for step in range(1, 11):
        record = make.record(step)
        board.write(record)
        writer.write(record)
        theirs.add_scalar("train/loss", 2.0 * step, step)
        theirs.add_scalar("lr", 0.5, step)
    theirs.close()
    board.close()
    writer.close()
    run.finish()
    wandb.tensorboard.unpatch()
    log = read(run)
    synced = [row for row in log.history if "train/loss" in row or "lr" in row]
    keys = {key for row in log.history for key in row if not key.startswith(("_", "gradflow/"))}
    got = [(row["global_step"], row.get("train/loss"), row.get("lr")) for row in synced]
    assert got == [(step, 2.0 * step, 0.5) for step in range(1, 11)]
    assert steps(log, ours) == []
    assert log.summary["gradflow/step"] == 10
    assert not [key for key in {key for row in log.history for key in row} if "gradflow/gradflow" in key]
    assert keys == {"train/loss", "lr", "global_step"}


def test_nothing_was_recorded(begin, make, read, ours):
    """A run without records has none of our rows."""
    run = begin()
    make.writer().close()
    run.finish()
    assert ours(read(run)) == []


@pytest.mark.parametrize("order", ["open", "no open"])
def test_a_life_of_every_call_at_any_time(place, order):
    """Flushing and closing may be done at any time and any number of times, and writing after close is ignored."""
    writer = WandbWriter()
    writer.flush()
    if order == "open":
        writer.open(RunInfo("1-0", 1.0))
    writer.write(StepRecord(1, 1.0))
    for _ in range(2):
        writer.close()
        writer.flush()
    writer.write(StepRecord(2, 2.0))


@pytest.mark.parametrize("name", ["_partial_history_callback", "_set_teardown_hooks", "_on_finish"])
def test_names_of_wandb_that_are_gone_are_known(monkeypatch, name):
    """`gradflow doctor` says what follows where a release of wandb lacks a name that is not public."""
    from gradflow_export.cli.doctor import check_wandb
    from gradflow_export.writers.wandb import private as wandb_private

    assert wandb_private.missing(wandb) == []
    assert check_wandb().verdict == "ok"
    monkeypatch.delattr(wandb.sdk.wandb_run.Run, name)
    assert len(wandb_private.missing(wandb)) == 1
    assert check_wandb().verdict == "note"


def test_without_any_private_name_the_writer_works(begin, make, read, ours, monkeypatch):
    """Rows have the newest values, and closing the writer keeps the summary."""
    from gradflow_export.writers.wandb import private as wandb_private

    for call in ("before_end", "leave_out_of_recap"):
        monkeypatch.setattr(wandb_private, call, lambda *more: False)
    monkeypatch.setattr(wandb_private, "alive", lambda module: [])
    run = begin()
    monkeypatch.setattr("gradflow_export.writers.wandb.fold.HOOK", "_a_name_that_is_gone")
    writer = make.writer()
    for step in range(1, 11):
        writer.write(make.record(step))
        (run.log if step % 2 else wandb.log)({"mine": step})
    writer.close()
    run.finish()
    log = read(run)
    assert steps(log, ours) == list(range(1, 11))
    assert [row["mine"] for row in log.history] == list(range(1, 11))
    assert log.summary["gradflow/last_step"] == 10


def test_the_recap_has_none_of_our_keys(begin, make):
    """What a run keeps for its end on the terminal holds the user's keys alone."""
    run, writer = begin(), make.writer()
    for step in range(1, 11):
        writer.write(make.record(step))
        run.log({"mine": step})
    writer.close()
    run.finish()
    assert {item.key for item in run._sampled_history.item if not item.key.startswith("_")} == {"mine"}
    assert not [item.key for item in run._final_summary.item if item.key.startswith("gradflow")]


def test_a_companion_run_has_every_row(begin, make, read, ours):
    """Curves of every step go to a second run of the same group; the user's has its own rows only."""
    run = begin(group="both")
    writer = make.writer(rows="companion")
    companion = writer._own
    for step in range(1, 11):
        writer.write(make.record(step))
        if step % 5 == 0:
            run.log({"mine": step}, step=step)
    writer.close()
    run.finish()
    assert (companion.group, companion.job_type, companion.id == run.id) == ("both", "gradflow", False)
    assert steps(read(companion), ours) == list(range(1, 11))
    assert [sorted(key for key in row if not key.startswith("_")) for row in read(run).history] == [["mine"], ["mine"]]


def test_a_full_disk_costs_views_and_files_only(begin, make, read, ours, said, monkeypatch):
    """Rows and summary are there, ``run.finish()`` raises nothing, and each thing is said once."""
    from gradflow_export.storage.table import PartWriter

    def full(*more, **named):
        raise OSError(28, "No space left on device")

    run, writer = begin(), make.writer()
    for step in range(1, 11):
        writer.write(make.record(step, issues=(make.issue(),) if step == 3 else ()))
        run.log({"mine": step})
        if step == 5:
            monkeypatch.setattr(wandb.Table, "__init__", full)
            monkeypatch.setattr(wandb.Html, "__init__", full)
            monkeypatch.setattr(PartWriter, "write", full)
    run.finish()
    writer.close()
    log = read(run)
    assert steps(log, ours) == list(range(1, 11))
    assert log.summary["gradflow/verdict"] == "1 problem: EXPLODING in a since step 3"
    assert len(said("Parquet files beside the W&B run are not continued")) == 1
    assert len(said("W&B refused the view")) == 1
