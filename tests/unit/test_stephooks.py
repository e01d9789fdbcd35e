"""Hooks of every optimizer step can be added and taken away at any time without disturbing a step."""

import gc
import threading

import pytest
import torch
from torch.optim import optimizer as torch_optimizer

from gradflow_export.hooks.optimizer_hooks import listen


def hooks():
    """How many process-wide hooks PyTorch knows."""
    return len(torch_optimizer._global_optimizer_pre_hooks) + len(torch_optimizer._global_optimizer_post_hooks)


@pytest.fixture
def optimizer():
    """An optimizer of one weight that has a gradient."""
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    return torch.optim.SGD([weight], lr=0.1)


def test_listeners_are_told_in_order_and_leave_nothing_behind(optimizer):
    """Both hear of the step, before and after; when they have ended, PyTorch's own lists are as they were."""
    was, heard = hooks(), []
    ends = [
        listen(lambda *_: heard.append("first"), lambda *_: heard.append("after")),
        listen(lambda *_: heard.append("second")),
    ]
    optimizer.step()
    assert heard == ["first", "second", "after"]
    for end in (*ends, ends[0]):
        end()
    optimizer.step()
    assert heard == ["first", "second", "after"]
    assert hooks() == was


def test_another_thread_may_end_it_in_the_middle_of_a_step(optimizer):
    """The training thread is between two hooks while the last listener ends; its step goes on."""
    was, reached, ended = hooks(), threading.Event(), threading.Event()
    end = listen()

    def wait(*_):
        reached.set()
        ended.wait(100)

    handle = optimizer.register_step_pre_hook(wait)
    late = listen(lambda *_: None)
    errors = []

    def train():
        try:
            optimizer.step()
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=train)
    thread.start()
    assert reached.wait(100)
    end()
    late()
    ended.set()
    thread.join(100)
    handle.remove()
    assert errors == []
    listen()()
    assert hooks() == was


def test_a_step_survives_a_listener_that_ends_inside_it(optimizer):
    """As a finalizer would, when garbage is collected between two hooks of one step."""
    was, ends = hooks(), []

    def finalize(*_):
        gc.collect()
        ends[0]()

    ends.append(listen(finalize))
    after = torch_optimizer.register_optimizer_step_pre_hook(lambda *_: None)
    optimizer.step()
    after.remove()
    listen()()
    assert hooks() == was
