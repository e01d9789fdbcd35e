"""The plugin's name and data version, and how the small description beside every tensor is read."""

from __future__ import annotations

import json
from typing import Any

from gradflow_export.chunks import FORMAT, PLUGIN_NAME

__all__ = ["FORMAT", "PLUGIN_NAME", "TAB_NAME", "decode_content"]

TAB_NAME = "GradFlow"


def decode_content(raw: bytes) -> dict[str, Any] | None:
    """Return the description stored with a tensor, ``None`` when it is not one of ours.

    Args:
        raw: ``plugin_content`` as TensorBoard returns it.
    """
    try:
        content = json.loads(raw)
    except ValueError:
        return None
    if not isinstance(content, dict) or not isinstance(content.get("v"), int):
        return None
    return content
