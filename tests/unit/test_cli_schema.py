"""``gradflow schema`` and the page it writes."""

from __future__ import annotations

import json
from pathlib import Path

from gradflow_export.cli import main
from gradflow_export.cli.schema import KIND_TITLES, markdown
from gradflow_export.records.catalog import CATALOG

PAGE = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"


def test_the_page_is_up_to_date():
    """docs/metrics.md is what `make schema` writes."""
    assert PAGE.read_text(encoding="utf-8") == markdown(CATALOG), "run: make schema"


def test_every_metric_is_on_the_page_once():
    """Each metric has one row, whatever its kind of site."""
    text = markdown(CATALOG)
    assert {spec.kind for spec in CATALOG.values()} <= {kind for kind, _, _ in KIND_TITLES}
    for name in CATALOG:
        assert text.count(f"`{name}`") == 1


def test_tables_have_one_cell_per_column():
    """A formula with bars does not break its row."""
    rows = [line.replace("\\|", "") for line in markdown(CATALOG).splitlines() if line.startswith("|")]
    assert {row.count("|") for row in rows} == {10}


def test_json_and_text_list_the_catalogue(capsys):
    """Both other forms list every metric."""
    assert main(["schema", "--json"]) == 0
    assert [entry["name"] for entry in json.loads(capsys.readouterr().out)] == list(CATALOG)
    assert main(["schema"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(CATALOG)
