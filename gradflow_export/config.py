"""Settings from keyword arguments, a dictionary, or a YAML or TOML file."""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from gradflow_export import extensions
from gradflow_export.errors import ArgumentError, ArgumentTypeError, StorageError, check_flag, nearest
from gradflow_export.hooks.compiled_calls import INSIDE, Inside
from gradflow_export.records.ignored import Ignored, ignored
from gradflow_export.schedule import DENSE_STEPS, INTERVALS, PREFLIGHT_STEPS, Schedule

_log = logging.getLogger("gradflow_export")

SECTION = "diagnostics"
AUTOMATIC: tuple[float | None, float] = 0.05, 20e-6
"""The budget of an exporter that is given none: a share of the time, and the seconds a step that it is at least."""
VERBOSE, VERBOSE_VARIABLE = 1, "GRADFLOW_VERBOSE"
"""How much is printed where nobody says otherwise, and the variable of the environment that says otherwise."""
_PLAIN = frozenset(
    {
        "profile", "every", "intervals", "enabled", "alerts_enabled", "rerun_nonfinite", "budget", "synchronous",
        "preflight", "compiled", "verbose", "ignore",
    }
)  # fmt: skip
THRESHOLDS: Mapping[str, float] = MappingProxyType(
    {
        "gradient_explosion_threshold": 10.0,
        "gradient_vanishing_threshold": 1e-6,
        "parameter_stagnation_threshold": 1e-8,
        "loss_spike_threshold": 2.0,
        "memory_usage_threshold": 1000.0,
        "exploding_threshold": 10.0,
        "vanishing_threshold": 1e-6,
        "dead_threshold": 0.9,
        "unstable_cv_threshold": 3.0,
    }
)
"""Every fixed threshold and its default; read-only. Memory in MB, the rest as in the rule it names."""

_BESIDE = frozenset({"model", "backends", "wandb", "logdir", "config", "start_step", "on_issue", "strict"})
"""What an exporter takes beside settings; a misspelt one comes here."""
_OF_WATCH = frozenset({"criterion", "optimizer", "blocks", "pairs", "grids", "copies", "roles"})


@dataclass(frozen=True)
class Settings:
    """What decides how a run is watched.

    Attributes:
        schedule: When instruments are read.
        profile: ``"robust"`` or ``"seed"``.
        thresholds: Fixed thresholds the user asked for by name.
        enabled: False watches nothing.
        alerts_enabled: False judges nothing.
        rerun_nonfinite: Whether a batch whose gradients are NaN or Inf is run again to find where that began; ``None``
            and False leave it at what the graph of its loss tells.
        budget: Greatest share of the time that watching may take, ``None`` for no limit.
        floor: Seconds a step that it may take in any case.
        synchronous: Whether everything of a step is done before the next begins; then there is no budget.
        preflight: First steps that are read densely and summed up in print, 0 for none.
        compiled: What is read inside code of ``torch.compile``: ``"exact"``, ``"always"`` or ``"never"``.
        ignored: Issue types and layers that are not reported.
        verbose: What is printed: 0 only warnings, 1 the beginning, grave issues and the verdict, 2 everything.
    """

    schedule: Schedule = field(default_factory=Schedule)
    profile: str = "robust"
    thresholds: Mapping[str, float] = field(default_factory=dict)
    enabled: bool = True
    alerts_enabled: bool = True
    rerun_nonfinite: bool | None = None
    budget: float | None = None
    floor: float = 0.0
    synchronous: bool = False
    preflight: int = 0
    compiled: Inside = "exact"
    ignored: Ignored = field(default_factory=Ignored)
    verbose: int = 0

    def as_json(self) -> dict[str, Any]:
        """Return the settings as JSON-ready values, for the run's description."""
        return {
            "profile": self.profile,
            "every": self.schedule.every,
            "intervals": dict(self.schedule.intervals),
            "thresholds": dict(self.thresholds),
            "alerts_enabled": self.alerts_enabled,
            "budget": self.budget,
            "synchronous": self.synchronous,
            "compiled": self.compiled,
            "ignore": [[kind.value, where] for kind, where in self.ignored.pairs],
        }


def refuse_of_watch(unknown: Iterable[str]) -> None:
    """Raise where ``watch()`` was passed arguments that it does not have.

    Args:
        unknown: Their names.

    Raises:
        ArgumentTypeError: The message names the nearest one, or says where the argument belongs.
    """
    for key in unknown:
        if key in _PLAIN | _BESIDE | THRESHOLDS.keys():
            raise ArgumentTypeError(f"{key!r} is an argument of Exporter; pass it there: Exporter(model, {key}=...).")
        known = _OF_WATCH | {"ignore"}
        raise ArgumentTypeError(f"watch() expects {', '.join(sorted(known))}, got {key!r}{nearest(key, known)}")


def make_settings(config: Mapping[str, Any] | str | os.PathLike[str] | None, given: Mapping[str, Any]) -> Settings:
    """Merge a configuration with keyword arguments, which win.

    Args:
        config: A dictionary, the path of a ``.yaml``, ``.yml`` or ``.toml`` file, or ``None``. Keys may stand at the
            top or in a section ``diagnostics``.
        given: Keyword arguments: ``profile``, ``every``, ``intervals``, ``enabled``, ``alerts_enabled``,
            ``rerun_nonfinite``, ``budget``, ``synchronous``, ``compiled``, ``verbose``, ``ignore`` and the names in
            ``rules.profiles.THRESHOLDS``; ``None`` means not given, but for
            ``budget``, where it means none.

    Raises:
        ArgumentError: A key is unknown (the message names the nearest) or a value cannot be used.
        ArgumentTypeError: ``config`` or a value has the wrong type.
        StorageError: The file cannot be read.
    """
    values = {} if config is None else _flatten(config)
    values.update({key: value for key, value in given.items() if value is not None or key == "budget"})
    names = _PLAIN | set(THRESHOLDS)
    for key in values:
        if key in _BESIDE:
            raise ArgumentError(
                f"{key!r} is no setting but an argument of its own; pass it to Exporter: Exporter(model, {key}=...)."
            )
        if key in _OF_WATCH:
            raise ArgumentError(f"{key!r} is an argument of watch(); pass it there: Exporter(model).watch({key}=...).")
        if key not in names:
            raise ArgumentError(
                f"unknown setting {key!r}{nearest(key, names | (_BESIDE if key in given else {SECTION}))}"
            )
    for key in ("enabled", "alerts_enabled", "rerun_nonfinite", "synchronous"):
        check_flag(key, values.get(key, True))
    intervals = values.get("intervals", {})
    if not isinstance(intervals, Mapping):
        raise ArgumentTypeError(
            f"intervals must map instruments to steps, got {intervals!r}; for example {{'blocks': 50}}."
        )
    preflight, synchronous = _check_preflight(values.get("preflight", False)), values.get("synchronous", False)
    budget, floor = (None, 0.0) if synchronous else _check_budget(values.get("budget", "auto"))
    if synchronous and values.get("budget", "auto") not in {None, "auto"}:
        raise ArgumentError(
            f"synchronous=True does everything within the step and keeps no budget, got budget={values['budget']!r}; "
            "leave one of them out."
        )
    known = {**INTERVALS, **extensions.intervals(INTERVALS)}
    return Settings(
        schedule=Schedule(values.get("every", 1), dict(intervals), max(DENSE_STEPS, preflight), known, shown=floor > 0),
        profile=values.get("profile", "robust"),
        thresholds={key: values[key] for key in THRESHOLDS if key in values},
        enabled=values.get("enabled", True),
        alerts_enabled=values.get("alerts_enabled", True),
        rerun_nonfinite=values.get("rerun_nonfinite"),
        budget=budget,
        floor=floor,
        synchronous=synchronous,
        preflight=preflight,
        compiled=_check_inside(values.get("compiled", "exact")),
        ignored=ignored(values.get("ignore")),
        verbose=_check_verbose(values["verbose"]) if "verbose" in values else _verbose_by_default(),
    )


def _check_inside(value: Any) -> Inside:
    if value not in INSIDE:
        raise ArgumentError(
            f"compiled must be one of {', '.join(map(repr, INSIDE))}, got {value!r}; leave it out for 'exact'."
        )
    return value  # type: ignore[no-any-return]  # narrowed by what it is compared with


def _check_verbose(value: Any) -> int:
    if value not in (0, 1, 2):
        raise ArgumentError(f"verbose must be 0, 1 or 2, got {value!r}; 0 prints warnings, 1 issues and the verdict.")
    return int(value)


def _verbose_by_default() -> int:
    said = os.environ.get(VERBOSE_VARIABLE, "").strip()
    said = {"off": "0", "on": "1"}.get(said.lower(), said)
    if said in {"", "0", "1", "2"}:
        return int(said or VERBOSE)
    _log.warning("gradflow: %s must be 0, 1 or 2, off or on, got %r, which is ignored.", VERBOSE_VARIABLE, said)
    return VERBOSE


def _check_preflight(value: object) -> int:
    if not isinstance(value, int):
        raise ArgumentTypeError(f"preflight must be True, False or a number of steps, got {value!r}; for example 50.")
    if value < 0:
        raise ArgumentError(f"preflight must be a number of steps of at least 0, got {value}; False leaves it out.")
    return PREFLIGHT_STEPS * value if isinstance(value, bool) else value


def _check_budget(value: object) -> tuple[float | None, float]:
    if value == "auto":
        return AUTOMATIC
    if value is None:
        return None, 0.0
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ArgumentTypeError(
            f"budget must be a share of the time, 'auto' or None for no limit, got {value!r}; for example budget=0.01."
        )
    if not 0 < value <= 1:
        raise ArgumentError(f"budget must be a share above 0 and at most 1, got {value!r}; 0.01 allows one per cent.")
    return float(value), 0.0


def _flatten(config: Mapping[str, Any] | str | os.PathLike[str]) -> dict[str, Any]:
    if isinstance(config, (str, os.PathLike)):
        config = read_file(Path(config))
    if not isinstance(config, Mapping):
        raise ArgumentTypeError(
            f"config must be a dictionary or the path of a .yaml or .toml file, got {type(config).__name__}; for "
            "example config={'every': 10}."
        )
    section = config.get(SECTION)
    section = {} if section is None else section
    if not isinstance(section, Mapping):
        raise ArgumentTypeError(
            f"config's section {SECTION!r} must hold keys and values, got {section!r}; for example 'every: 10'."
        )
    return {**{key: value for key, value in config.items() if key != SECTION}, **section}


def read_file(path: Path) -> Mapping[str, Any]:
    """Read a YAML or TOML file.

    Raises:
        StorageError: The file cannot be read.
        ArgumentError: Its ending or its content is not understood.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise StorageError(
            f"config file {str(path)!r} cannot be read: {error.strerror or error}; give the path of a .yaml or "
            ".toml file."
        ) from error
    except UnicodeDecodeError as error:
        raise ArgumentError(f"config file {str(path)!r} is no UTF-8 text: {error}.") from error
    if path.suffix not in {".yaml", ".yml", ".toml"}:
        raise ArgumentError(f"config file must end in .yaml, .yml or .toml, got {path.name!r}; rename it.")
    import yaml  # noqa: PLC0415 - a megabyte, and most runs have no such file

    try:
        data = yaml.safe_load(text) if path.suffix != ".toml" else _toml().loads(text)
    except ValueError as error:
        raise ArgumentError(f"config file {str(path)!r} is no valid TOML: {error}.") from error
    except yaml.YAMLError as error:
        raise ArgumentError(f"config file {str(path)!r} is no valid YAML: {error}.") from error
    if data is None:
        return {}
    if not isinstance(data, Mapping):
        raise ArgumentError(f"config file {str(path)!r} must hold keys and values, got {type(data).__name__}.")
    return _numbers(data)


def _toml() -> Any:
    try:
        return importlib.import_module("tomllib")
    except ModuleNotFoundError:
        return importlib.import_module("tomli")


def _numbers(data: Mapping[str, Any]) -> dict[str, Any]:
    """Turn strings such as ``1e-6``, which YAML 1.1 leaves as text, into numbers."""
    out: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, Mapping):
            out[str(key)] = _numbers(value)
        elif isinstance(value, str) and key in THRESHOLDS:
            try:
                out[str(key)] = float(value)
            except ValueError:
                out[str(key)] = value
        else:
            out[str(key)] = value
    return out
