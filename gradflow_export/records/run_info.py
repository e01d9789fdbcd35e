"""What is known of a run before its first step (floor 0)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class RunInfo:
    """What is known of a run before its first step.

    Attributes:
        session: Start time in milliseconds, a random word and the rank, ``"1732143600123-9f3ac07b-0"``: no two starts
            have the same, on whatever machine. Older versions left the word out.
        started: Seconds since the epoch.
        model: Class name of the watched model.
        parameters: Number of trainable entries of parameters.
        blocks: Names of the blocks whose gains are measured, in depth order; empty until known.
        rank: Rank of the process.
        world_size: Number of processes.
        settings: Profile, thresholds and intervals as JSON-ready values.
        versions: Package versions.
        entries: Number of entries of all parameters; 0 where an older version wrote it.
        tensors: Number of parameters.
        frozen: How many of them do not train.
    """

    session: str
    started: float
    model: str = ""
    parameters: int = 0
    blocks: tuple[str, ...] = ()
    rank: int = 0
    world_size: int = 1
    settings: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    entries: int = 0
    tensors: int = 0
    frozen: int = 0

    @property
    def size(self) -> str:
        """How many parameters there are, and how many of them train, in words."""
        if not self.frozen:
            return f"{self.parameters:,} parameter{'s' * (self.parameters != 1)}"
        frozen = f"{self.frozen} of {self.tensors} tensors frozen"
        return f"{self.parameters:,} of {self.entries:,} parameters train ({frozen})"


def info_to_json(info: RunInfo) -> dict[str, Any]:
    """Return the run's description, ready for ``json.dumps``."""
    return {**vars(info), "blocks": list(info.blocks), "settings": dict(info.settings), "versions": dict(info.versions)}


def info_from_json(data: Mapping[str, Any]) -> RunInfo:
    """Undo :func:`info_to_json`."""
    return RunInfo(**{**data, "blocks": tuple(data["blocks"])})
