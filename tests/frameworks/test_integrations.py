"""One line in each framework: the same bits, its own step numbers, its folder, its logs, its end."""

import importlib
import logging
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
import trainers

from gradflow_export.errors import ArgumentError
from gradflow_export.records.step_record import IssueType
from gradflow_export.storage.reader import read_run

STEPS = 12
FRAMEWORKS = {
    "transformers": ("GradFlowCallback", "runs/gradflow"),
    "lightning": ("GradFlowCallback", "csv/version_0/gradflow"),
    "accelerate": ("GradFlowTracker", "gradflow"),
    "ignite": ("GradFlowHandler", "gradflow"),
    "stable_baselines3": ("GradFlowCallback", "gradflow"),
    "skorch": ("GradFlowCallback", "gradflow"),
    "keras": ("GradFlowCallback", "gradflow"),
    "fastai": ("GradFlowCallback", "gradflow"),
}
"""Class that the user writes, and where its files are to lie in the framework's folder."""


def pytest_generate_tests(metafunc):
    if "name" in metafunc.fixturenames:
        metafunc.parametrize("name", FRAMEWORKS)


def play(name, folder, *, steps=STEPS, rate=0.1, watched=True, done=0, **options):
    """Train; return model, healths, norms and, of a watched run, what was recorded."""
    kind, place = FRAMEWORKS[name]
    made = []

    def make(model, start=0):
        if not watched:
            return None
        module = importlib.import_module(f"gradflow_export.integrations.{name}")
        more = {
            "accelerate": lambda: {"model": model, "logdir": folder, "start_step": start},
            "ignite": lambda: {"model": model, "logdir": folder / "gradflow"},
            "skorch": lambda: {"logdir": folder / "gradflow"},
            "keras": lambda: {"logdir": folder / "gradflow"},
            "fastai": lambda: {"start_step": start},
        }
        made.append(getattr(module, kind)(**more.get(name, dict)(), verbose=0, **options))
        return made[-1]

    torch.manual_seed(7)
    model, healths, norms = getattr(trainers, name)(folder, steps, rate, make, done)
    kept = read_run(folder / place) if watched else None
    if watched:
        assert made[0].session.exporter._closed
        assert made[0].session.exporter.summary()["set_aside"] == []
    return model, healths, norms, kept


def test_a_run_is_recorded_as_the_framework_counts_it(name, tmp_path, caplog, record_property):
    """Parameters are those of a run without us; steps, norms and health are right; nothing is warned of."""
    caplog.set_level(logging.WARNING, logger="gradflow_export")
    alone, *_ = play(name, tmp_path / "alone", watched=False)
    model, healths, norms, kept = play(name, tmp_path / "watched", budget=None)
    for one, other in zip(alone.parameters(), model.parameters(), strict=True):
        assert torch.equal(one, other)
    records = {record.step: record for record in kept.records}
    assert sorted(records) == list(range(1, STEPS + 1))
    assert len(norms) == STEPS
    error = max(abs(records[n].value("gradient.total_norm") / norm - 1) for n, norm in enumerate(norms, 1))
    assert error < 1e-6
    assert healths
    assert all(0 <= health <= 1 for health in healths)
    if name != "stable_baselines3":  # twelve steps of a policy are too few to say
        assert healths[-1] == 1
    noise = [record.getMessage() for record in caplog.records]
    # A layer of Keras is no call of a module, which is told of once.
    assert [line for line in noise if name != "keras" or "no call of a watched block" not in line] == []
    found = {issue.issue_type for record in records.values() for issue in record.issues}
    told = {
        "framework": name, "lines": 1, "steps": f"{len(records)} of {STEPS}", "norm error": f"{error:.1e}", "bits": "equal",
        "false issues": len(found), "noise": len(noise),
    }  # fmt: skip
    for key, value in told.items():
        record_property(key, value)


def test_a_resumed_run_goes_on_counting(name, tmp_path, record_property):
    """Steps of the second session follow those of the first, in the same folder."""
    if name != "stable_baselines3":
        play(name, tmp_path, budget=None)
    *_, kept = play(name, tmp_path, budget=None, done=STEPS)
    steps = sorted({record.step for record in kept.records})
    assert steps == list(range(1, 2 * STEPS + 1))
    record_property("framework", name)
    record_property("resumed", f"to {steps[-1]}")


def test_training_stops_where_asked(name, tmp_path, record_property):
    """A rate that makes the numbers overflow ends training early, and only where that was asked for."""
    broken = {"steps": 60, "rate": 1e38, "synchronous": True}
    kinds = ("NUMERICAL", "EXPLODING", "LOSS_SPIKE")
    if name == "stable_baselines3":  # a policy of NaN cannot be sampled, which raises by itself
        kinds, broken["rate"] = tuple(kind.value for kind in IssueType), 10.0
    *_, norms, kept = play(name, tmp_path / "stopped", stop_on=kinds, **broken)
    assert len(norms) < 60
    assert 0 < len(list(kept.records)) < 60
    record_property("framework", name)
    record_property("stops", "yes")


def test_a_misspelt_type_is_answered_with_the_nearest(name):
    """Before training begins."""
    module = importlib.import_module(f"gradflow_export.integrations.{name}")
    needs = (torch.nn.Linear(1, 1),) if name in {"accelerate", "ignite"} else ()
    with pytest.raises(ArgumentError, match="did you mean 'EXPLODING'"):
        getattr(module, FRAMEWORKS[name][0])(*needs, stop_on=("EXPLODNG",))


def test_the_trainer_takes_it_by_name(tmp_path):
    """``report_to="gradflow"`` works once the module was imported, and earlier reports show the health."""
    from transformers import Trainer, TrainingArguments

    import gradflow_export.integrations.transformers  # noqa: F401

    arguments = TrainingArguments(
        output_dir=str(tmp_path), report_to=["gradflow"], max_steps=2, disable_tqdm=True, use_cpu=True, logging_steps=1,
        save_strategy="no",
    )  # fmt: skip
    trainer = Trainer(trainers.Net(), arguments, train_dataset=trainers.Rows(16))
    trainer.train()
    assert [row["gradflow/health"] for row in trainer.state.log_history] == [1.0, 1.0, 1.0]
    assert [record.step for record in read_run(tmp_path / "runs" / "gradflow").records] == [1, 2]
