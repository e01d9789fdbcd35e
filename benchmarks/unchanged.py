"""Whether a change of the code changed any record or issue: of every program here, before and after.

Write what each commit says, in a checkout of its own, and compare::

    python benchmarks/unchanged.py write before.json
    python benchmarks/unchanged.py write after.json --corpus corpus.py --only vanish
    python benchmarks/unchanged.py compare before.json after.json --but "evidence input"

Programs are those of ``benchmarks/silent`` and ``benchmarks/heldout`` (sick, mended, healthy), those of further corpora
that have the shape ``benchmarks/detection.py`` describes, and every exporter of the tests of ``tests/loops``. Each runs
once at one seed with ``synchronous=True``, so that all values are reproducible bit for bit; clocks, memory and the
exporter's own share of the time are left out. ``compare`` prints the metrics that differ, by program, and the issues
gained and lost, and ends with 1 where anything differs that ``--but`` does not name.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import logging
import multiprocessing
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import detection
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

Said = dict[str, Any]
"""What one program said: ``metrics``, a hash of all values of each; ``issues``, one line each."""


def said(records: Sequence[StepRecord], issues: Sequence[Any]) -> Said:
    """Return a hash of every metric over all records, and every issue in words."""
    hashes: dict[str, Any] = defaultdict(hashlib.sha256)
    for record in records:
        for r in record.readings:
            if not is_timed(r.metric):
                hashes[r.metric].update(repr((record.step, r.sites, r.values.tobytes(), r.present.tobytes())).encode())
        for e in record.evidence:
            for name, value in e.values.items():
                hashes[f"evidence {e.kind}.{name}"].update(repr((record.step, e.layer, value)).encode())
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


class Loops:
    """A pytest plugin: every exporter that a test makes is synchronous, and what it says is kept by the test's name."""

    def __init__(self) -> None:
        self.found: dict[str, Said] = {}
        self._made: list[tuple[Exporter, MemoryWriter]] = []
        self._plain = Exporter.__init__

    def pytest_runtest_setup(self) -> None:
        """Watch what exporters are made."""

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


def loops(file: Path) -> dict[str, Said]:
    """Run one file of tests; return what its exporters said, by test."""
    plugin = Loops()
    pytest.main([str(file), "-q", "--no-header", "--no-summary", "-p", "no:cacheprovider"], plugins=[plugin])
    return plugin.found


def one(name: str, run: Callable[[], Said]) -> dict[str, Said]:
    """Run one program; an error is what it said."""
    try:
        return {name: run()}
    except Exception as error:  # a program that cannot run any more is a difference, and the others are still to run
        return {name: {"metrics": {}, "issues": [f"{type(error).__name__}: {error}"]}}


def tasks(corpora: Sequence[Path], only: str) -> Iterator[Callable[[], dict[str, Said]]]:
    """Yield everything there is to run."""
    for split in SPLITS:
        cases = importlib.import_module(f"silent.{split}")
        for kind, bunch in (("sick", cases.BUGS), ("mended", cases.BUGS), ("healthy", cases.HEALTHY)):
            for index, case in enumerate(bunch):
                name = f"silent/{split}/{case.name} {kind}"
                if only in name:
                    yield partial(one, name, partial(silent, split, kind, index))
    for path in (HELDOUT, *corpora):
        for index, case in enumerate(detection.load(path).CASES):
            name = f"{path.parent.name}/{case.name}"
            if only in name:
                yield partial(one, name, partial(corpus, path, index))
    for file in sorted(LOOPS.glob("test_*.py")):
        if only in f"loops/{file.name}":
            yield partial(loops, file)


def quietly() -> None:
    """Prepare this process for one program: one thread, one seed, no warnings."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    logging.getLogger("gradflow_export").setLevel(logging.ERROR)


def _run(task: Callable[[], dict[str, Said]]) -> dict[str, Said]:
    quietly()
    return task()


def write(path: Path, corpora: Sequence[Path], only: str, processes: int) -> None:
    """Run everything, each program in a process of its own, and store what it said."""
    found: dict[str, Said] = {}
    todo = list(tasks(corpora, only))
    with multiprocessing.get_context("fork").Pool(processes, maxtasksperchild=1) as pool:
        for part in tqdm(pool.imap_unordered(_run, todo), total=len(todo), disable=None):
            found |= part
    path.write_text(json.dumps(dict(sorted(found.items())), indent=1))
    print(f"{len(found)} programs are in {path}")


def compare(before: dict[str, Said], after: dict[str, Said], but: Sequence[str]) -> list[str]:
    """Return what differs, a line each; metrics and issue types that begin with one of ``but`` are intended to."""
    lines = [f"only {'after' if name in after else 'before'}: {name}" for name in sorted(before.keys() ^ after.keys())]
    metrics: dict[str, list[str]] = defaultdict(list)
    intended = tuple(but) or ("\0",)
    for name in sorted(before.keys() & after.keys()):
        old, new = before[name], after[name]
        for metric in old["metrics"].keys() | new["metrics"].keys():
            if old["metrics"].get(metric) != new["metrics"].get(metric):
                metrics[metric].append(name)
        for mark, these, those in (("lost", old, new), ("gained", new, old)):
            gone = (line for line in these["issues"] if line not in those["issues"])
            lines += [f"{name}: {mark} {line}" for line in gone if not line.startswith(intended)]
    for metric, names in sorted(metrics.items()):
        if not metric.startswith(intended):
            lines.append(f"{metric} differs in {len(names)} programs: {', '.join(names[:3])}")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    commands = parser.add_subparsers(dest="command", required=True)
    writing = commands.add_parser("write", help="run everything and store what it said")
    writing.add_argument("path", type=Path)
    writing.add_argument("--corpus", type=Path, nargs="*", default=[], help="further corpora: Python files with CASES")
    writing.add_argument("--only", default="", help="only programs whose name contains this")
    writing.add_argument("--processes", type=int, default=2)
    comparing = commands.add_parser("compare", help="print what differs between two files")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    comparing.add_argument("--but", nargs="*", default=[], help="beginnings of metrics and issue types that may differ")
    arguments = parser.parse_args()
    if arguments.command == "write":
        write(arguments.path, arguments.corpus, arguments.only, arguments.processes)
        return 0
    before, after = (json.loads(path.read_text()) for path in (arguments.before, arguments.after))
    lines = compare(before, after, arguments.but)
    print("\n".join(lines) or f"{len(before)} programs: every value and every issue is equal")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
