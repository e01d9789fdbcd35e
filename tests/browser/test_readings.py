"""A number is that of a reading, and every view says of which; where nothing was read nothing is painted."""

import math
import re

import pytest
from playwright.sync_api import expect

from gradflow_export.records.step_record import IssueType, Reading, RunInfo, Severity, StepRecord
from gradflow_export.writers.tensorboard import TensorBoardWriter

SITES = ("h.0", "h.1", "h.2")


def sparse_records(logs, steps=60, found=37, every=5, fall=0.0):
    """Return records of a loss at every step, of gains at every fifth, and of a rank at the first four.

    From the step ``found`` on all is NaN, which an issue says. The loss falls by ``fall`` at each step.
    """
    records = []
    for step in range(1, steps + 1):
        value = math.nan if step >= found else 1.0
        readings = [Reading.run("loss", value - fall * step)]
        if step % every == 0:
            readings += [Reading.of(f"block.{name}", SITES, [value] * 3) for name in ("gain", "gradient_norm")]
        if step <= 4:
            readings.append(Reading.of("block.effective_rank", SITES, [3.0] * 3))
        broken = logs.issue(IssueType.NUMERICAL, Severity.CRITICAL, "h.1", found)
        records.append(StepRecord(step, logs.EPOCH + step, tuple(readings), issues=(broken,) if step == found else ()))
    return records


def dead_records(logs):
    """Return records of blocks, one of which holds an activation without a live unit."""
    readings = (
        Reading.of("block.gradient_norm", SITES, [1.0] * 3),
        Reading.of("activation.dead_share", ("h.1.act",), [1.0]),
        Reading.run("loss", 1.0),
    )
    dead = logs.issue(IssueType.DEAD, layer="h.1.act", step=3)
    return [StepRecord(step, logs.EPOCH + step, readings, issues=(dead,) if step == 3 else ()) for step in range(1, 20)]


@pytest.fixture(scope="module")
def sparse(tmp_path_factory, logs, versions_in, tensorboard):
    """The address of a TensorBoard over runs whose layers are read at some steps only."""
    root = tmp_path_factory.mktemp("sparse")
    logs.write_run(root / "nan", sparse_records(logs))
    logs.write_run(root / "healthy", sparse_records(logs, steps=58, found=99, fall=0.01))
    logs.write_run(root / "late", sparse_records(logs, steps=39))
    logs.write_run(root / "dead", dead_records(logs))
    logs.write_run(root / "empty", [])
    long = "x" * 120
    accused = logs.issue(layer=long)
    logs.write_run(
        root / "long", [*logs.plain_records(range(1, 9), (long, "b")), StepRecord(9, 9.0, issues=(accused,))]
    )
    logs.write_run(root / "again", sparse_records(logs), model="Net", entries=3)
    logs.write_run(root / "again", sparse_records(logs, steps=30), start=600, model="Net", entries=3)
    for start, model in ((0, "Generator"), (2, "Discriminator")):
        logs.write_run(root / "gan", logs.plain_records(range(1, 9)), start=start, model=model)
    killed = TensorBoardWriter(root / "killed", rows=8, flush_seconds=1e9)
    killed.open(RunInfo(logs.session_name(), logs.EPOCH))
    for record in logs.plain_records(range(1, 33)):
        killed.write(record)
    killed.flush()
    with tensorboard(f"--logdir={root}", "--load_fast=true", holds=versions_in(root)) as address:
        yield address


def at(run, **state):
    """Return the part of an address that opens a run."""
    return "".join(f"&p.gradflow.{key}={value}" for key, value in {"run": run, **state}.items())


def test_a_verdict_opens_on_the_first_reading_that_shows_it(sparse, open_panel):
    """The issue is of step 37, its layers were read at 35 and at 40: at 35 all was well."""
    page, _ = open_panel(sparse, at("nan"))
    expect(page.locator("[data-part=step]")).to_have_text("40")
    note = page.locator("[data-part=table-note]")
    expect(note).to_have_text("at step 40")
    expect(page.locator(".health .broken").first).to_have_text("NaN")
    # Where somebody looks at the step itself, what is shown says when it was read.
    page.get_by_label("Previous step").click(click_count=3, delay=20)
    expect(page.locator("[data-part=step]")).to_have_text("37")
    expect(note).to_have_text("read at step 35, the last reading by step 37")
    expect(page.locator(".caption").first).to_contain_text("step 35: ")
    # A click on its card goes to the reading again.
    page.locator("[data-part=open] .issue").click()
    expect(page.locator("[data-part=step]")).to_have_text("40")
    expect(note).to_have_text("at step 40")
    page.wait_for_function("location.hash.includes('p.gradflow.step=40')")


def test_a_verdict_without_a_reading_after_it_opens_on_the_last_and_says_so(sparse, open_panel):
    """The run ended before its layers were read again."""
    page, _ = open_panel(sparse, at("late"))
    expect(page.locator("[data-part=step]")).to_have_text("35")
    expect(page.locator("[data-part=table-note]")).to_have_text("at step 35")


def test_numbers_are_those_of_the_reading_in_every_view(sparse, open_panel):
    """The run has 58 steps, its layers were read last at 55, their rank at 4."""
    page, _ = open_panel(sparse, at("healthy"))
    expect(page.locator("[data-part=table-note]")).to_have_text("read at step 55, the last reading by step 58")
    expect(page.locator(".caption").first).to_contain_text("step 55: ")
    page.locator("[data-part=metric]").select_option("block.effective_rank")
    expect(page.locator(".caption").first).to_contain_text("last read at step 4: ")
    plot = page.locator("[data-part=map]")
    box = plot.bounding_box()
    plot.hover(position={"x": box["width"] * 0.6, "y": 20})
    expect(page.locator(".tip .v")).to_have_text("not read")
    expect(page.locator(".tip")).to_contain_text("last read at step 4")
    plot.hover(position={"x": box["width"] * 3.5 / 58, "y": 20})
    expect(page.locator(".tip .v")).to_have_text("3")


def test_what_was_not_read_is_hatched(sparse, open_panel):
    """Of 58 steps the first four were read: not a tenth of the map has the colour of a reading."""
    page, _ = open_panel(sparse, at("healthy", metric="block.effective_rank"))
    expect(page.locator(".legend").first).to_contain_text("not read")
    colours = page.locator("[data-part=map] canvas").evaluate(
        """canvas => {
            const {data} = canvas.getContext('2d').getImageData(0, 10, canvas.width, 1);
            return Array.from({length: canvas.width}, (_, x) => data.slice(4 * x, 4 * x + 3).join());
        }"""
    )
    reading = colours[len(colours) * 2 // 58]
    # Steps 1 to 4, and one more for which the last of them holds.
    assert 4 / 58 <= colours.count(reading) / len(colours) < 6 / 58
    assert len(set(colours[len(colours) // 2 :])) == 2


def test_the_step_is_one_that_is_in_view(sparse, open_panel):
    """Selector, profile and table go to the nearest step in view; a step beyond it takes the view along."""
    page, _ = open_panel(sparse, at("healthy", zoom="11-15", step=50))
    expect(page.locator("[data-part=step]")).to_have_text("14")
    expect(page.locator("[data-part=table-note]")).to_have_text("read at step 10, the last reading by step 14")
    expect(page.locator(".caption").first).to_contain_text("step 10: ")
    # Nothing was read within the view: its left edge shows what holds there.
    page.locator("[data-part=map]").hover(position={"x": 3, "y": 20})
    expect(page.locator(".tip .v")).to_have_text("1")
    expect(page.locator(".tip")).to_contain_text(re.compile("step 10"))
    page.get_by_label("Next step").click()
    expect(page.locator("[data-part=step]")).to_have_text("15")
    expect(page.locator("[data-part=table-note]")).to_have_text("at step 15")
    page.wait_for_function("location.hash.includes('zoom=12')")


def test_the_accused_layer_is_a_row_of_the_table(sparse, open_panel):
    """The table opens on blocks; the layer that the verdict names is an activation inside one."""
    page, _ = open_panel(sparse, at("dead"))
    row = page.locator(".health tbody tr").filter(has_text="h.1.act")
    expect(row.locator("td").first).to_have_text("DEAD")
    expect(row).to_contain_text("100 %")


def test_a_run_that_was_killed_is_not_called_live_or_healthy_to_the_end(sparse, open_panel):
    """Nobody knows what came after its last step; one that was closed has finished."""
    page, _ = open_panel(sparse, at("killed"))
    expect(page.locator("[data-part=live]")).to_have_text("Not closed")
    verdict = page.locator("[data-part=verdict]")
    expect(verdict).to_contain_text("not closed: steps after 32 are unknown")
    expect(verdict).to_have_class(re.compile("tone-warn"))
    page, _ = open_panel(sparse, at("healthy"))
    expect(page.locator("[data-part=live]")).to_have_text("Finished")
    expect(page.locator("[data-part=verdict]")).to_have_class(re.compile("tone-good"))


def test_a_run_that_was_closed_without_a_step_says_so(sparse, open_panel):
    """It is not open, and nothing of it is healthy."""
    page, _ = open_panel(sparse, at("empty"))
    expect(page.locator("[data-part=verdict]")).to_contain_text("The run was closed before its first step")


def test_the_list_of_runs_hides_no_session_and_names_those_of_one_folder(sparse, open_panel):
    """A cell that was run again is two runs, and so are two exporters in one folder."""
    page, _ = open_panel(sparse, height=900)
    rows = page.locator(".runs tbody tr")
    expect(rows).to_have_count(11)
    expect(rows.filter(has_text="gan: Generator")).to_have_count(1)
    expect(rows.filter(has_text="gan: Discriminator")).to_have_count(1)
    again = rows.filter(has_text="again: began")
    expect(again).to_have_count(2)
    expect(again.filter(has_text="NUMERICAL")).to_have_count(1)
    expect(rows.filter(has_text="killed")).to_contain_text("Healthy as far as recorded")
    expect(rows.filter(has_text="empty").locator(".more")).to_have_text("No step recorded")
    healthy = page.get_by_role("button", name="healthy", exact=True)
    expect(rows.filter(has=healthy).locator(".ok")).to_have_text("Healthy")
    page.get_by_role("button", name="again: began").first.click()
    expect(page.locator("[data-part=run]").locator("option", has_text="again: began")).to_have_count(2)


def test_one_run_has_one_first_and_one_last_loss(sparse, open_panel):
    """The list, the page and the text say the same, also where the last loss is NaN."""
    page, _ = open_panel(sparse, height=900)
    head = page.locator(".runs thead button", has_text="first loss")
    assert head.get_attribute("title") == "Median of the first five finite losses"
    row = page.locator(".runs tbody tr").filter(has=page.get_by_role("button", name="nan", exact=True))
    expect(row.locator("td.num").first).to_have_text("1.00")
    page.get_by_role("button", name="nan", exact=True).click()
    expect(page.locator("[data-part=course]")).to_have_text("loss1.00 \u2192 NaN")


def test_two_runs_side_by_side_have_a_verdict_each(sparse, open_panel):
    """A healthy run beside a dead one is not all that is said; a difference counts the layers without a partner."""
    page, _ = open_panel(sparse, at("healthy", other="dead"))
    other = page.locator("[data-part=verdict-other]")
    expect(other).to_contain_text("dead: 1 problem: DEAD in h.1.act since step 3")
    expect(other).to_have_class(re.compile("tone-bad"))
    page, _ = open_panel(sparse, at("long", other="healthy", mode="difference", metric="block.gain"))
    expect(page.locator(".layers").first).to_contain_text("healthy has no layer of the same name")
    page, _ = open_panel(sparse, at("healthy"))
    expect(page.locator("[data-part=verdict-other]")).to_be_hidden()


@pytest.mark.parametrize("width", [360, 760, 1280])
def test_a_long_name_keeps_to_its_column(sparse, open_panel, width):
    """A layer of 120 letters does not lie over its verdict."""
    page, _ = open_panel(sparse, at("long"), width=width)
    row = page.locator(".health tbody tr").first
    name, verdict = (row.locator(part).bounding_box() for part in ("th button", "td >> nth=0"))
    assert name["x"] + name["width"] <= verdict["x"]


def test_narrow_paper_holds_every_column_and_the_whole_fix(sparse, open_panel):
    """What does not fit side by side on a screen of 760 px is made smaller on paper."""
    page, _ = open_panel(sparse, at("dead"), width=760)
    page.emulate_media(media="print")
    for part in (".health .scroll", "[data-part=fix]"):
        assert page.locator(part).evaluate(
            "box => [box.scrollWidth - box.clientWidth, box.scrollHeight - box.clientHeight]"
        ) <= [1, 1]
    page.emulate_media(media="screen")
    page.locator("[data-part=all-runs]").click()
    page.emulate_media(media="print")
    assert page.locator(".runs .scroll").evaluate("box => box.scrollWidth - box.clientWidth") <= 1
