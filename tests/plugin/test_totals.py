"""The summaries are counted from the log."""

from gradflow_export.records.step_record import IssueType, Severity, StepRecord
from tensorboard_plugin_gradflow.totals import summary, training_summary


def write_sick_run(folder, logs):
    """Write 20 steps with four problems and a note, two of them at the same step."""
    issues = (
        logs.issue(IssueType.EXPLODING, step=3),
        logs.issue(IssueType.EXPLODING, layer="b", step=3, healed=9),
        logs.issue(IssueType.LOSS_SPIKE, layer="", step=5),
        logs.issue(IssueType.MEMORY_LEAK, layer="", step=6),
        logs.issue(IssueType.VANISHING, Severity.INFO, step=7),
    )
    logs.write_run(folder, [*logs.plain_records(range(1, 20)), StepRecord(20, logs.EPOCH + 20, issues=issues)])


def test_the_training_summary_counts_issues_and_steps(tmp_path, logs, open_source):
    """A rate is a count per recorded step; a note is no anomaly."""
    write_sick_run(tmp_path / "a", logs)
    assert training_summary(open_source(tmp_path), "a") == {
        "v": 1,
        "run": "a",
        "total_steps": 20,
        "anomaly_steps": 3,
        "gradient_explosions": 2,
        "gradient_vanishing": 0,
        "loss_anomalies": 1,
        "anomaly_rate": 3 / 20,
        "loss_anomaly_rate": 1 / 20,
        "gradient_explosion_rate": 2 / 20,
        "gradient_vanishing_rate": 0.0,
    }


def test_the_summary_tells_training_from_the_rest(tmp_path, logs, open_source):
    """Memory belongs to the general share; without a run the newest one is meant."""
    write_sick_run(tmp_path / "a", logs)
    found = summary(open_source(tmp_path))
    assert (found["run"], found["open"]) == ("a", 3)
    assert found["by_type"] == {"EXPLODING": 2, "LOSS_SPIKE": 1, "MEMORY_LEAK": 1}
    assert found["training_debugger"]["total_anomalies"] == 3
    assert found["general_debugger"] == {"total_anomalies": 4, "debug_history_length": 5}


def test_an_empty_log_has_empty_summaries(tmp_path, open_source):
    """Zero steps, no division by zero."""
    assert training_summary(open_source(tmp_path))["anomaly_rate"] == 0
    assert summary(open_source(tmp_path))["run"] is None
