"""Inside compiled code: one graph, values as of the eager model, the same bits, and one line where nothing can be read."""

import copy
import io
import itertools

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

STEPS = 8
ROUNDING = {"rel": 1e-5, "abs": 1e-7}
OVER_A_WINDOW = {"activation.dead_share", "block.effective_rank", "block.rank_rows", "block.stable_rank"}
UNKNOWN = {"block.next"}
"""How blocks hang together is read from the graph of autograd, which compiled code has not."""


class Block(nn.Module):
    """A residual block with an activation module."""

    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.act = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.ReLU()
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(self.act(self.up(self.norm(x))))


class Net(nn.Module):
    """A chain of blocks; some of them may be checkpointed."""

    def __init__(self, *, reentrant=None):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(8) for _ in range(2))
        self.head = nn.Linear(8, 3)
        self.reentrant = reentrant

    def forward(self, x):
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)


class Tiny(nn.Module):
    """Layers and rectifiers only, which a compiler of C++ is soon done with."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def data(step):
    """Return another batch at each step."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(6, 8, generator=generator), torch.randint(0, 3, (6,), generator=generator)


def train(call, model, *, steps=STEPS, micro=1, autocast=False):
    """Train; return the bits of losses and of the last parameters."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    seen = []
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(micro):
            x, y = data(step * micro + part)
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                out = call(x)
            loss = nn.functional.cross_entropy(out.float(), y) / micro
            loss.backward()
            seen.append(loss.item())
        optimizer.step()
    return seen, [p.detach().clone() for p in model.parameters()]


def same_bits(one, other):
    """Whether two runs had the same losses and ended with the same parameters."""
    return one[0] == other[0] and all(torch.equal(a, b) for a, b in zip(one[1], other[1], strict=True))


def inside(record):
    """Return what is read at calls of modules: by metric, the values of all sites."""
    found = [r for r in record.readings if r.metric.startswith(("block.", "activation."))]
    return {r.metric: r.as_dict() for r in found if r.metric not in UNKNOWN}


def agree(records, wanted, first=0):
    """Assert that records hold what the eager run's hold, from one step on."""
    assert len(records) == len(wanted)
    assert {"block.gradient_norm", "block.gain", "block.output_rms", "activation.dead_share"} <= set(inside(wanted[-1]))
    for record, twin in list(zip(records, wanted, strict=True))[first:]:
        ours, theirs = inside(record), inside(twin)
        assert set(ours) == set(theirs)
        for metric, values in theirs.items():
            if first and metric in OVER_A_WINDOW:  # it began later
                continue
            assert ours[metric] == pytest.approx(values, **ROUNDING), (record.step, metric)


@pytest.fixture
def eager(watching, recorded):
    """Return a function that trains a model without compiling it and gives its records."""

    def records(model, **how):
        exporter = watching(model)
        train(model, model, **how)
        return recorded(exporter)

    return records


@pytest.fixture(autouse=True)
def afresh():
    """Begin and end without any compiled code."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def calling(model):
    """Return a function of the user's that calls a model."""

    def call(x):
        return model(x) * 1.0

    return call


def compile_as(how, model, backend):
    """Compile a model in one of the usual ways; return what is called and what is watched."""
    if how == "module.compile()":
        model.compile(backend=backend, fullgraph=True)
        return model, model
    if how == "a function":
        return torch.compile(calling(model), backend=backend, fullgraph=True), model
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    return compiled, compiled


@pytest.fixture(scope="module")
def bits():
    """Losses and parameters of a compiled run that nobody watches."""
    torch._dynamo.reset()
    plain = Net()
    return train(torch.compile(plain, backend="aot_eager", fullgraph=True), plain)


@pytest.mark.parametrize("how", ["torch.compile(model)", "module.compile()", "a function"])
@pytest.mark.parametrize("order", ["compiled first", "watched first"])
def test_one_graph_holds_the_taps(how, order, bits, watching, recorded, eager, said):
    """Watched before or after compiling, blocks and activations are read in one graph, with the bits of the unwatched run."""
    wanted = eager(Net())
    model, counter = Net(), CompileCounterWithBackend("aot_eager")
    known = order == "compiled first" and how != "a function"
    if order == "compiled first":
        call, watched = compile_as(how, model, counter)
        exporter = watching(watched)
    else:
        exporter = watching(model)
        call, _ = compile_as(how, model, counter)
    assert same_bits(train(call, model), bits)
    assert counter.frame_count == (1 if known else 2)  # what was compiled under process-wide hooks is compiled anew
    agree(recorded(exporter), wanted, first=0 if known else 2)  # the first step ends when the second does
    assert said() == []


def test_sampling_compiles_nothing_anew(watching, recorded):
    """Steps that are sampled and steps that are not run the same compiled code."""
    model, counter = Net(), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    exporter = watching(compiled, intervals={"blocks": 3, "activations": 2, "ranks": 5})
    train(compiled, model, steps=40)
    assert counter.frame_count == 1
    read = {r.step for r in recorded(exporter) if r.get("block.gain") is not None}
    assert 1 in read
    assert len(read) < 40


@pytest.mark.timeout(600)  # a compiler of C++ runs, on whatever machine this is
def test_real_code_keeps_its_bits(watching, recorded, eager):
    """Inductor's code with taps has the losses and parameters of its code without, and the values of the eager model."""
    wanted = eager(Tiny())
    quick = {"compile_threads": 1, "cpp_cache_precompile_headers": True, "cpp.simdlen": 1}  # eight kernels, one header
    with torch._inductor.config.patch(quick):
        plain = Tiny()
        bits = train(torch.compile(plain, fullgraph=True), plain)
        torch._dynamo.reset()
        model = Tiny()
        compiled = torch.compile(model, fullgraph=True, mode="reduce-overhead")  # on the CPU as the default mode
        exporter = watching(compiled)
        assert same_bits(train(compiled, model), bits)
    agree(recorded(exporter), wanted)


def test_a_second_instance_is_not_taken_for_the_first(watching, recorded, eager, said):
    """An instance watched after an unwatched one of the same class ran compiled is read all the same."""
    wanted = eager(Net())
    first, model = Net(), Net()
    train(torch.compile(first, backend="aot_eager"), first, steps=2)
    compiled = torch.compile(model, backend="aot_eager")
    exporter = watching(compiled)
    train(compiled, model)
    agree(recorded(exporter), wanted)
    assert said() == []


def test_a_model_that_ran_compiled_before_is_read(watching, recorded, said):
    """Watching a model in the middle of a compiled run reads it from the next step on."""
    model = Net()
    compiled = torch.compile(model, backend="aot_eager")
    train(compiled, model, steps=3)
    exporter = watching(compiled)
    train(compiled, model, steps=3)
    assert all("block.gain" in inside(record) for record in recorded(exporter))
    assert said() == []


def test_code_that_is_older_than_watch_is_told_of(watching, recorded, said):
    """A compiled function that called another instance unwatched before shows nothing, and one line says what to do."""
    first, model = Net(), Net()

    @torch.compile(backend="aot_eager")
    def call(x, net):
        return net(x)

    train(lambda x: call(x, first), first, steps=2)
    exporter = watching(model)
    train(lambda x: call(x, model), model)
    assert not any(inside(record) for record in recorded(exporter))
    assert len(said()) == len(said("call torch._dynamo.reset()")) == 1


def test_watching_again_needs_no_third_graph(watching, recorded):
    """Closing takes the instruments out of the code, watching again puts them in, with values in both runs."""
    model, counter = Net(), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for _ in range(3):
        exporter = watching(compiled)
        train(compiled, model, steps=2)
        assert all("block.gain" in inside(record) for record in recorded(exporter))
        assert not any(m._forward_hooks for m in model.blocks.modules())
    frames = counter.frame_count
    train(compiled, model, steps=2)
    assert counter.frame_count == frames + 1


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_inside(reentrant, watching, recorded, eager):
    """Compiled checkpointing has each block's values once, as without checkpointing."""
    wanted = eager(Net())
    plain, model = Net(reentrant=reentrant), Net(reentrant=reentrant)
    bits = train(torch.compile(plain, backend="aot_eager"), plain)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager")
    exporter = watching(compiled)
    assert same_bits(train(compiled, model), bits)
    agree(recorded(exporter), wanted)


def test_accumulation_inside(watching, recorded, eager):
    """Gradients at blocks of several micro-batches are joined inside compiled code as outside."""
    wanted = eager(Net(), micro=3)
    model = Net()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    exporter = watching(compiled)
    train(compiled, model, micro=3)
    agree(recorded(exporter), wanted)


def test_compiled_blocks_in_an_eager_model(watching, recorded, eager):
    """Blocks that are compiled one by one are read inside, and what is around them outside."""
    wanted = eager(Net())
    model = Net()
    for block in itertools.islice(model.blocks, 1):
        block.compile(backend="aot_eager", fullgraph=True)
    exporter = watching(model)
    train(model, model)
    agree(recorded(exporter), wanted)


@pytest.mark.parametrize("choice", ["exact", "always"])
def test_reduced_precision_is_read_on_request(choice, watching, recorded, said):
    """By default code under autocast keeps its bits and one line says so; ``compiled="always"`` reads it."""
    model = Net()
    compiled = torch.compile(model, backend="aot_eager")
    exporter = watching(compiled, compiled=choice)
    train(compiled, model, autocast=True)
    read = ["block.gain" in inside(record) for record in recorded(exporter)]
    assert set(read) == {choice == "always"}
    assert len(said("compiled='always'")) == (choice == "exact")


def test_compiled_code_can_be_left_alone(watching, recorded, said):
    """``compiled="never"`` puts nothing on the modules and says that nothing is read."""
    model = Net()
    compiled = torch.compile(model, backend="aot_eager")
    exporter = watching(compiled, compiled="never")
    assert not any(m._forward_hooks for m in model.blocks.modules())
    train(compiled, model)
    assert not any(inside(record) for record in recorded(exporter))
    assert len(said("the model is compiled")) == 1


def test_validation_and_copies_hold_no_taps(watching, recorded, eager):
    """Compiled passes without gradients leave no trace in records; copies and pickles of the model run alone."""
    wanted = eager(Net())
    model = Net()
    compiled = torch.compile(model, backend="aot_eager")
    exporter = watching(compiled)

    def call(x):
        with torch.no_grad():
            compiled(x * 100)
        return compiled(x)

    train(call, model)
    twin = copy.deepcopy(model)
    stored = io.BytesIO()
    torch.save(model, stored)
    assert b"gradflow" not in stored.getvalue()
    assert torch.equal(torch.compile(twin, backend="aot_eager")(data(0)[0]), model(data(0)[0]))
    agree(recorded(exporter), wanted)


class InPlace(nn.Module):
    """Blocks whose output is overwritten by what follows, and that return a tuple."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Tuple() for _ in range(2))
        self.act = nn.ReLU(inplace=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        for block in self.blocks:
            x = self.act(block(x)[1])
        return self.head(x)


class Tuple(nn.Module):
    """A linear layer that gives out a tuple."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return None, self.linear(x), x


def test_in_place_and_tuples_inside(watching, recorded, eager):
    """An output that is overwritten is read as the block gave it out, and so is one in a tuple."""
    wanted = eager(InPlace())
    model = InPlace()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    exporter = watching(compiled)
    train(compiled, model)
    agree(recorded(exporter), wanted)
