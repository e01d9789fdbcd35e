"""What an offline run holds is what was recorded, down to the last bit."""

import math

import numpy as np

from gradflow_export.records.catalog import CATALOG
from gradflow_export.records.step_record import Histogram, IssueType, Reading, Severity, StepRecord
from gradflow_export.writers.wandb.tables import HEALTH_COLUMNS

ODD = [None, 0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1e-45, 3.4e38, 0.1]
SITES = tuple(f"layer/{number}.weight" for number in range(len(ODD)))


def same(a, b):
    """Whether two numbers are the same to the last bit, NaN included; wandb-core drops the sign of zero."""
    return a == b or (math.isnan(a) and math.isnan(b))


def test_an_offline_log_equals_the_records(begin, make, read, ours):
    """Every headline number and every per-layer number comes back bit for bit, and what was missing is absent."""
    headlines = [name for name, spec in CATALOG.items() if spec.headline and spec.kind == "run"]
    random = np.random.default_rng(0)
    records = []
    for step in range(1, 40):
        run_level = [Reading.run(name, random.choice([math.nan, math.inf, 0.0, random.normal()])) for name in headlines]
        odd = Reading.of("parameter.gradient_norm", SITES, list(random.permutation(ODD)))
        records.append(StepRecord(step * 3, 1e9 + step, (*run_level, odd, Reading.run("custom.mine.x", step / 7))))
    run = begin()
    writer = make.writer(top=100, metrics=[*headlines, "parameter.gradient_norm"])
    for record in records:
        writer.write(record)
        run.log({"mine": record.step})
    writer.close()
    run.finish()
    rows = ours(read(run))
    for record, row in zip(records, rows, strict=False):
        wanted = {name: record.value(name) for name in (*headlines, "custom.mine.x")}
        wanted |= {f"parameter.gradient_norm/{site}": record.value("parameter.gradient_norm", site) for site in SITES}
        wanted = {"step": record.step, **{name: value for name, value in wanted.items() if value is not None}}
        besides = ("since", "flagged", "open_issues", "read_at")
        got = {name: value for name, value in row.items() if not name.startswith(besides)}
        assert got.keys() == wanted.keys()
        assert [(name, got[name], wanted[name]) for name in wanted if not same(got[name], wanted[name])] == []
    assert [row["step"] for row in rows if "step" in row] == [record.step for record in records]


def test_histograms_come_with_what_they_leave_out(begin, make, read, ours):
    """At most 32 bins, and how many entries were NaN or Inf; of a tensor without finite ones only that."""
    bins = Histogram("parameter.weight", "a", np.linspace(0, 1, 65), np.arange(64), 3)
    broken = Histogram("parameter.weight", "b", [0.0, math.nan], [0], 9)
    run, writer = begin(), make.writer()
    writer.write(make.record(1, histograms=(bins, broken)))
    run.log({"mine": 1})
    writer.close()
    run.finish()
    row = ours(read(run))[0]
    got = row["histogram/first"]
    assert got["_type"] == "histogram"
    assert (len(got["bins"]), len(got["values"]), sum(got["values"])) == (33, 32, sum(range(64)))
    counts = [row[f"flagged/parameter.weight_nonfinite:{site}"] for site in "ab"]
    assert counts == [3, 9]
    assert "histogram/last" not in row


def test_an_issue_is_told_once_and_kept_as_data(begin, make, read, ours):
    """One alert per incident, with what followed; a row of the issues table, and the verdict in table and summary."""
    opened, worse = make.issue(layer="fc"), make.issue(IssueType.NUMERICAL, Severity.CRITICAL, "fc", 5)
    again = make.issue(layer="fc", step=8)
    healed = make.issue(layer="fc", healed=6)
    gradient = Reading.of("parameter.gradient_norm", ("fc.weight",), [3.0])
    script = {3: (opened,), 5: (worse,), 6: (healed,), 8: (again,)}
    run, writer = begin(), make.writer()
    for step in range(1, 11):
        writer.write(make.record(step, gradient, issues=script.get(step, ())))
        writer._lane.wait(100)
        run.log({"mine": step})
    writer.close()
    run.finish()
    log = read(run)
    rows = ours(log)
    assert [(alert.title, alert.level) for alert in log.alerts] == [("gradflow: EXPLODING in fc", "ERROR")]
    assert "Since step: 3" in log.alerts[0].text
    assert "Followed by: NUMERICAL in fc since step 5" in log.alerts[0].text
    assert [row["open_issues"] for row in rows] == [0, 0, 1, 1, 2, 1, 1, 2, 2, 2]
    columns, cells = log.table(log.summary["gradflow/health"])
    assert tuple(columns) == HEALTH_COLUMNS
    assert cells == [["fc", "NUMERICAL (CRITICAL)", 3.0, None, None, None, "steady", 10.0, ""]]
    columns, data = log.table(log.summary["gradflow/issues"])
    assert [row[columns.index("until step")] for row in data] == [6.0, None, None]
    assert log.summary["gradflow/verdict"] == "1 problem: NUMERICAL in fc since step 5"
    assert log.summary["gradflow/issues_found"] == 3


def test_tables_come_at_a_slow_pace(begin, make, read, monkeypatch):
    """By the records' clock, and once at the end; those in between do not stay in rows of their own."""
    gradient = Reading.of("parameter.gradient_norm", ("fc.weight",), [math.inf])
    run, writer = begin(), make.writer(table_seconds=10.0)
    seen = []
    sender = writer._views.sender
    monkeypatch.setattr(writer._views, "sender", lambda *more: seen.append(more[1]) or sender(*more))
    for step in range(1, 36):
        writer.write(make.record(step, gradient))
        writer._lane.wait(100)
        run.log({"mine": step})
    writer.close()
    run.finish()
    log = read(run)
    _, cells = log.table(log.summary["gradflow/health"])
    assert seen == [11, 21, 31, 35]
    assert cells[0][2] in (math.inf, "Infinity")
    assert len(log.history) == 35


def test_the_run_is_described(begin, make, read):
    """What is known of the run is in its config, the user's own entries stay."""
    run = begin(config={"lr": 0.1})
    make.writer().close()
    run.finish()
    config = read(run).config
    assert config["lr"] == 0.1
    assert config["gradflow"]["model"] == "Net"
    assert config["gradflow"]["settings"] == {"every": 1}
    assert config["gradflow"]["blocks"] == ["a", "b"]


def test_the_summary_says_of_which_step_each_value_is(begin, make, read):
    """Whatever the newest records lack: old values are named with their steps, and one that was due and did not come is gone."""
    ends = {}
    for every in (1, 7, 40):
        run, writer = begin(), make.writer()
        for step in range(1, 41):
            readings = [Reading.run("loss", 1.0 if step < 25 else math.nan)]
            if step % 5 == 0:
                readings += [Reading.of("block.gain", ("a", "b"), [2.0, 3.0]), Reading.run("gain.mean_log", 1.0)]
                readings += [Reading.run("gain.depth", float(step))] if step < 25 else []
            if step % 4 == 0 and step < 30:
                readings += [Reading.run("update.ratio", float(step))]
            writer.write(make.record(step, *readings))
            if step % every == 0:
                run.log({"mine": step})
        writer.close()
        run.finish()
        log = read(run)
        ends[every] = {key: log.summary.get(f"gradflow/{key}") for key in ("gain.depth", "loss", "read_at", "step")}
        known = {}
        for row in log.history:
            step = row.get("gradflow/step")
            known |= {
                key: value for key, value in row.items() if key in ("gradflow/gain.depth", "gradflow/update.ratio")
            }
            for key, value in known.items():
                assert value == step or f"{key.removeprefix('gradflow/')} {value:.0f}" in row["gradflow/read_at"]
    wanted = {"gain.depth": None, "loss": "NaN", "read_at": "gain.depth 20, update.ratio 28", "step": 40}
    assert list(ends.values()) == [wanted] * 3
