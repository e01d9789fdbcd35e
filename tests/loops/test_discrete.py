"""The discrete instrument in real loops: nothing changes, and what was meant is right in each of them."""

import pytest
import torch
from torch import nn

from gradflow_export import Exporter, MemoryWriter

ERROR, LOST = "parameter.update_error", "parameter.lost_share"


class Turn(nn.Module):
    """A linear layer with complex weights."""

    def __init__(self):
        """Make it."""
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 6, dtype=torch.complex64))

    def forward(self, x):
        """Return |x w|."""
        return (x.to(self.w.dtype) @ self.w.T).abs()


def real(dtype=torch.float32):
    """Return a small model with real weights."""
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.1), nn.Tanh(), nn.Linear(8, 4)).to(dtype)


def closure_loop(model, optimizer, x, **_):
    """Run backward inside the step."""

    def closure():
        optimizer.zero_grad()
        loss = model(x).float().square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)


def plain_loop(model, optimizer, x, **_):
    """Run backward before the step."""
    optimizer.zero_grad()
    model(x).float().square().mean().backward()
    optimizer.step()


def scaled_loop(model, optimizer, x, scaler):
    """Step through a gradient scaler."""
    optimizer.zero_grad()
    scaler.scale(model(x).float().square().mean()).backward()
    scaler.step(optimizer)
    scaler.update()


SGD = lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9)  # noqa: E731 - one of a table of makers
PROGRAMS = {
    "bfloat16": (lambda: real(torch.bfloat16), SGD, plain_loop, None),
    "float16": (lambda: real(torch.float16), torch.optim.AdamW, plain_loop, None),
    "complex": (Turn, torch.optim.Adam, plain_loop, None),
    "rows": (real, torch.optim.RMSprop, plain_loop, "rows"),
    "closure": (real, SGD, closure_loop, "rows"),
    "lbfgs": (real, lambda p: torch.optim.LBFGS(p, max_iter=2), closure_loop, "rows"),
    "scaler": (real, lambda p: torch.optim.AdamW(p, fused=True), scaled_loop, "rows"),
}


def run(name, *, watch, steps=12):
    """Train and return weights, random state and records."""
    build, make, loop, pairs = PROGRAMS[name]
    torch.manual_seed(0)
    model = build()
    optimizer = make(model.parameters())
    memory, dtype = MemoryWriter(), torch.float32 if name == "complex" else next(model.parameters()).dtype
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    exporter = Exporter(model, backends=[memory], strict=True, intervals={"discrete": 1})
    if watch:
        exporter.watch(pairs=pairs)
    for _ in range(steps):
        loop(model, optimizer, torch.randn(16, 6).to(dtype), scaler=scaler)
    exporter.close()
    assert exporter._worker.error is None
    return [p.detach().view(torch.uint8).tolist() for p in model.parameters()], torch.rand(3), memory.records


@pytest.mark.parametrize("name", PROGRAMS)
def test_training_is_the_same_bit_for_bit(name):
    """Weights and the state of the random generator are those without watching, and every step was read."""
    weights, state, records = run(name, watch=True)
    expected, other, _ = run(name, watch=False)
    assert weights == expected
    assert torch.equal(state, other)
    assert len(records) == 12
    metric = "node.count" if name in {"complex", "lbfgs"} else ERROR
    assert all(record.get(metric) is not None for record in records)


@pytest.mark.parametrize("name", ["rows", "closure", "scaler"])
def test_what_float32_weights_take_is_what_was_meant(name):
    """In float32 next to nothing is lost, with backward inside the step and with scaled gradients too."""
    _, _, records = run(name, watch=True)
    for record in records:
        assert max(record.get(ERROR).values) < 1e-6
        assert record.value("update.effectiveness") == pytest.approx(1.0, abs=1e-3)


def test_an_optimizer_whose_rule_is_not_known_is_not_scored():
    """Nodes are read all the same."""
    _, _, records = run("lbfgs", watch=True)
    assert all(record.get(ERROR) is None for record in records)


def test_a_float32_model_is_left_alone():
    """Where nothing is coarse or complex and nothing was asked for there is nothing to read, nor a hook."""
    model = real()
    optimizer = SGD(model.parameters())
    memory = MemoryWriter()
    with Exporter(model, backends=[memory], strict=True).watch() as exporter:
        assert "discrete" not in {tap.instrument for tap in exporter._loop.instruments.armed}
        plain_loop(model, optimizer, torch.randn(4, 6))
    assert memory.records[0].get(LOST) is None


def test_two_optimizers_fill_one_reading():
    """Each owns half of the parameters, and the record has all of them."""
    torch.manual_seed(0)
    model = real(torch.bfloat16)
    optimizers = [SGD(model[0].parameters()), torch.optim.AdamW(model[3].parameters())]
    memory = MemoryWriter()
    with Exporter(model, backends=[memory], strict=True).watch():
        for _ in range(3):
            model.zero_grad()
            model(torch.randn(4, 6).bfloat16()).float().square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
    assert all(value is not None for value in memory.records[-1].get(LOST).as_dict().values())
    assert memory.records[-1].value("update.lost_share") is not None


@pytest.mark.parametrize(
    ("pairs", "text"),
    [
        ([("0.weight", "0.weights")], "'0.weights', which is no parameter of the model; did you mean '0.weight'"),
        ([("0.weight", "0.bias")], "must be real and of one shape"),
        (["0.weight"], "must hold two parameter names each"),
        ("columns", 'must be "rows" or pairs of parameter names'),
    ],
)
def test_wrong_pairs_are_named(pairs, text):
    """The message says what was expected, what came and what to do."""
    model = real()
    with pytest.raises((ValueError, TypeError), match=text):
        Exporter(model, backends=()).watch(pairs=pairs)


def observed(micro, *, clear=True, none=True):
    """Return the records of three steps of some micro-batches, with components of the loss."""
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    criterion = nn.MSELoss()
    memory = MemoryWriter()
    with Exporter(model, backends=[memory], strict=True).watch(criterion) as exporter:
        for step in range(3):
            if clear:
                optimizer.zero_grad(set_to_none=none)
            for part in range(micro):
                criterion(model(torch.ones(2, 3)), torch.zeros(2, 1)).backward()
                exporter.observe(components={"a": torch.tensor(part + 1.0), "b": -(step + 1.0)})
            optimizer.step()
    return memory.records


def test_backward_passes_that_add_to_gradients_are_counted():
    """Three micro-batches add twice; without zero_grad, or with gradients kept as zeros, every later pass adds."""
    once, thrice = observed(1)[-1], observed(3)[-1]
    assert (once.value("runtime.backward_passes"), once.value("runtime.accumulated_share")) == (1.0, 0.0)
    assert thrice.value("runtime.backward_passes") == 3.0
    assert thrice.value("runtime.accumulated_share") == pytest.approx(2 / 3)
    assert [r.value("runtime.accumulated_share") for r in observed(1, clear=False)] == [0.0, 1.0, 1.0]
    assert [r.value("runtime.accumulated_share") for r in observed(1, none=False)] == [0.0, 1.0, 1.0]


def test_times_of_loss_and_optimizer_are_read_at_every_step():
    """Both are above 0, and no longer than the step they are part of."""
    for record in observed(2)[1:]:
        parts = record.value("runtime.loss_time") + record.value("runtime.optimizer_time")
        assert 0 < parts < record.value("runtime.step_time")


def test_loss_components_are_means_over_micro_batches_and_shares_of_their_sizes():
    """A negative component counts by its size."""
    records = observed(3)
    assert records[1].get("loss.component").as_dict() == {"a": 2.0, "b": -2.0}
    assert records[2].get("loss.component_share").as_dict() == pytest.approx({"a": 0.4, "b": 0.6})


def test_many_parameters_take_turns(monkeypatch):
    """With more than fit into one step each is read again after as many steps as there are turns."""
    monkeypatch.setattr("gradflow_export.instruments.discrete.updates.AT_ONCE", 2)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 4)).bfloat16()
    optimizer = SGD(model.parameters())
    memory = MemoryWriter()
    with Exporter(model, backends=[memory], strict=True).watch():
        for _ in range(4):
            plain_loop(model, optimizer, torch.randn(4, 6).bfloat16())
    read = [{s for s, v in r.get(LOST).as_dict().items() if v is not None} for r in memory.records]
    assert [len(sites) for sites in read] == [2, 2, 2, 2]
    assert read[0] | read[1] == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert (read[2], read[3]) == (read[0], read[1])
    assert all(record.value("update.lost_share") is not None for record in memory.records)


@pytest.mark.parametrize("width", [8, 1024])
def test_what_some_rows_of_a_matrix_say_carries_an_error_and_what_all_say_none(width):
    """Where a tensor has more entries than are looked at in one step, lost share and effectiveness are estimates."""
    torch.manual_seed(0)
    model = nn.Linear(width, width).bfloat16()
    optimizer, memory = SGD(model.parameters()), MemoryWriter()
    with Exporter(model, backends=[memory], strict=True).watch():
        for _ in range(2):
            plain_loop(model, optimizer, torch.randn(4, width).bfloat16())
    record = memory.records[0]
    assert (record.value("parameter.read_share", "weight") < 1) == (width > 8)
    for name in ("parameter.lost_share", "parameter.update_effectiveness", "update.lost_share", "update.effectiveness"):
        error = record.get(f"{name}_error")
        assert record.get(name) is not None
        assert (error is not None and error.values.max() > 0) == (width > 8)
