"""Reads indexes and tensors through TensorBoard's data provider, whatever stands behind it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from tensorboard.data import provider

from tensorboard_plugin_gradflow.cache import IndexCache, Stored, TensorCache
from tensorboard_plugin_gradflow.errors import RequestError
from tensorboard_plugin_gradflow.index import Chunk, RunIndex, build_indexes, folder_of
from tensorboard_plugin_gradflow.metadata import PLUGIN_NAME

_BATCH_BYTES = 32 * 2**20
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
    """

    def __init__(
        self, data_provider: Any, cache: TensorCache, ctx: Any, experiment: str = "", kept: IndexCache | None = None
    ) -> None:
        self._provider = data_provider
        self._kept = kept or IndexCache(seconds=0.0)
        self._cache = cache
        self._ctx = ctx
        self._experiment = experiment

    def indexes(self) -> list[RunIndex]:
        """Return every run that holds something of ours, as of now, the most recently written first."""
        with self._kept.listing:
            built = [index for run, tags in self._list(None).items() for index in build_indexes(run, tags)]
            chosen = [index for index in built if index.sessions or index.too_new]
            chosen.sort(key=lambda index: (-index.updated, index.run))
            for index in reversed(chosen):
                self._kept.put((self._experiment, index.run), index)
        return chosen

    def index(self, run: str) -> RunIndex:
        """Return one run, as of a moment ago, and never older than what ``indexes`` told anybody.

        Raises:
            RequestError: There is no such run, or it holds nothing of ours.
        """
        key = (self._experiment, run)
        known = self._kept.get(key)
        if known is not None:
            return known
        with self._kept.listing:
            known = self._kept.get(key)
            if known is not None:
                return known
            folder = folder_of(run)
            listing = self._list(provider.RunTagFilter(runs=[folder]))
            for index in build_indexes(folder, listing[folder]) if folder in listing else ():
                if index.run == run:
                    self._kept.put(key, index)
                    return index
        raise RequestError(404, f"Expected a run with GradFlow data; got {run!r}. Ask /runs for those there are.")

    def read(self, run: str, chunks: Iterable[Chunk]) -> Iterator[tuple[Chunk, Stored]]:
        """Yield the tensors of ``chunks``, those in the cache first, the rest in batches of bounded size.

        A tensor that TensorBoard no longer has is left out.
        """
        batch: list[Chunk] = []
        size = 0
        for chunk in chunks:
            kept = self._cache.get((self._experiment, run, chunk.tag))
            if kept is not None:
                yield chunk, kept
                continue
            batch.append(chunk)
            size += 4 * int(chunk.content.get("rows", 1)) * _ASSUMED_SITES
            if size >= _BATCH_BYTES:
                yield from self._fetch(run, batch)
                batch, size = [], 0
        yield from self._fetch(run, batch)

    def read_json(self, run: str, chunks: Iterable[Chunk]) -> Iterator[tuple[Chunk, Any]]:
        """Yield the parsed JSON of string tensors; one that cannot be parsed is left out."""
        for chunk, stored in self.read(run, chunks):
            parsed = _parsed(stored)
            if parsed is not None:
                yield chunk, parsed

    def _list(self, run_tag_filter: Any) -> Any:
        return self._provider.list_tensors(
            self._ctx, experiment_id=self._experiment, plugin_name=PLUGIN_NAME, run_tag_filter=run_tag_filter
        )

    def _fetch(self, run: str, chunks: list[Chunk]) -> Iterator[tuple[Chunk, Stored]]:
        if not chunks:
            return
        found = self._provider.read_tensors(
            self._ctx,
            experiment_id=self._experiment,
            plugin_name=PLUGIN_NAME,
            downsample=_KEEP_LAST,
            run_tag_filter=provider.RunTagFilter(runs=[folder_of(run)], tags=[chunk.tag for chunk in chunks]),
        ).get(folder_of(run), {})
        for chunk in chunks:
            data = found.get(chunk.tag)
            if data:
                stored = _plain(data[-1].numpy)
                self._cache.put((self._experiment, run, chunk.tag), stored)
                yield chunk, stored


def _plain(array: Any) -> Stored:
    if array.dtype.kind in "OSU":
        text = array.item()
        return text.decode("utf-8", "replace") if isinstance(text, bytes) else str(text)
    return np.asarray(array)


def _parsed(stored: Stored) -> Any:
    try:
        return json.loads(stored) if isinstance(stored, str) else None
    except ValueError:
        return None
