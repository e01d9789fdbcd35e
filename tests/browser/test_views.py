"""The views below the verdict: when, which layer, against which run, how distributed, and how to take it away."""

import csv
import io
import re
import threading
from pathlib import Path

from playwright.sync_api import expect

from gradflow_export.cli import main
from gradflow_export.records.catalog import CATALOG
from tensorboard_plugin_gradflow import standalone

SICK = "&p.gradflow.run=sick"


def test_the_strip_shows_every_issue_from_its_first_step_to_its_healing(address, open_panel):
    """Bars lie over the map's steps; the buttons walk from issue to issue, and a click pins the layer."""
    _, frame = open_panel(address, SICK)
    bars = frame.locator("[data-part=lanes] button")
    assert sorted(bar.text_content() for bar in bars.all()) == [
        "DEAD transformer.h.3.mlp.act",
        "EXPLODING transformer.h.7.mlp",
        "NUMERICAL transformer.h.9.attn",
    ]
    step, pinned = frame.locator("[data-part=step]"), frame.locator("[data-part=names] .pinned")
    frame.get_by_label("Previous issue").click()
    expect(step).to_have_text("1\u202f680")
    frame.get_by_label("Previous issue").press("Enter")
    expect(step).to_have_text("1\u202f320")
    expect(pinned.first).to_have_text("transformer.h.7.mlp")
    frame.get_by_label("Previous issue").click()
    expect(step).to_have_text("720")
    expect(frame.get_by_label("Previous issue")).to_be_disabled()
    healed = frame.get_by_label("HIGH NUMERICAL transformer.h.9.attn since step 720, healed at 816")
    plot, bar = frame.locator("[data-part=map]").bounding_box(), healed.bounding_box()
    assert abs(bar["x"] - (plot["x"] + plot["width"] * 719 / 2400)) < 2
    assert abs(bar["width"] - plot["width"] * 97 / 2400) < 2
    frame.get_by_label("CRITICAL EXPLODING").press("Enter")
    expect(step).to_have_text("1\u202f320")


def cells(frame, row):
    """Return what one row of the health table shows."""
    return frame.locator("[data-part=health] tbody tr").nth(row).locator("td").all_text_contents()


def test_the_health_table_shows_what_was_written(address, open_panel):
    """Numbers at the chosen step equal those of the log; a row is pinned from the keyboard, in map and lines alike."""
    _, frame = open_panel(address, "&p.gradflow.run=known&p.gradflow.step=6")
    table = frame.locator("[data-part=health]")
    expect(table.locator("[data-part=table-note]")).to_have_text("at step 6")
    names = table.locator("tbody th button")
    expect(names).to_have_text(["a", "b"])
    assert cells(frame, 0) == ["gain > 2", "6.13", ""]
    assert cells(frame, 1)[1] == "106"
    table.get_by_role("button", name="gain").press("Enter")
    expect(names).to_have_text(["b", "a"])
    expect(table.locator("th[data-key=gain]")).to_have_attribute("aria-sort", "descending")
    names.first.press("Enter")
    expect(names.first).to_have_attribute("aria-pressed", "true")
    expect(frame.locator("[data-part=names] .pinned")).to_have_text("b")
    expect(frame.locator(".keys button")).to_have_text("b")


def test_the_health_table_says_which_layer_is_sick(address, open_panel):
    """The worst stands first; filter, kind of rows and step change it, and a row of another kind changes the map."""
    _, frame = open_panel(address, SICK)
    table = frame.locator("[data-part=health]")
    first = table.locator("tbody tr").first
    expect(first.locator("th")).to_have_text("transformer.h.7.mlp")
    expect(first.locator(".badge")).to_have_text("EXPLODING")
    expect(first.locator("path")).to_have_attribute("d", re.compile("^M.*L"))
    expect(table.locator("tbody tr").nth(1).locator("td").nth(3)).to_have_text("94.0 %")
    frame.get_by_label("Filter layers").fill("h.10.")
    expect(table.locator("tbody th")).to_have_text(["transformer.h.10.attn", "transformer.h.10.mlp"])
    frame.get_by_label("Filter layers").fill("")
    frame.locator("[data-part=rows]").select_option("module/activation")
    expect(first.locator("th")).to_have_text("transformer.h.3.mlp.act")
    first.click()
    expect(frame.locator("[data-part=metric]")).to_have_value("activation.dead_share")
    frame.get_by_label("Previous issue").press("Enter")
    frame.get_by_label("Previous issue").press("Enter")
    expect(table.locator("[data-part=table-note]")).to_have_text("at step 1\u202f320")
    expect(table.locator(".badge")).to_have_count(0)


def test_two_runs_are_compared_beside_each_other_and_by_difference(address, open_panel):
    """The second map has the same steps and colours; the difference is the ratio of what was written; a link keeps it."""
    page, frame = open_panel(address, SICK)
    first, second = (frame.locator(f"section[aria-label^='Map of the layers'] >> nth={number}") for number in (0, 1))
    expect(second).to_be_hidden()
    expect(frame.locator("[data-part=mode]")).to_be_hidden()
    frame.locator("[data-part=compare]").select_option("healthy")
    expect(first.locator("h2")).to_have_text("Layer map: sick")
    expect(second.locator("h2")).to_have_text("Layer map: healthy")
    expect(first.locator(".names .accused").first).to_be_visible()
    expect(second.locator(".names .accused, .accuse")).to_have_count(0)
    left, right = (frame.locator(f"[data-part={part}]").bounding_box() for part in ("map", "map-other"))
    assert (left["x"], left["width"]) == (right["x"], right["width"])
    frame.locator("[data-part=map-other]").hover(position={"x": 300, "y": 100})
    expect(frame.locator(".tip")).to_be_visible()
    expect(frame.locator(".lines section").first.locator(".runkey")).to_have_text(["sick", "healthy"])
    _, data = downloaded(page, frame, "this chart", "csv")
    assert {line.partition(b",")[0] for line in data.splitlines()[1:]} == {b"sick", b"healthy"}
    frame.locator("[data-part=mode]").select_option("difference")
    expect(second).to_be_hidden()
    expect(first.locator("h2")).to_have_text("Layer map: sick against healthy")
    expect(first).to_contain_text("white: equal")
    page.wait_for_function("location.hash.includes('p.gradflow.mode=difference')")
    _, again = open_panel(address, page.evaluate("location.hash").removeprefix("#"))
    expect(again.locator("section[aria-label='Map of the layers'] h2")).to_have_text("Layer map: sick against healthy")
    again.locator("[data-part=compare]").select_option("known")
    expect(again.locator("[data-part=note]")).to_have_text("known has no layer of the same name")
    again.locator("[data-part=metric]").select_option("block.gradient_norm")
    expect(again.locator("[data-part=note]")).to_have_text("known holds no gradient norm at the block's output")
    again.locator("[data-part=metric]").select_option("block.gain")
    again.locator("[data-part=compare]").select_option("")
    expect(again.locator("section[aria-label='Map of the layers'] h2")).to_have_text("Layer map")


def test_histograms_follow_the_pins_and_count_what_is_no_number(address, open_panel, logs):
    """One ridge per histogram written, the broken entries beside it; another parameter is one choice away."""
    page, frame = open_panel(address, SICK)
    expect(frame.locator("[data-part=histogram-site]")).to_have_value("transformer.h.7.mlp.weight")
    expect(frame.locator("[data-part=histogram-note]")).to_have_text("24 in all; each scaled to its own peak")
    ridges = frame.locator("[data-part=ridges] g")
    expect(ridges).to_have_count(24)
    entries, broken = logs.weight_histograms(2400, 2400, True)[0].counts.sum(), 240
    expect(ridges.last.locator("title")).to_have_text(
        f"step 2\u202f400: {entries:_} entries, {broken} NaN or Inf".replace("_", "\u202f")
    )
    expect(frame.locator("[data-part=ridges] .bad")).to_have_text(["220 NaN/Inf", "230 NaN/Inf", "240 NaN/Inf"])
    form = frame.locator("[data-part=histogram-form]")
    form.select_option("all")
    maps = frame.locator("[data-part=spread] canvas")
    expect(maps).to_have_count(2)
    spread = frame.locator("[data-part=spread] [data-name='transformer.h.7.mlp.weight']")
    expect(spread.locator("canvas")).to_have_attribute(
        "aria-label", re.compile("^24 histograms from \u22122 to 2, 3 with NaN or Inf$")
    )
    colours = "c => new Set(new Uint32Array(c.getContext('2d').getImageData(0, 0, c.width, c.height).data.buffer)).size"
    assert [canvas.evaluate(colours) > 8 for canvas in maps.all()] == [True, True]
    page.wait_for_function("location.hash.includes('p.gradflow.histograms=all')")
    spread.locator("button").click()
    expect(form).to_have_value("heat")
    expect(frame.locator("[data-part=ridges] .broken")).to_have_count(3)
    assert frame.locator("[data-part=ridges] .bin").count() > 24 * 10
    form.select_option("")
    frame.locator("[data-part=histogram-site]").select_option("head.weight")
    expect(frame.locator("[data-part=ridges] .bad")).to_have_count(0)
    frame.locator("[data-part=run]").select_option("known")
    expect(frame.locator("[data-part=ridges]")).to_be_hidden()


def downloaded(page, frame, what, kind, number=0):
    """Choose an entry of a download menu; returns the file's name and bytes."""
    with page.expect_download() as download:
        frame.get_by_label(f"Download {what}").nth(number).select_option(kind)
    return download.value.suggested_filename, Path(download.value.path()).read_bytes()


def test_what_is_shown_can_be_taken_away(address, open_panel):
    """The csv holds the values written, the pictures are whole, and the menu is ready again afterwards."""
    page, frame = open_panel(address, "&p.gradflow.run=known")
    expect(frame.locator("[data-part=health] tbody tr")).to_have_count(2)
    name, data = downloaded(page, frame, "the map", "csv")
    assert name == "known_block.gain_map.csv"
    rows = list(csv.DictReader(io.StringIO(data.decode(), newline="")))
    assert [(row["site"], float(row["extreme"])) for row in rows] == [
        (site, step + 100 * number + 0.125) for number, site in enumerate("ab") for step in range(1, 9)
    ]
    name, data = downloaded(page, frame, "the table", "csv")
    assert name == "known_health_8.csv"
    assert data.decode().splitlines()[1:] == ["a,outside,8.125", "b,outside,108.125"]
    for what in ("the map", "this chart"):
        assert b"</svg>" in downloaded(page, frame, what, "svg")[1]
        name, data = downloaded(page, frame, what, "png")
        assert (name[-4:], data[:8]) == (".png", b"\x89PNG\r\n\x1a\n")
        assert len(data) > 3000
    expect(frame.get_by_label("Download the map").first).to_have_value("")
    frame.get_by_label("About this metric").first.press("Enter")
    info = frame.locator("[data-part=info]")
    for text in (CATALOG["block.gain"].formula, CATALOG["block.gain"].source, "0.5 and 2", "block.gain"):
        expect(info).to_contain_text(text)
    page.keyboard.press("Escape")
    expect(info).to_be_hidden()


def test_a_figure_is_as_a_paper_prints_it(address, open_panel):
    """White also in the dark, both axes named, one of two fonts; printed, it is the only thing on a page of its size."""
    page, frame = open_panel(address, f"{SICK}&p.gradflow.metric=activation.dead_share")
    page.emulate_media(color_scheme="dark")
    expect(frame.locator("html")).to_have_class("dark")
    for what, quantity in (("the map", "dead units (share)"), ("this chart", "loss"), ("the histograms", "gradient")):
        text = downloaded(page, frame, what, "svg-serif")[1].decode()
        assert 'fill="#fff"' in text
        assert "Times New Roman" in text
        assert f">{quantity}</text>" in text
        assert ">optimizer step</text>" in text
        assert "var(" not in text
    assert '#39424e"' in downloaded(page, frame, "this chart", "svg")[1].decode()
    page.evaluate("() => { window.print = () => document.body.dataset.printed = '1' }")
    frame.get_by_label("Download the map").first.select_option("pdf")
    page.locator("[data-printed]").wait_for()
    sheet = page.locator(".sheet svg")
    size = [round(int(sheet.get_attribute(name)) * 72 / 96) for name in ("width", "height")]
    printed = page.pdf(prefer_css_page_size=True)
    (box,) = re.findall(rb"/MediaBox \[0 0 ([\d.]+) ([\d.]+)\]", printed)
    assert [round(float(side)) for side in box] == size
    assert b"/Count 1" in printed
    expect(sheet).to_have_count(0)
    expect(frame.locator("[data-part=verdict]")).to_be_visible()


def test_the_panel_works_without_tensorboard(logdir, context, tmp_path):
    """Served by `gradflow view`, and as one file that loads nothing: the same verdict, map, table and link."""
    out = tmp_path / "out.html"
    assert main(["snapshot", str(logdir), str(out)]) == 0
    server = standalone.make_server(logdir, 0)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    errors, requests, page = [], [], context.new_page()
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.on("request", lambda request: requests.append(request.url))
    try:
        for address in (f"http://localhost:{server.port}/", out.as_uri()):
            page.goto("about:blank")
            requests.clear()
            page.goto(f"{address}#p.gradflow.run=sick")
            expect(page.locator("[data-part=verdict] h1")).to_have_text("1 problem")
            expect(page.locator("[data-part=ridges] g")).to_have_count(24)
            expect(page.locator("[data-part=table-note]")).to_have_text("at step 2\u202f400")
            page.get_by_label("CRITICAL EXPLODING").click()
            expect(page.locator("[data-part=step]")).to_have_text("1\u202f320")
            expect(page).to_have_url(re.compile("p.gradflow.step=1320"))
            page.locator("[data-part=run]").select_option("known")
            expect(page.locator("[data-part=health] tbody tr").nth(1).locator("td").nth(1)).to_have_text("108")
            expect(page.locator(".lines canvas")).to_have_count(1)
            expect(page).to_have_url(re.compile("p.gradflow.run=known"))
            page.reload()
            expect(page.locator("[data-part=run]")).to_have_value("known")
        assert {url.split("#")[0] for url in requests if not url.startswith("data:")} == {out.as_uri()}
    finally:
        page.close()
        server.shutdown()
        thread.join()
        server.server_close()
    assert errors == []
