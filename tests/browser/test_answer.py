"""The panel is true at any size, gives the answer first, and can be used by everybody."""

import re
from pathlib import Path

import axe_playwright_python
import pytest
import torch
from playwright.sync_api import expect

from gradflow_export import Exporter
from gradflow_export.cli import main

BLOCKS = tuple(f"blocks.{number}" for number in range(6))
LOUD = (777, 20)
DEFAULT = "2026-11-23_14-17-27_Sequential"
"""A name that a run has where nobody gave it one."""
RED = """canvas => {
    const {data} = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
    let found = 0;
    for (let i = 0; i < data.length; i += 4) if (data[i] > 90 && data[i + 1] < 60 && data[i + 2] < 70) found++;
    return found;
}"""


@pytest.fixture(scope="module")
def wide_logdir(tmp_path_factory, logs):
    """Runs that are deep, sick in very many ways, fading, or dead."""
    root = tmp_path_factory.mktemp("wide")
    names = logs.deep_names(1000)
    logs.write_run(root / "deep", logs.deep_records(names, loud=LOUD, issues=(logs.issue(layer=names[777], step=20),)))
    logs.write_run(root / "deeper", logs.deep_records(logs.deep_names(10_000), steps=8, loud=(5432, 3)), rows=8)
    logs.write_run(root / "issues", logs.deep_records(names[:50], issues=logs.many_issues(names, 300)))
    logs.write_run(root / "countless", logs.deep_records(names[:50], issues=logs.many_issues(names, 10_000)))
    logs.write_run(root / "fading", logs.vanishing_records(BLOCKS), blocks=BLOCKS)
    for start in (0, 60):
        logs.write_run(root / "resumed", logs.plain_records(range(start + 1, start + 31)), start=start)
    trained(root / "trained")
    return root


class Block(torch.nn.Module):
    """A residual block."""

    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(4, 8), torch.nn.Linear(8, 4)

    def forward(self, x):
        """Return the input and what is learned about it."""
        return x + self.down(torch.relu(self.up(x)))


def trained(logdir):
    """Train a few steps with a real exporter, which writes the architecture."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(Block() for _ in range(3)), torch.nn.Linear(4, 2))
    criterion, optimizer = torch.nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), 0.1)
    exporter = Exporter(model, logdir=logdir).watch(criterion)
    for _ in range(6):
        optimizer.zero_grad()
        criterion(model(torch.randn(8, 4)), torch.randint(2, (8,))).backward()
        optimizer.step()
    exporter.close()


@pytest.fixture(scope="module")
def wide(wide_logdir, versions_in, tensorboard):
    """The address of a TensorBoard over these runs."""
    with tensorboard(f"--logdir={wide_logdir}", "--load_fast=true", holds=versions_in(wide_logdir)) as address:
        yield address


def at(run, **state):
    """Return the part of an address that opens a run."""
    return "".join(f"&p.gradflow.{key}={value}" for key, value in {"run": run, **state}.items())


def red(page):
    """Return how many pixels of the map are red."""
    return page.locator("[data-part=map] canvas").evaluate(RED)


def test_of_a_thousand_layers_one_that_deviates_is_seen_at_every_zoom(wide, open_panel, logs):
    """Several rows share a pixel, and the note says so; looking closer by wheel, keys and drag never loses it."""
    page, _ = open_panel(wide, at("deep"), height=800)
    note = page.locator("[data-part=note]")
    expect(note).to_have_text(re.compile(r"rows per pixel: the one furthest from 1 shown"))
    assert red(page) >= 1
    plot = page.locator("[data-part=map]")
    box = plot.bounding_box()
    y = box["height"] * (1 - (LOUD[0] + 0.5) / 1000)
    x = box["width"] * (LOUD[1] - 0.5) / 40
    plot.hover(position={"x": x, "y": y})
    expect(page.locator(".tip .l")).to_have_text(logs.deep_names(1000)[777])
    expect(page.locator(".tip .v")).to_have_text("8")
    page.keyboard.down("Shift")
    for _ in range(4):
        page.mouse.wheel(0, -400)
        page.wait_for_timeout(50)
        assert red(page) >= 1
    page.keyboard.up("Shift")
    expect(note).to_have_text(re.compile("rows \\d+\u2013\\d+ of 1.000"))
    page.wait_for_function("location.hash.includes('p.gradflow.rows=')")
    page.locator("[data-part=reset-rows]").click()
    expect(page.locator("[data-part=reset-rows]")).to_be_hidden()
    plot.focus()
    page.keyboard.press("v")
    expect(page.locator("[data-part=reset-rows]")).to_be_visible()
    page.keyboard.press("PageDown")
    page.keyboard.press("PageDown")
    expect(page.locator("[data-part=accused-above]")).to_have_text("▲ 1 with an issue")
    page.locator("[data-part=accused-above]").click()
    expect(page.locator("[data-part=accused-above]")).to_be_hidden()
    assert red(page) >= 1
    page.keyboard.press("0")


def test_ten_thousand_layers_are_shown_whole(wide, open_panel):
    """One reading in 80 000 is red, and the names are those of blocks."""
    page, _ = open_panel(wide, at("deeper"), height=800)
    expect(page.locator("[data-part=note]")).to_contain_text("rows per pixel")
    assert red(page) >= 1
    assert page.locator("[data-part=names] .name").count() < 60
    table = page.locator("[data-part=health]")
    expect(table.locator("[data-part=table-note]")).to_contain_text("10\u202f000 rows")
    assert table.locator("tbody tr").count() <= 50
    table.locator(".scroll").evaluate("box => { box.scrollTop = box.scrollHeight; }")
    expect(table.locator('tr[aria-rowindex="10001"]')).to_be_visible()
    assert table.locator("tbody tr").count() <= 50


def test_layers_fold_to_blocks_and_a_folded_block_shows_its_extreme(wide, open_panel):
    """By level for all, or by its own handle; a link keeps it; a click on the red pixel pins the layer that made it."""
    page, _ = open_panel(wide, at("deep"), height=900)
    page.locator("[data-part=fold]").select_option(label="folded to 84")
    assert red(page) >= 1
    page.locator("[data-part=tall]").click()
    expect(page.locator("[data-part=note]")).to_contain_text("folded rows show their reading furthest from 1")
    page.wait_for_function("location.hash.includes('p.gradflow.fold=')")
    handle = page.locator(".fold[aria-expanded=false]").first
    label = handle.get_attribute("aria-label")
    handle.press("Enter")
    expect(page.get_by_label(label, exact=True)).to_have_count(0)
    page.wait_for_function("decodeURIComponent(location.hash).includes('\"model.h.')")


def test_verdict_map_and_table_tell_one_story(wide, open_panel):
    """The map opens on what the verdict is about, names the accused layer, and only what is fine is called ok."""
    page, _ = open_panel(wide, at("fading"))
    expect(page.locator("[data-part=verdict]")).to_contain_text("VANISHING in blocks.0 since step 10")
    expect(page.locator("[data-part=fix]")).to_have_text("→ Add a skip connection.")
    expect(page.locator("[data-part=metric]")).to_have_value("block.gradient_norm")
    expect(page.locator("[data-part=names] .accused")).to_have_text("blocks.0")
    now = page.locator("[data-part=open] [data-part=now]")
    expect(now).to_have_text("gradient from the loss to blocks.0: now \u00d70.0183, worst \u00d70.0183 at step 40")
    expect(page.locator("[data-part=health] tbody .ok")).to_have_count(0)
    expect(page.locator("[data-part=health] tbody .off")).to_have_text(["gain < 0.5"] * 5)
    page.locator("[data-part=metric]").select_option("block.gain")
    expect(page.locator("[data-part=names] .name")).to_have_text(
        ["blocks.5", "blocks.4", "blocks.3", "blocks.2", "blocks.1", "blocks.0"]
    )
    plot = page.locator("[data-part=map]")
    box = plot.bounding_box()
    plot.hover(position={"x": box["width"] / 2, "y": box["height"] - 4})
    expect(page.locator(".tip .l")).to_have_text("blocks.0")
    expect(page.locator(".tip .v")).to_have_text("not read")
    expect(page.locator("[data-part=losing-note]")).to_contain_text("at step 40; largest change at blocks")


def test_the_headline_loss_is_that_of_the_report_at_any_width(wide, wide_logdir, open_panel, capsys):
    """One definition: the medians of the first and of the last five losses."""
    assert main(["report", str(wide_logdir / "fading")]) in {0, 1}
    said = re.search(r"loss\s+([\d.]+)\s*(?:->|→|to)\s*([\d.]+)", capsys.readouterr().out, re.IGNORECASE)
    for width in (360, 1280, 1920):
        page, _ = open_panel(wide, at("fading"), width=width)
        course = page.locator("[data-part=course] b")
        expect(course).to_have_text("2.33 → 2.03")
        expect(page.locator("[data-part=loss-spark] path")).to_have_attribute("d", re.compile("^M.*L"))
        page.close()
    assert said is None or [round(float(word), 2) for word in said.groups()] == [2.33, 2.03]


@pytest.mark.parametrize(("run", "count"), [("issues", "300"), ("countless", "10,000")])
def test_very_many_issues_leave_the_map_above_the_fold(wide, open_panel, run, count):
    """Grouped by cause, three open, the rest folded."""
    page, _ = open_panel(wide, at(run), height=800)
    expect(page.locator("[data-part=verdict] h1")).to_have_text(f"{count} problems")
    expect(page.locator("[data-part=open] > li")).to_have_count(3)
    expect(page.get_by_text("2 more kinds of issues")).to_be_visible()
    box = page.locator("[data-part=map]").bounding_box()
    assert box["y"] + box["height"] <= 800
    page.locator("[data-part=open] summary").first.click()
    expect(page.locator("[data-part=open] li li .issue").first).to_be_visible()


def test_a_link_to_a_run_that_is_not_there_says_so(wide, open_panel):
    """Another run is shown instead, until one is chosen."""
    page, _ = open_panel(wide, at("deleted"))
    expect(page.locator("[data-part=notice]")).to_contain_text('The run "deleted" is not in this log directory')
    page.locator("[data-part=run]").select_option("fading")
    expect(page.locator("[data-part=notice]")).to_be_hidden()


def test_a_printed_page_and_a_full_capture_hold_the_whole_table(wide, open_panel):
    """The box of the table is full before anybody scrolls to it; on paper every row is there, and no header lies on the map."""
    page, _ = open_panel(wide, at("issues"), height=700)
    rows = page.locator("[data-part=health] tbody tr")
    scroll = page.locator("[data-part=health] .scroll")
    expect(rows.first).to_have_attribute("aria-rowindex", "2")
    lacking = """box => {
        const rows = [...box.querySelectorAll('tbody tr')].map(row => row.getBoundingClientRect());
        return box.getBoundingClientRect().bottom - rows.at(-1).bottom;
    }"""
    assert scroll.evaluate(lacking) <= 0
    # The rows that were read, and of the layers that the issues name and nobody read a hundred.
    assert page.locator("[data-part=health] table").get_attribute("aria-rowcount") == "151"
    page.emulate_media(media="print")
    expect(rows).to_have_count(150)
    assert scroll.evaluate("box => box.scrollHeight - box.clientHeight") <= 1
    assert page.locator("header").evaluate("head => getComputedStyle(head).position") == "static"
    page.emulate_media(media="screen")
    assert b"/Count" in page.pdf()


def test_the_colours_stand_for_a_range_that_can_be_chosen(wide, open_panel):
    """Fixed, percentiles, or typed; a link keeps it; nonsense is refused."""
    page, _ = open_panel(wide, at("fading", metric="block.gain"))
    legend = page.locator(".legend .ramp").first
    page.locator("[data-part=colours]").select_option("fixed")
    expect(legend).to_contain_text("≤ 0.125")
    page.locator("[data-part=colours]").select_option("typed")
    page.locator("[data-part=colour-low]").fill("0.4")
    page.locator("[data-part=colour-low]").press("Tab")
    expect(legend).to_contain_text("≤ 0.4")
    page.wait_for_function("decodeURIComponent(location.hash).includes('colour=0.4~8')")
    page.locator("[data-part=colour-high]").fill("0.1")
    page.locator("[data-part=colour-high]").press("Tab")
    expect(page.locator("[data-part=colour-high]")).to_have_attribute("aria-invalid", "true")
    expect(legend).to_contain_text("≥ 8")


def test_a_metric_is_found_by_a_plain_word(wide, open_panel):
    """By topic; what the run lacks comes after what it holds."""
    page, _ = open_panel(wide, at("fading"))
    page.locator("[data-part=search-metric]").click()
    page.get_by_label("Search metrics", exact=True).last.fill("gain")
    found = page.locator("[data-part=found] button")
    assert {"block.gain", "gain.max"} <= set(found.evaluate_all("list => list.map(item => item.dataset.name)"))
    page.locator("[data-part=found] [data-name='block.gain']").click()
    expect(page.locator("[data-part=metric]")).to_have_value("block.gain")
    told = page.locator("[data-part=info]")
    while "block.gain" not in (told.text_content() or ""):  # it is about what is drawn, which may still be another
        page.keyboard.press("Escape")
        page.get_by_label("About this metric").first.click()
    expect(told).to_contain_text("between 0.5 and 2")
    page.keyboard.press("Escape")


def test_the_readings_around_an_issue_are_one_click_away(wide, open_panel):
    """Twenty before and after its first step, at all layers."""
    page, _ = open_panel(wide, at("fading"))
    page.get_by_role("button", name="20 readings around step 10").click()
    page.wait_for_function("/p.gradflow.zoom=1-31(&|$)/.test(location.hash)")
    expect(page.locator("[data-part=step]")).to_have_text("10")
    expect(page.locator("[data-part=names] .pinned")).to_have_text("blocks.0")


def test_what_was_noted_stands_on_the_time_axis(wide, open_panel):
    """A resumed run has a flag at the step from which it went on."""
    page, _ = open_panel(wide, at("resumed"))
    flag = page.locator("[data-part=annotations] .resumed")
    expect(flag).to_have_count(1)
    assert flag.get_attribute("aria-label").startswith("resumed at step 61")
    plot = page.locator("[data-part=map]").bounding_box()
    box = flag.bounding_box()
    share = (box["x"] + box["width"] / 2 - plot["x"]) / plot["width"]
    assert share == pytest.approx(60.5 / 90, abs=0.02)


def test_the_model_is_a_picture_in_the_order_of_its_calls(wide, open_panel):
    """Boxes are coloured as the map, say where their class is defined, open, and pin their layer."""
    page, _ = open_panel(wide, at("trained", metric="parameter.gradient_norm"))
    boxes = page.locator("[data-part=architecture] > .parts > .part")
    expect(boxes.locator("> .head button")).to_have_text(["0", "1", "2", "3"])
    expect(boxes.first.locator("> .head .kind")).to_have_text("Block")
    places = boxes.first.locator("> .head .kind").get_attribute("title")
    assert re.fullmatch(r"called at .*test_answer.py:\d+\nclass at .*test_answer.py:\d+", places)
    expect(boxes.last.locator("> .head .value")).to_have_text(re.compile(r"\d"))
    colour = boxes.last.evaluate("box => getComputedStyle(box).borderLeftColor")
    page.locator("[data-part=metric]").select_option("parameter.numel")
    page.wait_for_function(
        "before => getComputedStyle(document.querySelector('.model > .parts > .part:last-child')).borderLeftColor !== before",
        arg=colour,
    )
    boxes.first.locator("details").evaluate("box => box.open = true")
    expect(boxes.first.locator(".part button")).to_have_text(["up", "down"])


def test_all_runs_are_the_first_page(wide, open_panel):
    """A table that sorts and filters; chosen runs stand side by side, or as the difference to one of them."""
    page, _ = open_panel(wide)
    table = page.locator("[data-part=runs]")
    names = table.locator("tbody th")
    expect(names).to_have_count(7)
    row = table.locator("tbody tr", has_text="fading")
    expect(row).to_contain_text("VANISHING")
    expect(row.locator("td.num")).to_have_text(["2.33", "2.03", "40"])
    table.get_by_role("button", name="run", exact=True).click()
    expect(names).to_have_text(["countless", "deep", "deeper", "fading", "issues", "resumed", "trained"])
    page.get_by_label("Filter the table of runs").fill("vanishing")
    expect(names).to_have_text(["fading"])
    page.get_by_label("Filter the table of runs").fill("")
    for run in ("deep", "fading"):
        page.get_by_label(f"Compare {run}", exact=True).check()
    charts = page.locator("[data-part=multiples] .multiple")
    expect(charts).to_have_count(2)
    page.locator("[data-part=reference]").select_option("deep")
    page.locator("[data-part=multiples-difference]").click()
    expect(page.locator("[data-part=multiples-note]")).to_contain_text("difference to deep")
    expect(charts.first.locator("output")).to_have_text("0 at step 40")
    page.wait_for_function("location.hash.includes('p.gradflow.compare=')")
    table.get_by_role("button", name="fading").click()
    expect(page.locator("[data-part=verdict] h1")).to_have_text("1 problem")
    page.locator("[data-part=all-runs]").click()
    expect(table).to_be_visible()
    expect(page.locator("[data-part=verdict]")).to_be_hidden()


def test_what_colour_says_is_said_without_colours_too(wide, open_panel):
    """With colours forced by the system the map keeps its own, and badges, bars, toggles and the verdict have edges."""
    page, _ = open_panel(wide, at("deep"), height=800)
    page.emulate_media(forced_colors="active")
    assert page.evaluate("matchMedia('(forced-colors: active)').matches")
    assert red(page) >= 1
    edge = "e => [getComputedStyle(e).borderTopStyle, parseFloat(getComputedStyle(e).borderTopWidth) > 0]"
    for part in ("[data-part=open] .badge", "[data-part=open] .issue", "[data-part=lanes] button"):
        assert page.locator(part).first.evaluate(edge) == ["solid", True]
    live = page.locator(".live").evaluate("e => getComputedStyle(e).outlineStyle")
    assert live == "solid"
    page.emulate_media(forced_colors="none")


AUDIT = """async () => {
    const tags = ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa', 'wcag22aa', 'best-practice'];
    const {violations} = await axe.run(document, {runOnly: tags, rules: {'target-size': {enabled: true}}});
    return violations.flatMap(({id, nodes}) => nodes.map(node => `${id}: ${node.target} ${node.failureSummary}`));
}"""


@pytest.mark.parametrize("state", ["", at("issues"), at("trained", histograms="all")])
@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 360), ("dark", 1920)])
def test_everybody_can_use_the_panel(wide, open_panel, state, scheme, width):
    """axe-core finds nothing: names, roles, contrast, targets of 24 px; and nothing hangs over a narrow edge."""
    audit = Path(axe_playwright_python.__file__).parent / "axe.min.js"
    page, _ = open_panel(wide, state, width=width, height=800)
    page.emulate_media(color_scheme=scheme)
    page.wait_for_load_state("networkidle")
    if "histograms" in state:
        expect(page.locator("[data-part=spread] canvas").first).to_be_visible()
    page.evaluate(audit.read_text(encoding="utf-8"))
    assert page.evaluate(AUDIT) == []
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0


@pytest.mark.parametrize(
    ("state", "width"),
    [
        (at("trained"), 360),
        (at("trained", other="fading"), 360),
        (at("fading"), 360),
        (at("issues"), 360),
        (at("fading"), 375),
        (at("fading"), 1024),
        (at("trained", other="fading"), 1280),
        (at("fading"), 1280),
    ],
)
def test_nothing_is_cut_that_a_card_says(wide, open_panel, state, width):
    """Facts, verdict, cards, captions and legends are read whole; on a phone messages are as well."""
    page, _ = open_panel(wide, state, width=width, height=900)
    page.wait_for_load_state("networkidle")
    parts = ".facts, .verdict, .issue, .legend, .keys, .losing, .caption, .line h2"
    cut = """(parts) => [...document.querySelectorAll(parts)].flatMap(part => [part, ...part.querySelectorAll('*')])
        .filter(e => /hidden|clip/.test(getComputedStyle(e).overflow) && e.clientWidth > 0)
        .filter(e => e.scrollWidth > e.clientWidth + 1 || e.scrollHeight > e.clientHeight + 1)
        .map(e => `${e.className}: ${e.textContent}`)"""
    assert page.evaluate(cut, parts) == []
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0


def test_the_name_that_a_run_has_by_default_is_read_whole(tmp_path, logs, versions_in, tensorboard, open_panel):
    """In the table of all runs, on a window of 1024 px: what tells two runs of a day from each other is in its middle."""
    for name in (DEFAULT, DEFAULT.replace("14-17", "14-19")):
        logs.write_run(tmp_path / name, logs.plain_records(range(1, 4)))
    with tensorboard(f"--logdir={tmp_path}", holds=versions_in(tmp_path)) as address:
        page, _ = open_panel(address, width=1024)
        names = page.locator(".runs .link")
        expect(names).to_have_count(2)
        assert names.evaluate_all("all => all.map(e => e.scrollWidth - e.clientWidth)") == [0, 0]


def test_gradient_left_shows_every_run_that_is_compared(wide, open_panel):
    """A line, a hue and a legend entry each; alone, the run has the chart for itself."""
    page, _ = open_panel(wide, at("fading", other="trained"))
    card = page.locator("[data-part=losing]")
    keys = page.locator("[data-part=losing-note] .runkey")
    expect(keys).to_have_text([re.compile("^fading: at step 40; largest"), re.compile("^trained: at step 6; ")])
    lines = card.locator("svg g > path")
    expect(lines).to_have_count(2)
    assert len(set(lines.evaluate_all("list => list.map(e => getComputedStyle(e).stroke)"))) == 2
    page.get_by_label("Compare with", exact=True).select_option("")
    expect(lines).to_have_count(1)
    expect(keys).to_have_count(0)


def test_nothing_moves_while_a_run_is_loaded(wide, open_panel, context):
    """What arrives fills its place; measured by the browser in the panel's own page."""
    context.add_init_script(
        """window.moved = 0;
        new PerformanceObserver(list => list.getEntries().forEach(e => { window.moved += e.value; }))
            .observe({type: 'layout-shift', buffered: true});"""
    )
    page, _ = open_panel(wide, at("fading"))
    page.wait_for_load_state("networkidle")
    expect(page.locator("[data-part=losing] path").first).to_be_visible()
    assert page.evaluate("window.moved") < 5e-4
