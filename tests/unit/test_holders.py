"""Objects are found by what they hold, and no other thread is disturbed by the search."""

import threading

import pytest
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from gradflow_export import Exporter, MemoryWriter
from gradflow_export.hooks.holders import holders, optimizers_holding


@pytest.mark.parametrize("layers", [1, 2, 7, 40])
def test_every_optimizer_of_a_parameter_is_found(layers):
    """However many parameters there are, and whether it has stepped or not; those of others are not."""
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(layers)))
    mine = [torch.optim.SGD(model.parameters(), 0.1), torch.optim.Adam([{"params": list(model.parameters())}], 0.1)]
    others = torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.1)
    found = optimizers_holding(list(model.parameters()))
    assert {id(optimizer) for optimizer in found} == {id(optimizer) for optimizer in mine}
    assert others not in found
    assert optimizers_holding([]) == []


def test_an_object_is_found_through_containers_only():
    """What holds a thing in a tuple is found; what holds another object that holds it is not."""
    model = nn.Linear(2, 2)
    handle = model.register_forward_hook(lambda *_: None)
    assert holders([handle.hooks_dict_ref], RemovableHandle, depth=3) == [handle]
    assert holders([model.weight], nn.Module, depth=1) == []


def test_other_threads_build_tuples_meanwhile():
    """A tuple that a thread is still building is left alone: a list of all objects makes CPython fail there."""
    over, failed = threading.Event(), []

    def build():
        try:
            while not over.is_set():
                tuple(number for number in range(300))
        except SystemError as error:
            failed.append(error)

    threads = [threading.Thread(target=build) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(3):
            model, spare = nn.Linear(2, 2), nn.Linear(2, 2)
            torch.optim.SGD(spare.parameters(), 0.1)
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            model.register_forward_hook(lambda *_: None)
            with Exporter(model, backends=[MemoryWriter()], strict=True).watch() as exporter:
                for _ in range(12):
                    optimizer.zero_grad()
                    model(torch.ones(3, 2)).square().sum().backward()
                    optimizer.step()
            assert exporter._worker.error is None
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert failed == []
