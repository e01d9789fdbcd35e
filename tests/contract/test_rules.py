"""What every rule must do, whichever it is: both profiles, one suite."""

from __future__ import annotations

import dataclasses
import itertools
import math
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradflow_export.errors import ArgumentError
from gradflow_export.profiles import PROFILES, THRESHOLDS, profile
from gradflow_export.records.catalog import CATALOG
from gradflow_export.records.evidence import evidence_of
from gradflow_export.records.step_record import IssueType, Reading, Severity, StepRecord, to_float32
from gradflow_export.rules.attention import FixedEntropy
from gradflow_export.rules.history import History
from gradflow_export.rules.judge import Judge
from gradflow_export.rules.seed import FixedDiversity

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")  # arithmetic with NaN and Inf is left to nobody
ASKED_FOR = (FixedEntropy(), FixedDiversity())
ALL = (*{type(rule): rule for name in PROFILES for rule in profile(name)}.values(), *ASKED_FOR)
PARAMETERS = tuple(f"blocks.{i // 2}.{'weight' if i % 2 == 0 else 'bias'}" for i in range(12))
BLOCKS = tuple(f"blocks.{i}" for i in range(6))
SPECIAL = (None, 0.0, math.nan, math.inf, -math.inf, 1e-38, 1e38, -1.0, 1.0)
HEADS = tuple(f"{block}.head{head}" for block in BLOCKS for head in range(2))
FACTS = {name for rule in ALL for name in rule.evidence} | {
    "connection.state", "evaluation.samples", "hidden.state", "layer.cell_calls", "layer.taken_sequences", "loss.over_constant",
    "input.std", "loss.known", "mode.training_dropout", "parameter.added_decay", "loss.samples", "loss.sense", "loss.supervised", "parameter.first_entries", "parameter.foreign_gradient",
    "parameter.frozen_peak", "parameter.frozen_size", "parameter.initial_gain", "parameter.initial_mean", "parameter.recurrent_layer", "parameter.row_parting", "target.attained", "target.directions", "target.repeated", "target.rms", "wiring.game", "wiring.orphans", "wiring.outside",
}  # fmt: skip
"""What checks see; a rule remembers no other name that is no metric."""
EACH = pytest.mark.parametrize("rule", ALL, ids=[rule.name for rule in ALL], scope="module")
"""All tests of one rule come one after the other, and share what its records hold."""


def sites_of(metric):
    kind = CATALOG[metric].kind if metric in CATALOG else "run"
    return {"run": ("",), "parameter": PARAMETERS, "head": HEADS}.get(kind, BLOCKS)


def layers_of(fact):
    """Return where a fact is seen: at the whole model, at parameters or at layers."""
    kind = fact.partition(".")[0]
    return {"wiring": ("",), "connection": PARAMETERS, "hidden": PARAMETERS, "parameter": PARAMETERS}.get(kind, BLOCKS)


def wanted(rule):
    return sorted({*rule.needs, *rule.evidence, *rule.remembers} | {
        "loss", "gradient.total_norm", "block.gradient_norm", "block.output_spread", "parameter.trainable",
        "parameter.learning_rate", "parameter.gradient_norm", "activation.dead_share",
    })  # fmt: skip


def reading(metric, pick):
    sites = sites_of(metric)
    return Reading.of(metric, sites, tuple(pick() for _ in sites))


def record(step, facts, readings):
    """A record of metrics, and of facts, which are no metrics."""
    return StepRecord(step, 0.0, readings, evidence=evidence_of(step, facts))


def wild(rule, steps, seed):
    """What records hold, facts and readings, full of NaN, Inf, zeros and gaps."""
    rng = np.random.default_rng(seed)
    pool = (*SPECIAL, *np.exp(rng.normal(0, 3, 12)).tolist())
    present = np.array([value is not None for value in pool])
    values = to_float32([value or 0.0 for value in pool])

    def drawn(metric):  # all values at once, of a table that was rounded before
        sites = sites_of(metric)
        picked = rng.integers(len(pool), size=len(sites))
        return Reading.owned(metric, sites, values[picked], present[picked])

    def seen(fact):
        layers = layers_of(fact)
        return dict(zip(layers, (pool[i] for i in rng.integers(len(pool), size=len(layers))), strict=True))

    metrics = wanted(rule)
    for _ in range(steps):
        chosen = [metric for metric in metrics if rng.random() < 0.8]
        facts = {name: seen(name) for name in chosen if name not in CATALOG}
        yield facts, tuple(drawn(metric) for metric in chosen if metric in CATALOG)


def records_of(held):
    return (record(step, *each) for step, each in enumerate(held, start=1))


@pytest.fixture(scope="module")
def held(rule):
    """What 260 records of a rule hold: drawing it takes as long as judging it."""
    return [*wild(rule, 260, 1)]


@EACH
def test_rule_is_frozen_and_describes_itself(rule):
    """A rule is a frozen value with a name, needs from the catalogue, sane patience, and a docstring."""
    assert dataclasses.fields(rule)
    with pytest.raises(dataclasses.FrozenInstanceError):
        rule.patience = 0
    assert rule.needs or rule.evidence
    assert set(rule.needs) <= set(CATALOG)
    assert set(rule.evidence).isdisjoint(CATALOG)
    assert {name for name in rule.remembers if name not in CATALOG} <= FACTS
    assert rule.patience >= 1
    assert rule.heal >= 1
    assert rule.cooldown >= 0
    assert type(rule).__doc__
    assert pickle.loads(pickle.dumps(rule)) == rule


def test_names_are_unique():
    """No two rules answer to one name."""
    assert len({rule.name for rule in ALL}) == len(ALL)


@EACH
@pytest.mark.parametrize("part", range(3))
def test_rule_survives_anything_and_is_deterministic(rule, held, part):
    """NaN, Inf, zeros and gaps never raise, and the same records give the same issues, each of them complete."""
    records, runs = [*records_of(held[80 * part : 80 * (part + 1)])], []
    for _ in range(2):
        judge = Judge([rule], strict=True)
        events = [issue for record in records for issue in judge.check(record)]
        runs.append((events, judge.issues))
    assert runs[0] == runs[1]
    for issue in judge.issues:
        assert_complete(issue, 80)


@EACH
def test_rule_counts_the_steps_that_it_saw(rule, held):
    """Of a model whose first record is that of step 5001 it says what it says of one that begins at step 1."""
    runs = []
    for begun in (0, 5000):
        judge = Judge([rule], strict=True)
        for step, each in enumerate(held, start=begun + 1):
            judge.check(record(step, *each))
        runs.append([(i.issue_type, i.severity, i.layers, i.value, i.step - begun) for i in judge.issues])
    assert runs[0] == runs[1]


@EACH
def test_rule_ignores_records_where_everything_is_missing(rule):
    """Missing is not zero: nothing arrived, nothing is wrong."""
    judge = Judge([rule], strict=True)
    for step in range(1, 60):
        facts = {name: dict.fromkeys(layers_of(name)) for name in wanted(rule) if name not in CATALOG}
        readings = tuple(reading(metric, lambda: None) for metric in wanted(rule) if metric in CATALOG)
        judge.check(record(step, facts, readings))
    found = [issue for issue in judge.issues if "not in an optimizer" not in issue.message]
    assert not found


@EACH
def test_rule_says_nothing_of_an_empty_record(rule):
    """A record without any reading is no evidence, even when the rule is asked directly."""
    assert rule.check(StepRecord(1, 0.0), History(rule.remembers)) == ()


@EACH
def test_check_does_not_change_what_it_is_given(rule, held):
    """Asking twice gives the same answer."""
    history = History(rule.remembers)
    for record in records_of(held[-40:]):
        history.add(record)
        assert repr(rule.check(record, history)) == repr(rule.check(record, history))


def assert_complete(issue, steps):
    """Assert that value, threshold, site, first step, sentence and advice are there."""
    assert isinstance(issue.issue_type, IssueType)
    assert issue.severity > Severity.INFO
    assert issue.layers[0] == issue.layer
    assert 1 <= issue.step <= steps
    assert isinstance(issue.value, float)
    assert not math.isnan(issue.threshold)
    assert issue.message.endswith(".")
    assert len(issue.advice) > 20
    assert "nan" not in issue.advice.split()


@pytest.mark.parametrize("name", PROFILES)
def test_every_issue_is_complete(name):
    """Whatever happened, and of rules with the thresholds of their profile."""
    issues = []
    for rule in profile(name):
        judge = Judge([rule], strict=True)
        for record in records_of(wild(rule, 60, 0)):
            judge.check(record)
        issues += judge.issues
    assert {issue.issue_type for issue in issues}
    for issue in issues:
        assert_complete(issue, 60)


@EACH
def test_memory_is_bounded(rule, held):
    """After six hundred records the judge holds no more than after three hundred."""

    def size(judge):
        return len(pickle.dumps((judge._history._runs, judge._history._sites, judge._watches, judge._open)))

    judge, sizes = Judge([rule], strict=True, keep=10), []
    for index, record in enumerate(records_of(itertools.islice(itertools.cycle(held), 600))):
        judge.check(record)
        if index in {300, 599}:
            sizes.append(size(judge))
    assert sizes[1] < 1.5 * sizes[0] + 20_000
    assert len(judge.issues) <= 10 + len(judge._open)


def healthy(steps):
    """A plain healthy run: the loss falls, everything moves, nothing stands out."""
    rng = np.random.default_rng(0)

    def near(x=1.0):
        return float(x * math.exp(rng.normal(0, 0.2)))

    for step in range(1, steps + 1):
        loss = 2.0 * math.exp(-step / 100) + 0.1
        yield StepRecord(
            step,
            0.0,
            (
                Reading.run("loss", near(loss)),
                Reading.run("gradient.total_norm", near()),
                Reading.run("gradient.cosine", 0.1),
                Reading.run("flow.winding", near(2.0)),
                Reading.run("flow.plane", 0.9),
                Reading.run("flow.growth", near()),
                Reading.run("flow.work", 0.1),
                Reading.run("runtime.rss", 400.0),
                Reading.run("runtime.memory_limit", 64_000.0),
                reading("parameter.gradient_norm", near),
                reading("parameter.weight_norm", near),
                reading("parameter.update_norm", lambda: near(1e-3)),
                reading("parameter.learning_rate", lambda: 0.1),
                reading("parameter.trainable", lambda: 1.0),
                reading("parameter.numel", lambda: 64.0),
                reading("block.gradient_norm", near),
                reading("block.output_rms", near),
                reading("block.output_spread", near),
                reading("block.effective_rank", lambda: near(12.0)),
                reading("activation.dead_share", lambda: 0.2),
                reading("activation.saturated_share", lambda: 0.2),
                reading("parameter.zero_share", lambda: 0.3),
                reading("attention.entropy", lambda: 0.6),
                reading("attention.diversity", lambda: 0.8),
                reading("attention.sink", lambda: 0.3),
                reading("attention.max_logit", lambda: 4.0),
                reading("block.rank_residual", lambda: 0.7),
                reading("block.input_residual", lambda: 0.7),
            ),
        )


def test_a_healthy_run_raises_nothing():
    """Five hundred plain steps leave every robust rule silent."""
    judge = Judge(profile(), strict=True)
    assert [issue for record in healthy(500) for issue in judge.check(record)] == []


def test_seed_profile_is_literal():
    """The fixed thresholds fire just beyond their number and not at it."""
    cases = (
        ("parameter.gradient_norm", 9.9, 10.1, IssueType.EXPLODING),
        ("parameter.gradient_norm", 1.1e-6, 0.9e-6, IssueType.VANISHING),
        ("parameter.update_norm", 1.1e-8, 0.9e-8, IssueType.STAGNATION),
        ("parameter.zero_share", 0.89, 0.91, IssueType.DEAD),
    )
    for metric, still, beyond, kind in cases:
        for value, wanted_types in ((still, []), (beyond, [kind])):
            judge = Judge(profile("seed"), strict=True)
            judge.check(StepRecord(1, 0.0, (Reading.of(metric, ("a.weight",), (value,)),)))
            assert [issue.issue_type for issue in judge.issues] == wanted_types
    for metric, values, kind in (
        ("loss", (1.0, 2.1), IssueType.LOSS_SPIKE),
        ("runtime.rss", (1001.0,), IssueType.MEMORY_USAGE),
        ("gradient.total_norm", (*[1.0] * 19, 1e6), IssueType.UNSTABLE),
    ):
        judge = Judge(profile("seed"), strict=True)
        for step, value in enumerate(values, start=1):
            judge.check(StepRecord(step, 0.0, (Reading.run(metric, value),)))
        assert [issue.issue_type for issue in judge.issues] == [kind]


def test_explicit_threshold_adds_its_fixed_rule_beside_the_robust_ones():
    """A number the user gave is reported literally; without it the robust profile knows no fixed number."""
    record = StepRecord(1, 0.0, (Reading.of("parameter.gradient_norm", ("a.weight",), (7.0,)),))
    plain, given_ = Judge(profile()), Judge(profile("robust", {"gradient_explosion_threshold": 5.0}))
    assert plain.check(record) == ()
    assert [issue.value for issue in given_.check(record)] == [7.0]
    assert len(profile("robust", {"dead_threshold": 0.8})) == len(profile()) + 1
    assert not any(rule.fixed for rule in profile())


def test_two_names_of_one_threshold_must_agree():
    """``exploding_threshold`` is ``gradient_explosion_threshold``."""
    assert profile("seed", {"exploding_threshold": 3.0}) == profile("seed", {"gradient_explosion_threshold": 3.0})
    with pytest.raises(ArgumentError, match="twice"):
        profile("robust", {"exploding_threshold": 3.0, "gradient_explosion_threshold": 4.0})


@pytest.mark.parametrize("value", ["10", None, math.nan, -1.0, True], ids=repr)
def test_unusable_threshold_is_refused_at_once(value):
    """What is no number of at least 0 is named in the error."""
    with pytest.raises(ArgumentError, match="loss_spike_threshold"):
        profile("robust", {"loss_spike_threshold": value})


def test_unknown_names_are_refused_with_the_nearest():
    """A typing error is answered with the word that was meant."""
    with pytest.raises(ArgumentError, match="'robust'"):
        profile("robst")
    with pytest.raises(ArgumentError, match="gradient_explosion_threshold"):
        profile("seed", {"gradient_explosin_threshold": 1.0})


def test_thresholds_cannot_be_changed():
    """The table of defaults is read-only."""
    with pytest.raises(TypeError):
        THRESHOLDS["dead_threshold"] = 0.1


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(2**-10, 2**10, width=32), min_size=15, max_size=80), st.sampled_from([1e-8, 1e8]))
def test_loss_and_gradient_rules_do_not_see_the_scale(values, factor):
    """Loss and gradients times 1e8 or 1e-8: the same types at the same steps."""

    def run(scale):
        judge = Judge(profile(), strict=True)
        for step, value in enumerate(values, start=1):
            runs = (Reading.run("loss", value * scale), Reading.run("gradient.total_norm", value * scale))
            judge.check(StepRecord(step, 0.0, runs))
        return [(issue.issue_type, issue.step, issue.healed_step) for issue in judge.issues]

    assert run(1.0) == run(factor)
