"""What tables say."""

import math

import pytest

from gradflow_export.records.step_record import Issue, IssueType, Reading, Severity, StepRecord
from gradflow_export.writers.wandb.rows import merge
from gradflow_export.writers.wandb.tables import (
    HEALTH_COLUMNS,
    ISSUE_COLUMNS,
    MOST_ROWS,
    HealthBook,
    IssueBook,
)


def issue(kind=IssueType.EXPLODING, severity=Severity.HIGH, layer="a", step=3, healed=None, layers=()):
    return Issue(kind, severity, layer, step, 38.0, 2.0, "It explodes.", "Clip.", layers, healed)


def health(*records, issues=()):
    """Return the table's rows by layer, each as a dictionary."""
    book = HealthBook()
    for record in records:
        book.add(record)
    return {row[0]: dict(zip(HEALTH_COLUMNS[1:], row[1:], strict=True)) for row in book.rows(issues, 7)}


def norms(step, **values):
    sites = tuple(name.replace("_", ".") for name in values)
    return StepRecord(step, float(step), (Reading.of("parameter.gradient_norm", sites, list(values.values())),))


def test_parameters_count_for_their_layer():
    """Norms of weight and bias are joined, of update ratios the greatest is shown."""
    ratio = Reading.of("parameter.update_ratio", ("fc.weight", "fc.bias"), [1e-3, 1e-2])
    rows = health(norms(1, fc_weight=3.0, fc_bias=4.0), StepRecord(2, 2.0, (ratio,)))
    assert list(rows) == ["fc"]
    assert rows["fc"]["gradient norm"] == 5.0
    assert rows["fc"]["update ratio"] == pytest.approx(1e-2)
    assert rows["fc"]["gain"] is None


def test_every_kind_of_layer_has_a_row():
    """Blocks and modules stand beside the layers that have parameters."""
    gain = Reading.of("block.gain", ("fc", "block"), [1.5, None])
    dead = Reading.of("activation.dead_share", ("relu",), [0.25])
    rows = health(StepRecord(1, 1.0, (gain, dead)), norms(2, fc_weight=1.0))
    assert rows.keys() == {"fc", "relu"}
    assert (rows["fc"]["gain"], rows["relu"]["dead share"]) == (1.5, 0.25)


def test_the_last_reading_counts_even_when_later_ones_are_missing():
    """NaN is a reading; missing is none."""
    rows = health(norms(1, a_weight=2.0, b_weight=1.0), norms(2, a_weight=math.nan, b_weight=None))
    assert math.isnan(rows["a"]["gradient norm"])
    assert rows["b"]["gradient norm"] == 1.0
    assert (rows["a"]["read at"], rows["b"]["read at"]) == ("gradient norm 2", "gradient norm 1")


@pytest.mark.parametrize(("factor", "trend"), [(1.05, "rising"), (0.95, "falling"), (1.0, "steady")])
def test_the_trend_is_that_of_the_gradient_norm(factor, trend):
    """Several per cent a step are a trend."""
    assert health(*(norms(step, a_weight=factor**step) for step in range(1, 100)))["a"]["trend"] == trend


def test_a_layer_without_numbers_has_no_trend():
    """A gradient that was never finite neither rises nor falls."""
    assert health(norms(1, a_weight=math.nan), norms(2, a_weight=math.inf))["a"]["trend"] == "unknown"


def test_the_verdict_names_the_worst_open_issue_of_the_layer():
    """Issues name layers or parameters."""
    book = IssueBook()
    for found in (
        issue(step=1),
        issue(IssueType.NUMERICAL, Severity.CRITICAL, "b.weight", 2),
        issue(layer="c", step=4),
    ):
        assert book.add(found)
    assert not book.add(issue(layer="c", step=4, healed=5))
    rows = health(norms(1, a_weight=1.0, b_weight=1.0, c_weight=1.0), issues=book.open)
    verdicts = {name: row["verdict"] for name, row in rows.items()}
    assert verdicts == {"a": "EXPLODING (HIGH)", "b": "NUMERICAL (CRITICAL)", "c": "healthy"}


def test_cells_of_a_column_have_one_type():
    """W&B refuses a table whose column changes its type; ``None`` is allowed."""
    book = IssueBook()
    for found in (issue(), issue(layer="", step=9), issue(healed=8)):
        book.add(found)
    tables = [(HEALTH_COLUMNS, HealthBook().rows([], 1)), (ISSUE_COLUMNS, book.rows())]
    for columns, rows in tables:
        for number in range(len(columns)):
            assert len({type(row[number]) for row in rows if row[number] is not None}) <= 1
    assert [row[:5] for row in book.rows()] == [
        ["EXPLODING", "HIGH", "a", 3.0, 8.0],
        ["EXPLODING", "HIGH", "(whole model)", 9.0, None],
    ]


def test_the_list_of_issues_is_bounded():
    """A run that goes wrong for days fills no memory."""
    book = IssueBook()
    for step in range(MOST_ROWS + 50):
        book.add(issue(step=step))
    assert len(book.rows()) == MOST_ROWS
    assert book.found == MOST_ROWS + 50


def test_merging_hides_no_broken_value():
    """NaN and Inf of either row stay, and what only one row has."""
    older = {"step": 1, "a": math.inf, "b": 1.0, "table": "t", "c": math.inf}
    newer = {"step": 2, "a": 1.0, "b": 2.0, "c": math.nan}
    merged = merge(older, newer)
    assert math.isnan(merged.pop("c"))
    assert merged == {"step": 2, "a": math.inf, "b": 2.0, "table": "t"}
