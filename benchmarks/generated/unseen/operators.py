"""What an operator of the unseen half is, and all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from generated.unseen.programs import Program

EVERYWHERE = ("*", "", "input", "target", "loss")
"""Where a mistake touches everything."""

OPERATORS: list[Operator] = []


@dataclass(frozen=True)
class Operator:
    """A mistake.

    Attributes:
        make: Makes it, and says where in ``Program.where`` unless it is everywhere; False where it does not apply.
        types: Issue types that are true of it: its cause, and what the cause shows itself as.
        where: Sites at fault, where a program does not say so itself.
        degree: Whether it is a number that is off.
    """

    make: Callable[[Program], bool]
    types: tuple[str, ...]
    where: tuple[str, ...]
    degree: bool

    @property
    def name(self) -> str:
        """Name of the function that makes it."""
        return self.make.__name__


def mistake(*types: str, where: tuple[str, ...] = EVERYWHERE, degree: bool = False) -> Callable[..., Callable]:
    """Register the function below as an operator."""

    def register(make: Callable[[Program], bool]) -> Callable[[Program], bool]:
        OPERATORS.append(Operator(make, types, where, degree))
        return make

    return register


def drawn(p: Program, low: float, high: float) -> float:
    """Draw a degree, evenly on a logarithmic scale."""
    return low * (high / low) ** p.draw.random()


def put(p: Program, name: str, layer: nn.Module) -> None:
    """Put a layer in the place of another."""
    above, _, last = name.rpartition(".")
    setattr(p.model.get_submodule(above), last, layer)


def weights(p: Program, name: str) -> list[Tensor]:
    """Return the weight matrices of a layer and of those within."""
    return [q for q in p.model.get_submodule(name).parameters() if q.dim() > 1]


def middle(p: Program) -> str:
    """Draw a layer between the first and the head."""
    return p.draw.choice(p.places.middle)
