"""Records are frozen, tell the four states of a value apart, and go through JSON unchanged."""

import copy
import json
import math
import pickle
import struct
from dataclasses import FrozenInstanceError

import numpy as np
import pytest

from gradflow_export import ArgumentError
from gradflow_export.records.step_record import (
    Histogram,
    Issue,
    IssueType,
    Reading,
    RunInfo,
    Severity,
    StepRecord,
    info_from_json,
    info_to_json,
    issue_from_json,
    issue_to_json,
    number_from_json,
    number_to_json,
    to_float32,
)


def issue(**changes):
    """Return an issue."""
    fields = {
        "issue_type": IssueType.VANISHING,
        "severity": Severity.HIGH,
        "layer": "blocks.0",
        "step": 7,
        "value": 1e-5,
        "threshold": 1e-4,
        "message": "the gradient shrinks.",
        "advice": "add skip connections.",
    }
    return Issue(**{**fields, **changes})


def test_a_reading_keeps_four_states_apart():
    """Missing, zero, NaN and Inf come back as themselves."""
    reading = Reading.of("loss", "abcde", [None, 0.0, math.nan, math.inf, -math.inf])
    back = reading.as_dict()
    assert (back["a"], back["b"], back["d"], back["e"]) == (None, 0.0, math.inf, -math.inf)
    assert math.isnan(back["c"])


@pytest.mark.parametrize("value", [0.0, -0.0, 1.5, math.nan, math.inf, -math.inf, 1e300, -1e300, 1e-300, 5e-46, 0.1])
def test_readings_that_are_made_without_copies_are_the_same(value):
    """Bits, what is missing, and that nothing can be written to are those of the constructor."""
    wide = np.array([value, 2.0])
    for present in (np.array([True, True]), np.array([True, False]), np.array([False, True])):
        made = Reading("m", ("a", "b"), wide, present)
        owned = Reading.owned("m", ("a", "b"), to_float32(wide), present.copy())
        assert owned == made
        assert not owned.values.flags.writeable
        assert not owned.present.flags.writeable
    run = Reading.run("m", value)
    assert run == Reading("m", ("",), np.array([value]), np.array([True]))
    assert not run.values.flags.writeable
    assert not run.present.flags.writeable
    for copied in (run, pickle.loads(pickle.dumps(run)), copy.deepcopy(run)):
        assert copied == run
        assert struct.pack("f", copied.number) == copied.values.tobytes() == made_alone(value).values.tobytes()
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        _ = run.nothing_of_the_kind


def made_alone(value):
    return Reading("m", ("",), np.array([value]), np.array([True]))


def test_a_number_is_what_a_metric_of_the_whole_run_has():
    """Neither a missing value nor one of a layer is the number of a reading."""
    assert Reading.of("m", ("",), [2.5]).number == 2.5
    assert Reading.of("m", ("",), [None]).number is None
    assert Reading.of("m", ("a",), [2.5]).number is None


def test_readings_compare_bit_for_bit():
    """NaN equals NaN, zero differs from missing and from minus zero, and equal readings hash alike."""
    assert Reading.run("loss", math.nan) == Reading.run("loss", -math.nan)
    assert hash(Reading.run("loss", math.nan)) == hash(Reading.run("loss", math.nan))
    assert Reading.of("loss", ("",), [None]) != Reading.of("loss", ("",), [0.0])
    assert Reading.run("loss", 0.0) != Reading.run("loss", -0.0)
    assert Reading.run("loss", 1.0) != "loss"


def test_a_reading_cannot_be_changed():
    """Neither its fields nor its arrays, nor through the array it was made from."""
    mine = np.ones(2, dtype=np.float32)
    reading = Reading.of("loss", ("a", "b"), mine)
    mine[0] = 5.0
    assert reading.values.tolist() == [1.0, 1.0]
    with pytest.raises(ValueError, match="read-only"):
        reading.values[0] = 2.0
    with pytest.raises(FrozenInstanceError):
        reading.metric = "x"


def test_what_is_missing_is_zero_inside():
    """A value under a False mask has no meaning and is stored as zero, so that equality means something."""
    first = Reading("loss", ("a",), np.array([3.0]), np.array([False]))
    assert first == Reading.of("loss", ("a",), [None])


@pytest.mark.parametrize(
    ("values", "present"), [([1.0], [True, True]), ([1.0, 2.0, 3.0], [True] * 3), ([[1.0], [2.0]], [True, True])]
)
def test_a_reading_of_the_wrong_length_is_refused(values, present):
    """The message names the metric and both shapes."""
    with pytest.raises(ArgumentError, match=r"Reading 'loss' needs one value per site; got 2 sites"):
        Reading("loss", ("a", "b"), np.array(values), np.array(present))


def test_to_float32_of_the_ends_of_the_range():
    """Beyond the range finite stays finite, below it non-zero stays non-zero; float32 input is copied."""
    ends = to_float32([1e300, -1e300, 1e-300, -1e-300, 0.0, -0.0])
    assert np.isfinite(ends).all()
    assert (ends[:4] != 0).all()
    assert np.signbit(ends).tolist() == [False, True, False, True, False, True]
    narrow = np.array([1.0, np.nan], dtype=np.float32)
    assert to_float32(narrow) is not narrow
    assert to_float32([]).shape == (0,)
    assert to_float32([[1.0]]).shape == (1, 1)


def test_a_histogram_needs_one_more_edge_than_counts():
    """The message names the site and both shapes; equal histograms are equal."""
    with pytest.raises(ArgumentError, match="Histogram of 'a' needs one more edge than counts"):
        Histogram("parameter.weight", "a", np.array([0.0, 1.0]), np.array([1, 2]))
    first, second = (Histogram("parameter.weight", "a", np.array([0.0, 1.0]), np.array([1])) for _ in range(2))
    assert first == second
    assert hash(first) == hash(second)
    assert first != Histogram("parameter.weight", "a", np.array([0.0, 1.0]), np.array([1]), nonfinite=1)
    assert first != 3


def test_severities_are_ordered_and_types_print_bare():
    """The worst of several is their max."""
    assert max(Severity.LOW, Severity.CRITICAL, Severity.HIGH) is Severity.CRITICAL
    assert f"{IssueType.DEAD}" == "DEAD"


def test_an_issue_says_where_since_when_and_what_to_do():
    """The one-line form names everything, with the number of further layers and the step it healed at."""
    assert str(issue()) == (
        "[HIGH] VANISHING in blocks.0 since step 7: the gradient shrinks. Fix: add skip connections."
    )
    long = str(issue(layer="", layers=("", "a", "b"), healed_step=9))
    assert long.startswith("[HIGH] VANISHING in whole model (+2 more) since step 7 until step 9:")
    assert issue().layers == ("blocks.0",)
    assert issue().open
    assert "in blocks.0 since step 7, or up to 1 step before: " in str(issue(before=1))
    assert "in blocks.0 since step 7, or up to 5 steps before: " in str(issue(before=5))
    assert not issue(healed_step=9).open
    assert issue().key == ("VANISHING", "blocks.0", 7)


def test_issues_compare_with_nan():
    """Two issues about NaN are the same."""
    assert issue(value=math.nan) == issue(value=math.nan)
    assert issue(value=math.nan) != issue(value=1.0)
    assert issue() != 3
    assert hash(issue()) == hash(issue())


def test_a_record_sorts_its_readings_and_finds_them():
    """Readings come in the order of their names; values are found by metric and site, ``None`` when missing."""
    record = StepRecord(1, 2.0, (Reading.run("loss", 3.0), Reading.of("block.gain", ("a", "b"), [None, 2.0])))
    assert [r.metric for r in record.readings] == ["block.gain", "loss"]
    assert record.value("loss") == 3.0
    assert record.value("block.gain", "a") is None
    assert record.value("block.gain", "b") == 2.0
    assert record.value("block.gain", "c") is None
    assert record.value("overhead") is None
    assert record.get("overhead") is None
    same = StepRecord(1, 2.0, tuple(reversed(record.readings)))
    assert record == same
    assert hash(record) == hash(same)
    assert record != StepRecord(2, 2.0, record.readings)
    assert record != 3


def test_a_record_holds_each_metric_once():
    """Two readings of one metric are refused by name."""
    with pytest.raises(ArgumentError, match=r"StepRecord 4 holds \['loss'\] twice"):
        StepRecord(4, 0.0, (Reading.run("loss", 1.0), Reading.run("loss", 2.0)))


@pytest.mark.parametrize(
    ("value", "form"), [(1.5, 1.5), (None, None), (math.nan, "NaN"), (math.inf, "Infinity"), (-math.inf, "-Infinity")]
)
def test_numbers_survive_strict_json(value, form):
    """Non-finite numbers are strings, missing is null."""
    assert number_to_json(value) == form
    back = number_from_json(json.loads(json.dumps(number_to_json(value), allow_nan=False)))
    assert str(back) == str(value)


def test_issues_and_runs_survive_strict_json():
    """Every field comes back, NaN and None included."""
    for original in (issue(), issue(value=math.nan, threshold=math.inf, layers=("a", "b"), healed_step=12)):
        assert issue_from_json(json.loads(json.dumps(issue_to_json(original), allow_nan=False))) == original
    info = RunInfo("1-0", 1.5, "Net", 10, ("a", "b"), 1, 2, {"every": 1}, {"torch": "2"})
    assert info_from_json(json.loads(json.dumps(info_to_json(info), allow_nan=False))) == info
