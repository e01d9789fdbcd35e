"""Whatever way a loop trains a model: it is recorded, or one line names the way that is; never silence, never other bits."""

import copy
import ctypes
import sys
import threading

import pytest
import torch
from torch import nn
from torch.func import functional_call, stack_module_state, vmap
from torch.nn import functional
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from gradflow_export import Exporter, MemoryWriter
from gradflow_export.records.step_record import passes_alone

STEPS, RATE = 40, 0.05


class Net(nn.Module):
    """Three layers, one of them used through its weight only."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x):
        x = torch.tanh(self.first(x))
        return self.last(torch.tanh(functional.linear(x, self.second.weight, self.second.bias)))


def net(seed=0):
    """Return a model."""
    torch.manual_seed(seed)
    return Net()


def batches():
    """Yield inputs and classes."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        yield torch.randn(6, 4, generator=generator), torch.randint(3, (6,), generator=generator)


def loss_of(model, x, y):
    """Return the loss of a batch."""
    return functional.cross_entropy(model(x), y)


def passes(model, clear=True):
    """Yield after each backward pass, whose gradients are fresh."""
    for x, y in batches():
        if clear:
            model.zero_grad()
        loss_of(model, x, y).backward()
        yield


LOOPS = {}


def loop(function):
    """Keep a loop under its name. It takes a model, trains it or what stands for it, and returns what it trained."""
    LOOPS[function.__name__] = function
    return function


class Descent:
    """An optimizer that is none of torch's."""

    def __init__(self, parameters):
        self.parameters = list(parameters)

    @torch.no_grad()
    def step(self):
        for p in self.parameters:
            p.sub_(RATE * p.grad)

    def zero_grad(self):
        for p in self.parameters:
            p.grad = None


@loop
def own_class(model):
    optimizer = Descent(model.parameters())
    for x, y in batches():
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        optimizer.step()


class Shaped(Descent):
    """One that looks like torch's: groups, a state, a closure."""

    def __init__(self, parameters):
        super().__init__(parameters)
        self.param_groups, self.state = [{"params": self.parameters, "lr": RATE}], {}

    def step(self, closure=None):
        loss = None if closure is None else closure()
        super().step()
        return loss


@loop
def own_class_with_closure(model):
    optimizer = Shaped(model.parameters())
    for x, y in batches():

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = loss_of(model, x, y)
            loss.backward()
            return loss

        optimizer.step(closure)


class Unwrapped(torch.optim.Optimizer):
    """A subclass of torch's that never calls its constructor."""

    def __init__(self, parameters):
        self.param_groups, self.state, self.defaults = [{"params": list(parameters)}], {}, {}

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            p.sub_(RATE * p.grad)


@loop
def subclass_without_constructor(model):
    optimizer = Unwrapped(model.parameters())
    for _ in passes(model):
        optimizer.step()


@loop
def step_replaced_on_the_instance(model):
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    plain = Descent(model.parameters())
    optimizer.step = plain.step
    for _ in passes(model):
        optimizer.step()


@loop
def step_of_another_class(model):
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    for _ in passes(model):
        torch.optim.SGD.step.__wrapped__(optimizer)


@loop
def numpy_in_place(model):
    arrays = [p.detach().numpy() for p in model.parameters()]
    for _ in passes(model):
        for array, p in zip(arrays, model.parameters(), strict=True):
            array[...] -= RATE * p.grad.numpy()


@loop
def memory_by_its_address(model):
    for _ in passes(model):
        for p in model.parameters():
            new = (p.detach() - RATE * p.grad).contiguous()
            ctypes.memmove(p.data_ptr(), new.data_ptr(), p.numel() * p.element_size())


@loop
def data_replaced(model):
    for _ in passes(model):
        for p in model.parameters():
            p.data = p.data - RATE * p.grad


@loop
def parameters_replaced(model):
    for _ in passes(model):
        for module in model.modules():
            for name, p in list(module.named_parameters(recurse=False)):
                setattr(module, name, nn.Parameter(p.detach() - RATE * p.grad))


@loop
def states_loaded(model):
    for _ in passes(model):
        model.load_state_dict({name: p.detach() - RATE * p.grad for name, p in model.named_parameters()})


@loop
def one_long_vector(model):
    vector = parameters_to_vector(model.parameters()).detach().requires_grad_()
    optimizer = torch.optim.SGD([vector], RATE)
    for _ in passes(model):
        vector.grad = parameters_to_vector([p.grad for p in model.parameters()])
        optimizer.step()
        vector_to_parameters(vector.detach(), model.parameters())


@loop
def master_copies(model):
    copies = [p.detach().double().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.Adam(copies, RATE)
    for _ in passes(model):
        for mine, p in zip(copies, model.parameters(), strict=True):
            mine.grad = p.grad.double()
        optimizer.step()
        with torch.no_grad():
            for mine, p in zip(copies, model.parameters(), strict=True):
                p.copy_(mine)


@loop
def autograd_grad(model):
    for x, y in batches():
        found = torch.autograd.grad(loss_of(model, x, y), list(model.parameters()))
        with torch.no_grad():
            for p, g in zip(model.parameters(), found, strict=True):
                p.sub_(RATE * g)


@loop
def functional_updates(model):
    params = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    for x, y in batches():
        loss = functional.cross_entropy(functional_call(model, params, (x,)), y)
        found = torch.autograd.grad(loss, list(params.values()))
        params = {n: (p - RATE * g).detach().requires_grad_() for (n, p), g in zip(params.items(), found, strict=True)}
    return list(params.values())


@loop
def functional_updates_of_ones_own_forward(model):
    params = [p.detach().clone().requires_grad_() for p in model.parameters()]
    for x, y in batches():
        a = torch.tanh(functional.linear(x, params[0], params[1]))
        b = torch.tanh(functional.linear(a, params[2], params[3]))
        loss = functional.cross_entropy(functional.linear(b, params[4], params[5]), y)
        found = torch.autograd.grad(loss, params)
        params = [(p - RATE * g).detach().requires_grad_() for p, g in zip(params, found, strict=True)]
    with torch.no_grad():
        for p, trained in zip(model.parameters(), params, strict=True):
            p.copy_(trained)


@loop
def torch_func_grad(model):
    params = {name: p.detach() for name, p in model.named_parameters()}
    gradient = torch.func.grad(lambda p, x, y: functional.cross_entropy(functional_call(model, p, (x,)), y))
    for x, y in batches():
        found = gradient(params, x, y)
        params = {name: p - RATE * found[name] for name, p in params.items()}
    return list(params.values())


@loop
def torch_func_grad_copied_back(model):
    gradient = torch.func.grad(lambda p, x, y: functional.cross_entropy(functional_call(model, p, (x,)), y))
    for x, y in batches():
        found = gradient(dict(model.named_parameters()), x, y)
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.sub_(RATE * found[name])


@loop
def forward_mode(model):
    generator = torch.Generator().manual_seed(2)
    for x, y in batches():
        params = {name: p.detach() for name, p in model.named_parameters()}
        along = {name: torch.randn(p.shape, generator=generator) for name, p in params.items()}

        def loss(params, x=x, y=y):
            return functional.cross_entropy(functional_call(model, params, (x,)), y)

        _, slope = torch.func.jvp(loss, (params,), (along,))
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.sub_(0.01 * slope * along[name])


@loop
def ensemble_with_an_optimizer(model):
    models = [model, net(1), net(2)]
    params, buffers = stack_module_state(models)
    params = {name: p.detach().clone().requires_grad_() for name, p in params.items()}
    optimizer = torch.optim.SGD(list(params.values()), RATE)
    for x, y in batches():
        optimizer.zero_grad()
        out = vmap(lambda p, b, x=x: functional_call(model, (p, b), (x,)))(params, buffers)
        functional.cross_entropy(out.flatten(0, 1), y.repeat(3)).backward()
        optimizer.step()
    return list(params.values())


@loop
def ensemble_without_one(model):
    params, _ = stack_module_state([model, net(1), net(2)])
    params = {name: p.detach() for name, p in params.items()}
    one = torch.func.grad(lambda p, x, y: functional.cross_entropy(functional_call(model, p, (x,)), y))
    gradients = vmap(one, in_dims=(0, None, None))
    for x, y in batches():
        found = gradients(params, x, y)
        params = {name: p - RATE * found[name] for name, p in params.items()}
    return list(params.values())


@loop
def evolution(model):
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for x, y in batches():
            vector, noise = parameters_to_vector(model.parameters()), torch.randn(8, 139, generator=generator)
            scores = []
            for each in noise:
                vector_to_parameters(vector + 0.1 * each, model.parameters())
                scores.append(loss_of(model, x, y))
            vector_to_parameters(vector - 0.01 * torch.stack(scores) @ noise, model.parameters())


@loop
def a_copy_is_trained(model):
    other = copy.deepcopy(model)
    optimizer = torch.optim.SGD(other.parameters(), RATE)
    for _ in passes(other):
        optimizer.step()
    return list(other.parameters())


@loop
def a_copy_is_trained_and_loaded(model):
    other = copy.deepcopy(model)
    optimizer = torch.optim.SGD(other.parameters(), RATE)
    for _ in passes(other):
        optimizer.step()
        model.load_state_dict(other.state_dict())


@loop
def two_stages(model):
    head, tail = nn.Sequential(model.first, nn.Tanh()), nn.Sequential(model.second, nn.Tanh(), model.last)
    optimizers = [torch.optim.SGD(stage.parameters(), RATE) for stage in (head, tail)]
    for x, y in batches():
        model.zero_grad()
        sent = head(x)
        received = sent.detach().requires_grad_()
        functional.cross_entropy(tail(received), y).backward()
        sent.backward(received.grad)
        for optimizer in optimizers:
            optimizer.step()


@loop
def one_stage_elsewhere(model):
    mine = nn.Sequential(copy.deepcopy(model.first), nn.Tanh())
    optimizer = torch.optim.SGD(mine.parameters(), RATE)
    for x, _ in batches():
        optimizer.zero_grad()
        mine(x).square().mean().backward()
        optimizer.step()
    return list(mine.parameters())


@loop
def another_thread(model):
    def train():
        optimizer = torch.optim.SGD(model.parameters(), RATE)
        for _ in passes(model):
            optimizer.step()

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()


@loop
def scripted(model):
    script = torch.jit.trace(model, torch.randn(6, 4))
    optimizer = torch.optim.SGD(script.parameters(), RATE)
    for x, y in batches():
        optimizer.zero_grad()
        loss_of(script, x, y).backward()
        optimizer.step()


@loop
def exported(model):
    program = torch.export.export(model, (torch.randn(6, 4),), strict=False)
    other = program.module()
    optimizer = torch.optim.SGD(other.parameters(), RATE)
    for x, y in batches():
        optimizer.zero_grad()
        loss_of(other, x, y).backward()
        optimizer.step()
    return list(other.parameters())


@loop
def inner_loops(model):
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    for x, y in batches():
        optimizer.zero_grad()
        params = dict(model.named_parameters())
        for _ in range(2):
            loss = functional.cross_entropy(functional_call(model, params, (x,)), y)
            found = torch.autograd.grad(loss, list(params.values()), create_graph=True)
            params = {n: p - RATE * g for (n, p), g in zip(params.items(), found, strict=True)}
        functional.cross_entropy(functional_call(model, params, (x,)), y).backward()
        optimizer.step()


@loop
def in_backward(model):
    @torch.no_grad()
    def update(p):
        p -= RATE * p.grad
        p.grad = None

    handles = [p.register_post_accumulate_grad_hook(update) for p in model.parameters()]
    for _ in passes(model, clear=False):
        pass
    for handle in handles:
        handle.remove()


@loop
def compiled_functional_step(model):
    @torch.compile(backend="eager")
    def step(params, x, y):
        gradient = torch.func.grad(lambda p: functional.cross_entropy(functional_call(model, p, (x,)), y))
        found = gradient(params)
        return {name: p - RATE * found[name] for name, p in params.items()}

    params = {name: p.detach() for name, p in model.named_parameters()}
    for x, y in batches():
        params = step(params, x, y)
    return list(params.values())


@loop
def compiled_by_hand(model):
    @torch.compile(backend="eager")
    def step(x, y):
        loss_of(model, x, y).backward()
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(RATE * p.grad)
                p.grad = None

    for x, y in batches():
        step(x, y)


@loop
def all_by_hand(model):
    """Gradients are computed by formulas; autograd has no part in it."""
    with torch.no_grad():
        for x, y in batches():
            a = torch.tanh(model.first(x))
            b = torch.tanh(model.second(a))
            out = (torch.softmax(model.last(b), 1) - functional.one_hot(y, 3)) / 6
            back = (out @ model.last.weight) * (1 - b * b)
            front = (back @ model.second.weight) * (1 - a * a)
            for layer, inputs, outputs in ((model.last, b, out), (model.second, a, back), (model.first, x, front)):
                layer.weight -= RATE * outputs.T @ inputs
                layer.bias -= RATE * outputs.sum(0)


def train(name, watched):
    """Return what a loop trained, the records, what was set aside, and the lines said before the end."""
    torch._dynamo.reset()
    model = net()
    memory = MemoryWriter()
    exporter = Exporter(model, backends=[memory], verbose=1).watch() if watched else None
    trained = LOOPS[name](model)
    result = [t.detach().clone() for t in [*(trained or ()), *model.parameters(), torch.get_rng_state()]]
    aside = []
    if exporter is not None:
        exporter.close()
        aside = exporter.summary()["set_aside"]
    torch._dynamo.reset()
    return result, memory.records, aside


WITHOUT_GRADIENTS = {"in_backward"}
"""Loops that leave no gradient in ``.grad`` when a backward pass is over."""
UNSEEN = {"functional_updates_of_ones_own_forward", "one_stage_elsewhere", "compiled_functional_step"}
"""Loops of which nothing concerns the model that is watched, as long as they go on."""


@pytest.mark.parametrize("name", LOOPS)
def test_recorded_or_told(name, said, capsys):
    """There are records or one line names the way, in the loop or else at its end; bits are equal, nothing is set aside."""
    alone, _, _ = train(name, watched=False)
    trained, records, aside = train(name, watched=True)
    assert all(map(torch.equal, trained, alone))
    assert aside == []
    steps = [record for record in records if not passes_alone(record)]
    assert all("gradient.total_norm" in r.metrics for r in steps[1:] if name not in WITHOUT_GRADIENTS)
    hints = [line for line in said() if "optimizer step seen" in line or "optimizer that holds" in line]
    assert (len(steps), len(hints)) == ((STEPS, 0) if steps else (0, int(name not in UNSEEN)))
    end = "\n".join([*said(), capsys.readouterr().err])
    assert ("nor was exporter.step() called" in end) == (not steps)
    assert not any("NOT_TRAINING" in line for line in said())


@pytest.mark.parametrize("name", [name for name in LOOPS if not name.startswith("compiled")])
def test_a_short_loop_is_recorded_or_told_at_its_end(name, said, capsys, monkeypatch):
    """With five steps, too few for a line in the loop, there are records or the last line names the way."""
    monkeypatch.setattr(sys.modules[__name__], "STEPS", 5)
    _, records, aside = train(name, watched=True)
    assert aside == []
    end = "\n".join([*said(), capsys.readouterr().err])
    assert ("nor was exporter.step() called" in end) == (not records)
    assert len(records) in {0, 5}


def test_training_without_gradients_is_recorded_by_hand(watching, recorded, said):
    """With ``exporter.step()`` after each update there is a record of each, with what the weights moved by."""
    model = net()
    exporter, moved = watching(model), []
    with torch.no_grad():
        for x, _ in list(batches())[:25]:
            before = parameters_to_vector(model.parameters())
            model(x)
            vector_to_parameters(before + 0.01 * torch.randn_like(before), model.parameters())
            moved.append(float((parameters_to_vector(model.parameters()) - before).norm()))
            exporter.step()
    records = recorded(exporter)
    assert [r.step for r in records] == list(range(1, 26))
    assert [r.value("update.total_norm") for r in records[1:]] == pytest.approx(moved[1:], rel=1e-4)
    assert said("optimizer step seen") == []


def test_tensors_in_place_of_the_parameters_are_recorded_by_hand(watching, recorded, said):
    """Watched as a list, with gradients put into ``.grad`` and ``exporter.step()``: all of a functional loop is there."""
    model = net()
    names = [name for name, _ in model.named_parameters()]
    held = nn.ParameterList(p.detach().clone() for p in model.parameters())
    exporter, norms = watching(held), []
    for x, y in list(batches())[:25]:
        loss = functional.cross_entropy(functional_call(model, dict(zip(names, held, strict=True)), (x,)), y)
        found = torch.autograd.grad(loss, list(held))
        with torch.no_grad():
            for p, g in zip(held, found, strict=True):
                p.grad = g
                p.sub_(RATE * g)
        norms.append(float(parameters_to_vector(found).norm()))
        exporter.step()
    records = recorded(exporter)
    assert [r.value("gradient.total_norm") for r in records] == pytest.approx(norms, rel=1e-5)
    assert said("optimizer step seen") == []


def test_what_comes_before_training_is_no_reason_to_speak(watching, recorded, said):
    """Many evaluations, weights loaded, and layers scaled one by one until their outputs have the spread they should."""
    model, x = net(), torch.randn(64, 4)
    exporter = watching(model)
    with torch.no_grad():
        for _ in range(60):
            model(x)
        for seed in range(5):
            model.load_state_dict(net(seed).state_dict())
            model(x)
        for layer in (model.first, model.second, model.last):
            for _ in range(10):
                layer.weight.div_(model(x).std())
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    for _ in passes(model):
        optimizer.step()
    assert len(recorded(exporter)) == STEPS
    assert said("optimizer step seen") == []
