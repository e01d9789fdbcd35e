"""What a program sets for itself, a default device, a comparison of modules, complex numbers, costs no reading."""

import contextlib
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from gradflow_export import (
    Exporter,
    MemoryWriter,
    NaNHandlingConfig,
    NumericalStabilityManager,
    PyTorchDebugger,
    PyTorchDebuggingConfig,
)


class Block(nn.Module):
    """A layer and its activation."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.layer = nn.Linear(inputs, outputs)

    def forward(self, x):
        return torch.relu(self.layer(x))


class Compared(Block):
    """The same, with a comparison that returns a tensor."""

    def __eq__(self, other):
        return self.layer.weight == (other.layer.weight if isinstance(other, Compared) else 0)

    __hash__ = nn.Module.__hash__


def model_of(kind):
    """Three blocks and a head."""
    torch.manual_seed(0)
    return nn.Sequential(kind(6, 8), kind(8, 8), kind(8, 8), nn.Linear(8, 3))


def train(model, x, around=contextlib.nullcontext, manager=None, kind=torch.optim.Adam):
    """Train while watched, strictly and within a context, and return what was recorded."""
    optimizer, writer = kind(model.parameters(), 0.001), MemoryWriter()
    with around(), Exporter(model, backends=[writer], strict=True).watch() as exporter:
        for _ in range(12):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), Y)
            loss.backward()
            if manager is not None:
                manager.step(model, loss, optimizer)
            optimizer.step()
    assert not exporter.issues
    return writer.records


def metrics(records):
    """The names of what was read in any step."""
    return {reading.metric for record in records for reading in record.readings}


def values(records, metric):
    """One metric's values, step by step."""
    return [record.value(metric) for record in records]


@contextlib.contextmanager
def default_device(device):
    """Set the process's default device for a while."""
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


X = torch.randn(16, 6, generator=torch.Generator().manual_seed(1))
Y = torch.arange(16) % 3

AROUND = {
    "a device context": lambda: torch.device("meta"),
    "the default device": lambda: default_device("meta"),
}


@pytest.mark.parametrize("around", AROUND)
def test_a_default_device_costs_no_reading(around):
    """New tensors of the program's lie on a device that holds no numbers; every metric is read, with the same values."""
    usual = train(model_of(Block), X)
    model = model_of(Block)
    found = train(model, X, AROUND[around])
    assert metrics(found) == metrics(usual)
    for metric in ("loss", "gradient.total_norm", "update.norm"):
        assert values(found, metric) == values(usual, metric)


def test_modules_whose_comparison_is_a_tensor_are_told_apart_by_identity():
    """An overloaded ``==`` is not asked: not by the exporter, the stability manager or a debugger."""
    usual = train(model_of(Block), X)
    model = model_of(Compared)
    with NumericalStabilityManager(nan_config=NaNHandlingConfig(policy="zero")).watch(model) as manager:
        found = train(model, X, manager=manager)
    assert metrics(usual) <= metrics(found)
    assert values(found, "loss") == values(usual, "loss")
    alone = Compared(3, 3)
    debugger = PyTorchDebugger()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    with NumericalStabilityManager(nan_config=NaNHandlingConfig(policy="skip")).watch(alone).watch(alone) as manager:
        for _ in range(3):
            loss = alone(torch.ones(2, 3)).sum()
            loss.backward()
            manager.step(alone, loss, optimizer)
            assert debugger.validate_model_parameters(alone)["valid"]


class Complex(nn.Module):
    """Complex layers and a real head."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 8, dtype=torch.complex64), nn.Linear(8, 3)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)).abs())


class Viewed(nn.Module):
    """A real network on complex inputs."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, x):
        return self.body(torch.view_as_real(x).flatten(1))


@pytest.mark.parametrize("kind", [Complex, Viewed])
def test_complex_inputs_are_read_without_a_warning(kind):
    """Real and imaginary part count as features: nothing is discarded."""
    torch.manual_seed(0)
    model, x = kind(), torch.complex(X, -X.flip(0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = train(model, x)
    assert {"loss", "gradient.total_norm"} <= metrics(found)
    assert any("input.rms" in record.facts for record in found)


@pytest.mark.parametrize("policy", ["zero", "clamp", "skip", "rewind"])
def test_the_stability_manager_works_beside_a_default_device(policy):
    """What it finds and tells is the same where new tensors of the program's hold no numbers."""
    told = []
    for around in (contextlib.nullcontext, *AROUND.values()):
        model = nn.Sequential(*model_of(Block), nn.BatchNorm1d(3))
        x = X.clone()
        x[0, 0] = float("nan")
        optimizer, writer = torch.optim.SGD(model.parameters(), lr=0.1), MemoryWriter()
        config = NaNHandlingConfig(policy=policy)
        debug = PyTorchDebuggingConfig(enable_autograd_anomaly=True, save_debug_info=False)
        manager = NumericalStabilityManager(nan_config=config, debug_config=debug)
        with around(), Exporter(model, backends=[writer], strict=True).watch(), manager.watch(model):
            for inputs in (X, x, X):
                optimizer.zero_grad()
                loss = F.cross_entropy(model(inputs), Y)
                loss.backward()
                manager.step(model, loss, optimizer)
                optimizer.step()
            told.append(manager.get_debug_summary()["anomalies_by_type"])
        assert all(value.isfinite().all() for value in model.state_dict().values())
    assert told[0] == told[1] == told[2]
    assert told[0]["nan_loss"] == 1


class Graph(nn.Module):
    """A graph network: features that may be sparse, and a matrix of neighbours that is."""

    def __init__(self, neighbours):
        super().__init__()
        self.neighbours = neighbours
        self.first, self.last = nn.Parameter(0.3 * torch.randn(6, 8)), nn.Parameter(0.3 * torch.randn(8, 3))

    def forward(self, x):
        hidden = torch.relu(torch.sparse.mm(self.neighbours, torch.mm(x, self.first)))
        return torch.sparse.mm(self.neighbours, hidden @ self.last)


class Edges(nn.Module):
    """A block that puts out a sparse matrix of its weights."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(9))

    def forward(self):
        places = torch.arange(9) % len(X)
        return torch.sparse_coo_tensor(torch.stack([places, places.flip(0)]), self.weight, (len(X), len(X)))


class Between(nn.Module):
    """Sparse between its blocks, and with a sparse weight."""

    def __init__(self):
        super().__init__()
        self.edges, self.head = Edges(), nn.Linear(6, 3)
        self.mixed = nn.Parameter((0.3 * torch.eye(len(X))).to_sparse())

    def forward(self, x):
        return self.head(torch.sparse.mm(self.edges(), x) + torch.sparse.mm(self.mixed, x))


@pytest.mark.parametrize("neighbours", ["to_sparse", "to_sparse_csr"])
@pytest.mark.parametrize("features", ["to_sparse", "to_sparse_csr", "to_dense"])
@pytest.mark.filterwarnings("ignore:Sparse")
def test_sparse_inputs_cost_no_reading(neighbours, features):
    """Rows of a sparse input are not known; nothing is set aside for that."""
    torch.manual_seed(0)
    matrix = torch.eye(len(X)) + 0.2 * (torch.rand(len(X), len(X)) < 0.3).float()
    found = train(Graph(getattr(matrix, neighbours)()), getattr(X, features)())
    assert {"loss", "gradient.total_norm"} <= metrics(found)


@pytest.mark.filterwarnings("ignore:Sparse")
def test_evaluations_on_sparse_inputs_cost_no_reading():
    """A sparse tensor has no address by which one input is told from the next."""
    torch.manual_seed(0)
    model, writer = nn.Sequential(Graph(torch.eye(len(X)).to_sparse()), nn.Dropout(0.1)), MemoryWriter()
    optimizer, x = torch.optim.Adam(model.parameters()), X.to_sparse()
    with Exporter(model, backends=[writer], strict=True).watch() as exporter:
        for _ in range(12):
            optimizer.zero_grad()
            F.cross_entropy(model(x), Y).backward()
            optimizer.step()
            with torch.no_grad():
                model.eval()(x)
            model.train()
    assert exporter.summary()["set_aside"] == []


@pytest.mark.filterwarnings("ignore:Sparse")
def test_sparse_outputs_and_weights_cost_no_reading():
    """What a block gives as a sparse tensor has a gradient norm and no rows, and a sparse weight no rows either."""
    torch.manual_seed(0)
    found = train(Between(), X, kind=torch.optim.SGD)
    assert {"block.gradient_norm", "block.output_rms"} <= metrics(found)


def test_a_dispatch_mode_of_the_users_sees_the_training_alone():
    """As many operations of floating-point numbers are counted as without us, and attention is read all the same."""

    def counted(*, watched):
        torch.manual_seed(0)
        model = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
        memory, optimizer = MemoryWriter(), torch.optim.SGD(model.parameters(), lr=0.1)
        every = {"attention": 1, "blocks": 1}
        exporter = Exporter(model, backends=[memory], strict=True, intervals=every).watch() if watched else None
        with FlopCounterMode(display=False) as counter:
            for _ in range(3):
                optimizer.zero_grad()
                model(torch.randn(2, 3, 4)).square().mean().backward()
                optimizer.step()
        if exporter is not None:
            exporter.close()
            assert all(record.get("attention.entropy_nats") is not None for record in memory.records)
        return counter.get_total_flops(), [p.tolist() for p in model.parameters()]

    assert counted(watched=True) == counted(watched=False)
