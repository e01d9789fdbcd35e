"""The storage form: what is packed comes back bit for bit."""

import gc

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gradflow_export.records.step_record import Histogram, Issue, IssueType, Reading, RunInfo, Severity, StepRecord
from gradflow_export.storage.event_chunks import Unpacker, pack_info, parse_tag
from gradflow_export.storage.event_packing import Packer, SiteTables
from gradflow_export.storage.jsonl import LineDecoder, LineEncoder

VALUES = st.one_of(
    st.none(), st.floats(width=32), st.sampled_from([0.0, -0.0, float("nan"), float("inf"), -float("inf")])
)


def pack(rows, packer=None):
    """Return the blobs of one chunk."""
    packer = packer or Packer("1-0")
    for row in rows:
        packer.add(row)
    return packer.take()


def unpack(blobs):
    """Feed blobs to an unpacker, last first, so that order cannot matter."""
    unpacker = Unpacker()
    for blob in reversed(blobs):
        unpacker.add(parse_tag(blob.tag), blob.data, blob.content)
    return unpacker


@st.composite
def records(draw):
    """Draw records whose metrics come and go from step to step."""
    out, step = [], 0
    for _ in range(draw(st.integers(1, 6))):
        step += draw(st.integers(1, 5))
        readings = []
        for metric in draw(st.sets(st.sampled_from(["block.gain", "parameter.zero_share"]))):
            sites = draw(st.sampled_from([("a", "b"), ("a", "b", "c/d")]))
            readings.append(Reading.of(metric, sites, [draw(VALUES) for _ in sites]))
        for metric in draw(st.sets(st.sampled_from(["loss", "overhead"]))):
            readings.append(Reading.of(metric, ("",), [draw(VALUES)]))
        out.append(StepRecord(step, draw(st.floats(0, 2e9)), tuple(readings)))
    return out


@given(records())
def test_records_survive_packing_bit_for_bit(rows):
    """Missing, absent, zero, minus zero, NaN and the infinities are all told apart after a round trip."""
    assert unpack(pack(rows)).records() == rows


def test_issues_histograms_and_info_survive():
    """Everything else that a record and a run hold comes back too."""
    issue = Issue(IssueType.DEAD, Severity.HIGH, "a", 1, float("nan"), 0.9, "m", "do", ("a", "b"))
    histogram = Histogram("parameter.weight", "a", np.array([0.0, 0.5, 1.0]), np.array([1, 2]), 3)
    info = RunInfo("1-0", 1.5, "Net", 10, ("a",), 0, 1, {"every": 1}, {"torch": "2"})
    rows = [StepRecord(2, 3.0, (), (histogram,), (issue,))]
    back = unpack([pack_info(info), *pack(rows)])
    assert back.records() == rows
    assert back.info == info


def test_every_tag_is_used_once():
    """A reused tag would be thinned out by TensorBoard's sampling."""
    packer = Packer("1-0")
    rows = [
        StepRecord(i, 0.0, (Reading.of("block.gain", ("a",), [1.0]), Reading.run("loss", 1.0))) for i in range(1, 9)
    ]
    tags = [blob.tag for part in (rows[:4], rows[4:]) for blob in pack(part, packer)]
    assert len(tags) == len(set(tags))


def test_what_waits_is_no_work_for_the_collector():
    """Records that wait leave no objects that Python's garbage collector walks through, however many they are."""
    packer, found = Packer("1-0"), []
    for step in range(1, 301):
        readings = (Reading.of("block.gain", ("a", "b"), [1.0, None]), Reading.run("loss", 1.0))
        packer.add(StepRecord(step, 0.0, readings))
        if step in (100, 300):
            gc.collect()
            found.append(len(gc.get_objects()))
    assert packer.rows == 300
    assert found[1] - found[0] < 20


def test_tags_of_others_are_left_alone():
    """Only tags with our prefix and a numbered part are ours."""
    assert parse_tag("gradflow/loss") is None
    assert parse_tag("gradflow/1-0/loss/x") is None
    assert parse_tag("other/1-0/steps/0-0") is None
    assert parse_tag("gradflow/1-0/steps/12-3").chunk == 12


def test_site_tables_are_forgotten_before_they_fill_the_memory():
    """A table is written when it is new and once more after many others, each time under another number."""
    tables = SiteTables(most=2)
    asked = [tables.number((name,)) for name in "aabbacab"]
    assert asked == [
        (0, True), (0, False), (1, True), (1, False), (0, False), (2, True), (3, True), (4, True),
    ]  # fmt: skip


def test_ever_new_sites_come_back_from_either_form():
    """A model that takes another way at every step is stored bit for bit, by writers that remember 512 tables."""
    ways = [*range(700), 0, 699]
    rows = [StepRecord(k + 1, 1.0, (Reading.of("block.gain", (f"b{way}",), [way]),)) for k, way in enumerate(ways)]
    packer, encoder, decoder = Packer("1-0"), LineEncoder(), LineDecoder()
    assert unpack([blob for row in rows for blob in pack([row], packer)]).records() == rows
    lines = [line for row in rows for line in encoder.record(row).splitlines()]
    assert [found for line in lines if (found := decoder.decode(line)) is not None] == rows
    assert len(lines) == len(rows) + 701  # way 0 had been forgotten
