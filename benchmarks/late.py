"""How soon a fault that begins late in a program of short steps is reported: by default, and with every step recorded.

    python benchmarks/late.py                    # the table of docs/detection.md
    python benchmarks/late.py --write            # and put it there
    python benchmarks/late.py --each --only kill # each program by itself
    python benchmarks/late.py --healthy          # programs without a fault, and how many bursts of records they have

Eight programs whose steps take 0.2 to 5 ms train as they should until a step between 230 and 440, and then for 400
steps with one fault. ``default`` is what ``Exporter(model).watch()`` does: the budget of 5 % of the time, or 20 us a
step, leaves steps out. Of how many steps it leaves one is decided by the speed of the machine, and by what else runs
there; ``--spacing 32`` says it instead. ``synchronous=True`` records every step, which is the best that the rules can
do. Counted are the steps from the first one with the fault to the record in which an issue of a right type and MEDIUM
or worse opens; a program of which anything was told before is left out.

``--healthy`` trains the eight programs, the one of the README and some of ``benchmarks/generated`` for 3,000 steps and
counts bursts: steps recorded beyond their turn, because one was unlike those before it.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import logging
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from generated import grammar, programs
from torch import Tensor, nn
from torch.nn import functional as F

from gradflow_export import Exporter, MemoryWriter
from gradflow_export.records.issues import Severity
from gradflow_export.schedule import SETTLING_STEPS

AFTER = 400
"""Steps that a program trains on with its fault."""
PAGE = Path(__file__).resolve().parent.parent / "docs" / "detection.md"
BEGIN, END = "<!-- late: begin -->", "<!-- late: end -->"


class Loop:
    """A training loop of which every part may change while it runs.

    Attributes:
        model: What is watched.
        optimizer: Its optimizer.
        layer: A layer in the middle, which faults befall.
        batch: Returns inputs and targets of a step.
        loss: Takes outputs and targets.
        clip: Norm to which gradients are clipped.
        zeroes: Whether gradients are cleared before each backward pass.
    """

    def __init__(
        self,
        model: nn.Module,
        layer: nn.Module,
        optimizer: torch.optim.Optimizer,
        batch: Callable[[], tuple[Tensor, Tensor]],
        loss: Callable[[Tensor, Tensor], Tensor],
    ) -> None:
        self.model, self.layer, self.optimizer, self.batch, self.loss = model, layer, optimizer, batch, loss
        self.clip, self.zeroes = 0.0, True

    def step(self) -> None:
        """Train one step."""
        x, y = self.batch()
        if self.zeroes:
            self.optimizer.zero_grad()
        self.loss(self.model(x), y).backward()
        if self.clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()


def _rows(size: int, *of: Tensor) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: tuple(each[rows] for rows in [torch.randint(len(of[0]), (size,))] for each in of)


def _labelled(*shape: int, classes: int = 6, rows: int = 4096) -> tuple[Tensor, Tensor]:
    x, centres = torch.randn(rows, *shape), torch.randn(classes, *shape)
    y = torch.randint(classes, (rows,))
    return x + 0.6 * centres[y], y


def classifier() -> Loop:
    """A perceptron with Adam."""
    model = nn.Sequential(
        nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 6)
    )
    return Loop(model, model[2], torch.optim.Adam(model.parameters(), 1e-3), _rows(32, *_labelled(32)), F.cross_entropy)


def regressor() -> Loop:
    """A perceptron with SGD and momentum."""
    model = nn.Sequential(nn.Linear(16, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 1))
    x = torch.randn(4096, 16)
    y = torch.sin(x[:, :1]) + 0.5 * x[:, 1:2] * x[:, 2:3] + 0.1 * torch.randn(4096, 1)
    return Loop(model, model[2], torch.optim.SGD(model.parameters(), 0.02, momentum=0.9), _rows(32, x, y), F.mse_loss)


def convolutions() -> Loop:
    """Three convolutions with batch norm and AdamW."""
    parts = [
        [nn.Conv2d(a, b, 3, stride=s, padding=1), nn.BatchNorm2d(b), nn.ReLU()]
        for a, b, s in ((1, 8, 1), (8, 16, 2), (16, 16, 2))
    ]
    model = nn.Sequential(*(p for part in parts for p in part), nn.Flatten(), nn.Linear(16 * 9, 6))
    return Loop(
        model, model[3], torch.optim.AdamW(model.parameters(), 2e-3), _rows(32, *_labelled(1, 12, 12)), F.cross_entropy
    )


class _Sequence(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rnn, self.head = nn.Embedding(20, 24), nn.GRU(24, 32, batch_first=True), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(self.embed(x))[0][:, -1])


def recurrent() -> Loop:
    """A GRU that counts one of its tokens, with Adam."""
    model = _Sequence()
    x = torch.randint(20, (4096, 10))
    y = (x < 3).sum(1).clamp(max=3)
    return Loop(model, model.rnn, torch.optim.Adam(model.parameters(), 3e-3), _rows(32, x, y), F.cross_entropy)


class _Former(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(16, 32), nn.Parameter(0.1 * torch.randn(8, 32))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=True) for _ in range(2)
        )
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x) + self.place
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h)).flatten(0, 1)


def transformer() -> Loop:
    """Two blocks that reverse a sequence, with AdamW."""
    model = _Former()
    x = torch.randint(16, (4096, 8))
    rows = _rows(16, x, x.flip(1))

    def batch() -> tuple[Tensor, Tensor]:
        inputs, targets = rows()
        return inputs, targets.flatten()

    return Loop(model, model.blocks[1].linear1, torch.optim.AdamW(model.parameters(), 2e-3), batch, F.cross_entropy)


def residual() -> Loop:
    """Residual blocks with layer norm, plain SGD."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(48), nn.Linear(48, 96), nn.Linear(96, 48)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(F.gelu(self.up(self.norm(x))))

    model = nn.Sequential(nn.Linear(32, 48), *(Block() for _ in range(4)), nn.Linear(48, 6))
    return Loop(
        model, model[2].up, torch.optim.SGD(model.parameters(), 0.05), _rows(32, *_labelled(32)), F.cross_entropy
    )


def autoencoder() -> Loop:
    """A bottleneck of eight, with Adam."""
    model = nn.Sequential(
        nn.Linear(48, 64), nn.ReLU(), nn.Linear(64, 8), nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 48)
    )
    x = torch.randn(4096, 8) @ torch.randn(8, 48) / 3 + 0.1 * torch.randn(4096, 48)
    return Loop(model, model[2], torch.optim.Adam(model.parameters(), 2e-3), _rows(64, x, x), F.mse_loss)


def binary() -> Loop:
    """A deep perceptron with tanh, one logit, AdamW and weight decay."""
    layers = [nn.Linear(24, 40), nn.Tanh()]
    for _ in range(3):
        layers += [nn.Linear(40, 40), nn.Tanh()]
    model = nn.Sequential(*layers, nn.Linear(40, 1))
    x = torch.randn(4096, 24)
    y = ((x[:, :3].sum(1, keepdim=True) + 0.3 * torch.randn(4096, 1)) > 0).float()
    return Loop(
        model, model[4], torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.01), _rows(32, x, y),
        F.binary_cross_entropy_with_logits,
    )  # fmt: skip


PROGRAMS = (classifier, regressor, convolutions, recurrent, transformer, residual, autoencoder, binary)


def weights(layer: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of a layer."""
    return list(layer.parameters())


@torch.no_grad()
def killed(p: Loop) -> None:
    """A layer's weights are 0 and its biases far below."""
    for w in weights(p.layer):
        w.fill_(-5.0 if w.ndim == 1 else 0.0)


@torch.no_grad()
def saturated(p: Loop) -> None:
    """A layer's weights are 100 times as large."""
    for w in weights(p.layer):
        w.mul_(100.0)


@torch.no_grad()
def overwritten(p: Loop) -> None:
    """All weights of the model are drawn anew, three times as wide as they were."""
    for w in p.model.parameters():
        if w.ndim > 1:
            w.copy_(torch.randn_like(w) * 3 * w.std())


def no_rate(p: Loop) -> None:
    """The learning rate is 0."""
    for group in p.optimizer.param_groups:
        group["lr"] = 0.0


def high_rate(p: Loop) -> None:
    """The learning rate is 30 times as large."""
    for group in p.optimizer.param_groups:
        group["lr"] *= 30


def growing_rate(p: Loop) -> None:
    """The learning rate grows by 4 % with every step."""
    batch = p.batch

    def grown() -> tuple[Tensor, Tensor]:
        for group in p.optimizer.param_groups:
            group["lr"] *= 1.04
        return batch()

    p.batch = grown


def clipped(p: Loop) -> None:
    """Gradients are clipped to next to nothing."""
    p.clip = 1e-9


def one_nan(p: Loop) -> None:
    """One batch holds NaN in its targets or inputs, and so does the model from then on."""
    batch = p.batch

    def poisoned() -> tuple[Tensor, Tensor]:
        p.batch = batch
        x, y = batch()
        if x.is_floating_point():
            x[0] = float("nan")
        else:
            loss = p.loss

            def lost(out: Tensor, target: Tensor) -> Tensor:
                p.loss = loss
                return loss(out * float("nan"), target)

            p.loss = lost
        return x, y

    p.batch = poisoned


def stale(p: Loop) -> None:
    """The same batch comes for ever."""
    last = p.batch()
    p.batch = lambda: last


def shuffled(p: Loop) -> None:
    """Targets belong to other samples."""
    batch = p.batch

    def mixed() -> tuple[Tensor, Tensor]:
        x, y = batch()
        return x, y[torch.randperm(len(y))]

    p.batch = mixed


def frozen(p: Loop) -> None:
    """A layer is frozen."""
    p.layer.requires_grad_(False)


def dropped(p: Loop) -> None:
    """The optimizer is built anew with the last layer alone."""
    old = p.optimizer
    rest = {key: value for key, value in old.defaults.items() if key in {"lr", "momentum", "weight_decay"}}
    p.optimizer = type(old)(list(p.model.parameters())[-2:], **rest)


def turned(p: Loop) -> None:
    """The loss has the wrong sign."""
    loss = p.loss
    p.loss = lambda out, y: -loss(out, y)


def not_cleared(p: Loop) -> None:
    """Gradients are no longer cleared."""
    p.zeroes = False


def scaled(p: Loop) -> None:
    """Inputs, or for tokens what is made of them, are 300 times as large."""
    batch = p.batch
    if p.batch()[0].is_floating_point():
        p.batch = lambda: tuple(factor * part for factor, part in zip((300, 1), batch(), strict=True))
    else:
        with torch.no_grad():
            p.model.embed.weight.mul_(300.0)


def cut(p: Loop) -> None:
    """What comes before a layer is cut from the graph."""
    p.layer.register_forward_pre_hook(lambda _module, args: tuple(a.detach() for a in args))


_STEPS = "LEARNING_RATE UNSTABLE EXPLODING DIVERGING LOSS_SPIKE NUMERICAL SATURATION"
_STILL = "NOT_TRAINING STAGNATION LEARNING_RATE"
_LOST = (
    "DEAD SATURATION STAGNATION VANISHING BOTTLENECK NOT_TRAINING RANK_COLLAPSE LOSS_SPIKE EXPLODING DIVERGING UNSTABLE"
)


@dataclass(frozen=True)
class Fault:
    """A fault that begins late.

    Attributes:
        make: Lets it begin.
        types: Issue types that name it, or what it does.
        programs: Places in ``PROGRAMS`` of those that it befalls.
        always: Whether what shows it is read at every recorded step.
    """

    make: Callable[[Loop], None]
    types: str
    programs: tuple[int, ...]
    always: bool = True


FAULTS = (
    Fault(high_rate, _STEPS, (0, 1, 3, 5)),
    Fault(growing_rate, _STEPS, (1, 4, 6)),
    Fault(turned, f"{_STEPS} WRONG_LOSS NOT_LEARNING", (0, 2, 6)),
    Fault(scaled, f"{_STEPS} DATA_SCALE", (1, 3, 5)),
    Fault(one_nan, "NUMERICAL", (0, 3, 6)),
    Fault(not_cleared, f"STALE_GRAD {_STEPS}", (2, 5, 7)),
    Fault(overwritten, _LOST, (0, 4, 5)),
    Fault(shuffled, f"{_STEPS} BAD_TARGETS NOT_LEARNING", (2, 5, 7)),
    Fault(no_rate, _STILL, (0, 4, 7), always=False),
    Fault(clipped, f"{_STILL} CLIPPING", (1, 5, 7), always=False),
    Fault(frozen, _STILL, (0, 2, 4), always=False),
    Fault(dropped, _STILL, (0, 5, 6), always=False),
    Fault(cut, _STILL, (0, 1, 2), always=False),
    Fault(killed, _LOST, (0, 6, 2), always=False),
    Fault(saturated, _LOST, (1, 7, 4), always=False),
    Fault(stale, "OVERFITTING NOT_LEARNING STAGNATION", (0, 2), always=False),
)


@dataclass(frozen=True)
class Told:
    """What became of one program.

    Attributes:
        early: Types that were reported before the fault.
        first: Steps from the fault to the first issue.
        right: Steps to the first issue of a right type.
        records: Records from the fault to the first issue of a right type, or to the end.
        spacing: Of how many steps one was recorded when the fault began.
        types: Types that were reported afterwards.
        step_ms: What a step took.
    """

    early: list[str]
    first: int | None
    right: int | None
    records: int
    spacing: float
    types: list[str]
    step_ms: float


class Fixed:
    """Factors that no clock decides; assigned to a private attribute, for this alone."""

    def __init__(self, value: int) -> None:
        self.value = value

    share, owed = 1.0, 0.0

    def book(self, *_args: object, **_kwargs: object) -> None:
        """Decide nothing."""

    begin = book


def run(place: int, fault: Fault | None, seed: int, begin: int, spacing: int = 0, **settings: object) -> Told:
    """Train one program under an exporter."""
    torch.manual_seed(1000 * seed + place)
    p, memory = PROGRAMS[place](), MemoryWriter()
    with Exporter(p.model, backends=[memory], verbose=0, **settings) as exporter:
        exporter.watch()
        _forced(exporter, spacing)
        began = time.perf_counter()
        for step in range(1, begin + AFTER):
            if step == begin and fault is not None:
                fault.make(p)
            p.step()
        took = time.perf_counter() - began
    opened = [
        (r.step, str(i.issue_type))
        for r in memory.records
        for i in r.issues
        if i.open and i.severity >= Severity.MEDIUM
    ]
    types = fault.types.split() if fault is not None else []
    late = [(s, t) for s, t in opened if s >= begin]
    first, right = (min((s for s, t in late if not some or t in some), default=None) for some in ([], types))
    upto = begin + AFTER if right is None else right
    spacing = [r.value("schedule.spacing") or 1.0 for r in memory.records if r.step < begin]
    return Told(
        sorted({t for s, t in opened if s < begin}),
        None if first is None else first - begin + 1,
        None if right is None else right - begin + 1,
        sum(begin <= r.step <= upto for r in memory.records),
        spacing[-1],
        sorted({t for _, t in late}),
        1e3 * took / (begin + AFTER),
    )


def cases(only: list[str], most: int = 9) -> Iterator[tuple[Fault, int, int]]:
    """Yield faults, the places of their programs, and the steps at which they begin."""
    for number, fault in enumerate(FAULTS):
        if not only or any(word in fault.make.__name__ for word in only):
            for turn, place in enumerate(fault.programs[:most]):
                yield fault, place, 230 + (97 * number + 91 * turn) % 210


def each(only: list[str], seeds: int, spacing: int, best_too: bool = True, most: int = 9) -> Iterator[dict[str, Any]]:
    """Run all programs, by default and with every step recorded."""
    for fault, place, begin in cases(only, most):
        for seed in range(seeds):
            best = run(place, fault, seed, begin, synchronous=True) if best_too else None
            told = run(place, fault, seed, begin, spacing)
            yield {
                "fault": fault.make.__name__, "program": PROGRAMS[place].__name__, "begin": begin, "seed": seed,
                "always": fault.always, "best": (best or told).__dict__, "default": told.__dict__,
            }  # fmt: skip


def _forced(exporter: Exporter, spacing: int) -> None:
    """Have one of so many steps recorded, whatever the machine does; 0: as the clock has it."""
    if spacing:
        clock = exporter._loop.clock  # noqa: SLF001 - what the machine decides otherwise
        clock._spacing, clock._stretch = Fixed(spacing), Fixed(max(spacing // 8, 1))  # noqa: SLF001


def quick_start() -> Loop:
    """The README's program."""
    points = torch.randn(512, 16)
    hidden = [nn.Sequential(nn.Linear(16, 16), nn.Sigmoid()) for _ in range(12)]
    model = nn.Sequential(*hidden, nn.Linear(16, 2))
    rows = _rows(64, points, (points[:, 0] * points[:, 1] > 0).long())
    return Loop(model, hidden[5], torch.optim.Adam(model.parameters(), 2e-3), rows, F.cross_entropy)


def sound(seed: int, steps: int, generated: int) -> Iterator[tuple[str, nn.Module, Callable[[], object]]]:
    """Yield names, models and loops of programs without a fault."""
    for place, program in enumerate((*PROGRAMS, quick_start)):
        torch.manual_seed(1000 * seed + place)
        p = program()
        yield program.__name__, p.model, lambda p=p: [p.step() for _ in range(steps)]
    for number in range(100, 100 + generated):
        drawn = grammar.draw(number)
        p = programs.parts(dataclasses.replace(drawn, steps=steps), seed, number)
        programs.assemble(p)
        yield f"generated {number}", p.model, functools.partial(programs.train, p)


def healthy(seeds: int, spacing: int, generated: int, steps: int) -> Iterator[str]:
    """Train programs without a fault, and count the bursts of records that they have all the same."""
    yield "| program | steps | told | bursts | records in turn | of bursts | spacing |"
    yield "|---" * 7 + "|"
    rates = []
    for seed in range(seeds):
        for name, model, train in sound(seed, steps, generated):
            memory = MemoryWriter()
            with Exporter(model, backends=[memory], verbose=0) as exporter:
                exporter.watch()
                _forced(exporter, spacing)
                train()
            last = [r for r in memory.records if r.step > SETTLING_STEPS]
            apart = [r.value("schedule.spacing") or spacing or 1.0 for r in last]
            beyond = [r.step % each > 0 for r, each in zip(last, apart, strict=True)][:-1]
            close = [r.value("schedule.suspected") is not None for r in last]
            bursts = sum(now and not before for before, now in pairwise([False, *close]))
            told = sorted({str(i.issue_type) for i in exporter.issues if i.severity >= Severity.MEDIUM})
            done = exporter.summary()["steps"]["last"]
            rates.append(5000 * bursts / done)
            yield (
                f"| {name} | {done} | {' '.join(told)} | {bursts} | {len(beyond) - sum(beyond)} | {sum(beyond)} "
                f"| {apart[-1]:.0f} |"
            )
    yield f"\nBursts in 5,000 steps: {np.median(rates):.1f} at the median program, {np.mean(rates):.1f} on average."


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Return the lines of the table."""
    yield (
        "| what begins | programs | told by default | median | 90th percentile | records until then "
        "| told with every step | median | 90th percentile |"
    )
    yield "|---" * 9 + "|"
    kept = [row for row in rows if not (row["best"]["early"] or row["default"]["early"])]
    for fault in FAULTS:
        some = [row for row in kept if row["fault"] == fault.make.__name__]
        if some:
            yield _line((fault.make.__doc__ or "").rstrip("."), some)
    for always, name in ((True, "**all that is read at every step**"), (False, "**the rest**")):
        some = [row for row in kept if row["always"] is always]
        if some:
            yield _line(name, some)
    spacing = [row["default"]["spacing"] for row in kept]
    yield ""
    low, middle, high = (f"{np.quantile(spacing, q, method='higher'):.0f}" for q in (0.0, 0.5, 1.0))
    yield f"One of {low} to {high} steps was recorded as the faults began, of {middle} at the median."


def _line(name: str, rows: list[dict[str, Any]]) -> str:
    cells = [name, str(len(rows))]
    for way in ("default", "best"):
        delays = np.array([np.inf if r[way]["right"] is None else r[way]["right"] for r in rows])
        cells += [str(int(np.isfinite(delays).sum())), _steps(delays, 0.5), _steps(delays, 0.9)]
        if way == "default":
            cells.append(f"{np.median([r[way]['records'] for r in rows]):.0f}")
    return "| " + " | ".join(cells) + " |"


def _steps(delays: np.ndarray, q: float) -> str:
    value = float(np.quantile(delays, q, method="higher"))
    return f"{value:.0f}" if np.isfinite(value) else f"not within {AFTER}"


def _each(row: dict[str, Any]) -> str:
    words = [f"{row['fault']:13} {row['program']:12} {row['begin']:4} {row['default']['step_ms']:5.2f} ms"]
    for way in ("default", "best"):
        told = row[way]
        words.append(f"{way} 1 of {told['spacing']:.0f}: {told['right']} in {told['records']} records, {told['types']}")
        words += [f"before: {told['early']}"] * bool(told["early"])
    return " | ".join(words)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], help="words in the names of faults")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--each", action="store_true", help="print each program")
    parser.add_argument("--healthy", action="store_true")
    parser.add_argument(
        "--spacing", type=int, default=0, help="of how many steps one is recorded; 0: as the clock has it"
    )
    parser.add_argument("--alone", action="store_true", help="by default alone")
    parser.add_argument("--most", type=int, default=9, help="programs of each fault at most")
    parser.add_argument("--generated", type=int, default=8, help="generated programs without a fault")
    parser.add_argument("--steps", type=int, default=3000, help="steps of each program without a fault")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--write", action="store_true", help="put the table into docs/detection.md")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("gradflow_export").setLevel(logging.CRITICAL)
    if arguments.healthy:
        for line in healthy(arguments.seeds, arguments.spacing, arguments.generated, arguments.steps):
            print(line, flush=True)
        return
    rows = []
    for row in each(arguments.only, arguments.seeds, arguments.spacing, not arguments.alone, arguments.most):
        rows.append(row)
        if arguments.each:
            print(_each(row), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows))
    ways = f" --spacing {arguments.spacing}" * bool(arguments.spacing) + f" --most {arguments.most}"
    text = "\n".join([f"`python benchmarks/late.py{ways}`, {time.strftime('%Y-%m-%d')}.", "", *table(rows)])
    print(text)
    if arguments.write:
        page = PAGE.read_text(encoding="utf-8")
        head, rest = page.split(BEGIN, 1)
        PAGE.write_text(f"{head}{BEGIN}\n{text}\n{END}{rest.split(END, 1)[1]}", encoding="utf-8")


if __name__ == "__main__":
    main()
