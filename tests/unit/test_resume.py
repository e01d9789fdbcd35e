"""Training that goes on from a checkpoint."""

import shutil
from dataclasses import replace

import pytest
import torch
from torch import nn

from gradflow_export import ArgumentError, ArgumentTypeError, Exporter, read_run
from gradflow_export.cli.folders import runs_in
from gradflow_export.cli.report import summarise
from gradflow_export.engine.external_issues import ToldJudge
from gradflow_export.records.step_record import Issue, IssueType, Reading, Severity, StepRecord
from gradflow_export.rules.diverging import Diverging
from gradflow_export.storage import reader
from gradflow_export.storage.earlier import Earlier
from gradflow_export.writers import JsonlWriter


def train(logdir, steps, start_step=0):
    """Train a few steps into a log directory."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Exporter(model, logdir=logdir, start_step=start_step, strict=True).watch() as exporter:
        for _ in range(steps):
            optimizer.zero_grad()
            loss = model(torch.randn(3, 4)).square().mean()
            exporter.observe(loss=loss)
            loss.backward()
            optimizer.step()


def test_a_resumed_run_goes_on_where_it_was_saved(tmp_path):
    """Steps after the checkpoint replace those that were lost, and all others stand."""
    train(tmp_path, 12)
    train(tmp_path, 5, start_step=8)
    run = read_run(tmp_path)
    assert run.records.steps == tuple(range(1, 14))
    assert len(run.sessions) == 2


@pytest.mark.parametrize("kill", [False, True])
def test_records_steps_left_out_and_steps_lost_are_all_steps_of_all_sessions(tmp_path, kill):
    """Of earlier sessions it is known how many have no record; a log that is not there is no session."""

    def session(first, steps, every):
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        given = {"start_step": first, "intervals": {}, "every": every, "synchronous": True, "verbose": 0}
        with Exporter(model, logdir=tmp_path, **given).watch() as exporter:
            for _ in range(steps):
                optimizer.zero_grad()
                model(torch.randn(3, 4)).square().mean().backward()
                optimizer.step()
        return exporter.summary()

    def counted(summary):
        lost = sum(summary["lost"]["dropped"].values()) + summary["lost"]["unwritten"].get("", 0)
        return summary["steps"]["count"] + sum(summary["skipped"].values()) + lost

    assert counted(session(0, 20, 3)) == 20
    later = session(30 if kill else 14, 9, 2)
    assert counted(later) == (39 if kill else 23)
    assert later["skipped"]["earlier"] > 0
    shutil.rmtree(tmp_path)
    assert session(50, 9, 3)["skipped"] == {"every": 5, "budget": 0, "paused": 0}


SICK = Issue(IssueType.LEAKAGE, Severity.HIGH, "", 3, 1.0, 0.5, "The target is an input.", "Remove it.")


@pytest.mark.parametrize("backend", ["tensorboard", "jsonl"])
@pytest.mark.parametrize(("over", "start", "width", "left"), [
    (False, 12, 4, True), (False, 5, 4, True), (True, 12, 4, False), (False, 2, 4, False), (False, 0, 4, False),
    (False, 12, 8, False), ("long", 12, 4, False),
])  # fmt: skip
def test_a_resumed_run_says_what_was_left_open(tmp_path, monkeypatch, backend, over, start, width, left):
    """Unless it healed, came after the checkpoint, was another model's, or its log is long; it is no issue of the later session."""
    monkeypatch.setattr(reader, "QUICK", 100 if over == "long" else reader.QUICK)

    def session(steps, first, width, issues):
        torch.manual_seed(0)
        model = nn.Linear(width, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        watched = Exporter(
            model, backends=[backend], logdir=tmp_path, start_step=first, strict=True, verbose=0, alerts_enabled=True
        ).watch()
        with watched as exporter:
            for step in range(1, steps + 1):
                optimizer.zero_grad()
                model(torch.ones(3, width)).square().mean().backward()
                if step in issues:
                    exporter.add_issue(issues[step])
                optimizer.step()
        return exporter

    session(12, 0, 4, {3: SICK, **({6: replace(SICK, healed_step=6)} if over is True else {})})
    later = session(12, start, width, {})
    named = "1 problem left open by an earlier session: LEAKAGE in the whole model since step 3; no other open"
    assert later.summary()["verdict"].startswith(named) is left
    assert later.issues == ()
    whole = summarise(runs_in(tmp_path)[-1])
    assert (SICK.issue_type in [issue.issue_type for issue in whole.issues if issue.open]) is (left or over == "long")


@pytest.mark.parametrize(("value", "error"), [(-1, ArgumentError), (1.5, ArgumentTypeError), (True, ArgumentTypeError)])
def test_start_step_must_be_a_number_of_steps(value, error, tmp_path):
    """The message says what start_step is."""
    with pytest.raises(error, match="start_step must be"):
        Exporter(nn.Linear(1, 1), logdir=tmp_path, start_step=value)


def mlp(seed=0):
    """A small classifier."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))


def classify(logdir, model, optimizer, steps, start_step=0, size=64, **given):
    """Train a classifier in a session of its own; return the exporter, which is closed."""
    data = torch.Generator().manual_seed(start_step)
    exporter = Exporter(model, logdir=logdir, start_step=start_step, strict=True, verbose=0, synchronous=True, **given)
    with exporter.watch():
        for _ in range(steps):
            inputs = torch.randn(size, 16, generator=data)
            targets = (inputs[:, :4].sum(1) > 0).long()
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
    return exporter


def adam(model, rate=2e-3, state=None):
    """An optimizer, with the state of another one."""
    optimizer = torch.optim.Adam(model.parameters(), rate)
    if state is not None:
        optimizer.load_state_dict(state)
    return optimizer


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A log of 300 steps, and what was saved then."""
    folder = tmp_path_factory.mktemp("stopped")
    model = mlp()
    optimizer = adam(model)
    classify(folder, model, optimizer, 300)
    return folder, model.state_dict(), optimizer.state_dict()


def resumed(stopped, tmp_path, *, weights=True, state=True, fresh=(), rate=None, steps=60, size=64):
    """Go on from the log with some of what was saved; return the exporter."""
    folder = tmp_path / "run"
    shutil.copytree(stopped[0], folder)
    model = mlp(1)
    if weights:
        model.load_state_dict(stopped[1])
    for place in fresh:
        model[place].reset_parameters()
    optimizer = adam(model, state=stopped[2] if state else None)
    for group in optimizer.param_groups:
        group["lr"] = rate or group["lr"]
    return classify(folder, model, optimizer, steps, 300, size)


@pytest.mark.parametrize(("given", "said"), [
    ({"weights": False, "state": False}, ["the weights of", "load_state_dict(checkpoint['model'])", "without its state"]),
    ({"fresh": (2, 4)}, ["the weights of", "load_state_dict(checkpoint['model'])"]),
    ({"rate": 0.3}, ["the learning rate was 0.002 and is 0.3", "load_state_dict(checkpoint['scheduler'])"]),
])  # fmt: skip
def test_a_loss_that_is_higher_since_training_was_resumed_is_reported_with_what_differs(stopped, tmp_path, given, said):
    """The log that is continued knows the loss, the weights and the rate of before."""
    found = resumed(stopped, tmp_path, **given).issues
    (issue,) = [issue for issue in found if issue.cause == "resumed"]
    assert (issue.issue_type, issue.severity, issue.step) == (IssueType.DIVERGING, Severity.HIGH, 301)
    assert "at step 300, when the run stopped, and is" in issue.message
    assert all(text in f"{issue.message} {issue.advice}" for text in said)
    assert ("weights of" in issue.message) is ("weights of" in "".join(said))


def slow(folder, model, steps, start_step=0):
    """Train a classifier of products, whose loss still falls fast when it is stopped."""
    optimizer, data = adam(model), torch.Generator().manual_seed(start_step)
    exporter = Exporter(model, logdir=folder, start_step=start_step, strict=True, verbose=0, synchronous=True)
    with exporter.watch():
        for _ in range(steps):
            inputs = torch.randn(64, 16, generator=data)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), (inputs[:, 0] * inputs[:, 1] > 0).long()).backward()
            optimizer.step()
    return exporter


@pytest.mark.parametrize("scale", [1.0, 5.0])
def test_a_checkpoint_that_is_not_loaded_is_the_cause_however_the_loss_fell_before(tmp_path, scale):
    """Until the end, though chance is not far above what a steep loss varied by; weights are not called initial ones."""
    slow(tmp_path, mlp(), 280)
    model = mlp(1)
    with torch.no_grad():
        [parameter.mul_(scale) for parameter in model.parameters()]
    found = [
        issue for issue in slow(tmp_path, model, 60, 280).issues if issue.open and issue.severity >= Severity.MEDIUM
    ]
    causes = [issue for issue in found if issue.explained_by is None]
    assert "resumed" in [issue.cause for issue in causes]
    assert IssueType.BAD_INIT not in [issue.issue_type for issue in found]


@pytest.mark.parametrize(("last", "start"), [((0.3, 0.7), 300), ((0.7, 0.7, 0.7), 300), ((0.3,), 400)])
def test_a_rise_about_the_step_at_which_training_was_resumed_began_there(last, start):
    """The last losses of before may lie high by chance, and the fix begins with what was not loaded."""
    before = [0.3 + 0.7 * 0.98**step + 0.03 * (-1) ** step for step in range(300 - len(last))]
    judge = ToldJudge([Diverging()], strict=True)
    judge.recall(Earlier(losses=tuple(enumerate((*before, *last), 1))))
    for step in range(start + 1, start + 41):
        judge.check(StepRecord(step, 0.0, (Reading.run("loss", 0.7 + 0.03 * (-1) ** step),)))
    (issue,) = judge.issues
    assert issue.step == start + 1
    assert f"since step {start + 1}, when training was resumed, it has been" in issue.message
    assert f"between steps 300 and {start + 1}: whether training was resumed with all that was saved" in issue.advice


@pytest.mark.parametrize("given", [{}, {"state": False}, {"size": 8}, {"rate": 1e-3}])
def test_a_resumed_run_that_learns_on_is_healthy(stopped, tmp_path, given):
    """With all that was saved, with a new optimizer, with smaller batches, and with another rate."""
    exporter = resumed(stopped, tmp_path, **given)
    assert [str(issue) for issue in exporter.issues if issue.severity >= Severity.MEDIUM] == []
    assert exporter.summary()["verdict"].startswith("healthy")


def test_the_loss_of_a_resumed_run_fell_since_its_first_step(stopped, tmp_path):
    """Its own session shows no fall; the report of the folder says the same."""
    exporter = resumed(stopped, tmp_path)
    whole = summarise(runs_in(tmp_path / "run")[-1])
    assert exporter.summary()["loss"] == whole.as_dict()["loss"]
    assert exporter.summary()["verdict"] == whole.verdict
    assert "in 360 records; the loss fell from" in whole.verdict


def test_a_resumed_run_says_what_was_lost_before_it(tmp_path):
    """The session before was killed, as far as its file knows, two steps before the checkpoint."""
    train(tmp_path, 12)
    train(tmp_path, 5, start_step=14)
    lines = tmp_path / "lines"
    writer = JsonlWriter(lines)
    writer.open(
        replace(read_run(tmp_path).info, session="1000-a-0", started=1.0, settings={"every": 1, "budget": None})
    )
    for record in read_run(tmp_path).records[:12]:
        writer.write(record)
    writer.keep()
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Exporter(model, backends=["jsonl"], logdir=lines, start_step=14, strict=True).watch() as exporter:
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.randn(3, 4)).square().mean().backward()
            optimizer.step()
    told = exporter.summary()
    assert told["steps"] == {"count": 17, "first": 1, "last": 19}
    assert "in the 17 records; 2 steps were lost (the session before ended before they were written)" in told["verdict"]
    assert told["verdict"] == summarise(runs_in(lines)[-1]).verdict


def test_a_model_that_is_seen_for_a_few_steps_is_not_judged_as_if_it_had_trained_for_all(tmp_path):
    """The log does not hold the steps before: what it began with is unknown."""
    torch.manual_seed(0)
    model = mlp()
    optimizer = adam(model, 1e-5)
    assert [str(issue) for issue in classify(tmp_path, model, optimizer, 40, 5000).issues] == []


def test_a_resumed_session_is_read_as_densely_as_a_first_one(stopped, tmp_path):
    """What differs shows in its first step."""
    resumed(stopped, tmp_path, steps=20)
    records = read_run(tmp_path / "run").records
    assert [r.step for r in records[300:] if r.get("parameter.weight_norm")] == [*range(301, 311), 315, 320]


def test_what_an_earlier_session_left_open_ends_where_it_is_not_found_again(tmp_path):
    """A softmax before the cross-entropy is gone since training was resumed."""
    model = mlp()
    classify(tmp_path, nn.Sequential(*model, nn.Softmax(1)), adam(model), 60)
    later = classify(tmp_path, model, adam(model), 130, 60)
    (wrong,) = [issue for issue in later.issues if issue.issue_type is IssueType.WRONG_LOSS]
    assert 160 <= wrong.healed_step <= 190
    for summary in (later.summary()["verdict"], summarise(runs_in(tmp_path)[-1]).verdict):
        assert "left open" not in summary
        assert summary.startswith("healthy")


def test_what_an_earlier_session_left_open_stays_open_where_it_is_found_again(tmp_path):
    """It is one issue since its first step."""
    model = mlp()
    sick = nn.Sequential(*model, nn.Softmax(1))
    classify(tmp_path, sick, adam(model), 60)
    classify(tmp_path, sick, adam(model), 130, 60)
    found = summarise(runs_in(tmp_path)[-1]).issues
    (wrong,) = [issue for issue in found if issue.issue_type is IssueType.WRONG_LOSS]
    assert wrong.open
    assert wrong.step < 60
