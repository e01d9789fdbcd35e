"""Training loops on a GPU, with and without watching: `python benchmarks/cuda_loops.py`; ends with 0 when all hold.

For each loop: whether the weights are equal bit for bit; whether anything that the exporter does waits for the device
(``waits``: waits in ten steps more than the loop alone makes); how far the recorded loss and gradient norm are from the
loop's own, which is larger where the exporter sees another loss or the norm before clipping; what was complained about;
and the median wall time of a step (``ratio``) and the peak of memory (``memory``) relative to the loop alone. ``all``
reads everything at every step, without a budget.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import math
import os
import statistics
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
from cuda_programs import LOOPS
from cuda_steps import Diary, Step

from gradflow_export import Exporter, MemoryWriter
from gradflow_export.schedule import INTERVALS

STEPS = 150
SETTLED = 110
"""Steps after which a turn is timed: the first hundred are read densely."""


class Heard(logging.Handler):
    """Keeps what the exporter says at the level of a warning or above."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


WATCHED: dict[str, dict[str, Any] | None] = {
    "alone": None,
    "default": {},
    "all": {"intervals": dict.fromkeys(INTERVALS, 1), "budget": None},
}


@contextlib.contextmanager
def watched(model: nn.Module, settings: dict[str, Any] | None) -> Iterator[tuple[Exporter | None, MemoryWriter]]:
    """Watch, or do not."""
    writer = MemoryWriter()
    if settings is None:
        yield None, writer
        return
    with (
        tempfile.TemporaryDirectory() as folder,
        Exporter(model, logdir=folder, backends=["tensorboard", writer], **settings).watch() as exporter,
    ):
        yield exporter, writer


def waits(step: Step, steps: int) -> tuple[int, list[str]]:
    """Count the waits for the device in some steps."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        for _ in range(steps):
            step(None)
        torch.cuda.set_sync_debug_mode("default")
    found = [f"{Path(w.filename).name}:{w.lineno}" for w in said if "synchroniz" in str(w.message)]
    return len(found), sorted(set(found))


def run(name: str, setting: str, steps: int) -> dict[str, Any]:
    """Train once."""
    torch.manual_seed(0)
    heard = Heard()
    logging.getLogger("gradflow_export").addHandler(heard)
    model, step = LOOPS[name]()
    diary = Diary()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    out: dict[str, Any] = {}
    with watched(model, WATCHED[setting]) as (exporter, writer):
        for _ in range(steps):
            step(diary)
        out["peak"] = torch.cuda.max_memory_allocated()
        times = []
        for _ in range(5):
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(SETTLED // 5):
                step(None)
            torch.cuda.synchronize()
            times.append((time.perf_counter() - began) / (SETTLED // 5))
        out["ms"] = statistics.median(times) * 1e3
        out["waits"], out["where"] = waits(step, 10)
        torch.cuda.synchronize()
        out["weights"] = [
            p.detach().to_local().cpu() if hasattr(p, "to_local") else p.detach().cpu() for p in model.parameters()
        ]
    logging.getLogger("gradflow_export").removeHandler(heard)
    out["heard"] = heard.lines
    if exporter is not None:
        summary = exporter.summary()
        out["records"] = summary["steps"]["count"]
        out["set_aside"] = summary["set_aside"]
        out["issues"] = [str(issue) for issue in exporter.issues]
        out["loss_error"], out["norm_error"] = errors(writer, diary)
    return out


def errors(writer: MemoryWriter, diary: Diary) -> tuple[float | None, float | None]:
    """Return the largest relative difference of recorded losses and norms to the loop's own."""
    worst: list[float | None] = []
    for metric, own in (("loss", diary.losses), ("gradient.total_norm", diary.norms)):
        values = [float(v) for v in own]
        said = [(r.step, r.value(metric)) for r in writer.records if r.step <= len(values)]
        found = [abs(v - values[n - 1]) / (abs(values[n - 1]) + 1e-30) for n, v in said if v is not None]
        found = [error for error in found if not math.isnan(error)]
        worst.append(max(found) if found else None)
    return worst[0], worst[1]


def row(name: str, setting: str, alone: dict[str, Any], found: dict[str, Any]) -> tuple[bool, str]:
    """Return whether a watched run holds against the loop alone, and its line of the table."""
    same = all(torch.equal(a, b) for a, b in zip(alone["weights"], found["weights"], strict=True))
    more = found["waits"] - alone["waits"]
    parts = (
        f"{name:<28}{setting:<9}bits {'equal' if same else 'DIFFER'}",
        f"waits {more:>3} {found['where'][:4] if more else ''}",
        f"loss {found['loss_error']}  norm {found['norm_error']}  records {found['records']}",
        f"alone {alone['ms']:.2f} ms  ratio {found['ms'] / alone['ms']:.3f}",
        f"memory {found['peak'] / alone['peak']:.3f}",
        f"set aside {found['set_aside']}  {found['issues'][:3]}",
        *(f"\n    heard: {line[:300]}" for line in found["heard"][:4]),
    )
    return same and more <= 0 and not found["set_aside"], "  ".join(parts)


def in_turn(name: str, steps: int) -> tuple[bool, dict[str, Any]]:
    """Run one loop alone and watched, print its lines, and return whether all hold, with the figures."""
    found: dict[str, Any] = {}
    held = True
    for setting in WATCHED:
        torch.compiler.reset()
        try:
            found[setting] = run(name, setting, steps)
        except Exception:  # one loop that fails must not hide the others
            held = False
            print(f"{name} {setting}: FAILED\n{traceback.format_exc()[-1500:]}", flush=True)
            continue
        if setting != "alone" and "alone" in found:
            holds, line = row(name, setting, found["alone"], found[setting])
            held = held and holds
            print(line, flush=True)
    return held, {s: {k: v for k, v in one.items() if k != "weights"} for s, one in found.items()}


def main() -> int:
    """Run the loops, print a line for each, and return 0 when all hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", choices=list(LOOPS), help="a loop; may be given several times")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--json", help="file for all figures")
    chosen = parser.parse_args()
    if not torch.cuda.is_available():
        print("expected a CUDA device, found none: nothing was checked; run this on a machine with a GPU.")
        return 2
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    torch.backends.cudnn.benchmark = False
    warnings.filterwarnings("ignore", message=".*determinis.*")
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}")
    results = {name: in_turn(name, chosen.steps) for name in chosen.only or LOOPS}
    if chosen.json:
        Path(chosen.json).write_text(json.dumps({n: kept for n, (_, kept) in results.items()}, indent=1, default=str))
    return 0 if all(held for held, _ in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
