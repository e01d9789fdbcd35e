"""kill -9, a full disk, and forks: training goes on, and what was written reads back."""

import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
import traceback
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from gradflow_export import Exporter, JsonlWriter, MemoryWriter
from gradflow_export.cli import main
from gradflow_export.cli.report import summarise
from gradflow_export.storage.reader import read_run


class Foreign:
    """A writer of somebody else's."""

    name = "foreign"

    def open(self, run):
        """Begin."""

    def write(self, record):
        """Take one record."""

    def flush(self):
        """Make readable."""

    def close(self):
        """Finish."""


ROOT = Path(__file__).resolve().parents[2]

SETUP = """
import os, sys, time, torch
from torch import nn
torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
criterion, optimizer = nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1)
def train(steps):
    for _ in range(steps):
        optimizer.zero_grad()
        criterion(model(torch.ones(3, 4)), torch.tensor([0, 1, 2])).backward()
        optimizer.step()
from gradflow_export import Exporter
"""


def test_kill_9_leaves_what_was_written(tmp_path, programs):
    """After SIGKILL in mid-run the event file and the JSON lines hold whole records of consecutive steps."""
    body = """
    from gradflow_export import JsonlWriter
    from gradflow_export.writers import TensorBoardWriter
    writers = [TensorBoardWriter(sys.argv[1] + "/tb", flush_seconds=0.2), JsonlWriter(sys.argv[1] + "/lines")]
    exporter = Exporter(model, backends=writers, budget=None).watch(criterion)
    while True:
        train(1)
        time.sleep(0.005)
        if exporter._loop.steps % 100 == 60:
            exporter.summary()
            print(exporter._loop.steps, flush=True)
    """
    child = programs.start(SETUP + textwrap.dedent(body), tmp_path)
    until = time.monotonic() + 800
    while child.out.count("\n") < 2:
        assert time.monotonic() < until, child.err
        time.sleep(0.02)
    os.kill(child.pid, signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    for place, least in (("tb", 50), ("lines", 160)):
        records = list(read_run(tmp_path / place).records)
        assert len(records) >= least
        assert [r.step for r in records] == list(range(1, len(records) + 1))
        assert all(r.value("loss") is not None for r in records)
        assert all(r.value("gradient.total_norm") is not None for r in records)


FULL = """
import resource, signal
from gradflow_export.writers import MemoryWriter, TensorBoardWriter, JsonlWriter
place, limited = sys.argv[1], sys.argv[2] == "limit"
memory = MemoryWriter()
writers = [TensorBoardWriter(place + "/tb", flush_seconds=0.0), JsonlWriter(place + "/lines"), memory]
if limited:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, 150_000))
exporter = Exporter(model, backends=writers, budget=None).watch(criterion)
for _ in range(20):
    train(10)
    exporter.summary()
exporter.close()
print(len(memory.records), exporter.summary()["set_aside"], sorted(exporter._worker.outlets.lost))
print([float(p.detach().sum()) for p in model.parameters()])
"""


@pytest.fixture
def small_disk(tmp_path):
    """Return a directory on a tmpfs of 250 kB, or where mounting is not allowed, one in which files are limited."""
    command = ["mount", "-t", "tmpfs", "-o", "size=250k", "none", str(tmp_path)]
    mounted = shutil.which("mount") and subprocess.run(command, capture_output=True, check=False).returncode == 0
    yield tmp_path, "disk" if mounted else "limit"
    if mounted:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def test_a_full_disk_stops_the_files_and_not_the_training(small_disk, programs):
    """With the disk full to the end, training ends as unwatched, what is lost is told, and the rest reads back."""
    place, kind = small_disk
    done = programs.start(SETUP + FULL, place, kind)
    assert done.wait() == 0, done.err
    plain = {}
    exec(SETUP + "train(200)", plain)
    weights = [float(p.detach().sum()) for p in plain["model"].parameters()]
    assert done.out.splitlines() == ["200 [] ['jsonl', 'tensorboard']", str(weights)]
    for name in ("jsonl", "tensorboard"):
        lines = [line for line in done.err.splitlines() if f"the {name} writer" in line]
        assert "cannot write to" in lines[0]
        assert f"the {name} writer could not write steps" in lines[-1]
    counts = []
    for where in ("tb", "lines"):
        records = list(read_run(place / where).records)
        assert [r.step for r in records] == list(range(1, len(records) + 1))
        counts.append(len(records))
        assert summarise(read_run(place / where)).lost_steps
    assert 5 < min(counts) <= max(counts) < 200


def test_a_disk_that_was_full_for_a_while_costs_what_did_not_fit(small_disk, programs):
    """Once there is room again the rest is written; what is missing is told by the run and by its files."""
    place, kind = small_disk
    body = """
    from gradflow_export.writers import TensorBoardWriter, JsonlWriter, journal
    import resource, signal
    journal.HELD_BYTES, journal.MOST_SECONDS = 100_000, 0.2
    place, limited = sys.argv[1], sys.argv[2] == "limit"
    if limited:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, resource.RLIM_INFINITY))
    else:
        open(place + "/other", "wb").write(bytes(150_000))
    writers = [TensorBoardWriter(place + "/tb", flush_seconds=0.0), JsonlWriter(place + "/lines")]
    exporter = Exporter(model, backends=writers, budget=None).watch(criterion)
    for part in range(20):
        if part == 10:
            assert all(writer.lost for writer in writers)
            os.remove(place + "/other") if not limited else resource.setrlimit(
                resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            if not limited:
                os.system(f"mount -o remount,size=20m {place}")
            time.sleep(1)
        train(30)
        exporter.summary()
    exporter.close()
    for writer in writers:
        print(writer.lost.first, writer.lost.last, writer.lost.steps)
    """
    done = programs.start(SETUP + textwrap.dedent(body), place, kind)
    assert done.wait() == 0, done.err
    for where, line in zip(("tb", "lines"), done.out.splitlines(), strict=True):
        run, (first, last, steps) = read_run(place / where), map(int, line.split())
        assert [(gap.first, gap.last, gap.steps) for gap in run.gaps] == [(first, last, steps)]
        assert sorted({*run.records.steps, *range(first, last + 1)}) == list(range(1, 601))
        assert len(run.records) + steps == 600
        assert run.skipped == 0


def test_two_processes_in_one_folder_are_two_runs(tmp_path, capsys, programs):
    """Their sessions differ though they start together; each is read by itself, and the report shows both and why."""
    body = """
    for backend in ("tensorboard", "jsonl"):
        place = sys.argv[1] + "/" + backend
        exporter = Exporter(model, backends=[backend], logdir=place, budget=None).watch(criterion)
        train(3)
        open(place + "/ready" + sys.argv[2], "w").close()
        while len([name for name in os.listdir(place) if name.startswith("ready")]) < 2:
            time.sleep(0.01)
        train(4)
        exporter.close()
    """
    children = [programs.start(SETUP + textwrap.dedent(body), tmp_path, each) for each in "ab"]
    assert [child.wait() for child in children] == [0, 0]
    for backend in ("tensorboard", "jsonl"):
        place = tmp_path / backend
        first = read_run(place)
        (other,) = first.beside
        second = read_run(place, session=other)
        assert first.sessions != second.sessions == (other,)
        assert second.beside == first.sessions
        for run in (first, second):
            assert run.records.steps == tuple(range(1, 8))
        assert main(["report", str(place), "--details"]) == 0
        said = capsys.readouterr().out
        assert said.count("2 runs wrote to this folder at the same time; this is session") == 2
        assert all(name in said for name in (*first.sessions, *second.sessions))


def test_a_sudden_end_costs_at_most_a_second(tmp_path):
    """At random moments of the default backend's life, as does ``os._exit``; counted from steps the child told of."""
    command = [sys.executable, str(ROOT / "benchmarks" / "kill.py"), "--times", "2", "--logdir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("steps read back") == 2


def test_exit_without_close_writes_everything(tmp_path, programs):
    """A program that ends without close(), or with an exception, has every step on disk."""
    children = []
    for number, end in enumerate(("", "raise SystemExit(0)", "1 / 0")):
        logdir = str(tmp_path / str(number))
        body = f"Exporter(model, backends=['jsonl', 'tensorboard'], logdir={logdir!r}).watch(criterion)\ntrain(7)\n"
        children.append(programs.start(SETUP + body + end))
    assert [child.wait() for child in children] == [0, 0, 1]
    for number in range(3):
        run = read_run(tmp_path / str(number))
        assert [r.step for r in run.records] == list(range(1, 8))
        assert run.error == ("at step 8 (ZeroDivisionError: division by zero)" if number == 2 else "")


def in_child(body):
    """Run a function in a forked child; return the child's exit code, 0 when it returned a true value."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if body() else 3
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    until = time.monotonic() + 800
    status = (0, 0)
    while status[0] == 0 and time.monotonic() < until:
        status = os.waitpid(child, os.WNOHANG)
        time.sleep(0.02)
    if status[0] == 0:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert status[0] == child, "the child hangs"
    return os.waitstatus_to_exitcode(status[1])


def test_a_fork_that_does_not_train_writes_nothing(tmp_path, loop):
    """A forked child may ask for the report, watch anew, train then, and exit: the parent's run stays as it was."""
    memory = MemoryWriter()
    exporter = Exporter(loop.model, backends=["jsonl", memory], logdir=tmp_path).watch(loop.criterion)
    loop.train(3)
    exporter.summary()
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}

    def body():
        with exporter._worker._lock:
            pass
        exporter.report()
        own = MemoryWriter()
        with Exporter(loop.model, backends=[own]).watch(loop.criterion):
            loop.train(2)
        return [r.step for r in own.records] == [1, 2] and exporter._closed

    assert in_child(body) == 0
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before
    loop.train(3)
    exporter.close()
    assert [r.step for r in memory.records] == [1, 2, 3, 4, 5, 6]
    assert list(read_run(tmp_path).records) == memory.records


@pytest.mark.parametrize("backend", ["jsonl", "tensorboard", "named.jsonl"])
def test_training_in_a_forked_child_is_recorded(backend, tmp_path, loop, said):
    """It has a session of its own, which goes on counting; the parent's is what it would be, and neither has a gap."""
    backends = [JsonlWriter(tmp_path / backend) if "." in backend else backend, MemoryWriter(), Foreign()]
    exporter = Exporter(loop.model, backends=backends, logdir=tmp_path).watch(loop.criterion)
    loop.train(3)
    exporter.summary()
    started = type(loop)()

    def body():
        loop.train(4)
        summary = exporter.summary()
        exporter.close()
        lines = said("the foreign writer is left out")
        same = all(map(torch.equal, loop.model.state_dict().values(), started.model.state_dict().values()))
        return len(lines) == 1 and summary["steps"]["count"] == 4 and summary["set_aside"] == [] and same

    started.train(3)
    data = torch.Generator().manual_seed(0)
    for _ in range(4):
        started.optimizer.zero_grad()
        x = torch.randn(6, 4, generator=data)
        started.criterion(started.model(x), torch.tensor([0, 1, 2, 0, 1, 2])).backward()
        started.optimizer.step()
    assert in_child(body) == 0
    loop.train(2)
    exporter.close()
    runs = {run.records.steps: run for run in [read_run(tmp_path), *(
        read_run(tmp_path, session=name) for name in read_run(tmp_path).beside)]}  # fmt: skip
    assert set(runs) == {(1, 2, 3, 4, 5), (4, 5, 6, 7)}
    assert len({run.sessions for run in runs.values()}) == 2
    assert all(run.gaps == () and run.skipped == 0 for run in runs.values())


def test_a_child_of_multiprocessing_writes_its_last_step(tmp_path, loop):
    """Such a child ends without what is called at exit; what waits is written all the same."""
    exporter = Exporter(loop.model, logdir=tmp_path).watch(loop.criterion)
    child = multiprocessing.get_context("fork").Process(target=loop.train, args=(5,))
    child.start()
    child.join(100)
    exporter.close()
    assert child.exitcode == 0
    assert read_run(tmp_path).records.steps == (1, 2, 3, 4, 5)
    assert [path for path in tmp_path.iterdir() if path.suffix == ".draft"] == []


def test_a_fork_while_the_worker_holds_its_lock_does_not_hang(loop):
    """A child forked at the worst moment can still ask for the report and close."""
    exporter = Exporter(loop.model, backends=[MemoryWriter()]).watch(loop.criterion)
    loop.train(3)
    exporter.summary()
    with exporter._worker._lock:
        child = os.fork()
        if child == 0:
            signal.alarm(100)
            try:
                exporter.report()
                exporter.issues  # noqa: B018 - asking is the point
                exporter.close()
                os._exit(0)
            finally:
                os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    exporter.close()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_data_loader_workers(method, loop):
    """Workers of a DataLoader, made after watch(), deliver and end; every step is recorded."""
    memory = MemoryWriter()
    data = DataLoader(
        TensorDataset(torch.randn(24, 4), torch.randint(0, 3, (24,))), batch_size=4,
        num_workers=2 if method == "fork" else 1,  # each that is spawned imports torch
        multiprocessing_context=method,
    )  # fmt: skip
    with Exporter(loop.model, backends=[memory], strict=True).watch(loop.criterion):
        for x, y in data:
            loop.optimizer.zero_grad()
            loop.criterion(loop.model(x), y).backward()
            loop.optimizer.step()
    assert [r.step for r in memory.records] == [1, 2, 3, 4, 5, 6]
