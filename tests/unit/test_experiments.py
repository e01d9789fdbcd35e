"""Experiments on a training script: what is tried, what is believed, and that nothing of the user's is touched."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import select
import signal
import tempfile
import textwrap
import time
from collections import deque
from pathlib import Path

import psutil
import pytest

from gradflow_export.cli import main
from gradflow_export.errors import ArgumentError
from gradflow_export.experiments.account import as_json, cures, lines, patch, remark, weighed
from gradflow_export.experiments.battery import Battery
from gradflow_export.experiments.decision import Baseline, Trial, best
from gradflow_export.experiments.facts import Facts
from gradflow_export.experiments.laboratory import Laboratory
from gradflow_export.experiments.measure import parse, scale, yardstick
from gradflow_export.experiments.mending.treatment import TUNING
from gradflow_export.experiments.mending.untried import UNTRIED, UNTRIED_CAUSES
from gradflow_export.experiments.page import as_html
from gradflow_export.experiments.runs import Outcome, Request, Result
from gradflow_export.experiments.sandbox import COPY, Sandbox, outermost, size
from gradflow_export.experiments.survey import Training, joined
from gradflow_export.experiments.target import Target, cells
from gradflow_export.experiments.treatments import COMBINED, TREATMENTS, find, table
from gradflow_export.experiments.verdict import Verdict, longer
from gradflow_export.records.issues import Issue, IssueType, Severity
from gradflow_export.records.loss_mistakes import DRAWN_TOGETHER, MISTAKES, TARGETS_NO_SHARE, UNSIGNED
from gradflow_export.writers.preflight import findings

SCRIPT = """
    import sys
    import torch
    from torch import nn

    words = sys.argv[1:]
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))
    decay = 50.0 if "decay" in words else 0.0
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=decay)
    if "slow" in words or "large" in words:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1 if "large" in words else 5e-3)
    warm = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: (s + 1) / 1e4 if "warm" in words else 1.0)
    x = torch.randn(256, 8)
    y = x[:, :3].argmax(1)
    x *= 1e4 if "large" in words else 1.0
    for step in range(80):
        rows = torch.randint(256, (32,))
        if "stale" not in words:
            optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
        (loss - 5 if "negative" in words else loss).backward()
        if "early" in words:
            optimizer.zero_grad(set_to_none=False)
        optimizer.step()
        warm.step()
    """


@pytest.fixture
def script(tmp_path, monkeypatch):
    """A script in a folder of its own, which is the current one."""
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    path = folder / "train.py"
    path.write_text(textwrap.dedent(SCRIPT), encoding="utf-8")
    return path


def verdict_of(path, *words, suspects=()):
    with Laboratory(Target(path, words=words), jobs=2) as laboratory:
        survey = laboratory.look()
        return Battery(laboratory, survey.trainings[-1], steps=60, suspects=suspects).run()


def hashed(folder):
    """Names, contents and times of everything in a folder."""
    out = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        out.update(f"{path.relative_to(folder)} {path.lstat().st_mtime_ns} {path.is_dir()}".encode())
        out.update(path.read_bytes() if path.is_file() else b"")
    return out.hexdigest()


def test_the_cause_is_named_by_the_change_that_makes_it_learn(script):
    """A planted mistake is removed by its own treatment, in three seeds, and by no other."""
    verdict = verdict_of(script, "early")
    assert [trial.names for trial in verdict.cures] == [("keep the gradients as backward left them",)], verdict
    assert set(verdict.cures[0].effects) == {0, 1, 2}
    assert verdict.runs <= 40


def test_a_program_that_learns_gets_no_prescription(script):
    """A sound script is run as it is and with placebos, and then left in peace: no treatment that tunes is tried."""
    verdict = verdict_of(script)
    assert (verdict.cures, verdict.refused) == ([], "")
    assert all(find(name).kind == "exact" and not find(name).choice for trial in verdict.trials for name in trial.names)
    assert not verdict.baseline.ill
    assert verdict.baseline.against_placebo < 0.8


@pytest.mark.parametrize("word", ["slow", "warm"])
def test_a_program_that_learns_slowly_is_not_ill(script, word):
    """A small learning rate and one that warms up are remarked upon, with what is faster, and nothing is prescribed."""
    verdict = verdict_of(script, word)
    assert verdict.baseline.progress > 0.9
    assert (verdict.cures, verdict.baseline.ill) == ([], False)
    assert verdict.faster
    assert "faster in the same steps" in remark(verdict).lower()


SOUND = """
    import sys
    import torch
    from torch import nn

    word = sys.argv[1]
    torch.manual_seed(3)
    x = torch.randn(2048, 16)
    y = (x[:, :1] + x[:, 1:2] > 2.5).float()
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
    slow = [weight.detach().clone() for weight in model.parameters()]
    many = 1.0 if word == "looks ahead" else (1 - y).sum() / y.sum()
    measure = nn.BCEWithLogitsLoss(pos_weight=torch.as_tensor(many))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if word == "looks ahead":
        y = x[:, :1] + x[:, 1:2]
        measure, optimizer = nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(100):
        rows = torch.randint(2048, (128,))
        optimizer.zero_grad()
        measure(model(x[rows]), y[rows]).backward()
        optimizer.step()
        if word == "looks ahead" and step % 5 == 4:
            with torch.no_grad():
                for weight, far in zip(model.parameters(), slow):
                    weight.copy_(far.lerp_(weight, 0.5))
    """


@pytest.mark.parametrize("word", ["rare answers", "looks ahead"])
def test_noise_and_weights_that_are_averaged_on_purpose_are_not_treated(script, word):
    """One batch of rare answers says little of a loss, and a script may write to its weights and learn."""
    script.write_text(textwrap.dedent(SOUND), encoding="utf-8")
    verdict = verdict_of(script, word)
    assert (verdict.refused, verdict.cures) == ("", [])
    assert not verdict.baseline.ill


def test_the_cure_that_a_symptom_names_goes_before_others(script):
    """Large inputs are standardized, though another optimizer helps as well, and the finding keeps its place."""
    verdict = verdict_of(script, "large", suspects=[IssueType.DATA_SCALE])
    assert [trial.names for trial in verdict.cures] == [("standardize the inputs",)]
    found = Issue(IssueType.DATA_SCALE, Severity.HIGH, "input", 1, 1e4, 10.0, "Inputs are large.", "Scale them.")
    other = Issue(IssueType.LEARNING_RATE, Severity.HIGH, "", 1, 1.0, 0.1, "Steps are large.", "Lower it.")
    assert [each.issue_type for each in weighed([found], verdict)] == [IssueType.DATA_SCALE]
    assert IssueType.LEARNING_RATE not in {each.issue_type for each in weighed([other], verdict)}


def test_a_finding_keeps_its_severity_where_nothing_helps_an_ill_program():
    """Only where a program learns without its exact cure does an issue of degree become LOW."""
    issue = Issue(IssueType.LEARNING_RATE, Severity.HIGH, "", 1, 1.0, 0.1, "Steps are large.", "Lower it.")
    tried = Trial(("learning rate x 0.1",), {0: 0.99})
    for effect, severity in ((0.99, Severity.HIGH), (0.5, Severity.LOW)):
        verdict = Verdict(Training(0, 80, 1), 60, baseline=Baseline((1.0,) * 3, (effect,) * 3), trials=[tried])
        assert [each.severity for each in weighed([issue], verdict)] == [severity]


@pytest.mark.parametrize(("left", "listed"), [(set(), False), ({"VANISHING"}, True)])
def test_what_is_gone_with_the_cure_is_listed_with_it(left, listed):
    """It is a consequence; what a run with the cure shows as well has a cause of its own."""
    issue = Issue(IssueType.VANISHING, Severity.CRITICAL, "first", 4, 1e-6, 0.1, "Nothing arrives.", "Add a norm.")
    cure = Trial(("standardize the inputs",), dict.fromkeys(range(3), 0.1), left=left)
    verdict = Verdict(Training(0, 80, 1), 60, baseline=Baseline((1.0,) * 3, (1.0,) * 3), trials=[cure], cures=[cure])
    verdict.found = [("VANISHING", ""), ("DATA_SCALE", "")]
    found = weighed([issue], verdict)
    assert (IssueType.VANISHING in {each.issue_type for each in found}) == listed
    assert found[-1].message.endswith("Also resolved: VANISHING in first.") != listed


@pytest.mark.parametrize(("rate", "cause"), [(0.0, "does not suit"), (1e-7, "rate that is too small")])
def test_another_adam_in_the_place_of_an_adam_is_another_rate(rate, cause):
    """What changed is the learning rate, and that is what is named and mended."""
    cure = Trial(("Adam with 1e-2",), dict.fromkeys(range(3), 0.1))
    verdict = Verdict(Training(0, 80, 1), 60, baseline=Baseline((1.0,) * 3, (1.0,) * 3), trials=[cure], cures=[cure])
    verdict.facts = {"adam": rate}
    assert cause in cures(verdict)[0].message
    assert ("torch.optim.Adam(" in patch(cure, verdict.facts)) == (rate == 0)


def test_a_script_of_few_steps_is_not_asked_for_a_yardstick():
    """No measure helps where there is nothing to compare; where the loss is none, it does."""
    few = Verdict(Training(0, 20, 1), 12, refused="it makes 20 optimizer steps. Give the arguments.")
    assert lines(few) == ["nothing was tried: it makes 20 optimizer steps. Give the arguments."]
    none = Verdict(Training(0, 80, 1), 60, refused="its loss is negative", baseline=Baseline((1.0,) * 3, (0.5,) * 3))
    assert "--measure" in lines(none)[1]


@pytest.mark.parametrize(("words", "cure"), [(("negative",), None), (("negative", "decay"), ("weight decay 0",))])
def test_a_loss_below_zero_is_compared_by_differences(script, words, cure):
    """A smaller one is better where no finding doubts it, and nothing is tuned that no finding names."""
    verdict = verdict_of(script, *words)
    assert (verdict.refused, verdict.facts["measured"]) == ("", "")
    assert next((trial.names for trial in verdict.cures), None) == cure
    assert not any(find(name).kind == TUNING for trial in verdict.trials for name in trial.names)


def test_a_negative_loss_that_may_have_the_wrong_sign_is_no_yardstick():
    """A finding that the loss is wrong says that a smaller one need not be better."""
    facts = {"optimizers": 1, "places": 1, "digests": (), "echoes": 0.0}
    seeds = [Result(seed, (1.0, -1.0), -1.0, facts=facts) for seed in range(3)]
    assert "negative" in yardstick(None, seeds, seeds[0], None, doubted=True).refused
    rule = yardstick(None, seeds, seeds[0], None)
    assert rule.refused == ""
    assert rule.effect(seeds[0]) < 1 < rule.effect(Result(0, (1.0, 1.0), 1.0))


def test_the_command_prints_cause_effect_and_patch_and_touches_nothing(script, tmp_path, capsys):
    """Files, checkpoints and folders that the script writes are thrown away; the report is text and JSON."""
    script.write_text(
        script.read_text(encoding="utf-8")
        + "    open('log.txt', 'a').write('x'); torch.save(model.state_dict(), 'train.py')\n",
        encoding="utf-8",
    )
    before = hashed(script.parent)
    assert main(["doctor", str(script), "--try", "--format", "json", "stale"]) == 1
    assert hashed(script.parent) == before
    told = json.loads(capsys.readouterr().out)
    (experiment,) = told["experiments"]
    (cure,) = experiment["cures"]
    assert cure["treatments"] == ["clear old gradients"]
    assert "optimizer.zero_grad()" in cure["patch"]
    assert any(
        each["issue_type"] == "STALE_GRAD" and "Tried: clear old" in each["message"] for each in told["findings"]
    )


PACKAGE = """
    import argparse, torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset
    from .net import make

    parser = argparse.ArgumentParser()
    parser.add_argument("--decay", type=float)
    decay = parser.parse_args().decay
    x = torch.randn(512, 8)
    y = x[:, :3].argmax(1)
    first = nn.Linear(8, 8)
    optimizer = torch.optim.Adam(first.parameters(), 1e-2)
    for step in range(80):
        optimizer.zero_grad()
        (first(x[:32]) - x[:32]).square().mean().backward()
        optimizer.step()
    torch.save(first.state_dict(), "first.pt")
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=decay)
    for epoch in range(5):
        for inputs, targets in DataLoader(TensorDataset(x, y), 32, shuffle=True, num_workers=1):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
        torch.save(model.state_dict(), "second.pt")
    """


def test_a_module_with_workers_that_trains_two_models_one_after_the_other(tmp_path, capsys, monkeypatch):
    """Each model is examined by itself, though it cannot be forked where loader workers live; the page has charts."""
    folder = tmp_path / "project"
    (folder / "pkg").mkdir(parents=True)
    (folder / "pkg" / "__init__.py").touch()
    net = "from torch import nn\ndef make():\n    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))\n"
    (folder / "pkg" / "net.py").write_text(net, encoding="utf-8")
    (folder / "pkg" / "train.py").write_text(textwrap.dedent(PACKAGE), encoding="utf-8")
    monkeypatch.chdir(folder)
    before = hashed(folder)
    page = tmp_path / "report.html"
    options = ["--try", "--format", "json", "--html", str(page)]
    assert main(["doctor", *options, "-m", "pkg.train", "--decay", "90"]) == 1
    assert hashed(folder) == before
    first, second = json.loads(capsys.readouterr().out)["experiments"]
    # The first model is given the same rows of its table in each step.
    assert ([each["treatments"] for each in first["cures"]], first["complaint"]) == (
        [["other rows in each batch"]],
        None,
    )
    assert [each["treatments"] for each in second["cures"]] == [["weight decay 0"]]
    text = page.read_text(encoding="utf-8")
    assert "<polyline" in text
    assert "weight decay 0: the loss reaches" in text
    assert "Learning-rate range" in text


def test_a_yardstick_of_the_user_takes_the_place_of_the_loss():
    """A value that should grow becomes a cost that halves where it gets better by its own size."""
    found = scale([1.0, 3.0, 4.0, 4.0], higher=True)
    assert (found.cost(found.plain), found.cost(found.plain + found.size)) == (1.0, 0.5)
    assert found.cost(math.nan) == math.inf
    assert parse("lower:stdout:acc=(\\S+)").read("acc=0.5\nacc=x\nacc=0.25") == (0.5, 0.25)
    assert parse("metrics['reward']").higher
    with pytest.raises(ArgumentError, match="--measure expects"):
        parse("1 +")


MARK = f"7654.{os.getpid()}"
ENDLESS = f"""range(10**9):
    __import__('time').sleep(0.005)
    if step < 20:
        __import__('subprocess').Popen(['sleep', '{MARK}'], start_new_session=True)"""
"""Steps without an end, that start processes of their own session."""


def left_behind(known):
    """Those processes that still run, and all that the script started."""
    started = [each for each in psutil.process_iter(["cmdline"]) if MARK in (each.info["cmdline"] or [])]
    return [each for each in [*known, *started] if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize(
    ("options", "number"),
    [(("--try",), signal.SIGHUP), (("--no-try",), signal.SIGTERM), (("--try", "--fresh"), signal.SIGINT)],
)
def test_an_interrupt_ends_every_process_and_reports_what_is_known(script, programs, options, number):
    """After Ctrl-C, kill, or where the terminal is closed, nothing runs any more and what is known is printed."""
    script.write_text(script.read_text(encoding="utf-8").replace("range(80):", ENDLESS), encoding="utf-8")
    # Where the tests were started in the background, these are ignored by everything that they start.
    code = (
        "import atexit, signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "signal.signal(signal.SIGHUP, signal.SIG_DFL); "
        "atexit.register(print, 'taken apart'); from gradflow_export.cli import command; command()"
    )
    program = programs.start(code, "doctor", script, "--steps", "20", *options)
    process, trying = psutil.Process(program.pid), options == ("--try",)
    # The first stage tells nothing; it has begun when the script has started something.
    while (trying and "runs as it is" not in program.err) or not left_behind([]):
        assert process.status() != psutil.STATUS_ZOMBIE, program.err
        time.sleep(0.1)
    below = process.children(recursive=True)
    process.send_signal(number)
    assert program.wait() == 128 + number
    assert "interrupted" in program.out
    assert ("there are no results yet" in program.out) != trying
    assert "taken apart" not in program.out
    assert left_behind(below) == []


@pytest.fixture
def interruptible():
    """Ctrl-C as in a terminal: a process in the background of a shell ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("number", [1, 3, 9])
def test_nothing_is_awaited_after_an_interrupt(script, monkeypatch, fresh, number):
    """Whichever wait it comes in, it is the last one, whatever is being done; no folder and no process is left."""
    waits = []

    def waited(plain):
        def wait(*args):
            waits.append(plain)
            if len(waits) == number:
                signal.raise_signal(signal.SIGINT)
            return plain(*args)

        return wait

    before = signal.getsignal(signal.SIGINT)
    others = set(psutil.Process().children(recursive=True))
    monkeypatch.setattr("gradflow_export.experiments.forked.select.select", waited(select.select))
    monkeypatch.setattr("gradflow_export.experiments.fresh.time.sleep", waited(time.sleep))
    monkeypatch.setattr(tempfile, "tempdir", str(script.parent))

    def doctor():
        with Laboratory(Target(script), jobs=2, fresh=fresh) as laboratory:
            Battery(laboratory, laboratory.look().trainings[-1], steps=60).run()

    with pytest.raises(KeyboardInterrupt):
        doctor()
    assert len(waits) == number
    assert signal.getsignal(signal.SIGINT) is before
    assert list(script.parent.glob("gradflow-doctor-*")) == []
    assert left_behind(set(psutil.Process().children(recursive=True)) - others) == []


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_while_a_process_begins_comes_after_it(script):
    """A child that was forked is known before KeyboardInterrupt is raised, and one that was swallowed comes again."""
    with Laboratory(Target(script), jobs=1, in_place=True) as laboratory:
        done = []

        def begin():
            with laboratory._interrupts.held():
                with laboratory._interrupts.held():
                    signal.raise_signal(signal.SIGINT)
                done.append("inner")
            done.append("outer")

        with pytest.raises(KeyboardInterrupt):
            begin()
        assert done == ["inner"]
        with pytest.raises(KeyboardInterrupt):
            laboratory.look()


def test_models_that_are_trained_one_after_the_other_are_told_apart():
    """Optimizers that take turns belong together; those that follow on each other are trainings of their own."""
    assert joined([[0, 99, 100], [100, 149, 50]]) == [Training(0, 100, 1), Training(100, 50, 1)]
    assert joined([[0, 198, 100], [1, 199, 100]]) == [Training(0, 100, 2)]


def test_rescue_needs_three_seeds_and_illness_is_a_loss_that_does_not_fall_or_ignores_the_inputs():
    """The decision rule, at its bounds."""
    base = Baseline((1.0, 1.0, 1.0), (0.95, 0.95, 0.95), {"noise": 0.96})
    assert base.ill
    assert Trial(("x",), {0: 0.6, 1: 0.7, 2: 0.7}).rescues(base)
    assert not Trial(("x",), {0: 0.6, 1: 0.7}).rescues(base)
    assert not Trial(("x",), {0: 0.6, 1: 0.7, 2: 0.9}).rescues(base)
    assert not Trial(("x",), {0: 0.7, 1: 0.1, 2: 0.1}).rescues(base)
    assert not Trial(("x",), {0: 0.1, 1: 0.1, 2: 0.1}, acted=False).rescues(base)
    assert Baseline((1.0,) * 3, (0.5,) * 3, {"noise": 0.5}).ill
    assert not Baseline((1.0,) * 3, (0.5,) * 3, {"noise": 0.9, "shuffled": 0.6}).ill
    assert Baseline((1.0,) * 3, (math.inf, 0.1, 0.1)).ill
    close = Trial(("y",), {0: 0.65})
    assert best([Trial(("x",), {0: 0.6}), close, Trial(("z",), {0: 0.1})])[0].names == ("z",)
    assert best([close, Trial(("x",), {0: 0.6})])[1] is close


def test_every_treatment_says_what_it_separates_and_how_to_make_it_last():
    """The table of the documentation is that of the declarations, and combinations are made of treatments."""
    page = Path(__file__).resolve().parents[2] / "docs" / "doctor.md"
    assert table() in page.read_text(encoding="utf-8")
    assert all(find(name) for names in COMBINED for name in names)
    assert all(each.patch and each.fixes and each.separates for each in TREATMENTS if each.kind in {"exact", "tuning"})
    assert len({each.name for each in TREATMENTS}) == len(TREATMENTS)


def test_what_cannot_be_tried_is_said_once_with_the_reason_and_stands_in_the_page():
    """Each issue type has a treatment or a reason, and a script of two models is not told it twice."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "doctor.md").read_text(encoding="utf-8")
    assert {kind for each in TREATMENTS for kind in each.fixes}.isdisjoint(UNTRIED)
    assert {kind for each in TREATMENTS for kind in each.fixes} | set(UNTRIED) == set(IssueType)
    assert all(f"`{kind}`" in page and reason in page for kind, reason in UNTRIED.items())
    assert all(cause in page and reason in page for cause, reason in UNTRIED_CAUSES.items())
    leak = Issue(IssueType.MEMORY_LEAK, Severity.HIGH, "", 1, 1.0, 1.0, "memory rose.", "store numbers")
    verdict = Verdict(Training(0, 80, 1), 60, baseline=Baseline((1.0,) * 3, (0.5,) * 3))
    (told,) = weighed(weighed([leak], verdict), verdict)
    assert told.message == f"memory rose. Not tried: {UNTRIED[IssueType.MEMORY_LEAK]}."
    assert lines(verdict)[1] == "  The script learns."


def test_each_mistake_of_a_loss_has_a_treatment_or_a_reason_why_there_is_none():
    """A treatment that names no cause mends what its type names: labels of a margin, and targets that are no shares."""
    mended = {cause for each in TREATMENTS for cause in each.causes}
    assert set(MISTAKES) - mended - set(UNTRIED_CAUSES) == {TARGETS_NO_SHARE, UNSIGNED}
    assert mended.isdisjoint(UNTRIED_CAUSES)
    pull = Issue(IssueType.WRONG_LOSS, Severity.MEDIUM, "", 1, 1.0, 1.0, "it collapses.", "", cause=DRAWN_TOGETHER)
    verdict = Verdict(Training(0, 80, 1), 60, baseline=Baseline((1.0,) * 3, (0.5,) * 3))
    (told,) = weighed([pull], verdict)
    assert told.message.endswith(f" Not tried: {UNTRIED_CAUSES[DRAWN_TOGETHER]}.")


class _Runs:
    """A laboratory whose runs have the losses that are given for the names of treatments."""

    def __init__(self, losses):
        self.losses, self.steps = losses, set()

    def run(self, queue):
        """Give each result at once."""
        for request in queue:
            self.steps.add(request.steps)
            yield request, Result(1, effect=self.losses[request.names])


class _Stopped(_Runs):
    """A laboratory in which the user presses Ctrl-C, or the budget ends, after so many runs."""

    measure, runs = None, 0

    def __init__(self, losses, stop, interrupt):
        super().__init__(losses)
        self.stop, self.interrupt = stop, interrupt

    cpu = property(lambda self: float(self.runs))

    def examine(self, training):
        """Begin."""

    def run(self, queue):
        """Give each result at once, until it is stopped."""
        while queue:
            request = queue.popleft()
            if self.runs == self.stop and self.interrupt:
                raise KeyboardInterrupt
            self.runs += 1
            names = tuple(name for name in request.names if name != "watch")
            yield request, Result(1, effect=self.losses.get(names, 4.7), acted=True)


@pytest.mark.parametrize("interrupt", [True, False])
@pytest.mark.parametrize(("stop", "pending", "cured"), [(1, False, False), (2, True, False), (5, False, True)])
def test_a_search_that_was_stopped_claims_nothing_of_what_it_did_not_try(interrupt, stop, pending, cured):
    """What was not tried is said first; what was confirmed is a cure, and what promises one is named."""
    losses = {("learning rate x 0.01",): 0.5, ("the inputs of the batch before",): 0.6}
    budget = math.inf if interrupt else stop - 0.5
    experiments = Battery(_Stopped(losses, stop, interrupt), Training(0, 100, 1), steps=60, budget=budget)
    verdict = experiments.verdict
    verdict.baseline, verdict.facts = Baseline((5.0,) * 3, (4.9,) * 3, {"noise as inputs": 4.9}), Facts().told()
    experiments._observe = lambda: None
    with pytest.raises(KeyboardInterrupt) if interrupt else contextlib.nullcontext():
        experiments.run()
    told = lines(verdict)
    assert told[1].startswith("  Incomplete: the ")
    assert " before everything was tried. Not tried: " in told[1]
    assert ("learning rate x 0.01" in told[1]) == (stop == 1)
    assert "learning rate x 10," in told[1]
    assert not any("placebo inputs" in line for line in told)
    assert any("None of those tried so far makes it learn." in line for line in told) != cured
    assert any("not confirmed yet (loss 4.9 unchanged): learning rate x 0.01 (0.5)" in line for line in told) == pending
    assert any("[CURE] learning rate x 0.01" in line for line in told) == cured
    page = as_html("train.py", [], [verdict], [], Outcome(steps=100))
    assert "Incomplete: the " in page


def test_everything_that_was_confirmed_stands_in_the_report():
    """What another cure goes before, what is not prescribed, and what was known before a longer run."""
    small, failed = Trial(("learning rate x 0.1",), {0: 0.9}), Trial(("dropout 0",), {0: math.inf}, error="KeyError: 1")
    cure, other = (Trial((name,), dict.fromkeys(range(3), 0.3)) for name in ("weight decay 0", "learning rate x 100"))
    verdict = Verdict(
        Training(0, 500, 1), 60, baseline=Baseline((1.0,) * 3, (0.95,) * 3), trials=[small, failed, other]
    )
    also = "also confirmed in 3 of 3 seeds, not prescribed (loss 0.95 unchanged): learning rate x 100 (0.3)"
    assert also in "\n".join(lines(verdict))
    verdict.trials, verdict.cures = [*verdict.trials, cure], [cure]
    also = also.replace("not prescribed", "another goes before it")
    assert also in "\n".join(lines(verdict))
    assert "dropout 0 (the run failed, KeyError: 1)" in "\n".join(lines(verdict))
    assert also[1:] in as_html("train.py", [], [verdict], [], Outcome(steps=100))
    assert [each["treatments"] for each in as_json(verdict)["also_confirmed"]] == [["learning rate x 100"]]
    verdict.cures = [other]
    longer(_Runs({(): 0.9, ("learning rate x 0.1",): 0.2}), verdict, [small])
    assert [each.names for each in verdict.cures] == [small.names]
    told = "\n".join(lines(verdict))
    assert "(loss 0.95 unchanged after 60 steps): learning rate x 100 (0.3), weight decay 0 (0.3)" in told
    shorter = as_json(verdict)["in_fewer_steps"]
    assert [each["treatments"] for each in shorter["also_confirmed"]] == [["learning rate x 100"], ["weight decay 0"]]


@pytest.mark.parametrize(("name", "first", "treated", "confirmed"), [
    ("dropout 0", 0.8, 0.2, True), ("dropout 0", 0.8, 0.65, False), ("standardize the inputs", 0.97, 0.2, True),
])  # fmt: skip
def test_what_leads_without_rescuing_is_given_more_steps(name, first, treated, confirmed):
    """A treatment of what is accused may show in four times the steps; then the verdict is that of these."""
    led, behind = Trial((name,), {0: first}), Trial(("weight decay 0",), {0: 0.99})
    verdict = Verdict(Training(0, 500, 1), 60, baseline=Baseline((1.0,) * 3, (0.95,) * 3), trials=[led, behind])
    laboratory = _Runs({(): 0.9, (name,): treated})
    longer(laboratory, verdict, [], [Trial((name,), {0: 0.94})])
    assert laboratory.steps == set()
    longer(laboratory, verdict, verdict.trials)
    assert [each.names for each in verdict.cures] == [(name,)] * confirmed
    assert verdict.steps == (240 if confirmed else 60)
    assert verdict.baseline.effect[0] == (0.9 if confirmed else 0.95)
    assert laboratory.steps == {240}


def test_a_loss_that_comes_back_by_itself_is_low_where_the_script_learns():
    """Only one that stays away keeps its severity; what came back several times is printed once."""
    rose = Issue(IssueType.DIVERGING, Severity.HIGH, "", 71, 9.0, 3.0, "the loss rose.", "lower it", healed_step=124)
    again = dataclasses.replace(rose, step=151, healed_step=192)
    tried = Trial(("learning rate x 0.1",), {0: 0.6})
    verdict = Verdict(Training(0, 80, 1), 60, baseline=Baseline((1.0,) * 3, (0.5,) * 3), trials=[tried])
    assert [each.severity for each in weighed([rose, again], verdict)] == [Severity.LOW] * 2
    assert weighed([dataclasses.replace(rose, healed_step=None)], verdict)[0].severity is Severity.HIGH
    assert "1 finding." in findings([rose, again], 200)
    assert "healed at step 124; also at step 151" in findings([rose, again], 200)


def test_what_an_issue_says_of_a_cure_is_not_printed_again():
    """The patch stands below the finding, and in the account where no finding shows it."""
    cure = Trial(("weight decay 0",), {0: 0.1, 1: 0.1, 2: 0.1})
    verdict = Verdict(Training(0, 80, 1), 60, baseline=Baseline((1.0,) * 3, (1.0,) * 3), trials=[cure], cures=[cure])
    seen = Issue(IssueType.LEARNING_RATE, Severity.MEDIUM, "fc", 1, 1.0, 1.0, "its weights shrink.", "lower it")
    (told,) = weighed([seen], verdict)
    assert told.message.startswith(
        "A weight decay that outweighs the gradient. Seen: LEARNING_RATE in fc: its weights shrink. "
        "Tried: weight decay 0: the loss reaches 0.1 instead of 1 after 60 steps, in 3 of 3 seeds"
    )
    went = Issue(IssueType.BAD_TARGETS, Severity.HIGH, "target", 5, 1.0, 1.0, "no dependence.", "look", healed_step=9)
    assert [each.issue_type for each in weighed([seen, went], verdict)] == [IssueType.LEARNING_RATE]
    assert any("patch" in line for line in lines(verdict))
    assert not any("patch" in line for line in lines(verdict, [told]))


def test_a_cure_is_reported_once_with_the_finding_that_asked_for_it():
    """What else it explains is listed there, and makes no second finding of it."""
    cure = Trial(("classes last before flattening",), dict.fromkeys(range(3), 0.1), mistake=True)
    verdict = Verdict(Training(0, 80, 1), 60, baseline=Baseline((1.0,) * 3, (1.0,) * 3), trials=[cure], cures=[cure])
    mixed = Issue(IssueType.WRONG_LOSS, Severity.HIGH, "loss", 1, 1.0, 1.0, "positions are mixed.", "movedim")
    went = Issue(IssueType.DATA_SCALE, Severity.MEDIUM, "input", 5, 1.0, 1.0, "far.", "look", healed_step=9)
    (told,) = weighed([mixed, went], verdict)
    assert told.issue_type is IssueType.WRONG_LOSS
    assert told.message.endswith("Also seen: DATA_SCALE in input.")


def test_cells_of_a_notebook_are_run_without_lines_for_the_shell(tmp_path):
    """Magic lines become ``pass``, so that the code around them keeps its lines."""
    path = tmp_path / "train.ipynb"
    code = [["%matplotlib inline\n", "x = 1\n", "if x:\n", "    !ls"], ["%%bash\n", "ls"]]
    made = [{"cell_type": "code", "source": each} for each in code] + [{"cell_type": "markdown", "source": ["no"]}]
    path.write_text(json.dumps({"cells": made}), encoding="utf-8")
    assert cells(path) == ["pass\nx = 1\nif x:\n    pass", ""]


def test_cells_that_ipython_times_are_run(tmp_path):
    """The code after ``%time``, and a cell below ``%%time`` or ``%%capture``, is Python; ``display`` does nothing."""
    path = tmp_path / "train.ipynb"
    code = [["%%time\n", "x = 1"], ["%time x += 1\n", "display(x)"], ["%%capture out\n", "x += 1"], ["%time -l 3"]]
    saved = ["assert get_ipython() is None\n", f"open({str(tmp_path / 'x')!r}, 'w').write(str(x))"]
    made = [{"cell_type": "code", "source": each} for each in [*code, saved]]
    path.write_text(json.dumps({"cells": made}), encoding="utf-8")
    assert cells(path)[:4] == ["pass\nx = 1", "x += 1\ndisplay(x)", "pass\nx += 1", "pass"]
    with Laboratory(Target(path), jobs=1, in_place=True) as laboratory:
        assert laboratory.look().error == ""
    assert (tmp_path / "x").read_text(encoding="utf-8") == "3"


LEAVES = """
    import multiprocessing, os
    import torch
    from torch import nn

    def answer(sent):
        sent.send(1)

    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=answer, args=(theirs,))
    child.start()
    assert ours.recv() == 1
    child.join()
    if not os.fork():
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 7
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(64, 8)
    for step in range(40):
        optimizer.zero_grad()
        (model(x) - x[:, :1]).square().mean().backward()
        optimizer.step()
    os._exit(0)
    """


def test_a_script_that_leaves_its_process_is_examined_as_one_that_ends(tmp_path, capsys):
    """What was seen is told, though nothing can be printed any more; what it forks ends as it wants."""
    path = tmp_path / "train.py"
    path.write_text("import sys; sys.stdout.close()\n" + textwrap.dedent(LEAVES), encoding="utf-8")
    assert main(["doctor", str(path), "--try", "--format", "json"]) == 0
    told = json.loads(capsys.readouterr().out)
    (experiment,) = told["experiments"]
    assert (told["steps"], told["error"], experiment["refused"], experiment["steps"]) == (40, None, None, 32)


def test_where_no_overlay_is_allowed_a_small_folder_is_copied(tmp_path, monkeypatch):
    """In the copy the program sees its files, and what it writes does not reach the original."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "data.txt").write_text("data", encoding="utf-8")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.chdir(tmp_path / "a")
    assert size(tmp_path / "a", 10) == 4
    assert outermost([tmp_path, tmp_path / "a"]) == (tmp_path.resolve(),)
    child = os.fork()
    if not child:
        Sandbox(COPY, (tmp_path / "a",), scratch).enter()
        seen = Path("data.txt").read_text(encoding="utf-8")
        Path("data.txt").write_text("changed", encoding="utf-8")
        os._exit(0 if seen == "data" and Path.cwd() != tmp_path / "a" else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert (tmp_path / "a" / "data.txt").read_text(encoding="utf-8") == "data"


def test_runs_draw_the_same_numbers_of_python(tmp_path):
    """A script that draws its samples with ``random`` is the same in every run, though each is a process of its own."""
    path = tmp_path / "train.py"
    draw = "torch.randint(256, (32,))"
    path.write_text(textwrap.dedent(SCRIPT).replace(draw, "random.sample(range(256), 32)"), encoding="utf-8")
    path.write_text("import random\n" + path.read_text(encoding="utf-8"), encoding="utf-8")
    with Laboratory(Target(path), jobs=1) as laboratory:
        laboratory.examine(laboratory.look(steps=20).trainings[-1])
        runs = deque(Request(names, 0, 20) for names in ((), (), ("look", "no steps"), ("look",)))
        one, other, still, look = (result for _, result in laboratory.run(runs))
    assert one.losses == other.losses
    assert still.facts["digests"] == look.facts["digests"]
