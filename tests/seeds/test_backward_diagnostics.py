"""Every snippet of the backward-diagnostics document runs as written, with the import changed; its outputs are matched."""

import json
import math
import re
import sys
import time
import types

import pytest
import torch
from torch import nn

import gradflow_export
from gradflow_export import (
    ArgumentError,
    ArgumentTypeError,
    BackwardPassDiagnostics,
    DiscreteUpdateAnalyzer,
    Exporter,
    IssueType,
    StorageError,
    create_modular_train_context,
)
from gradflow_export.records.step_record import Reading, StepRecord

BASIC_USAGE = """
from gradflow_export import create_modular_train_context

# Create training context with diagnostics enabled
train_context = create_modular_train_context("config/production.yaml")

# Train with automatic diagnostic monitoring
for epoch in range(num_epochs):
    loss, accuracy = train_context.train_single_sample(sample_idx)

# Generate diagnostic report
train_context.print_diagnostic_report()

# Save diagnostic data
train_context.save_diagnostic_data("logs/diagnostics.json")
"""

ADVANCED_CONFIGURATION = """
# config/production.yaml
diagnostics:
  enabled: true
  alerts_enabled: true
  gradient_explosion_threshold: 10.0
  gradient_vanishing_threshold: 1e-6
  parameter_stagnation_threshold: 1e-8
  loss_spike_threshold: 2.0
  memory_usage_threshold: 1000.0  # MB
"""

PROGRAMMATIC_ACCESS = """
# Get diagnostic summary
summary = train_context.get_diagnostic_summary()

# Access specific metrics
gradient_stats = summary['backward_pass_diagnostics']['gradient_statistics']
loss_analysis = summary['backward_pass_diagnostics']['loss_analysis']
parameter_updates = summary['backward_pass_diagnostics']['parameter_updates']

# Get gradient flow patterns
flow_analysis = summary['gradient_flow_analysis']
bottlenecks = flow_analysis['frequent_bottlenecks']

# Get discrete update effectiveness
update_analysis = summary['discrete_update_analysis']
effectiveness = update_analysis['mean_effectiveness']
"""

ALERT_CONFIGURATION = """
# Configure alert thresholds
alert_thresholds = {
    'gradient_explosion_threshold': 10.0,
    'gradient_vanishing_threshold': 1e-6,
    'parameter_stagnation_threshold': 1e-8,
    'loss_spike_threshold': 2.0,
    'memory_usage_threshold': 1000.0
}
"""

CONSOLE_OUTPUT = """\
🔍 BACKWARD PASS DIAGNOSTIC REPORT
================================================================================

📊 GRADIENT STATISTICS
----------------------------------------
discrete_phase_mean_norm      : 0.003421 ± 0.001234 (range: 0.000123 - 0.012345)
discrete_mag_mean_norm        : 0.002876 ± 0.000987 (range: 0.000098 - 0.009876)
upstream_mean_norm            : 0.001234 ± 0.000456 (range: 0.000012 - 0.005678)

📉 LOSS ANALYSIS
----------------------------------------
total_loss                    : 2.3456 (avg: 2.4567)
confidence_max_confidence     : 0.234 (avg: 0.345)
confidence_target_confidence  : 0.123 (avg: 0.234)

🔧 PARAMETER UPDATES
----------------------------------------
avg_phase_change              : 0.001234 ± 0.000456
avg_mag_change                : 0.000987 ± 0.000321
num_updated_nodes             : 3.000000 ± 1.234567

⏱️  TIMING ANALYSIS
----------------------------------------
total_backward_pass           : 12.34ms ± 3.45ms
loss_computation              : 2.34ms ± 0.56ms
discrete_gradients            : 4.56ms ± 1.23ms

🚨 STABILITY ALERTS
----------------------------------------
Gradient explosions: 0
Parameter stagnations: 2
Unstable updates: 0
Total backward passes: 100
Avg backward pass time: 12.34ms
"""

JSON_KEYS = {
    "gradient_stats": ["discrete_phase_mean_norm", "discrete_mag_mean_norm", "upstream_mean_norm"],
    "loss_decomposition": ["total_loss", "logit_max_logit", "confidence_max_confidence"],
    "parameter_updates": ["avg_phase_change", "avg_mag_change", "num_updated_nodes"],
    "timing_stats": ["total_backward_pass", "loss_computation", "discrete_gradients"],
    "stability_counts": ["gradient_explosion_count", "parameter_stagnation_count", "unstable_updates_count"],
}

EXTENSIBILITY = """
# Custom diagnostic analyzer
class CustomAnalyzer:
    def __init__(self, diagnostics):
        self.diagnostics = diagnostics

    def analyze_custom_metric(self, data):
        # Custom analysis logic
        pass

# Register custom analyzer
diagnostics.register_analyzer('custom', CustomAnalyzer(diagnostics))
"""

EVERY_STEP = {"logits": 1, "updates": 1, "discrete": 1}


def build(width=12):
    """Return what is trained: a small classifier and sixteen samples."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 3))
    samples = [(torch.randn(6), index % 3) for index in range(16)]
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.05), "dataset": samples}


def trained(steps=6, **settings):
    """Return a context after some steps, with everything read at each of them."""
    context = create_modular_train_context(**build(), intervals=EVERY_STEP, strict=True, **settings)
    for step in range(steps):
        context.train_single_sample(step % 16)
    return context


@pytest.fixture
def project(tmp_path, monkeypatch):
    """Return a folder that holds the configuration of the document and a module to build what is trained."""
    module = types.ModuleType("my_project_training")
    module.build = build
    module.nothing = lambda: 3
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config").mkdir()
    train = "\ntrain:\n  factory: my_project_training:build\n  arguments: {width: 8}\n"
    (tmp_path / "config" / "production.yaml").write_text(ADVANCED_CONFIGURATION + train)
    return tmp_path


def test_basic_usage_and_programmatic_access(project, capsys):
    """A context is made from the YAML file alone, trains sample by sample, reports, saves, and can be asked."""
    names = {"num_epochs": 5, "sample_idx": 3}
    exec(BASIC_USAGE, names)
    assert isinstance(names["loss"], float)
    assert names["accuracy"] in {0.0, 1.0}
    assert "Total backward passes: 5" in capsys.readouterr().out
    assert list(json.loads((project / "logs" / "diagnostics.json").read_text())) == list(JSON_KEYS)
    exec(PROGRAMMATIC_ACCESS, names)
    assert names["gradient_stats"]["discrete_phase_mean_norm"]["mean"] > 0
    assert names["loss_analysis"]["total_loss"]["count"] == 5
    assert names["parameter_updates"]["num_updated_nodes"]["last"] == 8 + 3
    assert names["flow_analysis"]["pattern"] == "uniform"
    assert names["bottlenecks"] == []
    assert names["effectiveness"] == pytest.approx(1.0, abs=1e-3)
    settings = names["train_context"].exporter.settings
    assert settings.enabled
    assert settings.thresholds["gradient_vanishing_threshold"] == 1e-6
    names["train_context"].close()


def test_alert_thresholds_are_taken_by_name():
    """The thresholds of the document are alerts beside the scale-free rules, and decide what is counted."""
    names = {}
    exec(ALERT_CONFIGURATION, names)
    thresholds = names["alert_thresholds"]
    with trained(alert_thresholds={**thresholds, "gradient_explosion_threshold": 1e-6}) as context:
        assert context.exporter.settings.thresholds["loss_spike_threshold"] == 2.0
        assert context.diagnostic_data()["stability_counts"]["gradient_explosion_count"] == 6
        assert IssueType.EXPLODING in {alert.issue_type for alert in context.alerts}


def test_diagnostics_that_are_switched_off_say_that_there_is_no_data():
    """With enabled: false nothing is watched, training goes on, and every method answers."""
    with trained(config={"diagnostics": {"enabled": False}}) as context:
        assert context.diagnostic_report().count("no data") == 12
        assert context.get_diagnostic_summary()["discrete_update_analysis"]["mean_effectiveness"] is None


def pattern_of(text):
    """Return a text with each number replaced by how many decimals it has."""
    return re.sub(r"\d+(?:\.(\d+))?", lambda m: f"<{len(m[1] or '')}>", text)


def test_the_console_output_is_that_of_the_document(capsys):
    """Every line has the document's name, order, padding and number of decimals."""
    with trained() as context:
        context.print_diagnostic_report()
    assert pattern_of(capsys.readouterr().out) == pattern_of(CONSOLE_OUTPUT)


def test_the_json_export_has_the_keys_of_the_document(tmp_path):
    """Sections and series in the document's order, numbers per step in seconds, and counts."""
    with trained() as context:
        context.save_diagnostic_data(tmp_path / "new" / "folder" / "diagnostics.json")
    data = json.loads((tmp_path / "new" / "folder" / "diagnostics.json").read_text())
    assert {section: list(series) for section, series in data.items()} == JSON_KEYS
    for section in list(JSON_KEYS)[:3]:
        assert {len(values) for values in data[section].values()} == {6}
    assert all(isinstance(x, float) for values in data["gradient_stats"].values() for x in values)
    assert len(data["timing_stats"]["total_backward_pass"]) == 6
    assert all(isinstance(count, int) for count in data["stability_counts"].values())


def test_a_custom_analyzer_is_asked_about_every_record():
    """The class of the document can be registered; one that returns numbers makes metrics of them."""
    seen = []
    model = build()["model"]
    with BackwardPassDiagnostics(model, backends="memory", strict=True) as diagnostics:
        exec(EXTENSIBILITY, {"diagnostics": diagnostics})
        diagnostics.register_analyzer("mine", lambda record: seen.append(record.step) or {"twice": 2 * record.step})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(4, 6)).square().mean().backward()
            optimizer.step()
        assert diagnostics.get_diagnostic_summary()["backward_pass_diagnostics"]["records"] == 3
    assert seen == [1, 2, 3]


def test_the_numbers_are_those_of_the_loop():
    """Losses, upstream gradients and times are what the loop itself computes; the sum of nodes is that of all rows."""
    parts = build()
    model, optimizer, samples = parts["model"], parts["optimizer"], parts["dataset"]
    losses, upstream = [], []
    criterion = nn.CrossEntropyLoss()
    with BackwardPassDiagnostics(model, criterion, intervals=EVERY_STEP, strict=True) as diagnostics:
        for x, y in samples[:5]:
            optimizer.zero_grad()
            logits = model(x[None])
            logits.retain_grad()
            loss = criterion(logits, torch.tensor([y]))
            loss.backward()
            losses.append(loss.item())
            upstream.append(logits.grad.double().norm().item())
            optimizer.step()
        data = diagnostics.diagnostic_data()
    assert data["loss_decomposition"]["total_loss"] == pytest.approx(losses, rel=1e-6)
    assert data["gradient_stats"]["upstream_mean_norm"] == pytest.approx(upstream, rel=1e-6)
    assert data["parameter_updates"]["num_updated_nodes"] == [15.0] * 5
    assert all(value > 0 for value in data["timing_stats"]["total_backward_pass"])


def test_loss_components_are_part_of_the_decomposition():
    """Components that are handed over appear beside the total, with their share."""
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with BackwardPassDiagnostics(model, strict=True) as diagnostics:
        for _ in range(4):
            out = model(torch.ones(2, 3))
            parts = {"data": out.square().mean(), "decay": torch.tensor(0.5)}
            optimizer.zero_grad()
            loss = sum(parts.values())
            loss.backward()
            diagnostics.exporter.observe(loss=loss, components=parts)
            optimizer.step()
        data = diagnostics.diagnostic_data()["loss_decomposition"]
        told = diagnostics.get_diagnostic_summary()["backward_pass_diagnostics"]["loss_analysis"]["components"]
    assert data["component_decay"] == [0.5] * 4
    total = [a + b for a, b in zip(data["component_data"], data["component_decay"], strict=True)]
    assert data["total_loss"] == pytest.approx(total, rel=1e-6)
    assert told["data"]["share"] + told["decay"]["share"] == pytest.approx(1.0)


def test_rules_of_thumb_are_told_in_words():
    """A learning rate above 1 with a NaN loss, and gradients that are never set to zero."""
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0)
    with BackwardPassDiagnostics(model, backends=()) as diagnostics:
        for step in range(4):
            loss = model(torch.ones(2, 3)).square().mean() * (math.nan if step == 3 else 1.0)
            diagnostics.exporter.observe(loss=loss)
            loss.backward()
            optimizer.step()
        text = " ".join(diagnostics.get_diagnostic_summary()["backward_pass_diagnostics"]["warnings"])
    assert "learning rate is 2: too high" in text
    assert "zero_grad()" in text


def test_diagnostics_can_read_an_exporter_that_exists():
    """No second set of hooks: a second reader changes nothing, and is not closed by the first."""
    model = build()["model"]
    exporter = Exporter(model, backends=(), strict=True)
    diagnostics = BackwardPassDiagnostics(exporter)
    exporter.watch(pairs="rows")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 6)).square().mean().backward()
        optimizer.step()
    diagnostics.close()
    assert diagnostics.get_diagnostic_summary()["discrete_update_analysis"]["samples"] == 3
    exporter.close()


def test_a_sample_that_rests_is_no_parameter_that_does():
    """Of a long table a few rows move, and the entries that are looked at may be others: the checksum is of all."""
    analyzer = DiscreteUpdateAnalyzer()
    for step in range(1, 5):
        readings = (
            Reading.of("parameter.update_norm", ["table", "head"], [0.0, 0.0]),
            Reading.of("parameter.changed", ["table", "head"], [None if step == 1 else 1.0, 0.0]),
        )
        analyzer.add(StepRecord(step, 1.0, readings))
    assert analyzer.summary()["update_frequency"] == {"table": 0.75, "head": 0.0}


def test_updates_can_be_compared_by_hand():
    """The analyzer scores tensors, on a declared grid too."""
    analyzer = DiscreteUpdateAnalyzer()
    before, meant = torch.ones(4).bfloat16(), torch.tensor([0.001, 0.001, 0.5, 0.5])
    scores = analyzer.analyze(before, (before.float() + meant).bfloat16(), meant)
    assert scores["lost_share"] == 0.5
    assert scores["effectiveness"] == pytest.approx(1.0, abs=1e-4)
    grid = analyzer.analyze(torch.zeros(2), torch.tensor([0.1, 0.2]), torch.tensor([0.1, 0.2]), step=0.25)
    assert (grid["lost_share"], grid["changed_share"]) == (0.5, 0.5)


@pytest.mark.parametrize(
    ("call", "kind", "text"),
    [
        (create_modular_train_context, ArgumentError, "needs a model, got none; pass model="),
        (lambda: create_modular_train_context(model=nn.Linear(1, 1)), ArgumentError, "needs a dataset"),
        (lambda: create_modular_train_context({"train": 3}), ArgumentError, "must hold factory"),
        (lambda: create_modular_train_context({"train": {"factory": "no_such:f"}}), ArgumentError, "got 'no_such:f'"),
        (
            lambda: create_modular_train_context({"train": {"factory": "my_project_training:nothing"}}),
            ArgumentTypeError,
            "must return a mapping",
        ),
        (lambda: create_modular_train_context("none.yaml"), StorageError, "cannot be read"),
        (lambda: BackwardPassDiagnostics(nn.Linear(1, 1), buffer=0), ArgumentError, "at least 1 value"),
        (lambda: BackwardPassDiagnostics(nn.Linear(1, 1), buffer="many"), ArgumentTypeError, "got 'many'"),
        (lambda: BackwardPassDiagnostics(nn.Linear(1, 1), every_step=1), ArgumentError, "unknown setting"),
        (
            lambda: BackwardPassDiagnostics(Exporter(nn.Linear(1, 1), backends=()), every=2),
            ArgumentError,
            "has its settings already",
        ),
        (
            lambda: DiscreteUpdateAnalyzer().analyze(torch.ones(1), torch.ones(2), torch.ones(2)),
            ArgumentError,
            "must have one shape",
        ),
        (
            lambda: DiscreteUpdateAnalyzer().analyze(torch.ones(1), torch.ones(1), torch.ones(1), step=0.0),
            ArgumentError,
            "width of the grid",
        ),
    ],
)
@pytest.mark.usefixtures("project")
def test_wrong_arguments_are_named(call, kind, text):
    """The message says what was expected, what came and what to do."""
    with pytest.raises(kind, match=text):
        call()


def test_data_are_only_written_where_that_is_possible(tmp_path):
    """A wrong ending and a folder that is a file are told."""
    (tmp_path / "file").write_text("")
    with BackwardPassDiagnostics(build()["model"]) as diagnostics:
        with pytest.raises(ArgumentError, match=r"ending in \.json"):
            diagnostics.save_diagnostic_data(tmp_path / "data.txt")
        with pytest.raises(StorageError, match="cannot make the folder"):
            diagnostics.save_diagnostic_data(tmp_path / "file" / "data.json")


def test_the_names_of_the_document_are_public():
    """Coordinator, flow analysis and discrete analysis are what the document calls them."""
    for name in ("BackwardPassDiagnostics", "GradientFlowAnalyzer", "DiscreteUpdateAnalyzer"):
        assert getattr(gradflow_export, name).__name__ == name


def plainly(diagnostics_of, steps, *, criterion=None):
    """Use the diagnostics as the document does, without a word about intervals; return them, closed."""
    parts = build()
    model, optimizer, samples = parts["model"], parts["optimizer"], parts["dataset"]
    criterion = nn.CrossEntropyLoss() if criterion is None else criterion
    with diagnostics_of(model, criterion) as diagnostics:
        for step in range(steps):
            x, y = samples[step % 16]
            optimizer.zero_grad()
            criterion(model(x[None]), torch.tensor([y])).backward()
            optimizer.step()
            yield diagnostics, step


@pytest.mark.parametrize("steps", [1, 7, 130])
def test_the_json_export_has_one_value_for_each_backward_pass(steps, tmp_path):
    """In every series, however long the run, before and after it is closed, without any setting."""
    for diagnostics, step in plainly(BackwardPassDiagnostics, steps):
        if step == steps - 1:
            diagnostics.save_diagnostic_data(tmp_path / "open.json")
    diagnostics.save_diagnostic_data(tmp_path / "closed.json")
    for name in ("open", "closed"):
        data = json.loads((tmp_path / f"{name}.json").read_text())
        assert {section: list(series) for section, series in data.items()} == JSON_KEYS
        lengths = {name: len(values) for part in list(JSON_KEYS)[:4] for name, values in data[part].items()}
        assert lengths == dict.fromkeys(lengths, steps)


def test_chosen_intervals_are_kept(tmp_path):
    """Those that are named, in arguments or in the configuration; the others are read at every step."""
    by_argument = BackwardPassDiagnostics(build()["model"], intervals={"updates": 7})
    (tmp_path / "config.yaml").write_text("diagnostics:\n  intervals: {updates: 7}\n")
    by_file = BackwardPassDiagnostics(build()["model"], config=str(tmp_path / "config.yaml"))
    for diagnostics in (by_argument, by_file):
        told = diagnostics.exporter.settings.schedule.intervals
        assert (told["updates"], told["logits"], told["discrete"], told["blocks"]) == (7, 1, 1, 25)
        diagnostics.close()


def test_a_summary_waits_for_what_was_handed_over():
    """A worker that is slow makes it late and not incomplete; so does one asked in the middle of training."""
    for diagnostics, step in plainly(BackwardPassDiagnostics, 60):
        if step == 0:
            diagnostics.register_analyzer("slow", lambda _: time.sleep(0.01))
        if step in {30, 59}:
            told = diagnostics.get_diagnostic_summary()
            assert told["backward_pass_diagnostics"]["records"] == step + 1
            assert told["discrete_update_analysis"]["samples"] == step + 1


def test_small_nodes_are_named():
    """A row whose gradient is far below that of the others, in summary and report; nothing is said where none is."""

    class Uneven(nn.Module):
        def __init__(self, quiet):
            super().__init__()
            self.linear = nn.Linear(6, 9)
            self.register_buffer("scale", torch.ones(9))
            self.scale[list(quiet)] = 1e-6

        def forward(self, x):
            return self.linear(x) * self.scale

    for quiet in ((), (4,), (2, 7)):
        torch.manual_seed(0)
        model = Uneven(quiet)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with BackwardPassDiagnostics(model, strict=True) as diagnostics:
            for _ in range(10):
                optimizer.zero_grad()
                model(torch.randn(32, 6)).sum().square().backward()
                optimizer.step()
            summary, report = diagnostics.get_diagnostic_summary(), diagnostics.diagnostic_report()
        named = [f"linear.weight[{row}]" for row in quiet]
        expected = [{"node": node, "count": 10, "share": 1.0} for node in named]
        assert summary["gradient_flow_analysis"]["small_nodes"] == expected
        assert summary["discrete_update_analysis"]["small_nodes"] == expected
        assert ("NODES" in report) is bool(quiet)
        for node in named:
            assert f"{node} (100 % of readings)" in report
    assert set(summary["discrete_update_analysis"]["nodes"]["update_frequency"].values()) == {1.0}
    assert len(summary["discrete_update_analysis"]["nodes"]["effectiveness"]) == 9
    json.dumps(summary, allow_nan=False)
