"""The series of a diagnostic report: which metric stands behind each of its names."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from gradflow_export.records.statistics import Welford
from gradflow_export.records.step_record import StepRecord

GRADIENTS: Mapping[str, str] = MappingProxyType(
    {
        "discrete_phase_mean_norm": "phase.gradient",
        "discrete_mag_mean_norm": "magnitude.gradient",
        "upstream_mean_norm": "upstream.mean_norm",
    }
)
LOSS: Mapping[str, str] = MappingProxyType(
    {
        "total_loss": "loss",
        "logit_max_logit": "logits.max",
        "confidence_max_confidence": "confidence.max",
        "confidence_target_confidence": "confidence.target",
    }
)
UPDATES: Mapping[str, str] = MappingProxyType(
    {
        "avg_phase_change": "phase.change",
        "avg_mag_change": "magnitude.change",
        "num_updated_nodes": "update.changed_nodes",
    }
)
TIMING: Mapping[str, str] = MappingProxyType(
    {
        "total_backward_pass": "runtime.backward_time",
        "loss_computation": "runtime.loss_time",
        "discrete_gradients": "runtime.optimizer_time",
    }
)
OTHERS = (
    "gradient.total_norm", "gradient.mean_norm", "gradient.std_norm", "gradient.max_norm", "gradient.min_norm",
    "gradient.cosine", "phase.correlation", "phase.rank_correlation", "logits.min", "logits.mean", "logits.std",
    "logits.margin", "logits.log_z", "confidence.entropy", "alignment.accuracy", "alignment.margin",
    "update.total_norm", "update.ratio", "learning_rate", "runtime.rss", "runtime.cuda_allocated",
    "runtime.throughput", "runtime.backward_passes", "runtime.accumulated_share", "overhead",
)  # fmt: skip


class Series:
    """One run-level metric: statistics over the whole run, and the last values.

    Args:
        size: How many values to keep.

    Attributes:
        seen: Count, mean, spread and extremes of all finite values.
    """

    def __init__(self, size: int) -> None:
        self.seen = Welford()
        self._steps: deque[int] = deque(maxlen=size)
        self._values: deque[float] = deque(maxlen=size)

    def add(self, step: int, value: float) -> None:
        """Take in one value."""
        self.seen.add(value)
        self._steps.append(step)
        self._values.append(value)

    @property
    def values(self) -> list[float]:
        """The last values, oldest first; a new list."""
        return list(self._values)

    def last(self, count: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """Return the last steps and values. Shape of both: ``[<= count]``."""
        steps, values = list(self._steps)[-count:], list(self._values)[-count:]
        return np.array(steps, dtype=np.int64), np.array(values, dtype=np.float64)


class SeriesBook:
    """Every series a report needs, filled record by record.

    Args:
        size: How many values to keep of each.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        wanted = (*GRADIENTS.values(), *LOSS.values(), *UPDATES.values(), *TIMING.values(), *OTHERS)
        self._by_metric = {metric: Series(size) for metric in wanted}
        self._components: dict[str, Series] = {}

    def add(self, record: StepRecord) -> None:
        """Take in one record."""
        for reading in record.readings:
            series = self._by_metric.get(reading.metric)
            if series is not None and reading.present[0]:
                series.add(record.step, float(reading.values[0]))
        components = record.get("loss.component")
        if components is not None:
            for name, value in components.as_dict().items():
                if value is not None:
                    self._components.setdefault(name, Series(self._size)).add(record.step, value)

    def __getitem__(self, metric: str) -> Series:
        """Return the series of a metric; empty when it never arrived."""
        return self._by_metric[metric]

    def components(self) -> Iterator[tuple[str, Series]]:
        """Yield name and series of each loss component."""
        yield from self._components.items()
