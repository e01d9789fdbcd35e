"""What every instrument promises, run over the registry and over those of the loop itself."""

import ast
import contextlib
import re
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules import module as global_modules
from torch.optim import optimizer as global_optimizers

import gradflow_export
from gradflow_export.engine.registry import kinds, make_instruments, stepped, taken
from gradflow_export.hooks.compiled_calls import CompiledCode
from gradflow_export.hooks.discover import find_blocks
from gradflow_export.hooks.guards import Part
from gradflow_export.hooks.module_calls import ModuleCalls
from gradflow_export.hooks.module_hooks import ModuleHook
from gradflow_export.hooks.optimizer_steps import OptimizerSteps
from gradflow_export.hooks.readings import Clue, ClueSample, Pending, Sample
from gradflow_export.instruments.base import Cost, Instrument, Need, Setting, overrides
from gradflow_export.instruments.blocks import BlockInstrument
from gradflow_export.instruments.gradients.clipping import ClippingInstrument
from gradflow_export.instruments.gradients.parameters import GradientInstrument
from gradflow_export.instruments.loss import LossInstrument
from gradflow_export.instruments.runtime import RuntimeInstrument
from gradflow_export.metrics.arrays.norms import l2_norms
from gradflow_export.records.catalog import CATALOG
from gradflow_export.schedule import INTERVALS

ENTRIES = {kind.__name__: kind for kind in kinds()}
TAPS = ("blocks", "loss", "gradients", "clipping", *ENTRIES)
"""Those that the loop itself asks, and every entry of the registry."""
SELDOM = {
    "OriginInstrument",
    "RuntimeInstrument",
    "PictureInstrument",
    "ReloadInstrument",
    "StructureInstrument",
    "ModeInstrument",
    "EvaluationLoss",
    "CopyInstrument",
}
"""What gives out a note or numbers, or something only where there is a mistake or weights were loaded.

What finds nothing to read in the model below reads in the programs of its checks, ``tests/checks/fixtures``.
"""
ONCE = {"InitialInstrument"}
"""What is read in the first steps only, and not the same in each."""
JOINS = {"WiringInstrument"}
"""What gives out all of a record again, until the next begins: several optimizers of one record are joined."""
ROOMS = ("hooks", "autograd_graph", "instruments", "checks")
FILES = (path for room in ROOMS for path in (Path(gradflow_export.__file__).parent / room).rglob("*.py"))
SOURCES = sorted(
    path for path in FILES if re.search(r"^(import|from) torch", path.read_text(encoding="utf-8"), re.MULTILINE)
)
"""What may see a tensor: checks that judge numbers alone, without torch, do so on the worker."""
WAITING = {"item", "cpu", "tolist", "numpy", "synchronize"}


class Attending(nn.Module):
    """Two heads of attention between the samples, so that two dimensions suffice."""

    heads = 2

    def forward(self, x):
        parts = x.unflatten(1, (self.heads, -1)).transpose(0, 1)
        return x + functional.scaled_dot_product_attention(parts, parts, parts).transpose(0, 1).flatten(1)


class Remembering(nn.Module):
    """The samples as the steps of one sequence."""

    def __init__(self):
        super().__init__()
        self.core = nn.LSTM(6, 6)

    def forward(self, x):
        return x + self.core(x)[0]


class Kept(Part):
    """Keeps what hooks return."""

    def __init__(self, results):
        super().__init__()
        self.results = results

    def __call__(self, hook):
        """Wrap a hook."""

        def kept(*args, **kwargs):
            self.results.append(hook(*args, **kwargs))
            return self.results[-1]

        return kept


class Rig:
    """One tap on one model, driven as the exporter drives it."""

    def __init__(self, name):
        torch.manual_seed(0)
        self.name = name
        self.model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
        if name == "AttentionInstrument":
            self.model.insert(4, Attending())
        if name == "RecurrentInstrument":
            self.model.insert(4, Remembering())
        if name == "RepeatedInstrument":
            self.model.insert(4, nn.ModuleList([nn.Linear(6, 6)] * 2))
            self.model[4].forward = lambda x, both=tuple(self.model[4]): both[1](both[0](x))
        self.criterion = nn.CrossEntropyLoss()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.results, self.on = [], False
        self.calls = ModuleCalls()
        self.part = Kept(self.results)
        self.guard = self.part.__call__
        self.tap = self.make()

    def make(self):
        """Build the instrument."""
        if self.name == "blocks":
            tap = BlockInstrument(self.calls, find_blocks(self.model)[0], guard=self.guard)
            tap.sample_rows = True
            return tap
        if self.name in ENTRIES:
            setting = Setting(self.model, CompiledCode(self.model), lambda _: self.part, given={"pairs": "rows"})
            return ENTRIES[self.name].make(setting)
        if self.name == "loss":
            tap = LossInstrument(self.criterion, guard=self.guard)
            tap.want_logits = True
            return tap
        if self.name == "clipping":
            return ClippingInstrument(lambda: self.model, guard=self.guard)
        return GradientInstrument()

    def before(self, step):
        """Read what is read before the optimizer steps."""
        if self.name == "gradients":
            self.results.append(self.tap.read(step, statistics=True, histograms=True))
        elif self.name in ENTRIES:
            norms = l2_norms([p.grad for p in step.owned.parameters])
            self.results.append(self.tap.used(step, norms, None, stepped=False))
            self.results.append(self.tap.before(step))
        elif self.name == "clipping":
            self.results.append(self.tap.compare(step, l2_norms([p.grad for p in step.owned.parameters])))

    def after(self, step):
        """Read what is read after it."""
        if self.name in ENTRIES:
            self.results.append(self.tap.after(step))
            # which a loop asks for once the next forward pass has used the weights
            self.results.append(self.tap.settle())

    @property
    def may_be_empty(self):
        """Whether it may give out nothing in one step: it seldom does, or this model has nothing that it reads."""
        return self.name in SELDOM or not getattr(self.tap, "modules", 1)

    @contextlib.contextmanager
    def attached(self):
        """Attach the instrument, and the optimizer hooks that drive it, for a while."""
        steps = OptimizerSteps(lambda: self.model, self.before, self.after, skipped=self.after)
        attach = getattr(self.tap, "attach", contextlib.ExitStack)
        with steps.attach(), attach():
            self.calls.arm()
            arms = self.name in ENTRIES
            if not arms:
                self.tap.armed = True
            else:
                self.tap.arm(on=True)
            self.on = True
            try:
                yield
            finally:
                self.on = False
                if arms:
                    self.tap.arm(on=False)
                else:
                    self.tap.armed = False
                self.calls.arm(on=False)

    def step(self):
        """Train one step."""
        self.optimizer.zero_grad()
        output = self.model(torch.randn(5, 4))
        loss = self.criterion(output, torch.tensor([0, 1, 2, 0, 1]))
        if self.on and self.name == "PolicyInstrument":
            self.results.append(self.tap.take({"logits": output, "std": output.exp()}))
        if self.on and self.name in ENTRIES:
            self.results.append(self.tap.see(loss))
        loss.backward()
        if self.name == "clipping" and self.tap.armed:
            self.tap.over()
        self.optimizer.step()
        return loss

    def state(self):
        """Return everything that might be left on modules, parameters or torch itself."""
        modules = [*self.model.modules(), *self.criterion.modules()]
        hooks = [(k, dict(v)) for m in modules for k, v in vars(m).items() if "hooks" in k and isinstance(v, dict)]
        names = [sorted(vars(m)) for m in modules] + [sorted(vars(p)) for p in self.model.parameters()]
        world = [dict(v) for k, v in vars(global_modules).items() if k.startswith("_global") and isinstance(v, dict)]
        world += [dict(global_optimizers._global_optimizer_pre_hooks)]
        world += [dict(global_optimizers._global_optimizer_post_hooks)]
        world += [functional.scaled_dot_product_attention, torch.softmax, vars(Tensor).get("softmax")]
        return hooks, names, world, [dict(p._backward_hooks or {}) for p in self.model.parameters()]


def metrics_of(item):
    """Return the metrics that an item becomes; samples for histograms and ranks become no reading, clues evidence."""
    if isinstance(item, (Clue, ClueSample)):
        return set()
    if isinstance(item, Pending):
        return {item.metric}
    return set() if item.analyse is None else set(item.analyse(np.asarray(item.values)))


@pytest.fixture(params=TAPS)
def rig(request):
    """Each instrument in turn."""
    return Rig(request.param)


def test_specs_are_in_the_catalogue(rig):
    """Every metric an instrument declares is the catalogue's own entry, and every metric it gives out is declared."""
    declared = getattr(rig.tap, "specs", ())
    assert all(CATALOG[spec.name] is spec for spec in declared)
    with rig.attached():
        rig.step()
        drained = rig.tap.drain()
    given = {metric for item in drained for metric in metrics_of(item)}
    assert given or rig.may_be_empty or any(isinstance(item, (Clue, ClueSample)) for item in drained)
    assert given <= {spec.name for spec in declared}


def test_the_runtime_tap_declares_what_it_reads():
    """Memory figures are declared, in the catalogue, and positive."""
    tap = RuntimeInstrument()
    read = tap.numbers()
    assert set(read) <= {spec.name for spec in tap.specs}
    assert all(CATALOG[spec.name] is spec for spec in tap.specs)
    assert all(value > 0 for value in read.values())


def test_hooks_return_none(rig):
    """No hook returns anything, which would replace the output, gradient or arguments."""
    with rig.attached():
        rig.step()
    assert rig.results
    assert all(result is None for result in rig.results)


def test_drain_empties(rig):
    """What was given out once is not given out again, and the next step is given out anew."""
    with rig.attached():
        rig.step()
        first = rig.tap.drain()
        assert first or rig.may_be_empty
        assert rig.tap.drain() == [] or rig.name in JOINS
        rig.step()
        again = rig.tap.drain()
    assert rig.name in ONCE or {i.metric for i in first if isinstance(i, Pending)} <= {i.metric for i in again}


def test_values_are_detached_and_placed(rig):
    """Each value is a detached tensor or an array, one per place, places rise, and sites are strings."""
    with rig.attached():
        rig.step()
        drained = rig.tap.drain()
    assert drained or rig.may_be_empty
    for item in drained:
        values = torch.as_tensor(item.values.astype(np.int64) if item.values.dtype == object else item.values)
        assert not values.requires_grad
        assert values.grad_fn is None
        if isinstance(item, Sample):
            assert item.site
            continue
        places = range(len(item.sites)) if item.where is None else list(item.where)
        assert values.shape == (len(places),)
        assert list(places) == sorted(set(places))
        assert all(isinstance(site, str) for site in item.sites)
        assert torch.isfinite(values).all()


def test_after_close_the_model_is_as_it_was(rig):
    """Attaching, training and closing leave hooks, attributes and torch's global tables as they were."""
    before = rig.state()
    with rig.attached():
        rig.step()
    assert rig.state() == before
    rig.tap.drain()
    rig.results.clear()
    loss = rig.step()
    assert rig.tap.drain() == []
    assert rig.results == []
    assert not loss._backward_hooks


def test_closing_on_an_exception_is_closing(rig):
    """An exception while attached leaves nothing either."""
    before = rig.state()
    with pytest.raises(KeyError), rig.attached():  # noqa: PT012 - the step must run before
        rig.step()
        raise KeyError
    assert rig.state() == before


def test_training_is_the_same_with_each_tap():
    """With any one instrument attached the weights after three steps are bit for bit those without."""

    def weights(name, *, attach):
        rig = Rig(name)
        torch.manual_seed(1)
        with rig.attached() if attach else contextlib.nullcontext():
            for _ in range(3):
                rig.step()
                rig.tap.drain()
        return [p.detach().numpy().tobytes() for p in rig.model.parameters()]

    for name in TAPS:
        assert weights(name, attach=True) == weights(name, attach=False), name


@pytest.mark.parametrize("name", ENTRIES)
def test_an_instrument_declares_when_it_reads(name):
    """Its class has a name and an interval, that of the settings; what it costs and needs is known."""
    kind = ENTRIES[name]
    assert issubclass(kind, Instrument)
    assert kind.interval == INTERVALS.get(kind.instrument, 1)
    assert kind.cost in get_args(Cost)
    assert kind.needs <= set(get_args(Need))


def test_every_instrument_is_in_the_registry():
    """A subclass that the registry does not name would never be made."""
    folder = Path(gradflow_export.__file__).parent
    named = {
        node.name
        for path in folder.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef) and {"Instrument", "Reader"} & set(map(ast.unparse, node.bases))
    }
    assert named - {"Reader"} == set(ENTRIES)


def test_instruments_without_anything_to_read_are_left_out():
    """A plain model has no recurrence, no replicas and no layer that stands twice in a list."""
    model = nn.Linear(2, 2)
    made = make_instruments(Setting(model, CompiledCode(model), lambda _: Part()))
    assert {"RecurrentInstrument", "ReplicaInstrument", "RepeatedInstrument", "ActivationInstrument"}.isdisjoint(
        type(one).__name__ for one in made
    )
    assert all(one.modules for one in made)


def test_what_an_instrument_overrides_is_what_it_is_told_of():
    """Those that look around optimizer steps, and those that take what the user hands over, are known by class."""
    model = nn.LSTM(2, 2)
    made = make_instruments(Setting(model, CompiledCode(model), lambda _: Part(), given={"pairs": "rows"}))
    assert [type(one).__name__ for one in made if overrides(one, "settle")] == ["DiscreteInstrument"]
    assert {type(one).__name__ for one in made if stepped(one)} == {
        "UpdateInstrument", "MomentInstrument", "DiscreteInstrument", "CopyInstrument", "WiringInstrument", "ArrivalInstrument",
        "SumInstrument", "InitialInstrument", "ReloadInstrument",
    }  # fmt: skip
    assert taken() == {"policy", "intended", "validation_loss"}


def test_a_module_hook_copies_as_nothing():
    """The one hook that sits on a module turns into a method of the standard library when copied."""
    import copy
    import pickle

    hook = ModuleHook(print)
    for twin in (copy.deepcopy(hook), pickle.loads(pickle.dumps(hook))):
        assert twin(None, None, None) is None
        assert twin.__module__ is None or "gradflow" not in twin.__module__


def waiting_calls(path):
    """Return calls in a file that make the host wait for the device, as ``(line, name)``."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [
        (node.lineno, node.func.attr)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in WAITING
    ]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_no_tap_waits_for_the_device(path):
    """No .item(), .cpu(), .tolist(), .numpy() or synchronize() stands in what runs on the training thread."""
    assert waiting_calls(path) == []


def test_the_search_for_waiting_calls_finds_them(tmp_path):
    """The walk that the test above trusts sees each of the calls it forbids."""
    source = tmp_path / "bad.py"
    source.write_text("\n".join(f"x = y.{name}()" for name in sorted(WAITING)))
    assert [name for _, name in waiting_calls(source)] == sorted(WAITING)
