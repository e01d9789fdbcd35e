"""The sites of a metric as a tree: block, role, tensor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tensorboard_plugin_gradflow.data import site_tables, value_chunks
from tensorboard_plugin_gradflow.metadata import FORMAT
from tensorboard_plugin_gradflow.series import Query, chosen_sites, one_phase
from tensorboard_plugin_gradflow.source import Source

MOST_DEPTH = 64
"""Parts of a name that make levels; the rest of a longer name is one."""


@dataclass(frozen=True)
class Node:
    """A range of sites whose names begin alike.

    Attributes:
        name: The part of their names that they share, without its last dot; the whole name of a site alone.
        label: What of the name its parent does not have.
        first: The first site, in depth order.
        count: How many sites.
        level: 0 for the outermost.
        parent: Place of the parent among all nodes, ``None`` for the outermost.
    """

    name: str
    label: str
    first: int
    count: int
    level: int
    parent: int | None


def site_tree(source: Source, run: str, metric: str) -> dict[str, Any]:
    """Return the tree of the sites that /series gives for a metric.

    Args:
        source: Where to read.
        run: TensorBoard's name of the run.
        metric: A metric that the run holds.
    """
    index = source.index(run)
    tables = site_tables(source, index)
    pairs = one_phase(value_chunks(index, tables, metric))
    sites = chosen_sites(pairs, tables, Query(metric))
    nodes = [asdict(node) for node in nodes_of(sites)]
    return {"v": FORMAT, "run": run, "metric": metric, "sites": len(sites), "nodes": nodes}


def nodes_of(sites: Sequence[str]) -> list[Node]:
    """Return the nodes of some sites, a parent before its children. Prefixes that lead on alone are joined.

    Numbers are not levels of their own: ``layers.7`` is one part, as a block is called.

    Args:
        sites: In depth order; a node covers sites that follow each other.
    """
    parts = [_parts(site) for site in sites]
    out: list[Node] = []
    # What is still to be split: a range, the number of parts that lead there, level and parent.
    waiting: list[tuple[int, int, int, int, int | None]] = [(0, len(sites), 0, 0, None)]
    while waiting:
        first, end, deep, level, parent = waiting.pop()
        found: list[tuple[int, int, int, int, int | None]] = []
        for begin, stop in _runs(parts, first, end, deep):
            shared = _shared(parts, begin, stop, deep)
            name, above = ".".join(parts[begin][:shared]), ".".join(parts[begin][:deep])
            label = (name[len(above) + 1 :] if above else name) or parts[begin][-1]
            out.append(Node(name, label, begin, stop - begin, level, parent))
            if stop - begin > 1:
                found.append((begin, stop, shared, level + 1, len(out) - 1))
        waiting += reversed(found)
    return _in_order(out)


def _in_order(nodes: Sequence[Node]) -> list[Node]:
    """Return nodes in the order in which they are drawn: by first site, the outer before the inner."""
    order = sorted(range(len(nodes)), key=lambda place: (nodes[place].first, nodes[place].level))
    where = {place: number for number, place in enumerate(order)}
    return [
        Node(node.name, node.label, node.first, node.count, node.level, None if above is None else where[above])
        for node, above in ((nodes[place], nodes[place].parent) for place in order)
    ]


def _parts(site: str) -> tuple[str, ...]:
    """Return the parts of a name; a number belongs to the word before it."""
    out: list[str] = []
    for part in site.split(".", MOST_DEPTH):
        if out and part.isdigit():
            out[-1] += f".{part}"
        else:
            out.append(part)
    return tuple(out)


def _runs(parts: Sequence[tuple[str, ...]], first: int, end: int, deep: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of sites that follow each other and have the same part at a depth; one without any is alone."""
    begin = first
    for place in range(first + 1, end + 1):
        part = parts[begin][deep : deep + 1]
        if place == end or not part or parts[place][deep : deep + 1] != part:
            yield begin, place
            begin = place


def _shared(parts: Sequence[tuple[str, ...]], begin: int, stop: int, deep: int) -> int:
    """Return how many parts all of a range share; at least one more than the depth at which they were distinguished."""
    shared = len(parts[begin])
    for place in range(begin + 1, stop):
        same = 0
        while same < min(shared, len(parts[place])) and parts[place][same] == parts[begin][same]:
            same += 1
        shared = same
    return max(shared, min(deep + 1, len(parts[begin])))
