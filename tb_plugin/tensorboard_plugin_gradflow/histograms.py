"""Histograms of one parameter over time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from gradflow_export.errors import nearest
from tensorboard_plugin_gradflow.errors import RequestError
from tensorboard_plugin_gradflow.index import Chunk, RunIndex, Session
from tensorboard_plugin_gradflow.metadata import FORMAT
from tensorboard_plugin_gradflow.sound import is_histogram
from tensorboard_plugin_gradflow.source import Source

MOST_HISTOGRAMS = 256
DEFAULT_HISTOGRAMS = 48


def list_histograms(source: Source, run: str) -> dict[str, Any]:
    """Return which metric of which site has histograms, by the first and the last chunk of each session.

    Args:
        source: Where to read.
        run: TensorBoard's name of the run.
    """
    index = source.index(run)
    known: dict[tuple[str, str], None] = {}
    for session in index.sessions:
        chunks = [chunk for chunk in session.of_kind("histograms") if _counts(session, chunk)]
        for _, item in _items(source, index, session, chunks[:1] + chunks[1:][-1:]):
            known[str(item["metric"]), str(item["site"])] = None
    return {"v": FORMAT, "run": run, "items": [{"metric": metric, "site": site} for metric, site in known]}


def read_histograms(
    source: Source,
    run: str,
    metric: str,
    site: str,
    first: int | None = None,
    last: int | None = None,
    most: int | None = None,
) -> dict[str, Any]:
    """Return histograms in step order; where there are more than ``most``, evenly chosen ones, the last included.

    Args:
        source: Where to read.
        run: TensorBoard's name of the run.
        metric: Such as ``"parameter.gradient"``.
        site: The parameter's name.
        first: First step wanted, ``None`` for the beginning.
        last: Last step wanted, ``None`` for the end.
        most: How many histograms at most, ``None`` for the default.

    Raises:
        RequestError: The run, the metric or the site is unknown, or the range is bad.
    """
    most = _checked(first, last, most)
    sites = _by_site(source, run, metric)
    if site not in sites:
        raise RequestError(404, f"Run {run!r} has no histogram of {site!r}{nearest(site, sites)}")
    return {"v": FORMAT, "run": run, "metric": metric, "site": site, **_shown(sites[site], first, last, most)}


def read_all_histograms(
    source: Source,
    run: str,
    metric: str,
    first: int | None = None,
    last: int | None = None,
    most: int | None = None,
) -> dict[str, Any]:
    """Return the histograms of every site, as ``read_histograms`` does those of one, in one pass over the log.

    Args:
        source: Where to read.
        run: TensorBoard's name of the run.
        metric: Such as ``"parameter.gradient"``.
        first: First step wanted, ``None`` for the beginning.
        last: Last step wanted, ``None`` for the end.
        most: How many histograms of each site at most, ``None`` for the default.

    Raises:
        RequestError: The run or the metric is unknown, or the range is bad.
    """
    most = _checked(first, last, most)
    sites = [
        {"site": site, **_shown(found, first, last, most)} for site, found in _by_site(source, run, metric).items()
    ]
    return {"v": FORMAT, "run": run, "metric": metric, "sites": sites}


def _checked(first: int | None, last: int | None, most: int | None) -> int:
    most = DEFAULT_HISTOGRAMS if most is None else most
    if not 1 <= most <= MOST_HISTOGRAMS:
        raise RequestError(400, f"Expected most between 1 and {MOST_HISTOGRAMS}; got {most}.")
    if first is not None and last is not None and first > last:
        raise RequestError(400, f"Expected first <= last; got first={first}, last={last}.")
    return most


def _by_site(source: Source, run: str, metric: str) -> dict[str, dict[int, Mapping[str, Any]]]:
    """Return every histogram of a metric by site and step, the sites in the order in which they were written."""
    index = source.index(run)
    metrics: dict[str, None] = {}
    sites: dict[str, dict[int, Mapping[str, Any]]] = {}
    for session in index.sessions:
        for step, item in _items(source, index, session, session.of_kind("histograms")):
            metrics[str(item["metric"])] = None
            if item["metric"] == metric:
                sites.setdefault(str(item["site"]), {})[step] = item
    if metric not in metrics:
        raise RequestError(404, f"Run {run!r} has no histograms of {metric!r}{nearest(metric, metrics)}")
    return sites


def _shown(found: Mapping[int, Mapping[str, Any]], first: int | None, last: int | None, most: int) -> dict[str, Any]:
    steps = [step for step in sorted(found) if (first is None or step >= first) and (last is None or step <= last)]
    shown = [
        {"step": step, **{name: found[step][name] for name in ("edges", "counts", "nonfinite")}}
        for step in _spread(steps, most)
    ]
    return {"total": len(steps), "histograms": shown}


def _spread(steps: list[int], most: int) -> list[int]:
    if len(steps) <= most:
        return steps
    if most == 1:
        return steps[-1:]
    return [steps[round(number * (len(steps) - 1) / (most - 1))] for number in range(most)]


def _counts(session: Session, chunk: Chunk) -> bool:
    return int(chunk.content["first"]) < session.cut


def _items(
    source: Source, index: RunIndex, session: Session, chunks: Iterable[Chunk]
) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for step, item in source.read_items(index.run, [c for c in chunks if _counts(session, c)], is_histogram):
        if step < session.cut:
            yield step, item
