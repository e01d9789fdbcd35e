"""Gains as W&B shows them: the gain report as a page, and a chart of gain by depth at a few moments of the run."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, final

import numpy as np

from gradflow_export.records.step_record import StepRecord
from gradflow_export.records.verdict import Verdict
from gradflow_export.writers.gain_book import GainBook, GainMap
from gradflow_export.writers.gain_report import Rows, gain_report, printable
from gradflow_export.writers.wandb.tables import Cell, IssueBook

CHART = "wandb/lineseries/v0"
"""A chart that every W&B server has built in; it draws lineVal over step, a line per lineKey."""

CHART_COLUMNS = ("depth", "block", "moment", "gain", "gain as a power of 2")
MOST_LINES = 4
MOST_POINTS = 500


@final
class GainViews:
    """Collects gains, and makes of them what W&B can show.

    Args:
        module: wandb, or a module like it; what it has no class for is left out.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        self._book = GainBook()

    def add(self, record: StepRecord) -> None:
        """Take in one record."""
        self._book.add(record)

    def views(
        self, issues: IssueBook, verdict: Verdict, step: int, model: str = ""
    ) -> list[tuple[str, Callable[[], Any]]]:
        """Return ``gain_report`` and ``gain_chart_table``, each with a call that makes of it what can be logged.

        Args:
            issues: Every issue so far.
            verdict: On the run so far.
            step: The newest step.
            model: Name of the model.

        Returns:
            What is known now is kept in the calls, so they may be made later and on another thread.
        """
        out: list[tuple[str, Callable[[], Any]]] = []
        gains, norms = self._book.map, self._book.norms
        if hasattr(self._module, "Html") and (gains is not None or norms is not None):
            shown = partial(gain_report, gains, norms, issues.open, verdict)
            page = partial(shown, step=step, found=issues.found, model=model)
            out.append(("gain_report", lambda: self._module.Html(page(), inject=False)))
        if hasattr(self._module, "plot_table") and gains is not None:
            # The table that the chart of `gradflow dashboard` is drawn from: a chart itself would need a row.
            table = partial(self._module.Table, columns=list(CHART_COLUMNS))
            out.append(("gain_chart_table", lambda: table(data=chart_rows(gains))))
        return out


def chart_rows(gains: GainMap) -> list[list[Cell]]:
    """Return the rows of the chart, columns as in ``CHART_COLUMNS``.

    Args:
        gains: Gains by time and depth.

    Returns:
        At most four moments, the first and the newest among them, and at most 500 places in depth; the power of 2 is
        empty where the gain is 0, NaN, Inf or missing.
    """
    rows = Rows.of(gains.sites, MOST_POINTS)
    values, present = rows.worst(gains.values, gains.present)
    out: list[list[Cell]] = []
    for column in sorted({round(at) for at in np.linspace(0, len(gains.spans) - 1, MOST_LINES).tolist()}):
        first, last = gains.spans[column]
        moment = f"step {first}" if first == last else f"steps {first} to {last}"
        for row, start in enumerate(rows.starts):
            gain = float(values[column, row]) if present[column, row] else None
            power = math.log2(gain) if gain is not None and 0 < gain < math.inf else None
            out.append([float(start), printable(gains.sites[start]), moment, gain, power])
    return out
