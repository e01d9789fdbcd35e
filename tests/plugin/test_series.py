"""Values over time: what was written is what the panel gets."""

import math

import numpy as np
import pytest

from gradflow_export.records.step_record import Reading, StepRecord
from gradflow_export.storage.event_chunks import MISSING_BITS, NAN_BITS
from tensorboard_plugin_gradflow.errors import RequestError
from tensorboard_plugin_gradflow.series import Query, read_series


@pytest.fixture
def read(open_source, decode):
    """Return a function that reads one metric of run "a"."""
    return lambda logdir, *args, **more: decode(read_series(open_source(logdir), "a", Query(*args, **more)))


def test_undecimated_values_are_those_written_bit_for_bit(tmp_path, logs, read):
    """Steps, times and values come back in order over several chunks."""
    logs.write_run(tmp_path / "a", logs.plain_records(range(1, 200), value=lambda step, site: step / 7 + site))
    series = read(tmp_path, "block.gain", columns=4096)
    assert (series.sites, series.width, series.most) == (["a", "b"], 1, 1)
    assert series.first == series.last == list(range(1, 200))
    assert series.wall.tolist() == [logs.EPOCH + step for step in range(1, 200)]
    expected = np.array([[step / 7 + site for step in range(1, 200)] for site in (0, 1)], np.float32)
    assert series.values["extreme"].tobytes() == expected.tobytes()


def test_missing_nan_infinity_and_zero_arrive_as_four_things(tmp_path, logs, read):
    """None of the four states turns into another."""
    sites = ("missing", "nan", "inf", "minus", "zero")
    values = [None, math.nan, math.inf, -math.inf, 0.0]
    logs.write_run(tmp_path / "a", [StepRecord(1, 1.0, (Reading.of("block.log_gain", sites, values),))])
    bits = read(tmp_path, "block.log_gain").values["extreme"].view(np.uint32)[:, 0]
    assert bits.tolist() == [MISSING_BITS, NAN_BITS, 0x7F800000, 0xFF800000, 0]


def test_a_spike_of_one_step_survives_any_zoom(tmp_path, logs, read):
    """The extreme of a column is kept, and the header says how many steps one covers."""
    rows = logs.plain_records(range(1, 2001), sites=("a",), value=lambda step, _: 50.0 if step == 777 else 1.0)
    logs.write_run(tmp_path / "a", rows)
    series = read(tmp_path, "block.gain", columns=10)
    assert series.columns <= 11
    assert (series.width, series.most) == (200, 200)
    assert [value for value in series.values["extreme"][0] if value != 1] == [50.0]
    assert sum(series.readings) == 2000


def test_a_range_is_read_at_full_resolution(tmp_path, logs, read):
    """Both ends belong to the range."""
    logs.write_run(tmp_path / "a", logs.plain_records(range(1, 2001)))
    series = read(tmp_path, "block.gain", first=500, last=509, columns=100)
    assert series.first == list(range(500, 510))


@pytest.mark.parametrize("rows", [1, 3, 64])
def test_what_holds_at_the_beginning_of_a_range_can_be_asked_for(tmp_path, logs, read, rows):
    """The readings before it come first, however far back and in whatever chunk, and columns get no wider by them."""
    steps = [1, 2, 3, 4, *range(500, 1001)]
    logs.write_run(tmp_path / "a", logs.plain_records(steps), rows=rows)
    for first, expected in ((100, [2, 3, 4]), (501, [3, 4, 500]), (2, [1]), (1, [])):
        series = read(tmp_path, "block.gain", first=first, last=first + 9, columns=100, before=3)
        assert series.first[: len(expected)] == expected
        assert (series.width, series.most) == (1, 1)
        assert all(step >= first for step in series.first[len(expected) :])
        plain = read(tmp_path, "block.gain", first=first, last=first + 9, columns=100)
        assert series.first[len(expected) :] == plain.first
        if plain.first:
            assert series.values["extreme"][:, len(expected) :].tolist() == plain.values["extreme"].tolist()


def test_what_a_resumed_session_replaced_holds_nowhere(tmp_path, logs, read):
    """Readings before a range are those that still count."""
    logs.write_run(tmp_path / "a", logs.plain_records(range(1, 100), value=lambda *_: 1.0))
    logs.write_run(tmp_path / "a", logs.plain_records(range(50, 60, 5), value=lambda *_: 2.0), start=200)
    series = read(tmp_path, "block.gain", first=70, last=80, columns=100, before=4)
    assert series.first == [48, 49, 50, 55]
    assert series.values["extreme"][0].tolist() == [1.0, 1.0, 2.0, 2.0]


@pytest.mark.parametrize("sites", [2, 40])
def test_many_small_chunks_and_one_large_one_are_the_same_series(tmp_path, logs, read, sites):
    """Rows of small chunks are joined before they are reduced, here across two sessions that overlap."""
    rng = np.random.default_rng(sites)
    values = rng.standard_normal((700, sites)).astype(np.float32)
    names = tuple(f"s{number:02}" for number in range(sites))
    for name, rows in (("many", 4), ("one", 1024)):
        for start, steps in enumerate((range(500), range(300, 700))):
            records = logs.plain_records(steps, names, value=lambda step, site: values[step, site])
            logs.write_run(tmp_path / name / "a", records, rows=rows, start=3600 * start)
    more = {"columns": 70, "reducers": ("extreme", "min", "max", "mean"), "sites": names[::-1][:30]}
    for metric in ("block.gain", "loss"):
        query = more if metric == "block.gain" else {**more, "sites": ()}
        many, one = (read(tmp_path / name, metric, **query) for name in ("many", "one"))
        assert (many.first, many.last, many.readings) == (one.first, one.last, one.readings)
        assert sum(one.readings) == 700
        for how in ("extreme", "min", "max"):
            assert many.values[how].tobytes() == one.values[how].tobytes()
        assert many.values["mean"] == pytest.approx(one.values["mean"], rel=1e-6)


def test_a_range_without_steps_is_an_empty_series(tmp_path, logs, read):
    """Beyond the end there is nothing, and that is no error."""
    logs.write_run(tmp_path / "a", logs.plain_records(range(1, 20)))
    assert read(tmp_path, "block.gain", first=500, last=900).columns == 0


def test_run_level_metrics_leave_out_steps_at_which_they_were_not_read(tmp_path, logs, read):
    """Not read is not missing: such a step has no reading at all."""
    rows = [StepRecord(step, 1.0, (Reading.run("loss", step),)) for step in (1, 2, 3)]
    rows.append(StepRecord(4, 1.0, (Reading.run("learning_rate", 0.5),)))
    logs.write_run(tmp_path / "a", rows)
    bits = read(tmp_path, "loss").values["extreme"].view(np.uint32)[0]
    assert np.array([1, 2, 3], np.float32).view(np.uint32).tolist() == bits[:3].tolist()
    assert bits[3:].tolist() == [MISSING_BITS]


def test_several_reductions_come_in_the_order_asked(tmp_path, logs, read):
    """One request draws a line and its band."""
    logs.write_run(tmp_path / "a", logs.plain_records(range(100), sites=("a",), value=lambda step, _: float(step)))
    series = read(tmp_path, "block.gain", columns=1, reducers=("mean", "min", "max"))
    assert {name: block[0, 0] for name, block in series.values.items()} == {"mean": 49.5, "min": 0.0, "max": 99.0}


def test_a_later_session_wins_from_its_first_step(tmp_path, logs, read):
    """A run resumed from a checkpoint shows the history that led to the present model."""
    logs.write_run(tmp_path / "a", logs.plain_records(range(1, 101), value=lambda *_: 1.0))
    logs.write_run(tmp_path / "a", logs.plain_records(range(51, 81), value=lambda *_: 2.0), start=600)
    series = read(tmp_path, "block.gain", columns=4096)
    assert series.first == list(range(1, 81))
    assert series.values["extreme"][0].tolist() == [1.0] * 50 + [2.0] * 30


def test_sites_that_come_and_go_are_missing_where_they_were_not(tmp_path, logs, read):
    """A layer added later has no values before."""
    logs.write_run(tmp_path / "a", logs.plain_records(range(1, 4), sites=("a", "b"), value=lambda *_: 1.0))
    logs.write_run(tmp_path / "a", logs.plain_records(range(4, 6), sites=("b", "c"), value=lambda *_: 2.0), start=60)
    series = read(tmp_path, "block.gain")
    present = series.values["extreme"].view(np.uint32) != MISSING_BITS
    assert series.sites == ["b", "c", "a"]
    assert present.sum(axis=1).tolist() == [5, 2, 3]


def test_chosen_sites_come_in_the_order_asked(tmp_path, logs, read):
    """Pinned layers need not be read with all the others."""
    logs.write_run(tmp_path / "a", logs.plain_records(range(1, 4), sites=("a", "b", "c"), value=lambda _, site: site))
    series = read(tmp_path, "block.gain", sites=("c", "a"))
    assert series.values["extreme"][:, 0].tolist() == [2.0, 0.0]


def test_hostile_names_of_layers_come_back_unchanged(tmp_path, logs, read):
    """Names are data, whatever they hold."""
    logs.write_run(tmp_path / "a", logs.plain_records(range(1, 4), sites=logs.HOSTILE))
    assert read(tmp_path, "block.gain").sites == list(logs.HOSTILE)
    assert read(tmp_path, "block.gain", sites=logs.HOSTILE[:1]).sites == [logs.HOSTILE[0]]


def test_validation_steps_do_not_mix_with_training_steps(tmp_path, logs, read):
    """Series show the training phase where the metric was read in it, and another phase otherwise."""
    rows = logs.plain_records(range(1, 4))
    both = (Reading.of("block.gain", ("a", "b"), [9.0, 9.0]), Reading.run("alignment.accuracy", 0.5))
    rows.append(StepRecord(4, 1.0, both, phase="eval"))
    logs.write_run(tmp_path / "a", rows)
    assert read(tmp_path, "block.gain").first == [1, 2, 3]
    assert read(tmp_path, "alignment.accuracy").first == [4]
    assert read(tmp_path, "block.gain", phase="eval").values["extreme"].tolist() == [[9.0], [9.0]]
    with pytest.raises(RequestError) as caught:
        read(tmp_path, "alignment.accuracy", phase="train")
    assert (caught.value.status, "eval" in caught.value.message) == (404, True)


def test_a_truncated_file_is_read_up_to_its_last_whole_chunk(tmp_path, logs, read):
    """What a killed process left behind stays readable."""
    logs.write_run(tmp_path / "a", logs.plain_records(range(1, 257)), rows=64)
    path = next((tmp_path / "a").iterdir())
    path.write_bytes(path.read_bytes()[:-11])
    series = read(tmp_path, "block.gain", columns=4096)
    assert series.first[0] == 1
    assert series.first[-1] >= 192


@pytest.mark.parametrize(
    ("more", "status"),
    [
        ({"metric": "block.gian"}, 404),
        ({"metric": "block.gain", "sites": ("nobody",)}, 404),
        ({"metric": "block.gain", "first": 9, "last": 3}, 400),
        ({"metric": "block.gain", "columns": 0}, 400),
        ({"metric": "block.gain", "columns": 10**9}, 400),
        ({"metric": "block.gain", "reducers": ("median",)}, 400),
    ],
)
def test_what_cannot_be_answered_is_a_request_error(tmp_path, logs, open_source, more, status):
    """Unknown names are 404, unusable arguments 400."""
    logs.write_run(tmp_path / "a", logs.plain_records(range(1, 9)))
    with pytest.raises(RequestError) as caught:
        read_series(open_source(tmp_path), "a", Query(**more))
    assert caught.value.status == status
