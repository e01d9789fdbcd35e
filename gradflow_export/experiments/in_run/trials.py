"""Tries what mends an issue while the run goes on, on a copy of the model and batches that the run has seen.

That is done in a forked process without the run's own loop. It is niced, has none of the run's open files, and there is
one at a time.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import math
import os
import random
import select
import sys
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from gradflow_export.experiments.decision import Baseline, Trial, number
from gradflow_export.experiments.facts import Facts
from gradflow_export.experiments.in_run.tape import Batch, Tape
from gradflow_export.experiments.interventions import Intervention
from gradflow_export.experiments.mending.treatment import TRIED, Treatment
from gradflow_export.experiments.mending.untried import UNTRIED
from gradflow_export.experiments.patient import Patient
from gradflow_export.experiments.plan import left_to_default
from gradflow_export.experiments.sandbox import end_tree, lead_tree
from gradflow_export.experiments.treatments import TREATMENTS
from gradflow_export.exporter import Exporter
from gradflow_export.hooks import torch_private
from gradflow_export.hooks.module_hooks import hook_calls
from gradflow_export.hooks.optimizer_hooks import listen
from gradflow_export.records.issues import Issue, IssueType, Severity

_log = logging.getLogger("gradflow_export")

BATCHES, BYTES = 8, 64 * 2**20
"""Batches that are kept, the latest, and the bytes that they may have."""
EVERY = 10
"""Steps between two that are kept, after the first ones."""
STEPS, ORDERS = 40, 3
"""Steps of each trial, and orders of the batches in which what helps is tried."""
MOST = 8
"""Treatments that are tried for one issue."""
SECONDS, CLOSING = 120.0, 10.0
"""Time that the trials of an issue may take, and that closing waits for them."""
WAITING = 4
"""Issues that may wait for their trial."""
KNOWN = 1000
"""Issues of which it is remembered that they were tried."""
NICE = 10


class Trials:
    """Records batches of a run, and tries on them what mends its HIGH issues.

    Args:
        exporter: What watches the run.
        model: The model that is trained.
        amend: Called with an issue and what is to be added to its message, by another thread.
    """

    def __init__(self, exporter: Exporter, model: nn.Module, amend: Callable[[Issue, str], None]) -> None:
        self._exporter, self._model, self._amend = weakref.ref(exporter), weakref.ref(model), amend
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._batches: deque[Batch] = deque(maxlen=BATCHES)
        self._wanted: deque[Issue] = deque(maxlen=WAITING)
        self._known: deque[tuple[str, str, int]] = deque(maxlen=KNOWN)
        self._tape: Tape | None = None
        self._steps, self._process = 0, 0
        self._inside = self._told = self._closed = False
        self._waiter: threading.Thread | None = None
        self._hooks = contextlib.ExitStack()

    def attach(self) -> None:
        """Begin to record."""
        model = self._model()
        if model is not None:
            self._hooks.callback(hook_calls([(model, self._begins)], before=True, with_kwargs=True))
            self._hooks.callback(hook_calls([(model, self._called)], with_kwargs=True))
            self._hooks.callback(listen(lambda *_: None, self._stepped))

    def opened(self, issue: Issue) -> None:
        """Ask for the trial of an issue that has opened."""
        if not issue.open or issue.severity < Severity.HIGH or self._closed or issue.key in self._known:
            return
        # What the trial adds to an issue is reported as that issue once more.
        self._known.append(issue.key)
        self._wanted.append(issue)

    def close(self) -> None:
        """Wait for what is being tried, for a bounded time, and end it."""
        self._closed = True
        self._hooks.close()
        self._leave()
        waiter = self._waiter
        if waiter is not None and waiter.is_alive():
            waiter.join(CLOSING)
            if waiter.is_alive():
                end_tree(self._process)
                waiter.join(CLOSING)
        self._batches.clear()

    def _begins(self, _module: nn.Module, args: Any, kwargs: Any) -> None:
        self._leave()
        if self._tape is not None:
            self._tape.saw(args, kwargs)

    def _called(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if not (torch.is_grad_enabled() and module.training) or torch.compiler.is_compiling():
            return
        if self._steps >= BATCHES and self._steps % EVERY:
            return
        # Modes lie on a stack: one that surrounds this call would be left in the place of ours.
        if torch_private.function_modes():
            return
        if self._tape is None or self._tape.loss is not None:
            self._keep()
            self._tape = Tape()
            self._tape.saw(args, kwargs)
        self._tape.add(None, args, kwargs, output)
        self._tape.__enter__()  # type: ignore[no-untyped-call]
        self._inside = True

    def _leave(self) -> None:
        # It was the only mode when it was entered; one that lies on it now is not ours to take away.
        if self._tape is not None and self._inside and torch_private.function_modes() == 1:
            self._tape.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self._inside = False

    def _keep(self) -> None:
        """Keep the batch of the last tape."""
        tape, self._tape = self._tape, None
        with contextlib.suppress(Exception):
            batch = tape.batch() if tape is not None else None
            if batch is not None and batch.bytes * BATCHES <= BYTES:
                self._batches.append(batch)

    def _stepped(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        model = self._model()
        if self._closed or model is None:
            return
        if optimizer not in self._optimizers:
            owned = {id(weight) for weight in model.parameters()}
            if not any(id(weight) in owned for group in optimizer.param_groups for weight in group["params"]):
                return
            self._optimizers.add(optimizer)
        self._steps += 1
        self._leave()
        self._keep()
        if self._wanted and self._process == 0:
            self._try(self._wanted.popleft(), model)

    def _try(self, issue: Issue, model: nn.Module) -> None:
        """Fork a process that tries what mends an issue, or say how to do it elsewhere."""
        if issue.issue_type in UNTRIED:
            self._amend(issue, f"Not tried: {UNTRIED[issue.issue_type]}.")
            return
        treatments = in_run(issue.issue_type)
        batches = [batch for batch in self._batches if batch.whole]
        why = unsafe(model) or (
            "what mends it lies in the loop of the script"
            if not treatments
            else "no batch could be recorded from the model to backward()"
            if not batches
            else ""
        )
        if why:
            self._refer(issue, f"is not tried in this run: {why}")
            return
        reader, writer = os.pipe()
        with warnings.catch_warnings():
            # Other threads do not come along, and this child waits for none of them.
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if not child:
            os.close(reader)
            _child(writer, self._exporter(), model, list(self._optimizers), batches, treatments)
        os.close(writer)
        self._process = child
        self._waiter = threading.Thread(
            target=self._wait, args=(issue, child, reader), name="gradflow-trials", daemon=True
        )
        self._waiter.start()

    def _refer(self, issue: Issue, why: str) -> None:
        """Say, once, how to try it elsewhere."""
        if not self._told:
            self._told = True
            _log.warning("gradflow: %s %s; run: %s", issue.issue_type, why, command())

    def _wait(self, issue: Issue, child: int, reader: int) -> None:
        """Read what came of it, and add it to the issue."""
        data, limit = b"", time.monotonic() + SECONDS
        try:
            while (left := limit - time.monotonic()) > 0:
                ready, _, _ = select.select([reader], [], [], left)
                got = os.read(reader, 2**16) if ready else b""
                if not got:
                    break
                data += got
            end_tree(child)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child, 0)
            text = str(json.loads(data)["told"]) if data else ""
            if text:
                self._amend(issue, text)
            else:
                self._refer(issue, "could not be tried in this run")
        except Exception:
            _log.debug("gradflow: a trial failed", exc_info=True)
        finally:
            os.close(reader)
            self._process = 0


def in_run(kind: IssueType) -> list[Treatment]:
    """Return the treatments that mend an issue and need nothing of the script's loop, the nearest first."""
    found = [each for each in TREATMENTS if each.kind in TRIED and kind in each.fixes and not each.of_loop]
    return sorted(found, key=lambda each: each.fixes.index(kind) > 0)


def unsafe(model: nn.Module) -> str:
    """Return why nothing can be tried in a copy of this process; empty where it can."""
    if not hasattr(os, "fork") or sys.platform == "darwin":
        return "this system cannot fork a process that computes"
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return "CUDA is initialized"
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return "it is one process of several"
    if any(weight.device.type != "cpu" for weight in model.parameters()):
        return "its model is not on the CPU"
    return ""


def command() -> str:
    """Return the command that tries what mends this script, with its arguments."""
    script = sys.argv[0] if sys.argv and Path(sys.argv[0]).suffix in {".py", ".ipynb"} else "SCRIPT"
    return " ".join(["gradflow doctor --try", script, *(sys.argv[1:] if script != "SCRIPT" else ())])


def _child(
    writer: int,
    exporter: Exporter | None,
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    batches: Sequence[Batch],
    treatments: Sequence[Treatment],
) -> NoReturn:
    """Be the process that tries; what is held by the run is never cleaned up here."""
    try:
        gc.disable()
        lead_tree()
        os.nice(NICE)
        left_to_default()
        writer = _alone(writer)
        # More threads than this one did not come along, and would be waited for.
        torch.set_num_threads(1)
        if exporter is not None:
            with contextlib.suppress(OSError):  # what it would close is closed already
                exporter.close()
        told = Course(model, optimizers, batches).tried(treatments)
        os.write(writer, json.dumps({"told": told}).encode())
    finally:
        os._exit(0)


def _alone(kept: int) -> int:
    """Close every file that came along but one; nothing is flushed, which the run will do itself."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for handle in (0, 1, 2):
        os.dup2(nothing, handle)
    # A number that nothing had: what is closed later, by objects that came along, must not be this.
    own = os.dup(kept)
    os.closerange(3, own)
    os.closerange(own + 1, os.sysconf("SC_OPEN_MAX") if os.sysconf("SC_OPEN_MAX") > 0 else 2**16)
    return own


class Course:
    """Runs of a model on batches that it has seen, each in a process forked from this one.

    Args:
        model: The model; every run begins with its weights as they are now.
        optimizers: What trains it.
        batches: What it is trained on.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer], batches: Sequence[Batch]) -> None:
        self._model, self._optimizers, self._batches = model, optimizers, batches

    def tried(self, treatments: Sequence[Treatment]) -> str:
        """Return what treatments did, in one sentence; empty where nothing can be said."""
        plain = [self._run([Facts()], order) for order in range(ORDERS)]
        if not all(each.get("losses") for each in plain):
            return ""
        baseline = Baseline(
            tuple(float(each["losses"][0]) for each in plain), tuple(float(each["effect"]) for each in plain)
        )
        helpful: list[Trial] = []
        vain: list[Trial] = []
        for each in [each for each in treatments if each.worth(plain[0]["facts"])][:MOST]:
            trial = self._trial(each, baseline)
            if trial.acted and not trial.error:
                (helpful if trial.rescues(baseline) else vain).append(trial)
        before = number(baseline.effect[0])
        parts = [
            f"{trial.names[0]}: the loss reaches {number(trial.effects[0])} instead of {before}, in {ORDERS} of "
            f"{ORDERS} orders of the batches"
            for trial in sorted(helpful, key=lambda trial: trial.effects[0])
        ]
        if vain:
            tried = ", ".join(f"{trial.names[0]} ({number(trial.effects[0])})" for trial in vain)
            parts.append(f"in vain, where the loss is {before} as it is: {tried}")
        where = f"in {STEPS} steps of a copy on the last {len(self._batches)} batches"
        return f"Tried {where}: {'; '.join(parts)}." if parts else ""

    def _trial(self, treatment: Treatment, baseline: Baseline) -> Trial:
        effects: dict[int, float] = {}
        acted, error = False, ""
        for order in range(ORDERS):
            found = self._run([treatment.make()], order)
            effects[order] = float(found.get("effect", math.inf))
            acted, error = found.get("acted", False), found.get("error", "")
            trial = Trial((treatment.name,), dict(effects), acted, error)
            if not trial.screened(baseline):
                break
        return trial

    def _run(self, changes: Sequence[Intervention], order: int) -> dict[str, Any]:
        """Do one run and return what came of it; one that fails has an ``error``."""
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            try:
                os.close(reader)
                os.write(writer, json.dumps(self._one(changes, order, writer)).encode())
            except BaseException as raised:
                os.write(writer, json.dumps({"error": repr(raised)}).encode())
            finally:
                os._exit(0)
        os.close(writer)
        data = b""
        while got := os.read(reader, 2**16):
            data += got
        os.close(reader)
        os.waitpid(child, 0)
        return dict(json.loads(data)) if data else {"error": "its process ended"}

    def _one(self, changes: Sequence[Intervention], order: int, writer: int) -> dict[str, Any]:
        def end(patient: Patient) -> NoReturn:
            facts = next((each.told() for each in changes if isinstance(each, Facts)), {})
            told = {
                "losses": patient.losses,
                "effect": patient.effect,
                "acted": all(each.acted for each in changes),
                "facts": facts,
            }
            os.write(writer, json.dumps(told).encode())
            os._exit(0)

        patient = Patient(lambda: (changes, STEPS), end)
        patient.attach()
        draw = random.Random(order)
        torch.manual_seed(order)
        self._model.train()
        with torch.enable_grad():
            while True:
                for batch in draw.sample(self._batches, len(self._batches)):
                    for optimizer in self._optimizers:
                        optimizer.zero_grad()
                    torch.autograd.backward(batch.again(self._model))
                    for optimizer in self._optimizers:
                        optimizer.step()
