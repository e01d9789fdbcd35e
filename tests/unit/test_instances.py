"""All objects of a class are found, and no other thread is disturbed by the search."""

import threading

import pytest
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from gradflow_export import Exporter, MemoryWriter
from gradflow_export.debugging import TensorCensus
from gradflow_export.hooks.instances import instances


class Mine(torch.optim.Adam):
    """A subclass of a user's."""


@pytest.mark.parametrize("count", [0, 1, 40])
def test_every_living_object_of_a_class_is_found(count):
    """Those of subclasses too, whoever wrote these, and nothing that is no object of the class."""
    before = {id(optimizer) for optimizer in instances(torch.optim.Optimizer)}
    weights = [nn.Parameter(torch.ones(1)) for _ in range(2 * count)]
    made = [(Mine if number % 2 else torch.optim.SGD)([weight], 0.1) for number, weight in enumerate(weights)]
    found = instances(torch.optim.Optimizer)
    assert {id(optimizer) for optimizer in found} - before == {id(optimizer) for optimizer in made}
    assert all(isinstance(optimizer, torch.optim.Optimizer) for optimizer in found)


def test_handles_of_hooks_are_found():
    """Handles, whose class has no subclass, are found wherever they are kept."""
    model = nn.Linear(2, 2)
    kept = {"deep": [(model.register_forward_hook(lambda *_: None),)]}
    assert any(handle is kept["deep"][0][0] for handle in instances(RemovableHandle))


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
            TensorCensus().take()
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert failed == []
