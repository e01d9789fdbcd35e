"""Unusual models and layers: right values against a twin computed in the loop."""

import collections
import itertools
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from gradflow_export import Exporter, MemoryWriter


def run(model, optimizer, notes, loss_of, steps=4):
    """Train some steps, noting what the twin sees."""
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model).backward()
        notes.step(optimizer)


def stack(width=6, depth=4, act=nn.Tanh):
    """Return blocks in a ModuleList-like chain."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), act()) for _ in range(depth)))


def block_norms(model, forward):
    """Return the gradient norm at each block's output from retain_grad, in a pass of its own."""
    kept = []

    def keep(_module, _args, out):
        out.retain_grad()
        kept.append(out)

    handles = [block.register_forward_hook(keep) for block in model]
    forward().backward()
    for handle in handles:
        handle.remove()
    return [float(out.grad.double().norm()) for out in kept]


def test_block_norms_and_gains_are_those_of_retain_grad(watching, recorded):
    """Norms at block outputs equal those of retained gradients, gains their quotients, last block to first."""
    model, x = stack(), torch.randn(5, 6)
    wanted = block_norms(model, lambda: model(x).square().sum())
    model.zero_grad()
    twin = stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exporter = watching(model)
    model(x).square().sum().backward()
    optimizer.step()
    (record,) = recorded(exporter)
    assert record.get("block.gradient_norm").sites == ("0", "1", "2", "3")
    assert list(record.get("block.gradient_norm").values) == pytest.approx(wanted, rel=1e-5)
    gains = [a / b for a, b in itertools.pairwise(wanted)]
    assert list(record.get("block.gain").values) == pytest.approx(gains, rel=1e-5)
    outputs = list(itertools.accumulate(twin, lambda h, block: block(h).detach(), initial=x))[1:]
    rms = [float(h.double().square().mean().sqrt()) for h in outputs]
    assert list(record.get("block.output_rms").values) == pytest.approx(rms, rel=1e-5)


class InPlace(nn.Module):
    """Linear layers, each followed by a ReLU that overwrites its output."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        for layer in self.layers:
            x = self.relu(layer(x))
        return x


def test_in_place_relu_after_a_block(watching, recorded, ledger):
    """A ReLU overwriting a block's output neither breaks backward nor the norm: it is that of the output itself."""
    torch.manual_seed(0)
    model, x = InPlace(), torch.randn(8, 6)
    outputs = []
    h = x
    for layer in model.layers:
        out = layer(h)
        out.retain_grad()
        outputs.append(out)
        h = out.relu()
    h.square().sum().backward()
    wanted = [float(out.grad.double().norm()) for out in outputs]
    rms = [float(out.detach().double().square().mean().sqrt()) for out in outputs]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    exporter, notes = watching(model), ledger(model)
    run(model, optimizer, notes, lambda m: m(x).square().sum())
    records = recorded(exporter)
    notes.agrees_with(records)
    assert list(records[0].get("block.gradient_norm").values) == pytest.approx(wanted, rel=1e-5)
    assert list(records[0].get("block.output_rms").values) == pytest.approx(rms, rel=1e-5)


def test_frozen_layers_are_missing_not_zero(watching, recorded, ledger):
    """Frozen parameters, in the optimizer or not, have no gradient; parameters with zero gradients have zero."""
    model = stack()
    model[0].requires_grad_(False)
    model[3][0].weight.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exporter, notes = watching(model), ledger(model)
    run(model, optimizer, notes, lambda m: (m(torch.randn(5, 6)) * 0).sum())
    for record in recorded(exporter):
        values = record.get("parameter.gradient_norm").as_dict()
        assert values == {
            n: (0.0 if p.requires_grad else None) for n, p in model.named_parameters()
        }  # fmt: skip
        assert record.value("block.gradient_norm", "0") is None
        assert record.value("gradient.with_grad") == 5.0
        trainable = record.get("parameter.trainable").as_dict()
        assert trainable == {n: float(p.requires_grad) for n, p in model.named_parameters()}


def test_a_parameter_that_gets_no_gradient_is_missing(watching, recorded, ledger):
    """A trainable parameter that the loss does not depend on is missing in gradients and zero in updates."""
    model = stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exporter, notes = watching(model), ledger(model)
    run(model, optimizer, notes, lambda m: m[:2](torch.ones(2, 6)).sum())
    records = recorded(exporter)
    notes.agrees_with(records)
    assert records[1].value("parameter.gradient_norm", "3.0.weight") is None
    assert records[1].value("parameter.update_norm", "3.0.weight") == 0.0


class Tied(nn.Module):
    """A decoder whose weight is the embedding's."""

    def __init__(self, *, sparse=False, tied=True):
        super().__init__()
        self.embed = nn.Embedding(11, 6, sparse=sparse)
        self.mix = nn.Linear(6, 6)
        self.decode = nn.Linear(6, 11, bias=False)
        if tied:
            self.decode.weight = self.embed.weight

    def forward(self, x):
        return self.decode(self.mix(self.embed(x)))


def test_shared_weights_are_one_site(watching, recorded, ledger):
    """A weight used in two places has one name and the gradient of both uses."""
    torch.manual_seed(0)
    model = Tied()
    optimizer = torch.optim.Adam(model.parameters())
    exporter, notes = watching(model), ledger(model)
    run(model, optimizer, notes, lambda m: m(torch.randint(0, 11, (4,))).square().sum())
    records = recorded(exporter)
    notes.agrees_with(records)
    assert records[0].get("parameter.gradient_norm").sites == ("embed.weight", "mix.weight", "mix.bias")


@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_sparse_gradients(kind, watching, recorded, ledger):
    """A sparse gradient's norm is that of its touched rows, repeated indices added; updates are right too."""
    torch.manual_seed(0)
    model = Tied(sparse=True, tied=False)
    dense = [*model.mix.parameters(), *model.decode.parameters()]
    made = torch.optim.SGD if kind == "sgd" else torch.optim.SparseAdam
    optimizers = [made(model.embed.parameters(), lr=0.1), torch.optim.SGD(dense, lr=0.1)]
    exporter, notes = watching(model), ledger(model)
    for _ in range(3):
        model.zero_grad()
        model(torch.tensor([1, 1, 3])).square().sum().backward()
        assert model.embed.weight.grad.is_sparse
        for optimizer in optimizers:
            notes.step(optimizer)
    notes.join((0, 1), (2, 3), (4, 5))
    records = recorded(exporter)
    notes.agrees_with(records)
    assert records[0].value("parameter.zero_share", "embed.weight") is not None


class Complex(nn.Module):
    """A complex weight between real ends."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(4, 5)
        self.turn = nn.Parameter(torch.randn(5, 5, dtype=torch.complex64))
        self.leave = nn.Linear(5, 1)

    def forward(self, x):
        return self.leave((self.enter(x).to(torch.complex64) @ self.turn).abs())


def test_complex_parameters(watching, recorded, ledger):
    """The norm of a complex gradient or update is (sum |z|^2)^(1/2)."""
    torch.manual_seed(0)
    model = Complex()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    exporter, notes = watching(model), ledger(model)
    run(model, optimizer, notes, lambda m: m(torch.randn(6, 4)).square().mean())
    records = recorded(exporter)
    notes.agrees_with(records)
    assert records[2].value("parameter.gradient_linf", "turn") == pytest.approx(
        float(model.turn.grad.abs().max()), rel=1.0
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.float32])
def test_dtypes(dtype, watching, recorded, ledger):
    """bf16 and float64 parameters give the norms that float64 arithmetic on their entries gives."""
    model = stack().to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exporter, notes = watching(model), ledger(model)
    run(model, optimizer, notes, lambda m: m(torch.ones(3, 6, dtype=dtype)).square().sum())
    records = recorded(exporter)
    notes.agrees_with(records)
    assert records[0].get("block.gradient_norm").present.all()


def test_mixed_dtypes_in_one_model(watching, recorded, ledger):
    """bf16, float32 and float64 parameters side by side each have their own right norms."""
    model = stack()
    model[1].bfloat16()
    model[2].double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exporter, notes = watching(model), ledger(model)

    def loss(m):
        h = torch.ones(3, 6)
        for block in m:
            h = block(h.to(block[0].weight.dtype))
        return h.square().sum()

    run(model, optimizer, notes, loss)
    notes.agrees_with(recorded(exporter))


def test_very_small_and_very_large_gradients(watching, recorded):
    """Norms whose squares leave float32 are right; NaN and Inf are NaN and Inf."""
    model = stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    exporter = watching(model, alerts_enabled=False)
    wanted = [1e-30, 1e30, 0.0, float("nan"), float("inf")]
    for value in wanted:
        for p in model.parameters():
            p.grad = torch.full_like(p, value)
        optimizer.step()
    for record, value in zip(recorded(exporter), wanted, strict=True):
        seen = record.value("parameter.gradient_norm", "0.0.weight")
        assert seen == pytest.approx(value * 6, rel=1e-6, nan_ok=True)
        assert record.value("gradient.nonfinite") == (0.0 if value < float("inf") else 8.0)


@pytest.mark.parametrize("change", ["double", "bfloat16", "half_and_back"])
def test_a_model_cast_after_watch(change, watching, recorded, ledger):
    """Casting the watched model keeps it watched, with right values from the next step on."""
    model = stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exporter, notes = watching(model), ledger(model)
    x = torch.ones(3, 6)
    run(model, optimizer, notes, lambda m: m(x).square().sum(), 2)
    optimizer.zero_grad()
    if change == "double":
        model.double()
    elif change == "bfloat16":
        model.bfloat16()
    else:
        model.half().float()
    x = x.to(next(model.parameters()).dtype)
    run(model, optimizer, notes, lambda m: m(x).square().sum(), 2)
    notes.agrees_with(recorded(exporter))


def test_layers_replaced_and_thawed_while_watching(watching, recorded, ledger):
    """A head replaced and a body thawed with add_param_group are seen from the next step, under their names."""
    model = stack()
    model[:3].requires_grad_(False)
    optimizer = torch.optim.SGD(model[3].parameters(), lr=0.1)
    exporter, notes = watching(model), ledger(model)
    run(model, optimizer, notes, lambda m: m(torch.ones(3, 6)).square().sum(), 2)
    model[:3].requires_grad_(True)
    optimizer.add_param_group({"params": model[:3].parameters(), "lr": 0.01})
    run(model, optimizer, notes, lambda m: m(torch.ones(3, 6)).square().sum(), 2)
    model.append(nn.Linear(6, 2))
    optimizer.add_param_group({"params": model[4].parameters(), "lr": 0.5})
    run(model, optimizer, notes, lambda m: m(torch.ones(3, 6)).square().sum(), 2)
    for kept in (notes.gradients, notes.updates, notes.weights):
        assert [len(k) for k in kept] == [2, 2, 8, 8, 10, 10]
    records = recorded(exporter)
    notes.agrees_with(records)
    rates = records[-1].get("parameter.learning_rate").as_dict()
    assert rates["3.0.weight"] == pytest.approx(0.1)
    assert rates["0.0.weight"] == pytest.approx(0.01)
    assert rates["4.weight"] == pytest.approx(0.5)


class Pair(NamedTuple):
    """Two tensors by name."""

    hidden: torch.Tensor
    state: torch.Tensor


class Output(collections.OrderedDict):
    """A mapping with attributes, as Hugging Face models return."""

    def __getattr__(self, name):
        try:
            return self[name]
        except KeyError as error:
            raise AttributeError(name) from error


class Wraps(nn.Module):
    """A linear layer that returns its output in a container."""

    def __init__(self, kind):
        super().__init__()
        self.linear, self.kind = nn.Linear(6, 6), kind

    def forward(self, x):
        h = torch.tanh(self.linear(x))
        return {
            "tuple": lambda: (h, None),
            "nested": lambda: [None, (torch.zeros(2, dtype=torch.long), {"a": "b", "h": h})],
            "namedtuple": lambda: Pair(h, h.detach()),
            "dict": lambda: {"attentions": torch.ones(1, requires_grad=True), "last_hidden_state": h},
            "hugging face": lambda: Output(loss=None, logits=h, past=[1, 2]),
            "nothing": lambda: "words",
        }[self.kind](), h


class Chain(nn.Module):
    """Blocks that return containers; the tensor inside goes on."""

    def __init__(self, kind):
        super().__init__()
        self.blocks = nn.ModuleList(Wraps(kind) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            _, x = block(x)
        return x


@pytest.mark.parametrize("kind", ["tuple", "nested", "namedtuple", "dict", "hugging face"])
def test_containers_as_block_outputs(kind, watching, recorded):
    """The gradient at the first floating tensor of a tuple, list, mapping or named output is measured."""
    torch.manual_seed(0)
    model, x = Chain(kind), torch.randn(4, 6)
    hidden = []
    h = x
    for block in model.blocks:
        h = torch.tanh(block.linear(h))
        h.retain_grad()
        hidden.append(h)
    h.square().sum().backward()
    wanted = [float(h.grad.double().norm()) for h in hidden]
    model.zero_grad()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exporter = watching(model)
    model(x).square().sum().backward()
    optimizer.step()
    (record,) = recorded(exporter)
    assert list(record.get("block.gradient_norm").values) == pytest.approx(wanted, rel=1e-5)


def test_a_layer_used_twice(watching, recorded):
    """A block called twice in a pass has the L2 norm of both output gradients together; parameters have their sum."""
    torch.manual_seed(0)
    layer, x = nn.Linear(6, 6), torch.randn(4, 6)
    model = nn.ModuleDict({"a": layer, "b": nn.Linear(6, 6), "c": nn.Linear(6, 6)})

    def forward():
        first = model["a"](x)
        second = model["a"](torch.tanh(first))
        return first, second, model["c"](model["b"](second)).square().sum()

    first, second, loss = forward()
    g1, g2 = torch.autograd.grad(loss, [first, second])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exporter = watching(model, blocks=["a", "b", "c"])
    forward()[2].backward()
    optimizer.step()
    (record,) = recorded(exporter)
    assert record.value("block.gradient_norm", "a") == pytest.approx(float(torch.cat([g1, g2]).norm()), rel=1e-5)
    assert record.value("parameter.gradient_norm", "a.weight") == pytest.approx(float(layer.weight.grad.norm()))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(reentrant, watching, recorded, ledger):
    """Both kinds of activation checkpointing train as before, with right gradients, updates and block norms."""

    def build():
        torch.manual_seed(0)
        return nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Dropout(0.3)) for _ in range(4))

    def loss(model):
        h = torch.ones(4, 6, requires_grad=True)
        for block in model:
            h = checkpoint(block, h, use_reentrant=reentrant)
        return h.square().sum()

    plain = build()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)
    for _ in range(4):
        optimizer.zero_grad()
        loss(plain).backward()
        optimizer.step()

    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    exporter, notes = watching(model), ledger(model)
    run(model, optimizer, notes, loss)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    records = recorded(exporter)
    notes.agrees_with(records)

    # The same blocks without checkpointing, from the same start and the same generator, are the twin.
    model = build()

    def forward():
        h = torch.ones(4, 6, requires_grad=True)
        for block in model:
            h = block(h)
        return h.square().sum()

    wanted = block_norms(model, forward)
    assert list(records[0].get("block.gradient_norm").values) == pytest.approx(wanted, rel=1e-5)


def test_a_parallel_wrapper_is_looked_through(watching, recorded, ledger):
    """DataParallel around the model changes no name."""
    model = stack()
    wrapped = nn.DataParallel(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    exporter, notes = watching(wrapped), ledger(model)
    run(model, optimizer, notes, lambda _: wrapped(torch.ones(3, 6)).square().sum())
    notes.agrees_with(recorded(exporter))


@pytest.mark.parametrize("container", [nn.ParameterList, nn.ParameterDict])
def test_parameters_without_layers(container, watching, recorded, ledger):
    """Bare parameters in lists and dictionaries, scalars and empty ones among them, are measured."""
    values = [torch.randn(3), torch.randn(()), torch.empty(0)]
    made = container(values) if container is nn.ParameterList else container({f"p{i}": v for i, v in enumerate(values)})
    model = nn.Module()
    model.weights = made
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exporter, notes = watching(model), ledger(model)
    run(model, optimizer, notes, lambda m: sum(p.square().sum() for p in m.parameters()))
    notes.agrees_with(recorded(exporter))


@pytest.mark.parametrize("transform", ["vmap", "grad"])
def test_function_transforms_are_passed_over(transform, watching, recorded):
    """Calls under ``torch.func.vmap`` or ``grad`` leave no trace in the records and break nothing, steps around them are read."""
    model, x = stack(act=nn.ReLU), torch.randn(5, 6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exporter = watching(model)
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def per_sample(row):
        return torch.func.functional_call(model, parameters, (row.unsqueeze(0),)).sum()

    for _ in range(3):
        optimizer.zero_grad()
        if transform == "vmap":
            torch.func.vmap(model)(x.unsqueeze(1)).sum().backward()
            optimizer.zero_grad()
        else:
            torch.func.grad(per_sample)(x[0])
        model(x).square().sum().backward()
        optimizer.step()
    twin = stack(act=nn.ReLU)
    wanted = block_norms(twin, lambda: twin(x).square().sum())
    records = recorded(exporter)
    assert list(records[0].get("block.gradient_norm").values) == pytest.approx(wanted, rel=1e-5)
    assert all(record.get("activation.dead_share") is not None for record in records)


@pytest.mark.parametrize("part", [lambda: nn.Linear(6, 6), lambda: nn.Sequential(nn.Linear(6, 6), nn.ReLU())])
@pytest.mark.parametrize("inside", [True, False])
def test_a_part_that_is_scripted_is_watched_like_any_other(part, inside):
    """Its class has no ``forward`` of its own, be it a layer or a container, in a model or beside others."""

    def trained(watched):
        torch.manual_seed(0)
        first, last = torch.jit.script(part()), nn.Linear(6, 2)
        model = nn.Sequential(first, last) if inside else nn.ModuleList([first, last])
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        exporter = Exporter(model, backends=[MemoryWriter()], strict=True).watch() if watched else None
        for _ in range(8):
            optimizer.zero_grad()
            last(first(torch.randn(4, 6))).square().mean().backward()
            optimizer.step()
        if exporter is not None:
            exporter.close()
        return [parameter.tolist() for parameter in model.parameters()]

    assert trained(True) == trained(False)
