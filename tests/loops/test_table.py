"""Every training loop against the plain one: each cell of docs/loops.md, and not a bit changed by watching."""

import importlib.util
import math
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

from gradflow_export import Exporter, MemoryWriter
from gradflow_export.schedule import INTERVALS


def load():
    """Return the list of loops, which lies beside this file."""
    spec = importlib.util.spec_from_file_location("gradflow_loops_table", Path(__file__).with_name("table.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


TABLE = load()
MICRO, RATE, NORM, VALUE = 3, 1e-2, 0.1, 0.01
NAMES = [loop.name for loop in TABLE.LOOPS]


class Block(nn.Module):
    """A residual block with a hidden ReLU."""

    def __init__(self):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(self.act(self.up(x)))


class Net(nn.Module):
    """Four blocks and a head."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(8, 3)
        self.reentrant = None

    def forward(self, x):
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)


def batch(step):
    """Return inputs and classes of one step; the inputs require gradients, as reentrant checkpointing wants."""
    generator = torch.Generator().manual_seed(100 + step)
    x = torch.randn(12, 8, generator=generator).requires_grad_()
    return x, torch.randint(0, 3, (12,), generator=generator)


class Run:
    """What every loop needs: a model, a criterion, and a plain way to do each part."""

    def __init__(self, steps, *, fused=None):
        self.model, self.criterion, self.steps = Net(), nn.CrossEntropyLoss(), steps
        self.call, self.optimizers, self.losses, self.fused = self.model, [], [], fused

    def adam(self, parameters):
        """Make an optimizer."""
        made = torch.optim.AdamW(list(parameters), lr=RATE, fused=self.fused)
        self.optimizers.append(made)
        return made

    def forward(self, x, y, divided=1):
        """Return the loss of a batch."""
        loss = self.criterion(self.call(x), y) / divided
        self.losses.append(loss.detach().clone())
        return loss

    def train(self, each=None, after=None, *, clip=None, set_to_none=True):
        """Train as everybody does, with the parts that a loop has of its own."""
        optimizer = self.optimizers[0] if self.optimizers else self.adam(self.model.parameters())
        for step in range(self.steps):
            if each is not None:
                each(step)
            optimizer.zero_grad(set_to_none=set_to_none)
            self.forward(*batch(step)).backward()
            if clip is not None:
                clip(self.model.parameters())
            optimizer.step()
            if after is not None:
                after()


def accumulation(run):
    """Three micro-batches to a step."""
    optimizer = run.adam(run.model.parameters())
    for step in range(run.steps):
        optimizer.zero_grad()
        for x, y in zip(*(part.chunk(MICRO) for part in batch(step)), strict=True):
            run.forward(x, y, MICRO).backward()
        optimizer.step()


def two_optimizers(run):
    """Halves of the model, one after the other."""
    both = [run.adam(run.model.blocks.parameters()), run.adam(run.model.head.parameters())]
    for step in range(run.steps):
        run.model.zero_grad()
        run.forward(*batch(step)).backward()
        for optimizer in both:
            optimizer.step()


def two_backward_passes(run):
    """One forward pass in two graphs: the head's optimizer steps before the backward pass reaches the blocks."""
    both = [run.adam(run.model.head.parameters()), run.adam(run.model.blocks.parameters())]
    for step in range(run.steps):
        run.model.zero_grad()
        x, y = batch(step)
        for block in run.model.blocks:
            x = block(x)
        cut = x.detach().requires_grad_()
        loss = run.criterion(run.model.head(cut), y)
        run.losses.append(loss.detach().clone())
        loss.backward()
        both[0].step()
        x.backward(cut.grad)
        both[1].step()


def optimizer_in_backward(run):
    """One optimizer for each parameter, which steps and frees the gradient during backward."""
    for parameter in run.model.parameters():
        optimizer = run.adam([parameter])

        def step(parameter, optimizer=optimizer):
            optimizer.step()
            parameter.grad = None

        parameter.register_post_accumulate_grad_hook(step)
    for step in range(run.steps):
        run.forward(*batch(step)).backward()


def closure(run, optimizer=None):
    """The backward pass runs inside the step."""
    optimizer = run.adam(run.model.parameters()) if optimizer is None else optimizer
    for step in range(run.steps):

        def evaluate(step=step):
            optimizer.zero_grad()
            loss = run.forward(*batch(step))
            loss.backward()
            return loss

        optimizer.step(evaluate)


def lbfgs(run):
    """One evaluation in each step."""
    optimizer = torch.optim.LBFGS(run.model.parameters(), lr=RATE, max_iter=1)
    run.optimizers.append(optimizer)
    closure(run, optimizer)


def along_the_gradient(run):
    """The plain twin of the first step of LBFGS: ``lr * min(1, 1/|g|_1)`` along the gradient."""
    optimizer = torch.optim.SGD(run.model.parameters(), lr=RATE)
    run.optimizers.append(optimizer)
    for step in range(run.steps):
        run.forward(*batch(step)).backward()
        total = sum(float(p.grad.abs().sum()) for p in run.model.parameters())
        optimizer.param_groups[0]["lr"] = RATE * min(1.0, 1.0 / total)
        optimizer.step()


def grad_scaler(run):
    """A scaler whose first step overflows and is skipped; that batch comes once more."""
    optimizer = run.adam(run.model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100)
    for step, bad in [(0, True), *((step, False) for step in range(run.steps))]:
        optimizer.zero_grad()
        scaler.scale(run.forward(*batch(step))).backward()
        if bad:
            run.model.head.bias.grad[0] = math.inf
        scaler.step(optimizer)
        scaler.update()


def autocast(run):
    """The forward pass in bfloat16."""
    model = run.model

    def call(x):
        with torch.autocast("cpu", torch.bfloat16):
            return model(x).float()

    run.call = call
    run.train()


def checkpointed(run, *, reentrant=False):
    """Each block checkpointed."""
    run.model.reentrant = reentrant
    run.train()


def unfreezing(run):
    """The first two blocks are frozen at first."""
    model = run.model
    model.blocks[:2].requires_grad_(False)
    optimizer = run.adam([*model.blocks[2:].parameters(), *model.head.parameters()])

    def each(step):
        if step == 2:
            model.blocks[:2].requires_grad_(True)
            optimizer.add_param_group({"params": list(model.blocks[:2].parameters())})

    run.train(each)


def replaced(run):
    """The head is another one from the third step on."""
    model, optimizer = run.model, run.adam(run.model.parameters())

    def each(step):
        if step == 2:
            torch.manual_seed(1)
            model.head = nn.Linear(8, 3)
            optimizer.add_param_group({"params": list(model.head.parameters())})

    run.train(each)


def averaged(run):
    """Two averages of the weights."""
    copies = [AveragedModel(run.model), AveragedModel(run.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))]
    run.train(after=lambda: [average.update_parameters(run.model) for average in copies])


def compiled(run, *, reentrant=None):
    """One graph; the instrument's operator in it needs no compiler of C++ to be right."""
    torch._dynamo.reset()
    run.model.reentrant = reentrant
    run.call = torch.compile(run.model, backend="aot_eager", fullgraph=True)
    return run.call


WAYS = {
    "gradients zeroed in place": lambda run: run.train(set_to_none=False),
    "accumulation": accumulation,
    "two optimizers": two_optimizers,
    "optimizer between two backward passes": two_backward_passes,
    "optimizer in backward": optimizer_in_backward,
    "closure": closure,
    "LBFGS": lbfgs,
    "clipped by norm": lambda run: run.train(clip=lambda p: nn.utils.clip_grad_norm_(p, NORM)),
    "clipped by value": lambda run: run.train(clip=lambda p: nn.utils.clip_grad_value_(p, VALUE)),
    "GradScaler": grad_scaler,
    "GradScaler, fused": grad_scaler,
    "bfloat16 autocast": autocast,
    "checkpointing": checkpointed,
    "checkpointing, reentrant": lambda run: checkpointed(run, reentrant=True),
    "unfreezing": unfreezing,
    "parameters replaced": replaced,
    "EMA and SWA": averaged,
    "compiled": Run.train,
    "compiled, checkpointing": Run.train,
    "watched, then compiled": Run.train,
}


def clipped_by_hand(run, change):
    """The plain twin of clipping."""

    def clip(parameters):
        gradients = [p.grad for p in parameters]
        change(gradients, math.sqrt(sum(float(g.double().square().sum()) for g in gradients)))

    run.train(clip=clip)


def left_out(run):
    """The plain twin of freezing: the first blocks' gradients are thrown away for two steps."""
    steps = iter(range(run.steps))

    def clip(_parameters):
        if next(steps) < 2:
            for parameter in run.model.blocks[:2].parameters():
                parameter.grad = None

    run.train(clip=clip)


def overwritten(run):
    """The plain twin of replacing the head: the same parameters get the new one's values and no history."""
    optimizer = run.adam(run.model.parameters())

    def each(step):
        if step == 2:
            torch.manual_seed(1)
            for old, new in zip(run.model.head.parameters(), nn.Linear(8, 3).parameters(), strict=True):
                old.data.copy_(new.detach())
                del optimizer.state[old]

    run.train(each)


TWINS = {
    "LBFGS": along_the_gradient,
    "clipped by norm": lambda run: clipped_by_hand(run, lambda gs, total: [g.mul_(min(1, NORM / total)) for g in gs]),
    "clipped by value": lambda run: clipped_by_hand(run, lambda gs, _: [g.copy_(g.clip(-VALUE, VALUE)) for g in gs]),
    "unfreezing": left_out,
    "parameters replaced": overwritten,
}
"""Loops whose training differs from the plain one's on purpose, and the plain loop that does the same."""
PREPARED = {
    "compiled": compiled,
    "compiled, checkpointing": lambda run: compiled(run, reentrant=False),
}


def go(name, *, watch, way=None):
    """Run one loop; return the bits it ended with, the records, and what the loop itself noted of gradients."""
    loop = next((loop for loop in TABLE.LOOPS if loop.name == name), None)
    steps = 6 if loop is None else max(loop.steps, 1)
    run = Run(steps, fused=True if name == "GradScaler, fused" else None)
    watched = PREPARED[name](run) if name in PREPARED and way is None else run.model
    writer, exporter = MemoryWriter(), None
    if watch:
        exporter = Exporter(watched, backends=[writer], intervals=dict.fromkeys(INTERVALS, 1), strict=True)
        exporter.watch(run.criterion)
    if name == "watched, then compiled" and way is None:
        compiled(run)
    (way or WAYS[name])(run)
    if exporter is not None:
        exporter.close()
        assert exporter._worker.error is None, exporter._worker.error
        assert exporter.summary()["set_aside"] == []
    return [t.detach().clone() for t in (*run.losses, *run.model.parameters())], writer.records


@pytest.fixture(scope="module")
def runs():
    """Return a function that gives the records of a loop, watched, and asserts that not a bit differs from unwatched."""
    known = {}

    def records(name, way=None):
        if (name, way) not in known:
            plain, _ = go(name, watch=False, way=way)
            seen, known[name, way] = go(name, watch=True, way=way)
            assert len(plain) == len(seen)
            assert all(torch.equal(a, b) for a, b in zip(plain, seen, strict=True)), f"{name}: watching changed bits"
        return known[name, way]

    yield records
    torch._dynamo.reset()


def values(record, metric, *, roughly):
    """Return a metric's values by site; of a histogram its ends and its counts, or where it is compared roughly their sum."""
    if metric == "parameter.gradient":
        found = [h for h in record.histograms if h.metric == metric]
        return {h.site: [h.edges[0], h.edges[-1], *([sum(h.counts)] if roughly else h.counts)] for h in found}
    reading = record.get(metric)
    return {} if reading is None else {site: value for site, value in reading.as_dict().items() if value is not None}


@pytest.mark.parametrize("family", TABLE.FAMILIES)
@pytest.mark.parametrize("name", NAMES)
def test_each_cell(name, family, runs):
    """The family's values are the plain loop's within the tolerance of the table, or absent where it says so."""
    loop = next(loop for loop in TABLE.LOOPS if loop.name == name)
    cell, metric = loop.cell(family), loop.metric(family)
    ours, theirs = runs(name), runs(name if name in TWINS else "plain", TWINS.get(name, Run.train))
    assert [record.step for record in ours] == list(range(1, loop.steps + 1))
    for record in ours[loop.first - 1 :]:
        seen = values(record, metric, roughly=cell == TABLE.REDUCED)
        if isinstance(cell, str):
            assert seen == {}
            continue
        wanted = values(theirs[record.step - 1], metric, roughly=cell == TABLE.REDUCED)
        assert wanted
        # Of each optimizer some parameters of every depth have histograms.
        assert set(seen) >= set(wanted) if family == "histograms" else set(seen) == set(wanted)
        for site, value in wanted.items():
            assert seen[site] == pytest.approx(value, rel=cell, abs=cell * 1e-2), site


def test_the_document_says_the_same():
    """docs/loops.md holds the table that is tested here, word for word; ``make schema`` writes it."""
    text = TABLE.DOCUMENT.read_text(encoding="utf-8")
    assert TABLE.document(text) == text
    assert set(WAYS) == set(NAMES)
