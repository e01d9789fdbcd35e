"""Tables, gain report and gain chart of a W&B run: made on a thread of their own, kept in the run's summary."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, final

from gradflow_export.records.causes import groups
from gradflow_export.records.lost import StoredLost
from gradflow_export.records.step_record import RunInfo, Severity, StepRecord
from gradflow_export.records.verdict import Course, Verdict, problem, verdict
from gradflow_export.writers.wandb.fold import Row
from gradflow_export.writers.wandb.gains import GainViews
from gradflow_export.writers.wandb.picks import RUN_KEYS
from gradflow_export.writers.wandb.rows import FIRST, RowQueue, Rows
from gradflow_export.writers.wandb.tables import HEALTH_COLUMNS, ISSUE_COLUMNS, Cell, HealthBook, IssueBook

STEP_COLUMNS = (FIRST, "step", *RUN_KEYS)
MOST_STEPS = 1000
"""Rows of the table of steps; beyond that one covers several, their newest values, NaN and Inf of any kept."""

IN_ROWS = ("gain_report",)
"""Views that W&B draws from rows only; the others are drawn from the summary."""


@final
class Views:
    """Collects what tables and pages are made of.

    Args:
        module: wandb, or a module like it.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        self._health, self.issues, self._gains = HealthBook(), IssueBook(), GainViews(module)
        self._steps, self._course, self._lost = RowQueue(MOST_STEPS), Course(), StoredLost()

    def add(self, record: StepRecord) -> bool:
        """Take in one record; return whether it has the first issue of the run."""
        self._course.add(record)
        self._lost.add(record)
        self._health.add(record)
        self._gains.add(record)
        values = {name: value for name in RUN_KEYS if (value := record.value(name)) is not None}
        self._steps.put({FIRST: record.step, "step": record.step, **values})
        before = self.issues.found
        for issue in record.issues:
            self.issues.add(issue)
        return self.issues.found > 0 and before == 0

    @property
    def verdict(self) -> Row:
        """What the run's summary says of the whole."""
        found, still = self.issues.found, len(self.issues.open)
        return {"verdict": str(self._judged()), "issues_found": found, "open_issues": still}

    def _judged(self) -> Verdict:
        every = groups(self.issues.all)
        still = [group.head for group in every if group.head.open and group.head.severity > Severity.INFO]
        return verdict(
            self._course,
            [problem(each, stepped=self._course.stepped) for each in still],
            worst=max((each.severity for each in still), default=Severity.INFO),
            healed=sum(not group.head.open for group in every),
            lost=self._lost.lost_steps.phrase,
        )

    def sender(self, rows: Rows, step: int, info: RunInfo | None) -> Callable[[], None]:
        """Return what sends the views as they are now, made anew: what was only changed is not sent again."""
        tables: dict[str, tuple[tuple[str, ...], list[list[Cell]]]] = {
            "health": (HEALTH_COLUMNS, self._health.rows(self.issues.open, step)),
            "issues": (ISSUE_COLUMNS, self.issues.rows()),
            "steps": (STEP_COLUMNS, [[row.get(name) for name in STEP_COLUMNS] for row in self._steps.rows()]),
        }
        makers: dict[str, Callable[[], Any]] = {
            name: partial(self._module.Table, columns=list(columns), data=cells)
            for name, (columns, cells) in tables.items()
            if cells
        }
        makers |= dict(self._gains.views(self.issues, self._judged(), step, info.model if info else ""))
        return partial(_send, rows, makers, step)


def _send(rows: Rows, makers: Mapping[str, Callable[[], Any]], step: int) -> None:
    made: Row = {}
    for name, make in makers.items():
        # Each on its own: pages are files, and a full disk must not cost the tables or the rows.
        rows.try_to(f"the view {name}", partial(_put_into, made, name, make))
    if rows.own:
        if made:
            rows.add(made, step)
        return
    for name, view in made.items():
        # In the summary at once, where no row has to come; as what W&B then has of it within the user's next row.
        if rows.summarise({name: view}) and name in IN_ROWS:
            kept = rows.summary(name)
            if isinstance(kept, Mapping):
                rows.add({name: dict(kept)}, step)


def _put_into(made: Row, name: str, make: Callable[[], Any]) -> None:
    made[name] = make()
