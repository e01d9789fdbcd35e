"""Issues that something beside the rules found reach records, reports and writers."""

import torch
from torch import nn

from gradflow_export import Exporter, Issue, IssueType, MemoryWriter, Severity, read_run


def issue(step, kind=IssueType.EXPLODING, layer="0.weight", **more):
    """An issue as a debugger makes it."""
    return Issue(kind, Severity.HIGH, layer, step, 12.0, 10.0, "seen.", "do.", **more)


def watched(**settings):
    """A model, its optimizer, and an exporter that keeps records in memory."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    memory = MemoryWriter()
    exporter = Exporter(model, backends=[memory], strict=True, **settings).watch()
    return model, torch.optim.SGD(model.parameters(), lr=0.01), exporter, memory


def train(model, optimizer, steps=1, scale=1.0):
    """Make some steps."""
    for _ in range(steps):
        optimizer.zero_grad()
        (model(torch.ones(2, 3)) * scale).sum().backward()
        optimizer.step()


def test_a_told_issue_is_written_with_the_record_of_its_step():
    """What is told between two steps stands in the record of the second."""
    model, optimizer, exporter, memory = watched()
    train(model, optimizer, 2)
    told = issue(exporter.current_step)
    exporter.add_issue(told)
    train(model, optimizer, 2)
    assert exporter.issues == (told,)
    exporter.close()
    assert [record.step for record in memory.records if record.issues] == [3]
    assert len(memory.records) == 4


def test_the_step_of_an_issue_is_that_of_its_record():
    """Whatever step an issue names, it gets that of the step during which it was told, from the first step on."""
    model, optimizer, exporter, memory = watched()
    train(model, optimizer)
    exporter.add_issue(issue(700))
    train(model, optimizer)
    exporter.add_issue(issue(700, healed_step=1))
    train(model, optimizer)
    exporter.close()
    assert [(record.step, [(i.step, i.healed_step) for i in record.issues]) for record in memory.records] == [
        (1, []),
        (2, [(2, None)]),
        (3, [(2, 3)]),
    ]


def test_an_issue_of_a_step_that_a_budget_leaves_out_keeps_its_step():
    """It stands in the next record, as does its end, and both name the steps in which they were told."""
    model, optimizer, exporter, memory = watched()
    for number in range(1, 201):
        if number == 99:
            exporter._loop.clock._spacing.value = 64
        if number in (140, 150):
            exporter.add_issue(issue(0, IssueType.DEAD, healed_step=1 if number == 150 else None))
        optimizer.zero_grad()
        model(torch.ones(2, 3)).square().mean().backward()
        optimizer.step()
    exporter.close()
    assert not {140, 150} & {record.step for record in memory.records}
    found = {(i.step, i.healed_step) for r in memory.records for i in r.issues if i.issue_type is IssueType.DEAD}
    assert found == {(140, None), (140, 150)}


def test_a_told_issue_heals():
    """The same issue with a healed step closes it, and one that was never told is ignored."""
    model, optimizer, exporter, memory = watched()
    exporter.add_issue(issue(1))
    train(model, optimizer, 2)
    exporter.add_issue(issue(1, healed_step=3))
    exporter.add_issue(issue(2, IssueType.VANISHING, healed_step=3))
    train(model, optimizer, 2)
    assert [(found.issue_type, found.healed_step) for found in exporter.issues] == [(IssueType.EXPLODING, 3)]
    exporter.close()
    assert [len(record.issues) for record in memory.records] == [1, 0, 1, 0]


def test_what_a_rule_says_already_is_not_said_twice():
    """A NaN that the rules find themselves is told once, whoever sees it first in the step."""
    model, optimizer, exporter, _ = watched()
    train(model, optimizer, 2)
    exporter.add_issue(issue(exporter.current_step, IssueType.NUMERICAL, layer=""))
    train(model, optimizer, 1, scale=float("nan"))
    assert [found.issue_type for found in exporter.issues] == [IssueType.NUMERICAL]
    exporter.close()


def test_what_is_told_after_the_last_record_is_not_lost(tmp_path):
    """A finding after the last recorded step is in the file, also where only every tenth step is recorded."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    exporter = Exporter(model, logdir=tmp_path, every=10).watch()
    train(model, optimizer, 12)
    told = issue(exporter.current_step, layer="weight")
    exporter.add_issue(told)
    exporter.close()
    assert exporter.issues == (told,)
    assert [found for record in read_run(tmp_path).records for found in record.issues] == [told]


def test_switched_off_alerts_stay_off():
    """``alerts_enabled=False`` lets nobody raise an issue, and before ``watch`` there is no step to raise it in."""
    model, optimizer, exporter, _ = watched(alerts_enabled=False)
    exporter.add_issue(issue(1))
    train(model, optimizer, 2)
    assert exporter.issues == ()
    exporter.close()
    late = Exporter(model, backends=())
    late.add_issue(issue(1))
    assert late.current_step == 0
    assert late.issues == ()
