"""Histograms of a parameter over time, as written."""

import numpy as np
import pytest

from gradflow_export.records.step_record import Histogram, StepRecord
from tensorboard_plugin_gradflow.errors import RequestError
from tensorboard_plugin_gradflow.histograms import list_histograms, read_all_histograms, read_histograms

METRIC = "parameter.gradient"


@pytest.fixture
def source(tmp_path, logs, open_source):
    """A run with a histogram of two parameters every tenth step, which was resumed at step 80."""
    logs.write_run(tmp_path / "a", records(logs, range(10, 101, 10)))
    logs.write_run(tmp_path / "a", records(logs, range(80, 91, 10), nonfinite=7), start=600)
    return open_source(tmp_path)


def records(logs, steps, nonfinite=0):
    """Return records whose histograms say their step in the counts."""
    out = []
    for step in steps:
        both = [Histogram(METRIC, site, np.array([-1.0, 0.0, 1.0]), np.array([step, 1]), nonfinite) for site in "vw"]
        out.append(StepRecord(step, logs.EPOCH + step, histograms=tuple(both)))
    return out


def test_every_site_is_listed(source):
    """The selector knows what there is."""
    assert list_histograms(source, "a")["items"] == [{"metric": METRIC, "site": site} for site in "vw"]


def test_histograms_come_in_step_order_and_later_sessions_count(source):
    """Counts, edges and the number of NaN and Inf are those written."""
    answer = read_histograms(source, "a", METRIC, "w")
    assert [item["step"] for item in answer["histograms"]] == [10, 20, 30, 40, 50, 60, 70, 80, 90]
    assert [item["counts"][0] for item in answer["histograms"]] == [10, 20, 30, 40, 50, 60, 70, 80, 90]
    assert [item["nonfinite"] for item in answer["histograms"]] == [0] * 7 + [7] * 2
    assert answer["histograms"][0]["edges"] == [-1.0, 0.0, 1.0]


def test_a_range_and_a_bound_choose_evenly_and_keep_the_last(source):
    """Nothing is left out unsaid: the total is told."""
    answer = read_histograms(source, "a", METRIC, "w", 20, 85, 3)
    assert [item["step"] for item in answer["histograms"]] == [20, 50, 80]
    assert answer["total"] == 7
    assert [item["step"] for item in read_histograms(source, "a", METRIC, "w", most=1)["histograms"]] == [90]


def test_all_sites_come_in_one_answer(source):
    """Each as it comes alone, in the order of writing; an unknown metric is refused."""
    answer = read_all_histograms(source, "a", METRIC, 20, 85, 3)
    alone = [read_histograms(source, "a", METRIC, site, 20, 85, 3) for site in "vw"]
    assert answer["sites"] == [{name: one[name] for name in ("site", "total", "histograms")} for one in alone]
    with pytest.raises(RequestError, match="has no histograms"):
        read_all_histograms(source, "a", "parameter.weight")


@pytest.mark.parametrize(
    ("query", "status"),
    [
        ({"metric": "parameter.weight"}, 404),
        ({"site": "nobody"}, 404),
        ({"most": 0}, 400),
        ({"most": 257}, 400),
        ({"first": 9, "last": 1}, 400),
    ],
)
def test_bad_requests_are_refused(source, query, status):
    """Unknown is 404, out of range is 400."""
    with pytest.raises(RequestError) as caught:
        read_histograms(source, "a", **{"metric": METRIC, "site": "w", **query})
    assert caught.value.status == status


def test_a_run_without_histograms_lists_none(tmp_path, logs, open_source):
    """Nothing written is an empty list."""
    logs.write_run(tmp_path / "b", logs.plain_records(range(1, 3)))
    assert list_histograms(open_source(tmp_path), "b")["items"] == []
