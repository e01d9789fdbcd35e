"""The panel without TensorBoard: a server on this machine, one file, and the two commands."""

import base64
import gzip
import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from dataclasses import replace

import numpy as np
import pytest
from werkzeug.test import Client

from gradflow_export.cli import main
from gradflow_export.records.step_record import Histogram, Note, StepRecord
from tensorboard_plugin_gradflow import standalone
from tensorboard_plugin_gradflow.snapshot import render_snapshot


@pytest.fixture
def client(tmp_path, logs):
    """A client of the server's application over one small run."""
    logs.write_run(tmp_path / "a", logs.plain_records(range(1, 9)))
    return Client(standalone.ViewerApp(tmp_path))


def test_the_page_its_code_and_the_data_are_served(client):
    """Everything comes from this server, and the page's policy says so."""
    page = client.get("/")
    assert 'src="boot.js"' in page.text
    assert page.headers["Content-Security-Policy"].startswith("default-src 'self'")
    assert client.get("/boot.js").mimetype == "text/javascript"
    assert client.get("/static/index.js").status_code == 200
    assert client.get("/runs").json["runs"][0]["run"] == "a"
    assert client.get("/moment?run=a&metric=block.gain&step=3").json["metrics"]["block.gain"]["values"] == [3.0, 3.125]


def test_nothing_else_is_served(client):
    """No file system, no other method, no other host name."""
    assert client.get("/../../etc/passwd").status_code == 404
    assert client.get("/static/../plugin.py").status_code == 404
    assert client.post("/runs").status_code == 405
    for host, status in (
        ("evil.example", 403),
        ("localhost.evil.example:6008", 403),
        ("[::1]:6008", 200),
        ("127.0.0.1", 200),
    ):
        assert client.get("/runs", headers={"Host": host}).status_code == status


def test_new_steps_and_new_runs_appear(client, tmp_path, logs, monkeypatch):
    """The list of runs looks at the folder again, but not with every request."""
    logs.write_run(tmp_path / "b", logs.plain_records(range(1, 5)))
    assert len(client.get("/runs").json["runs"]) == 1
    monkeypatch.setattr(standalone, "_RELOAD_SECONDS", 0.0)
    assert {run["run"] for run in client.get("/runs").json["runs"]} == {"a", "b"}


def kept(page):
    """Return the data that a snapshot carries."""
    return json.loads(re.search(r'id="gradflow-snapshot">(.*?)</script>', page, re.DOTALL)[1])


def test_a_snapshot_carries_what_was_written_and_loads_nothing(tmp_path, logs, decode):
    """Values, issues and histograms come back from the one file; names of layers cannot leave their place."""
    bins = Histogram("parameter.gradient", "w", np.array([0.0, 1.0]), np.array([3]), 2)
    issue = logs.issue(layer="</script><script>alert(1)</script>")
    last = StepRecord(9, logs.EPOCH + 9, histograms=(bins,), issues=(issue,))
    logs.write_run(tmp_path / "a", [*logs.plain_records(range(1, 9), sites=logs.HOSTILE), last])
    page = render_snapshot(standalone.open_source(tmp_path), "<b>title</b>")
    assert page.count("<script") == page.count("</script>") == 2
    assert "<title>&lt;b&gt;title&lt;/b&gt;</title>" in page
    assert "default-src 'none'" in page
    run = kept(page)["kept"]["a"]
    series = decode(gzip.decompress(base64.b64decode(run["series"]["block.gain"])))
    assert series.sites == list(logs.HOSTILE)
    assert series.values["extreme"][1].tolist() == [step + 0.125 for step in range(1, 9)]
    assert run["moment"]["block.gain"]["values"][0] == 8.0
    assert run["issues"][0]["layer"] == issue.layer
    assert run["histograms"][0]["histograms"] == [{"step": 9, "edges": [0.0, 1.0], "counts": [3], "nonfinite": 2}]


def test_a_snapshot_has_the_remarks_the_model_and_the_table_of_runs(tmp_path, logs):
    """What the server answers about annotations, architecture and overview lies in the file unchanged."""
    modules = [
        {"name": name, "kind": "Linear", "parent": parent, "order": 0, "calls": 1, "parameters": 3, "trainable": 3,
         "own": 3, "file": None, "line": None, "block": False, "shared": None}
        for name, parent in (("", None), ("up", 0))
    ]  # fmt: skip
    notes = (
        Note("architecture", "", 1, {"modules": modules, "total": 2}),
        Note("mark", "longer sequences", 4, {}),
    )
    first, *rest = logs.plain_records(range(1, 9))
    logs.write_run(tmp_path / "a", [replace(first, notes=notes), *rest])
    held = kept(render_snapshot(standalone.open_source(tmp_path), "t", logdir=tmp_path))
    run, client = held["kept"]["a"], Client(standalone.ViewerApp(tmp_path))
    assert run["annotations"] == client.get("/annotations?run=a").json["annotations"]
    assert [item["text"] for item in run["annotations"]] == ["longer sequences"]
    assert run["architecture"] == client.get("/architecture?run=a").json["modules"]
    assert [module["name"] for module in run["architecture"]] == ["", "up"]
    assert held["overview"] == client.get("/overview").json


def test_the_command_writes_a_snapshot(tmp_path, logs, capsys):
    """It says where and how large."""
    logs.write_run(tmp_path / "runs" / "a", logs.plain_records(range(1, 9)))
    out = tmp_path / "out.html"
    assert main(["snapshot", str(tmp_path / "runs"), str(out)]) == 0
    assert "MB" in capsys.readouterr().out
    assert kept(out.read_text(encoding="utf-8"))["runs"][0]["last"] == 8


def test_what_cannot_be_shown_is_said_in_one_line(tmp_path, logs, capsys):
    """No folder, no run, no place to write, no free port: exit code 2, no traceback."""
    logs.write_run(tmp_path / "a", logs.plain_records(range(1, 3)))
    (tmp_path / "empty").mkdir()
    taken = standalone.make_server(tmp_path, 0)
    calls = (
        ["view", str(tmp_path / "nowhere")],
        ["view", str(tmp_path), "--port", str(taken.port)],
        ["snapshot", str(tmp_path / "nowhere"), "out.html"],
        ["snapshot", str(tmp_path / "empty"), "out.html"],
        ["snapshot", str(tmp_path), str(tmp_path / "no" / "folder" / "out.html")],
    )
    for call in calls:
        assert main(call) == 2
        assert capsys.readouterr().err.count("\n") == 1
    taken.server_close()
    with pytest.raises(SystemExit):
        main(["view", str(tmp_path), "--port", "x"])


def test_the_command_serves_on_loopback_without_torch_until_it_is_stopped(tmp_path, logs):
    """A fresh process answers at the address it prints, and ends quietly on Ctrl+C."""
    logs.write_run(tmp_path / "a", logs.plain_records(range(1, 3)))
    # A process begun in the background of a shell, as all of a CI may be, ignores Ctrl+C unless it says otherwise.
    heard = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    code = "import sys; from gradflow_export.cli import main; r = main(sys.argv[1:]); assert 'torch' not in sys.modules; sys.exit(r)"
    command = [sys.executable, "-c", f"{heard}; {code}", "view", str(tmp_path), "--port", "0"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ)
    ) as process:
        address = re.search(r"http://localhost:\d+/", process.stdout.readline())[0]
        with urllib.request.urlopen(f"{address}runs") as answer:
            assert json.load(answer)["runs"][0]["run"] == "a"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=800)
    assert (process.returncode, out, err) == (0, "", "")
