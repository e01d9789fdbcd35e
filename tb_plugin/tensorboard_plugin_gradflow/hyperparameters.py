"""Hyperparameters of runs, from where others keep them: TensorBoard's HParams plugin and W&B."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from tensorboard.plugins.hparams import plugin_data_pb2

from tensorboard_plugin_gradflow.index import folder_of

MOST, MOST_TEXT, MOST_FILE = 100, 200, 2**17
_DEPTH = 4
_TAG = "_hparams_/session_start_info"
_PLACES = ("config.yaml", "files/config.yaml", "wandb/latest-run/files/config.yaml")

Value = float | int | str | bool


class Hyperparameters:
    """What is known of the hyperparameters of some runs.

    Args:
        described: Descriptions of the HParams plugin's tensors by run and tag.
        logdir: Where W&B's files may lie; ``None`` when it is not on this machine.
    """

    def __init__(self, described: Mapping[str, Mapping[str, bytes]], logdir: Path | None) -> None:
        self._by_folder: dict[str, dict[str, Value]] = {}
        self._below: dict[str, list[str]] = {}
        for run, tags in described.items():
            if _TAG in tags:
                self._by_folder[run] = _from_hparams(tags[_TAG])
                self._below.setdefault(_above(run), []).append(run)
        self._logdir = logdir

    def of(self, run: str) -> dict[str, Any]:
        """Return the hyperparameters of a run, and from where they are.

        Args:
            run: TensorBoard's name of the run.
        """
        folder = folder_of(run)
        found: dict[str, Value] = {}
        sources = []
        # SummaryWriter.add_hparams writes into a folder of its own, below the one it was made for.
        for place in (folder, *sorted(self._below.get(folder, ())), _above(folder)):
            if place in self._by_folder:
                found, sources = dict(self._by_folder[place]), ["hparams"]
                break
        config = {} if self._logdir is None else _from_wandb(self._logdir / folder)
        if config:
            found, sources = {**config, **found}, [*sources, "wandb"]
        return {"hyperparameters": dict(list(found.items())[:MOST]), "hyperparameters_from": sources}


def _above(folder: str) -> str:
    return "." if "/" not in folder else folder.rpartition("/")[0]


def _from_hparams(content: bytes) -> dict[str, Value]:
    try:
        data = plugin_data_pb2.HParamsPluginData.FromString(content)
    except Exception:  # each protobuf runtime has a DecodeError of its own
        return {}
    out: dict[str, Value] = {}
    for name, value in sorted(data.session_start_info.hparams.items())[:MOST]:
        kind = value.WhichOneof("kind")
        if kind in {"number_value", "string_value", "bool_value"}:
            out |= _plain(name, getattr(value, kind))
    return out


def _from_wandb(folder: Path) -> dict[str, Value]:
    for place in _PLACES:
        path = folder / place
        try:
            if path.stat().st_size > MOST_FILE:
                continue
            config = yaml.load(path.read_bytes(), _loader())  # noqa: S506 - a safe loader, in C where there is one
        except (OSError, yaml.YAMLError, ValueError, RecursionError):
            continue
        if isinstance(config, dict) and "wandb_version" in config:
            return dict(_flat(config))
    return {}


def _loader() -> Any:
    return getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def _flat(config: Mapping[Any, Any]) -> Iterator[tuple[str, Value]]:
    """Yield what can be shown of a W&B configuration: at most so many, at most so deep, however it refers to itself."""
    waiting = [
        (str(name), entry["value"], 1)
        for name, entry in reversed(list(config.items()))
        if isinstance(entry, dict) and "value" in entry and not str(name).startswith("_")
    ]
    told = 0
    while waiting and told < MOST:
        name, value, depth = waiting.pop()
        if isinstance(value, dict):
            inside = list(value.items())[:MOST] if depth < _DEPTH else []
            waiting += [(f"{name}.{key}", item, depth + 1) for key, item in reversed(inside)]
            told += 0 if inside else 1
            continue
        for pair in _plain(name, value).items():
            told += 1
            yield pair


def _plain(name: str, value: Any) -> dict[str, Value]:
    if isinstance(value, float) and not math.isfinite(value):
        value = str(value)
    if isinstance(value, (list, tuple)) and len(value) <= 8 and not any(isinstance(v, (list, dict)) for v in value):
        value = ", ".join(map(str, value))
    if not isinstance(value, (bool, int, float, str)):
        return {}
    return {name[:MOST_TEXT]: value[:MOST_TEXT] if isinstance(value, str) else value}
