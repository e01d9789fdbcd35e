"""Whatever fails inside, training goes on, the rest goes on, and one line says so."""

import gc
import time
import weakref

import pytest
import torch

from gradflow_export import Exporter, JsonlWriter, MemoryWriter
from gradflow_export.cli.report import summarise
from gradflow_export.engine import worker as worker_module
from gradflow_export.hooks.optimizer_hooks import listen
from gradflow_export.storage.reader import read_run
from tensorboard_plugin_gradflow import standalone
from tensorboard_plugin_gradflow.data import run_meta


class Broken:
    """A writer that raises in one of its methods."""

    name = "broken"

    def __init__(self, method):
        self.method, self.calls = method, []

    def _do(self, method):
        self.calls.append(method)
        if method == self.method:
            raise OSError(28, "No space left on device")

    def open(self, run):
        """Begin."""
        self._do("open")

    def write(self, record):
        """Take one record."""
        self._do("write")

    def flush(self):
        """Make readable."""
        self._do("flush")

    def close(self):
        """Finish."""
        self._do("close")


@pytest.mark.parametrize("method", ["open", "write", "flush", "close"])
def test_a_writer_that_raises_is_set_aside(method, loop, said, tmp_path, monkeypatch):
    """The other writers get every record, training is unharmed, and exactly one line names the writer."""
    monkeypatch.setattr(worker_module, "IDLE_SECONDS", 0.0)
    broken, memory = Broken(method), MemoryWriter()
    exporter = Exporter(loop.model, backends=[broken, JsonlWriter(tmp_path), memory]).watch(loop.criterion)
    loop.train(5)
    exporter.summary()
    if method == "flush":
        until = time.monotonic() + 100
        while "flush" not in broken.calls and time.monotonic() < until:
            time.sleep(0.01)
    exporter.close()
    assert loop.trained_as_unwatched(5)
    assert [r.step for r in memory.records] == [1, 2, 3, 4, 5]
    assert list(read_run(tmp_path).records) == memory.records
    assert len(said()) == len(said(f"the broken writer failed in {method}() and is disabled")) == 1
    assert broken.calls.count(method) == 1
    assert exporter.summary()["set_aside"] == ["broken"]
    lost = exporter._worker.outlets.lost
    if method in {"open", "write"}:
        assert (lost["broken"].first, lost["broken"].last, lost["broken"].steps) == (1, 5, 5)
        assert "No space left on device" in lost["broken"].reason
    else:
        assert lost == {}
    if method != "close":
        assert broken.calls[-1] == "close"
        assert "disabled after an error: broken" in exporter.report()


PARTS = {
    "gradients": "gradflow_export.instruments.gradients.parameters.GradientInstrument.read",
    "updates": "gradflow_export.instruments.updates._Plan.keep",
    "updates after": "gradflow_export.instruments.updates._Plan.compare",
    "updates settled": "gradflow_export.instruments.change_check.Checksums.compare",
    "blocks": "gradflow_export.hooks.output_stats.SentOutputs.take",
    "blocks backward": "gradflow_export.hooks.gradient_hooks.GradientStore._count",
    "blocks drain": "gradflow_export.instruments.blocks.BlockInstrument.drain",
    "activations": "gradflow_export.instruments.activations.modules.ActivationInstrument._unit_dim",
    "loss": "gradflow_export.instruments.criterion._Call",
    "loss reached": "gradflow_export.instruments.micro_batches.Pass.add_part",
    "loss logits": "gradflow_export.instruments.loss.as_samples",
    "origin": "gradflow_export.instruments.origin._seen",
    "moments": "gradflow_export.instruments.moments._read",
    "clipping": "gradflow_export.instruments.gradients.clipping._total",
    "transfer": "gradflow_export.engine.training_loop.pack",
}
STILL = {"gradients": "loss", "updates": "loss", "blocks": "loss", "activations": "loss", "loss": "gradient.total_norm"}


@pytest.mark.parametrize("name", PARTS)
def test_a_tap_that_raises_is_set_aside(name, loop, said, monkeypatch):
    """One line names the part and the way out, the other parts are still read, training is unharmed."""
    calls = []

    def broken(*args, **kwargs):
        calls.append(1)
        raise ZeroDivisionError("no such thing")

    part, memory = name.split(maxsplit=1)[0], MemoryWriter()
    exporter = Exporter(loop.model, backends=[memory]).watch(loop.criterion)
    monkeypatch.setattr(PARTS[name], broken)
    loop.train(5)
    exporter.close()
    assert loop.trained_as_unwatched(5)
    assert len(calls) == 1
    lines = said(f"reading {part} failed and is disabled")
    assert len(said()) == len(lines) == 1
    assert "strict=True" in lines[0]
    assert "ZeroDivisionError: no such thing" in lines[0]
    assert exporter.summary()["set_aside"] == [part]
    assert [r.step for r in memory.records] == [1, 2, 3, 4, 5]
    if part in STILL:
        assert all(r.value(STILL[part]) is not None for r in memory.records)
    (step,) = exporter.summary()["lost"]["disabled"].values()
    assert f"disabled after an error: {part} (step {step})" in exporter.report().splitlines()[1]


@pytest.mark.parametrize("name", PARTS)
def test_strict_raises(name, loop, monkeypatch):
    """With strict=True the same error comes out where it happened."""

    def broken(*args, **kwargs):
        raise ZeroDivisionError("no such thing")

    exporter = Exporter(loop.model, backends=[MemoryWriter()], strict=True).watch(loop.criterion)
    with monkeypatch.context() as patch:
        patch.setattr(PARTS[name], broken)
        with pytest.raises(ZeroDivisionError, match="no such thing"):
            loop.train(2)
    exporter.close()


def test_a_rule_that_raises_is_set_aside(loop, said, monkeypatch):
    """The other rules, the records and training go on; one line."""
    from gradflow_export.rules import numerical

    def broken(self, record, history):
        raise ZeroDivisionError("rule")

    monkeypatch.setattr(numerical.Numerical, "check", broken)
    memory = MemoryWriter()
    exporter = Exporter(loop.model, backends=[memory]).watch(loop.criterion)
    loop.train(5)
    exporter.close()
    assert loop.trained_as_unwatched(5)
    assert [r.step for r in memory.records] == [1, 2, 3, 4, 5]
    assert len(said()) == 1
    assert "rule" in said()[0]
    assert "disabled after an error: rule numerical (step 1)" in exporter.summary()["verdict"]


def test_what_an_error_disabled_is_a_loss_wherever_a_run_is_judged(loop, monkeypatch, tmp_path):
    """The exporter, the command line and the panel say the same, with the step."""
    exporter = Exporter(loop.model, backends=["tensorboard"], logdir=tmp_path / "a", verbose=0).watch(loop.criterion)
    loop.train(12)
    monkeypatch.setattr(PARTS["loss"], None)
    loop.train(2)
    exporter.close()
    source = standalone.open_source(tmp_path)
    panel = run_meta(source, "a")["said"]
    verdicts = {
        exporter.summary()["verdict"],
        summarise(read_run(tmp_path / "a")).verdict,
        ": ".join(panel[name] for name in ("headline", "detail")),
    }
    (verdict,) = verdicts
    assert "no open problem in the 14 records; disabled after an error: loss (step 13)" in verdict
    assert panel["tone"] == "warn"


@pytest.mark.parametrize("answer", ["raises", "words", "infinite", "none", "ok"])
def test_analyzers(answer, loop, said):
    """An analyzer's numbers become metrics; one that raises or answers nonsense is set aside with one line."""
    calls = []

    def analyze(record):
        calls.append(record.step)
        if answer == "raises":
            raise KeyError("x")
        return {"words": {"a": "b"}, "infinite": {"a": float("inf")}, "none": None, "ok": {"a": record.step}}[answer]

    memory = MemoryWriter()
    exporter = Exporter(loop.model, backends=[memory])
    exporter.register_analyzer("mine", analyze)
    exporter.watch(loop.criterion)
    loop.train(4)
    exporter.close()
    failed = answer in {"raises", "words"}
    assert calls == ([1] if failed else [1, 2, 3, 4])
    assert len(said("analyzer 'mine' failed at step 1 and is disabled")) == len(said()) == failed
    wanted = {"ok": [1.0, 2.0, 3.0, 4.0], "infinite": [float("inf")] * 4}.get(answer, [None] * 4)
    assert [r.value("custom.mine.a") for r in memory.records] == wanted


def test_the_model_deleted_while_steps_wait(loop, tmp_path):
    """Steps waiting when the model is collected are still judged and written, and the thread ends."""
    memory = MemoryWriter()
    exporter = Exporter(loop.model, backends=[memory, "jsonl"], logdir=tmp_path).watch(loop.criterion)
    loop.train(20)
    gone = weakref.ref(loop.model)
    del loop.model, loop.optimizer
    gc.collect()
    assert gone() is None
    assert exporter._closed
    assert not exporter._worker._thread.is_alive()
    assert len(memory.records) == 20
    assert list(read_run(tmp_path).records) == memory.records
    assert exporter.summary()["steps"]["last"] == 20
    exporter.observe(loss=1.0)
    exporter.step()


def test_a_model_collected_by_the_worker_thread(loop):
    """A model whose last reference dies on the worker's own thread is closed there without waiting for itself."""
    memory = MemoryWriter()
    holder = [loop.model]
    exporter = Exporter(loop.model, backends=[memory])

    def analyze(record):
        if record.step == 3:
            holder.clear()
            gc.collect()

    exporter.register_analyzer("drops", analyze)
    exporter.watch(loop.criterion)
    loop.train(3)
    exporter._loop.finish()
    del loop.model, loop.optimizer
    exporter._worker._thread.join(100)
    gc.collect()
    assert not exporter._worker._thread.is_alive()
    assert [r.step for r in memory.records] == [1, 2, 3]
    listen()()  # the hooks that the worker had to leave, for this thread might have been among them


def test_an_error_of_the_user_passes_through_the_hooks(loop):
    """An exception in the user's forward arrives unchanged, and the next step is recorded."""
    memory = MemoryWriter()
    with Exporter(loop.model, backends=[memory], strict=True).watch(loop.criterion):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            loop.model(torch.ones(1, 3))
        loop.train(2)
    assert [r.step for r in memory.records] == [1, 2]
