"""The gallery of docs/gallery.md: a dozen small programs with one fault each, what is found, a picture, the fix.

``python benchmarks/gallery.py`` trains them all, writes the page and its pictures, and ends with 1 where the fault is
not among the issues.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from gradflow_export import Exporter, MemoryWriter
from gradflow_export.records.statistics import Ends
from gradflow_export.records.step_record import Issue, StepRecord
from gradflow_export.report.card import sparkline
from gradflow_export.report.trace import Trace

DOCS = Path(__file__).resolve().parents[1] / "docs"
STEPS = 120
INTRO = """# Gallery of faults

Each program has one fault. The picture shows the loss (left) and the gradient norm of every weight at the last step
with gradients (right), from input to output, on a logarithmic axis. `python benchmarks/gallery.py` trains the programs
and writes this page.
"""

Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


class Fault(NamedTuple):
    """A program: what goes wrong, its type, how the model and the loss are made, and what else is different."""

    title: str
    kind: str
    code: str
    model: Callable[[], nn.Module]
    loss: Loss = lambda model, x, y: nn.functional.cross_entropy(model(x), y)
    rate: float = 0.1
    data: Callable[[Tensor], Tensor] = lambda x: x
    trained: Callable[[nn.Module], list[nn.Parameter]] = lambda model: list(model.parameters())
    clear: bool = True


def layers(depth: int, activation: type[nn.Module], width: int = 32) -> nn.Sequential:
    """Return a chain of layers from 8 features to 3 classes."""
    inner = [part for _ in range(depth) for part in (nn.Linear(width, width), activation())]
    return nn.Sequential(nn.Linear(8, width), activation(), *inner, nn.Linear(width, 3))


def scaled(model: nn.Sequential, factor: float, bias: float = 0.0) -> nn.Sequential:
    """Multiply all weights but the last, and set their biases."""
    with torch.no_grad():
        for layer in list(model)[:-1]:
            if isinstance(layer, nn.Linear):
                layer.weight.mul_(factor)
                layer.bias.fill_(bias)
    return model


def softmax_first(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Give probabilities to a loss that expects logits."""
    return nn.functional.cross_entropy(model(x).softmax(1), y)


def root_of_nothing(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Take a root whose derivative is infinite at 0."""
    return nn.functional.cross_entropy(model(x), y) + (model[0].bias * 0).abs().sqrt().sum()  # type: ignore[index]


def broadcast(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Subtract ``[rows]`` from ``[rows, 1]``."""
    return (model(x)[:, :1] - y.float()).square().mean()


FAULTS = (
    Fault(
        "Twelve sigmoid layers",
        "VANISHING",
        "layers = [nn.Sequential(nn.Linear(32, 32), nn.Sigmoid()) for _ in range(12)]",
        lambda: layers(12, nn.Sigmoid),
    ),
    Fault(
        "Initial weights that are too large",
        "EXPLODING",
        "layer.weight.mul_(8)",
        lambda: scaled(layers(8, nn.ReLU), 8.0),
        rate=1e-9,
    ),
    Fault(
        "Biases that make ReLU units dead",
        "DEAD",
        "layer.bias.fill_(-3)",
        lambda: scaled(layers(2, nn.ReLU), 1.0, -3.0),
    ),
    Fault(
        "The gradient of sqrt at 0",
        "NUMERICAL",
        "loss + penalty.abs().sqrt().sum()",
        lambda: layers(2, nn.Tanh),
        root_of_nothing,
    ),
    Fault(
        "A learning rate of 3", "LEARNING_RATE", "SGD(model.parameters(), lr=3.0)", lambda: layers(2, nn.ReLU), rate=3.0
    ),
    Fault(
        "A layer missing from the optimizer",
        "NOT_TRAINING",
        "SGD(model[:-1].parameters(), lr=0.1)",
        lambda: layers(2, nn.ReLU),
        trained=lambda model: list(model[:-1].parameters()),  # type: ignore[index]
    ),
    Fault(
        "Gradients that are never cleared",
        "STALE_GRAD",
        "# optimizer.zero_grad()",
        lambda: layers(2, nn.Tanh),
        clear=False,
    ),
    Fault(
        "Softmax before cross entropy",
        "WRONG_LOSS",
        "cross_entropy(model(x).softmax(1), y)",
        lambda: layers(2, nn.ReLU),
        softmax_first,
    ),
    Fault(
        "Targets with another shape",
        "WRONG_LOSS",
        "(output - target).square().mean()    # [32, 1] - [32]",
        lambda: layers(2, nn.ReLU),
        broadcast,
        rate=0.01,
    ),
    Fault(
        "Inputs that are not normalized",
        "DATA_SCALE",
        "x = 1000 * x + 5000",
        lambda: layers(2, nn.ReLU),
        rate=1e-6,
        data=lambda x: 1000 * x + 5000,
    ),
    Fault(
        "Saturated units",
        "SATURATION",
        "layer.weight.mul_(30)    # before tanh",
        lambda: scaled(layers(3, nn.Tanh), 30.0),
        rate=1e-3,
    ),
    Fault(
        "All weights equal",
        "BAD_INIT",
        "nn.init.constant_(layer.weight, 0.1)",
        lambda: constant(layers(2, nn.Tanh)),
    ),
)


def constant(model: nn.Sequential) -> nn.Sequential:
    """Set all weights to one number."""
    for layer in model:
        if isinstance(layer, nn.Linear):
            nn.init.constant_(layer.weight, 0.1)
    return model


def play(fault: Fault) -> tuple[list[StepRecord], tuple[Issue, ...]]:
    """Train a program; return its records and issues."""
    torch.manual_seed(0)
    model, memory = fault.model(), MemoryWriter()
    optimizer = torch.optim.SGD(fault.trained(model), lr=fault.rate)
    with Exporter(model, backends=memory, synchronous=True, verbose=0).watch() as exporter:
        for _ in range(STEPS):
            x = torch.randn(32, 8)
            y = x[:, :3].argmax(1)
            if fault.clear:
                optimizer.zero_grad()
            fault.loss(model, fault.data(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        return memory.records, exporter.issues


def picture(records: list[StepRecord]) -> str:
    """Return loss and gradient norms as SVG."""
    trace, ends = Trace(), Ends()
    for record in records:
        loss = record.value("loss")
        if loss is not None:
            trace.add(record.step, loss)
            ends.add(loss, record.step)
    left = sparkline(trace, ends.values).replace("<svg", '<svg x="10" y="26"')
    readings = [r for record in records if (r := record.get("parameter.gradient_norm")) is not None and r.present.any()]
    sites = [(s, float(v)) for s, v in readings[-1].as_dict().items() if s.endswith("weight") and v is not None]
    logs = [math.log10(v) if math.isfinite(v) and v > 0 else None for _, v in sites]
    known = [v for v in logs if v is not None] or [0.0]
    low, high = min(known) - 0.5, max(known) + 0.5
    bars = ""
    for n, ((site, value), height) in enumerate(zip(sites, logs, strict=True)):
        tall = 48 if height is None else 48 * (height - low) / (high - low)
        colour = "#c5221f" if height is None else "#1a73e8"
        wide = 260 / len(sites)
        bars += (
            f'<rect x="{280 + n * wide:.1f}" y="{74 - tall:.1f}" width="{wide - 3:.1f}" height="{tall:.1f}" '
            f'fill="{colour}"><title>{escape(site)}: {value:.3g}</title></rect>'
        )
    text = 'font-family="sans-serif" font-size="11" fill="#777"'
    note = f"1e{min(known):.0f} to 1e{max(known):.0f}" + (", red: 0 or not finite" if None in logs else "")
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 550 84" width="550" height="84">'
        f'<text x="10" y="14" {text}>loss</text><text x="280" y="14" {text}>gradient norm by layer, {note}</text>'
        f"{left}{bars}</svg>\n"
    )


def main() -> int:
    """Write the page; return 1 where a fault was not found."""
    folder = DOCS / "images" / "gallery"
    folder.mkdir(exist_ok=True)
    page, missed = [INTRO], 0
    for number, fault in enumerate(FAULTS, 1):
        records, issues = play(fault)
        found = next((issue for issue in issues if issue.issue_type.value == fault.kind), None)
        missed += found is None
        print(
            f"{fault.title:<40}{fault.kind:<16}{'found' if found else 'MISSED'}  {[i.issue_type.value for i in issues]}"
        )
        if found is None:
            continue
        name = f"{number:02}-{fault.kind.lower()}.svg"
        (folder / name).write_text(picture(records))
        where = f" in `{found.layer}`" if found.layer else ""
        page += [
            f"## {fault.title}", "", "```python", fault.code, "```", "",
            f"![Loss and gradient norms of this program](images/gallery/{name})", "",
            f"**[{fault.kind}](issues/{fault.kind.lower()}.md)**{where} since step {found.step}: {found.message}", "",
            f"Fix: {found.advice}", "",
        ]  # fmt: skip
    (DOCS / "gallery.md").write_text("\n".join(page).rstrip("\n") + "\n")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
