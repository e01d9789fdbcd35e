"""What a process that was killed had recorded and not yet written as a chunk: the panel shows it like the rest."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from gradflow_export.storage.event_chunks import Blob, parse_tag
from gradflow_export.storage.reader import drafts_in
from tensorboard_plugin_gradflow.metadata import PLUGIN_NAME, decode_content
from tensorboard_plugin_gradflow.sound import is_whole

SETTLED_SECONDS = 10.0
"""A draft that was not touched for so long has nobody who would still write it as a chunk."""

_FROM = 10**9
"""Drafts are numbered from here on, so that they come after all chunks and tables of their session."""


class WithDrafts:
    """A data provider that has the drafts of sessions which were never closed beside what the event files hold.

    Args:
        provider: TensorBoard's.
        logdir: Its log directory; ``None`` when there is none on this machine, and so no drafts.
    """

    def __init__(self, provider: Any, logdir: str | None) -> None:
        self._provider = provider
        self._logdir = Path(logdir) if logdir and Path(logdir).is_dir() else None

    def list_tensors(self, ctx: Any, **wanted: Any) -> dict[str, dict[str, Any]]:
        """Return tags and descriptions by run, as TensorBoard's provider does."""
        found = self._provider.list_tensors(ctx, **wanted)
        if wanted.get("plugin_name") != PLUGIN_NAME:
            return dict(found)
        return {run: {**tags, **self._listed(run, tags)} for run, tags in found.items()}

    def read_tensors(self, ctx: Any, **wanted: Any) -> dict[str, dict[str, Any]]:
        """Return tensors by run and tag, as TensorBoard's provider does."""
        found = {run: dict(tags) for run, tags in self._provider.read_tensors(ctx, **wanted).items()}
        chosen = wanted["run_tag_filter"]
        drafted = {tag for tag in chosen.tags or () if _is_draft(tag)}
        for run in (chosen.runs or ()) if drafted else ():
            for tag, (blob, _) in self._drafts(run).items():
                if tag in drafted:
                    found.setdefault(run, {})[tag] = [SimpleNamespace(numpy=np.asarray(blob.data))]
        return found

    def _listed(self, run: str, tags: Mapping[str, Any]) -> dict[str, Any]:
        drafts = self._drafts(run)
        written = _written(tags) if drafts else {}
        out = {}
        for tag, (blob, wall) in drafts.items():
            parts = parse_tag(tag)
            first = blob.content.get("first")
            # What cannot be understood is listed too, so that it is counted.
            if parts is not None and (not is_whole(first) or first > written.get(parts.session, -1)):
                content = json.dumps(dict(blob.content)).encode()
                out[tag] = SimpleNamespace(plugin_content=content, max_wall_time=wall)
        return out

    def _drafts(self, run: str) -> dict[str, tuple[Blob, float]]:
        if self._logdir is None:
            return {}
        found = drafts_in(self._logdir / run, before=time.time() - SETTLED_SECONDS)
        renumbered = ((_renumbered(blob), wall) for blob, wall in found)
        return {blob.tag: (blob, wall) for blob, wall in renumbered if blob is not None}


def _renumbered(blob: Blob) -> Blob | None:
    """Return a blob under the number that drafts have, ``None`` where it is none of ours."""
    parts = parse_tag(blob.tag)
    if parts is None:
        return None
    head, dash, tail = parts.part.partition("-")
    content = dict(blob.content)
    if "clock" in content:
        clock, _, part = str(content["clock"]).rpartition("/")
        number, _, last = part.partition("-")
        if not (number.isascii() and number.isdigit() and isinstance(content.get("sites"), int)):
            return None
        content |= {"sites": int(content["sites"]) + _FROM, "clock": f"{clock}/{int(number) + _FROM}-{last}"}
    tag = f"{blob.tag.rpartition('/')[0]}/{int(head) + _FROM}{dash}{tail}"
    return Blob(tag, blob.data, content, blob.step)


def _is_draft(tag: str) -> bool:
    parts = parse_tag(tag)
    return parts is not None and parts.chunk >= _FROM


def _written(tags: Mapping[str, Any]) -> dict[str, int]:
    """Return the last step of each session that stands in a chunk."""
    out: dict[str, int] = {}
    for tag, series in tags.items():
        parts, content = parse_tag(tag), decode_content(series.plugin_content)
        if parts is not None and content is not None and content.get("kind") == "clock":
            last = content.get("last")
            out[parts.session] = max(out.get(parts.session, -1), last if is_whole(last) else -1)
    return out
