"""The logger for event loops: it checks the value of the call, off the loop's thread, and keeps no tensor."""

import asyncio
import gc
import json
import logging
import math
import threading
import weakref

import pytest
import torch
from torch import nn

from gradflow_export import (
    ArgumentError,
    ArgumentTypeError,
    AsyncTrainingLogger,
    Exporter,
    IssueType,
    MemoryWriter,
    TrainingPhase,
)
from gradflow_export.debugging.service.loglines import LogLines


@pytest.fixture
def logger():
    """A logger that is ended in any case."""
    with AsyncTrainingLogger(user_id=7, model_name="net") as made:
        yield made


def with_gradients(value=1.0):
    """A model whose gradients are one number."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    for p in model.parameters():
        p.grad = torch.full_like(p, value)
    return model


@pytest.mark.parametrize(
    "tensor",
    [
        torch.linspace(0, 1, 64),
        torch.linspace(0, 1, 64).reshape(8, 8).t(),
        torch.linspace(0, 1, 64).half(),
        torch.arange(64),
        torch.ones(64),
        torch.complex(torch.ones(4), torch.zeros(4)),
    ],
    ids=["plain", "transposed", "half", "whole", "constant", "complex"],
)
def test_the_value_checked_is_that_of_the_call(tensor, logger):
    """A tensor that changes between the call and the await is told as it was, whichever way it is read."""
    tensor = tensor.clone()
    before = tensor.double().mean().item() if not tensor.is_complex() else 1.0

    async def check():
        waiting = logger.check_tensor_anomalies_async(tensor, "x")
        tensor.fill_(9)
        return await waiting

    info = asyncio.run(check())
    assert info["mean_value"] == pytest.approx(before)
    assert info["max_value"] == pytest.approx(tensor.new_tensor(before).item().real, abs=64)
    assert info["max_value"] != 9


def test_a_nan_that_is_gone_when_awaited_is_told(logger):
    """What was broken at the call is broken in the answer, and counted exactly."""
    tensor = torch.tensor([1.0, math.nan, math.inf, math.nan])

    async def check():
        waiting = logger.check_tensor_anomalies_async(tensor, "x")
        tensor.zero_()
        return await waiting

    info = asyncio.run(check())
    assert (info["has_nan"], info["nan_count"], info["inf_count"], info["mean_value"]) == (True, 2, 1, 1.0)


@pytest.mark.parametrize("native", ["1", "0"])
def test_gradients_are_those_of_the_call(native, logger, monkeypatch):
    """``zero_grad`` and an optimizer's step between the call and the await change nothing in the answer."""
    monkeypatch.setenv("GRADFLOW_NATIVE", native)
    model = with_gradients(2.0)
    model[1].bias.grad[0] = -math.inf
    model[0].bias.grad[0] = math.nan
    model[1].weight.grad = None

    async def check():
        waiting = logger.check_gradient_anomalies_async(model)
        for p in model.parameters():
            if p.grad is not None:
                p.grad.zero_()
            p.grad = None
        return await waiting

    assert asyncio.run(check()) == {
        "total_params": 4,
        "params_with_grad": 3,
        "params_with_nan_grad": 1,
        "params_with_inf_grad": 1,
        "total_norm": "NaN",
        "max_norm": "NaN",
        "min_norm": "NaN",
        "exploding": [],
        "vanishing": [],
        "nonfinite": ["0.bias", "1.bias"],
        "has_anomaly": True,
    }


def test_norms_of_gradients_are_told(logger):
    """Total, greatest and least norm, and what lies beyond the thresholds; ``None`` without a gradient."""
    model = with_gradients(3.0)
    model[1].weight.grad.fill_(60.0)
    info = asyncio.run(logger.check_gradient_anomalies_async(model))
    assert (info["max_norm"], info["min_norm"]) == (pytest.approx(120.0), pytest.approx(3.0))
    assert info["total_norm"] == pytest.approx(math.sqrt(120**2 + 12 * 9 + 4 * 9 + 9))
    assert (info["exploding"], info["vanishing"], info["has_anomaly"]) == (["1.weight", "0.weight"], [], True)
    empty = asyncio.run(logger.check_gradient_anomalies_async(nn.Linear(2, 2)))
    assert (empty["params_with_grad"], empty["total_norm"], empty["max_norm"]) == (0, 0.0, None)


def test_the_loop_goes_on_while_a_check_is_slow(logger, monkeypatch):
    """A check that waits for the loop to do something else ends: it is not on the loop's thread."""
    done, threads = threading.Event(), []
    note = logger.debugger.note_tensor

    def slow(info):
        threads.append(threading.current_thread())
        assert done.wait(100)
        return note(info)

    monkeypatch.setattr(logger.debugger, "note_tensor", slow)

    async def both():
        check = asyncio.create_task(logger.check_tensor_anomalies_async(torch.ones(3), "x"))
        await asyncio.sleep(0)
        for _ in range(20):
            await logger.update_progress_async(epoch=0, step=0, loss=1.0)
        done.set()
        return await check

    assert asyncio.run(both())["mean_value"] == 1.0
    assert threads[0] is not threading.current_thread()


def test_many_checks_keep_their_order(logger):
    """Hundreds of checks at once are answered each with its own value."""

    async def check():
        waiting = [logger.check_tensor_anomalies_async(torch.full((5,), float(n)), f"x{n}") for n in range(300)]
        return await asyncio.gather(*waiting)

    assert [info["mean_value"] for info in asyncio.run(check())] == [float(n) for n in range(300)]
    assert [entry.name for entry in logger.debugger.history.entries] == [f"x{n}" for n in range(200, 300)]


def test_the_summary_has_the_documented_keys(logger):
    """Progress, phases, events and counts, in strict JSON."""
    logger.start_training(total_epochs=2, total_steps=8)
    for step in range(4):
        asyncio.run(
            logger.update_progress_async(epoch=0, step=step, loss=[3.0, 1.0, math.nan, 2.0][step], accuracy=0.5)
        )
    logger.set_phase(TrainingPhase.VALIDATION)
    logger.log_warning("slow")
    logger.log_error("lost", TrainingPhase.CHECKPOINTING, {"loss": math.nan, "at": [1, {"x": torch.ones(2, 3)}]})
    summary = logger.get_training_summary()
    assert set(summary) == {
        "user_id", "model_name", "phase", "progress", "seconds_by_phase", "warnings", "errors", "events", "log", "debug",
    }  # fmt: skip
    progress = summary["progress"]
    assert {key: progress[key] for key in ("total_epochs", "total_steps", "epoch", "step", "loss", "learning_rate")} == {
        "total_epochs": 2, "total_steps": 8, "epoch": 0, "step": 3, "loss": 2.0, "learning_rate": None,
    }  # fmt: skip
    assert (progress["steps_done"], progress["best_loss"], progress["fraction"]) == (4, 1.0, 0.5)
    assert progress["metrics"] == {"accuracy": 0.5}
    assert 0 < progress["elapsed_seconds"] <= progress["remaining_seconds"] * 1.001
    assert set(summary["seconds_by_phase"]) == {"initialization", "training", "validation"}
    assert (summary["phase"], summary["warnings"], summary["errors"]) == ("validation", 1, 1)
    assert [(event["level"], event["phase"]) for event in summary["events"]] == [
        ("info", "training"),
        ("warning", "validation"),
        ("error", "checkpointing"),
    ]
    assert summary["events"][2]["context"] == {"loss": "NaN", "at": [1, {"x": "tensor of shape (2, 3)"}]}
    assert set(summary["log"]) == {"written", "waiting", "left_out", "late", "latest_seconds"}
    assert summary["debug"] == {"total_anomalies": 0, "debug_history_length": 0}
    json.dumps(summary, allow_nan=False)


def test_errors_are_logged_with_their_place(logger):
    """Type, message and where it was raised."""

    def broken():
        raise KeyError("batch")

    with pytest.raises(KeyError) as caught:
        broken()
    logger.log_error(caught.value, TrainingPhase.DATA_LOADING, {"step": 3})
    event = logger.get_training_summary()["events"][0]
    assert event["message"] == "KeyError: 'batch'"
    assert event["context"]["step"] == 3
    assert event["context"]["raised_at"][-1].endswith("in broken")


def test_events_are_bounded_and_hold_no_tensor():
    """A hundred events are kept, and a tensor in a context can go."""
    with AsyncTrainingLogger(user_id="me", model_name="net") as logger:
        tensor = torch.ones(3)
        gone = weakref.ref(tensor)
        logger.log_error("x", None, {"tensor": tensor, "nested": [tensor]})
        asyncio.run(logger.check_tensor_anomalies_async(tensor))
        del tensor
        gc.collect()
        for number in range(150):
            logger.log_warning(f"w{number}")
    assert gone() is None
    assert logger.get_training_summary()["events"][0]["message"] == "w50"
    assert logger.get_training_summary()["warnings"] == 150


def test_the_log_is_written_in_order_by_another_thread(caplog):
    """All lines are there once it has ended, and the thread that spoke did not write them."""
    caplog.set_level(logging.INFO, logger="gradflow_export.training")
    sink = Sink()
    with sink, AsyncTrainingLogger(user_id=1, model_name="net") as logger:
        logger.start_training()
        for number in range(5):
            logger.log_warning(str(number))
    messages = [record.getMessage().rpartition(": ")[2] for record in caplog.records]
    assert messages == ["training of net began", *"01234"]
    assert sink.threads == {"gradflow-logger-lines"}


class Sink(logging.Handler):
    """A handler of the logger's lines that takes its time: it waits for an event, or is open to all."""

    def __init__(self, gate=None):
        super().__init__()
        self.gate, self.lines, self.threads, self.reached = gate, [], set(), threading.Event()

    def emit(self, record):
        self.reached.set()
        if self.gate is not None:
            self.gate.wait(100)
        self.threads.add(threading.current_thread().name)
        self.lines.append(record.getMessage().rpartition(": ")[2])

    def __enter__(self):
        logging.getLogger("gradflow_export").addHandler(self)
        return self

    def __exit__(self, *error):
        logging.getLogger("gradflow_export").removeHandler(self)


def test_a_slow_sink_does_not_hold_an_awaited_check(caplog):
    """A check is answered while a handler has not even taken in the first of many lines, a warning of its own included."""
    caplog.set_level(logging.INFO, logger="gradflow_export")
    gate = threading.Event()
    with Sink(gate) as sink, AsyncTrainingLogger(user_id=1, model_name="net", most_waiting=1000) as logger:
        logger.start_training()
        for number in range(40):
            logger.log_info(str(number))
        assert sink.reached.wait(100)
        assert asyncio.run(logger.check_tensor_anomalies_async(torch.ones(3)))["mean_value"] == 1.0
        assert asyncio.run(logger.check_gradient_anomalies_async(with_gradients(math.nan)))["has_anomaly"]
        assert not sink.lines
        assert logger.get_training_summary()["log"]["waiting"] >= 41
        gate.set()
    assert [line for line in sink.lines if line.isdigit()] == [str(number) for number in range(40)]
    assert any("NaN" in record.getMessage() for record in caplog.records)
    assert logger.get_training_summary()["log"]["left_out"] == 0


def test_lines_that_a_slow_sink_cannot_take_are_counted_and_said(caplog):
    """At most so many wait; the oldest are left out, in order, a line says how many, and events are all there."""
    caplog.set_level(logging.INFO, logger="gradflow_export")
    gate = threading.Event()
    with Sink(gate) as sink, AsyncTrainingLogger(user_id=1, model_name="net", most_waiting=10) as logger:
        logger.log_info("first")
        assert sink.reached.wait(100)
        for number in range(60):
            logger.log_info(str(number))
        log = logger.get_training_summary()["log"]
        assert (log["waiting"], log["left_out"]) == (10, 50)
        gate.set()
    told = [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]
    assert len(told) == 1
    assert told[0].startswith("gradflow: 50 log lines were left out")
    assert [line for line in sink.lines if line.isdigit() or line == "first"] == ["first", *map(str, range(50, 60))]
    summary = logger.get_training_summary()
    assert (summary["log"]["written"], summary["log"]["left_out"]) == (11, 50)
    assert len(summary["events"]) == 61


def test_a_sink_that_hangs_does_not_keep_the_run_from_ending(monkeypatch):
    """After a limited time the end comes, and what was not written is counted."""
    monkeypatch.setattr("gradflow_export.debugging.service.loglines._GRACE", 0.05)
    gate = threading.Event()
    with Sink(gate) as sink:
        lines = LogLines(logging.getLogger("gradflow_export"), drain=0.05)
        for number in range(5):
            lines.put(logging.ERROR, "line: %d", number)
        assert sink.reached.wait(100)
        lines.close()
        assert not sink.lines
        assert lines.counts()["waiting"] == 4
        lines.put(logging.ERROR, "after the end")
        lines.reopen()
        lines.put(logging.ERROR, "line: %d", 5)
        gate.set()
        monkeypatch.setattr(lines, "_drain", 100.0)  # what was short for a sink that hangs is long for a busy machine
        lines.close()
    assert sink.lines[0] == "0"
    assert lines.counts()["waiting"] == 0


def test_a_problem_reaches_the_exporter_that_watches(logger):
    """A gradient above the threshold is an issue of the exporter too."""
    model = with_gradients(100.0)
    exporter = Exporter(model, backends=[MemoryWriter()], strict=True).watch()
    asyncio.run(logger.check_gradient_anomalies_async(model))
    exporter.close()
    assert [issue.issue_type for issue in exporter.issues] == [IssueType.EXPLODING]


def test_anomaly_mode_lasts_from_start_to_end():
    """Also where the logger is forgotten or the block fails; without the switch it is never touched."""
    with AsyncTrainingLogger(1, "net") as logger:
        logger.start_training()
        assert not torch.is_anomaly_enabled()
    logger = AsyncTrainingLogger(1, "net", enable_autograd_debug=True)
    assert not torch.is_anomaly_enabled()
    logger.start_training()
    assert torch.is_anomaly_enabled()
    with pytest.raises(ZeroDivisionError), logger:
        1 / 0  # noqa: B018
    assert not torch.is_anomaly_enabled()
    assert logger.phase is TrainingPhase.FAILED
    logger = AsyncTrainingLogger(1, "net", enable_autograd_debug=True)
    logger.start_training()
    del logger
    gc.collect()
    assert not torch.is_anomaly_enabled()


def test_after_the_end_nothing_is_checked():
    """Ending twice does nothing; logging afterwards is kept and raises nothing."""
    logger = AsyncTrainingLogger(1, "net")
    logger.end_training()
    logger.end_training(TrainingPhase.FAILED)
    assert logger.phase is TrainingPhase.COMPLETED
    logger.log_warning("late")
    assert logger.get_training_summary()["warnings"] == 1
    with pytest.raises(ArgumentError, match="has ended its training"):
        asyncio.run(logger.check_tensor_anomalies_async(torch.ones(1)))


def test_a_logger_begins_anew_after_its_end():
    """A second run, as of another fold, checks, counts and ends like the first, and leaves no anomaly mode on."""
    logger = AsyncTrainingLogger(1, "net", enable_autograd_debug=True)
    for phase in (TrainingPhase.COMPLETED, TrainingPhase.FAILED):
        logger.start_training(total_steps=2)
        assert logger.phase is TrainingPhase.TRAINING
        assert asyncio.run(logger.check_tensor_anomalies_async(torch.tensor([float("nan")])))["has_nan"]
        asyncio.run(logger.update_progress_async(0, 0, 1.0))
        logger.end_training(phase)
        assert logger.phase is phase
        assert logger.get_training_summary()["progress"]["steps_done"] == 1
        assert not torch.is_anomaly_enabled()


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda _: AsyncTrainingLogger(1.5, "x"), ArgumentTypeError, "user_id must be a number or a name, got 1.5"),
        (lambda _: AsyncTrainingLogger(1, None), ArgumentTypeError, "model_name must be a name, got None"),
        (
            lambda _: AsyncTrainingLogger(1, "x", "yes"),
            ArgumentTypeError,
            "enable_autograd_debug must be True or False",
        ),
        (lambda made: made.start_training(0), ArgumentError, "total_epochs must be at least 1, got 0"),
        (lambda made: made.start_training(1, "x"), ArgumentTypeError, "total_steps must be a whole number, got 'x'"),
        (lambda made: made.set_phase("training"), ArgumentTypeError, "phase must be a TrainingPhase, got 'training'"),
        (lambda made: made.log_warning("x", "training"), ArgumentTypeError, "phase must be a TrainingPhase"),
        (lambda made: made.check_tensor_anomalies_async(3.0, "loss"), ArgumentTypeError, "loss must be a torch.Tensor"),
        (lambda made: made.check_gradient_anomalies_async(3.0), ArgumentTypeError, "model must be a torch.nn.Module"),
    ],
)
def test_what_cannot_be_used_is_told_at_the_call(call, error, words, logger):
    """Not when the answer is awaited."""
    with pytest.raises(error, match=words):
        call(logger)
