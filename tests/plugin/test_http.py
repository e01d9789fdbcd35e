"""The routes: every answer is data or a JSON error, and never a traceback."""

import gzip
import logging

import numpy as np
import pytest
from tensorboard.data import provider as base_provider

from tensorboard_plugin_gradflow.plugin import _shrinks

MORE = ("/moment?run=a&metric=loss", "/histograms?run=a", "/summary", "/training/summary?run=a")


@pytest.fixture
def client(tmp_path, logs, open_client):
    """A client over one small run."""
    logs.write_run(tmp_path / "a", logs.plain_records(range(1, 9)))
    return open_client(tmp_path)


@pytest.mark.parametrize("route", ["/runs", "/meta?run=a", "/issues?run=a", "/catalog", *MORE])
def test_json_routes_answer_json(client, route):
    """Each names the version of the form."""
    response = client.get(route)
    assert response.status_code == 200
    assert response.json["v"] == 1


@pytest.mark.parametrize(
    ("route", "status"),
    [
        ("/meta", 400),
        ("/meta?run=nobody", 404),
        ("/issues?run=../../etc/passwd", 404),
        ("/moment?run=a", 400),
        ("/moment?run=a&metric=loss&step=x", 400),
        ("/moment?run=a&metric=nothing", 404),
        ("/moment?run=b&metric=loss", 404),
        ("/histograms", 400),
        ("/histograms?run=a&site=w", 400),
        ("/histograms?run=a&metric=parameter.gradient", 404),
        ("/histograms?run=a&metric=parameter.gradient&site=w", 404),
        ("/histograms?run=a&metric=m&site=w&most=x", 400),
        ("/summary?run=nobody", 404),
        ("/training/summary?run=nobody", 404),
        ("/series?run=a", 400),
        ("/series?run=a&metric=nothing", 404),
        ("/series?run=a&metric=loss&first=x", 400),
        ("/series?run=a&metric=loss&first=99999999999999999999", 400),
        ("/series?run=a&metric=loss&first=5&last=1", 400),
        ("/series?run=a&metric=loss&columns=-1", 400),
        ("/series?run=a&metric=loss&reduce=", 400),
        ("/series?run=a&metric=block.gain&site=%3Cimg%3E", 404),
    ],
)
def test_bad_requests_get_a_json_error(client, route, status):
    """The error says what was expected, and holds no traceback."""
    response = client.get(route)
    assert response.status_code == status
    assert response.json["error"]
    assert b"Traceback" not in response.data


def test_other_methods_are_refused(client):
    """The panel only reads."""
    assert client.post("/runs").status_code == 405


def test_binary_answers_are_compressed_when_the_client_accepts_it(client, decode):
    """The same bytes either way."""
    route = "/series?run=a&metric=loss"
    packed = client.get(route, headers={"Accept-Encoding": "gzip, br"})
    plain = client.get(route)
    assert packed.headers["Content-Encoding"] == "gzip"
    assert "Content-Encoding" not in plain.headers
    assert gzip.decompress(packed.data) == plain.data
    assert decode(plain.data).metric == "loss"


def test_noise_is_not_compressed():
    """It takes the server longer than the wire; numbers that repeat are."""
    assert not _shrinks(np.random.default_rng(0).standard_normal(50_000).astype(np.float32).tobytes())
    assert _shrinks(np.repeat(np.arange(100, dtype=np.float32), 500).tobytes())


def test_the_panel_is_served(client):
    """Its code comes as a script."""
    response = client.get("/static/index.js")
    assert response.status_code == 200
    assert response.mimetype == "text/javascript"


def test_a_failing_provider_is_a_short_answer_and_a_line_in_the_log(open_client, tmp_path, caplog):
    """The browser learns that it failed; the log says why."""

    class Broken(base_provider.DataProvider):
        def list_plugins(self, ctx=None, *, experiment_id):
            return []

        def list_runs(self, ctx=None, *, experiment_id):
            return []

        def list_scalars(self, *args, **more):
            return {}

        read_scalars = read_last_scalars = list_scalars

        def list_tensors(self, *args, **more):
            raise RuntimeError("the disk is on fire")

    with caplog.at_level(logging.ERROR):
        response = open_client(tmp_path, Broken()).get("/runs")
    assert response.status_code == 500
    assert "fire" not in response.json["error"]
    assert "the disk is on fire" in caplog.text


def test_tensors_of_a_newer_version_are_counted_and_left_out(client, monkeypatch):
    """An old panel says so instead of guessing."""
    monkeypatch.setattr("tensorboard_plugin_gradflow.index.FORMAT", 0)
    run = client.get("/runs").json["runs"][0]
    assert run["too_new"] > 0
    assert run["first"] is None


def test_the_requests_of_a_gesture_list_the_tensors_once(tmp_path, logs, open_client, read_anew):
    """What /runs found serves those that follow."""
    logs.write_run(tmp_path / "a", logs.plain_records(range(1, 9)))
    provider = read_anew(tmp_path)
    client = open_client(tmp_path, provider)
    for route in ("/runs", "/meta?run=a", "/issues?run=a", "/series?run=a&metric=loss", "/moment?run=a&metric=loss"):
        assert client.get(route).status_code == 200
    assert provider.listed == 1


def test_nobody_gets_less_than_the_list_of_runs_told(tmp_path, logs, open_client, read_anew, decode):
    """A client keeps answers under the version it was told, so that an older one would stay for long."""
    logs.write_run(tmp_path / "a", logs.plain_records(range(1, 9)))
    client = open_client(tmp_path, read_anew(tmp_path))
    versions, lasts = [], []
    for start in (9, 17):
        versions.append(client.get("/runs").json["runs"][0]["version"])
        lasts.append(decode(client.get("/series?run=a&metric=loss").data).last[-1])
        logs.write_run(tmp_path / "a", logs.plain_records(range(start, start + 8)), start=60 * start)
    assert versions[0] != versions[1]
    assert lasts == [8, 16]
