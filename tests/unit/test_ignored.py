"""Issues that a user chose to ignore are listed, and raise no alert."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradflow_export import ArgumentError, ArgumentTypeError, Exporter, Issue, IssueType, MemoryWriter, Severity
from gradflow_export.records.ignored import Ignored, ignored


class Unused(nn.Module):
    """Two of four layers are never called."""

    def __init__(self):
        super().__init__()
        self.first, self.pooler, self.spare, self.last = (
            nn.Linear(6, 8), nn.Sequential(nn.Linear(8, 8)), nn.Linear(8, 8), nn.Linear(8, 2),
        )  # fmt: skip

    def forward(self, x):
        return self.last(self.first(x).relu())


def watched(ignore, **settings):
    torch.manual_seed(0)
    model = Unused()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    memory = MemoryWriter()
    exporter = Exporter(model, backends=[memory], strict=True, synchronous=True, **settings).watch(ignore=ignore)
    with exporter:
        for _ in range(20):
            x = torch.randn(16, 6)
            optimizer.zero_grad()
            F.cross_entropy(model(x), (x[:, 0] > 0).long()).backward()
            optimizer.step()
        exporter.issues  # noqa: B018 - waits for the worker
    return exporter, memory


def layers(issues, kind=IssueType.NOT_TRAINING):
    return {layer for issue in issues if issue.issue_type is kind for layer in issue.layers}


SPARE, POOLER = {"spare.weight", "spare.bias"}, {"pooler.0.weight", "pooler.0.bias"}


@pytest.mark.parametrize(("ignore", "told", "meant"), [
    ((), SPARE | POOLER, set()),
    ([("NOT_TRAINING", "pooler")], SPARE, POOLER),
    ([("NOT_TRAINING", "spare.weight")], POOLER | {"spare.bias"}, {"spare.weight"}),
    ([("NOT_TRAINING", "*.bias")], {"spare.weight", "pooler.0.weight"}, {"spare.bias", "pooler.0.bias"}),
    (["NOT_TRAINING"], set(), SPARE | POOLER),
    ([("DEAD", "pooler"), ("NOT_TRAINING", "pool[!e]*")], SPARE | POOLER, set()),
])  # fmt: skip
def test_what_is_ignored_is_listed_and_is_no_issue(ignore, told, meant):
    """By type and by module, name or shell pattern; of one finding each layer counts by itself."""
    exporter, memory = watched(ignore)
    assert (layers(exporter.issues), layers(exporter.ignored)) == (told, meant)
    assert {layer for record in memory.records for layer in layers(record.issues)} == told
    assert ("ignored  NOT_TRAINING" in exporter.report()) is bool(meant)
    assert ("NOT_TRAINING" in {item["issue_type"] for item in exporter.summary()["ignored"]}) is bool(meant)


def test_a_configuration_and_the_argument_add_up():
    """Both are ignored, and the configuration is told in the description of the run."""
    exporter, _ = watched([("NOT_TRAINING", "pooler")], config={"ignore": [["NOT_TRAINING", "spare"]]})
    assert layers(exporter.issues) == set()
    assert layers(exporter.ignored) == SPARE | POOLER
    assert exporter.settings.as_json()["ignore"] == [["NOT_TRAINING", "spare"]]


def test_an_issue_that_something_else_found_is_ignored_too():
    """What is handed to add_issue() opens and heals among the ignored."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    issue = Issue(IssueType.DEAD, Severity.HIGH, "part", 1, 1.0, 1.0, "seen.", "mend it.")
    with Exporter(model, backends=[MemoryWriter()], strict=True).watch(ignore=["DEAD"]) as exporter:
        exporter.add_issue(issue)
        optimizer.step()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        assert [found.layer for found in exporter.ignored] == ["part"]
        assert exporter.issues == ()


@pytest.mark.parametrize(("given", "error", "words"), [
    ([("NOT_TRANING", "a")], ArgumentError, "did you mean 'NOT_TRAINING'"),
    (["dead"], ArgumentError, "did you mean 'DEAD'"),
    ("NOT_TRAINING", ArgumentTypeError, "list of issue types, or pairs"),
    (3, ArgumentTypeError, "list of issue types, or pairs"),
    ([("DEAD",)], ArgumentTypeError, "hold issue types, or pairs"),
    ([("DEAD", 1)], ArgumentTypeError, "hold issue types, or pairs"),
])  # fmt: skip
def test_what_cannot_be_ignored_is_an_error_with_an_example(given, error, words):
    """An unknown type names the nearest; what is no list of pairs shows one."""
    with pytest.raises(error, match=words):
        Exporter(nn.Linear(2, 1), backends=[]).watch(ignore=given)
    with pytest.raises(error, match=words):
        Exporter(nn.Linear(2, 1), backends=[], config={"ignore": given})


def test_nothing_is_ignored_by_default():
    """``None`` and an empty list are nothing."""
    assert ignored(None) == ignored([]) == Ignored()


def test_a_layer_that_the_model_has_not_is_an_error_that_names_the_nearest():
    """A part of a module's name is none; what lies within a module, a parameter or a shell pattern is."""
    model = Unused()
    with pytest.raises(ArgumentError, match=r"ignore names 'poler', .* did you mean 'pooler'"):
        Exporter(model, backends=[]).watch(ignore=[("DEAD", "poler")])
    with pytest.raises(ArgumentError, match="no layer of the model"):
        Exporter(model, backends=[]).watch(ignore=[("DEAD", "pool")])
    for where in ("pooler", "pooler.0.weight", "pooler.0.head 3", "*.act", ""):
        Exporter(model, backends=[]).watch(ignore=[("DEAD", where)]).close()
