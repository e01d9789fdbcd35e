"""What watching changes in code that ``torch.compile`` makes: graphs, bits, time.

    python benchmarks/compiled.py                            # about ten minutes, most of it the C++ compiler's
    python benchmarks/compiled.py --model mlp --steps 30

Every row trains one model twice from the same weights on the same batches, compiled by inductor both times, once
without an exporter and once with one at its defaults:

- **graphs**: how often a graph was compiled, without and with; **breaks** of the graph, the same way; **late**: those
  compiled after the third step, where one more would be a recompilation for a sampled step.
- **losses**, **parameters**: whether every bit of all losses and of the last parameters and buffers is the same.
- **time**: CPU time of the training thread of the last two thirds of the steps, with over without; the exporter reads
  more densely in its first 100 steps than later. The model without one is trained twice: **A/A** is the noise.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch._inductor import config as inductor

sys.path.insert(0, str(Path(__file__).parent))
from timing import apart

WIDTH, BATCH, CLASSES, SETTLED = 32, 16, 10, 3
ORDERS = ("bare", "compiled, watched", "compiled, watched, every layer", "watched, compiled")


class Residual(nn.Module):
    """Adds what a part makes of its input to it."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.inner = nn.Sequential(*parts)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Attention(nn.Module):
    """Causal self-attention of four heads."""

    def __init__(self) -> None:
        super().__init__()
        self.take, self.give = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.take(x).chunk(3, dim=-1))
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.give(out.transpose(1, 2).flatten(-2))


class Mean(nn.Module):
    """The mean over positions."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(dim=1)


def mlp() -> nn.Module:
    """Residual blocks of two layers."""
    blocks = [Residual(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, WIDTH)) for _ in range(4)]
    return nn.Sequential(*blocks, nn.Linear(WIDTH, CLASSES))


def convolutions() -> nn.Module:
    """Residual convolutions with batch norm."""
    blocks = [Residual(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(3)]
    first = (nn.Unflatten(1, (1, 4, 8)), nn.Conv2d(1, 8, 3, padding=1))
    return nn.Sequential(*first, *blocks, nn.Flatten(), nn.Linear(256, CLASSES))


def gpt() -> nn.Module:
    """Two blocks of attention over eight words made of the features."""
    blocks = [
        nn.Sequential(
            Residual(nn.LayerNorm(WIDTH), Attention()),
            Residual(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH)),
        )
        for _ in range(2)
    ]
    return nn.Sequential(nn.Unflatten(1, (8, 4)), nn.Linear(4, WIDTH), *blocks, Mean(), nn.Linear(WIDTH, CLASSES))


def norms() -> nn.Module:
    """A chain of layer norms, which inductor likes to join with what is around them."""
    parts = [nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]
    return nn.Sequential(*parts, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES))


MODELS: Mapping[str, Callable[[], nn.Module]] = MappingProxyType(
    {"mlp": mlp, "convolutions": convolutions, "gpt": gpt, "norms": norms}
)


@dataclass(frozen=True)
class Run:
    """What one training run was like.

    Attributes:
        losses: Bits of every loss.
        state: Bits of parameters and buffers at the end.
        graphs: Graphs that were compiled.
        breaks: Breaks of a graph.
        late: Graphs compiled after the third step.
        ms: Median CPU time of a step of the training thread, the first third left out.
    """

    losses: bytes
    state: bytes
    graphs: int
    breaks: int
    late: int
    ms: float


def train(model_name: str, order: str, steps: int) -> Run:
    """Train once in this process."""
    from gradflow_export import Exporter, MemoryWriter

    logging.getLogger("gradflow_export").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    inductor.compile_threads = 1  # a process that leaves helpers behind waits five minutes for them
    torch.manual_seed(0)
    model = MODELS[model_name]()
    criterion, backend = nn.CrossEntropyLoss(), CompileCounterWithBackend("inductor")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = [(torch.randn(BATCH, WIDTH), torch.randint(0, CLASSES, (BATCH,))) for _ in range(8)]
    leaves = [
        name for name, module in model.named_modules() if next(module.parameters(recurse=False), None) is not None
    ]
    how = {"blocks": leaves} if order.endswith("every layer") else {}

    def watch(what: Callable[..., Tensor]) -> Exporter:
        return Exporter(what, backends=[MemoryWriter(maxlen=5)], enabled=order != "bare", **how).watch(criterion)

    late = order == "watched, compiled"
    exporter = watch(model) if late else None
    call = torch.compile(model, backend=backend, fullgraph=not late)
    exporter = exporter or watch(call)
    losses, times, settled = [], [], 0
    for step in range(steps):
        x, y = batches[step % len(batches)]
        began = time.thread_time()
        optimizer.zero_grad()
        loss = criterion(call(x), y)
        loss.backward()
        optimizer.step()
        times.append(time.thread_time() - began)
        losses.append(loss.detach())
        settled = backend.frame_count if step + 1 == SETTLED else settled
    exporter.close()
    return Run(
        torch.stack(losses).numpy().tobytes(),
        b"".join(value.detach().numpy().tobytes() for value in model.state_dict().values()),
        backend.frame_count,
        sum(counters["graph_break"].values()),
        backend.frame_count - settled,
        statistics.median(times[steps // 3 :]) * 1e3,
    )


def main() -> int:
    """Measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=tuple(MODELS))
    parser.add_argument("--steps", type=int, default=120)
    args = parser.parse_args()
    print(f"torch {torch.__version__}, inductor, {args.steps} steps\n")
    print("| model | order | graphs | breaks | late | losses | parameters | time | A/A |\n" + "|---" * 9 + "|")
    for name in args.model or MODELS:
        bare, again = (apart(train, name, "bare", args.steps) for _ in range(2))
        for order in ORDERS[1:]:
            run = apart(train, name, order, args.steps)
            ratio, noise = run.ms / bare.ms, again.ms / bare.ms
            same = ("same" if a == b else "DIFFER" for a, b in ((run.losses, bare.losses), (run.state, bare.state)))
            print(
                f"| {name} | {order} | {bare.graphs} -> {run.graphs} | {bare.breaks} -> {run.breaks} "
                f"| {bare.late} -> {run.late} | {' | '.join(same)} | {ratio:.3f} | {noise:.3f} |",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
