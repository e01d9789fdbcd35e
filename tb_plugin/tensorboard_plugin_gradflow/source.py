"""Reads indexes and tensors through TensorBoard's data provider, whatever stands behind it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from tensorboard.data import provider

from tensorboard_plugin_gradflow.cache import Damage, IndexCache, Stored, TensorCache
from tensorboard_plugin_gradflow.errors import RequestError
from tensorboard_plugin_gradflow.index import Chunk, RunIndex, build_indexes, folder_of
from tensorboard_plugin_gradflow.metadata import PLUGIN_NAME
from tensorboard_plugin_gradflow.sound import fits, is_sound, is_whole, parsed

Tables = Mapping[tuple[str, int], tuple[str, ...]]
"""Names of sites by session and number of the table."""

_BATCH_BYTES = 16 * 2**20
_TEXT_BYTES = 2**11
_NAMED = 8
_ASSUMED_SITES = 256
_KEEP_LAST = 1


class Source:
    """One experiment as one request sees it.

    Args:
        data_provider: TensorBoard's.
        cache: Shared between requests.
        ctx: TensorBoard's request context.
        experiment: Experiment id, ``""`` for a local log directory.
        kept: Indexes, shared between requests; without it the tensors are listed anew each time.
        damage: What could not be understood, shared between requests.
    """

    def __init__(
        self,
        data_provider: Any,
        cache: TensorCache,
        ctx: Any,
        experiment: str = "",
        kept: IndexCache | None = None,
        damage: Damage | None = None,
    ) -> None:
        self._provider = data_provider
        self._damage = damage or Damage()
        self._indexes = kept or IndexCache(seconds=0.0)
        self._cache = cache
        self._ctx = ctx
        self._experiment = experiment

    def indexes(self) -> list[RunIndex]:
        """Return every run that holds something of ours, as of now, the most recently written first."""
        with self._indexes.listing:
            built = [index for run, tags in self._list(None).items() for index in build_indexes(run, tags)]
            chosen = [index for index in built if index.sessions or index.too_new or index.damaged]
            chosen.sort(key=lambda index: (-index.updated, index.run))
            for index in reversed(chosen):
                self._indexes.put((self._experiment, index.run), index)
        return chosen

    def index(self, run: str) -> RunIndex:
        """Return one run, as of a moment ago, and never older than what ``indexes`` returned to anybody.

        Raises:
            RequestError: There is no such run, or it holds nothing of ours.
        """
        key = (self._experiment, run)
        known = self._indexes.get(key)
        if known is not None:
            return known
        with self._indexes.listing:
            known = self._indexes.get(key)
            if known is not None:
                return known
            folder = folder_of(run)
            listing = self._list(provider.RunTagFilter(runs=[folder]))
            for index in build_indexes(folder, listing[folder]) if folder in listing else ():
                if index.run == run and (index.sessions or index.too_new or index.damaged):
                    self._indexes.put(key, index)
                    return index
        there = sorted(index.run for index in self.indexes())
        named = ", ".join(map(repr, there[:_NAMED])) or "none"
        more = f" and {len(there) - _NAMED} more" if len(there) > _NAMED else ""
        raise RequestError(
            404,
            f"There is no run {run[:200]!r} with GradFlow data in this log directory: it was deleted, renamed, or lies "
            f"elsewhere. Runs here: {named}{more}.",
        )

    def damaged(self, index: RunIndex) -> int:
        """Return how many parts of a run could not be understood so far."""
        return index.damaged + self._damage.count((self._experiment, index.run))

    def hurt(self, run: str, part: Hashable) -> None:
        """Count a part of a run that cannot be understood."""
        self._damage.add((self._experiment, run), part)

    def read(self, run: str, chunks: Iterable[Chunk], sites: Tables | None = None) -> Iterator[tuple[Chunk, Stored]]:
        """Yield the tensors of ``chunks``, those in the cache first, the rest in batches of bounded size.

        What is not there is left out; what is there and is not what its description says is counted as damaged.

        Args:
            run: TensorBoard's name of the run.
            chunks: Which tensors.
            sites: Tables of site names, where values are read: they say how wide a tensor is.
        """
        batch: list[Chunk] = []
        size = 0
        for chunk in chunks:
            kept = self._cache.get((self._experiment, run, chunk.tag))
            if kept is not None:
                yield chunk, kept
                continue
            batch.append(chunk)
            size += _expected_bytes(chunk, sites)
            if size >= _BATCH_BYTES:
                yield from self._fetch(run, batch)
                batch, size = [], 0
        yield from self._fetch(run, batch)

    def read_json(self, run: str, chunks: Iterable[Chunk]) -> Iterator[tuple[Chunk, Any]]:
        """Yield the parsed JSON of string tensors; one that cannot be parsed is left out and counted as damaged."""
        for chunk, stored in self.read(run, chunks):
            found = parsed(stored)
            if found is None or not fits(chunk, found):
                self.hurt(run, chunk.tag)
            else:
                yield chunk, found

    def read_items(
        self, run: str, chunks: Iterable[Chunk], sound: Callable[[Any], bool]
    ) -> Iterator[tuple[int, Mapping[str, Any]]]:
        """Yield step and item of lists of both; one that is not sound is left out and counted as damaged.

        Args:
            run: TensorBoard's name of the run.
            chunks: Which tensors.
            sound: Says whether an item is what it should be.
        """
        for chunk, items in self.read_json(run, chunks):
            for number, item in enumerate(items):
                if isinstance(item, list) and len(item) == 2 and is_whole(item[0]) and sound(item[1]):
                    yield item[0], item[1]
                else:
                    self.hurt(run, (chunk.tag, number))

    def read_together(self, wanted: Mapping[str, Sequence[Chunk]]) -> dict[str, dict[str, Stored]]:
        """Return tensors of many runs, by run and tag, at the price of few questions.

        Args:
            wanted: Which tensors, by run.
        """
        out: dict[str, dict[str, Stored]] = {}
        left: dict[str, dict[str, Chunk]] = {}
        for run, chunks in wanted.items():
            for chunk in chunks:
                kept = self._cache.get((self._experiment, run, chunk.tag))
                if kept is None:
                    left.setdefault(run, {})[chunk.tag] = chunk
                else:
                    out.setdefault(run, {})[chunk.tag] = kept
        for part in _parts(left):
            tags = [tag for run in part for tag in left[run]]
            try:
                found = self._ask([folder_of(run) for run in part], tags)
            except Exception:
                # One of them cannot be read: each is asked for alone.
                found = {}
            for run in part:
                here = found.get(folder_of(run), {}) if found else None
                pairs = (
                    self._kept(run, left[run].values(), here)
                    if here is not None
                    else self._fetch(run, list(left[run].values()))
                )
                out.setdefault(run, {}).update((chunk.tag, stored) for chunk, stored in pairs)
        return out

    def list_others(self, plugin: str) -> Mapping[str, Mapping[str, bytes]]:
        """Return the descriptions of another plugin's tensors, by run and tag; empty where they cannot be listed."""
        try:
            found = self._provider.list_tensors(self._ctx, experiment_id=self._experiment, plugin_name=plugin)
        except Exception:
            return {}
        return {run: {tag: series.plugin_content for tag, series in tags.items()} for run, tags in found.items()}

    def _list(self, run_tag_filter: Any) -> Any:
        return self._provider.list_tensors(
            self._ctx, experiment_id=self._experiment, plugin_name=PLUGIN_NAME, run_tag_filter=run_tag_filter
        )

    def _fetch(self, run: str, chunks: list[Chunk]) -> Iterator[tuple[Chunk, Stored]]:
        if not chunks:
            return
        try:
            found = self._ask([folder_of(run)], [chunk.tag for chunk in chunks]).get(folder_of(run), {})
        except Exception:
            # Somewhere among them is what cannot be read, or all of them are too large for one answer.
            if len(chunks) > 1:
                middle = len(chunks) // 2
                yield from self._fetch(run, chunks[:middle])
                yield from self._fetch(run, chunks[middle:])
                return
            found = {chunks[0].tag: None}
        yield from self._kept(run, chunks, found)

    def _kept(self, run: str, chunks: Iterable[Chunk], found: Mapping[str, Any]) -> Iterator[tuple[Chunk, Stored]]:
        """Yield what was found and is sound, and keep it."""
        for chunk in chunks:
            if chunk.tag not in found:
                continue
            stored = _plain(found[chunk.tag])
            if stored is None or not is_sound(chunk, stored):
                self.hurt(run, chunk.tag)
                continue
            self._cache.put((self._experiment, run, chunk.tag), stored)
            yield chunk, stored

    def _ask(self, runs: Sequence[str], tags: Sequence[str]) -> Any:
        return self._provider.read_tensors(
            self._ctx,
            experiment_id=self._experiment,
            plugin_name=PLUGIN_NAME,
            downsample=_KEEP_LAST,
            run_tag_filter=provider.RunTagFilter(runs=runs, tags=tags),
        )


def _expected_bytes(chunk: Chunk, sites: Tables | None) -> int:
    """Return about how much memory a tensor takes."""
    if chunk.content.get("kind") != "values":
        return 8 * int(chunk.content.get("rows", _TEXT_BYTES))
    key = chunk.parts.session, int(chunk.content["sites"])
    width = _ASSUMED_SITES if sites is None else len(sites.get(key, ()))
    return 4 * int(chunk.content["rows"]) * max(width, 1)


def _parts(wanted: Mapping[str, Mapping[str, Chunk]]) -> Iterator[list[str]]:
    """Yield runs whose tensors may be asked for at once."""
    part: list[str] = []
    size = 0
    for run, chunks in wanted.items():
        part.append(run)
        size += sum(_expected_bytes(chunk, None) for chunk in chunks.values())
        if size >= _BATCH_BYTES:
            yield part
            part, size = [], 0
    if part:
        yield part


def _plain(data: Any) -> Stored | None:
    """Return the newest tensor of a tag, ``None`` where there is none that can be used."""
    if not data:
        return None
    array = np.asarray(data[-1].numpy)
    if array.dtype.kind not in "OSU":
        return array
    if array.size != 1:
        return None
    text = array.item()
    return text.decode("utf-8", "replace") if isinstance(text, bytes) else str(text)
