"""Which units of rectifiers fired, read on the host for many modules at once."""

from __future__ import annotations

import math

import numpy as np
from torch import Tensor

from gradflow_export.metrics.arrays.local import PLAIN
from gradflow_export.metrics.arrays.one_pass import usable_interface
from gradflow_export.native.outputs import read_rectified


class FiredUnits:
    """Marks units that were above zero, or NaN, in this window or the one before, and counts exact zeros.

    A module whose number of units changes begins anew.
    """

    def __init__(self) -> None:
        self._interface = usable_interface()
        self._shapes: dict[int, tuple[int, int]] = {}
        self._firsts: dict[int, int] = {}
        self._marks = np.zeros(0, dtype=np.uint8)
        self._earlier = np.zeros(0, dtype=np.uint8)
        self._zeros: dict[int, float] = {}

    def offer(self, module: int, output: Tensor, unit_dim: int) -> bool:
        """Read an output; False where torch must read it.

        Args:
            module: Its number.
            output: Two or more dimensions, not empty.
            unit_dim: 1 for channels, -1 for features.
        """
        if self._interface is None or not output.is_cpu or type(output) not in PLAIN:
            return False
        size = output.shape
        shape = (size[1], math.prod(size[2:])) if unit_dim == 1 else (size[-1], 1)
        if self._shapes.get(module) != shape:
            self._shapes[module], self._firsts[module] = shape, len(self._marks)
            fresh = np.zeros(shape[0], dtype=np.uint8)
            self._marks, self._earlier = (np.concatenate([marks, fresh]) for marks in (self._marks, self._earlier))
        firsts = [self._firsts[module]]
        (zeros,) = read_rectified(self._interface, [output], [shape], firsts, self._marks)
        if zeros < 0:
            return False
        self._zeros[module] = zeros / output.numel()
        return True

    def shares(self) -> tuple[dict[int, float], dict[int, float]]:
        """Return the share of units that did not fire, and of zero entries, of each module read since the last call."""
        zeros, self._zeros = self._zeros, {}
        modules = list(zeros)
        if not modules:
            return {}, {}
        fired = np.maximum(self._marks, self._earlier)
        begins = np.array([self._firsts[module] for module in modules])
        ends = begins + [self._shapes[module][0] for module in modules]
        sums = np.concatenate([[0], np.cumsum(fired, dtype=np.int64)])
        dead = 1.0 - (sums[ends] - sums[begins]) / (ends - begins)
        return dict(zip(modules, map(float, dead), strict=True)), zeros

    def turn(self) -> None:
        """End a window."""
        self._earlier, self._marks = self._marks, np.zeros_like(self._marks)

    def forget(self) -> None:
        """Forget zeros; windows go on."""
        self._zeros = {}
