"""The grammar: every axis of a training program, and how one is drawn."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

BODIES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "points": ("plain", "residual"),
        "teacher": ("plain", "residual"),
        "rings": ("plain", "residual"),
        "series": ("recurrent", "convolution", "transformer"),
        "running": ("recurrent", "convolution"),
        "words": ("bag", "recurrent", "transformer"),
        "bars": ("image", "image_residual"),
        "code": ("autoencoder",),
        "chain": ("recurrent", "transformer"),
    }
)
"""Which networks suit which task."""
LOSSES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "classes": ("CrossEntropyLoss", "cross_entropy", "log_softmax", "smoothing", "by_hand", "hinge"),
        "binary": ("BCEWithLogitsLoss", "binary_cross_entropy", "by_hand", "MSELoss"),
        "numbers": ("MSELoss", "mse_loss", "by_hand", "L1Loss", "SmoothL1Loss"),
    }
)
"""Losses for each kind of target; those by hand call no function that is known to be a loss."""
RATES: Mapping[str, float] = MappingProxyType(
    {"SGD": 0.05, "momentum": 0.05, "Adam": 3e-3, "AdamW": 3e-3, "RMSprop": 1e-3, "Adagrad": 3e-2, "NAdam": 3e-3}
)
"""Optimizers and a learning rate that suits each."""


@dataclass(frozen=True)
class Recipe:
    """One program, as chosen by the grammar.

    Attributes:
        task: Name of a task.
        body: Kind of network.
        depth: Hidden layers or blocks.
        width: Units of each.
        activation: Name of a function of ``torch.nn.functional``, or ``tanh``, ``sigmoid``.
        functional: Whether activations are function calls instead of modules.
        norm: ``""``, ``layer`` or ``batch``.
        dropout: Its probability.
        bias: Whether hidden layers have one.
        init: ``default``, ``xavier``, ``kaiming`` or ``orthogonal``.
        cell: Recurrent cell.
        loss: A name of ``LOSSES``.
        optimizer: A name of ``RATES``.
        rate: Learning rate.
        schedule: ``""``, ``cosine``, ``step`` or ``warmup``.
        decay: Weight decay.
        clip: Limit of the gradient norm, 0 for none.
        loop: ``plain``, ``accumulation``, ``bf16``, ``closure``, ``two``, ``ema`` or ``in_place``.
        batch: Rows of a batch.
        evaluate: Whether the loop evaluates from time to time.
        samples: Rows to train on.
        steps: Optimizer steps.
    """

    task: str
    body: str
    depth: int
    width: int
    activation: str
    functional: bool
    norm: str
    dropout: float
    bias: bool
    init: str
    cell: str
    loss: str
    optimizer: str
    rate: float
    schedule: str
    decay: float
    clip: float
    loop: str
    batch: int
    evaluate: bool
    samples: int
    steps: int


def draw(number: int) -> Recipe:
    """Return the program of that number; the same number is the same program for ever."""
    r = random.Random(f"program {number}")
    task = r.choice(tuple(BODIES))
    kind = {"rings": "binary", "teacher": "numbers", "running": "numbers", "code": "numbers"}.get(task, "classes")
    body = r.choice(BODIES[task])
    optimizer = r.choice(("SGD", "momentum", "momentum", "Adam", "Adam", "Adam", "AdamW", "AdamW", *RATES))
    slow = body in {"transformer", "recurrent", "convolution", "image", "image_residual"}
    depth = r.choice((1, 2, 2)) if slow else r.choice((1, 2, 3, 4, 6))
    activation = r.choice(("relu", "relu", "gelu", "tanh", "silu", "leaky_relu", "elu"))
    norm = r.choice(("", "", "layer", "batch")) if body not in {"recurrent", "bag", "transformer"} else ""
    return Recipe(
        task=task,
        body=body,
        depth=depth,
        width=r.choice((16, 32)) if slow else r.choice((16, 32, 32, 64)),
        activation=activation,
        functional=r.random() < 0.4,
        norm=norm,
        dropout=r.choice((0.0, 0.0, 0.1, 0.2)),
        bias=r.random() < 0.85 or not norm,
        init=r.choice(("default", "default", "default", "xavier", "kaiming", "orthogonal")),
        cell=r.choice(("RNN", "GRU", "LSTM")),
        loss=r.choice(LOSSES[kind]),
        optimizer=optimizer,
        rate=RATES[optimizer] * r.choice((0.5, 1.0, 1.0, 2.0)),
        schedule=r.choice(("", "", "", "cosine", "step", "warmup")),
        decay=r.choice((0.0, 0.0, 1e-4, 1e-2)),
        clip=r.choice((0.0, 0.0, 1.0, 5.0)),
        loop=r.choice(("plain", "plain", "plain", "accumulation", "bf16", "closure", "two", "ema", "in_place")),
        batch=r.choice((16, 32)) if slow else r.choice((16, 32, 64, 128)),
        evaluate=r.random() < 0.5,
        samples=r.choice((600, 1200, 2400)),
        steps=r.choice((150, 200, 300)),
    )
