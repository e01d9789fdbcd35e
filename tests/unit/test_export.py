"""Records as tables: every value comes back with the same bits, whatever is larger than memory stays on disk."""

import csv
import io
import json
import math
import subprocess
import sys

import numpy as np
import pyarrow.parquet
import pytest
import torch
from torch import nn

from gradflow_export import ArgumentError, Exporter, MemoryWriter, Reading, RunInfo, StepRecord, StorageError
from gradflow_export.cli import main
from gradflow_export.storage.table import COLUMNS, write_csv, write_json, write_parquet, write_table
from gradflow_export.writers import make_writer

HARD = (0.1, -0.0, 1e-45, 3.4e38, math.nan, math.inf, -math.inf, 1 / 3, None)
SITES = (*(f"layer.{index}" for index in range(len(HARD) - 1)), 'with "quotes", and\na line')


def records(count=3):
    """Records with every kind of value."""
    for step in range(1, count + 1):
        yield StepRecord(
            step,
            1732143600.123456 + step / 3,
            (Reading.run("loss", 2.0 / step), Reading.of("parameter.gradient_norm", SITES, HARD)),
        )


def expected(given):
    """What the table must hold: float32 values by place, *missing* left out."""
    return [
        (record.step, record.wall_time, reading.metric, site, np.float32(value))
        for record in given
        for reading in record.readings
        for site, value in reading.as_dict().items()
        if value is not None
    ]


def same(rows, wanted):
    """Whether two tables are equal, values bit for bit."""
    assert [row[:4] for row in rows] == [row[:4] for row in wanted]
    bits = [np.array([row[4] for row in table], dtype=np.float32).tobytes() for table in (rows, wanted)]
    assert bits[0] == bits[1]


def read_csv(text):
    """Read a table with nothing but the standard library."""
    header, *rows = csv.reader(io.StringIO(text, newline=""))
    assert tuple(header) == COLUMNS
    return [(int(step), float(time), metric, site, float(value)) for step, time, metric, site, value in rows]


def read_parquet(path):
    """Read a table with pyarrow."""
    table = pyarrow.parquet.read_table(path)
    assert tuple(table.column_names) == COLUMNS
    assert table.schema.field("value").type == "float"
    return list(zip(*(table.column(name).to_pylist() for name in COLUMNS), strict=True))


def test_csv_round_trips():
    """Every number is read back exactly, also as a float64; sites with quotes and line breaks too."""
    stream = io.StringIO()
    write_csv(stream, records())
    rows = read_csv(stream.getvalue())
    same(rows, expected(records()))
    assert rows[1][4] == float(np.float32(0.1))


def test_parquet_round_trips(tmp_path):
    """Every value is a float32 with the same bits, NaN and Inf among them."""
    write_parquet(tmp_path / "x.parquet", records())
    same(read_parquet(tmp_path / "x.parquet"), expected(records()))


def test_json_round_trips():
    """The document is strict JSON; missing is null, NaN and Inf are words."""
    stream = io.StringIO()
    write_json(stream, records(), RunInfo(session="1-0", started=1.0, model="MLP"))
    told = json.loads(stream.getvalue(), parse_constant=pytest.fail)
    assert told["info"]["model"] == "MLP"
    assert [line["step"] for line in told["records"]] == [1, 2, 3]
    values = told["records"][0]["metrics"]["parameter.gradient_norm"]
    assert [values[site] for site in SITES[4:7]] == ["NaN", "Infinity", "-Infinity"]
    assert values[SITES[-1]] is None
    assert np.float32(values[SITES[0]]) == np.float32(0.1)


def test_no_record_is_a_table_without_rows(tmp_path):
    """An empty run has columns and no rows, in each form."""
    for form in ("csv", "parquet", "json"):
        write_table(tmp_path / f"x.{form}", ())
    assert (tmp_path / "x.csv").read_text() == "step,wall_time,metric,site,value\n"
    assert read_parquet(tmp_path / "x.parquet") == []
    assert json.loads((tmp_path / "x.json").read_text()) == {"info": None, "records": []}


def test_records_are_written_as_they_come(tmp_path, monkeypatch):
    """Neither form holds more than one group of rows: what was taken is on its way before the next is asked for."""
    monkeypatch.setattr("gradflow_export.storage.table.GROUP_ROWS", 20)
    stream, path = io.StringIO(), tmp_path / "x.parquet"

    def watched(size, sizes):
        for record in records(40):
            sizes.append(size())
            yield record

    lines, bytes_written = [], []
    write_csv(stream, watched(lambda: len(stream.getvalue()), lines))
    write_parquet(path, watched(lambda: path.stat().st_size, bytes_written))
    assert len(set(lines)) == 40
    assert len(set(bytes_written)) > 10
    assert pyarrow.parquet.ParquetFile(tmp_path / "x.parquet").num_row_groups > 10


@pytest.mark.parametrize("backend", ["tensorboard", "jsonl", "memory"])
@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_an_exporter_saves_its_records_while_training_goes_on(backend, form, tmp_path):
    """What is saved between two steps holds every step so far, and training goes on being recorded."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    exporter = Exporter(model, backends=[backend], logdir=tmp_path / "run", strict=True).watch()
    read = (lambda path: read_csv(path.read_text())) if form == "csv" else read_parquet
    path = tmp_path / f"out.{form}"
    for step in range(1, 5):
        optimizer.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        if step in {2, 4}:
            exporter.save(path)
            assert sorted({row[0] for row in read(path)}) == list(range(1, step + 1))
    exporter.close()
    exporter.save(str(path))
    norms = [row for row in read(path) if row[2] == "parameter.gradient_norm" and row[0] == 4]
    assert {row[3]: row[4] for row in norms} == {"weight": pytest.approx(math.sqrt(12)), "bias": 2.0}
    assert list(tmp_path.glob("*.part")) == []


def test_an_exporter_without_records_says_so(tmp_path):
    """Without a writer that keeps records there is nothing to save as a table; the summary still is."""
    model = nn.Linear(2, 1)
    exporter = Exporter(model, backends="console", logdir=tmp_path).watch()
    with pytest.raises(ArgumentError, match="keeps records, got console; add 'tensorboard'"):
        exporter.save(tmp_path / "x.csv")
    with pytest.raises(ArgumentError, match=r"ending in .json, .csv or .parquet, got 'x.txt'"):
        exporter.save("x.txt")
    exporter.save(tmp_path / "x.json")
    exporter.close()
    assert json.loads((tmp_path / "x.json").read_text())["steps"]["count"] == 0
    early = Exporter(nn.Linear(2, 1), backends=[MemoryWriter()])
    early.save(tmp_path / "x.csv")
    assert read_csv((tmp_path / "x.csv").read_text()) == []


def test_a_place_that_cannot_be_written_is_told(tmp_path):
    """The old file stays, and no part of a new one."""
    (tmp_path / "x.csv").write_text("old")

    def failing():
        yield next(records())
        raise OSError(28, "No space left on device")

    with pytest.raises(StorageError, match="No space left"):
        write_table(tmp_path / "x.csv", failing())
    assert [path.name for path in tmp_path.iterdir()] == ["x.csv"]
    assert (tmp_path / "x.csv").read_text() == "old"
    with pytest.raises(StorageError, match="No such file"):
        write_table(tmp_path / "nowhere" / "x.parquet", ())
    with pytest.raises(ArgumentError, match=r"ending in .csv, .json, .parquet; got 'x.cvs'; did you mean 'csv'"):
        write_table("x.cvs", ())


def test_without_pyarrow_it_says_what_to_install():
    """The error holds the pip command and the way without it."""
    code = (
        "import sys; sys.modules['pyarrow'] = None\n"
        "from gradflow_export.storage.table import write_table\nwrite_table('x.parquet', ())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "pip install 'gradflow-export[parquet]', or write a .csv file" in done.stderr


def write_runs(folder, names):
    """Write runs of two steps."""
    for name in names:
        writer = make_writer("tensorboard", folder / name)
        writer.open(RunInfo(session="1732143600123-0", started=1732143600.123, model="MLP"))
        for record in records(2):
            writer.write(record)
        writer.close()


def test_the_command_writes_one_run_to_the_terminal(tmp_path, capsys):
    """CSV and JSON go where a pipe can take them."""
    write_runs(tmp_path, ["a"])
    assert main(["export", str(tmp_path), "--format", "csv"]) == 0
    same(read_csv(capsys.readouterr().out), expected(records(2)))
    assert main(["export", str(tmp_path), "--format", "json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["records"]) == 2


def test_the_command_writes_files(tmp_path, capsys):
    """One run goes to a file or into a folder, several runs each to a file of its own."""
    write_runs(tmp_path / "runs", ["a", "b/c"])
    assert (
        main(["export", str(tmp_path / "runs" / "a"), "--format", "parquet", "--output", f"{tmp_path}/x.parquet"]) == 0
    )
    same(read_parquet(tmp_path / "x.parquet"), expected(records(2)))
    for form in ("csv", "parquet", "json"):
        assert main(["export", str(tmp_path / "runs"), "--format", form, "--output", f"{tmp_path}/out"]) == 0
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == ["a.csv", "a.json", "a.parquet", "b__c.csv", "b__c.json", "b__c.parquet"]
    assert "2 steps" in capsys.readouterr().out


def test_a_folder_that_two_processes_and_then_a_third_run_wrote_to_is_exported_whole(tmp_path, capsys):
    """The newest run has the folder's name, the others that of their session too; a single file says what it leaves out."""
    sessions = {"1000000-a-0": 1000.0, "1000001-b-0": 1000.001, "9000000-c-0": 9000.0}
    for length, (session, began) in enumerate(sessions.items(), 2):
        writer = make_writer("jsonl", tmp_path / "two")
        writer.open(RunInfo(session=session, started=began, model="MLP"))
        for step in range(1, length + 1):
            writer.write(StepRecord(step, began + step, (Reading.run("loss", 1.0),)))
        writer.close()
    assert main(["report", str(tmp_path / "two"), "--details"]) == 0
    said = capsys.readouterr().out
    assert all(f"steps 1 to {length}, " in said for length in (2, 3, 4))
    assert all(f"this is session {name}" in said for name in sessions)
    assert main(["export", str(tmp_path / "two"), "--format", "csv", "--output", f"{tmp_path}/out"]) == 0
    lengths = {path.name: len(path.read_text().splitlines()) - 1 for path in (tmp_path / "out").iterdir()}
    assert lengths == {"two.csv": 4, "two.1000000-a-0.csv": 2, "two.1000001-b-0.csv": 3}
    assert main(["export", str(tmp_path / "two"), "--format", "csv"]) == 0
    out, err = capsys.readouterr()
    assert len(read_csv(out[out.index("step,") :])) == 4
    assert all(name in err for name in sessions)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["runs", "--format", "csv"], "expected one run, got 2"),
        (["runs", "--format", "csv", "--output", "x.csv"], "holds 2 runs"),
        (["runs/a", "--format", "parquet"], "cannot be printed"),
        (["nothing", "--format", "csv"], "is not a folder"),
        (["empty", "--format", "csv"], "holds no gradflow run"),
    ],
)
def test_a_wrong_call_is_told(words, told, tmp_path, capsys, monkeypatch):
    """The exit code is 2 and the way out is named."""
    write_runs(tmp_path / "runs", ["a", "b"])
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    assert main(["export", *words]) == 2
    assert told in capsys.readouterr().err
