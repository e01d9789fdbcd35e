"""What W&B tables say: the health of each layer, and the issues of a run. Plain Python values only."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import final

import numpy as np
import numpy.typing as npt

from gradflow_export.records.step_record import Issue, Reading, StepRecord
from gradflow_export.writers.wandb.ages import told

MOST_ROWS = 1000

HEALTH_COLUMNS = ("layer", "verdict", "gradient norm", "gain", "update ratio", "dead share", "trend", "step", "read at")
ISSUE_COLUMNS = (
    "type", "severity", "layer", "since step", "until step", "value", "threshold", "message", "advice", "layers",
)  # fmt: skip

Cell = str | float | None
Floats = npt.NDArray[np.float64]

_FAST, _SLOW = 0.2, 0.02
_MOVED = math.log(1.5)


@final
class IssueBook:
    """Every issue of a run as it stands now; beyond 1000 the oldest go."""

    def __init__(self) -> None:
        self._issues: dict[tuple[str, str, int], Issue] = {}
        self.found = 0

    def add(self, issue: Issue) -> bool:
        """Take in an issue that opened or healed; return whether it was not known before."""
        new = issue.key not in self._issues
        self._issues[issue.key] = issue
        self.found += new
        if len(self._issues) > MOST_ROWS:
            del self._issues[next(iter(self._issues))]
        return new

    @property
    def all(self) -> list[Issue]:
        """Each as it stands now, in the order they were found."""
        return list(self._issues.values())

    @property
    def open(self) -> list[Issue]:
        """Those that are open, worst first."""
        return sorted((issue for issue in self._issues.values() if issue.open), key=lambda i: (-i.severity, i.step))

    def rows(self) -> list[list[Cell]]:
        """Return one row per issue, in the order they were found; columns as in ``ISSUE_COLUMNS``."""
        return [
            [
                issue.issue_type.value, issue.severity.name, issue.layer or "(whole model)", float(issue.step),
                None if issue.healed_step is None else float(issue.healed_step), float(issue.value),
                float(issue.threshold), issue.message, issue.advice, ", ".join(issue.layers),
            ]
            for issue in self._issues.values()
        ]  # fmt: skip


class _Latest:
    """The last values of one metric, by site, and the steps they are of."""

    def __init__(self, reading: Reading, step: int) -> None:
        self.sites = reading.sites
        self.steps = np.full(len(reading.sites), step)
        self.values = np.where(reading.present, reading.values.astype(np.float64), np.nan)
        self.present = np.array(reading.present)

    def add(self, reading: Reading, step: int) -> None:
        self.steps[reading.present] = step
        self.values = np.where(reading.present, reading.values, self.values)
        self.present |= reading.present

    def as_dict(self) -> dict[str, float]:
        return {site: float(self.values[i]) for i, site in enumerate(self.sites) if self.present[i]}

    def older(self, step: int) -> dict[str, int]:
        """Return the steps of values that are of another step, by site."""
        return {self.sites[i]: int(self.steps[i]) for i in np.flatnonzero(self.present & (self.steps != step))}


@final
class HealthBook:
    """Remembers the last reading of each layer, and whether its gradient norm rises or falls."""

    _METRICS = ("parameter.gradient_norm", "block.gain", "parameter.update_ratio", "activation.dead_share")
    """In the order of their columns."""

    def __init__(self) -> None:
        self._latest: dict[str, _Latest] = {}
        self._sites: tuple[str, ...] | None = None
        self._fast: Floats = np.zeros(0)
        self._slow: Floats = np.zeros(0)

    def add(self, record: StepRecord) -> None:
        """Take in one record."""
        for metric in self._METRICS:
            reading = record.get(metric)
            if reading is None:
                continue
            known = self._latest.get(metric)
            if known is None or (known.sites is not reading.sites and known.sites != reading.sites):
                self._latest[metric] = _Latest(reading, record.step)
            else:
                known.add(reading, record.step)
            if metric == self._METRICS[0]:
                self._follow(reading)

    def _follow(self, reading: Reading) -> None:
        values = reading.values.astype(np.float64)
        good = reading.present & np.isfinite(values) & (values > 0)
        logs = np.log(values, where=good, out=np.zeros_like(values))
        if reading.sites != self._sites:
            self._sites = reading.sites
            self._fast = np.where(good, logs, np.nan)
            self._slow = self._fast.copy()
        fresh = good & np.isnan(self._fast)
        self._fast[fresh] = self._slow[fresh] = logs[fresh]
        self._fast[good] += _FAST * (logs[good] - self._fast[good])
        self._slow[good] += _SLOW * (logs[good] - self._slow[good])

    def rows(self, issues: Sequence[Issue], step: int) -> list[list[Cell]]:
        """Return one row per layer, columns as in ``HEALTH_COLUMNS``.

        Args:
            issues: What is open, worst first.
            step: The step that the table is of.

        Returns:
            A parameter counts for the layer it belongs to: norms are joined, of ratios the greatest is taken. The last
            column names the steps of values that are older than ``step``.
        """
        older = {
            column: latest.older(step) if (latest := self._latest.get(metric)) else {}
            for column, metric in zip(HEALTH_COLUMNS[2:6], self._METRICS, strict=True)
        }
        norms, gains, ratios, dead = (
            latest.as_dict() if (latest := self._latest.get(metric)) else {} for metric in self._METRICS
        )
        parameters: dict[str, list[str]] = {}
        for name in (*norms, *ratios):
            parameters.setdefault(name.rpartition(".")[0] or name, []).append(name)
        layers = dict.fromkeys((*parameters, *gains, *dead))
        moves = self._moves()
        out: list[list[Cell]] = []
        for layer in list(layers)[:MOST_ROWS]:
            names = list(dict.fromkeys(parameters.get(layer, ())))
            norm = [norms[name] for name in names if name in norms]
            out.append(
                [
                    layer or "(whole model)", _verdict(layer, names, issues), math.hypot(*norm) if norm else None,
                    gains.get(layer), _worst([ratios[name] for name in names if name in ratios]),
                    dead.get(layer), _trend([moves[name] for name in names if name in moves]),
                    float(step), _read_at(older, (layer, *names)),
                ]
            )  # fmt: skip
        return out

    def _moves(self) -> dict[str, float]:
        return dict(zip(self._sites or (), (self._fast - self._slow).tolist(), strict=True))


def _verdict(layer: str, names: Sequence[str], issues: Sequence[Issue]) -> str:
    concerned = {layer, *names}
    for issue in issues:
        if not concerned.isdisjoint(issue.layers):
            return f"{issue.issue_type.value} ({issue.severity.name})"
    return "healthy"


def _read_at(older: Mapping[str, Mapping[str, int]], sites: Sequence[str]) -> str:
    return told({f"{column}/{site}": steps[site] for column, steps in older.items() for site in sites if site in steps})


def _worst(values: Sequence[float]) -> float | None:
    return next((value for value in values if math.isnan(value)), max(values)) if values else None


def _trend(moves: Sequence[float]) -> str:
    known = [move for move in moves if not math.isnan(move)]
    if not known:
        return "unknown"
    move = max(known, key=abs)
    return "steady" if abs(move) < _MOVED else "rising" if move > 0 else "falling"
