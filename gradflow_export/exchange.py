"""Brings the readings of all ranks to rank 0 through the job's key-value store, on the worker threads alone."""

from __future__ import annotations

import json
import logging
import time
import zlib
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from gradflow_export.across import Columns, Joiner, Part, part_of
from gradflow_export.assemble import Column
from gradflow_export.records import Reading
from gradflow_export.taps.shards import Layout

_log = logging.getLogger("gradflow_export")

PATIENCE_SECONDS = 4.0
"""How long rank 0's worker waits for a rank, once; one that stays silent is not waited for until it speaks again."""

AGAIN_STEPS, AGAIN_SECONDS = 50, 0.2
"""How often and how long a silent rank is waited for again: its worker may have fallen behind for good."""

LOOK_SECONDS = 0.005
KEPT = 256
"""Messages of one rank that may lie in the store; beyond that the oldest are deleted."""


class Exchange:
    """One end of the way from rank to rank: rank 0 joins what has arrived, the others send.

    No collective is used, so no rank ever waits for another in its training thread, and one that stops is missed for
    ``PATIENCE_SECONDS`` by a worker and by nobody else. An error of the store is told once; then rank 0 goes on alone.

    Args:
        store: Has ``add``, ``set``, ``get``, ``check`` and ``delete_key``; ``None`` for none. Ends at the same place
            among those that are open on their ranks belong together.
        rank: That of this process.
        ranks: How many there are.
    """

    def __init__(self, store: Any, rank: int, ranks: int) -> None:
        self.rank = rank
        self._store = store
        self._ranks = ranks
        self._place = self._channel = 0
        self._channels: dict[int, int] = {}
        self._joiner = Joiner(ranks)
        self._silent: set[int] = set()
        self._posted: deque[str] = deque()

    def open(self) -> None:
        """Take a place among the exchanges of this rank that are open, and tell where messages will lie.

        Raises:
            RuntimeError: The store does not answer; nothing will be exchanged.
        """
        if self._store is None:
            return
        self._channel = self._store.add(f"opened/{self.rank}", 1)
        self._place = self._channel - 1 - self._store.add(f"closed/{self.rank}", 0)
        self._store.set(f"at/{self.rank}/{self._place}", str(self._channel))

    def close(self) -> None:
        """Give up the place."""
        try:
            if self._store is not None:
                self._store.delete_key(f"at/{self.rank}/{self._place}")
                self._store.add(f"closed/{self.rank}", 1)
        except Exception as error:
            self._set_aside(error)

    def join(self, step: int, columns: Columns, layouts: Sequence[Layout]) -> list[Reading]:
        """Send this rank's columns, or on rank 0 make them those of the job; return what that brings to light."""
        own = part_of(columns, layouts)
        try:
            if self.rank:
                self._post(step, own)
                return []
            arrived = self._receive(step)
        except Exception as error:
            self._set_aside(error)
            arrived = {}
        if self.rank:
            return []
        return self._joiner.join(Part(columns, own.sizes), layouts, arrived)

    def _set_aside(self, error: Exception) -> None:
        self._store = None
        _log.warning(
            "gradflow: the key-value store of this job cannot be used any more; rank %d goes on alone, and values that "
            "need every shard are left out. Keep the process group until the exporters are closed. %s: %s",
            self.rank,
            type(error).__name__,
            error,
        )

    def _post(self, step: int, part: Part) -> None:
        if self._store is None:
            return
        key = f"{self.rank}/{self._channel}/{step}"
        self._store.set(key, encode(part))
        self._posted.append(key)
        if len(self._posted) > KEPT:
            self._store.delete_key(self._posted.popleft())

    def _receive(self, step: int) -> dict[int, Part]:
        """Return what has arrived for a step, by rank, after waiting for those that are expected to speak."""
        if self._store is None:
            return {}
        ranks = range(1, self._ranks)
        complete = self._wait([rank for rank in ranks if rank not in self._silent], step, PATIENCE_SECONDS)
        if self._silent:
            complete = self._wait(list(ranks), step, AGAIN_SECONDS if step % AGAIN_STEPS == 0 else 0.0)
        arrived: dict[int, Part] = {}
        for rank in ranks:
            if not complete and not self._wait([rank], step, 0.0):
                self._miss(rank, step)
                continue
            key = f"{rank}/{self._channels[rank]}/{step}"
            arrived[rank] = decode(self._store.get(key))
            self._store.delete_key(key)
            self._silent.discard(rank)
        return arrived

    def _wait(self, ranks: list[int], step: int, seconds: float) -> bool:
        """Return whether the messages of all these ranks are there, waiting for them a while."""
        until = time.monotonic() + seconds
        while not self._all_there(ranks, step):
            if time.monotonic() >= until:
                return False
            time.sleep(LOOK_SECONDS)
        return True

    def _all_there(self, ranks: list[int], step: int) -> bool:
        for rank in ranks:
            if rank not in self._channels:
                known = f"at/{rank}/{self._place}"
                if not self._store.check([known]):
                    return False
                self._channels[rank] = int(self._store.get(known))
        keys = [f"{rank}/{self._channels[rank]}/{step}" for rank in ranks]
        return not keys or bool(self._store.check(keys))

    def _miss(self, rank: int, step: int) -> None:
        self._channels.pop(rank, None)
        if rank not in self._silent:
            self._silent.add(rank)
            _log.warning(
                "gradflow: nothing came from rank %d for step %d within %.0f s. Recording goes on without it: means "
                "are over the other ranks, and what needs every shard is left out. Watch the model on every rank, with "
                "the same settings.",
                rank,
                step,
                PATIENCE_SECONDS,
            )


def encode(part: Part) -> bytes:
    """Return a part as bytes: compressed, a line of JSON, then values and presence of each column."""
    columns = part.columns.items()
    head = {"sizes": dict(part.sizes), "columns": [[metric, list(column.sites)] for metric, column in columns]}
    body = [array for _, c in columns for array in (c.values.astype("<f8").tobytes(), c.present.tobytes())]
    return zlib.compress(b"".join([json.dumps(head).encode(), b"\n", *body]), 1)


def decode(message: bytes) -> Part:
    """Undo :func:`encode`."""
    line, _, body = zlib.decompress(message).partition(b"\n")
    head = json.loads(line)
    columns: Columns = {}
    start = 0
    for metric, sites in head["columns"]:
        count = len(sites)
        column = columns[metric] = Column(tuple(sites))
        column.values = np.frombuffer(body, "<f8", count, start).astype(np.float64)
        column.present = np.frombuffer(body, np.bool_, count, start + 8 * count).copy()
        start += 9 * count
    return Part(columns, head["sizes"])
