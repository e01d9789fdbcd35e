"""The comparison of all programs before and after a change of the code."""

from __future__ import annotations

import importlib
import os
from functools import partial
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def unchanged(monkeypatch):
    """Return the script as a module."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("unchanged")


def ended(name):
    """End the process without a word."""
    del name
    os._exit(7)


def counted(name):
    """Begin another process, as some tests do, and say so."""
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    return {name: {"metrics": {}, "issues": [f"ended with {os.waitpid(pid, 0)[1]}"]}}


def saying(name, value):
    """Say two metrics."""
    return {name: {"metrics": {"block.effective_rank": value, "loss": value}, "issues": []}}


def test_a_program_that_ends_its_process_keeps_the_others_from_nothing(unchanged, tmp_path):
    """What it said is how it ended; a second run does not repeat what is stored."""
    path = tmp_path / "before.jsonl"
    todo = [partial(ended, "silent/a"), partial(counted, "silent/b")]
    unchanged.write(path, todo, 2)
    stored = unchanged.stored(path)
    assert stored["silent/a"]["silent/a"]["issues"] == ["the process ended with 7"]
    assert stored["silent/b"]["silent/b"]["issues"] == ["ended with 0"]
    before = path.read_text()
    unchanged.write(path, todo, 2)
    assert path.read_text() == before


def test_only_what_is_listed_may_differ(unchanged):
    """An issue twice instead of once is a difference, and so is a metric that has gone."""
    before = {"silent/a": {"metrics": {"loss": "1", "gain.depth": "2"}, "issues": ["DEAD HIGH 1"]}, "silent/b": {}}
    after = {"silent/a": {"metrics": {"loss": "1"}, "issues": ["DEAD HIGH 1", "DEAD HIGH 1"]}}
    assert list(unchanged.differences(before, after)) == [
        ("silent/b", "program", "only before"),
        ("silent/a", "gain.depth", "differs"),
        ("silent/a", "DEAD HIGH 1", "gained"),
    ]


def test_intended_differences_are_told_by_program_and_beginning(unchanged, tmp_path, capsys):
    """Each is counted under its reason, and what is left is returned."""
    (tmp_path / "intended.txt").write_text("# since 1\nsilent/* | block.effective_rank | read rarely\n")
    meant = unchanged.intended(tmp_path / "intended.txt")
    ways = []
    for name, value in (("before", "1"), ("after", "2")):
        ways.append(tmp_path / name)
        unchanged.write(ways[-1], [partial(saying, "silent/a", value)], 1)
    assert unchanged.compare(*ways, meant) == ["loss differs in 1 programs: silent/a"]
    assert "intended, 1 times: read rarely" in capsys.readouterr().out


def test_the_stored_list_can_be_read(unchanged):
    """Each line names programs, a metric or issue, and why."""
    assert all(all(row) for row in unchanged.intended(unchanged.INTENDED))
