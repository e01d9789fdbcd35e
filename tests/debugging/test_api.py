"""The debugging API: what it answers, who may change what, and that summaries are whole while training runs."""

import json
import logging
import math
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from starlette.testclient import TestClient
from torch import nn

from gradflow_export import (
    ArgumentError,
    ArgumentTypeError,
    DebugLevel,
    DiffusionModelDebugger,
    PyTorchDebugger,
    StorageError,
    TrainingDebugger,
)
from gradflow_export.debugging.service.api import create_app, serve, serving

TOKEN = "a-token-of-some-length"
LOCAL = "http://127.0.0.1:8008"
HOLDER = {"Authorization": f"Bearer {TOKEN}"}


@pytest.fixture
def debuggers():
    """Three debuggers that have seen something."""
    training, diffusion, general = TrainingDebugger(), DiffusionModelDebugger(), PyTorchDebugger()
    model = nn.Linear(2, 1)
    model(torch.ones(1, 2)).sum().backward()
    for step in range(4):
        training.monitor_training_step(model, math.nan if step == 3 else 1.0, step)
    diffusion.monitor_diffusion_step(model, 0, torch.tensor([1.0, math.inf]))
    general.analyze_tensor(torch.tensor([math.nan]), "x")
    general.analyze_tensor(torch.ones(2), "y")
    return training, diffusion, general


@pytest.fixture
def client(debuggers):
    """A client of an application whose token is known."""
    return TestClient(create_app(*debuggers, token=TOKEN), base_url=LOCAL)


def test_the_summary_is_matched_key_for_key(client):
    """The three debuggers answer with the keys of the guide, and no others."""
    assert client.get("/training-logs/debug/summary").json() == {
        "training_debugger": {
            "total_anomalies": 1,
            "debug_history_length": 4,
            "total_steps": 4,
            "anomaly_rate": 0.25,
            "gradient_explosion_rate": 0.0,
        },
        "diffusion_debugger": {"total_anomalies": 1, "debug_history_length": 1},
        "general_debugger": {"total_anomalies": 1, "debug_history_length": 2},
    }


def test_the_training_summary_is_matched_key_for_key(client):
    """Counts and rates of steps."""
    assert client.get("/training-logs/debug/training/summary").json() == {
        "total_steps": 4,
        "anomaly_steps": 1,
        "gradient_explosions": 0,
        "gradient_vanishing": 0,
        "loss_anomalies": 1,
        "anomaly_rate": 0.25,
        "loss_anomaly_rate": 0.25,
        "gradient_explosion_rate": 0.0,
        "gradient_vanishing_rate": 0.0,
    }


@pytest.mark.parametrize("level", list(DebugLevel))
def test_a_level_is_set_for_all(client, debuggers, level):
    """Whoever holds the token sets the level."""
    answer = client.post(f"/training-logs/debug/level/{level.value}", headers=HOLDER)
    assert (answer.status_code, answer.json()) == (200, {"level": level.value})
    assert {debugger.level for debugger in debuggers} == {level}


def test_an_unknown_level_is_refused(client, debuggers):
    """422 names the levels, and nothing changes."""
    answer = client.post("/training-logs/debug/level/loud", headers=HOLDER)
    assert answer.status_code == 422
    assert answer.json() == {"error": "expected one of basic, advanced, extreme; got 'loud'; choose one of them."}
    assert {debugger.level for debugger in debuggers} == {DebugLevel.BASIC}


def test_clear_begins_anew(client):
    """After clearing all counts are 0."""
    assert client.post("/training-logs/debug/clear", headers=HOLDER).status_code == 200
    summary = client.get("/training-logs/debug/summary").json()
    assert {value for part in summary.values() for value in part.values()} == {0}


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "Bearer",
        "Bearer wrong",
        f"Basic {TOKEN}",
        f"Bearer {TOKEN}x",
        f"Bearer {TOKEN[:-1]}",
        "Bearer \u00fc\u00fc",
    ],
)
@pytest.mark.parametrize("path", ["clear", "level/basic", "level/loud"])
def test_nobody_changes_anything_without_the_token(client, debuggers, path, header):
    """A missing or wrong token is refused before anything else is looked at, and the reply holds no token."""
    headers = {} if header is None else {"Authorization": header.encode()}
    answer = client.post(f"/training-logs/debug/{path}", headers=headers)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert TOKEN not in answer.text
    assert answer.json()["error"].startswith("expected the header 'Authorization: Bearer <token>', got ")
    assert debuggers[0].get_debug_summary()["total_steps"] == 4


def test_changing_by_get_and_unknown_paths_are_refused(client):
    """A link cannot change anything."""
    assert client.get("/training-logs/debug/clear", headers=HOLDER).status_code == 405
    assert client.get("/training-logs/debug/nothing").status_code == 404
    assert "error" in client.get("/training-logs/debug/nothing").json()


def test_health_and_metrics(client):
    """Prometheus reads the counts of each debugger."""
    assert client.get("/health").json() == {"status": "ok"}
    answer = client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    lines = answer.text.splitlines()
    assert 'gradflow_debug_anomalies_total{debugger="training_debugger"} 1.0' in lines
    assert 'gradflow_debug_history_length{debugger="general_debugger"} 2.0' in lines
    assert 'gradflow_debug_level{debugger="diffusion_debugger",level="basic"} 1.0' in lines
    assert "gradflow_training_steps_total 4.0" in lines
    assert TOKEN not in answer.text


def test_a_token_is_made_and_written_to_the_console_once(capsys, monkeypatch, caplog):
    """Without a token one is made; it goes to the console alone, and works."""
    monkeypatch.delenv("GRADFLOW_API_TOKEN", raising=False)
    with caplog.at_level(logging.DEBUG):
        client = TestClient(create_app(), base_url=LOCAL)
        printed = capsys.readouterr()
        token = printed.err.partition("Bearer ")[2].rstrip("'\n")
        assert printed.err.count("Bearer") == 1
        assert len(token) >= 32
        answer = client.post("/training-logs/debug/clear", headers={"Authorization": f"Bearer {token}"})
    assert answer.status_code == 200
    assert token not in caplog.text + answer.text + printed.out
    create_app()
    assert token not in capsys.readouterr().err


def test_the_environment_gives_the_token(capsys, monkeypatch):
    """A token in the environment is used and not written anywhere."""
    monkeypatch.setenv("GRADFLOW_API_TOKEN", TOKEN)
    client = TestClient(create_app(), base_url=LOCAL)
    assert client.post("/training-logs/debug/clear", headers=HOLDER).status_code == 200
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"token": "short"}, ArgumentError, "at least 16 ASCII characters"),
        ({"token": "with a space in it, long"}, ArgumentError, "without spaces"),
        ({"token": 5}, ArgumentTypeError, "token must be a string"),
        ({"training_debugger": PyTorchDebugger()}, ArgumentTypeError, "must be a TrainingDebugger"),
    ],
)
def test_bad_arguments_are_told(arguments, error, words):
    """What cannot be used raises when the application is made."""
    with pytest.raises(error, match=words):
        create_app(**arguments)


@pytest.mark.parametrize(("host", "port"), [("127.0.0.1", 70000), ("127.0.0.1", True), ("", 8008)])
def test_a_bad_address_is_told(host, port):
    """Before anything listens."""
    with pytest.raises(ArgumentError, match=r"host must|port must"):
        serve(create_app(token=TOKEN), host, port)


def test_without_the_packages_it_says_what_to_install():
    """The error holds the pip command."""
    code = "import sys; sys.modules['starlette'] = None; import gradflow_export.debugging.service.api"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "pip install 'gradflow-export[api]'" in done.stderr


def test_a_taken_port_is_told():
    """Two servers cannot listen at one place."""
    app = create_app(token=TOKEN)
    with serving(app, port=0) as address:
        taken = serving(app, port=int(address.rpartition(":")[2]))
        with pytest.raises(StorageError, match="expected a free port"):
            taken.__enter__()


def test_two_hundred_requests_while_training_see_whole_summaries(debuggers):
    """Over real HTTP: no error, and in every reply counts, rates and history belong to one moment."""
    training = debuggers[0]
    training.clear_debug_history()
    model = nn.Linear(2, 1)
    model(torch.ones(1, 2)).sum().backward()
    stop = threading.Event()

    def train():
        step = 0
        while not stop.is_set():
            training.monitor_training_step(model, math.nan if step % 3 == 0 else 1.0, step)
            step += 1

    def ask(address, number):
        path = "/metrics" if number % 10 == 9 else f"/training-logs/debug{'/training' * (number % 2)}/summary"
        with urllib.request.urlopen(address + path, timeout=800) as answer:
            return number, answer.status, answer.read()

    with serving(create_app(*debuggers, token=TOKEN), port=0) as address, ThreadPoolExecutor(200) as pool:
        assert address.startswith("http://127.0.0.1:")
        thread = threading.Thread(target=train)
        thread.start()
        try:
            replies = list(pool.map(lambda number: ask(address, number), range(200)))
        finally:
            stop.set()
            thread.join()
    assert {status for _, status, _ in replies} == {200}
    whole = [json.loads(body) for number, _, body in replies if number % 10 != 9]
    for summary in whole:
        told = summary.get("training_debugger", summary)
        steps, wrong = told["total_steps"], told.get("total_anomalies", told.get("anomaly_steps"))
        assert wrong == -(-steps // 3)
        assert told["anomaly_rate"] == (wrong / steps if steps else 0)
        assert told.get("debug_history_length", min(steps, 100)) == min(steps, 100)
        assert told.get("loss_anomalies", wrong) == wrong
    assert len({summary.get("training_debugger", summary)["total_steps"] for summary in whole}) > 10


PAGES = ("/training-logs/debug/summary", "/training-logs/debug/training/summary", "/health", "/metrics")

OWN = (
    "127.0.0.1", "127.0.0.1:8008", "localhost", "LOCALHOST:1", "localhost.", "127.8.9.1", "[::1]", "[::1]:8008",
    "[::ffff:127.0.0.1]:80", "gpu7.lan", "GPU7.lan:8008", "10.1.2.3", "[fe80::1]:9",
)  # fmt: skip

FOREIGN = (
    "evil.example", "evil.example:8008", "localhost.evil.example", "127.0.0.1.evil.example", "testserver", "gpu7",
    "10.1.2.4", "0.0.0.0", "2130706433", "127.1", "[::2]", "127.0.0.1.nip.io:8008", "localhostx", "x.localhost",
)  # fmt: skip


@pytest.fixture
def served(debuggers):
    """A client of an application that has further names."""
    app = create_app(*debuggers, token=TOKEN, hosts=["gpu7.lan", "10.1.2.3", "fe80::1"])
    return TestClient(app, base_url=LOCAL)


@pytest.mark.parametrize("page", PAGES)
def test_only_names_of_its_own_are_answered(served, page):
    """A page under a name of its own that leads to this machine (DNS rebinding) reads nothing, whatever it asks for."""
    for host in OWN:
        assert served.get(page, headers={"Host": host}).status_code == 200, host
    for host in FOREIGN:
        refused = served.get(page, headers={"Host": host})
        assert refused.status_code == 403, host
        assert f"got {host!r}; use http://127.0.0.1" in refused.json()["error"]
        assert "hosts=[name]" in refused.json()["error"]


@pytest.mark.parametrize(
    "host", ["", "a b", "user@127.0.0.1", "127.0.0.1:port", "127.0.0.1/x", "[::1", "http://localhost"]
)
def test_a_host_that_is_none_is_refused(served, host):
    """What is no name and no address is a bad request."""
    refused = served.get("/health", headers={"Host": host})
    assert refused.status_code == 400
    assert "expected one header 'Host'" in refused.json()["error"]


def test_a_foreign_host_changes_nothing_even_with_the_token(served, debuggers):
    """The host is looked at first."""
    for path in ("/training-logs/debug/level/extreme", "/training-logs/debug/clear"):
        assert served.post(path, headers={**HOLDER, "Host": "evil.example"}).status_code == 403
    assert {debugger.level for debugger in debuggers} == {DebugLevel.BASIC}
    assert debuggers[0].get_debug_summary()["debug_history_length"] == 4


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "Cross-Site"}, 403),
        ({"Sec-Fetch-Site": "same-origin"}, 200),
        ({"Sec-Fetch-Site": "none"}, 200),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://[::bad"}, 403),
        ({"Origin": "http://127.0.0.1:8008"}, 200),
        ({"Origin": "http://localhost:3000"}, 200),
        ({"Origin": "https://gpu7.lan"}, 200),
    ],
)
def test_what_a_browser_sends_for_another_site_is_refused(served, headers, status):
    """By what browsers say of where a request comes from."""
    assert served.get("/training-logs/debug/summary", headers=headers).status_code == status
    path = "/training-logs/debug/level/advanced"
    assert served.post(path, headers={**HOLDER, **headers}).status_code == status


def test_a_server_answers_under_the_address_it_was_told_to_listen_at(debuggers):
    """Over a real socket: the address that is yielded works, a foreign name does not."""
    with serving(create_app(*debuggers, token=TOKEN), port=0) as address:
        assert urllib.request.urlopen(f"{address}/health").status == 200
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(urllib.request.Request(f"{address}/health", headers={"Host": "evil.example"}))
    assert refused.value.code == 403
    refused.value.close()


@pytest.mark.parametrize(
    ("hosts", "error", "words"),
    [
        ("gpu7.lan", ArgumentTypeError, "hosts must be a list of names, got 'gpu7.lan'"),
        ([7], ArgumentTypeError, "a host must be a name or an address, got 7"),
        (["http://gpu7.lan"], ArgumentError, "without scheme, got 'http://gpu7.lan'"),
    ],
)
def test_hosts_that_are_none_are_told(hosts, error, words):
    """At construction."""
    with pytest.raises(error, match=words):
        create_app(token=TOKEN, hosts=hosts)
