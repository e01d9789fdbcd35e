"""Several threads train models of their own: each record is of its own model, and torch is left as it was."""

import random
import sys
import threading
import weakref
from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.optim import optimizer as torch_optimizer

from gradflow_export import Exporter, MemoryWriter
from gradflow_export.hooks import optimizer_hooks
from gradflow_export.hooks.backward_listener import Roots
from gradflow_export.hooks.guards import TURNS, hook_all_calls, hook_process

STEPS = 5


@pytest.fixture
def hasty():
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def process_wide():
    """Return what torch and we keep for the whole process: hooks, and the functions that something may stand in for."""
    hooks = {
        name: dict(held)
        for home in (torch_module, torch_optimizer)
        for name, held in vars(home).items()
        if name.startswith("_global_") and isinstance(held, dict)
    }
    functions = [torch.autograd.backward, torch.relu, torch.Tensor.relu, torch.nn.utils.clip_grad_norm_]
    return hooks, functions


def run_together(*jobs):
    failures = []

    def run(job):
        try:
            job()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


class Rectified(nn.Module):
    def __init__(self):
        super().__init__()
        self.lift, self.head = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x):
        return self.head(torch.relu(self.lift(x)))


def test_models_that_train_at_once_put_functions_back():
    before = torch.relu

    def train():
        model = Rectified()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with Exporter(model, backends=[MemoryWriter()], verbose=0) as exporter:
            exporter.watch()
            for _step in range(25):
                optimizer.zero_grad()
                model(torch.randn(8, 4)).square().mean().backward()
                optimizer.step()

    run_together(*[train] * 4)
    assert torch.relu is before


def test_exporters_that_open_and_close_at_once_leave_nothing(hasty):
    before, counts = process_wide(), []
    gates = threading.Barrier(3)

    def train(seed):
        drawn = random.Random(seed)
        for _again in range(2):
            writers, open_ones = [], []
            for _model in range(drawn.randint(1, 2)):
                model, writer = Rectified(), MemoryWriter()
                optimizer = torch.optim.SGD(model.parameters(), 0.1)
                exporter = Exporter(model, backends=[writer], verbose=0, synchronous=True, budget=None).watch()
                open_ones.append((exporter, model, optimizer))
                writers.append(writer)
            for _step in range(STEPS):
                for _, model, optimizer in open_ones:
                    optimizer.zero_grad()
                    model(torch.randn(8, 4)).square().mean().backward()
                    optimizer.step()
            drawn.shuffle(open_ones)
            for exporter, _, _ in open_ones:
                exporter.close()
            counts.extend(len(writer.records) for writer in writers)
        gates.wait()  # a thread that has stepped and still lives is no reason to leave anything
        assert process_wide() == before

    run_together(*(lambda seed=seed: train(seed) for seed in range(3)))
    assert set(counts) == {STEPS}


def test_registrations_at_once_neither_get_lost_nor_stay(hasty):
    before = process_wide()
    model = nn.Linear(2, 2)

    def register(number):
        parameter = nn.Parameter(torch.zeros(2))
        parameter.grad = torch.zeros(2)
        optimizer = torch.optim.SGD([parameter], 0.1)
        seen = []
        for _again in range(60):
            seen.clear()
            stops = [
                optimizer_hooks.listen(lambda stepped, *_: seen.append(stepped)),
                hook_all_calls(lambda *_: seen.append(threading.get_ident()), always=True),
                hook_all_calls(lambda *_: None, before=True),
            ]
            optimizer.step()
            model(torch.zeros(1, 2))
            assert any(one is optimizer for one in seen)
            assert threading.get_ident() in seen
            random.Random(number).shuffle(stops)
            for stop in (*stops, *stops):
                stop()

    run_together(*(lambda number=number: register(number) for number in range(4)))
    assert process_wide() == before


class Handle:
    """One of torch's, with a number that somebody else was given too."""

    def __init__(self, hooks, number):
        self.id, self.hooks = number, hooks

    def hooks_dict_ref(self):
        return self.hooks

    def remove(self):
        self.hooks.pop(self.id, None)


def test_a_number_given_out_twice_costs_nobody_a_hook():
    hooks, numbers = OrderedDict(), iter((7, 8))

    def register(hook):
        number = next(numbers)
        hooks[number] = hook
        if number == 7:
            hooks[7] = "somebody else's, registered at the same time"
        return Handle(hooks, number)

    remove = hook_process(register, "ours")
    assert list(hooks.values()) == ["somebody else's, registered at the same time", "ours"]
    hooks[8] = "another one"
    remove()
    assert list(hooks) == [7, 8]


def test_what_a_finalizer_asks_for_waits_for_the_change_under_way():
    made = []
    with TURNS:
        TURNS.last(lambda: made.append("asked for meanwhile"))
        made.append("the change")
    assert made == ["the change", "asked for meanwhile"]


def test_a_pass_of_another_thread_is_never_taken_for_the_models():
    mine, other, seen = nn.Linear(3, 1), nn.Linear(3, 1), []
    with Roots(lambda: mine, lambda roots: seen.append(threading.get_ident()), lambda _seconds: None).attach():
        for _step in range(12):
            mine(torch.ones(1, 3)).sum().backward()
        run_together(lambda: other(torch.ones(1, 3)).sum().backward())
        run_together(lambda: mine(torch.ones(1, 3)).sum().backward())
    assert len(seen) == 13


class Noted(nn.Parameter):
    """A parameter that notes in which threads its gradient is read."""

    readers: set[int] = set()  # noqa: RUF012 - shared on purpose

    @property
    def grad(self):
        """The gradient."""
        Noted.readers.add(threading.get_ident())
        return torch.Tensor.grad.__get__(self)

    @grad.setter
    def grad(self, value):
        torch.Tensor.grad.__set__(self, value)


def test_what_another_thread_trains_has_no_gradients_of_the_model_read():
    """They may be freed meanwhile, without the interpreter's lock: then the process ends."""
    model, memory = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)), MemoryWriter()
    for layer in model:
        layer.weight = Noted(layer.weight.detach().clone())
    other = nn.Linear(3, 1)
    optimizer, others = (torch.optim.SGD(m.parameters(), 0.1) for m in (model, other))

    def train():
        others.zero_grad()
        other(torch.randn(4, 3)).sum().backward()
        others.step()

    Noted.readers.clear()
    with Exporter(model, backends=[memory], verbose=0, synchronous=True, budget=None, strict=True).watch():
        for _step in range(12):
            optimizer.zero_grad()
            run_together(train)
            model(torch.randn(4, 3)).square().mean().backward()
            run_together(train)
            optimizer.step()
    assert Noted.readers == {threading.get_ident()}
    assert len(memory.records) == 12


def test_an_unknown_optimizer_of_another_thread_ends_no_quiet_stretch():
    """What ends it plans the next step, arms hooks and forgets readings: in the middle of the model's own step."""
    mine, other = (torch.optim.SGD([nn.Parameter(torch.zeros(2))], 0.1) for _ in range(2))
    passed, ended, told = optimizer_hooks.PassedSteps(), [], []
    passed.begin(5, mine, weakref.WeakSet(), ended.append, glance=lambda _optimizer: 1, first=5)
    stop = optimizer_hooks.listen(lambda optimizer, *_: told.append(optimizer), None, passed)
    try:
        mine.step()
        run_together(other.step)
        mine.step()
        assert (ended, told) == ([], [])
        other.step()
        assert (ended, told) == ([2], [other])
    finally:
        stop()
