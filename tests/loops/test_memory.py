"""Nothing grows with the number of steps."""

import json
import subprocess
import sys
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
