"""What was reported beside the numbers: the model as it is, and what belongs on every time axis."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tensorboard_plugin_gradflow.data import run_level
from tensorboard_plugin_gradflow.headline import gaps_between, readings
from tensorboard_plugin_gradflow.index import RunIndex
from tensorboard_plugin_gradflow.metadata import FORMAT
from tensorboard_plugin_gradflow.sound import is_note, is_whole
from tensorboard_plugin_gradflow.source import Source

MOST_MODULES = 10_000
MOST_ANNOTATIONS = 500
_EARLIER_FIRST = ("mark", "checkpoint")
_FEW = 50
_TOLD = math.log(1.2)
_PAUSE = 10

Steps = npt.NDArray[np.int64]


def architecture(source: Source, run: str) -> dict[str, Any]:
    """Return the modules of the model, as the newest session that tells them has them; none where no session does.

    Args:
        source: Where to read.
        run: TensorBoard's name of the run.
    """
    index = source.index(run)
    for number in reversed(range(len(index.sessions))):
        for note in _notes(source, index, number):
            if note["kind"] == "architecture":
                data = note.get("data")
                held = data if isinstance(data, dict) else {}
                modules = held.get("modules")
                found = modules[:MOST_MODULES] if isinstance(modules, list) else []
                sound = [_module(item, place) for place, item in enumerate(found)]
                if all(item is not None for item in sound) and is_whole(held.get("total")):
                    return {"v": FORMAT, "run": run, "modules": sound, "total": held["total"]}
                source.hurt(run, ("architecture", number))
    return {"v": FORMAT, "run": run, "modules": [], "total": 0}


def time_axis(source: Source, run: str) -> dict[str, Any]:
    """Return remarks of the user, changes of the learning rate, sessions that resumed, and gaps, in step order.

    Args:
        source: Where to read.
        run: TensorBoard's name of the run.
    """
    index = source.index(run)
    found = [
        {"kind": note["kind"], "step": note["step"], "last": note["step"], "text": note["text"]}
        for number in range(len(index.sessions))
        for note in _notes(source, index, number)
        if note["kind"] in _EARLIER_FIRST
    ]
    found += _resumed(index)
    found += _gaps(source, index)
    found += _rates(source, index)
    found.sort(key=lambda item: (item["kind"] not in _EARLIER_FIRST, item["step"]))
    shown = sorted(found[:MOST_ANNOTATIONS], key=lambda item: item["step"])
    return {"v": FORMAT, "run": run, "annotations": shown, "total": len(found)}


def _notes(source: Source, index: RunIndex, number: int) -> Iterator[Mapping[str, Any]]:
    session = index.sessions[number]
    for step, note in source.read_items(index.run, session.of_kind("notes"), is_note):
        if step < session.cut:
            yield note


def _module(item: Any, place: int) -> dict[str, Any] | None:
    """Return a module with all that it should have, in the right types, ``None`` where that is not so."""
    if not isinstance(item, Mapping) or not all(isinstance(item.get(name), str) for name in ("name", "kind")):
        return None
    numbers = ("parent", "order", "calls", "line", "call_line")
    counts = ("parameters", "trainable", "own")
    whole = all(item.get(name) is None or is_whole(item[name]) for name in numbers)
    whole = whole and all(is_whole(item.get(name)) for name in counts)
    texts = all(item.get(name) is None or isinstance(item[name], str) for name in ("file", "call_file", "shared"))
    # A parent comes before its children, so that nobody walks in a circle.
    tree = item.get("parent") is None or (is_whole(item["parent"]) and item["parent"] < place)
    if not (whole and texts and tree and isinstance(item.get("block"), bool)):
        return None
    return {
        name: item.get(name) for name in ("name", "kind", *numbers, *counts, "file", "call_file", "block", "shared")
    }


def _resumed(index: RunIndex) -> list[dict[str, Any]]:
    out = []
    for session in index.sessions[1:]:
        first = min((chunk.content["first"] for chunk in session.of_kind("clock")), default=None)
        if first is not None:
            out.append({"kind": "resumed", "step": first, "last": first, "text": "resumed"})
    return out


def _gaps(source: Source, index: RunIndex) -> list[dict[str, Any]]:
    out = []
    for session in index.sessions:
        for _, gap in source.read_json(index.run, session.of_kind("gap")):
            reason, last = str(gap.get("reason", ""))[:200], min(gap["last"], session.cut - 1)
            if last >= gap["first"]:
                out.append({"kind": "gap", "step": gap["first"], "last": last, "text": f"not written: {reason}"})
    out += [
        {"kind": "gap", "step": lost.first, "last": lost.last, "text": lost.reason}
        for lost in gaps_between(source, index)
    ]
    steps = _all_steps(source, index)
    between = np.diff(steps)
    if len(between):
        # Where steps are short, the exporter records one of several to keep to its budget, and says of how many.
        usual = max([float(np.median(between)), *_numbers(source, index, "schedule.spacing")[1].tolist()])
        for place in np.flatnonzero(between > _PAUSE * usual):
            first, last = int(steps[place]) + 1, int(steps[place + 1]) - 1
            if not any(gap["step"] <= last and gap["last"] >= first for gap in out):
                out.append({"kind": "gap", "step": first, "last": last, "text": "nothing recorded"})
    return out


def _all_steps(source: Source, index: RunIndex) -> Steps:
    found = [np.empty(0, np.int64)]
    for session in index.sessions:
        clocks = [c for c in session.of_kind("clock") if c.parts.name == "steps" and c.key.endswith("-0")]
        for _, stored in source.read(index.run, clocks):
            if isinstance(stored, np.ndarray):
                steps = stored.astype(np.int64)
                found.append(steps[steps < session.cut])
    return np.unique(np.concatenate(found))


def _numbers(source: Source, index: RunIndex, metric: str) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Return the steps and values of a metric of the whole run. Shapes: ``[readings]``."""
    parts = [readings(source, index, session, chunk, metric) for session, chunk in run_level(source, index, metric)]
    steps, values = (np.concatenate([np.empty(0), *(part[number] for part in parts)]) for number in (0, 1))
    known = np.isfinite(values)
    return steps[known], values[known]


def _rates(source: Source, index: RunIndex) -> list[dict[str, Any]]:
    steps, rates = _numbers(source, index, "learning_rate")
    known = rates >= 0
    ramps = ramps_of(steps[known].tolist(), rates[known].tolist())
    if len(ramps) > _FEW:
        ramps = _joined(ramps)
    return [
        {"kind": "learning_rate", "step": first, "last": last, "from": before, "to": after,
         "text": f"learning rate {before:.3g} to {after:.3g}"}
        for first, last, before, after in ramps
        if before != after and (0 in (before, after) or abs(math.log(after / before)) > _TOLD)
    ]  # fmt: skip


Ramp = tuple[int, int, float, float]
"""First and last step at which the learning rate is another one than before, that before, and that at the end."""


def ramps_of(steps: Sequence[int], rates: Sequence[float]) -> list[Ramp]:
    """Return the stretches in which a rate goes one way at every reading.

    Args:
        steps: Rising.
        rates: One for each step.
    """
    out: list[Ramp] = []
    way = 0
    for place in range(1, len(rates)):
        before, now = rates[place - 1], rates[place]
        turn = (now > before) - (now < before)
        if turn and turn == way:
            out[-1] = (out[-1][0], steps[place], out[-1][2], now)
        elif turn:
            out.append((steps[place], steps[place], before, now))
        way = turn
    return out


def _joined(ramps: Sequence[Ramp]) -> list[Ramp]:
    """Join ramps that follow each other in one direction: a schedule that goes down once in each epoch is one thing."""
    out: list[Ramp] = []
    for ramp in ramps:
        if out and (out[-1][3] > out[-1][2]) == (ramp[3] > ramp[2]):
            out[-1] = (out[-1][0], ramp[1], out[-1][2], ramp[3])
        else:
            out.append(ramp)
    return out
