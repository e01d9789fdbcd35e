"""Distributions of actions, handed over by the user with ``observe(policy=...)``."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Mapping
from numbers import Real
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributions import Categorical, Distribution, Independent, OneHotCategorical, TransformedDistribution

from gradflow_export.autograd_graph.provenance import nearest_parameter
from gradflow_export.errors import nearest
from gradflow_export.hooks.parameter_names import ParameterNames
from gradflow_export.hooks.readings import Drained, Pending, stack_scalars
from gradflow_export.instruments.base import Instrument, Setting
from gradflow_export.metrics.policy import discrete_entropy, gaussian_entropy, mean_std
from gradflow_export.records.catalog import MetricSpec, spec
from gradflow_export.records.step_record import RUN_SITE

_log = logging.getLogger("gradflow_export")

POLICY_KEYS = ("logits", "probs", "std", "mask", "action_range")
POLICY_METRICS = (
    "policy.entropy", "policy.std", "policy.gaussian_entropy", "policy.head_entropy", "policy.head_std",
)  # fmt: skip
NEAREST = 64
"""Nodes of the graph that are looked at for the parameters a distribution comes from."""


class PolicyInstrument(Instrument):
    """Entropy and spread of the actions a policy would take, and the layer they come from.

    Of what one head hands over several times before a step ends the last counts; over several heads means are taken.

    Args:
        model: Whose parameters the distributions come from; only a weak reference is kept.
    """

    instrument: ClassVar[str] = "policy"
    interval: ClassVar[int] = 25
    takes: ClassVar[str] = "policy"

    def __init__(self, model: nn.Module) -> None:
        self._names = ParameterNames(weakref.ref(model))
        self._on = False
        self._told: set[str] = set()
        self._values: dict[str, dict[str, Tensor]] = {}

    @classmethod
    def make(cls, setting: Setting) -> PolicyInstrument:
        """Make one for a model."""
        return cls(setting.model)

    @property
    def modules(self) -> int:
        """One: the policy is handed over, whatever the model is."""
        return 1

    @property
    def specs(self) -> tuple[MetricSpec, ...]:
        """The metrics this instrument can give out."""
        return tuple(spec(name) for name in POLICY_METRICS)

    def attach(self) -> contextlib.ExitStack:
        """Begin; there is nothing to hook."""
        stack = contextlib.ExitStack()
        stack.callback(self.forget)
        return stack

    def arm(self, *, on: bool) -> None:
        """Begin to read what is handed over, or with ``on=False`` only look at its names."""
        self._on = on
        self._names.begin()

    def observe(self, policy: Any) -> None:
        """Take the distribution of actions for the batch at hand.

        Args:
            policy: A ``torch.distributions`` object with logits, probabilities or a standard deviation, or a mapping
                with any of ``POLICY_KEYS``: ``logits`` or ``probs`` ``[..., actions]``, ``mask`` of the allowed
                actions, ``std`` of any shape, ``action_range`` as the width of the range of continuous actions.
        """
        given = _parts(policy) if isinstance(policy, Distribution) else policy
        if not isinstance(given, Mapping):
            self._tell(
                f"policy={type(policy).__name__}",
                f"observe(policy=...) takes a mapping with {', '.join(POLICY_KEYS)} or a torch.distributions object "
                f"with logits, probs or stddev, got {type(policy).__name__}; nothing is read from it.",
            )
            return
        for name in given.keys() - set(POLICY_KEYS):
            self._tell(str(name), f"observe(policy=...) does not know {name!r}{nearest(str(name), POLICY_KEYS)}")
        if self._on:
            with torch.no_grad():
                self._read(given)

    def take(self, value: Any) -> None:
        """Take the distribution that ``exporter.observe(policy=...)`` was called with."""
        self.observe(value)

    def _read(self, given: Mapping[str, Any]) -> None:
        logits, probs, std, mask = (given.get(name) for name in ("logits", "probs", "std", "mask"))
        made = probs if logits is None else logits
        if isinstance(made, Tensor) and made.is_floating_point() and made.dim() and made.numel():
            logs = made.detach().log() if logits is None else made
            entropy = discrete_entropy(logs, mask if isinstance(mask, Tensor) else None)
            self._values.setdefault("entropy", {})[self._head(made)] = entropy
        if isinstance(std, Real):
            std = torch.tensor(float(std), dtype=torch.float64)
        if isinstance(std, Tensor) and std.is_floating_point() and std.numel():
            head = self._head(std)
            self._values.setdefault("std", {})[head] = mean_std(std, _width(given.get("action_range")))
            self._values.setdefault("gaussian_entropy", {})[head] = gaussian_entropy(std)

    def _head(self, tensor: Tensor) -> str:
        """Return the layer a tensor comes from, or the parameter where it belongs to no layer; empty when unknown."""
        name = nearest_parameter(tensor, self._names.name_of, NEAREST)
        layer, _, own = (name or "").rpartition(".")
        if name is None or tensor.grad_fn is None:
            return name or RUN_SITE
        return layer if layer and own in {"weight", "bias"} else name

    def drain(self) -> Drained:
        """Give out what was read since the last call, and forget it."""
        out: Drained = []
        for name, heads in self._values.items():
            values = stack_scalars(list(heads.values()))
            skips = name == "entropy"
            out.append(Pending(f"policy.{name}", (RUN_SITE,), values.mean().reshape(1), nan_is_missing=skips))
            if name != "gaussian_entropy" and RUN_SITE not in heads:
                out.append(Pending(f"policy.head_{name}", tuple(heads), values, nan_is_missing=skips))
        self.forget()
        return out

    def forget(self) -> None:
        """Forget what was read: the step makes no record."""
        self._values = {}

    def _tell(self, what: str, message: str) -> None:
        if what not in self._told:
            self._told.add(what)
            _log.warning("gradflow: %s", message)


def _width(given: Any) -> float | None:
    width = float(given) if isinstance(given, Real) else 0.0
    return width if width > 0 else None


def _parts(policy: Distribution) -> Mapping[str, Any] | None:
    """Return the logits or the standard deviation of a distribution, ``None`` when it is of another kind.

    Of a squashed one the standard deviation is that before squashing.
    """
    while isinstance(policy, (Independent, TransformedDistribution)):
        policy = policy.base_dist
    if isinstance(policy, (Categorical, OneHotCategorical)):
        return {"logits": policy.logits}
    with contextlib.suppress(NotImplementedError):
        support: Any = policy.support
        if not support.is_discrete:
            return {"std": policy.stddev}
    return None
