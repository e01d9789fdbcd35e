"""The table of very many runs, and what it says before all of them are read."""

import re
from dataclasses import replace

import pytest
from playwright.sync_api import expect

from gradflow_export.records.step_record import Note

RUNS = 130


@pytest.fixture(scope="module")
def many_logdir(tmp_path_factory, logs):
    """More runs than one look of the server takes in; every tenth has an issue, at a layer whose places are known."""
    root = tmp_path_factory.mktemp("many")
    places = {"file": "net.py", "line": 7, "call_file": "train.py", "call_line": 40}
    counts = {"parameters": 3, "trainable": 3, "own": 3, "order": 0, "calls": 1, "block": False, "shared": None}
    modules = [
        {"name": name, "kind": "Linear", "parent": parent, **counts, **places}
        for name, parent in (("", None), ("a", 0))
    ]
    architecture = Note("architecture", "Net", 1, {"modules": modules, "total": 2})
    for number in range(RUNS):
        first, *rest = logs.plain_records(range(1, 13))
        found = (logs.issue(layer="a", step=1),) if number % 10 == 0 else ()
        records = [replace(first, notes=(architecture,), issues=found), *rest]
        logs.write_run(root / f"run-{number:03}", records, start=100 * number)
    return root


@pytest.fixture(scope="module")
def many(many_logdir, versions_in, tensorboard):
    """The address of a TensorBoard over these runs."""
    with tensorboard(f"--logdir={many_logdir}", "--load_fast=true", holds=versions_in(many_logdir)) as address:
        yield address


def test_of_many_runs_those_in_view_are_rows_and_any_can_be_reached(many, open_panel):
    """The sick ones first; the focus stays in the table when its row is scrolled away; on paper all of them are there."""
    page, _ = open_panel(many, height=700)
    table = page.locator("[data-part=runs]")
    rows, scroll = table.locator("tbody tr"), table.locator(".scroll")
    expect(table.locator("[data-part=runs-note]")).to_have_text(f"{RUNS} runs")
    assert rows.count() < 50
    assert table.locator("table").get_attribute("aria-rowcount") == str(RUNS + 1)
    expect(rows.nth(12)).to_contain_text("EXPLODING")
    expect(rows.nth(13)).to_contain_text("Healthy")
    table.get_by_role("button", name="run-000").focus()
    scroll.evaluate("box => { box.scrollTop = box.scrollHeight; }")
    expect(table.locator(f'tr[aria-rowindex="{RUNS + 1}"]')).to_be_visible()
    assert rows.count() < 50
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "Table of the runs"
    page.get_by_label("Filter the table of runs").fill("run-12 healthy")
    expect(table.locator("tbody th")).to_have_text([f"run-{number}" for number in range(129, 120, -1)])
    page.get_by_label("Filter the table of runs").fill("")
    page.emulate_media(media="print")
    expect(rows).to_have_count(RUNS)
    page.emulate_media(media="screen")


def test_a_table_is_shown_before_all_runs_are_read(many_logdir, versions_in, tensorboard, open_panel, context):
    """Runs not read yet are there by name, are not called healthy, and fill up without a reload."""
    held, reads = [], False

    def impatient(route):
        if "patience=200" in route.request.url:
            route.continue_(url=route.request.url.replace("patience=200", "patience=0"))
        elif reads:  # on a slow machine one more request does not see all runs
            route.continue_()
        else:
            held.append(route)

    context.route(re.compile(r"/overview\?"), impatient)
    try:
        with tensorboard(f"--logdir={many_logdir}", holds=versions_in(many_logdir)) as address:
            page = context.new_page()
            page.goto(f"{address}/data/plugin_entry.html?name=gradflow")
            note = page.locator("[data-part=runs-note]")
            expect(note).to_have_text(re.compile(rf"^{RUNS} runs; reading \d+ of them$"))
            unread = page.locator("[data-part=runs] tbody tr", has_text="…")
            page.locator("[data-part=runs] .scroll").evaluate("box => { box.scrollTop = box.scrollHeight; }")
            expect(unread.first).to_be_visible()
            expect(unread.first).not_to_contain_text("Healthy")
            while not held:
                page.wait_for_timeout(20)
            reads = True
            for route in held:
                route.continue_()
            expect(note).to_have_text(f"{RUNS} runs")
            expect(unread).to_have_count(0)
            page.close()
    finally:
        context.unroute(re.compile(r"/overview\?"))


def test_an_issue_card_says_where_the_layer_is_called_and_defined(many, open_panel):
    """As the exporter saw it."""
    page, _ = open_panel(many, "&p.gradflow.run=run-000")
    expect(page.locator("[data-part=source]")).to_have_text("called at train.py:40, class at net.py:7")
