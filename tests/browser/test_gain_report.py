"""The gain report in Chromium, framed as W&B frames it: light and dark, nothing loaded, nothing run, no complaints."""

import math

import pytest

from gradflow_export.records.step_record import Issue, IssueType, Reading, Severity, StepRecord
from gradflow_export.records.verdict import Verdict
from gradflow_export.writers.gain_book import GainBook
from gradflow_export.writers.gain_report import gain_report

NAMES = (
    "blocks.0",
    "</title><script>document.title='bad'</script>",
    '"><img src=x onerror="document.title=1">',
    "last",
)
LOAD = """text => new Promise(done => {
    const frame = document.querySelector('iframe');
    frame.onload = () => done();
    frame.srcdoc = text;
})"""
BOX = "element => { const box = element.getBoundingClientRect(); return [box.width, box.height] }"


def report():
    """A page on a sick model with hostile names."""
    book = GainBook()
    for step in range(1, 201):
        gains = [1.0, 0.1, 2.0 ** (step / 40), None if step < 20 else math.nan]
        norms = [1e-3, 1e-2, 1.0, 0.0]
        readings = Reading.of("block.gain", NAMES, gains), Reading.of("block.gradient_norm", NAMES, norms)
        book.add(StepRecord(step, 1e9 + step, readings))
    issue = Issue(IssueType.EXPLODING, Severity.HIGH, NAMES[2], 99, 38.0, 2.0, "", "Clip.", (NAMES[2],), None)
    said = Verdict("bad", "1 problem", f"EXPLODING in {NAMES[2]} since step 99")
    return gain_report(book.map, book.norms, [issue], said, step=200, found=1, model="Net")


@pytest.fixture(params=["light", "dark"])
def opened(browser, request):
    """The page in a frame that may run scripts, so that one that got through would; gives scheme, frame and complaints."""
    with browser.new_context(color_scheme=request.param, viewport={"width": 1200, "height": 700}) as context:
        page, complaints = context.new_page(), []
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda asked: complaints.append(asked.url))
        page.set_content(
            "<meta name=color-scheme content='light dark'><iframe style='width:1150px;height:650px'></iframe>"
        )
        page.evaluate(LOAD, report())
        frame = page.frame_locator("iframe")
        yield request.param, frame, complaints


def test_it_is_drawn_without_a_complaint(opened):
    """Both figures have a size and cells, hostile names are text, nothing is loaded or run, and colours fit the scheme."""
    scheme, frame, complaints = opened
    sizes = [svg.evaluate(BOX) for svg in frame.locator("svg").all()]
    assert len(sizes) == 2
    assert all(width > 400 and height > 60 for width, height in sizes)
    assert frame.locator("path.r").count() >= 5
    assert frame.locator("path.odd").evaluate(BOX)[0] > 100
    assert frame.locator("script, img").count() == 0
    assert NAMES[2] in frame.locator("td").nth(2).inner_text()
    assert frame.locator("title").first.evaluate("element => element.ownerDocument.title") == "Gain report"
    colours = frame.locator("body").evaluate(
        "body => [getComputedStyle(body).backgroundColor, getComputedStyle(body).color]"
    )
    brightness = [sum(int(part) for part in colour[4:-1].split(",")) for colour in colours]
    assert (brightness[0] > brightness[1]) == (scheme == "light")
    assert abs(brightness[0] - brightness[1]) > 400
    assert [complaint for complaint in complaints if not complaint.startswith("about:")] == []
