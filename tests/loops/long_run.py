"""Trains for long beside an exporter, alone in a process, and prints what is held meanwhile as JSON."""

import gc
import json
import sys
from collections.abc import Sized

import psutil
import torch
from torch import nn

from gradflow_export import Exporter, MemoryWriter

STEPS = 700


def containers(thing, path="exporter", seen=None):
    """Return the length of every container that is reachable from the exporter through objects of ours."""
    seen = set() if seen is None else seen
    if id(thing) in seen or isinstance(thing, (str, bytes, torch.Tensor, nn.Module)):
        return {}
    seen.add(id(thing))
    out = {path: len(thing)} if isinstance(thing, Sized) else {}
    if isinstance(thing, dict):
        parts = {f"{path}[{k!r}]": v for k, v in list(thing.items()) if isinstance(k, (str, int, tuple))}
    elif isinstance(thing, (list, tuple)) or type(thing).__name__ == "deque":
        parts = {f"{path}[{i}]": v for i, v in enumerate(list(thing)[:50])}
    elif type(thing).__module__.startswith("gradflow_export"):
        names = [*getattr(thing, "__dict__", {}), *getattr(type(thing), "__slots__", ())]
        parts = {f"{path}.{n}": getattr(thing, n) for n in names if hasattr(thing, n)}
    else:
        parts = {}
    for name, part in parts.items():
        out.update(containers(part, name, seen))
    return out


def main(folder):
    """Watch, train three times as long, print what is held after the second and the third time."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    criterion, optimizer = nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.01)
    x, y = torch.randn(8, 4), torch.randint(0, 2, (8,))
    chosen = ["tensorboard", "jsonl", MemoryWriter(maxlen=5)]
    exporter = Exporter(model, backends=chosen, logdir=folder, strict=True, budget=None).watch(criterion)

    def measure():
        for step in range(STEPS):
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
            if step % 250 == 0:
                exporter.summary()
        exporter.summary()
        for writer in exporter._worker.outlets.all:  # what waits to be written is bounded by time, not by steps
            writer.flush()
        gc.collect()
        things = gc.get_objects()
        tensors = sum(type(thing) is torch.Tensor for thing in things)
        rss = psutil.Process().memory_info().rss
        return {"objects": len(things), "tensors": tensors, "containers": containers(exporter), "rss": rss}

    measure()  # windows fill, and Python warms up
    before, after = measure(), measure()
    exporter.close()
    dropped, error = exporter.summary()["dropped"], exporter._worker.error
    print(json.dumps({"before": before, "after": after, "dropped": dropped, "error": error and repr(error)}))


if __name__ == "__main__":
    main(sys.argv[1])
