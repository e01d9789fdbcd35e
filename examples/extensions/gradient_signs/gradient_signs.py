"""A metric of one's own: the share of positive entries in the gradient of each parameter."""

from __future__ import annotations

import numpy as np
import torch

from gradflow_export.hooks.readings import Pending
from gradflow_export.instruments.base import Instrument

METRIC = "custom.gradient_signs.positive"


class GradientSigns(Instrument):
    """Reads the signs of gradients on sampled steps; a share far from 0.5 for long means that a parameter drifts."""

    instrument = "gradient_signs"
    interval = 50
    cost = "G"

    def __init__(self):
        self._out = []

    def before(self, step):
        """Read the gradients of one optimizer, as it is about to use them."""
        if not self.armed:
            return
        owned = step.owned
        pairs = zip(owned.where, owned.parameters, strict=True)
        some = [(place, parameter.grad) for place, parameter in pairs if parameter.grad is not None]
        if some:
            shares = torch.stack([(gradient > 0).double().mean() for _, gradient in some])
            places = np.array([place for place, _ in some])
            self._out.append(Pending(METRIC, owned.sites, shares, places))

    def forget(self):
        """Forget what was collected: the step makes no record."""
        self._out = []

    def drain(self):
        """Give out what was collected since the last call; nothing here waits for the device."""
        out, self._out = self._out, []
        return out
