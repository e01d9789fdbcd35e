"""NaN and Inf: NUMERICAL, one issue for the whole run that names where it began."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

import numpy as np

from gradflow_export.records.step_record import IssueType, Severity, StepRecord
from gradflow_export.rules.base import Finding, Rule, number, some
from gradflow_export.rules.evidence import only, reading_of
from gradflow_export.rules.history import History


@dataclass(frozen=True, kw_only=True)
class Numerical(Rule):
    """Report the first step and place at which a value is NaN or Inf.

    On the CPU, the readings ``origin.*`` name the place, and the issue names only that place. Otherwise the forward
    pass is searched first: the first block with a non-finite output. If all outputs are finite, or none was read, it is
    the first non-finite gradient in the order of the backward pass, which is the last one in the order of registration.
    Every tensor is read, because the backward pass of a ReLU turns NaN into 0 where the unit is off.

    Attributes:
        runaway: Factor above the first loss from which on a later non-finite value counts as overflow.
    """

    runaway: float = 1e3
    patience: int = 1

    needs: ClassVar[tuple[str, ...]] = (
        "loss",
        "gradient.total_norm",
        "gradient.nonfinite",
        "parameter.gradient_norm",
        "parameter.nonfinite",
        "parameter.weight_norm",
        "parameter.update_norm",
        "block.output_rms",
        "block.gradient_norm",
    )
    remembers: ClassVar[tuple[str, ...]] = ("loss", "gradient.total_norm", "learning_rate")
    quiet: ClassVar[bool] = False

    def check(self, record: StepRecord, history: History) -> tuple[Finding, ...]:
        """Look at everything this record holds."""
        loss = record.value("loss")
        bad_loss = loss is not None and not math.isfinite(loss)
        outputs = _nonfinite(record, "block.output_rms")
        weights = _nonfinite(record, "parameter.weight_norm")
        gradients = _gradients(record)
        if not (bad_loss or outputs or gradients or weights or _total(record)):
            return ()
        origin = _origin(record, history)
        layers, place, advice = (
            self._explain(bad_loss, outputs, weights, gradients, record, history) if origin is None else origin[:3]
        )
        advice = (None if record.get("origin.input") is not None else self._overflow(record, history)) or advice
        value = loss if bad_loss and loss is not None else float(max(len(gradients), len(outputs), len(weights), 1))
        seen = (
            (bad_loss, f"the loss is {number(value)}"),
            (outputs, f"the output of {some(outputs, 1)} is not finite"),
            (gradients, f"the gradient of {some(gradients)} is NaN or Inf"),
            (weights, f"the weights of {some(weights)} are NaN or Inf"),
        )
        what = [words for there, words in seen if there] or ["the gradient norm is not finite"]
        message = " and ".join(what) + f"; it begins {place}."
        rank = record.value("origin.rank")
        known = "" if rank is None else f"step {record.step}, rank {int(rank)}"
        cause, losses = known if origin is None else origin[3], history.run("loss")
        # What was broken in the step of a finite loss would have broken it.
        fine = losses.steps[(losses.steps < record.step) & np.isfinite(losses.values)] if bad_loss else losses.steps[:0]
        since, before = (record.step, record.step - 1 - int(fine[-1])) if fine.size else (None, None)
        return (
            Finding(
                IssueType.NUMERICAL, Severity.CRITICAL, layers, value, 0.0, message, advice, since, before, origin=cause
            ),
        )  # fmt: skip

    def _overflow(self, record: StepRecord, history: History) -> str | None:
        """Return what to do where the loss had grown far above its first before it was no longer finite."""
        loss = history.run("loss")
        finite = (loss.steps < record.step) & np.isfinite(loss.values)
        steps, values = loss.steps[finite], loss.values[finite]
        if not values.size or not loss.first > 0 or not values[-1] > self.runaway * loss.first:
            return None
        usual = np.flatnonzero(values <= 10.0 * loss.first)
        begin = int(usual[-1]) if usual.size else 0
        rate = history.run("learning_rate")
        lower = f" from {number(rate.last)} by a factor of ten or more" if rate.count else ""
        return (
            f"the loss grew from {number(float(values[begin]))} to {number(float(values[-1]))} in "
            f"{int(steps[-1] - steps[begin])} steps before it overflowed: lower the learning rate{lower}, and clip: "
            "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)."
        )

    def _explain(
        self,
        bad_loss: bool,
        outputs: tuple[str, ...],
        weights: tuple[str, ...],
        gradients: tuple[str, ...],
        record: StepRecord,
        history: History,
    ) -> tuple[tuple[str, ...], str, str]:
        if outputs:
            everything = tuple(dict.fromkeys(outputs + gradients))
            return (
                everything,
                f"in the forward pass at {outputs[0]}",
                (
                    f"check the batch of step {record.step} with torch.isfinite(x).all() and what {outputs[0]} "
                    "computes: in float16 anything above 65504 overflows, use torch.bfloat16 or float32 "
                    "there."
                ),
            )
        if bad_loss and record.get("block.output_rms") is not None:
            return (
                gradients or ("",),
                "after the last block",
                (
                    "use a loss that takes logits (F.cross_entropy, F.binary_cross_entropy_with_logits) instead of "
                    "log(softmax(x)), and clamp the arguments of log, sqrt and divisions: x.clamp_min(1e-8)."
                ),
            )
        if bad_loss:
            return (
                gradients or ("",),
                "in the forward pass or in the loss",
                (
                    f"check the batch of step {record.step} with torch.isfinite(x).all(); then use a loss that "
                    "works on logits (F.cross_entropy) instead of log(softmax(x)), clamp what goes into log, sqrt "
                    "and divisions, and lower the "
                    ""
                    "learning rate if the loss was rising."
                ),
            )
        if gradients:
            return (
                gradients,
                f"in the backward pass at {gradients[0]}",
                (
                    "run this step under torch.autograd.detect_anomaly() to see the operation: often sqrt, norm "
                    "or pow at 0 (add 1e-8), or torch.where over a branch that is NaN. With a GradScaler call "
                    ""
                    "scaler.unscale_(optimizer) before "
                    "clipping."
                ),
            )
        unseen = _unseen(record, history)
        since = f"in one of the steps {unseen[0]} to {record.step}, which were not recorded" if unseen else ""
        return (
            weights or ("",),
            (since or f"in the weights of {weights[0]}") if weights else "in the gradients",
            (
                "restart from the last checkpoint with finite weights, and skip updates whose gradient norm is "
                "not finite: torch.nn.utils.clip_grad_norm_(..., "
                "error_if_nonfinite=True)."
            ),
        )


def _nonfinite(record: StepRecord, metric: str, *, counts: bool = False) -> tuple[str, ...]:
    reading = record.get(metric)
    if reading is None:  # most of them, at nearly every record
        return ()
    broken = reading.values > 0 if counts else ~np.isfinite(reading.values)
    return only(reading, broken).sites if np.logical_or.reduce(broken) else ()


def _gradients(record: StepRecord) -> tuple[str, ...]:
    """Return parameters, or else blocks, with a non-finite gradient, in backward order."""
    names = _nonfinite(record, "parameter.gradient_norm") or _nonfinite(record, "parameter.nonfinite", counts=True)
    return (names or _nonfinite(record, "block.gradient_norm"))[::-1]


def _total(record: StepRecord) -> bool:
    count, norm = record.value("gradient.nonfinite"), record.value("gradient.total_norm")
    return bool(count) or (norm is not None and not math.isfinite(norm))


_ADVICE: Mapping[str, str] = MappingProxyType(
    {
        "input": "leave such batches out: if not torch.isfinite(x).all(): continue; and look where the data is made.",
        "weights": "an earlier update overflowed: restart from the last checkpoint with finite weights with a smaller "
        "learning rate, and clip: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True).",
        "forward": "look at what this module computes: in float16 anything above 65504 overflows (torch.bfloat16 or "
        "float32 there), log, sqrt and divisions need clamp_min(1e-8); if sizes were growing, lower the learning rate.",
        "loss": "check that the loss is a mean over something: a batch without rows, an empty mask, or targets that "
        "are all ignore_index make it 0 / 0; skip such batches. Where it has a log, sqrt or division, use a loss of "
        "logits (F.cross_entropy, F.binary_cross_entropy_with_logits) instead of log(softmax(x)), and clamp what goes "
        "into log, sqrt and divisions: x.clamp_min(1e-8).",
        "backward": "run this step under torch.autograd.detect_anomaly() to see the operation: often sqrt, norm or pow "
        "at 0 (add 1e-8), or torch.where over a branch that is NaN.",
    }
)


def _origin(record: StepRecord, history: History) -> tuple[tuple[str, ...], str, str, str] | None:
    """Return layers, place, advice and cause where it is known where it began."""
    for kind, words in (
        ("input", "in the input of the model"),
        ("weights", "in the weights of {}, which were so before the forward pass"),
        ("forward", "in the forward pass at {}"),
        ("loss", "in the loss: every output of the model was finite"),
        ("backward", "in the backward pass at {}"),
    ):
        reading = record.get(f"origin.{kind}")
        if reading is None:
            continue
        number_of = int(reading.values[0])
        if kind == "forward" and len(reading.sites) == 2:
            before, after = reading.sites
            where = f"in the forward pass between {before or 'the input'} and {after or 'the loss'}"
        else:
            where = words.format(some(reading.sites, 1))
        where += f", micro-batch {number_of}" if number_of else ""
        advice, unseen = _ADVICE[kind], _unseen(record, history)
        if kind == "weights" and unseen:  # what broke them was not looked at
            where = (
                f"in one of the steps {unseen[0]} to {unseen[-1]}, which were not recorded; {some(reading.sites, 1)} "
            )
            where += "was NaN or Inf before the forward pass of this one"
            advice = (
                "record every step, Exporter(..., budget=None), to have the place named; until then leave out steps "
                "whose gradients are not finite: torch.nn.utils.clip_grad_norm_(..., error_if_nonfinite=True)."
            )
        rank = record.value("origin.rank")
        cause = f"{where.removeprefix('in ')}, step {record.step}, rank {record.rank if rank is None else int(rank)}"
        layers = tuple(filter(None, reading.sites)) or ("",)
        every = reading_of(record, "parameter.weight_norm").sites
        if kind == "weights" and unseen and set(layers).issuperset(every):  # all are by now, which says of none
            layers = ("",)
        return layers, where + _last_finite(record, history), advice, cause
    return None


def _unseen(record: StepRecord, history: History) -> range:
    """Return the steps between this record and the one before it."""
    steps = history.run("gradient.total_norm").steps
    earlier = steps[steps < record.step]
    return range(int(earlier[-1]) + 1, record.step) if len(earlier) else range(0)


def _last_finite(record: StepRecord, history: History) -> str:
    """Return the last finite loss and gradient norm in words."""
    told = []
    for metric, word in (("loss", "loss"), ("gradient.total_norm", "gradient norm")):
        past = history.run(metric)
        finite = [(int(s), float(v)) for s, v in zip(past.steps, past.values, strict=True) if math.isfinite(v)]
        if finite and finite[-1][0] < record.step:
            told.append(f"{word} {number(finite[-1][1])} at step {finite[-1][0]}")
    return f" (last finite: {', '.join(told)})" if told else ""
