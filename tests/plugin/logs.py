"""Runs whose content is known, written by the real writer; shared by the plugin's and the browser's tests."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np

from gradflow_export.records.step_record import Histogram, Issue, IssueType, Reading, RunInfo, Severity, StepRecord
from gradflow_export.writers.tensorboard import TensorBoardWriter

EPOCH = 1_732_143_600.0
HOSTILE = (
    "<img src=x onerror=\"document.title='owned'\">",
    "quote\"s & 'ticks' </script><script>document.title='owned'</script>",
    "émoji 🔥 名前",
    "\u202eright to left \u05e9\u05db\u05d1\u05d4 <b>",
    "very_long_" + "x" * 490,
)


def session_name(start: int = 0, rank: int = 0) -> str:
    """Return a session that began ``start`` seconds after the epoch of these tests."""
    return f"{int((EPOCH + start) * 1000)}-{rank}"


def write_run(logdir, records, *, start=0, rank=0, rows=64, **info):
    """Write records as one session; returns them."""
    writer = TensorBoardWriter(Path(logdir), rows=rows, flush_seconds=1e9)
    writer.open(RunInfo(session_name(start, rank), EPOCH + start, rank=rank, **info))
    for record in records:
        writer.write(record)
    writer.close()
    return records


def plain_records(steps, sites=("a", "b"), metric="block.gain", value=lambda step, site: step + site / 8):
    """Return records of one per-site metric and the loss, every value computable from its step and site number."""
    return [
        StepRecord(
            step,
            EPOCH + step,
            (
                Reading.of(metric, sites, [value(step, number) for number in range(len(sites))]),
                Reading.run("loss", 1.0 / (1 + step)),
            ),
        )
        for step in steps
    ]


def hostile_run(logdir):
    """Write a run in which every layer has a hostile name, and issues and histograms of each."""
    records = plain_records(range(1, 50), sites=HOSTILE)
    bins = tuple(Histogram("parameter.gradient", name, np.array([0.0, 1.0]), np.array([3])) for name in HOSTILE)
    found = tuple(issue(layer=name, message=name, advice=name) for name in HOSTILE)
    return write_run(logdir, [*records, StepRecord(50, EPOCH + 50, histograms=bins, issues=found)], model=HOSTILE[0])


STATES = {"nan": math.nan, "plus": math.inf, "minus": -math.inf, "missing": None, "zero": 0.0, "number": 1.5}


def records_of_states():
    """Return records in which each site stays in one of the states that a value can be in."""
    reading = Reading.of("block.gain", tuple(STATES), tuple(STATES.values()))
    return [StepRecord(step, EPOCH + step, (reading, Reading.run("loss", math.nan))) for step in range(1, 9)]


def records_of_kinds():
    """Return records of a metric that no catalogue knows yet, and of a validation phase."""
    heads = ("h.0.attn:0", "h.0.attn:1", "h.1.attn:0")
    records = [
        StepRecord(
            step,
            EPOCH + step,
            (Reading.of("tomorrow.entropy", heads, [0.25, 0.5, step / 8]), Reading.run("loss", 1.0 / step)),
        )
        for step in range(1, 9)
    ]
    evaluated = (Reading.of("tomorrow.entropy", heads, [0.75, 0.5, 0.25]), Reading.run("loss", 42.0))
    return [*records, StepRecord(9, EPOCH + 9, evaluated, phase="eval")]


def records_with_spike(steps=20_000, at=12_345):
    """Return a long run of gains of 1 in which one site has a gain of 8 in one step alone."""
    quiet, loud = (Reading.of("block.gain", ("a", "b", "c"), [1.0, gain, 1.0]) for gain in (1.0, 8.0))
    return [StepRecord(step, EPOCH + step, (loud if step == at else quiet,)) for step in range(1, steps + 1)]


def deep_names(count):
    """Return names of so many parameters, twelve to a block."""
    parts = ("attn.qkv", "attn.out", "mlp.up", "mlp.down")
    return tuple(f"model.h.{number // 12}.{parts[number // 3 % 4]}.w{number % 3}" for number in range(count))


def deep_records(names, steps=40, loud=None, issues=()):
    """Return records of gains near 1; ``loud`` is a site and a step at which one is 8; issues come with the last step."""
    records = []
    for step in range(1, steps + 1):
        gain = np.exp(np.random.default_rng(step).normal(0.0, 0.05, len(names)))
        if loud is not None and step == loud[1]:
            gain[loud[0]] = 8.0
        readings = (Reading.of("block.gain", names, gain), Reading.run("loss", 4.0 / math.sqrt(step)))
        records.append(StepRecord(step, EPOCH + step, readings, issues=issues if step == steps else ()))
    return records


def many_issues(names, count):
    """Return issues of five kinds, none of which explains another, at the first layers in turn."""
    kinds = tuple(map(IssueType, ("DEAD", "SATURATION", "HEAD_REDUNDANCY", "OPTIMIZER_STATE", "EVAL_RANDOM")))
    return tuple(issue(kinds[n % 5], layer=names[n % len(names)], step=1 + n // len(names)) for n in range(count))


def vanishing_records(blocks, steps=40):
    """Return records of a gradient that fades on its way back, ever more; the first block has no gain of its own."""
    fading = issue(
        IssueType.VANISHING, layer=blocks[0], step=10, message="the gradient fades.", advice="Add a skip connection."
    )
    records = []
    for step in range(1, steps + 1):
        log_gains = np.full(len(blocks) - 1, -0.02 * step)
        norms = np.exp(np.append(np.cumsum(log_gains[::-1])[::-1], 0.0))
        readings = (
            Reading.of("block.gradient_norm", blocks, norms),
            Reading.of("block.gain", blocks[1:], np.exp(log_gains)),
            Reading.of("block.log_gain", blocks[1:], log_gains),
            Reading.run("loss", 2.0 + 1.0 / step),
        )
        issues = (replace(fading, value=1e-6, threshold=1e-4),) if step == steps else ()
        records.append(StepRecord(step, EPOCH + step, readings, issues=issues))
    return records


def issue(kind=IssueType.EXPLODING, severity=Severity.HIGH, layer="a", step=3, healed=None, **more):
    """Return an issue with every field filled."""
    text = {"message": f"{layer} is {kind.value.lower()}.", "advice": f"Do something about {layer}.", **more}
    return Issue(kind, severity, layer, step, 38.0, 2.0, layers=(layer,), healed_step=healed, **text)


def block_names(depth):
    """Return the names of a small transformer's blocks in depth order."""
    parts = [f"transformer.h.{number}.{part}" for number in range(depth) for part in ("attn", "mlp")]
    return ("embedding", *parts, "head")


def sick_run(logdir, steps=2400, depth=11, sick=True):
    """Write a transformer-like run that is healthy, or falls ill in three ways on the way."""
    rng = np.random.default_rng(7)
    blocks = block_names(depth)
    relus = tuple(f"{name}.act" for name in blocks if name.endswith("mlp"))
    bad = blocks.index("transformer.h.7.mlp")
    base = rng.normal(0.0, 0.10, len(blocks)) + 0.12 * np.sin(np.arange(len(blocks)))
    records = []
    for step in range(1, steps + 1):
        gain = np.exp(base + rng.normal(0.0, 0.09, len(blocks)))
        dead = np.clip(0.05 + 0.02 * rng.random(len(relus)), 0, 1)
        loss = 4.2 * math.exp(-step / 900) + 0.9 + 0.05 * rng.standard_normal()
        if sick:
            gain, dead, loss = _fall_ill(step, steps, bad, gain, dead, loss)
        norms = 0.4 * np.exp(-np.cumsum(np.log(np.where(np.isfinite(gain), gain, 1.0)))[::-1])
        readings = [
            Reading.run("loss", loss),
            Reading.run("gradient.total_norm", float(np.sqrt((norms**2).sum()))),
            Reading.run("learning_rate", 3e-4 * min(1, step / 200)),
            Reading.run("gain.max", float(np.nanmax(np.where(np.isfinite(gain), gain, np.nan)))),
            Reading.of("block.gain", blocks, _or_missing(gain, step, sick)),
            Reading.of("block.gradient_norm", blocks, norms),
        ]
        if step % 10 == 0:
            readings.append(Reading.of("activation.dead_share", relus, dead))
        issues = sick_issues(steps) if sick and step == steps else ()
        histograms = weight_histograms(step, steps, sick) if step % 100 == 0 else ()
        records.append(StepRecord(step, EPOCH + 0.4 * step, tuple(readings), histograms, issues))
    write_run(logdir, records, rows=256, model="TinyGPT", parameters=124_439_808, blocks=blocks)
    return records


def weight_histograms(step, steps, sick):
    """Return histograms of two gradients: one spreads and breaks in a sick run, the other only narrows."""
    edges, share = np.linspace(-1.0, 1.0, 41), step / steps
    middles = (edges[1:] + edges[:-1]) / 2
    out = []
    for name, width in (("transformer.h.7.mlp.weight", 0.1 + 0.5 * share * sick), ("head.weight", 0.4 - 0.25 * share)):
        counts = np.round(5000 * np.exp(-0.5 * (middles / width) ** 2)).astype(np.int64)
        broken = step // 10 if sick and share > 0.9 and name != "head.weight" else 0
        out.append(Histogram("parameter.gradient", name, edges * (1 + share), counts, broken))
    return tuple(out)


def sick_issues(steps):
    """Return the issues of a sick run: two open, one healed."""
    at = int(steps * 0.55)
    return (
        Issue(
            IssueType.EXPLODING,
            Severity.CRITICAL,
            "transformer.h.7.mlp",
            at,
            38.2,
            2.0,
            "gain 38.2 is above 2.0: the block multiplies the gradient that passes through it.",
            "Clip the gradient norm to 1.0 and put a LayerNorm in front of the block.",
        ),
        Issue(
            IssueType.DEAD,
            Severity.MEDIUM,
            "transformer.h.3.mlp.act",
            int(steps * 0.7),
            0.94,
            0.9,
            "94 % of the units gave no output above 0 for 200 steps.",
            "Lower the learning rate, or replace ReLU by GELU or LeakyReLU.",
        ),
        Issue(
            IssueType.NUMERICAL,
            Severity.HIGH,
            "transformer.h.9.attn",
            int(steps * 0.30),
            float("nan"),
            0.0,
            "NaN in the gradient at the block's output.",
            "Run gradflow.debug.anomaly() around this step to find the operation.",
            healed_step=int(steps * 0.34),
        ),
    )


def _fall_ill(step, steps, bad, gain, dead, loss):
    share = step / steps
    gain[: bad - 3] *= 1.0 - 0.75 * max(0.0, share - 0.6)
    if share > 0.5:
        gain[bad] *= min(38.0, math.exp(60 * (share - 0.5)))
        loss += 0.8 * (share - 0.5) + (3.0 if step % 97 == 0 else 0.0)
    if 0.30 <= share < 0.34:
        gain[bad + 4] = math.nan if step % 2 else math.inf
    dead[3] = min(0.94, 0.05 + 1.4 * max(0.0, share - 0.35))
    return gain, dead, loss


def _or_missing(gain, step, sick):
    values = [float(value) for value in gain]
    if sick and 420 <= step < 560:
        values[-2] = None
    return values
