"""What becomes of a watched model is what becomes of one that nobody watched: the same bytes, or the same error."""

import copy
import io
import pickle
import weakref
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from torch import multiprocessing, nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.hooks import RemovableHandle

from gradflow_export.schedule import INTERVALS

SAFE = [nn.Sequential, nn.Linear, nn.ReLU, nn.BatchNorm1d, nn.Embedding, nn.Dropout]


class Loose(nn.Module):
    """A model that TorchScript refuses, with a loss of its own and hooks that are its user's."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)
        self.criterion = nn.MSELoss()
        self.handle = self.first.register_forward_hook(shifted)
        self.register_forward_pre_hook(nothing)

    def forward(self, x, **options):
        return self.second(functional.relu(self.first(x), **options))


class Odd(nn.Module):
    """Parameters in unusual places: in a list, in a hidden module, tied, looked up, and given to modules as input."""

    def __init__(self):
        super().__init__()
        self.loose = [nn.Parameter(torch.randn(4))]
        self.hidden = [nn.Linear(4, 4)]
        self.table, self.head = nn.Embedding(6, 4), nn.Linear(4, 6)
        self.head.weight = self.table.weight
        self.layers = nn.ModuleList([nn.Linear(4, 4)] * 3)
        self.position = nn.Parameter(torch.randn(3, 4))
        self.norm = nn.LayerNorm(4)

    def forward(self, x):
        h = self.table(x) + self.norm(self.position) + self.loose[0]
        for layer in self.layers:
            h = torch.relu(layer(self.hidden[0](h)) + layer(self.position))
        return self.head(h)


def shifted(_module, _given, output):
    return output + 1


def nothing(_module, _given):
    return None


def plain():
    """Return a model of layers of torch."""
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 2))


ALL = dict.fromkeys(INTERVALS, 1)
MODELS = {"layers of torch": plain, "hooks of the user's": Loose}
STATES = {"before the first step": 0, "after 3 steps": 3, "after 150 steps": 150, "closed": 30}


def made(kind, steps, watch=None, *, close=False):
    """Return a model after some steps, watched or not."""
    torch.manual_seed(0)
    start, RemovableHandle.next_id = RemovableHandle.next_id, 1000  # numbers of the user's hooks are in its pickles
    try:
        model = MODELS[kind]()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        criterion = getattr(model, "criterion", nn.MSELoss())
        # Everything at every step at first, and after many steps what is read by default.
        often = {} if steps > 100 else {"intervals": ALL}
        exporter = None if watch is None else watch(model, criterion, **{"intervals": None, **often})
        for step in range(steps):
            optimizer.zero_grad()
            criterion(model(torch.randn(6, 4)), torch.zeros(6, 2)).backward()
            optimizer.step()
            if step == 1:
                with torch.no_grad():
                    model.eval()(torch.ones(2, 4))
                    model.train()
        optimizer.zero_grad()
        if close:
            exporter.close()
        return model
    finally:
        RemovableHandle.next_id = max(start, RemovableHandle.next_id)


def hooks_of(model):
    """Return how many entries all dictionaries of hooks of a model have."""
    return sum(len(v) for m in model.modules() for k, v in vars(m).items() if "hooks" in k and isinstance(v, dict))


class Pickler(pickle.Pickler):
    """The pickler of the standard library, but for storages, whose addresses are in their pickles."""

    def persistent_id(self, found):
        if isinstance(found, torch.UntypedStorage | torch.storage.TypedStorage):
            return str(found.device), bytes(getattr(found, "_untyped_storage", found).tolist())
        return None


def pickled(model, protocol=pickle.DEFAULT_PROTOCOL):
    stored = io.BytesIO()
    Pickler(stored, protocol).dump(model)
    return stored.getvalue()


def saved(model):
    stored = io.BytesIO()
    torch.save(model, stored)
    return stored.getvalue()


def loaded(model):
    stored = io.BytesIO(saved(model))
    with torch.serialization.safe_globals(SAFE):
        return pickled(torch.load(stored, weights_only=True))


def exported(model):
    program = torch.export.export(model.eval(), (torch.ones(2, 4),))
    return program.graph_module.code, sorted(program.state_dict), str(program.graph_signature)


def averaged(model):
    average = AveragedModel(model)
    return hooks_of(average), pickled(average)


def scripted(model):
    script = torch.jit.script(model.eval())
    return script.code, script(torch.ones(2, 4)).tolist(), hooks_of(script)


def traced(model):
    trace = torch.jit.trace(model.eval(), torch.ones(2, 4))
    return trace.code, hooks_of(trace)


def swapped(model):
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        return pickled(model.to(torch.float64))
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def of_subclasses(model):
    """Convert a model whose weights have become wrapper subclasses, which PyTorch swaps with any setting."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(TwoTensor(module.weight.detach(), module.weight.detach().clone()))
    return [
        (name, p.dtype, p.a.sum().item() if hasattr(p, "a") else 0) for name, p in model.double().named_parameters()
    ]


WAYS = {
    "torch.save": saved,
    "torch.load of weights only": loaded,
    "pickle": lambda model: [pickled(model, protocol) for protocol in range(2, 6)],
    "the pickle of processes": lambda model: len(bytes(ForkingPickler.dumps(model))),
    "copy.deepcopy": lambda model: (hooks_of(copy.deepcopy(model)), pickled(copy.deepcopy(model))),
    "AveragedModel": averaged,
    "torch.jit.script": scripted,
    "torch.jit.trace": traced,
    "torch.export": exported,
    "share_memory": lambda model: sorted(model.share_memory().state_dict()),
}


CHANGES = {
    "to, swapping": swapped,
    "to, tensor subclasses": of_subclasses,
    "to another dtype": lambda model: pickled(model.to(torch.bfloat16)),
}


def outcome(way, model):
    """Return what comes of a way to use a model, or the error."""
    try:
        return way(model)
    except Exception as error:
        return type(error), str(error)
    finally:
        model.train()


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("state", STATES)
def test_nobody_can_tell_that_a_model_is_watched(state, kind, watching):
    """Bytes, code and errors of a watched model are those of one that was trained alike and never watched."""
    plain, model = made(kind, STATES[state]), made(kind, STATES[state], watching, close=state == "closed")
    for name, way in WAYS.items():
        assert (name, outcome(way, model)) == (name, outcome(way, plain))


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("way", CHANGES)
def test_a_watched_model_is_converted_as_any_other(way, state, kind, watching):
    """Conversions give the same parameters or the same error, whatever was read before."""
    expected = outcome(CHANGES[way], made(kind, STATES[state]))
    assert outcome(CHANGES[way], made(kind, STATES[state], watching, close=state == "closed")) == expected


@pytest.mark.parametrize("state", STATES)
def test_conversion_works_after_close_too(state, watching):
    """Closing leaves nothing that keeps parameters from being swapped, and training goes on with the swapped ones."""
    model = made("layers of torch", STATES[state], watching, close=True)
    swapped(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(6, 4, dtype=torch.float64)).square().mean().backward()
    optimizer.step()


def test_swapped_parameters_are_read_on(watching, recorded):
    """After model.to() swapped every parameter, gradients and updates of the same names are read."""
    model = plain()
    exporter = watching(model)
    swapped(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(6, 4, dtype=torch.float64)).square().mean().backward()
        optimizer.step()
    for record in recorded(exporter):
        assert set(record.get("parameter.gradient_norm").sites) == {name for name, _ in model.named_parameters()}


def test_a_spawned_process_gets_the_model_alone(watching):
    """A model handed to a spawned process arrives as an unwatched one does."""
    models = [made("hooks of the user's", 3), made("hooks of the user's", 3, watching)]
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        expected, ours = (pickle.loads(pool.apply(pickle.dumps, (model,))) for model in models)
    assert pickled(ours) == pickled(expected)
    assert hooks_of(ours) == hooks_of(expected)


def test_copies_of_a_compiled_model_are_plain(watching):
    """Hooks for compiled code are in the modules, and in no copy or file of them."""
    torch._dynamo.reset()
    files = []
    for watch in (None, watching):
        torch.manual_seed(0)
        model = plain()
        compiled = torch.compile(model, backend="aot_eager")
        if watch is not None:
            watch(compiled)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            compiled(torch.randn(6, 4)).square().mean().backward()
            optimizer.step()
        twin = copy.deepcopy(model)
        files.append((saved(model), saved(twin), hooks_of(twin), scripted(model)))
    torch._dynamo.reset()
    assert hooks_of(model) > 0
    assert files[0] == files[1]


def test_the_users_hooks_stay_the_users(watching):
    """Hooks registered before and while watching run in their order, and their handles remove them at any time."""
    model, ran = plain(), []

    def hook(name):
        return lambda *_: ran.append(name)

    before = [model.register_forward_hook(hook("before, removed while")), model.register_forward_hook(hook("before"))]
    with_keywords = model.register_forward_pre_hook(lambda _m, _a, _k: ran.append("keywords"), with_kwargs=True)
    exporter = watching(model)
    meanwhile = [model.register_forward_hook(hook("while")), model.register_forward_hook(hook("first"), prepend=True)]
    model(torch.ones(2, 4))
    assert ran == ["keywords", "first", "before, removed while", "before", "while"]
    before[0].remove()
    ran.clear()
    model(torch.ones(2, 4))
    assert ran == ["keywords", "first", "before", "while"]
    exporter.close()
    ran.clear()
    model(torch.ones(2, 4))
    assert ran == ["keywords", "first", "before", "while"]
    for handle in (before[1], with_keywords, *meanwhile):
        handle.remove()
    ran.clear()
    model(torch.ones(2, 4))
    assert ran == []
    assert hooks_of(model) == 0
    assert {type(v) for m in model.modules() for k, v in vars(m).items() if "hooks" in k and isinstance(v, dict)} == {
        type(nn.Linear(1, 1)._forward_hooks)
    }


def test_no_hook_stays_on_a_tensor_that_the_user_holds(watching):
    """Closing takes our hooks off outputs and losses of all steps, and leaves the user's."""
    model, criterion, held, ran = plain(), nn.MSELoss(), [], []
    exporters = [watching(model, criterion), watching(model)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(80):
        optimizer.zero_grad()
        hidden = model[0](torch.randn(6, 4))
        out = model[1:](hidden)
        held += [hidden, out, model(torch.randn(6, 4)), criterion(out, torch.zeros(6, 2))]
        held[-1].register_hook(lambda _, step=step: ran.append(step))
        (held[-1] + held[-2].sum()).backward()
        optimizer.step()
    exporters[0].close()
    assert sum(bool(t._backward_hooks) for t in held) > 100
    exporters[1].close()
    assert [len(t._backward_hooks or ()) for t in held] == [0, 0, 0, 1] * 80
    assert ran == list(range(80))


def test_two_who_watch_leave_one_after_the_other(watching):
    """Of two exporters of one model either may go first; with the last one nothing is left."""
    for first in (0, 1):
        model = plain()
        exporters = [watching(model, strict=False), watching(model[0], strict=False)]
        exporters[first].close()
        model(torch.ones(2, 4)).sum().backward()
        exporters[1 - first].close()
        assert hooks_of(model) == 0


@pytest.mark.parametrize("closure", [False, True])
def test_no_weak_reference_stands_on_a_parameter(closure, watching):
    """At no moment of a step, and in no place of the model, does anything refer to a parameter weakly."""
    torch.manual_seed(0)
    model = Odd()
    every = [*model.parameters(), *model.loose, *model.hidden[0].parameters()]
    watching(model)
    others = [p for p in every if p is not model.position]
    optimizers = [torch.optim.AdamW(others, lr=0.01), torch.optim.SGD([model.position], lr=0.01)]

    def free():
        return not any(weakref.getweakrefs(p) for p in every)

    def passes():
        for optimizer in optimizers:
            optimizer.zero_grad()
        out = model(torch.randint(6, (5, 3)))
        assert free()
        loss = functional.cross_entropy(out.flatten(0, 1), torch.randint(6, (15,)))
        loss.backward()
        assert free()
        return loss

    for step in range(12):
        if not closure:
            passes()
        for optimizer in optimizers:
            optimizer.step(*[passes] * closure)
            assert free()
        if step == 5:
            model.load_state_dict(model.state_dict())
            assert free()
