"""What is tried while a run goes on: on a copy, with nothing of the run's, and the run keeps its bits."""

from __future__ import annotations

import copy
import logging
import os
import sys
import threading
import time

import psutil
import pytest
import torch
from torch import nn
from torch.nn import functional

from gradflow_export import Exporter
from gradflow_export.errors import ArgumentError
from gradflow_export.experiments.in_run import trials
from gradflow_export.experiments.in_run.tape import Tape, seen
from gradflow_export.experiments.mending.untried import UNTRIED
from gradflow_export.hooks import torch_private
from gradflow_export.records.issues import Issue, IssueType, Severity
from gradflow_export.records.step_record import IssueType as Kind


class Net(nn.Module):
    """Gives a mapping, as models of libraries do."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3))

    def forward(self, x, labels=None):
        scores = self.layers(x)
        if labels is None:
            return {"scores": scores}
        return {"loss": functional.cross_entropy(scores, labels), "scores": scores}


LOSSES = {
    "functional": lambda model, x, y: functional.cross_entropy(model(x)["scores"], y) * 2,
    "module": lambda model, x, y: nn.CrossEntropyLoss()(model(x=x)["scores"], y),
    "by hand": lambda model, x, y: -model(x)["scores"].log_softmax(1)[torch.arange(len(y)), y].mean(),
    "of the model": lambda model, x, y: model(x, labels=y)["loss"],
    "two calls": lambda model, x, y: (model(x)["scores"] - model(x.flip(0))["scores"]).square().mean() + 1,
    "in place": lambda model, x, y: model(x)["scores"].mul(1.0).add_(1).square().sum(),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_made_again_from_what_was_taken_down(name):
    """Whatever stands between the model and backward, the same weights give the same loss and gradients again."""
    torch.manual_seed(0)
    model, tape = Net().eval(), Tape()
    model.register_forward_pre_hook(lambda _m, a, k: tape.saw(a, k), with_kwargs=True)

    def called(module, args, kwargs, output):
        tape.add(None, args, kwargs, output)

    handle = model.register_forward_hook(called, with_kwargs=True)
    x, y = torch.randn(6, 8), torch.randint(3, (6,))
    # The model's own calls are taken down as one, as the recorder of a run does by leaving the mode.
    plain = model.layers.forward
    model.layers.forward = lambda given: _outside(tape, plain, given)
    with tape:
        loss = LOSSES[name](model, x, y)
        loss.backward()
    handle.remove()
    model.layers.forward = plain
    gradients = [weight.grad.clone() for weight in model.parameters()]
    model.zero_grad()
    batch = tape.batch()
    again = batch.again(model)
    again.backward()
    assert torch.equal(loss, again)
    assert all(torch.equal(one, weight.grad) for one, weight in zip(gradients, model.parameters(), strict=True))
    assert batch.whole
    x.add_(1)
    assert not batch.whole


def _outside(tape, function, given):
    with torch._C.DisableTorchFunction():
        return function(given)


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """Closing waits for a trial as long as it takes: it is niced, and other work may have the cores."""
    monkeypatch.setattr(trials, "CLOSING", trials.SECONDS)


def train(on_issue, steps=60, *, decay=50.0, sees=lambda exporter: None, **options):
    torch.manual_seed(3)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=decay)
    x = torch.randn(256, 8)
    y = x[:, :3].argmax(1)
    options = {"backends": [], "verbose": 0, "budget": None, "synchronous": True, **options}
    with Exporter(model, on_issue=on_issue, **options).watch() as exporter:
        for step in range(steps):
            rows = torch.randint(256, (32,))
            optimizer.zero_grad()
            functional.cross_entropy(model(x[rows])["scores"], y[rows]).backward()
            optimizer.step()
            if step == steps // 2:
                sees(exporter)
    return model, exporter


def issue(kind=IssueType.LEARNING_RATE):
    return Issue(kind, Severity.HIGH, "layers.0", 3, 1.0, 0.0, "It is so.", "Do this.")


def ask(kind=IssueType.LEARNING_RATE, found=None):
    """Return what has an issue opened, as a rule would open it, and waits for its trial."""

    def sees(exporter):
        exporter._judge._issues[10**6] = issue(kind)
        exporter._on_issue(issue(kind), 3)
        if found is not None:
            found.append(exporter)

    return sees


def test_an_issue_tells_what_its_treatment_did_and_training_keeps_its_bits():
    """Weight decay that outweighs the gradient: without it the copy learns; the run itself is as without us."""
    alone, _ = train(None)
    model, exporter = train("try", sees=ask())
    for one, other in zip(alone.parameters(), model.parameters(), strict=True):
        assert torch.equal(one, other)
    (told,) = [each for each in exporter._judge._issues.values() if each.key == issue().key]
    assert told.message.startswith("It is so. Tried in 40 steps of a copy on the last 8 batches: ")
    assert told.message.count("Tried") == 1
    assert "weight decay 0: the loss reaches 0." in told.message
    assert "in 3 of 3 orders of the batches" in told.message
    assert (told.severity, told.advice, told.step) == (Severity.HIGH, "Do this.", 3)


def test_without_being_asked_nothing_is_forked_or_recorded(monkeypatch):
    """By default an issue starts no process, and no hook stands in the model for it."""
    monkeypatch.setattr(os, "fork", None)
    _, exporter = train(None, sees=ask())
    assert exporter._trials is None
    with pytest.raises(ArgumentError, match="on_issue expects"):
        Exporter(Net(), on_issue="mend")


def test_the_process_that_tries_has_no_file_of_the_run_and_is_the_only_one(monkeypatch, tmp_path):
    """It is niced and has three handles to nothing and one to tell; a second issue waits for it; then all are gone."""
    states = []
    kept = trials.Trials._wait

    def wait(self, asked, child, reader):
        process = psutil.Process(child)
        limit = time.monotonic() + 100
        while process.num_fds() > 6 and time.monotonic() < limit:
            time.sleep(0.01)
        states.append((process.nice(), process.open_files(), child))
        kept(self, asked, child, reader)

    def sees(exporter):
        ask()(exporter)
        exporter._on_issue(issue(IssueType.UNSTABLE), 3)

    monkeypatch.setattr(trials.Trials, "_wait", wait)
    with (tmp_path / "log").open("w") as file:
        file.write("not flushed")
        train("try", sees=sees)
    assert (tmp_path / "log").read_text() == "not flushed"
    nicest = 19  # this process may itself be niced
    assert [state[:2] for state in states] == [(min(psutil.Process().nice() + trials.NICE, nicest), [])]
    assert not psutil.pid_exists(states[0][2])
    assert not [each for each in threading.enumerate() if each.name == "gradflow-trials"]


@pytest.mark.parametrize("why", ["loop", "no batch", "cuda"])
def test_where_it_cannot_be_tried_the_doctor_command_is_printed_once(caplog, monkeypatch, why):
    """What mends it lies in the loop, no loss was recorded, or the process cannot be copied: the log says what to run."""
    monkeypatch.setattr(sys, "argv", ["train.py", "--epochs", "3"])
    caplog.set_level(logging.WARNING, logger="gradflow_export")
    if why == "cuda":
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    if why == "no batch":
        monkeypatch.setattr(Tape, "batch", lambda _self: None)
    kind = Kind.STALE_GRAD if why == "loop" else Kind.LEARNING_RATE

    def sees(exporter):
        ask(kind)(exporter)
        exporter._on_issue(issue(Kind.STALE_GRAD), 4)

    train("try", sees=sees)
    told = [each.getMessage() for each in caplog.records if "gradflow doctor" in each.getMessage()]
    assert len(told) == 1
    assert told[0].endswith("run: gradflow doctor --try train.py --epochs 3")


def test_what_no_trial_can_confirm_says_so_in_the_issue(caplog):
    """The doctor could not try it either, so the log names no command."""
    caplog.set_level(logging.WARNING, logger="gradflow_export")
    _, exporter = train("try", decay=0.0, sees=ask(Kind.MEMORY_LEAK))
    (leak,) = [each for each in exporter.issues if each.issue_type is Kind.MEMORY_LEAK]
    assert leak.message == f"It is so. Not tried: {UNTRIED[Kind.MEMORY_LEAK]}."
    assert not [each for each in caplog.records if "gradflow doctor" in each.getMessage()]


def test_the_model_that_is_recorded_can_be_copied_and_its_hooks_go(tmp_path):
    """A copy and a file of the watched model hold nothing of it; after closing no mode of torch is active."""
    saved = []

    def sees(exporter):
        model = exporter._model()
        saved.append(copy.deepcopy(model))
        torch.save(model, tmp_path / "model.pt")

    model, _ = train("try", sees=sees)
    assert not saved[0]._forward_pre_hooks
    assert not model._forward_pre_hooks
    assert not torch.load(tmp_path / "model.pt", weights_only=False)._forward_hooks
    assert torch_private.function_modes() == 0


def test_a_mode_of_the_user_keeps_its_place():
    """Where a mode surrounds the call of the model, nothing is recorded and the stack of modes is left alone."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Exporter(model, backends=[], verbose=0, on_issue="try").watch() as exporter:
        for _ in range(3):
            with torch.device("cpu"):
                loss = model(torch.randn(4, 8))["scores"].square().mean()
            assert torch_private.function_modes() == 0
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert not exporter._trials._batches


def test_tensors_are_seen_in_whatever_a_model_gives():
    """Mappings, sequences with names and dataclasses are looked into, in order."""
    given = torch.return_types.max((torch.ones(1), torch.zeros(1)))
    assert [float(each) for each in seen({"a": [given], "b": torch.full((1,), 5.0)})] == [1, 0, 5]
