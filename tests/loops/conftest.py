"""Watching with a memory writer, and a ledger that computes norms in the loop itself."""

import logging

import pytest
import torch

from gradflow_export import Exporter, MemoryWriter
from gradflow_export.schedule import INTERVALS

ALL = dict.fromkeys(INTERVALS, 1)


@pytest.fixture
def watching():
    """Return a function that watches a model, everything at every step, and raises what goes wrong inside."""
    made = []

    def watch(model, criterion=None, *, optimizer=None, blocks=None, intervals=ALL, strict=True, **settings):
        writer = MemoryWriter()
        exporter = Exporter(model, backends=[writer], intervals=intervals, strict=strict, **settings)
        exporter.writer = writer
        made.append(exporter)
        return exporter.watch(criterion, optimizer=optimizer, blocks=blocks)

    yield watch
    for exporter in made:
        exporter.close()
        assert exporter._worker.error is None, exporter._worker.error


@pytest.fixture
def recorded():
    """Return a function that closes an exporter and gives its records."""

    def records(exporter):
        exporter.close()
        assert exporter.summary()["set_aside"] == []
        return exporter.writer.records

    return records


@pytest.fixture
def said(caplog):
    """Return a function that gives the lines logged so far that hold a word."""
    caplog.set_level(logging.INFO, logger="gradflow_export")

    def lines(word=""):
        return [r.getMessage() for r in caplog.records if r.name == "gradflow_export" and word in r.getMessage()]

    return lines


def entries(tensor):
    """Return all stored entries in float64, real and imaginary parts apart."""
    tensor = tensor.detach()
    tensor = tensor.coalesce().values() if tensor.is_sparse else tensor
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return tensor.double().reshape(-1)


class Ledger:
    """The slow, obvious twin: reads gradients and weights in the loop, one by one."""

    def __init__(self, model):
        self.model = model
        self.gradients, self.weights, self.updates = [], [], []
        self._kept = {}

    def before(self, optimizer=None):
        """Note gradients and weights of what this optimizer owns, just before it steps."""
        owned = None if optimizer is None else {id(p) for g in optimizer.param_groups for p in g["params"]}
        mine = {n: p for n, p in self.model.named_parameters() if owned is None or id(p) in owned}
        self.gradients.append({n: float(entries(p.grad).norm()) for n, p in mine.items() if p.grad is not None})
        self._kept = {n: entries(p).clone() for n, p in mine.items() if p.requires_grad}

    def after(self):
        """Note what the step did."""
        now = dict(self.model.named_parameters())
        self.weights.append({n: float(w.norm()) for n, w in self._kept.items()})
        self.updates.append({n: float((entries(now[n]) - w).norm()) for n, w in self._kept.items()})

    def step(self, optimizer, *args):
        """Step with a note before and one after."""
        self.before(optimizer)
        optimizer.step(*args)
        self.after()

    def join(self, *groups):
        """Join the notes of optimizers that step together: ``join((0, 1), (2, 3))``."""
        for name in ("gradients", "weights", "updates"):
            notes = getattr(self, name)
            setattr(self, name, [{k: v for i in group for k, v in notes[i].items()} for group in groups])

    def agrees_with(self, records, rel=2e-6, update_rel=1e-3):
        """Assert that every record holds the same norms, and *missing* where there is no gradient."""
        assert [r.step for r in records] == list(range(1, len(self.gradients) + 1))
        every = [n for n, _ in self.model.named_parameters()]
        for record, gradients, weights, updates in zip(
            records, self.gradients, self.weights, self.updates, strict=True
        ):
            for metric, notes, tolerance in (
                ("parameter.gradient_norm", gradients, rel),
                ("parameter.weight_norm", weights, rel),
                ("parameter.update_norm", updates, update_rel),
            ):
                values = {n: record.value(metric, n) for n in every}
                wanted = {n: notes.get(n) for n in every}
                missing = {n for n in every if values[n] is None}
                assert missing == {n for n in every if wanted[n] is None}, (record.step, metric)
                for name in set(every) - missing:
                    assert values[name] == pytest.approx(wanted[name], rel=tolerance, abs=1e-12), (
                        record.step,
                        metric,
                        name,
                    )


@pytest.fixture
def ledger():
    """Return the class :class:`Ledger`."""
    return Ledger


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """Compute with one thread: tiny tensors gain nothing from more, and tests share the machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
