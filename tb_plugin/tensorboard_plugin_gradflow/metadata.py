"""The plugin's name and data version, and how the small description beside every tensor is read."""

from __future__ import annotations

import json
from typing import Any

from gradflow_export.storage.event_chunks import FORMAT, PLUGIN_NAME

__all__ = ["FORMAT", "MOST_CONTENT", "PLUGIN_NAME", "TAB_NAME", "decode_content"]

TAB_NAME = "GradFlow"
MOST_CONTENT = 2**16
"""Bytes of a description; ours have some hundred."""


def decode_content(raw: bytes) -> dict[str, Any] | None:
    """Return the description stored with a tensor, ``None`` when it is not one of ours.

    Args:
        raw: ``plugin_content`` as TensorBoard returns it.
    """
    if len(raw) > MOST_CONTENT:
        return None
    try:
        content = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    version = content.get("v") if isinstance(content, dict) else None
    return content if isinstance(version, int) and not isinstance(version, bool) and version >= 1 else None
