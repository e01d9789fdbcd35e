"""The corpus of silent mistakes keeps its promises, and its benchmark counts as it says."""

import importlib
import importlib.util
import logging
import sys
import warnings
from collections import Counter
from pathlib import Path

import pytest
from torch import nn

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
HALVES = ("dev", "heldout")
SETS = (*HALVES, "second")
QUICK = (
    "zero_grad_before_step",
    "broadcast_mse",
    "inputs_shuffled_alone",
    "layer_replaced_after_optimizer",
    "argmax_between_networks",
    "kl_of_probabilities",
    "energies_unscaled",
    "accumulation_longer_than_epoch",
    "warmup_in_whole_numbers",
)
ODD = ("linear_regression", "softmax_regression_from_zero", "mostly_noise", "lora", "simplified_graph_network")


@pytest.fixture(autouse=True)
def on_path(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))


@pytest.fixture
def script(on_path):
    spec = importlib.util.spec_from_file_location("silent_benchmark", BENCHMARKS / "silent.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    log = logging.getLogger("gradflow_export")
    before = log.level
    with warnings.catch_warnings():
        yield module
    log.setLevel(before)
    del sys.modules[spec.name]


def half(name):
    return importlib.import_module(f"silent.{name}")


def test_metadata_is_complete():
    """At least 78 mistakes, each with a source of its own, known types and sites, and 43 odd healthy programs."""
    types = importlib.import_module("silent.common").TYPES
    bugs = [bug for name in SETS for bug in half(name).BUGS]
    healthy = [case for name in SETS for case in half(name).HEALTHY]
    assert len(bugs) >= 78
    assert len(healthy) >= 43
    names = Counter(case.name for case in [*bugs, *healthy])
    assert max(names.values()) == 1
    assert max(Counter(bug.source for bug in bugs).values()) == 1
    for bug in bugs:
        assert bug.source.startswith("https://")
        assert bug.title
        assert bug.make.__doc__
        assert bug.where
        assert bug.types
        assert set(bug.types) <= set(types)
        assert not set(bug.types) & set(bug.also)
    assert all(case.make.__doc__ for case in healthy)
    assert {bug.types[0] for bug in bugs} == set(types)


def test_halves_are_as_drawn():
    """Each program is in the half into which chance put it, under its type."""
    for name, drawn in zip(HALVES, importlib.import_module("silent.split").halves(), strict=True):
        there = Counter(bug.name for bug in half(name).BUGS) + Counter(case.name for case in half(name).HEALTHY)
        assert set(there) == {program for programs in drawn.values() for program in programs}
        for bug in half(name).BUGS:
            assert bug.name in drawn[bug.types[0]]


@pytest.mark.parametrize("name", QUICK)
def test_only_the_mended_twin_learns(name):
    """Without any exporter the mended twin reaches its goal, and these sick programs do not."""
    bug = next(bug for part in SETS for bug in half(part).BUGS if bug.name == name)
    for fixed in (False, True):
        program = bug.build(fixed, 0)
        assert isinstance(program.model, nn.Module)
        program.train()
        assert (program.score() >= program.goal) is fixed


@pytest.mark.parametrize("name", ODD)
def test_odd_programs_learn(name):
    """A program that only looks wrong reaches its goal."""
    case = next(case for part in SETS for case in half(part).HEALTHY if case.name == name)
    program = case.build(0)
    program.train()
    assert program.score() >= program.goal


def test_sites_at_fault():
    """A site is at fault at or below a prefix; the star is any layer and no other site, the empty name the whole model."""
    common = importlib.import_module("silent.common")
    assert common.at_fault("head.0.weight", ("head",))
    assert common.at_fault("hidden[0].weight", ("hidden",))
    assert not common.at_fault("header", ("head",))
    assert not common.at_fault("head", ("head.0",))
    assert common.at_fault("fc", ("*",))
    assert not common.at_fault("loss", ("*",))
    assert not common.at_fault("", ("*",))
    assert common.at_fault("", ("",))
    assert not common.at_fault("fc", ("",))
    assert common.located(("a", "b", "c"), ("a",))
    assert common.located(("b", "a"), ("a",))
    assert not common.located(("b", "c", "a"), ("a",))


def test_verdicts(script):
    """Weak issues identify nothing; a wrong type is no right one; any weak word of a new type alarms a mended twin."""
    bug = next(bug for bug in half("dev").BUGS if bug.name == "groups_not_appended")

    def run(form, *issues):
        return script.Run("dev", bug.name, form, 0, issues, 1.0, True, 0.0)

    right = ("NOT_TRAINING", 3, ("fc",))
    row = script.judge(bug, [
        run("sick", ("NOT_TRAINING", 1, ("fc",))), run("sick", ("DEAD", 3, ("fc",))), run("sick", right),
        run("sick", ("NOT_TRAINING", 2, ("encoder",))), run("mended", ("DEAD", 1, ("fc",))),
        run("mended", ("STALE_GRAD", 0, ("fc",))), run("mended", ("DEAD", 2, ("fc",))),
    ])  # fmt: skip
    counts = {key: row[key] for key in ("identified", "right_type", "located", "twin_alarmed")}
    assert counts == {"identified": 3, "right_type": 2, "located": 1, "twin_alarmed": 2}
    assert row["extra"] == ["DEAD"]
    totals = script.summary([row], {"odd": [run("healthy", right), run("healthy")]})
    assert totals["identified"] == {"programs": 0, "runs": 3}
    assert totals["healthy_alarmed"] == {"programs": 1, "runs": 1}
    page = script.table([row], {"odd": [run("healthy", right)]}, totals)
    assert "| mistakes identified | ≥ 90 % | 0 of 1 | 0% |" in page
    assert "- odd (seeds 0): NOT_TRAINING" in page


def test_a_watched_run(script):
    """A program is trained under an exporter that is given the model alone; its issues come back as plain data."""
    index = [bug.name for bug in half("dev").BUGS].index("zero_grad_before_step")
    seen = script.work(script.Task("dev", index, "mended", 0, watched=True))
    assert seen.learned
    assert all(isinstance(sites, tuple) for _, _, sites in seen.issues)
