"""Bad input to the Exporter: one clear error at once, that says what was expected, what came and what to do."""

import io
import logging
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from gradflow_export import Exporter, GradientGainMonitor, Issue, IssueType, MemoryWriter, Severity
from gradflow_export.engine.build import default_logdir
from gradflow_export.errors import ArgumentError, ArgumentTypeError, GradflowError, StorageError
from gradflow_export.writers import WandbWriter


def net():
    """Return a small model."""
    return nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))


MODEL = net()


class Bare(nn.Module):
    """Layers kept in a plain list, which registers nothing."""

    def __init__(self):
        super().__init__()
        self.layers = [nn.Linear(2, 2)]


BAD = {
    "a class": (lambda: Exporter(nn.Linear), ArgumentTypeError, ("torch.nn.Module", "the class Linear", "Linear(...)")),
    "a list of modules": (
        lambda: Exporter([net(), net()]),
        ArgumentTypeError,
        ("a list of modules", "nn.ModuleList of them"),
    ),
    "an argument of watch": (
        lambda: Exporter(net(), optimizer=torch.optim.SGD(MODEL.parameters())),
        ArgumentError,
        ("'optimizer' is an argument of watch()", "Exporter(model).watch(optimizer=...)"),
    ),
    "blocks that are one name": (
        lambda: Exporter(MODEL, backends="memory").watch(blocks="0"),
        ArgumentTypeError,
        ("blocks must be a list", "got '0'", "blocks=['encoder.0'"),
    ),
    "blocks that are one layer": (
        lambda: Exporter(MODEL, backends="memory").watch(blocks=nn.Linear(2, 2)),
        ArgumentTypeError,
        ("blocks must be a list", "got Linear", "blocks=['encoder.0'"),
    ),
    "none": (lambda: Exporter(None), ArgumentTypeError, ("torch.nn.Module", "NoneType", "pass the module itself")),
    "an optimizer": (
        lambda: Exporter(torch.optim.SGD(net().parameters())),
        ArgumentTypeError,
        ("torch.nn.Module", "SGD", "pass the module itself"),
    ),
    "no parameters": (lambda: Exporter(nn.ReLU()), ArgumentError, ("ReLU", "no parameters", "nn.ModuleList")),
    "layers in a list": (lambda: Exporter(Bare()), ArgumentError, ("Bare", "no parameters", "nn.ModuleList")),
    "an optimizer of other tensors": (
        lambda: Exporter(MODEL, backends="memory").watch(optimizer=torch.optim.SGD(net().parameters())),
        ArgumentError,
        ("optimizer must hold a parameter of the model", "got SGD of other tensors", "model.parameters()"),
    ),
    "a name of an analyzer": (
        lambda: Exporter(MODEL, backends="memory").register_analyzer(3, len),
        ArgumentTypeError,
        ("name must be a short word, got 3", "'accuracy'"),
    ),
    "unknown backend": (
        lambda: Exporter(net(), backends="tensorbord"),
        ArgumentError,
        ("unknown backend", "'tensorbord'", "did you mean 'tensorboard'?"),
    ),
    "unknown backend in a list": (
        lambda: Exporter(net(), backends=["memory", "xyz"]),
        ArgumentError,
        ("unknown backend", "'xyz'", "known are: console, jsonl, memory, tensorboard"),
    ),
    "backend of a wrong type": (
        lambda: Exporter(net(), backends=[3]),
        ArgumentTypeError,
        ("expects a name, a writer", "got 3", "pass 'tensorboard'"),
    ),
    "backend class": (
        lambda: Exporter(net(), backends=[MemoryWriter]),
        ArgumentTypeError,
        ("expects a name, a writer", "MemoryWriter", "an instance"),
    ),
    "unknown keyword": (
        lambda: Exporter(net(), gradient_explosion_treshold=3.0, backends="memory"),
        ArgumentError,
        ("unknown setting", "'gradient_explosion_treshold'", "did you mean 'gradient_explosion_threshold'?"),
    ),
    "keyword of the exporter, misspelt": (
        lambda: Exporter(net(), backend="memory"),
        ArgumentError,
        ("unknown setting", "'backend'", "did you mean 'backends'?"),
    ),
    "keyword of watch(), misspelt": (
        lambda: Exporter(net(), backends="memory").watch(block=1),
        ArgumentTypeError,
        ("watch() expects blocks, copies, criterion,", "got 'block'", "did you mean 'blocks'?"),
    ),
    "keyword of the exporter, passed to watch()": (
        lambda: Exporter(net(), backends="memory").watch(budget=0.01),
        ArgumentTypeError,
        ("'budget' is an argument of Exporter", "Exporter(model, budget=...)"),
    ),
    "folder of a wrong type": (
        lambda: Exporter(net(), logdir=3, backends="memory"),
        ArgumentTypeError,
        ("logdir must be a path", "got 3", "logdir='runs/first'"),
    ),
    "start step of a wrong type": (
        lambda: Exporter(net(), start_step="7", backends="memory"),
        ArgumentTypeError,
        ("start_step must be a whole number", "got '7'", "steps done before"),
    ),
    "unknown config key": (
        lambda: Exporter(net(), config={"diagnostics": {"evry": 3}}, backends="memory"),
        ArgumentError,
        ("unknown setting", "'evry'", "did you mean 'every'?"),
    ),
    "config of a wrong type": (
        lambda: Exporter(net(), config=[1], backends="memory"),
        ArgumentTypeError,
        ("config must be a dictionary or the path", "list"),
    ),
    "no config file": (
        lambda: Exporter(net(), config="/nowhere/x.yaml", backends="memory"),
        StorageError,
        ("config file", "/nowhere/x.yaml", "No such file"),
    ),
    "every zero": (
        lambda: Exporter(net(), every=0, backends="memory"),
        ArgumentError,
        ("at least 1 step", "got 0", "exporter.pause()"),
    ),
    "every a word": (
        lambda: Exporter(net(), every="often", backends="memory"),
        ArgumentTypeError,
        ("whole number of steps", "'often'", "every=10"),
    ),
    "every true": (
        lambda: Exporter(net(), every=True, backends="memory"),
        ArgumentTypeError,
        ("whole number of steps", "True", "every=10"),
    ),
    "unknown instrument": (
        lambda: Exporter(net(), intervals={"block": 3}, backends="memory"),
        ArgumentError,
        ("intervals names 'block'", "no instrument", "did you mean 'blocks'?"),
    ),
    "interval of zero": (
        lambda: Exporter(net(), intervals={"blocks": 0}, backends="memory"),
        ArgumentError,
        ("intervals['blocks']", "at least 1 step", "got 0"),
    ),
    "interval of a wrong type": (
        lambda: Exporter(net(), intervals={"blocks": 2.5}, backends="memory"),
        ArgumentTypeError,
        ("intervals['blocks']", "whole number", "2.5"),
    ),
    "intervals a number": (
        lambda: Exporter(net(), intervals=5, backends="memory"),
        ArgumentTypeError,
        ("intervals must map instruments to steps", "got 5", "{'blocks': 50}"),
    ),
    "unknown profile": (
        lambda: Exporter(net(), profile="strict", backends="memory"),
        ArgumentError,
        ("unknown profile", "'strict'", "known are: robust, seed"),
    ),
    "negative threshold": (
        lambda: Exporter(net(), gradient_explosion_threshold=-1.0, backends="memory"),
        ArgumentError,
        ("at least 0", "got -1.0", "Pass a float"),
    ),
    "threshold NaN": (
        lambda: Exporter(net(), gradient_vanishing_threshold=float("nan"), backends="memory"),
        ArgumentError,
        ("at least 0", "got nan", "Pass a float"),
    ),
    "threshold a word": (
        lambda: Exporter(net(), loss_spike_threshold="high", backends="memory"),
        ArgumentError,
        ("must be a number", "'high'", "Pass a float"),
    ),
    "enabled a word": (
        lambda: Exporter(net(), enabled="no", backends="memory"),
        ArgumentTypeError,
        ("enabled must be true or false", "'no'"),
    ),
    "strict a word": (
        lambda: Exporter(net(), strict="no", backends="memory"),
        ArgumentTypeError,
        ("strict must be true or false", "'no'", "leave it out"),
    ),
    "strict_single_backward a number": (
        lambda: GradientGainMonitor([net()], strict_single_backward=1),
        ArgumentTypeError,
        ("strict_single_backward must be true or false", "got 1", "leave it out"),
    ),
    "alert_healed a word": (
        lambda: WandbWriter(alert_healed="yes"),
        ArgumentTypeError,
        ("alert_healed must be true or false", "'yes'", "leave it out"),
    ),
    "criterion the model itself": (
        lambda: Exporter(MODEL, backends="memory").watch(nn.DataParallel(MODEL)),
        ArgumentError,
        ("criterion must be a loss module", "got the watched", "call watch() without it"),
    ),
    "criterion a function": (
        lambda: Exporter(MODEL, backends="memory").watch(nn.functional.mse_loss),
        ArgumentTypeError,
        ("criterion must be a loss module", "function", "exporter.observe(loss=loss)"),
    ),
    "criterion a class": (
        lambda: Exporter(MODEL, backends="memory").watch(nn.MSELoss),
        ArgumentTypeError,
        ("criterion must be a loss module", "type", "exporter.observe(loss=loss)"),
    ),
    "optimizer of a wrong type": (
        lambda: Exporter(MODEL, backends="memory").watch(optimizer="sgd"),
        ArgumentTypeError,
        ("optimizer must be a torch.optim.Optimizer", "str", "exporter.step()"),
    ),
    "optimizer in a list of a wrong type": (
        lambda: Exporter(MODEL, backends="memory").watch(optimizer=[torch.optim.SGD(net().parameters()), 3]),
        ArgumentTypeError,
        ("optimizer must be a torch.optim.Optimizer", "int", "exporter.step()"),
    ),
    "unknown block": (
        lambda: Exporter(MODEL, backends="memory").watch(blocks=["1", "head"]),
        ArgumentError,
        ("blocks names 'head'", "no module of the model"),
    ),
    "foreign block": (
        lambda: Exporter(MODEL, backends="memory").watch(blocks=[nn.Linear(2, 2)]),
        ArgumentError,
        ("Linear", "not part of the watched model", "pass modules of the model itself"),
    ),
    "block of a wrong type": (
        lambda: Exporter(MODEL, backends="memory").watch(blocks=[0]),
        ArgumentTypeError,
        ("module names or modules", "int", "for example"),
    ),
    "a model nobody keeps": (
        lambda: Exporter(net(), backends="memory").watch(),
        ArgumentError,
        ("is gone", "keep a reference"),
    ),
    "no blocks": (
        lambda: Exporter(MODEL, backends="memory").watch(blocks=[]),
        ArgumentError,
        ("blocks is empty", "name at least one module"),
    ),
    "a block twice": (
        lambda: Exporter(MODEL, backends="memory").watch(blocks=["0", "0"]),
        ArgumentError,
        ("same module twice", "'0'", "separate nn.Module"),
    ),
    "analyzer": (
        lambda: Exporter(net(), backends="memory").register_analyzer("mine", 3),
        ArgumentTypeError,
        ("analyzer must be callable", "int"),
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_clear_error(name, caplog):
    """Each mistake raises one error of ours, at once, that says what was expected, what came and what to do."""
    call, kind, words = BAD[name]
    with pytest.raises(kind) as caught:
        call()
    assert isinstance(caught.value, GradflowError)
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert "\n" not in message
    assert caplog.records == []


def test_a_logdir_below_a_file_cannot_be_written(tmp_path):
    """An unwritable logdir is told when the exporter is constructed, whoever runs it, and is an OSError too."""
    (tmp_path / "file").write_text("x")
    for backend in ("tensorboard", "jsonl"):
        with pytest.raises(StorageError, match=r"expects a directory it can write to, got .*; pass another logdir"):
            Exporter(net(), backends=backend, logdir=tmp_path / "file" / "run")
    with pytest.raises(OSError, match="Not a directory"):
        Exporter(net(), logdir=tmp_path / "file" / "run")


def test_no_folder_is_chosen_twice(tmp_path, monkeypatch):
    """Not even by exporters of several threads, of which none has written yet."""
    monkeypatch.chdir(tmp_path)
    with ThreadPoolExecutor(8) as threads:
        chosen = list(threads.map(lambda _: default_logdir(net()), range(32)))
    assert len(set(chosen)) == 32
    assert list(tmp_path.iterdir()) == []


def test_errors_leave_nothing_behind(tmp_path):
    """After a failed watch() the same exporter can be told again, rightly."""
    model = net()
    with Exporter(model, backends=[MemoryWriter()]) as exporter:
        with pytest.raises(ArgumentTypeError):
            exporter.watch(nn.functional.mse_loss)
        with pytest.raises(ArgumentError):
            exporter.watch(blocks=["none"])
        assert exporter.watch(nn.MSELoss(), blocks=["0", "2"]) is exporter
        nn.functional.mse_loss(model(torch.ones(1, 2)), torch.zeros(1, 2)).backward()


def test_save_names_what_it_wants(tmp_path):
    """save() wants a path with a known ending that can be written."""
    exporter = Exporter(net(), backends=[MemoryWriter()])
    with pytest.raises(ArgumentError, match=r"ending in \.json, \.csv or \.parquet, got '.*report\.txt'"):
        exporter.save(tmp_path / "report.txt")
    with pytest.raises(StorageError, match=r"cannot write .*x\.json"):
        exporter.save(tmp_path / "none" / "x.json")
    exporter.save(tmp_path / "x.json")
    assert '"verdict"' in (tmp_path / "x.json").read_text()


def test_what_cannot_be_used_after_watch_is_told_once_and_left_out(caplog):
    """An unknown keyword and values of a wrong type never raise into a loop; each is named once in the log."""
    caplog.set_level(logging.WARNING, logger="gradflow_export")
    model = net()
    with Exporter(model, backends=[MemoryWriter()], strict=True).watch() as exporter:
        for _ in range(3):
            exporter.observe(los=1.0, loss="low", logits=[1, 2], targets=None)
        exporter.add_issue("it is broken")
        exporter.add_issue(Issue("NONSENSE", Severity.HIGH, "0", 1, 1.0, 0.0, "", ""))
    assert [record.getMessage() for record in caplog.records] == [
        "gradflow: observe() does not know 'los'; did you mean 'loss'?",
        "gradflow: observe() expects a tensor or a number for 'loss', got str; it is left out.",
        "gradflow: observe() expects a tensor for 'logits', got list; it is left out.",
        "gradflow: add_issue() expects an Issue, got str, which is left out; pass Issue(...).",
        (
            "gradflow: add_issue() expects an IssueType and a Severity, got 'NONSENSE' and <Severity.HIGH: 3>; the issue "
            "is left out; pass IssueType.DEAD and Severity.HIGH."
        ),
    ]


def trained(exporter, model, steps=3, **observed):
    """Train a few steps, in which something is passed to observe()."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.ones(4, 2)).square().mean()
        exporter.observe(**observed)
        loss.backward()
        optimizer.step()


def test_one_component_that_is_no_number_costs_nothing_else(caplog):
    """What observe() is passed at later steps is recorded."""
    model, memory = net(), MemoryWriter()
    with Exporter(model, backends=[memory], verbose=0).watch() as exporter:
        trained(exporter, model, components={"a": "b", "c": 1.0})
        trained(exporter, model, components={"a": 2.0}, logits=torch.randn(4, 3), targets=torch.tensor([0, 1, 2, 0]))
    assert memory.records[0].get("loss.component").as_dict() == {"a": None, "c": 1.0}
    assert memory.records[-1].get("loss.component").as_dict() == {"a": 2.0, "c": None}
    assert memory.records[-1].value("alignment.accuracy") is not None
    assert exporter.summary()["set_aside"] == []
    assert caplog.messages == [
        "gradflow: observe(components=...) expects tensors or numbers, got str for 'a', and leaves out what cannot be used."
    ]


@pytest.mark.parametrize(("shape", "of", "fit"), [
    ((4,), torch.long, True), ((4, 1), torch.long, True), ((4, 3), torch.float, True), ((4, 3), torch.long, True),
    ((3,), torch.long, False), ((4,), torch.float, False), ((4, 2), torch.float, False), ((), torch.long, False),
])  # fmt: skip
def test_targets_that_cannot_belong_to_the_logits_are_named(shape, of, fit, caplog):
    """The message has both shapes."""
    model = net()
    with Exporter(model, backends=[], verbose=0).watch() as exporter:
        trained(exporter, model, logits=torch.randn(4, 3), targets=torch.zeros(shape, dtype=of))
    got = f"got {list(shape)} of {str(of)[6:]} for [4, 3]; they are left out."
    assert [message.partition("logits, ")[2] for message in caplog.messages] == ([] if fit else [got])


def test_an_unknown_name_lists_all_that_observe_knows(caplog):
    """Those that only some instruments take are among them."""
    model = net()
    with Exporter(model, backends=[], verbose=0).watch() as exporter:
        trained(exporter, model, nonsense=1.0)
    known = "components, intended, logits, loss, policy, targets, validation_loss"
    assert caplog.messages == [f"gradflow: observe() does not know 'nonsense'; known are: {known}"]


@pytest.mark.parametrize("resumed", [False, True])
def test_what_is_paused_before_watch_begins_paused(resumed, caplog):
    """The last line says why nothing was recorded, and what to do."""
    caplog.set_level(logging.INFO, logger="gradflow_export")
    model = net()
    exporter = Exporter(model, backends=["memory"], verbose=1)
    exporter.pause()
    if resumed:
        exporter.resume()
    with exporter.watch():
        trained(exporter, model)
    assert exporter.summary()["steps"]["count"] == 3 * resumed
    why = "gradflow: no step was recorded: recording was paused for all 3 steps; call exporter.resume()"
    assert caplog.messages[-1].startswith(why) is not resumed
    assert ("no loss was recorded" in exporter.report()) is False


def test_what_comes_after_close_is_named_once(caplog):
    """One line for all of it."""
    model = net()
    with Exporter(model, backends=[], verbose=0).watch() as exporter:
        trained(exporter, model)
    for _ in range(2):
        exporter.mark("late")
        exporter.observe(loss=1.0)
        exporter.add_issue(Issue(IssueType.DEAD, Severity.HIGH, "0", 1, 1.0, 0.0, "", ""))
    assert caplog.messages == [
        "gradflow: this exporter is closed: mark() and what else is passed to it is not recorded."
    ]


def test_an_analyzer_that_fails_is_one_line_with_its_place(caplog):
    """The file and the line where it failed."""
    model = net()
    exporter = Exporter(model, backends=[], verbose=0)
    exporter.register_analyzer("bad", lambda record: {"x": 1 / 0})
    with exporter.watch():
        trained(exporter, model)
    (line,) = caplog.messages
    assert line.startswith(
        "gradflow: analyzer 'bad' failed at step 1 and is disabled: ZeroDivisionError: division by zero ("
    )
    assert f"{__file__}, line " in line
    assert not caplog.records[0].exc_info


def test_a_report_is_printed_where_its_letters_cannot_be(monkeypatch, tmp_path):
    """They are escaped."""
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    Exporter(net(), logdir=tmp_path / "größer", verbose=0).print_report()
    out.flush()
    assert b"gr\\xf6\\xdfer" in out.buffer.getvalue()


@pytest.mark.parametrize(("error", "said"), [
    (ValueError("bad batch"), "ended by an exception at step 4 (ValueError: bad batch)"),
    (KeyboardInterrupt(), "; interrupted at step 4"), (SystemExit(3), "ended by an exception at step 4 (SystemExit: 3)"),
    (SystemExit(0), ""), (SystemExit(), ""), (StopIteration(), ""),
])  # fmt: skip
def test_a_loop_that_an_exception_ends_is_healthy_only_as_far_as_recorded(error, said, caplog):
    """The verdict has its step; a program that ends with success is over."""
    caplog.set_level(logging.INFO, logger="gradflow_export")
    model = net()
    exporter = Exporter(model, backends=["memory"], verbose=1).watch()

    def loop():
        with exporter:
            trained(exporter, model)
            raise error

    with pytest.raises(type(error)):
        loop()
    for verdict in (exporter.summary()["verdict"], caplog.messages[-1]):
        assert said in verdict
        assert ("step 4" in verdict) is bool(said)
