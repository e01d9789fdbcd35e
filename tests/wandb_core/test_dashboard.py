"""``gradflow dashboard``: the workspace of wandb-workspaces, printed and saved to a server on the loopback."""

import json
import os
import re
import subprocess
import sys

import pytest

from gradflow_export.cli import main
from gradflow_export.writers.wandb.fold import Span
from gradflow_export.writers.wandb.picks import HISTOGRAM_KEYS, RUN_KEYS

WITHOUT_TORCH = """
import sys
from gradflow_export.cli import main
code = main(sys.argv[1:])
sys.exit(code or 10 * ("torch" in sys.modules))
"""


@pytest.fixture
def printed(capsys):
    """Return what a dry run prints, as data."""

    def run(*more):
        assert main(["dashboard", "me/mine", "--dry-run", *more]) == 0
        return json.loads(capsys.readouterr().out)

    return run


@pytest.fixture
def server(beside_server):
    """A fresh server."""
    with beside_server.LoopbackServer() as made:
        yield made


def sections(described):
    """Return the sections by name."""
    return {section["name"]: section for section in described["spec"]["section"]["panelBankConfig"]["sections"]}


def panels(described, kind=None):
    """Return the settings of all panels of a kind."""
    every = [panel for section in sections(described).values() for panel in section["panels"]]
    return [panel["config"] for panel in every if kind in (None, panel["viewType"])]


def dashboard(*words, **more):
    """Run the command in a process of its own."""
    outside = {
        name: value for name, value in os.environ.items() if not name.startswith(("WANDB_SERVICE", "WANDB_MODE"))
    }
    command = [sys.executable, "-c", WITHOUT_TORCH, "dashboard", *words]
    return subprocess.run(
        command, capture_output=True, text=True, env=outside | more, stdin=subprocess.DEVNULL, check=False
    )


def test_every_section_is_there_in_reading_order(printed):
    """What is wrong comes first, then where, then the curves."""
    assert list(sections(printed())) == [
        "Verdict", "Compare runs", "Flagged layers", "Gain report", "Gains", "Gradients and updates",
        "Loss and policy", "Histograms",
    ]  # fmt: skip
    assert all(section["panels"] for section in sections(printed()).values())


def test_every_number_that_is_sent_has_a_curve(printed):
    """Each key that is sent by default is drawn once, over our own step; per layer by a pattern."""
    described = printed()
    curves = panels(described, "Run History Line Plot")
    drawn = [key for curve in curves for key in curve.get("metrics", [])]
    patterns = [re.compile(curve["metricRegex"]) for curve in curves if curve.get("useMetricRegex")]
    numbers = [key for key in Span.KEYS if "worst" not in key]
    assert sorted(drawn) == sorted(f"gradflow/{name}" for name in (*RUN_KEYS, *numbers, "open_issues"))
    for key in ("block.gain/encoder.3", "parameter.gradient_norm/encoder.3.weight", "flagged/block.gain:encoder.3"):
        assert len([pattern for pattern in patterns if pattern.match(f"gradflow/{key}")]) == 1
    assert not [pattern for pattern in patterns if pattern.match("gradflow/block_gain/a")]
    assert {curve["xAxis"] for curve in curves} == {"gradflow/step"}


def test_runs_are_set_against_each_other(printed):
    """A bar per run for gain, gradient and issues, and the settings that differ."""
    described = printed()
    assert [panel["metrics"] for panel in panels(described, "Bar Chart")] == [
        ["gradflow/gain.depth"], ["gradflow/since_last/gradient_norm_max"], ["gradflow/issues_found"],
    ]  # fmt: skip
    assert len(panels(described, "Run Comparer")) == 1
    assert len(panels(described, "Parallel Coordinates Plot")) == 1


def test_a_report_has_the_same_panels(place, server, printed):
    """The same sections under headings, saved to the project."""
    login = {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": server.settings()["api_key"]}
    done = dashboard("me/test", "--report", "--name", "Mine", **login)
    assert done.returncode == 0, done.stderr
    (view,) = server.views
    assert (view["entityName"], view["projectName"], view["displayName"]) == ("me", "test", "Mine")
    assert all(f'"{title}"' in view["spec"] for title in sections(printed()))
    assert view["spec"].count("gradflow/gain_report") == 1


def test_tables_report_and_chart_are_shown(printed):
    """The keys are those that the writer sends."""
    described = printed()
    text = json.dumps(described)
    assert all(
        f'"gradflow/{key}"' in text
        for key in ("health", "issues", "steps", "gain_report", "gain_chart_table", *HISTOGRAM_KEYS)
    )
    (chart,) = panels(described, "Vega2")
    assert chart["panelDefId"] == "wandb/lineseries/v0"
    assert "summary:gradflow/verdict" in text


def test_name_and_prefix_are_those_asked_for(printed):
    """A second exporter's keys can be shown too."""
    described = printed("--name", "Mine", "--prefix", "gradflow_2")
    assert (described["entity"], described["project"], described["name"]) == ("me", "mine", "Mine")
    assert "gradflow/" not in json.dumps(described)


@pytest.mark.parametrize("place", ["mine", "me/", "/mine", "me/mine/more", "https://wandb.ai/me/mine", ""])
def test_a_malformed_place_is_said_so(place, capsys):
    """The message says what was expected and what came."""
    assert main(["dashboard", place, "--dry-run"]) == 2
    assert f"expects ENTITY/PROJECT, got {place!r}" in capsys.readouterr().err


def test_a_name_that_cannot_be_used_is_said_so(capsys):
    """W&B takes no emoji."""
    assert main(["dashboard", "me/mine", "--dry-run", "--name", "\N{ROCKET}"]) == 2
    assert "Emojis are not allowed" in capsys.readouterr().err


def test_a_missing_package_is_said_with_the_pip_command(monkeypatch, capsys):
    """The command works where the extra is not installed, up to saying so."""
    monkeypatch.setitem(sys.modules, "wandb_workspaces", None)
    assert main(["dashboard", "me/mine", "--dry-run"]) == 2
    assert "pip install 'gradflow-export[dashboard]'" in capsys.readouterr().err


def test_it_is_saved(place, server):
    """The server gets one view with what the dry run prints, and the address is told; torch is not imported."""
    login = {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": server.settings()["api_key"]}
    done = dashboard("me/test", "--name", "Mine", **login)
    assert done.returncode == 0, done.stderr
    (view,) = server.views
    assert (view["entityName"], view["projectName"], view["displayName"]) == ("me", "test", "Mine")
    assert "Gain report" in sections({"spec": json.loads(view["spec"])})
    assert f"saved: {server.url}/me/test?nw=" in done.stdout


def test_a_project_that_is_not_yours_is_said_so(place, server):
    """What the server answered is passed on, without a traceback."""
    login = {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": server.settings()["api_key"]}
    done = dashboard("me/other", **login)
    assert done.returncode == 2
    assert "takes a view of me/other" in done.stderr
    assert "Traceback" not in done.stderr


def test_without_a_login_the_way_out_is_said(place, tmp_path, server):
    """No key and no terminal: one line that says how to log in."""
    done = dashboard("me/test", WANDB_BASE_URL=server.url, HOME=str(tmp_path), NETRC=str(tmp_path / "netrc"))
    assert done.returncode == 2
    assert "wandb login" in done.stderr
    assert "Traceback" not in done.stderr
    assert server.views == []
