"""Whether a change of the code changed any record or issue: of every program here, before and after.

Write what each commit says, in a checkout of its own, and compare::

    python benchmarks/unchanged.py write before.jsonl
    python benchmarks/unchanged.py write after.jsonl --corpus corpus.py --only vanish
    python benchmarks/unchanged.py compare before.jsonl after.jsonl

Programs are those of ``benchmarks/silent`` and ``benchmarks/heldout`` (sick, mended, healthy), of both halves of
``benchmarks/generated`` as many as there are operators, each healthy and with one mistake, those of further corpora
that have the shape ``benchmarks/detection.py`` describes, and every exporter of the tests of ``tests/loops``. Each runs
once at one seed with ``synchronous=True``, so that all values are reproducible bit for bit; clocks, memory and the
exporter's own share of the time are left out. What was written stays: a run that was stopped goes on where it was.

``compare`` prints the metrics that differ, by program, and the issues gained and lost. What is meant to differ stands
with its reason in ``benchmarks/intended.txt``; it ends with 1 where anything else does.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import logging
import multiprocessing
import sys
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from multiprocessing import connection
from pathlib import Path
from typing import Any, NamedTuple

import detection
import mutation
import numpy as np
import pytest
import torch
from reproducible import is_timed
from tqdm import tqdm

from gradflow_export import Exporter, MemoryWriter
from gradflow_export.records.step_record import StepRecord

ROOT = Path(__file__).resolve().parent.parent
SPLITS = ("dev", "heldout", "second", "third")
HELDOUT = ROOT / "benchmarks" / "heldout" / "programs.py"
LOOPS = ROOT / "tests" / "loops"
INTENDED = ROOT / "benchmarks" / "intended.txt"
LIMIT_SECONDS = 900.0

Said = dict[str, Any]
"""What one program said: ``metrics``, a hash of all values of each; ``issues``, one line each."""

Task = partial[dict[str, Said]]
"""Runs one program, or one file of tests, by the name that is its first argument."""


def said(records: Sequence[StepRecord], issues: Sequence[Any]) -> Said:
    """Return a hash of every metric over all records, and every issue in words.

    Evidence has one with a metric of its name: what was a metric and is evidence now is equal where its values are.
    """
    hashes: dict[str, Any] = defaultdict(hashlib.sha256)
    for record in records:
        seen: dict[str, dict[str, Any]] = defaultdict(dict)
        for r in record.readings:
            if not is_timed(r.metric):
                seen[r.metric].update(s for *s, here in zip(r.sites, r.values.tolist(), r.present, strict=True) if here)
        for e in record.evidence:
            for name, value in e.values.items():
                if value is not None:
                    seen[f"{e.kind}.{name}"][e.layer] = float(np.float32(value))
        for metric, values in seen.items():
            if values:
                hashes[metric].update(repr((record.step, sorted(values.items()))).encode())
        for h in record.histograms:
            hashes[f"histogram {h.metric}"].update(repr((record.step, h)).encode())
    lines = [f"{i.issue_type} {i.severity.name} {i.step} {i.healed_step} {list(i.layers)} {i.message}" for i in issues]
    return {"metrics": {name: h.hexdigest()[:16] for name, h in sorted(hashes.items())}, "issues": sorted(lines)}


def watched(model: Any, train: Callable[[Exporter], None], **watch: Any) -> Said:
    """Train under an exporter that does all work of a step within it."""
    memory = MemoryWriter()
    with Exporter(model, backends=[memory], synchronous=True) as exporter:
        exporter.watch(**watch)
        train(exporter)
    return said(memory.records, exporter.issues)


def silent(split: str, kind: str, index: int) -> Said:
    """Run one program of ``benchmarks/silent``."""
    cases = importlib.import_module(f"silent.{split}")
    healthy = kind == "healthy"
    case = (cases.HEALTHY if healthy else cases.BUGS)[index]
    program = case.build(0) if healthy else case.build(kind == "mended", 0)
    return watched(program.model, lambda _: program.train())


def corpus(path: Path, index: int) -> Said:
    """Run one program of a corpus of the shape that ``benchmarks/detection.py`` describes."""
    torch.manual_seed(0)
    program = detection.load(path).CASES[index].build(0)

    def train(exporter: Exporter) -> None:
        def tap(phase: str, _program: Any) -> None:
            if phase == "backward" and program.policy is not None:
                exporter.observe(policy=program.policy(program.model))

        with detection.observing_backward(exporter):
            for t in range(program.steps):
                program.step(t, tap)

    return watched(program.model, train, blocks=program.blocks)


def generated(of: str, number: int, mistake: str) -> Said:
    """Run one program of ``benchmarks/generated``; one in which the mistake cannot be made says nothing."""
    half = mutation.half(of)
    parts = half.programs.parts(half.draw(number), 0, number)
    if mistake and not half.operators[mistake].make(parts):
        return said((), ())
    half.programs.assemble(parts)
    return watched(parts.model, lambda _: half.programs.train(parts))


class Loops:
    """A pytest plugin: every exporter that a test makes is synchronous, and what it says is kept by the test's name."""

    def __init__(self) -> None:
        self.found: dict[str, Said] = {}
        self._made: list[tuple[Exporter, MemoryWriter]] = []
        self._plain = Exporter.__init__

    def pytest_runtest_setup(self) -> None:
        """Begin each test at one seed, and watch what exporters are made."""
        torch.manual_seed(0)

        def make(exporter: Exporter, model: Any, *args: Any, **settings: Any) -> None:
            memory = MemoryWriter()
            if "backends" in settings:
                settings["backends"] = [*settings["backends"], memory]
            if settings.get("budget") is None:
                settings.setdefault("synchronous", True)
            self._plain(exporter, model, *args, **settings)
            self._made.append((exporter, memory))

        Exporter.__init__ = make  # type: ignore[method-assign,assignment]

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        """Keep what they said; tests close them before."""
        Exporter.__init__ = self._plain  # type: ignore[method-assign]
        for number, (exporter, memory) in enumerate(self._made):
            self.found[f"loops/{item.nodeid.removeprefix('tests/loops/')} {number}"] = said(
                memory.records, exporter.issues
            )
        self._made.clear()


def loops(_name: str, file: Path) -> dict[str, Said]:
    """Run one file of tests; return what its exporters said, by test."""
    plugin = Loops()
    pytest.main([str(file), "-q", "--no-header", "--no-summary", "-p", "no:cacheprovider"], plugins=[plugin])
    return plugin.found


def one(name: str, run: Callable[[], Said]) -> dict[str, Said]:
    """Run one program; an error is what it said."""
    quietly()
    try:
        return {name: run()}
    except Exception as error:  # a program that cannot run any more is a difference, and the others are still to run
        return failed(name, f"{type(error).__name__}: {error}")


def failed(name: str, why: str) -> dict[str, Said]:
    """Return what is kept of a program that did not run to its end."""
    return {name: {"metrics": {}, "issues": [why]}}


def tasks(corpora: Sequence[Path], only: str) -> Iterator[Task]:
    """Yield everything there is to run."""
    return (task for task in _all_tasks(corpora) if only in task.args[0])


def _all_tasks(corpora: Sequence[Path]) -> Iterator[Task]:
    for split in SPLITS:
        cases = importlib.import_module(f"silent.{split}")
        for kind, bunch in (("sick", cases.BUGS), ("mended", cases.BUGS), ("healthy", cases.HEALTHY)):
            for index, case in enumerate(bunch):
                yield partial(one, f"silent/{split}/{case.name} {kind}", partial(silent, split, kind, index))
    for path in (HELDOUT, *corpora):
        for index, case in enumerate(detection.load(path).CASES):
            yield partial(one, f"{path.parent.name}/{case.name}", partial(corpus, path, index))
    for half in ("development", "unseen"):
        for number, operator in enumerate(mutation.half(half).operators):
            for mistake in ("", operator):
                name = f"generated/{half}/{number} {mistake or 'healthy'}"
                yield partial(one, name, partial(generated, half, number, mistake))
    for file in sorted(LOOPS.glob("test_*.py")):
        yield partial(loops, f"loops/{file.name}", file)


def quietly() -> None:
    """Prepare this process for one program: one thread, one seed, no warnings."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    logging.getLogger("gradflow_export").setLevel(logging.ERROR)


def run_all(todo: Sequence[Task], processes: int) -> Iterator[tuple[str, dict[str, Said]]]:
    """Run each task in a process of its own, which may begin others; yield names and what was said as they end."""
    fork = multiprocessing.get_context("fork")
    waiting, running = list(reversed(todo)), {}
    while waiting or running:
        while waiting and len(running) < processes:
            task = waiting.pop()
            reader, writer = fork.Pipe(duplex=False)
            process = fork.Process(target=_tell, args=(task, writer))
            process.start()
            writer.close()  # so that the pipe ends where the process does
            running[reader] = task.args[0], process, time.monotonic() + LIMIT_SECONDS
        ready = connection.wait(list(running), timeout=1.0)
        for reader, (name, process, until) in list(running.items()):
            if reader in ready or time.monotonic() > until:
                del running[reader]
                try:
                    found = reader.recv() if reader in ready else failed(name, f"ran past {LIMIT_SECONDS:.0f} s")
                except EOFError:
                    process.join()
                    found = failed(name, f"the process ended with {process.exitcode}")
                process.kill()
                process.join()
                yield name, found


def _tell(task: Task, writer: connection.Connection) -> None:
    writer.send(task())


def stored(path: Path) -> dict[str, dict[str, Said]]:
    """Return what was written before, by task."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {line["task"]: line["said"] for line in map(json.loads, lines)}


def write(path: Path, todo: Sequence[Task], processes: int) -> None:
    """Run what is not stored yet, and store what it said as it comes."""
    known = stored(path)
    todo = [task for task in todo if task.args[0] not in known]
    with path.open("a") as out:
        for name, found in tqdm(run_all(todo, processes), total=len(todo), disable=None):
            print(json.dumps({"task": name, "said": found}), file=out, flush=True)
    print(f"{sum(map(len, stored(path).values()))} programs are in {path}")


class Difference(NamedTuple):
    """A metric whose values differ, or an issue that was gained or lost, of one program."""

    program: str
    subject: str
    how: str


def differences(before: Mapping[str, Said], after: Mapping[str, Said]) -> Iterator[Difference]:
    """Yield what differs between programs that ran before and after, and the names of those that ran once."""
    for name in sorted(before.keys() ^ after.keys()):
        yield Difference(name, "program", f"only {'after' if name in after else 'before'}")
    for name in sorted(before.keys() & after.keys()):
        old, new = before[name], after[name]
        for metric in sorted(old["metrics"].keys() | new["metrics"].keys()):
            if old["metrics"].get(metric) != new["metrics"].get(metric):
                yield Difference(name, metric, "differs")
        for how, these, those in (("lost", old, new), ("gained", new, old)):
            gone = Counter(these["issues"]) - Counter(those["issues"])
            yield from (Difference(name, line, how) for line in gone.elements())


def intended(path: Path) -> list[tuple[str, str, str]]:
    """Return what is meant to differ: pattern of programs, patterns of how metric or issue begins, why."""
    lines = path.read_text().splitlines()
    rows = [[part.strip() for part in line.split("|")] for line in lines if line and not line.startswith("#")]
    return [(program, beginning, why) for program, beginning, why in rows]


def compare(before: Path, after: Path, meant: Sequence[tuple[str, str, str]]) -> list[str]:
    """Print how often each intended difference was met; return the others, metrics together, a line each."""
    metrics: dict[str, list[str]] = defaultdict(list)
    lines, met = [], Counter[str]()
    old, new = ({name: s for part in stored(path).values() for name, s in part.items()} for path in (before, after))
    for found in differences(old, new):
        reasons = (
            why
            for program, beginnings, why in meant
            if program in {"*", found.program} or fnmatchcase(found.program, program)
            if any(fnmatchcase(found.subject, f"{beginning.strip()}*") for beginning in beginnings.split(","))
        )
        why = next(reasons, None)
        if why is not None:
            met[why] += 1
        elif found.how == "differs":
            metrics[found.subject].append(found.program)
        else:
            lines.append(f"{found.program}: {found.how} {found.subject}")
    lines += [f"{metric} differs in {len(names)} programs: {', '.join(names[:3])}" for metric, names in metrics.items()]
    for why, count in met.items():
        print(f"intended, {count} times: {why}")
    print("\n".join(lines) or f"{len(old.keys() & new.keys())} programs: every other value and issue is equal")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    commands = parser.add_subparsers(dest="command", required=True)
    writing = commands.add_parser("write", help="run everything and store what it said")
    writing.add_argument("path", type=Path)
    writing.add_argument("--corpus", type=Path, nargs="*", default=[], help="further corpora: Python files with CASES")
    writing.add_argument("--only", default="", help="only programs, and files of tests, whose name contains this")
    writing.add_argument("--every", type=int, default=1, help="one of so many of them")
    writing.add_argument("--processes", type=int, default=2)
    comparing = commands.add_parser("compare", help="print what differs between two files")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    comparing.add_argument("--intended", type=Path, default=INTENDED, help="list of what is meant to differ")
    arguments = parser.parse_args()
    if arguments.command == "write":
        todo = list(tasks(arguments.corpus, arguments.only))
        write(arguments.path, todo[:: arguments.every], arguments.processes)
        return 0
    return 1 if compare(arguments.before, arguments.after, intended(arguments.intended)) else 0


if __name__ == "__main__":
    sys.exit(main())
