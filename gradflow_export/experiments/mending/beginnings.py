"""Changes to weights that begin where no gradient reaches them."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from gradflow_export.experiments.interventions import Intervention, weights

WAIT = 3
"""Steps without any gradient after which a table of weights is drawn: zeros before zeros may be gone by then."""


class DrawnZeros(Intervention):
    """Draws tables of weights that hold one number and get no gradient, every second one at a time.

    Of two consecutive tables of zeros, such as both factors of an adapter, neither gets a gradient. One is drawn as
    ``nn.Linear`` draws its own, the other may stay: it gets a gradient then.
    """

    def __init__(self) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(0)
        self._dead: dict[int, int] = {}

    def before_step(self, optimizer: Optimizer) -> None:
        """Draw those that are due."""
        dead = [weight for weight in weights(optimizer) if _dead(weight)]
        self._dead = {id(weight): self._dead.get(id(weight), 0) + 1 for weight in dead}
        for weight in [each for each in dead if self._dead[id(each)] > WAIT][::2]:
            drawn = nn.init.kaiming_uniform_(torch.empty(weight.shape), math.sqrt(5.0), generator=self._generator)
            weight.data.copy_(drawn)
            self.acted = True


def _dead(weight: Tensor) -> bool:
    gradient = weight.grad
    if weight.dim() < 2 or weight.numel() < 2 or gradient is None or gradient.is_sparse or bool(gradient.any()):
        return False
    return bool((weight == weight.flatten()[0]).all())
