"""The tools beside training: clipping, anomaly mode, checks of gradients, memory, profiles."""

import ctypes
import gc
import json
import math
import threading
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradflow_export import ArgumentError, ArgumentTypeError, anomaly_mode, check_gradients
from gradflow_export.debugging import (
    AnomalyMode,
    CudaDevices,
    GradientClippingConfig,
    MemoryWatch,
    NaNHandlingConfig,
    NumericalStabilityManager,
    ProfilerWindow,
    PyTorchDebuggingConfig,
)

MB = 2**18
"""Entries of float32 in a megabyte."""


def net():
    """A network with weights of every kind of shape, and gradients on them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(27, 4))
    model(torch.randn(5, 2, 4, 4)).square().sum().backward()
    return model


def clipped(config, model):
    """Clip the gradients of a model; return what the manager tells, and norms before."""
    before = {name: p.grad.clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    told = NumericalStabilityManager(config).step(model, 1.0, optimizer)["clipping"]
    return told, before


def norm(tensors):
    """L2 norm of several tensors together, the slow way."""
    return math.sqrt(sum(float((t.double() ** 2).sum()) for t in tensors))


def test_clipping_by_norm_is_the_library_s():
    """The same bits as torch.nn.utils.clip_grad_norm_, and what was left of the norm is told."""
    ours, theirs = net(), net()
    told, before = clipped(GradientClippingConfig(max_norm=0.5), ours)
    nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine.grad, other.grad)
    assert told["norm_before"] == pytest.approx(norm(before.values()), rel=1e-5)
    assert told["norm_after"] == pytest.approx(0.5, rel=1e-4)
    assert told["scale"] == pytest.approx(0.5 / norm(before.values()), rel=1e-4)
    assert (told["clipped"], told["share"]) == (True, 1.0)


def test_adaptive_clipping_is_that_of_the_paper():
    """Row by row, as Brock et al. 2021 write it: G_i <- lambda max(|W_i|, eps) / |G_i| G_i where that is less."""
    model = net()
    told, before = clipped(GradientClippingConfig(mode="adaptive", clip_factor=0.02, exclude=["3"]), model)
    rows = shortened = 0
    for name, p in model.named_parameters():
        if name.startswith("3"):
            assert torch.equal(p.grad, before[name])
            continue
        units = [()] if p.dim() <= 1 else [(i,) for i in range(len(p))]
        for unit in units:
            weight, gradient = p.detach()[unit], before[name][unit]
            most = 0.02 * max(norm([weight]), 1e-3)
            factor = min(1.0, most / norm([gradient]))
            assert torch.allclose(p.grad[unit], factor * gradient, rtol=1e-5, atol=0)
            rows, shortened = rows + 1, shortened + (factor < 1)
    assert told["share"] == shortened / rows
    assert shortened > 0


def test_clipping_by_layer_leaves_small_layers_alone():
    """Each module's weight and bias are scaled down together, and only where they are too long."""
    model = net()
    norms = {layer: norm(p.grad for p in model[layer].parameters()) for layer in (0, 1, 3)}
    bound = sorted(norms.values())[1]
    told, _ = clipped(GradientClippingConfig(mode="per_layer", max_norm=bound * 1.001), model)
    for layer, before in norms.items():
        assert norm(p.grad for p in model[layer].parameters()) == pytest.approx(min(before, bound * 1.001), rel=1e-4)
    assert told["share"] == pytest.approx(1 / 3)


def test_clipping_by_value_counts_entries_and_takes_sparse_gradients():
    """Every entry ends in the range; of a sparse gradient those of the touched rows."""
    model = nn.Embedding(5, 2, sparse=True)
    (model(torch.tensor([1, 1, 3])) * torch.tensor([[3.0, 0.1]])).sum().backward()
    told, _ = clipped(GradientClippingConfig(mode="value", clip_value=0.5), model)
    assert model.weight.grad.to_dense()[1].tolist() == pytest.approx([0.5, 0.2])
    assert model.weight.grad.to_dense()[3].tolist() == pytest.approx([0.5, 0.1])
    assert told["share"] == 0.5
    told, _ = clipped(GradientClippingConfig(max_norm=0.1), model)
    assert norm([model.weight.grad.to_dense()]) == pytest.approx(0.1, rel=1e-4)


def state():
    """The process-wide switches of the anomaly mode."""
    return torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()


def backward_of_root():
    """A backward pass that makes NaN, under an anomaly mode of its own, without PyTorch's warning."""
    x = torch.zeros(1, requires_grad=True)
    with warnings.catch_warnings(), anomaly_mode():
        warnings.simplefilter("ignore")
        (torch.sqrt(x) * 0.0).sum().backward()


def test_anomaly_mode_is_put_back_whatever_happens():
    """Nested, left by an exception, inside PyTorch's own, and with PyTorch's own inside."""
    before = state()
    with pytest.raises(RuntimeError, match="SqrtBackward0"), anomaly_mode():
        backward_of_root()
    assert state() == before
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        with anomaly_mode(enabled=False):
            assert state() == (False, True)
            with torch.autograd.set_detect_anomaly(True):
                assert state() == (True, True)
            assert state() == (False, True)
        assert state() == (True, False)
    assert state() == before


def test_anomaly_modes_of_two_threads_may_overlap():
    """The one that began first ends first: the other keeps it on, and then it is off."""
    before, one_is_in, other_is_in, one_is_out = state(), *(threading.Event() for _ in range(3))
    seen = []

    def first():
        with anomaly_mode():
            one_is_in.set()
            other_is_in.wait(100)
        one_is_out.set()

    def second():
        one_is_in.wait(100)
        with anomaly_mode(check_nan=False):
            other_is_in.set()
            one_is_out.wait(100)
            seen.append(state())

    threads = [threading.Thread(target=first), threading.Thread(target=second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert seen == [(True, False)]
    assert state() == before


def test_an_anomaly_mode_that_is_started_twice_is_stopped_once():
    """Starting and stopping again change nothing."""
    before, mode = state(), AnomalyMode()
    mode.start()
    mode.start()
    assert state() == (True, True)
    mode.stop()
    mode.stop()
    assert state() == before


class Scaled(torch.autograd.Function):
    """tanh(x w), with a backward that is off by a factor."""

    @staticmethod
    def forward(ctx, x, w, factor):
        ctx.save_for_backward(x, w)
        ctx.factor = factor
        return (x * w).tanh()

    @staticmethod
    def backward(ctx, gradient):
        x, w = ctx.saved_tensors
        inner = gradient * (1 - (x * w).tanh() ** 2)
        return inner * w * ctx.factor, inner * x, None


class Wrong(nn.Module):
    """A network whose middle has such a backward."""

    def __init__(self, factor):
        super().__init__()
        self.first, self.last, self.factor = nn.Linear(6, 5), nn.Linear(5, 3), factor
        self.scale = nn.Parameter(torch.randn(5))

    def forward(self, x):
        return self.last(Scaled.apply(self.first(x), self.scale, self.factor))


@pytest.mark.parametrize(("factor", "passes"), [(1.0, True), (1.01, False), (0.99, False)])
def test_a_backward_that_is_off_by_a_per_cent_is_found(factor, passes):
    """Of a custom function as torch.autograd.gradcheck finds it, and within a module all that lies before it."""
    torch.manual_seed(0)
    x, w = torch.randn(3, 4, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)
    found = check_gradients(Scaled.apply, (x, w, factor))
    assert bool(found) is passes
    inputs = (x.requires_grad_(), w.requires_grad_(), factor)
    assert torch.autograd.gradcheck(Scaled.apply, inputs, raise_exception=False) is passes
    if not passes:
        assert found.worst == "input 0"
        assert found.max_relative_error == pytest.approx(abs(factor - 1) / max(factor, 1), rel=1e-3)
    inside = check_gradients(Wrong(factor), torch.randn(7, 6))
    failed = {name for name, check in inside.parameters.items() if not check.passed}
    assert failed == (set() if passes else {"first.weight", "first.bias", "input 0"})
    assert set(inside.parameters) == failed | {
        "scale",
        "last.weight",
        "last.bias",
        "first.weight",
        "first.bias",
        "input 0",
    }
    assert inside.worst in (failed or inside.parameters)


def test_dropout_batch_statistics_and_kinks_do_not_disturb():
    """A healthy network passes, on inputs that lie exactly on the kink of its ReLU too, and stays as it was."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(6, 9, bias=False), nn.BatchNorm1d(9), nn.ReLU(), nn.Dropout(0.5), nn.Linear(9, 2)
    ).train()
    inputs = torch.randn(8, 6)
    before, generator = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    assert check_gradients(model, inputs)
    at_the_kink = check_gradients(model, torch.zeros(8, 6))
    assert at_the_kink
    assert sum(check.kinks for check in at_the_kink.parameters.values()) > 0
    assert check_gradients(lambda x: F.dropout(x, 0.5, True), inputs)
    assert torch.equal(generator, torch.get_rng_state())
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


class Deep(nn.Module):
    """Many layers, one of them with a backward that is off; counts its calls."""

    def __init__(self, wrong, depth=20):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(depth))
        self.wrong, self.calls = wrong, []

    def forward(self, x):
        self.calls.append(1)
        for place, layer in enumerate(self.layers):
            weight = Scaled.apply(layer.weight, torch.ones_like(layer.weight), 1.01 if place == self.wrong else 1.0)
            x = 0.1 * F.gelu(F.linear(x, weight, layer.bias)) + x
        return x


def test_many_tensors_are_checked_together_first_and_the_wrong_one_is_still_named(monkeypatch):
    """A healthy network takes few passes, however many its tensors; a wrong backward is found among them."""
    monkeypatch.setattr(Deep, "__deepcopy__", lambda self, _memo: self, raising=False)
    for depth in (20, 80):
        torch.manual_seed(0)
        healthy = Deep(None, depth)
        found = check_gradients(healthy.double(), torch.randn(3, 5))
        assert found
        assert len(found.parameters) == 2 * depth + 1
        assert len(healthy.calls) <= 30
    found = check_gradients(Deep(7).double(), torch.randn(3, 5))
    assert [name for name, check in found.parameters.items() if not check.passed] == ["layers.7.weight"]
    assert found.worst == "layers.7.weight"
    assert found.max_relative_error == pytest.approx(0.0099, rel=0.05)


def test_losses_and_sparse_gradients_are_checked():
    """A loss is checked by its inputs, a model with its loss, sparse gradients where they are wanted."""
    labels = torch.tensor([0, 2, 1])
    assert set(check_gradients(nn.CrossEntropyLoss(), (torch.randn(3, 4), labels)).parameters) == {"input 0"}
    model = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 3))
    rows = torch.tensor([1, 5, 1])
    assert set(check_gradients(model, rows, loss=lambda out: F.cross_entropy(out, labels)).parameters) == {
        "0.weight", "1.weight", "1.bias",
    }  # fmt: skip
    assert set(check_gradients(model, rows, sparse=False).parameters) == {"1.weight", "1.bias"}
    assert set(check_gradients(model, rows, dense=False).parameters) == {"0.weight"}


def test_a_loss_that_is_cut_off_is_found_or_refused():
    """A parameter that autograd does not see differs from its finite difference; an output without graph is refused."""

    class Cut(nn.Module):
        def __init__(self):
            super().__init__()
            self.seen, self.cut = nn.Linear(3, 2), nn.Linear(3, 2)

        def forward(self, x):
            return self.seen(x) + self.cut(x).detach()

    found = check_gradients(Cut(), torch.randn(4, 3))
    assert {name for name, check in found.parameters.items() if not check.passed} >= {"cut.weight", "cut.bias"}
    assert "of 5 gradients agree with finite differences" in str(found)
    with pytest.raises(ArgumentError, match="got one that is detached"):
        check_gradients(lambda x: x.detach(), torch.randn(3))
    with pytest.raises(ArgumentError, match="must hold a floating-point tensor"):
        check_gradients(lambda x: x, torch.tensor([1]))
    with pytest.raises(ArgumentTypeError, match="got int"):
        check_gradients(3, torch.randn(3))


def test_a_megabyte_a_step_is_a_leak_and_its_tensors_are_named():
    """Tensors that pile up are found and told by shape; the verdict says how fast."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # a leak fits unseen into what earlier tests have freed
    watch, kept = MemoryWatch(scan_interval=20), []
    for step in range(1, 91):
        kept.append(torch.full((MB,), float(step)))
        watch.read(step)
    verdict = watch.verdict()
    assert verdict["leaks"]
    assert verdict["megabytes_per_step"] == pytest.approx(1.0, rel=0.2)
    worst = verdict["growing"][0]
    assert (worst["shape"], worst["dtype"], worst["made_by"]) == ([MB], "float32", "leaf")
    assert worst["count"] == pytest.approx(worst["megabytes"])
    json.dumps(verdict, allow_nan=False)


def test_a_replay_buffer_that_fills_is_no_leak():
    """Memory that levels off was never a leak."""
    watch, kept = MemoryWatch(), []
    for step in range(1, 91):
        if step <= 30:
            kept.append(torch.full((2 * MB,), float(step)))
        watch.read(step)
    assert not watch.verdict()["leaks"]
    assert watch.verdict()["message"] == ""


def test_a_profile_is_written_for_tensorboard_and_summed_up(tmp_path):
    """The window ends by itself, its trace can be read, and the operations that take most are listed."""
    ended = []
    window = ProfilerWindow(tmp_path / "run", steps=2, memory=True, on_end=ended.append)
    window.start()
    for _ in range(4):
        torch.mm(torch.ones(300, 300), torch.ones(300, 300))
        window.step()
    assert not window.running
    assert ended == [window.summary]
    assert "aten::mm" in [entry["name"] for entry in window.summary["by_time"]]
    assert window.summary["by_memory"][0]["megabytes"] > 0.3
    (trace,) = (tmp_path / "run").glob("*.pt.trace.json")
    assert window.summary["trace"] == str(trace)
    assert any(event.get("name") == "aten::mm" for event in json.loads(trace.read_text())["traceEvents"])


def test_cuda_debugging_without_cuda_says_so_once_and_does_nothing(caplog, monkeypatch):
    """Where there is no device the log says what is not done, and the loop goes on."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    devices = CudaDevices(synchronize=True, memory_fraction=0.5)
    devices.synchronize()
    assert devices.read() == {}
    (record,) = caplog.records
    assert "sees no CUDA device: nothing is synchronised, limited or monitored" in record.message


@pytest.mark.parametrize(
    ("config", "given", "kind", "text"),
    [
        (GradientClippingConfig, {"mode": "nrom"}, ArgumentError, "did you mean 'norm'"),
        (GradientClippingConfig, {"max_norm": 0.0}, ArgumentError, "max_norm must be above 0, got 0.0"),
        (GradientClippingConfig, {"max_norm": "1"}, ArgumentTypeError, "max_norm must be a number"),
        (GradientClippingConfig, {"exclude": "head"}, ArgumentTypeError, "exclude must be a list of names"),
        (NaNHandlingConfig, {"policy": "ignore"}, ArgumentError, "policy must be one of detect, skip"),
        (NaNHandlingConfig, {"rewind_after": 0}, ArgumentError, "rewind_after must be at least 1"),
        (NaNHandlingConfig, {"check_loss": 1}, ArgumentTypeError, "check_loss must be True or False"),
        (PyTorchDebuggingConfig, {"autograd_anomaly_mode": "rise"}, ArgumentError, "did you mean 'raise'"),
        (PyTorchDebuggingConfig, {"cuda_memory_fraction": 1.5}, ArgumentError, "share above 0 and at most 1, got 1.5"),
        (PyTorchDebuggingConfig, {"enable_grad_check": "yes"}, ArgumentTypeError, "must be True or False, got 'yes'"),
        (PyTorchDebuggingConfig, {"max_debug_iterations": 2.5}, ArgumentTypeError, "must be a whole number"),
        (PyTorchDebuggingConfig, {"debug_timeout": -1.0}, ArgumentError, "debug_timeout must be a number of at least"),
        (PyTorchDebuggingConfig, {"debug_file_prefix": "a/b"}, ArgumentError, "put folders into debug_output_dir"),
        (PyTorchDebuggingConfig, {"debug_output_dir": 3}, ArgumentTypeError, "must be a path, got 3"),
    ],
)
def test_wrong_settings_are_named(config, given, kind, text):
    """The message says what was expected, what came and what to do."""
    with pytest.raises(kind, match=text):
        config(**given)


def test_wrong_arguments_of_the_manager_are_named():
    """Configurations in the wrong place, and losses that are none."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(
        ArgumentTypeError, match=r"clipping_config must be of the type GradientClippingConfig, got NaNHandlingConfig"
    ):
        NumericalStabilityManager(NaNHandlingConfig())
    with pytest.raises(ArgumentTypeError, match=r"debug_config must be a PyTorchDebuggingConfig, got dict"):
        NumericalStabilityManager(debug_config={})
    with pytest.raises(ArgumentTypeError, match=r"loss must be a tensor or a number, got str"):
        NumericalStabilityManager().step(model, "0.1", optimizer)
    for wrong in (model, None):
        with pytest.raises(ArgumentTypeError, match=r"optimizer must be a torch.optim.Optimizer, got (Linear|None)"):
            NumericalStabilityManager().step(model, 1.0, wrong)
    with pytest.raises(ArgumentTypeError, match=r"model must be a torch.nn.Module, got NoneType"):
        NumericalStabilityManager().watch(None)
    with pytest.raises(ArgumentTypeError, match=r"scaler must be a torch.amp.GradScaler, got int"):
        NumericalStabilityManager(scaler=3)
    for schedulers in (torch.optim.lr_scheduler.StepLR(optimizer, 1), [optimizer]):
        with pytest.raises(ArgumentTypeError, match=r"schedulers must be a list of learning-rate schedulers, got"):
            NumericalStabilityManager(schedulers=schedulers)
