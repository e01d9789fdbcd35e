"""The half of the generator that was written by somebody who had read no rule and no check."""

from generated.unseen import degree, meaning, structure
from generated.unseen.operators import OPERATORS

__all__ = ["OPERATORS", "degree", "meaning", "structure"]
