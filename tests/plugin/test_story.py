"""The model as it is, and what belongs on every time axis."""

import torch
from torch import nn

from gradflow_export import Exporter
from gradflow_export.records.step_record import Note, Reading, StepRecord
from tensorboard_plugin_gradflow.standalone import open_source
from tensorboard_plugin_gradflow.story import architecture, ramps_of, time_axis


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x):
        return x + torch.relu(self.inner(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 2)
        self.blocks = nn.ModuleList(Block(4) for _ in range(3))
        self.twice = self.blocks[0]
        self.nested = nn.Sequential(nn.Sequential(nn.Tanh(), nn.Identity()))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.nested(self.head(x))


def train(logdir, steps=4):
    """Train a small model and return it, after remarks of the user."""
    torch.manual_seed(0)
    model, criterion = Net(), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Exporter(model, logdir=logdir).watch(criterion) as exporter:
        for step in range(1, steps + 1):
            optimizer.zero_grad()
            criterion(model(torch.randn(8, 4)), torch.randint(2, (8,))).backward()
            if step == 3:
                exporter.mark("longer sequences")
                exporter.mark("saved", kind="checkpoint")
            optimizer.step()
    return model


def test_the_architecture_is_told_once_with_sources_and_order(tmp_path):
    """Each module has its class, where that is defined, its parameters, and when and where it was first called."""
    model = train(tmp_path / "a")
    answer = architecture(open_source(tmp_path), "a")
    modules = {module["name"]: module for module in answer["modules"]}
    assert answer["total"] == len(modules) == len(dict(model.named_modules())) + 1
    for name, module in model.named_modules():
        assert modules[name]["kind"] == type(module).__name__
        assert modules[name]["parameters"] == sum(p.numel() for p in module.parameters())
        assert modules[name]["own"] == sum(p.numel() for p in module.parameters(recurse=False))
    block = modules["blocks.1"]
    assert block["file"].endswith("test_story.py")
    line = open(block["file"], encoding="utf-8").readlines()[block["line"] - 1]  # noqa: PTH123, SIM115
    assert line.startswith("class Block")
    assert answer["modules"][block["parent"]]["name"] == "blocks"
    assert (block["block"], modules["head"]["block"]) == (True, False)
    written = {"blocks.1": "x = block(x)", "blocks.1.inner": "x + torch.relu(self.inner(x))", "": "criterion(model("}
    written |= dict.fromkeys(("nested", "nested.0", "nested.0.1"), "self.nested(self.head(x))")
    for name, text in written.items():
        called = modules[name]
        assert text in open(called["call_file"], encoding="utf-8").readlines()[called["call_line"] - 1]  # noqa: PTH123, SIM115
    assert (modules["blocks"]["call_file"], modules["blocks"]["call_line"]) == (None, None)
    # Those inside end first; the head is registered first and called last.
    called = ["blocks.0.inner", "blocks.0", "blocks.1.inner", "blocks.1", "blocks.2.inner", "blocks.2", "head"]
    called += ["nested.0.0", "nested.0.1", "nested.0", "nested", ""]
    assert [modules[name]["order"] for name in called] == list(range(12))
    assert (modules["blocks"]["order"], modules["blocks"]["calls"]) == (None, None)
    assert modules["twice"]["shared"] == "blocks.0"
    assert modules["twice"]["own"] == modules["twice"]["parameters"] == 0


def test_a_module_inside_itself_ends(tmp_path):
    """Somebody may keep a reference to the whole model in one of its parts."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    with Exporter(model, logdir=tmp_path / "a").watch() as exporter:
        model[0].whole = model
        optimizer = torch.optim.SGD([*nn.Module.parameters(model[1])], 0.1)
        model[1](torch.randn(2, 3)).sum().backward()
        optimizer.step()
        del model[0].whole
    del exporter
    assert architecture(open_source(tmp_path), "a")["v"] == 1


def test_marks_of_the_user_are_annotations(tmp_path):
    """At the step under way, in the order of steps."""
    train(tmp_path / "a")
    found = time_axis(open_source(tmp_path), "a")
    assert [(item["kind"], item["step"], item["text"]) for item in found["annotations"]] == [
        ("mark", 3, "longer sequences"),
        ("checkpoint", 3, "saved"),
    ]


def test_a_bad_mark_is_told_and_left_out(tmp_path, caplog):
    """Nothing raises into the loop."""
    model = nn.Linear(2, 2)
    with Exporter(model, logdir=tmp_path).watch() as exporter:
        exporter.mark(3)
        exporter.mark("x", kind="birthday")
    assert caplog.text.count("mark() expects a text") == 2


def test_an_older_log_has_no_architecture(tmp_path, logs):
    """The answer is empty, not an error."""
    logs.write_run(tmp_path / "a", logs.plain_records(range(1, 9)))
    assert architecture(open_source(tmp_path), "a")["modules"] == []


def test_a_newer_session_and_gaps_are_annotations(tmp_path, logs):
    """Where training resumed, and where nothing was recorded."""
    logs.write_run(tmp_path / "a", logs.plain_records([*range(1, 20), *range(100, 120)]))
    logs.write_run(tmp_path / "a", logs.plain_records(range(115, 130)), start=1000)
    found = time_axis(open_source(tmp_path), "a")["annotations"]
    assert [(item["kind"], item["step"], item["last"]) for item in found] == [("gap", 20, 99), ("resumed", 115, 115)]


def test_steps_that_the_budget_leaves_out_are_no_gap(tmp_path, logs):
    """A record says of how many steps it is one; a distance of that order is as it should be."""
    records = [
        StepRecord(step, logs.EPOCH + step, (Reading.run("schedule.spacing", 1.0 if step <= 100 else 32.0),))
        for step in (*range(1, 101), *range(132, 260, 32), 1000)
    ]
    logs.write_run(tmp_path / "a", records)
    found = time_axis(open_source(tmp_path), "a")["annotations"]
    assert [(item["kind"], item["step"], item["last"]) for item in found] == [("gap", 229, 999)]


def test_changes_of_the_learning_rate_are_annotations(tmp_path, logs):
    """A drop is one, a warm-up is one from end to end, and small steps on the way are none."""
    rates = [*(0.01 * n for n in range(1, 11)), *[0.1] * 10, *[0.01] * 10, *[0.0101] * 5]
    records = [
        StepRecord(step, logs.EPOCH + step, (Reading.run("learning_rate", rate),)) for step, rate in enumerate(rates, 1)
    ]
    logs.write_run(tmp_path / "a", records)
    found = time_axis(open_source(tmp_path), "a")["annotations"]
    assert [(item["step"], item["last"], round(item["from"], 3), round(item["to"], 3)) for item in found] == [
        (2, 10, 0.01, 0.1),
        (21, 21, 0.1, 0.01),
    ]


def test_ramps_end_where_the_rate_rests_or_turns():
    """Against examples."""
    assert ramps_of([1, 2, 3, 4, 5, 6], [1, 2, 3, 3, 2, 4]) == [(2, 3, 1, 3), (5, 5, 3, 2), (6, 6, 2, 4)]
    assert ramps_of([], []) == []


def test_many_marks_do_not_push_each_other_out_of_order(tmp_path, logs):
    """What the user wrote is told first, up to 500, and the rest is counted."""
    records = [
        StepRecord(step, logs.EPOCH + step, notes=(Note("mark", str(step), step), Note("later", "x", step)))
        for step in range(1, 601)
    ]
    logs.write_run(tmp_path / "a", records)
    found = time_axis(open_source(tmp_path), "a")
    assert found["total"] == 600
    assert [item["step"] for item in found["annotations"]] == list(range(1, 501))
