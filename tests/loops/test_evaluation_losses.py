"""The reader of evaluation losses leaves torch, loss modules and what they give out as they are."""

import copy

import pytest
import torch
from torch import nn

from gradflow_export import Exporter, MemoryWriter


def network(outputs=3, dropout=0.0, width=64):
    return nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Dropout(dropout), nn.Linear(width, outputs))


def classes(count, flipped=0.0):
    """Return samples of three classes, some of them with a label that is wrong."""
    x = torch.randn(count, 6)
    y = x[:, :3].argmax(1)
    return x, torch.where(torch.rand(count) < flipped, torch.randint(0, 3, (count,)), y)


def functions():
    """Return everything that torch's loss functions may be called by."""
    return {name: getattr(where, name) for where in (torch._C._nn, torch, nn.functional) for name in dir(where)}


def test_nothing_of_torch_is_replaced_in_an_evaluation():
    """Between a pass without gradients and the next step torch's functions are its own, so that they can be compiled."""
    model, criterion = network(), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hooks = type(criterion._forward_hooks)
    with Exporter(model, backends=[MemoryWriter()], strict=True, verbose=0).watch():
        for _ in range(6):
            x, y = classes(8)
            criterion(model(x), y).backward()
            optimizer.step()
            before = functions()
            with torch.no_grad():
                scores = model(x)
                criterion(scores, y)
            assert all(function is before[name] for name, function in functions().items())
        assert len(criterion._forward_hooks) == 1
        script = torch.jit.script(criterion)
        assert torch.equal(script(scores, y), criterion(scores, y))
        assert not copy.deepcopy(criterion)._forward_hooks
    assert type(criterion._forward_hooks) is hooks
    assert not criterion._forward_hooks


@pytest.mark.parametrize("call", ["no_grad", "inference_mode", "functional", "vmap", "raises", "compiled"])
def test_evaluations_of_any_kind_give_what_they_gave(call):
    """The same numbers, and no error of ours, in modes, transforms, exceptions and compiled loss modules."""
    torch.manual_seed(0)
    model, criterion, (x, y) = network(), nn.CrossEntropyLoss(), classes(32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled = torch.compile(criterion, backend="eager") if call == "compiled" else criterion

    @torch.inference_mode()
    def apart():
        return criterion(model(x), y)

    def evaluate():
        if call == "inference_mode":
            return apart()
        with torch.no_grad():
            if call == "functional":
                return criterion(torch.func.functional_call(model, dict(model.named_parameters()), x), y)
            if call == "vmap":
                return torch.func.vmap(lambda a, b: criterion(model(a[None]), b[None]))(x, y).mean()
            if call == "raises":
                with pytest.raises(IndexError):
                    criterion(model(x), y + 10)
            return compiled(model(x), y)

    with Exporter(model, backends=[MemoryWriter()], strict=True, verbose=0).watch():
        for _ in range(8):
            optimizer.zero_grad()
            compiled(model(x), y).backward()
            optimizer.step()
            with torch.no_grad():
                wanted = nn.functional.cross_entropy(model(x), y)
            torch.testing.assert_close(evaluate(), wanted, rtol=0, atol=1e-6)
    if call == "compiled":
        assert sum(torch._dynamo.utils.counters["recompiles"].values()) <= 1
