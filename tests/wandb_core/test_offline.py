"""What an offline run holds is what was recorded, down to the last bit."""

import math

import numpy as np

from gradflow_export.catalog import CATALOG
from gradflow_export.records import Reading, StepRecord

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
    writer = make.writer(top=100)
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
        got = {name: value for name, value in row.items() if name not in ("alerts", "open_issues")}
        assert got.keys() == wanted.keys()
        assert [(name, got[name], wanted[name]) for name in wanted if not same(got[name], wanted[name])] == []
    assert [row["step"] for row in rows] == [*(record.step for record in records), records[-1].step]
