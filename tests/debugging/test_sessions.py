"""Debugging sessions: limits, files, rotation, pictures, and what is left when something goes wrong."""

import gc
import json
import logging
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from gradflow_export import (
    ArgumentError,
    Exporter,
    MissingPackageError,
    NaNHandlingConfig,
    NumericalStabilityManager,
    PyTorchDebuggingConfig,
    PyTorchDebuggingManager,
    StorageError,
    create_training_wrapper,
    plot_debug_session,
)
from gradflow_export.debugging.service.files import SessionFiles
from gradflow_export.debugging.service.session import StepFacts

KINDS = ("history", "anomalies", "gradients", "memory")


def step(manager, model, optimizer, x=None):
    """Train one step through a manager."""
    loss = model(torch.randn(3, 4) if x is None else x).square().mean()
    loss.backward()
    result = manager.step(model, loss, optimizer)
    optimizer.step()
    optimizer.zero_grad()
    return result


@pytest.fixture
def parts():
    """A model and its optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
    return model, torch.optim.Adam(model.parameters())


def files(folder, prefix="pytorch_debug"):
    """Names of the JSON files in a folder, by session."""
    out = {}
    for path in sorted(folder.glob(f"{prefix}_*.json")):
        kind, _, stamp = path.stem.removeprefix(f"{prefix}_").partition("_")
        out.setdefault(stamp, {})[kind] = json.loads(path.read_text())
    return out


def test_debugging_ends_at_its_limits_and_clipping_goes_on(parts, tmp_path):
    """After max_debug_iterations steps or debug_timeout seconds records are empty; the policy still acts."""
    now = [0.0]
    config = PyTorchDebuggingConfig(max_debug_iterations=3, save_debug_info=False)
    manager = NumericalStabilityManager(nan_config=NaNHandlingConfig(), debug_config=config)
    enabled = [step(manager, *parts)["debug_info"]["debug_enabled"] for _ in range(5)]
    assert enabled == [True, True, True, False, False]
    assert manager.get_debug_summary()["ended_because"] == "max_debug_iterations=3 reached"
    assert step(manager, *parts, torch.full((3, 4), torch.nan))["action"] == "skip"
    config = PyTorchDebuggingConfig(debug_timeout=10.0, save_debug_info=False)
    timed = PyTorchDebuggingManager(config, clock=lambda: now[0])
    seen = []
    for now[0] in (0.0, 9.0, 11.0, 12.0):
        seen.append(timed.step(parts[0], StepFacts(4, [1.0]))["debug_enabled"])
    assert seen == [True, True, True, False]
    assert timed.get_debug_summary()["ended_because"] == "debug_timeout=10 s reached"
    assert timed.get_debug_summary()["session_duration"] == 11.0


def test_four_files_hold_the_session(parts, tmp_path):
    """History, anomalies, gradients and memory; NaN is a string, and a gradient check that was made is in the summary."""
    config = PyTorchDebuggingConfig(
        enable_memory_debugging=True, enable_grad_check=True, debug_output_dir=str(tmp_path), debug_file_prefix="mine"
    )
    with NumericalStabilityManager(nan_config=NaNHandlingConfig(), debug_config=config) as manager:
        manager.start_debug_session("first try")
        for number in range(4):
            step(manager, *parts, torch.full((3, 4), torch.nan) if number == 2 else None)
        summary = manager.get_debug_summary()
    (session,) = files(tmp_path, "mine").values()
    assert [len(session[kind]) for kind in KINDS] == [4, 2, 4, 4]
    assert session["gradients"][2]["total_norm"] == "NaN"
    assert session["memory"][0]["cpu_memory"]["rss"] > 1
    assert [entry["type"] for entry in session["anomalies"]] == ["nan_loss", "nan_gradient"]
    assert [record["anomalies_detected"] for record in session["history"]] == [False, False, True, False]
    assert (summary["session"], summary["anomalies_detected"]) == ("first try", 2)
    assert summary["gradient_check"]["passed"]
    assert set(summary["gradient_check"]["parameters"]) >= {"0.weight", "2.bias"}
    assert not list(tmp_path.glob("*.partial"))


def test_old_sessions_are_deleted_and_only_they(tmp_path):
    """The newest are kept, two of the same second have two names, and nobody else's files are touched."""
    other = tmp_path / "pytorch_debug_history_notes.json"
    other.write_text("[]")
    stamps = ("20260101_000000", "20260102_000000", "20260102_000000", "20260103_000000")
    for stamp in stamps:
        kept = SessionFiles(tmp_path, "pytorch_debug", stamp, keep=2, most_bytes=1000, entries=10)
        kept.write()
    names = {path.name for path in tmp_path.glob("*_history_*.json")} - {other.name}
    assert names == {
        "pytorch_debug_history_20260102_000000_2.json",
        "pytorch_debug_history_20260103_000000.json",
    }
    assert other.exists()


def test_a_file_never_grows_beyond_its_size(tmp_path):
    """What does not fit is left out, oldest first, and what is left is valid JSON."""
    kept = SessionFiles(tmp_path, "p", "20260101_000000", keep=1, most_bytes=200, entries=1000)
    for number in range(100):
        kept.add("history", {"iteration": number})
    kept.write()
    path = kept.paths["history"]
    assert path.stat().st_size <= 200
    written = json.loads(path.read_text())
    assert written[-1] == {"iteration": 99}
    assert [entry["iteration"] for entry in written] == list(range(100 - len(written), 100))


def test_folders_that_cannot_be_written_are_told(parts, tmp_path, caplog):
    """An explicit start raises; a step goes on without files and says so; a disk that fails later is told once."""
    (tmp_path / "file").write_text("")
    config = PyTorchDebuggingConfig(debug_output_dir=str(tmp_path / "file" / "below"))
    manager = NumericalStabilityManager(debug_config=config)
    with pytest.raises(StorageError, match=r"must be a folder that can be made, got .* choose another"):
        manager.start_debug_session()
    assert step(manager, *parts)["debug_info"]["debug_enabled"]
    assert "no debug files are written" in caplog.text
    kept = SessionFiles(tmp_path / "gone", "p", "20260101_000000", keep=1, most_bytes=200, entries=10)
    (tmp_path / "gone").rmdir()
    caplog.clear()
    kept.write()
    kept.write()
    assert [record.message.count("cannot be written") for record in caplog.records] == [1]


def test_a_loop_that_ends_by_an_exception_leaves_nothing_switched_on(parts, tmp_path):
    """Autograd's anomaly mode is off and the files are written once the manager is gone, or its block is left."""
    config = PyTorchDebuggingConfig(
        enable_autograd_anomaly=True, autograd_anomaly_mode="raise", debug_output_dir=str(tmp_path)
    )
    manager = NumericalStabilityManager(debug_config=config)
    step(manager, *parts)
    assert torch.is_anomaly_enabled()
    del manager
    gc.collect()
    assert not torch.is_anomaly_enabled()
    assert not parts[0]._forward_pre_hooks

    def break_off():
        with NumericalStabilityManager(debug_config=config) as other:
            step(other, *parts)
            raise KeyError

    with pytest.raises(KeyError):
        break_off()
    assert not torch.is_anomaly_enabled()
    assert [len(session["history"]) for session in files(tmp_path).values()] == [1, 1]


def test_what_is_logged_follows_the_level(parts, caplog):
    """Verbose sessions log each step; from level error on anomalies are silent."""
    caplog.set_level(logging.INFO, "gradflow_export")
    for level, verbose, expected in (("info", True, 2), ("warning", True, 0), ("error", False, 0)):
        caplog.clear()
        config = PyTorchDebuggingConfig(debug_level=level, verbose_logging=verbose, save_debug_info=False)
        wrapper = create_training_wrapper(nan_config=NaNHandlingConfig(), debug_config=config)
        for x in (None, None, torch.full((3, 4), torch.nan)):
            loss = parts[0](torch.randn(3, 4) if x is None else x).square().mean()
            loss.backward()
            wrapper(parts[0], loss, parts[1])
            parts[1].zero_grad()
        wrapper.stop_debug_session()
        assert sum("gradient norm" in record.message for record in caplog.records) == expected
        assert any("the loss is NaN" in record.message for record in caplog.records) is (level != "error")


def test_a_profile_goes_to_the_exporter_s_log_folder(parts, tmp_path):
    """TensorBoard finds the trace beside the run."""
    config = PyTorchDebuggingConfig(
        enable_performance_debugging=True, profile_memory=True, profile_steps=1, save_debug_info=False
    )
    with (
        Exporter(parts[0], backends=(), logdir=tmp_path / "run").watch(),
        NumericalStabilityManager(debug_config=config) as manager,
    ):
        for _ in range(4):
            step(manager, *parts)
        profile = manager.get_debug_summary()["profile"]
    assert profile["by_time"]
    assert profile["by_memory"]
    assert [str(path) for path in (tmp_path / "run").glob("*.pt.trace.json")] == [profile["trace"]]


def test_pictures_show_something(parts, tmp_path):
    """Four PNG files, of a session with an anomaly and of one without, that are not one colour; pyplot is untouched."""
    image = pytest.importorskip("PIL.Image")
    config = PyTorchDebuggingConfig(enable_memory_debugging=True, debug_output_dir=str(tmp_path / "out"))
    with NumericalStabilityManager(nan_config=NaNHandlingConfig(), debug_config=config) as manager:
        for number in range(6):
            step(manager, *parts, torch.full((3, 4), torch.inf) if number == 3 else None)
        pictures = manager.debugging.plot()
        history = manager.get_debug_summary()["files"]["history"]
    assert set(pictures) == {"anomalies", "gradients", "memory", "distribution"}
    for path in plot_debug_session(history, tmp_path / "again").values():
        with image.open(path) as picture:
            assert picture.size == (800, 400)
            assert len(picture.convert("RGB").getcolors(100_000)) > 50
    healthy = plot_debug_session(
        [{**json.loads(Path(history).read_text())[0], "memory_info": {}}], tmp_path / "healthy"
    )
    assert all(path.stat().st_size > 3000 for path in healthy.values())
    assert "matplotlib.pyplot" not in sys.modules


def test_pictures_without_data_or_matplotlib_are_told(monkeypatch, tmp_path):
    """The message says what to install, or what to do first."""
    with pytest.raises(ArgumentError, match="must hold at least one step, got none"):
        plot_debug_session([], tmp_path)
    with pytest.raises(StorageError, match="must be a file of step records"):
        plot_debug_session(tmp_path / "none.json", tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'gradflow-export\[plots\]'"):
        plot_debug_session([{"iteration": 1, "anomaly_details": []}], tmp_path)
