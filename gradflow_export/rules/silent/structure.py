"""Mistakes between layers: answers that can be seen, gradients that are cut off, layers that are one: graph alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gradflow_export.records.step_record import IssueType, Severity, StepRecord
from gradflow_export.rules.base import Finding, Rule, number, some
from gradflow_export.rules.evidence import layers_of, seen, sites_of
from gradflow_export.rules.history import History
from gradflow_export.rules.signals import owner


@dataclass(frozen=True, kw_only=True)
class SeenAnswers(Rule):
    """Find models that are to predict the next word of a sequence and can see it: no causal mask, or one turned round.

    Targets that are the words of the input moved on by one, word for word, are proof of the task; attention of a place
    to the next one, or a recurrent layer that reads these words from the end, that the answer is in sight. The loss
    then falls to nothing, and of a text that is to be written nothing is known. What encodes another sequence, a prefix
    of which most targets do not count, and targets that are not moved are left in peace.

    Attributes:
        share: Least share of places that see the next one.
    """

    share: float = 0.5
    patience: int = 2
    heal: int = 100

    name: ClassVar[str] = "seen-answers"
    evidence: ClassVar[tuple[str, ...]] = ("target.ahead",)

    def check(self, record: StepRecord, history: History) -> tuple[Finding, ...]:
        """Judge the graph of this record."""
        del history
        values = {site: seen(record, "target.ahead", site) or 0.0 for site in layers_of(record, "target.ahead")}
        layers = tuple(site for site, value in values.items() if value >= self.share)
        if not layers:
            return ()
        return (
            Finding(
                IssueType.BAD_TARGETS,
                Severity.HIGH,
                layers,
                max(values.values()),
                self.share,
                f"targets are the words of the input moved on by one, and {some(layers)} sees the next word at "
                f"{number(100 * max(values.values()))} % of the places: the answer is read, not predicted.",
                "hide what comes later: F.scaled_dot_product_attention(q, k, v, is_causal=True), mask=nn.Transformer."
                "generate_square_subsequent_mask(n), or scores.masked_fill(torch.ones(n, n).triu(1).bool(), -inf); "
                "recurrent layers with bidirectional=False.",
                cause="answers in sight",
            ),
        )


@dataclass(frozen=True, kw_only=True)
class CutOff(Rule):
    """Find layers whose outputs are used in a way that passes no gradient back to them.

    What enters them was drawn by ``sample()`` from a distribution whose parameters train (and whose ``log_prob`` nobody
    asks for), or comes by a step of rounding alone, whose gradient is 0. What comes before has another part of the
    loss, such as a divergence from a prior, so that gradients are there and only this one is not. Where it has none,
    all its gradients are 0, and :class:`~gradflow_export.rules.silent.wiring.NotTraining` tells of that.

    Source: Kingma and Welling 2014, arXiv:1312.6114, sec. 2.4.
    """

    patience: int = 2
    heal: int = 100

    name: ClassVar[str] = "cut-off"
    evidence: ClassVar[tuple[str, ...]] = ("cut_off.receives",)

    def check(self, record: StepRecord, history: History) -> tuple[Finding, ...]:
        """Judge the graph of this record, and what gradients there are."""
        del history
        layers = layers_of(record, "cut_off.receives")
        given = tuple(site for site in layers if record.fact("cut_off.receives", site))
        made = tuple(site for site in layers if site not in given)
        if not layers or set(made) <= _without_gradient(record):
            return ()
        return (
            Finding(
                IssueType.NOT_TRAINING,
                Severity.HIGH,
                layers,
                1.0,
                0.0,
                f"what {some(given)} is given was drawn or rounded from the outputs of {some(made)}, and passes no "
                "gradient on: of this part of the loss they never hear.",
                "draw with rsample() in place of sample() or torch.normal(mean, std), or mean + std * torch.randn_like("
                "std); round straight through, x + (x.round() - x).detach().",
                cause="cut off",
            ),
        )


@dataclass(frozen=True, kw_only=True)
class RepeatedLayer(Rule):
    """Find a layer that stands several times in one container, as by ``[layer] * n``: n layers with the weights of one.

    It takes calls of which each is given what the one before made, or all the same tensor. A layer that is registered
    once and called several times, or registered elsewhere besides, is shared on purpose.
    """

    patience: int = 2
    heal: int = 100

    name: ClassVar[str] = "repeated-layer"
    evidence: ClassVar[tuple[str, ...]] = ("layer.repeated",)

    def check(self, record: StepRecord, history: History) -> tuple[Finding, ...]:
        """Judge the calls of this record."""
        del history
        layers = layers_of(record, "layer.repeated")
        if not layers:
            return ()
        count = max(seen(record, "layer.repeated", site) or 0.0 for site in layers)
        return (
            Finding(
                IssueType.CAPACITY,
                Severity.MEDIUM,
                layers,
                count,
                1.0,
                f"{some(layers)} stands {number(count)} times in its container: all are one layer with one set of "
                "weights.",
                "make each anew, nn.ModuleList([Block() for _ in range(n)]) in place of [Block()] * n; where one is "
                "meant to be shared, register it once and call it n times, or say so: watch(ignore=[('CAPACITY', "
                f"{layers[0]!r})]).",
                cause="repeated layer",
            ),
        )


@dataclass(frozen=True, kw_only=True)
class DiscardedActivation(Rule):
    """Find activations whose result nobody takes, ``F.relu(x)`` as a line of its own, between two layers.

    What entered the activation goes on to the next layer with nothing between that bends, no loss of the step depends
    on the result, and nobody holds it any more.
    """

    patience: int = 3
    heal: int = 100

    name: ClassVar[str] = "discarded-activation"
    evidence: ClassVar[tuple[str, ...]] = ("layer.discarded",)

    def check(self, record: StepRecord, history: History) -> tuple[Finding, ...]:
        """Judge the graph of this record."""
        del history
        layers = layers_of(record, "layer.discarded")
        if not layers:
            return ()
        return (
            Finding(
                IssueType.CAPACITY,
                Severity.MEDIUM,
                layers,
                1.0,
                0.0,
                f"an activation of the output of {some(layers)} is computed and thrown away: the next layer gets what "
                "entered it, and the two are one linear map.",
                "use the result: x = F.relu(x), or nn.ReLU(inplace=True).",
                cause="result thrown away",
            ),
        )


def _without_gradient(record: StepRecord) -> set[str]:
    """Return the modules whose parameters all got a gradient of exactly 0, as far as they got one."""
    sites = sites_of(record, "parameter.gradient_norm")
    moved = {owner(site) for site in sites if record.value("parameter.gradient_norm", site) != 0.0}
    return {owner(site) for site in sites} - moved
