"""The axes of a program of the unseen half. A number is a program, the same for ever."""

from __future__ import annotations

import random
from dataclasses import dataclass

TEST = 300
"""Held-out samples."""


@dataclass(frozen=True)
class Spec:
    """What was drawn of a program.

    Attributes:
        family: What is learned, and the kind of network that learns it.
        width: Units of a hidden layer.
        depth: Blocks between the first layer and the head.
        activation: Name of a function of ``torch`` or ``torch.nn.functional``.
        as_module: Whether the activation is a module.
        norm: ``layer``, ``batch``, ``rms`` or ``""``.
        dropout: Its probability.
        init: How weights of matrices are first filled, ``""`` for PyTorch's way.
        variant: Which of the family's losses, and which of its forms, as a number.
        optimizer: Its name.
        rate: Learning rate, a factor of the optimizer's usual one.
        decay: Weight decay.
        grouped: Whether biases and norms have a group without decay.
        clip: Largest norm of the gradient, 0 for none.
        batch: Samples of a step.
        schedule: How the rate moves.
        loop: How the loop is written.
        reads: How batches come: ``loader``, ``permutation`` or ``random``.
        validates: Steps between validations, 0 for none.
        early: Whether there is a validation before the first step.
        steps: Optimizer steps.
        samples: Training samples.
    """

    family: str
    width: int
    depth: int
    activation: str
    as_module: bool
    norm: str
    dropout: float
    init: str
    variant: int
    optimizer: str
    rate: float
    decay: float
    grouped: bool
    clip: float
    batch: int
    schedule: str
    loop: str
    reads: str
    validates: int
    early: bool
    steps: int
    samples: int


FAMILIES = (
    "mixer", "segment", "tags", "graph", "forecast", "pairs", "vae", "rank", "tasks", "ratings", "chars", "counts",
    "field", "gratings", "experts",
)  # fmt: skip


def draw(number: int) -> Spec:
    """Return program ``number``."""
    r = random.Random(f"unseen {number}")
    loop = r.choice(("plain", "plain", "micro", "autocast", "average", "checkpoint", "two", "epochs"))
    return Spec(
        family=FAMILIES[number % len(FAMILIES)],
        width=r.choice((24, 32, 40, 48)),
        depth=r.choice((1, 2, 2, 3, 4)),
        activation=r.choice(("relu", "relu", "gelu", "mish", "hardswish", "softplus", "celu", "tanh", "relu6")),
        as_module=r.random() < 0.5,
        norm=r.choice(("", "", "layer", "batch", "rms")),
        dropout=r.choice((0.0, 0.0, 0.05, 0.1, 0.2)),
        init=r.choice(("", "", "truncated", "he", "glorot")),
        variant=r.randrange(60),
        optimizer=r.choice(
            ("AdamW", "AdamW", "Adam", "nesterov", "SGD", "NAdam", "RAdam", "RMSprop", "Adamax", "manual")
        ),
        rate=r.choice((0.5, 1.0, 1.0, 1.5, 2.0)),
        decay=r.choice((0.0, 0.0, 1e-4, 1e-2)),
        grouped=r.random() < 0.3,
        clip=r.choice((0.0, 0.0, 1.0, 5.0)),
        batch=r.choice((24, 32, 48, 64)),
        schedule=r.choice(("", "", "one_cycle", "restarts", "linear", "exponential", "plateau", "warm_cosine")),
        loop=loop,
        reads=r.choice(("loader", "permutation", "permutation", "random")),
        validates=r.choice((0, 20, 50)),
        early=r.random() < 0.3,
        steps=r.choice((150, 190, 240)),
        samples=r.choice((900, 1400, 2000)),
    )
