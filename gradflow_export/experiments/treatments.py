"""The treatments: each is one change to a training script, made from outside, and the patch that makes it for good.

An *exact* treatment removes one cause and does little to a sound program. A *tuning* treatment helps many programs
that are merely untuned, so that it counts only where a program does not learn.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from gradflow_export.experiments import interventions as do
from gradflow_export.experiments import model_edits as edit
from gradflow_export.experiments import probes as probe
from gradflow_export.experiments.facts import Facts
from gradflow_export.experiments.mending import losses as loss
from gradflow_export.experiments.mending import rates, scores
from gradflow_export.experiments.mending import sequences as sequence
from gradflow_export.experiments.mending.batches import Batches
from gradflow_export.experiments.mending.beginnings import DrawnZeros
from gradflow_export.experiments.mending.catalog import MENDED
from gradflow_export.experiments.mending.layers import AROUND
from gradflow_export.experiments.mending.leaks import ScaledLoss
from gradflow_export.experiments.mending.penalties import NoPenalty
from gradflow_export.experiments.mending.rates import GROUPS, LIMITS
from gradflow_export.experiments.mending.tables import EVERYTHING_TRAINED, TABLES_TRAINED
from gradflow_export.experiments.mending.treatment import EXACT, LOOK, PLACEBO, TRIED, TUNING, Treatment
from gradflow_export.experiments.watched import Watch
from gradflow_export.records.issues import IssueType

WATCH = "watch"
SCALED = 30.0
"""Mean, spread, or inverse of the spread of inputs from which on their scale may be the cause."""
DROPPED = 0.75
"""Share that a dropout leaves out from which on it may be the cause."""
WIDE = 4.0
"""Gain of first weights from which on they may be the cause; ``nn.Linear`` draws 0.58."""
APART = 8.0
"""Mean of an input's columns as a multiple of their spread from which on it may be the cause."""
PADDING = 0.5
"""Share of the steps of recurrent layers that are padding from which on it may be the cause."""
FADED = 0.25
"""Share of steps with nearly no learning rate from which on a schedule may be the cause."""
RETURNED = 2
"""Times that weights were put back to the same numbers from which on that may be the cause."""
_T = IssueType
_RATE = (
    _T.LEARNING_RATE, _T.UNSTABLE, _T.EXPLODING, _T.NUMERICAL, _T.LOSS_SPIKE, _T.DIVERGING, _T.ATTENTION_COLLAPSE,
    _T.POLICY_COLLAPSE,
)  # fmt: skip


def _rate(factor: float, kind: str, separates: str, fixes: tuple[IssueType, ...]) -> Treatment:
    """Return the treatment with a multiple of the learning rate."""
    patch = f"for group in optimizer.param_groups:\n    group['lr'] *= {factor:g}"
    make = functools.partial(do.GroupOption, "lr", float(factor))
    causes = frozenset({"too small"} if factor > 1 else ())
    return Treatment(f"learning rate x {factor:g}", kind, make, separates, patch, fixes, causes=causes)


def _adam(rate: str, separates: str) -> Treatment:
    """Return the treatment with another optimizer."""
    patch = f"optimizer = torch.optim.Adam(model.parameters(), lr={rate})"
    fixes = (_T.OPTIMIZER_STATE, _T.LEARNING_RATE, _T.STAGNATION)
    return Treatment(f"Adam with {rate}", TUNING, functools.partial(do.OwnAdam, float(rate)), separates, patch, fixes)


def _kept(facts: Mapping[str, Any]) -> str:
    """Return what keeps gradients as the backward pass left them."""
    if (kept := facts.get("kept", 1.0)) == 0:
        return "optimizer.zero_grad()  # before backward(), not between backward() and step()"
    return (
        f"# as little as {kept:.2g} of the gradient remains\n"
        "# remove what changes gradients between backward() and step(): clip_grad_norm_, clip_grad_value_, zero_grad()"
    )


TREATMENTS: tuple[Treatment, ...] = (
    Treatment(
        "clear old gradients",
        EXACT,
        do.ClearedGradients,
        "gradients of earlier steps that are added to the new ones",
        "optimizer.zero_grad()  # before each backward(), once per optimizer step",
        (_T.STALE_GRAD,),
        lambda facts: facts["stale"] > 0,
        mistake=True,
        of_loop=True,
    ),
    Treatment(
        "keep the gradients as backward left them",
        EXACT,
        do.KeptGradients,
        "gradients that are cleared, clipped or scaled away between backward() and step()",
        _kept,
        (_T.LEARNING_RATE, _T.NOT_TRAINING),
        lambda facts: facts["edited"] > 0,
        of_loop=True,
    ),
    *LIMITS,
    Treatment(
        "pin the weights between steps",
        EXACT,
        do.PinnedWeights,
        "weights that something other than the optimizer overwrites",
        "# remove what writes to the weights between two steps: a re-initialization, a reloaded checkpoint, copy_()",
        (_T.NOT_TRAINING, _T.STAGNATION, _T.DESYNC),
        lambda facts: facts["foreign"] > 0,
        evident=lambda facts: facts["returned"] >= RETURNED,
        of_loop=True,
    ),
    EVERYTHING_TRAINED,
    TABLES_TRAINED,
    Treatment(
        "random weights in place of zeros",
        EXACT,
        DrawnZeros,
        "consecutive tables of zeros, of which none gets a gradient",
        "torch.nn.init.kaiming_uniform_(first.weight, 5**0.5)  # of two consecutive layers, such as the factors of an "
        "adapter, at most one may start at 0",
        (_T.BAD_INIT, _T.STAGNATION, _T.NOT_TRAINING),
        lambda facts: facts["level"] > 0,
        mistake=True,
    ),
    Treatment(
        "zeros in place of NaN and Inf",
        EXACT,
        edit.Finite,
        "inputs or targets with entries that are not finite",
        "inputs = torch.nan_to_num(inputs, 0.0, 0.0, 0.0)  # or mend what makes them: (x - mean) / (std + 1e-8)",
        (_T.NUMERICAL, _T.DATA_SCALE),
        lambda facts: facts["endless"] > 0,
        mistake=True,
    ),
    Treatment(
        "a transpose instead of a reshape",
        EXACT,
        scores.Transposed,
        "a reshape that exchanges dimensions and mixes the samples of a batch",
        "x = x.transpose(0, 1)  # in place of x.view(b, a) or x.reshape(b, a), for x of shape (a, b)",
        (_T.NOT_LEARNING, _T.BAD_TARGETS, _T.WRONG_LOSS),
        lambda facts: facts["mixed"] > 0,
        mistake=True,
    ),
    Treatment(
        "hold the first learning rate",
        EXACT,
        do.FirstRate,
        "a schedule that decays the learning rate to zero or raises it",
        "# remove scheduler.step(), or call it once per epoch instead of once per batch",
        (_T.LEARNING_RATE,),
        lambda facts: bool(facts["schedule"]),
        evident=lambda facts: facts["faded"] > FADED,
        choice=True,
        of_loop=True,
    ),
    _rate(0.1, EXACT, "a learning rate that is too large", _RATE),
    _rate(0.01, EXACT, "a learning rate that is far too large", _RATE),
    Treatment(
        "no penalty on the weights",
        EXACT,
        NoPenalty,
        "a penalty on the weights that outweighs the rest of the loss",
        "loss = data_loss + 1e-3 * penalty  # a smaller factor, so that the data decide where the weights go",
        (_T.LEARNING_RATE, _T.NOT_LEARNING),
        lambda facts: bool(facts.get("penalized")),
        choice=True,
    ),
    Treatment(
        "minus the loss",
        EXACT,
        loss.OtherSign,
        "a loss that makes the measured value worse",
        "(-loss).backward()  # or remove the minus that it has",
        (_T.WRONG_LOSS,),
        lambda facts: bool(facts.get("measured")),
    ),
    Treatment(
        "dropout 0",
        EXACT,
        do.NoDropout,
        "a dropout rate that is too high",
        "for module in model.modules():\n    if isinstance(module, torch.nn.Dropout):\n        module.p = 0.0",
        (_T.NOT_LEARNING, _T.EVAL_RANDOM),
        lambda facts: facts["dropout"] > 0,
        evident=lambda facts: facts["dropout"] > DROPPED,
        choice=True,
    ),
    Treatment(
        "no steps through the padding",
        EXACT,
        sequence.WithoutPadding,
        "recurrent layers that process the padding",
        "packed = torch.nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)\n"
        "output, state = rnn(packed)  # the state is that of each sequence's last step; output[:, -1] is not",
        (_T.NOT_LEARNING,),
        lambda facts: facts["padding"] > 0,
        evident=lambda facts: facts["padding"] > PADDING,
    ),
    Treatment(
        "a scaled loss",
        EXACT,
        ScaledLoss,
        "gradients that are too small for half precision",
        "scaler = torch.amp.GradScaler()\nscaler.scale(loss).backward()\nscaler.step(optimizer)\nscaler.update()",
        (_T.UNDERFLOW, _T.STAGNATION),
        lambda facts: facts["half"] > 0,
    ),
    _adam("1e-3", "any mistake in the optimizer and its options"),
    Treatment(
        "the full learning rate",
        TUNING,
        do.FullRate,
        "a warm-up that lasts too long",
        "# a warm-up of fewer steps, such as min(1.0, (step + 1) / 50) in place of the script's",
        (_T.LEARNING_RATE, _T.STAGNATION),
        lambda facts: facts["reached"] < 0.5 and bool(facts["schedule"]),
        of_loop=True,
    ),
    *GROUPS,
    _rate(10, TUNING, "a learning rate that is too small", (_T.LEARNING_RATE, _T.STAGNATION)),
    _rate(100, TUNING, "a learning rate that is far too small", (_T.LEARNING_RATE, _T.STAGNATION)),
    _rate(1000, TUNING, "a learning rate that leaves the weights where they are", (_T.LEARNING_RATE, _T.STAGNATION)),
    _adam("1e-2", "an optimizer that does not suit the model"),
    Treatment(
        "standardize the inputs",
        TUNING,
        edit.Standardized,
        "inputs that are too large, too small or not centered",
        "inputs = (inputs - mean) / std  # mean and std of the training data",
        (_T.DATA_SCALE,),
        lambda facts: facts["scale"] > 0,
        evident=lambda facts: facts["scale"] > SCALED or facts["offset"] > APART,
    ),
    Treatment(
        "standardize the targets",
        TUNING,
        loss.AnswersInUnits,
        "targets that are too large, too small or not centered",
        "targets = (targets - mean) / std  # mean and std of the training data",
        (_T.DATA_SCALE, _T.BAD_TARGETS),
        lambda facts: bool(facts.get("far", True)),
        evident=lambda facts: bool(facts.get("far")),
    ),
    Treatment(
        "layer norm after each layer",
        TUNING,
        edit.NormAfterLayers,
        "activations or gradients that shrink or grow with depth",
        "torch.nn.LayerNorm(width)  # after each linear layer except the last",
        (_T.BAD_INIT, _T.VANISHING, _T.EXPLODING, _T.SATURATION, _T.BOTTLENECK, _T.COLLAPSE, _T.RANK_COLLAPSE),
        lambda facts: facts["layers"] > 1,
    ),
    AROUND,
    Treatment(
        "Kaiming initialization",
        TUNING,
        edit.Kaiming,
        "initial weights of the wrong scale",
        "torch.nn.init.kaiming_normal_(layer.weight, nonlinearity='relu'); torch.nn.init.zeros_(layer.bias)",
        (_T.BAD_INIT, _T.VANISHING, _T.EXPLODING, _T.DEAD, _T.BOTTLENECK, _T.COLLAPSE),
        lambda facts: facts["layers"] + facts["level"] > 0,
        evident=lambda facts: facts["gain"] > WIDE or 2 * facts["level"] > facts["tables"],
    ),
    Treatment(
        "the layers' own initialization",
        TUNING,
        edit.Reset,
        "initial weights that the script overwrote",
        "# remove your own initialization; layer.reset_parameters() restores the default",
        (_T.BAD_INIT, _T.DEAD),
        lambda facts: bool(facts["resettable"]),
        evident=lambda facts: facts["gain"] > WIDE or 2 * facts["level"] > facts["tables"],
    ),
    Treatment(
        "ReLU instead of sigmoid and tanh",
        TUNING,
        edit.Relu,
        "saturated activations",
        "torch.nn.ReLU()  # instead of torch.nn.Sigmoid() and torch.nn.Tanh() between layers",
        (_T.SATURATION, _T.VANISHING),
        lambda facts: facts["squashing"] > 1,
    ),
    Treatment(
        "clip gradients to norm 1",
        TUNING,
        rates.Clipped,
        "rare large steps that undo earlier training",
        "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # before optimizer.step()",
        (_T.LOSS_SPIKE, _T.EXPLODING, _T.RECURRENT_SUPERCRITICAL),
    ),
    Treatment(
        "the other axis for time",
        TUNING,
        sequence.OtherAxis,
        "recurrent or attention layers that treat the batch dimension as time",
        "# batch_first=True for inputs of shape (batch, time, features), False for (time, batch, features), in "
        "torch.nn.LSTM, torch.nn.MultiheadAttention and torch.nn.TransformerEncoderLayer",
        (_T.NOT_LEARNING,),
        lambda facts: facts["sequences"] > 0,
    ),
    Treatment(
        "attention masks the other way round",
        TUNING,
        sequence.OtherMasks,
        "attention that attends only to the padding",
        "mask = ~mask  # True: ignored in torch.nn.MultiheadAttention, attended to in scaled_dot_product_attention",
        (_T.NOT_TRAINING, _T.NOT_LEARNING),
        lambda facts: facts["masked"] > 0,
    ),
    *MENDED,
    Treatment("shuffled inputs", PLACEBO, edit.Shuffled, "whether inputs correspond to their targets", ""),
    Treatment("noise as inputs", PLACEBO, edit.Noise, "whether anything is learned from the inputs", ""),
    Treatment("look", LOOK, Facts, "", ""),
    Treatment("batches", LOOK, Batches, "", ""),
    Treatment(WATCH, LOOK, Watch, "", ""),
    _rate(0.001, LOOK, "", ()),
    Treatment("one batch for ever", LOOK, probe.OneBatch, "whether model and optimizer can learn anything", ""),
    Treatment("evaluation mode", LOOK, probe.EvalMode, "whether the model behaves differently in evaluation mode", ""),
    Treatment(
        "gradient noise", LOOK, probe.GradientNoise, "how much the gradient of a batch deviates from the mean", ""
    ),
    Treatment("outputs", LOOK, probe.Outputs, "in which layer two runs start to differ", ""),
    Treatment("causality", LOOK, probe.Causality, "whether the output at a position depends on later positions", ""),
    Treatment("no steps", LOOK, do.FrozenWeights, "what the loss is without any learning", ""),
)
"""Every treatment, in the order in which they are tried."""

COMBINED: tuple[tuple[str, ...], ...] = (
    ("the mean of the loss", "learning rate x 10"),
    ("the mean of the loss", "learning rate x 100"),
    ("ReLU instead of sigmoid and tanh", "Kaiming initialization", "Adam with 1e-3"),
    ("layer norm after each layer", "Adam with 1e-2"),
    ("standardize the inputs", "Kaiming initialization", "Adam with 1e-3"),
)
"""What is tried together once nothing helps alone, and parts of it; of what rescues, the smallest is named.

What begins with an exact treatment is tried with the single ones: a loss that is a mean needs another rate.
"""


def find(name: str) -> Treatment:
    """Return the treatment of that name."""
    return next(each for each in TREATMENTS if each.name == name)


def of_kind(kind: str, facts: Mapping[str, Any]) -> list[Treatment]:
    """Return the treatments of a kind that could change a script of which these facts are known.

    One that forgets its steps cannot be changed by anything else.
    """
    known = [each for each in TREATMENTS if each.kind == kind and each.worth(facts)]
    return [each for each in known if each.evident(facts) or not facts.get("forgotten")]


def combinations(known: Collection[str]) -> list[tuple[str, ...]]:
    """Return what is tried together of treatments that could change a script: each of them, and their parts of two."""
    parts = (part for names in COMBINED for part in (*itertools.combinations(names, 2), names))
    return [part for part in dict.fromkeys(parts) if set(part) <= set(known)]


def nearness(names: Sequence[str], suspects: Collection[IssueType], found: Collection[tuple[str, str]] = ()) -> int:
    """Return 0 where what symptoms accuse is what treatments mend first, 1 where they mend it too, and else 2.

    Args:
        names: Of the treatments.
        suspects: Issue types that symptoms accuse.
        found: Type and cause of what a watched run shows, as far as there was one.
    """
    treatments = map(find, names)
    accused = [[kind in suspects and each.answers(kind, found) for kind in each.fixes] for each in treatments]
    return min((min(each.index(True), 1) for each in accused if any(each)), default=2)


def patches(names: Sequence[str], facts: Mapping[str, Any]) -> str:
    """Return the code that makes the named changes for good in a script of which these facts are known."""
    told = [find(name).patch_for(facts) for name in names]
    return "\n".join(
        ["# with an optimizer; the script's own update is to be changed alike", *told] if facts.get("by_hand") else told
    )


def table() -> str:
    """Return all treatments as a table in Markdown."""
    lines = ["| treatment | kind | cause that it tests | issue types |", "|---|---|---|---|"]
    for each in TREATMENTS:
        if each.kind in TRIED:
            types = " ".join(f"`{kind}`" for kind in each.fixes)
            lines.append(f"| {each.name} | {each.kind} | {each.separates} | {types} |")
    return "\n".join(lines)
