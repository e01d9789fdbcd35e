"""A model whose parameters become shards after it is watched."""

import pytest
import torch
from torch import distributed, nn

from gradflow_export import Exporter, MemoryWriter
from gradflow_export.schedule import INTERVALS


@pytest.fixture
def group():
    """Be a job of one process for a while."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def shard(model):
    """Shard each block, then what is left."""
    from torch.distributed.fsdp import fully_shard  # here, as every process collects this file, and few run it

    for block in model:
        fully_shard(block)
    fully_shard(model)


def split(model):
    """Split one weight by columns, the next by rows."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (1,))
    parallelize_module(model, mesh, {"0.0": ColwiseParallel(), "1.0": RowwiseParallel()})


@pytest.mark.parametrize("spread", [shard, split])
def test_watched_then_sharded(spread, group):
    """Every instrument reads the parameters that stand there now; nothing is set aside and the norms are right."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(3)), nn.Linear(16, 3))
    memory, norms = MemoryWriter(), []
    with Exporter(model, backends=[memory], intervals=dict.fromkeys(INTERVALS, 1), strict=True).watch() as exporter:
        spread(model)
        optimizer = torch.optim.Adam(model.parameters(), 1e-3)
        for _ in range(10):
            x = torch.randn(32, 16)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), (x[:, 0] > 0).long()).backward()
            gradients = [p.grad for p in model.parameters()]
            whole = [g.full_tensor() if hasattr(g, "full_tensor") else g for g in gradients]
            norms.append(float(torch.stack([g.norm() for g in whole]).norm()))
            optimizer.step()
    assert exporter.summary()["set_aside"] == []
    assert [record.value("gradient.total_norm") for record in memory.records] == pytest.approx(norms, rel=1e-5)
    spreads = memory.records[0].facts["parameter.row_spread"]
    assert set(spreads) == {name for name, _ in model.named_parameters() if name.endswith("weight")}
    assert all(0 < value < 3 for value in spreads.values())
