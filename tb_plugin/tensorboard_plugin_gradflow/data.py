"""What each route answers, as plain functions of a source; nothing here knows HTTP."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import asdict
from typing import Any, TypeVar

from gradflow_export.errors import ArgumentError, nearest
from gradflow_export.records.catalog import CATALOG, MetricSpec, spec
from gradflow_export.records.causes import with_causes
from gradflow_export.records.retired import RETIRED
from gradflow_export.records.step_record import Issue, Severity, issue_from_json
from gradflow_export.records.verdict import JUDGED
from tensorboard_plugin_gradflow.derived import DERIVED, stored_name
from tensorboard_plugin_gradflow.errors import RequestError
from tensorboard_plugin_gradflow.headline import READ, Known, both_ends, loss_course, lost_steps
from tensorboard_plugin_gradflow.howto import how_to_read
from tensorboard_plugin_gradflow.index import Chunk, RunIndex, Session, folder_of, started
from tensorboard_plugin_gradflow.metadata import FORMAT
from tensorboard_plugin_gradflow.said import Findings, findings
from tensorboard_plugin_gradflow.sound import is_issue, is_names, is_number, is_whole
from tensorboard_plugin_gradflow.source import Source, Tables

DEFAULT_ISSUES, MOST_ISSUES = 1000, 10_000
_MOST_PARTS = 64

_Held = TypeVar("_Held")
_META_FIELDS: tuple[tuple[str, Callable[[Any], bool]], ...] = (
    ("started", lambda value: is_number(value) and not isinstance(value, str)),
    ("model", lambda value: isinstance(value, str)),
    ("parameters", is_whole),
    ("blocks", is_names),
    ("rank", is_whole),
    ("world_size", is_whole),
    ("settings", lambda value: isinstance(value, dict)),
    ("versions", lambda value: isinstance(value, dict)),
)


def describe(name: str, sites: int = 1) -> MetricSpec:
    """Return the catalogue's description of a metric, or a plain one for a metric of another version.

    Args:
        name: The metric.
        sites: How many sites it has, which tells a metric of layers from one of the whole run.
    """
    if name in DERIVED:
        return DERIVED[name].spec
    try:
        return spec(name)
    except ArgumentError:
        kind = {"block": "block", "parameter": "parameter", "activation": "module"}.get(
            name.partition(".")[0], "run" if sites == 1 else "node"
        )
        return MetricSpec(name, name, "1", kind, "not in the catalogue of this version", "unknown", "unknown")


def catalog() -> dict[str, Any]:
    """Return every metric of the catalogue with all that is known of it, and how a run comes to hold it."""
    known = [*CATALOG.values(), *(item.spec for item in DERIVED.values())]
    return {"v": FORMAT, "metrics": [asdict(item) | how_to_read(item) for item in known]}


def list_runs(source: Source) -> dict[str, Any]:
    """Return every run with GradFlow data, the most recently written first.

    With their models where several share a folder: their names say less then.
    """
    indexes = source.indexes()
    folders = Counter(folder_of(index.run) for index in indexes)
    runs = [
        about(source, index) | (model_of(source, index) if folders[folder_of(index.run)] > 1 else {})
        for index in indexes
    ]
    return {"v": FORMAT, "runs": runs}


def model_of(source: Source, index: RunIndex) -> dict[str, Any]:
    """Return class and number of parameters of a run's model, ``None`` where they are not known.

    Args:
        source: Where to read.
        index: The run.
    """
    info: dict[str, Any] = {}
    for session in index.sessions[-1:]:
        info = next((known_of(data) for _, data in source.read_json(index.run, session.of_kind("meta"))), {})
    return {name: info.get(name) for name in ("model", "parameters")}


def run_meta(source: Source, run: str) -> dict[str, Any]:
    """Return what is known of one run: its sessions, the metrics it holds, its first and last loss, what was lost.

    Args:
        source: Where to read.
        run: TensorBoard's name of the run.
    """
    index = source.index(run)
    tables = site_tables(source, index)
    sessions = []
    for session in index.sessions:
        info = next((known_of(data) for _, data in source.read_json(run, session.of_kind("meta"))), {})
        sessions.append({"session": session.name, "started": started(session.name), **info})
    metrics = []
    phases = _phases(index, tables)
    for name, (first, last, sites) in sorted(_metrics(index, tables).items()):
        item = asdict(describe(name, sites)) | {"first": first, "last": last, "sites": sites, "phases": phases[name]}
        metrics.append(item)
    found = findings_of(source, index, all_issues(source, index), tables)
    base = about(source, index)
    return base | {
        "v": FORMAT, "sessions": sessions, "phases": list(index.phases), "metrics": metrics,
        "loss": both_ends(found.course), "lost": found.lost.total, "said": found.said(base["state"]),
    }  # fmt: skip


def findings_of(
    source: Source,
    index: RunIndex,
    issues: Iterable[Mapping[str, Any]],
    tables: Tables | None = None,
    read: Known = READ,
) -> Findings:
    """Return what the verdict on a run is made of.

    Args:
        source: Where to read.
        index: The run.
        issues: All of its issues.
        tables: Its site tables, at least those of run-level metrics; ``None`` to read these.
        read: What was read of the loss already, by tag.
    """
    tables = _run_tables(source, index) if tables is None else tables
    course = loss_course(source, index, _run_level(index, tables, "loss"), read)
    course.judged = any(_run_level(index, tables, name) for name in JUDGED)
    lost = lost_steps(source, index, _run_level(index, tables, "runtime.dropped"))
    return findings(source, index, issues, course, lost)


def known_of(info: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a run's description holds, as far as it is of the right types."""
    return {name: info[name] for name, sound in _META_FIELDS if name in info and sound(info[name])}


def run_issues(source: Source, run: str, most: int | None = None) -> dict[str, Any]:
    """Return the issues of one run, open ones first, the worst first.

    ``metrics`` names those that were read at the issue's first site, and where none was, those read inside it.

    Args:
        source: Where to read.
        run: TensorBoard's name of the run.
        most: How many issues at most, ``None`` for the default.

    Raises:
        RequestError: The run is unknown, or ``most`` is out of range.
    """
    most = DEFAULT_ISSUES if most is None else most
    if not 1 <= most <= MOST_ISSUES:
        raise RequestError(400, f"Expected most between 1 and {MOST_ISSUES}; got {most}.")
    index = source.index(run)
    found = all_issues(source, index)
    places = _places_by_metric(_sites_by_metric(index, site_tables(source, index)))
    shown = {layer: _metrics_at(layer, places) for layer in {issue["layer"] for issue in found[:most]}}
    issues = [issue | {"metrics": shown[issue["layer"]]} for issue in found[:most]]
    opened = sum(issue["state"] == "open" for issue in found)
    return {"v": FORMAT, "run": run, "issues": issues, "open": opened, "total": len(found)}


def all_issues(source: Source, index: RunIndex) -> list[dict[str, Any]]:
    """Return every issue of one run, open ones first, the worst first.

    An issue is one thing however often it was written; its last word counts. An issue that was open when its session
    ended and another session followed is ``"ended"``, unless that one reports the same type and layer: then it goes
    on. ``explained_by`` is type, layer and step of the issue whose consequence it is, or ``None``.

    Args:
        source: Where to read.
        index: The run.
    """
    found: dict[tuple[str, str, int], dict[str, Any]] = {}
    same: dict[tuple[str, str, int], tuple[str, str, int]] = {}
    for number, session in enumerate(index.sessions):
        left = {key[:2]: key for key, issue in found.items() if issue.get("healed_step") is None}
        for step, issue in source.read_items(index.run, session.of_kind("issues"), is_issue):
            if step < session.cut:
                own = issue["issue_type"], issue["layer"], issue["step"]
                same.setdefault(own, left.pop(own[:2], own) if own not in found else own)
                found[same[own]] = {**issue, "step": same[own][2], "seen": step, "state": _state(issue, number, index)}
    return sorted(_explained(found.values()), key=_worst_first)


def site_tables(source: Source, index: RunIndex) -> Tables:
    """Return every table of site names of a run by session and number."""
    tables = {}
    for session in index.sessions:
        for chunk, names in source.read_json(index.run, session.of_kind("sites")):
            tables[session.name, int(chunk.parts.part)] = tuple(names)
    return tables


def value_chunks(index: RunIndex, tables: Tables, metric: str) -> list[tuple[Session, Chunk]]:
    """Return the chunks that hold a metric, oldest first.

    Args:
        index: The run.
        tables: Its site tables.
        metric: A run-level or per-site metric.

    Raises:
        RequestError: The run has no such metric.
    """
    name = stored_name(metric)
    chosen = []
    for session in index.sessions:
        own = session.of_metric(name) if name not in {"run", *RETIRED} else ()
        shared = [chunk for chunk in session.of_metric("run") if name in _names(session, chunk, tables)]
        found = sorted([*own, *shared], key=lambda chunk: chunk.order) if own and shared else own or shared
        chosen += [(session, chunk) for chunk in found]
    if not chosen:
        known = _metrics(index, tables)
        raise RequestError(404, f"Run {index.run!r} has no metric {metric!r}{nearest(metric, known)}")
    return chosen


def run_level(source: Source, index: RunIndex, metric: str) -> list[tuple[Session, Chunk]]:
    """Return the chunks that hold a run-level metric, oldest first; none where the run has no such metric.

    Args:
        source: Where to read.
        index: The run.
        metric: The metric.
    """
    return _run_level(index, _run_tables(source, index), metric)


def _run_tables(source: Source, index: RunIndex) -> Tables:
    """Return the tables of run-level metrics alone, which are short."""
    tables = {}
    for session in index.sessions:
        wanted = {chunk.content["sites"] for chunk in session.of_metric("run")}
        chosen = [chunk for chunk in session.of_kind("sites") if int(chunk.parts.part) in wanted]
        for chunk, names in source.read_json(index.run, chosen):
            tables[session.name, int(chunk.parts.part)] = tuple(names)
    return tables


def _run_level(index: RunIndex, tables: Tables, metric: str) -> list[tuple[Session, Chunk]]:
    """Return the chunks that hold a run-level metric, oldest first; none where the run has no such metric."""
    return [
        (session, chunk)
        for session in index.sessions
        for chunk in session.of_metric("run")
        if metric in _names(session, chunk, tables)
    ]


def about(source: Source, index: RunIndex) -> dict[str, Any]:
    """Return what every answer about a run begins with.

    Args:
        source: Where it was found.
        index: The run.
    """
    first, last = index.steps or (None, None)
    return {
        "run": index.run,
        "version": index.version,
        "first": first,
        "last": last,
        "started": started(index.sessions[0].name) if index.sessions else None,
        "updated": index.updated,
        "state": index.state(time.time()),
        "too_new": index.too_new,
        "damaged": source.damaged(index),
    }


def _names(session: Session, chunk: Chunk, tables: Tables) -> tuple[str, ...]:
    """Return the metrics in one chunk: many for the table of run-level metrics, else one."""
    own = (str(chunk.content["metric"]),)
    names = tables.get((session.name, int(chunk.content["sites"])), ()) if own == ("run",) else own
    return tuple(name for name in names if name not in RETIRED)


def _metrics(index: RunIndex, tables: Tables) -> dict[str, tuple[int, int, int]]:
    """Return first step, last step and number of sites by metric."""
    out: dict[str, tuple[int, int, int]] = {}
    for session in index.sessions:
        for chunk in session.of_kind("values"):
            first, last = int(chunk.content["first"]), int(chunk.content["last"])
            wide = chunk.content["metric"] != "run"
            sites = len(tables.get((session.name, int(chunk.content["sites"])), ())) if wide else 1
            if first >= session.cut:
                continue
            for name in _names(session, chunk, tables):
                before = out.get(name, (first, last, sites))
                out[name] = (min(before[0], first), max(before[1], min(last, session.cut - 1)), max(before[2], sites))
    return _with_derived(out)


def _with_derived(held: dict[str, _Held]) -> dict[str, _Held]:
    """Add the metrics that can be had from those that a run holds."""
    return held | {name: held[item.source] for name, item in DERIVED.items() if item.source in held}


def _phases(index: RunIndex, tables: Tables) -> dict[str, list[str]]:
    """Return the phases in which each metric was read, "train" first."""
    out: dict[str, set[str]] = {}
    for session in index.sessions:
        for chunk in session.of_kind("values"):
            for name in _names(session, chunk, tables):
                out.setdefault(name, set()).add(session.phase_of(chunk))
    out = _with_derived(out)
    return {name: sorted(words, key=lambda word: (word != "train", word)) for name, words in out.items()}


def _sites_by_metric(index: RunIndex, tables: Tables) -> dict[str, tuple[str, ...]]:
    """Return the sites of each per-site metric, those of its newest table."""
    return {
        str(chunk.content["metric"]): tables.get((session.name, int(chunk.content["sites"])), ())
        for session in index.sessions
        for chunk in session.of_kind("values")
        if chunk.content["metric"] not in {"run", *RETIRED}
    }


def _places_by_metric(sites: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[AbstractSet[str], AbstractSet[str]]]:
    """Return the sites of each metric, and all that they lie in: thousands of layers are looked up in thousands."""
    known = {table: (frozenset(table), frozenset(_above(table))) for table in set(sites.values())}
    return {name: known[table] for name, table in sites.items()}


def _above(sites: Iterable[str]) -> Iterator[str]:
    for site in sites:
        parts = site.split(".", _MOST_PARTS)
        yield from (".".join(parts[:count]) for count in range(1, len(parts)))


def _metrics_at(layer: str, places: Mapping[str, tuple[AbstractSet[str], AbstractSet[str]]]) -> list[str]:
    exact = sorted(name for name, (sites, _) in places.items() if layer in sites)
    return exact or sorted(name for name, (_, above) in places.items() if layer in above)


def _explained(issues: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the issues, each with what explains it; what has ended explains what has ended."""
    found = list(issues)
    known: dict[bool, list[Issue]] = {True: [], False: []}
    for issue in found:
        with contextlib.suppress(KeyError, TypeError, ValueError):  # of a type that this version does not know
            known[issue["state"] == "ended"].append(issue_from_json({**issue, "explained_by": None}))
    why = {item.key: item.explained_by for members in known.values() for item in with_causes(members)}
    for issue in found:
        cause = why.get((issue["issue_type"], issue["layer"], issue["step"]))
        yield {**issue, "explained_by": None if cause is None else list(cause)}


def _state(issue: Mapping[str, Any], number: int, index: RunIndex) -> str:
    if issue.get("healed_step") is not None:
        return "healed"
    return "open" if number == len(index.sessions) - 1 else "ended"


def _worst_first(issue: Mapping[str, Any]) -> tuple[bool, int, int]:
    known = issue["severity"] in Severity.__members__
    severity = int(Severity[issue["severity"]]) if known else 0
    return issue["state"] != "open", -severity, int(issue["step"])
