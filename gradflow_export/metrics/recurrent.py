"""One step of a recurrent layer in closed form, and what its state Jacobian does along a sequence (float64, numpy)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from gradflow_export.metrics.arrays.algebra import product, singular_values
from gradflow_export.metrics.arrays.two_stages import error_of_exponent, error_of_states
from gradflow_export.metrics.outputs import rank_of_spectrum
from gradflow_export.metrics.spectra import spectral_norm, spectral_radius
from gradflow_export.records.statistics import median

Floats = npt.NDArray[np.float64]

GATES: Mapping[str, int] = MappingProxyType({"RNN_TANH": 1, "RNN_RELU": 1, "GRU": 3, "LSTM": 4})
"""How many gates the weights of each kind of layer hold, by PyTorch's name of the kind."""

DECAYED = 0.1
"""A gradient has been forgotten when this share of it is left."""

SPECTRA, LEAST_SPECTRA = 32, 3
"""States at which the Jacobian's spectrum is taken, for a small layer and for a wide one."""
_SPECTRUM_WORK = 16 * 64**3
RANK_DIMENSION = 512
"""Widest state whose singular values are all taken."""


@dataclass(frozen=True)
class Layer:
    """Weights of one layer and direction, in PyTorch's layout.

    Attributes:
        kind: ``"RNN_TANH"``, ``"RNN_RELU"``, ``"LSTM"`` or ``"GRU"``.
        weight_ih: Shape: ``[gates * hidden, inputs]``.
        weight_hh: Shape: ``[gates * hidden, outputs]``; ``outputs`` is ``hidden`` unless there is a projection.
        bias_ih: Shape: ``[gates * hidden]``, ``None`` for none.
        bias_hh: Shape: ``[gates * hidden]``, ``None`` for none.
        weight_hr: Projection of an LSTM. Shape: ``[outputs, hidden]``, ``None`` for none.
    """

    kind: str
    weight_ih: Floats
    weight_hh: Floats
    bias_ih: Floats | None = None
    bias_hh: Floats | None = None
    weight_hr: Floats | None = None

    @property
    def hidden(self) -> int:
        """Width of a gate."""
        return int(self.weight_hh.shape[0]) // GATES[self.kind]

    @property
    def outputs(self) -> int:
        """Width of what the layer gives out."""
        return int(self.weight_hh.shape[1])

    @property
    def dimension(self) -> int:
        """Width of the whole state: ``h``, and ``c`` of an LSTM behind it."""
        return self.outputs + (self.hidden if self.kind == "LSTM" else 0)

    def step(self, inputs: Floats, state: Floats) -> Step:
        """Advance one step.

        Args:
            inputs: Shape: ``[batch, inputs]``.
            state: Shape: ``[batch, dimension]``.
        """
        h, c = state[:, : self.outputs], state[:, self.outputs :]
        from_input, from_state = product(inputs, self.weight_ih.T), product(h, self.weight_hh.T)
        if self.bias_ih is not None:
            from_input = from_input + self.bias_ih
        if self.bias_hh is not None:
            from_state = from_state + self.bias_hh
        gates = GATES[self.kind]
        x, s = np.split(from_input, gates, axis=1), np.split(from_state, gates, axis=1)
        if self.kind == "LSTM":
            i, f, o = (_sigmoid(x[k] + s[k]) for k in (0, 1, 3))
            g = np.tanh(x[2] + s[2])
            cell = f * c + i * g
            squashed = np.tanh(cell)
            out = o * squashed
            out = out if self.weight_hr is None else product(out, self.weight_hr.T)
            return Step(self, np.concatenate([out, cell], axis=1), (i, f, g, o, c, squashed))
        if self.kind == "GRU":
            r, z = _sigmoid(x[0] + s[0]), _sigmoid(x[1] + s[1])
            n = np.tanh(x[2] + r * s[2])
            return Step(self, (1.0 - z) * n + z * h, (r, z, n, s[2], h))
        if self.kind == "RNN_RELU":
            after = np.maximum(x[0] + s[0], 0.0)
            return Step(self, after, ((after > 0).astype(np.float64),))
        after = np.tanh(x[0] + s[0])
        return Step(self, after, (1.0 - after * after,))


@dataclass(frozen=True)
class Step:
    """What one step made of a state, and its derivative there.

    Attributes:
        layer: Whose step it was.
        state: The new state. Shape: ``[batch, dimension]``.
        saved: What the derivative needs. Shape of each: ``[batch, hidden]``.
    """

    layer: Layer
    state: Floats
    saved: tuple[Floats, ...]

    def push(self, directions: Floats) -> Floats:
        """Return ``J v`` for one direction per sequence, ``J`` the derivative of the new state by the old one.

        Args:
            directions: Shape: ``[batch, dimension]``.
        """
        h = directions[:, : self.layer.outputs]
        moved = product(h, self.layer.weight_hh.T)
        return self._tangent(self.saved, moved, h, directions[:, self.layer.outputs :])

    def jacobian(self, row: int) -> Floats:
        """Return the derivative of one sequence's new state by its old one. Shape: ``[dimension, dimension]``.

        Source: Pascanu et al. 2013, arXiv:1211.5063, eq. 5, for the whole state of gated layers too.
        """
        layer = self.layer
        directions = np.eye(layer.dimension)
        moved = np.zeros((layer.dimension, layer.weight_hh.shape[0]))
        moved[: layer.outputs] = layer.weight_hh.T
        saved = tuple(entry[row] for entry in self.saved)
        rows = self._tangent(saved, moved, directions[:, : layer.outputs], directions[:, layer.outputs :])
        return np.ascontiguousarray(rows.T)

    def _tangent(self, saved: tuple[Floats, ...], moved: Floats, h: Floats, c: Floats) -> Floats:
        """Derive the step along directions whose product with ``weight_hh`` is ``moved``."""
        kind = self.layer.kind
        if kind == "LSTM":
            i, f, g, o, before, squashed = saved
            di, df, dg, do = np.split(moved, 4, axis=1)
            cell = f * c + f * (1 - f) * before * df + i * (1 - i) * g * di + i * (1 - g * g) * dg
            out = o * (1 - o) * squashed * do + o * (1 - squashed * squashed) * cell
            out = out if self.layer.weight_hr is None else product(out, self.layer.weight_hr.T)
            return np.concatenate([out, cell], axis=1)
        if kind == "GRU":
            r, z, n, hidden, before = saved
            dr, dz, dn = np.split(moved, 3, axis=1)
            candidate = (1 - n * n) * (r * (1 - r) * hidden * dr + r * dn)
            return np.asarray((1 - z) * candidate + z * (1 - z) * (before - n) * dz + z * h, dtype=np.float64)
        return np.asarray(saved[0] * moved, dtype=np.float64)


def _sigmoid(x: Floats) -> Floats:
    return np.asarray(0.5 * (1.0 + np.tanh(0.5 * x)), dtype=np.float64)


def run(layer: Layer, inputs: Floats, state: Floats, lengths: Sequence[int]) -> list[Step]:
    """Run a layer over sequences; a sequence keeps its last state after its end.

    Args:
        layer: Its weights.
        inputs: Shape: ``[time, batch, inputs]``.
        state: The state before the first step. Shape: ``[batch, dimension]``.
        lengths: Steps of each sequence.

    Returns:
        One step for each time.
    """
    ends = np.asarray(lengths)
    out: list[Step] = []
    for time, now in enumerate(inputs):
        step = layer.step(now, state)
        state = np.where((ends > time)[:, None], step.state, state)
        out.append(Step(layer, state, step.saved))
    return out


@dataclass(frozen=True)
class Dynamics:
    """What the state Jacobians of one layer do along sampled sequences.

    Attributes:
        spectral_radius: Median over sampled states of the greatest ``|eigenvalue|`` of the one-step Jacobian.
        spectral_norm: Median over sampled states of its greatest singular value.
        lyapunov: Largest Lyapunov exponent, per step; NaN where nothing was measured.
        effective_rank: Median over sampled states of ``exp(H(sigma / sum sigma))``; NaN above ``RANK_DIMENSION``.
        dimension: Width of the state.
        radius_error: Standard error of ``spectral_radius`` as a share of it; 0 where all states were taken.
        norm_error: The same of ``spectral_norm``.
        rank_error: The same of ``effective_rank``.
        lyapunov_error: Standard error of ``lyapunov``, per step; 0 where all sequences were run to their end.
    """

    spectral_radius: float
    spectral_norm: float
    lyapunov: float
    effective_rank: float
    dimension: int
    radius_error: float = 0.0
    norm_error: float = 0.0
    rank_error: float = 0.0
    lyapunov_error: float = 0.0

    @property
    def decay(self) -> float:
        """What is left of a gradient after one step back in time, ``exp(lyapunov)``: 1 is no decay."""
        return effective_radius(self.lyapunov)

    @property
    def memory(self) -> float:
        """Steps until a tenth of the gradient is left; infinite when it does not decay."""
        return memory_length(self.lyapunov)


def effective_radius(lyapunov: float) -> float:
    """Return ``exp(lyapunov)``, the factor per step that composes over time.

    Source: Engelken et al. 2023, arXiv:2006.02427.
    """
    return math.exp(min(lyapunov, 700.0)) if not math.isnan(lyapunov) else math.nan


def memory_length(lyapunov: float) -> float:
    """Return the steps until ``DECAYED`` of a gradient is left.

    Args:
        lyapunov: Largest Lyapunov exponent. Unit: nats per step.

    Returns:
        ``ln 0.1 / lyapunov``: 21.9 for a factor of 0.9 per step; 0 when all is forgotten in one step, infinite for an
        exponent of at least 0.
    """
    if math.isnan(lyapunov) or lyapunov >= 0:
        return lyapunov if math.isnan(lyapunov) else math.inf
    return math.log(DECAYED) / lyapunov


def criticality(radius: float, optimal: float = 0.9, band: float = 0.15) -> str:
    """Return ``"SUBCRITICAL"``, ``"CRITICAL"`` or ``"SUPERCRITICAL"``: below, inside or above ``optimal +- band``.

    Args:
        radius: ``exp(lyapunov)`` for sequences of at least 8 steps, else the spectral radius.
        optimal: Centre of the band.
        band: Half its width.
    """
    if radius < optimal - band:
        return "SUBCRITICAL"
    return "SUPERCRITICAL" if radius > optimal + band else "CRITICAL"


def largest_lyapunov(chains: Sequence[Sequence[Step]], lengths: Sequence[Sequence[int]]) -> float:
    """Return the largest Lyapunov exponent of the state's dynamics.

    A direction is pushed along each sequence twice, renormalised at every step: the first pass turns it towards the
    slowest decay, the second is measured. A layer that forgets everything gives -inf.

    Args:
        chains: Steps of each group of sequences.
        lengths: For each group, steps of each of its sequences.

    Returns:
        Mean over sequences of ``(1/T) ln ||J_T ... J_1 v||``. Unit: nats per step. NaN when there is no step.

    Source: Benettin et al. 1980, Meccanica 15; Engelken et al. 2023, arXiv:2006.02427, eq. 8.
    """
    logs, _ = _exponents(chains, lengths)
    return float(np.mean(logs)) if logs else math.nan


def _exponents(chains: Sequence[Sequence[Step]], lengths: Sequence[Sequence[int]]) -> tuple[list[float], list[float]]:
    """Return the exponent of each sequence, and the variance of its steps over their number."""
    logs: list[float] = []
    scatter: list[float] = []
    for steps, ends in zip(chains, lengths, strict=True):
        if not steps:
            continue
        batch, dimension = steps[0].state.shape
        # Fixed, without any symmetry that a layer's weights might share.
        start = 1.0 + 0.5 * np.sin(1.0 + 1.7 * np.arange(dimension, dtype=np.float64) ** 1.1)
        start *= np.where(np.sin(2.3 * np.arange(dimension, dtype=np.float64) ** 1.3) < 0, -1.0, 1.0)
        directions = np.tile(start / np.linalg.norm(start), (batch, 1))
        directions, _ = _push(steps, directions, ends)
        _, grown = _push(steps, directions, ends)
        each = [grown[:end, row] for row, end in enumerate(ends) if end > 0]
        logs.extend(float(own.mean()) for own in each)
        with np.errstate(invalid="ignore"):  # of a layer that forgets everything
            scatter.extend(float(own.var(ddof=1)) / len(own) if len(own) > 1 else 0.0 for own in each)
    return logs, scatter


def _push(steps: Sequence[Step], directions: Floats, ends: Sequence[int]) -> tuple[Floats, Floats]:
    """Push a direction along each sequence; return where it ends and the logarithms of its growth at each step."""
    grown, last = np.zeros((len(steps), len(directions))), np.asarray(ends)
    for time, step in enumerate(steps):
        moved = step.push(directions)
        sizes = np.linalg.norm(moved, axis=1)
        going = last > time
        with np.errstate(divide="ignore"):
            grown[time] = np.where(going, np.log(sizes), 0.0)
        usable = going & (sizes > 0)
        directions = np.where(usable[:, None], moved / np.where(usable, sizes, 1.0)[:, None], directions)
    return directions, grown


def dynamics(
    chains: Sequence[Sequence[Step]], lengths: Sequence[Sequence[int]], batch: int = 0, whole: int = 0
) -> Dynamics:
    """Measure what the one-step Jacobians of a layer do along sampled sequences.

    Args:
        chains: Steps of each group of sequences, all of one layer and at least one of them not empty.
        lengths: For each group, steps of each of its sequences.
        batch: Of how many sequences these are some; 0 for no others.
        whole: How many steps the longest sequence has, where it was not run to its end.

    Source: Pascanu et al. 2013, arXiv:1211.5063; Roy and Vetterli 2007, EUSIPCO.
    """
    places = [
        (step, row, (group, row))
        for group, (steps, ends) in enumerate(zip(chains, lengths, strict=True))
        for time, step in enumerate(steps)
        for row, end in enumerate(ends)
        if end > time
    ]
    dimension = places[0][0].layer.dimension
    count = max(min(SPECTRA, _SPECTRUM_WORK // dimension**3), LEAST_SPECTRA)
    # Away from the ends: the first state of a sequence is often zero.
    spaced = (np.arange(count) + 0.5) * len(places) / count
    chosen = sorted({int(place) for place in spaced})
    radii, norms, ranks = [], [], []
    for step, row, _ in (places[place] for place in chosen):
        jacobian = step.jacobian(row)
        if not np.isfinite(jacobian).all():
            radii, norms, ranks = [math.nan], [math.nan], [math.nan]
            break
        radii.append(spectral_radius(jacobian, tolerance=1e-3))
        if dimension <= RANK_DIMENSION:
            singular = singular_values(jacobian)
            norms.append(float(singular[0]))
            ranks.append(rank_of_spectrum(singular))
        else:
            norms.append(spectral_norm(jacobian))
    owners = [places[place][2] for place in chosen]
    logs, scatter = _exponents(chains, lengths)
    errors = [error_of_states(np.array(values), owners, len(places), batch) for values in (radii, norms, ranks)]
    return Dynamics(
        median(np.array(radii)),
        median(np.array(norms)),
        float(np.mean(logs)),
        median(np.array(ranks)) if ranks else math.nan,
        dimension,
        errors[0],
        errors[1],
        errors[2],
        error_of_exponent(np.array(logs), np.array(scatter), batch, max(map(max, lengths)) / max(whole, 1)),
    )
