"""Nothing grows with the number of steps."""

import gc
import json
import subprocess
import sys
import threading
import weakref
from collections import Counter
from pathlib import Path

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gradflow_export import Exporter, MemoryWriter


def test_nothing_grows_over_thousands_of_steps(tmp_path):
    """Objects, live tensors, containers and resident memory are the same after 1400 steps as after 2100."""
    program = Path(__file__).with_name("long_run.py")
    done = subprocess.run([sys.executable, program, tmp_path], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    before, after = found["before"], found["after"]
    assert (found["dropped"], found["error"]) == (0, None)
    held = before["containers"]
    assert {k: (held[k], n) for k, n in after["containers"].items() if n > held.get(k, n) + 64} == {}
    assert len(held) > 100
    assert after["tensors"] - before["tensors"] <= 50
    assert after["objects"] - before["objects"] <= 1000
    assert after["rss"] - before["rss"] < 4 * 2**20


class _Large(TorchDispatchMode):
    """Counts, by operator, the results of at least so many bytes in memory that no argument had."""

    def __init__(self, least):
        super().__init__()
        self.least, self.found = least, Counter()

    def __torch_dispatch__(self, function, _types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        known = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in known:
                self.found[str(function)] += tensor.untyped_storage().nbytes() >= self.least
        return out


def test_no_copy_of_a_large_parameter_or_gradient_is_made():
    """In the first steps, which read everything, no operator of ours makes anything half as large as a weight."""
    found = {}
    for watched in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(600, 600), nn.ReLU(), nn.Linear(600, 600), nn.ReLU(), nn.Linear(600, 4))
        criterion, optimizer = nn.CrossEntropyLoss(), torch.optim.Adam(model.parameters(), foreach=False)
        x, y = torch.randn(8, 600), torch.randint(0, 4, (8,))
        exporter = Exporter(model, backends=[MemoryWriter()], strict=True, enabled=watched)
        with exporter.watch(criterion), _Large(600 * 600 * 2) as large:
            for _ in range(10):
                optimizer.zero_grad()
                criterion(model(x), y).backward()
                optimizer.step()
        found[watched] = +large.found
    assert found[False].total() > 0
    assert found[True] - found[False] == Counter()


PLAIN = """
import sys
import torch
from torch import nn
from gradflow_export import Exporter

model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
criterion, optimizer = nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), 0.01)
with Exporter(model, logdir=sys.argv[1]).watch(criterion) as exporter:
    for step in range(40):
        optimizer.zero_grad()
        criterion(model(torch.randn(16, 8)), torch.randint(0, 4, (16,))).backward()
        optimizer.step()
print(exporter.summary()["steps"]["count"], *sorted(sys.modules))
"""


def test_what_few_models_need_is_not_loaded(tmp_path):
    """A plain model at defaults loads no code for what it does not have: each would cost part of a megabyte."""
    done = subprocess.run([sys.executable, "-c", PLAIN, tmp_path], capture_output=True, text=True, check=True)
    steps, *loaded = done.stdout.split()
    assert steps == "40"
    others = {"numpy.ma", "yaml", "wandb", "pandas", "scipy"}
    ours = {"storage.reader", "instruments.recurrent", "rules.seed", "cli", "debugging", "diagnostics", "integrations"}
    assert (others | {f"gradflow_export.{name}" for name in ours}) & set(loaded) == set()


def test_models_that_replace_each_other_leave_nothing():
    """Fifty models, each watched and forgotten: no hook, no thread, no model and no exporter is left."""
    surroundings = _process()
    data, left = torch.randn(16, 8), []
    for _ in range(50):
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
        exporter = Exporter(model, backends=[MemoryWriter()]).watch()
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(3):
            optimizer.zero_grad()
            model(data).square().mean().backward()
            optimizer.step()
        left += [weakref.ref(model), weakref.ref(exporter)]
    assert sum(reference() is not None for reference in left[::2]) == 1  # models go at once, without a collection
    threads = threading.active_count()
    del model, exporter, optimizer
    gc.collect()
    assert [reference() for reference in left] == [None] * len(left)
    assert _process() == surroundings
    assert threads <= surroundings[-1] + 2


def _process():
    """Return what stands process-wide: torch's hooks, the function that makes backward passes, threads."""
    hooks = [
        (name, len(value))
        for home in (torch.nn.modules.module, sys.modules[torch.optim.Optimizer.__module__])
        for name, value in sorted(vars(home).items())
        if name.startswith("_global_") and isinstance(value, dict)
    ]
    return hooks, torch.autograd.backward, threading.active_count()


def test_work_of_the_training_thread_grows_with_the_blocks_and_no_faster():
    """Watching, the first step and those after it make as many calls for each of 300 blocks as for each of 30."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x):
            return x + 0.01 * torch.nn.functional.relu(self.layer(x))

    def calls(blocks):
        torch.manual_seed(0)
        model = nn.Sequential(*(Block() for _ in range(blocks)))
        optimizer, data, counted, counts = torch.optim.SGD(model.parameters(), lr=0.01), torch.randn(4, 8), [0], []

        def count(_frame, event, _arg):
            counted[0] += event in {"call", "c_call"}

        def step():
            optimizer.zero_grad()
            model(data).square().mean().backward()
            optimizer.step()

        exporter = Exporter(model, backends=[MemoryWriter()])
        try:
            for part in (exporter.watch, *[step] * 6):
                counted[0] = 0
                sys.setprofile(count)
                try:
                    part()
                finally:
                    sys.setprofile(None)
                counts.append(counted[0] / blocks)
        finally:
            exporter.close()
        return counts

    few, many = calls(30), calls(300)
    assert all(more <= 1.2 * less for less, more in zip(few, many, strict=True)), (few, many)
