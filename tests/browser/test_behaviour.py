"""What the panel does under a hand: pointing, clicking, zooming, choosing, by mouse and by keyboard."""

import contextlib
import csv
import io
import re
from pathlib import Path

import pytest
from playwright.sync_api import Error, expect

from gradflow_export.records.catalog import CATALOG
from tensorboard_plugin_gradflow.howto import how_to_read

SICK = "&p.gradflow.run=sick"
KNOWN = "&p.gradflow.run=known"
RED = """canvas => {
    const {data} = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
    let found = 0;
    for (let i = 0; i < data.length; i += 4) if (data[i] > 90 && data[i + 1] < 60 && data[i + 2] < 70) found++;
    return found;
}"""


def link_of(page):
    """Return the part of the address that a person would copy."""
    return page.url.partition("#")[2]


def stored(page, **state):
    """Wait until the address holds these values, all at once; what was there before does not count."""
    holds = """wanted => {
        const parts = new Map(location.hash.slice(1).split('&').map(part => part.split('=')));
        return Object.entries(wanted).every(([key, value]) => decodeURIComponent(parts.get(`p.gradflow.${key}`)) === value);
    }"""
    page.wait_for_function(holds, arg=state)


def zoomed_below(page, steps):
    """Wait until the address holds a zoom of fewer steps; return its ends."""
    short = "most => { const z = /zoom=(\\d+)-(\\d+)/.exec(location.hash); return z && z[2] - z[1] < most && [+z[1], +z[2]]; }"
    return page.wait_for_function(short, arg=steps).json_value()


def tells(page, *lines):
    """Wait until the tooltip begins with these lines."""
    for number, text in enumerate(lines):
        expect(page.locator(".tip div").nth(number)).to_have_text(text)


def at(target, x, y=0.5):
    """Return a position inside an element, by shares of its width and height, once it is there.

    A chart whose form changes is drawn anew: for a moment what was found is no longer in the page.
    """
    while (box := target.bounding_box()) is None:
        target.wait_for()
    return {"x": box["width"] * x, "y": box["height"] * y}


def point(target, x, shown):
    """Point at a chart until something is shown: one that is drawn anew under a hand at rest has forgotten where it was."""
    for _ in range(20):
        target.hover(position=at(target, x))
        with contextlib.suppress(Error):
            return shown.first.wait_for(timeout=5000)
        target.page.mouse.move(2, 2)
    raise AssertionError(f"{shown} was never shown")


def saved(page, what, kind, number=0):
    """Choose an entry of a download menu; return the file's bytes."""
    with page.expect_download() as download:
        page.get_by_label(f"Download {what}").nth(number).select_option(kind)
    return Path(download.value.path()).read_bytes()


def table_of(data):
    """Return the lines of a csv file as dictionaries."""
    return list(csv.DictReader(io.StringIO(data.decode(), newline="")))


def test_one_cursor_is_linked_over_map_profile_and_lines(address, open_panel):
    """Pointing at the map points at the same step in every chart, and at the row in the profile; and back."""
    page, _ = open_panel(address, SICK)
    plot, line = page.locator("[data-part=map]"), page.locator("[data-part=line-run] .u-over").first
    expect(page.locator(".lines canvas")).to_have_count(3)
    plot.hover(position=at(plot, 0.5))
    expect(page.locator("[data-part=profile] .hline")).to_be_visible()
    for cursor in page.locator(".lines .u-cursor-x").all():
        share = cursor.evaluate("c => new DOMMatrix(getComputedStyle(c).transform).e / c.parentElement.clientWidth")
        assert share == pytest.approx(0.5, abs=0.01)
    line.hover(position=at(line, 0.25))
    ghost = page.locator("[data-part=map] .vline.ghost")
    expect(ghost).to_be_visible()
    share = ghost.evaluate("g => g.offsetLeft / g.parentElement.clientWidth")
    assert share == pytest.approx(0.25, abs=0.01)
    page.mouse.move(2, 2)
    expect(ghost).to_be_hidden()


def test_pointing_tells_layer_value_step_and_wall_time(address, open_panel, logs):
    """In the map and in the lines, and the numbers are those that were written."""
    page, _ = open_panel(address, KNOWN)
    spoken = "t => new Date(t * 1000).toLocaleString([], {dateStyle: 'medium', timeStyle: 'medium'})"
    wall = page.evaluate(spoken, logs.EPOCH + 4)
    plot, line = page.locator("[data-part=map]"), page.locator("[data-part=line-run] .u-over").first
    plot.hover(position=at(plot, 3.5 / 8, 0.25))
    expect(page.locator(".tip div")).to_have_text(["b", "104.125", "gain, step 4", wall])
    point(line, 3 / 8, page.locator(".tip div", has_text="loss"))
    expect(page.locator(".tip div")).to_have_text(["loss", "0.2", "step 4", wall])
    page.locator("[data-part=names] .name").first.click()
    pinned = page.locator("[data-part=line-pins] .u-over")
    point(pinned, 3 / 8, page.locator(".tip div", has_text="b: gain"))
    expect(page.locator(".tip div")).to_have_text(["b: gain", "104.125", "step 4", wall])


def test_a_click_selects_the_same_layer_everywhere(address, open_panel):
    """Map row, name, table row and line are one selection, wherever it was made or taken back."""
    page, _ = open_panel(address, KNOWN)
    plot = page.locator("[data-part=map]")
    row = page.locator("[data-part=health] tbody tr", has_text="b")
    key = page.locator("[data-part=line-pins] .keys button")

    def selected(names):
        expect(page.locator("[data-part=names] .pinned")).to_have_text(names)
        expect(page.locator("[data-part=health] [aria-pressed=true]")).to_have_text(names)
        expect(key).to_have_text(names)
        expect(page.locator("[data-part=map] .pinrow")).to_have_count(len(names))

    plot.click(position=at(plot, 0.9, 0.25))
    selected(["b"])
    expect(page.locator("[data-part=step]")).to_have_text("8")
    key.click()
    selected([])
    row.click()
    selected(["b"])
    page.locator("[data-part=names] .name", has_text="b").click()
    selected([])


def test_of_several_pins_in_a_row_the_last_counts(address, open_panel):
    """The answer to the first pin comes after that to the second, and is not drawn; a step keeps every row and cell."""
    page, _ = open_panel(address, KNOWN)
    keys, held = page.locator("[data-part=line-pins] .keys button"), []
    page.route(re.compile("site="), lambda route: route.continue_() if held else held.append(route))
    names = page.locator("[data-part=names] .name")
    with page.expect_request(re.compile("site=")):
        names.nth(0).click()
    names.nth(1).click()
    expect(keys).to_have_text(["b", "a"])
    with page.expect_event("requestfinished", lambda request: request == held[0].request):
        held[0].continue_()
    page.evaluate("() => new Promise(requestAnimationFrame)")
    assert keys.all_text_contents() == ["b", "a"]
    cells = page.locator("[data-part=health] tbody td")
    before = cells.element_handles()
    page.get_by_label("Previous step").click()
    expect(page.locator("[data-part=table-note]")).to_have_text("at step 7")
    assert cells.all_text_contents() == ["gain > 2", "7.13", "", "gain > 2", "107", ""]
    assert [cell.evaluate("cell => cell.isConnected") for cell in before] == [True] * 6


def test_the_wheel_zooms_and_the_server_decimates_anew(address, open_panel):
    """Over the map and over a line; the step under the pointer stays; a double click shows all; the page still scrolls."""
    page, _ = open_panel(address, SICK, height=500)
    note, reset = page.locator("[data-part=note]"), page.locator("[data-part=reset]")
    for target, share in (
        (page.locator("[data-part=map]"), 0.25),
        (page.locator("[data-part=line-run] .u-over").first, 0.75),
    ):
        target.scroll_into_view_if_needed()
        page.wait_for_timeout(300)
        target.hover(position=at(target, share))
        with page.expect_request(re.compile(r"series\?.*first=")):
            for _ in range(3):
                page.mouse.wheel(0, -400)
        expect(note).to_have_text("every reading shown")
        first, last = zoomed_below(page, 300)
        assert first + share * (last - first) == pytest.approx(1 + share * 2400, abs=5)
        target.dblclick(position=at(target, share))
        expect(reset).to_be_hidden()
        expect(note).to_contain_text("steps per column")
        before = page.evaluate("scrollY")
        page.mouse.wheel(0, 400)
        page.wait_for_function("before => scrollY > before", arg=before)
        expect(reset).to_be_hidden()


def test_the_keyboard_moves_zooms_and_pins(address, open_panel):
    """What a mouse does in map and lines, arrow keys, Enter, plus, minus and 0 do as well."""
    page, _ = open_panel(address, KNOWN)
    plot, step = page.locator("[data-part=map]"), page.locator("[data-part=step]")
    plot.focus()
    for key, shown in (("ArrowLeft", "7"), ("Home", "1"), ("ArrowRight", "2"), ("End", "8")):
        page.keyboard.press(key)
        expect(step).to_have_text(shown)
    page.keyboard.press("ArrowUp")
    page.keyboard.press("ArrowUp")
    tells(page, "b", "108.125", "gain, step 8")
    page.keyboard.press("ArrowLeft")
    tells(page, "b", "107.125", "gain, step 7")
    page.keyboard.press("Enter")
    expect(page.locator("[data-part=names] .pinned")).to_have_text("b")
    page.keyboard.press("+")
    first, last = zoomed_below(page, 8)
    assert 0 < first <= 7 < last
    page.keyboard.press("Shift+ArrowLeft")
    page.wait_for_function("before => !location.hash.includes(before)", arg=f"zoom={first}-{last}")
    page.keyboard.press("0")
    expect(page.locator("[data-part=reset]")).to_be_hidden()
    page.locator("[data-part=line-run] .chart").first.focus()
    page.keyboard.press("Home")
    expect(step).to_have_text("1")
    page.keyboard.press("+")
    expect(page.locator("[data-part=reset]")).to_be_visible()
    page.keyboard.press("-")
    expect(page.locator("[data-part=reset]")).to_be_hidden()


def test_tab_reaches_everything_and_the_focus_is_seen(address, open_panel):
    """Every stop has a name and an outline."""
    page, _ = open_panel(address, SICK)
    describe = """() => {
        const e = document.activeElement, style = getComputedStyle(e);
        return [e.getAttribute('aria-label') || e.textContent || e.title, style.outlineStyle, parseFloat(style.outlineWidth)];
    }"""
    stops = []
    for _ in range(110):
        page.keyboard.press("Tab")
        stops.append(page.evaluate(describe))
        if stops[-1][0] == "Download the histograms":
            break
    assert [stop for stop in stops if not stop[0] or stop[1] == "none" or stop[2] < 1] == []
    names = " | ".join(stop[0] for stop in stops)
    for part in (
        "All runs", "Run", "Compare with", "Previous step", "Step", "Finished", "EXPLODING", "1 past issue", "Previous issue", "CRITICAL EXPLODING",
        "Metric on the map", "About this metric", "Value shown for a column", "Download the map", "transformer.h.7.mlp", "gain by layer and step",
        "Axis of the lines", "Smoothing", "Add a chart", "Metric of this chart", "Remove this chart", "log", "loss over time", "Rows", "Filter layers", "gradient norm",
        "Parameter", "How histograms are drawn", "Download the histograms",
    ):  # fmt: skip
        assert part in names


def test_charts_are_added_and_removed_and_a_link_keeps_the_choice(address, open_panel):
    """Also when none is left; the rest take their place; what a run lacks is explained in its chart."""
    page, _ = open_panel(address, SICK)
    cards, add = page.locator(".lines > section:visible"), page.get_by_label("Add a chart")
    expect(page.locator(".lines canvas")).to_have_count(3)
    before = page.locator("[data-part=line-run]").first.bounding_box()["width"]
    for chart in ("learning_rate", "runtime.rss"):
        add.select_option(chart)
    expect(page.locator(".lines canvas")).to_have_count(4)
    expect(page.locator("[data-part=line-run]").last).to_contain_text(how_to_read(CATALOG["runtime.rss"])["how"])
    page.get_by_label("Remove this chart").first.click()
    stored(page, charts='["gradient.total_norm","@pins","@left","learning_rate","runtime.rss"]')
    chosen = [select.input_value() for select in page.get_by_label("Metric of this chart").all()]
    assert chosen == ["gradient.total_norm", "learning_rate", "runtime.rss"]
    again, _ = open_panel(address, link_of(page))
    assert [select.input_value() for select in again.get_by_label("Metric of this chart").all()] == chosen
    again.close()
    while cards.count():
        cards.first.get_by_label("Remove this chart").click()
    stored(page, charts='["@left"]')
    again, _ = open_panel(address, link_of(page))
    expect(again.locator("[data-part=map]")).to_be_visible()
    assert again.locator(".lines > section:visible").count() == 0
    again.get_by_label("Add a chart").select_option("@pins")
    expect(again.locator("[data-part=line-pins] canvas")).to_have_count(1)
    again.get_by_label("Add a chart").select_option("loss")
    assert again.locator("[data-part=line-run] canvas").bounding_box()["width"] > before


def averaged(values, weight):
    """Return TensorBoard's debiased moving average."""
    out, last = [], 0.0
    for number, value in enumerate(values, 1):
        last = last * weight + (1 - weight) * value
        out.append(last / (1 - weight**number))
    return out


def test_axis_smoothing_log_and_metrics_of_the_lines_live_in_the_address(address, open_panel):
    """The raw value stays readable beside the smoothed one; a link opens the same view."""
    page, _ = open_panel(address, KNOWN)
    card = page.locator("[data-part=line-run]").first
    page.locator("[data-part=axis]").select_option("relative")
    page.locator("[data-part=smooth]").fill("0.6")
    card.locator("[data-part=log]").click()
    page.get_by_label("Next step").focus()
    page.get_by_label("Previous step").click()
    stored(page, step="7", smooth="0.6", axis="relative", log='{"loss":true}')
    again, _ = open_panel(address, link_of(page))
    expect(again.locator("[data-part=axis]")).to_have_value("relative")
    expect(again.locator("[data-part=smooth]")).to_have_value("0.6")
    expect(again.locator("[data-part=step]")).to_have_text("7")
    expect(again.locator("[data-part=log]").first).to_have_attribute("aria-pressed", "true")
    over = again.locator("[data-part=line-run] .u-over").first
    over.hover(position=at(over, 1.0 - 1e-9))
    smoothed = averaged([1 / (1 + step) for step in range(1, 9)], 0.6)[-1]
    tells(again, "loss", "0.111111", f"smoothed {smoothed:.6g}", "step 8")
    again.locator("[data-part=axis]").select_option("wall")
    over.hover(position=at(over, 3 / 7))
    expect(again.locator(".tip .v")).to_have_text("0.2")
    ghost = again.locator("[data-part=map] .vline.ghost")
    assert ghost.evaluate("g => g.offsetLeft / g.parentElement.clientWidth") == pytest.approx(3.5 / 8, abs=0.01)


def test_pinned_curves_of_the_other_run_lie_in_the_same_chart(address, open_panel):
    """Both runs' numbers are there, the other's dashed."""
    page, _ = open_panel(address, f"{SICK}&p.gradflow.other=healthy&p.gradflow.pins=%5B%22transformer.h.7.mlp%22%5D")
    card = page.locator("[data-part=line-pins]")
    expect(card.locator(".keys .mono")).to_have_text(["sick: transformer.h.7.mlp", "healthy: transformer.h.7.mlp"])
    expect(card).to_contain_text("dashed: the other run")
    rows = table_of(saved(page, "this chart", "csv", 2))
    last = {row["run"]: float(row["max"]) for row in rows}
    assert (last["sick"] > 20, last["healthy"] < 2) == (True, True)
    assert {row["site"] for row in rows} == {"transformer.h.7.mlp"}


def test_what_a_column_of_many_steps_shows_is_written_and_can_be_chosen(address, open_panel):
    """The extreme at first; the note always says which, and the address keeps it."""
    page, _ = open_panel(address, "&p.gradflow.run=spike")
    note = page.locator("[data-part=note]")
    expect(note).to_have_text(re.compile(r"^\d+ steps per column: extreme shown$"))
    for how, value in (("max", 8.0), ("min", 1.0), ("mean", None), ("extreme", 8.0)):
        page.locator("[data-part=reduce]").select_option(how)
        expect(note).to_contain_text(f"steps per column: {how} shown")
        rows = [row for row in table_of(saved(page, "the map", "csv")) if row["site"] == "b"]
        (spike,) = (row for row in rows if int(row["first_step"]) <= 12_345 <= int(row["last_step"]))
        steps = int(spike["last_step"]) - int(spike["first_step"]) + 1
        assert float(spike[how]) == pytest.approx(1 + 7 / steps if value is None else value)
        if how == "mean":
            stored(page, reduce="mean")


def test_a_spike_of_one_step_is_seen_at_every_zoom(address, open_panel):
    """One step in 20 000 paints at least one column of its row, however wide the view."""
    page, _ = open_panel(address, "&p.gradflow.run=spike", width=700)
    plot, canvas = page.locator("[data-part=map]"), page.locator("[data-part=map] canvas")
    box = plot.bounding_box()
    plot.hover(position=at(plot, 12_345 / 20_000))
    for _ in range(8):
        page.wait_for_load_state("networkidle")
        assert canvas.evaluate(RED) >= 0.9 * box["height"] / 3
        page.mouse.wheel(0, -400)
    zoomed_below(page, 60)


def test_nan_infinity_missing_and_zero_are_told_apart(address, open_panel, logs):
    """In words everywhere, and in the map by hatch, grey and colour."""
    page, _ = open_panel(address, "&p.gradflow.run=states")
    plot, words = page.locator("[data-part=map]"), ["NaN", "\u221e", "\u2212\u221e", "no gain", "0", "1.5"]
    sites = list(logs.STATES)
    shades = {}
    for number, (site, word) in enumerate(zip(sites, words, strict=True)):
        share = 1 - (number + 0.5) / len(sites)
        plot.hover(position=at(plot, 0.5, share))
        expect(page.locator(".tip .l")).to_have_text(site)
        expect(page.locator(".tip .v")).to_have_text(word)
        pixels = """(canvas, share) => {
            const {data} = canvas.getContext('2d').getImageData(0, Math.floor(canvas.height * share), canvas.width, 1);
            return new Set(new Uint32Array(data.buffer)).size + ':' + data[0] + ',' + data[1] + ',' + data[2];
        }"""
        shades[site] = page.locator("[data-part=map] canvas").evaluate(pixels, share)
    assert {shades[site].partition(":")[0] for site in ("nan", "plus", "minus")} == {"2"}
    assert {shades[site].partition(":")[0] for site in ("missing", "zero", "number")} == {"1"}
    assert len({shades[site] for site in ("missing", "zero", "number")}) == 3
    expect(page.locator("[data-part=health] .broken")).to_have_text(words[:3], use_inner_text=True)
    expect(page.locator("[data-part=health] .none")).to_have_text("\u2013")
    expect(page.locator("[data-part=verdict] h1")).to_have_text("The loss is NaN")
    expect(page.locator("[data-part=course]")).to_have_text("lossNaN")
    page.locator("[data-part=all-runs]").click()
    row = page.locator("[data-part=runs] tbody tr", has_text="states")
    expect(row).to_contain_text("loss is NaN")
    expect(row.locator("td.broken")).to_have_text("NaN")


def test_a_metric_that_the_run_lacks_is_explained(address, open_panel):
    """On the map and in a chart: what it is, and the argument or interval that makes it; a link keeps the question."""
    name = "activation.dead_share"
    page, _ = open_panel(address, f"{KNOWN}&p.gradflow.metric={name}")
    told, lesson = how_to_read(CATALOG[name]), page.locator("[data-part=lesson]")
    for text in ("Not recorded in this run: dead units", CATALOG[name].formula, told["how"], told["code"]):
        expect(lesson).to_contain_text(text)
    page.locator("[data-part=metric]").select_option("block.gain")
    expect(lesson).to_be_hidden()
    expect(page.locator("[data-part=map]")).to_be_visible()
    chart = page.locator("[data-part=line-run]").first
    chart.locator("select").first.select_option("runtime.rss")
    expect(chart).to_contain_text(how_to_read(CATALOG["runtime.rss"])["how"])
    stored(page, charts='["runtime.rss","@pins","@left"]')


def test_a_metric_of_any_kind_can_be_put_on_the_map(address, open_panel):
    """One that no catalogue knows yet has rows of its own in map and table; one of the whole run is one row."""
    page, _ = open_panel(address, "&p.gradflow.run=kinds")
    expect(page.locator("[data-part=metric]")).to_have_value("tomorrow.entropy")
    expect(page.locator("[data-part=names] .name")).to_have_text(["h.1.attn:0", "h.0.attn:1", "h.0.attn:0"])
    expect(page.locator("[data-part=health] tbody th")).to_have_text(["h.0.attn:0", "h.0.attn:1", "h.1.attn:0"])
    expect(page.locator("[data-part=health] tbody td.num")).to_have_text(["0.250", "0.500", "1.00"])
    page.locator("[data-part=metric]").select_option("loss")
    expect(page.locator("[data-part=names] .name")).to_have_text(["whole model"])
    plot = page.locator("[data-part=map]")
    plot.hover(position=at(plot, 3.5 / 9))
    tells(page, "whole model", "0.25", "loss, step 4")


def test_the_phases_of_a_run_are_shown_apart(address, open_panel):
    """Training at first; the other phase is one choice away, in every view and in the address; the head is one line."""
    page, _ = open_panel(address, "&p.gradflow.run=kinds")
    phases = page.locator("[data-part=phase]")
    expect(phases.locator("option")).to_have_text(["train", "eval"])
    live, run = (page.locator(part).bounding_box() for part in (".live", "[data-part=run]"))
    assert (live["y"], live["x"] + live["width"] <= 1280) == (run["y"], True)
    assert page.locator(".facts").bounding_box()["height"] < 20, "what is said of the run is one line too"
    phases.select_option("eval")
    expect(page.locator("[data-part=health] tbody td.num")).to_have_text(["0.750", "0.500", "0.250"])
    assert {row["first_step"] for row in table_of(saved(page, "the map", "csv"))} == {"9"}
    stored(page, phase="eval")
    page.locator("[data-part=run]").select_option("known")
    expect(phases).to_be_hidden()


def test_histograms_can_be_taken_away(address, open_panel, logs):
    """Every bin that was written, and a whole picture."""
    page, _ = open_panel(address, SICK)
    expect(page.locator("[data-part=ridges] g")).to_have_count(24)
    rows = table_of(saved(page, "the histograms", "csv"))
    written = logs.weight_histograms(2400, 2400, sick=True)[0]
    last = [row for row in rows if row["step"] == "2400"]
    assert [int(row["count"]) for row in last] == written.counts.tolist()
    assert [float(row["from"]) for row in last] == pytest.approx(written.edges[:-1].tolist())
    assert {row["nonfinite"] for row in last} == {"240"}
    assert saved(page, "the histograms", "svg").count(b"NaN/Inf") == 3
    assert saved(page, "the histograms", "png")[:8] == b"\x89PNG\r\n\x1a\n"


def test_hostile_names_are_text_in_every_view(address, open_panel, logs):
    """Markup, quotes, emoji, right-to-left and 500 letters, in map, lines, table, strip, histograms, tooltips and files."""
    run = logs.HOSTILE[2]
    page, _ = open_panel(address, KNOWN)
    page.locator("[data-part=run]").select_option(run)
    expect(page.locator("[data-part=names] .pinned")).to_have_count(3)
    page.locator("[data-part=open] .issue").first.click()
    expect(page.locator("[data-part=step]")).to_have_text("3")
    expect(page.locator("[data-part=course]")).to_have_text("loss0.250 \u2192 0.0208")
    chosen = page.locator("[data-part=lanes] .chosen")
    expect(chosen).to_have_count(1)
    walked = [chosen.text_content()]
    for _ in logs.HOSTILE[1:]:
        page.get_by_label("Next issue").click()
        expect(chosen).not_to_have_text(walked[-1])
        walked.append(chosen.text_content())
    expect(page.get_by_label("Next issue")).to_be_disabled()
    for name in logs.HOSTILE:  # all are drawn anew with each
        named = page.locator("[data-part=names]").get_by_title(name, exact=True)
        if "pinned" not in named.get_attribute("class"):
            named.click()
            expect(named).to_have_class(re.compile(r"\bpinned\b"))
    expect(page.locator("[data-part=names] .pinned")).to_have_count(len(logs.HOSTILE))
    for listed in (
        "[data-part=line-pins] .keys .mono", "[data-part=health] tbody button",
        "[data-part=open] .advice", "[data-part=histogram-site] option",
    ):  # fmt: skip
        expect(page.locator(listed)).to_have_count(len(logs.HOSTILE))
    shown = {
        "names": page.locator("[data-part=names] .name").evaluate_all("list => list.map(e => e.title)"),
        "table": page.locator("[data-part=health] tbody button").evaluate_all("list => list.map(e => e.title)"),
        "lines": page.locator("[data-part=line-pins] .keys .mono").all_text_contents(),
        "strip": [text.removeprefix("EXPLODING ") for text in walked],
        "issues": page.locator("[data-part=open] .advice").evaluate_all(
            "list => list.map(e => e.textContent.slice(2))"
        ),
        "histograms": page.locator("[data-part=histogram-site] option").all_text_contents(),
    }
    assert {view: set(names) == set(logs.HOSTILE) for view, names in shown.items()} == dict.fromkeys(shown, True)
    line = page.locator("[data-part=line-pins] .u-over")
    point(line, 0.5, page.locator(".tip", has_text=logs.HOSTILE[0]))
    page.locator("[data-part=compare]").select_option("known")
    page.locator("[data-part=run]").select_option("known")
    page.locator("[data-part=compare]").select_option(run)
    expect(page.locator("[data-part=map-other]")).to_be_visible()
    assert page.locator("img").count() == 0
    assert page.title() == "GradFlow"
    overflow = page.evaluate("document.documentElement.scrollWidth - innerWidth")
    assert overflow <= 0


def test_nothing_jumps_while_the_page_loads(address, open_panel):
    """The browser's own measure of layout shift; 0.1 is called good, this is far below."""
    page, _ = open_panel(address, SICK)
    page.wait_for_load_state("networkidle")
    measure = """() => new Promise(done => {
        new PerformanceObserver(list => done(list.getEntries().map(e => [e.value, e.sources.map(s => s.node?.className || '')])))
            .observe({type: 'layout-shift', buffered: true});
        setTimeout(() => done([]), 500);
    })"""
    shifts = page.evaluate(measure)
    assert sum(value for value, _ in shifts) < 0.01, shifts


def test_many_runs_can_be_filtered(address, open_panel):
    """What is chosen stays offered; without many runs the field is not there."""
    page, _ = open_panel(address, KNOWN)
    field, options = page.get_by_label("Filter runs"), page.locator("[data-part=run] option")
    field.fill("SICK")
    expect(options).to_have_text(["sick", "known"])
    field.fill("")
    expect(options).to_have_count(7)
