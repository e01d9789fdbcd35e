"""Loops as well-known scripts write them, at their own settings and on data made here: bits, norms and footprint."""

import math
import os
import threading
import time
from contextlib import nullcontext

import pytest
import torch
from torch import nn, optim
from torch.nn import functional
from torch.nn.modules import module as module_hooks
from torch.optim import optimizer as optimizer_hooks

from gradflow_export import Exporter, MemoryWriter
from gradflow_export.storage.reader import read_run


def norm_of(model):
    """Return the gradient norm in float64, as the optimizer meets it."""
    return math.sqrt(sum(float(p.grad.double().square().sum()) for p in model.parameters() if p.grad is not None))


class GraphAttentionLayer(nn.Module):
    """One layer of pytorch/examples' ``gat``."""

    def __init__(self, in_features, out_features, heads, *, concat, dropout=0.4):
        super().__init__()
        self.heads, self.concat, self.dropout = heads, concat, dropout
        self.hidden = out_features // heads if concat else out_features
        self.W = nn.Parameter(torch.empty(in_features, self.hidden * heads))
        self.a = nn.Parameter(torch.empty(heads, 2 * self.hidden, 1))
        self.leakyrelu, self.softmax = nn.LeakyReLU(0.2), nn.Softmax(dim=1)
        nn.init.xavier_normal_(self.W)
        nn.init.xavier_normal_(self.a)

    def forward(self, h, adjacency):
        nodes = h.shape[0]
        h = functional.dropout(torch.mm(h, self.W), self.dropout, training=self.training)
        h = h.view(nodes, self.heads, self.hidden).permute(1, 0, 2)
        scores = torch.matmul(h, self.a[:, : self.hidden, :]) + torch.matmul(h, self.a[:, self.hidden :, :]).mT
        e = self.leakyrelu(scores)
        e = torch.where(adjacency > 0, e, torch.full_like(e, -9e16))
        attention = functional.dropout(functional.softmax(e, dim=-1), self.dropout, training=self.training)
        h = torch.matmul(attention, h)
        return h.permute(1, 0, 2).contiguous().view(nodes, -1) if self.concat else h.mean(dim=0)


class GAT(nn.Module):
    """Two such layers."""

    def __init__(self):
        super().__init__()
        self.gat1 = GraphAttentionLayer(24, 16, 8, concat=True)
        self.gat2 = GraphAttentionLayer(16, 7, 1, concat=False)

    def forward(self, h, adjacency):
        return functional.log_softmax(self.gat2(functional.elu(self.gat1(h, adjacency)), adjacency), dim=1)


def gat(model, norms):
    """A graph network trained on some of its nodes, evaluated twice after each step."""
    generator = torch.Generator().manual_seed(1)
    h, target = torch.rand(40, 24, generator=generator), torch.randint(7, (40,), generator=generator)
    adjacency = ((torch.rand(40, 40, generator=generator) < 0.1) | torch.eye(40, dtype=torch.bool)).float()
    criterion, optimizer = nn.NLLLoss(), optim.Adam(model.parameters(), lr=0.005, weight_decay=5e-4)
    order = torch.randperm(40)
    for _ in range(12):
        model.train()
        optimizer.zero_grad()
        output = model(h, adjacency)
        criterion(output[order[:28]], target[order[:28]]).backward()
        norms.append(norm_of(model))
        optimizer.step()
        model.eval()
        with torch.no_grad():
            for part in (order[:28], order[28:]):
                criterion(model(h, adjacency)[part], target[part]).item()


class Sequence(nn.Module):
    """The model of pytorch/examples' ``time_sequence_prediction``."""

    def __init__(self):
        super().__init__()
        self.lstm1, self.lstm2, self.linear = nn.LSTMCell(1, 9), nn.LSTMCell(9, 9), nn.Linear(9, 1)
        self.double()

    def forward(self, x, future=0):
        outputs = []
        h, c, h2, c2 = (torch.zeros(x.size(0), 9, dtype=torch.double) for _ in range(4))
        for value in x.split(1, dim=1):
            h, c = self.lstm1(value, (h, c))
            h2, c2 = self.lstm2(h, (h2, c2))
            outputs.append(self.linear(h2))
        for _ in range(future):
            h, c = self.lstm1(outputs[-1], (h, c))
            h2, c2 = self.lstm2(h, (h2, c2))
            outputs.append(self.linear(h2))
        return torch.cat(outputs, dim=1)


def time_sequence(model, norms):
    """LBFGS at its defaults: up to twenty evaluations of a closure a step; then a prediction."""
    data = torch.sin(torch.arange(24, dtype=torch.double) / 3 + torch.arange(8, dtype=torch.double)[:, None])
    criterion, optimizer = nn.MSELoss(), optim.LBFGS(model.parameters(), lr=0.8)

    def closure():
        optimizer.zero_grad()
        loss = criterion(model(data[3:, :-1]), data[3:, 1:])
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
        norms.append(norm_of(model))  # of the last evaluation
        with torch.no_grad():
            criterion(model(data[:3, :-1], future=5)[:, :-5], data[:3, 1:]).item()


class Attention(nn.Module):
    """The attention of nanoGPT."""

    def __init__(self):
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(16, 48, bias=False), nn.Linear(16, 16, bias=False)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (part.view(b, t, 2, c // 2).transpose(1, 2) for part in self.c_attn(x).split(16, dim=2))
        y = functional.scaled_dot_product_attention(q, k, v, dropout_p=0.0, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c))


class GPTBlock(nn.Module):
    """The block of nanoGPT."""

    def __init__(self):
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(16), Attention(), nn.LayerNorm(16)
        self.mlp = nn.Sequential(nn.Linear(16, 64, bias=False), nn.GELU(), nn.Linear(64, 16, bias=False))

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """nanoGPT, whose head is its table."""

    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(20, 16), nn.Embedding(8, 16)
        self.h, self.ln_f = nn.ModuleList(GPTBlock() for _ in range(2)), nn.LayerNorm(16)
        self.lm_head = nn.Linear(16, 20, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, tokens, targets=None):
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.size(1)))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return logits, functional.cross_entropy(logits.view(-1, 20), targets.view(-1), ignore_index=-1)


def nano_gpt(model, norms):
    """Compiled, gathering gradients over three batches, clipped, with a scaler that does nothing, and evaluations."""
    generator = torch.Generator().manual_seed(1)

    def get_batch():
        text = torch.randint(20, (4, 9), generator=generator)
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()

    decayed = [p for p in model.parameters() if p.dim() >= 2]
    plain = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    optimizer, scaler = optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95)), torch.amp.GradScaler("cpu", enabled=False)
    call = torch.compile(model, backend="eager")
    x, y = get_batch()
    for number in range(8):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * (number + 1) / 8
        if number % 4 == 0:
            call.eval()
            with torch.no_grad():
                call(*get_batch())[1].item()
            call.train()
        for _ in range(3):
            with nullcontext():
                _, loss = call(x, y)
                loss = loss / 3
            x, y = get_batch()
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(call.parameters(), 1.0)
        norms.append(norm_of(model))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)


SCRIPTS = {"gat": (GAT, gat), "time sequence": (Sequence, time_sequence), "nanoGPT, compiled": (GPT, nano_gpt)}


def footprint():
    """Return what of the process a run may leave behind."""
    hooks = {n: len(v) for n, v in vars(module_hooks).items() if n.startswith("_global_") and isinstance(v, dict)}
    steps = [len(v) for n, v in vars(optimizer_hooks).items() if n.startswith("_global_") and isinstance(v, dict)]
    homes = (torch, torch.Tensor, functional, torch.autograd, nn.Module, optim.Optimizer, nn.utils.clip_grad, os)
    functions = [(home.__name__, n, id(v)) for home in homes for n, v in vars(home).items() if callable(v)]
    return hooks, steps, sorted(functions), sorted(t.name for t in threading.enumerate())


def run(name, watched):
    """Return weights and the generator's state, the norms of the loop, the records, and what was set aside."""
    make, loop = SCRIPTS[name]
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, memory, norms, aside = make(), MemoryWriter(), [], []
    exporter = Exporter(model, backends=[memory]).watch() if watched else None
    loop(model, norms)
    if exporter is not None:
        exporter.close()
        aside = exporter.summary()["set_aside"]
    torch._dynamo.reset()
    return [*(p.detach().clone() for p in model.parameters()), torch.get_rng_state()], norms, memory.records, aside


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_recorded_and_left_as_it_is(name, said):
    """Equal bits, the norms that the optimizer met, one record a step, no word, and nothing left behind."""
    alone, _, _, _ = run(name, watched=False)
    before = footprint()
    state, norms, records, aside = run(name, watched=True)
    assert all(map(torch.equal, state, alone))
    assert aside == []
    assert [r.value("gradient.total_norm") for r in records] == pytest.approx(norms, rel=2e-5)
    assert [r.step for r in records] == list(range(1, len(norms) + 1))
    assert said("step seen") == []
    after, until = footprint(), time.monotonic() + 100
    while after != before and time.monotonic() < until:  # threads end by themselves
        time.sleep(0.05)
        after = footprint()
    assert after == before


class Digits(nn.Module):
    """The model of pytorch/examples' ``mnist_hogwild``, smaller."""

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2, self.drop = nn.Conv2d(1, 4, 5), nn.Conv2d(4, 8, 5), nn.Dropout2d()
        self.fc1, self.fc2 = nn.Linear(128, 16), nn.Linear(16, 10)

    def forward(self, x):
        x = functional.relu(functional.max_pool2d(self.conv1(x), 2))
        x = functional.relu(functional.max_pool2d(self.drop(self.conv2(x)), 2)).view(-1, 128)
        x = functional.dropout(functional.relu(self.fc1(x)), training=self.training)
        return functional.log_softmax(self.fc2(x), dim=1)


def hogwild(rank, model, barrier):
    """What each of the processes does with the model that they share; with a barrier all are there from start to end."""
    torch.manual_seed(1 + rank)
    data = torch.utils.data.TensorDataset(torch.randn(24, 1, 28, 28), torch.randint(10, (24,)))
    loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
    optimizer = optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
    model.train()
    for x, y in loader:
        optimizer.zero_grad()
        functional.nll_loss(model(x), y).backward()
        optimizer.step()
        if barrier is not None:
            barrier.wait(100)


@pytest.mark.parametrize("together", [False, True])
def test_processes_that_share_a_model_are_recorded_each(together, tmp_path, capfd):
    """Forked, one after the other with the same bits as unwatched; at once, with a run for each of them."""

    def train(folder):
        torch.manual_seed(0)
        model = Digits()
        model.share_memory()
        exporter = None if folder is None else Exporter(model, logdir=folder, verbose=1).watch()
        children = []
        context = torch.multiprocessing.get_context("fork")
        barrier = context.Barrier(2) if together else None
        for rank in range(2):
            children.append(context.Process(target=hogwild, args=(rank, model, barrier)))
            children[-1].start()
            if not together:
                children[-1].join(100)
        for child in children:
            child.join(100)
        assert [child.exitcode for child in children] == [0, 0]
        if exporter is not None:
            exporter.close()
        return [p.detach().clone() for p in model.parameters()]

    trained = train(tmp_path)
    if not together:
        assert all(map(torch.equal, trained, train(None)))
    first = read_run(tmp_path)
    runs = [first, *(read_run(tmp_path, session=name) for name in first.beside)]
    # What begins in a folder after another has ended takes its place.
    assert [r.records.steps for r in runs if r.records.steps] == [(1, 2, 3, 4, 5, 6)] * (1 + together)
    assert "nor was exporter.step() called" in capfd.readouterr().err
