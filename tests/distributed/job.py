"""The processes of a job: ``python job.py <ranks> <store> <folder> <scenario>...``; results are pickled."""

import logging
import os
import pickle
import signal
import sys
import time
import traceback
from pathlib import Path

import torch
import torch.distributed.fsdp
import torch.distributed.tensor.parallel
from torch import distributed, nn

from gradflow_export import Exporter, MemoryWriter
from gradflow_export.distributed import rank_transport as exchange
from gradflow_export.schedule import INTERVALS

STEPS, BATCH = 6, 16
ALL = dict.fromkeys(INTERVALS, 1)


class Block(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(width, inner), nn.ReLU(), nn.Linear(inner, width)

    def forward(self, x):
        return x + self.down(self.act(self.up(x)))


class Net(nn.Module):
    """Widths that two ranks cannot share out evenly, except inside a block."""

    def __init__(self, width=7, inner=10):
        super().__init__()
        self.stem = nn.Linear(5, width)
        self.blocks = nn.ModuleList(Block(width, inner) for _ in range(4))
        self.head = nn.Linear(width, 3)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def data():
    generator = torch.Generator().manual_seed(7)
    shape = (STEPS, BATCH)
    x = torch.randn(*shape, 5, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 3, shape, generator=generator)


def make():
    torch.manual_seed(0)
    return Net().double()


def plain(model):
    return model


def ddp(model):
    return nn.parallel.DistributedDataParallel(model)


def gathering(model):
    """A forward pass that needs the other rank, as a contrastive loss does."""

    def gather(_module, _args, output):
        distributed.all_gather([torch.empty_like(output) for _ in range(2)], output.detach())

    model.stem.register_forward_hook(gather)
    return ddp(model)


def fsdp(model):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def tensor_parallel(model):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2,))
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def mixed(model):
    """Two blocks sharded by ``fully_shard``, the others plain, their gradients averaged by hand."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))
    for block in list(model.blocks)[:2]:
        fully_shard(block, mesh=mesh)
    return model


def two_dimensional(model):
    """``fully_shard`` over tensor parallelism: four ranks, two batches."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    for block in model.blocks:
        parallelize_module(block, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["data"])
    return fully_shard(model, mesh=mesh["data"])


def average(model):
    for p in model.parameters():
        if p.grad is not None and not hasattr(p.grad, "placements"):
            distributed.all_reduce(p.grad)
            p.grad /= 2


def bits(tensor):
    held = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return held.detach().contiguous().numpy().tobytes()


def train(
    wrap, part=(0, 1), *, watch="after", each=lambda *_: None, clip=False, steps=STEPS, every=1, players=1, fails=None
):
    """Train on one part of each batch, as ``(number, parts)``; return records, issues and the bits of loss and weights."""
    model = make()
    model.stem.requires_grad_(every == 1)
    criterion = nn.CrossEntropyLoss()
    writer = MemoryWriter()
    exporter = None
    options = {"intervals": ALL, "strict": True, "every": every}
    if watch == "before":
        exporter = Exporter(model, backends=[writer], **options).watch(criterion)
    trained = wrap(model)
    if watch == "after":
        exporter = Exporter(trained, backends=[writer], **options).watch(criterion)
    learned = [p for p in trained.parameters() if p.requires_grad]
    optimizers = [torch.optim.Adam(learned[place::players], lr=1e-2) for place in range(players)]
    x, y = data()
    number, parts = part
    mine = slice(number * BATCH // parts, (number + 1) * BATCH // parts)
    seen = []
    for step in range(steps):
        inputs = x[step % STEPS, mine].clone()
        if step == fails:
            exporter._guard.strict = False
            exporter._guard.failed("attention", ValueError("of this rank"))
        for optimizer in optimizers:
            each(step, model, inputs, optimizer)
            optimizer.zero_grad()
        loss = criterion(trained(inputs), y[step % STEPS, mine])
        loss.backward()
        if wrap is mixed:
            average(model)
        if clip:
            nn.utils.clip_grad_norm_(trained.parameters(), 0.1)
        for optimizer in optimizers:
            optimizer.step()
        seen += [bits(loss), *map(bits, model.parameters())]
    out = {"bits": seen, "records": [], "issues": (), "aside": []}
    if exporter is not None:
        exporter.close()
        assert exporter._worker.error is None, exporter._worker.error
        aside = exporter.summary()["set_aside"]
        out |= {"records": writer.records, "issues": exporter.issues, "aside": aside, "report": exporter.report()}
    return out


def poison(rank):
    def each(step, model, inputs, optimizer):
        if rank == 1 and step == 3:
            inputs[2, 1] = float("nan")

    return each


def drift(rank):
    def each(step, model, inputs, optimizer):
        optimizer.param_groups[0]["lr"] = 1e-2 if rank == 0 or step < 3 else 1.1e-2

    return each


def stop(rank, folder, leaver):
    """One rank takes part in four steps and dies; the other goes on alone, and must not wait for it."""
    model = make()
    criterion, writer = nn.CrossEntropyLoss(), MemoryWriter()
    exporter = Exporter(model, backends=[writer], intervals=ALL, strict=True).watch(criterion)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    x, y = data()
    for step in range(20):
        if rank == leaver and step == 4:
            exporter._worker.drain(100)
            Path(folder, "left").touch()
            os._exit(0)
        if rank != leaver and step == 4:
            while not Path(folder, "left").exists():
                time.sleep(0.01)
        optimizer.zero_grad()
        criterion(model(x[step % STEPS]), y[step % STEPS]).backward()
        optimizer.step()
    began = time.monotonic()
    exporter.close()
    return {"records": writer.records, "closing": time.monotonic() - began, "aside": exporter.summary()["set_aside"]}


def run(name, rank, folder):
    half, whole = (rank, 2), (0, 1)
    runs = {
        "ddp": lambda: train(ddp, half),
        "ddp clipped": lambda: train(ddp, half, clip=True, watch="before"),
        "fsdp": lambda: train(fsdp, half),
        "fsdp clipped": lambda: train(fsdp, half, watch="before", clip=True),
        "tensor parallel": lambda: train(tensor_parallel, whole, watch="before"),
        "two-dimensional": lambda: train(two_dimensional, (rank // 2, 2)),
        "mixed": lambda: train(mixed, half),
        "ddp every": lambda: train(ddp, half, every=4),
        "fsdp every": lambda: train(fsdp, half, every=4),
        "ddp players": lambda: train(ddp, half, players=2),
        "fsdp players": lambda: train(fsdp, half, players=2),
        "ddp one step": lambda: train(ddp, half, steps=1),
        "ddp failing": lambda: train(ddp, half, fails=2 if rank else None),
        "ddp unwatched": lambda: train(ddp, half, watch=None),
        "fsdp unwatched": lambda: train(fsdp, half, watch=None),
        "tensor parallel unwatched": lambda: train(tensor_parallel, whole, watch=None),
        "ddp nan": lambda: train(ddp, half, each=poison(rank)),
        "gathering nan": lambda: train(gathering, half, each=poison(rank)),
        "fsdp nan": lambda: train(fsdp, half, each=poison(rank)),
        "drift": lambda: train(ddp, half, each=drift(rank), steps=8),
        "rank 1 stops": lambda: stop(rank, folder, 1),
        "rank 0 stops": lambda: stop(rank, folder, 0),
    }
    return runs[name]()


class Lines(logging.Handler):
    """Keeps what was said."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def main(rank, ranks, store, folder, names):
    torch.set_num_threads(1)
    host, port = store.split(":")
    common = distributed.TCPStore(host, int(port), ranks, is_master=rank == 0, wait_for_workers=False)
    distributed.init_process_group("gloo", store=common, rank=rank, world_size=ranks)
    stops = any("stops" in name for name in names)
    if not stops:  # on a busy machine a worker may be late; where nobody leaves, patience costs nothing
        exchange.PATIENCE_SECONDS = 60.0
    log = logging.getLogger("gradflow_export")
    log.setLevel(logging.INFO)
    for name in names:
        lines = Lines()
        log.addHandler(lines)
        out = run(name, rank, folder)
        log.removeHandler(lines)
        with Path(folder, f"{name}.{rank}.pickle").open("wb") as file:
            pickle.dump({**out, "lines": lines.lines}, file)
    if stops:
        os._exit(0)  # the process group cannot be taken down without the other rank
    distributed.barrier()  # rank 0 holds the store, which the others need until they have closed
    distributed.destroy_process_group()


def fork(count, *rest):
    """Fork the ranks, which share what was imported; return whether all end well. Where one fails, the others are ended."""
    ranks = set()
    for rank in range(count):
        child = os.fork()
        if not child:
            status = 1
            try:
                main(rank, count, *rest)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        ranks.add(child)
    while ranks:
        child, status = os.wait()
        ranks.remove(child)
        if status:
            for other in ranks:
                os.kill(other, signal.SIGKILL)
            return False
    return True


if __name__ == "__main__":
    sys.exit(not fork(int(sys.argv[1]), *sys.argv[2:4], sys.argv[4:]))
