"""One line in each framework: the same bits, its own step numbers, its folder, its logs, its end."""

import importlib
import logging
import os
import pickle
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
    "ultralytics": ("GradFlowCallback", "train/gradflow"),
}
"""Class that the user writes, and where its files are to lie in the framework's folder."""


def pytest_generate_tests(metafunc):
    if "name" in metafunc.fixturenames:
        metafunc.parametrize("name", FRAMEWORKS)


def play(name, folder, *, steps=STEPS, rate=None, watched=True, done=0, **options):
    """Train; return model, healths, norms and, of a watched run, what was recorded."""
    kind, place = FRAMEWORKS[name]
    # A tenth saturates the policy of A2C within five steps, which is told.
    rate = rate or (7e-4 if name == "stable_baselines3" else 0.1)
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
    assert healths[-1] == 1
    noise = [record.getMessage() for record in caplog.records]
    assert noise == []
    found = {issue.issue_type for record in records.values() for issue in record.issues}
    assert found == set()
    assert any(record.get("block.gradient_norm") for record in records.values())
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


def test_processes_of_a_training_on_several_devices_get_the_settings(tmp_path):
    """Ultralytics pickles callbacks into its processes: they arrive without the exporter of an earlier training."""
    from gradflow_export.integrations.ultralytics import GradFlowCallback

    callback = GradFlowCallback(stop_on=("NUMERICAL",), every=3)
    callback.session.start(trainers.Net(), logdir=tmp_path)
    arrived = pickle.loads(pickle.dumps(callback._begin)).__self__
    callback.session.close()
    assert arrived.session.exporter is None
    assert (arrived.session._stop_on, arrived.session._options) == ({IssueType.NUMERICAL}, {"every": 3})


def model_of_keras(kind):
    """Return a model of Keras, and the blocks that are to be found in it."""
    import keras
    from keras import layers

    class Residual(layers.Layer):
        """Two layers in a class of one's own."""

        def __init__(self):
            super().__init__()
            self.wide, self.narrow = layers.Dense(16, activation="relu"), layers.Dense(8)

        def call(self, x):
            return x + self.narrow(self.wide(x))

    class Own(keras.Model):
        """Blocks in a list, and a weight that belongs to no layer."""

        def __init__(self):
            super().__init__()
            self.blocks, self.head = [Residual() for _ in range(4)], layers.Dense(3)
            self.scale = self.add_weight(shape=(1,), initializer="ones", name="scale")

        def call(self, x):
            for block in self.blocks:
                x = block(x)
            return self.head(x * self.scale)

    if kind == "own":
        return Own(), ["residual", "residual_1", "residual_2", "residual_3"]
    inputs = keras.Input((8,))
    if kind == "nested":
        inner = keras.Sequential([keras.Input((8,)), layers.Dense(8), layers.Dense(8)], name="encoder")
        return keras.Model(inputs, layers.Dense(3, name="head")(layers.Dropout(0.1)(inner(inputs)))), [
            "encoder.dense", "encoder.dense_1", "head",
        ]  # fmt: skip
    hidden = inputs
    for name in ("type", "children", "forward"):
        hidden = layers.Add()([hidden, layers.Dense(8, activation="relu", name=name)(hidden)])
    return keras.Model(inputs, layers.Dense(3, name="head")(hidden)), ["type", "children", "forward", "head"]


@pytest.mark.parametrize("kind", ["own", "nested", "functional"])
def test_layers_of_keras_are_blocks(kind, tmp_path):
    """Whatever they lie in and whatever their names, each weight is watched once and gains are read."""
    os.environ["KERAS_BACKEND"] = "torch"
    import keras

    from gradflow_export.integrations.keras import GradFlowCallback

    keras.utils.clear_session()
    model, blocks = model_of_keras(kind)
    model.compile(keras.optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    callback = GradFlowCallback(tmp_path, verbose=0, synchronous=True)
    model.fit(*trainers._table(32), batch_size=8, verbose=0, callbacks=[callback])
    (record, *_), info = read_run(tmp_path).records, callback.session.exporter.summary()["info"]
    assert list(record.get("block.gradient_norm").sites) == info["blocks"] == blocks
    assert info["parameters"] == sum(int(torch.tensor(w.shape).prod()) for w in model.trainable_weights)
    assert info["model"] == type(model).__name__


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
