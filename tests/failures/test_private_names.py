"""A release of torch that has lost one of its private names costs what that name is needed for, and nothing else."""

import ast
from pathlib import Path

from gradflow_export.hooks import torch_private

WITHOUT = """
import contextlib, gc, importlib, os, pkgutil, sys, traceback, warnings
import torch
import torch._dynamo  # as the first optimizer does: once for all children
from torch import nn
import gradflow_export
torch.set_num_threads(1)
LOOKS_UP = "gradflow_export.hooks.torch_private"
ROOMS = "records", "schedule", "metrics", "rules", "storage", "report", "writers", "checks", "instruments", "engine"

# What looks none of the names up, nor imports what does, is imported once for all children too.
sys.modules[LOOKS_UP] = None
for module in pkgutil.walk_packages(gradflow_export.__path__, "gradflow_export."):
    if module.name.split(".")[1] in ROOMS:
        with contextlib.suppress(ImportError):
            importlib.import_module(module.name)
del sys.modules[LOOKS_UP]

def without(path):
    home, name = path.rpartition(".")[::2]
    pieces = home.split(".")
    owner = torch
    for piece in pieces[1:]:
        owner = vars(owner).get(piece)
        if owner is None:
            return  # nothing has loaded it, or this release has lost it already
    was = vars(owner).get(name)
    if was is None:
        return
    delattr(owner, name)
    warnings.simplefilter("ignore")
    from gradflow_export.hooks import torch_private
    setattr(owner, name, was)  # torch itself needs it
    from gradflow_export import Exporter, MemoryWriter
    from gradflow_export.debugging.nan.batch import copied_buffers, restore_buffers
    import gradflow_export.debugging.inspect.gradcheck
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 3))
    optimizer, memory = torch.optim.Adam(model.parameters(), 0.01), MemoryWriter()
    exporter = Exporter(model, backends=[memory]).watch(nn.CrossEntropyLoss())
    for step in range(3):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(torch.randn(6, 4)), torch.tensor([0, 1, 2, 0, 1, 2])).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    exporter.close()
    assert [record.step for record in memory.records] == [1, 2, 3]
    assert all(record.value("gradient.total_norm") > 0 for record in memory.records)
    assert exporter.summary()["set_aside"] == [], exporter.summary()["set_aside"]
    restore_buffers(copied_buffers(model))

gc.collect()
gc.freeze()  # no child looks through all this again
for path in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        try:
            without(path)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        print("without", path)
"""


def names():
    """Return every dotted name that is looked up."""
    calls = [
        node for node in ast.walk(ast.parse(Path(torch_private.__file__).read_text())) if isinstance(node, ast.Call)
    ]
    return [call.args[0].value for call in calls if ast.unparse(call.func) == "_find"]


def test_every_name_can_be_missing(programs):
    """Without any one of them the package imports, records three steps, and sets nothing aside."""
    found = names()
    assert len(found) >= 15
    done = programs.start(WITHOUT, *found)
    assert (done.wait(), done.out) == (0, ""), done.out + done.err
