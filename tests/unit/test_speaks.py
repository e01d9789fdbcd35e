"""What an exporter says by itself: when watching begins, when issues open and heal, and at the end."""

from __future__ import annotations

import ast
import copy
import gc
import io
import logging
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

import gradflow_export
from gradflow_export import ArgumentError, ConsoleWriter, Exporter
from gradflow_export.records.step_record import Issue, IssueType, RunInfo, Severity, StepRecord
from gradflow_export.writers.console import BURST, REFILL_SECONDS, first_clause
from gradflow_export.writers.terminal import say

VANISHING = """
import os, signal, sys
import torch
from torch import nn
from gradflow_export import Exporter

torch.manual_seed(0)
model = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.Sigmoid()) for _ in range(12)], nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
x = torch.randn(64, 16)
y = (x[:, :1] > 0).float()
exporter = Exporter(model, synchronous=True).watch()
for step in range(30):
    optimizer.zero_grad()
    nn.functional.binary_cross_entropy_with_logits(model(x), y).backward()
    optimizer.step()
print("trained")
"""


@pytest.fixture
def run(programs, tmp_path):
    """Return what runs a script of a user's: its standard output, lines of ours on standard error, and exit status."""

    def run(script: str, **environment: str) -> tuple[str, list[str], int]:
        env = {key: value for key, value in os.environ.items() if key != "GRADFLOW_VERBOSE"} | environment
        program = programs.start(script, cwd=tmp_path, env=env)
        code = program.wait()
        return program.out, [line for line in program.err.splitlines() if "gradflow: " in line], code

    return run


def test_two_lines_are_enough_to_be_told(tmp_path, run):
    """Whoever writes the two lines of the README reads what is watched, what is wrong, and what to do next."""
    out, said, code = run(VANISHING)
    assert (out, code) == ("trained\n", 0)
    assert len(said) == 3, said
    assert re.match(r"gradflow: watching Sequential, [\d,]+ parameters, 13 blocks \(0\.0, 1\.0, \.\.\. 12\); ", said[0])
    folder = re.search(r"open them with: tensorboard --logdir (\S+)$", said[0])[1]
    assert (tmp_path / folder).is_dir()
    assert re.match(r"gradflow: \[CRITICAL\] VANISHING in 0\.0 .*since step \d+: .* Fix: .*\.$", said[1])
    assert re.match(r"gradflow: after step 30: 1 problem: VANISHING in 0\.0 .*Next: gradflow report ", said[2])
    assert said[2].endswith(folder)


def test_a_script_that_changes_its_folder_is_told_where_the_report_is(tmp_path, run):
    """The command of the last line works where the script ended."""
    (tmp_path / "elsewhere").mkdir()
    _, said, _ = run(f"{VANISHING}\nimport os\nos.chdir('elsewhere')\n")
    told = Path(said[2].rpartition("gradflow report ")[2])
    assert told.is_absolute()
    assert told.is_dir()


@pytest.mark.parametrize("environment", [{"GRADFLOW_VERBOSE": "0"}, {"RANK": "1"}], ids=["switched off", "rank 1"])
def test_nothing_is_said_where_nobody_wants_it(run, environment):
    """The environment silences it, and ranks above 0 are silent by themselves."""
    assert run(VANISHING, **environment)[:2] == ("trained\n", [])


def test_an_exception_has_its_verdict_after_the_traceback(run):
    """A script that fails still ends with what was found."""
    _, said, code = run(VANISHING + "raise RuntimeError('mine')\n")
    assert code == 1
    assert said[-1].startswith("gradflow: after step 30: 1 problem: VANISHING")


def test_a_killed_process_has_said_its_issues(run):
    """What was found stands in the log of a job that is killed, on lines of its own."""
    _, said, code = run(VANISHING + "os.kill(os.getpid(), signal.SIGKILL)\n")
    assert code == -signal.SIGKILL
    assert len(said) == 2, said
    assert all(line.startswith("gradflow: ") for line in said)


def test_a_run_without_steps_says_where_to_look(run):
    """A script that ends before its first step is told so, and what to run."""
    _, said, _ = run(VANISHING.replace("range(30)", "range(0)"))
    assert said[-1].startswith("gradflow: no step was recorded: no optimizer has stepped")
    assert "gradflow doctor" in said[-1]


def test_logging_that_is_set_up_gets_the_lines(tmp_path, run):
    """A program with handlers of its own finds the lines there, by severity, and nothing on standard error."""
    setup = (
        "import logging\n"
        "logging.basicConfig(filename='job.log', level=logging.INFO, format='%(levelname)s %(name)s %(message)s')\n"
    )
    _, said, _ = run(setup + VANISHING)
    lines = [line.split(" ", 2) for line in (tmp_path / "job.log").read_text().splitlines() if "gradflow: " in line]
    assert said == []
    assert [(level, name) for level, name, _ in lines] == [
        ("INFO", "gradflow_export"), ("ERROR", "gradflow_export"), ("ERROR", "gradflow_export")
    ]  # fmt: skip


@pytest.fixture
def bare_logging(monkeypatch):
    """The logger as in a program that never heard of logging; pytest has handlers of its own."""
    monkeypatch.setattr(logging.getLogger("gradflow_export"), "propagate", False)
    return logging.getLogger("gradflow_export")


@pytest.mark.parametrize(
    ("setting", "shown"), [("none", True), ("own level", False), ("disable", False), ("default root", True)]
)
def test_levels_that_the_user_chose_are_heeded(bare_logging, monkeypatch, capsys, setting, shown):
    """A level that silences this logger silences the lines; the level that the root has by default does not."""
    if setting == "own level":
        monkeypatch.setattr(bare_logging, "level", logging.ERROR)
    if setting == "disable":
        monkeypatch.setattr(logging.root.manager, "disable", logging.INFO)
    if setting == "default root":
        monkeypatch.setattr(bare_logging, "handlers", [logging.NullHandler()])
        monkeypatch.setattr(logging.root, "level", logging.WARNING)
    logging.getLogger("gradflow_export")._cache.clear()
    say("gradflow: a line")
    assert capsys.readouterr().err == ("gradflow: a line\n" if shown else "")
    bare_logging._cache.clear()


@pytest.mark.parametrize("stream", [None, "closed", "broken"])
def test_a_console_that_is_gone_is_no_error(bare_logging, monkeypatch, stream):
    """Nothing is raised without standard error, nor when it is closed or its reader has gone away."""

    class Broken(io.StringIO):
        def write(self, text):
            raise BrokenPipeError(text)

    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", {None: None, "closed": closed, "broken": Broken()}[stream])
    say("gradflow: a line")


class Terminal(io.StringIO):
    """A terminal that keeps what the bars and we write, in order."""

    def isatty(self):
        return True


def test_a_bar_of_tqdm_is_not_torn(bare_logging, monkeypatch):
    """A line from another thread stands alone: the bar is cleared before it and drawn again below it."""
    from tqdm import tqdm

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with tqdm(total=10, file=terminal, mininterval=0, miniters=1, ncols=60) as bar:
        bar.update(3)
        before = terminal.tell()
        other = threading.Thread(target=say, args=("gradflow: a line",))
        other.start()
        other.join()
        after = terminal.getvalue()[before:]
    assert re.match(r"^\r +\rgradflow: a line\n\r.*30%", after), repr(after)


def test_a_bar_that_is_switched_off_changes_nothing(bare_logging, monkeypatch):
    """Beside a disabled bar, as in the log of a job, the line is written plainly."""
    from tqdm import tqdm

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with tqdm(total=10, file=terminal, disable=True):
        say("gradflow: a line")
    assert terminal.getvalue() == "gradflow: a line\n"


def test_a_bar_of_rich_is_not_torn(bare_logging, monkeypatch):
    """rich puts itself in the place of standard error, and draws its bar anew below the line."""
    from rich.console import Console
    from rich.progress import Progress

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", Terminal())
    console = Console(file=terminal, force_terminal=True, width=60)
    with Progress(console=console, auto_refresh=False) as progress:
        progress.add_task("training", total=10, completed=3)
        progress.refresh()
        before = terminal.tell()
        say("gradflow: a line")
        progress.refresh()
        after = terminal.getvalue()[before:]
    plain = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", after).replace("\r", "")
    assert plain.splitlines()[0] == "gradflow: a line"
    assert "30%" in plain


def test_tqdm_is_not_loaded_for_it():
    """A program without progress bars does not get the library."""
    script = "from gradflow_export.writers.terminal import say; import sys; say('x'); assert 'tqdm' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, timeout=800)


def issue(kind, step, healed=None, severity=Severity.HIGH, layer="fc"):
    return Issue(kind, severity, layer, step, 1.0, 0.5, "it is 1.", "do this; or that.", (layer,), healed)


def lines(records, verbose=1):
    stream = io.StringIO()
    writer = ConsoleWriter(stream, verbose=verbose)
    writer.about("", str, lambda: "the verdict")
    writer.open(RunInfo("1-0", 1.0, "Net", 10, blocks=("a", "b")))
    for record in records:
        writer.write(record)
    writer.close()
    return stream.getvalue().splitlines()


def test_grave_issues_have_one_line_when_they_open_and_one_when_they_heal():
    """An issue of severity MEDIUM has none, one that is repeated while it is open has no second one."""
    found = [
        StepRecord(1, 1.0, issues=(issue(IssueType.DEAD, 1), issue(IssueType.UNSTABLE, 1, severity=Severity.MEDIUM))),
        StepRecord(2, 2.0, issues=(issue(IssueType.DEAD, 1),)),
        StepRecord(3, 3.0, issues=(issue(IssueType.DEAD, 1, severity=Severity.CRITICAL),)),
        StepRecord(9, 9.0, issues=(issue(IssueType.DEAD, 1, healed=9), issue(IssueType.UNSTABLE, 1, 9, Severity.LOW))),
    ]
    assert lines(found) == [
        "gradflow: watching Net, 10 parameters, 2 blocks (a, b)",
        "gradflow: [HIGH] DEAD in fc since step 1: it is 1. Fix: do this.",
        "gradflow: [CRITICAL] DEAD in fc since step 1: it is 1. Fix: do this.",
        "gradflow: healed at step 9: DEAD in fc since step 1",
        "gradflow: after step 9: the verdict",
    ]


def test_more_is_said_when_more_is_asked_for():
    """With verbose=2 every issue is printed with all of its advice, and headline numbers."""
    said = lines([StepRecord(1, 1.0, issues=(issue(IssueType.UNSTABLE, 1, severity=Severity.LOW),))], verbose=2)
    assert said[1:3] == [
        "gradflow: [LOW] UNSTABLE in fc since step 1: it is 1. Fix: do this; or that.", "gradflow: step 1"
    ]  # fmt: skip


def test_issues_that_come_and_go_do_not_flood_the_terminal():
    """Whatever happens, lines are bounded by the time that has passed; what is left out is counted."""
    count, seconds = 1500, 60.0
    records = [
        StepRecord(step, seconds * step / count, issues=(issue(IssueType.LOSS_SPIKE, step, layer=str(step)),))
        for step in range(1, count)
    ]
    said = lines([*records, StepRecord(count, seconds, issues=(issue(IssueType.NUMERICAL, count),))])
    printed = [line for line in said if "[HIGH]" in line]
    assert len(printed) <= BURST + seconds / REFILL_SECONDS + 1
    assert "NUMERICAL" in printed[-1], "the first of a type always has its line"
    left_out = sum(int(match[1]) for line in said if (match := re.match(r"gradflow: (\d+) more lines", line)))
    assert left_out + len(printed) == count


def test_the_named_backend_is_the_only_one_that_speaks(tmp_path, capsys, bare_logging):
    """``backends="console"`` says everything, once."""
    model = nn.Linear(2, 1)
    with Exporter(model, backends="console", logdir=tmp_path, verbose=1).watch():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(2, 2)).sum().backward()
        optimizer.step()
    err = capsys.readouterr().err
    assert err.count("watching Linear") == 1
    assert "step 1  loss" in err
    assert "nothing is written to disk" in err
    assert "Next: exporter.print_report()" in err


@pytest.mark.parametrize("value", [3, -1, "loud", 1.5])
def test_an_impossible_verbosity_is_refused(value):
    """The error names what can be given."""
    with pytest.raises(ArgumentError, match="verbose must be 0, 1 or 2, got"):
        Exporter(nn.Linear(1, 1), backends=[], verbose=value)


def test_a_misspelt_environment_stops_nobody(monkeypatch, caplog):
    """A variable with another value is reported and ignored."""
    monkeypatch.setenv("GRADFLOW_VERBOSE", "yes")
    Exporter(nn.Linear(1, 1), backends=[])
    assert "GRADFLOW_VERBOSE must be 0, 1 or 2, off or on, got 'yes'" in caplog.text


@pytest.mark.parametrize("every", [None, 5])
@pytest.mark.parametrize("criterion", [True, False])
def test_a_report_that_tells_the_loss_never_says_that_none_was_seen(every, criterion):
    """The note about a missing loss and the loss in the verdict exclude each other, at every moment."""
    torch.manual_seed(0)
    model, loss = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), nn.CrossEntropyLoss()
    optimizer, x = torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(32, 4)
    y = (x[:, 0] > 0).long()
    exporter = Exporter(model, backends=[], every=every).watch(loss if criterion else None)
    for step in range(60):
        if step in {0, 1, 30}:
            check_note(exporter)
        optimizer.zero_grad()
        (loss(model(x), y) if criterion else nn.functional.cross_entropy(model(x), y)).backward()
        optimizer.step()
    exporter.close()
    check_note(exporter)
    assert "the loss fell from" in exporter.report()


def check_note(exporter):
    text = exporter.report()
    assert not ("the loss fell" in text and "no loss was recorded" in text)


def balanced(text):
    """Whether brackets close and quotes come in pairs; an apostrophe within or after a word is none."""
    bare = re.sub(r"(?<=\w)'", "", text)
    pairs = all(bare.count(a) == bare.count(b) for a, b in ("()", "[]", "{}"))
    return pairs and all(bare.count(quote) % 2 == 0 for quote in '`"')


def texts_of_the_package():
    """Every text of the package's source, with a word in the place of what is put into it."""
    for path in Path(gradflow_export.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                yield "".join(str(part.value) if isinstance(part, ast.Constant) else "x" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def test_an_advice_is_never_cut_in_the_middle_of_code():
    """Of any text that rules hold, the first clause is a beginning with closed brackets and quotes."""
    found = {" ".join(text.split()) for text in texts_of_the_package() if balanced(text)}
    assert len(found) > 1000
    for text in found:
        clause = first_clause(text)
        assert text.startswith(clause)
        assert balanced(clause), clause


@pytest.mark.parametrize(("advice", "first"), [
    ("call optimizer.add_param_group({'params': [p]. }); or look.", "call optimizer.add_param_group({'params': [p]. })"),
    ("leave such batches out: if not x.all(): continue; and look.", "leave such batches out: if not x.all(): continue"),
    ("look at 3: set the layers' bias to 0. Or 1.", "look at 3: set the layers' bias to 0"),
    ("write `a; b` there. Then go on.", "write `a; b` there"),
    ("scale by 0.5, e.g(", "scale by 0.5, e.g("),
    ("", ""),
])  # fmt: skip
def test_what_one_has_to_do_is_in_the_first_clause(advice, first):
    """A colon ends nothing; a full stop or a semicolon does where no bracket or quote is open."""
    assert first_clause(advice) == first


@pytest.mark.parametrize(("said", "verbose"), [("off", 0), ("ON", 1), ("2", 2)])
def test_the_environment_is_understood_in_words(monkeypatch, caplog, said, verbose):
    """``off`` and ``on`` stand for 0 and 1."""
    monkeypatch.setenv("GRADFLOW_VERBOSE", said)
    assert Exporter(nn.Linear(1, 1), backends=[]).settings.verbose == verbose
    assert "GRADFLOW_VERBOSE" not in caplog.text


@pytest.mark.parametrize("end", ["close", "issues", "collected", "model first"])
def test_an_exporter_that_was_never_told_to_watch_says_so_once(caplog, end):
    """When it is closed, asked or gone, and in its verdict; one that watched or prints nothing does not."""
    gc.collect()
    caplog.clear()
    model = nn.Linear(1, 1)
    exporter = Exporter(model, backends=[], verbose=1)
    if end == "issues":
        assert exporter.issues == ()
        assert exporter.summary()["verdict"] == "watch() was never called: nothing was read"
    if end == "model first":  # as where both are local to a function
        del model
    if end in {"collected", "model first"}:
        del exporter
    else:
        exporter.close()
    gc.collect()
    assert caplog.text.count("watch() was never called") == 1
    caplog.clear()
    model = nn.Linear(1, 1)
    Exporter(model, backends=[], verbose=0).close()
    exporter = Exporter(model, backends=[], verbose=1).watch()
    exporter.close()
    assert exporter.summary()["verdict"] == "no step recorded yet"
    assert "never called" not in caplog.text


def test_a_copy_of_what_holds_an_exporter_holds_the_same_one(caplog):
    """Deep and shallow; a checkpoint of it has None in its place, and one line says so."""
    model = nn.Linear(1, 1)
    exporter = Exporter(model, backends=[]).watch()
    assert copy.deepcopy({"exporter": exporter})["exporter"] is exporter
    assert copy.copy(exporter) is exporter
    file = io.BytesIO()
    torch.save({"exporter": exporter, "step": 3}, file)
    file.seek(0)
    assert torch.load(file, weights_only=False) == {"exporter": None, "step": 3}
    assert pickle.loads(pickle.dumps([exporter])) == [None]
    assert "is saved as None" in caplog.text
    exporter.close()
