"""Brings the readings of all ranks to rank 0 through the job's key-value store, on the worker threads alone."""

from __future__ import annotations

import logging
import time
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from gradflow_export.distributed.rank_reduce import Columns, Joiner
from gradflow_export.distributed.rank_shares import SCHEMAS, Merger, Schema, Share, decode, encode
from gradflow_export.hooks.shard_layout import Layout
from gradflow_export.records.lost import DISABLED
from gradflow_export.records.step_record import Issue, Note, Reading

_log = logging.getLogger("gradflow_export")

GROUP = 8
"""Ranks that report to the first of them: those of one machine, as a rule."""
FAN_IN = 16
"""First ranks of groups that report to one other."""

PATIENCE_SECONDS = 4.0
"""How long a worker waits for a rank, for each level of the tree below it; who stays silent is waited for no more."""

AGAIN_STEPS, AGAIN_SECONDS = 50, 0.2
"""How often and how long a silent rank is waited for again: its worker may have fallen behind for good."""

ALONE_STEPS = 20
"""Steps after which a rank whose model rank 0 does not watch says so."""

_ENDED = "ended "
"""Begins, in what ranks report of a step, the name of what an error has ended on one."""

LOOK_SECONDS = 0.005
KEPT = 256
"""Messages of one rank that may lie in the store; beyond that the oldest are deleted."""


def children_of(rank: int, ranks: int) -> list[int]:
    """Return the ranks that report to one: those of its group, and first ranks of ``FAN_IN`` other groups.

    Args:
        rank: From 0.
        ranks: How many there are.
    """
    if rank % GROUP:
        return []
    first = rank // GROUP * FAN_IN + 1
    leaders = range(first * GROUP, (first + FAN_IN) * GROUP, GROUP)
    return [child for child in (*range(rank + 1, rank + GROUP), *leaders) if child < ranks]


def height_of(rank: int, ranks: int) -> int:
    """Return how many levels of the tree are below a rank."""
    below = children_of(rank, ranks)
    leaders = [child for child in below if child % GROUP == 0]
    return 1 + height_of(leaders[0], ranks) if leaders else int(bool(below))


class Exchange:
    """One end of the way from rank to rank: each adds what the ranks below it report, and rank 0 has them all.

    No collective is used, so no rank ever waits for another in its training thread. One that stops is missed by the
    worker of the rank it reports to, for one step; then that worker reads the messages of those below it itself. An
    error of the store is logged once; then this rank goes on alone.

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
        self._patience = PATIENCE_SECONDS * height_of(rank, ranks)
        self._place = self._channel = self._posts = 0
        self._channels: dict[int, int] = {}
        self._joiner, self._merger = Joiner(rank, ranks), Merger()
        self._silent: set[int] = set()
        self._heard: set[int] = set()
        self._posted: deque[str] = deque()
        self._published: set[bytes] = set()
        self._schemas: dict[bytes, Schema] = {}
        self._ended: set[str] = set()

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
        """Give up the place; a rank that has read no message yet is left the way to them."""
        try:
            if self._store is not None:
                if not (self.rank and self._posted and self._store.check([self._posted[0]])):
                    self._store.delete_key(f"at/{self.rank}/{self._place}")
                self._store.add(f"closed/{self.rank}", 1)
        except Exception as error:
            self._disable(error)

    def join(
        self, step: int, columns: Columns, layouts: Sequence[Layout], told: list[Issue | Note] | None = None
    ) -> list[Reading]:
        """Send what this rank and those below it report, or on rank 0 make its columns those of the job.

        Args:
            step: Counted from 1.
            columns: Values of this rank by metric.
            layouts: How its parameters lie.
            told: What else is reported of the step; on rank 0 what an error has ended on other ranks is added.

        Returns:
            What only several ranks together can tell; nothing above rank 0.
        """
        told = told if told is not None else []
        own = self._joiner.share(columns, layouts)
        self._ended.update(_ENDED + note.text for note in told if isinstance(note, Note) and note.kind == DISABLED)
        own.first.update(dict.fromkeys(self._ended, (self.rank, {})))  # each time: one message may be missed
        shares = [own]
        try:
            if self._store is not None:
                shares.extend(self._receive(step))
                if self.rank:
                    self._post(step, self._merger.merge(shares))
        except Exception as error:
            self._disable(error)
        if self.rank:
            return []
        whole = self._merger.merge(shares)
        for kind in sorted(kind for kind in whole.first.keys() - self._ended if kind.startswith(_ENDED)):
            self._ended.add(kind)
            told.append(Note(DISABLED, f"{kind.removeprefix(_ENDED)} on rank {whole.first[kind][0]}", step))
        return self._joiner.finish(columns, layouts, whole)

    def _disable(self, error: Exception) -> None:
        self._store = None
        _log.warning(
            "gradflow: the key-value store of this job cannot be used any more; rank %d goes on alone, and values that "
            "need every shard are left out. Keep the process group until the exporters are closed. %s: %s",
            self.rank,
            type(error).__name__,
            error,
        )

    def _post(self, step: int, share: Share) -> None:
        digest = share.schema.digest
        if digest not in self._published and len(self._published) < SCHEMAS:
            self._store.set(f"schema/{digest.hex()}", zlib.compress(share.schema.as_bytes(), 1))
            self._published.add(digest)
        self._posts += 1
        if self._posts == ALONE_STEPS and not self._store.check([f"at/0/{self._place}"]):
            _log.warning(
                "gradflow: rank %d watches a model that rank 0 does not, such as a stage of a pipeline: what it reads "
                "is not recorded. Watch each stage before torch.distributed.init_process_group(), each with a logdir "
                "of its own.",
                self.rank,
            )
        key = f"{self.rank}/{self._channel}/{step}"
        self._store.set(key, encode(share, schema=digest not in self._published))
        self._posted.append(key)
        if len(self._posted) > KEPT:
            self._store.delete_key(self._posted.popleft())

    def _schema(self, digest: bytes) -> Schema:
        known = self._schemas.get(digest)
        if known is None:
            known = Schema.of_bytes(zlib.decompress(self._store.get(f"schema/{digest.hex()}")))
            if len(self._schemas) < SCHEMAS:
                self._schemas[digest] = known
        return known

    def _receive(self, step: int) -> list[Share]:
        """Return what has come for a step from the ranks below, after waiting for those that are expected to speak."""
        arrived: dict[int, Share] = {}
        self._take(self._below(self.rank, arrived, silent=True), step, arrived)
        again = AGAIN_SECONDS if self._silent and step % AGAIN_STEPS == 0 else 0.0
        began = time.monotonic()
        while True:
            expected = list(self._below(self.rank, arrived, silent=False))
            waited = time.monotonic() - began
            if waited >= (self._patience if expected else again):
                break
            time.sleep(LOOK_SECONDS)
            self._take(self._below(self.rank, arrived, silent=True), step, arrived)
        for rank in expected:
            self._miss(rank, step)
        heard, out = 0, []
        for share in arrived.values():
            if not heard & share.ranks:  # a rank that was silent has reported of others that were read directly
                heard |= share.ranks
                out.append(share)
        return out

    def _below(self, rank: int, arrived: dict[int, Share], *, silent: bool) -> Iterator[int]:
        """Yield the ranks from which nothing has come yet: those that report here, and those below silent ones.

        Args:
            rank: To which they report.
            arrived: What has come, by rank.
            silent: Whether those that are not expected to speak are yielded too.
        """
        for child in children_of(rank, self._ranks):
            if child in arrived:
                continue
            if child not in self._silent:
                yield child
                continue
            if silent:
                yield child
            yield from self._below(child, arrived, silent=silent)

    def _take(self, wanted: Iterator[int], step: int, arrived: dict[int, Share]) -> None:
        """Take the messages of these ranks that are there; one question to the store is enough where all are."""
        keys = {rank: f"{rank}/{self._channels[rank]}/{step}" for rank in wanted if self._knows(rank)}
        expected = [key for rank, key in keys.items() if rank not in self._silent]
        every = bool(expected) and self._store.check(expected)
        for rank, key in keys.items():
            if (every and rank not in self._silent) or self._store.check([key]):
                arrived[rank] = decode(self._store.get(key), self._schema)
                self._store.delete_key(key)
                self._silent.discard(rank)
                self._heard.add(rank)
            elif rank in self._silent or rank not in self._heard:
                self._channels.pop(rank, None)  # it may have begun anew

    def _knows(self, rank: int) -> bool:
        if rank not in self._channels:
            known = f"at/{rank}/{self._place}"
            if not self._store.check([known]):
                return False
            self._channels[rank] = int(self._store.get(known))
        return True

    def _miss(self, rank: int, step: int) -> None:
        self._channels.pop(rank, None)
        self._silent.add(rank)
        _log.warning(
            "gradflow: nothing came from rank %d for step %d within %.0f s. Recording goes on without it: means are "
            "over the other ranks, and what needs every shard is left out. Watch the model on every rank, with the "
            "same settings; stages of a pipeline, before torch.distributed.init_process_group().",
            rank,
            step,
            self._patience,
        )
