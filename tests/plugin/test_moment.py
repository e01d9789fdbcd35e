"""The health table's numbers: one step, exactly as written."""

import math

import numpy as np
import pytest

from gradflow_export.records.step_record import Reading, StepRecord
from tensorboard_plugin_gradflow.errors import RequestError
from tensorboard_plugin_gradflow.moment import read_moment


def test_values_are_those_of_the_last_reading_at_or_before_the_step(tmp_path, logs, open_source):
    """A metric that is read every third step shows its own last reading, run-level ones too."""
    records = logs.plain_records(range(1, 300))
    every_third = logs.plain_records(range(1, 300, 3), metric="block.log_gain")
    merged = [
        StepRecord(r.step, r.wall_time, r.readings + (every_third[i // 3].readings[:1] if i % 3 == 0 else ()))
        for i, r in enumerate(records)
    ]
    logs.write_run(tmp_path / "a", merged)
    found = read_moment(open_source(tmp_path), "a", 200, ["block.gain", "block.log_gain", "loss"])["metrics"]
    assert found["block.gain"] == {"step": 200, "sites": ["a", "b"], "values": [200.0, 200.125]}
    assert found["block.log_gain"] == {"step": 199, "sites": ["a", "b"], "values": [199.0, 199.125]}
    assert found["loss"] == {"step": 200, "sites": [""], "values": [float(np.float32(1 / 201))]}
    assert read_moment(open_source(tmp_path), "a", None, ["loss"])["metrics"]["loss"]["step"] == 299
    assert read_moment(open_source(tmp_path), "a", 0, ["loss"])["metrics"]["loss"]["step"] is None


def test_zero_missing_nan_and_infinity_stay_apart(tmp_path, logs, open_source):
    """Four states, four answers."""
    reading = Reading.of("block.gain", ("a", "b", "c", "d"), [0.0, None, math.nan, math.inf])
    logs.write_run(tmp_path / "a", [StepRecord(1, logs.EPOCH, (reading,))])
    found = read_moment(open_source(tmp_path), "a", 1, ["block.gain"])["metrics"]["block.gain"]
    assert found["values"] == [0.0, None, "NaN", "Infinity"]


def test_what_a_later_session_undid_is_not_shown(tmp_path, logs, open_source):
    """A step is looked for in the history that counts."""
    logs.write_run(tmp_path / "a", logs.plain_records(range(1, 9)))
    logs.write_run(tmp_path / "a", logs.plain_records(range(5, 7), value=lambda step, site: -step), start=60)
    found = read_moment(open_source(tmp_path), "a", 8, ["block.gain"])["metrics"]["block.gain"]
    assert (found["step"], found["values"]) == (6, [-6.0, -6.0])
    assert read_moment(open_source(tmp_path), "a", 4, ["block.gain"])["metrics"]["block.gain"]["values"][0] == 4.0


@pytest.mark.parametrize(("metrics", "status"), [([], 400), (["loss"] * 17, 400), (["nothing"], 404)])
def test_bad_requests_are_refused(tmp_path, logs, open_source, metrics, status):
    """Too few, too many, unknown."""
    logs.write_run(tmp_path / "a", logs.plain_records(range(1, 3)))
    with pytest.raises(RequestError) as caught:
        read_moment(open_source(tmp_path), "a", 1, metrics)
    assert caught.value.status == status
