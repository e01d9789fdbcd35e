"""What installed packages add is used, and what is broken in it hurts nobody."""

import importlib
import logging
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch import nn

from gradflow_export import Exporter, MemoryWriter, extensions, read_run
from gradflow_export.cli import main
from gradflow_export.errors import ArgumentError

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted(path.parent for path in (ROOT / "examples" / "extensions").glob("*/pyproject.toml"))


@pytest.fixture(autouse=True)
def _anew():
    """Look for extensions anew in each test, and forget afterwards what it had installed."""
    known = set(sys.modules)
    extensions.extensions.cache_clear()
    yield
    extensions.extensions.cache_clear()
    for name in set(sys.modules) - known:
        if Path(getattr(sys.modules[name], "__file__", None) or "/").parent.name == "site":
            del sys.modules[name]


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder for packages, which is on the path."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    return folder


def package(folder, name, kind, source, value=None):
    """Put a package of one module into a folder, as an installer would."""
    (folder / f"{name}.py").write_text(textwrap.dedent(source))
    info = folder / f"{name}-2.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 2.0\n")
    (info / "entry_points.txt").write_text(f"[gradflow_export.{kind}]\n{name} = {value or f'{name}:Own'}\n")
    importlib.invalidate_caches()
    extensions.extensions.cache_clear()


INSTRUMENT = """
from gradflow_export.hooks.readings import Pending
from gradflow_export.instruments.base import Instrument
import torch
class Own(Instrument):
    instrument, interval = "own", 5
    def drain(self):
        return [Pending("custom.own.one", ("",), torch.ones(1))]
"""


def train(steps=12, *, same=False, rising=False, **settings):
    """Train a small model while watched; return the exporter, closed."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with Exporter(model, synchronous=True, **settings).watch() as exporter:
        for step in range(steps):
            optimizer.zero_grad()
            if rising:  # the same batch, at a loss that is scaled up faster than it falls
                torch.manual_seed(1)
            x = torch.randn(1, 4).expand(16, -1) if same else torch.randn(16, 4)
            (model(x).square().mean() * (1.2**step if rising else 1.0)).backward()
            optimizer.step()
        exporter.weights = [p.detach().clone() for p in model.parameters()]
    return exporter


def warnings_of(caplog):
    """Return what was logged, a line each."""
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_examples_are_installed_by_pip_and_run(tmp_path):
    """Each documented example, installed into a folder, gives its metric, issue or file in a process of its own."""
    site, builds = tmp_path / "site", [tmp_path / example.name for example in EXAMPLES]
    for example, build in zip(EXAMPLES, builds, strict=True):
        build.mkdir()
        for path in example.iterdir():
            if path.is_file():
                (build / path.name).write_text(path.read_text())
    command = ["-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index", "--target", site]
    subprocess.run([sys.executable, *command, *builds], check=True, capture_output=True)
    script = tmp_path / "run.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import sys; sys.path.insert(0, {str(ROOT / "tests" / "unit")!r})
            from test_extensions import train
            from gradflow_export import MemoryWriter
            memory = MemoryWriter()
            exporter = train(30, same=True, backends=[memory, "csv", "jsonl"], logdir={str(tmp_path / "run")!r})
            print(sorted({{r.metric for record in memory.records for r in record.readings if "custom" in r.metric}}))
            print(sorted(memory.records[4].get("custom.gradient_signs.positive").as_dict()))
            print([issue.message for issue in (*exporter.issues, *train(30, rising=True, backends=[memory]).issues)])
            print(exporter.report())
            """
        )
    )
    paths = os.pathsep.join([str(site), str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, script], check=False, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": paths}
    )
    assert done.returncode == 0, done.stderr
    assert "left out" not in done.stderr
    metrics, sites, messages, *report = done.stdout.splitlines()
    assert metrics == "['custom.gradient_signs.positive']"
    assert sites == "['0.bias', '0.weight', '2.bias', '2.weight']"
    assert "all samples of the batch are the same" in messages
    assert "the loss rose 10 times in a row" in messages
    assert "check 'constant-inputs' of gradflow-constant-inputs 1.0" in "\n".join(report)
    lines = (tmp_path / "run" / "records.csv").read_text().splitlines()
    assert lines[0] == "step,loss,issues"
    assert len(lines) == 31
    assert any("DATA_SCALE" in line for line in lines)
    stored = list(read_run(tmp_path / "run").records)
    assert stored[0].get("custom.gradient_signs.positive") is not None


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_an_example_is_short(example):
    """Extending takes about 50 lines of code, documentation not counted."""
    (module,) = example.glob("*.py")
    text = re.sub(r'""".*?"""', "", module.read_text(), flags=re.DOTALL)
    assert sum(bool(line.strip()) for line in text.splitlines()) <= 50


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_the_page_shows_the_examples(example):
    """The code in docs/extensions.md is that of the packages."""
    (module,) = example.glob("*.py")
    assert f"```python\n{module.read_text()}```" in (ROOT / "docs" / "extensions.md").read_text()


def test_extensions_are_listed(site, tmp_path, capsys):
    """``gradflow doctor`` and the report say what other packages add."""
    package(site, "own_instrument", "instruments", INSTRUMENT)
    assert "instrument 'own_instrument' of own_instrument 2.0" in train(backends=[MemoryWriter()]).report()
    main(["doctor", "--logdir", str(tmp_path)])
    assert "instrument 'own_instrument' of own_instrument 2.0, own_instrument:Own" in capsys.readouterr().out


def test_the_interval_of_an_instrument_is_its_own_and_can_be_set(site):
    """It is read on the interval that its class declares, or that ``intervals`` sets; another name is an error."""
    package(site, "own_instrument", "instruments", INSTRUMENT)
    memory = MemoryWriter()
    exporter = train(backends=[memory], intervals={"own": 4})
    assert exporter.settings.schedule.intervals["own"] == 4
    assert train(backends=[MemoryWriter()]).settings.schedule.intervals["own"] == 5
    with pytest.raises(ArgumentError, match="did you mean 'own'"):
        train(backends=[memory], intervals={"owm": 4})


BROKEN_AT_LOADING = {
    "import": ("import nothing_of_that_name", None),
    "syntax": ("def", None),
    "missing": ("x = 1", None),
    "module": ("class Own: pass", "nothing_of_that_name:Own"),
    "function": ("def Own(): pass", None),
    "nothing": ("class Own: pass", None),
    "exit": ("raise RuntimeError('no\\nlicence')", None),
}


@pytest.mark.parametrize("how", BROKEN_AT_LOADING)
@pytest.mark.parametrize("kind", extensions.KINDS)
def test_what_cannot_be_loaded_is_left_out_with_one_line(site, caplog, kind, how):
    """Training and the rest go on; one line, said once, names the package and the reason."""
    source, value = BROKEN_AT_LOADING[how]
    package(site, "broken", kind, source, value)
    memory = MemoryWriter()
    for _ in range(2):
        exporter = train(3, backends=[memory, "broken"] if kind == "writers" else [memory])
    assert len(memory.records) == 6
    (line,) = warnings_of(caplog)
    assert line.startswith(f"gradflow: the {kind.removesuffix('s')} 'broken' of broken 2.0 is left out: ")
    assert "\n" not in line
    assert "extensions" not in exporter.report()


RAISE = "raise ValueError('mine')"
BROKEN_LATER = {
    "no subclass": ("class Own:\n  instrument, interval, make, drain = 'own', 5, 1, 1", "no subclass"),
    "taken name": (INSTRUMENT.replace('"own"', '"wiring"'), "there is an instrument called 'wiring' already"),
    "no interval": (INSTRUMENT.replace(", 5", ", 0"), "interval must be a number of steps"),
    "make": (INSTRUMENT + f"    def __init__(self): {RAISE}", "mine"),
    "attach": (INSTRUMENT + f"    def attach(self): {RAISE}", "mine"),
    "arm": (INSTRUMENT + f"    def arm(self, *, on): {RAISE}", "mine"),
    "forget": (INSTRUMENT + f"    def forget(self): {RAISE}", "mine"),
    "see": (INSTRUMENT + f"    def see(self, root): {RAISE}", "mine"),
    "before": (INSTRUMENT + f"    def before(self, step): {RAISE}", "mine"),
    "after": (INSTRUMENT + f"    def after(self, step): {RAISE}", "mine"),
    "settle": (INSTRUMENT + f"    waits = True\n    def settle(self): {RAISE}", "mine"),
    "news": (INSTRUMENT + f"    @property\n    def news(self): {RAISE}", "mine"),
    "modules": (INSTRUMENT + f"    @property\n    def modules(self): {RAISE}", "mine"),
    "drain": (INSTRUMENT + f"    def drain(self): {RAISE}", "mine"),
    "drains nothing known": (INSTRUMENT + "    def drain(self): return [1]", "got int"),
    "drains no list": (INSTRUMENT + "    def drain(self): return 1", "int"),
    "metric of ours": (INSTRUMENT.replace("custom.own.one", "loss"), "begins with 'custom.'"),
    "shape": (INSTRUMENT.replace("ones(1)", "ones(3)"), "values of shape (3,) for 1 sites"),
}


@pytest.fixture(scope="module")
def undisturbed():
    """Weights and records of a run without any extension."""
    plain = MemoryWriter()
    return train(backends=[plain]).weights, plain.records


@pytest.mark.parametrize("how", BROKEN_LATER)
def test_an_instrument_that_fails_is_disabled_with_one_line(undisturbed, site, caplog, how):
    """Whatever it raises and wherever, training has the same bits and every other reading is there."""
    source, reason = BROKEN_LATER[how]
    weights, records = undisturbed
    memory = MemoryWriter()
    package(site, "broken", "instruments", source)
    exporter = train(backends=[memory])
    assert all(torch.equal(a, b) for a, b in zip(weights, exporter.weights, strict=True))
    for one, other in zip(records, memory.records[: len(records)], strict=True):
        assert {r.metric for r in one.readings} <= {r.metric for r in other.readings}
    # What fails while the run is closed is told in a record after the last.
    later = memory.records[len(records) :]
    assert all(each.notes and {r.metric for r in each.readings} <= {"runtime.kept", "runtime.waited"} for each in later)
    (line,) = warnings_of(caplog)
    assert "instrument 'broken' of broken 2.0" in line
    assert reason in line


RULE = """
from gradflow_export.rules.base import Rule
from dataclasses import dataclass
@dataclass(frozen=True, kw_only=True)
class Own(Rule):
    name = "own"
    needs = ("loss",)
    def check(self, record, history):
        raise ValueError("mine")
"""


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (RULE, "rule 'own' failed at step 1"),
        (RULE.replace('("loss",)', "()"), "never be asked"),
        (RULE.replace("(Rule)", ""), "no subclass"),
        (RULE.replace('raise ValueError("mine")', "return [1]"), "rule 'own' failed at step 1"),
        (RULE + "    def __post_init__(self): raise ValueError('mine')", "mine"),
    ],
)
def test_a_rule_that_fails_is_disabled_with_one_line(site, caplog, source, reason):
    """The other rules judge, and one line says which is left out."""
    package(site, "broken", "rules", source)
    memory = MemoryWriter()
    exporter = train(backends=[memory])
    assert len(memory.records) == 12
    assert exporter.summary()["verdict"]
    (line,) = warnings_of(caplog)
    assert reason in line


WRITER = """
class Own:
    name = "own"
    def __init__(self, logdir): {init}
    def open(self, run): pass
    def write(self, record): {write}
    def flush(self): pass
    def close(self): pass
"""


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (WRITER.format(init=RAISE, write="pass"), "the writer 'broken' of broken 2.0 is left out: ValueError: mine"),
        (WRITER.format(init="pass", write=RAISE), "the own writer failed in write()"),
        (WRITER.format(init="pass", write="pass").replace("self, logdir", "self"), "the writer 'broken' of broken 2.0"),
    ],
)
def test_a_writer_that_fails_is_disabled_with_one_line(site, caplog, source, reason):
    """The other writers get every record."""
    package(site, "broken", "writers", source)
    memory = MemoryWriter()
    train(backends=["broken", memory])
    assert len(memory.records) == 12
    (line,) = warnings_of(caplog)
    assert reason in line


def test_extensions_can_be_turned_off(site, monkeypatch):
    """``GRADFLOW_EXTENSIONS=0`` loads none of them."""
    package(site, "own_instrument", "instruments", INSTRUMENT)
    monkeypatch.setenv("GRADFLOW_EXTENSIONS", "0")
    extensions.extensions.cache_clear()
    assert extensions.active() == ()


def test_an_unknown_backend_names_the_writers_of_packages_too(site):
    """A misspelt name of an installed writer is an error that names it."""
    package(site, "elsewhere", "writers", WRITER.format(init="pass", write="pass"))
    with pytest.raises(ArgumentError, match="did you mean 'elsewhere'"):
        train(backends=["elsewhare"])
