"""After close() nothing is left: no hook, thread, exit callback or patched function."""

import gc
import inspect
import threading
import weakref

import psutil
import pytest
import torch
from torch import nn
from torch.nn.modules import module as global_modules
from torch.optim import optimizer as global_optimizers

from gradflow_export import Exporter, MemoryWriter


def net():
    """Return a small model."""
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.Sigmoid(), nn.Linear(8, 3))


def train(model, criterion, optimizer, steps=2):
    """Train some steps and return the last loss."""
    for _ in range(steps):
        optimizer.zero_grad()
        loss = criterion(model(torch.ones(3, 4)), torch.tensor([0, 1, 2]))
        loss.backward()
        optimizer.step()
    return loss


def ours():
    """Return what of ours lives in the process: threads and callbacks at exit."""
    threads = [t for t in threading.enumerate() if t.name.startswith("gradflow")]
    at_exit = [
        i for i in weakref.finalize._registry.values() if "gradflow" in (getattr(i.func, "__module__", None) or "")
    ]
    return threads, at_exit


def torch_state():
    """Return every function and class attribute of the torch modules and classes that a watcher might patch."""
    owners = [
        torch, torch.nn, torch.autograd, torch.Tensor, nn.Module, nn.Linear, nn.ReLU, nn.CrossEntropyLoss,
        torch.optim.Optimizer, torch.optim.SGD, torch.nn.functional, global_modules, torch.utils.data.DataLoader,
        torch.amp.GradScaler, torch.autograd.graph, global_optimizers,
    ]  # fmt: skip
    return {(str(o), name): id(inspect.getattr_static(o, name)) for o in owners for name in vars(o) if name != "_"}


def hooks(*modules):
    """Return how many hooks of any kind there are: global, on modules, on parameters."""
    count = sum(len(v) for k, v in vars(global_modules).items() if k.startswith("_global_") and isinstance(v, dict))
    count += len(global_optimizers._global_optimizer_pre_hooks) + len(global_optimizers._global_optimizer_post_hooks)
    for module in modules:
        for m in module.modules():
            count += sum(len(v) for k, v in vars(m).items() if "hooks" in k and hasattr(v, "__len__"))
        count += sum(len(p._backward_hooks or ()) for p in module.parameters())
    return count


def test_nothing_is_left_after_close(tmp_path):
    """Hooks, threads, exit callbacks and torch's own functions are what they were before."""
    model, criterion = net(), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, criterion, optimizer)
    before = torch_state(), hooks(model, criterion), ours(), threading.active_count()
    exporter = Exporter(model, backends=["tensorboard", "jsonl"], logdir=tmp_path).watch(criterion)
    train(model, criterion, optimizer, 3)
    assert hooks(model, criterion) > before[1]
    assert [len(x) for x in ours()] == [len(x) + 1 for x in before[2]]
    meanwhile = {key for key, now in torch_state().items() if before[0][key] != now}
    assert meanwhile == {(str(torch.autograd), "backward"), (str(global_modules), "_has_any_global_hook")}
    exporter.close()
    loss = criterion(model(torch.ones(3, 4)), torch.tensor([0, 1, 2]))
    assert not loss._backward_hooks
    assert not model(torch.ones(3, 4))._backward_hooks
    assert (torch_state(), hooks(model, criterion), ours(), threading.active_count()) == before


def test_closing_twice_is_closing_once():
    """The second close does nothing, and the face still answers after it."""
    model = net()
    exporter = Exporter(model, backends=[MemoryWriter()]).watch()
    train(model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1))
    exporter.close()
    exporter.close()
    exporter.step()
    exporter.observe(loss=1.0)
    exporter.pause()
    exporter.resume()
    assert exporter.summary()["steps"]["count"] == 2
    assert "healthy" in exporter.report()
    with pytest.raises(ValueError, match="is closed; construct a new one"):
        exporter.watch()


def test_an_unwatched_exporter_closes():
    """An exporter that never watched starts no thread and closes without a word."""
    before = ours()
    with Exporter(net(), backends=[MemoryWriter()]) as exporter:
        assert ours()[0] == before[0]
        assert exporter.summary()["steps"]["count"] == 0
    exporter.close()
    assert ours() == before


def test_an_exception_in_the_with_block_goes_through_and_closes():
    """The user's exception arrives unchanged, and everything of ours is gone."""
    model, before = net(), ours()
    writer = MemoryWriter()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ZeroDivisionError), Exporter(model, backends=[writer]) as exporter:  # noqa: PT012
        exporter.watch()
        train(model, nn.CrossEntropyLoss(), optimizer)
        raise ZeroDivisionError
    assert ours() == before
    assert hooks(model) == 0
    assert writer.closed
    assert [r.step for r in writer.records] == [1, 2]


def test_nobody_has_to_keep_the_exporter():
    """Its result thrown away, the exporter goes on, and closes when the model is gone."""
    gc.collect()  # what earlier tests left
    before, writer, model = ours(), MemoryWriter(), net()
    Exporter(model, backends=[writer]).watch()
    gc.collect()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, nn.CrossEntropyLoss(), optimizer, 4)
    gone = weakref.ref(model)
    del model, optimizer
    gc.collect()
    assert gone() is None
    assert ours() == before
    assert writer.closed
    assert [r.step for r in writer.records] == [1, 2, 3, 4]
    assert hooks() == 0


def test_watching_does_not_keep_the_model_alive():
    """The model is collected although the user still holds the exporter, which still reports."""
    model = net()
    exporter = Exporter(model, backends=[MemoryWriter()]).watch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, nn.CrossEntropyLoss(), optimizer)
    gone = weakref.ref(model)
    del model, optimizer
    gc.collect()
    assert gone() is None
    assert exporter.summary()["steps"]["last"] == 2


def test_watching_again_closes_the_earlier_exporter(said):
    """A second exporter on the same model closes the first, with exactly one line, and hooks do not pile up."""
    model, criterion = net(), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first = Exporter(model, backends=[MemoryWriter()]).watch(criterion)
    train(model, criterion, optimizer)
    one = hooks(model, criterion)
    for number in range(3):
        second = Exporter(model, backends=[MemoryWriter()]).watch(criterion)
        train(model, criterion, optimizer)
        assert hooks(model, criterion) == one
        assert len(said()) == len(said("was being watched already")) == number + 1
    assert first._closed
    assert first.summary()["steps"]["last"] == 2
    assert second.summary()["steps"]["last"] == 2
    second.close()
    assert hooks(model, criterion) == 0


def test_watching_twice_with_one_exporter_is_said(said):
    """A second watch() of the same exporter is ignored with one line."""
    model = net()
    with Exporter(model, backends=[MemoryWriter()]) as exporter:
        assert exporter.watch() is exporter
        count = hooks(model)
        assert exporter.watch() is exporter
        assert hooks(model) == count
    assert len(said("second watch() is ignored")) == 1


def test_a_notebook_cell_run_again(said):
    """A cell that builds model, optimizer and exporter anew leaves the earlier ones to the collector, silently."""
    before = ours()
    for _ in range(3):
        model, criterion = net(), nn.CrossEntropyLoss()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        exporter = Exporter(model, backends=[MemoryWriter()]).watch(criterion)
        train(model, criterion, optimizer)
        gc.collect()
        assert len(ours()[0]) == len(before[0]) + 1 + (1 if len(ours()[0]) > len(before[0]) + 1 else 0)
        assert exporter.summary()["steps"]["last"] == 2
    assert said() == []
    del model, optimizer, exporter
    gc.collect()
    assert ours() == before


def test_disabled_watches_nothing():
    """``enabled=False`` attaches no hook, starts no thread and writes nothing, and the face answers."""
    model, before = net(), ours()
    with Exporter(model, enabled=False, logdir="/proc/none").watch() as exporter:
        assert hooks(model) == 0
        assert ours() == before
        exporter.step()
        exporter.observe(loss=torch.ones(()))
        assert exporter.summary()["steps"]["count"] == 0


def test_a_tap_that_cannot_attach_leaves_nothing(monkeypatch):
    """When watch() itself fails half way, what was attached is taken away again."""
    model, criterion, before = net(), nn.CrossEntropyLoss(), ours()
    exporter = Exporter(model, backends=[MemoryWriter()])

    def broken(*_hooks):
        raise RuntimeError("no room")

    monkeypatch.setattr("gradflow_export.hooks.optimizer_steps.listen", broken)
    with pytest.raises(RuntimeError, match="no room"):
        exporter.watch(criterion)
    exporter.close()
    assert hooks(model, criterion) == 0
    assert ours() == before


def test_no_file_stays_open(tmp_path):
    """What was opened to watch is closed by close(), also while the exporter lives on."""

    def opened():
        """Return path and descriptor of each open file; where others write, the position moves by itself."""
        return {(file.path, file.fd) for file in psutil.Process().open_files()}

    before = opened()
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    exporter = Exporter(model, backends=["tensorboard", "jsonl"], logdir=tmp_path).watch()
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(3, 4)).square().mean().backward()
        optimizer.step()
    exporter.close()
    assert opened() <= before
