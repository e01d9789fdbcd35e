"""What the rules of recurrent layers and policies take for a fault, and what for a network that learns."""

import math

import numpy as np
import pytest

from gradflow_export.records.step_record import IssueType, Reading, Severity, StepRecord
from gradflow_export.rules.judge import Judge
from gradflow_export.rules.policy import ExcessExploration, PolicyCollapse, adequacy, collapse_risk, slope_of
from gradflow_export.rules.recurrent import Subcritical, Supercritical


def judged(rule, readings, losses=lambda _: 2.0, steps=40):
    """Judge records made of one function from step to readings, and return the issues."""
    judge = Judge([rule], strict=True)
    for step in range(1, steps + 1):
        judge.check(StepRecord(step, 0.0, (Reading.run("loss", losses(step)), *readings(step))))
    return judge.issues


def layers(decays, length=20, radii=None):
    """Return the readings of recurrent layers, ``{site: factor per step}``."""
    sites = tuple(decays)
    values = tuple(decays.values())
    return lambda _: (
        Reading.of("recurrent.decay", sites, values),
        Reading.of("recurrent.spectral_radius", sites, values if radii is None else radii),
        Reading.of("recurrent.length", sites, (float(length),) * len(sites)),
    )


def halving(step):
    return 2.0 * math.exp(-step / 5)


def test_a_state_that_forgets_at_once_is_subcritical():
    """A fifth left per step is a fault since the first step, named with the steps its memory lasts."""
    (issue,) = judged(Subcritical(), layers({"rnn": 0.19}))
    assert (issue.issue_type, issue.layer, issue.step) == (IssueType.RECURRENT_SUBCRITICAL, "rnn", 1)
    assert issue.severity is Severity.HIGH
    assert "a tenth is left after 1.39 of 20 time steps" in issue.message
    assert judged(Subcritical(), layers({"rnn": 0.0}))[0].value == 0.0


@pytest.mark.parametrize("start", [0.46, 0.55, 0.64, 0.74])
def test_where_pytorch_begins_is_no_fault(start):
    """What its initialisations give is left in peace while the loss falls, and in a short run in any case."""
    assert judged(Subcritical(), layers({"rnn": start})) == ()
    assert judged(Subcritical(), layers({"rnn": start}), halving, 400) == ()


def test_a_task_that_needs_no_memory_is_learned_without():
    """The same forgetting is no fault once the loss has halved, and none in sequences shorter than the memory."""
    assert [i.open for i in judged(Subcritical(), layers({"rnn": 0.19}), halving)] == [False]

    def late(step):
        return layers({"rnn": 0.38})(step) if step > 9 else ()

    assert judged(Subcritical(), late, lambda step: 2.0 if step < 3 else 0.5) == ()
    assert judged(Subcritical(), layers({"rnn": 0.3}, length=3)) == ()


def test_a_short_memory_and_a_loss_that_rests_are_a_hint():
    """Inside what initialisations give, hundreds of steps without progress make a remark of low severity."""
    (issue,) = judged(Subcritical(), layers({"rnn": 0.6}), steps=300)
    assert issue.severity is Severity.LOW
    assert issue.step > 200
    assert judged(Subcritical(), layers({"rnn": 0.8}), steps=300) == ()


def test_one_layer_that_remembers_is_enough():
    """A stack is ill when all its layers and directions forget; other modules are judged by themselves."""
    both = {"enc.l0": 0.2, "enc.l0_reverse": 0.1, "dec": 0.9}
    (issue,) = judged(Subcritical(), layers(both))
    assert issue.layers == ("enc.l0", "enc.l0_reverse")
    assert judged(Subcritical(), layers({**both, "enc.l1": 0.7})) == ()


def test_growth_over_the_sequence_is_supercritical():
    """What counts is the factor over the whole sequence; the worst layer is told of, severity follows its decades."""
    (issue,) = judged(Supercritical(), layers({"rnn.l0": 1.2, "rnn.l1": 1.5}, length=30))
    assert (issue.layers, issue.severity) == (("rnn.l0", "rnn.l1"), Severity.HIGH)
    assert "multiplies a gradient by 1.5 per step" in issue.message
    assert "10 to the power of 5.28 over 30 time steps" in issue.message
    assert judged(Supercritical(), layers({"rnn": 1.5}, length=100))[0].severity is Severity.CRITICAL
    assert judged(Supercritical(), layers({"rnn": 1.1}, length=30))[0].severity is Severity.MEDIUM


@pytest.mark.parametrize(("factor", "length"), [(1.06, 20), (1.04, 500), (1.02, 64), (0.99, 64)])
def test_a_cell_that_was_told_to_remember_is_no_fault(factor, length):
    """A forget bias of 5 gives 1.06 over 20 steps, threefold in all: healthy."""
    assert judged(Supercritical(), layers({"rnn": factor}, length=length)) == ()


def test_short_sequences_are_judged_by_the_spectral_radius():
    """Below eight steps nothing composes yet: the one-step radius is taken."""
    assert judged(Supercritical(), layers({"rnn": 0.5}, length=7, radii=(1.6,)))[0].value == pytest.approx(1.6)
    assert judged(Supercritical(), layers({"rnn": 1.6}, length=7, radii=(0.5,))) == ()


@pytest.mark.parametrize(("error", "found"), [(0.01, 1), (0.2, 0)])
@pytest.mark.parametrize(
    ("rule", "factor", "length", "metric"),
    [
        (Subcritical(), 0.3, 20, "decay"),
        (Supercritical(), 1.5, 30, "decay"),
        (Subcritical(), 0.3, 7, "spectral_radius"),
        (Supercritical(), 1.6, 7, "spectral_radius"),
    ],
)
def test_what_four_sequences_say_is_reported_only_where_the_others_cannot_differ(
    rule, factor, length, metric, error, found
):
    """Where three standard errors lead out of the range of faults, the rule does not know of one."""
    told = Reading.of(f"recurrent.{metric}_error", ("rnn",), (error,))
    issues = judged(rule, lambda step: (*layers({"rnn": factor}, length=length)(step), told))
    assert len(issues) == found
    if issues:
        assert issues[0].value == pytest.approx(factor)


def test_a_latch_that_was_learned_is_no_fault():
    """A factor that rises above 1 while the loss falls keeps a bit; the same growth without that is a fault."""

    def latch(step):
        return layers({"rnn": min(1.02 + 0.008 * step, 1.2)}, length=16)(step)

    assert judged(Supercritical(), latch, halving) == ()
    assert judged(Supercritical(), latch)[0].severity is Severity.MEDIUM
    late = judged(Supercritical(), lambda step: layers({"rnn": 1.5 if step > 9 else 1.0})(step), lambda s: 2 / s**0.5)
    assert [issue.step for issue in late] == [10]


def test_non_finite_dynamics_are_left_to_others():
    """NaN in a weight makes NaN dynamics, of which these rules say nothing."""
    for rule in (Subcritical(), Supercritical()):
        assert judged(rule, layers({"rnn": math.nan})) == ()
        assert judged(rule, layers({"rnn": math.inf})) == ()


def entropy(value, head="pi"):
    return lambda step: (
        Reading.run("policy.entropy", value(step)),
        Reading.of("policy.head_entropy", (head,), (value(step),)),
    )


def test_a_policy_that_was_certain_from_the_beginning_is_a_collapse():
    """Certain before anything was learned is HIGH, and the head is named."""
    (issue,) = judged(PolicyCollapse(), entropy(lambda _: 0.02))
    assert (issue.issue_type, issue.layer, issue.severity) == (IssueType.POLICY_COLLAPSE, "pi", Severity.HIGH)
    assert "from the beginning" in issue.message


def test_a_policy_that_becomes_certain_is_judged_by_its_loss():
    """A policy may become certain because it has learned: no fault once the loss rests after a real fall."""

    def value(step):
        return max(1.0 - 0.05 * step, 0.05)

    (issue,) = judged(PolicyCollapse(), entropy(value), steps=80)
    assert (issue.severity, issue.step) == (Severity.MEDIUM, 19)
    resting = judged(PolicyCollapse(), entropy(lambda s: 1.0 if s < 60 else 0.05), lambda s: 1 + math.exp(-s / 4), 90)
    assert resting == ()
    assert judged(PolicyCollapse(), entropy(lambda step: max(1.0 - 0.02 * step, 0.2)), steps=80) == ()


def test_a_return_that_rises_earns_a_certain_choice():
    """A loss that falls far below zero together with the entropy is no collapse; a critic that learns later is none."""

    def value(step):
        return max(math.exp(-step / 8), 0.03)

    assert judged(PolicyCollapse(), entropy(value), lambda s: 0.3 - 1.2 * (1 - math.exp(-s / 8)), 80) == ()
    critic = judged(PolicyCollapse(), entropy(value), lambda s: 5.0 * math.exp(-s / 60) - 0.1, 80)
    assert [issue.severity for issue in critic] == [Severity.MEDIUM]
    after = judged(PolicyCollapse(), entropy(lambda s: 0.9 if s < 3 else 0.03), lambda s: 0.3 - 0.02 * s, 80)
    assert len(after) == 1


def test_a_narrow_gaussian_is_a_collapse_and_a_wide_one_is_too_much():
    """Both are told at the parameter the spread comes from; without one, of the whole model."""

    def std(value):
        return lambda _: (Reading.run("policy.std", value), Reading.of("policy.head_std", ("log_std",), (value,)))

    assert [i.layer for i in judged(PolicyCollapse(), std(0.02))] == ["log_std"]
    (issue,) = judged(ExcessExploration(), std(7.4))
    assert (issue.issue_type, issue.layer, issue.step) == (IssueType.EXCESS_EXPLORATION, "log_std", 1)
    assert judged(ExcessExploration(), std(1.5)) == judged(PolicyCollapse(), std(0.1)) == ()
    assert judged(ExcessExploration(), lambda _: (Reading.run("policy.std", 3.0),))[0].layer == ""


def test_a_wide_gaussian_that_narrows_is_no_fault():
    """Starting wide and coming down is how exploration is meant to go."""
    assert judged(ExcessExploration(), lambda step: (Reading.run("policy.std", 0.5 + 6 * 0.95**step),)) == ()


def test_a_uniform_choice_is_normal_at_first():
    """Uniform at init says nothing; after hundreds of steps it is a remark of low severity."""
    assert judged(ExcessExploration(), entropy(lambda _: 0.995), steps=400) == ()
    (issue,) = judged(ExcessExploration(), entropy(lambda _: 0.995), steps=700)
    assert (issue.severity, issue.layer) == (Severity.LOW, "pi")
    assert judged(ExcessExploration(), entropy(lambda step: 0.995 if step % 300 > 20 else 0.9), steps=700) == ()


@pytest.mark.parametrize(
    ("entropies", "stds", "risk", "explores"),
    [
        ([0.05], [], "HIGH", "TOO_LOW"),
        ([0.9, 0.7, 0.45, 0.3], [], "HIGH", "TOO_LOW"),
        ([0.4, 0.4, 0.4], [], "MEDIUM", "TOO_LOW"),
        ([1.0, 0.8, 0.6], [], "MEDIUM", "ADEQUATE"),
        ([0.9, 0.91, 0.9], [], "LOW", "ADEQUATE"),
        ([], [0.04], "HIGH", "TOO_LOW"),
        ([], [0.08], "MEDIUM", "TOO_LOW"),
        ([], [0.5], "LOW", "ADEQUATE"),
        ([], [2.5], "LOW", "TOO_HIGH"),
        ([], [], "LOW", "ADEQUATE"),
    ],
)
def test_risk_and_adequacy_follow_the_documented_thresholds(entropies, stds, risk, explores):
    """0.5 and a fifth of it, 0.1 and half of it, 2.0; a fall that will reach the bottom in time counts as there."""
    series = np.array(entropies, dtype=np.float64), np.array(stds, dtype=np.float64)
    assert (collapse_risk(*series), adequacy(*series)) == (risk, explores)


def test_uniform_is_too_much_only_late():
    """The same uniform choice is adequate in the first half of training and too much in the second."""
    series = np.array([0.99]), np.array([])
    assert adequacy(*series) == "ADEQUATE"
    assert adequacy(*series, late=True) == "TOO_HIGH"


def test_slope_is_the_median_over_pairs():
    """One outlier does not move it."""
    assert slope_of(np.array([0.0, 1.0, 2.0, 50.0, 4.0])) == pytest.approx(1.0)
    assert slope_of(np.array([3.0, 9.0])) == 0.0


@pytest.mark.parametrize(
    ("lack", "update", "issues"),
    [
        (lambda step: 1e-3 / step**0.5, 0.05, 1),
        (lambda step: 1e-11 * step**2, 0.05, 1),
        (lambda step: 1e-9 * step**2, 0.05, 0),
        (lambda step: 1e-3 / step**0.5, 0.001, 0),
    ],
    ids=["bonus-outweighs", "temperature-divides", "young-policy", "weights-hardly-moved"],
)
def test_a_uniform_choice_that_does_not_follow_its_weights_is_too_much(lack, update, issues):
    """The head's updates add up to its size and the choice is none the nearer to a decision: told within 100 steps."""

    def readings(step):
        moves = ("pi.weight", "other.weight")
        return (
            *entropy(lambda s: 1.0 - lack(s))(step),
            Reading.of("parameter.update_norm", moves, (update, 9.0)),
            Reading.of("parameter.weight_norm", moves, (1.0, 1.0)),
        )

    found = judged(ExcessExploration(), readings, steps=100)
    assert [issue.layer for issue in found] == ["pi"] * issues


def test_a_collapse_does_not_heal_because_certainty_leaves_no_loss():
    """Where one action is certain its log-probability is 0, and so is the loss: nothing was learned by that."""

    def loss(step):
        return 0.2 * math.sin(7.0 * step) if step < 60 else 0.0

    (issue,) = judged(PolicyCollapse(), entropy(lambda step: 0.8 if step < 20 else 0.0065), loss, 120)
    assert issue.open
