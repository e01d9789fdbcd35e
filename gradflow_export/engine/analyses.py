"""Gathers the facts that checks gave out in one step, and runs the analyses that samples bring along."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gradflow_export.hooks.readings import Clue, ClueSample, Sample
from gradflow_export.records.evidence import Facts, Value
from gradflow_export.records.lost import DISABLED
from gradflow_export.records.step_record import Issue, Note, Reading

_log = logging.getLogger("gradflow_export")


class Clues:
    """Values of facts by layer; what several optimizers of one step gave out is joined."""

    def __init__(self) -> None:
        self._sites: dict[str, tuple[str, ...]] = {}
        self._values: dict[str, dict[int, Value]] = {}

    def add(self, item: Clue, values: npt.NDArray[Any]) -> None:
        """Take in one fact.

        Args:
            item: Where it was looked for.
            values: One for each entry of ``item.where``. Shape: ``[len(item.where)]``.
        """
        if self._sites.get(item.metric) != item.sites:
            self._sites[item.metric], self._values[item.metric] = item.sites, {}
        known = self._values[item.metric]
        where = range(len(item.sites)) if item.where is None else item.where.tolist()
        for place, value in zip(where, values.tolist(), strict=True):
            if not (item.nan_is_missing and math.isnan(value)):
                known[place] = value
            else:
                known.setdefault(place, None)

    def facts(self) -> dict[str, Facts]:
        """Return the values by fact and layer, layers in the order of the model."""
        return {
            name: {self._sites[name][place]: values[place] for place in sorted(values)}
            for name, values in self._values.items()
        }


class Analyses:
    """Runs the analyses of samples; one that fails is disabled."""

    def __init__(self) -> None:
        self._failed: set[str] = set()

    def run(
        self, samples: Sequence[tuple[Sample, npt.NDArray[np.floating]]], step: int, told: list[Issue | Note]
    ) -> tuple[list[Reading], dict[str, dict[str, float]]]:
        """Return what the analyses say of metrics and of facts, each joined over the samples.

        Args:
            samples: Each with its values on the host.
            step: Their step.
            told: Takes a note on each analysis that fails.
        """
        metrics: dict[str, dict[str, float]] = {}
        facts: dict[str, dict[str, float]] = {}
        for sample, values in samples:
            if sample.analyse is None or sample.metric in self._failed:
                continue
            joined = facts if isinstance(sample, ClueSample) else metrics
            try:
                for name, sites in sample.analyse(values).items():
                    joined.setdefault(name, {}).update(sites)
            except Exception:
                self._failed.add(sample.metric)
                told.append(Note(DISABLED, f"analysis of {sample.metric}", step))
                _log.warning("gradflow: the analysis of %s failed and is disabled", sample.metric, exc_info=True)
        return [Reading.of(metric, list(sites), list(sites.values())) for metric, sites in metrics.items()], facts
