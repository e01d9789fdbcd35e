"""Modes of the user's see the training alone, compiled modules warn of nobody's hooks but theirs, odd tensors cost nothing."""

import itertools
import warnings
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules import module as torch_module
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from gradflow_export import Exporter, MemoryWriter


def _blurred(result):
    return result * (1 + 1e-3 * torch.randn(())) if isinstance(result, torch.Tensor) and result.dim() else result


class NoisyOperators(TorchDispatchMode):
    """Draws a random number for every operation that makes a tensor, as emulations of a coarse arithmetic do."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        plain = not function._schema.is_mutable and not any(each.alias_info for each in function._schema.returns)
        return _blurred(result) if plain and "detach" not in str(function) else result


NOISY = {F.linear, torch.tanh, torch.aminmax, torch.cat, torch.where, torch.Tensor.abs, torch.Tensor.reshape}


class NoisyFunctions(TorchFunctionMode):
    """The same for functions as Python calls them."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        return _blurred(result) if function in NOISY else result


def trained(mode, watched, steps=24):
    """Train a small model under a mode; return its losses."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.1), []
    exporter = Exporter(model, backends=[MemoryWriter()], strict=True).watch() if watched else None
    with mode():
        for _ in range(steps):
            optimizer.zero_grad()
            loss = model(torch.randn(4, 8)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    if exporter is not None:
        exporter.close()
    return losses


@pytest.mark.parametrize("mode", [NoisyOperators, NoisyFunctions])
def test_a_mode_that_draws_random_numbers_draws_as_many(mode):
    """What is ours would draw more of them, and the training would be another one."""
    assert trained(mode, watched=True) == trained(mode, watched=False)


class Counted(torch.Tensor):
    """Inputs whose subclass counts every function, draws a random number in it, and knows few of them."""

    calls: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", "")
        cls.calls.append(name)
        if name not in {"linear", "tanh", "square", "mean", "backward"}:
            raise NotImplementedError(f"no rule for {name}")
        torch.rand(())
        return super().__torch_function__(function, types, args, kwargs or {})


def counted(watched, budget):
    """Train a small model on such inputs; return the functions that were called, and the weights."""
    torch.manual_seed(0)
    Counted.calls.clear()
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    exporter = Exporter(model, backends=[MemoryWriter()], strict=True, budget=budget).watch() if watched else None
    for _ in range(24):
        optimizer.zero_grad()
        model(torch.randn(4, 8).as_subclass(Counted)).square().mean().backward()
        optimizer.step()
    if exporter is not None:
        exporter.close()
    return [*Counted.calls], [parameter.tolist() for parameter in model.parameters()]


@pytest.mark.parametrize("budget", [0.05, None])
def test_a_subclass_of_the_inputs_sees_the_functions_of_the_training_alone(budget):
    """What it does at each, be it a random number or a refusal, is done as often as without us."""
    assert counted(True, budget) == counted(False, budget)


@pytest.mark.parametrize("odd", ["many gradients at once", "rows of several lengths"])
def test_tensors_that_hardly_know_an_operation_end_no_reading(odd):
    """Gradients of ``is_grads_batched``, and nested tensors of the newer kind."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Exporter(model, backends=[MemoryWriter()], strict=True, budget=None).watch() as exporter:
        for _ in range(12):
            optimizer.zero_grad()
            if odd == "many gradients at once":
                out = model(torch.randn(4, 8))
                every = torch.eye(16).reshape(16, 4, 4)
                torch.autograd.grad(out, model[2].weight, every, retain_graph=True, is_grads_batched=True)
            else:
                rows = [torch.randn(3, 8), torch.randn(5, 8)]
                out = model(torch.nested.nested_tensor(rows, layout=torch.jagged)).values()
            out.square().mean().backward()
            optimizer.step()
    assert exporter.summary()["set_aside"] == []


@pytest.mark.parametrize("others", [False, True])
def test_a_compiled_module_warns_of_hooks_of_others_alone(others):
    """Where warnings are errors, ours must not end the loop; torch's own answer is back afterwards."""
    asks, model = torch_module._has_any_global_hook, nn.Linear(4, 2)
    handle = torch_module.register_module_forward_hook(lambda *_: None) if others else None
    with Exporter(model, backends=[MemoryWriter()], strict=True).watch(), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        compiled, optimizer = torch.compile(model, backend="eager"), torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(4):
            optimizer.zero_grad()
            compiled(torch.randn(3, 4)).square().mean().backward()
            optimizer.step()
    if handle is not None:
        handle.remove()
    assert any("global hooks" in str(each.message) for each in told) == others
    assert torch_module._has_any_global_hook is asks


class Padded(nn.Module):
    """Attention over sequences of which some are padded; an evaluation packs them into a tensor without a shape."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2)
        self.head = nn.Linear(16, 2)

    def forward(self, x, padding):
        return self.head(self.encoder(x, src_key_padding_mask=padding).mean(1))


@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")
@pytest.mark.parametrize("kind", ["inside an evaluation", "all along"])
def test_a_tensor_without_a_shape_is_passed_over(kind):
    """Every reading goes on: no operation fails on a ragged tensor, in a layer's input, output or graph."""
    torch.manual_seed(0)
    model = Padded() if kind == "inside an evaluation" else nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    optimizer, padding = (
        torch.optim.Adam(model.parameters(), 1e-3),
        torch.arange(5) >= torch.tensor([[3], [5], [5], [4]]),
    )
    with Exporter(model, backends=[MemoryWriter()], strict=True).watch() as exporter:
        for _ in range(12):
            optimizer.zero_grad()
            if kind == "all along":
                rows = torch.nested.nested_tensor([torch.randn(3, 8), torch.randn(5, 8)])
                out = torch.nested.to_padded_tensor(model(rows), 0.0)
            else:
                out = model.train()(torch.randn(4, 5, 16), padding)
                with torch.no_grad():
                    model.eval()(torch.randn(4, 5, 16), padding)
            out.square().mean().backward()
            optimizer.step()
    assert exporter.summary()["set_aside"] == []


class Inner(torch.Tensor):
    """Weights whose subclass knows what training needs, and nothing else."""

    @staticmethod
    def __new__(cls, held):
        return torch.Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype, requires_grad=held.requires_grad)

    def __init__(self, held):
        self.held = held

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if str(function) in {"aten.select.int", "aten.slice.Tensor"}:
            raise NotImplementedError(f"no kernel for {function}")

        def bare(tree):
            return torch.utils._pytree.tree_map(lambda each: each.held if isinstance(each, Inner) else each, tree)

        out = function(*bare(args), **bare(kwargs or {}))
        if function._schema.name[-1] == "_":
            return args[0]
        return torch.utils._pytree.tree_map(lambda each: Inner(each) if isinstance(each, torch.Tensor) else each, out)


def test_weights_that_lack_an_operation_do_not_keep_a_model_from_being_watched():
    """A reading may be lost, and one line says which; neither watch() nor the loop raises."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    for layer in (model[0], model[2]):
        layer.weight = nn.Parameter(Inner(layer.weight.detach()))
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.1, foreach=False), []
    with Exporter(model, backends=[MemoryWriter()], verbose=0).watch():
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(Inner(torch.randn(4, 8))).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.held.item())
    assert all(before != after for before, after in itertools.pairwise(losses))
