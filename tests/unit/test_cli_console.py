"""Text of the commands on terminals of any width, and piped."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from gradflow_export.cli.console import LABELS, folded, show
from gradflow_export.records.step_record import Issue, IssueType, Reading, RunInfo, Severity, StepRecord
from gradflow_export.writers import JsonlWriter

WORDS = st.text(st.characters(whitelist_categories=("L", "N", "P")), min_size=1, max_size=40)
LINES = st.builds(
    lambda label, words: label + " ".join(words),
    st.sampled_from(["", "  ", *(f"    {label:<6} " for label in LABELS)]),
    st.lists(WORDS, max_size=30),
)


@given(st.lists(LINES, max_size=6), st.integers(20, 200))
def test_no_line_is_wider_than_the_terminal_and_nothing_is_lost(lines, width):
    """Whatever the text and the width, all characters are there, in order, and every line fits."""
    console = Console(file=io.StringIO(), width=width)
    made = [line.plain for line in folded(lines, console)]
    assert all(cell_len(line) <= width for line in made)
    assert re.sub(r"\s", "", "".join(made)) == re.sub(r"\s", "", "".join(lines))


def test_a_long_advice_is_folded_below_itself():
    """The label stands alone in its column."""
    console = Console(file=io.StringIO(), width=30)
    made = [line.plain for line in folded(["    fix      add a skip connection or a LayerNorm"], console)]
    assert made == ["    fix      add a skip", "             connection or a", "             LayerNorm"]


def test_piped_text_is_as_it_is(capsys, monkeypatch):
    """Programs that read the output get each line whole, without colours."""
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    text = "runs/a\n  1 problem: DEAD\n    fix      " + "word " * 200
    show(text)
    assert capsys.readouterr().out == text + "\n"


@pytest.mark.parametrize("width", [40, 80, 160])
@pytest.mark.parametrize("colour", [True, False])
def test_a_report_fits_the_terminal(tmp_path, width, colour):
    """On a terminal no line of a report is wider than it, and colours follow NO_COLOR."""
    import pty

    writer = JsonlWriter(tmp_path / "run")
    writer.open(RunInfo("1000-0", 1.0, "Net", 1234, blocks=("a", "b")))
    issue = Issue(IssueType.VANISHING, Severity.CRITICAL, "a", 1, 1.0, 2.0, "it is small. " * 20, "do this. " * 40)
    writer.write(StepRecord(1, 1.0, (Reading.run("loss", 1.0),), issues=(issue,)))
    writer.close()
    ours, theirs = pty.openpty()
    env = {key: value for key, value in os.environ.items() if key not in {"NO_COLOR", "FORCE_COLOR"}}
    env |= {"COLUMNS": str(width), "LINES": "50", "TERM": "xterm"} | ({} if colour else {"NO_COLOR": "1"})
    command = [sys.executable, "-m", "gradflow_export", "report", str(tmp_path)]
    with subprocess.Popen(command, stdout=theirs, env=env, close_fds=True) as process:
        os.close(theirs)
        parts = []
        try:
            while part := os.read(ours, 1 << 16):
                parts.append(part)
        except OSError:  # the end, as Linux reports it
            pass
    os.close(ours)
    assert process.returncode == 0
    text = b"".join(parts).decode()
    plain = re.sub(r"\x1b\[[\d;]*m", "", text).splitlines()
    assert max(map(len, plain)) <= width
    assert " ".join(" ".join(plain).split()).count("do this.") == 40
    # Without colours bold and dim stay, as https://no-color.org has it.
    assert ("\x1b[1;31m" in text) == colour
