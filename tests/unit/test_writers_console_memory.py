"""The console and memory writers."""

import io
import sys
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

from gradflow_export.errors import ArgumentError
from gradflow_export.records.step_record import Issue, IssueType, Reading, RunInfo, Severity, StepRecord
from gradflow_export.rules.judge import Judge
from gradflow_export.rules.memory import MemoryLeak
from gradflow_export.writers import ConsoleWriter, MemoryWriter

NORMS = ("parameter.gradient_norm", "parameter.weight_norm", "parameter.update_norm")
TOTALS = ("loss", "gradient.total_norm", "learning_rate", "runtime.rss")

GOLDEN = """\
gradflow: watching Net, 1,234,567 parameters, rank 1 of 4
gradflow: step 1  loss 2.303  gradient norm 1e-07  lr 0.001
gradflow: [HIGH] VANISHING in fc1 (+1 more) since step 2: gain is 0.01, below 0.5. Fix: use residual connections.
gradflow: step 4 (evaluation)  loss nan  accuracy 0.5  steps/s 12.35
gradflow: healed [HIGH] VANISHING in fc1 (+1 more) since step 2 until step 5: gain is 0.9. Fix: nothing.
gradflow: closed after step 5; issues: 1, still open: 0
"""


def write_sample_run(writer):
    """Write a run with pinned values: ten seconds between the first and the second headline."""

    def issue(message, advice, healed=None):
        return Issue(IssueType.VANISHING, Severity.HIGH, "fc1", 2, 0.01, 0.5, message, advice, ("fc1", "fc2"), healed)

    def numbers(**values):
        return tuple(Reading.of(name.replace("__", "."), ("",), [value]) for name, value in values.items())

    writer.open(RunInfo("1-1", 1.0, "Net", 1234567, rank=1, world_size=4))
    first = numbers(loss=2.302585, gradient__total_norm=1e-7, learning_rate=1e-3, gain__depth=None)
    writer.write(StepRecord(1, 100.0, first))
    writer.write(
        StepRecord(2, 101.0, first, issues=(issue("gain is 0.01,\n below 0.5.", "use residual connections."),))
    )
    writer.write(StepRecord(3, 102.0, first, issues=()))
    last = numbers(loss=float("nan"), alignment__accuracy=0.5, runtime__throughput=12.3456)
    writer.write(StepRecord(4, 110.0, last, phase="evaluation"))
    writer.write(StepRecord(5, 111.0, issues=(issue("gain is 0.9.", "nothing.", 5),)))
    writer.close()


def test_console_output_is_this_text():
    """Issues are one line each, headline numbers come every ten seconds of the run, missing ones are left out."""
    stream = io.StringIO()
    write_sample_run(ConsoleWriter(stream))
    assert stream.getvalue() == GOLDEN


@pytest.mark.parametrize("verbose", [1, 2])
def test_what_is_open_at_the_end_is_told_with_its_fix_once(verbose):
    """Issues of severity MEDIUM interrupt nobody; the end tells of those that are open, unless they were told before."""

    def issue(kind, layer, severity, healed=None):
        return Issue(kind, severity, layer, 1, 0.01, 0.5, "it is so.", f"mend {layer}.", (layer,), healed)

    kinds = (IssueType.OVERFITTING, IssueType.OVERFITTING, IssueType.MEMORY_LEAK, IssueType.ROTATION, IssueType.LEAKAGE)
    open_ones = [issue(kind, f"layer{i}", Severity.MEDIUM) for i, kind in enumerate(kinds)]
    gone = issue(IssueType.SATURATION, "tanh", Severity.MEDIUM, healed=2)
    told, slight = issue(IssueType.DESYNC, "fc", Severity.HIGH), issue(IssueType.BOTTLENECK, "fc", Severity.LOW)
    stream = io.StringIO()
    writer = ConsoleWriter(stream, verbose=verbose)
    writer.write(StepRecord(1, 100.0, issues=(*open_ones, told, slight, replace(gone, healed_step=None))))
    writer.write(StepRecord(2, 101.0, issues=(gone,)))
    before = stream.getvalue()
    writer.close()
    *lines, verdict = stream.getvalue()[len(before) :].splitlines()
    expected = [
        f"gradflow: [MEDIUM] {kinds[i]} in layer{i} since step 1: it is so. Fix: mend layer{i}." for i in (0, 2, 3)
    ]
    assert lines == (expected if verbose == 1 else [])
    assert "closed after step 2" in verdict
    assert ("MEDIUM" in before) == (verbose == 2)


def test_a_name_breaks_no_line():
    """A line break or an escape sequence in the name of a module is written out, so that one line stays one line."""
    stream = io.StringIO()
    ConsoleWriter(stream).open(RunInfo("1-1", 1.0, "N\x1b[31met", 3, blocks=("a\nb", "größe", "日本")))
    assert stream.getvalue() == "gradflow: watching N\\x1b[31met, 3 parameters, 3 blocks (a\\nb, größe, 日本)\n"


def test_console_prints_every_record_when_asked():
    """With every=0 each record has its line."""
    stream = io.StringIO()
    writer = ConsoleWriter(stream, every=0)
    for step in (1, 2, 3):
        writer.write(StepRecord(step, 1.0))
    assert stream.getvalue() == "gradflow: step 1\ngradflow: step 2\ngradflow: step 3\n"


def test_console_keeps_talking_when_the_clock_goes_back():
    """A clock that was set back does not silence the headline for hours."""
    stream = io.StringIO()
    writer = ConsoleWriter(stream, every=10)
    writer.write(StepRecord(1, 1e9))
    writer.write(StepRecord(2, 1.0))
    assert stream.getvalue().count("step") == 2


def test_console_finds_the_stream_when_it_prints(capsys):
    """The default is standard error as it is redirected at that moment."""
    writer = ConsoleWriter()
    writer.open(RunInfo("1-0", 1.0))
    writer.flush()
    writer.close()
    assert capsys.readouterr() == (
        "",
        "gradflow: watching a model, 0 parameters\ngradflow: closed after step 0; no issues\n",
    )
    assert not sys.stderr.closed


@pytest.mark.parametrize("every", [-1.0, float("nan")])
def test_console_refuses_an_impossible_interval(every):
    """The error names what was expected and what came."""
    with pytest.raises(ArgumentError, match="seconds >= 0, got"):
        ConsoleWriter(every=every)


def test_memory_keeps_the_last_records():
    """With maxlen the oldest go; without, all stay after close."""
    bounded, unbounded = MemoryWriter(maxlen=2), MemoryWriter()
    rows = [StepRecord(step, 0.0) for step in range(1, 5)]
    for writer in (bounded, unbounded):
        writer.open(RunInfo("1-0", 1.0))
        for row in rows:
            writer.write(row)
        writer.close()
        writer.write(StepRecord(9, 0.0))
    assert bounded.records == rows[2:]
    assert unbounded.records == rows
    assert bounded.info == RunInfo("1-0", 1.0)
    assert bounded.closed


def test_memory_refuses_to_keep_nothing():
    """A bound below one record is a mistake."""
    with pytest.raises(ArgumentError, match="got 0"):
        MemoryWriter(maxlen=0)


@pytest.mark.parametrize("maxlen", [None, 50])
def test_what_is_kept_in_memory_is_about_what_it_says(maxlen):
    """The records take as much memory as ``kept_bytes`` says, whatever they hold, within a third."""
    writer, sites = MemoryWriter(maxlen), tuple(f"layer.{n}" for n in range(200))
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for step in range(1, 201):
            values = np.arange(200, dtype=np.float32) + step
            readings = [Reading(name, sites, values.copy(), np.ones(200, dtype=bool)) for name in NORMS]
            writer.write(StepRecord(step, float(step), (*readings, *(Reading.run(n, 1.0 * step) for n in TOTALS))))
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert writer.kept_bytes == pytest.approx(taken, rel=0.33)


@pytest.mark.parametrize("kept", [0.0, 1.0])
def test_what_a_writer_keeps_is_no_leak(kept):
    """Memory that grows by what is kept of the run is nobody's mistake; by anything else it is."""
    judge = Judge([MemoryLeak()], strict=True)
    for step in range(1, 401):
        grown = 0.5 * step
        own = (Reading.run("runtime.kept", grown),) if kept else ()
        judge.check(StepRecord(step, 0.0, (Reading.run("runtime.rss", 400.0 + grown), *own)))
    assert [issue.issue_type for issue in judge.issues] == ([] if kept else [IssueType.MEMORY_LEAK])


@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
def test_an_unknown_amount_kept_hides_no_leak(odd):
    """Where what writers keep is NaN or Inf at some steps, the amounts known beside them count."""
    judge = Judge([MemoryLeak()], strict=True)
    for step in range(1, 401):
        kept = odd if step % 7 == 0 else 1.0
        judge.check(
            StepRecord(step, 0.0, (Reading.run("runtime.rss", 400.0 + step), Reading.run("runtime.kept", kept)))
        )
    assert [issue.issue_type for issue in judge.issues] == [IssueType.MEMORY_LEAK]
