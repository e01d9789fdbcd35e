"""A table of all runs: what each came to, in one answer."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tensorboard_plugin_gradflow.cache import Remembered
from tensorboard_plugin_gradflow.data import about, all_issues, findings_of, model_of, run_level
from tensorboard_plugin_gradflow.headline import Floats, Steps, both_ends, every_step, readings
from tensorboard_plugin_gradflow.hyperparameters import Hyperparameters
from tensorboard_plugin_gradflow.index import Chunk, RunIndex, Session
from tensorboard_plugin_gradflow.metadata import FORMAT
from tensorboard_plugin_gradflow.said import Findings, player_chunks, tables_of
from tensorboard_plugin_gradflow.series import one_phase
from tensorboard_plugin_gradflow.sound import as_number
from tensorboard_plugin_gradflow.source import Source

MOST_RUNS = 1000
POINTS, CHUNKS = 32, 8
_ENOUGH_ROWS = 10
_LOSS_BYTES = 48 * 2**20
_ASSUMED_METRICS = 64
_TOGETHER = 64

Pairs = list[tuple[Session, Chunk]]


def overview(
    source: Source, kept: Remembered, logdir: Path | None, runs: Sequence[str] = (), patience: float | None = None
) -> dict[str, Any]:
    """Return verdict, loss, trend and hyperparameters of every run, or of some.

    Args:
        source: Where to read.
        kept: What was found before, by run and version.
        logdir: The log directory; ``None`` when it is not on this machine.
        runs: Names of the runs wanted; empty for all.
        patience: Seconds after which no more runs are looked at; those left are pending. ``None`` waits for all.

    Raises:
        RequestError: A run is unknown.
    """
    until = math.inf if patience is None else time.monotonic() + patience
    indexes = [source.index(run) for run in runs] if runs else source.indexes()
    shown = indexes[:MOST_RUNS]
    chunks = max(2, min(CHUNKS, _LOSS_BYTES // (256 * 4 * _ASSUMED_METRICS * max(1, len(shown)))))
    unknown = [index for index in shown if kept.get((index.run, index.version)) is None]
    for start in range(0, len(unknown), _TOGETHER):
        if start and time.monotonic() > until:
            break
        part = unknown[start : start + _TOGETHER]
        # Asked for together, and kept until they are looked at one by one.
        source.read_together({index.run: list(_told_by(index)) for index in part})
        losses = {index.run: run_level(source, index, "loss") for index in part}
        drawn = {run: _some(_of_training(pairs), chunks) for run, pairs in losses.items()}
        source.read_together({index.run: list(_with_clocks(drawn[index.run])) for index in part})
        for index in part:
            kept.put((index.run, index.version), _outcome(source, index, drawn[index.run]))
    given = Hyperparameters(source.list_others("hparams"), logdir)
    found = [kept.get((index.run, index.version)) for index in shown]
    rows = [
        _row(about(source, index), outcome) | given.of(index.run) for index, outcome in zip(shown, found, strict=True)
    ]
    return {"v": FORMAT, "total": len(indexes), "pending": found.count(None), "runs": rows}


def _row(base: dict[str, Any], outcome: tuple[Findings, dict[str, Any]] | None) -> dict[str, Any]:
    if outcome is None:
        return base | _unknown()
    found, more = outcome
    return base | more | {"said": found.said(base["state"])}


def _outcome(source: Source, index: RunIndex, drawn: Pairs) -> tuple[Findings, dict[str, Any]]:
    """Return what does not change while a run's version stays; of the losses some are drawn."""
    issues = all_issues(source, index)
    states = [issue["state"] for issue in issues if issue["severity"] != "INFO"]
    # What another one explains is no problem more.
    problems = [
        item
        for item in issues
        if item["explained_by"] is None and item["severity"] != "INFO" and item["state"] == "open"
    ]
    worst = problems[0] if problems else None
    named = ("issue_type", "severity", "layer", "step")
    read = {chunk.tag: readings(source, index, session, chunk, "loss") for session, chunk in drawn}
    found = findings_of(source, index, issues, read=read)
    return found, {
        **model_of(source, index),
        "issues": {state: states.count(state) for state in ("open", "healed", "ended")},
        "problems": len(problems),
        "verdict": None if worst is None else {name: worst[name] for name in named},
        "loss": both_ends(found.course),
        "trend": _trend([part for part in read.values() if len(part[0])]),
    }


def _unknown() -> dict[str, Any]:
    """Return what is said of a run that was not looked at yet."""
    nothing = dict.fromkeys(("model", "parameters", "verdict", "loss", "said"))
    return {"pending": True, "issues": {"open": 0, "healed": 0, "ended": 0}, "problems": 0, "trend": [], **nothing}


def _told_by(index: RunIndex) -> Iterator[Chunk]:
    """Yield what says which tensors hold the loss, and what was found."""
    for session in index.sessions:
        for kind in ("issues", "gap", "notes"):
            yield from session.of_kind(kind)
        tables = {chunk.content["sites"] for chunk in session.of_metric("run")}
        yield from (chunk for chunk in session.of_kind("sites") if int(chunk.parts.part) in tables)
    for session, chunk in player_chunks(index):
        yield from (chunk, *tables_of(session, chunk))
    for session in index.sessions[-1:]:
        yield from session.of_kind("meta")


def _of_training(pairs: Pairs) -> Pairs:
    return one_phase(pairs) if pairs else []


def _some(pairs: Pairs, most: int) -> Pairs:
    """Choose chunks evenly, the first and the last included, and from either end as many as tell the ends."""
    if len(pairs) <= most:
        return pairs
    places = {round(number * (len(pairs) - 1) / (most - 1)) for number in range(most)}
    for order in (range(len(pairs)), reversed(range(len(pairs)))):
        rows = 0
        for place in order:
            places.add(place)
            rows += pairs[place][1].content["rows"]
            if rows >= _ENOUGH_ROWS:
                break
    return [pairs[place] for place in sorted(places)]


def _with_clocks(pairs: Pairs) -> Iterator[Chunk]:
    for session, chunk in pairs:
        clock = session.clock_of(chunk)
        if clock is not None:
            yield from (chunk,) if every_step(clock) else (clock, chunk)


def _trend(parts: Sequence[tuple[Steps, Floats]]) -> list[list[Any]]:
    """Return medians of parts of the loss, each with the last step of its part."""
    out: list[list[Any]] = []
    for steps, values in parts[:: -(-len(parts) // POINTS) or 1]:
        pieces = max(1, min(POINTS // max(1, len(parts)), len(steps)))
        edges = len(steps) * np.arange(pieces + 1) // pieces
        finite = np.isfinite(values)
        piece = np.repeat(np.arange(pieces), np.diff(edges))[finite]
        rising = values[finite][np.lexsort((values[finite], piece))]
        ends = np.searchsorted(piece, np.arange(pieces + 1))
        counts, last = np.diff(ends), edges[1:] - 1
        chosen = values[last]
        chosen[counts > 0] = rising[(ends[:-1] + counts // 2)[counts > 0]]
        out += [[step, as_number(value)] for step, value in zip(steps[last].tolist(), chosen.tolist(), strict=True)]
    return out
