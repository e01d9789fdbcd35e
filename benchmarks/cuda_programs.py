"""Training loops for a GPU, as users write them: what benchmarks/cuda_loops.py trains with and without watching."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
from collections.abc import Callable
from typing import Any

import torch
from cuda_steps import GPU, Diary, Step, images, plain, points, text
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from workloads import Cnn, Gpt, Mlp

Loop = Callable[[], tuple[nn.Module, Step]]
LOOPS: dict[str, Loop] = {}


def loop(make: Loop) -> Loop:
    """Have a loop run."""
    LOOPS[make.__name__] = make
    return make


@loop
def mlp() -> tuple[nn.Module, Step]:
    """200 thin layers."""
    model = Mlp().to(GPU)
    return model, plain(model, torch.optim.AdamW(model.parameters(), lr=1e-4), *points())


@loop
def cnn_amp_fp16() -> tuple[nn.Module, Step]:
    """Convolutions, channels last, fp16 with a scaler."""
    model = Cnn().to(GPU, memory_format=torch.channels_last)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), torch.amp.GradScaler("cuda")
    x, y = images()

    def step(diary: Diary | None) -> None:
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        if diary is not None:
            diary.note(loss, model)
        scaler.step(optimizer)
        scaler.update()

    return model, step


@loop
def gpt_bf16_fused() -> tuple[nn.Module, Step]:
    """A transformer under bf16 autocast, fused AdamW, clipped."""
    model = Gpt().to(GPU)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    return model, plain(model, optimizer, *text(), half=torch.bfloat16, limit=1.0)


@loop
def gpt_compiled() -> tuple[nn.Module, Step]:
    """The same compiled by inductor."""
    model = Gpt(depth=4).to(GPU)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    return model, plain(model, optimizer, *text(), run=torch.compile(model))


@loop
def mlp_cuda_graphs_by_compile() -> tuple[nn.Module, Step]:
    """Compiled with mode reduce-overhead, which replays CUDA graphs."""
    model = Mlp(depth=20).to(GPU)
    run = torch.compile(model, mode="reduce-overhead")
    return model, plain(model, torch.optim.AdamW(model.parameters(), lr=1e-4), *points(), run=run)


@loop
def mlp_compiled_in_place() -> tuple[nn.Module, Step]:
    """``model.compile()``."""
    model = Mlp(depth=20).to(GPU)
    model.compile()
    return model, plain(model, torch.optim.AdamW(model.parameters(), lr=1e-4), *points())


@loop
def whole_graph() -> tuple[nn.Module, Step]:
    """Forward, backward and step captured as one CUDA graph by hand."""
    model = Mlp(depth=10).to(GPU)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, capturable=True)
    x, y = points()
    held: dict[str, Any] = {}

    def once() -> Tensor:
        optimizer.zero_grad(set_to_none=False)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    def step(_diary: Diary | None) -> None:
        if "graph" not in held:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(3):
                    once()
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                held["loss"] = once()
            held["graph"] = graph
        held["graph"].replay()

    return model, step


@loop
def graphed_callables() -> tuple[nn.Module, Step]:
    """``torch.cuda.make_graphed_callables``."""
    model = Mlp(depth=10).to(GPU)
    x, y = points()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    held: dict[str, Any] = {}

    def step(diary: Diary | None) -> None:
        if "run" not in held:
            held["run"] = torch.cuda.make_graphed_callables(model, (x,))
        optimizer.zero_grad(set_to_none=False)
        loss = F.cross_entropy(held["run"](x), y)
        loss.backward()
        if diary is not None:
            diary.note(loss, model)
        optimizer.step()

    return model, step


@loop
def accumulated_and_clipped() -> tuple[nn.Module, Step]:
    """Four micro-batches, then clipping."""
    model = Cnn(channels=32, depth=4).to(GPU)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    x, y = images(64)

    def step(diary: Diary | None) -> None:
        optimizer.zero_grad()
        total = torch.zeros((), device=GPU)
        for part, labels in zip(x.chunk(4), y.chunk(4), strict=True):
            loss = F.cross_entropy(model(part), labels) / 4
            loss.backward()
            total = total + loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        if diary is not None:
            diary.note(total, model)
        optimizer.step()

    return model, step


@loop
def lstm() -> tuple[nn.Module, Step]:
    """CuDNN's recurrent kernels."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.head = nn.LSTM(16, 64, 2, batch_first=True), nn.Linear(64, 10)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(self.rnn(x)[0][:, -1])
            return out

    model = Recurrent().to(GPU)
    x, y = torch.randn(32, 40, 16, device=GPU), torch.randint(0, 10, (32,), device=GPU)
    return model, plain(model, torch.optim.RMSprop(model.parameters(), lr=1e-3), x, y)


@loop
def side_stream() -> tuple[nn.Module, Step]:
    """Everything on another stream, batches copied without blocking on a third."""
    model = Mlp(depth=20).to(GPU)
    x, y = points()
    inner = plain(model, torch.optim.Adam(model.parameters(), lr=1e-3), x, y)
    fresh = [(each, each.cpu().pin_memory()) for each in (x, y)]
    work, copies = torch.cuda.Stream(), torch.cuda.Stream()

    def step(diary: Diary | None) -> None:
        copies.wait_stream(work)
        with torch.cuda.stream(copies):
            for there, here in fresh:
                there.copy_(here, non_blocking=True)
        work.wait_stream(copies)
        with torch.cuda.stream(work):
            inner(diary)

    return model, step


@loop
def checkpointed() -> tuple[nn.Module, Step]:
    """Activation checkpointing in every block, capturable Adam."""

    class Saved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(8))
            self.head = nn.Linear(64, 10)

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = x + checkpoint(block, x, use_reentrant=False)
            out: Tensor = self.head(x)
            return out

    model = Saved().to(GPU)
    return model, plain(model, torch.optim.Adam(model.parameters(), lr=1e-3, capturable=True), *points())


@loop
def sparse_embedding() -> tuple[nn.Module, Step]:
    """Sparse gradients of a large table."""
    table = nn.Embedding(200_000, 64, sparse=True)
    head = nn.Linear(64, 10)
    model = nn.Sequential(table, head).to(GPU)
    sparse = torch.optim.SparseAdam(list(table.parameters()), lr=1e-2)
    dense = torch.optim.Adam(head.parameters(), lr=1e-3)
    x, y = torch.randint(0, 200_000, (256,), device=GPU), torch.randint(0, 10, (256,), device=GPU)

    def step(diary: Diary | None) -> None:
        sparse.zero_grad()
        dense.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        if diary is not None:
            diary.note(loss, model)
        sparse.step()
        dense.step()

    return model, step


@loop
def half_on_the_host() -> tuple[nn.Module, Step]:
    """Embedding on the CPU, the rest on the GPU."""

    class Split(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.rest = nn.Embedding(500, 64), nn.Sequential(nn.Linear(64, 64), nn.Tanh()).to(GPU)
            self.head = nn.Linear(64, 10).to(GPU)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(self.rest(self.table(x).to(GPU)))
            return out

    model = Split()
    x, y = torch.randint(0, 500, (64,)), torch.randint(0, 10, (64,), device=GPU)
    return model, plain(model, torch.optim.Adam(model.parameters(), lr=1e-3, foreach=False), x, y)


@loop
def default_device() -> tuple[nn.Module, Step]:
    """``torch.set_default_device``."""
    with GPU:
        model = Mlp(depth=10)
    inner = plain(model, torch.optim.AdamW(model.parameters(), lr=1e-3), *points())

    def step(diary: Diary | None) -> None:
        with GPU:
            inner(diary)

    return model, step


@loop
def two_players() -> tuple[nn.Module, Step]:
    """A GAN."""
    generator = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 16))
    judge = nn.Sequential(nn.Linear(16, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
    model = nn.ModuleDict({"generator": generator, "judge": judge}).to(GPU)
    ours = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
    theirs = torch.optim.Adam(judge.parameters(), lr=2e-4, betas=(0.5, 0.999))
    real, noise = torch.randn(64, 16, device=GPU), torch.randn(64, 8, device=GPU)
    one, zero = torch.ones(64, 1, device=GPU), torch.zeros(64, 1, device=GPU)

    def step(_diary: Diary | None) -> None:
        made = generator(noise)
        theirs.zero_grad()
        loss = F.binary_cross_entropy_with_logits(judge(real), one)
        (loss + F.binary_cross_entropy_with_logits(judge(made.detach()), zero)).backward()
        theirs.step()
        ours.zero_grad()
        F.binary_cross_entropy_with_logits(judge(made), one).backward()
        ours.step()

    return model, step


@loop
def pure_half() -> tuple[nn.Module, Step]:
    """A model in bf16."""
    model = Gpt(depth=2).to(GPU, torch.bfloat16)
    return model, plain(model, torch.optim.SGD(model.parameters(), lr=1e-2), *text())


@loop
def broken_batch() -> tuple[nn.Module, Step]:
    """One batch with NaN, whose step the loop leaves out."""
    model = Cnn(channels=32, depth=2).to(GPU)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    x, y = images()
    usual, numbers = plain(model, optimizer, x, y), itertools.count(1)

    def step(diary: Diary | None) -> None:
        if next(numbers) == 60:
            F.cross_entropy(model(x * math.nan), y).backward()
        else:
            usual(diary)

    return model, step


@loop
def out_of_memory() -> tuple[nn.Module, Step]:
    """A batch that does not fit is left out."""
    model = Mlp(depth=6).to(GPU)
    x, y = points()
    usual, numbers = plain(model, torch.optim.Adam(model.parameters(), lr=1e-3), x, y), itertools.count(1)

    def step(diary: Diary | None) -> None:
        if next(numbers) == 70:
            with contextlib.suppress(torch.cuda.OutOfMemoryError):
                model(x.expand(1 << 23, *x.shape).reshape(-1, 64)).sum().backward()
        else:
            usual(diary)

    return model, step


def alone(kind: str) -> tuple[nn.Module, Step]:
    import torch.distributed as dist

    if not dist.is_initialized():
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "29577")
        dist.init_process_group("nccl", rank=0, world_size=1)
    model = Gpt(depth=2).to(GPU)
    run: Any = None
    if kind == "ddp":
        run = nn.parallel.DistributedDataParallel(model, device_ids=[0])
    else:
        from torch.distributed.fsdp import fully_shard

        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    return model, plain(model, torch.optim.AdamW(model.parameters(), lr=1e-4), *text(), run=run)


@loop
def ddp() -> tuple[nn.Module, Step]:
    """DistributedDataParallel over NCCL, one rank."""
    return alone("ddp")


@loop
def fsdp2() -> tuple[nn.Module, Step]:
    """fully_shard over NCCL, one rank."""
    return alone("fsdp2")
