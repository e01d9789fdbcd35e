"""A check of one's own, and the instrument that gives it its evidence: samples of a batch that are all the same."""

from __future__ import annotations

from dataclasses import dataclass

from gradflow_export.hooks.readings import Clue
from gradflow_export.instruments.base import Instrument
from gradflow_export.records.issues import IssueType, Severity
from gradflow_export.rules.base import Check, Finding


class InputSpread(Instrument):
    """Reads, on sampled steps, whether the first input of the model differs between the samples of a batch."""

    instrument, interval = "input_spread", 100

    def __init__(self, setting):
        self._model, self._hook, self._out = setting.model, setting.part("input_spread")(self._enters), []

    @classmethod
    def make(cls, setting):
        """Make one for a model."""
        return cls(setting)

    def attach(self):
        """Begin; closing the returned stack takes the hook away."""
        stack = super().attach()
        stack.callback(self._model.register_forward_pre_hook(self._hook).remove)
        return stack

    def _enters(self, _model, args):
        if self.armed and args and args[0].dim() > 1 and len(args[0]) > 1:
            self._out = [Clue("batch.same", ("",), (args[0][1:] == args[0][:1]).all().double().reshape(1))]

    def drain(self):
        """Give out what was collected since the last call."""
        out, self._out = self._out, []
        return out


@dataclass(frozen=True, kw_only=True)
class ConstantInputs(Check):
    """Find batches all of whose samples are the same.

    Why it is bad:
        Nothing distinguishes the samples, so that the model can only learn the mean of their targets.

    Example:
        batch = dataset[0][0].expand(32, -1)

    Use instead:
        batch = torch.stack([dataset[n][0] for n in range(32)])

    Not reported:
        Single batches: three readings in a row must show it.
    """

    name, raises, evidence = "constant-inputs", (IssueType.DATA_SCALE,), ("batch.same",)

    def check(self, record, history):
        """Return a finding where the samples of a batch are all the same."""
        if not record.fact("batch.same"):
            return ()
        message = "all samples of the batch are the same: the model can only learn the mean of their targets"
        advice = "stack different samples: torch.stack([dataset[n][0] for n in range(32)])"
        return (Finding(IssueType.DATA_SCALE, Severity.HIGH, ("",), 1.0, 0.0, message, advice),)
