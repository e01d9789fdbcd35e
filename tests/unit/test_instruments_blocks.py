"""What blocks send forward and what comes back, in the cases in which the two could be mistaken for something else."""

import gc
import pickle
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.nn.modules import module as global_modules
from torch.utils.checkpoint import checkpoint

from gradflow_export import Exporter, MemoryWriter
from gradflow_export.engine.isolation import Guard
from gradflow_export.hooks.guards import unguarded
from gradflow_export.hooks.module_calls import ModuleCalls
from gradflow_export.instruments.blocks import BlockInstrument


@pytest.fixture(autouse=True)
def _no_hook_stays():
    """Take away what a test leaves armed: hooks of all modules, which other tests would count."""
    before = set(global_modules._global_forward_hooks)
    yield
    for key in set(global_modules._global_forward_hooks) - before:
        del global_modules._global_forward_hooks[key]


class Watched:
    """Three linear layers under an instrument, and what really comes back to their outputs."""

    def __init__(self, guard=unguarded):
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.tap = BlockInstrument(ModuleCalls(), [(f"{n}", layer) for n, layer in enumerate(self.layers)], guard=guard)
        self.closing = self.tap.attach()
        self.tap.calls.arm()
        self.came = {n: [] for n in range(3)}

    def forward(self, layers=(0, 1, 2), after=lambda x: x):
        """Run some layers one after the other."""
        x = torch.randn(5, 4)
        for n in layers:
            x = self.layers[n](x)
            x.register_hook(lambda gradient, n=n: self.came[n].append(gradient.clone()))
            x = after(x)
        return x.square().sum()

    def norms(self):
        """Return what the instrument says of each layer."""
        (found,) = [item for item in self.tap.drain() if item.metric == "block.gradient_norm"] or [None]
        return (
            {}
            if found is None
            else {int(found.sites[n]): float(v) for n, v in zip(found.where, found.values, strict=True)}
        )

    def really(self):
        """Return the norm over all that came to each layer."""
        joined = {n: torch.cat([g.reshape(-1) for g in came]) for n, came in self.came.items() if came}
        return {n: pytest.approx(float(gradients.double().norm()), rel=1e-6) for n, gradients in joined.items()}


def test_changed_in_place_afterwards():
    """An in-place function after the block hides neither its output nor its gradient."""
    for _ in range(3):
        watched = Watched()
        watched.forward(after=torch.relu_).backward()
        assert watched.norms() == watched.really()


def test_two_backward_passes_through_one_graph():
    """The norms of both are joined; those of a graph that was begun before a reset are not taken."""
    watched = Watched()
    loss = watched.forward()
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)
    assert watched.tap.store.backward_passes == 1
    assert watched.norms() == watched.really()
    watched.tap.store.reset()
    loss.backward()
    assert watched.norms() == {}


def test_a_graph_that_sends_more_after_a_step_is_of_that_step():
    """An optimizer between two backward passes through one graph: both belong to it, until the next forward pass."""
    watched = Watched()
    loss = watched.forward()
    loss.backward(retain_graph=True)
    first = watched.norms()
    loss.backward()
    assert watched.norms() == pytest.approx(first, rel=1e-6)


def test_micro_batches_and_a_block_called_twice():
    """All that comes to a block is one norm."""
    watched = Watched()
    watched.forward((0, 1, 1, 2)).backward()
    watched.forward((0, 2)).backward()
    assert [len(came) for came in watched.came.values()] == [2, 2, 2]
    assert watched.norms() == watched.really()


def test_a_gradient_that_the_user_keeps_is_as_without_us():
    """``retain_grad`` shows the gradient, other outputs keep none, and hooks of the user's own stay removable."""
    watched, seen = Watched(), []
    first = watched.layers[0](torch.randn(5, 4))
    second = watched.layers[1](first)
    first.retain_grad()
    first.register_hook(seen.append).remove()
    second.register_hook(seen.append)
    second.sum().backward()
    assert float(first.grad.norm()) == pytest.approx(watched.norms()[0], rel=1e-6)
    assert second.is_leaf is False
    assert second.retains_grad is False
    assert len(seen) == 1


def test_two_taps_see_the_same_output():
    """A block that gives its input on, and a second tap, each read the one tensor that they all share."""
    watched, other = Watched(), Watched()
    shared = nn.Identity()
    tap = BlockInstrument(watched.tap.calls, [("shared", shared)])
    with tap.attach():
        shared(watched.layers[0](torch.randn(5, 4))).sum().backward()
        assert list(tap.drain()[0].values) == list(watched.norms().values()) == [pytest.approx(20**0.5)]
    assert other.norms() == {}


def test_an_output_can_be_saved_without_a_warning():
    """The hook is left out when a tensor is pickled, and nobody is told of it."""
    watched = Watched()
    output = watched.layers[0](torch.randn(5, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pickle.dumps(output)


def test_nothing_is_held():
    """Outputs and gradients are free as soon as the model lets them go, with a backward pass or without."""
    watched = Watched()
    for backward in (True, False):
        held = []

        def keep(x, held=held, backward=backward):
            held.append(weakref.ref(x))
            if backward:
                x.register_hook(lambda gradient: held.append(weakref.ref(gradient)))
            return x

        watched.came = {n: [] for n in range(3)}
        loss = watched.forward(after=keep)
        if backward:
            loss.backward()
        watched.came.clear()
        del loss
        gc.collect()
        assert len(held) == (6 if backward else 3)
        assert [reference for reference in held if reference() is not None] == []


def test_what_cannot_be_read_at_once_is_read_by_torch():
    """Transposed, complex and empty outputs; the same block with another shape; a sum with what was read at once."""
    watched = Watched()
    watched.forward(after=lambda x: x.t().contiguous().t()).backward()
    assert watched.norms() == watched.really()
    block = nn.Identity()
    tap = BlockInstrument(watched.tap.calls, [("block", block)])
    inputs = [torch.randn(5, 4), torch.randn(3, 2), torch.randn(4, 3).t(), torch.randn(2, 2, dtype=torch.complex64)]
    with tap.attach():
        for x in inputs:
            (block(x.requires_grad_() * 1) * torch.ones(x.shape).t().contiguous().t()).abs().sum().backward()
            sent = next(item for item in tap.drain() if item.metric == "block.output_rms")
            assert float(sent.values[0]) == pytest.approx(float(x.detach().abs().square().mean().sqrt()), rel=1e-6)
        for x in inputs[:3]:
            (block(x * 1) * 2.0).sum().backward()
        norm = next(item for item in tap.drain() if item.metric == "block.gradient_norm").values[0]
        assert float(norm) == pytest.approx(2.0 * (20 + 6 + 12) ** 0.5, rel=1e-6)


def test_hooks_that_nobody_wraps_look_after_themselves():
    """They rest while the guard is suspended and after its part failed, and their time is counted."""
    guard = Guard()
    watched = Watched(guard.part("blocks"))
    with guard.suspended():
        watched.forward().backward()
    assert watched.norms() == {}
    assert guard.spent == 0.0
    with guard.suspended():
        loss = watched.forward()
    loss.backward()
    assert watched.norms() == {}
    watched.forward().backward()
    assert len(watched.norms()) == 3
    assert guard.spent > 0.0
    watched.forward().backward()
    guard.failed("blocks", ValueError("no such thing"))
    watched.norms()
    watched.forward().backward()
    assert watched.norms() == {}
    assert guard.failures == {"blocks": 1}


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_count_once(reentrant):
    """Blocks whose pass is run again in backward get the gradient of one pass."""
    norms = []
    for again in (False, True):
        watched = Watched()
        x = torch.ones(5, 4, requires_grad=True)
        for layer in watched.layers:
            x = checkpoint(layer, x, use_reentrant=reentrant) if again else layer(x)
        x.square().sum().backward()
        norms.append(watched.norms())
    assert norms[1] == pytest.approx(norms[0], rel=1e-6)
    assert len(norms[0]) == 3


@pytest.mark.parametrize("inplace", [False, True])
def test_both_ways_of_reading_say_the_same(inplace, monkeypatch):
    """Block gains, output sizes and spreads, dead and zero shares, updates: with the C library as without."""
    readings = []
    for switch in ("1", "0"):
        monkeypatch.setenv("GRADFLOW_NATIVE", switch)
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(12, 12), nn.ReLU(inplace=inplace)) for _ in range(3)]
        model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(inplace=inplace), nn.Flatten(), *layers, nn.Linear(12, 1))
        model[0].bias.data[1] = -100.0
        optimizer, writer = torch.optim.SGD(model.parameters(), lr=0.1), MemoryWriter()
        with Exporter(model, backends=[writer], strict=True).watch():
            for _ in range(7):
                for _ in range(2):
                    model(torch.randn(5, 2, 4, 4)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        readings.append([{r.metric: list(r.values[r.present]) for r in record.readings} for record in writer.records])
    for native, plain in zip(*readings, strict=True):
        assert native.keys() == plain.keys()
        names = [name for name in native if not name.startswith(("runtime.", "overhead", "flow.", "loss.time"))]
        assert {"block.gradient_norm", "block.output_spread", "activation.dead_share"} <= set(names)
        for name in names:
            assert native[name] == pytest.approx(plain[name], rel=1e-4, abs=1e-6, nan_ok=True), name
    assert readings[0][-1]["activation.dead_share"][0] == pytest.approx(1 / 3)
