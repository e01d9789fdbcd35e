"""A recurrent module run anew from a flat copy of its weights, inputs and states."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gradflow_export.metrics.recurrent import RANK_DIMENSION, Dynamics, Floats, Layer, Step, dynamics, run

Shape = tuple[int, ...]


@dataclass(frozen=True)
class LayerLayout:
    """Where the weights of one layer and direction lie in the flat copy.

    Attributes:
        site: Its name.
        shapes: Of ``weight_ih``, ``weight_hh``, ``bias_ih``, ``bias_hh``, ``weight_hr``; ``None`` for what it lacks.
    """

    site: str
    shapes: tuple[Shape | None, ...]


@dataclass(frozen=True)
class CallLayout:
    """Where one call of the module lies in the flat copy.

    Attributes:
        sizes: Sequences that are still going at each step, falling.
        features: Width of the input.
        states: Shapes of the states before the call, ``[layers * directions, batch, width]`` each; empty when zero.
        batch: Sequences of the call, those that were not copied too.
    """

    sizes: tuple[int, ...]
    features: int
    states: tuple[Shape, ...]
    batch: int = 0

    @property
    def lengths(self) -> list[int]:
        """Steps of each sequence."""
        return [sum(size > row for size in self.sizes) for row in range(self.sizes[0])]


@dataclass(frozen=True)
class _Call:
    layout: CallLayout
    inputs: Floats
    state: Floats | None


@dataclass(frozen=True)
class Unrolled:
    """The layout of a flat copy; called with it, what the module's state Jacobians do.

    Dropout between layers is not repeated. A call whose state is not zero goes on where the call before it ended, as
    in a loop over cells; its own state is used in any case.

    Attributes:
        kind: ``"RNN_TANH"``, ``"RNN_RELU"``, ``"LSTM"`` or ``"GRU"``.
        layers: Layers from the input on, both directions of one after the other.
        directions: 1 or 2.
        calls: Calls in order.
        uncopied: Steps beyond those that were copied.
    """

    kind: str
    layers: tuple[LayerLayout, ...]
    directions: int
    calls: tuple[CallLayout, ...]
    uncopied: int = 0

    def __call__(self, values: npt.NDArray[np.floating]) -> dict[str, dict[str, float]]:
        """Return every metric by site.

        Args:
            values: Weights of the layers, then inputs and states of the calls. Shape: ``[entries]``.
        """
        layers, calls = self._unflatten(np.asarray(values, dtype=np.float64))
        out: dict[str, dict[str, float]] = {}
        with np.errstate(over="ignore", invalid="ignore"):
            sequences = list(_sequences(calls, self.directions))
            length = self.uncopied + max(sum(len(call.layout.sizes) for call in sequence) for sequence in sequences)
            batch = sum(sequence[0].layout.batch for sequence in sequences)
            runs = [_run(layers, self.directions, sequence) for sequence in sequences]
            for place, layout in enumerate(self.layers):
                chains, lengths = zip(*(each[place] for each in runs), strict=True)
                for name, value in _values(dynamics(chains, lengths, batch, length), length).items():
                    out.setdefault(f"recurrent.{name}", {})[layout.site] = value
        return out

    def trajectories(self, values: npt.NDArray[np.floating]) -> dict[str, list[Floats]]:
        """Return the states of each layer and direction, in the order it went through them.

        Args:
            values: As for a call. Shape: ``[entries]``.

        Returns:
            One array for each group of sequences; a sequence that ended keeps its last state. Shape of each:
            ``[steps, sequences, width]``.
        """
        layers, calls = self._unflatten(np.asarray(values, dtype=np.float64))
        out: dict[str, list[Floats]] = {layout.site: [] for layout in self.layers}
        with np.errstate(over="ignore", invalid="ignore"):
            for sequence in _sequences(calls, self.directions):
                for layout, (steps, _) in zip(self.layers, _run(layers, self.directions, sequence), strict=True):
                    out[layout.site].append(np.stack([step.state for step in steps]))
        return out

    def _unflatten(self, flat: Floats) -> tuple[list[Layer], list[_Call]]:
        place = 0

        def take(shape: Shape | None) -> Floats | None:
            nonlocal place
            if shape is None:
                return None
            start, place = place, place + int(np.prod(shape))
            return flat[start:place].reshape(shape)

        layers = [Layer(self.kind, *(take(shape) for shape in layout.shapes)) for layout in self.layers]  # type: ignore[arg-type]  # the first two are never None
        calls: list[_Call] = []
        for layout in self.calls:
            rows = take((sum(layout.sizes), layout.features))
            inputs = np.zeros((len(layout.sizes), layout.sizes[0], layout.features))
            start = 0
            for time, size in enumerate(layout.sizes):
                inputs[time, :size] = rows[start : start + size]  # type: ignore[index]  # there is always an input
                start += size
            states = [state for shape in layout.states if (state := take(shape)) is not None]
            calls.append(_Call(layout, inputs, np.concatenate(states, axis=2) if states else None))
        return layers, calls


def _sequences(calls: Sequence[_Call], directions: int) -> Iterator[list[_Call]]:
    """Yield the calls that go on from each other."""
    together: list[_Call] = []
    for call in calls:
        goes_on = directions == 1 and call.state is not None and bool(np.any(call.state))
        if together and not (goes_on and together[-1].layout.lengths == call.layout.lengths):
            yield together
            together = []
        together.append(call)
    if together:
        yield together


def _run(layers: Sequence[Layer], directions: int, calls: Sequence[_Call]) -> list[tuple[list[Step], list[int]]]:
    """Run the layers over calls that go on from each other; return steps and lengths of each layer and direction."""
    lengths = np.sum([call.layout.lengths for call in calls], axis=0).tolist()
    out: list[tuple[list[Step], list[int]]] = [([], lengths) for _ in layers]
    for call in calls:
        ends = call.layout.lengths
        inputs = call.inputs
        for first in range(0, len(layers), directions):
            given = []
            for place in range(first, first + directions):
                backward, layer = place > first, layers[place]
                state = np.zeros((len(ends), layer.dimension)) if call.state is None else call.state[place]
                steps = run(layer, _turned(inputs, ends) if backward else inputs, state, ends)
                out[place][0].extend(steps)
                after = np.stack([step.state[:, : layer.outputs] for step in steps])
                given.append(_turned(after, ends) if backward else after)
            inputs = np.concatenate(given, axis=2)
    return out


def _turned(values: Floats, lengths: Sequence[int]) -> Floats:
    """Reverse each sequence within its length. Shape: ``[time, batch, width]``."""
    out = np.array(values, dtype=np.float64)
    for row, length in enumerate(lengths):
        out[:length, row] = values[:length, row][::-1]
    return out


def _values(found: Dynamics, length: int) -> dict[str, float]:
    out = {
        "spectral_radius": found.spectral_radius,
        "spectral_norm": found.spectral_norm,
        "lyapunov": found.lyapunov,
        "decay": found.decay,
        "memory_length": found.memory,
        "length": float(length),
        "spectral_radius_error": found.radius_error,
        "spectral_norm_error": found.norm_error,
        "lyapunov_error": found.lyapunov_error,
        "decay_error": found.lyapunov_error,
        "memory_length_error": found.lyapunov_error / -found.lyapunov if found.lyapunov < 0 else 0.0,
    }
    if found.dimension <= RANK_DIMENSION:
        rank = found.effective_rank
        out |= {"effective_rank": rank, "rank_share": rank / found.dimension, "effective_rank_error": found.rank_error}
    return out
