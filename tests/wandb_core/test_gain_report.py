"""The gain report and the gain chart: what is kept, what is shown, and what reaches W&B."""

import json
import math
from html.parser import HTMLParser
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradflow_export.records.step_record import Issue, IssueType, Reading, RunInfo, Severity, StepRecord
from gradflow_export.records.verdict import Course, Verdict, problem, verdict
from gradflow_export.writers import WandbWriter
from gradflow_export.writers.gain_book import GainBook
from gradflow_export.writers.gain_report import MOST_ROWS, gain_report
from gradflow_export.writers.wandb.gains import GainViews, chart_rows

HOSTILE = (
    "</title><script>bad()</script>", '"><img src=x onerror=bad()>', "a&lt;b&amp;", "'onload='bad()", "\x00\x1b[31m\u202e\ud800",
    "]]></svg><style>*{display:none}</style>", "x" * 5000, "",
)  # fmt: skip


def record(step, gains, sites=None, norms=None, issues=()):
    """A record with gains, and norms where they are given."""
    sites = tuple(f"blocks.{i}" for i in range(len(gains))) if sites is None else sites
    readings = [Reading.of("block.gain", sites, gains)]
    if norms is not None:
        readings.append(Reading.of("block.gradient_norm", sites, norms))
    return StepRecord(step, 1e9 + step, tuple(readings), issues=issues)


def issue(layer="blocks.1", advice="Clip."):
    """An issue that is open."""
    return Issue(IssueType.EXPLODING, Severity.HIGH, layer, 3, 38.0, 2.0, "It explodes.", advice, (layer,), None)


def page_of(book, issues=(), step=1):
    """The report on what a book holds."""
    course, named = Course(steps=3, judged=True, stepped=True), list(map(problem, issues))
    return gain_report(book.map, book.norms, list(issues), verdict(course, named), step=step, found=len(issues))


class Elements(HTMLParser):
    """Collects elements, attributes and text."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.attributes, self.text = [], [], []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data):
        self.text.append(data)


def farthest(values):
    """Slow twin of what a column keeps: the first of those farthest from 1; ``None`` when nothing arrived."""

    def far(value):
        if math.isnan(value):
            return math.inf
        return 1e6 if value in (0.0, math.inf) else abs(math.log(value))

    known = [value for value in values if value is not None]
    return max(known, key=far) if known else None


gain = st.one_of(st.none(), st.just(0.0), st.just(math.inf), st.just(math.nan), st.floats(2.0**-60, 2.0**60, width=32))


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(st.lists(gain, min_size=2, max_size=2), min_size=1, max_size=40))
def test_a_column_keeps_what_is_farthest_from_one(rows):
    """Whatever is joined, each column has of its steps the extreme of each block, and all steps are covered."""
    book = GainBook(columns=4)
    for step, gains in enumerate(rows, 1):
        book.add(record(step, gains))
    seen = book.map
    assert len(seen.spans) <= 4
    assert [step for first, last in seen.spans for step in range(first, last + 1)] == list(range(1, len(rows) + 1))
    for column, (first, last) in enumerate(seen.spans):
        for block in range(2):
            expected = farthest([rows[step - 1][block] for step in range(first, last + 1)])
            got = float(seen.values[column, block]) if seen.present[column, block] else None
            assert got == expected or (got is not None and math.isnan(got) and math.isnan(expected))


def test_a_spike_of_one_step_survives_a_long_run():
    """Of 5000 steps the one that exploded is still on the map, and the map is no larger than at first."""
    book = GainBook()
    for step in range(1, 5001):
        book.add(record(step, [1.0, 38.0 if step == 3777 else 1.0]))
    seen = book.map
    assert seen.values.shape[0] <= 96
    (column,) = np.flatnonzero(seen.values[:, 1] == 38.0)
    assert seen.spans[column][0] <= 3777 <= seen.spans[column][1]


def test_other_blocks_begin_a_new_map():
    """Gains of different models are never mixed."""
    book = GainBook()
    book.add(record(1, [1.0, 2.0]))
    book.add(record(2, [1.0, 2.0, 3.0]))
    assert (book.map.spans, len(book.map.sites)) == (((2, 2),), 3)


def test_without_blocks_the_norms_of_layers_are_shown():
    """A layer's parameters are joined; a NaN beside an Inf stays one."""
    book = GainBook()
    names = ("fc.weight", "fc.bias", "out.weight", "out.bias", "free")
    book.add(StepRecord(5, 1.0, (Reading.of("parameter.gradient_norm", names, [3.0, 4.0, math.inf, math.nan, None]),)))
    norms = book.norms
    assert norms.sites == ("fc", "out", "free")
    assert norms.values[0] == 5.0
    assert math.isnan(norms.values[1])
    assert norms.present.tolist() == [True, True, False]
    assert "No gain was measured" in page_of(book)


def test_the_report_says_what_is_wrong_and_what_to_do():
    """Verdict, step, layer, value and advice are text, not only colour."""
    book = GainBook()
    book.add(record(7, [1.0, 38.0], norms=[0.1, 3.0]))
    text = " ".join(Elements(page_of(book, [issue()], step=7)).text)
    assert "EXPLODING in blocks.1 since step 3" in text
    assert "at step 7; 1 issue found so far, 1 open" in text
    assert all(part in text for part in ("HIGH", "38 (mark 2)", "Clip."))
    assert "blocks.1: gain 38 to 38, furthest from 1: 38 in step 7" in text
    assert "healthy: no open problem in 3 records" in " ".join(Elements(page_of(book)).text)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_name_is_only_text(name):
    """Names of layers and models, and advice, make no element, no attribute and nothing that cannot be encoded."""
    plain, hostile = GainBook(), GainBook()
    plain.add(record(1, [1.0, 2.0], ("a", "b"), norms=[1.0, 2.0]))
    hostile.add(record(1, [1.0, 2.0], (name, "b"), norms=[1.0, 2.0]))
    pages = [
        gain_report(
            book.map, book.norms, [issue(word, word)], Verdict("bad", "1 problem", word), step=1, found=1, model=word
        )
        for book, word in ((plain, "a"), (hostile, name))
    ]
    known, got = (Elements(page) for page in pages)
    if name:
        assert got.tags == known.tags
        assert [key for key, _ in got.attributes] == [key for key, _ in known.attributes]
    assert len(pages[1].encode()) < 20_000


def test_a_page_stays_small_whatever_is_measured():
    """4000 blocks with random gains at 500 steps make a page of tens of kilobytes, with every block on a row."""
    random, book = np.random.default_rng(0), GainBook()
    sites = tuple(f"model.encoder.layers.{i}.with.a.long.name" for i in range(4000))
    for step in range(500):
        gains = np.exp(random.normal(0, 3, 4000))
        book.add(record(step, gains, sites, norms=gains if step == 499 else None))
    page = page_of(book, [issue(layer=f"blocks.{i}") for i in range(200)])
    assert len(page.encode()) < 100_000
    assert "and 188 more" in page
    assert page.count("<title>model.encoder.layers.") == 2 * MOST_ROWS


def test_the_chart_has_a_few_moments_and_empty_cells_where_no_power_exists():
    """First and newest moment are among the lines; 0, NaN, Inf and missing have no power of 2 and keep their gain."""
    book = GainBook()
    book.add(record(1, [4.0, 0.0, math.inf, None, math.nan]))
    for step in range(2, 11):
        book.add(record(step, [1.0] * 5))
    rows = chart_rows(book.map)
    moments = list(dict.fromkeys(row[2] for row in rows))
    assert (len(moments), moments[0], moments[-1]) == (4, "step 1", "step 10")
    assert [row[4] for row in rows[:5]] == [2.0, None, None, None, None]
    assert [row[3] for row in rows[:4]] == [4.0, 0.0, math.inf, None]
    assert [row[:2] for row in rows[:2]] == [[0.0, "blocks.0"], [1.0, "blocks.1"]]


def test_what_a_module_cannot_show_is_left_out():
    """A module without pages and custom charts gets neither."""
    views = GainViews(SimpleNamespace())
    views.add(record(1, [1.0]))
    assert views.views(SimpleNamespace(open=[], found=0), Verdict("good", "healthy"), 1) == []


def test_a_page_that_cannot_be_written_costs_nothing_else(begin, read, ours, said, monkeypatch):
    """A full disk where pages are written is said once; rows, tables and the chart go on."""

    def full(*args, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("wandb.Html", full)
    run, writer = begin(), WandbWriter(rows="own")
    writer.open(RunInfo("1-0", 1.0, "Net"))
    for step in range(1, 11):
        writer.write(record(step, [1.0, 38.0], norms=[1.0, 2.0], issues=(issue(),) if step == 3 else ()))
        writer._lane.wait(100)
    writer.close()
    run.finish()
    rows = ours(read(run))
    assert [row["step"] for row in rows if "block.gain/blocks.1" in row] == list(range(1, 11))
    assert len([row for row in rows if "health" in row and "gain_chart_table" in row]) == 2
    (line,) = said("the view gain_report")
    assert "No space left" in line


def test_report_and_chart_reach_the_server(beside_server, port, begin):
    """Both are sent with the first issue and at the end; the page is a file, the chart a table that the dashboard draws."""
    with beside_server.LoopbackServer(port) as server:
        run = begin(settings=server.settings())
        writer = WandbWriter()
        writer.open(RunInfo("1-0", 1.0, "Net"))
        for step in range(1, 11):
            writer.write(record(step, [1.0, 38.0], norms=[1.0, 2.0], issues=(issue(),) if step == 3 else ()))
            writer._lane.wait(100)
            run.log({"mine": step}, step=step)
        writer.close()
        run.finish()
        rows = server.history(run.id)
        reports = [row["gradflow/gain_report"] for row in rows if "gradflow/gain_report" in row]
        pages = [body for name, body in server.uploads.items() if "gain_report" in name and name.endswith(".html")]
        assert [report["_type"] for report in reports][:1] == ["html-file"]
        assert server.summary(run.id)["gradflow/gain_report"]["_type"] == "html-file"
        assert all(b"EXPLODING in blocks.1" in page for page in pages)
        assert len(pages) == 2
        assert server.summary(run.id)["gradflow/gain_chart_table"]["_type"] == "table-file"
        tables = [
            json.loads(server.uploads[name]) for name in server.uploads if name.endswith("gain_chart_table.table.json")
        ]
        assert tables
        assert all({"depth", "moment", "gain as a power of 2"} <= set(table["columns"]) for table in tables)
        assert [row[1] for row in tables[-1]["data"]][:2] == ["blocks.0", "blocks.1"]
        assert [row["mine"] for row in rows if "mine" in row] == list(range(1, 11))
        assert server.unknown == []


@settings(max_examples=60, deadline=None)
@given(data=st.data(), blocks=st.integers(0, 90), steps=st.integers(1, 6))
def test_any_gains_and_norms_make_a_page(data, blocks, steps):
    """Whatever is measured or missing, the page is whole: every element that needs an end has one."""
    book = GainBook(columns=4)
    values = st.lists(gain, min_size=blocks, max_size=blocks)
    for step in range(1, steps + 1):
        book.add(record(step, data.draw(values), norms=data.draw(values)))
    page = page_of(book, step=steps)
    assert page.count("<svg ") == page.count("</svg>") == 2 * bool(blocks)
    assert page.count("<section>") == page.count("</section>")
    assert page.endswith("</body></html>")


@pytest.mark.parametrize(("gain", "advice"), [(0.3, "add skip connections"), (3.0, "clip the gradient"), (1.0, "")])
def test_the_page_says_what_to_do_where_most_blocks_damp_or_amplify(gain, advice):
    """By the newest reading, not by the extremes that a column joins; nothing is said of gains near 1."""
    book = GainBook(columns=2)
    for step in range(1, 9):
        book.add(record(step, [1.0 if step < 8 else gain] * 5))
    page = page_of(book, step=8)
    told = "5 of 5 transitions"
    assert (told in page) is bool(advice)
    assert advice in page
    book.add(record(9, [1.0] * 5))
    assert told not in page_of(book, step=9)
