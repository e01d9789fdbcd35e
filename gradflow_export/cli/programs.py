"""Small training programs on real data, each healthy or with one fault.

The data need no download: scikit-learn's handwritten digits, and the sources of Python's own standard library.
"""

from __future__ import annotations

import sysconfig
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from gradflow_export.errors import MissingPackageError, StorageError

SICK_BLOCK = 3
"""Index of the block that a fault of one block is put into."""

NAN_STEP = 20
"""The step, counted from 1, at which the fault ``nan`` strikes."""

SPIKE_STEP = 120
"""The step, counted from 1, that gets the broken batch of the fault ``spike``."""

Batch = tuple[Tensor, Tensor]

_SOURCES = ("argparse.py", "ast.py", "configparser.py", "dataclasses.py", "inspect.py", "tarfile.py", "typing.py")
_CHARACTERS = 96
_UNKNOWN = ord("?") - 31
_RARE = ord("~") - 31


@dataclass(frozen=True)
class Program:
    """Everything a training loop needs.

    Attributes:
        model: Freshly initialised; its blocks are ``model.blocks``.
        optimizer: Owns every parameter, except where the fault is ``stagnation``.
        criterion: Takes logits ``[batch, classes]`` and targets ``[batch]``.
        batches: Endless, seeded stream of inputs and targets.
        accuracy: Computes the share of right answers on held-out data, from 0 to 1.
        before_step: Called with the step number, from 1, before each forward pass.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    criterion: nn.Module
    batches: Iterator[Batch]
    accuracy: Callable[[], float]
    before_step: Callable[[int], None]


class ScaleGradient(torch.autograd.Function):
    """Identity forward; multiplies the gradient by a number on its way back, as a misplaced ``detach()`` does."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, factor: float) -> Tensor:
        """Return the input and keep the factor."""
        ctx.factor = factor
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Return the gradient times the factor."""
        return gradient * ctx.factor, None


class Block(nn.Module, ABC):
    """A block that can be given a fault.

    Attributes:
        gradient_factor: What the gradient is multiplied by on its way back through this block; 1 when healthy.
        poisoned: Whether the block divides zero by zero.
    """

    def __init__(self) -> None:
        super().__init__()
        self.gradient_factor = 1.0
        self.poisoned = False

    @abstractmethod
    def transform(self, hidden: Tensor) -> Tensor:
        """Compute the output of the healthy block."""

    @abstractmethod
    def rectified(self) -> nn.Linear | nn.Conv2d:
        """Return the layer whose output goes through the ReLU."""

    def forward(self, hidden: Tensor) -> Tensor:
        """Compute the output, with the fault where there is one."""
        if self.gradient_factor != 1.0:
            hidden = ScaleGradient.apply(hidden, self.gradient_factor)  # type: ignore[no-untyped-call]
        hidden = self.transform(hidden)
        nothing = 0.0 * hidden
        return hidden + nothing / nothing if self.poisoned else hidden

    def vanish(self) -> None:
        """Pass on too little of the gradient."""
        self.gradient_factor = 0.05

    def explode(self) -> None:
        """Enlarge the gradient."""
        self.gradient_factor = 8.0

    def die(self) -> None:
        """Let no unit be on."""
        with torch.no_grad():
            cast("Tensor", self.rectified().bias).fill_(-30.0)


class PlainBlock(Block):
    """One layer, initialised for it, and ReLU. Shapes: those of the layer."""

    def __init__(self, layer: nn.Linear | nn.Conv2d) -> None:
        super().__init__()
        self.layer, self.activation = layer, cast("nn.Module", nn.ReLU())
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")  # He et al. 2015, arXiv:1502.01852, eq. 10
        nn.init.zeros_(cast("Tensor", layer.bias))

    def transform(self, hidden: Tensor) -> Tensor:
        """Apply the layer."""
        output: Tensor = self.activation(self.layer(hidden))
        return output

    def rectified(self) -> nn.Linear | nn.Conv2d:
        """Return the layer."""
        return self.layer

    def vanish(self) -> None:
        """Use a sigmoid, and PyTorch's own initialisation."""
        self.activation = nn.Sigmoid()
        self.layer.reset_parameters()

    def explode(self) -> None:
        """Make the initial weights three times too large."""
        with torch.no_grad():
            self.layer.weight.mul_(3.0)


class TransformerBlock(Block):
    """Causal self-attention and a ReLU feed-forward layer. Shapes: ``[batch, length, width]`` to the same.

    Pre-LN here: each part gets a normalised input, and the sum of all parts is never normalised.

    Source: Xiong et al. 2020, arXiv:2002.04745.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.activation, self.down = nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width)

    def transform(self, hidden: Tensor) -> Tensor:
        """Add attention, then the feed-forward layer."""
        hidden = hidden + self.attend(self.norm1(hidden))
        output: Tensor = hidden + self.down(self.activation(self.up(self.norm2(hidden))))
        return output

    def attend(self, hidden: Tensor) -> Tensor:
        """Mix each position with those before it."""
        batch, length, width = hidden.shape
        query, key, value = self.qkv(hidden).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        output: Tensor = self.proj(mixed.transpose(1, 2).reshape(batch, length, width))
        return output

    def rectified(self) -> nn.Linear:
        """Return the wide layer."""
        return self.up


class PostNormBlock(TransformerBlock):
    """The same with the norms after the sums, as in Vaswani et al. 2017, arXiv:1706.03762, section 3.1."""

    def transform(self, hidden: Tensor) -> Tensor:
        """Normalise after attention, and after the feed-forward layer."""
        hidden = self.norm1(hidden + self.attend(hidden))
        output: Tensor = self.norm2(hidden + self.down(self.activation(self.up(hidden))))
        return output


class DigitsMLP(nn.Module):
    """Eight linear blocks on 64 pixels. Shapes: ``[batch, 64]`` to ``[batch, 10]``."""

    def __init__(self, width: int = 64, depth: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(PlainBlock(nn.Linear(width, width)) for _ in range(depth))
        self.head = nn.Linear(width, 10)

    def forward(self, pixels: Tensor) -> Tensor:
        """Return logits."""
        for block in self.blocks:
            pixels = block(pixels)
        logits: Tensor = self.head(pixels)
        return logits


class DigitsCNN(nn.Module):
    """Eight 3 x 3 convolution blocks on 8 x 8 images. Shapes: ``[batch, 64]`` to ``[batch, 10]``."""

    def __init__(self, channels: int = 16, depth: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, channels, 3, padding=1)
        self.blocks = nn.ModuleList(PlainBlock(nn.Conv2d(channels, channels, 3, padding=1)) for _ in range(depth))
        self.head = nn.Linear(channels * 16, 10)

    def forward(self, pixels: Tensor) -> Tensor:
        """Return logits."""
        hidden = self.stem(pixels.view(-1, 1, 8, 8))
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(functional.avg_pool2d(hidden, 2).flatten(1))
        return logits


class CharacterTransformer(nn.Module):
    """Blocks that guess the next character. Shapes: ``[batch, length]`` to ``[batch * length, 96]``."""

    def __init__(
        self, depth: int = 5, block: type[TransformerBlock] = TransformerBlock, width: int = 48, length: int = 48
    ) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(_CHARACTERS, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(block(width, heads=4) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, _CHARACTERS)

    def forward(self, characters: Tensor) -> Tensor:
        """Return logits, one row per character."""
        hidden = self.embed(characters) + self.place(torch.arange(characters.shape[1], device=characters.device))
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(self.norm(hidden)).flatten(0, 1)
        return logits


def build(program: str, fault: str, seed: int = 0) -> Program:
    """Make a program, seeded, on the CPU.

    Args:
        program: ``"mlp"``, ``"cnn"`` or ``"transformer"``; or ``"pre-ln"`` or ``"post-ln"``, two transformers of twelve
            blocks that differ in nothing but where they normalise, at a learning rate that needs a warm-up and gets
            none.
        fault: ``"none"``, ``"vanishing"``, ``"exploding"``, ``"dead"``, ``"spike"``, ``"nan"`` or ``"stagnation"``.
        seed: Seeds initialisation and the order of the data.

    Raises:
        MissingPackageError: The digits are wanted and scikit-learn is not installed.
        StorageError: The characters are wanted and this Python has no readable standard library sources.
    """
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    reads_text = program in {"transformer", "pre-ln", "post-ln"}
    if reads_text:
        model: nn.Module = _transformer(program)
        train, test = _text()
        size = 32 if program == "transformer" else 16
        batches, held_out = _windows(train, generator, batch=size), next(_windows(test, generator, batch=128))
    else:
        model = DigitsMLP() if program == "mlp" else DigitsCNN()
        pixels, digits = _digits()
        # Large batches, so that a loss scatters little and one that leaps stands out whatever the order of the data.
        batches, held_out = _shuffled(pixels[360:], digits[360:], generator, batch=256), (pixels[:360], digits[:360])

    if fault == "spike":
        batches = _broken_at(SPIKE_STEP, batches)
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    learning = _sicken(model, blocks, fault)

    def before_step(step: int) -> None:
        if fault == "nan" and step == NAN_STEP:
            blocks[SICK_BLOCK].poisoned = True

    def accuracy() -> float:
        model.eval()
        with torch.no_grad():
            right = model(held_out[0]).argmax(-1) == held_out[1]
        return float(right.float().mean())

    rate = {"mlp": 1e-3, "cnn": 1e-3, "transformer": 4e-3, "pre-ln": 5e-3, "post-ln": 5e-3}[program]
    optimizer = torch.optim.AdamW(learning, lr=rate)
    return Program(model, optimizer, nn.CrossEntropyLoss(), batches, accuracy, before_step)


def _transformer(program: str) -> CharacterTransformer:
    if program == "transformer":
        return CharacterTransformer()
    return CharacterTransformer(depth=12, block=TransformerBlock if program == "pre-ln" else PostNormBlock)


def _sicken(model: nn.Module, blocks: Sequence[Block], fault: str) -> list[nn.Parameter]:
    """Put a fault into the model; return the parameters that the optimizer is to be given."""
    left_out: set[nn.Parameter] = set()
    if fault == "vanishing":
        for block in blocks:
            block.vanish()
    elif fault == "exploding":
        for block in blocks:
            block.explode()
    elif fault == "dead":
        blocks[SICK_BLOCK].die()
    elif fault == "stagnation":
        left_out = set(blocks[SICK_BLOCK].parameters())
    return [parameter for parameter in model.parameters() if parameter not in left_out]


def _digits() -> Batch:
    """Return all 1797 digits, shuffled once and standardised. Shapes: ``[1797, 64]``, ``[1797]``."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise MissingPackageError(
            "the digits come with scikit-learn, which is not installed; run: pip install 'gradflow-export[demo]'"
        ) from error
    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    pixels = torch.as_tensor(data.data, dtype=torch.float32)[order]
    return (pixels - pixels.mean()) / pixels.std(), torch.as_tensor(data.target, dtype=torch.long)[order]


def _shuffled(pixels: Tensor, digits: Tensor, generator: torch.Generator, batch: int) -> Iterator[Batch]:
    while True:
        for rows in torch.split(torch.randperm(len(digits), generator=generator), batch)[:-1]:
            yield pixels[rows], digits[rows]


def _broken_at(step: int, batches: Iterator[Batch]) -> Iterator[Batch]:
    """Spoil the labels of one batch: digits that are one too high, or a rare character everywhere."""
    for number, (inputs, targets) in enumerate(batches, start=1):
        if number != step:
            yield inputs, targets
        elif inputs.is_floating_point():
            yield inputs, (targets + 1) % 10
        else:
            yield inputs, torch.full_like(targets, _RARE)


def _text() -> tuple[Tensor, Tensor]:
    """Return characters to learn from and held-out characters, as codes from 0. Shapes: ``[n]``, ``[m]``."""
    folder = Path(sysconfig.get_path("stdlib"))
    files = [folder / name for name in _SOURCES if (folder / name).is_file()]
    if len(files) < 2:
        raise StorageError(
            f"the characters come from Python's standard library sources, and {folder} has none; run --program mlp"
        )
    *train, test = (_encode(path.read_text(encoding="utf-8", errors="replace")) for path in files)
    return torch.cat(train), test


def _encode(text: str) -> Tensor:
    """Number the characters: 0 is a line break, 1 to 95 are printable ASCII, all else becomes a question mark."""
    known = {"\n": 0, **{chr(code): code - 31 for code in range(32, 127)}}
    return torch.tensor([known.get(character, _UNKNOWN) for character in text], dtype=torch.long)


def _windows(text: Tensor, generator: torch.Generator, batch: int, length: int = 48) -> Iterator[Batch]:
    steps = torch.arange(length)
    while True:
        rows = torch.randint(len(text) - length - 1, (batch, 1), generator=generator) + steps
        yield text[rows], text[rows + 1].flatten()
