"""The graph of autograd: names of nodes are those of the installed torch, and the walk meets each node once."""

import mmap
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from gradflow_export.autograd_graph import nodes
from gradflow_export.autograd_graph.nodes import (
    ATTENTION,
    BY_HAND,
    Op,
    below,
    by_number,
    inputs,
    is_variant,
    kind_of,
    longest,
    sources,
    sources_in,
    takers_in,
    walk,
)  # fmt: skip

KINDS = sorted(value for name, value in vars(Op).items() if name.isupper())
LIBRARIES = ("*torch_cpu.*", "*torch_python.*", "*torch_cuda.*")


def in_torch(words):
    """Return which of these words stand in the libraries of the installed torch."""
    found = set()
    for path in {path for pattern in LIBRARIES for path in (Path(torch.__file__).parent / "lib").glob(pattern)}:
        if path.suffix in {".so", ".dylib", ".dll"}:
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as held:
                found |= {word for word in words if held.find(word.encode()) >= 0}
    return found


def test_every_kind_is_a_node_of_the_installed_torch():
    """A release that calls an operation otherwise fails here, and is mended in one line of the table."""
    generated = {f"{kind}Backward" for kind in KINDS if kind not in BY_HAND}
    assert generated - in_torch(generated) == set()


class Once(torch.autograd.Function):
    """Doubles; its derivative has none."""

    @staticmethod
    def forward(_, x):
        return 2 * x

    @staticmethod
    @once_differentiable
    def backward(_, gradient):
        return 2 * gradient


def test_kinds_written_by_hand_are_what_torch_makes():
    """A leaf, a write to a view, a checkpoint, and what can be differentiated once only."""
    x = torch.randn(3, requires_grad=True)
    written = x.clone()
    written[:1] *= 2.0
    again = checkpoint(torch.sin, x, use_reentrant=True).grad_fn
    (once,) = torch.autograd.grad(Once.apply(x.exp()).square().sum(), x, create_graph=True)
    made = {kind_of(node) for node in walk([x.sin().grad_fn, written.grad_fn, again, once.grad_fn])}
    assert made >= BY_HAND


@pytest.mark.parametrize(("make", "kind"), [
    (F.logsigmoid, Op.LOG_SIGMOID), (lambda x: x.softmax(-1), Op.SOFTMAX), (lambda x: 1.0 - x, Op.RSUB),
    (lambda x: x.diag(), Op.DIAGONAL),
    (lambda x: x.t(), Op.T), (lambda x: x.relu(), Op.RELU), (lambda x: x.double(), Op.TO_COPY),
    (nn.Linear(4, 2), Op.ADDMM), (lambda x: F.layer_norm(x, (4,)), Op.NATIVE_LAYER_NORM),
    (lambda x: F.cross_entropy(x, torch.zeros(4, dtype=torch.long)), Op.NLL_LOSS), (lambda x: x.round(), Op.ROUND),
])  # fmt: skip
def test_a_node_is_of_the_kind_of_its_operation(make, kind):
    """Whatever variant of it ran."""
    assert kind_of(make(torch.randn(4, 4, requires_grad=True)).grad_fn) == kind


@pytest.mark.parametrize("name", KINDS)
def test_what_a_user_writes_is_of_no_kind_whatever_its_name(name):
    """A ``torch.autograd.Function`` called ``Sign`` may pass gradients straight through, and one called ``Mm`` no product."""
    written = type(name.rpartition(":")[2], (Once,), {})
    assert kind_of(written.apply(torch.randn(3, requires_grad=True)).grad_fn) not in {*KINDS} - {Op.CHECKPOINT, Op.ONCE}


def test_fused_attention_begins_with_one_word():
    """On any device, and with any kernel."""
    q = torch.randn(1, 1, 4, 8, requires_grad=True)
    assert kind_of(F.scaled_dot_product_attention(q, q, q).grad_fn).startswith(ATTENTION)


def test_arguments_without_a_graph_have_no_source():
    """They keep their place among the inputs."""
    x = torch.randn(3, requires_grad=True)
    node = (torch.ones(3) * x).grad_fn
    assert kind_of(None) == ""
    assert inputs(node)[0] is None
    assert sources(node) == [below(node, 1)] == [inputs(node)[1]]
    assert below(node, 7) is None
    assert is_variant(x.sum().grad_fn, Op.SUM, 0)
    assert not is_variant(x.view(3, 1).sum(0).grad_fn, Op.SUM, 0)
    assert not by_number((x * x).grad_fn)


def diamond():
    x = torch.randn(3, requires_grad=True)
    left, right = x.sin(), x.cos()
    return (left * right).grad_fn, left.grad_fn, right.grad_fn, below(left.grad_fn)


def test_a_walk_meets_each_node_once_nearer_ones_first():
    """It begins at its roots, and goes on only where it may."""
    top, left, right, leaf = diamond()
    assert list(walk([top, None])) == [top, left, right, leaf]
    assert list(walk([top], past=lambda node: node is top)) == [top, left, right]
    assert list(walk([top], into=lambda node: node is not right)) == [top, left, leaf]
    assert len(list(walk([top], most=2))) < 4


def test_who_takes_a_result_is_known_once_for_each_argument():
    """The root comes first and has no taker; a graph that is too long is none."""
    top, left, right, leaf = diamond()
    takers = takers_in(top, 10)
    assert takers == {top: [], left: [top], right: [top], leaf: [left, right]}
    assert next(iter(takers)) is top
    x = torch.randn(3, requires_grad=True)
    square = (x * x).grad_fn
    assert takers_in(square, 10)[below(square)] == [square, square]
    assert takers_in(top, 3) is None


def test_what_a_result_comes_from_is_known_once_for_each_argument():
    """The root comes first, and leaves come from nothing; a graph that is too long is none."""
    top, left, right, leaf = diamond()
    behind = sources_in(top, 10)
    assert behind == {top: [left, right], left: [leaf], right: [leaf], leaf: []}
    assert next(iter(behind)) is top
    x = torch.randn(3, requires_grad=True)
    square = (x * x).grad_fn
    assert sources_in(square, 10)[square] == [below(square), below(square)]
    assert sources_in(top, 3) is None


def looked_at_and_freed():
    """Look at long graphs in each way, and let go of them."""
    for look in (lambda root: list(walk([root])), sources_in, takers_in):
        result = torch.ones(2, requires_grad=True)
        for _ in range(50_000):
            result = result * 1.0
        look(result.grad_fn)
        del result


@pytest.mark.skipif(sys.platform == "win32", reason="no limit of the stack can be set")
def test_a_graph_that_was_looked_at_does_not_overflow_the_stack_when_it_is_freed():
    """PyTorch frees nodes that Python has seen one within the other: in a process of its own, as an overflow ends it."""
    here, name = str(Path(__file__).parent), Path(__file__).stem
    program = (
        f"import sys, threading; sys.path.insert(0, {here!r}); from {name} import looked_at_and_freed as f; "
        "thread = threading.Thread(target=f); thread.start(); thread.join(); f(); print('whole')"
    )
    for size in ("8192", "1024"):
        command = ["bash", "-c", f"ulimit -Ss {size} && exec {shlex.join([sys.executable, '-c', program])}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout.strip()) == (0, "whole"), done.stderr


def test_how_many_nodes_are_looked_at_goes_by_the_stack(monkeypatch):
    assert longest(10) == 10
    assert longest() == longest(1e9) >= 1_000
    monkeypatch.setattr(nodes, "_STACK", 1 << 19)
    assert longest() == longest(1e9) >= 1_000
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(longest).result() == 1_024
