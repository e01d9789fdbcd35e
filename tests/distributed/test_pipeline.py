"""Stages of a pipeline: each rank trains a model of its own, with one optimizer step a batch."""

import json

import pytest

STAGE = """
import json, logging, sys
import torch
from torch import distributed, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from gradflow_export.distributed import rank_transport as exchange
from gradflow_export import Exporter, MemoryWriter

folder, rank, first = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "first"
exchange.PATIENCE_SECONDS = 0.5
torch.set_num_threads(1)
torch.manual_seed(rank)
lines = []
handler = logging.Handler()
handler.emit = lambda record: lines.append(record.getMessage())
logging.getLogger("gradflow_export").addHandler(handler)
ends = (nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16)), (nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))
part, memory, norms = nn.Sequential(*ends[rank]), MemoryWriter(), []

def watch():
    return Exporter(part, backends=[memory], logdir=f"{folder}/{rank}", budget=None, strict=True).watch()

exporter = watch() if first else None
distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
exporter = exporter or watch()
schedule = ScheduleGPipe(PipelineStage(part, rank, 2, torch.device("cpu")), 4, loss_fn=nn.functional.cross_entropy)
optimizer, data = torch.optim.SGD(part.parameters(), 0.1), torch.Generator().manual_seed(0)
for _ in range(24):
    optimizer.zero_grad()
    x = torch.randn(16, 8, generator=data)
    if rank == 0:
        schedule.step(x)
    else:
        schedule.step(target=(x[:, 0] > 0).long())
    norms.append(float(torch.stack([p.grad.norm() for p in part.parameters()]).norm()))
    optimizer.step()
exporter.close()
read = [record.value("gradient.total_norm") for record in memory.records]
json.dump({"norms": norms, "read": read, "lines": lines}, open(f"{folder}/{rank}.json", "w"))
distributed.destroy_process_group()
"""


def train(programs, folder, order):
    """Train both stages; return what each of them saw."""
    ranks = [programs.start(STAGE, folder, rank, order) for rank in range(2)]
    assert [program.wait() for program in ranks] == [0, 0], [program.err for program in ranks]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def test_stages_that_are_watched_first_are_recorded(programs, tmp_path):
    """Watched before the process group is made, each stage has a run of its own, with its own gradients."""
    for stage in train(programs, tmp_path, "first"):
        assert stage["read"] == pytest.approx(stage["norms"], rel=1e-5)
        assert stage["lines"] == []


def test_a_stage_that_rank_0_does_not_watch_says_so(programs, tmp_path):
    """Watched in a job, the first stage is recorded as it is, and the other says once how it can be."""
    first, second = train(programs, tmp_path, "later")
    assert first["read"] == pytest.approx(first["norms"], rel=1e-5)
    assert second["read"] == []
    told = [line for line in second["lines"] if "stage of a pipeline" in line]
    assert len(told) == 1
    assert "before torch.distributed.init_process_group()" in told[0]
